"""Protocols of a teacher: its source, the open teacher and its target format, and the values they exchange.

    source = source_of(recipe)                 # from the recipe and files alone; no weights are read
    teacher = source.open(context)             # weights are on the device; ready to be queried
    targets = teacher.targets(batch)           # once per micro-batch, without a graph
    loss = teacher.format.loss(section, pairing)

A new backend is one file with a source and a teacher, and a line in `registry.BACKENDS`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from torch import nn

from distill.models.attention_choice import AttentionChoices
from distill.models.head import HeadWeights, LogitTransform
from distill.models.precision import Precision, resolve_device, resolve_precision
from distill.models.sharding import SINGLE_PROCESS, Placement
from distill.teachers.calibration import NO_ROWS, Calibration, calibration_of
from distill.teachers.footprint import Footprint, FootprintContext
from distill.teachers.losses import DIVERGENCES
from distill.teachers.measure import KL, Measure

if TYPE_CHECKING:
    from distill.data.load import Splits
    from distill.recipe import Recipe
    from distill.recipe import Teacher as TeacherSection
    from distill.teachers.layer_matching import StepStates
    from distill.teachers.losses import LossSpec, TargetLoss
    from distill.teachers.vocabulary import Vocabulary

Batch = Mapping[str, torch.Tensor]
Collate = Callable[[Sequence[Mapping[str, Sequence[int]]]], dict[str, torch.Tensor]]
# a teacher's outputs for a batch, opaque to all but its format; None where the loss needs none
Targets = object
LossResult = torch.Tensor | tuple[torch.Tensor, Sequence[torch.Tensor]]


class StepInputs:
    """Inputs of a micro-batch's loss: made by `DistillationObjective.compare`, read inside the student's forward.

    A plain class: DDP and FSDP2 look for tensors in keyword arguments (FSDP2 casts them) and leave this one alone.

    Attributes:
        targets: of the teacher for this batch, in its `TargetFormat`; None if the loss has no divergence.
        num_items: int64 tensor [] or int that the summed loss is divided by; None for this batch's valid tokens.
        statistics: whether sums of the token statistics are returned beside the loss.
        sampled_log_p: float [B, S] as the shifted labels: log-probabilities of the labels when the student sampled
            them, NaN where it did not; None where they were not kept.
        advantages: float [B, S] as the shifted labels: what a reward adds to each token's advantage; None without one.
        weight: total weight of all divergences in the present step of a schedule; None without a schedule.
        batch: the collated batch, for those who watch the loss.
        layers: states of both models' layers, where the loss compares them; the teacher's are there, the student's
            forward adds its own.
    """

    def __init__(
        self, targets: Targets | None, num_items: torch.Tensor | int | None, statistics: bool,
        sampled_log_p: torch.Tensor | None = None, advantages: torch.Tensor | None = None, weight: float | None = None,
    ) -> None:  # fmt: skip
        self.targets = targets
        self.num_items = num_items
        self.statistics = statistics
        self.sampled_log_p = sampled_log_p
        self.advantages = advantages
        self.weight = weight
        self.batch: Batch = {}
        self.layers: StepStates | None = None

    def with_targets(self, targets: Targets, num_items: torch.Tensor | int | None) -> StepInputs:
        """Return the same inputs with other targets and another divisor, as a route of several has them."""
        inputs = copy.copy(self)
        inputs.targets, inputs.num_items = targets, num_items
        return inputs


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


class VocabularyAlignment(NamedTuple):
    """Alignment of a student's logits with a teacher's.

    Attributes:
        student: scale and soft cap of the student's logits.
        columns: of the vocabulary that the loss is over.
        vocab_size: as the fused losses take it: `columns`, None where no head is cut.
    """

    student: LogitTransform
    columns: int
    vocab_size: int | None

    def arguments(self, call: HeadForward) -> dict[str, object]:
        """Return the arguments of every fused loss beside hidden states, weights and labels, for any teacher."""
        return {
            "student_bias": call.head.bias, "student_lora": call.head.lora, "num_items": call.inputs.num_items,
            "valid_rows": call.valid_rows, "vocab_size": self.vocab_size, "return_stats": call.inputs.statistics,
        }  # fmt: skip


class TargetProperties(NamedTuple):
    """Properties of targets that reports, metrics and the student's forward depend on.

    Attributes:
        columns: of each teacher's distribution: the rows of its head, or the columns of what is stored.
        measure: name, unit and key of the reported divergences.
        caveat: limitation to report with them; None where they compare two whole distributions.
        divergences: those that these targets can be compared by, as `loss.terms` names them.
        routes: names of the routes; each route's sums, `PER_ROUTE` of teachers/losses.py, follow the statistics.
        reads_valid_rows: whether losses read hidden states at a batch's `valid_rows` only.
        needed_by_hard_labels: whether a loss of hard labels alone needs the targets too, which determine its tokens.
    """

    columns: tuple[int, ...]
    measure: Measure = KL
    caveat: str | None = None
    divergences: frozenset[str] = DIVERGENCES
    routes: tuple[str, ...] = ()
    reads_valid_rows: bool = True
    needed_by_hard_labels: bool = False


class TargetFormat(Protocol):
    """Format of a teacher's targets, and the losses that take them.

    Attributes:
        properties: what others than the losses use of it.
    """

    properties: TargetProperties

    def pair(self, student: LogitTransform, rows: int, vocab_size: int | None) -> VocabularyAlignment:
        """Return how a student's logits are aligned with these targets.

        Args:
            student: scale and soft cap of its logits.
            rows: of its head.
            vocab_size: columns that are compared; None for as many as all heads have.

        Raises:
            ValueError: more columns than a head has, or a head with fewer than the targets need.
        """
        ...

    def loss(self, section: LossSpec, pairing: VocabularyAlignment) -> TargetLoss:
        """Return the loss module for a recipe's `loss` section.

        Raises:
            ValueError: a term that cannot be computed from these targets.
        """
        ...

    def held_out(self, pairing: VocabularyAlignment) -> TargetLoss:
        """Return the loss of evaluations: the forward divergence with statistics, and the reverse divergence."""
        ...

    def apply(self, loss: TargetLoss, pairing: VocabularyAlignment, call: HeadForward) -> LossResult:
        """Return the loss of a batch, a scalar; with `call.inputs.statistics`, it and the token statistics [N]."""
        ...


class AcceptedRows(NamedTuple):
    """Rows that a teacher has outputs for.

    Attributes:
        reading: which tokens it reads in place of the student's: the `same`, the same answers after a `context`, or
            the same text `retokenised`.
        supports_new_rows: whether it can be queried for rows that it has not seen (on-policy).
        whole_documents: whether rows must hold whole documents, as its outputs were stored: doctor may not cut them.
    """

    reading: Literal["same", "context", "retokenised"] = "same"
    supports_new_rows: bool = True
    whole_documents: bool = False


class Teacher(Protocol):
    """A teacher that is ready to be queried. Methods with a body here are the default of most kinds.

    What only some teachers can do stands in capabilities.py, with the function that asks for it.

    Attributes:
        format: what `targets` returns.
        models: by the field of the recipe that names each: to patch, compile, diagnose; empty for a cache.
        rows: for which it has outputs.
    """

    format: TargetFormat
    models: Mapping[str, nn.Module]
    rows: AcceptedRows = AcceptedRows()

    def collate(self, plain: Collate) -> Collate:
        """Return the collator: `plain`, or one around it that adds the columns that the teacher needs."""
        return plain

    def targets(self, batch: Batch) -> Targets:
        """Return the teacher's outputs for a collated batch, without a graph; every rank calls this equally often."""
        ...

    def student_batch(self, batch: Batch, needs_targets: bool) -> dict[str, torch.Tensor]:
        """Return the student's part of a batch; ValueError for a batch that `collate` has not made."""
        return dict(batch)

    def fingerprint(self) -> dict[str, object]:
        """Return a fingerprint of the weights, for the lock file; collective where they are sharded."""
        ...

    def close(self) -> None:
        """Release threads and connections; the teacher cannot be queried afterwards."""
        return


