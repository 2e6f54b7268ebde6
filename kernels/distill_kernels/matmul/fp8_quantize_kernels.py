"""The kernels that quantise to e4m3 with a scale a row or a column, and transpose the bytes.

The formulas stand in `fp8_train.py`, which launches them.
"""

from __future__ import annotations

from distill_kernels.launch import tl, triton
from distill_kernels.layers.activations import activate, activate_with_derivative


@triton.jit
def _scale_of(largest, TINY: tl.constexpr):
    scale = largest * (1.0 / 448.0)
    rounded = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(scale < TINY, 1.0, rounded)


@triton.jit
def _part_of_row(sources, strides, row, column, inside, PART: tl.constexpr, KIND: tl.constexpr):
    if KIND == "plain":
        return tl.load(sources[PART] + row * strides[PART] + column, mask=inside, other=0.0).to(tl.float32)
    else:
        gate = tl.load(sources[0] + row * strides[0] + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(sources[1] + row * strides[1] + column, mask=inside, other=0.0).to(tl.float32)
        if KIND == "swiglu":
            return activate(gate, "silu") * up
        else:
            upstream = tl.load(sources[2] + row * strides[2] + column, mask=inside, other=0.0).to(tl.float32)
            value, derivative = activate_with_derivative(gate, "silu")
            if PART == 0:
                return upstream * up * derivative
            else:
                return upstream * value


@triton.jit
def _quantize_kernel(
    sources,
    strides,
    widths,
    factor_ptr,
    x8_ptr,
    scale_ptr,
    x8_stride,
    PARTS: tl.constexpr,
    KIND: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program; its second reading comes from the cache, or from registers where there is one part."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    first = 0
    for part in tl.static_range(PARTS):
        inside = column < widths[part]
        x = _part_of_row(sources, strides, row, column, inside, part, KIND)
        if factor_ptr is not None:
            x *= tl.load(factor_ptr + first + column, mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.abs(x))
        first += widths[part]
    scale = _scale_of(tl.max(largest, 0), TINY)
    inverse = 1.0 / scale
    first = 0
    for part in tl.static_range(PARTS):
        inside = column < widths[part]
        x = _part_of_row(sources, strides, row, column, inside, part, KIND)
        if factor_ptr is not None:
            x *= tl.load(factor_ptr + first + column, mask=inside, other=0.0)
        tl.store(x8_ptr + row * x8_stride + first + column, (x * inverse).to(tl.float8e4nv), mask=inside)
        first += widths[part]
    tl.store(scale_ptr + row, scale)


@triton.jit
def _column_maxima_kernel(
    dy8_ptr, token_ptr, sw_ptr, largest_ptr, M, N, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """ROWS rows and BLOCK_N columns a program; `largest` are the bits of numbers >= 0, which order as they do."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    largest = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, ROWS, BLOCK_M):
        m = tl.program_id(1) * ROWS + start + tl.arange(0, BLOCK_M)
        inside = (m < M)[:, None] & (n < N)[None, :]
        dy8 = tl.load(dy8_ptr + m[:, None].to(tl.int64) * N + n[None, :], mask=inside, other=0)
        token = tl.load(token_ptr + m, mask=m < M, other=0.0)
        largest = tl.maximum(largest, tl.abs(dy8.to(tl.float8e4nv, bitcast=True).to(tl.float32)) * token[:, None])
    found = tl.max(largest, 0) * (1.0 / tl.load(sw_ptr + n, mask=n < N, other=1.0))
    tl.atomic_max(largest_ptr + n, found.to(tl.int32, bitcast=True), mask=n < N)


@triton.jit
def _transpose_kernel(
    source_ptr,
    out_ptr,
    token_ptr,
    sw_ptr,
    largest_ptr,
    scale_ptr,
    M,
    N,
    width,
    stride,
    out_stride,
    KIND: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """[M, N] to bytes [N, width], zeros beyond M: "copy" of bytes; of a "weight" by the scales `sw` of its rows; of
    the "gradient", whose columns' scales are written by the first row of programs.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m < M)[:, None] & (n < N)[None, :]
    x = tl.load(source_ptr + m[:, None].to(tl.int64) * stride + n[None, :], mask=inside, other=0)
    if KIND == "weight":
        sw = tl.load(sw_ptr + m, mask=m < M, other=1.0)
        x = (x.to(tl.float32) * (1.0 / sw)[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    if KIND == "gradient":
        token = tl.load(token_ptr + m, mask=m < M, other=0.0)
        sw = tl.load(sw_ptr + n, mask=n < N, other=1.0)
        scale = _scale_of(tl.load(largest_ptr + n, mask=n < N, other=0).to(tl.float32, bitcast=True), TINY)
        # one after the other: their product may leave fp32's range, each step is the size of some gradient
        values = x.to(tl.float8e4nv, bitcast=True).to(tl.float32) * token[:, None] * (1.0 / sw)[None, :]
        x = (values * (1.0 / scale)[None, :]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        if tl.program_id(0) == 0:
            tl.store(scale_ptr + n, scale, mask=n < N)
    at = out_ptr + n[:, None].to(tl.int64) * out_stride + m[None, :]
    tl.store(at, tl.trans(x), mask=(n < N)[:, None] & (m < width)[None, :])
