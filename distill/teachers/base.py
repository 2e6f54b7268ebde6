"""Protocols of a teacher: its source, the open teacher and its target format, and the values they exchange.

    source = source_of(recipe)                 # from the recipe and files alone; no weights are read
    teacher = source.open(context)             # weights are on the device; ready to be queried
    targets = teacher.targets(batch)           # once per micro-batch, without a graph
    loss = teacher.format.loss(section, pairing)

A new backend is one file with a source and a teacher, and a line in `registry.BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from torch import nn

from distill.models.attention_choice import AttentionChoices
from distill.models.flops import FlopCounts, count_flops, count_text, parameters_of, sum_flops
from distill.models.head import HeadWeights, LogitTransform, find_head
from distill.models.precision import Precision, resolve_device, resolve_precision
from distill.models.sharding import SINGLE_PROCESS, Placement, is_sharded
from distill.teachers.calibration import NO_ROWS, Calibration, CutRequest, CutStudent, calibration_of
from distill.teachers.footprint import Footprint, FootprintContext, SmallerTeacher
from distill.teachers.losses import DIVERGENCES
from distill.teachers.measure import KL, Measure

if TYPE_CHECKING:
    from distill.data.load import Splits
    from distill.models.shape import Shape
    from distill.recipe import Generate, ModelSection, Recipe
    from distill.recipe import Teacher as TeacherSection
    from distill.teachers.losses import LossSpec, TargetLoss
    from distill.teachers.vocabulary import Vocabulary

Batch = Mapping[str, torch.Tensor]
Collate = Callable[[Sequence[Mapping[str, Sequence[int]]]], dict[str, torch.Tensor]]
# a teacher's outputs for a batch, opaque to all but its format; None where the loss needs none
Targets = object
Prompt = str | list[dict[str, str]]
LossResult = torch.Tensor | tuple[torch.Tensor, Sequence[torch.Tensor]]


class LossInputs:
    """Inputs of the loss that the objective passes to the student's forward with the batch.

    A plain class: DDP and FSDP2 look for tensors in keyword arguments (FSDP2 casts them) and leave this one alone.

    Attributes:
        targets: of the teacher for this batch, in its `TargetFormat`; None if the loss has no divergence.
        num_items: int64 tensor [] or int that the summed loss is divided by; None for this batch's valid tokens.
        statistics: whether sums of the token statistics are returned beside the loss.
        sampled_log_p: float [B, S] as the shifted labels: log-probabilities of the labels when the student sampled
            them, NaN where it did not; None where they were not kept.
        advantages: float [B, S] as the shifted labels: what a reward adds to each token's advantage; None without one.
        batch: the collated batch, for those who watch the loss.
    """

    def __init__(
        self, targets: Targets | None, num_items: torch.Tensor | int | None, statistics: bool,
        sampled_log_p: torch.Tensor | None = None, advantages: torch.Tensor | None = None,
        batch: Batch = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.targets = targets
        self.num_items = num_items
        self.statistics = statistics
        self.sampled_log_p = sampled_log_p
        self.advantages = advantages
        self.batch = batch


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
    inputs: LossInputs
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
        measure: name, unit and key of the reported divergences.
        caveat: limitation to report with them; None where they compare two whole distributions.
        divergences: those that these targets can be compared by, as `loss.terms` names them.
        routes: names of the routes; each route's sums, `PER_ROUTE` of teachers/losses.py, follow the statistics.
        reads_valid_rows: whether losses read hidden states at a batch's `valid_rows` only.
        needed_by_hard_labels: whether a loss of hard labels alone needs the targets too, which determine its tokens.
    """

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

    properties: TargetProperties = TargetProperties()

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


