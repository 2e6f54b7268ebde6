"""The kernel of dk and dv: a program owns a tile of keys and visits the queries that attend to it.

The formulas stand in `flash_backward.py`, which launches it.
"""

from __future__ import annotations

from typing import NamedTuple

from distill_kernels.attention.operands import load_tile, softcapped
from distill_kernels.attention.ranges import dense_or_packed_interval
from distill_kernels.attention.split_kv import part_of_tiles, store_sums
from distill_kernels.launch import tl, triton


class KeyGradientSizes(NamedTuple):
    """Sizes of a launch; `group` query heads share a key head, `padded_rows` of lse and delta belong to each head."""

    batches: int
    heads: int
    kv_heads: int
    group: int
    queries: int
    padded_rows: int
    keys: int


@triton.jit
def _gather_queries(
    sums,
    key_tile,
    query_tiles,
    row_terms,
    ranges_ptr,
    batch,
    head,
    n,
    start,
    end,
    sizes,
    window,
    score_factors,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    PACKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """Add the share of query tiles [start, end) of one head to dk and dv, `sums`, and return them.

    key_tile: k and v at `n`, [BLOCK_N, BLOCK_D]. query_tiles: of `tiles_of` q and dout. row_terms: lse to base 2 and
    delta.
    """
    dk, dv = sums
    k, v = key_tile
    q_tiles, dout_tiles = query_tiles
    lse_ptr, delta_ptr = row_terms
    score_scale, cap, cap_rate = score_factors
    for m in tl.range(start, end, BLOCK_M):
        m = tl.multiple_of(m, BLOCK_M)
        row = m + tl.arange(0, BLOCK_M)
        # lse and delta are stored with rows padded to whole tiles, so that these loads need no mask; a padded row has
        # lse = +inf and contributes p = 0.
        terms_at = (batch.to(tl.int64) * sizes.heads + head) * sizes.padded_rows + row
        q = load_tile(q_tiles, batch, head, m, BLOCK_M, HEAD_DIM, BLOCK_D, TMA)
        lse = tl.load(lse_ptr + terms_at)
        # Scores transposed, keys by queries: dk and dv are then products from the left, P and dS never move.
        s = tl.dot(k, q.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M], keys by queries
        if SOFTCAP:
            s, tanh = softcapped(s, cap_rate, cap)
        # lse is kept to base 2 with the scale folded in: P comes back exactly as the forward pass normalised it.
        p = tl.exp2(s * score_scale - lse[None, :])
        if MASKED:
            # The interval is the query's, as in the forward pass; rows past the end repeat the last query and are
            # already 0.
            row = tl.minimum(row, sizes.queries - 1)
            query_sizes = sizes.batches, sizes.queries, sizes.keys
            low, high = dense_or_packed_interval(row, batch, ranges_ptr, query_sizes, window, CAUSAL, PACKED, False)
            column = n + tl.arange(0, BLOCK_N)
            p = tl.where((column[:, None] >= low[None, :]) & (column[:, None] < high[None, :]), p, 0.0)
        dout = load_tile(dout_tiles, batch, head, m, BLOCK_M, HEAD_DIM, BLOCK_D, TMA)
        # P and dS are rounded to the operands' dtype for the tensor cores; sums stay in fp32.
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
        dp = tl.dot(v, dout.T, input_precision=PRECISION)
        delta = tl.load(delta_ptr + terms_at)
        # dS = P * (dP - delta): delta is the row's sum of P * dP, computed once from dout and out.
        ds = p * (dp - delta[None, :])
        if SOFTCAP:
            ds = ds * (1 - tanh * tanh)
        # the scale of the scores is applied once to the finished sum, at the store
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _key_gradient_kernel(
    q_tiles,
    k_tiles,
    v_tiles,
    dout_tiles,
    dk_ptr,
    dv_ptr,
    lse_ptr,
    delta_ptr,
    key_ranges_ptr,
    ranges_ptr,
    dk_strides,
    dv_strides,
    sizes,
    window,
    scale,
    score_factors,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    RIGHT: tl.constexpr,
    PACKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
    TMA: tl.constexpr,
):
    """Compute dk and dv of one tile of keys of one key head; if SPLIT, the sums over one part of its queries.

    key_ranges, ranges: intervals of queries for each key, and of keys for each query. Strides are of batch entries,
    heads, positions. RIGHT: intervals of queries have an end (a window, documents).
    """
    stride_kb, stride_kh, stride_kn = dk_strides
    stride_vb, stride_vh, stride_vn = dv_strides
    keys = sizes.keys
    # the first key tiles of a causal batch are attended by the most queries, and start first
    n = tl.program_id(0) * BLOCK_N
    batch = tl.program_id(1) // sizes.kv_heads
    kv_head = tl.program_id(1) % sizes.kv_heads
    last_column = tl.minimum(n + BLOCK_N, keys) - 1
    key_sizes = sizes.batches, keys, sizes.queries
    # Which queries see a tile of keys? Key j is seen by the interval [low_j, high_j), and both ends grow with j. So the
    # tile's first key gives where visits start and where full visibility may already end, its last key gives where full
    # visibility starts and where visits end:
    #
    #               start           inside                  outside         end
    #   queries       |--- masked ---|------- no mask --------|--- masked ---|
    #               low of         low of                  high of        high of
    #              first key      last key                first key      last key
    first_low, first_high = dense_or_packed_interval(n, batch, key_ranges_ptr, key_sizes, window, CAUSAL, PACKED, True)
    last_low, last_high = dense_or_packed_interval(
        last_column, batch, key_ranges_ptr, key_sizes, window, CAUSAL, PACKED, True
    )
    # query tiles [start, inside) and [outside, end) cross an interval's end; a partial key tile is all masked
    end = tl.maximum(last_high, 0)
    # rounded to query tiles: outwards where visits begin, and inwards where the comparison is left out
    start = tl.maximum(first_low, 0) // BLOCK_M * BLOCK_M
    inside = tl.where(n + BLOCK_N > keys, end, last_low)
    inside = tl.minimum((inside + BLOCK_M - 1) // BLOCK_M, tl.cdiv(end, BLOCK_M)) * BLOCK_M
    inside = tl.maximum(inside, start)
    # Without a window on that side no query is too late for a key, and the second masked part does not exist.
    if RIGHT:
        outside = tl.maximum(inside, first_high // BLOCK_M * BLOCK_M)
    else:
        outside = tl.maximum(inside, end)
    # a part takes whole query tiles of the range; the four bounds are cut to it
    if SPLIT:
        start, end = part_of_tiles(start, end, BLOCK_M)
        inside = tl.minimum(tl.maximum(inside, start), end)
        outside = tl.minimum(tl.maximum(outside, start), end)

    k = load_tile(k_tiles, batch, kv_head, n, BLOCK_N, HEAD_DIM, BLOCK_D, TMA)
    v = load_tile(v_tiles, batch, kv_head, n, BLOCK_N, HEAD_DIM, BLOCK_D, TMA)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    # One program adds up all query heads that share this key head: no atomics, and always the same order. Masked tiles
    # stand apart from the others, so that those compare no indices.
    bounds = start, inside, outside, end
    for query_head_in_group in range(sizes.group):
        head = kv_head * sizes.group + query_head_in_group
        for section in tl.static_range(3 if RIGHT else 2):
            dk, dv = _gather_queries(
                (dk, dv),
                (k, v),
                (q_tiles, dout_tiles),
                (lse_ptr, delta_ptr),
                ranges_ptr,
                batch,
                head,
                n,
                bounds[section],
                bounds[section + 1],
                sizes,
                window,
                score_factors,
                HEAD_DIM,
                BLOCK_D,
                BLOCK_M,
                BLOCK_N,
                section != 1,
                CAUSAL,
                PACKED,
                SOFTCAP,
                PRECISION,
                TMA,
            )
    # Parts store fp32 sums that another kernel adds in their order (split_kv.py); scale and dtype are applied there.
    row = n + tl.arange(0, BLOCK_N)
    if SPLIT:
        store_sums(dk_ptr, dk, row, keys, HEAD_DIM, BLOCK_D)
        store_sums(dv_ptr, dv, row, keys, HEAD_DIM, BLOCK_D)
    else:
        column = tl.arange(0, BLOCK_D)
        stored = (row < keys)[:, None] & (column < HEAD_DIM)[None, :]
        batch_64 = batch.to(tl.int64)
        head_64 = kv_head.to(tl.int64)
        row_64 = row[:, None].to(tl.int64)
        dk_at = dk_ptr + batch_64 * stride_kb + head_64 * stride_kh + row_64 * stride_kn + column[None, :]
        dv_at = dv_ptr + batch_64 * stride_vb + head_64 * stride_vh + row_64 * stride_vn + column[None, :]
        tl.store(dk_at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=stored)
        tl.store(dv_at, dv.to(dv_ptr.dtype.element_ty), mask=stored)
