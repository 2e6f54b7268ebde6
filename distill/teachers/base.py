"""What a teacher is: three small protocols, asked at three different times, and the values they exchange.

    source = source_of(recipe)                 # from the recipe and files alone; no weights are read
    teacher = source.open(context)             # weights are on the device; ready to be asked
    targets = teacher.targets(batch)           # once a micro-batch, without a graph
    loss = teacher.format.loss(section, pairing)

A new backend is one file with a source and a teacher, and a line in `registry.BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from distill_kernels import LossTerm
from torch import nn

from distill.models.attention_choice import AttentionChoices
from distill.models.head import HeadWeights, LogitTransform, find_head
from distill.models.precision import Precision, resolve_device, resolve_precision
from distill.models.sharding import ALONE, Sharing, is_sharded
from distill.models.work import Work, count_text, parameters_of, total_work, work_of
from distill.teachers.footprint import Footprint, FootprintContext, SmallerTeacher
from distill.teachers.losses import DIVERGENCES
from distill.teachers.measure import KL, Measure

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from distill.data.load import Splits
    from distill.models.shape import Shape
    from distill.recipe import Generate, ModelSection, Recipe, Student
    from distill.recipe import Teacher as TeacherSection
    from distill.teachers.losses import LossSpec, TargetLoss
    from distill.teachers.vocabulary import Vocabulary

Batch = Mapping[str, torch.Tensor]
Collate = Callable[[Sequence[Mapping[str, Sequence[int]]]], dict[str, torch.Tensor]]
# what a teacher says of a batch, opaque to everybody but its format; None where the loss needs none
Targets = object
Prompt = str | list[dict[str, str]]
TOP = 8  # likeliest tokens of both models that `overlap` compares
LossResult = torch.Tensor | tuple[torch.Tensor, Sequence[torch.Tensor]]


class LossInputs:
    """What the objective hands to the student's forward beside the batch.

    A plain class: DDP and FSDP2 look for tensors in keyword arguments (FSDP2 casts them) and leave this one alone.

    Attributes:
        targets: of the teacher for this batch, in its `TargetFormat`; None if the loss has no divergence.
        num_items: int64 tensor [] or int that the summed loss is divided by; None for this batch's valid tokens.
        statistics: whether sums of the token statistics are returned beside the loss.
        drawn_log_p: float [B, S] as the shifted labels: log-probabilities of the labels when the student drew them,
            NaN where it did not; None where nobody kept them.
        advantages: float [B, S] as the shifted labels: what a reward adds to each token's advantage; None without one.
    """

    def __init__(
        self, targets: Targets | None, num_items: torch.Tensor | int | None, statistics: bool,
        drawn_log_p: torch.Tensor | None = None, advantages: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.targets = targets
        self.num_items = num_items
        self.statistics = statistics
        self.drawn_log_p = drawn_log_p
        self.advantages = advantages


class HeadCall(NamedTuple):
    """What a loss gets inside the student head's own call.

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


class Pairing(NamedTuple):
    """How a student's logits meet a teacher's.

    Attributes:
        student: how the student makes logits of hidden states and head.
        columns: of the vocabulary that the loss is over.
        vocab_size: as the fused losses take it: `columns`, None where no head is cut.
    """

    student: LogitTransform
    columns: int
    vocab_size: int | None

    def arguments(self, call: HeadCall) -> dict[str, object]:
        """What every fused loss takes beside hidden states, weights and labels, whatever the teacher is."""
        return {
            "student_bias": call.head.bias, "student_lora": call.head.lora, "num_items": call.inputs.num_items,
            "valid_rows": call.valid_rows, "vocab_size": self.vocab_size, "return_stats": call.inputs.statistics,
        }  # fmt: skip


