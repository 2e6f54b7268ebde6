"""The fused loss as autograd sees it: arguments checked, gradients made in the forward pass, scaled in backward.

Eager calls go through an `autograd.Function`, which hands out the gradients made in the forward pass without copying
them. Compiled calls (`torch.compile(fullgraph=True)`) go through the operator `distill::linear_divergence`, which runs
the same computation. Row scales and the reduction around it are plain PyTorch in both.

With reduction "none" what comes from above is known in backward alone. A gradient of hidden states is scaled by it
then, row by row; where any other is wanted, which sums over rows, all are made in backward, by computing once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from distill_kernels.losses.arguments import MOST_TOP_K, check_arguments, expect, lora_of
from distill_kernels.losses.linear import find_rows, linear_divergence, row_scales
from distill_kernels.losses.mixture import Mixture, TeacherHead, shares_of, teacher_of
from distill_kernels.losses.operands import Batch, Head, Inputs, Wanted
from distill_kernels.losses.scaling import hand_out, power_of_two, scale_gradient_
from distill_kernels.losses.sharded_heads import Heads, own_heads
from distill_kernels.losses.shards import VocabShard
from distill_kernels.losses.terms import Objective, TokenStats
from distill_kernels.losses.topk_rows import TopK
from distill_kernels.operands import differentiable_once, own_output


@torch.library.custom_op("distill::linear_divergence", mutates_args=())
def linear_divergence_op(
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
    all_count: bool,
    per_row: bool,
    wanted: list[bool],
    teacher_ids: torch.Tensor | None,
    teacher_logprobs: torch.Tensor | None,
    tail: str,
    shard: str,
) -> list[torch.Tensor]:
    """Loss ([] or, `per_row`, [N]), statistics [7, N], gradients of the five student tensors; empty where unwanted."""
    rows = _rows_to_compute(row_scale, valid_rows, skip_rows)
    heads = [Head(*tensors) for tensors in zip(teacher_hidden, teacher_weight, teacher_bias, strict=True)]
    teacher, compared = teacher_of(heads, mixture, Objective.decode(objective))
    top = None if teacher_ids is None or teacher_logprobs is None else TopK(teacher_ids, teacher_logprobs, tail)
    batch = Batch(labels, row_scale, rows, top, all_count)
    student = Head(student_hidden, student_weight, student_bias, lora_a, lora_b, lora_scale)
    own = VocabShard.decode(shard) if shard else None
    outcome = linear_divergence(
        student, teacher, batch, compared, Wanted(*wanted), vocab=vocab, dtype=dtype, workspace=workspace, shard=own
    )
    empty = row_scale.new_empty(0)
    stats = empty if outcome.stats is None else torch.stack(outcome.stats)
    loss = outcome.loss if per_row else outcome.loss.sum()
    gradients = (
        gradient if gradient is not None else empty.new_empty(0, dtype=(row_scale if like is None else like).dtype)
        for gradient, like in zip(outcome.gradients, student[:5], strict=True)
    )
    return [loss, stats, *gradients]


def _rows_to_compute(row_scale: torch.Tensor, valid_rows: torch.Tensor | None, skip: bool) -> torch.Tensor | None:
    """The rows to gather, or None for all where all are named (in any order) or none may be skipped."""
    if valid_rows is None:
        return find_rows(row_scale) if skip else None
    return None if valid_rows.numel() == row_scale.numel() else valid_rows


@linear_divergence_op.register_fake
def _(
    student_hidden,
    student_weight,
    student_bias,
    lora_a,
    lora_b,
    teacher_hidden,
    teacher_weight,
    teacher_bias,
    labels,
    row_scale,
    valid_rows,
    mixture,
    objective,
    lora_scale,
    vocab,
    dtype,
    workspace,
    skip_rows,
    all_count,
    per_row,
    wanted,
    teacher_ids,
    teacher_logprobs,
    tail,
    shard,
):
    n = student_hidden.shape[0]
    inputs = (student_hidden, student_weight, student_bias, lora_a, lora_b)
    return [
        row_scale.new_empty(n) if per_row else row_scale.new_empty(()),
        row_scale.new_empty((len(TokenStats._fields), n), dtype=torch.float32) if wanted[5] else row_scale.new_empty(0),
        *(
            torch.empty(like.shape, dtype=like.dtype, device=like.device)
            if want and like is not None
            else row_scale.new_empty(0, dtype=(row_scale if like is None else like).dtype)
            for want, like in zip(wanted[:5], inputs, strict=True)
        ),
    ]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    ctx.settings, ctx.wanted, ctx.text, ctx.teachers = inputs[11:20], inputs[20], inputs[23:25], len(inputs[5])
    ctx.per_row, ctx.again = inputs[19], inputs[19] and not inputs[20][0]
    ctx.without_gradient = [_no_gradient(given) for given in inputs[5:]]
    again = (*inputs[:5], *inputs[8:11], *inputs[21:23], *inputs[5], *inputs[6], *inputs[7])
    ctx.save_for_backward(*(again if ctx.again else output[2:]))


def _no_gradient(given: Any) -> Any:
    """What backward returns for an argument without one: autograd takes a list of tensors, or an empty one, apart."""
    return [None] * len(given) if isinstance(given, list) and all(map(torch.is_tensor, given)) else None


@differentiable_once
def _op_backward(ctx: Any, upstream: list[torch.Tensor]) -> tuple[Any, ...]:
    if ctx.again:
        count = ctx.teachers
        students, (labels, row_scale, valid_rows), top = (ctx.saved_tensors[i:j] for i, j in ((0, 5), (5, 8), (8, 10)))
        teachers = [list(ctx.saved_tensors[10 + count * part :][:count]) for part in range(3)]
        wanted = [*ctx.needs_input_grad[:5], False]
        settings = list(ctx.settings)
        settings[7:9] = False, False
        scale, factor = power_of_two(row_scale * upstream[0], settings[4])
        made = linear_divergence_op(
            *students, *teachers, labels, scale, valid_rows, *settings, wanted, *top, *ctx.text
        )[2:]
    else:
        wanted, made, factor = ctx.wanted, ctx.saved_tensors, upstream[0][:, None] if ctx.per_row else upstream[0]
    gradients = [_times(gradient, factor) if want else None for gradient, want in zip(made, wanted, strict=False)]
    return (*gradients, *ctx.without_gradient)


def _times(gradient: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """`gradient * factor`, rounded once; a factor below what 16 bits can hold counts as well."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return gradient if factor is None else (gradient.to(wide) * factor).to(gradient.dtype)


