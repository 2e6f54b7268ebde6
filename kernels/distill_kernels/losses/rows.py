"""The row kernel: from relative logits of both models to losses, statistics and, in place, the student's gradient.

One program a row. It joins the tiles' shifts and totals to the row's normalisers, then sweeps the vocabulary: with
`l = log p` and `p = exp(l)` of both models per element, the table in divergence.py gives `f` and `g`. Divergences whose
`sum(g)` is not known beforehand (all but forward KL) need a sweep of their own for it; the gradient's sweep then runs
backwards, to find the row's end still in L2.

Bytes a row, 16-bit logits: 4 V read and 2 V written; twice the reads, less what L2 keeps, with the extra sweep.

Where the vocabulary is cut over ranks (shards.py), a small kernel leaves each rank's normalisers for the ranks to join;
the same sweeps then make each rank's part of the loss, with `sum(g)` added up over the ranks between them.
"""

from __future__ import annotations

import torch

from distill_kernels.launch import HAS_TRITON, cdiv, next_power_of_2, tl, triton
from distill_kernels.layers.fast_math import exp, log_of_normal, reciprocal
from distill_kernels.losses import divergence, terms
from distill_kernels.losses.projection import TILE, Logits
from distill_kernels.losses.shards import ON_ANOTHER_RANK, VocabShard, join_normalisers
from distill_kernels.losses.terms import Objective

if HAS_TRITON:
    FORWARD_KL = tl.constexpr(terms.FORWARD_KL)
    REVERSE_KL = tl.constexpr(terms.REVERSE_KL)
    JSD = tl.constexpr(terms.JSD)
    SKEW_FORWARD_KL = tl.constexpr(terms.SKEW_FORWARD_KL)
    SKEW_REVERSE_KL = tl.constexpr(terms.SKEW_REVERSE_KL)
    TVD = tl.constexpr(terms.TVD)
    MOST_LOG_RATIO = tl.constexpr(divergence.MOST_LOG_RATIO)
    ELSEWHERE = tl.constexpr(ON_ANOTHER_RANK)


@triton.jit
def _log_ratio_product(p, log_p, log_q):
    return tl.where(p > 0.0, p * (log_p - log_q), 0.0)


@triton.jit
def _one_divergence(KIND: tl.constexpr, share, log_s, log_t, p_s, p_t):
    """`f` and `g` of one divergence, elementwise: `reference_terms` in Triton."""
    if KIND == FORWARD_KL:
        g = p_s - p_t
        f = _log_ratio_product(p_t, log_t, log_s) + g
    elif KIND == REVERSE_KL:
        g = _log_ratio_product(p_s, log_s, log_t)
        f = g - p_s + p_t
    elif KIND == TVD:
        difference = p_s - p_t
        f = 0.5 * tl.abs(difference)
        g = 0.5 * tl.where(difference > 0.0, p_s, tl.where(difference < 0.0, -p_s, 0.0))
    else:
        d = log_t - log_s
        d = tl.where(d == d, d, 0.0)  # both -inf
        d = tl.maximum(tl.minimum(d, MOST_LOG_RATIO), -MOST_LOG_RATIO)
        e = exp(d)
        teacher_share = share
        if KIND == SKEW_REVERSE_KL:
            teacher_share = 1.0 - share
        q = 1.0 + teacher_share * (e - 1.0)
        log_q = log_of_normal(q)
        if KIND == JSD:
            g = (share - 1.0) * p_s * log_q
            f = share * p_t * (d - log_q) + g
        else:
            m = p_s + teacher_share * (p_t - p_s)
            if KIND == SKEW_REVERSE_KL:
                f = m - p_s - p_s * log_q
                g = p_s * (share * (1.0 - reciprocal(q)) - log_q)
            else:
                tl.static_assert(KIND == SKEW_FORWARD_KL)
                f = p_t * (d - log_q) - p_t + m
                g = (1.0 - share) * p_s * (1.0 - e * reciprocal(q))
    return f, g


