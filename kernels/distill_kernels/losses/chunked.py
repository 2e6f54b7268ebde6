"""Custom per-token losses of logits, computed from hidden states and heads in chunks of rows.

Per chunk: raw logits `x W^T (+ bias) (+ LoRA)` with an fp32 result; the rows' losses by a function of the user's, whose
gradient `G` autograd makes; then `dx = G W` and `dW += G^T x` as in linear.py. Gradients are made in the forward pass;
with reduction "none", where each row has an upstream gradient of its own, in the backward pass, from logits made again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from distill_kernels.launch import device_facts
from distill_kernels.losses.arguments import REDUCTIONS, Lora, check_arguments, expect, unpack_lora, workspace_bytes
from distill_kernels.losses.linear import REFERENCE_CHUNK_ELEMENTS, HeadGradients, nonzero_rows, row_scales
from distill_kernels.losses.mixture import TeacherHead
from distill_kernels.losses.operands import Head, LossOutput, RequiredGrads, RowBatch, TokenArguments
from distill_kernels.losses.projection import matmul_fp32
from distill_kernels.losses.scaling import fp16_safe_scale, scale_gradient_, take_scaled_gradients
from distill_kernels.operands import differentiable_once

Rows = slice | torch.Tensor
# of raw logits [n, V], rows, their factors [n], and whether the gradient is required
RowLoss = Callable[[torch.Tensor, Rows, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor | None]]


def raw_logits(head: Head, hidden: torch.Tensor) -> torch.Tensor:
    """Return logits [n, V] of `hidden` [n, H] before scale and soft cap, fp32 (fp64 for fp64)."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype == torch.float64:
            return a @ b
        return matmul_fp32(a, b, torch.empty(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device))

    logits = product(hidden, head.weight.t())
    if head.bias is not None:
        logits += head.bias
    if head.lora_a is not None and head.lora_b is not None:
        logits.add_(product(hidden @ head.lora_a.t(), head.lora_b.t()), alpha=head.lora_scale)
    return logits


