"""Losses of the terms that are no divergences of whole distributions, each computed beside the fused terms.

A term has a value in each trained token's row. What a micro-batch adds to the loss of its optimizer step is

    weight * T^2 * (sum of the rows' values) / (valid tokens of all micro-batches and ranks of the step)

with each value times the token's weight (token_weights.py), with T^2 for terms at the loss's temperature (Hinton et
al., 2015), unless the recipe switches it off, and with the weight of the present step, where it is scheduled: a term
loss is made anew for each step of a schedule. `TermLoss` has all of it; a subclass computes the values. Where a kernel
makes the gradients in the forward pass, it has to know each row's factor beforehand, and takes the same mean by
`reduction`, `num_items` and `token_weights`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from distill_kernels import ChunkedLoss, FusedDistillationLoss, LossTerm

from distill.models.head import HeadWeights, LogitTransform
from distill.objectives.losses import LossOfParts, TargetLoss, temperatures_of
from distill.objectives.targets import HeadForward, LossResult, VocabularyAlignment
from distill.recipe.loss import Loss, Term

MIB = 1 << 20


class TermLoss(abc.ABC):
    """The weighted loss of one term of a recipe.

    Args:
        section: The recipe's loss, for its temperature.
        transform: Scale and soft cap of the teacher's logits.

    Attributes:
        reduction: "mean" over the tokens of the step, or "none": each token's loss [B, S], 0 where it is not trained.
        workspace: Bytes of the logits' buffers, where the term has any; None to choose.
        temperature: Softmax temperature of the term, as the kernels take it.
        at_temperature: Whether the term compares distributions at the loss's temperature; else at 1.
        reads_layers: Whether the term compares layers of both models.
        weighted_by_kernel: Whether `reduced` has the weight already: where a kernel takes it, gradients in 16 bits are
            rounded once instead of twice.
    """

    at_temperature = False
    weighted_by_kernel = False
    reads_layers = False

    def __init__(self, term: Term, section: Loss, alignment: VocabularyAlignment, transform: LogitTransform) -> None:
        self.term = term
        self.alignment = alignment
        self.transform = transform
        self.temperature = temperatures_of(section) if self.at_temperature else 1.0
        self.weight = term.weight * (section.scale if self.at_temperature else 1.0)
        self.reduction = "mean"
        self.workspace: int | None = None

    @property
    def name(self) -> str:
        return str(self.term.type)

    def __call__(self, call: HeadForward, teacher: HeadWeights | None) -> torch.Tensor:
        """Return the loss inside the student head's own call; `teacher` is None where its targets need no head."""
        value = self.reduced(call, teacher)
        return value if self.weighted_by_kernel else self.weight * value

    @abc.abstractmethod
    def reduced(self, call: HeadForward, teacher: HeadWeights | None) -> torch.Tensor:
        """Return the loss without its weight, by `reduce` or by a kernel that takes `kernel_settings`."""

    def reduce(self, values: torch.Tensor, rows: torch.Tensor, call: HeadForward) -> torch.Tensor:
        """Return the reduced values [M] of the trained flat rows int64 [M]."""
        weights = call.inputs.token_weights
        if weights is not None:
            weights = weights.flatten()[rows]
            # a token that is left out may have a loss of inf, whose product with 0 would be NaN
            values = torch.where(weights != 0, values * weights, 0.0)
        if self.reduction == "none":
            return values.new_zeros(call.labels.numel()).index_copy(0, rows, values).view(call.labels.shape)
        return values.sum() / call.divisor()

    def kernel_settings(self) -> dict[str, Any]:
        """Return settings of a fused loss by which it reduces as `reduce` does; it gets `num_items` with its inputs."""
        workspace = None if self.workspace is None else self.workspace / MIB
        return {"reduction": self.reduction, "max_workspace_mib": workspace}

    def chunked(
        self,
        call: HeadForward,
        row_losses: Callable[..., torch.Tensor],
        labels: torch.Tensor,
        teacher: HeadWeights | None = None,
    ) -> torch.Tensor:
        """Return the reduced losses of rows in plain PyTorch, chunk by chunk: a batch's logits never exist together.

        Args:
            row_losses: Each row's loss [n] of logits before scale and soft cap, as `ChunkedLoss` takes it.
            labels: What `row_losses` gets with each row, as the labels [B, S], -100 where no token is trained.
            teacher: Head of the teacher, if `row_losses` reads its logits.
        """
        theirs = {}
        if teacher is not None:
            theirs = {
                "teacher_hidden": call.inputs.targets,
                "teacher_weight": teacher.weight,
                "teacher_bias": teacher.bias,
            }
        loss = ChunkedLoss(row_losses, **self.kernel_settings())
        value: torch.Tensor = loss(
            call.hidden, call.head.weight, labels=labels, **theirs, **self.alignment.arguments(call)
        )
        return value


# makes a term's loss, of the arguments of `TermLoss`
Maker = Callable[..., TermLoss]
Makers = Mapping[str, Maker]  # by the term's type


class CompositeLoss(LossOfParts):
    """A recipe's loss with terms that are no divergences of whole distributions.

    Args:
        own: Losses of these terms, at least one.
        fused: Loss of the other terms; None where there are none.
        measured: Loss whose divergence the statistics report: `fused`, or one that is computed for metrics alone.
    """

    def __init__(
        self, own: Sequence[TermLoss], fused: FusedDistillationLoss | None, measured: FusedDistillationLoss
    ) -> None:
        self.own = list(own)
        self.fused = fused
        self.measured = measured
        self.objective = measured.objective
        self.terms = [] if fused is None else list(fused.terms)
        self.terms += [LossTerm(loss.name, loss.term.weight) for loss in self.own]
        self.reads_layers = any(loss.reads_layers for loss in self.own)

    @property
    def parts(self) -> Iterable[Any]:
        return (*self.own, *([] if self.fused is None else [self.fused]), self.measured)

    def compute(
        self, call: HeadForward, teacher: HeadWeights | None, of_fused: Callable[[TargetLoss], LossResult]
    ) -> LossResult:
        """Return the loss inside the student head's own call, with the statistics if the call wants them.

        Args:
            teacher: Head of the teacher; None where its targets need no head.
            of_fused: Calls a fused loss with the teacher's targets.
        """
        statistics: Sequence[torch.Tensor] | None = None
        first, *values = [loss(call, teacher) for loss in self.own]
        if self.fused is not None:
            result = of_fused(self.fused)
            value, statistics = result if isinstance(result, tuple) else (result, None)
            values.append(value)
        # a loss that is measured beside the others is no part of the total, and needs no graph
        if self.measured is not self.fused and call.inputs.statistics:
            with torch.no_grad():
                _, statistics = of_fused(self.measured)
        total = sum(values, first)
        return total if statistics is None else (total, statistics)