linear_divergence_op.register_autograd(_op_backward, setup_context=_save_for_backward)


class _FusedLoss(torch.autograd.Function):
    """The same for eager calls: gradients are kept out of autograd's sight, scaled in place and handed out once."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, lora_a: Any, lora_b: Any, call: Any) -> Any:
        teacher, batch, objective, wanted, settings, per_row, lora_scale = call
        student = Head(hidden, weight, bias, lora_a, lora_b, lora_scale)
        again = per_row and any(wanted[1:5])
        now = Wanted(stats=wanted.stats) if again else wanted
        outcome = linear_divergence(student, teacher, batch, objective, now, **settings)
        if again:
            ctx.save_for_backward(hidden, weight, bias, lora_a, lora_b)
            ctx.again = (teacher, batch._replace(lse=outcome.lse), objective, wanted, settings, lora_scale)
            ctx.versions = _versions(teacher, batch)
        else:
            ctx.gradients, ctx.per_row = outcome.gradients, per_row
        loss = own_output(outcome.loss) if per_row else outcome.loss.sum()
        stats = None if outcome.stats is None else torch.stack(outcome.stats)
        if stats is not None:
            ctx.mark_non_differentiable(stats)
        return loss, stats

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, upstream: torch.Tensor, _: Any) -> Any:
        if hasattr(ctx, "again"):
            for name, tensor, version in ctx.versions:
                expected = 'no change before backward, since reduction="none" computes again'
                expect(tensor._version == version, name, expected, "a tensor that was modified in place")
            teacher, batch, objective, wanted, settings, lora_scale = ctx.again
            scale, down = power_of_two(batch.row_scale * upstream, settings["dtype"])
            student = Head(*ctx.saved_tensors)._replace(lora_scale=lora_scale)
            batch = batch._replace(row_scale=scale, all_count=False)
            outcome = linear_divergence(student, teacher, batch, objective, wanted._replace(stats=False), **settings)
            scaled = (g if g is None or down is None else scale_gradient_(g, down) for g in outcome.gradients)
            return (*scaled, None)
        if ctx.per_row:
            return (_times(ctx.gradients[0], upstream[:, None]), *[None] * 5)
        return (*hand_out(ctx, upstream), None)


def _versions(teacher: Head | Mixture | None, batch: Batch) -> list[tuple[str, torch.Tensor, int]]:
    """What backward reads again and autograd does not watch: names, tensors, and how often each was modified."""
    heads = teacher.heads if isinstance(teacher, Mixture) else () if teacher is None else (teacher,)
    read = [(f"teacher_{name}", tensor) for head in heads for name, tensor in zip(Head._fields, head[:3], strict=False)]
    read += [("labels", batch.labels), ("valid_rows", batch.rows)]
    if batch.top is not None:
        read += [("teacher_ids", batch.top.ids), ("teacher_logprobs", batch.top.logprobs)]
    known = [(name, tensor) for name, tensor in read if tensor is not None and not tensor.is_inference()]
    return [(name, tensor, tensor._version) for name, tensor in known]


def _detached(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Head:
    return Head(hidden.detach().flatten(0, -2), weight.detach(), None if bias is None else bias.detach())


class Settings(NamedTuple):
    """What a module was made with; `encoded` is `objective.encode()`."""

    objective: Objective
    encoded: str
    ignore_index: int
    reduction: str
    workspace: int | None
    skip_ignored_rows: bool


def fused_loss(
    settings: Settings,
    inputs: Inputs,
    return_stats: bool,
    *,
    top: TopK | None = None,
    teachers: Sequence[TeacherHead] | None = None,
    tp_group: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, TokenStats]:
    """What every module calls.

    With `top`, [..., K] of every token, the divergence is from this teacher, and none comes as a head; with `teachers`
    from their mixture.
    """
    objective, encoded, ignore_index, reduction, workspace, skip_ignored_rows = settings
    if not objective.needs_teacher and not return_stats:
        inputs = inputs._replace(teacher_hidden=None, teacher_weight=None, teacher_bias=None)
    several = teachers is not None and len(teachers) > 0 and (objective.needs_teacher or return_stats)
    expect(teachers is None or len(teachers) > 0, "teachers", "at least one TeacherHead", "none")
    alone = inputs.teacher_hidden is None and inputs.teacher_weight is None
    expect(not teachers or alone, "teachers", "either teachers or teacher_hidden and teacher_weight", "both")
    # needs no teacher's head, or has them checked one by one
    heads_only = objective if top is None and not several else objective._replace(kinds=())
    inputs, others, shard, lora = _own_inputs(inputs, tp_group, teachers if teachers and several else ())
    vocab, dtype = check_arguments(heads_only, inputs, sharded=shard is not None)
    for number, other in enumerate(others):
        one = inputs._replace(teacher_hidden=other.hidden, teacher_weight=other.weight, teacher_bias=other.bias)
        try:
            check_arguments(objective, one, sharded=shard is not None)
        except ValueError as error:
            raise ValueError(f"teachers[{number}]: {error}") from None
    shape = inputs.student_hidden.shape[:-1]
    if top is not None:
        most = min(vocab if shard is None else shard.vocab, MOST_TOP_K)
        expect(0 < top.ids.shape[-1] <= most, "teacher_ids", f"K of 1 to {most}", top.ids.shape[-1])
        top = TopK(top.ids.flatten(0, -2), top.logprobs.flatten(0, -2), top.tail)
    teacher_heads: list[Head] = []
    mixture: list[float] = []
    if several:
        counted, mixture = shares_of(others)
        teacher_heads = [_detached(teacher.hidden, teacher.weight, teacher.bias) for teacher in counted]
    elif inputs.teacher_hidden is not None and inputs.teacher_weight is not None:
        teacher_heads = [_detached(inputs.teacher_hidden, inputs.teacher_weight, inputs.teacher_bias)]
    hidden, valid_rows = inputs.student_hidden.flatten(0, -2), inputs.valid_rows
    labels = None if inputs.labels is None else inputs.labels.flatten()
    weights = None if inputs.token_weights is None else inputs.token_weights.detach().flatten()
    scale = row_scales(
        hidden, labels, weights, inputs.num_items, valid_rows, ignore_index=ignore_index, reduction=reduction
    )
    per_row = reduction == "none"
    some_ignored = labels is not None or weights is not None
    skip = skip_ignored_rows and valid_rows is None and some_ignored
    all_count = skip or not some_ignored
    students = (hidden, inputs.student_weight, inputs.student_bias, *lora[:2])
    flags = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in students]
    wanted = Wanted(*flags)._replace(stats=return_stats)
    again = per_row and any(flags[1:])
    scale, down = (scale, None) if again else power_of_two(scale, dtype)
    if torch.compiler.is_compiling():
        parts = [[head[part] for head in teacher_heads] for part in range(3)]
        loss, stats, *_ = linear_divergence_op(
            *students,
            *parts,
            labels,
            scale,
            valid_rows,
            mixture,
            encoded,
            lora[2],
            vocab,
            dtype,
            workspace,
            skip,
            all_count,
            per_row,
            list(Wanted(stats=return_stats) if again else wanted),
            *(top or (None, None, "")),
            "" if shard is None else shard.encode(),
        )
    else:
        rows = _rows_to_compute(scale, valid_rows, skip)
        teacher, compared = teacher_of(teacher_heads, mixture, objective)
        how = {"vocab": vocab, "dtype": dtype, "workspace": workspace, "shard": shard}
        batch = Batch(labels, scale, rows, top, all_count)
        loss, stats = _FusedLoss.apply(*students, (teacher, batch, compared, wanted, how, per_row, lora[2]))
    if down is not None:
        loss = loss * down
    if per_row:
        loss = loss.view(shape)
    return (loss, TokenStats(*stats.unbind(0))) if return_stats else loss


def _own_inputs(
    inputs: Inputs, tp_group: Any, teachers: Sequence[TeacherHead]
) -> tuple[Inputs, tuple[TeacherHead, ...], VocabShard | None, tuple[torch.Tensor | None, torch.Tensor | None, float]]:
    """This rank's rows of all heads, `vocab_size` its columns where they are cut; A, B and scale of the LoRA apart."""
    lora_a, lora_b, scale = lora_of(inputs.student_lora)
    names = [name for name in Heads._fields if name in Inputs._fields]
    given = Heads(**{name: getattr(inputs, name) for name in names}, lora_a=lora_a, lora_b=lora_b)
    heads, others, shard = own_heads(given, tp_group, inputs.vocab_size, teachers)
    lora = (heads.lora_a, heads.lora_b, scale)
    own = {name: getattr(heads, name) for name in names}
    own |= {"student_lora": None if inputs.student_lora is None else lora}
    if shard is not None:
        own |= {"vocab_size": shard.columns}
    return inputs._replace(**own), others, shard, lora
