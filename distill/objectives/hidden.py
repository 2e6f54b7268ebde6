"""Targets that are hidden states: one teacher's last hidden states [B, S, hidden] and its head, in the fused losses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from distill_kernels import FusedDistillationLoss
from distill_kernels.losses.divergence import unique_argmax
from torch import nn

from distill.models.head import HeadWeights, LogitTransform, aligned_head_weight, find_head, whole
from distill.objectives.layer_losses import AttentionRelationLoss, HiddenStateLoss, RouterLoss
from distill.objectives.losses import HeldOutLoss, LogitTransforms, LossSpec, TargetLoss, build_loss
from distill.objectives.policy_gradient import SampledTokenLoss
from distill.objectives.student_top_k import student_top_k_loss
from distill.objectives.targets import (
    TOP,
    HeadForward,
    LossResult,
    TargetFormat,
    TargetProperties,
    Targets,
    VocabularyAlignment,
)
from distill.objectives.term_loss import CompositeLoss, Makers
from distill.recipe.loss import Loss

TERM_LOSSES: Makers = {  # of terms that are no divergences of whole distributions, by the term's type
    "attention_relation": AttentionRelationLoss,
    "hidden_state": HiddenStateLoss,
    "policy_gradient": SampledTokenLoss,
    "router": RouterLoss,
    "top_k_reverse_kl": student_top_k_loss,
}


class TeacherHead(Protocol):
    """A teacher's head as a handle that is opened inside the loss.

    Attributes:
        rows: Number of rows of its weight.
    """

    rows: int

    def open(self) -> contextlib.AbstractContextManager[HeadWeights]:
        """Return a context manager of the head's weights, gathered while it lasts."""
        ...


class ModelHead:
    """The head of a loaded model, which may be sharded."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.rows = len(find_head(model).linear.weight)  # type: ignore[arg-type]

    def open(self) -> contextlib.AbstractContextManager[HeadWeights]:
        """Return a context manager: weights gathered on entry, resharded on exit; changes of the head are seen."""
        return whole(find_head(self.model))


class StoredHead:
    """A head whose weights are in memory, outside of any model.

    Args:
        name: readable, for a message that says what is not finite.
    """

    def __init__(self, weights: HeadWeights, name: str = "the stored head") -> None:
        self.name = name
        weight, bias, lora = weights
        self.weights = HeadWeights(
            aligned_head_weight(weight), None if bias is None else aligned_head_weight(bias), lora
        )
        self.rows = len(weight)

    @contextlib.contextmanager
    def open(self) -> Iterator[HeadWeights]:
        yield self.weights

    def move_to(self, device: torch.device) -> None:
        """Move the weights in place, without a LoRA; those who have the head see it."""
        weight, bias, _ = self.weights
        self.weights = HeadWeights(weight.to(device), None if bias is None else bias.to(device), None)


class FusedFormat(TargetFormat):
    """Hidden states and heads, in the fused losses of full distributions.

    Attributes:
        transform: scale and soft cap of the teacher's logits, as far as the loss takes them.
    """

    transform = LogitTransform()

    def transforms(self, alignment: VocabularyAlignment) -> LogitTransforms:
        return LogitTransforms(alignment.student, self.transform)

    def loss(self, section: LossSpec, alignment: VocabularyAlignment) -> TargetLoss:
        return build_loss(section, self.transforms(alignment))

    def held_out(self, alignment: VocabularyAlignment) -> TargetLoss:
        return HeldOutLoss(lambda term: FusedDistillationLoss([term], **self.transforms(alignment)))

    def scores(self, targets: Targets, rows: torch.Tensor) -> torch.Tensor:
        """Return for flat `rows` [n] a score of each token, fp32 [n, columns], ordered as the teacher's
        probabilities are.
        """
        raise NotImplementedError

    def likeliest(
        self, targets: Targets, rows: torch.Tensor, most: int
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {"": (rows[:most], unique_argmax(self.scores(targets, rows[:most])))}

    @torch.no_grad()
    def overlap(self, alignment: VocabularyAlignment, call: HeadForward, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the overlap from the student head's GEMM alone: scale and soft cap do not change the order."""
        hidden = call.hidden.flatten(0, 1)[rows]
        head = call.head
        # autocast would keep its copy of the head's weight for the rest of the forward, and this one has no gradient
        with torch.autocast(hidden.device.type, enabled=False):
            own = nn.functional.linear(hidden.to(head.weight.dtype), head.weight, head.bias)
            if head.lora is not None:
                a, b, scale = head.lora
                own = own + scale * (hidden.to(a.dtype) @ a.T) @ b.T
            theirs = self.scores(call.inputs.targets, rows)
        most = min(TOP, alignment.columns)
        own_tokens = own[:, : alignment.columns].topk(most).indices
        their_tokens = theirs[:, : alignment.columns].topk(most).indices
        return {"": (own_tokens[:, :, None] == their_tokens[:, None]).any(-1).float().mean(-1)}


