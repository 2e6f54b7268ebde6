"""Attention's launch plans start kernels that are compiled already: those that Triton's look-up would give."""

import inspect
import itertools
import random
from typing import NamedTuple

import pytest
import torch
from distill_kernels.attention import flash, flash_backward, operands, ranges
from distill_kernels.attention.flash import flash_attention
from distill_kernels.decoding import cached_attention
from distill_kernels.launch import FAMILIES, HAS_TRITON, DeviceFacts
from stand_in_gpu import Compiled, Kernel, PyCUtensorMap, stand_in_gpu


def specialised(value):
    """Return the properties by which Triton distinguishes arguments: types, alignment, 1, multiples of 16, int32."""
    if isinstance(value, tuple):
        return tuple(map(specialised, value))
    if hasattr(value, "block_shape"):
        return Described(value.base.data_ptr() % 16, list(value.shape))
    if isinstance(value, torch.Tensor):
        return Pointer(value.data_ptr() % 16 == 0)
    if isinstance(value, int):
        return value if value == 1 else (value % 16 == 0, value < 2**31)
    return type(value)


class Pointer(NamedTuple):
    aligned: bool


def fits(kind, value):
    """Return whether an argument is of a kind that a kernel was compiled for; a plan gives addresses for tensors."""
    if isinstance(kind, Pointer):
        return not kind.aligned or value % 16 == 0
    if isinstance(kind, Described):
        return kind == value
    if isinstance(kind, tuple) and isinstance(value, tuple):
        return all(map(fits, kind, value))
    return kind == specialised(value)


class Strict(Kernel):
    """A stand-in whose compiled kernels refuse arguments that they were not compiled for, and count their starts."""

    def __init__(self, function):
        super().__init__(function)
        parameters = inspect.signature(function).parameters.values()
        self.constant = ["constexpr" in str(parameter.annotation) for parameter in parameters]
        self.replayed = 0

    def compile(self, grid, values):
        kinds = [value if fixed else specialised(value) for value, fixed in zip(values, self.constant, strict=True)]

        class Native:
            def __call__(_, *handed):
                assert handed[:3] == (*grid, 1, 1)[:3]
                given = iter(handed[-1])
                for kind, fixed in zip(kinds, self.constant, strict=True):
                    value = next(given)
                    if isinstance(value, PyCUtensorMap):  # its descriptor's shape and strides follow
                        rank = len(kind.shape)
                        value = Described(value.address % 16, [next(given) for _ in range(rank)])
                        assert [next(given) for _ in range(rank)][-1] == 1
                    assert value == kind if fixed else fits(kind, value)
                assert not list(given)
                self.replayed += 1

        return Compiled(values, Native())


class Described(NamedTuple):
    misaligned: int
    shape: list


def drawn(layout, heads, positions, size, dtype):
    """[B, H, T, D]: as projections make it, off by an element, adjacent in T, or expanded over the batch."""
    wide = torch.randn(2, positions + 1, heads, size + 8).to(dtype)
    plain = wide[:, 1:, :, :size].transpose(1, 2)
    return (plain, wide[:, 1:, :, 1 : size + 1].transpose(1, 2), plain.contiguous(), plain[:1].expand_as(plain))[layout]


@pytest.mark.plain("sm_90")
@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
def test_plans_start_what_tritons_lookup_would(family, monkeypatch):
    facts = DeviceFacts(132, family, FAMILIES[family].shared_bytes, 50 << 20, 80 << 30)
    modules = (flash, flash_backward, cached_attention, ranges)
    for module in (flash, flash_backward, cached_attention, operands):
        monkeypatch.setattr(module, "device_facts", lambda device: facts)
    for op in (flash._forward_op, flash._backward_op, cached_attention._op):
        monkeypatch.setattr(op, "plans", None)
    generator = random.Random(3)
    choices = [
        (torch.bfloat16, torch.float32),
        (1, 2),
        (1, 2, 4),
        (16, 40),
        (48, 65),
        (None, 1, 16),
        (False, True),
        (False, True),
    ]
    cases = generator.sample(list(itertools.product(*choices)), 20)
    with stand_in_gpu(*modules, make=Strict) as kernels:
        drawn_once = [
            (*case, generator.randrange(4), generator.choice((1, 0.5)), generator.choice((1, 30, 30.0)))
            for case in cases
        ]
        for case in drawn_once * 8:
            dtype, kv_heads, group, size, positions, window, capped, packed, layout, scale, cap = case
            q, dout = (drawn(layout, kv_heads * group, positions, size, dtype) for _ in range(2))
            k, v = (drawn(layout, kv_heads, positions, size, dtype) for _ in range(2))
            lengths = torch.tensor([0, 20, positions, 2 * positions], dtype=torch.int32) if packed else None
            more = {"scale": scale, "window": window, "softcap": cap if capped else None}
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = flash_attention(*leaves, cu_seqlens_q=lengths, **more)
            torch.autograd.grad(out, leaves, dout)
            filled = torch.full((3,), positions, dtype=generator.choice([torch.int32, torch.int64]))
            filled, starts = generator.choice([filled[:2], filled[1:]]), torch.zeros(2, dtype=torch.int32)
            cached_attention.decode_attention(q[:, :, :1], k, v, filled, starts=starts if packed else None, **more)
    counts = {kernel.fn.__name__: (kernel.looked_up, kernel.replayed) for kernel in kernels if kernel.looked_up}
    assert len(counts) >= 7 and all(replayed >= 12 for _, replayed in counts.values()), repr(counts)


@pytest.mark.gpu
@pytest.mark.parametrize("more", [{}, {"window": 100, "softcap": 30}, {"causal": False, "scale": 1}])
@pytest.mark.parametrize("layout", [0, 1])
def test_later_launches_give_the_bits_of_the_first(layout, more, monkeypatch):
    ops = (flash._forward_op, cached_attention._op)
    for op in ops:
        monkeypatch.setattr(op, "plans", None)

    def results(seed):
        torch.manual_seed(seed)
        with torch.device("cuda"):
            q, k, v, dout = (drawn(layout, heads, 300, 64, torch.bfloat16) for heads in (4, 2, 2, 4))
            lengths = torch.tensor([300, 17 * seed + 2])
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flash_attention(*leaves, **more)
        shared = {name: value for name, value in more.items() if name != "causal"}
        decoded = cached_attention.decode_attention(q[:, :, :2], k, v, lengths, **shared)
        return out, *torch.autograd.grad(out, leaves, dout), decoded

    first, other = results(1), results(2)
    again = results(1), results(1)
    plans = [plan for op in ops for plan in op.plans.planned.plans()]
    plans += [back for plan in plans if plan.gradient for back in plan.gradient.planned.plans()]
    aligned = layout == 0  # the other begins behind the first element
    assert len(plans) == 3 and all((plan.replay is not None) == aligned for plan in plans)
    again = again[1]
    assert all(map(torch.equal, first, again)) and not torch.equal(first[0], other[0])
