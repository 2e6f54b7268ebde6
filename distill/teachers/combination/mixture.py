"""Several teachers in a run: the student learns the mixture of their probabilities.

    p_t = sum_k w_k softmax(z_k / T)

The mixture is made in the fused pass (`distill_kernels.TeacherHead`); held-out figures are against it too. All teachers
share one vocabulary; those with a context read it before each answer, the same one in a mixture. Each is loaded for
itself, also where two of them are the same model with different adapters; of a route some may be served or cached
(`distill.teachers.combination.routes`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from distill_kernels import TeacherHead
from torch import nn

from distill.core.ranks import is_main_process
from distill.data.load import Splits
from distill.generation.greedy import generate
from distill.models.flops import sum_flops
from distill.models.head import LogitTransform
from distill.models.load.fingerprint import model_identity
from distill.models.load.loading import load_tokenizer
from distill.models.load.vocabulary import compare
from distill.objectives.hidden import FusedFormat, HiddenFormat, pairing_of
from distill.objectives.losses import TargetLoss
from distill.objectives.measure import KL
from distill.objectives.targets import Batch, HeadForward, LossResult, TargetProperties, VocabularyAlignment
from distill.recipe import Data, Generate, ModelSection, Recipe
from distill.recipe.teachers import TeacherDescription
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.capabilities import CopiesTruncated, Layer, Part, Prompt, Responds, truncated_copy
from distill.teachers.combination.mixture_model import MixtureModel
from distill.teachers.footprint import Footprint, FootprintContext
from distill.teachers.interface import AcceptedRows, Collate, LoadContext, Teacher, TeacherSource
from distill.teachers.rows.context.data import ContextCollator, load_context_data
from distill.teachers.rows.context.teacher import ContextTeacher
from distill.teachers.rows.reading import PREFIX
from distill.teachers.source_capabilities import (
    SourceLayer,
    SourcePart,
    files_of,
    measure_of_source,
    note_data,
    of_member,
)
from distill.teachers.vocabulary import Vocabulary, is_synthetic

log = logging.getLogger(__name__)
MEMBER = re.compile(r"member\d+_")  # prefix of a member's own columns


class MixtureFormat(FusedFormat):
    """Each teacher's last hidden states, and all their heads; its scale and cap travel with its head.

    Args:
        members: Target formats of the teachers.
        weights: Mixing weights of the teachers' probabilities, with sum 1.
    """

    def __init__(self, members: Sequence[HiddenFormat], weights: Sequence[float]) -> None:
        self.members, self.weights = list(members), tuple(weights)
        self.properties = TargetProperties(tuple(member.head.rows for member in self.members))

    def pair(self, student: LogitTransform, rows: int, vocab_size: int | None) -> VocabularyAlignment:
        heads = {f"teachers.{number}": columns for number, columns in enumerate(self.properties.columns)}
        return pairing_of(student, {"student": rows, **heads}, vocab_size)

    def apply(self, loss: TargetLoss, pairing: VocabularyAlignment, call: HeadForward) -> LossResult:
        targets: Any = call.inputs.targets
        with contextlib.ExitStack() as opened:
            heads = None
            if targets is not None:
                weights = [opened.enter_context(member.head.open()) for member in self.members]
                heads = [
                    TeacherHead(hidden, head.weight, share, head.bias, member.transform.scale, member.transform.softcap)
                    for hidden, head, share, member in zip(targets, weights, self.weights, self.members, strict=True)
                ]
            arguments = pairing.arguments(call)
            return loss(call.hidden, call.head.weight, labels=call.labels, teachers=heads, **arguments)

    def scores(self, targets: object, rows: torch.Tensor) -> torch.Tensor:
        """Return the mixture's probabilities, over the columns that all members have."""
        assert isinstance(targets, tuple)
        each = [member.scores(hidden, rows) for member, hidden in zip(self.members, targets, strict=True)]
        columns = min(logits.shape[-1] for logits in each)
        parts = zip(self.weights, each, strict=True)
        return sum((share * logits[:, :columns].softmax(-1) for share, logits in parts), each[0].new_zeros(()))


