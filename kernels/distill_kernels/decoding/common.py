"""Device functions and buffers shared by the kernels of a decoding step: GEMM of few rows, dependent launch.

A step's kernels last a few microseconds, most of it latency: of the previous kernel's end, then of the weight's first
bytes. With programmatic dependent launch (`DeviceFacts.dependent_launch`) a kernel starts while the previous one still
runs, prefetches the first lines of its weight, and only then waits for the previous kernel's results. The next kernel
may start after that wait, so that at most two overlap, and results of earlier kernels may be read at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from distill_kernels.launch import HAS_TRITON, next_power_of_2, tl, triton

if HAS_TRITON:
    from distill_kernels.launch import has_ptx

    SHRINK = tl.constexpr(1 / 16)  # exact; float16's range would not hold x times a norm's weight of every model


@triton.jit
def wait_for_previous_kernel(DEPENDENT_LAUNCH: tl.constexpr):
    """Wait for the previous kernel's results, then let the next kernel start."""
    # The wait returns when the previous kernel is complete and its writes are visible, and that one had waited
    # likewise: whatever any earlier kernel wrote may be read or overwritten from here on.
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(weight_ptr, rows, first, last, K, COLUMNS: tl.constexpr):
    """Prefetch columns `first` up to `last`, at most COLUMNS, of `rows` of a [., K] weight into L2."""
    if has_ptx():
        # One address a line of 128 bytes is enough to bring it to L2; nothing enters registers, so that nothing is
        # waited for.
        LINE: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
        column = first + tl.arange(0, (COLUMNS + LINE - 1) // LINE) * LINE
        # int64: a row of a large weight, such as the head's, may start beyond 2^31 elements.
        at = weight_ptr + rows.to(tl.int64)[:, None] * K + column[None, :]
        inside = tl.broadcast_to((column < last)[None, :], at.shape)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r",
            [at.to(tl.int64), inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def rms_factor(squares_ptr, m, M, parts, H, eps, PARTS: tl.constexpr):
    """Return 1 / sqrt(mean of squares + eps) / SHRINK of rows `m`, from `parts` sums of squares [parts, M]."""
    # The writer's tiles left one sum each, added here in one order by every program: all get the same bits.
    part = tl.arange(0, PARTS)
    at = squares_ptr + part[:, None] * M + m[None, :]
    squares = tl.load(at, mask=(part < parts)[:, None] & (m < M)[None, :], other=0.0)
    return tl.rsqrt(tl.sum(squares, 0) / H + eps) / SHRINK


@triton.jit
def scaled_row(x, scale):
    """Return `Stream.scaled` of `x`, both fp32: x times the norm's weight times `SHRINK`."""
    return x * (scale * SHRINK)


def sum_block(squares: torch.Tensor) -> int:
    """Return PARTS of `rms_factor` for sums [parts, M], rounded up so that few kernels are compiled."""
    return max(64, next_power_of_2(squares.shape[0]))


@triton.jit
def multiply(
    x_ptr,
    weight_ptr,
    up_ptr,
    m,
    rows,
    M,
    K,
    stride_x,
    first,
    part,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return x W^T, fp32 [BLOCK_M, BLOCK_N], over columns `first` to `first + part`, and x U^T where GATED.

    `rows` of the weights exist; rows of x from M on, and columns from K on, count as 0. EVEN: no column is from K on.
    """
    # x is [BLOCK_M, BLOCK_K] and W [BLOCK_N, BLOCK_K] at a time, both with the inner dimension side by side.
    k = first + tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * stride_x + k[None, :]
    offsets = rows.to(tl.int64)[:, None] * K + k[None, :]
    held = (m < M)[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total_up = tl.zeros((BLOCK_M, BLOCK_N if GATED else 1), tl.float32)
    for done in range(0, part, BLOCK_K):
        # Where no column is past the end the comparison is constant, and its mask is compiled away.
        inside = ((tl.arange(0, BLOCK_K) < K - first - done) | EVEN)[None, :]
        x = tl.load(x_ptrs + done, mask=held & inside, other=0.0)
        # Each weight is read once in a step and may leave L2 first; x is read by every program and should stay.
        weight = tl.load(weight_ptr + offsets + done, mask=inside, other=0.0, eviction_policy="evict_first")
        # The cast brings a weight kept in fp32 to the dtype of the products; of equal dtypes it is nothing.
        total = tl.dot(x, weight.to(x.dtype).T, total, input_precision=PRECISION)
        if GATED:
            up = tl.load(up_ptr + offsets + done, mask=inside, other=0.0, eviction_policy="evict_first")
            total_up = tl.dot(x, up.to(x.dtype).T, total_up, input_precision=PRECISION)
    return total, total_up


class Stream(NamedTuple):
    """Residual stream of a step, prepared by its last writer for the RMSNorm that follows.

    The norm needs no kernel: the writer stores the stream times the norm's weight, and sums of squares of each tile of
    columns; the reader multiplies its fp32 sums by 1 / rms of each row.

    Attributes:
        x: [M, K], rows contiguous.
        scaled: [M, K], contiguous, x times the norm's weight times `SHRINK`, in the dtype of the products.
        squares: fp32 [parts, M], whose sums are those of x's squares.
    """

    x: torch.Tensor
    scaled: torch.Tensor
    squares: torch.Tensor


class Scratch(NamedTuple):
    """Buffers for partial sums, shared by the kernels of a step, one after the other.

    Attributes:
        parts: Partial sums, fp32.
        counters: int32, zero between kernels; of one step alone, since two could run at the same time.
    """

    parts: torch.Tensor
    counters: torch.Tensor

    @classmethod
    def allocate(cls, elements: int, counters: int, device: torch.device) -> Scratch:
        """Return buffers of at least so many elements and counters."""
        return cls(
            torch.empty(max(elements, 1), dtype=torch.float32, device=device),
            torch.zeros(max(counters, 1), dtype=torch.int32, device=device),
        )
