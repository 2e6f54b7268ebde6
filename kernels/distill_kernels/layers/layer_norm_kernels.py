"""The kernels of LayerNorm: rows forward, rows backward with the groups' sums, and sums of columns on their own.

The formulas stand in `layer_norm.py`, which launches them.
"""

from __future__ import annotations

from distill_kernels.launch import tl, triton
from distill_kernels.layers.row_layout import force_recompute


@triton.jit
def _norm_rows(
    x_ptr,
    affine_ptrs,
    outputs,
    affine,
    rows,
    cols,
    x_stride,
    n_rows,
    eps,
    H: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STATS: tl.constexpr,
    LOOP: tl.constexpr,
):
    """Normalise and store `rows`; outputs: pointers of y, mean and 1/std.

    affine_ptrs: pointers of weight and bias, which are loaded here; with LOOP they are `affine`, loaded once before.
    """
    weight_ptr, bias_ptr = affine_ptrs
    y_ptr, mean_ptr, rstd_ptr = outputs
    weight, bias = affine
    mask = (rows < n_rows)[:, None] & (cols < H)[None, :]  # [ROWS, BLOCK_H]
    at = x_ptr + rows[:, None] * x_stride + cols[None, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / H  # [ROWS]
    # The variance from centred values, in a second sum: the mean of squares less the squared mean would cancel. Lanes
    # beyond H loaded 0, which is not the mean: they are taken out.
    centred = tl.where((cols < H)[None, :], x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1) / H + eps)
    y = centred * rstd[:, None]
    if HAS_WEIGHT:
        if not LOOP:
            weight = tl.load(weight_ptr + cols, mask=cols < H, other=0.0)  # [BLOCK_H]
        y *= weight.to(tl.float32)[None, :]
    if HAS_BIAS:
        if not LOOP:
            bias = tl.load(bias_ptr + cols, mask=cols < H, other=0.0)
        y += bias.to(tl.float32)[None, :]
    tl.store(y_ptr + rows[:, None] * H + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    if STATS:
        tl.store(mean_ptr + rows, mean, mask=rows < n_rows)
        tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)


