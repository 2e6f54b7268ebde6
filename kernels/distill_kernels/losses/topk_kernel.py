"""The row kernel for a teacher of K tokens: the student's relative logits to loss, statistics and gradient, in place.

One program a row; the formulas are in topk_rows.py. The K logits are gathered; for the bucket, -inf takes their places
in the row's memory, so that a sweep over the row sees and sums the other tokens only. The gradient's sweep runs
backwards over the whole row, and the K gradients are scattered over what it wrote.

Bytes a row, 16-bit logits: 2 V read and 2 V written, and 2 V read once more, less what L2 keeps, where the row is swept
for the tail (bucket), statistics or label smoothing. The others' normaliser comes from the tiles' sums. The teacher's
part is 32 to 64 sectors: nothing.

Where the vocabulary is cut over ranks, topk_shards.py gathers the K logits and sums the tail beforehand, and the kernel
takes them from there: outcomes are computed by every rank, gradients and statistics over its own columns.
"""

from __future__ import annotations

import torch

from distill_kernels.launch import HAS_TRITON, cdiv, next_power_of_2, tl, triton
from distill_kernels.layers.fast_math import LOG2_E, exp, exp2
from distill_kernels.losses.projection import TILE, Logits
from distill_kernels.losses.rows import _all_divergences, _load, _logit, _normaliser
from distill_kernels.losses.shards import ON_ANOTHER_RANK, VocabShard
from distill_kernels.losses.terms import Objective
from distill_kernels.losses.topk_rows import TopK
from distill_kernels.losses.topk_shards import join_top_k

BLOCK = 16  # tiles
SMALLEST_TAIL = 1e-30  # a tail of less, relative to the row, is summed again relative to its own maximum
if HAS_TRITON:
    ELSEWHERE = tl.constexpr(ON_ANOTHER_RANK)


@triton.jit
def _hard_gradient(
    z, columns, label, lse1, V, hard_weight, smoothing, z_loss, SMOOTHED: tl.constexpr, Z_LOSS: tl.constexpr
):
    p = exp(z - lse1)
    if Z_LOSS:
        p *= 1.0 + 2.0 * z_loss * lse1
    if SMOOTHED:
        p -= smoothing / V
    return hard_weight * (p - tl.where(columns == label, 1.0 - smoothing, 0.0))


