"""Row kernel for losses over materialised logits (logits.py): row losses and gradients, and their specification.

Per row of `V` logits: the normalisers `log sum exp(z / T)` of student and teacher by an online sweep (Milakov and
Gimelshein, 2018), then `f` and `g` of the table in divergence.py, then the student's gradient. Forward KL and
cross-entropy need no sweep for `sum(g)`, which is 0, unless an entry's value has a cap. Rows of up to
`MAX_REGISTER_COLUMNS` columns stay in registers.

Bytes a row of b-byte logits, fewest: `2 V b` read and `V b` written. Longer rows are read once more for every sweep
after the first.
"""

from __future__ import annotations

import torch

from distill_kernels.launch import DeviceFacts, device_facts, next_power_of_2, runs_on_triton, tl, triton
from distill_kernels.layers.fast_math import LOG2_E, exp, exp2
from distill_kernels.losses.arguments import check_values
from distill_kernels.losses.divergence import RowRequest, reference_rows
from distill_kernels.losses.linear import REFERENCE_CHUNK_ELEMENTS
from distill_kernels.losses.operands import RowBatch
from distill_kernels.losses.row_functions import (
    clamp_at_zero,
    hard_gradient,
    hard_loss,
    logit_gradient,
    weighted_divergences,
    zero_row,
)
from distill_kernels.losses.terms import Objective

MAX_REGISTER_COLUMNS = 16_384  # longest row that a program keeps in registers, read once
LONG_ROW_COLUMNS = 65_536  # from here on longer blocks are faster for divergences (sweep on an H200)
STEPS = 4  # a block is [STEPS, LANES]: a thread holds STEPS pieces, so that maxima over them cost no exchange


@triton.jit
def _load(ptr, columns, V, EVICT: tl.constexpr):
    # -inf past the row's end: no maximum, exponential 0. From here on everything is fp32.
    z = tl.load(ptr + columns, mask=columns < V, other=-float("inf"), eviction_policy=EVICT)
    return z.to(tl.float32)


@triton.jit
def _join(maxima, totals, hard, inverse_t):
    """Return the row's `log sum exp` at temperature T and at 1 from its lanes' maxima and sums of exponentials."""
    maximum = tl.max(maxima)
    # Lanes that saw only -inf have total 0 and exp(-inf - base) = 0. A base of -inf would make that NaN.
    base = tl.where(maximum == -float("inf"), 0.0, maximum)
    total = tl.sum(totals * tl.exp((maxima - base) * inverse_t))
    total_hard = tl.sum(hard * tl.exp(maxima - base))
    return base * inverse_t + tl.log(total), base + tl.log(total_hard)


@triton.jit
def _online(z, maxima, totals, hard, inverse_t, BOTH: tl.constexpr):
    """Update the lanes' running maxima and sums with a block [STEPS, LANES] (online softmax)."""
    after = tl.maximum(maxima, tl.max(z, 0))
    base = tl.where(after == -float("inf"), 0.0, after)
    # Sums so far were relative to the old maximum: they shrink by exp(before) when a lane's maximum grows. At the first
    # block `before` is -inf and the factor 0.
    z = (z - base[None, :]) * LOG2_E
    before = (maxima - base) * LOG2_E
    totals = totals * exp2(before * inverse_t) + tl.sum(exp2(z * inverse_t), 0)
    if BOTH:
        hard = hard * exp2(before) + tl.sum(exp2(z), 0)
    else:
        hard = totals
    return after, totals, hard


@triton.jit
def _gradient(
    z,
    log_s,
    log_t,
    columns,
    label,
    lse1,
    sums,
    scale,
    V,
    inverse_t,
    weights,
    parameters,
    entry_caps,
    capped,
    hard,
    KINDS: tl.constexpr,
    HARD: tl.constexpr,
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    NEEDS_G_SUM: tl.constexpr,
    EXACT_WHEN_CONFIDENT: tl.constexpr,
):
    """Return `f` of a block and its gradient for the student's logits, times the row's scale."""
    f = tl.zeros_like(z)
    g = tl.zeros_like(z)
    if len(KINDS) > 0:
        f, g, p_s, _pt = weighted_divergences(log_s, log_t, weights, parameters, KINDS, entry_caps, capped)
        if NEEDS_G_SUM:
            g = logit_gradient(g, p_s, sums, EXACT_WHEN_CONFIDENT)
        g *= inverse_t
    if HARD:
        g += hard_gradient(exp(z - lse1), columns, label, lse1, V, hard, SMOOTHED, Z_LOSS)
    return f, g * scale