@triton.jit
def _all_divergences(log_s, log_t, weights, shares, KINDS: tl.constexpr):
    """Weighted sums of `f` and of `g` over the terms, `p_s` and `p_t`."""
    p_s = exp(log_s)
    p_t = exp(log_t)
    f = tl.zeros_like(p_s)
    g = tl.zeros_like(p_s)
    for i in tl.static_range(len(KINDS)):
        f_i, g_i = _one_divergence(KINDS[i], shares[i], log_s, log_t, p_s, p_t)
        f += weights[i] * f_i
        g += weights[i] * g_i
    return f, g, p_s, p_t


@triton.jit
def _normaliser(shift_ptr, total_ptr, tiles, inverse_t, TILES: tl.constexpr):
    """Row maximum and `log sum exp(z / T)` from the row's tiles."""
    tile = tl.arange(0, TILES)
    total = tl.load(total_ptr + tile, mask=tile < tiles, other=0.0)
    shift = tl.load(shift_ptr + tile, mask=tile < tiles, other=0.0)
    maximum = tl.max(tl.where(total > 0.0, shift, -float("inf")), 0)
    parts = tl.where(total > 0.0, total * tl.exp((shift - maximum) * inverse_t), 0.0)
    return maximum, maximum * inverse_t + tl.log(tl.sum(parts, 0))


@triton.jit
def _load(values_ptr, shift_ptr, tile, columns, V, tiles):
    """Logits [BLOCK, TILE] of a row; -inf beyond the vocabulary."""
    values = tl.load(values_ptr + columns, mask=columns < V, other=-float("inf")).to(tl.float32)
    return values + tl.load(shift_ptr + tile, mask=tile < tiles, other=0.0)[:, None]


