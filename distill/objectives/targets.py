"""Formats of a teacher's targets and the values that a loss takes: inputs of a step, the head's call, alignment.

pairing = format.pair(student, rows, vocab_size)        # columns of both heads that are compared
loss = format.loss(section, pairing)
value = format.apply(loss, pairing, call)               # inside the call of the student's head
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from distill_kernels.losses import DIVERGENCES

from distill.core.labels import IGNORE_INDEX
from distill.models.head import HeadWeights, LogitTransform
from distill.objectives.measure import KL, DivergenceUnit

if TYPE_CHECKING:
    from distill.objectives.layer_matching import StepStates
    from distill.objectives.losses import LossSpec, TargetLoss

Batch = Mapping[str, torch.Tensor]
# a teacher's outputs for a batch, opaque to all but its format; None where the loss needs none
Targets = object
TOP = 8  # most probable tokens of each model that `TargetFormat.overlap` compares
LossResult = torch.Tensor | tuple[torch.Tensor, Sequence[torch.Tensor]]


@dataclass(frozen=True, eq=False)
class StepInputs:
    """Inputs of a micro-batch's loss: made by `DistillationObjective`, read in the student's forward.

    Attributes:
        targets: The teacher's targets for this batch, in its `TargetFormat`; None if the loss has no divergence.
        num_items: int64 tensor [] or int that the summed loss is divided by; None for this batch's valid tokens.
        statistics: whether sums of the token statistics are returned beside the loss.
        sampled_log_p: float [B, S] as the shifted labels: log-probabilities of the labels when the student sampled
            them, NaN where it did not; None where they were not kept.
        advantages: float [B, S] as the shifted labels: what a reward adds to each token's advantage; None without one.
        weight: total weight of all divergences in the present step of a schedule; None without a schedule.
        batch: the collated batch, for those who watch the loss.
        layers: states of both models' layers, where the loss compares them; the teacher's are there, the student's
            forward adds its own.
        weighted: whether the objective's token weights apply: in training, not in evaluations.
        weight_sum: sum of the token weights of the whole step, where they are divided by it; None for this batch's.
        token_weights: float [B, S] as the shifted labels: factors of the tokens' losses, which the student's forward
            adds; None for equal weights.
    """

    targets: Targets | None
    num_items: torch.Tensor | int | None
    statistics: bool
    sampled_log_p: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    weight: float | None = None
    batch: Batch = field(default_factory=dict)
    layers: StepStates | None = None
    weighted: bool = False
    weight_sum: torch.Tensor | float | None = None
    token_weights: torch.Tensor | None = None


class OpaqueInputs:
    """A `StepInputs` on its way through DDP and FSDP2, which cast or move the tensors that they find in arguments.

    They look into mappings, sequences and dataclasses, and leave an object of any other class as it is.
    """

    def __init__(self, value: StepInputs) -> None:
        self.value = value


class HeadForward(NamedTuple):
    """Inputs of a loss inside the student head's own call.

    Attributes:
        hidden: the student's last hidden states, [B, S, hidden].
        head: the student's head as it is inside the call.
        inputs: targets, divisor, whether statistics are returned.
        labels: int64 [B, S], already shifted.
        valid_rows: int64 [M], the flat rows with a label, where the collator gives them.
    """

    hidden: torch.Tensor
    head: HeadWeights
    inputs: StepInputs
    labels: torch.Tensor
    valid_rows: torch.Tensor | None

    def trained_rows(self) -> torch.Tensor:
        """Return the flat rows with a label, int64 [M]; a host sync where the collator does not give them."""
        if self.valid_rows is not None:
            return self.valid_rows
        return (self.labels != IGNORE_INDEX).flatten().nonzero()[:, 0]

    def divisor(self) -> torch.Tensor | int:
        """Return what the rows' summed losses are divided by: the step's valid tokens, or else this batch's."""
        if self.inputs.num_items is not None:
            return self.inputs.num_items
        return (self.labels != IGNORE_INDEX).sum().clamp_min(1)


