"""The second half of a weight gradient: partial sums of many programs, added in a fixed order.

Kernels that sum over tokens (the gradients of norm weights and biases) let each program keep its own fp32 sum and
write it to one row of `partials [P, C]`; one more kernel adds the rows. No atomics, so the result is the same in every
run. Reads 4 P C bytes, which mostly still lie in the L2 cache, and writes C elements.
"""

from __future__ import annotations

import torch

from distill_kernels.launch import cdiv, tl, triton

_COLUMNS, _ROWS = 32, 64


@triton.jit(do_not_specialize=["n_rows"])
def _column_sums_kernel(partials_ptr, out_ptr, n_rows, n_cols, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, n_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows[:, None] < n_rows) & (cols[None, :] < n_cols)
        total += tl.load(partials_ptr + rows[:, None].to(tl.int64) * n_cols + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=cols < n_cols)


def column_sums(partials: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum `partials`, fp32 [P, C] contiguous, over its rows in a fixed order: [C] in `dtype`."""
    rows, columns = partials.shape
    out = torch.empty(columns, dtype=dtype, device=partials.device)
    _column_sums_kernel[(cdiv(columns, _COLUMNS),)](
        partials, out, rows, columns, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8
    )
    return out
