"""Row kernel: relative logits of both models to losses, statistics and, in place, the student's gradient.

A small kernel reduces the tiles' shifts and totals to the normalisers of a row. Then one program a row sweeps its
columns: with `l = log p` and `p = exp(l)` of both models per element, the table in divergence.py gives `f` and `g`.
Divergences whose `sum(g)` is not known beforehand (all but forward KL, and that with a cap on entries) take one more
sweep first, which also finds the tokens beyond their cap.

Bytes a row, 16-bit logits: 4 V read and 2 V written; twice the reads with the extra sweep.
"""

from __future__ import annotations

import torch

from distill_kernels.launch import cdiv, device_facts, next_power_of_2, tl, triton
from distill_kernels.layers.fast_math import exp
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
    logit_gradient,
    normaliser,
    raw_logit_gradient,
    reduce_by_8,
    skip_row,
    store_clipped,
    store_stats,
    to_int32,
    weighted_divergences,
    zero_row,
)
from distill_kernels.losses.terms import Objective

MOST_THREADS = 1024  # of a program
# tiles of a step, and warps; with 32, one row a multiprocessor at a time
ONE_SWEEP = 8
TWO_SWEEPS = 32


@triton.jit
def _row_normalisers_kernel(
    student,
    teacher,
    norms_ptr,
    tiles,
    norms_stride,
    inverse_t,
    teacher_inverse_t,
    TEMPERED: tl.constexpr,
    HARD: tl.constexpr,
    HAS_TEACHER: tl.constexpr,
    STATS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Store one row's normalisers over this rank's columns, for the ranks to combine.

    They are the maximum and the log sums of exponentials at T and at 1, of the student and then of the teacher, whose T
    is another where `teacher_inverse_t` is not None.
    """
    # A program a row. Shifts and totals are [n, tiles]: a row's lie side by side, TILES of them read at once.
    start = tl.program_id(0).to(tl.int64) * tiles
    student_shift, student_total, student_hard = student
    teacher_shift, teacher_total, teacher_hard = teacher
    student_max, lse_s = normaliser(student_shift + start, student_total + start, tiles, inverse_t, TILES)
    # Without a temperature the sums at T and at 1 are one, and without a teacher its part repeats the student's: the
    # row kernel reads six numbers a row whatever the objective.
    lse1_s = lse_s
    lse_t = lse_s
    lse1_t = lse_s
    teacher_max = student_max
    if TEMPERED and (HARD or STATS):
        _, lse1_s = normaliser(student_shift + start, student_hard + start, tiles, 1.0, TILES)
    if HAS_TEACHER:
        if teacher_inverse_t is not None:
            inverse_t = teacher_inverse_t
        teacher_max, lse_t = normaliser(teacher_shift + start, teacher_total + start, tiles, inverse_t, TILES)
        lse1_t = lse_t
        if TEMPERED and STATS:
            _, lse1_t = normaliser(teacher_shift + start, teacher_hard + start, tiles, 1.0, TILES)
    log_normalisers = student_max, lse_s, lse1_s, teacher_max, lse_t, lse1_t
    # Six planes of n, so that the ranks' parts are combined by elementwise operations.
    for i in tl.static_range(6):
        tl.store(norms_ptr + i * norms_stride + tl.program_id(0), log_normalisers[i])


@triton.jit
def _gradient_sums(
    student,
    teacher,
    lse_s,
    lse_t,
    V,
    tiles,
    inverse_t,
    teacher_inverse_t,
    weights,
    parameters,
    entry_caps,
    KINDS: tl.constexpr,
    EXACT_WHEN_CONFIDENT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ONLY: tl.constexpr = -1,
):
    """Return a row's sum of g, with EXACT_WHEN_CONFIDENT those of g and p_s without a token of p_s > 1/2, and of f.

    ONLY: the one term whose sums these are; -1 for all, without the sum of f.
    """
    # Partial sums stay spread over [BLOCK, TILE / 8] lanes and are folded once at the end: a reduction to a scalar in
    # every step would make all warps wait for each other.
    g_sum = tl.zeros((BLOCK, TILE // 8), tl.float32)
    g_without_top_sum = g_sum
    others_p = g_sum
    f_sum = g_sum
    for block in range(tl.cdiv(tiles, BLOCK)):
        # A step is BLOCK tiles of TILE columns, [BLOCK, TILE]: the first axis picks the tile's shift, the flattened two
        # are the row's columns. In the last step tiles and columns beyond V load as -inf: p, f and g are 0 there.
        tile = block * BLOCK + tl.arange(0, BLOCK)
        columns = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        log_s = load_tiles(student[0], student[1], tile, columns, V, tiles) * inverse_t - lse_s
        log_t = load_tiles(teacher[0], teacher[1], tile, columns, V, tiles) * teacher_inverse_t - lse_t
        f, g, p_s, _ = weighted_divergences(log_s, log_t, weights, parameters, KINDS, entry_caps, None, ONLY)
        if ONLY >= 0:
            f_sum += reduce_by_8(f)
        g_sum += reduce_by_8(g)
        # Where one token holds more than half of p_s, g - p_s sum(g) cancels for it: its gradient is then computed from
        # the other tokens' sums (logit_gradient in row_functions.py).
        if EXACT_WHEN_CONFIDENT:
            g_without_top_sum += reduce_by_8(tl.where(p_s > 0.5, 0.0, g))
            others_p += reduce_by_8(tl.where(p_s > 0.5, 0.0, p_s))
    return tl.sum(g_sum), tl.sum(g_without_top_sum), tl.sum(others_p), tl.sum(f_sum)


@triton.jit
def _row_kernel(
    student,
    teacher,
    gradient_ptr,
    tokens,
    outputs,
    norms_and_sums,
    clip_ptr,
    sizes,
    strides,
    inverse_t,
    teacher_inverse_t,
    weights,
    parameters,
    token_caps,
    entry_caps,
    stats_weights,
    hard,
    transform,
    owns_row_terms,
    KINDS: tl.constexpr,
    TEMPERED: tl.constexpr,
    HARD: tl.constexpr,
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_TEACHER: tl.constexpr,
    EXACT_WHEN_CONFIDENT: tl.constexpr,
    GRADIENT: tl.constexpr,
    STATS: tl.constexpr,
    NEEDS_G_SUM: tl.constexpr,
    SUM_PASS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one row over this rank's V of `whole_vocab` columns; loss and statistics are these columns' parts.

    With NEEDS_G_SUM the gradient needs the sums of `_gradient_sums`: a sweep before, whose end the second, backwards,
    may find in L2; or, where ranks share the vocabulary, loaded from `sums_ptr`, where a launch with SUM_PASS has
    stored this rank's part of them and nothing else.

    student, teacher: relative logits [n, V] and their tiles' shifts. tokens: labels, row scales, indices of the rows.
    outputs: losses [N], statistics [7, N]. norms_and_sums: fp32 [6, n] of `row_normalisers`, fp32 [3, n] or None.
    weights, parameters, stats_weights: by term of KINDS, as token_caps and entry_caps, or None; token_caps need all
    columns here. clip_ptr: the two statistics of caps [2, N], or None. hard: weight, label smoothing, z-loss.
    owns_row_terms: 1 or 0.
    """
    student_ptr, student_shift_ptr = student
    teacher_ptr, teacher_shift_ptr = teacher
    labels_ptr, scale_ptr, rows_ptr = tokens
    loss_ptr, stats_ptr = outputs
    norms_ptr, sums_ptr = norms_and_sums
    V, whole_vocab, tiles = sizes
    student_stride, teacher_stride, gradient_stride, stats_stride, norms_stride = strides
    # int64: row times stride passes 2^31 elements at 17,000 rows of 128,256 columns.
    chunk_row = tl.program_id(0).to(tl.int64)  # within the chunk
    row = chunk_row
    if rows_ptr is not None:
        row = tl.load(rows_ptr + chunk_row)
    # `row` finds what belongs to the token (label, scale, loss, statistics), `chunk_row` what lies in the buffers.
    scale = tl.load(scale_ptr + row)
    student_ptr += chunk_row * student_stride
    gradient_ptr += chunk_row * gradient_stride
    # A row that does not count costs one sweep of zeros over its gradient, and reads no logits.
    if scale == 0.0:
        if not SUM_PASS:
            skip_row(row, loss_ptr, stats_ptr, stats_stride, gradient_ptr, V, GRADIENT, TILE, BLOCK)
        return

    teacher_ptr += chunk_row * teacher_stride
    # The row's maxima are compared for equality below: logits are rebuilt as value + shift, and the tile's maximum is
    # stored as exactly 0, so that the top logit comes back as its shift.
    student_max = tl.load(norms_ptr + chunk_row)
    lse_s = tl.load(norms_ptr + norms_stride + chunk_row)
    lse1_s = tl.load(norms_ptr + 2 * norms_stride + chunk_row)
    teacher_max = tl.load(norms_ptr + 3 * norms_stride + chunk_row)
    lse_t = tl.load(norms_ptr + 4 * norms_stride + chunk_row)
    lse1_t = tl.load(norms_ptr + 5 * norms_stride + chunk_row)
    student_shift_ptr += chunk_row * tiles
    teacher_shift_ptr += chunk_row * tiles
    if teacher_inverse_t is None:
        teacher_inverse_t = inverse_t
    sums = 0.0, 0.0, 0.0
    # Terms whose value for this token is beyond their cap, a bit each; the caps of these, weighted, together.
    capped = None
    at_caps = 0.0
    # First sweep, forwards: dL/dz = g - p_s sum(g) needs the whole row's sum before any element can be written.
    if SUM_PASS or (NEEDS_G_SUM and sums_ptr is None):
        if token_caps is None:
            sums = _gradient_sums(
                (student_ptr, student_shift_ptr),
                (teacher_ptr, teacher_shift_ptr),
                lse_s,
                lse_t,
                V,
                tiles,
                inverse_t,
                teacher_inverse_t,
                weights,
                parameters,
                entry_caps,
                KINDS,
                EXACT_WHEN_CONFIDENT,
                TILE,
                BLOCK,
            )
        else:
            # Term by term, since each has a cap of its own and, beyond it, no part of the sums.
            capped = tl.full((), 0, tl.int32)
            for i in tl.static_range(len(KINDS)):
                of_term = _gradient_sums(
                    (student_ptr, student_shift_ptr),
                    (teacher_ptr, teacher_shift_ptr),
                    lse_s,
                    lse_t,
                    V,
                    tiles,
                    inverse_t,
                    teacher_inverse_t,
                    weights,
                    parameters,
                    entry_caps,
                    KINDS,
                    EXACT_WHEN_CONFIDENT,
                    TILE,
                    BLOCK,
                    ONLY=i,
                )
                cap = weights[i] * token_caps[i]
                beyond = of_term[3] > cap
                capped |= tl.where(beyond, 1 << i, 0)
                at_caps += tl.where(beyond, cap, 0.0)
                sums = (
                    sums[0] + tl.where(beyond, 0.0, of_term[0]),
                    sums[1] + tl.where(beyond, 0.0, of_term[1]),
                    of_term[2],  # of p_s: the same for every term
                )
    if SUM_PASS:
        for i in tl.static_range(3):
            tl.store(sums_ptr + i * norms_stride + chunk_row, sums[i])
        return
    if NEEDS_G_SUM and sums_ptr is not None:
        at = sums_ptr + chunk_row
        sums = tl.load(at), tl.load(at + norms_stride), tl.load(at + 2 * norms_stride)
    label = tl.full((), -1, tl.int32)
    student_label = 0.0
    teacher_label = 0.0
    if labels_ptr is not None:
        label = to_int32(tl.load(labels_ptr + row), V)
        student_label = logit_at(student_ptr, student_shift_ptr, label, V, TILE)
        student_label = label_logprob(student_label, label, lse1_s, V, whole_vocab)
        if HAS_TEACHER and STATS:
            teacher_label = logit_at(teacher_ptr, teacher_shift_ptr, label, V, TILE)
            teacher_label = label_logprob(teacher_label, label, lse1_t, V, whole_vocab)
        # The gradient is written into the student's logits. The label's logit above was read by all warps; one of them
        # may already be storing the last block below.
        if GRADIENT:
            tl.debug_barrier()  # gradients overwrite logits that all warps must have read

    # The sweep that writes. Each element is read and written by the same thread of the same step, so that no barrier is
    # needed between the blocks.
    blocks = tl.cdiv(tiles, BLOCK)
    f_sum = tl.zeros((BLOCK, TILE // 8), tl.float32)
    z_sum = f_sum
    whole_f = f_sum
    stats_f = f_sum
    entropy_s = f_sum
    entropy_t = f_sum
    top_count = f_sum
    for step in range(blocks):
        # Backwards: where a sweep came before, the row's end is what L2 still holds.
        block = step
        if GRADIENT:
            block = blocks - 1 - step
        tile = block * BLOCK + tl.arange(0, BLOCK)
        columns = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        # Loaded again after a first sweep: a row of both models does not fit into registers.
        z_s = load_tiles(student_ptr, student_shift_ptr, tile, columns, V, tiles)
        z_t = z_s
        if HAS_TEACHER:
            z_t = load_tiles(teacher_ptr, teacher_shift_ptr, tile, columns, V, tiles)
        # The logits are relative to their tile's maximum plus that maximum (load_tiles): fp32 from here on.
        log_s = z_s * inverse_t - lse_s
        log_t = z_t * teacher_inverse_t - lse_t
        g = tl.zeros((BLOCK, TILE), tl.float32)
        p_s = g
        p_t = g
        if len(KINDS) > 0:
            f, g, p_s, p_t = weighted_divergences(log_s, log_t, weights, parameters, KINDS, entry_caps, capped)
            f_sum += reduce_by_8(f)
            if clip_ptr is not None:
                whole_f += reduce_by_8(weighted_divergences(log_s, log_t, stats_weights, parameters, KINDS)[0])
        # Hard labels and statistics are defined at T = 1, divergences at T.
        p1 = p_s  # the student at T = 1
        if (HARD or STATS) and (TEMPERED or len(KINDS) == 0):
            # Compiled only where the probabilities of the divergence are not those at T = 1.
            p1 = exp(z_s - lse1_s)
        if SMOOTHED:
            z_sum += reduce_by_8(tl.where(columns < V, z_s, 0.0))
        # entropies are sums of p log p; 0 log 0 = 0 where a logit is -inf
        if STATS:
            if TEMPERED:
                log_s = z_s - lse1_s
            entropy_s += reduce_by_8(tl.where(p1 > 0.0, p1 * log_s, 0.0))
            if HAS_TEACHER:
                if TEMPERED:
                    log_t = z_t - lse1_t
                    stats_f += reduce_by_8(weighted_divergences(log_s, log_t, stats_weights, parameters, KINDS)[0])
                if TEMPERED or len(KINDS) == 0:
                    p_t = exp(log_t)
                entropy_t += reduce_by_8(tl.where(p_t > 0.0, p_t * log_t, 0.0))
                # Agreement of the two argmaxes without an index: a column that is both tops adds 1, one that is a
                # single model's adds 2. The row's total is 1 only where exactly one column is the top of both
                # (agreement_part).
                top_s = z_s == student_max
                top_t = z_t == teacher_max
                top_count += reduce_by_8(tl.where(top_s & top_t, 1.0, tl.where(top_s | top_t, 2.0, 0.0)))
        if GRADIENT:
            # The chain back to the raw logits: through the softmax, the temperature, the scale and the soft cap.
            if NEEDS_G_SUM:
                g = logit_gradient(g, p_s, sums, EXACT_WHEN_CONFIDENT)
            g *= inverse_t
            if HARD:
                g += hard_gradient(p1, columns, label, lse1_s, whole_vocab, hard, SMOOTHED, Z_LOSS)
            g = raw_logit_gradient(g, z_s, scale, transform, SCALED, CAPPED)
            # The gradient's one rounding to 16 bits. Columns beyond V, padding of the buffer's rows, stay unwritten.
            tl.store(gradient_ptr + columns, g.to(gradient_ptr.dtype.element_ty), mask=columns < V)

    # No divergence is negative; rounding may leave the sum of two nearly equal distributions just below 0.
    loss = clamp_at_zero(tl.sum(f_sum))
    any_capped = 0.0
    if token_caps is not None:
        if NEEDS_G_SUM:
            loss += at_caps
            any_capped = tl.where(capped != 0, 1.0, 0.0)
        else:
            # One divergence alone, whose value is known only now: beyond the cap its gradient is taken back.
            tl.static_assert(len(KINDS) == 1)
            cap = weights[0] * token_caps[0]
            any_capped = tl.where(loss > cap, 1.0, 0.0)
            if GRADIENT:  # noqa: SIM102 - known when compiled, unlike the next condition
                if loss > cap:
                    tl.debug_barrier()  # other threads stored what these zeros replace
                    zero_row(gradient_ptr, V, blocks, tl.arange(0, TILE)[None, :], BLOCK)
            loss = tl.where(loss > cap, cap, loss)
    divergence = loss
    if clip_ptr is not None:
        whole = clamp_at_zero(tl.sum(whole_f))
        store_clipped(clip_ptr, stats_stride, row, any_capped, whole, loss * (stats_weights[0] / weights[0]))
        divergence = whole
    if TEMPERED:
        divergence = clamp_at_zero(tl.sum(stats_f))
    if HARD:
        # The log sum of exponentials belongs to the row, not to these columns: one rank adds it.
        row_lse = lse1_s * owns_row_terms
        loss += hard_loss(student_label, tl.sum(z_sum), lse1_s, row_lse, whole_vocab, hard, SMOOTHED, Z_LOSS)
    # Only the loss is scaled: statistics are of the token, whatever its weight.
    tl.store(loss_ptr + row, loss * scale)
    if STATS:
        agreement = agreement_part(tl.sum(top_count), V, whole_vocab)
        entropies = -tl.sum(entropy_s), -tl.sum(entropy_t)
        store_stats(
            stats_ptr,
            stats_stride,
            row,
            (divergence, -student_label, entropies[0], entropies[1], agreement, student_label, teacher_label),
        )


def row_normalisers(
    student: ChunkLogits,
    other: ChunkLogits,
    inverse_t: float,
    teacher_inverse_t: float | None = None,
    **flags: bool,
) -> torch.Tensor:
    """Return the normalisers of both models' rows, fp32 [6, n].

    Args:
        student: relative logits, [n, V].
        other: the teacher's, or the student's again where there is none.
        inverse_t: 1 / T of the divergences.
        teacher_inverse_t: that of the teacher, if it is another.
        flags: constants of the kernel: TEMPERED, HARD, HAS_TEACHER, STATS.
    """
    n, vocab = student.values.shape
    log_normalisers = torch.full((6, n), -float("inf"), dtype=torch.float32, device=student.values.device)
    tiles = cdiv(vocab, TILE)
    _row_normalisers_kernel[(n,)](
        student[1:],
        other[1:],
        log_normalisers,
        tiles,
        log_normalisers.stride(0),
        inverse_t,
        teacher_inverse_t,
        **flags,
        TILES=next_power_of_2(tiles),
        # one warp: some hundred numbers a row, and no exchange between warps
        num_warps=1,
    )
    return log_normalisers


def launch_row_loss(
    student: ChunkLogits, teacher: ChunkLogits | None, objective: Objective, call: RowCall
) -> torch.Tensor:
    """Launch the row kernel over the n rows of `student`; return their log sums of exponentials, fp32 [n].

    Args:
        student: the student's relative logits, [n, V].
        teacher: the teacher's relative logits, [n, V], or None.
        objective: terms of the loss and its settings.
        call: labels, scales and outputs.
    """
    n, vocab = student.values.shape
    if n == 0:
        return call.loss.new_empty(0)
    other = student if teacher is None else teacher
    flags = {
        "TEMPERED": objective.tempered,
        "HARD": objective.hard_weight != 0.0,
        "HAS_TEACHER": teacher is not None,
        "STATS": call.stats is not None,
    }
    log_normalisers = row_normalisers(student, other, *objective.inverse_temperatures, **flags)
    # Without a gradient nothing is stored, and the kernel gets any valid pointer.
    out = student.values if call.gradient is None else call.gradient
    sum_first = objective.needs_sums(with_gradient=call.gradient is not None)
    # With two sweeps, wide steps (32 tiles, 32 warps) leave one row at a time on a multiprocessor, so that more of
    # each row is still in L2 when the second sweep comes. A single sweep finds nothing there and takes narrow ones.
    most = TWO_SWEEPS if call.stats is None else TWO_SWEEPS // 2  # whose sums take registers
    block = min(most, max(next_power_of_2(cdiv(vocab, TILE)), ONE_SWEEP)) if sum_first else ONE_SWEEP
    _row_kernel[(n,)](
        tuple(student[:2]),
        tuple(other[:2]),
        out,
        call.tokens,
        call.outputs,
        (log_normalisers, None),
        call.clip,
        (vocab, vocab, cdiv(vocab, TILE)),
        (
            student.values.stride(0),
            other.values.stride(0),
            out.stride(0),
            call.stats_stride,
            log_normalisers.stride(0),
        ),
        *objective.inverse_temperatures,
        objective.weights,
        objective.parameters,
        *objective.caps,
        objective.divergence_weights,
        (objective.hard_weight, objective.label_smoothing, objective.z_loss),
        objective.transform,
        1.0,  # the program adds the terms of a row that belong to no column
        KINDS=objective.codes,
        EXACT_WHEN_CONFIDENT=objective.stable_top,
        GRADIENT=call.gradient is not None,
        NEEDS_G_SUM=sum_first,
        SUM_PASS=False,
        TILE=TILE,
        BLOCK=block,
        num_warps=min(block, MOST_THREADS // device_facts(call.loss.device).warp_size),
        **flags | objective.hard_label_flags | objective.transform_flags,
    )
    return log_normalisers[2]
