"""Row kernel: relative logits of both models to losses, statistics and, in place, the student's gradient.

A small kernel reduces the tiles' shifts and totals to the normalisers of a row over this rank's columns; ranks that
share the vocabulary (shards.py) combine theirs. Then one program a row sweeps its columns: with `l = log p`
and `p = exp(l)` of both models per element, the table in divergence.py gives `f` and `g`. Divergences whose `sum(g)` is
not known beforehand (all but forward KL) take one more sweep first, whose sums are added up over the ranks.

Bytes a row, 16-bit logits: 4 V read and 2 V written; twice the reads with the extra sweep.
"""

from __future__ import annotations

import torch

from distill_kernels.launch import cdiv, next_power_of_2, tl, triton
from distill_kernels.layers.fast_math import exp
from distill_kernels.losses import terms
from distill_kernels.losses.projection import TILE, Logits
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
    store_stats,
    to_int32,
    weighted_divergences,
    zero_row,
)
from distill_kernels.losses.shards import VocabShard, join_normalisers
from distill_kernels.losses.terms import Objective


@triton.jit
def _all_normalisers(
    student,
    teacher,
    row,
    tiles,
    inverse_t,
    TEMPERED: tl.constexpr,
    HARD: tl.constexpr,
    HAS_TEACHER: tl.constexpr,
    STATS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Return a row's maximum and log sum of exponentials at T and at 1, of the student and then of the teacher."""
    start = row * tiles
    student_shift, student_total, student_hard = student
    teacher_shift, teacher_total, teacher_hard = teacher
    student_max, lse_s = normaliser(student_shift + start, student_total + start, tiles, inverse_t, TILES)
    lse1_s = lse_s
    lse_t = lse_s
    lse1_t = lse_s
    teacher_max = student_max
    if TEMPERED and (HARD or STATS):
        _, lse1_s = normaliser(student_shift + start, student_hard + start, tiles, 1.0, TILES)
    if HAS_TEACHER:
        teacher_max, lse_t = normaliser(teacher_shift + start, teacher_total + start, tiles, inverse_t, TILES)
        lse1_t = lse_t
        if TEMPERED and STATS:
            _, lse1_t = normaliser(teacher_shift + start, teacher_hard + start, tiles, 1.0, TILES)
    return student_max, lse_s, lse1_s, teacher_max, lse_t, lse1_t


@triton.jit
def _row_normalisers_kernel(
    student,
    teacher,
    norms_ptr,
    tiles,
    norms_stride,
    inverse_t,
    TEMPERED: tl.constexpr,
    HARD: tl.constexpr,
    HAS_TEACHER: tl.constexpr,
    STATS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Store one row's six normalisers over this rank's columns, for the ranks to combine."""
    norms = _all_normalisers(
        student, teacher, tl.program_id(0).to(tl.int64), tiles, inverse_t, TEMPERED, HARD, HAS_TEACHER, STATS, TILES
    )
    for i in tl.static_range(6):
        tl.store(norms_ptr + i * norms_stride + tl.program_id(0), norms[i])


@triton.jit
def _row_kernel(
    student,
    teacher,
    gradient_ptr,
    tokens,
    outputs,
    norms_and_sums,
    sizes,
    strides,
    inverse_t,
    weights,
    parameters,
    stats_weights,
    hard,
    student_scale,
    inverse_cap,
    owns_row_terms,
    KINDS: tl.constexpr,
    TEMPERED: tl.constexpr,
    HARD: tl.constexpr,
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_TEACHER: tl.constexpr,
    STABLE_TOP: tl.constexpr,
    GRADIENT: tl.constexpr,
    STATS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one row over this rank's V of `whole_vocab` columns; loss and statistics are these columns' parts.

    With `sums_ptr` the row is swept twice: first without `GRADIENT`, which stores the sums that `logit_gradient` needs
    there, over this rank's columns; then with it, which loads the sums over all ranks. The first computes the loss.

    student, teacher: relative logits [n, V] and their tiles' shifts. tokens: labels, row scales, indices of the rows.
    outputs: losses [N], statistics [7, N]. norms_and_sums: fp32 [6, n] of `row_normalisers`, fp32 [3, n] or None.
    weights, parameters, stats_weights: by term of KINDS. hard: weight, label smoothing, z-loss. owns_row_terms: 1 or 0.
    """
    student_ptr, student_shift_ptr = student
    teacher_ptr, teacher_shift_ptr = teacher
    labels_ptr, scale_ptr, rows_ptr = tokens
    loss_ptr, stats_ptr = outputs
    norms_ptr, sums_ptr = norms_and_sums
    V, whole_vocab, tiles = sizes
    student_stride, teacher_stride, gradient_stride, stats_stride, norms_stride = strides
    HAS_SUMS: tl.constexpr = sums_ptr is not None
    MAKES_SUMS: tl.constexpr = HAS_SUMS and not GRADIENT
    MAKES_LOSS: tl.constexpr = not (HAS_SUMS and GRADIENT)  # this sweep computes loss and statistics
    chunk_row = tl.program_id(0).to(tl.int64)  # within the chunk
    row = chunk_row
    if rows_ptr is not None:
        row = tl.load(rows_ptr + chunk_row)
    scale = tl.load(scale_ptr + row)
    student_ptr += chunk_row * student_stride
    gradient_ptr += chunk_row * gradient_stride
    blocks = tl.cdiv(tiles, BLOCK)
    tile_columns = tl.arange(0, TILE)[None, :]
    if scale == 0.0:
        if MAKES_LOSS:
            tl.store(loss_ptr + row, 0.0)
        if MAKES_SUMS:
            for i in tl.static_range(3 if STABLE_TOP else 1):
                tl.store(sums_ptr + i * norms_stride + chunk_row, 0.0)
        if STATS and MAKES_LOSS:
            store_stats(stats_ptr, stats_stride, row, (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
        if GRADIENT:
            zero_row(gradient_ptr, V, blocks, tile_columns, BLOCK)
        return

    teacher_ptr += chunk_row * teacher_stride
    student_max = tl.load(norms_ptr + chunk_row)
    lse_s = tl.load(norms_ptr + norms_stride + chunk_row)
    lse1_s = tl.load(norms_ptr + 2 * norms_stride + chunk_row)
    teacher_max = tl.load(norms_ptr + 3 * norms_stride + chunk_row)
    lse_t = tl.load(norms_ptr + 4 * norms_stride + chunk_row)
    lse1_t = tl.load(norms_ptr + 5 * norms_stride + chunk_row)
    student_shift_ptr += chunk_row * tiles
    teacher_shift_ptr += chunk_row * tiles
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
        if GRADIENT:
            tl.debug_barrier()  # gradients overwrite logits that all warps must have read

    f_sum = tl.zeros((BLOCK, TILE // 8), tl.float32)
    g_sum = f_sum
    others_g = f_sum
    others_p = f_sum
    z_sum = f_sum
    stats_f = f_sum
    entropy_s = f_sum
    entropy_t = f_sum
    top_count = f_sum
    sums = 0.0, 0.0, 0.0  # sum of g; sums of g and of p_s without a token of p_s > 1/2
    if HAS_SUMS and GRADIENT:
        sums = tl.load(sums_ptr + chunk_row), 0.0, 0.0
        if STABLE_TOP:
            sums = (
                sums[0],
                tl.load(sums_ptr + norms_stride + chunk_row),
                tl.load(sums_ptr + 2 * norms_stride + chunk_row),
            )
    for step in range(blocks):
        block = step
        if GRADIENT:
            block = blocks - 1 - step
        tile = block * BLOCK + tl.arange(0, BLOCK)
        columns = tile[:, None] * TILE + tile_columns
        z_s = load_tiles(student_ptr, student_shift_ptr, tile, columns, V, tiles)
        z_t = z_s
        if HAS_TEACHER:
            z_t = load_tiles(teacher_ptr, teacher_shift_ptr, tile, columns, V, tiles)
        log_s = z_s * inverse_t - lse_s
        log_t = z_t * inverse_t - lse_t
        g = tl.zeros((BLOCK, TILE), tl.float32)
        p_s = g
        p_t = g
        if len(KINDS) > 0:
            f, g, p_s, p_t = weighted_divergences(log_s, log_t, weights, parameters, KINDS)
            if MAKES_LOSS:
                f_sum += reduce_by_8(f)
            if MAKES_SUMS:
                g_sum += reduce_by_8(g)
                if STABLE_TOP:
                    others_g += reduce_by_8(tl.where(p_s > 0.5, 0.0, g))
                    others_p += reduce_by_8(tl.where(p_s > 0.5, 0.0, p_s))
        p1 = p_s  # the student at T = 1
        if (HARD or STATS) and (TEMPERED or len(KINDS) == 0):
            p1 = exp(z_s - lse1_s)
        if MAKES_LOSS and SMOOTHED:
            z_sum += reduce_by_8(tl.where(columns < V, z_s, 0.0))
        if MAKES_LOSS and STATS:
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
                top_s = z_s == student_max
                top_t = z_t == teacher_max
                top_count += reduce_by_8(tl.where(top_s & top_t, 1.0, tl.where(top_s | top_t, 2.0, 0.0)))
        if GRADIENT:
            if HAS_SUMS:
                g = logit_gradient(g, p_s, sums, STABLE_TOP)
            g *= inverse_t
            if HARD:
                g += hard_gradient(p1, columns, label, lse1_s, whole_vocab, hard, SMOOTHED, Z_LOSS)
            g = raw_logit_gradient(g, z_s, scale, student_scale, inverse_cap, SCALED, CAPPED)
            tl.store(gradient_ptr + columns, g.to(gradient_ptr.dtype.element_ty), mask=columns < V)

    if MAKES_SUMS:
        tl.store(sums_ptr + chunk_row, tl.sum(g_sum))
        if STABLE_TOP:
            tl.store(sums_ptr + norms_stride + chunk_row, tl.sum(others_g))
            tl.store(sums_ptr + 2 * norms_stride + chunk_row, tl.sum(others_p))
    if MAKES_LOSS:
        loss = clamp_at_zero(tl.sum(f_sum))
        divergence = loss
        if TEMPERED:
            divergence = clamp_at_zero(tl.sum(stats_f))
        if HARD:
            row_lse = lse1_s * owns_row_terms
            loss += hard_loss(student_label, tl.sum(z_sum), lse1_s, row_lse, whole_vocab, hard, SMOOTHED, Z_LOSS)
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


def row_normalisers(student: Logits, other: Logits, temperature: float, **flags: bool) -> torch.Tensor:
    """Return the normalisers of both models' rows over this rank's columns (perhaps none), fp32 [6, n].

    Args:
        student: relative logits, [n, V].
        other: the teacher's, or the student's again where there is none.
        temperature: T of the divergences.
        flags: constants of the kernel: TEMPERED, HARD, HAS_TEACHER, STATS.
    """
    n, vocab = student.values.shape
    norms = torch.full((6, n), -float("inf"), dtype=torch.float32, device=student.values.device)
    if vocab:
        tiles = cdiv(vocab, TILE)
        _row_normalisers_kernel[(n,)](
            student[1:],
            other[1:],
            norms,
            tiles,
            norms.stride(0),
            1.0 / temperature,
            **flags,
            TILES=next_power_of_2(tiles),
            num_warps=1,
        )
    return norms


def launch_row_loss(
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
    shard: VocabShard,
) -> torch.Tensor:
    """Launch the row kernel over the n rows of `student`; return their log sums of exponentials, fp32 [n].

    Args:
        student: the student's relative logits, [n, V].
        teacher: the teacher's, or None.
        objective: the loss.
        labels, row_scale, loss: of all tokens, [N].
        rows: int64 [n], which tokens these rows are; None: the first n of what is passed.
        stats: fp32 [7, N] with rows in order, or None.
        gradient: [n, V] in the dtype to compute; may be the memory of `student.values`. None: no gradient.
        shard: whose columns these are; V may be 0, and `labels` count from the first of them
            (`VocabShard.local_labels`). `loss` and `stats` become parts, for the ranks to add up; `gradient` is whole.
    """
    o = objective
    n, vocab = student.values.shape
    if n == 0:
        return loss.new_empty(0)
    other = student if teacher is None else teacher
    flags = {
        "TEMPERED": o.temperature != 1.0,
        "HARD": o.hard_weight != 0.0,
        "HAS_TEACHER": teacher is not None,
        "STATS": stats is not None,
    }
    norms = join_normalisers(shard.ranks.all_gather(row_normalisers(student, other, o.temperature, **flags)))
    sums = None

    def launch(gradient: torch.Tensor | None) -> None:
        if vocab == 0:
            return
        out = student.values if gradient is None else gradient
        _row_kernel[(n,)](
            tuple(student[:2]),
            tuple(other[:2]),
            out,
            (labels, row_scale, rows),
            (loss, stats),
            (norms, sums),
            (vocab, shard.vocab, cdiv(vocab, TILE)),
            (
                student.values.stride(0),
                other.values.stride(0),
                out.stride(0),
                0 if stats is None else stats.stride(0),
                norms.stride(0),
            ),
            1.0 / o.temperature,
            o.weights,
            o.parameters,
            o.divergence_weights,
            (o.hard_weight, o.label_smoothing, o.z_loss),
            o.student_scale,
            1.0 / o.student_softcap if o.student_softcap else 0.0,
            1.0 if shard.owns_row_terms else 0.0,
            KINDS=o.kinds,
            SMOOTHED=o.label_smoothing != 0.0,
            Z_LOSS=o.z_loss != 0.0,
            SCALED=o.student_scale != 1.0,
            CAPPED=o.student_softcap != 0.0,
            STABLE_TOP=o.stable_top,
            GRADIENT=gradient is not None,
            TILE=TILE,
            BLOCK=8,
            num_warps=8,
            **flags,
        )

    if gradient is not None and any(kind != terms.FORWARD_KL for kind in o.kinds):
        sums = torch.zeros(3, n, dtype=torch.float32, device=loss.device)
        launch(None)
        shard.ranks.all_reduce_(sums)
    launch(gradient)
    return norms[2]
