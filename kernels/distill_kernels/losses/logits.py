"""Divergences and cross-entropy over logits that already exist, with the gradient made in the forward pass.

The gradient goes to new memory, or with `in_place` over the student's logits; backward multiplies it in place by the
upstream gradient, and not at all where that is 1. The arithmetic is in logit_row_kernel.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from distill_kernels.launch import constant_in_graphs
from distill_kernels.losses.arguments import FLOATS, REDUCTIONS, check_tokens, checked_direction, expect
from distill_kernels.losses.linear import row_scales
from distill_kernels.losses.logit_row_kernel import logit_rows
from distill_kernels.losses.scaling import fp16_safe_scale, scale_gradient_
from distill_kernels.losses.terms import Clip, LossTerm, Objective, Temperatures, make_objective, plain_number
from distill_kernels.operands import check_tensor, differentiable_once

SECOND_BACKWARD = "the loss was already differentiated: its gradient is made once, in the forward pass; call it again"


@torch.library.custom_op("distill::logit_divergence", mutates_args=())
def logit_divergence_op(
    student: torch.Tensor,
    teacher: torch.Tensor | None,
    labels: torch.Tensor | None,
    row_scale: torch.Tensor,
    objective: str,
    with_gradient: bool,
) -> list[torch.Tensor]:
    """Row losses [N] and their sum's gradient for the student's logits [B, S, V] (empty where not required)."""
    shape = student.shape if with_gradient else (0,)
    gradient = torch.empty(shape, dtype=student.dtype, device=student.device)
    required = gradient if with_gradient else None
    return [logit_rows(student, teacher, labels, row_scale, Objective.decode(objective), required), gradient]


@logit_divergence_op.register_fake
def _(student, teacher, labels, row_scale, objective, with_gradient):
    gradient = torch.empty(student.shape if with_gradient else (0,), dtype=student.dtype, device=student.device)
    return [torch.empty_like(row_scale), gradient]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    ctx.save_for_backward(output[1])


@differentiable_once
def _op_backward(ctx: Any, upstream: list[torch.Tensor]) -> tuple[Any, ...]:
    (gradient,) = ctx.saved_tensors
    # One factor a row, over the columns. Not in place: it is an output of the operator that autograd has saved.
    factor = upstream[0].view(*gradient.shape[:2], 1)
    return (gradient * factor).to(gradient.dtype), None, None, None, None, None


logit_divergence_op.register_autograd(_op_backward, setup_context=_save)


class _LogitLoss(torch.autograd.Function):
    """Eager calls: the gradient is kept out of autograd's sight, scaled in place and handed out once."""

    @staticmethod
    def forward(ctx: Any, student: torch.Tensor, call: Any) -> torch.Tensor:
        teacher, labels, row_scale, objective, per_row, required, in_place = call
        gradient = None
        if required:
            gradient = (
                student.detach() if in_place else torch.empty(student.shape, dtype=student.dtype, device=student.device)
            )
        loss = logit_rows(student.detach(), teacher, labels, row_scale, objective, gradient)
        if required and in_place:
            # The kernel wrote behind autograd's back: an operation that saved these logits for its backward must
            # notice.
            torch.autograd.graph.increment_version(student)
        ctx.gradient = gradient
        ctx.per_row = per_row
        return loss if per_row else loss.sum()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        if ctx.gradient is None:
            raise RuntimeError(SECOND_BACKWARD)
        gradient = ctx.gradient
        # Without a reference of our own autograd takes the memory as it is, with no copy; a second backward finds none.
        ctx.gradient = None
        if ctx.per_row:
            return gradient.mul_(upstream.view(*gradient.shape[:2], 1)), None
        return scale_gradient_(gradient, upstream), None


def _as_batches(logits: torch.Tensor) -> torch.Tensor:
    """[..., V] as [B, S, V], a view wherever strides allow, columns side by side."""
    # The kernel takes strides of batch and position but columns side by side: `logits[:, :-1]` is a view, and not
    # copied.
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    return logits.unsqueeze(0) if logits.dim() == 2 else logits if logits.dim() == 3 else logits.flatten(0, -3)


def _objective(terms: tuple[LossTerm, ...], settings: tuple[tuple[str, Any], ...]) -> Objective:
    return make_objective(terms, **dict(settings))


_cached_objective = functools.lru_cache(maxsize=256)(_objective)  # eager calls only: torch.compile warns of caches


@constant_in_graphs
def _encoded(terms: tuple[LossTerm, ...], settings: tuple[tuple[str, Any], ...]) -> str:
    return _objective(terms, settings).encode()


