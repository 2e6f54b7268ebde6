"""Device functions shared by the row kernels: divergences, relative logits, the hard-label term, skipped rows.

The formulas are those of divergence.py; relative logits and their tiles are described in projection.py.
"""

from __future__ import annotations

from distill_kernels.launch import HAS_TRITON, tl, triton
from distill_kernels.layers.fast_math import exp, log_of_normal, reciprocal
from distill_kernels.losses import DIVERGENCES, divergence

CODES = list(DIVERGENCES)  # a divergence is its place in kernels, which take no strings
if HAS_TRITON:
    FORWARD_KL = tl.constexpr(CODES.index("forward_kl"))
    REVERSE_KL = tl.constexpr(CODES.index("reverse_kl"))
    JSD = tl.constexpr(CODES.index("jsd"))
    SKEW_FORWARD_KL = tl.constexpr(CODES.index("skew_forward_kl"))
    SKEW_REVERSE_KL = tl.constexpr(CODES.index("skew_reverse_kl"))
    TVD = tl.constexpr(CODES.index("tvd"))
    MAX_LOG_RATIO = tl.constexpr(divergence.MAX_LOG_RATIO)
    OTHER_RANK = tl.constexpr(-2)  # a label of columns that are not here; launchers always pass all columns


@triton.jit
def _log_ratio_product(p, log_p, log_q):
    return tl.where(p > 0.0, p * (log_p - log_q), 0.0)


@triton.jit
def one_divergence(KIND: tl.constexpr, parameter, log_s, log_t, p_s, p_t):
    """Return `f` and `g` of one divergence, elementwise: `reference_terms` in Triton."""
    if KIND == FORWARD_KL:
        # A teacher's logit of -inf gives p_t = 0 and the guarded product 0; a student's of -inf under p_t > 0 gives
        # inf.
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
        # Mixtures in the ratio e = p_t / p_s, with q = m / p_s: equal distributions give q = 1 and a logarithm of
        # exactly 0. The clamp keeps e finite where one logit is -inf; beyond it the smaller probability vanishes in
        # fp32.
        d = tl.where(d == d, d, 0.0)  # both -inf
        d = tl.maximum(tl.minimum(d, MAX_LOG_RATIO), -MAX_LOG_RATIO)
        e = exp(d)
        teacher_weight = parameter
        if KIND == SKEW_REVERSE_KL:
            teacher_weight = 1.0 - parameter
        q = 1.0 + teacher_weight * (e - 1.0)
        log_q = log_of_normal(q)
        if KIND == JSD:
            g = (parameter - 1.0) * p_s * log_q
            f = parameter * p_t * (d - log_q) + g
        else:
            m = p_s + teacher_weight * (p_t - p_s)
            if KIND == SKEW_REVERSE_KL:
                f = m - p_s - p_s * log_q
                g = p_s * (parameter * (1.0 - reciprocal(q)) - log_q)
            else:
                tl.static_assert(KIND == SKEW_FORWARD_KL)
                f = p_t * (d - log_q) - p_t + m
                g = (1.0 - parameter) * p_s * (1.0 - e * reciprocal(q))
    return f, g


@triton.jit
def weighted_divergences(
    log_s,
    log_t,
    weights,
    parameters,
    KINDS: tl.constexpr,
    entry_caps=None,
    capped=None,
    ONLY: tl.constexpr = -1,
):
    """Return the weighted sums of `f` and of `g` over the terms, and `p_s` and `p_t`.

    entry_caps: of each term's f, or None. capped: int32, the bits of terms whose token's value is capped: they count as
    0 here; or None. ONLY: the term to compute; -1 for all.
    """
    p_s = exp(log_s)
    p_t = exp(log_t)
    f = tl.zeros_like(p_s)
    g = tl.zeros_like(p_s)
    for i in tl.static_range(len(KINDS)):  # an item of a tuple is no constexpr in Triton 3.6
        if ONLY == -1 or i == ONLY:
            f_i, g_i = one_divergence(tl.constexpr(KINDS[i]), parameters[i], log_s, log_t, p_s, p_t)
            # Selected, not multiplied by 0: an excluded token's f or g may be inf. A NaN is beyond no cap and stays.
            if entry_caps is not None:
                beyond = f_i > entry_caps[i]
                f_i = tl.where(beyond, entry_caps[i], f_i)
                g_i = tl.where(beyond, 0.0, g_i)
            if capped is not None:
                constant = (capped & (1 << i)) != 0
                f_i = tl.where(constant, 0.0, f_i)
                g_i = tl.where(constant, 0.0, g_i)
            f += weights[i] * f_i
            g += weights[i] * g_i
    return f, g, p_s, p_t


