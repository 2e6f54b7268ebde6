"""Capabilities of teachers: what only some of them can do, and for each the one function that asks for it.

A teacher that can do more than `Teacher` demands has the methods of one of these protocols; it need not inherit from
it. Everybody else calls the function below the protocol, which looks through the layers around a backend (stores,
contexts, other tokenizers, mixtures, routes) and knows what holds for a teacher without the capability.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from distill.models.flops import FlopCounts, count_flops, count_text, parameters_of, sum_flops
from distill.models.head import find_head
from distill.models.sharding import is_sharded
from distill.objectives.targets import Batch, VocabularyAlignment
from distill.teachers.interface import CutRequest, CutStudent, Teacher

if TYPE_CHECKING:
    from distill.objectives.hidden import StoredHead
    from distill.recipe import Generate

Prompt = str | list[dict[str, str]]


class Part(NamedTuple):
    """A teacher inside another.

    Attributes:
        teacher: The inner teacher.
        prefix: Prefix of its columns in the batches of the outer teacher.
        batch_of: Function from the outer teacher's batch to the inner one's; None where no row is for it.
    """

    teacher: Teacher
    prefix: str
    batch_of: Callable[[Batch], Batch | None]


@runtime_checkable
class Layer(Protocol):
    """A teacher around others, whose outputs it stores, aligns or combines."""

    def parts(self) -> Sequence[Part]:
        """Return the teachers inside, the first one first."""
        ...


def parts_of(teacher: Teacher) -> Sequence[Part]:
    """Return the teachers directly inside a teacher; none for a backend."""
    return teacher.parts() if isinstance(teacher, Layer) else ()


def layers_of(teacher: Teacher) -> Iterator[Teacher]:
    """Yield a teacher and all that are inside it, the outer ones first."""
    yield teacher
    for part in parts_of(teacher):
        yield from layers_of(part.teacher)


# ---------------------------------------------------------------- models and heads


@runtime_checkable
class HoldsHead(Protocol):
    """A teacher whose model is not in this process, but whose head is.

    Attributes:
        stored_head: the head; None where K tokens are given.
    """

    stored_head: StoredHead | None


def stored_heads(teacher: Teacher) -> list[StoredHead]:
    """Return the heads of a teacher that are not part of its models."""
    heads = [each.stored_head for each in layers_of(teacher) if isinstance(each, HoldsHead)]
    return [head for head in heads if head is not None]


def head_tensors(teacher: Teacher) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights and biases of a teacher's heads with a readable name; of sharded ones, this process's part."""
    for name, head in ((name, find_head(model).linear) for name, model in teacher.models.items()):
        for tensor in (head.weight, getattr(head, "bias", None)):
            if isinstance(tensor, torch.Tensor):
                yield f"the weights of the {name}'s head", tensor
    for stored in stored_heads(teacher):
        yield stored.name, stored.weights.weight


def move_to(teacher: Teacher | nn.Module, device: torch.device) -> None:
    """Move a teacher's models that are not sharded, and its other heads, to a device; also a model alone."""
    models = {"": teacher} if isinstance(teacher, nn.Module) else teacher.models
    for model in models.values():
        if not is_sharded(model):
            model.to(device)
    for head in [] if isinstance(teacher, nn.Module) else stored_heads(teacher):
        head.to(device)


def is_collective(teacher: Teacher) -> bool:
    """Return whether all processes must query a teacher, and ask for its fingerprint, since its models are sharded."""
    return any(map(is_sharded, teacher.models.values()))


@runtime_checkable
class Quantises(Protocol):
    """A teacher whose layers may be loaded in 16 bits to be quantised in place."""

    def quantise(self) -> None:
        """Quantise the layers that the recipe has in 8 bits and loading has not."""
        ...


def quantise_layers(teacher: Teacher) -> None:
    """Quantise what a recipe has in 8 bits and loading has not: after patching, before any query."""
    for each in layers_of(teacher):
        if isinstance(each, Quantises):
            each.quantise()


@runtime_checkable
class CutsStudents(Protocol):
    """A teacher with layers that a student can be cut from."""

    def cut_student(self, request: CutRequest) -> CutStudent:
        """Return a student of this teacher's parts, in train mode, without adapters; ValueError where impossible."""
        ...


