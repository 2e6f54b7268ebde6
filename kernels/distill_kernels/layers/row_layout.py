"""Row layout of a tensor, and the distribution of rows over programs for kernels that reduce over each row."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from distill_kernels.launch import HAS_TRITON, next_power_of_2, tl, triton

if HAS_TRITON:
    from distill_kernels.launch import has_ptx


class RowConfig(NamedTuple):
    """Launch shape of a row kernel.

    Attributes:
        rows: Rows a program processes at a time.
        warps: Warps of a program.
        programs: Programs per multiprocessor of a looping kernel.
        stages: Loads in flight of a looping kernel.
        twice: A backward kernel converts its 16-bit inputs to fp32 twice, for the sums and for the result, to save
            registers.
    """

    rows: int
    warps: int
    programs: int = 0
    stages: int = 1
    twice: bool = False


# The rules below were read off a sweep on an H200, 1 MiB to 128 MiB of bf16, rows of 128 to 16,384 elements.


@functools.lru_cache(maxsize=4096)
def forward_rows(columns: int, n_rows: int, multiprocessors: int) -> RowConfig:
    """Return the launch shape of one pass over rows: about 16 elements a thread; many small rows share a program."""
    rows = max(1, 2048 // next_power_of_2(columns))
    while rows > 1 and n_rows < rows * 4 * multiprocessors:
        rows //= 2
    warps = 1 << ((rows * columns // 512).bit_length() - 1) if rows * columns >= 512 else 1
    return RowConfig(rows=rows, warps=min(max(warps, 4), 16))


@functools.cache
def backward_rows(columns: int) -> RowConfig:
    """Return the launch shape of looping programs that accumulate sums over rows, with three loads in flight."""
    block = next_power_of_2(columns)
    rows = max(1, min(8, 4096 // block))
    return RowConfig(
        rows=rows,
        warps=min(max(rows * block // 1024, 2), 16),
        programs=min(8, max(1, round(8192 / (rows * columns)))),
        stages=3 if block <= 8192 else 1,
    )


@functools.lru_cache(maxsize=4096)
def affine_forward_rows(columns: int, n_rows: int, multiprocessors: int) -> RowConfig:
    """Return `forward_rows` for a layer with weight and bias: fewer threads for long rows, loops for the longest."""
    config = forward_rows(columns, n_rows, multiprocessors)
    if columns > 12_288:
        return RowConfig(rows=1, warps=16, programs=1, stages=3)
    if columns > 4096:
        return RowConfig(rows=1, warps=4 if columns <= 6144 else 8)
    return RowConfig(rows=8, warps=2) if columns <= 128 and config.rows > 8 else config


def stages_that_fit(stages: int, tile_bytes: int, shared_bytes: int) -> int:
    """Return the loads in flight, at most `stages`; all but one tile lie in shared memory, with 4 KiB of sums."""
    return max(1, min(stages, 1 + (shared_bytes - 4096) // tile_bytes))


@functools.cache
def one_sum_rows(columns: int, low_precision: bool) -> RowConfig:
    """Return `backward_rows` for a layer that keeps one sum a column.

    With `low_precision` (16-bit inputs) rows whose sums leave no registers for fp32 inputs are converted `twice`.
    """
    if low_precision and columns > 8192:
        return RowConfig(rows=1, warps=16, programs=1, stages=3, twice=True)
    if low_precision and 4096 < columns <= 5120:  # 1,024 columns at a time: no threads beyond the last
        return RowConfig(rows=1, warps=4, programs=2, stages=3, twice=True)
    return backward_rows(columns)


@functools.cache
def two_sums_rows(columns: int, low_precision: bool) -> RowConfig:
    """Return `one_sum_rows` for a layer that keeps two sums a column."""
    config = one_sum_rows(columns, low_precision)
    if columns <= 128:
        return config._replace(programs=6)
    if 2048 < columns <= 4096:
        return config._replace(programs=2, twice=low_precision and columns > 3072)
    return config._replace(stages=4) if 5120 < columns <= 6144 else config


@triton.jit
def force_recompute(x, zero):
    """Return 16-bit `x` as a value that the compiler takes for another, so that it recomputes results from it.

    This frees the registers of the first results. `zero` is a kernel argument, 0, and must not be specialised.
    """
    if has_ptx():
        mask = tl.full(x.shape, 0, tl.int16) + zero.to(tl.int16)
        return tl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;", "=r,r,r", [x, mask], dtype=x.dtype, is_pure=False, pack=2
        )
    else:
        return x


def as_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return `tensor` as equally spaced rows of its last dimension, and the stride between rows in elements.

    Slices of a wider matrix are used without a copy; other layouts (transposed, or rows at several distances) are
    copied, as `reshape` would.
    """
    columns = tensor.shape[-1]
    if tensor.is_contiguous():
        return tensor, columns
    if tensor.stride(-1) == 1 or columns == 1:
        distance = None
        expected = 0
        for size, stride in zip(reversed(tensor.shape[:-1]), reversed(tensor.stride()[:-1]), strict=True):
            if size == 1:
                continue
            if distance is None:
                distance = stride
                expected = stride
            if stride != expected:
                break
            expected *= size
        else:
            return tensor, columns if distance is None else distance
    return tensor.contiguous(), columns
