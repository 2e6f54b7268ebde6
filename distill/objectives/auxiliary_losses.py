"""Auxiliary loss terms, no divergences of whole distributions, each with a pass of its own beside the fused terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from distill_kernels import LossTerm

from distill.models.head import HeadWeights, LogitTransform
from distill.objectives.losses import LogitTransforms, build_loss
from distill.objectives.targets import HeadForward, LossResult, VocabularyAlignment
from distill.recipe.loss import Loss


class TermLoss(Protocol):
    """The loss of one auxiliary term, weighted.

    Attributes:
        reduction: "mean" over the tokens of the step, or "none".
        workspace: bytes of the logits' buffers, where it can be set; None to choose.
    """

    reduction: str
    workspace: int | None

    def __call__(self, call: HeadForward, teacher: HeadWeights) -> torch.Tensor:
        """Return the loss inside the student head's own call, a scalar or each token's."""
        ...


Maker = Callable[..., TermLoss]  # of the term, the section, the pairing, transform
Makers = Mapping[str, Maker]  # by the term's type


class CompositeLoss:
    """A recipe's loss that has auxiliary terms.

    Args:
        section: the recipe's.
        pairing: Alignment of the two vocabularies.
        transform: scale and soft cap of the teacher.
        makers: Functions that make the losses of auxiliary terms.

    Attributes:
        takes_call: True: it is called with a `HeadForward` and the teacher's head.
        fused: the loss of the other terms, if there are any; and, where that does not compare with the teacher, the
            forward KL, for metrics only. Each with whether it counts.
        measured: the last of them.
        reads_layers: whether a term compares layers of both models.
    """

    takes_call = True

    def __init__(self, section: Loss, pairing: VocabularyAlignment, transform: LogitTransform, makers: Makers) -> None:
        weighted = [term for term in section.terms if term.weight > 0]
        own = [term for term in weighted if term.type in makers]
        rest = [term for term in weighted if term.type not in makers]
        self.own = [makers[term.type](term, section, pairing, transform) for term in own]
        self.pairing = pairing
        transforms = LogitTransforms(pairing.student, transform)
        self.fused = [(build_loss(section.model_copy(update={"terms": rest}), transforms), True)] if rest else []
        self.terms = [term for loss, _ in self.fused for term in loss.terms]
        self.terms += [LossTerm(str(getattr(term, "function", term.type)), term.weight) for term in own]
        if not (self.fused and self.fused[0][0].objective.needs_teacher):
            self.fused.append((build_loss("forward_kl", transforms), False))
        self.measured = self.fused[-1][0]
        self.reads_layers = section.reads_layers
        self.objective = self.measured.objective
        self.reduction = "mean"
        self.workspace = None

    def __call__(self, call: HeadForward, teacher: HeadWeights) -> LossResult:
        both = (call.hidden, call.head.weight, call.inputs.targets, teacher.weight, call.labels)
        arguments = self.pairing.arguments(call) | {"teacher_bias": teacher.bias}
        statistics = None
        for loss in (*self.own, *(loss for loss, _ in self.fused)):
            loss.reduction = self.reduction
            loss.workspace = self.workspace
        first, *values = [loss(call, teacher) for loss in self.own]
        for loss, counts in self.fused:
            if counts or call.inputs.statistics:
                with torch.set_grad_enabled(torch.is_grad_enabled() and counts):
                    result: LossResult = loss(*both, **arguments)
                value, statistics = result if isinstance(result, tuple) else (result, None)
                values += [value] * counts
        total = sum(values, first)
        return total if statistics is None else (total, statistics)