def distillation_loss(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor | None,
    labels: torch.Tensor | None = None,
    *,
    terms: Sequence[LossTerm],
    temperature: float | Temperatures = 1.0,
    scale_by_temperature_squared: bool = True,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    token_weights: torch.Tensor | None = None,
    num_items: torch.Tensor | int | None = None,
    in_place: bool = False,
) -> torch.Tensor:
    """Any weighted sum of divergences at one temperature, plus hard labels, over logits that exist.

    Where hidden states and heads are at hand, `FusedDistillationLoss` never makes the logits.

    Args:
        student_logits: [N, V] or [..., V], fp32, bf16, fp16 or fp64; gets a gradient. `logits[:, :-1]` is not copied.
        teacher_logits: the same shape, any of these dtypes; None for cross-entropy alone.
        labels: integers of the leading shape, already shifted; rows with `ignore_index` do not count. None: all count.
        terms: `LossTerm(type, weight, beta, alpha, clip)`.
        temperature: softmax temperature T > 0 of the divergences, or `Temperatures(teacher, student)`; cross-entropy is
            at T = 1.
        scale_by_temperature_squared: multiply the divergences by T^2, of the student's T.
        label_smoothing: share of the hard target that is spread over the vocabulary.
        z_loss: weight of the squared log-normaliser beside the cross-entropy.
        ignore_index: label of rows that do not count.
        reduction: "mean" over `num_items` or the rows that count, "sum", or "none" (per row).
        token_weights: factor of each row's loss, of the leading shape.
        num_items: divisor of the mean, int or integer tensor.
        in_place: write the gradient over `student_logits`, whose values are lost; it may not be a leaf. Without a
            gradient asked for, and under torch.compile (which plans memory itself), nothing is overwritten.

    Returns:
        fp32 scalar (fp64 for fp64 logits), or the leading shape for "none".

    Raises:
        ValueError: naming the argument that does not fit.
    """
    settings = (
        ("temperature", plain_number(temperature, "temperature")),
        ("scale_by_temperature_squared", scale_by_temperature_squared),
        ("label_smoothing", plain_number(label_smoothing, "label_smoothing")),
        ("z_loss", plain_number(z_loss, "z_loss")),
    )
    terms = tuple(LossTerm(*map(plain_number, term)) for term in terms)
    make = _objective if torch.compiler.is_compiling() else _cached_objective
    objective = make(terms, settings)
    for name, tensor in (("student_logits", student_logits), ("teacher_logits", teacher_logits)):
        if tensor is not None:
            check_tensor(name, tensor)
    leading = student_logits.shape[:-1]
    floating = student_logits.dim() >= 2 and student_logits.dtype in FLOATS
    got = f"{list(student_logits.shape)} of {student_logits.dtype}"
    expect(floating, "student_logits", "floating [..., V] of at least 2 dimensions", got)
    expect(reduction in REDUCTIONS, "reduction", "one of mean, sum, none", repr(reduction))
    if objective.needs_teacher:
        expect(teacher_logits is not None, "teacher_logits", "the teacher's logits", None)
    else:
        teacher_logits = None
    if teacher_logits is not None:
        same = teacher_logits.shape == student_logits.shape and teacher_logits.device == student_logits.device
        expected = f"{list(student_logits.shape)} on {student_logits.device} as student_logits"
        expect(same, "teacher_logits", expected, f"{list(teacher_logits.shape)} on {teacher_logits.device}")
        teacher_logits = _as_batches(teacher_logits.detach())
    check_tokens(labels, token_weights, num_items, None, leading=leading, device=student_logits.device)
    labels = None if labels is None else labels.reshape(-1)
    expect(labels is not None or objective.hard_weight == 0, "labels", "indices, for the cross-entropy term", None)
    token_weights = None if token_weights is None else token_weights.detach().reshape(-1)
    required = student_logits.requires_grad and torch.is_grad_enabled()
    if in_place:
        sizes = student_logits.shape
        steps = student_logits.stride()
        # A row that strides repeat would be overwritten once for each of its uses; a leaf would lose a parameter's
        # values.
        shared = any(size > 1 and step == 0 for size, step in zip(sizes, steps, strict=True))
        free = not (student_logits.is_leaf and required) and student_logits.stride(-1) == 1 and not shared
        expected = "student_logits computed by an operation, its last dimension contiguous, no row expanded"
        expect(free, "in_place", expected, "a leaf" if student_logits.is_leaf else f"strides {student_logits.stride()}")
    student = _as_batches(student_logits)
    rows = student.shape[0] * student.shape[1]
    scale = row_scales(
        # In place of hidden states, of which only rows, dtype and device are read.
        student_logits.new_empty(0).expand(rows, 0),
        labels,
        token_weights,
        num_items,
        None,
        ignore_index=ignore_index,
        reduction=reduction,
    )
    per_row = reduction == "none"
    # fp16 gradients of a mean over many rows underflow: the kernel works at about 1, and `down` takes the factor back
    # in the loss, whose upstream gradient then carries it to backward.
    scale, down = (scale, None) if per_row or not required else fp16_safe_scale(scale, student.dtype)
    if torch.compiler.is_compiling():
        loss = logit_divergence_op(student, teacher_logits, labels, scale, _encoded(terms, settings), required)[0]
        loss = loss if per_row else loss.sum()
    else:
        call = (teacher_logits, labels, scale, objective, per_row, required, in_place)
        loss = _LogitLoss.apply(student, call)
    if down is not None:
        loss = loss * down
    return loss.view(leading) if per_row else loss