@triton.jit(do_not_specialize=["N", "S"])
def _logits_kernel(
    logits,
    labels_ptr,
    scale_ptr,
    loss_ptr,
    N,
    S,
    V,
    strides,
    inverse_t,
    teacher_inverse_t,
    weights,
    parameters,
    token_caps,
    entry_caps,
    hard,
    KINDS: tl.constexpr,
    TEMPERED: tl.constexpr,
    HARD: tl.constexpr,
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    NEEDS_G_SUM: tl.constexpr,
    EXACT_WHEN_CONFIDENT: tl.constexpr,
    GRADIENT: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Rows of `logits`, of student, teacher and gradient, whose `strides` of batch and row follow each other."""
    student_ptr, teacher_ptr, gradient_ptr = logits
    student_batch, student_row, teacher_batch, teacher_row, gradient_batch, gradient_row = strides
    BLOCK: tl.constexpr = STEPS * LANES
    SOFT: tl.constexpr = len(KINDS) > 0
    BOTH: tl.constexpr = TEMPERED and HARD
    # Terms with a cap on the token's value are summed one after the other in pass 2, all others together.
    ROUNDS: tl.constexpr = 1 if token_caps is None else len(KINDS)
    if teacher_inverse_t is None:
        teacher_inverse_t = inverse_t
    # A block is [STEPS, LANES] columns of one row, lanes adjacent in memory. Running maxima and sums are [LANES]: lanes
    # are joined once a row, not once a block.
    within = tl.arange(0, STEPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    blocks = tl.cdiv(V, BLOCK)
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        # int64, since batch times its stride may pass 2^31 elements. Two indices, since rows of a sliced [B, S, V] are
        # not one stride apart.
        batch = (row // S).to(tl.int64)
        inner = (row % S).to(tl.int64)
        student = student_ptr + batch * student_batch + inner * student_row
        teacher = teacher_ptr + batch * teacher_batch + inner * teacher_row
        gradient = gradient_ptr + batch * gradient_batch + inner * gradient_row
        scale = tl.load(scale_ptr + row)
        if scale == 0.0:
            # An ignored row reads no logits, which may hold NaN: 0 times NaN would be NaN.
            tl.store(loss_ptr + row, 0.0)
            if GRADIENT:
                zero_row(gradient, V, blocks, within, BLOCK)
        else:
            label = tl.full((), -1, tl.int64)
            at_label = 0.0
            if HARD:
                label = tl.load(labels_ptr + row).to(tl.int64)
                # NaN for a label outside of the vocabulary shows in the loss. Read now: the gradient may overwrite
                # these logits.
                inside = (label >= 0) & (label < V)
                at_label = tl.load(student + label, mask=inside, other=float("nan")).to(tl.float32)
            # the normalisers
            zs = tl.full((STEPS, LANES), -float("inf"), tl.float32)
            zt = zs
            max_s = tl.full((LANES,), -float("inf"), tl.float32)
            max_t = max_s
            total_s = tl.zeros((LANES,), tl.float32)
            total_t = total_s
            hard_s = total_s
            hard_t = total_s
            z_sum = total_s
            # Pass 1. IN_REGISTERS compiles each pass to one block, whose logits the later passes use without a load;
            # longer rows are loaded again in every pass, and evict_last asks the cache to keep them until then.
            for block in range(1 if IN_REGISTERS else blocks):
                columns = block * BLOCK + within
                zs = _load(student, columns, V, "evict_last")
                max_s, total_s, hard_s = _online(zs, max_s, total_s, hard_s, inverse_t, BOTH)
                if SMOOTHED:
                    z_sum += tl.sum(tl.where(columns < V, zs, 0.0), 0)
                if SOFT:
                    zt = _load(teacher, columns, V, "evict_last")
                    max_t, total_t, hard_t = _online(zt, max_t, total_t, hard_t, teacher_inverse_t, False)
            lse_s, lse1 = _join(max_s, total_s, hard_s, inverse_t)
            if not BOTH:
                lse1 = lse_s
            lse_t = lse_s
            if SOFT:
                lse_t, _ = _join(max_t, total_t, hard_t, teacher_inverse_t)
            # the divergences, and sum(g) where the gradient needs it
            f_sum = tl.zeros((LANES,), tl.float32)
            sums = 0.0, 0.0, 0.0  # of g; of g and p_s without a token of p_s > 1/2
            capped = None  # bits of the terms whose value is beyond their cap
            at_caps = 0.0  # the caps of these, weighted, together
            if token_caps is not None and NEEDS_G_SUM:
                capped = tl.full((), 0, tl.int32)
            # Pass 2, after the normalisers and before any gradient. Left out where sum(g) is 0 and pass 3 sums f
            # itself.
            if SOFT and (NEEDS_G_SUM or not GRADIENT):
                for i in tl.static_range(ROUNDS):
                    f_part = tl.zeros((LANES,), tl.float32)
                    g_sum = f_part
                    g_without_top = f_part
                    rest_p = f_part
                    for block in range(1 if IN_REGISTERS else blocks):
                        if not IN_REGISTERS:
                            columns = block * BLOCK + within
                            zs = _load(student, columns, V, "evict_last")
                            zt = _load(teacher, columns, V, "evict_last")
                        f, g, p_s, _pt = weighted_divergences(
                            zs * inverse_t - lse_s,
                            zt * teacher_inverse_t - lse_t,
                            weights,
                            parameters,
                            KINDS,
                            entry_caps,
                            None,
                            i if token_caps is not None else -1,
                        )
                        f_part += tl.sum(f, 0)
                        g_sum += tl.sum(g, 0)
                        if EXACT_WHEN_CONFIDENT:
                            g_without_top += tl.sum(tl.where(p_s > 0.5, 0.0, g), 0)
                            rest_p += tl.sum(tl.where(p_s > 0.5, 0.0, p_s), 0)
                    of_term = tl.sum(g_sum, 0), 0.0, 0.0
                    if EXACT_WHEN_CONFIDENT:
                        of_term = of_term[0], tl.sum(g_without_top, 0), tl.sum(rest_p, 0)
                    if capped is None:
                        f_sum = f_part
                        sums = of_term
                    else:
                        cap = weights[i] * token_caps[i]
                        beyond = tl.sum(f_part, 0) > cap
                        capped |= tl.where(beyond, 1 << i, 0)
                        at_caps += tl.where(beyond, cap, 0.0)
                        f_sum += tl.where(beyond, 0.0, f_part)
                        sums = (
                            sums[0] + tl.where(beyond, 0.0, of_term[0]),
                            sums[1] + tl.where(beyond, 0.0, of_term[1]),
                            of_term[2],  # of p_s: the same for every term
                        )
            if GRADIENT:
                # Pass 3 may write over the student's logits: an element is loaded before it is stored, in one step,
                # and no later step reads it.
                for count in range(1 if IN_REGISTERS else blocks):
                    columns = (blocks - 1 - count) * BLOCK + within  # backwards: the row's end is still in the cache
                    if not IN_REGISTERS:
                        zs = _load(student, columns, V, "evict_first")
                        if SOFT:
                            zt = _load(teacher, columns, V, "evict_first")
                    f, g = _gradient(
                        zs,
                        zs * inverse_t - lse_s,
                        zt * teacher_inverse_t - lse_t,
                        columns,
                        label,
                        lse1,
                        sums,
                        scale,
                        V,
                        inverse_t,
                        weights,
                        parameters,
                        entry_caps,
                        capped,
                        hard,
                        KINDS,
                        HARD,
                        SMOOTHED,
                        Z_LOSS,
                        NEEDS_G_SUM,
                        EXACT_WHEN_CONFIDENT,
                    )
                    if SOFT and not NEEDS_G_SUM:
                        f_sum += tl.sum(f, 0)
                    tl.store(gradient + columns, g.to(gradient_ptr.dtype.element_ty), mask=columns < V)
            loss = clamp_at_zero(tl.sum(f_sum, 0))
            if token_caps is not None:
                if NEEDS_G_SUM:
                    loss += at_caps
                else:
                    # One divergence alone, whose value is known only now: beyond the cap its gradient is taken back.
                    tl.static_assert(len(KINDS) == 1)
                    cap = weights[0] * token_caps[0]
                    if GRADIENT:  # noqa: SIM102 - known when compiled, unlike the next condition
                        if loss > cap:
                            tl.debug_barrier()  # other threads stored what these zeros replace
                            zero_row(gradient, V, blocks, within, BLOCK)
                    loss = tl.where(loss > cap, cap, loss)
            if HARD:
                loss += hard_loss(at_label - lse1, tl.sum(z_sum, 0), lse1, lse1, V, hard, SMOOTHED, Z_LOSS)
            tl.store(loss_ptr + row, loss * scale)


def launch_shape(vocab: int, rows: int, facts: DeviceFacts, *, soft: bool) -> tuple[bool, int, int, int]:
    """Return the launch shape of a row: kept in registers or not, lanes of a block, warps of a program, programs.

    Longer blocks help long rows of divergences, not of cross-entropy. How many rows are in flight makes no difference:
    the L2 cache keeps next to nothing for later sweeps (measured on an H200).

    Args:
        vocab, rows: number of columns and rows of the logits.
        facts: properties of the device.
        soft: True if a teacher's logits are read too.
    """
    in_registers = vocab <= MAX_REGISTER_COLUMNS
    longer = in_registers or (vocab > LONG_ROW_COLUMNS and soft)
    lanes = min(max(next_power_of_2(vocab) // STEPS, 128), 4096 if longer else 2048)
    warps = max(lanes // 256, 4)
    return in_registers, lanes, warps, min(rows, facts.multiprocessors * 64 // warps)


def launch_logit_rows(
    student: torch.Tensor,
    teacher: torch.Tensor | None,
    labels: torch.Tensor | None,
    row_scale: torch.Tensor,
    objective: Objective,
    gradient: torch.Tensor | None,
) -> torch.Tensor:
    """Return row losses [N] and fill `gradient`, by the Triton kernel; logits are [B, S, V] with adjacent columns.

    Args:
        student: logits [B, S, V] with adjacent columns, fp32, bf16 or fp16.
        teacher: logits of the same shape, or None where the objective has no divergence.
        labels: int64 [B * S], or None.
        row_scale: fp32 [B * S], factor of each row's loss; 0 skips the row.
        objective: terms of the loss and its settings.
        gradient: filled with the gradient for `student`, of its shape; may be its memory. None: no gradient.
    """
    batches, length, vocab = student.shape
    loss = torch.empty(batches * length, dtype=torch.float32, device=student.device)
    soft = bool(objective.kinds)
    other = student if teacher is None else teacher
    out = student if gradient is None else gradient
    facts = device_facts(student.device)
    # Caps take registers for more sums, which the longer blocks of long rows do not leave.
    longer = soft and not objective.clips
    in_registers, lanes, warps, programs = launch_shape(vocab, batches * length, facts, soft=longer)
    if loss.numel() == 0:
        return loss
    _logits_kernel[(programs,)](
        (student, other, out),
        labels,
        row_scale,
        loss,
        batches * length,
        length,
        vocab,
        (*student.stride()[:2], *other.stride()[:2], *out.stride()[:2]),
        *objective.inverse_temperatures,
        objective.weights,
        objective.parameters,
        *objective.caps,
        (objective.hard_weight, objective.label_smoothing, objective.z_loss),
        KINDS=objective.codes,
        TEMPERED=objective.temperature != 1.0,  # the student's
        NEEDS_G_SUM=objective.needs_sums(with_gradient=True),
        EXACT_WHEN_CONFIDENT=objective.stable_top,
        GRADIENT=gradient is not None,
        IN_REGISTERS=in_registers,
        STEPS=STEPS,
        LANES=lanes,
        num_warps=warps,
        **objective.hard_label_flags,
    )
    return loss


def reference_logit_rows(
    student: torch.Tensor,
    teacher: torch.Tensor | None,
    labels: torch.Tensor | None,
    row_scale: torch.Tensor,
    objective: Objective,
    gradient: torch.Tensor | None,
) -> torch.Tensor:
    """Return row losses [N] and fill `gradient`, in plain PyTorch: fp32 (fp64 for fp64 logits), some rows at a time.

    Args:
        student: logits [B, S, V] with adjacent columns, any floating dtype.
        teacher: logits of the same shape, or None where the objective has no divergence.
        labels: int64 [B * S], or None.
        row_scale: fp32 (fp64 for fp64 logits) [B * S], factor of each row's loss; 0 skips the row.
        objective: terms of the loss and its settings.
        gradient: filled with the gradient for `student`, of its shape; may be its memory. None: no gradient.
    """
    vocab = student.shape[-1]
    accumulate_dtype = row_scale.dtype
    flat = student.reshape(-1, vocab)
    loss = row_scale.new_empty(row_scale.shape)
    flat_teacher = None if teacher is None else teacher.reshape(-1, vocab)
    made = None if gradient is None else torch.empty_like(flat)
    chunk = max(REFERENCE_CHUNK_ELEMENTS // vocab, 1)
    for start in range(0, loss.numel(), chunk):
        here = slice(start, start + chunk)
        result = reference_rows(
            flat[here].to(accumulate_dtype),
            None if flat_teacher is None else flat_teacher[here].to(accumulate_dtype),
            objective,
            RowRequest(None if labels is None else labels[here], row_scale[here], with_gradient=made is not None),
        )
        loss[here] = result.loss
        if made is not None and result.gradient is not None:
            made[here] = result.gradient.to(made.dtype)
    if gradient is not None and made is not None:
        gradient.copy_(made.view(gradient.shape))
    return loss


def logit_rows(
    student: torch.Tensor,
    teacher: torch.Tensor | None,
    labels: torch.Tensor | None,
    row_scale: torch.Tensor,
    objective: Objective,
    gradient: torch.Tensor | None,
) -> torch.Tensor:
    """Return row losses [N] and fill `gradient` by the kernel, or by the reference where no kernel applies."""
    batch = RowBatch(labels, row_scale, None).contiguous()
    check_values(batch, student.shape[-1], labels_count=objective.hard_weight != 0.0)
    kernel = runs_on_triton(student) and student.dtype != torch.float64
    path = launch_logit_rows if kernel else reference_logit_rows
    return path(student, teacher, batch.labels, batch.row_scale, objective, gradient)