class Teacher(Protocol):
    """A teacher that is ready to be queried. Methods with a body here are the default of most kinds.

    Attributes:
        format: what `targets` returns.
        models: by the field of the recipe that names each: to patch, compile, diagnose; empty for a cache.
        supports_new_rows: whether it can be queried for rows that it has not seen (on-policy).
        whole_documents: whether rows must hold whole documents, as its outputs were stored: doctor may not cut them.
        ahead: micro-batches that may be submitted before their targets are needed.
        prefix: of the names of `input_ids` and `position_ids` among the columns that it reads of a batch.
        reading: which tokens it reads in place of the student's: the `same`, the same answers after a `context`, or
            the same text `retokenised`.
    """

    prefix: str = ""
    reading: Literal["same", "context", "retokenised"] = "same"
    format: TargetFormat
    models: Mapping[str, nn.Module]
    supports_new_rows: bool = True
    whole_documents: bool = False
    ahead: int = 0

    def collate(self, plain: Collate) -> Collate:
        """Return the collator: `plain`, or one around it that adds the columns that the teacher needs."""
        return plain

    def submit(self, batch: Batch) -> None:
        """Start computing the targets of a batch ahead of time, where that is possible."""
        return

    def fault_of(self, batches: Sequence[Batch]) -> str | None:
        """Return why targets submitted for these batches will not come, a line; None once all of them are there."""
        return None

    def targets(self, batch: Batch) -> Targets:
        """Return the teacher's outputs for a collated batch, without a graph; every rank calls this equally often."""
        ...

    def student_batch(self, batch: Batch, needs_targets: bool) -> dict[str, torch.Tensor]:
        """Return the student's part of a batch; ValueError for a batch that `collate` has not made."""
        return dict(batch)

    def head_rows(self) -> list[int]:
        """Return the rows of each head, or the columns of what is stored."""
        return [len(find_head(model).linear.weight) for model in self.models.values()]  # type: ignore[arg-type]

    def head_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights and biases of the heads with a readable name; of sharded ones, this process's part."""
        for name, head in ((name, find_head(model).linear) for name, model in self.models.items()):
            for tensor in (head.weight, getattr(head, "bias", None)):
                if isinstance(tensor, torch.Tensor):
                    yield f"the weights of the {name}'s head", tensor

    def flops_per_token(self) -> dict[str, FlopCounts | None]:
        """Return FLOPs per token of one forward pass by the prefix of what is read; None where they are not known."""
        return {self.prefix: sum_flops(count_flops(model, trains=False) for model in self.models.values())}

    def parameters_text(self) -> str:
        """Return the number of parameters as readable text."""
        return f"{count_text(sum(parameters_of(model)[0] for model in self.models.values()))} parameters"

    def to(self, device: torch.device) -> None:
        """Move the models that are not sharded."""
        for model in self.models.values():
            if not is_sharded(model):
                model.to(device)

    def cut_student(self, request: CutRequest) -> CutStudent:
        """Return a student of this teacher's parts, in train mode, without adapters; ValueError where impossible."""
        raise ValueError("student.from_teacher: this kind of teacher has no layers to cut a student from")

    def quantise(self) -> None:
        """Quantise layers that the recipe has in 8 bits and loading has not: after patching, before any query."""
        return

    def validate_first_batch(self, batch: Batch, student: nn.Module | None, pairing: VocabularyAlignment) -> list[str]:
        """Check the first held-out batch: quantise, and return lines on what that costs, or what share is matched."""
        return []

    def respond(self, prompts: Sequence[Prompt], settings: Generate) -> list[str] | None:
        """Return greedy responses to questions or conversations of messages; None where it cannot generate. Every
        process must call this for a sharded teacher."""
        return None

    @property
    def is_collective(self) -> bool:
        """True where all processes must call `respond` and `fingerprint`, since the models are sharded."""
        return any(map(is_sharded, self.models.values()))

    def truncated_copy(self, layers: Sequence[int]) -> Teacher:
        """Return a copy with only these layers (negative indices count from the end), for doctor's training runs."""
        ...

    def fingerprint(self) -> dict[str, object]:
        """Return a fingerprint of the weights, for the lock file; collective where they are sharded."""
        ...

    def follow(self, student: nn.Module) -> None:
        """Update a teacher that is not frozen, such as an EMA; called after each optimizer step."""
        return

    def save(self, checkpoint: Path) -> None:
        """Write what training has changed into a checkpoint's folder; called on the first process only."""
        return

    def restore(self, checkpoint: Path) -> None:
        """Restore what `save` wrote into a checkpoint; called on all processes."""
        return

    def flush(self) -> None:
        """Flush pending outputs; called on all processes, at checkpoints and the ends of epochs and evaluations."""
        return

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

    Attributes:
        recipe: the run's.
        sections: of the models that will be loaded, by field; none for a cache.
        shardable: whether its weights may be sharded over the devices.
    """

    recipe: Recipe
    sections: Mapping[str, TeacherSection]
    shardable: bool = True

    @property
    def is_to_be_made(self) -> bool:
        """True for a cache that another command has to make first."""
        return False

    @property
    def config_section(self) -> ModelSection:
        """The model whose configuration the (first) teacher has."""
        return next(iter(self.sections.values()))

    @property
    def tokenizer_section(self) -> ModelSection:
        """The model whose tokenizer the (first) teacher has."""
        return next(iter(self.sections.values()))

    def shapes(self) -> list[Shape]:
        """Sizes of the teachers, the first one first."""
        ...

    def vocabulary(self) -> Vocabulary:
        """Tokenizers, and how data are made with them.

        Raises:
            ValueError: a tokenizer that cannot be read.
        """
        ...

    def measure(self) -> Measure:
        """Return name, unit and key of its divergence."""
        return KL

    def note_data(self, splits: Splits) -> None:
        """Note the rows that the teacher will read, in its own reading."""
        return

    def data_problems(self, splits: Splits) -> list[str]:
        """Return why the teacher cannot be used for these rows, in its own reading: documents that are missing."""
        return []

    def follow(self, other: TeacherSource) -> None:
        """Copy what another recipe's source knows of the data, where this one's are the same."""
        return

    def problems(self, *, cuda: bool, sharded: bool, family: str | None = None) -> list[str]:
        """Return why its configuration cannot be loaded this way; `family` is the GPU's, None where unknown."""
        return []

    def footprint(self, context: FootprintContext) -> Footprint:
        """Return bytes and FLOPs of a training step, by arithmetic."""
        ...

    def smaller(self, family: str | None = None) -> list[SmallerTeacher]:
        """Return other ways of holding it on GPUs of a family, which need less memory."""
        return []

    def title(self) -> str:
        """Return a readable name."""
        ...

    def size_text(self) -> str:
        """Return its size as readable text, before it is loaded."""
        return f"{sum(shape.parameters for shape in self.shapes()) / 1e6:,.2f} M parameters"

    def open(self, context: LoadContext, vocabulary: Vocabulary) -> Teacher:
        """Load the teacher.

        Raises:
            ValueError: naming the field.
        """
        ...
