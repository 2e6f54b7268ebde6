"""Softmax over the last dimension, for rows of any length.

    y = e^(x - max x) / sum e^(x - max x),   dx = y (dy - sum(y dy))

Three ways, by shape, all in fp32 inside:
    tile    the row fits a program's registers: one read, one write;
    loop    it does not: a first pass keeps a running maximum and sum (Milakov and Gimelshein, 2018, arXiv:1805.02867),
            a second, in which the row mostly comes from the L2 cache, writes;
    split   few long rows: several programs take parts of each row, so that the whole GPU works; two launches.
For N rows of C columns of b bytes, forward moves 2 N C b and backward 3 N C b bytes at least.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from distill_kernels.kernel_op import KernelOp, check_floats, forbid_double_backward
from distill_kernels.launch import cdiv, device_facts, launch, next_power_of_2, runs_on_triton, tl, triton
from distill_kernels.layers.row_layout import as_rows


def reference_softmax(x: torch.Tensor) -> torch.Tensor:
    """Return the softmax in plain PyTorch, in fp32 (fp64 stays fp64): the specification."""
    upcast = x.double() if x.dtype == torch.float64 else x.float()
    return torch.softmax(upcast, -1).to(x.dtype)


@triton.jit(do_not_specialize=["n_rows"])
def _forward_tile(x_ptr, y_ptr, x_stride, n_rows, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    cols = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    # Columns past the row load as -inf and weigh 0. A row past the last is all -inf: its NaN is not stored.
    mask = (rows < n_rows) & (cols < n_cols)
    x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=float("-inf")).to(tl.float32)
    y = tl.exp(x - tl.max(x, 1, keep_dims=True))
    y = y * (1.0 / tl.sum(y, 1, keep_dims=True))
    tl.store(y_ptr + rows * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _row_statistics(x_ptr, first, last, BLOCK: tl.constexpr):
    # maximum, and sum of e^(x - maximum), of x[first:last]; (-inf, 0) where that holds nothing but -inf
    lanes = tl.arange(0, BLOCK)
    biggest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    for start in range(first, last, BLOCK):
        cols = start + lanes
        # Kept in L2 if it can be: the second pass reads the same row.
        x = tl.load(x_ptr + cols, mask=cols < last, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
        after = tl.maximum(biggest, tl.max(x, 0))
        # While nothing but -inf was seen, 0 in place of the maximum keeps -inf less -inf out; the sum stays 0.
        base = tl.where(after == float("-inf"), 0.0, after)
        total = total * tl.exp(biggest - base) + tl.sum(tl.exp(x - base), 0)
        biggest = after
    return biggest, total


@triton.jit
def _write_softmax(x_ptr, y_ptr, first, last, biggest, total, BLOCK: tl.constexpr):
    scale = 1.0 / total  # a row of -inf: -inf minus -inf, NaN, as in torch
    for start in range(first, last, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        # The last read of the row, and a result that is not read here: both may leave L2 first.
        x = tl.load(x_ptr + cols, mask=cols < last, eviction_policy="evict_first").to(tl.float32)
        y = tl.exp(x - biggest) * scale
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < last, eviction_policy="evict_first")


@triton.jit
def _forward_loop(x_ptr, y_ptr, x_stride, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    # Two passes by one program: nothing is exchanged but these two numbers, which every thread has after the reduction.
    biggest, total = _row_statistics(x_ptr, 0, n_cols, BLOCK)
    _write_softmax(x_ptr, y_ptr + row * n_cols, 0, n_cols, biggest, total, BLOCK)


@triton.jit
def _forward_split_statistics(x_ptr, parts_ptr, x_stride, n_cols, per_part, BLOCK: tl.constexpr):
    # parts [N, P, 2]: each part's maximum and sum
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    first = part * per_part
    biggest, total = _row_statistics(x_ptr + row * x_stride, first, tl.minimum(first + per_part, n_cols), BLOCK)
    parts_ptr += (row * parts + part) * 2
    tl.store(parts_ptr, biggest)
    tl.store(parts_ptr + 1, total)


@triton.jit
def _forward_split_write(x_ptr, parts_ptr, y_ptr, x_stride, n_cols, per_part, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    lanes = tl.arange(0, PARTS)
    parts_ptr += row * parts * 2 + lanes * 2
    # Every part of a row combines all parts' numbers by itself, in one order. They are complete: a launch of its own.
    maxima = tl.load(parts_ptr, mask=lanes < parts, other=float("-inf"))
    totals = tl.load(parts_ptr + 1, mask=lanes < parts, other=0.0)
    biggest = tl.max(maxima, 0)
    # A part of nothing but -inf has sum 0, and a whole row of it gives NaN only as it is written, as in torch.
    base = tl.where(biggest == float("-inf"), 0.0, biggest)
    total = tl.sum(totals * tl.exp(maxima - base), 0)
    first = part * per_part
    last = tl.minimum(first + per_part, n_cols)
    _write_softmax(x_ptr + row * x_stride, y_ptr + row * n_cols, first, last, biggest, total, BLOCK)


@triton.jit(do_not_specialize=["n_rows"])
def _backward_tile(dy_ptr, y_ptr, dx_ptr, dy_stride, n_rows, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    cols = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    mask = (rows < n_rows) & (cols < n_cols)
    # Masked to 0, so that columns past the row add nothing to the sum.
    y = tl.load(y_ptr + rows * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + rows * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(y * dy, 1, keep_dims=True))
    tl.store(dx_ptr + rows * n_cols + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _row_product(dy_ptr, y_ptr, first, last, BLOCK: tl.constexpr):
    # sum(y dy) over [first:last]
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(first, last, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        # Both rows are read again to write the gradient, and should stay in L2 until then.
        y = tl.load(y_ptr + cols, mask=cols < last, other=0.0, eviction_policy="evict_last").to(tl.float32)
        dy = tl.load(dy_ptr + cols, mask=cols < last, other=0.0, eviction_policy="evict_last").to(tl.float32)
        products += y * dy
    return tl.sum(products, 0)


@triton.jit
def _write_gradient(dy_ptr, y_ptr, dx_ptr, first, last, product, BLOCK: tl.constexpr):
    for start in range(first, last, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        y = tl.load(y_ptr + cols, mask=cols < last, eviction_policy="evict_first").to(tl.float32)
        dy = tl.load(dy_ptr + cols, mask=cols < last, eviction_policy="evict_first").to(tl.float32)
        dx = (y * (dy - product)).to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + cols, dx, mask=cols < last, eviction_policy="evict_first")


@triton.jit
def _backward_loop(dy_ptr, y_ptr, dx_ptr, dy_stride, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * dy_stride
    y_ptr += row * n_cols
    # The gradient of any column needs the sum over all: a pass for it, then a pass that writes.
    product = _row_product(dy_ptr, y_ptr, 0, n_cols, BLOCK)
    _write_gradient(dy_ptr, y_ptr, dx_ptr + row * n_cols, 0, n_cols, product, BLOCK)


@triton.jit
def _backward_split_product(dy_ptr, y_ptr, parts_ptr, dy_stride, n_cols, per_part, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = part * per_part
    last = tl.minimum(first + per_part, n_cols)
    product = _row_product(dy_ptr + row * dy_stride, y_ptr + row * n_cols, first, last, BLOCK)
    tl.store(parts_ptr + row * tl.num_programs(1) + part, product)


@triton.jit
def _backward_split_write(
    dy_ptr, y_ptr, parts_ptr, dx_ptr, dy_stride, n_cols, per_part, BLOCK: tl.constexpr, PARTS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    lanes = tl.arange(0, PARTS)
    # Each part adds all parts' sums by itself, in one order: the same bits in all of them, and no atomics.
    product = tl.sum(tl.load(parts_ptr + row * parts + lanes, mask=lanes < parts, other=0.0), 0)
    first = part * per_part
    last = tl.minimum(first + per_part, n_cols)
    y_ptr = y_ptr + row * n_cols
    dy_ptr = dy_ptr + row * dy_stride
    dx_ptr = dx_ptr + row * n_cols
    _write_gradient(dy_ptr, y_ptr, dx_ptr, first, last, product, BLOCK)


class SoftmaxPlan(NamedTuple):
    """Launch shape: strategy ("tile", "loop", "split"), rows a program, columns at a time, warps, parts a row."""

    strategy: str
    rows: int
    block: int
    warps: int
    parts: int = 1


TILE_COLUMNS = 16_384


@functools.lru_cache(maxsize=4096)
def plan(n_rows: int, n_cols: int, multiprocessors: int, direction: str, element_bytes: int = 2) -> SoftmaxPlan:
    """Return the launch shape: a tile where the row fits, split where rows are too few to fill the GPU, else a loop.

    The numbers were read off a sweep on an H200 over 1 MiB to 128 MiB of bf16.
    """
    # the backward's two rows of 16 bits stay packed in registers, and nothing is exchanged but one sum
    long_tile = direction == "backward" and element_bytes == 2 and n_rows >= multiprocessors
    if n_cols <= TILE_COLUMNS * (2 if long_tile else 1):
        block = next_power_of_2(n_cols)
        rows = max(1, 2048 // block)
        return SoftmaxPlan("tile", rows, block, min(max(rows * block // 1024, 4), 16))
    if n_rows < multiprocessors:
        return SoftmaxPlan("split", 1, 4096, 8, min(cdiv(n_cols, 4096), cdiv(8 * multiprocessors, n_rows)))
    if direction == "forward":
        return SoftmaxPlan("loop", 1, 8192 if n_cols <= 32_768 else 16_384, 16)
    return SoftmaxPlan("loop", 1, 16_384, 16 if n_cols <= 32_768 else 32)


def _plan(x: torch.Tensor, direction: str) -> tuple[int, int, SoftmaxPlan]:
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols if n_cols else 0
    return n_rows, n_cols, plan(n_rows, n_cols, device_facts(x.device).multiprocessors, direction, x.element_size())


def _per_part(n_cols: int, chosen: SoftmaxPlan) -> int:
    # whole blocks, so that vector loads stay aligned
    return cdiv(cdiv(n_cols, chosen.parts), chosen.block) * chosen.block


def _launch_forward(x: torch.Tensor) -> torch.Tensor:
    x, stride = as_rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    n_rows, n_cols, chosen = _plan(x, "forward")
    if chosen.strategy == "tile":
        launch(
            _forward_tile,
            (cdiv(n_rows, chosen.rows),),
            x,
            y,
            stride,
            n_rows,
            n_cols,
            ROWS=chosen.rows,
            BLOCK=chosen.block,
            num_warps=chosen.warps,
        )
    elif chosen.strategy == "loop":
        launch(_forward_loop, (n_rows,), x, y, stride, n_cols, BLOCK=chosen.block, num_warps=chosen.warps)
    else:
        per_part = _per_part(n_cols, chosen)
        parts = cdiv(n_cols, per_part)
        statistics = torch.empty((n_rows, parts, 2), dtype=torch.float32, device=x.device)
        launch(
            _forward_split_statistics,
            (n_rows, parts),
            x,
            statistics,
            stride,
            n_cols,
            per_part,
            BLOCK=chosen.block,
            num_warps=chosen.warps,
        )
        launch(
            _forward_split_write,
            (n_rows, parts),
            x,
            statistics,
            y,
            stride,
            n_cols,
            per_part,
            BLOCK=chosen.block,
            PARTS=next_power_of_2(parts),
            num_warps=chosen.warps,
        )
    return y


def _launch_backward(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    dy, stride = as_rows(dy)
    y = y.contiguous()
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if not y.numel():
        return dx
    n_rows, n_cols, chosen = _plan(y, "backward")
    if chosen.strategy == "tile":
        launch(
            _backward_tile,
            (cdiv(n_rows, chosen.rows),),
            dy,
            y,
            dx,
            stride,
            n_rows,
            n_cols,
            ROWS=chosen.rows,
            BLOCK=chosen.block,
            num_warps=chosen.warps,
        )
    elif chosen.strategy == "loop":
        launch(_backward_loop, (n_rows,), dy, y, dx, stride, n_cols, BLOCK=chosen.block, num_warps=chosen.warps)
    else:
        per_part = _per_part(n_cols, chosen)
        parts = cdiv(n_cols, per_part)
        products = torch.empty((n_rows, parts), dtype=torch.float32, device=y.device)
        launch(
            _backward_split_product,
            (n_rows, parts),
            dy,
            y,
            products,
            stride,
            n_cols,
            per_part,
            BLOCK=chosen.block,
            num_warps=chosen.warps,
        )
        launch(
            _backward_split_write,
            (n_rows, parts),
            dy,
            y,
            products,
            dx,
            stride,
            n_cols,
            per_part,
            BLOCK=chosen.block,
            PARTS=next_power_of_2(parts),
            num_warps=chosen.warps,
        )
    return dx


_backward_op = KernelOp("softmax_backward", _launch_backward, lambda dy, y: y.new_empty(y.shape))


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(output)


def _backward(ctx, dy):
    return _backward_op(dy, *ctx.saved_tensors)


def _check(x: torch.Tensor) -> None:
    check_floats(x=x)
    if x.dim() == 0:
        raise ValueError("x: expected at least one dimension, got a scalar")


_forward_op = KernelOp(
    "softmax_forward",
    _launch_forward,
    lambda x: x.new_empty(x.shape),
    setup_context=_setup_context,
    backward=_backward,
    check=_check,
)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Compute the softmax over the last dimension, as `torch.softmax(x, -1)`.

    Args:
        x: [..., C], fp32, bf16 or fp16; rows may be strided. A row of -inf alone gives NaN.

    Returns:
        [..., C] in x's dtype.

    Raises:
        ValueError: On a scalar or an unsupported dtype.
    """
    if not runs_on_triton(x):
        _check(x)
        return forbid_double_backward(reference_softmax(x))
    return _forward_op(x)
