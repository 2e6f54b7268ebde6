"""Reduction of partial sums over programs in a fixed order, the second step of a weight gradient.

Kernels that sum over tokens (the gradients of norm weights and biases) let each program keep its own fp32 sum and
write it to one row of `partials [P, C]`; one more kernel adds the rows. No atomics, so the result is the same in every
run. Reads 4 P C bytes, which mostly still lie in the L2 cache, and writes C elements.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from distill_kernels.launch import cdiv, next_power_of_2, tl, triton


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
    partials_ptr, out_ptr, n_rows, n_cols, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr
):
    if DEPENDENT_LAUNCH:  # this kernel started while the partial sums were still being made
        tl.extra.cuda.gdc_wait()
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, n_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows[:, None] < n_rows) & (cols[None, :] < n_cols)
        total += tl.load(partials_ptr + rows[:, None].to(tl.int64) * n_cols + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=cols < n_cols)


def column_sums(partials: torch.Tensor, dtype: torch.dtype, dependent_launch: bool = False) -> torch.Tensor:
    """Sum `partials`, fp32 [P, C] contiguous, over its rows in a fixed order: [C] in `dtype`.

    `dependent_launch`: this kernel starts while the previous one, which writes them and calls `gdc_launch_dependents`,
    still runs.
    """
    rows, columns = partials.shape
    tile = sums_tile(rows, columns)
    out = torch.empty(columns, dtype=dtype, device=partials.device)
    _column_sums_kernel[(cdiv(columns, tile.columns),)](
        partials,
        out,
        rows,
        columns,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPENDENT_LAUNCH=dependent_launch,
        num_warps=tile.warps,
        **({"launch_pdl": True} if dependent_launch else {}),
    )
    return out
