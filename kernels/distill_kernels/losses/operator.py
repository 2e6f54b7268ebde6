"""Autograd function and operator of the fused loss: gradients are computed in the forward pass, scaled in backward.

Eager calls go through an `autograd.Function`, which hands out the gradients made in the forward pass without copying
them. Compiled calls (`torch.compile(fullgraph=True)`) go through the operator `distill::linear_divergence`, which runs
the same computation. Row scales and the reduction around it are plain PyTorch in both.

With reduction "none" each row has its own upstream gradient, known in backward only. The gradient of hidden states is
scaled by it row by row; other gradients sum over rows, so where one is required, all are recomputed in backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from distill_kernels.losses.arguments import MAX_TOP_K, check_arguments, check_policy, expect
from distill_kernels.losses.linear import linear_divergence, nonzero_rows, row_scales
from distill_kernels.losses.mixture import LossTarget, Mixture, compared_teacher, flatten_teachers
from distill_kernels.losses.operands import Chosen, Head, RequiredGrads, RowBatch, TokenArguments
from distill_kernels.losses.policy_reference import Policy, PolicySettings
from distill_kernels.losses.scaling import fp16_safe_scale, scale_gradient_, take_scaled_gradients
from distill_kernels.losses.terms import Objective, TokenStats
from distill_kernels.losses.topk_reference import StudentTopK, TopK
from distill_kernels.operands import differentiable_once, non_view_output


def _linear_divergence(
    student_hidden: torch.Tensor,
    student_weight: torch.Tensor,
    student_bias: torch.Tensor | None,
    lora_a: torch.Tensor | None,
    lora_b: torch.Tensor | None,
    teacher_hidden: Sequence[torch.Tensor],
    teacher_weight: Sequence[torch.Tensor],
    teacher_bias: Sequence[torch.Tensor | None],
    labels: torch.Tensor | None,
    row_scale: torch.Tensor,
    valid_rows: torch.Tensor | None,
    mixture: Sequence[float],
    objective: str,
    lora_scale: float,
    vocab: int,
    dtype: torch.dtype,
    workspace: int | None,
    skip_rows: bool,
    no_ignored_rows: bool,
    per_row: bool,
    required: list[bool],
    teacher_ids: torch.Tensor | None,
    teacher_logprobs: torch.Tensor | None,
    advantages: torch.Tensor | None,
    old_logprobs: torch.Tensor | None,
    reference_logprobs: torch.Tensor | None,
    tail: str,
    student_k: int,
    policy: str,
) -> list[torch.Tensor]:
    """Return loss ([], or [N] if `per_row`), statistics [7, N] and five gradients; empty where not required."""
    rows = _rows_to_compute(row_scale, valid_rows, skip_rows)
    heads = [Head(*tensors) for tensors in zip(teacher_hidden, teacher_weight, teacher_bias, strict=True)]
    teacher, compared = compared_teacher(heads, mixture, Objective.decode(objective))
    chosen: Chosen | None = None
    if teacher_ids is not None and teacher_logprobs is not None:
        chosen = TopK(teacher_ids, teacher_logprobs, tail)
    elif student_k:
        chosen = StudentTopK(student_k, tail)
    elif policy:
        chosen = Policy(advantages, old_logprobs, reference_logprobs, PolicySettings.decode(policy))
    batch = RowBatch(labels, row_scale, rows, chosen, no_ignored_rows)
    student = Head(student_hidden, student_weight, student_bias, lora_a, lora_b, lora_scale)
    output = linear_divergence(
        student,
        teacher,
        batch,
        compared,
        RequiredGrads(*required),
        vocab=vocab,
        dtype=dtype,
        workspace=workspace,
    )
    empty = row_scale.new_empty(0)
    stats = empty if output.stats is None else torch.stack(output.stats)
    loss = output.loss if per_row else output.loss.sum()
    gradients = (
        gradient if gradient is not None else empty.new_empty(0, dtype=(row_scale if like is None else like).dtype)
        for gradient, like in zip(output.gradients, student[:5], strict=True)
    )
    return [loss, stats, *gradients]


def _rows_to_compute(row_scale: torch.Tensor, valid_rows: torch.Tensor | None, skip: bool) -> torch.Tensor | None:
    """Return the rows to gather; None for all rows, where all are given (in any order) or none may be skipped."""
    if valid_rows is None:
        return nonzero_rows(row_scale) if skip else None
    return None if valid_rows.numel() == row_scale.numel() else valid_rows


linear_divergence_op = torch.library.custom_op("distill::linear_divergence", _linear_divergence, mutates_args=())
# torch's registrations give the arguments as one tuple; here they are taken by name
PARAMETERS = tuple(inspect.signature(_linear_divergence).parameters)
STUDENT = PARAMETERS[:5]
TEACHERS = ("teacher_hidden", "teacher_weight", "teacher_bias")  # a list of tensors each
ROWS = ("labels", "row_scale", "valid_rows")
TOKENS = ("teacher_ids", "teacher_logprobs", "advantages", "old_logprobs", "reference_logprobs")


@linear_divergence_op.register_fake
def _(*inputs):
    given = dict(zip(PARAMETERS, inputs, strict=True))
    row_scale = given["row_scale"]
    required = RequiredGrads(*given["required"])
    n = row_scale.shape[0]
    stats = row_scale.new_empty((len(TokenStats._fields), n), dtype=torch.float32)
    gradients = (
        torch.empty(like.shape, dtype=like.dtype, device=like.device)
        if want and like is not None
        else row_scale.new_empty(0, dtype=(row_scale if like is None else like).dtype)
        for want, like in zip(required, (given[name] for name in STUDENT), strict=False)
    )
    return [
        row_scale.new_empty(n if given["per_row"] else ()),
        stats if required.stats else row_scale.new_empty(0),
        *gradients,
    ]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    given = dict(zip(PARAMETERS, inputs, strict=True))
    ctx.per_row = given["per_row"]
    ctx.required = given["required"]
    # the forward pass left a head's gradients to the backward, which alone knows each row's upstream gradient
    ctx.recompute = ctx.per_row and not ctx.required[0]
    ctx.without_gradient = [_no_gradient(given[name]) for name in PARAMETERS[5:]]
    if not ctx.recompute:
        ctx.save_for_backward(*output[2:])
        return
    tensors = {*STUDENT, *TEACHERS, *ROWS, *TOKENS}
    ctx.settings = {name: value for name, value in given.items() if name not in tensors}
    ctx.teachers = len(given["teacher_hidden"])
    ctx.save_for_backward(
        *(given[name] for name in (*STUDENT, *ROWS, *TOKENS)),
        *(tensor for name in TEACHERS for tensor in given[name]),
    )


def _no_gradient(given: Any) -> Any:
    """Return backward's value for an argument without gradient: autograd unpacks lists of tensors, also empty ones."""
    return [None] * len(given) if isinstance(given, list) and all(map(torch.is_tensor, given)) else None