def student_cut_from(teacher: Teacher, request: CutRequest) -> CutStudent:
    """Return a student of a teacher's parts, of the first one of several.

    Raises:
        ValueError: there are no layers to cut from, or not those.
    """
    if isinstance(teacher, CutsStudents):
        return teacher.cut_student(request)
    for part in parts_of(teacher):
        return student_cut_from(part.teacher, request)
    raise ValueError("student.from_teacher: this kind of teacher has no layers to cut from; give student.model")


@runtime_checkable
class CopiesTruncated(Protocol):
    """A teacher with layers in this process, some of which can be left out."""

    def truncated_copy(self, layers: Sequence[int]) -> Teacher:
        """Return a copy with only these layers; negative indices count from the end."""
        ...


def truncated_copy(teacher: Teacher, layers: Sequence[int]) -> Teacher:
    """Return a copy with only these layers, for doctor's training runs; all of a teacher without layers here."""
    return teacher.truncated_copy(layers) if isinstance(teacher, CopiesTruncated) else copy.copy(teacher)


@runtime_checkable
class HasReferenceLogits(Protocol):
    """A teacher whose model is not in this process, with logits that the doctor compares its `targets` with."""

    def reference_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits [B, S, V] of token ids [B, S], in float64 where possible, without calling `targets`."""
        ...


def reference_logits(teacher: Teacher, input_ids: torch.Tensor) -> torch.Tensor:
    """Return logits [B, S, V] of a backend of another package, computed independently of its `targets`.

    Raises:
        ValueError: the backend has no such method.
    """
    if isinstance(teacher, HasReferenceLogits):
        return teacher.reference_logits(input_ids)
    name = type(teacher).__name__
    raise ValueError(f"teacher: expected {name} to have reference_logits(input_ids), got no such method; add it")


# ---------------------------------------------------------------- queries


@runtime_checkable
class Prefetches(Protocol):
    """A teacher that can begin to compute targets before they are needed.

    Attributes:
        prefetch_depth: micro-batches that may be submitted before their targets are needed.
    """

    prefetch_depth: int

    def submit(self, batch: Batch) -> None:
        """Begin to compute the targets of a batch, without waiting."""
        ...

    def fault_of(self, batches: Sequence[Batch]) -> str | None:
        """Return why targets submitted for these batches will not come, a line; None once all of them are there."""
        ...


class PrefetchingParts:
    """Several teachers, or one that reads other columns, as one that prefetches.

    Args:
        parts: the inner teachers, each with itself as one that prefetches.
    """

    def __init__(self, parts: Sequence[tuple[Part, Prefetches]]) -> None:
        self.parts = list(parts)
        self.prefetch_depth = max(inner.prefetch_depth for _, inner in parts)

    def _batches(self, batch: Batch) -> Iterator[tuple[Prefetches, Batch]]:
        for part, inner in self.parts:
            if (own := part.batch_of(batch)) is not None:
                yield inner, own

    def submit(self, batch: Batch) -> None:
        """Submit to each inner teacher what it reads of a batch."""
        for inner, own in self._batches(batch):
            inner.submit(own)

    def fault_of(self, batches: Sequence[Batch]) -> str | None:
        """Return the first fault of an inner teacher."""
        asked = (each for batch in batches for each in self._batches(batch))
        return next((fault for inner, own in asked if (fault := inner.fault_of([own]))), None)


def prefetching_of(teacher: Teacher) -> Prefetches | None:
    """Return a teacher as one that prefetches, for its own batches; None where nothing inside it does."""
    if isinstance(teacher, Prefetches):
        return teacher
    found = [(part, inner) for part in parts_of(teacher) if (inner := prefetching_of(part.teacher)) is not None]
    return PrefetchingParts(found) if found else None


@runtime_checkable
class ChecksFirstBatch(Protocol):
    """A teacher that has something to check or to measure on the first held-out batch."""

    def validate_first_batch(self, batch: Batch, student: nn.Module | None, pairing: VocabularyAlignment) -> list[str]:
        """Check the batch: quantise, and return lines on what that costs, or what share is matched."""
        ...


def first_batch_lines(
    teacher: Teacher, batch: Batch, student: nn.Module | None, pairing: VocabularyAlignment
) -> list[str]:
    """Check a teacher, and those inside it, on the first held-out batch; return lines of a report.

    Args:
        teacher: An open, patched teacher; one with an 8-bit dtype is quantised here.
        batch: Batch of the teacher's collator.
        student: Student for comparison; None where it reads other tokens than the teacher.
        pairing: Alignment of the student's logits with the targets.
    """
    if isinstance(teacher, ChecksFirstBatch):
        return teacher.validate_first_batch(batch, student, pairing)
    inner = [(part.teacher, own) for part in parts_of(teacher) if (own := part.batch_of(batch)) is not None]
    return [line for each, own in inner for line in first_batch_lines(each, own, student, pairing)]


@runtime_checkable
class Responds(Protocol):
    """A teacher that generates text, or has stored some."""

    def respond(self, prompts: Sequence[Prompt], settings: Generate) -> list[str] | None:
        """Return greedy responses; None where these prompts have none."""
        ...


def responses_of(teacher: Teacher, prompts: Sequence[Prompt], settings: Generate) -> list[str] | None:
    """Return greedy responses to questions or conversations of messages; None where a teacher cannot generate.

    Every process must call this for a sharded teacher.
    """
    if isinstance(teacher, Responds):
        return teacher.respond(prompts, settings)
    parts = parts_of(teacher)
    return responses_of(parts[0].teacher, prompts, settings) if len(parts) == 1 else None


# ---------------------------------------------------------------- state

Constructor = tuple[Callable[..., Teacher], tuple[object, ...]]


@runtime_checkable
class Reconstructs(Protocol):
    """A teacher that is not pickled whole: another process constructs it anew from models, teachers and settings."""

    def constructor(self) -> Constructor:
        """Return a function that makes this teacher, and its arguments, all of which can be pickled."""
        ...


def constructor_of(value: object) -> Constructor | None:
    """Return the constructor of a teacher; None of any other value, and of a teacher that is pickled as it is."""
    return value.constructor() if isinstance(value, Reconstructs) and not isinstance(value, type) else None


@runtime_checkable
class FollowsStudent(Protocol):
    """A teacher that training changes, such as a running average of the student."""

    def update_ema(self, student: nn.Module) -> None:
        """Update the teacher; called after each optimizer step."""
        ...

    def save(self, checkpoint: Path) -> None:
        """Write what training has changed into a checkpoint's folder; called on the first process only."""
        ...

    def restore(self, checkpoint: Path) -> None:
        """Restore what `save` wrote into a checkpoint; called on all processes."""
        ...


