"""The row kernel: from relative logits of both models to losses, statistics and, in place, the student's gradient.

One program a row. It joins the tiles' shifts and totals to the row's normalisers, then sweeps the vocabulary: with
`l = log p` and `p = exp(l)` of both models per element, the table in divergence.py gives `f` and `g`. Divergences whose
`sum(g)` is not known beforehand (all but forward KL) need a sweep of their own for it; the gradient's sweep then runs
backwards, to find the row's end still in L2.

Bytes a row, 16-bit logits: 4 V read and 2 V written; twice the reads, less what L2 keeps, with the extra sweep.
"""

from __future__ import annotations

import torch

from distill_kernels.launch import HAS_TRITON, cdiv, next_power_of_2, tl, triton
from distill_kernels.losses import divergence, terms
from distill_kernels.losses.projection import TILE, Logits
from distill_kernels.losses.terms import Objective

if HAS_TRITON:
    FORWARD_KL = tl.constexpr(terms.FORWARD_KL)
    REVERSE_KL = tl.constexpr(terms.REVERSE_KL)
    JSD = tl.constexpr(terms.JSD)
    SKEW_FORWARD_KL = tl.constexpr(terms.SKEW_FORWARD_KL)
    SKEW_REVERSE_KL = tl.constexpr(terms.SKEW_REVERSE_KL)
    TVD = tl.constexpr(terms.TVD)
    MOST_LOG_RATIO = tl.constexpr(divergence.MOST_LOG_RATIO)


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
        e = tl.exp(d)
        teacher_share = share
        if KIND == SKEW_REVERSE_KL:
            teacher_share = 1.0 - share
        q = 1.0 + teacher_share * (e - 1.0)
        log_q = tl.log(q)
        if KIND == JSD:
            g = (share - 1.0) * p_s * log_q
            f = share * p_t * (d - log_q) + g
        else:
            m = p_s + teacher_share * (p_t - p_s)
            if KIND == SKEW_REVERSE_KL:
                f = m - p_s - p_s * log_q
                g = p_s * (share * (1.0 - 1.0 / q) - log_q)
            else:
                tl.static_assert(KIND == SKEW_FORWARD_KL)
                f = p_t * (d - log_q) - p_t + m
                g = (1.0 - share) * p_s * (1.0 - e / q)
    return f, g


