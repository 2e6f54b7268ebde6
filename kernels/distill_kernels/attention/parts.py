"""Keys in parts: attention for grids that would leave multiprocessors idle.

One program a tile of queries and head is few programs where both are few: 32 at 2,048 queries of one head, on 132
multiprocessors. Each tile's keys are then cut into parts, a program each, and a small second kernel adds them up. A
part c gives its rows' largest score m_c (to base 2), sum l_c of exp2(s - m_c) and a_c = sum exp2(s - m_c) v in fp32:

    out = sum_c w_c a_c / sum_c w_c l_c,     lse = log 2 * (m + log2 sum_c w_c l_c),     w_c = exp2(m_c - m)

with m the largest m_c (Dao et al., Flash-Decoding, 2023). Sums run over c in its order: equal bits from run to run.
The parts of a tile share its own interval of keys, whatever bounds it: causality, a window, documents.

Bytes: 4 (D + 2) a row and part, written and read again, all of it within the L2 cache.
"""

from __future__ import annotations

import torch

from distill_kernels.attention.operands import head_block
from distill_kernels.launch import cdiv, next_power_of_2, tl, triton

MERGING = 3  # what a second kernel costs, in tiles of keys
MOST_PARTS = 16


def most_keys(queries: int, keys: int, causal: bool, window: int | None) -> int:
    """The most keys that a tile of `queries` positions may see."""
    if window is None:
        return keys
    return min(keys, queries - 1 + (window if causal else 2 * window - 1))


def part_count(programs: int, tiles: int, at_once: int) -> int:
    """Parts that the keys of each of `programs` programs are cut into; 1: they fill the GPU, or have too few keys.

    Args:
        programs: Tiles of queries, times heads, times batch entries.
        tiles: Tiles of keys that a program visits at most.
        at_once: Programs that run at once. Where several share a multiprocessor each takes longer, by half is assumed.
    """
    parts = max(1, min(at_once // programs, tiles, MOST_PARTS))
    longest = cdiv(tiles, parts)
    return cdiv(tiles, longest) if 2 * tiles > 3 * longest + 2 * MERGING else 1


@triton.jit
def part_of_keys(start, end, BLOCK_N: tl.constexpr):
    """The share of the key tiles in [start, end) that is this program's, by its place in the grid's last dimension."""
    part, parts = tl.program_id(2), tl.num_programs(2)
    tiles = tl.cdiv(tl.maximum(end - start, 0), BLOCK_N)
    return start + tiles * part // parts * BLOCK_N, start + tiles * (part + 1) // parts * BLOCK_N


@triton.jit
def store_part(sums_ptr, weights_ptr, acc, m_i, l_i, row, queries, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """a_c into `sums`, [parts, rows, D], m_c and l_c into `weights`, [2, parts, rows]; rows are B * H * T_q."""
    heads, parts = tl.num_programs(1).to(tl.int64), tl.num_programs(2)
    at = (tl.program_id(2) * heads + tl.program_id(1)) * queries + row
    held = row < queries
    tl.store(weights_ptr + at, m_i, mask=held)
    tl.store(weights_ptr + parts * heads * queries + at, l_i, mask=held)
    column = tl.arange(0, BLOCK_D)
    tl.store(
        sums_ptr + at[:, None] * HEAD_DIM + column[None, :], acc, mask=held[:, None] & (column < HEAD_DIM)[None, :]
    )


@triton.jit
def _merge_kernel(
    sums_ptr, weights_ptr, out_ptr, lse_ptr, stride_ob, stride_oh, stride_om, heads, queries, parts,
    PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    held = row < queries
    cells = held[:, None] & (column < HEAD_DIM)[None, :]
    rows = tl.num_programs(1).to(tl.int64) * queries
    first = tl.program_id(1).to(tl.int64) * queries + row
    m = tl.full([BLOCK_M], -1e30, tl.float32)
    for part in tl.static_range(PARTS):
        inside = held & (part < parts)
        m = tl.maximum(m, tl.load(weights_ptr + part * rows + first, mask=inside, other=-1e30))
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in tl.static_range(PARTS):
        inside = held & (part < parts)
        at = part * rows + first
        weight = tl.exp2(tl.load(weights_ptr + at, mask=inside, other=-1e30) - m)
        total += weight * tl.load(weights_ptr + parts * rows + at, mask=inside, other=0.0)
        sums = tl.load(sums_ptr + at[:, None] * HEAD_DIM + column[None, :], mask=cells & (part < parts), other=0.0)
        acc += weight[:, None] * sums
    empty = total == 0
    acc = acc * (1 / tl.where(empty, 1.0, total))[:, None]
    lse = tl.where(empty, float("-inf"), (m + tl.log2(total)) * 0.6931471805599453)
    tl.store(lse_ptr + first, lse, mask=held)
    out_at = out_ptr + batch * stride_ob + head * stride_oh + row[:, None].to(tl.int64) * stride_om + column[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=cells)


def new_parts(parts: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for what `store_part` leaves: fp32 [parts, B, H, T, D] and [2, parts, B, H, T]."""
    rows = q.shape[:3]
    sums = torch.empty(parts, *rows, q.shape[3], dtype=torch.float32, device=q.device)
    return sums, torch.empty(2, parts, *rows, dtype=torch.float32, device=q.device)


def merge_parts(sums: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fill `out`, [B, H, T, D] of any strides, and `lse`, [B, H, T], from the parts."""
    batches, heads, queries, size = out.shape
    block_d = head_block(size)
    block_m = max(1, 1024 // block_d)
    _merge_kernel[(cdiv(queries, block_m), batches * heads)](
        sums, weights, out, lse, *out.stride()[:3], heads, queries, sums.shape[0],
        PARTS=next_power_of_2(sums.shape[0]), HEAD_DIM=size, BLOCK_D=block_d, BLOCK_M=block_m, num_warps=4,
    )  # fmt: skip