@differentiable_once
def _op_backward(ctx: Any, upstream: list[torch.Tensor]) -> tuple[Any, ...]:
    if ctx.recompute:
        saved = iter(ctx.saved_tensors)
        again = {name: next(saved) for name in (*STUDENT, *ROWS, *TOKENS)}
        for name in TEACHERS:
            again[name] = [next(saved) for _ in range(ctx.teachers)]
        scale, factor = fp16_safe_scale(again["row_scale"] * upstream[0], ctx.settings["dtype"])
        required = [*ctx.needs_input_grad[:5], False]
        again |= ctx.settings | {
            "row_scale": scale,
            "required": required,
            "no_ignored_rows": False,  # a row's upstream gradient, now part of its scale, may be 0
            "per_row": False,  # the gradients are of the scaled rows' sum
        }
        made = linear_divergence_op(**again)[2:]
    else:
        required = ctx.required
        made = ctx.saved_tensors
        factor = upstream[0][:, None] if ctx.per_row else upstream[0]
    gradients = [
        _scale_and_round(gradient, factor) if want else None for gradient, want in zip(made, required, strict=False)
    ]
    return (*gradients, *ctx.without_gradient)


def _scale_and_round(gradient: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """Return `gradient * factor`, rounded once; computed in fp32, so that a factor too small for fp16 still counts."""
    accumulate_dtype = torch.promote_types(gradient.dtype, torch.float32)
    return gradient if factor is None else (gradient.to(accumulate_dtype) * factor).to(gradient.dtype)


linear_divergence_op.register_autograd(_op_backward, setup_context=_save_for_backward)


class _FusedLoss(torch.autograd.Function):
    """Autograd function of eager calls; gradients are kept outside of autograd, scaled in place, returned once."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, lora_a: Any, lora_b: Any, call: Any) -> Any:
        teacher, batch, objective, required, settings, per_row, lora_scale = call
        student = Head(hidden, weight, bias, lora_a, lora_b, lora_scale)
        recompute = per_row and any(required[1:5])
        now = RequiredGrads(stats=required.stats) if recompute else required
        output = linear_divergence(student, teacher, batch, objective, now, **settings)
        if recompute:
            ctx.save_for_backward(hidden, weight, bias, lora_a, lora_b)
            ctx.recompute = (teacher, batch._replace(lse=output.lse), objective, required, settings, lora_scale)
            ctx.versions = _versions(teacher, batch)
        else:
            ctx.gradients = output.gradients
            ctx.per_row = per_row
        loss = non_view_output(output.loss) if per_row else output.loss.sum()
        stats = None if output.stats is None else torch.stack(output.stats)
        if stats is not None:
            ctx.mark_non_differentiable(stats)
        return loss, stats

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, upstream: torch.Tensor, _: Any) -> Any:
        if hasattr(ctx, "recompute"):
            for name, tensor, version in ctx.versions:
                expected = 'no change before backward, since reduction="none" computes again'
                expect(tensor._version == version, name, expected, "a tensor that was modified in place")
            teacher, batch, objective, required, settings, lora_scale = ctx.recompute
            # the upstream gradient of a row is its factor, and may be 0 where the loss counted
            scale, down = fp16_safe_scale(batch.row_scale * upstream, settings["dtype"])
            student = Head(*ctx.saved_tensors)._replace(lora_scale=lora_scale)
            batch = batch._replace(row_scale=scale, no_ignored_rows=False)
            output = linear_divergence(student, teacher, batch, objective, required._replace(stats=False), **settings)
            scaled = (g if g is None or down is None else scale_gradient_(g, down) for g in output.gradients)
            return (*scaled, None)
        if ctx.per_row:
            return (_scale_and_round(ctx.gradients[0], upstream[:, None]), *[None] * 5)
        return (*take_scaled_gradients(ctx, upstream), None)


def _versions(teacher: Head | Mixture | None, batch: RowBatch) -> list[tuple[str, torch.Tensor, int]]:
    """Return names, tensors and versions of what backward reads again and autograd does not track."""
    heads = teacher.heads if isinstance(teacher, Mixture) else () if teacher is None else (teacher,)
    read = [(f"teacher_{name}", tensor) for head in heads for name, tensor in zip(Head._fields, head[:3], strict=False)]
    read += [("labels", batch.labels), ("valid_rows", batch.rows)]
    if isinstance(batch.chosen, TopK):
        read += [("teacher_ids", batch.chosen.ids), ("teacher_logprobs", batch.chosen.logprobs)]
    if isinstance(batch.chosen, Policy):
        read += list(zip(Policy._fields, batch.chosen[:3], strict=False))
    known = [(name, tensor) for name, tensor in read if tensor is not None and not tensor.is_inference()]
    return [(name, tensor, tensor._version) for name, tensor in known]


class LossSettings(NamedTuple):
    """Settings of a loss module; `encoded` is `objective.encode()`."""

    objective: Objective
    encoded: str
    ignore_index: int
    reduction: str
    workspace: int | None
    skip_ignored_rows: bool


def fused_loss(
    settings: LossSettings,
    student: Head,
    target: LossTarget,
    tokens: TokenArguments,
    vocab_size: int | None = None,
    *,
    return_stats: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, TokenStats]:
    """Compute a fused loss from its settings and arguments; every loss module calls this.

    Args:
        settings: settings of the loss module.
        student: the student's hidden states [..., H] and head.
        target: what the student is compared with; teachers are left out where nothing reads them.
        tokens: labels, weights and the rows that count.
        vocab_size: columns that both vocabularies share; None: all.
        return_stats: return `(loss, TokenStats)`.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    objective = settings.objective
    teachers = target.teachers if objective.needs_teacher or return_stats else ()
    vocab, dtype = check_arguments(student, teachers, tokens, vocab_size, needs_labels=objective.hard_weight != 0.0)
    shape = student.hidden.shape[:-1]
    chosen = _by_row(target.chosen, vocab, shape, student.hidden.device)
    counted, mixture = flatten_teachers(teachers) if teachers else ([], [])
    heads = [teacher.by_row() for teacher in counted]
    student = student._replace(hidden=student.hidden.flatten(0, -2))
    labels = None if tokens.labels is None else tokens.labels.flatten()
    weights = None if tokens.weights is None else tokens.weights.detach().flatten()
    scale = row_scales(
        student.hidden,
        labels,
        weights,
        tokens.num_items,
        tokens.valid_rows,
        ignore_index=settings.ignore_index,
        reduction=settings.reduction,
    )
    some_ignored = labels is not None or weights is not None
    skip = settings.skip_ignored_rows and tokens.valid_rows is None and some_ignored
    no_ignored_rows = skip or not some_ignored
    flags = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in student[:5]]
    required = RequiredGrads(*flags)._replace(stats=return_stats)
    per_row = settings.reduction == "none"
    # gradients that sum over rows wait for backward, which knows each row's upstream gradient
    recompute = per_row and any(flags[1:])
    scale, down = (scale, None) if recompute else fp16_safe_scale(scale, dtype)
    if torch.compiler.is_compiling():
        loss, stats, *_ = linear_divergence_op(
            *student[:5],
            teacher_hidden=[head.hidden for head in heads],
            teacher_weight=[head.weight for head in heads],
            teacher_bias=[head.bias for head in heads],
            labels=labels,
            row_scale=scale,
            valid_rows=tokens.valid_rows,
            mixture=mixture,
            objective=settings.encoded,
            lora_scale=student.lora_scale,
            vocab=vocab,
            dtype=dtype,
            workspace=settings.workspace,
            skip_rows=skip,
            no_ignored_rows=no_ignored_rows,
            per_row=per_row,
            required=list(RequiredGrads(stats=return_stats) if recompute else required),
            **_plain_arguments(chosen),
        )
    else:
        rows = _rows_to_compute(scale, tokens.valid_rows, skip)
        teacher, compared = compared_teacher(heads, mixture, objective)
        how = {"vocab": vocab, "dtype": dtype, "workspace": settings.workspace}
        batch = RowBatch(labels, scale, rows, chosen, no_ignored_rows)
        call = (teacher, batch, compared, required, how, per_row, student.lora_scale)
        loss, stats = _FusedLoss.apply(*student[:5], call)
    if down is not None:
        loss = loss * down
    if per_row:
        loss = loss.view(shape)
    return (loss, TokenStats(*stats.unbind(0))) if return_stats else loss