@triton.jit(do_not_specialize=["n_rows"])
def _forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    x_stride,
    n_rows,
    eps,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STATS: tl.constexpr,
    LOOP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """ROWS rows a program, or with LOOP every so many, so that weight and bias are read once a program."""
    affine_ptrs = weight_ptr, bias_ptr
    outputs = y_ptr, mean_ptr, rstd_ptr
    cols = tl.arange(0, BLOCK_H)
    weight = 0.0
    bias = 0.0
    if LOOP:
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + cols, mask=cols < H, other=0.0)  # [BLOCK_H]
        if HAS_BIAS:
            bias = tl.load(bias_ptr + cols, mask=cols < H, other=0.0)
        for start in tl.range(tl.program_id(0) * ROWS, n_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
            rows = start + tl.arange(0, ROWS).to(tl.int64)
            _norm_rows(
                x_ptr,
                affine_ptrs,
                outputs,
                (weight, bias),
                rows,
                cols,
                x_stride,
                n_rows,
                eps,
                H=H,
                HAS_WEIGHT=HAS_WEIGHT,
                HAS_BIAS=HAS_BIAS,
                STATS=STATS,
                LOOP=LOOP,
            )
    else:
        rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        _norm_rows(
            x_ptr,
            affine_ptrs,
            outputs,
            (weight, bias),
            rows,
            cols,
            x_stride,
            n_rows,
            eps,
            H=H,
            HAS_WEIGHT=HAS_WEIGHT,
            HAS_BIAS=HAS_BIAS,
            STATS=STATS,
            LOOP=LOOP,
        )


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["n_rows", "zero"])
def _backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    dy_stride,
    x_stride,
    n_rows,
    zero,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEED_SUMS: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    REREAD_FP32: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """SUM_ROWS: rows of a tile lie in the same threads and share their sums. REREAD_FP32: x and dy are made fp32 twice.

    Between a row's loads and its dx lie the sums over it, for which all warps wait. Kept in fp32 meanwhile, n and dn
    take twice the registers of the 16 bits that they come from.
    """
    # The kernel that adds the programs' sums may start at once; it waits for this whole grid before it reads one.
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
    cols = tl.arange(0, BLOCK_H)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < H, other=0.0)  # [BLOCK_H]
    # The sums over rows stay in registers to the program's end, when one row of partials is written. Where the rows of
    # a tile lie in different threads each keeps its own until then: adding them would be a barrier in every step.
    kept: tl.constexpr = 1 if SUM_ROWS else ROWS
    dweight = tl.zeros([kept, BLOCK_H], tl.float32)
    dbias = tl.zeros([kept, BLOCK_H], tl.float32)
    step = tl.num_programs(0) * ROWS
    for start in tl.range(tl.program_id(0) * ROWS, n_rows, step, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS).to(tl.int64)  # [ROWS]
        mask = (rows < n_rows)[:, None] & (cols < H)[None, :]  # [ROWS, BLOCK_H]
        x_16_bit = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0)
        dy_16_bit = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0)
        mean = tl.load(mean_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        dy = dy_16_bit.to(tl.float32)
        x = x_16_bit.to(tl.float32)
        if x_ptr.dtype.element_ty.primitive_bitwidth == 16 and BLOCK_H <= 4096:  # longer rows would spill
            normed = x * rstd - mean * rstd  # one instruction; x is rounded more than the difference then is
        else:
            normed = (x - mean) * rstd
        # lanes beyond H: dy = 0 takes them out of every sum
        if NEED_SUMS:
            if SUM_ROWS:
                dweight += tl.sum(dy * normed, 0, keep_dims=True)
                dbias += tl.sum(dy, 0, keep_dims=True)
            else:
                dweight += dy * normed
                dbias += dy
        dnormed = dy
        if HAS_WEIGHT:
            dnormed = dy * weight.to(tl.float32)[None, :]
        total, sum_dn_n = tl.reduce((dnormed, dnormed * normed), 1, _add_pairs, keep_dims=True)  # one barrier for both
        if REREAD_FP32:
            x = force_recompute(x_16_bit, zero).to(tl.float32)
            dnormed = force_recompute(dy_16_bit, zero).to(tl.float32)
            if HAS_WEIGHT:
                dnormed = dnormed * weight.to(tl.float32)[None, :]
            if BLOCK_H > 4096:
                normed = (x - mean) * rstd
        if REREAD_FP32 and BLOCK_H <= 4096:
            # The same dx by x in place of n, which would take registers of its own: n = (x - mean) rstd.
            slope = sum_dn_n * rstd * rstd / H
            dx = dnormed * rstd - (total * rstd / H - mean * slope) - x * slope
        else:
            dx = dnormed * rstd - total * rstd / H - normed * (sum_dn_n * rstd / H)
        tl.store(dx_ptr + rows[:, None] * H + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_SUMS:
        partial_ptr += tl.program_id(0).to(tl.int64) * 2 * H  # [programs, 2, H]
        tl.store(partial_ptr + cols, tl.sum(dweight, 0), mask=cols < H)
        tl.store(partial_ptr + H + cols, tl.sum(dbias, 0), mask=cols < H)


@triton.jit(do_not_specialize=["n_rows", "rows_per_group"])
def _column_kernel(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    partial_ptr,
    dy_stride,
    x_stride,
    n_rows,
    rows_per_group,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums of dw and db over a group of rows, for COLUMNS columns: what `_backward_kernel` has no registers for."""
    column_blocks: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    group = tl.program_id(0) // column_blocks
    cols = (tl.program_id(0) % column_blocks) * COLUMNS + tl.arange(0, COLUMNS)[None, :]  # [1, COLUMNS]
    dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    first = group * rows_per_group
    last = tl.minimum(first + rows_per_group, n_rows)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)[:, None].to(tl.int64)  # [ROWS, 1]
        mask = (rows < last) & (cols < H)
        x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=rows < last, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < last, other=0.0)
        dweight += dy * ((x - mean) * rstd)
        dbias += dy
    partial_ptr += group.to(tl.int64) * 2 * H  # [groups, 2, H]
    tl.store(partial_ptr + cols, tl.sum(dweight, 0, keep_dims=True), mask=cols < H)
    tl.store(partial_ptr + H + cols, tl.sum(dbias, 0, keep_dims=True), mask=cols < H)
