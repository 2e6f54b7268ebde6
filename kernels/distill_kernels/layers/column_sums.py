"""Reduction of partial sums over programs in a fixed order, the second step of a weight gradient.

Kernels that sum over tokens (the gradients of norm weights and biases) let each program keep its own fp32 sum and
write it to one row of `partials [P, C]`; one more kernel adds the rows. No atomics, so the result is the same in every
run. Reads 4 P C bytes, which mostly still lie in the L2 cache, and writes C elements.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from distill_kernels.launch import cdiv, next_power_of_2, tl, triton
from distill_kernels.launch_plans import launch


class SumsTile(NamedTuple):
    """Rows and columns that a program loads at a time, and its warps."""

    rows: int
    columns: int
    warps: int


def sums_tile(n_rows: int, n_cols: int) -> SumsTile:
    """Return the tile found by a sweep on an H200: narrow with few columns (more programs), tall (fewer steps)."""
    if n_cols >= 4096:
        return SumsTile(rows=64, columns=32, warps=8)
    return SumsTile(rows=min(next_power_of_2(n_rows), 512), columns=8, warps=8)


@triton.jit(do_not_specialize=["n_rows"])
def _column_sums_kernel(
    partials_ptr,
    out_ptr,
    other_ptr,
    n_rows,
    n_cols,
    split,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    if DEPENDENT_LAUNCH:  # this kernel started while the partial sums were still being made
        tl.extra.cuda.gdc_wait()
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, n_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows[:, None] < n_rows) & (cols[None, :] < n_cols)
        total += tl.load(partials_ptr + rows[:, None].to(tl.int64) * n_cols + cols[None, :], mask=mask, other=0.0)
    sums = tl.sum(total, 0)
    tl.store(out_ptr + cols, sums.to(out_ptr.dtype.element_ty), mask=cols < split)
    after = (cols >= split) & (cols < n_cols)
    tl.store(other_ptr + cols - split, sums.to(other_ptr.dtype.element_ty), mask=after)


def column_sums(partials: torch.Tensor, dtype: torch.dtype, dependent_launch: bool = False) -> torch.Tensor:
    """Sum `partials`, fp32 [P, C] contiguous, over its rows in a fixed order: [C] in `dtype`.

    `dependent_launch`: this kernel starts while the previous one, which writes them and calls `gdc_launch_dependents`,
    still runs.
    """
    out = torch.empty(partials.shape[1], dtype=dtype, device=partials.device)
    _launch(partials, out, out, dependent_launch)
    return out


def column_sums_of_two(
    partials: torch.Tensor, dtypes: tuple[torch.dtype, torch.dtype], dependent_launch: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum `partials`, fp32 [P, 2 C], as `column_sums` does: the first C and the last C columns, each in its dtype."""
    columns = partials.shape[1] // 2
    first, second = (torch.empty(columns, dtype=dtype, device=partials.device) for dtype in dtypes)
    _launch(partials, first, second, dependent_launch)
    return first, second


def _launch(partials: torch.Tensor, out: torch.Tensor, other: torch.Tensor, dependent_launch: bool) -> None:
    rows, columns = partials.shape
    tile = sums_tile(rows, columns)
    launch(
        _column_sums_kernel,
        (cdiv(columns, tile.columns),),
        partials,
        out,
        other,
        rows,
        columns,
        len(out),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPENDENT_LAUNCH=dependent_launch,
        num_warps=tile.warps,
        **({"launch_pdl": True} if dependent_launch else {}),
    )