class LoadContext(NamedTuple):
    """Device, dtypes and placement with which a source is opened.

    Attributes:
        device: of this process.
        precision: dtypes of computing and of both models' weights.
        placement: how several processes hold the models.
        attention: which attention back ends the models get, for a teacher that is patched while it is loaded.
        calibration: rows by which the parts of a student that is cut from the teacher are chosen.
    """

    device: torch.device
    precision: Precision
    placement: Placement
    attention: AttentionChoices
    calibration: Calibration = NO_ROWS


def load_context(recipe: Recipe, splits: Splits | None = None) -> LoadContext:
    """Return the context of a single process for a recipe: its device and precision, nothing shared.

    Args:
        splits: data of the recipe, where a student may be cut by them.
    """
    device = resolve_device(recipe.train)
    calibration = NO_ROWS if splits is None else calibration_of(recipe, splits)
    return LoadContext(device, resolve_precision(recipe, device), SINGLE_PROCESS, AttentionChoices(recipe), calibration)


class TeacherSource(Protocol):
    """A teacher as described by the recipe and the files on this machine; no weights are read.

    What only some sources know stands in source_capabilities.py, with the function that asks for it.

    Attributes:
        recipe: the run's.
        sections: of the models that will be loaded, by field; none for a cache.
        shardable: whether its weights may be sharded over the devices.
    """

    recipe: Recipe
    sections: Mapping[str, TeacherSection]
    shardable: bool = True

    def vocabulary(self) -> Vocabulary:
        """Tokenizers, and how data are made with them.

        Raises:
            ValueError: a tokenizer that cannot be read.
        """
        ...

    def problems(self, *, cuda: bool, sharded: bool, family: str | None = None) -> list[str]:
        """Return why its configuration cannot be loaded this way; `family` is the GPU's, None where unknown."""
        return []

    def footprint(self, context: FootprintContext) -> Footprint:
        """Return bytes and FLOPs of a training step, by arithmetic."""
        ...

    def title(self) -> str:
        """Return a readable name."""
        ...

    def open(self, context: LoadContext, vocabulary: Vocabulary) -> Teacher:
        """Load the teacher.

        Raises:
            ValueError: naming the field.
        """
        ...
