"""What a teacher is: `TeacherPlan`, from the recipe and files alone, and `Teacher`, open and ready to be queried.

    plan = source_of(recipe)                   # no weights are read
    teacher = plan.open(context, vocabulary)   # weights are on the device
    targets = teacher.targets(batch)           # once per micro-batch, without a graph
    loss = teacher.format.loss(section, pairing)

Both classes have every method that anybody calls, each with what holds for most teachers. A teacher may hold others:
a store and rows of another reading hold one, routes and mixtures several,

    routes or a mixture  ->  rows (a context, another tokenizer)  ->  store  ->  backend (a model here, a server)

and name them in `parts()`. A default goes through the parts: what a teacher does that overrides nothing is what those
inside it do, each for its own part of a batch, and of the rows. Backends, rows and combinations override what is their
own. A backend of another package subclasses the two and registers the plan (scripts/examples/backend.py).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from distill.data.collator import BatchColumns
from distill.models.flops import FlopCounts, count_flops, count_text, parameters_of, sum_flops
from distill.models.head import find_head
from distill.models.meta_models import meta_config, meta_model
from distill.models.shape import ModelSizes, parameters_text
from distill.models.sharding import is_sharded
from distill.objectives.measure import KL, DivergenceUnit
from distill.objectives.targets import Batch, TargetFormat, Targets, VocabularyAlignment
from distill.teachers.identity import model_name, teacher_identity
from distill.teachers.load_context import CutRequest, CutStudent, LoadContext
from distill.teachers.vocabulary import Vocabulary

if TYPE_CHECKING:
    from distill.data.load import Splits
    from distill.generation.tasks import TaskQuestions
    from distill.models.dtypes import Precision
    from distill.models.load.shared_weights import FrozenWeights
    from distill.objectives.hidden import StoredHead
    from distill.recipe import Generate, LoadedTeacherConfig, Lora, ModelSection, Recipe, TeacherConfig
    from distill.teachers.footprint import Footprint, FootprintContext, SmallerTeacher

Prompt = str | list[dict[str, str]]


class AcceptedRows(NamedTuple):
    """Rows that a teacher has outputs for.

    Attributes:
        reading: Tokens that the teacher reads for a student's row: the `same`, the same response after another prompt
            (`context`), or the same text in its own tokens (`retokenised`).
        supports_new_rows: True if the teacher can be queried for rows that were not in the data (on-policy).
        whole_documents: True if rows must hold whole documents, as its outputs were stored: doctor may not cut them.
    """

    reading: Literal["same", "context", "retokenised"] = "same"
    supports_new_rows: bool = True
    whole_documents: bool = False


# ---------------------------------------------------------------- an open teacher


class InnerTeacher(NamedTuple):
    """A teacher inside another.

    Attributes:
        teacher: The inner teacher.
        prefix: Prefix of its columns in the batches of the outer teacher.
        batch_of: Function from the outer teacher's batch to the inner one's; None where no row is for it.
    """

    teacher: Teacher
    prefix: str
    batch_of: Callable[[Batch], Batch | None]


Constructor = tuple[Callable[..., "Teacher"], tuple[object, ...]]


class Teacher:
    """A teacher that is ready to be queried.

    Attributes:
        format: Format of what `targets` returns, and the losses that take it.
        models: Loaded models by the field of the recipe that names each: to patch, compile, diagnose; empty for a
            cache and a server.
        stored_head: LM head of a teacher of hidden states whose model is not in this process; else None.
        tokenizer: Tokenizer by which the teacher generates; None where it does not.
        rows: Rows that the teacher has outputs for.
        columns: Functions that make the columns of a batch that the teacher needs beside the student's.
    """

    format: TargetFormat
    models: Mapping[str, nn.Module] = {}  # read only, as its type says; a proxy could not be copied
    stored_head: StoredHead | None = None
    tokenizer: Any = None
    rows: AcceptedRows = AcceptedRows()
    columns: Sequence[BatchColumns] = ()

    def parts(self) -> Sequence[InnerTeacher]:
        """Return the teachers directly inside this one, the first one first; none of a backend."""
        return ()

    def unwrap_all(self) -> Iterator[Teacher]:
        """Yield this teacher and all that are inside it, the outer ones first."""
        yield self
        for part in self.parts():
            yield from part.teacher.unwrap_all()

    def parts_of(self, batch: Batch) -> Iterator[tuple[Teacher, Batch]]:
        """Yield the teachers directly inside that read some of a batch, each with its own batch."""
        for part in self.parts():
            own = part.batch_of(batch)
            if own is not None:
                yield part.teacher, own

    # ------------------------------------------------------------ outputs

    def targets(self, batch: Batch) -> Targets:
        """Return the teacher's outputs for a collated batch, without a graph; every rank calls this equally often."""
        raise NotImplementedError(f"{type(self).__name__}.targets")

    def sent(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return K tokens of a batch's trained positions [M, ...] on the CPU, by the names of `TopK`, as servers send
        them; of teachers that give no hidden states.
        """
        raise NotImplementedError(f"{type(self).__name__}.sent")

    def student_batch(self, batch: Batch, needs_targets: bool) -> dict[str, torch.Tensor]:
        """Return the student's part of a batch; ValueError for a batch without `columns`."""
        return dict(batch)

    @property
    def prefetch_depth(self) -> int:
        """Number of micro-batches that may be prefetched before their targets are needed; 0 for none."""
        return max((part.teacher.prefetch_depth for part in self.parts()), default=0)

    def prefetch(self, batch: Batch) -> None:
        """Begin to compute the targets of a batch, without waiting."""
        for teacher, own in self.parts_of(batch):
            teacher.prefetch(own)

    def prefetch_error(self, batches: Sequence[Batch]) -> str | None:
        """Wait for the targets that were prefetched; return why some will not come, one line, or None."""
        for batch in batches:
            for teacher, own in self.parts_of(batch):
                error = teacher.prefetch_error([own])
                if error is not None:
                    return error
        return None

    def respond(self, prompts: Sequence[Prompt], settings: Generate) -> list[str] | None:
        """Return greedy responses to questions or conversations of messages; None where there are none.

        Every process must call this for a sharded teacher.
        """
        parts = self.parts()
        return parts[0].teacher.respond(prompts, settings) if len(parts) == 1 else None

    def choose(self, questions: TaskQuestions) -> list[str] | None:
        """Return the option of each prompt that the teacher finds most probable; None where none can be computed.

        Every process must call this for a sharded teacher.
        """
        parts = self.parts()
        return parts[0].teacher.choose(questions) if len(parts) == 1 else None

    def validate_first_batch(
        self, batch: Batch, student: nn.Module | None, alignment: VocabularyAlignment
    ) -> list[str]:
        """Check the teacher on the first held-out batch, and quantise it; return lines of a report.

        Args:
            batch: Batch of the teacher's collator.
            student: Student for comparison; None where it reads other tokens than the teacher.
            alignment: Alignment of the student's logits with the targets.
        """
        lines: list[str] = []
        for teacher, own in self.parts_of(batch):
            lines += teacher.validate_first_batch(own, student, alignment)
        return lines

    def reference_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits [B, S, V] of token ids [B, S], in float64 where possible, without calling `targets`.

        The doctor compares `targets` with them, of a backend of another package whose model is not in `models`.
        """
        name = type(self).__name__
        raise ValueError(f"teacher: expected {name} to have reference_logits(input_ids), got no such method; add it")

    # ------------------------------------------------------------ models and heads

    def stored_heads(self) -> list[StoredHead]:
        """Return the heads, here and inside, that are not part of a model in this process."""
        heads = [each.stored_head for each in self.unwrap_all()]
        return [head for head in heads if head is not None]

    def head_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights and biases of the heads with a readable name; of sharded ones, this process's part."""
        for name, model in self.models.items():
            head = find_head(model).linear
            for tensor in (head.weight, getattr(head, "bias", None)):
                if isinstance(tensor, torch.Tensor):
                    yield f"the weights of the {name}'s head", tensor
        for stored in self.stored_heads():
            yield stored.name, stored.weights.weight

    def move_to(self, device: torch.device) -> None:
        """Move the models that are not sharded, and the stored heads, to a device."""
        for model in self.models.values():
            if not is_sharded(model):
                model.to(device)
        for head in self.stored_heads():
            head.move_to(device)

    def is_collective(self) -> bool:
        """Return whether all processes must query it, and ask for its fingerprint, since its models are sharded."""
        return any(map(is_sharded, self.models.values()))

    def quantise(self) -> None:
        """Quantise the layers that the recipe has in 8 bits and loading has not: after patching, before any query."""
        for part in self.parts():
            part.teacher.quantise()

    def cut_student(self, request: CutRequest) -> CutStudent:
        """Return a student of this teacher's parts, of the first one of several; in train mode, without adapters.

        Raises:
            ValueError: there are no layers to cut from, or not those.
        """
        for part in self.parts():
            return part.teacher.cut_student(request)
        raise ValueError("student.from_teacher: this kind of teacher has no layers to cut from; give student.model")

    def truncated_copy(self, layers: Sequence[int]) -> Teacher:
        """Return a copy with only these layers (negative: from the end); with all, where no layer is here."""
        return copy.copy(self)

    # ------------------------------------------------------------ state

    def flush(self) -> None:
        """Write stored outputs that are pending; called on all processes, at checkpoints and the ends of epochs."""
        for part in self.parts():
            part.teacher.flush()

    def close(self) -> None:
        """Release threads and connections; the teacher cannot be queried afterwards."""
        for part in self.parts():
            part.teacher.close()

    @property
    def follows_student(self) -> bool:
        """True where training changes the teacher, such as a running average of the student."""
        return any(part.teacher.follows_student for part in self.parts())

    def add_adapters(self, lora: Lora, seed: int | None = None) -> None:
        """Put the student's adapters on a teacher that follows the student; before it is patched or queried."""
        for part in self.parts():
            part.teacher.add_adapters(lora, seed)

    def update_ema(self, student: nn.Module) -> None:
        """Update a teacher that follows the student; called after each optimizer step."""
        for part in self.parts():
            part.teacher.update_ema(student)

    def save(self, checkpoint: Path) -> None:
        """Write what training has changed into a checkpoint's folder; called on the first process only."""
        for part in self.parts():
            part.teacher.save(checkpoint)

    def restore(self, checkpoint: Path) -> None:
        """Restore what `save` wrote into a checkpoint; called on all processes."""
        for part in self.parts():
            part.teacher.restore(checkpoint)

    def fingerprint(self) -> dict[str, object]:
        """Return a fingerprint of the weights, for the lock file; collective where they are sharded."""
        (part,) = self.parts()  # combinations of several have their own
        return part.teacher.fingerprint()

    @property
    def stores_outputs(self) -> bool:
        """True where outputs are stored, so that the models are not needed once all are."""
        return any(part.teacher.stores_outputs for part in self.parts())

    def constructor(self) -> Constructor | None:
        """Return a function that makes this teacher anew in another process, and its arguments, all of which can be
        pickled; None where the teacher itself can be.
        """
        return None

    # ------------------------------------------------------------ figures

    def flops_per_token(self) -> dict[str, FlopCounts | None]:
        """Return FLOPs per token of a forward pass by the prefix of the columns that are read; None where not known."""
        if not self.parts():
            return {"": sum_flops(count_flops(model, trains=False) for model in self.models.values())}
        works: dict[str, list[FlopCounts | None]] = {}
        for part in self.parts():
            for inner, work in part.teacher.flops_per_token().items():
                works.setdefault(part.prefix + inner, []).append(work)
        return {prefix: sum_flops(own) for prefix, own in works.items()}

    def size_text(self) -> str:
        """Return the size as readable text: parameters, or what is stored or received in place of them."""
        parts = self.parts()
        if len(parts) == 1:
            return parts[0].teacher.size_text()
        return f"{count_text(sum(parameters_of(model)[0] for model in self.models.values()))} parameters"


# ---------------------------------------------------------------- before weights are read


class InnerPlan(NamedTuple):
    """A plan inside another.

    Attributes:
        plan: The inner plan.
        splits_of: Function from the outer plan's rows to those that the inner teacher reads.
        number: Index of the teacher among several, from 0; None for a single one.
    """

    plan: TeacherPlan
    splits_of: Callable[[Splits], Splits]
    number: int | None = None


class TeacherPlan:
    """A teacher as described by the recipe and the files on this machine; no weights are read.

    Args:
        recipe: Recipe of the run, with this teacher alone.
        section: Section of the recipe that describes the teacher; None for the recipe's `teacher`.
        field: Field of the recipe that holds the section, such as `teachers.1`.

    Attributes:
        sections: Sections of the models that will be loaded, by field; empty for a cache.
        shardable: True if the weights may be sharded over the devices.
    """

    shardable: bool = True

    def __init__(self, recipe: Recipe, section: TeacherConfig | None = None, field: str = "teacher") -> None:
        self.recipe = recipe
        self.section = section or recipe.teacher
        self.field = field
        self.sections: Mapping[str, LoadedTeacherConfig] = {}

    def parts(self) -> Sequence[InnerPlan]:
        """Return the plans directly inside this one, the first one first; none of a backend."""
        return ()

    def inner_of_one(self) -> TeacherPlan | None:
        """Return the plan inside one that holds a single teacher; None of a backend, and of several teachers."""
        for part in self.parts():
            if part.number is None:
                return part.plan
        return None

    def unwrap_all(self) -> Iterator[TeacherPlan]:
        """Yield this plan and all that are inside it, the outer ones first."""
        yield self
        for part in self.parts():
            yield from part.plan.unwrap_all()

    def open(self, context: LoadContext, vocabulary: Vocabulary) -> Teacher:
        """Load the teacher.

        Raises:
            ValueError: naming the field.
        """
        raise NotImplementedError(f"{type(self).__name__}.open")

    # ------------------------------------------------------------ the model

    def config_section(self) -> ModelSection:
        """Return the section that names the configuration of the (first) teacher's model."""
        for part in self.parts():
            return part.plan.config_section()
        for section in self.sections.values():
            return section
        return self.section.loaded()

    def tokenizer_section(self) -> ModelSection:
        """Return the section that names the tokenizer of the (first) teacher's model."""
        for part in self.parts():
            return part.plan.tokenizer_section()
        return self.config_section()

    def vocabulary(self) -> Vocabulary:
        """Return the tokenizers, and how data are made with them.

        Raises:
            ValueError: a tokenizer that cannot be read.
        """
        inner = self.inner_of_one()
        if inner is not None:
            return inner.vocabulary()
        section = self.config_section() if self.recipe.data.is_synthetic else self.tokenizer_section()
        return Vocabulary(self.recipe, section)

    def shapes(self) -> list[ModelSizes]:
        """Return the sizes of the teachers, the first one first; also of those whose weights are not loaded."""
        if self.parts():
            return [shape for part in self.parts() for shape in part.plan.shapes()]
        field = next(iter(self.sections), "teacher")
        return [meta_model(meta_config(self.config_section(), field), field).shape]

    def frozen_weights(self, precision: Precision, *, sharded: bool) -> list[FrozenWeights]:
        """Return the weights that are loaded in this process and stay frozen, of which models may share one copy."""
        return [weights for part in self.parts() for weights in part.plan.frozen_weights(precision, sharded=sharded)]

    def title(self) -> str:
        """Return a readable name."""
        inner = self.inner_of_one()
        return model_name(self.section) if inner is None else inner.title()

    def size_text(self) -> str:
        """Return the size as readable text, before the teacher is loaded."""
        inner = self.inner_of_one()
        if inner is not None:
            return inner.size_text()
        return parameters_text(list(self.shapes()))

    def maker(self) -> dict[str, object] | None:
        """Return the identity of the model, for what is stored of it, as `teacher_identity` does; None if unknown."""
        return teacher_identity(self.section)

    def stored_dtype(self) -> str | None:
        """Return the dtype that stores without loss what servers send; None for that of the teacher's head."""
        return None

    # ------------------------------------------------------------ planning

    def problems(self, *, cuda: bool, sharded: bool, family: str | None = None) -> list[str]:
        """Return why its configuration cannot be loaded this way; `family` is the GPU's, None where unknown."""
        found: list[str] = []
        for part in self.parts():
            texts = part.plan.problems(cuda=cuda, sharded=sharded, family=family)
            found += [of_member(part.number, text) for text in texts]
        return found

    def footprint(self, context: FootprintContext) -> Footprint:
        """Return bytes and FLOPs of a training step, by arithmetic."""
        inner = self.inner_of_one()
        if inner is None:
            raise NotImplementedError(f"{type(self).__name__}.footprint")
        return inner.footprint(context)

    def smaller(self, family: str | None = None) -> list[SmallerTeacher]:
        """Return other ways of holding the teacher on GPUs of a family, which need less memory; none of several."""
        inner = self.inner_of_one()
        return [] if inner is None else inner.smaller(family)

    # ------------------------------------------------------------ outputs and data

    def measure(self) -> DivergenceUnit:
        """Return name, unit and key of the divergence to the teacher."""
        inner = self.inner_of_one()
        return KL if inner is None else inner.measure()

    def is_to_be_made(self) -> bool:
        """Return whether another command has to store the teacher's outputs first."""
        inner = self.inner_of_one()
        return inner is not None and inner.is_to_be_made()

    def note_data(self, splits: Splits) -> None:
        """Note the rows of a run, as this teacher reads them, where it must know them before it is opened."""
        for part in self.parts():
            part.plan.note_data(part.splits_of(splits))

    def data_problems(self, splits: Splits) -> list[str]:
        """Return why the teacher cannot be used for these rows, as it reads them, such as missing documents."""
        found: list[str] = []
        for part in self.parts():
            texts = part.plan.data_problems(part.splits_of(splits))
            found += [of_member(part.number, text) for text in texts]
        return found

    def loss_problems(self) -> list[str]:
        """Return why its targets do not allow the recipe's loss, as far as is known before it is opened."""
        return [text for part in self.parts() for text in part.plan.loss_problems()]

    def copy_cached_state(self, other: TeacherPlan) -> None:
        """Copy from another recipe's plan what holds for this one too: what servers answered, what was read of data."""
        if isinstance(other, type(self)):
            for own, given in zip(self.parts(), other.parts(), strict=False):
                own.plan.copy_cached_state(given.plan)


def of_member(number: int | None, text: str) -> str:
    """Return a message with the field of one of several teachers."""
    return text if number is None else re.sub("^teacher[.]", f"teachers.{number}.", text)