class SeveralTeachers(Teacher, Layer):
    """Common base of mixtures and of routed teachers.

    Args:
        members: the teachers, or causal language models; all give hidden states.
    """

    def __init__(self, members: Sequence[Teacher | nn.Module]) -> None:
        self.members: list[Teacher] = [
            LoadedTeacher(member, field=f"teachers.{number}") if isinstance(member, nn.Module) else member
            for number, member in enumerate(members)
        ]
        self.models = {name: model for member in self.members for name, model in member.models.items()}
        self.rows = AcceptedRows(
            supports_new_rows=all(member.rows.supports_new_rows for member in self.members),
            whole_documents=any(member.rows.whole_documents for member in self.members),
        )

    def parts(self) -> list[Part]:
        """Return the members, each with its columns of a batch."""
        return [
            Part(member, self.prefix_of(number), functools.partial(self.member_batch, number))
            for number, member in enumerate(self.members)
        ]

    def prefix_of(self, number: int) -> str:
        """Return the prefix of the columns that a member's models read."""
        return ""

    def member_batch(self, number: int, batch: Batch) -> Batch | None:
        """Return a member's batch; None where it reads nothing of this one."""
        raise NotImplementedError

    def batches(self, batch: Batch) -> Iterator[tuple[int, Teacher, Batch]]:
        """Yield number, teacher and batch of each member that reads some of a batch."""
        for number, member in enumerate(self.members):
            if (own := self.member_batch(number, batch)) is not None:
                yield number, member, own

    def elsewhere(self) -> dict[str, object]:
        """Return the fingerprints of the members whose weights are not in this process."""
        return {f"member {number}": m.fingerprint() for number, m in enumerate(self.members) if not m.models}

    def close(self) -> None:
        for member in self.members:
            member.close()


