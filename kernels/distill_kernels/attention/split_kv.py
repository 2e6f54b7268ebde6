"""Split-KV attention: each tile's keys in parts, for grids that would leave multiprocessors idle.

One program a tile of queries and head is few programs where both are few: 32 at 2,048 queries of one head, on 132
multiprocessors. Each tile's keys are then cut into parts, a program each, and a small second kernel adds them up. A
part c gives its rows' largest score m_c (to base 2), sum l_c of exp2(s - m_c) and a_c = sum exp2(s - m_c) v in fp32:

    out = sum_c w_c a_c / sum_c w_c l_c,     lse = log 2 * (m + log2 sum_c w_c l_c),     w_c = exp2(m_c - m)

with m the largest m_c (Dao et al., Flash-Decoding, 2023). Sums run over c in its order: equal bits from run to run.
The parts of a tile share its own interval of keys, whatever bounds it: causality, a window, documents. A gradient's
parts, keys for dq and queries for dk and dv, have the final lse already, and are just added.

Bytes: 4 (D + 2) a row and part, written and read again, all of it within the L2 cache.
"""

from __future__ import annotations

import torch

from distill_kernels.attention.operands import head_block
from distill_kernels.constants import LN_2, LOWEST
from distill_kernels.launch import DeviceFacts, cdiv, launch, next_power_of_2, tl, triton

MERGE_COST_TILES = 3  # cost of the second kernel, in tiles of keys
MAX_PARTS = 16


def max_keys(queries: int, keys: int, causal: bool, window: int | None) -> int:
    """Return the largest number of keys that a tile of `queries` positions may see."""
    if window is None:
        return keys
    return min(keys, queries - 1 + (window if causal else 2 * window - 1))


def concurrent_programs(block_d: int, facts: DeviceFacts) -> int:
    """Return how many programs of the attention kernels run at once: two a multiprocessor, one with wide heads."""
    return facts.multiprocessors * (2 if block_d <= 128 else 1)