def _by_row(chosen: Chosen | None, vocab: int, shape: torch.Size, device: torch.device) -> Chosen | None:
    """Check what is known of the chosen tokens, [*shape, ...], and return it by rows, [N, ...]."""
    if isinstance(chosen, TopK):
        most = min(vocab, MAX_TOP_K)
        expect(0 < chosen.ids.shape[-1] <= most, "teacher_ids", f"K of 1 to {most}", chosen.ids.shape[-1])
        return chosen._replace(ids=chosen.ids.flatten(0, -2), logprobs=chosen.logprobs.flatten(0, -2))
    if isinstance(chosen, StudentTopK):
        expect(chosen.k <= vocab, "k", f"1 to the {vocab} columns that count", chosen.k)
    if isinstance(chosen, Policy):
        check_policy(chosen, shape, device)
        advantages, old, reference = (None if each is None else each.detach().flatten() for each in chosen[:3])
        return Policy(advantages, old, reference, chosen.settings)
    return chosen


def _plain_arguments(chosen: Chosen | None) -> dict[str, Any]:
    """Return the chosen tokens as the operator takes them: tensors, numbers and text."""
    policy = chosen if isinstance(chosen, Policy) else None
    return {
        "teacher_ids": chosen.ids if isinstance(chosen, TopK) else None,
        "teacher_logprobs": chosen.logprobs if isinstance(chosen, TopK) else None,
        "advantages": None if policy is None else policy.advantages,
        "old_logprobs": None if policy is None else policy.old_logprobs,
        "reference_logprobs": None if policy is None else policy.reference_logprobs,
        "tail": chosen.tail if isinstance(chosen, TopK | StudentTopK) else "",
        "student_k": chosen.k if isinstance(chosen, StudentTopK) else 0,
        "policy": "" if policy is None else policy.settings.encode(),
    }
