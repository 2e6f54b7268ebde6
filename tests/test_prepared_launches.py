"""Attention's later launches go to a kernel that is compiled already: to the one that Triton's look-up would give."""

import inspect
import itertools
import random

import pytest
import torch
from distill_kernels.attention import flash, flash_backward
from distill_kernels.attention.flash import flash_attention
from distill_kernels.attention.operands import tiles_of
from distill_kernels.launch import FAMILIES, CachedLauncher, DeviceFacts, interpreted
from distill_kernels.primitives import decode

KERNELS = {
    flash: ["_forward_kernel"],
    decode: ["_chunk_kernel", "_combine_kernel"],
    flash_backward: ["_row_terms_kernel", "_key_gradient_kernel", "_query_gradient_kernel"],
}


def specialised(value):
    """Return the properties by which Triton distinguishes arguments: types, alignment, 1, multiples of 16, int32."""
    if isinstance(value, tuple):
        return tuple(map(specialised, value))
    if hasattr(value, "block_shape"):
        return value.base.dtype, tuple(value.block_shape), value.base.data_ptr() % 16
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value if value == 1 else (value % 16 == 0, value < 2**31)
    return type(value)


class Kernel:
    """Stands for a `triton.jit` function: what it compiles refuses arguments that it was not compiled for."""

    def __init__(self, function):
        parameters = inspect.signature(function.fn).parameters.values()
        self.constant = ["constexpr" in str(parameter.annotation) for parameter in parameters]
        self.looked_up = self.prepared = 0

    def kind(self, args):
        assert len(args) == len(self.constant)
        return [arg if fixed else specialised(arg) for arg, fixed in zip(args, self.constant, strict=True)]

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.looked_up += 1
            kind, kernel = self.kind(args), self

            class Compiled:
                def __getitem__(self, other):
                    assert other == grid

                    def run(*args):
                        assert kernel.kind(args) == kind
                        kernel.prepared += 1

                    return run

            return Compiled()

        return launch


def drawn(layout, heads, positions, size, dtype):
    """[B, H, T, D]: as projections make it, off by an element, adjacent in T, or expanded over the batch."""
    wide = torch.randn(2, positions + 1, heads, size + 8).to(dtype)
    plain = wide[:, 1:, :, :size].transpose(1, 2)
    return (plain, wide[:, 1:, :, 1 : size + 1].transpose(1, 2), plain.contiguous(), plain[:1].expand_as(plain))[layout]


@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
def test_cached_launches_equal_those_of_tritons_lookup(family, monkeypatch):
    facts = DeviceFacts(132, family, FAMILIES[family].shared_bytes, 50 << 20, 80 << 30)
    kernels = []
    for module, names in KERNELS.items():
        monkeypatch.setattr(module, "device_facts", lambda device: facts)
        for name in [name for name, value in vars(module).items() if isinstance(value, CachedLauncher)]:
            monkeypatch.setattr(module, name, CachedLauncher())
        for name in names:
            kernels.append(Kernel(getattr(module, name)))
            monkeypatch.setattr(module, name, kernels[-1])
    monkeypatch.setattr("distill_kernels.attention.operands.device_facts", lambda device: facts)
    for module in (flash, flash_backward):
        monkeypatch.setattr(module, "merge_parts" if module is flash else "add_parts", lambda *args: None)
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
        for case in cases * 8:
            dtype, kv_heads, group, size, positions, window, capped, packed = case
            layout = generator.randrange(4)
            q, dout = (drawn(layout, kv_heads * group, positions, size, dtype) for _ in range(2))
            k, v = (drawn(layout, kv_heads, positions, size, dtype) for _ in range(2))
            lengths = torch.tensor([0, 20, positions, 2 * positions], dtype=torch.int32) if packed else None
            scale, cap = generator.choice((1, 0.5)), generator.choice((1, 30, 30.0)) if capped else None
            more = {"scale": scale, "window": window, "softcap": cap}
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = flash_attention(*leaves, cu_seqlens_q=lengths, **more)
            torch.autograd.grad(out, leaves, dout)
            filled = torch.full((3,), positions, dtype=generator.choice([torch.int32, torch.int64]))
            filled, starts = generator.choice([filled[:2], filled[1:]]), torch.zeros(2, dtype=torch.int32)
            decode.decode_attention(q[:, :, :1], k, v, filled, starts=starts if packed else None, **more)
    assert all(kernel.prepared > 20 for kernel in kernels), [(kernel.looked_up, kernel.prepared) for kernel in kernels]


def test_a_cached_descriptor_points_to_its_own_tensor():
    first, second = (torch.randn(2, 8, 3, 16).transpose(1, 2) for _ in range(2))
    made = [tiles_of(x, 16, 16, True) for x in (first, second, first[:, :, :4])]
    assert [x.base.data_ptr() for x in made] == [first.data_ptr(), second.data_ptr(), first.data_ptr()]
    assert {**vars(made[1]), "base": None} == {**vars(made[0]), "base": None} and made[2].shape == [2, 3, 4, 16]


@pytest.mark.gpu
@pytest.mark.parametrize("more", [{}, {"window": 100, "softcap": 30}, {"causal": False, "scale": 1}])
@pytest.mark.parametrize("layout", [0, 1])
def test_later_launches_give_the_bits_of_the_first(layout, more, monkeypatch):
    for module in KERNELS:
        for name in [name for name, value in vars(module).items() if isinstance(value, CachedLauncher)]:
            monkeypatch.setattr(module, name, CachedLauncher())

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
    again = results(1)
    assert all(map(torch.equal, first, again)) and not torch.equal(first[0], other[0])