@triton.jit
def logit_gradient(g, p_s, sums, EXACT_WHEN_CONFIDENT: tl.constexpr):
    """Return `g - p_s sum(g)`; sums[1] and sums[2] (of g and p_s) leave out a token of p_s > 1/2, see divergence.py."""
    plain = g - p_s * sums[0]
    if EXACT_WHEN_CONFIDENT:
        plain = tl.where(p_s > 0.5, g * sums[2] - p_s * sums[1], plain)
    return plain


@triton.jit
def normaliser(shift_ptr, total_ptr, tiles, inverse_t, TILES: tl.constexpr):
    """Row maximum and `log sum exp(z / T)` from the row's tiles."""
    tile = tl.arange(0, TILES)
    total = tl.load(total_ptr + tile, mask=tile < tiles, other=0.0)
    shift = tl.load(shift_ptr + tile, mask=tile < tiles, other=0.0)
    # A tile whose logits are all -inf has total 0 and a shift of 0 that is no logit: it must not win the maximum.
    # Compared with 0, not by its sign: a tile with a NaN logit has a NaN total, which belongs to the sum.
    maximum = tl.max(tl.where(total == 0.0, -float("inf"), shift), 0)
    parts = tl.where(total == 0.0, 0.0, total * tl.exp((shift - maximum) * inverse_t))
    return maximum, maximum * inverse_t + tl.log(tl.sum(parts, 0))


@triton.jit
def load_tiles(values_ptr, shift_ptr, tile, columns, V, tiles):
    """Logits [BLOCK, TILE] of a row; -inf beyond the vocabulary."""
    # Shifts beyond the last tile load as 0, so that -inf + 0 stays -inf.
    values = tl.load(values_ptr + columns, mask=columns < V, other=-float("inf")).to(tl.float32)
    return values + tl.load(shift_ptr + tile, mask=tile < tiles, other=0.0)[:, None]