class HiddenFormat(FusedFormat):
    """One teacher's last hidden states, and its head.

    Args:
        transform: scale and soft cap of its logits.

    Attributes:
        makers: Make the losses of terms that are not fused, by the term's type.
    """

    def __init__(self, head: TeacherHead, transform: LogitTransform) -> None:
        self.makers = dict(TERM_LOSSES)
        self.head = head
        self.transform = transform
        self.properties = TargetProperties((head.rows,))

    def pair(self, student: LogitTransform, rows: int, vocab_size: int | None) -> VocabularyAlignment:
        return pairing_of(student, {"student": rows, "teacher": self.head.rows}, vocab_size)

    def loss(self, section: LossSpec, alignment: VocabularyAlignment) -> TargetLoss:
        if isinstance(section, Loss) and section.has(*self.makers):
            return self._composite(section, alignment)
        return super().loss(section, alignment)

    def _composite(self, section: Loss, alignment: VocabularyAlignment) -> CompositeLoss:
        """Return the loss of a section whose terms are not all fused; the fused ones are one loss."""
        weighted = [term for term in section.terms if term.weight > 0]
        own = [
            self.makers[term.type](term, section, alignment, self.transform)
            for term in weighted
            if term.type in self.makers
        ]
        rest = [term for term in weighted if term.type not in self.makers]
        transforms = self.transforms(alignment)
        fused = build_loss(section.model_copy(update={"terms": rest}), transforms) if rest else None
        measured = fused
        if measured is None or not measured.objective.needs_teacher:
            # terms without a divergence of whole distributions report the forward KL all the same, as a metric
            measured = build_loss("forward_kl", transforms)
        return CompositeLoss(own, fused, measured)

    def apply(self, loss: TargetLoss, alignment: VocabularyAlignment, call: HeadForward) -> LossResult:
        """Return the loss; the teacher's head is not used where the loss has no divergence."""
        with self.head.open() as teacher:

            def of_fused(fused: Any) -> LossResult:
                return fused(
                    call.hidden,
                    call.head.weight,
                    call.inputs.targets,
                    teacher.weight,
                    call.labels,
                    teacher_bias=teacher.bias,
                    return_stats=call.inputs.statistics,
                    **alignment.arguments(call),
                )

            return loss.compute(call, teacher, of_fused) if isinstance(loss, CompositeLoss) else of_fused(loss)

    def scores(self, targets: object, rows: torch.Tensor) -> torch.Tensor:
        assert isinstance(targets, torch.Tensor)
        return self.logits(targets.flatten(0, 1)[rows])

    def logits(self, targets: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits [..., rows of the head] of hidden states [..., hidden], scale and soft cap applied."""
        with self.head.open() as teacher:
            z: Any = nn.functional.linear(targets.to(teacher.weight.dtype), teacher.weight, teacher.bias).float()
        return self.transform.applied(z)


def pairing_of(student: LogitTransform, rows: dict[str, int], vocab_size: int | None) -> VocabularyAlignment:
    """Return a pairing over `vocab_size` columns, or as many as the smallest head has.

    Args:
        student: scale and soft cap of its logits.
        rows: Number of rows of each head, by model.
        vocab_size: columns requested.

    Raises:
        ValueError: more than a head has.
    """
    smallest = min(rows.values())
    if vocab_size is not None and not 0 < vocab_size <= smallest:
        raise ValueError(f"vocab_size: expected 1 to {smallest} (heads: {rows}), got {vocab_size}")
    columns = vocab_size or smallest
    return VocabularyAlignment(student, columns, None if columns == max(rows.values()) else columns)