class MixtureTeacher(SeveralTeachers, CopiesTruncated, Responds):
    """Several teachers of hidden states over one vocabulary.

    Args:
        members: the teachers, or causal language models.
        weights: Mixing weights of the teachers' probabilities, >= 0 and not all 0; divided by their sum.
    """

    def __init__(self, members: Sequence[Teacher | nn.Module], weights: Sequence[float]) -> None:
        if len(members) != len(weights) or not members or min(weights) < 0 or sum(weights) <= 0:
            raise ValueError(
                f"teachers: expected a weight >= 0 for each of {len(members)} models, not all 0; got {list(weights)}"
            )
        super().__init__(members)
        if not all(isinstance(member.format, HiddenFormat) for member in self.members):
            raise ValueError("teachers: expected several teachers that give hidden states, got one that gives top k")
        self.weights = tuple(weight / sum(weights) for weight in weights)
        self.format = MixtureFormat([cast("HiddenFormat", member.format) for member in self.members], self.weights)
        if any(member.rows.reading == "context" for member in self.members):
            self.rows = self.rows._replace(reading="context")

    def collate(self, plain: Collate) -> Collate:
        # answers after the teachers' prompt are replaced with those after the student's (on-policy): columns of all
        first = next((member for member in self.members if isinstance(member, ContextTeacher)), None)
        plain = plain if first is None else ContextCollator(plain, first.pad_token_id)
        return MixtureCollator(plain, [member.collate for member in self.members])

    def student_batch(self, batch: Batch, needs_targets: bool) -> dict[str, torch.Tensor]:
        for _, member, own in self.batches(batch):
            member.student_batch(own, needs_targets)  # raises where a column is missing
        return {name: value for name, value in batch.items() if not MEMBER.match(name) and not name.startswith(PREFIX)}

    def member_batch(self, number: int, batch: Batch) -> Batch:
        own = f"member{number}_"
        plain = {name: value for name, value in batch.items() if not MEMBER.match(name)}
        named = {name.removeprefix(own): value for name, value in batch.items() if name.startswith(own)}
        return {**plain, **named}

    def targets(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return each teacher's last hidden states, [B, S, its hidden size]."""
        return tuple(cast("torch.Tensor", member.targets(own)) for _, member, own in self.batches(batch))

    def respond(self, prompts: Sequence[Prompt], settings: Generate) -> list[str] | None:
        """Return responses sampled from the mixture; None where one of the teachers is not loaded or has a context."""
        first = self.members[0]
        if len(self.models) < len(self.members) or self.rows.reading != "same" or not is_main_process():
            return None
        assert isinstance(first, LoadedTeacher)
        group = MixtureModel(list(self.models.values()), self.weights)
        return first.tokenizer and generate(group, first.tokenizer, prompts, settings.max_new_tokens)

    def truncated_copy(self, layers: Sequence[int]) -> MixtureTeacher:
        return MixtureTeacher([truncated_copy(member, layers) for member in self.members], self.weights)

    def fingerprint(self) -> dict[str, object]:
        here = model_identity(MixtureModel(list(self.models.values()), self.weights)) if self.models else {}
        return here | self.elsewhere()


class MixtureCollator:
    """A collator that adds the columns of each member's own collator under `member{n}_`.

    Args:
        plain: Collator of the batch that all members read.
        members: For each member, the function that wraps a collator.
    """

    def __init__(self, plain: Collate, members: Sequence[Callable[[Collate], Collate]]) -> None:
        self.plain, self.members = plain, list(members)

    def __call__(self, rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
        """Collate rows."""
        batch = dict(self.plain(rows))
        more: dict[str, torch.Tensor] = {}

        def collated(_: object) -> dict[str, torch.Tensor]:
            return dict(batch)

        for number, member in enumerate(self.members):
            made = member(collated)(rows)
            batch |= {name: value for name, value in made.items() if name == "valid_rows"}
            more |= {f"member{number}_{name}": value for name, value in made.items() if name not in batch}
        return batch | more


class MixtureSource(TeacherSource, SourceLayer):
    """Several teachers of a recipe.

    Args:
        recipe: Recipe of the run.
        description: Sections and weights of the teachers.
        members: Sources of the teachers, in the order of the description.
    """

    def __init__(self, recipe: Recipe, description: TeacherDescription, members: Sequence[TeacherSource]) -> None:
        self.recipe, self.weights, self.given = recipe, description.weights, list(members)
        self.all_sections = description.members
        self.sections = {field: section for field, section in description.members.items() if section.is_loaded}

    @property
    def members(self) -> list[TeacherSource]:
        """Sources of the teachers."""
        return self.given

    def named(self) -> Iterator[tuple[str, TeacherSource]]:
        """Yield the teachers' sources as they are given, by the recipe's field of each."""
        return zip(self.all_sections, self.given, strict=True)

    def parts(self) -> list[SourcePart]:
        """Return the members, each with the rows that it reads."""
        return [
            SourcePart(member, functools.partial(self.member_splits, number), number)
            for number, member in enumerate(self.members)
        ]

    def member_splits(self, number: int, splits: Splits) -> Splits:
        """Return the rows that a member reads."""
        return splits

    def mixed(self) -> list[int]:
        """Return the numbers of the teachers that are mixed with others."""
        return list(range(len(self.given)))

    def vocabulary(self) -> Vocabulary:
        return MixtureVocabulary(self)

    def problems(self, *, cuda: bool, sharded: bool, family: str | None = None) -> list[str]:
        settings: Any = {"cuda": cuda, "sharded": sharded, "family": family}
        texts = [(n, text) for n, member in enumerate(self.members) for text in member.problems(**settings)]
        for number in self.mixed():
            if (measure := measure_of_source(self.members[number])) != KL:
                needed = "expected the hidden states of each teacher of a mixture"
                texts.append((number, f"teacher.path: {needed}, got {measure.name}; distill cache --hidden"))
        return [*(of_member(*each) for each in texts), *[SHARDED] * sharded]

    def footprint(self, context: FootprintContext) -> Footprint:
        """All teachers are held, and run one after another; the loss reads hidden states one teacher at a time."""
        parts = [member.footprint(context) for member in self.members]
        spaces = [part.workspace for part in parts if part.workspace is not None]
        return parts[0]._replace(
            workspace=max(spaces, default=None),
            wide_head_gradient=any(part.wide_head_gradient for part in parts),
            weights=sum(part.weights for part in parts),
            token_bytes=sum(part.token_bytes for part in parts),
            flops=sum_flops(part.flops for part in parts),
        )

    def title(self) -> str:
        return " + ".join(
            f"{weight:.2f} x {member.title()}" + (f" with {section.adapter}" if section.adapter else "")
            for weight, member, section in zip(self.weights, self.members, self.all_sections.values(), strict=True)
        )

    def open(self, context: LoadContext, vocabulary: Vocabulary) -> Teacher:
        sections = list(self.all_sections.values())
        for number, section in enumerate(sections):
            same = [
                other for other in sections[:number] if (other.model, other.config) == (section.model, section.config)
            ]
            if section.is_loaded and same:
                log.info("teachers.%d: %s is loaded a second time", number, section.model or section.config)
        return MixtureTeacher([member.open(context, vocabulary) for member in self.members], self.weights)


class MixtureVocabulary(Vocabulary):
    """One tokenizer for several teachers and a student."""

    def __init__(self, source: MixtureSource, section: ModelSection | None = None) -> None:
        """Read the tokenizer of the data: that of `section`, else the first teacher's."""
        if section is None:
            files = files_of(source)
            section = files.config_section() if is_synthetic(source.recipe.data) else files.tokenizer_section()
        super().__init__(source.recipe, section)
        self.source = source

    def read(self, data: Data, seed: int) -> Splits:
        contexts = [own.context for own in self.source.all_sections.values() if own.context is not None]
        if contexts:  # all the same
            splits = load_context_data(data, self.tokenizer, contexts[0], seed=seed)
        else:
            splits = super().read(data, seed)
        note_data(self.source, splits)
        return splits

    def tokenizers(self) -> list[Any] | None:
        if self.tokenizer is None:
            return None
        return [self.tokenizer, *(other for _, other in self._others()), self.student_tokenizer]

    def prepare(self) -> None:
        """Compare every teacher's tokenizer, and the student's, with the first one's."""
        if self.tokenizer is not None:
            for field, other in self._others():
                compare(self.tokenizer, other).require(field=f"{field}.model")
        super().prepare()

    def _others(self) -> Iterator[tuple[str, Any]]:
        """Yield the tokenizers that have to be that of the data, by the recipe's field of each."""
        for field, member in list(self.source.named())[1:]:
            yield field, load_tokenizer(files_of(member).tokenizer_section(), field)


SHARDED = (
    "parallel.teacher: several teachers cannot be sharded over the devices, and do not fit as copies; name fewer or "
    "smaller ones, or set it to copied"
)
