"""Stochastic rounding to bfloat16, from random numbers that a seed, a tensor, a step and an element determine.

A bf16 number keeps the upper 16 bits of an fp32 number. Adding a uniform 16-bit integer to the lower 16 bits and
cutting them off rounds up with a probability equal to the part cut off: the rounded value is right on average, so that
updates much smaller than bf16's spacing still move a weight (Gupta et al., 2015; Zamirai et al., 2020).

The integers come from Philox4x32 with 7 rounds (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"),
keyed by the seed, at the counter (element // 8, tensor, step, 0): eight 16-bit integers a call. Nothing is stored, and
the CPU and the GPU draw the same integers.
"""

from __future__ import annotations

import torch

from distill_kernels.launch import cdiv, tl, triton

PHILOX_ROUNDS = 7


def _multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper and lower 32 bits of the 64-bit product of two unsigned 32-bit numbers held in int64."""
    low = (a & 0xFFFF) * b
    high = (a >> 16) * b
    carried = (high & 0xFFFFFFFFFFFF) + (low >> 16)
    return carried >> 16, ((carried & 0xFFFF) << 16) | (low & 0xFFFF)


def reference_random16(seed: int, tensor: int, step: int, count: int) -> torch.Tensor:
    """Uniform integers in [0, 2^16), int32 [count], for elements 0 .. count - 1 of tensor number `tensor` at `step`."""
    mask = 0xFFFFFFFF
    c0 = torch.arange(cdiv(count, 8), dtype=torch.int64)
    c1 = torch.full_like(c0, tensor)
    c2 = torch.full_like(c0, step)
    c3 = torch.zeros_like(c0)
    k0 = seed & mask
    k1 = (seed >> 32) & mask
    for _ in range(PHILOX_ROUNDS):
        high_a, low_a = _multiply(0xD2511F53, c0)
        high_b, low_b = _multiply(0xCD9E8D57, c2)
        c0 = high_b ^ c1 ^ k0
        c1 = low_b
        c2 = high_a ^ c3 ^ k1
        c3 = low_a
        k0 = (k0 + 0x9E3779B9) & mask
        k1 = (k1 + 0xBB67AE85) & mask
    words = torch.stack((c0, c2, c1, c3), dim=1)
    return torch.stack((words & 0xFFFF, words >> 16), dim=2).flatten()[:count].to(torch.int32)


def reference_other16(random: torch.Tensor) -> torch.Tensor:
    """A second uniform 16-bit integer from the first, by a bijection of [0, 2^16)."""
    return (random * 0x6255 + 0x3619) & 0xFFFF


def reference_stochastic_round(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """fp32 `values` rounded to bf16, up with a probability equal to the part cut off.

    Args:
        values: fp32, any shape. Infinities and NaN are kept.
        random: int32 of the same shape, uniform in [0, 2^16).

    Returns:
        bf16, the shape of `values`.
    """
    noisy = ((values.contiguous().view(torch.int32) + random) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), noisy, values).to(torch.bfloat16)


@triton.jit
def random16(seed, tensor, step, first, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    """uint32 [BLOCK], uniform in [0, 2^16), for elements `first` .. `first + BLOCK - 1`; `first` divides by 8."""
    c0 = (first // 8).to(tl.int32) + tl.arange(0, BLOCK // 8)
    zero = c0 * 0
    r0, r1, r2, r3 = tl.philox(seed, c0, zero + tensor, zero + step, zero, ROUNDS)
    words = tl.join(tl.join(r0, r1), tl.join(r2, r3))  # [BLOCK / 8, 2, 2], in the order r0 r2 r1 r3
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (BLOCK,))


@triton.jit
def other16(random):
    """A second uniform 16-bit integer from the first, by a bijection of [0, 2^16)."""
    return (random * 0x6255 + 0x3619) & 0xFFFF


@triton.jit
def stochastic_round(values, random):
    """fp32 `values` rounded to bf16 with 16-bit `random`; infinities and NaN are kept."""
    bits = values.to(tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    noisy = ((bits + random) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(finite, noisy, values).to(tl.bfloat16)