@triton.jit
def _logit(values_ptr, shift_ptr, column, V, TILE: tl.constexpr):
    """One logit of a row; -inf outside of the vocabulary."""
    inside = (column >= 0) & (column < V)
    value = tl.load(values_ptr + column, mask=inside, other=-float("inf")).to(tl.float32)
    return value + tl.load(shift_ptr + column // TILE, mask=inside, other=0.0)


@triton.jit
def _eights(x):
    """Sums over the eight neighbours that a thread holds: what adds them up needs an eighth of the registers."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 8, 8)), 2)


@triton.jit
def _all_normalisers(
    student_shift_ptr, student_total_ptr, student_hard_ptr, teacher_shift_ptr, teacher_total_ptr, teacher_hard_ptr,
    tiles, inverse_t,
    TEMPERED: tl.constexpr, HARD: tl.constexpr, HAS_TEACHER: tl.constexpr, STATS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Maximum, log sum of exps at T and at T = 1 of a row, of the student and of the teacher."""
    student_max, lse_s = _normaliser(student_shift_ptr, student_total_ptr, tiles, inverse_t, TILES)
    lse1_s = lse_s
    lse_t = lse_s
    lse1_t = lse_s
    teacher_max = student_max
    if TEMPERED and (HARD or STATS):
        _, lse1_s = _normaliser(student_shift_ptr, student_hard_ptr, tiles, 1.0, TILES)
    if HAS_TEACHER:
        teacher_max, lse_t = _normaliser(teacher_shift_ptr, teacher_total_ptr, tiles, inverse_t, TILES)
        lse1_t = lse_t
        if TEMPERED and STATS:
            _, lse1_t = _normaliser(teacher_shift_ptr, teacher_hard_ptr, tiles, 1.0, TILES)
    return student_max, lse_s, lse1_s, teacher_max, lse_t, lse1_t


@triton.jit
def _fold_rows_kernel(
    student_shift_ptr, student_total_ptr, student_hard_ptr, teacher_shift_ptr, teacher_total_ptr, teacher_hard_ptr,
    norms_ptr, tiles, norms_stride, inverse_t,
    TEMPERED: tl.constexpr, HARD: tl.constexpr, HAS_TEACHER: tl.constexpr, STATS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One row's six normalisers over the columns of this rank, for the ranks to join."""
    start = tl.program_id(0).to(tl.int64) * tiles
    norms = _all_normalisers(
        student_shift_ptr + start, student_total_ptr + start, student_hard_ptr + start,
        teacher_shift_ptr + start, teacher_total_ptr + start, teacher_hard_ptr + start,
        tiles, inverse_t, TEMPERED, HARD, HAS_TEACHER, STATS, TILES,
    )  # fmt: skip
    for i in tl.static_range(6):
        tl.store(norms_ptr + i * norms_stride + tl.program_id(0), norms[i])


@triton.jit
def _row_kernel(
    student_ptr, student_shift_ptr, student_total_ptr, student_hard_ptr,
    teacher_ptr, teacher_shift_ptr, teacher_total_ptr, teacher_hard_ptr,
    gradient_ptr, labels_ptr, scale_ptr, rows_ptr, loss_ptr, stats_ptr, norms_ptr, mean_ptr,
    V, whole_vocab, tiles, student_stride, teacher_stride, gradient_stride, stats_stride, norms_stride,
    inverse_t, weights, shares, stats_weights, hard_weight, smoothing, z_loss, student_scale, inverse_cap, first_rank,
    KINDS: tl.constexpr, TEMPERED: tl.constexpr, HARD: tl.constexpr, SMOOTHED: tl.constexpr, Z_LOSS: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, HAS_TEACHER: tl.constexpr, HAS_LABELS: tl.constexpr,
    HAS_ROWS: tl.constexpr, SWEEP_FIRST: tl.constexpr, GRADIENT: tl.constexpr, STATS: tl.constexpr,
    SHARDED: tl.constexpr, HAS_MEAN: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One row. `SHARDED`: its normalisers are given, and loss and statistics are this rank's parts of them.

    `HAS_MEAN` (with `SHARDED`): without `GRADIENT`, `sum(g)` over this rank's columns goes to `mean_ptr`; with it, the
    sum over all ranks comes from there, and loss and statistics were made before.
    """
    FIGURES: tl.constexpr = not (HAS_MEAN and GRADIENT)  # loss and statistics are made here
    here = tl.program_id(0).to(tl.int64)  # within the chunk
    row = here
    if HAS_ROWS:
        row = tl.load(rows_ptr + here)
    scale = tl.load(scale_ptr + row)
    student_ptr += here * student_stride
    gradient_ptr += here * gradient_stride
    blocks = tl.cdiv(tiles, BLOCK)
    within = tl.arange(0, TILE)[None, :]
    if scale == 0.0:
        if FIGURES:
            tl.store(loss_ptr + row, 0.0)
        if HAS_MEAN and not GRADIENT:
            tl.store(mean_ptr + here, 0.0)
        if STATS and FIGURES:
            for i in tl.static_range(7):
                tl.store(stats_ptr + i * stats_stride + row, 0.0)
        if GRADIENT:
            for block in range(blocks):
                columns = (block * BLOCK + tl.arange(0, BLOCK))[:, None] * TILE + within
                nothing = tl.zeros((BLOCK, TILE), tl.float32)
                tl.store(gradient_ptr + columns, nothing.to(gradient_ptr.dtype.element_ty), mask=columns < V)
        return

    student_shift_ptr += here * tiles
    teacher_ptr += here * teacher_stride
    teacher_shift_ptr += here * tiles
    if SHARDED:
        student_max = tl.load(norms_ptr + here)
        lse_s = tl.load(norms_ptr + norms_stride + here)
        lse1_s = tl.load(norms_ptr + 2 * norms_stride + here)
        teacher_max = tl.load(norms_ptr + 3 * norms_stride + here)
        lse_t = tl.load(norms_ptr + 4 * norms_stride + here)
        lse1_t = tl.load(norms_ptr + 5 * norms_stride + here)
    else:
        student_max, lse_s, lse1_s, teacher_max, lse_t, lse1_t = _all_normalisers(
            student_shift_ptr, student_total_ptr + here * tiles, student_hard_ptr + here * tiles,
            teacher_shift_ptr, teacher_total_ptr + here * tiles, teacher_hard_ptr + here * tiles,
            tiles, inverse_t, TEMPERED, HARD, HAS_TEACHER, STATS, TILES,
        )  # fmt: skip
    label = tl.full((), -1, tl.int32)
    student_label = 0.0
    teacher_label = 0.0
    if HAS_LABELS:
        label = tl.load(labels_ptr + row).to(tl.int32)
        student_label = _logit(student_ptr, student_shift_ptr, label, V, TILE) - lse1_s
        if HAS_TEACHER and STATS:
            teacher_label = _logit(teacher_ptr, teacher_shift_ptr, label, V, TILE) - lse1_t
        if SHARDED:
            student_label = tl.where(label == ELSEWHERE, 0.0, student_label)
            teacher_label = tl.where(label == ELSEWHERE, 0.0, teacher_label)
        if GRADIENT:
            tl.debug_barrier()  # gradients take the place of what every warp has read

    f_sum = tl.zeros((BLOCK, TILE // 8), tl.float32)
    g_sum = f_sum
    z_sum = f_sum
    stat_f = f_sum
    entropy_s = f_sum
    entropy_t = f_sum
    common_top = f_sum
    g_mean = 0.0
    if HAS_MEAN and GRADIENT:
        g_mean = tl.load(mean_ptr + here)
    for sweep in tl.static_range(0 if SWEEP_FIRST else 1, 2 if GRADIENT else 1):
        for count in range(blocks):
            block = blocks - 1 - count if sweep == 1 else count
            tile = block * BLOCK + tl.arange(0, BLOCK)
            columns = tile[:, None] * TILE + within
            z_s = _load(student_ptr, student_shift_ptr, tile, columns, V, tiles)
            z_t = z_s
            if HAS_TEACHER:
                z_t = _load(teacher_ptr, teacher_shift_ptr, tile, columns, V, tiles)
            log_s = z_s * inverse_t - lse_s
            log_t = z_t * inverse_t - lse_t
            g = tl.zeros((BLOCK, TILE), tl.float32)
            p_s = g
            p_t = g
            if len(KINDS) > 0:
                f, g, p_s, p_t = _all_divergences(log_s, log_t, weights, shares, KINDS)
                if FIGURES and (sweep == 0 or not SWEEP_FIRST):
                    f_sum += _eights(f)
                if sweep == 0:
                    g_sum += _eights(g)
            p1 = p_s  # the student at T = 1
            if (HARD or STATS) and (TEMPERED or len(KINDS) == 0):
                p1 = exp(z_s - lse1_s)
            if FIGURES and (sweep == 0 or not SWEEP_FIRST) and SMOOTHED:
                z_sum += _eights(tl.where(columns < V, z_s, 0.0))
            if FIGURES and (sweep == 0 or not SWEEP_FIRST) and STATS:
                if TEMPERED:
                    log_s = z_s - lse1_s
                entropy_s += _eights(tl.where(p1 > 0.0, p1 * log_s, 0.0))
                if HAS_TEACHER:
                    if TEMPERED:
                        log_t = z_t - lse1_t
                        stat_f += _eights(_all_divergences(log_s, log_t, stats_weights, shares, KINDS)[0])
                    if TEMPERED or len(KINDS) == 0:
                        p_t = exp(log_t)
                    entropy_t += _eights(tl.where(p_t > 0.0, p_t * log_t, 0.0))
                    both = (z_s == student_max) & (z_t == teacher_max)
                    common_top += _eights(tl.where(both, 1.0, 0.0))
            if sweep == 1:
                if SWEEP_FIRST or HAS_MEAN:
                    g -= p_s * g_mean
                g *= inverse_t
                if HARD:
                    if Z_LOSS:
                        p1 *= 1.0 + 2.0 * z_loss * lse1_s
                    if SMOOTHED:
                        p1 -= smoothing / whole_vocab
                    g += hard_weight * (p1 - tl.where(columns == label, 1.0 - smoothing, 0.0))
                g *= scale
                if SCALED:
                    g *= student_scale
                if CAPPED:
                    g *= 1.0 - (z_s * inverse_cap) * (z_s * inverse_cap)
                tl.store(gradient_ptr + columns, g.to(gradient_ptr.dtype.element_ty), mask=columns < V)
        if sweep == 0:
            g_mean = tl.sum(g_sum)

    if HAS_MEAN and not GRADIENT:
        tl.store(mean_ptr + here, g_mean)
    if FIGURES:
        loss = tl.maximum(tl.sum(f_sum), 0.0)
        divergence = loss
        if TEMPERED:
            divergence = tl.maximum(tl.sum(stat_f), 0.0)
        if HARD:
            once = lse1_s  # what belongs to a row, not to its columns
            if SHARDED:
                once *= first_rank
            hard = -(1.0 - smoothing) * student_label
            if SMOOTHED:
                hard -= smoothing * (tl.sum(z_sum) / whole_vocab - once)
            if Z_LOSS:
                hard += z_loss * once * lse1_s
            loss += hard_weight * hard
        tl.store(loss_ptr + row, loss * scale)
        if STATS:
            tl.store(stats_ptr + row, divergence)
            tl.store(stats_ptr + stats_stride + row, -student_label)
            tl.store(stats_ptr + 2 * stats_stride + row, -tl.sum(entropy_s))
            tl.store(stats_ptr + 3 * stats_stride + row, -tl.sum(entropy_t))
            tl.store(stats_ptr + 4 * stats_stride + row, tl.max(tl.minimum(common_top, 1.0)))
            tl.store(stats_ptr + 5 * stats_stride + row, student_label)
            tl.store(stats_ptr + 6 * stats_stride + row, teacher_label)


def run_rows(
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
) -> None:
    """Launch the row kernel over the n rows of `student`.

    Args:
        student: the student's relative logits, [n, V].
        teacher: the teacher's, or None.
        objective: the loss.
        labels, row_scale, loss: of all tokens, [N].
        rows: int64 [n], which tokens these rows are; None: the first n of what is passed.
        stats: fp32 [7, N] with rows in order, or None.
        gradient: [n, V] in the dtype wanted; may be the memory of `student.values`. None: no gradient.
        shard: these are the columns that one rank holds, V may be 0, and `labels` count from its first one
            (`VocabShard.own_labels`). `loss` and `stats` become parts, for the ranks to add up; `gradient` is whole.
    """
    o = objective
    n, vocab = student.values.shape
    other = student if teacher is None else teacher
    tiles = cdiv(vocab, TILE)
    inverse_cap = 1.0 / o.student_softcap if o.student_softcap else 0.0
    if n == 0:
        return
    sweep_first = any(kind != terms.FORWARD_KL for kind in o.kinds)
    flags = {
        "TEMPERED": o.temperature != 1.0, "HARD": o.hard_weight != 0.0, "HAS_TEACHER": teacher is not None,
        "STATS": stats is not None, "TILES": next_power_of_2(tiles),
    }  # fmt: skip
    numbers = student[1:], other[1:]  # the tiles' shifts and totals
    norms = mean = None

    def launch(gradient: torch.Tensor | None, *, sweep_first: bool) -> None:
        if vocab == 0:
            return
        out = student.values if gradient is None else gradient
        _row_kernel[(n,)](
            student.values, *numbers[0], other.values, *numbers[1],
            out, labels, row_scale, rows, loss, stats, norms, mean,
            vocab, vocab if shard is None else shard.vocab, tiles, student.values.stride(0), other.values.stride(0),
            out.stride(0), 0 if stats is None else stats.stride(0), 0 if norms is None else norms.stride(0),
            1.0 / o.temperature, o.weights, o.parameters, o.divergence_weights,
            o.hard_weight, o.label_smoothing, o.z_loss, o.student_scale, inverse_cap,
            1.0 if shard is None or shard.speaks else 0.0,
            KINDS=o.kinds, SMOOTHED=o.label_smoothing != 0.0, Z_LOSS=o.z_loss != 0.0, SCALED=o.student_scale != 1.0,
            CAPPED=o.student_softcap != 0.0, HAS_LABELS=labels is not None, HAS_ROWS=rows is not None,
            SWEEP_FIRST=sweep_first, GRADIENT=gradient is not None, SHARDED=norms is not None,
            HAS_MEAN=mean is not None, TILE=TILE, BLOCK=8, num_warps=8, **flags,
        )  # fmt: skip

    if shard is not None:
        norms = torch.full((6, n), -float("inf"), dtype=torch.float32, device=loss.device)
        if vocab:
            _fold_rows_kernel[(n,)](
                *numbers[0], *numbers[1], norms, tiles, norms.stride(0), 1.0 / o.temperature, **flags, num_warps=1
            )
        norms = join_normalisers(shard.ranks.gather(norms))
        if sweep_first and gradient is not None:
            mean = torch.zeros(n, dtype=torch.float32, device=loss.device)
            launch(None, sweep_first=True)
            shard.ranks.add_(mean)
            sweep_first = False
    launch(gradient, sweep_first=sweep_first or gradient is None)
