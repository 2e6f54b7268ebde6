"""Row kernel for a top-K teacher: the student's relative logits to loss, statistics and gradient, in place.

One program a row; the formulas are in topk_reference.py. topk_normalisers.py gathers the K logits beforehand and sums
the tail. The gradient's sweep runs backwards over the whole row, and the K gradients are scattered over what it wrote.

Bytes a row, 16-bit logits: 2 V read and 2 V written, and 2 V read once more, less what L2 keeps, for statistics or
label smoothing. The teacher's part is 32 to 64 sectors, which is negligible.
"""

from __future__ import annotations

from distill_kernels.launch import HAS_TRITON, cdiv, next_power_of_2, tl, triton
from distill_kernels.layers.fast_math import LOG2_E, exp, exp2
from distill_kernels.losses.operands import RowCall
from distill_kernels.losses.projection import TILE, ChunkLogits
from distill_kernels.losses.row_functions import (
    agreement_part,
    clamp_at_zero,
    hard_gradient,
    hard_loss,
    label_logprob,
    load_tiles,
    logit_at,
    raw_logit_gradient,
    skip_row,
    store_clipped,
    store_stats,
    to_int32,
    weighted_divergences,
)
from distill_kernels.losses.terms import Objective
from distill_kernels.losses.topk_normalisers import top_k_normalisers
from distill_kernels.losses.topk_reference import IMPOSSIBLE, TopK

BLOCK = 16  # tiles
if HAS_TRITON:
    NO_PROBABILITY = tl.constexpr(IMPOSSIBLE)


