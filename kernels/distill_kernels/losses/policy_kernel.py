"""Row kernels of policy-gradient losses: relative logits to loss, statistics and, in place, the logits' gradient.

The formulas are in policy_reference.py. A first kernel computes each sampled token's log-probability and, with an
entropy bonus, the row's entropy, over its columns.
The second computes the row's terms and sweeps its columns once.

The token's logit is computed from its row of the head in fp32, not read from the stored logits: these are rounded
relative to their tile's maximum, an unlikely token's by up to 2^-8, which would turn the coefficients of tokens near
the ends of a clipping range to 0 or back, and is multiplied by exp(d) in k3.

Bytes a row, 16-bit logits: 4 H read for the token; 2 V read and 2 V written; 2 V read once more with an entropy bonus.
Nothing is swept where neither a gradient nor statistics are required.
"""

from __future__ import annotations

import torch

from distill_kernels.launch import cdiv, tl, triton
from distill_kernels.layers.fast_math import exp
from distill_kernels.losses.operands import Head, RowCall
from distill_kernels.losses.policy_reference import NO_CLIP, Policy
from distill_kernels.losses.projection import TILE, ChunkLogits
from distill_kernels.losses.row_functions import (
    label_logprob,
    load_tiles,
    raw_logit_gradient,
    reduce_by_8,
    skip_row,
    store_stats,
    to_int32,
)
from distill_kernels.losses.row_kernel import row_normalisers
from distill_kernels.losses.terms import Objective

BLOCK = 8  # tiles
DEPTH = 1024  # elements of one step of a token's product