class TargetFormat(Protocol):
    """What targets are, and the losses that take them.

    Attributes:
        measure: what the divergences reported are called, and what they are means over.
        caveat: what must be known of them; None where they are those of two whole distributions.
        terms: the divergences that these targets can be compared by, as `loss.terms` names them.
        routes: of which the statistics are followed by their own, as `PER_ROUTE` of teachers/losses.py names them.
        reads_valid_rows: whether losses read of hidden states nothing but a batch's `valid_rows`.
    """

    measure: Measure = KL
    caveat: str | None = None
    terms: frozenset[str] = DIVERGENCES
    routes: tuple[str, ...] = ()
    reads_valid_rows: bool = True

    def pair(self, student: LogitTransform, rows: int, vocab_size: int | None) -> Pairing:
        """How a student meets these targets.

        Args:
            student: how it makes logits.
            rows: of its head.
            vocab_size: columns that are compared; None for as many as all heads have.

        Raises:
            ValueError: more columns than a head has, or a head with fewer than the targets need.
        """
        ...

    def loss(self, section: LossSpec, pairing: Pairing) -> TargetLoss:
        """The loss module for a recipe's `loss` section.

        Raises:
            ValueError: a term that these targets cannot give.
        """
        ...

    def held_out(self, pairing: Pairing) -> TargetLoss:
        """What takes the place of the loss in an evaluation: forward divergence with statistics, and the reverse."""
        ...

    def apply(self, loss: TargetLoss, pairing: Pairing, call: HeadCall) -> LossResult:
        """The loss of a batch, a scalar; with `call.inputs.statistics` a pair of it and the token statistics [N]."""
        ...

    def measured_terms(self, loss: TargetLoss) -> Sequence[LossTerm]:
        """The terms that the statistics' divergence is of."""
        return loss.terms

    def likeliest(
        self, targets: Targets, rows: torch.Tensor, most: int
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
        """Of flat `rows`, at most the first `most` of each route, and the teacher's most probable token after each (-1
        in a tie), both int64; by route, "" where there are none. Empty where these targets do not tell it at once."""
        return {}

    def overlap(self, pairing: Pairing, call: HeadCall, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of flat `rows` [n] the share of the student's `TOP` likeliest tokens that are among the teacher's, float32
        [n], by route, NaN in the rows of others; "" where there are none. Empty where these targets do not tell it at
        once."""
        return {}

    def needs_targets(self, loss: TargetLoss) -> bool:
        """Whether the teacher has to be asked at all for this loss."""
        return bool(loss.objective.needs_teacher)


class Teacher(Protocol):
    """A teacher that is ready to be asked. Methods with a body here are what most kinds do.

    Attributes:
        format: what `targets` returns.
        models: by the field of the recipe that names each: to patch, compile, blame; empty for a cache.
        judges_new_rows: may it be asked about rows it has not seen (on-policy).
        whole_documents: rows must hold whole documents, as they were when it was asked: doctor may not cut them.
        ahead: micro-batches that it may be asked of before they are needed.
        prefix: what stands before `input_ids` and `position_ids` in the names of what it reads of a batch.
        reading: which tokens it reads for the student's: the `same`, the same answers after a `context`, or the same
            text `retokenised`.
    """

    prefix: str = ""
    reading: Literal["same", "context", "retokenised"] = "same"
    format: TargetFormat
    models: Mapping[str, nn.Module]
    judges_new_rows: bool = True
    whole_documents: bool = False
    ahead: int = 0

    def collate(self, plain: Collate) -> Collate:
        """What makes batches: `plain`, or something around it that adds what must be known of a batch beforehand."""
        return plain

    def submit(self, batch: Batch) -> None:
        """Start on a batch ahead of time, where that is possible."""
        return

    def fault_of(self, batches: Sequence[Batch]) -> str | None:
        """Why what was submitted of these batches will not come, a line; None once all of it is there."""
        return None

    def targets(self, batch: Batch) -> Targets:
        """What the teacher says of a collated batch, without a graph; every rank asks equally often."""
        ...

    def student_batch(self, batch: Batch, needs_targets: bool) -> dict[str, torch.Tensor]:
        """The part of a batch that is the student's; ValueError of one that `collate` has not made."""
        return dict(batch)

    def head_rows(self) -> list[int]:
        """Rows of each head, or columns of what is stored."""
        return [len(find_head(model).linear.weight) for model in self.models.values()]  # type: ignore[arg-type]

    def head_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights and biases of the heads by a name for people; of sharded ones this process's part."""
        for name, head in ((name, find_head(model).linear) for name, model in self.models.items()):
            for tensor in (head.weight, getattr(head, "bias", None)):
                if isinstance(tensor, torch.Tensor):
                    yield f"the weights of the {name}'s head", tensor

    def works(self) -> dict[str, Work | None]:
        """FLOPs of one forward pass by token, None where they are not known, by the prefix of what is read."""
        return {self.prefix: total_work(work_of(model, trains=False) for model in self.models.values())}

    def parameters_text(self) -> str:
        """Its size, for people."""
        return f"{count_text(sum(parameters_of(model)[0] for model in self.models.values()))} parameters"

    def to(self, device: torch.device) -> None:
        """Move what does not lie in shards."""
        for model in self.models.values():
            if not is_sharded(model):
                model.to(device)

    def cut_student(self, section: Student, device: torch.device, dtype: torch.dtype) -> CutStudent:
        """A student of this teacher's layers, in train mode, without adapters; ValueError where it cannot be cut."""
        raise ValueError("student.from_teacher: this kind of teacher has no layers to cut a student from")

    def quantise(self) -> None:
        """Put layers into 8 bits where the recipe has it and loading has not: after patching, before it is asked."""
        return

    def prove(self, batch: Batch, student: nn.Module | None, pairing: Pairing) -> list[str]:
        """Once, on the first held-out batch: quantises, and says in lines what that costs, or what share is matched."""
        return []

    def respond(self, prompts: Sequence[Prompt], settings: Generate) -> list[str] | None:
        """Greedy answers to questions, or to conversations of messages; None where it cannot generate. Of a sharded
        teacher every process must call this."""
        return None

    @property
    def is_collective(self) -> bool:
        """Whether `respond` and `fingerprint` must be called by all processes: its models lie in shards."""
        return any(map(is_sharded, self.models.values()))

    def small(self, layers: Sequence[int]) -> Teacher:
        """A copy with only these layers (negative indices count from the end), for doctor's training runs."""
        ...

    def fingerprint(self) -> dict[str, object]:
        """Of its weights, for the lock file; collective where they are sharded."""
        ...

    def follow(self, student: nn.Module) -> None:
        """Called after each optimizer step: a teacher that is not frozen moves."""
        return

    def save(self, checkpoint: Path) -> None:
        """Write what training has changed into a checkpoint's folder: on the first process alone."""
        return

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint: on all processes."""
        return

    def settle(self) -> None:
        """Write down what must last: on all processes, at checkpoints and the ends of epochs and evaluations."""
        return

    def close(self) -> None:
        """Release what it holds open: threads, connections. It cannot be asked after that."""
        return


class CutStudent(NamedTuple):
    """A student that was cut from its teacher, and the indices of the teacher's layers it has."""

    model: PreTrainedModel
    layer_indices: list[int]


class OpenContext(NamedTuple):
    """What a source is opened with.

    Attributes:
        device: of this process.
        precision: dtypes of computing and of both models' weights.
        sharing: how several processes hold the models.
        attention: which attention back ends the models get, for a teacher that is patched while it is loaded.
    """

    device: torch.device
    precision: Precision
    sharing: Sharing
    attention: AttentionChoices


def open_context(recipe: Recipe) -> OpenContext:
    """The context of this process for a recipe, alone: its device and precision."""
    device = resolve_device(recipe.train)
    return OpenContext(device, resolve_precision(recipe, device), ALONE, AttentionChoices(recipe))


class TeacherSource(Protocol):
    """A teacher as the recipe and the files on this machine tell of it; no weights are read.

    Attributes:
        recipe: the run's.
        sections: of the models that will be loaded, by field; none for a cache.
        shardable: whether its weights may be cut over the devices.
    """

    recipe: Recipe
    sections: Mapping[str, TeacherSection]
    shardable: bool = True

    @property
    def is_to_be_made(self) -> bool:  # a cache that another command makes first
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
        """What its divergence is called, over which outcomes."""
        return KL

    def note_data(self, splits: Splits) -> None:
        """Note the rows that the teacher will read, as it reads them itself."""
        return

    def data_problems(self, splits: Splits) -> list[str]:
        """Why it cannot teach these rows, as it reads them itself: documents that are missing."""
        return []

    def follow(self, other: TeacherSource) -> None:
        """Take over what another recipe's source knows of the data, where this one's are the same."""
        return

    def problems(self, *, cuda: bool, sharded: bool, family: str | None = None) -> list[str]:
        """Why it cannot be loaded so, by its configuration; `family` is the GPU's, None where it is not known."""
        return []

    def footprint(self, context: FootprintContext) -> Footprint:
        """Bytes and FLOPs, by arithmetic."""
        ...

    def smaller(self, family: str | None = None) -> list[SmallerTeacher]:
        """Other ways of holding it on GPUs of a family that take less of their memory."""
        return []

    def title(self) -> str:
        """What it is called where a person reads of it."""
        ...

    def size_text(self) -> str:
        """What there is of it, for people, before it is loaded."""
        return f"{sum(shape.parameters for shape in self.shapes()) / 1e6:,.2f} M parameters"

    def open(self, context: OpenContext, vocabulary: Vocabulary) -> Teacher:
        """Load it.

        Raises:
            ValueError: naming the field.
        """
        ...
