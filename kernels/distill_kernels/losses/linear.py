"""Linear divergence, from hidden states and head weights to loss and gradients: entry point and PyTorch path.

Per chunk of rows: logits `z = x W^T (+ bias) (+ scale (x A^T) B^T)` of both models, the rows' losses and the gradient
`G` for the student's logits (divergence.py), then `dx = G W` and `dW += G^T x`. Logits of the whole batch never exist,
and gradients are made in the forward pass, to be multiplied by the upstream gradient in backward.

Symbols: `N` tokens, `V` vocabulary, `H` hidden size (`Hs` of the student, `Ht` of the teacher), `r` rank of a LoRA.

CPU tensors take the PyTorch path of this file (fp32 arithmetic, fp64 for fp64 inputs), CUDA tensors that of fused.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from distill_kernels.launch import runs_on_triton
from distill_kernels.losses.accumulate import add_matmul_
from distill_kernels.losses.arguments import can_check_values, check_values, expect
from distill_kernels.losses.divergence import RowRequest, RowResult, reference_rows
from distill_kernels.losses.mixture import Mixture, reference_mixture_rows
from distill_kernels.losses.operands import Head, LossOutput, RequiredGrads, RowBatch
from distill_kernels.losses.policy_reference import Policy, reference_policy_rows
from distill_kernels.losses.terms import Objective, TokenStats
from distill_kernels.losses.topk_reference import (
    StudentTopK,
    TopK,
    reference_student_top_k_rows,
    reference_top_k_rows,
)

REFERENCE_CHUNK_ELEMENTS = 8 << 20  # logits of one chunk and model on the CPU: 32 MiB in fp32


def row_scales(
    student_hidden: torch.Tensor,
    labels: torch.Tensor | None,
    token_weights: torch.Tensor | None,
    num_items: torch.Tensor | int | None,
    rows: torch.Tensor | None,
    *,
    ignore_index: int,
    reduction: str,
) -> torch.Tensor:
    """Return the factor of every row's loss, [N]: its token weight over the number of items, 0 where ignored.

    For reduction "mean" the number of items is `num_items`, or else the number of rows that count: those of `rows`
    whose label is not `ignore_index` (their token weights do not change it). No host sync; not finite
    where rows count and the number of items is 0.

    Raises:
        ValueError: for that case, where values may be checked (see arguments.py).
    """
    n = student_hidden.shape[0]
    dtype = torch.float64 if student_hidden.dtype == torch.float64 else torch.float32
    if labels is None:
        valid = student_hidden.new_ones(n, dtype=torch.bool)
    else:
        valid = labels.long() != ignore_index  # as the label's own dtype, uint8 or uint16, -100 would be a token
    if rows is not None:
        valid = valid & torch.zeros_like(valid).index_fill_(0, rows, True)
    scale = valid.to(dtype)
    if token_weights is not None:
        scale = torch.where(valid, token_weights.to(dtype), 0.0)
    if reduction != "mean":
        return scale
    if num_items is None:
        return scale / valid.sum().clamp_min(1)
    if can_check_values(scale) and not torch.compiler.is_compiling():
        known = not isinstance(num_items, torch.Tensor) or can_check_values(num_items)
        expect(not known or bool(num_items != 0) or not valid.any(), "num_items", "above 0, since rows count", 0)
    items = num_items.reshape(()) if isinstance(num_items, torch.Tensor) else num_items
    return torch.where(valid, scale / items, 0.0)  # 0 where a whole step counts no token, in place of 0 / 0


def nonzero_rows(row_scale: torch.Tensor) -> torch.Tensor | None:
    """Return the indices of rows of nonzero scale, or None where all are. One host sync on CUDA."""
    rows = row_scale.nonzero().squeeze(-1)
    return None if rows.numel() == row_scale.numel() else rows


def linear_divergence(
    student: Head,
    teacher: Head | Mixture | None,
    batch: RowBatch,
    objective: Objective,
    required: RequiredGrads,
    *,
    vocab: int,
    dtype: torch.dtype,
    workspace: int | None = None,
) -> LossOutput:
    """Compute the loss of every row and the required gradients of their sum.

    Args:
        student: the student's head. Its tensors' gradients come back in their own dtypes.
        teacher: the teacher's head, several teachers', or None where the objective has no divergence.
        batch: labels, row scales and the rows to compute.
        objective: terms of the loss and its settings.
        required: gradients to compute, and whether statistics are required.
        vocab: number of columns that count; the others are padding.
        dtype: dtype of the GEMMs' operands.
        workspace: bytes for the logits' buffers, or None to choose.
    """
    check_values(batch, vocab, labels_count=objective.hard_weight != 0.0 or required.stats)
    path = reference_linear_divergence
    if runs_on_triton(student.hidden) and dtype != torch.float64:
        from distill_kernels.losses.fused import fused_linear_divergence as path
    # dtypes are chosen here, once; autocast would change those of products inside
    with torch.autocast(student.hidden.device.type, enabled=False):
        return path(student, teacher, batch, objective, required, vocab=vocab, dtype=dtype, workspace=workspace)


def project(head: Head, hidden: torch.Tensor) -> torch.Tensor:
    """Return raw logits [n, V] of `hidden` [n, H], all in one dtype."""
    logits = torch.mm(hidden, head.weight.t())
    if head.bias is not None:
        logits += head.bias
    if head.lora_a is not None and head.lora_b is not None:
        logits.addmm_(hidden @ head.lora_a.t(), head.lora_b.t(), alpha=head.lora_scale)
    return logits


def reference_linear_divergence(
    student: Head,
    teacher: Head | Mixture | None,
    batch: RowBatch,
    objective: Objective,
    required: RequiredGrads,
    *,
    vocab: int,
    dtype: torch.dtype,
    workspace: int | None = None,
) -> LossOutput:
    """Compute `linear_divergence` in plain PyTorch, chunk by chunk: the specification, and the path of CPU tensors.

    Products and row arithmetic run in fp32 (fp64 where `dtype` is fp64), whatever the inputs' dtype. `workspace`
    bounds the bytes of one chunk's logits.
    """
    accumulate_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    sums = HeadGradients(student, required, vocab, accumulate_dtype)
    hidden = student.hidden
    n = student.hidden.shape[0]
    student = student.cut(vocab, accumulate_dtype)
    teacher = None if teacher is None else teacher.cut(vocab, accumulate_dtype)
    # a quarter of the workspace: probabilities and gradients stand beside the logits
    elements = REFERENCE_CHUNK_ELEMENTS if workspace is None else workspace // (4 * accumulate_dtype.itemsize)
    chunk = min(max(elements // vocab, 1), max(n, 1))

    loss = batch.row_scale.new_zeros(n)
    stats = TokenStats(*(hidden.new_zeros(n, dtype=torch.float32) for _ in TokenStats._fields))
    count = n if batch.rows is None else batch.rows.numel()
    for start in range(0, count, chunk):
        stop = min(start + chunk, count)
        here = slice(start, stop) if batch.rows is None else batch.rows[start:stop]
        x = hidden[here].to(accumulate_dtype)
        row_loss: Callable[..., RowResult] = reference_rows
        if isinstance(batch.chosen, TopK):
            row_loss = functools.partial(reference_top_k_rows, top=batch.chosen.rows(here))
        elif isinstance(batch.chosen, StudentTopK) and isinstance(teacher, Head):
            row_loss = functools.partial(reference_student_top_k_rows, student_top=batch.chosen)
        elif isinstance(batch.chosen, Policy):
            row_loss = functools.partial(reference_policy_rows, policy=batch.chosen.rows(here))
        elif isinstance(teacher, Mixture):
            row_loss = functools.partial(reference_mixture_rows, mixture=teacher, here=here, project=project)
        labels = None if batch.labels is None else batch.labels[here]
        result = row_loss(
            project(student, x),
            project(teacher, teacher.hidden[here].to(accumulate_dtype)) if isinstance(teacher, Head) else None,
            objective,
            RowRequest(labels, batch.row_scale[here], required.gradient, required.stats),
        )
        loss[here] = result.loss
        if result.stats is not None:
            for all_rows, these_rows in zip(stats, result.stats, strict=True):
                all_rows[here] = these_rows
        if result.gradient is not None:
            sums.add(student, batch.mask_ignored(x, here), result.gradient, here)
    if objective.clips:  # from the share of the token's value to nats
        stats = stats._replace(clipped_value=stats.clipped_value * stats.divergence)
    return LossOutput(loss, stats if required.stats else None, *sums.results())


class HeadGradients:
    """Gradients of the student's tensors, summed chunk by chunk from those of its logits.

    Products take their operands in the dtype of the cut head; sums over chunks are kept in `accumulate_dtype` and
    returned in the dtypes of the original head.
    """

    def __init__(self, original: Head, required: RequiredGrads, vocab: int, accumulate_dtype: torch.dtype) -> None:
        def zeros(tensor: torch.Tensor | None, want: bool) -> torch.Tensor | None:
            return torch.zeros_like(tensor, dtype=accumulate_dtype) if want and tensor is not None else None

        self.original = original
        self.vocab = vocab
        # each row of dx is written by one chunk only, so that it needs no wider sum
        self.hidden = original.hidden.new_zeros(original.hidden.shape) if required.hidden else None
        self.weight = zeros(original.weight, required.weight)
        self.bias = zeros(original.bias, required.bias)
        self.lora_a = zeros(original.lora_a, required.lora_a)
        self.lora_b = zeros(original.lora_b, required.lora_b)

    def add(self, head: Head, x: torch.Tensor, gradient: torch.Tensor, here: slice | torch.Tensor) -> None:
        """Add the gradients that follow from the gradient [n, V] of the logits of `x` [n, H].

        Args:
            head: head cut to the columns that count, in the dtype of x.
            x: hidden states [n, H].
            gradient: gradient of the logits [n, V], any floating dtype.
            here: indices of these rows among all N.
        """
        if self.bias is not None:
            self.bias[: self.vocab] += gradient.sum(0)
        g = gradient.to(x.dtype)
        if self.weight is not None:
            add_matmul_(self.weight[: self.vocab], g.t(), x)
        low = None
        if head.lora_a is not None and head.lora_b is not None:
            # the gradient for x A^T, [n, r]
            low = (g @ head.lora_b).mul_(head.lora_scale)
            if self.lora_a is not None:
                add_matmul_(self.lora_a, low.t(), x)
            if self.lora_b is not None:
                add_matmul_(self.lora_b[: self.vocab], g.t(), x @ head.lora_a.t(), head.lora_scale)
        if self.hidden is not None:
            d_x = g @ head.weight
            if low is not None and head.lora_a is not None:
                d_x.addmm_(low, head.lora_a)
            self.hidden[here] = d_x.to(self.hidden.dtype)

    def results(self) -> tuple[torch.Tensor | None, ...]:
        """Return gradients of hidden states, weight, bias, LoRA A and B in their dtypes; None where not required."""
        sums = (self.hidden, self.weight, self.bias, self.lora_a, self.lora_b)
        return tuple(
            None if total is None or like is None else total.to(like.dtype)
            for total, like in zip(sums, self.original[:5], strict=True)
        )