class VocabularyAlignment(NamedTuple):
    """Alignment of a student's logits with a teacher's.

    Attributes:
        student: scale and soft cap of the student's logits.
        columns: Number of vocabulary entries that the loss is over.
        vocab_size: Argument of the fused losses: `columns`, None where no head is cut.
    """

    student: LogitTransform
    columns: int
    vocab_size: int | None

    def arguments(self, call: HeadForward) -> dict[str, Any]:
        """Return the arguments of every loss kernel beside hidden states, weights and labels, for any teacher."""
        return {
            "student_bias": call.head.bias,
            "student_lora": call.head.lora,
            "token_weights": call.inputs.token_weights,
            "num_items": call.inputs.num_items,
            "valid_rows": call.valid_rows,
            "vocab_size": self.vocab_size,
        }


class TargetProperties(NamedTuple):
    """Properties of targets that reports, metrics and the student's forward depend on.

    Attributes:
        columns: Size of each teacher's distribution: the rows of its head, or the columns of what is stored.
        measure: name, unit and key of the reported divergences.
        caveat: limitation to report with them; None where they compare two whole distributions.
        divergences: divergences that these targets determine, by their names in `loss.terms`.
        routes: names of the routes; each route's sums, `PER_ROUTE` of objectives/losses.py, follow the statistics.
        labels_are_tokens: whether a label is one token; else it is a text of several tokens.
        needed_by_hard_labels: whether a loss of hard labels alone needs the targets too, which determine its tokens.
    """

    columns: tuple[int, ...]
    measure: DivergenceUnit = KL
    caveat: str | None = None
    divergences: frozenset[str] = frozenset(DIVERGENCES)
    routes: tuple[str, ...] = ()
    labels_are_tokens: bool = True
    needed_by_hard_labels: bool = False


class TargetFormat:
    """Format of a teacher's targets, and the losses that take them.

    Attributes:
        properties: Properties of the targets that others than the losses use.
    """

    properties: TargetProperties

    def pair(self, student: LogitTransform, rows: int, vocab_size: int | None) -> VocabularyAlignment:
        """Return how a student's logits are aligned with these targets.

        Args:
            student: scale and soft cap of its logits.
            rows: Number of rows of the student's head.
            vocab_size: columns that are compared; None for as many as all heads have.

        Raises:
            ValueError: more columns than a head has, or a head with fewer than the targets need.
        """
        raise NotImplementedError

    def loss(self, section: LossSpec, alignment: VocabularyAlignment) -> TargetLoss:
        """Return the loss for a recipe's `loss` section.

        Raises:
            ValueError: a term that cannot be computed from these targets.
        """
        raise NotImplementedError

    def held_out(self, alignment: VocabularyAlignment) -> TargetLoss:
        """Return the loss of evaluations: the forward divergence with statistics, and the reverse divergence."""
        raise NotImplementedError

    def apply(self, loss: TargetLoss, alignment: VocabularyAlignment, call: HeadForward) -> LossResult:
        """Return the loss of a batch, a scalar; with `call.inputs.statistics`, it and the token statistics [N]."""
        raise NotImplementedError

    # what a line of the first batch's report and the metrics of rollouts compare beside the sums over tokens of a loss

    def likeliest(
        self, targets: Targets, rows: torch.Tensor, most: int
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return at most the first `most` of each route's flat `rows`, and the teacher's top-1 token after each (-1 in
        a tie), both int64; by route, "" where there are none. Empty where the targets do not give these directly.
        """
        return {}

    def overlap(self, alignment: VocabularyAlignment, call: HeadForward, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return for flat `rows` [n] the share of the student's `TOP` most probable tokens that are among the
        teacher's, float32 [n], by route, NaN in the rows of others; "" where there are no routes. Empty as above.
        """
        return {}