def following(teacher: Teacher) -> list[FollowsStudent]:
    """Return the teachers, inside this one too, that training changes; none where all are frozen."""
    return [each for each in layers_of(teacher) if isinstance(each, FollowsStudent)]


@runtime_checkable
class Flushes(Protocol):
    """A teacher that stores outputs, in parts."""

    def flush(self) -> None:
        """Write what is pending."""
        ...


def stores_of(teacher: Teacher) -> list[Flushes]:
    """Return a teacher's stores."""
    return [each for each in layers_of(teacher) if isinstance(each, Flushes)]


def flush(teacher: Teacher) -> None:
    """Write pending outputs; called on all processes, at checkpoints and the ends of epochs and evaluations."""
    for each in stores_of(teacher):
        each.flush()


# ---------------------------------------------------------------- figures


@runtime_checkable
class CountsWork(Protocol):
    """A teacher whose work does not follow from its models."""

    def flops_per_token(self) -> dict[str, FlopCounts | None]:
        """Return FLOPs per token by the prefix of what is read; None where they are not known."""
        ...


def flops_per_token(teacher: Teacher) -> dict[str, FlopCounts | None]:
    """Return FLOPs per token of one forward pass by the prefix of the columns that are read; None where not known."""
    if isinstance(teacher, CountsWork):
        return teacher.flops_per_token()
    parts = parts_of(teacher)
    if not parts:
        return {"": sum_flops(count_flops(model, trains=False) for model in teacher.models.values())}
    works = [(part.prefix + inner, work) for part in parts for inner, work in flops_per_token(part.teacher).items()]
    return {prefix: sum_flops(work for own, work in works if own == prefix) for prefix, _ in works}


@runtime_checkable
class DescribesSize(Protocol):
    """A teacher whose size is not the number of its models' parameters."""

    def size_text(self) -> str:
        """Return the size as readable text."""
        ...


def size_text(teacher: Teacher) -> str:
    """Return a teacher's size as readable text: its parameters, or what is stored or received in place of them."""
    if isinstance(teacher, DescribesSize):
        return teacher.size_text()
    parts = parts_of(teacher)
    if len(parts) == 1:
        return size_text(parts[0].teacher)
    return f"{count_text(sum(parameters_of(model)[0] for model in teacher.models.values()))} parameters"