def chunk_rows(vocab: int, workspace: int | None, device: torch.device) -> int:
    """Return the rows of a chunk whose logits, gradient and intermediates (six fp32 copies) fit the workspace."""
    if workspace is None and device.type == "cpu":
        return max(REFERENCE_CHUNK_ELEMENTS // vocab, 1)
    budget = device_facts(device).memory_bytes // 24 if workspace is None else workspace
    # 24 bytes a logit: six fp32 copies
    return min(max(budget // (24 * vocab), 1), 2048)


def run_chunks(
    student: Head,
    batch: RowBatch,
    required: RequiredGrads,
    row_loss: RowLoss,
    *,
    vocab: int,
    dtype: torch.dtype,
    rows: int,
) -> LossOutput:
    """Compute the losses of all rows and the required gradients of their sum.

    Args:
        student: the student's head; gradients come back in its tensors' dtypes.
        batch: row scales and the rows to compute (labels are read by `row_loss` alone).
        required: gradients to compute.
        row_loss: returns the rows' losses times their factors [n], and the gradient [n, V] of their sum or None.
        vocab: columns that count.
        dtype: dtype of the GEMMs' operands.
        rows: rows of a chunk.
    """
    sums = HeadGradients(student, required, vocab, torch.float64 if dtype == torch.float64 else torch.float32)
    hidden = student.hidden
    n = student.hidden.shape[0]
    student = student.cut(vocab, dtype)
    loss = batch.row_scale.new_zeros(n)
    count = n if batch.rows is None else batch.rows.numel()
    for start in range(0, count, rows):
        stop = min(start + rows, count)
        here: Rows = slice(start, stop) if batch.rows is None else batch.rows[start:stop]
        x = hidden[here].to(dtype)
        loss[here], gradient = row_loss(raw_logits(student, x), here, batch.row_scale[here], required.gradient)
        if gradient is not None:
            sums.add(student, batch.mask_ignored(x, here), gradient, here)
    return LossOutput(loss, None, *sums.results())


class _ChunkedCall(NamedTuple):
    """Arguments of `_ChunkedFunction` beside the student's tensors; `per_row`: return each row's loss, no sum."""

    lora_scale: float
    batch: RowBatch
    required: RequiredGrads
    row_loss: RowLoss
    settings: dict[str, Any]
    per_row: bool

    def run(self, head: Head, batch: RowBatch, required: RequiredGrads) -> LossOutput:
        with torch.autocast(head.hidden.device.type, enabled=False):
            return run_chunks(
                head._replace(lora_scale=self.lora_scale), batch, required, self.row_loss, **self.settings
            )


class _ChunkedFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Any, weight: Any, bias: Any, lora_a: Any, lora_b: Any, call: _ChunkedCall
    ) -> torch.Tensor:
        head = Head(hidden, weight, bias, lora_a, lora_b)
        if call.per_row:
            # the rows' upstream gradients are known in backward only
            ctx.save_for_backward(hidden, weight, bias, lora_a, lora_b)
            ctx.call = call
            return call.run(head, call.batch, RequiredGrads()).loss
        output = call.run(head, call.batch, call.required)
        ctx.gradients = output.gradients
        return output.loss.sum()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        if not hasattr(ctx, "call"):
            return (*take_scaled_gradients(ctx, upstream), None)
        call: _ChunkedCall = ctx.call
        # Each row's upstream gradient becomes its factor: one pass over the chunks makes all gradients.
        scale, down = fp16_safe_scale(call.batch.row_scale * upstream, call.settings["dtype"])
        output = call.run(Head(*ctx.saved_tensors), call.batch._replace(row_scale=scale), call.required)
        scaled = (g if g is None or down is None else scale_gradient_(g, down) for g in output.gradients)
        return (*scaled, None)


class ChunkedLoss(nn.Module):
    """Custom differentiable loss, computed without the logits of the whole batch.

    Autograd differentiates `fn` chunk by chunk in the forward pass, so its parameters, if any, get no gradient.

    Args:
        fn: `fn(student_logits, teacher_logits, labels) -> losses [n]`, each row's from that row alone; fp32 logits
            [n, V] as the heads make them (no scale, soft cap or temperature), teacher logits None without a teacher,
            labels [n] or None. Labels of rows that do not count are not passed, or come as `ignore_index`.
        ignore_index: label of tokens that do not count.
        reduction: "mean" over `num_items` or the rows that count, "sum", or "none" (per row; backward makes
            the logits again, so that teacher and labels must not change before).
        max_workspace_mib: bound for a chunk's buffers, or None to choose.
    """

    def __init__(
        self,
        fn: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor],
        ignore_index: int = -100,
        reduction: str = "mean",
        max_workspace_mib: float | None = None,
    ) -> None:
        super().__init__()
        expect(reduction in REDUCTIONS, "reduction", "one of mean, sum, none", repr(reduction))
        self.fn = fn
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.workspace = workspace_bytes(max_workspace_mib)

    def forward(
        self,
        student_hidden: torch.Tensor,
        student_weight: torch.Tensor,
        teacher_hidden: torch.Tensor | None = None,
        teacher_weight: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        student_bias: torch.Tensor | None = None,
        teacher_bias: torch.Tensor | None = None,
        student_lora: Lora | None = None,
        token_weights: torch.Tensor | None = None,
        num_items: torch.Tensor | int | None = None,
        valid_rows: torch.Tensor | None = None,
        vocab_size: int | None = None,
    ) -> torch.Tensor:
        """Compute the loss, fp32 (fp64 for fp64): a scalar, or with reduction "none" the shape of the labels.

        Arguments as in `FusedDistillationLoss.forward`.

        Raises:
            ValueError: naming the argument that does not fit, or where `fn` returns another shape than [n].
        """
        student = Head(student_hidden, student_weight, student_bias, *unpack_lora(student_lora))
        teachers = []
        if teacher_hidden is not None and teacher_weight is not None:
            teachers.append(TeacherHead(teacher_hidden, teacher_weight, bias=teacher_bias))
        tokens = TokenArguments(labels, token_weights, num_items, valid_rows)
        vocab, dtype = check_arguments(student, teachers, tokens, vocab_size, needs_labels=False)
        student = student._replace(hidden=student_hidden.flatten(0, -2))
        teacher = teachers[0].by_row().cut(vocab, dtype) if teachers else None
        labels = None if labels is None else labels.flatten()
        weights = None if token_weights is None else token_weights.detach().flatten()
        scale = row_scales(
            student.hidden,
            labels,
            weights,
            num_items,
            valid_rows,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
        )
        per_row = self.reduction == "none"
        scale, down = (scale, None) if per_row else fp16_safe_scale(scale, dtype)
        skip = valid_rows is None and (labels is not None or weights is not None)
        rows = nonzero_rows(scale) if skip else valid_rows
        grad = torch.is_grad_enabled()
        required = RequiredGrads(*(grad and tensor is not None and tensor.requires_grad for tensor in student[:5]))
        settings = {"vocab": vocab, "dtype": dtype, "rows": chunk_rows(vocab, self.workspace, student_hidden.device)}
        batch = RowBatch(labels, scale, rows)
        call = _ChunkedCall(student.lora_scale, batch, required, self._row_loss(teacher, labels), settings, per_row)
        loss: torch.Tensor = _ChunkedFunction.apply(*student[:5], call)
        if per_row:
            return loss.view(student_hidden.shape[:-1])
        return loss if down is None else loss * down

    def _row_loss(self, teacher: Head | None, labels: torch.Tensor | None) -> RowLoss:
        """Return `fn` with its gradient: raw logits of some rows to their scaled losses and the logits' gradient."""

        def row_loss(
            raw: torch.Tensor, rows: Rows, factor: torch.Tensor, with_gradient: bool
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            other = None if teacher is None else raw_logits(teacher, teacher.hidden[rows].to(teacher.weight.dtype))
            targets = None if labels is None else labels[rows]
            with torch.set_grad_enabled(with_gradient):
                logits = raw.requires_grad_(with_gradient)
                losses = self.fn(logits, other, targets)
                expected = f"losses of shape {list(factor.shape)}, one a row"
                expect(losses.shape == factor.shape, "fn", expected, list(losses.shape))
                # A skipped row's loss may be NaN: selected away here, and its gradient below, since autograd multiplies
                # NaN by 0.
                losses = torch.where(factor != 0, losses * factor, 0.0)
                total = losses.sum()
            gradient = None
            if with_gradient:
                (gradient,) = torch.autograd.grad(total, logits)
                gradient = gradient.masked_fill((factor == 0)[:, None], 0.0)
            return losses.detach(), gradient

        return row_loss
