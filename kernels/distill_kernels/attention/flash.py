"""FlashAttention: softmax(q k^T * scale) v without the [T, T] scores in memory, forward and gradient.

For query i over its keys j (an interval, see `ranges.py`), with z_ij = scale * q_i . k_j, soft-capped to
cap * tanh(z_ij / cap) where a cap is given:

    lse_i = log sum_j exp z_ij        out_i = sum_j exp(z_ij - lse_i) v_j

With attention sinks (Agarwal et al., gpt-oss, 2025) each query head has one learned logit more, exp sink_h in the sum
of lse_i, that has no value: what it takes of a row's probability goes nowhere.

Keys are visited tile by tile with a running maximum and sum (Milakov & Gimelshein, 2018; Dao et al., 2022; Dao,
2023); exponentials are taken to base 2 with the scale folded into one multiply-add. Tiles outside every interval
are skipped; only tiles that cross an interval's end compare indices. Where tiles of queries and heads are too few to
fill the GPU, keys are cut into parts (`split_kv.py`). Work 4 B H T_q T_k D operations (half of it if causal); bytes:
q, k, v read, out and lse written. k and v tiles arrive by TMA through strided descriptors, so views of [B, T, H, D]
projections cost no copies. The gradient is in `flash_backward.py`.

Symbols: `B` batch, `H` query heads, `Hkv` key heads (H a multiple), `T` positions, `D` head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from distill_kernels.attention.flash_backward import backward_on_triton
from distill_kernels.attention.operands import (
    ScoreSettings,
    Tiles,
    aligned,
    autotune_tiles,
    check_attention,
    empty_positions_first,
    head_block,
    initial_softmax_state,
    load_tile,
    score_constants,
    softcapped,
    tiles_of,
    uses_tma,
)
from distill_kernels.attention.ranges import kernel_window, key_tiles, packed_ranges
from distill_kernels.attention.reference import reference_attention, reference_attention_backward
from distill_kernels.attention.split_kv import (
    concurrent_programs,
    max_keys,
    merge_parts,
    new_sums,
    new_weights,
    part_count,
    part_of_tiles,
    store_part,
)
from distill_kernels.constants import LN_2, LOWEST
from distill_kernels.kernel_op import KernelOp
from distill_kernels.launch import cdiv, device_facts, launch, runs_on_triton, tl, triton
from distill_kernels.operands import check_tensor, contiguous_rows


class ForwardSizes(NamedTuple):
    """Sizes of a forward launch; `group` query heads share a key head."""

    batches: int
    heads: int
    group: int
    queries: int
    keys: int


@triton.jit
def _forward_kernel(
    q_tiles,
    k_tiles,
    v_tiles,
    out_ptr,
    lse_ptr,
    ranges_ptr,
    sinks_ptr,
    out_strides,
    sizes,
    window,
    score_factors,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    LEFT: tl.constexpr,
    PACKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
    TMA: tl.constexpr,
):
    """Compute one tile of queries of one head over all of its keys; if SPLIT, over one part of them (split_kv.py).

    q_tiles, k_tiles, v_tiles: of `tiles_of`. out_strides: of batch entries, heads, positions. sizes: `ForwardSizes`.
    score_factors: of `ScoreSettings`. LEFT: intervals have a beginning (a window, documents); SPLIT, PACKED, SOFTCAP,
    SINKS: see `ScoreSettings` and split_kv.py.
    """
    stride_ob, stride_oh, stride_om = out_strides
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
    # a part of the keys: its maximum, sum and output are merged afterwards (merge_parts)
    if SPLIT:
        start, end = part_of_tiles(start, end, BLOCK_N)
    q = load_tile(q_tiles, batch, head, m, BLOCK_M, HEAD_DIM, BLOCK_D, TMA)
    m_i = tl.full([BLOCK_M], LOWEST, tl.float32)  # finite: a row whose keys are all masked so far yields no NaN
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        largest, total = initial_softmax_state(sinks_ptr, head)
        if SPLIT:  # the sink is of one part
            total = tl.where(tl.program_id(2) == 0, total, 0.0)
        m_i = tl.zeros([BLOCK_M], tl.float32) + largest
        l_i = l_i + total
    # The online softmax: m_i is the running maximum to base 2, l_i the sum of exponentials relative to it, and both l_i
    # and acc are rescaled by alpha whenever the maximum moves.
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n in tl.range(start, end, BLOCK_N):
        n = tl.multiple_of(n, BLOCK_N)
        k = load_tile(k_tiles, batch, kv_head, n, BLOCK_N, HEAD_DIM, BLOCK_D, TMA)
        s = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if SOFTCAP:
            s, _ = softcapped(s, cap_rate, cap)
        # a branch in one loop, not two loops: those would each wait for the first of their own tiles
        if (n < full_begin) | (n >= full_end):
            column = n + tl.arange(0, BLOCK_N)
            keep = (column[None, :] >= low[:, None]) & (column[None, :] < high[:, None])
            s = tl.where(keep, s, float("-inf"))
        # score_scale holds log2(e): the multiply-add of z * scale - m and one exp2 are all that an element costs
        m_new = tl.maximum(m_i, tl.max(s, 1) * score_scale)
        p = tl.exp2(s * score_scale - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = load_tile(v_tiles, batch, kv_head, n, BLOCK_N, HEAD_DIM, BLOCK_D, TMA)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m_i = m_new

    if SPLIT:
        store_part(out_ptr, lse_ptr, acc, m_i, l_i, row, queries, HEAD_DIM, BLOCK_D)
    else:
        # A query that sees no key gives zeros and lse = -inf, not NaN: its l_i stayed 0 because m_i began finite.
        empty = l_i == 0
        acc = acc * (1 / tl.where(empty, 1.0, l_i))[:, None]
        lse = tl.where(empty, float("-inf"), (m_i + tl.log2(l_i)) * LN_2)
        tl.store(lse_ptr + tl.program_id(1).to(tl.int64) * queries + row, lse, mask=row < queries)
        column = tl.arange(0, BLOCK_D)
        at = out_ptr + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
        at = at + row[:, None].to(tl.int64) * stride_om + column[None, :]
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(row < queries)[:, None] & (column < HEAD_DIM)[None, :])


def forward_on_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    masking: ScoreSettings,
    tile: Tiles | None = None,
    parts: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out, [B, T, H, D] in memory, and lse fp32 [B, H, T]; `tile` and `parts` are for measurements.

    Args:
        q: [B, H, T, D].
        k, v: [B, Hkv, Tk, D].
        masking: scale and masks.
        tile: None: by `autotune_tiles`.
        parts: parts of the keys; None: by `part_count`.
    """
    batches, heads, queries, size = q.shape
    kv_heads = k.shape[1]
    keys = k.shape[2]
    block_d = head_block(size)
    facts = device_facts(q.device)
    if tile is None:
        tile = autotune_tiles("forward", q, k, masking, lambda tile: forward_on_triton(q, k, v, masking, tile))
    tma = uses_tma(facts, tile)
    tiles = cdiv(queries, tile.queries)
    # Few queries and heads leave multiprocessors idle (decoding, one long sequence): keys are cut into parts then.
    seen = max_keys(tile.queries, keys, masking.causal, masking.window)
    parts = parts or part_count(tiles * batches * heads, cdiv(seen, tile.keys), concurrent_programs(block_d, facts))
    out = empty_positions_first(q)
    lse = _new_lse(q)
    ranges = lse  # of a dense batch, whose intervals the kernel computes: not read
    if masking.cu_seqlens_q is not None and masking.cu_seqlens_k is not None:
        ranges = packed_ranges(
            masking.cu_seqlens_q, masking.cu_seqlens_k, batches * queries, masking.causal, masking.window
        )
    sums = out if parts == 1 else new_sums(parts, q)
    weights = lse if parts == 1 else new_weights(parts, q)
    q = aligned(q, "q")
    k = aligned(k, "k")
    v = aligned(v, "v")
    sinks = contiguous_rows(masking.sinks)
    launch(
        _forward_kernel,
        (tiles, batches * heads, parts),
        tiles_of(q, tile.queries, block_d, tma),
        tiles_of(k, tile.keys, block_d, tma),
        tiles_of(v, tile.keys, block_d, tma),
        sums,
        weights,
        ranges,
        lse if sinks is None else sinks,
        out.stride()[:3],
        ForwardSizes(batches=batches, heads=heads, group=heads // kv_heads, queries=queries, keys=keys),
        kernel_window(masking.window),
        masking.score_factors,
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        LEFT=masking.packed or masking.window is not None,
        SINKS=sinks is not None,
        SPLIT=parts > 1,
        TMA=tma,
        **score_constants(q, masking),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if parts > 1:
        merge_parts(sums, weights, out, lse)
    return out, lse


def _new_lse(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


def _masking(causal, scale, window, softcap, cu_seqlens_q, cu_seqlens_k, sinks) -> ScoreSettings:
    """Return the masking that an op's arguments describe; without lengths of their own keys have the queries'."""
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    return ScoreSettings(causal, scale, window, softcap, cu_seqlens_q, cu_seqlens_k, sinks)


def _launch_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    masking = _masking(causal, scale, window, softcap, cu_seqlens_q, cu_seqlens_k, sinks)
    if q.numel() == 0 or k.numel() == 0 or not runs_on_triton(q):
        out, lse = reference_attention(q, k, v, masking)
        return empty_positions_first(q).copy_(out), lse
    return forward_on_triton(q, k, v, masking)


def _fake_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale, window, softcap, sinks=None):
    return empty_positions_first(q), _new_lse(q)


def _launch_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Return dq, dk, dv and, with sinks, dsinks."""
    masking = _masking(causal, scale, window, softcap, cu_seqlens_q, cu_seqlens_k, sinks)
    if q.numel() == 0 or k.numel() == 0 or not runs_on_triton(q):
        dq, dk, dv, *dsinks = reference_attention_backward(dout, q, k, v, out, lse, masking)
        return [
            empty_positions_first(q).copy_(dq),
            empty_positions_first(k).copy_(dk),
            empty_positions_first(v).copy_(dv),
            *dsinks,
        ]
    return backward_on_triton(dout, q, k, v, out, lse, masking)


def _fake_backward(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, causal, scale, window, softcap, sinks=None):
    grads = [empty_positions_first(q), empty_positions_first(k), empty_positions_first(v)]
    return grads if sinks is None else [*grads, sinks.new_empty(sinks.shape)]


_backward_op = KernelOp("flash_attention_backward", _launch_backward, _fake_backward)


def _save_for_backward(ctx, inputs, output):
    q, k, v, cu_seqlens_q, cu_seqlens_k, *ctx.scalars, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k, sinks)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # else autograd allocates zeros for the gradient of lse


def _backward(ctx, dout):
    if dout is None:
        return (None,) * 10
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, sinks = ctx.saved_tensors
    dq, dk, dv, *dsinks = _backward_op(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *ctx.scalars, sinks)
    return dq, dk, dv, None, None, None, None, None, None, dsinks[0] if dsinks else None


def _check(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale, window, softcap, sinks=None) -> None:
    check_attention(q, k, v, _masking(causal, scale, window, softcap, cu_seqlens_q, cu_seqlens_k, sinks))


_forward_op = KernelOp(
    "flash_attention",
    _launch_forward,
    _fake_forward,
    setup_context=_save_for_backward,
    backward=_backward,
    check=_check,
    results=1,
)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """Exact attention with gradients for q, k, v and sinks, in memory linear in the number of positions.

    Args:
        q: [B, H, Tq, D], fp16, bf16 or fp32, D up to 256. Any strides; views of [B, T, H, D] tensors cost no copy
            where strides are multiples of 16 bytes.
        k, v: [B, Hkv, Tk, D], H a multiple of Hkv (grouped and multi-query heads are not repeated).
        causal: query i sees keys up to i + Tk - Tq: the *last* query sees the last key, as in FlashAttention-2.
        scale: factor of q.k, > 0; 1/sqrt(D) by default.
        window: a query sees the `window` keys that end with its own (and, if not causal, as many on the other side).
        softcap: scores become softcap * tanh(score / softcap).
        sinks: [H], attention sinks: a learned logit a query head that counts in the softmax's denominator and has no
            value (`scale` and `softcap` are not applied to it), fp16, bf16 or fp32.
        cu_seqlens_q, cu_seqlens_k: cumulative document lengths, int [documents + 1] from 0, over the B * T
            positions flattened; no document crosses a batch entry. k's default to q's. Trailing empty documents are
            allowed (`cu_seqlens_from_position_ids` makes them); positions behind the last document give zeros.
        max_seqlen_q, max_seqlen_k: taken for the sake of callers that have them; not needed.
        deterministic: taken for callers that ask; the fastest way known here is deterministic anyway.

    Returns:
        [B, H, Tq, D] in q's dtype, laid out as [B, Tq, H, D] in memory. A query that sees no key gives zeros.

    Raises:
        ValueError: shapes, dtypes or arguments that do not fit.
    """
    if not isinstance(q, torch.Tensor):
        check_tensor("q", q)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)  # Triton takes the int 1 for a constant
    cu_seqlens_k = None if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k  # launch plans tell tensors apart
    return _forward_op(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale, window, softcap, sinks)