def part_count(programs: int, tiles: int, at_once: int) -> int:
    """Return the parts to split the keys of each program into; 1 where programs fill the GPU or keys are few.

    Args:
        programs: Tiles of queries, times heads, times batch entries.
        tiles: Tiles of keys that a program visits at most.
        at_once: Programs that run at once. Where several share a multiprocessor each takes longer, by half is assumed.
    """
    parts = max(1, min(at_once // programs, tiles, MAX_PARTS))
    longest = cdiv(tiles, parts)
    return cdiv(tiles, longest) if 2 * tiles > 3 * longest + 2 * MERGE_COST_TILES else 1


@triton.jit
def part_of_tiles(start, end, BLOCK: tl.constexpr):
    """Return this program's part of the tiles in [start, end), by its index in the grid's last dimension."""
    part = tl.program_id(2)
    parts = tl.num_programs(2)
    tiles = tl.cdiv(tl.maximum(end - start, 0), BLOCK)
    return start + tiles * part // parts * BLOCK, start + tiles * (part + 1) // parts * BLOCK


@triton.jit
def store_sums(sums_ptr, sums, row, rows, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store `sums` of positions `row` into fp32 [parts, batches * heads, rows, D]; return each row's index there."""
    at = (tl.program_id(2) * tl.num_programs(1).to(tl.int64) + tl.program_id(1)) * rows + row
    column = tl.arange(0, BLOCK_D)
    cells = (row < rows)[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(sums_ptr + at[:, None] * HEAD_DIM + column[None, :], sums, mask=cells)
    return at


@triton.jit
def store_part(sums_ptr, weights_ptr, acc, m_i, l_i, row, queries, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store a_c into `sums`, m_c and l_c into `weights`, fp32 [2, parts, batches * heads, queries]."""
    at = store_sums(sums_ptr, acc, row, queries, HEAD_DIM, BLOCK_D)
    held = row < queries
    tl.store(weights_ptr + at, m_i, mask=held)
    tl.store(weights_ptr + tl.num_programs(2) * tl.num_programs(1).to(tl.int64) * queries + at, l_i, mask=held)


@triton.jit
def _merge_kernel(
    sums_ptr,
    weights_ptr,
    out_ptr,
    lse_ptr,
    out_strides,
    sizes,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Add the parts of BLOCK_M rows of one head, weighed by their maxima; sizes: query heads, queries, parts."""
    stride_ob, stride_oh, stride_om = out_strides
    heads, queries, parts = sizes
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    held = row < queries
    cells = held[:, None] & (column < HEAD_DIM)[None, :]
    rows = tl.num_programs(1).to(tl.int64) * queries
    first = tl.program_id(1).to(tl.int64) * queries + row
    # The maxima first, then the sums relative to their largest: two passes over a few KiB that lie in L2.
    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    for part in tl.static_range(PARTS):
        inside = held & (part < parts)
        m = tl.maximum(m, tl.load(weights_ptr + part * rows + first, mask=inside, other=LOWEST))
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in tl.static_range(PARTS):
        inside = held & (part < parts)
        at = part * rows + first
        # A part that saw no key has m_c = LOWEST: its weight is 0, or its l_c is where no part saw one.
        weight = tl.exp2(tl.load(weights_ptr + at, mask=inside, other=LOWEST) - m)
        total += weight * tl.load(weights_ptr + parts * rows + at, mask=inside, other=0.0)
        sums = tl.load(sums_ptr + at[:, None] * HEAD_DIM + column[None, :], mask=cells & (part < parts), other=0.0)
        acc += weight[:, None] * sums
    empty = total == 0
    acc = acc * (1 / tl.where(empty, 1.0, total))[:, None]
    lse = tl.where(empty, float("-inf"), (m + tl.log2(total)) * LN_2)
    tl.store(lse_ptr + first, lse, mask=held)
    out_at = out_ptr + batch * stride_ob + head * stride_oh + row[:, None].to(tl.int64) * stride_om + column[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=cells)


@triton.jit
def _add_kernel(
    sums_ptr,
    out_ptr,
    other_ptr,
    out_strides,
    sizes,
    scale,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Sum the first parts, times `scale`, into `out`; program_id(2) = 1 sums as many further parts into `other`.

    out_strides: of batch entries, heads, positions, of `other` too. sizes: heads, positions, parts.
    """
    stride_ob, stride_oh, stride_om = out_strides
    heads, positions, parts = sizes
    if tl.program_id(2) == 1:
        out_ptr = other_ptr
        scale = 1.0
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    cells = (row < positions)[:, None] & (column < HEAD_DIM)[None, :]
    rows = tl.num_programs(1).to(tl.int64) * positions
    first = tl.program_id(1).to(tl.int64) * positions + row
    # In the order of the parts, [BLOCK_M, BLOCK_D] each: equal bits from run to run. PARTS is a power of two, so that
    # few kernels are compiled; parts that do not exist are not loaded.
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in tl.static_range(PARTS):
        at = sums_ptr + ((tl.program_id(2) * parts + part) * rows + first)[:, None] * HEAD_DIM + column[None, :]
        acc += tl.load(at, mask=cells & (part < parts), other=0.0)
    out_at = out_ptr + batch * stride_ob + head * stride_oh + row[:, None].to(tl.int64) * stride_om + column[None, :]
    tl.store(out_at, (acc * scale).to(out_ptr.dtype.element_ty), mask=cells)


def new_sums(parts: int, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(parts, *like.shape, dtype=torch.float32, device=like.device)


def new_weights(parts: int, like: torch.Tensor) -> torch.Tensor:
    """Return an empty buffer for m and l of the rows of [B, H, T, D] `like`: fp32 [2, parts, B, H, T]."""
    return torch.empty(2, parts, *like.shape[:3], dtype=torch.float32, device=like.device)


def merge_parts(sums: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fill `out`, [B, H, T, D] of any strides, and `lse`, [B, H, T], from the parts."""
    grid, constants = _rows_at_a_time(len(sums), out)
    sizes = (*out.shape[1:3], len(sums))
    launch(_merge_kernel, grid, sums, weights, out, lse, out.stride()[:3], sizes, **constants)


def add_parts(sums: torch.Tensor, out: torch.Tensor, scale: float, other: torch.Tensor | None = None) -> None:
    """Fill `out`, [B, H, T, D] of any strides, with the sum of parts times `scale`.

    Where `other`, of the same shape and strides, is given, the second half of `sums` is its parts, not scaled.
    """
    tensors = 1 if other is None else 2
    parts = len(sums) // tensors
    grid, constants = _rows_at_a_time(parts, out)
    sizes = (*out.shape[1:3], parts)
    second = out if other is None else other  # without one no program writes there
    launch(_add_kernel, (*grid, tensors), sums, out, second, out.stride()[:3], sizes, scale, **constants)


def _rows_at_a_time(parts: int, out: torch.Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Return grid and constants of the kernels that add parts: 1,024 elements of each part a program."""
    batches, heads, positions, size = out.shape
    block_d = head_block(size)
    block_m = max(1, 1024 // block_d)
    constants = {
        "PARTS": next_power_of_2(parts),
        "HEAD_DIM": size,
        "BLOCK_D": block_d,
        "BLOCK_M": block_m,
        "num_warps": 4,
    }
    return (cdiv(positions, block_m), batches * heads), constants
