"""The gradient of FlashAttention, from q, k, v, out and lse: no scores are stored, they are computed again.

With P = exp(z - lse), dP = dout v^T and delta_i = sum_d dout_id out_id:

    dS = P * (dP - delta)        dv = P^T dout        dk = scale * dS^T q        dq = scale * dS k

(under a soft cap dS is multiplied by 1 - tanh^2(z / cap)). Sinks are in lse and out, and change none of these; theirs
is dsink_h = -sum_i exp(sink_h - lse_i) delta_i, over a head's rows. One kernel owns a tile of keys and visits the
queries that attend to it, for every query head of its group, and makes dk and dv; a second owns a tile of queries and
makes dq. P and dP are computed in both: 7 products where one kernel with atomic adds into dq would need 5. On an H200
the two are the faster by half, since small tiles keep their sums in registers; and every sum has one fixed order, so
that gradients are equal from run to run.

Bytes: q, k, v, out, dout, lse read, dq, dk, dv written, 8 B H T of row terms between the kernels.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from distill_kernels.attention.key_gradient import KeyGradientSizes, _key_gradient_kernel
from distill_kernels.attention.operands import (
    ScoreSettings,
    Tiles,
    aligned,
    autotune_tiles,
    choose_tiles,
    empty_positions_first,
    head_block,
    load_tile,
    score_constants,
    softcapped,
    tiles_of,
    uses_tma,
)
from distill_kernels.attention.ranges import kernel_window, key_tiles, packed_ranges
from distill_kernels.attention.split_kv import (
    add_parts,
    concurrent_programs,
    max_keys,
    new_sums,
    part_count,
    part_of_tiles,
    store_sums,
)
from distill_kernels.constants import LOG2_E
from distill_kernels.launch import INTERPRETER, cdiv, device_facts, launch, tl, triton
from distill_kernels.operands import contiguous_rows

PADDING = 128  # rows of lse and delta are padded to this, so that no tile needs to check their end


@triton.jit
def _row_terms_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    terms_ptr,
    sinks_ptr,
    sums_ptr,
    out_strides,
    dout_strides,
    sizes,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SINKS: tl.constexpr,
):
    """terms[0] = lse to base 2, terms[1] = delta, both [B * H, padded]; padding rows get p = exp2(s - inf) = 0.

    With SINKS also these rows' sum of the sinks' gradients, [B * H, programs]. Strides are of batch entries, heads,
    positions. sizes: query heads, queries, rows of `terms`.
    """
    stride_ob, stride_oh, stride_om = out_strides
    stride_gb, stride_gh, stride_gm = dout_strides
    heads, queries, padded_rows = sizes
    batch_head = tl.program_id(1).to(tl.int64)
    batch = batch_head // heads
    head = batch_head % heads
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    inside = (row < queries)[:, None] & (column < HEAD_DIM)[None, :]
    row_64 = row[:, None].to(tl.int64)
    out_at = out_ptr + batch * stride_ob + head * stride_oh + row_64 * stride_om + column[None, :]
    dout_at = dout_ptr + batch * stride_gb + head * stride_gh + row_64 * stride_gm + column[None, :]
    # [BLOCK_M, BLOCK_D], multiplied and summed in fp32: delta is subtracted from dP, which is about as large
    out = tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dout_at, mask=inside, other=0.0).to(tl.float32)
    # Padding rows get lse = +inf: p = exp2(s - inf) = 0 there, and the tiles of the gradients need no mask for rows.
    lse = tl.load(lse_ptr + batch_head * queries + row, mask=row < queries, other=float("inf"))
    terms_at = terms_ptr + batch_head * padded_rows + row
    delta = tl.sum(out * dout, 1)
    tl.store(terms_at, lse * LOG2_E)
    tl.store(terms_at + tl.num_programs(1).to(tl.int64) * padded_rows, delta)
    if SINKS:
        # A row that sees no key has lse = -inf although its sink is finite: its output is 0, and so is its gradient.
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        p = tl.where(lse == float("-inf"), 0.0, tl.exp2((sink - lse) * LOG2_E))
        tl.store(sums_ptr + batch_head * tl.num_programs(0) + tl.program_id(0), -tl.sum(p * delta, 0))


class QueryGradientSizes(NamedTuple):
    """Sizes of a launch; `group` query heads share a key head, `padded_rows` of lse and delta belong to each head."""

    batches: int
    heads: int
    group: int
    queries: int
    padded_rows: int
    keys: int


@triton.jit
def _query_gradient_kernel(
    q_tiles,
    k_tiles,
    v_tiles,
    dout_tiles,
    dq_ptr,
    lse_ptr,
    delta_ptr,
    ranges_ptr,
    dq_strides,
    sizes,
    window,
    scale,
    score_factors,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    LEFT: tl.constexpr,
    PACKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
    TMA: tl.constexpr,
):
    """Compute dq of one tile of queries of one head; if SPLIT, the sum over one part of its keys (split_kv.py).

    sizes: `QueryGradientSizes`. Other arguments are those of the forward kernel (flash.py).
    """
    stride_qb, stride_qh, stride_qm = dq_strides
    heads = sizes.heads
    queries = sizes.queries
    score_scale, cap, cap_rate = score_factors
    # the last query tiles of a causal batch have the most keys: they start first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    kv_head = head // sizes.group
    m = tile * BLOCK_M
    row = m + tl.arange(0, BLOCK_M)
    interval_sizes = sizes.batches, queries, sizes.keys
    start, full_begin, full_end, end, low, high = key_tiles(
        m, row, batch, ranges_ptr, interval_sizes, window, BLOCK_M, BLOCK_N, CAUSAL, LEFT, PACKED
    )
    if SPLIT:
        start, end = part_of_tiles(start, end, BLOCK_N)
    q = load_tile(q_tiles, batch, head, m, BLOCK_M, HEAD_DIM, BLOCK_D, TMA)
    dout = load_tile(dout_tiles, batch, head, m, BLOCK_M, HEAD_DIM, BLOCK_D, TMA)
    # Rows are padded to whole tiles, so that these loads need no mask.
    at = tl.program_id(1).to(tl.int64) * sizes.padded_rows + row
    lse = tl.load(lse_ptr + at)
    delta = tl.load(delta_ptr + at)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n in tl.range(start, end, BLOCK_N):
        n = tl.multiple_of(n, BLOCK_N)
        k = load_tile(k_tiles, batch, kv_head, n, BLOCK_N, HEAD_DIM, BLOCK_D, TMA)
        s = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        v = load_tile(v_tiles, batch, kv_head, n, BLOCK_N, HEAD_DIM, BLOCK_D, TMA)
        # dP needs no scores: its product can run while their exponentials are computed
        dp = tl.dot(dout, v.T, input_precision=PRECISION)
        if SOFTCAP:
            s, tanh = softcapped(s, cap_rate, cap)
        # lse is kept to base 2: P comes back exactly as the forward pass normalised it.
        p = tl.exp2(s * score_scale - lse[:, None])
        if (n < full_begin) | (n >= full_end):
            column = n + tl.arange(0, BLOCK_N)
            p = tl.where((column[None, :] >= low[:, None]) & (column[None, :] < high[:, None]), p, 0.0)
        # dS = P * (dP - delta), rounded to the operands' dtype for the tensor cores; the sum stays in fp32
        ds = p * (dp - delta[:, None])
        if SOFTCAP:
            ds = ds * (1 - tanh * tanh)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    if SPLIT:
        store_sums(dq_ptr, dq, row, queries, HEAD_DIM, BLOCK_D)
    else:
        column = tl.arange(0, BLOCK_D)
        dq_at = dq_ptr + batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
        dq_at = dq_at + row[:, None].to(tl.int64) * stride_qm + column[None, :]
        # the scale of the scores is applied once, to the finished sum
        stored = (row < queries)[:, None] & (column < HEAD_DIM)[None, :]
        tl.store(dq_at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=stored)


def backward_on_triton(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    masking: ScoreSettings,
    key_tile: Tiles | None = None,
    query_tile: Tiles | None = None,
    key_parts: int | None = None,
    query_parts: int | None = None,
) -> list[torch.Tensor]:
    """Return dq, dk, dv and, with sinks, dsinks by the kernels; the last four arguments are for measurements.

    Args:
        dout: gradient of out, [B, H, T, D].
        q, k, v: inputs of the forward, [B, H or Hkv, T, D].
        out, lse: results of the forward, [B, H, T, D] and fp32 [B, H, T].
        masking: scale and masks.
        key_tile, query_tile, key_parts, query_parts: launch shapes; None: chosen as in the forward.
    """
    facts = device_facts(q.device)
    again = functools.partial(backward_on_triton, dout, q, k, v, out, lse, masking)  # with tiles, to time them
    if key_tile is None:
        other = choose_tiles("dq", head_block(q.shape[3]), q.dtype, facts)
        key_tile = autotune_tiles("dk and dv", q, k, masking, lambda tile: again(tile, other))
    if query_tile is None:
        query_tile = autotune_tiles("dq", q, k, masking, lambda tile: again(key_tile, tile))
    inputs = Inputs(aligned(q, "q"), aligned(k, "k"), aligned(v, "v"), aligned(dout, "dout"))
    terms, dsinks = _row_terms(inputs.dout, out, lse, masking.sinks)
    # Of dense batches the kernels compute the intervals, and read none of these.
    ranges = lse
    key_ranges = lse
    if masking.cu_seqlens_q is not None and masking.cu_seqlens_k is not None:
        both = (masking.cu_seqlens_q, masking.cu_seqlens_k)
        batches = q.shape[0]
        causal = masking.causal
        ranges = packed_ranges(*both, batches * q.shape[2], causal, masking.window)
        key_ranges = packed_ranges(*both, batches * k.shape[2], causal, masking.window, from_keys=True)
    dk, dv = _key_gradients(inputs, terms, (key_ranges, ranges), masking, key_tile, key_parts)
    dq = _query_gradient(inputs, terms, ranges, masking, query_tile, query_parts)
    return [dq, dk, dv] if dsinks is None else [dq, dk, dv, dsinks]


class Inputs(NamedTuple):
    """What both kernels load tiles of: q and dout [B, H, T, D], k and v [B, Hkv, Tk, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    def tiles(self, tile: Tiles, tma: bool) -> tuple[Any, Any, Any, Any]:
        """Return the arguments of `load_tile` for q, k, v and dout."""
        block_d = head_block(self.q.shape[3])
        return (
            tiles_of(self.q, tile.queries, block_d, tma),
            tiles_of(self.k, tile.keys, block_d, tma),
            tiles_of(self.v, tile.keys, block_d, tma),
            tiles_of(self.dout, tile.queries, block_d, tma),
        )


def _row_terms(
    dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return lse to base 2 and delta, fp32 [2, B * H, T padded], and the sinks' gradient, [H], or None without."""
    batches, heads, queries, size = out.shape
    padded_rows = cdiv(queries, PADDING) * PADDING
    terms = torch.empty(2, batches * heads, padded_rows, dtype=torch.float32, device=out.device)
    block_m = 32 if device_facts(out.device).family == INTERPRETER or size > 128 else 64
    programs = padded_rows // block_m
    sums = None
    if sinks is not None:
        sums = torch.empty(batches, heads, programs, dtype=torch.float32, device=out.device)
    launch(
        _row_terms_kernel,
        (programs, batches * heads, 1),
        out,
        dout,
        lse,
        terms,
        lse if sinks is None else contiguous_rows(sinks),
        terms if sums is None else sums,
        out.stride()[:3],
        dout.stride()[:3],
        (heads, queries, padded_rows),
        HEAD_DIM=size,
        BLOCK_D=head_block(size),
        BLOCK_M=block_m,
        SINKS=sinks is not None,
    )
    return terms, None if sinks is None or sums is None else sums.sum((0, 2)).to(sinks.dtype)


def _key_gradients(
    inputs: Inputs,
    terms: torch.Tensor,
    ranges: tuple[torch.Tensor, torch.Tensor],
    masking: ScoreSettings,
    tile: Tiles,
    parts: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dk and dv; `ranges`: intervals of queries for each key, and of keys for each query."""
    batches, heads, queries, size = inputs.q.shape
    kv_heads = inputs.k.shape[1]
    keys = inputs.k.shape[2]
    facts = device_facts(inputs.q.device)
    tma = uses_tma(facts, tile)
    dk = empty_positions_first(inputs.k)
    dv = empty_positions_first(inputs.v)
    tiles = cdiv(keys, tile.keys)
    seen = max_keys(tile.keys, queries, masking.causal, masking.window)
    at_once = concurrent_programs(head_block(size), facts)
    parts = parts or part_count(tiles * batches * kv_heads, cdiv(seen, tile.queries), at_once)
    sums = None if parts == 1 else new_sums(2 * parts, inputs.k)
    scale = float(masking.scale)
    launch(
        _key_gradient_kernel,
        (tiles, batches * kv_heads, parts),
        *inputs.tiles(tile, tma),
        dk if sums is None else sums[:parts],
        dv if sums is None else sums[parts:],
        terms[0],
        terms[1],
        *ranges,
        dk.stride()[:3],
        dv.stride()[:3],
        KeyGradientSizes(
            batches=batches,
            heads=heads,
            kv_heads=kv_heads,
            group=heads // kv_heads,
            queries=queries,
            padded_rows=terms.shape[2],
            keys=keys,
        ),
        kernel_window(masking.window),
        scale,
        masking.score_factors,
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        RIGHT=masking.packed or masking.window is not None,
        SPLIT=parts > 1,
        TMA=tma,
        **score_constants(inputs.q, masking),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if sums is not None:
        add_parts(sums, dk, scale, dv)
    return dk, dv


def _query_gradient(
    inputs: Inputs,
    terms: torch.Tensor,
    ranges: torch.Tensor,
    masking: ScoreSettings,
    tile: Tiles,
    parts: int | None,
) -> torch.Tensor:
    """Return dq; `ranges`: intervals of keys for each query."""
    batches, heads, queries, size = inputs.q.shape
    kv_heads = inputs.k.shape[1]
    keys = inputs.k.shape[2]
    facts = device_facts(inputs.q.device)
    tma = uses_tma(facts, tile)
    dq = empty_positions_first(inputs.q)
    tiles = cdiv(queries, tile.queries)
    seen = max_keys(tile.queries, keys, masking.causal, masking.window)
    at_once = concurrent_programs(head_block(size), facts)
    parts = parts or part_count(tiles * batches * heads, cdiv(seen, tile.keys), at_once)
    sums = None if parts == 1 else new_sums(parts, inputs.q)
    scale = float(masking.scale)
    launch(
        _query_gradient_kernel,
        (tiles, batches * heads, parts),
        *inputs.tiles(tile, tma),
        dq if sums is None else sums,
        terms[0],
        terms[1],
        ranges,
        dq.stride()[:3],
        QueryGradientSizes(
            batches=batches,
            heads=heads,
            group=heads // kv_heads,
            queries=queries,
            padded_rows=terms.shape[2],
            keys=keys,
        ),
        kernel_window(masking.window),
        scale,
        masking.score_factors,
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        LEFT=masking.packed or masking.window is not None,
        SPLIT=parts > 1,
        TMA=tma,
        **score_constants(inputs.q, masking),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if sums is not None:
        add_parts(sums, dq, scale)
    return dq