@triton.jit
def _all_divergences(log_s, log_t, weights, shares, KINDS: tl.constexpr):
    """Weighted sums of `f` and of `g` over the terms, `p_s` and `p_t`."""
    p_s = tl.exp(log_s)
    p_t = tl.exp(log_t)
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
def _row_kernel(
    student_ptr, student_shift_ptr, student_total_ptr, student_hard_ptr,
    teacher_ptr, teacher_shift_ptr, teacher_total_ptr, teacher_hard_ptr,
    gradient_ptr, labels_ptr, scale_ptr, rows_ptr, loss_ptr, stats_ptr,
    V, tiles, student_stride, teacher_stride, gradient_stride, stats_stride, inverse_t, weights, shares, stats_weights,
    hard_weight, smoothing, z_loss, student_scale, inverse_cap,
    KINDS: tl.constexpr, TEMPERED: tl.constexpr, HARD: tl.constexpr, SMOOTHED: tl.constexpr, Z_LOSS: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, HAS_TEACHER: tl.constexpr, HAS_LABELS: tl.constexpr,
    HAS_ROWS: tl.constexpr, SWEEP_FIRST: tl.constexpr, GRADIENT: tl.constexpr, STATS: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
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

    student_shift_ptr += here * tiles
    teacher_ptr += here * teacher_stride
    teacher_shift_ptr += here * tiles
    student_max, lse_s = _normaliser(student_shift_ptr, student_total_ptr + here * tiles, tiles, inverse_t, TILES)
    lse1_s = lse_s
    lse_t = lse_s
    lse1_t = lse_s
    teacher_max = student_max
    if TEMPERED and (HARD or STATS):
        _, lse1_s = _normaliser(student_shift_ptr, student_hard_ptr + here * tiles, tiles, 1.0, TILES)
    if HAS_TEACHER:
        teacher_max, lse_t = _normaliser(teacher_shift_ptr, teacher_total_ptr + here * tiles, tiles, inverse_t, TILES)
        lse1_t = lse_t
        if TEMPERED and STATS:
            _, lse1_t = _normaliser(teacher_shift_ptr, teacher_hard_ptr + here * tiles, tiles, 1.0, TILES)
    label = tl.full((), -1, tl.int32)
    student_label = 0.0
    teacher_label = 0.0
    if HAS_LABELS:
        label = tl.load(labels_ptr + row).to(tl.int32)
        student_label = _logit(student_ptr, student_shift_ptr, label, V, TILE) - lse1_s
        if HAS_TEACHER and STATS:
            teacher_label = _logit(teacher_ptr, teacher_shift_ptr, label, V, TILE) - lse1_t

    f_sum = tl.zeros((BLOCK, TILE), tl.float32)
    g_sum = tl.zeros((BLOCK, TILE), tl.float32)
    z_sum = tl.zeros((BLOCK, TILE), tl.float32)
    stat_f = tl.zeros((BLOCK, TILE), tl.float32)
    entropy_s = tl.zeros((BLOCK, TILE), tl.float32)
    entropy_t = tl.zeros((BLOCK, TILE), tl.float32)
    common_top = tl.zeros((BLOCK, TILE), tl.float32)
    g_mean = 0.0
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
                if sweep == 0 or not SWEEP_FIRST:
                    f_sum += f
                if sweep == 0:
                    g_sum += g
            p1 = p_s  # the student at T = 1
            if (HARD or STATS) and (TEMPERED or len(KINDS) == 0):
                p1 = tl.exp(z_s - lse1_s)
            if (sweep == 0 or not SWEEP_FIRST) and SMOOTHED:
                z_sum += tl.where(columns < V, z_s, 0.0)
            if (sweep == 0 or not SWEEP_FIRST) and STATS:
                if TEMPERED:
                    log_s = z_s - lse1_s
                entropy_s += tl.where(p1 > 0.0, p1 * log_s, 0.0)
                if HAS_TEACHER:
                    if TEMPERED:
                        log_t = z_t - lse1_t
                        stat_f += _all_divergences(log_s, log_t, stats_weights, shares, KINDS)[0]
                    if TEMPERED or len(KINDS) == 0:
                        p_t = tl.exp(log_t)
                    entropy_t += tl.where(p_t > 0.0, p_t * log_t, 0.0)
                    both = (z_s == student_max) & (z_t == teacher_max)
                    common_top = tl.where(both, 1.0, common_top)
            if sweep == 1:
                if SWEEP_FIRST:
                    g -= p_s * g_mean
                g *= inverse_t
                if HARD:
                    if Z_LOSS:
                        p1 *= 1.0 + 2.0 * z_loss * lse1_s
                    if SMOOTHED:
                        p1 -= smoothing / V
                    g += hard_weight * (p1 - tl.where(columns == label, 1.0 - smoothing, 0.0))
                g *= scale
                if SCALED:
                    g *= student_scale
                if CAPPED:
                    g *= 1.0 - (z_s * inverse_cap) * (z_s * inverse_cap)
                tl.store(gradient_ptr + columns, g.to(gradient_ptr.dtype.element_ty), mask=columns < V)
        if sweep == 0:
            g_mean = tl.sum(g_sum)

    loss = tl.maximum(tl.sum(f_sum), 0.0)
    divergence = loss
    if TEMPERED:
        divergence = tl.maximum(tl.sum(stat_f), 0.0)
    if HARD:
        hard = -(1.0 - smoothing) * student_label
        if SMOOTHED:
            hard -= smoothing * (tl.sum(z_sum) / V - lse1_s)
        if Z_LOSS:
            hard += z_loss * lse1_s * lse1_s
        loss += hard_weight * hard
    tl.store(loss_ptr + row, loss * scale)
    if STATS:
        tl.store(stats_ptr + row, divergence)
        tl.store(stats_ptr + stats_stride + row, -student_label)
        tl.store(stats_ptr + 2 * stats_stride + row, -tl.sum(entropy_s))
        tl.store(stats_ptr + 3 * stats_stride + row, -tl.sum(entropy_t))
        tl.store(stats_ptr + 4 * stats_stride + row, tl.max(common_top))
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
    """
    o = objective
    n, vocab = student.values.shape
    tiles = cdiv(vocab, TILE)
    other = student if teacher is None else teacher
    out = student.values if gradient is None else gradient
    inverse_cap = 1.0 / o.student_softcap if o.student_softcap else 0.0
    if n == 0:
        return
    _row_kernel[(n,)](
        student.values, student.shift, student.total, student.total_hard,
        other.values, other.shift, other.total, other.total_hard,
        out, labels, row_scale, rows, loss, stats,
        vocab, tiles, student.values.stride(0), other.values.stride(0), out.stride(0),
        0 if stats is None else stats.stride(0), 1.0 / o.temperature, o.weights, o.parameters, o.divergence_weights,
        o.hard_weight, o.label_smoothing, o.z_loss, o.student_scale, inverse_cap,
        KINDS=o.kinds, TEMPERED=o.temperature != 1.0, HARD=o.hard_weight != 0.0, SMOOTHED=o.label_smoothing != 0.0,
        Z_LOSS=o.z_loss != 0.0, SCALED=o.student_scale != 1.0, CAPPED=o.student_softcap != 0.0,
        HAS_TEACHER=teacher is not None, HAS_LABELS=labels is not None, HAS_ROWS=rows is not None,
        SWEEP_FIRST=gradient is None or any(kind != terms.FORWARD_KL for kind in o.kinds),
        GRADIENT=gradient is not None, STATS=stats is not None,
        TILE=TILE, BLOCK=8, TILES=next_power_of_2(tiles), num_warps=8,
    )  # fmt: skip
