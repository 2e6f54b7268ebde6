"""Reduction of partial sums over programs in a fixed order, the second step of a weight gradient.

Kernels that sum over tokens (the gradients of norm weights and biases) let each program keep its own fp32 sum and
write it to one row of `partials [P, C]`; one more kernel adds the rows. No atomics, so the result is the same in every
run. Reads 4 P C bytes, which mostly still lie in the L2 cache, and writes C elements.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from distill_kernels.launch import cdiv, dependent_launch_options, launch, next_power_of_2, tl, triton


class SumsTile(NamedTuple):
    """Rows and columns that a program loads at a time, and its warps."""

    rows: int
    columns: int
    warps: int


def row_groups(n_rows: int, rows: int, programs: int) -> tuple[int, int]:
    """Return the rows of a group and the number of groups, for about `programs` that each loop over one group.

    Args:
        rows: Rows of a program's tile, of which a group has whole ones.
    """
    rows_per_group = cdiv(cdiv(n_rows, programs), rows) * rows
    return rows_per_group, cdiv(n_rows, rows_per_group)


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
    """Sum COLUMNS columns over all rows; columns from `split` on go to `other`."""
    if DEPENDENT_LAUNCH:  # this kernel started while the partial sums were still being made
        tl.extra.cuda.gdc_wait()
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # ROWS sums a column, each over every ROWS-th row, and those added at the end: the order depends on the sizes alone.
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, n_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows[:, None] < n_rows) & (cols[None, :] < n_cols)
        total += tl.load(partials_ptr + rows[:, None].to(tl.int64) * n_cols + cols[None, :], mask=mask, other=0.0)
    sums = tl.sum(total, 0)
    tl.store(out_ptr + cols, sums.to(out_ptr.dtype.element_ty), mask=cols < split)
    after = (cols >= split) & (cols < n_cols)
    tl.store(other_ptr + cols - split, sums.to(other_ptr.dtype.element_ty), mask=after)


def column_sums(
    partials: torch.Tensor, out: torch.Tensor, other: torch.Tensor | None = None, dependent_launch: bool = False
) -> None:
    """Sum the rows of `partials` in a fixed order.

    Args:
        partials: fp32 [P, C] contiguous, or [P, C + D].
        out: [C], gets the sums of the first C columns in its dtype.
        other: [D], gets those of the other columns; None if there are none.
        dependent_launch: This kernel starts while the previous one, which writes `partials` and calls
            `gdc_launch_dependents`, still runs.
    """
    rows, columns = partials.shape
    tile = sums_tile(rows, columns)
    launch(
        _column_sums_kernel,
        (cdiv(columns, tile.columns),),
        partials,
        out,
        out if other is None else other,
        rows,
        columns,
        len(out),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPENDENT_LAUNCH=dependent_launch,
        num_warps=tile.warps,
        **dependent_launch_options(dependent_launch),
    )
