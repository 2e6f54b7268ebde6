"""Attention's launch plans start kernels that are compiled already: those that Triton's look-up would give."""

import inspect
import itertools
import random
from typing import NamedTuple

import pytest
import torch
from distill_kernels import kernel_op, launch_plans
from distill_kernels.attention import flash, flash_backward, ranges
from distill_kernels.attention.flash import flash_attention
from distill_kernels.attention.operands import tiles_of
from distill_kernels.launch import FAMILIES, DeviceFacts, interpreted
from distill_kernels.launch_plans import LAUNCH_HOOKS, LaunchPlan
from distill_kernels.primitives import decode

KERNELS = {
    flash: ["_forward_kernel"],
    decode: ["_chunk_kernel", "_combine_kernel"],
    ranges: ["_ranges_kernel"],
    flash_backward: ["_row_terms_kernel", "_key_gradient_kernel", "_query_gradient_kernel"],
}


def specialised(value):
    """Return the properties by which Triton distinguishes arguments: types, alignment, 1, multiples of 16, int32."""
    if isinstance(value, tuple):
        return tuple(map(specialised, value))
    if hasattr(value, "block_shape"):
        return tuple(value.block_shape), value.base.data_ptr() % 16
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
    if isinstance(kind, tuple) and isinstance(value, tuple):
        return all(map(fits, kind, value))
    return kind == specialised(value)


class Kernel:
    """Stands for a `triton.jit` function: what it compiles refuses arguments that it was not compiled for."""

    def __init__(self, function):
        self.fn = function.fn
        parameters = inspect.signature(function.fn).parameters.values()
        self.arg_names = [parameter.name for parameter in parameters]
        self.constant = ["constexpr" in str(parameter.annotation) for parameter in parameters]
        self.looked_up = self.replayed = 0

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.looked_up += 1
            for hook in LAUNCH_HOOKS.calls:
                hook(None)
            args += tuple(options[name] for name in self.arg_names[len(args) :])
            kernel, kinds = (
                self,
                [arg if fixed else specialised(arg) for arg, fixed in zip(args, self.constant, strict=True)],
            )

            class Compiled:
                function = packed_metadata = None

                def run(self, x, y, z, stream, function, metadata, enter, leave, more, *args):
                    assert (x, y, z) == (*grid, 1, 1)[:3]
                    for arg, kind, fixed in zip(args, kinds, kernel.constant, strict=True):
                        assert arg == kind if fixed else fits(kind, arg)
                    kernel.replayed += 1

            return Compiled()

        return launch


def drawn(layout, heads, positions, size, dtype):
    """[B, H, T, D]: as projections make it, off by an element, adjacent in T, or expanded over the batch."""
    wide = torch.randn(2, positions + 1, heads, size + 8).to(dtype)
    plain = wide[:, 1:, :, :size].transpose(1, 2)
    return (plain, wide[:, 1:, :, 1 : size + 1].transpose(1, 2), plain.contiguous(), plain[:1].expand_as(plain))[layout]


@pytest.mark.skipif(LAUNCH_HOOKS is None, reason="needs triton")
@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
def test_plans_start_what_tritons_lookup_would(family, monkeypatch):
    facts = DeviceFacts(132, family, FAMILIES[family].shared_bytes, 50 << 20, 80 << 30)
    kernels = []
    for module, names in KERNELS.items():
        if hasattr(module, "device_facts"):
            monkeypatch.setattr(module, "device_facts", lambda device: facts)
        for name in names:
            kernels.append(Kernel(getattr(module, name)))
            monkeypatch.setattr(module, name, kernels[-1])
    monkeypatch.setattr("distill_kernels.attention.operands.device_facts", lambda device: facts)
    monkeypatch.setattr(launch_plans, "current_device", lambda: -1)
    monkeypatch.setattr(kernel_op, "current_device", lambda: -1)
    monkeypatch.setattr(kernel_op, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(
        launch_plans,
        "empty_on_current_device",
        lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
    )
    for op in (flash._forward_op, flash._backward_op, decode._op):
        monkeypatch.setattr(op, "_plans", {})
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
    with interpreted():
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
            decode.decode_attention(q[:, :, :1], k, v, filled, starts=starts if packed else None, **more)
    assert all(kernel.replayed > 12 for kernel in kernels), [(k.fn.__name__, k.looked_up, k.replayed) for k in kernels]


def test_a_cached_descriptor_points_to_its_own_tensor():
    first, second = (torch.randn(2, 8, 3, 16).transpose(1, 2) for _ in range(2))
    made = [tiles_of(x, 16, 16, True) for x in (first, second, first[:, :, :4])]
    assert [x.base.data_ptr() for x in made] == [first.data_ptr(), second.data_ptr(), first.data_ptr()]
    assert {**vars(made[1]), "base": None} == {**vars(made[0]), "base": None} and made[2].shape == [2, 3, 4, 16]


@pytest.mark.gpu
@pytest.mark.parametrize("more", [{}, {"window": 100, "softcap": 30}, {"causal": False, "scale": 1}])
@pytest.mark.parametrize("layout", [0, 1])
def test_later_launches_give_the_bits_of_the_first(layout, more, monkeypatch):
    for op in (flash._forward_op, flash._backward_op, decode._op):
        monkeypatch.setattr(op, "_plans", {})

    def results(seed):
        torch.manual_seed(seed)
        with torch.device("cuda"):
            q, k, v, dout = (drawn(layout, heads, 300, 64, torch.bfloat16) for heads in (4, 2, 2, 4))
            lengths = torch.tensor([300, 17 * seed + 2])
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flash_attention(*leaves, **more)
        shared = {name: value for name, value in more.items() if name != "causal"}
        decoded = decode.decode_attention(q[:, :, :2], k, v, lengths, **shared)
        return out, *torch.autograd.grad(out, leaves, dout), decoded

    first, other = results(1), results(2)
    again = results(1), results(1)
    plans = [plan for op in (flash._forward_op, flash._backward_op, decode._op) for plan in op._plans.values()]
    aligned = layout == 0  # the other begins behind the first element
    assert plans and all(isinstance(plan, LaunchPlan) == aligned for plan in plans)
    again = again[1]
    assert all(map(torch.equal, first, again)) and not torch.equal(first[0], other[0])