@triton.jit
def _top_k_kernel(
    student,
    gradient_ptr,
    teacher,
    tokens,
    outputs,
    joint,
    clip_ptr,
    sizes,
    strides,
    inverse_t,
    weights,
    parameters,
    token_caps,
    entry_caps,
    stats_factor,
    hard,
    transform,
    whole_vocab,
    start,
    KINDS: tl.constexpr,
    BUCKET: tl.constexpr,
    SAMPLED: tl.constexpr,
    REVERSE: tl.constexpr,
    TEMPERED: tl.constexpr,
    HARD: tl.constexpr,
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    GRADIENT: tl.constexpr,
    OWNS_ROW_TERMS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Compute one row over this rank's V columns from `start` on, given the values joined over ranks (`JoinedTopK`).

    Loss and statistics are these columns' parts; terms of the row as a whole are added where `OWNS_ROW_TERMS`. Each
    outcome, the bucket too, is an entry of `entry_caps`; sampled weights have none.
    """
    values_ptr, shift_ptr = student
    ids_ptr, given_ptr, rest_ptr = teacher
    labels_ptr, scale_ptr, rows_ptr = tokens
    loss_ptr, stats_ptr = outputs
    norms_ptr, top_ptr = joint
    V, tiles, K = sizes
    values_stride, gradient_stride, ids_stride, given_stride, stats_stride, norms_stride = strides
    STATS: tl.constexpr = stats_ptr is not None
    HAS_LABELS: tl.constexpr = labels_ptr is not None
    SOFT: tl.constexpr = len(KINDS) > 0
    # The K tokens' logits come from `top_ptr`, gathered before from all ranks. With a bucket they were set to -inf in
    # the row itself, so that sums over the row are sums over the other tokens (the bucket's).
    here = tl.program_id(0).to(tl.int64)  # within the chunk
    row = here
    if rows_ptr is not None:
        row = tl.load(rows_ptr + here)
    scale = tl.load(scale_ptr + row)
    values_ptr += here * values_stride
    gradient_ptr += here * gradient_stride
    shift_ptr += here * tiles
    blocks = tl.cdiv(tiles, BLOCK)
    within = tl.arange(0, TILE)[None, :]
    # Its gradient is zeros, stored without reading a logit: what lies there may be NaN. Its teacher's entries, too, may
    # be anything.
    if scale == 0.0:
        skip_row(row, loss_ptr, stats_ptr, stats_stride, gradient_ptr, V, GRADIENT, TILE, BLOCK)
        return

    # [4, n]: the maximum, and the log sums of exponentials at T, at T = 1 and, further below, at T of the others.
    student_max = tl.load(norms_ptr + here)
    lse = tl.load(norms_ptr + norms_stride + here)
    lse1 = tl.load(norms_ptr + 2 * norms_stride + here)
    rate = inverse_t * LOG2_E
    lane = tl.arange(0, LANES)
    # Lanes past K, and unused places of a shorter list, hold -inf, and are no outcome.
    given = tl.load(given_ptr + row * given_stride + lane, mask=lane < K, other=-float("inf")).to(tl.float32)
    used = given != -float("inf")
    ids = to_int32(tl.load(ids_ptr + row * ids_stride + lane, mask=lane < K, other=-1), whole_vocab)
    ids -= start
    # which of the K this rank's columns hold, and therefore stores
    held = used & (ids >= 0) & (ids < V)
    z_top = tl.load(top_ptr + here * K + lane, mask=lane < K, other=-float("inf"))
    label = tl.full((), -1, tl.int32)
    at_label = 0.0
    # Before the sweeps: with a gradient they overwrite the label's logit.
    if HAS_LABELS:
        label = to_int32(tl.load(labels_ptr + row), V)
        at_label = logit_at(values_ptr, shift_ptr, label, V, TILE)
        if SOFT and BUCKET:  # the row holds -inf where the label is one of the K
            at_label = tl.maximum(at_label, tl.max(tl.where(held & (ids == label), z_top, -float("inf")), 0))
        at_label = label_logprob(at_label, label, lse1, V, whole_vocab)
    # From here on the row's logits are overwritten in place, block by block.
    tl.debug_barrier()  # gradients take the place of what every warp has read
    z_sum = tl.zeros((BLOCK, TILE), tl.float32)
    entropy = tl.zeros((BLOCK, TILE), tl.float32)
    highest = tl.zeros((BLOCK, TILE), tl.float32)  # tokens of the student's highest logit
    # A sweep of its own: the gradient's sweep below runs backwards and overwrites, and needs none of these sums.
    if SMOOTHED or STATS:
        # A step is BLOCK tiles of TILE columns, [BLOCK, TILE]; tiles and columns beyond V load as -inf and add 0.
        for block in range(blocks):
            tile = block * BLOCK + tl.arange(0, BLOCK)
            columns = tile[:, None] * TILE + within
            z = load_tiles(values_ptr, shift_ptr, tile, columns, V, tiles)
            if SMOOTHED:
                z_sum += tl.where(z > -float("inf"), z, 0.0)
            if STATS:
                p = exp(z - lse1)
                entropy += tl.where(p > 0.0, p * (z - lse1), 0.0)
                highest += tl.where(z == student_max, 1.0, 0.0)
    z_total = tl.sum(z_sum)
    entropy_total = tl.sum(entropy)
    if SOFT and BUCKET:  # what the sweep did not see
        if SMOOTHED:
            z_total += tl.sum(tl.where(held, z_top, 0.0), 0)
        if STATS:
            p = tl.where(held, tl.exp(z_top - lse1), 0.0)
            entropy_total += tl.sum(tl.where(p > 0.0, p * (z_top - lse1), 0.0), 0)

    # outcomes: lanes 0 to K - 1 the tokens, lane K the others
    # Soft terms live on K + 1 outcomes, in registers: no sweep.
    loss = 0.0
    slope = tl.zeros((LANES,), tl.float32)
    others = 0.0  # the soft gradient of another token is others * exp(z / T - base)
    base = lse
    if SOFT:
        # Tokens sampled from the teacher: weights w instead of probabilities, KL(w || p_s) + p_s's mass in excess of
        # the weights', so that it is 0 at w = p_s and not negative elsewhere.
        if SAMPLED:
            w = tl.exp(given)
            total = tl.sum(w, 0)
            # Unused lanes hold -inf on both sides: w and p are 0 there, and the where keeps 0 times NaN out of the sum.
            log_s = z_top * inverse_t - lse
            f = tl.where(w > 0.0, w * (given - log_s), 0.0)
            tl.static_assert(entry_caps is None)
            loss = weights[0] * clamp_at_zero(tl.sum(f, 0) + (1.0 - total))
            whole = loss
            slope = weights[0] * inverse_t * (total * tl.exp(log_s) - w)
            # Every token has the slope's first part, W p_s(v): the sweep stores it for all, the scatter replaces that
            # of the K.
            others = weights[0] * inverse_t * total
        else:
            log_s = z_top * inverse_t
            log_t = given
            # the bucket is one outcome: the student's mass outside of the K, and the teacher's rest
            if BUCKET:
                base = tl.load(norms_ptr + 3 * norms_stride + here)
                if rest_ptr is not None:
                    log_rest = tl.load(rest_ptr + row)
                else:
                    # 1 - sum of K probabilities in fp32; a teacher of high confidence may round to just below 0
                    log_rest = tl.log(tl.maximum(1.0 - tl.sum(tl.exp(given), 0), 0.0))
                # K that are the whole vocabulary leave nothing: the bucket is no outcome then, whatever rounding says.
                log_rest = tl.where(tl.sum(used.to(tl.int32), 0) < whole_vocab, log_rest, -float("inf"))
                log_s = tl.where(lane == K, base, log_s)
                log_t = tl.where(lane == K, log_rest, log_t)
            # The stored form marks a token that the teacher excludes; reverse KL is infinite there by definition.
            impossible = tl.max(tl.where(log_t == NO_PROBABILITY, 1, 0), 0) == 1
            # Both sides' outcomes add up to 1: the student's by this log-softmax. The teacher's do so with the bucket
            # by construction, and are normalised only without it.
            peak = tl.max(log_s, 0)
            log_s -= peak + tl.log(tl.sum(tl.exp(log_s - peak), 0))
            if not BUCKET:
                peak = tl.max(log_t, 0)
                log_t -= peak + tl.log(tl.sum(tl.exp(log_t - peak), 0))
            f, g_top, p_s, _ = weighted_divergences(log_s, log_t, weights, parameters, KINDS, entry_caps)
            loss = clamp_at_zero(tl.sum(f, 0))
            if REVERSE and entry_caps is None:
                loss = tl.where(impossible, float("inf"), loss)
            whole = loss
            if entry_caps is not None and clip_ptr is not None:
                whole = weighted_divergences(log_s, log_t, weights, parameters, KINDS)[0]
                whole = clamp_at_zero(tl.sum(whole, 0))
                if REVERSE:
                    whole = tl.where(impossible, float("inf"), whole)
            # softmax over the K + 1 outcomes: the same g - p sum(g) as for full rows
            slope = (g_top - p_s * tl.sum(g_top, 0)) * inverse_t
            if BUCKET:
                # Each other token gets the bucket's gradient times its share of the bucket, exp(z / T - base).
                others = tl.sum(tl.where(lane == K, slope, 0.0), 0)
                base = tl.where(base == -float("inf"), 0.0, base)  # no other token has a probability, and each gets 0
        any_capped = 0.0
        if token_caps is not None:
            tl.static_assert(len(KINDS) == 1)
            cap = weights[0] * token_caps[0]
            any_capped = tl.where(loss > cap, 1.0, 0.0)
            slope = tl.where(loss > cap, 0.0, slope)
            others = tl.where(loss > cap, 0.0, others)
            loss = tl.where(loss > cap, cap, loss)
        if clip_ptr is not None:
            store_clipped(clip_ptr, stats_stride, row, any_capped, whole, loss)

    if GRADIENT:
        # Backwards: statistics' sweep left the row's end in L2.
        for count in range(blocks):
            tile = (blocks - 1 - count) * BLOCK + tl.arange(0, BLOCK)
            columns = tile[:, None] * TILE + within
            z = load_tiles(values_ptr, shift_ptr, tile, columns, V, tiles)
            # With renormalize the tokens outside have no soft gradient, and without hard labels the sweep stores zeros.
            # At the K the row may hold -inf (a NaN with a soft cap); the scatter below replaces what is stored there.
            g = tl.zeros_like(z)
            if SOFT and (BUCKET or SAMPLED):
                g = others * exp2(z * rate - base * LOG2_E)
            if HARD:
                g += hard_gradient(exp(z - lse1), columns, label, lse1, whole_vocab, hard, SMOOTHED, Z_LOSS)
            # fp32 up to here, rounded once as it is stored. Each thread overwrites only the elements that it has just
            # loaded.
            g = raw_logit_gradient(g, z, scale, transform, SCALED, CAPPED)
            tl.store(gradient_ptr + columns, g.to(gradient_ptr.dtype.element_ty), mask=columns < V)
        if SOFT:
            # The K gradients are scattered over what the sweep stored for the same columns: without the barrier the
            # order of two warps' stores to one address is open.
            tl.debug_barrier()
            g_top = slope
            if HARD:
                g_top += hard_gradient(exp(z_top - lse1), ids, label, lse1, whole_vocab, hard, SMOOTHED, Z_LOSS)
            g_top = raw_logit_gradient(g_top, z_top, scale, transform, SCALED, CAPPED)
            tl.store(gradient_ptr + ids, g_top.to(gradient_ptr.dtype.element_ty), mask=held)

    # every rank has computed the K outcomes; one of them counts
    row_lse = lse1
    if not OWNS_ROW_TERMS:
        loss = 0.0
        row_lse = 0.0
    divergence = loss * stats_factor
    if clip_ptr is not None:
        divergence = whole * stats_factor
    if HARD:
        loss += hard_loss(at_label, z_total, lse1, row_lse, whole_vocab, hard, SMOOTHED, Z_LOSS)
    tl.store(loss_ptr + row, loss * scale)
    if STATS:
        # The agreement of row_kernel.py: 1 for a column that is both tops, 2 for a single one.
        own = held & (z_top == student_max)
        theirs = held & (given == tl.max(given, 0))
        tops = tl.where(own & theirs, 1.0, tl.where(own | theirs, 2.0, 0.0))
        if not (SOFT and BUCKET):  # the sweep saw them too
            tops -= tl.where(own, 2.0, 0.0)
        agreement = agreement_part(2.0 * tl.sum(highest) + tl.sum(tops, 0), V, whole_vocab)
        store_stats(
            stats_ptr, stats_stride, row, (divergence, -at_label, -entropy_total, 0.0, agreement, at_label, 0.0)
        )


def launch_top_k_row_loss(
    student: ChunkLogits, teacher: ChunkLogits | None, objective: Objective, call: RowCall, *, top: TopK
) -> None:
    """Launch the top-K row kernel over the n rows of `student`; arguments as in `launch_row_loss`.

    `teacher` is None; `top` holds all tokens, as the labels do. Overwrites
    `student.values` even without a gradient.
    """
    gradient = call.gradient
    n, vocab = student.values.shape
    if n == 0:
        return
    assert teacher is None
    tiles = cdiv(vocab, TILE)
    k = top.ids.shape[1]
    out = student.values if gradient is None else gradient
    ids, given, tail, rest = top
    bucket = tail == "bucket"
    at_temperature_1 = objective.temperature != 1.0 and (objective.hard_weight != 0.0 or call.stats is not None)
    joint = top_k_normalisers(
        student,
        top,
        call.row_scale,
        call.rows,
        temperature=objective.temperature,
        bucket=bucket and bool(objective.kinds),
        at_temperature_1=at_temperature_1,
        block=BLOCK,
    )
    _top_k_kernel[(n,)](
        tuple(student[:2]),
        out,
        (ids, given, rest),
        call.tokens,
        call.outputs,
        tuple(joint),
        call.clip,
        (vocab, tiles, k),
        (
            student.values.stride(0),
            out.stride(0),
            ids.stride(0),
            given.stride(0),
            call.stats_stride,
            joint.norms.stride(0),
        ),
        1.0 / objective.temperature,
        objective.weights,
        objective.parameters,
        *objective.caps,
        objective.divergence_weights[0] / objective.weights[0] if objective.kinds else 0.0,
        (objective.hard_weight, objective.label_smoothing, objective.z_loss),
        objective.transform,
        vocab,
        0,  # the first column
        KINDS=objective.codes,
        BUCKET=bucket,
        SAMPLED=tail == "sampled",
        REVERSE="reverse_kl" in objective.kinds,
        TEMPERED=objective.temperature != 1.0,
        GRADIENT=gradient is not None,
        OWNS_ROW_TERMS=True,
        TILE=TILE,
        BLOCK=BLOCK,
        LANES=next_power_of_2(k + 1),
        num_warps=8,
        **objective.hard_label_flags | objective.transform_flags,
    )
