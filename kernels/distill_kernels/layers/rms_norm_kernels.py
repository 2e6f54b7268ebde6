"""The kernels of RMSNorm, forward and backward, with or without the residual addition.

The formulas stand in `rms_norm.py`, which launches them.
"""

from __future__ import annotations

from distill_kernels.constants import E4M3_MAX
from distill_kernels.launch import tl, triton
from distill_kernels.layers.row_layout import force_recompute


@triton.jit(do_not_specialize=["n_rows"])
def _forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    rstd_ptr,
    x_stride,
    residual_stride,
    n_rows,
    eps,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
    FORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Normalise ROWS rows of x, or of x + residual, whose sum is stored too; FORM: "llama", "gemma", "none"."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    cols = tl.arange(0, BLOCK_H)  # the weight is loaded as a vector: as a row of one it would set the tile's layout
    at = rows[:, None] * H + cols[None, :]  # [ROWS, BLOCK_H]
    mask = (rows < n_rows)[:, None] & (cols < H)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    sum_dtype = x_ptr.dtype.element_ty
    if HAS_RESIDUAL:
        sum_dtype = sum_ptr.dtype.element_ty
        residual = tl.load(residual_ptr + rows[:, None] * residual_stride + cols[None, :], mask=mask, other=0.0)
        # The norm is that of the stored, rounded sum, as of modules that hand it on as a tensor.
        rounded = (x + residual.to(tl.float32)).to(sum_dtype)
        tl.store(sum_ptr + at, rounded, mask=mask)
        x = rounded.to(tl.float32)
    # Lanes beyond H are 0 and add nothing to the sum; the mean is over H.
    rstd = tl.rsqrt(tl.sum(x * x, 1) / H + eps)  # [ROWS]
    y = x * rstd[:, None]
    if FORM == "llama":
        # the cast before the weight, as LlamaRMSNorm has it; gemma's form rounds once
        weight = tl.load(weight_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
        y = y.to(sum_dtype).to(tl.float32) * weight[None, :]
    elif FORM == "gemma":
        y *= 1.0 + tl.load(weight_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)[None, :]
    if y_ptr.dtype.element_ty == tl.float8e4nv:  # matmul/fp8.py: each row's scale takes the place of 1/rms
        y = y.to(sum_dtype).to(tl.float32)
        rstd = tl.maximum(tl.max(tl.abs(y), 1) / E4M3_MAX, 1e-12)
        y /= rstd[:, None]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)


@triton.jit
def _times_weight(dy, weight, FORM: tl.constexpr):
    if FORM == "gemma":
        return dy * (1.0 + weight.to(tl.float32))[None, :]
    elif FORM == "llama":
        return dy * weight.to(tl.float32)[None, :]
    else:
        return dy


@triton.jit(do_not_specialize=["n_rows", "zero"])
def _backward_kernel(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dx_cast_ptr,
    partial_ptr,
    dy_stride,
    dsum_stride,
    x_stride,
    n_rows,
    zero,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
    FORM: tl.constexpr,
    HAS_DSUM: tl.constexpr,
    STORE_CAST: tl.constexpr,
    NEED_DWEIGHT: tl.constexpr,
    REREAD_FP32: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """REREAD_FP32: x and dy are made fp32 twice, and wait in 16 bits for the sum over their row (see layer_norm).

    Every program takes each num_programs-th tile of ROWS rows and leaves one row of `partial`, its sum of dy * n, which
    another kernel adds in a fixed order (column_sums.py). dx_cast: dx in a second dtype, with STORE_CAST.
    """
    # That kernel may start at once; it waits for this whole grid before it reads a sum.
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
    cols = tl.arange(0, BLOCK_H)
    weight = 1.0
    if FORM != "none":
        weight = tl.load(weight_ptr + cols, mask=cols < H, other=0.0)  # [BLOCK_H]
    dweight = tl.zeros([ROWS, BLOCK_H], tl.float32)
    step = tl.num_programs(0) * ROWS
    for start in tl.range(tl.program_id(0) * ROWS, n_rows, step, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS).to(tl.int64)  # [ROWS]
        mask = (rows < n_rows)[:, None] & (cols < H)[None, :]  # [ROWS, BLOCK_H]
        x_16_bit = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0)
        dy_16_bit = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        normed = x_16_bit.to(tl.float32) * rstd
        dy = dy_16_bit.to(tl.float32)
        if NEED_DWEIGHT:
            dweight += dy * normed
        dnormed = _times_weight(dy, weight, FORM)
        # For this sum all warps of a program wait; x and dy are needed again behind it.
        mean_dn_n = tl.sum(dnormed * normed, 1, keep_dims=True) / H
        if REREAD_FP32:
            normed = force_recompute(x_16_bit, zero).to(tl.float32) * rstd
            dnormed = _times_weight(force_recompute(dy_16_bit, zero).to(tl.float32), weight, FORM)
        dx = (dnormed - normed * mean_dn_n) * rstd
        # The sum x + residual goes on beside the norm: its own gradient is added before the rounding.
        if HAS_DSUM:
            dsum_at = dsum_ptr + rows[:, None] * dsum_stride + cols[None, :]
            dx += tl.load(dsum_at, mask=mask, other=0.0).to(tl.float32)
        at = rows[:, None] * H + cols[None, :]
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if STORE_CAST:
            tl.store(dx_cast_ptr + at, dx.to(dx_cast_ptr.dtype.element_ty), mask=mask)
    if NEED_DWEIGHT:
        partial_ptr += tl.program_id(0).to(tl.int64) * H + cols
        tl.store(partial_ptr, tl.sum(dweight, 0), mask=cols < H)