@triton.jit
def _dot_rows(a_ptr, a_row, a_strides, b_ptr, b_row, b_strides, length, inside, BLOCK: tl.constexpr):
    """Return the product of a row of each of two matrices, in fp32; 0 where not `inside`."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, length, BLOCK):
        # int64, since an index times a stride may pass 2^31. The last step is masked to 0, and everything is where the
        # token is not among these columns.
        at = (start + tl.arange(0, BLOCK)).to(tl.int64)
        mask = (at < length) & inside
        a = tl.load(a_ptr + a_row * a_strides[0] + at * a_strides[1], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + b_row * b_strides[0] + at * b_strides[1], mask=mask, other=0.0).to(tl.float32)
        total += a * b
    return tl.sum(total, 0)


@triton.jit
def _log_p_kernel(
    student,
    head,
    lora,
    tokens,
    lse_ptr,
    parts_ptr,
    sizes,
    strides,
    matrix_strides,
    inverse_t,
    transform,
    ENTROPY: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store this rank's part of one row's log-probability of its token and, with ENTROPY, of the row's entropy."""
    values_ptr, shift_ptr = student
    hidden_ptr, weight_ptr, bias_ptr = head
    low_ptr, lora_b_ptr = lora
    labels_ptr, scale_ptr, rows_ptr = tokens
    V, whole_vocab, tiles, H, R = sizes
    values_stride, parts_stride = strides
    scale, softcap, lora_scale = transform
    # One program a row. Only the token's column of the head is read, H elements: the product is repeated in fp32
    # because the stored logits are rounded relative to their tile (see the module's docstring).
    here = tl.program_id(0).to(tl.int64)  # within the chunk
    row = here
    if rows_ptr is not None:
        row = tl.load(rows_ptr + here)
    # Skipped rows keep the launcher's zeros, which the second kernel does not read.
    if tl.load(scale_ptr + row) == 0.0:
        return
    values_ptr += here * values_stride
    shift_ptr += here * tiles
    lse = tl.load(lse_ptr + here)
    label = to_int32(tl.load(labels_ptr + row), V)
    inside = (label >= 0) & (label < V)
    # a label on another rank loads column 0 masked, and label_logprob then returns this rank's part, 0
    column = tl.where(inside, label, 0).to(tl.int64)
    z = _dot_rows(hidden_ptr, here, matrix_strides[0], weight_ptr, column, matrix_strides[1], H, inside, DEPTH)
    if low_ptr is not None:
        z += lora_scale * _dot_rows(
            low_ptr, here, matrix_strides[2], lora_b_ptr, column, matrix_strides[3], R, inside, DEPTH
        )
    if bias_ptr is not None:
        z += tl.load(bias_ptr + column).to(tl.float32)
    if SCALED:
        z *= scale
    # tanh as in the projection's epilogue: it saturates without overflow
    if CAPPED:
        z = softcap * (1.0 - 2.0 / (1.0 + tl.exp(z * (2.0 / softcap))))
    tl.store(parts_ptr + here, label_logprob(z * inverse_t, label, lse, V, whole_vocab))
    if ENTROPY:
        # Lanes of eight columns each, summed once after the sweep.
        entropy = tl.zeros((BLOCK, TILE // 8), tl.float32)
        # A step is BLOCK tiles of TILE columns, [BLOCK, TILE]. Columns beyond V load as -inf: p is 0, and the where
        # keeps 0 times -inf out.
        for block in range(tl.cdiv(tiles, BLOCK)):
            tile = block * BLOCK + tl.arange(0, BLOCK)
            columns = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
            log_p = load_tiles(values_ptr, shift_ptr, tile, columns, V, tiles) * inverse_t - lse
            p = exp(log_p)
            entropy -= reduce_by_8(tl.where(p > 0.0, p * log_p, 0.0))
        tl.store(parts_ptr + parts_stride + here, tl.sum(entropy))


@triton.jit
def _k3(difference):
    """Return `exp(d) - 1` and `exp(d) - 1 - d`, by their series where d is small and the differences would cancel."""
    # At |d| < 0.1 the terms that are left out are below d^4 / 360 of k3, 3e-7; the plain differences cancel there.
    small = tl.abs(difference) < 0.1
    tail = 1.0 + difference / 3.0 * (1.0 + difference / 4.0 * (1.0 + difference / 5.0))
    growth = tl.exp(difference) - 1.0
    square = 0.5 * difference * difference * tail
    return tl.where(small, difference + square, growth), tl.where(small, square, growth - difference)


@triton.jit
def _policy_terms(
    log_p,
    ratio,
    advantage,
    reference,
    settings,
    CLIPPED: tl.constexpr,
    KL_IN_REWARD: tl.constexpr,
    K2: tl.constexpr,
    K3: tl.constexpr,
):
    """`policy_reference.reference_policy_terms` of one row."""
    clip_low, clip_high, kl_weight = settings
    # d = log(p_ref / p): k1 goes into the reward, k2 and k3 are terms of their own (Schulman, 2020)
    difference = reference - log_p
    # As a reward it is a constant to the gradient: it changes the factor of the ratio, and adds no slope of its own.
    if KL_IN_REWARD:
        advantage += kl_weight * difference
    # d(ratio) / d(log p) is the ratio itself, so that the slope of this term equals its value.
    loss = -ratio * advantage
    slope = loss
    # PPO's pessimistic minimum as a maximum of losses: where the clipped one is larger it is a constant, without slope.
    if CLIPPED:
        clipped = -tl.minimum(tl.maximum(ratio, 1.0 - clip_low), 1.0 + clip_high) * advantage
        # A comparison with NaN is false, and keeps the NaN of a label that is no token in the loss. Equal losses keep
        # the slope: inside of the range both are the same.
        slope = tl.where(clipped > loss, 0.0, slope)
        loss = tl.where(clipped > loss, clipped, loss)
    if K2:
        loss += kl_weight * 0.5 * difference * difference
        slope -= kl_weight * difference
    if K3:
        growth, k3 = _k3(difference)
        loss += kl_weight * k3
        slope -= kl_weight * growth
    return loss, slope


@triton.jit
def _policy_kernel(
    student,
    gradient_ptr,
    tokens,
    policy,
    outputs,
    lse_ptr,
    parts_ptr,
    sizes,
    strides,
    inverse_t,
    settings,
    entropy_weight,
    transform,
    CLIPPED: tl.constexpr,
    KL_IN_REWARD: tl.constexpr,
    K2: tl.constexpr,
    K3: tl.constexpr,
    ENTROPY: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    GRADIENT: tl.constexpr,
    OWNS_ROW_TERMS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one row over this rank's V columns, given its log-probability and entropy over all ranks (`parts_ptr`).

    Terms of the row as a whole are stored where `OWNS_ROW_TERMS`, and 0 elsewhere.
    """
    values_ptr, shift_ptr = student
    labels_ptr, scale_ptr, rows_ptr = tokens
    advantages_ptr, old_ptr, reference_ptr = policy
    loss_ptr, stats_ptr = outputs
    V, tiles = sizes
    values_stride, gradient_stride, stats_stride, parts_stride = strides
    STATS: tl.constexpr = stats_ptr is not None
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
    # Advantages and old log-probabilities of such a row may be anything, and are not read.
    if scale == 0.0:
        skip_row(row, loss_ptr, stats_ptr, stats_stride, gradient_ptr, V, GRADIENT, TILE, BLOCK)
        return

    lse = tl.load(lse_ptr + here)
    log_p = tl.load(parts_ptr + here)
    label = to_int32(tl.load(labels_ptr + row), V)
    advantage = 0.0
    # Without old log-probabilities the ratio is 1 with the gradient of log p; NaN stays visible.
    ratio = tl.where(log_p == log_p, 1.0, log_p)  # NaN of a label that is no token
    reference = 0.0
    if advantages_ptr is not None:
        advantage = tl.load(advantages_ptr + row).to(tl.float32)
    if old_ptr is not None:
        ratio = tl.exp(log_p - tl.load(old_ptr + row).to(tl.float32))
    if reference_ptr is not None:
        reference = tl.load(reference_ptr + row).to(tl.float32)
    loss, slope = _policy_terms(log_p, ratio, advantage, reference, settings, CLIPPED, KL_IN_REWARD, K2, K3)
    entropy = 0.0
    # Summed over the whole row by the first kernel: the gradient needs it at every column, before the sweep.
    if ENTROPY:
        entropy = tl.load(parts_ptr + parts_stride + here)
        loss -= entropy_weight * entropy
    entropy_sum = tl.zeros((BLOCK, TILE // 8), tl.float32)
    # One sweep, backwards: with an entropy bonus the first kernel read the row's end last, and L2 may hold it. Each
    # element is stored by the thread that loaded it, so that no barrier is needed.
    if GRADIENT or (STATS and not ENTROPY):
        slope *= inverse_t
        for count in range(blocks):
            tile = (blocks - 1 - count) * BLOCK + tl.arange(0, BLOCK)
            columns = tile[:, None] * TILE + within
            z = load_tiles(values_ptr, shift_ptr, tile, columns, V, tiles)
            all_log_p = z * inverse_t - lse
            p = exp(all_log_p)
            if STATS and not ENTROPY:
                entropy_sum -= reduce_by_8(tl.where(p > 0.0, p * all_log_p, 0.0))
            if GRADIENT:
                # d log p[label] / dz = 1[label] - p
                g = tl.where(columns == label, slope, 0.0) - slope * p
                if ENTROPY:
                    # d(-H)/dz = p (log p + H)
                    g += (entropy_weight * inverse_t) * tl.where(p > 0.0, p * (all_log_p + entropy), 0.0)
                # fp32 up to here, rounded once as it is stored over the logits.
                g = raw_logit_gradient(g, z, scale, transform, SCALED, CAPPED)
                tl.store(gradient_ptr + columns, g.to(gradient_ptr.dtype.element_ty), mask=columns < V)
    # What every rank knows of a row is stored by one of them, so that a sum over ranks counts it once.
    if not OWNS_ROW_TERMS:
        loss = 0.0
        log_p = 0.0
        reference = 0.0
        entropy = 0.0
    tl.store(loss_ptr + row, loss * scale)
    if STATS:
        entropy += tl.sum(entropy_sum)
        divergence = 0.0
        if reference_ptr is not None:
            divergence = _k3(reference - log_p)[1]
        store_stats(stats_ptr, stats_stride, row, (divergence, -log_p, entropy, 0.0, 0.0, log_p, reference))


def launch_policy_row_loss(
    student: ChunkLogits,
    teacher: ChunkLogits | None,
    objective: Objective,
    call: RowCall,
    *,
    policy: Policy,
    head: Head,
) -> None:
    """Launch the kernels over the n rows of `student`; arguments as in `launch_row_loss`.

    `teacher` is None; `policy` holds all tokens, as the labels do; `head` has the hidden states of the n rows.
    """
    assert teacher is None and call.labels is not None
    settings = policy.settings
    gradient = call.gradient
    n, vocab = student.values.shape
    if n == 0:
        return
    tempered = {"TEMPERED": False, "HARD": False, "HAS_TEACHER": False, "STATS": False}
    lse = row_normalisers(student, student, 1.0 / objective.temperature, **tempered)[1]
    # Two planes of n: log-probabilities, and entropies where a bonus needs them.
    parts = torch.zeros(2, n, dtype=torch.float32, device=call.loss.device)
    tiles = cdiv(vocab, TILE)
    entropy = settings.entropy_weight != 0.0
    out = student.values if gradient is None else gradient
    # The adapter's first factor is applied to all rows at once, [n, R]; the kernel reads one row of the second.
    low = None if head.lora_a is None else torch.mm(head.hidden, head.lora_a.t())
    _log_p_kernel[(n,)](
        tuple(student[:2]),
        (head.hidden, head.weight, head.bias),
        (low, head.lora_b),
        call.tokens,
        lse,
        parts,
        (vocab, vocab, tiles, head.hidden.shape[1], 0 if low is None else low.shape[1]),
        (student.values.stride(0), parts.stride(0)),
        tuple((0, 0) if each is None else each.stride() for each in (head.hidden, head.weight, low, head.lora_b)),
        1.0 / objective.temperature,
        (objective.student_scale, objective.student_softcap or 1.0, head.lora_scale),
        ENTROPY=entropy,
        DEPTH=DEPTH,
        TILE=TILE,
        BLOCK=BLOCK,
        num_warps=8 if entropy else 4,
        **objective.transform_flags,
    )
    # At most one of the three flags is set: a penalty of weight 0 compiles away.
    with_kl = policy.reference_logprobs is not None and settings.kl_weight != 0.0
    _policy_kernel[(n,)](
        tuple(student[:2]),
        out,
        call.tokens,
        tuple(policy[:3]),
        call.outputs,
        lse,
        parts,
        (vocab, tiles),
        (student.values.stride(0), out.stride(0), call.stats_stride, parts.stride(0)),
        1.0 / objective.temperature,
        (settings.clip_low, settings.clip_high, settings.kl_weight),
        settings.entropy_weight,
        objective.transform,
        CLIPPED=settings.clip_low != NO_CLIP,
        KL_IN_REWARD=with_kl and settings.kl_estimator == "reward",
        K2=with_kl and settings.kl_estimator == "k2",
        K3=with_kl and settings.kl_estimator == "k3",
        ENTROPY=entropy,
        GRADIENT=gradient is not None,
        OWNS_ROW_TERMS=True,
        TILE=TILE,
        BLOCK=BLOCK,
        num_warps=8,
        **objective.transform_flags,
    )