def kl_div(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    labels: torch.Tensor | None = None,
    direction: str = "forward",
    temperature: float | Temperatures = 1.0,
    reduction: str = "mean",
    clip: Clip | None = None,
    **settings: Any,
) -> torch.Tensor:
    """KL(p_t || p_s), or KL(p_s || p_t) for direction "reverse"; `settings` as in `distillation_loss`.

    Args:
        student_logits: [..., V], fp32, bf16 or fp16 (fp64 on the CPU); gets a gradient.
        teacher_logits: [..., V], the same leading dimensions; no gradient.
        labels: integers [...]; rows with `ignore_index` do not count. None: all rows count.
        direction: "forward" or "reverse".
        temperature: softmax temperature T > 0, or `Temperatures(teacher, student)`.
        reduction: "mean", "sum" or "none".
        clip: caps of the divergence, or None.
        settings: other keywords of `distillation_loss`.

    Returns:
        fp32 scalar, or [...] with reduction "none".

    Raises:
        ValueError: naming the argument that does not fit.
    """
    term = LossTerm(f"{checked_direction(direction)}_kl", 1.0, clip=clip)
    return distillation_loss(
        student_logits, teacher_logits, labels, terms=[term], temperature=temperature, reduction=reduction, **settings
    )


def jsd(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    labels: torch.Tensor | None = None,
    beta: float = 0.5,
    temperature: float | Temperatures = 1.0,
    reduction: str = "mean",
    clip: Clip | None = None,
    **settings: Any,
) -> torch.Tensor:
    """Generalised Jensen-Shannon divergence; returns and raises as `kl_div`.

    Args:
        student_logits, teacher_logits, labels, temperature, reduction, clip, settings: see `kl_div`.
        beta: the teacher's share, in [0, 1]; 0 is forward KL, 1 reverse KL.
    """
    term = LossTerm("jsd", 1.0, beta=beta, clip=clip)
    return distillation_loss(
        student_logits, teacher_logits, labels, terms=[term], temperature=temperature, reduction=reduction, **settings
    )


def skew_kl(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    labels: torch.Tensor | None = None,
    alpha: float = 0.1,
    direction: str = "forward",
    temperature: float | Temperatures = 1.0,
    reduction: str = "mean",
    clip: Clip | None = None,
    **settings: Any,
) -> torch.Tensor:
    """Skewed KL (DistiLLM), forward or reverse; returns and raises as `kl_div`.

    Args:
        student_logits, teacher_logits, labels, direction, temperature, reduction, settings: see `kl_div`.
        alpha: the skew, in [0, 1).
    """
    term = LossTerm(f"skew_{checked_direction(direction)}_kl", 1.0, alpha=alpha, clip=clip)
    return distillation_loss(
        student_logits, teacher_logits, labels, terms=[term], temperature=temperature, reduction=reduction, **settings
    )


def tvd(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    labels: torch.Tensor | None = None,
    temperature: float | Temperatures = 1.0,
    reduction: str = "mean",
    clip: Clip | None = None,
    **settings: Any,
) -> torch.Tensor:
    """Total variation distance, half the sum of |p_t - p_s|; returns and raises as `kl_div`.

    Args:
        student_logits, teacher_logits, labels, temperature, reduction, clip, settings: see `kl_div`.
    """
    term = LossTerm("tvd", 1.0, clip=clip)
    return distillation_loss(
        student_logits, teacher_logits, labels, terms=[term], temperature=temperature, reduction=reduction, **settings
    )


def cross_entropy(
    student_logits: torch.Tensor, labels: torch.Tensor, reduction: str = "mean", **settings: Any
) -> torch.Tensor:
    """Hard-label cross-entropy; `settings` (label_smoothing, z_loss, ...) as in `distillation_loss`.

    Args:
        student_logits: [..., V], fp32, bf16 or fp16 (fp64 on the CPU); gets a gradient.
        labels: integers [...]; rows with `ignore_index` do not count.
        reduction: "mean", "sum" or "none".
        settings: other keywords of `distillation_loss`.

    Returns:
        fp32 scalar, or [...] with reduction "none".

    Raises:
        ValueError: naming the argument that does not fit.
    """
    term = LossTerm("cross_entropy", 1.0)
    return distillation_loss(student_logits, None, labels, terms=[term], reduction=reduction, **settings)