@triton.jit
def _top_k_kernel(
    values_ptr, shift_ptr, total_ptr, hard_ptr, gradient_ptr, ids_ptr, given_ptr, labels_ptr, scale_ptr, rows_ptr,
    loss_ptr, stats_ptr, norms_ptr, top_ptr,
    V, tiles, K, values_stride, gradient_stride, ids_stride, given_stride, stats_stride, inverse_t, weights, shares,
    stats_factor, hard_weight, smoothing, z_loss, student_scale, inverse_cap, whole_vocab, start, norms_stride,
    KINDS: tl.constexpr, BUCKET: tl.constexpr, SAMPLED: tl.constexpr, TEMPERED: tl.constexpr, HARD: tl.constexpr,
    SMOOTHED: tl.constexpr, Z_LOSS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, HAS_LABELS: tl.constexpr,
    HAS_ROWS: tl.constexpr, GRADIENT: tl.constexpr, STATS: tl.constexpr, SHARDED: tl.constexpr,
    SPEAKS: tl.constexpr, SMALLEST_TAIL: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """One row. `SHARDED`: of one rank's columns, with what all ranks hold given (`Joint`); loss and statistics are the
    rank's parts, what belongs to the row and not to columns is added where it `SPEAKS`."""
    SOFT: tl.constexpr = len(KINDS) > 0
    here = tl.program_id(0).to(tl.int64)  # within the chunk
    row = here
    if HAS_ROWS:
        row = tl.load(rows_ptr + here)
    scale = tl.load(scale_ptr + row)
    values_ptr += here * values_stride
    gradient_ptr += here * gradient_stride
    shift_ptr += here * tiles
    blocks = tl.cdiv(tiles, BLOCK)
    within = tl.arange(0, TILE)[None, :]
    if scale == 0.0:
        tl.store(loss_ptr + row, 0.0)
        if STATS:
            for i in tl.static_range(7):
                tl.store(stats_ptr + i * stats_stride + row, 0.0)
        if GRADIENT:
            for block in range(blocks):
                columns = (block * BLOCK + tl.arange(0, BLOCK))[:, None] * TILE + within
                nothing = tl.zeros((BLOCK, TILE), tl.float32)
                tl.store(gradient_ptr + columns, nothing.to(gradient_ptr.dtype.element_ty), mask=columns < V)
        return

    if SHARDED:
        student_max = tl.load(norms_ptr + here)
        lse = tl.load(norms_ptr + norms_stride + here)
        lse1 = tl.load(norms_ptr + 2 * norms_stride + here)
    else:
        student_max, lse = _normaliser(shift_ptr, total_ptr + here * tiles, tiles, inverse_t, TILES)
        lse1 = lse
        whole_vocab = V
    rate = inverse_t * LOG2_E
    if TEMPERED and (HARD or STATS) and not SHARDED:
        _, lse1 = _normaliser(shift_ptr, hard_ptr + here * tiles, tiles, 1.0, TILES)
    label = tl.full((), -1, tl.int32)
    at_label = 0.0
    if HAS_LABELS:
        label = tl.load(labels_ptr + row).to(tl.int32)
        at_label = _logit(values_ptr, shift_ptr, label, V, TILE) - lse1
    lane = tl.arange(0, LANES)
    ids = tl.load(ids_ptr + row * ids_stride + lane, mask=lane < K, other=-1).to(tl.int32)
    given = tl.load(given_ptr + row * given_stride + lane, mask=lane < K, other=-float("inf")).to(tl.float32)
    if SHARDED:
        ids -= start
    there = (ids >= 0) & (ids < V)
    if SHARDED:
        z_top = tl.load(top_ptr + here * K + lane, mask=lane < K, other=-float("inf"))
        if HAS_LABELS and SOFT and BUCKET:  # the row holds -inf where the label is one of the K
            at_label = tl.maximum(at_label, tl.max(tl.where(there & (ids == label), z_top - lse1, -float("inf")), 0))
        if HAS_LABELS:
            at_label = tl.where(label == ELSEWHERE, 0.0, at_label)
    else:
        z_top = _logit(values_ptr, shift_ptr, ids, V, TILE)
    tl.debug_barrier()  # -inf and gradients take the place of what every warp has read
    if SOFT and BUCKET and not SHARDED:  # from here on the row holds the other tokens
        tl.store(values_ptr + ids, tl.full((LANES,), -float("inf"), values_ptr.dtype.element_ty), mask=there)
        tl.debug_barrier()

    maxima = tl.full((BLOCK, TILE), -float("inf"), tl.float32)
    mass = tl.zeros((BLOCK, TILE), tl.float32)
    z_sum = tl.zeros((BLOCK, TILE), tl.float32)
    entropy = tl.zeros((BLOCK, TILE), tl.float32)
    if (SOFT and BUCKET and not SHARDED) or SMOOTHED or STATS:
        for block in range(blocks):
            tile = block * BLOCK + tl.arange(0, BLOCK)
            columns = tile[:, None] * TILE + within
            z = _load(values_ptr, shift_ptr, tile, columns, V, tiles)
            if SOFT and BUCKET and not SHARDED:
                maxima = tl.maximum(maxima, z)
                mass += exp2(z * rate - lse * LOG2_E)
            if SMOOTHED:
                z_sum += tl.where(z > -float("inf"), z, 0.0)
            if STATS:
                p = exp(z - lse1)
                entropy += tl.where(p > 0.0, p * (z - lse1), 0.0)
    z_total = tl.sum(z_sum)
    entropy_total = tl.sum(entropy)
    if SOFT and BUCKET:  # what the sweep did not see
        if SMOOTHED:
            z_total += tl.sum(tl.where(there, z_top, 0.0), 0)
        if STATS:
            p = tl.exp(z_top - lse1)
            if SHARDED:
                p = tl.where(there, p, 0.0)
            entropy_total += tl.sum(tl.where(p > 0.0, p * (z_top - lse1), 0.0), 0)

    # outcomes: lanes 0 to K - 1 the tokens, lane K the others
    loss = 0.0
    slope = tl.zeros((LANES,), tl.float32)
    others = 0.0  # the soft gradient of another token is others * exp(z / T - base)
    base = lse
    if SOFT:
        if SAMPLED:
            w = tl.exp(given)
            total = tl.sum(w, 0)
            log_s = z_top * inverse_t - lse
            f = tl.where(w > 0.0, w * (given - log_s), 0.0)
            loss = weights[0] * tl.maximum(tl.sum(f, 0) + (1.0 - total), 0.0)
            slope = weights[0] * inverse_t * (total * tl.exp(log_s) - w)
            others = weights[0] * inverse_t * total
        else:
            log_s = z_top * inverse_t
            log_t = given
            if BUCKET:
                if SHARDED:
                    base = tl.load(norms_ptr + 3 * norms_stride + here)
                else:
                    tail = tl.sum(mass)
                    if tail < SMALLEST_TAIL:
                        base = tl.max(maxima) * inverse_t
                        base = tl.where(base == -float("inf"), 0.0, base)
                        mass = tl.zeros((BLOCK, TILE), tl.float32)
                        for block in range(blocks):
                            tile = block * BLOCK + tl.arange(0, BLOCK)
                            columns = tile[:, None] * TILE + within
                            z = _load(values_ptr, shift_ptr, tile, columns, V, tiles)
                            mass += exp2(z * rate - base * LOG2_E)
                        tail = tl.sum(mass)
                    base += tl.log(tail)
                missing = tl.maximum(1.0 - tl.sum(tl.exp(given), 0), 0.0)
                log_s = tl.where(lane == K, base, log_s)
                log_t = tl.where(lane == K, tl.log(missing), log_t)
            peak = tl.max(log_s, 0)
            log_s -= peak + tl.log(tl.sum(tl.exp(log_s - peak), 0))
            if not BUCKET:
                peak = tl.max(log_t, 0)
                log_t -= peak + tl.log(tl.sum(tl.exp(log_t - peak), 0))
            f, g_top, p_s, _ = _all_divergences(log_s, log_t, weights, shares, KINDS)
            loss = tl.maximum(tl.sum(f, 0), 0.0)
            slope = (g_top - p_s * tl.sum(g_top, 0)) * inverse_t
            if BUCKET:
                others = tl.sum(tl.where(lane == K, slope, 0.0), 0)
                base = tl.where(base == -float("inf"), 0.0, base)  # no other token has a probability, and each gets 0

    if GRADIENT:
        for count in range(blocks):
            tile = (blocks - 1 - count) * BLOCK + tl.arange(0, BLOCK)
            columns = tile[:, None] * TILE + within
            z = _load(values_ptr, shift_ptr, tile, columns, V, tiles)
            g = tl.zeros_like(z)
            if SOFT and (BUCKET or SAMPLED):
                g = others * exp2(z * rate - base * LOG2_E)
            if HARD:
                g += _hard_gradient(
                    z, columns, label, lse1, whole_vocab, hard_weight, smoothing, z_loss, SMOOTHED, Z_LOSS
                )
            g *= scale
            if SCALED:
                g *= student_scale
            if CAPPED:
                g *= 1.0 - (z * inverse_cap) * (z * inverse_cap)
            tl.store(gradient_ptr + columns, g.to(gradient_ptr.dtype.element_ty), mask=columns < V)
        if SOFT:
            tl.debug_barrier()
            g_top = slope
            if HARD:
                g_top += _hard_gradient(
                    z_top, ids, label, lse1, whole_vocab, hard_weight, smoothing, z_loss, SMOOTHED, Z_LOSS
                )
            g_top *= scale
            if SCALED:
                g_top *= student_scale
            if CAPPED:
                g_top *= 1.0 - (z_top * inverse_cap) * (z_top * inverse_cap)
            tl.store(gradient_ptr + ids, g_top.to(gradient_ptr.dtype.element_ty), mask=there)

    once = lse1
    if SHARDED and not SPEAKS:
        loss = 0.0
        once = 0.0
    divergence = loss * stats_factor
    if HARD:
        hard = -(1.0 - smoothing) * at_label
        if SMOOTHED:
            hard -= smoothing * (z_total / whole_vocab - once)
        if Z_LOSS:
            hard += z_loss * once * lse1
        loss += hard_weight * hard
    tl.store(loss_ptr + row, loss * scale)
    if STATS:
        tl.store(stats_ptr + row, divergence)
        tl.store(stats_ptr + stats_stride + row, -at_label)
        tl.store(stats_ptr + 2 * stats_stride + row, -entropy_total)
        tl.store(stats_ptr + 3 * stats_stride + row, 0.0)
        both = there & (z_top == student_max) & (given == tl.max(given, 0))
        tl.store(stats_ptr + 4 * stats_stride + row, tl.max(tl.where(both, 1.0, 0.0), 0))
        tl.store(stats_ptr + 5 * stats_stride + row, at_label)
        tl.store(stats_ptr + 6 * stats_stride + row, 0.0)


def run_top_k_rows(
    student: Logits,
    teacher: Logits | None,
    objective: Objective,
    *,
    labels: torch.Tensor | None,
    row_scale: torch.Tensor,
    rows: torch.Tensor | None,
    loss: torch.Tensor,
    stats: torch.Tensor | None,
    gradient: torch.Tensor | None,
    shard: VocabShard | None = None,
    top: TopK,
) -> None:
    """As `run_rows`, for a teacher of K tokens a row; `teacher` is None, `top` is of all tokens, as `labels` are.

    With `shard`, ids are those of the whole vocabulary. Overwrites `student.values` even without a gradient.
    """
    o = objective
    n, vocab = student.values.shape
    if n == 0:
        return
    assert teacher is None
    tiles, k = cdiv(vocab, TILE), top.ids.shape[1]
    out = student.values if gradient is None else gradient
    ids, given = (x if x.stride(1) == 1 else x.contiguous() for x in top[:2])
    bucket = top.tail == "bucket" and k < (vocab if shard is None else shard.vocab)  # else there is no tail
    norms = at_top = None
    if shard is not None:
        at_one = o.temperature != 1.0 and (o.hard_weight != 0.0 or stats is not None)
        norms, at_top = join_top_k(
            student, ids, row_scale, rows, shard, temperature=o.temperature, bucket=bucket and bool(o.kinds),
            at_one=at_one, smallest_tail=SMALLEST_TAIL, block=BLOCK,
        )  # fmt: skip
        if vocab == 0:
            return
    _top_k_kernel[(n,)](
        student.values, student.shift, student.total, student.total_hard, out, ids, given, labels, row_scale, rows,
        loss, stats, norms, at_top,
        vocab, tiles, k, student.values.stride(0), out.stride(0), ids.stride(0), given.stride(0),
        0 if stats is None else stats.stride(0), 1.0 / o.temperature, o.weights, o.parameters,
        o.divergence_weights[0] / o.weights[0] if o.kinds else 0.0,
        o.hard_weight, o.label_smoothing, o.z_loss, o.student_scale,
        1.0 / o.student_softcap if o.student_softcap else 0.0,
        None if shard is None else shard.vocab, None if shard is None else shard.start,
        None if norms is None else norms.stride(0),
        KINDS=o.kinds, BUCKET=bucket, SAMPLED=top.tail == "sampled", TEMPERED=o.temperature != 1.0,
        HARD=o.hard_weight != 0.0, SMOOTHED=o.label_smoothing != 0.0, Z_LOSS=o.z_loss != 0.0,
        SCALED=o.student_scale != 1.0, CAPPED=o.student_softcap != 0.0, HAS_LABELS=labels is not None,
        HAS_ROWS=rows is not None, GRADIENT=gradient is not None, STATS=stats is not None,
        SHARDED=shard is not None, SPEAKS=shard is None or shard.speaks,
        SMALLEST_TAIL=SMALLEST_TAIL, TILE=TILE, BLOCK=BLOCK, TILES=next_power_of_2(tiles),
        LANES=next_power_of_2(k + 1), num_warps=8,
    )  # fmt: skip