@triton.jit
def logit_at(values_ptr, shift_ptr, column, V, TILE: tl.constexpr):
    """One logit of a row; -inf outside of the vocabulary."""
    inside = (column >= 0) & (column < V)
    value = tl.load(values_ptr + column, mask=inside, other=-float("inf")).to(tl.float32)
    return value + tl.load(shift_ptr + column // TILE, mask=inside, other=0.0)


@triton.jit
def to_int32(index, V):
    """Return indices as int32, clamped to [-3, V]: out-of-range ids stay out of range, -1 and -2 as they are."""
    # Clamp before the cast: an id of 2^32 would wrap to 0, a token like any other.
    return tl.maximum(tl.minimum(index.to(tl.int64), V), -3).to(tl.int32)


@triton.jit
def label_logprob(logit, label, lse, V, whole_vocab):
    """Return a label's log-probability from its logit: NaN outside of the vocabulary, 0 where another rank adds it."""
    value = tl.where((label >= 0) & (label < V), logit - lse, float("nan"))
    return tl.where((label == OTHER_RANK) & (whole_vocab > V), 0.0, value)


@triton.jit
def clamp_at_zero(x):
    """Return `max(x, 0)`, with NaN kept."""
    # a comparison, since a maximum may drop NaN, and NaN is how a bad label shows
    return tl.where(x < 0.0, 0.0, x)


@triton.jit
def reduce_by_8(x):
    """Sum every 8 adjacent columns, which one thread holds, so that accumulators take an eighth of the registers."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 8, 8)), 2)


@triton.jit
def agreement_part(tops, V, whole_vocab):
    """Return `TokenStats.agreement` of a row from `tops`, the count of highest logits among its V columns.

    A token that is highest under both models counts 1, under one of them 2, so that a sum of 1 is agreement. With
    several ranks the count itself is returned, for the ranks to add up.
    """
    if whole_vocab == V:
        tops = tl.where(tops == 1.0, 1.0, 0.0)
    return tops


@triton.jit
def hard_gradient(p, columns, label, lse, vocab, hard, SMOOTHED: tl.constexpr, Z_LOSS: tl.constexpr):
    """Return the hard-label term's gradient from probabilities at T = 1. `hard`: weight, smoothing, z-loss."""
    weight, smoothing, z_loss = hard
    # d(lse)/dz = p, so that d(z_loss lse^2)/dz = 2 z_loss lse p.
    if Z_LOSS:
        p *= 1.0 + 2.0 * z_loss * lse
    if SMOOTHED:
        p -= smoothing / vocab
    return weight * (p - tl.where(columns == label, 1.0 - smoothing, 0.0))


@triton.jit
def hard_loss(at_label, z_total, lse, row_lse, vocab, hard, SMOOTHED: tl.constexpr, Z_LOSS: tl.constexpr):
    """Return the hard-label term of a row from the label's log-probability and the sum of the logits.

    `row_lse` is `lse` on the rank that owns the row terms and 0 on the others.
    """
    weight, smoothing, z_loss = hard
    loss = -(1.0 - smoothing) * at_label
    if SMOOTHED:
        loss -= smoothing * (z_total / vocab - row_lse)
    if Z_LOSS:
        loss += z_loss * row_lse * lse
    return weight * loss


@triton.jit
def raw_logit_gradient(g, z, scale, transform, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """Return the gradient for raw logits from that for transformed ones, times the row's scale.

    transform: the student's logit scale, and the inverse of its soft cap.
    """
    student_scale, inverse_cap = transform
    g *= scale
    if SCALED:
        g *= student_scale
    if CAPPED:
        # z is the capped logit, z / cap = tanh(u), and dz/du = 1 - tanh(u)^2.
        g *= 1.0 - (z * inverse_cap) * (z * inverse_cap)
    return g


@triton.jit
def zero_row(row_ptr, V, blocks, within, BLOCK: tl.constexpr):
    """Write zeros over the V columns of a row, in blocks of columns `within` [m, n], or of BLOCK times [1, n]."""
    for block in range(blocks):
        if within.shape[0] == 1:
            columns = (block * BLOCK + tl.arange(0, BLOCK))[:, None] * within.shape[1] + within
        else:
            columns = block * BLOCK + within
        nothing = tl.zeros(columns.shape, row_ptr.dtype.element_ty)
        tl.store(row_ptr + columns, nothing, mask=columns < V)


@triton.jit
def skip_row(
    row,
    loss_ptr,
    stats_ptr,
    stats_stride,
    gradient_ptr,
    V,
    GRADIENT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store zeros for a row of scale 0: its loss, statistics if there are any, and GRADIENT."""
    tl.store(loss_ptr + row, 0.0)
    if stats_ptr is not None:
        store_stats(stats_ptr, stats_stride, row, (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    if GRADIENT:
        zero_row(gradient_ptr, V, tl.cdiv(tl.cdiv(V, TILE), BLOCK), tl.arange(0, TILE)[None, :], BLOCK)


@triton.jit
def store_clipped(clip_ptr, stride, row, capped, whole, kept):
    """Store the last two `TokenStats` of one row: whether the token is capped, and the share that the caps take.

    whole, kept: the divergences without and with caps.
    """
    tl.store(clip_ptr + row, capped)
    # an infinite divergence gives 1, and one of 0 gives 0
    tl.store(clip_ptr + stride + row, clamp_at_zero(tl.where(whole > 0.0, 1.0 - kept / whole, 0.0)))


@triton.jit
def store_stats(stats_ptr, stats_stride, row, figures):
    """Store the first seven `TokenStats` of one row."""
    for i in tl.static_range(7):
        tl.store(stats_ptr + i * stats_stride + row, figures[i])
