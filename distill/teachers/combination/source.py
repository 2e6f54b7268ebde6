"""Plan and tokenizers of a recipe's several teachers, on routes of their own or all on one (a mixture)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from distill.data.chat import ChatOptions, template_of
from distill.data.formats import RowFormat
from distill.data.load import Splits, load_rows
from distill.data.report import DataReport
from distill.data.tokenise import Encoder, RowEncoder
from distill.models.flops import sum_flops
from distill.models.load.shared_weights import FrozenWeights
from distill.models.load.vocabulary import compare
from distill.models.loading import load_tokenizer
from distill.objectives.measure import KL, DivergenceUnit, combine_measures
from distill.recipe import Data, DataPart, LoadedTeacherConfig, ModelSection, Recipe
from distill.recipe.teachers import TeacherDescription, teacher_prompt
from distill.teachers.base import InnerPlan, Teacher, TeacherPlan, of_member
from distill.teachers.combination.mixture import MixtureTeacher
from distill.teachers.combination.route_data import RoutedEncoder, RouteRows
from distill.teachers.combination.routes import RoutedTeacher
from distill.teachers.footprint import Footprint, FootprintContext
from distill.teachers.load_context import LoadContext
from distill.teachers.rows.context.data import ContextEncoder, ContextReport, context_room, load_context_data
from distill.teachers.rows.retokenised.answers import TeacherReader
from distill.teachers.rows.retokenised.data import CrossReport
from distill.teachers.rows.retokenised.encode import PairEncoder, TokenisedReader
from distill.teachers.rows.retokenised.teacher import CrossPlan, CrossVocabulary
from distill.teachers.vocabulary import Match, Vocabulary

E = TypeVar("E", bound=Encoder)
SHARDED = (
    "parallel.teacher: several teachers cannot be sharded over the devices, and do not fit as copies; name fewer or "
    "smaller ones, or set it to copied"
)


class SeveralPlan(TeacherPlan):
    """Several teachers of a recipe.

    Args:
        description: Description of its teachers.

    Attributes:
        groups: Numbers of the teachers by route; all on one of no name in a mixture.
        is_routed: True where each row has its route.
    """

    def __init__(self, recipe: Recipe, description: TeacherDescription, members: Sequence[TeacherPlan]) -> None:
        super().__init__(recipe)
        self.weights = description.weights
        self.given = list(members)
        self.all_sections = description.members
        self.sections = {
            field: section for field, section in description.members.items() if isinstance(section, LoadedTeacherConfig)
        }
        self.is_routed = bool(description.routes)
        routes = description.routes or ("",) * len(self.given)
        self.groups = {route: [n for n, own in enumerate(routes) if own == route] for route in dict.fromkeys(routes)}

    @functools.cached_property
    def members(self) -> list[TeacherPlan]:
        if self.recipe.student.vocabulary != "cross":
            return self.given
        own = load_tokenizer(self.recipe.student, "student")
        others = [load_tokenizer(source.tokenizer_section(), field) for field, source in self.named()]
        return [
            source if compare(other, own).compatible else CrossPlan(source)
            for other, source in zip(others, self.given, strict=True)
        ]

    def named(self) -> Iterator[tuple[str, TeacherPlan]]:
        return zip(self.all_sections, self.given, strict=True)

    def parts(self) -> list[InnerPlan]:
        return [
            InnerPlan(member, functools.partial(self._rows_of, self.route_of(number)), number)
            for number, member in enumerate(self.members)
        ]

    def route_of(self, number: int) -> int:
        return next(route for route, group in enumerate(self.groups.values()) if number in group)

    def _rows_of(self, route: int, splits: Splits) -> Splits:
        if not self.is_routed:
            return splits
        return splits.read_as(lambda rows: RouteRows(rows, route))

    def vocabulary(self) -> SeveralVocabulary:
        return SeveralVocabulary(self)

    def measure(self) -> DivergenceUnit:
        return combine_measures([member.measure() for member in self.members])

    def problems(self, *, cuda: bool, sharded: bool, family: str | None = None) -> list[str]:
        settings: Any = {"cuda": cuda, "sharded": sharded, "family": family}
        texts = [(n, text) for n, member in enumerate(self.members) for text in member.problems(**settings)]
        for number in (number for group in self.groups.values() if len(group) > 1 for number in group):
            measure = self.members[number].measure()
            if measure != KL:
                needed = "expected the hidden states of each teacher of a mixture"
                texts.append((number, f"teacher.path: {needed}, got {measure.name}; distill cache --hidden"))
        return [*(of_member(*each) for each in texts), *[SHARDED] * sharded]

    def footprint(self, context: FootprintContext) -> Footprint:
        """Return the footprint of all teachers, which are held together; the loss reads one teacher's states at a time.

        A token goes through the teachers of one route, at most the costliest.
        """
        parts = [member.footprint(context) for member in self.members]
        spaces = [part.workspace for part in parts if part.workspace is not None]
        works = [sum_flops(parts[number].flops for number in group) for group in self.groups.values()]
        known = [work for work in works if work is not None]
        checkpoints: dict[FrozenWeights, float] = {}
        repeated = 0.0  # of teachers that hold the copy of an earlier one
        for part in parts:
            repeated += sum(size for weights, size in part.checkpoints.items() if weights in checkpoints)
            checkpoints.update(part.checkpoints)
        return parts[0]._replace(
            workspace=max(spaces, default=None),
            wide_head_gradient=any(part.wide_head_gradient for part in parts),
            weights=sum(part.weights for part in parts) - repeated,
            checkpoints=checkpoints,
            token_bytes=(2 if self.is_routed else 1) * sum(part.token_bytes for part in parts),
            flops=max(known, key=lambda each: each.total(1, 1, 1)) if len(known) == len(works) else None,
        )

    def title(self) -> str:
        if self.is_routed:
            return ", ".join(
                f"{route}: {self.members[n].title()}" for route, group in self.groups.items() for n in group
            )
        return " + ".join(
            f"{weight:.2f} x {member.title()}" + (f" with {section.adapter}" if section.adapter else "")
            for weight, member, section in zip(self.weights, self.members, self.all_sections.values(), strict=True)
        )

    def open(self, context: LoadContext, vocabulary: Vocabulary) -> Teacher:
        assert isinstance(vocabulary, SeveralVocabulary)
        opened = [
            member.open(context, vocabulary.others.get(number, vocabulary))
            for number, member in enumerate(self.members)
        ]
        found: list[Teacher] = []
        for group in self.groups.values():
            several = [opened[n] for n in group]
            shares = [self.weights[n] for n in group]
            found.append(several[0] if self.is_routed and len(group) == 1 else MixtureTeacher(several, shares))
        return RoutedTeacher(found, list(self.groups)) if self.is_routed else found[0]


class SeveralVocabulary(Vocabulary):
    """Tokenizer of several teachers and a student, and those of teachers on routes that read the text by their own."""

    def __init__(self, source: SeveralPlan) -> None:
        recipe = source.recipe
        self.source = source
        section: ModelSection = recipe.student
        if recipe.student.vocabulary != "cross":
            section = source.config_section() if recipe.data.is_synthetic else source.tokenizer_section()
        super().__init__(recipe, section)

    @functools.cached_property
    def others(self) -> dict[int, CrossVocabulary]:
        """Vocabularies of the routes, by number, whose teacher has a tokenizer of its own, alone on its route."""
        members = enumerate(self.source.members)
        return {number: member.vocabulary() for number, member in members if isinstance(member, CrossPlan)}

    def read(self, data: Data, seed: int) -> Splits:
        made = [teacher_prompt(data, section) for section in self.source.all_sections.values()]
        prompts = [prompt for prompt in made if prompt is not None]
        if self.source.is_routed:
            splits = self._read_routes(data, seed)
        elif prompts:  # all the same
            splits = load_context_data(data, self.tokenizer, prompts[0], seed=seed)
        else:
            splits = super().read(data, seed)
        self.source.note_data(splits)
        return splits

    def _read_routes(self, data: Data, seed: int) -> Splits:
        source = self.source
        template = template_of(data, self.tokenizer)
        routes = list(source.groups)
        made_prompts = [teacher_prompt(data, section) for section in source.all_sections.values()]
        prompts = {source.route_of(number): prompt for number, prompt in enumerate(made_prompts) if prompt is not None}
        others = {source.route_of(number): other for number, other in self.others.items()}

        def encoder(format: RowFormat, part: DataPart) -> RoutedEncoder:
            own = part.data
            options = ChatOptions.of(part.data)

            def made(kind: type[E]) -> E:
                return kind(self.tokenizer, format, template, max_length=own.max_length, options=options)

            readers: dict[int, RowEncoder] = {}
            for number in (number for number, route in enumerate(routes) if part.teacher in (None, route)):
                prompt = prompts.get(number)
                if prompt is not None:
                    readers[number] = made(ContextEncoder).after(prompt)
                other = others.get(number)
                if other is not None:
                    readers[number] = PairEncoder(*other.readers, format, max_length=own.max_length, options=options)
            kinds = [kind for kind, used in ((ContextEncoder, prompts), (PairEncoder, others)) if used]
            return made(RoutedEncoder).by(own.fields.teacher, routes, part.teacher).with_readers(readers, kinds)

        report = CrossReport if others else ContextReport if prompts else DataReport
        templates = [template, *(other.readers[1].template for other in others.values())]
        return load_rows(
            data, encoder, templates, seed=seed, report_type=report, room=context_room(data, prompts.values())
        )

    def tokenizers(self) -> list[PreTrainedTokenizerBase | TokenisedReader] | None:
        """Return the tokenizers of every teacher and, last, of the student; `TokenisedReader`s where they differ."""
        if self.tokenizer is None:
            return None
        if not self.others:
            return [self.tokenizer, *(other for _, other in self._same()), self.student_tokenizer]
        (student, _), *_ = (other.readers for other in self.others.values())
        count = len(self.source.members)
        return [self.others[n].readers[1] if n in self.others else self.tokenizer for n in range(count)] + [student]

    def prepare(self) -> None:
        if self.tokenizer is not None:
            for field, other in self._same():
                compare(self.tokenizer, other).require(field=f"{field}.model")
        super().prepare()

    def _same(self) -> Iterator[tuple[str, PreTrainedTokenizerBase]]:
        """Yield the tokenizers that have to be that of the data, by the recipe's field of each."""
        for field, member in list(self.source.named())[1:] if self.recipe.student.vocabulary != "cross" else ():
            yield field, load_tokenizer(member.tokenizer_section(), field)

    def answer_readers(self) -> dict[int | None, TeacherReader]:
        return {
            self.source.route_of(number): reader
            for number, other in self.others.items()
            for reader in other.answer_readers().values()
        }

    def match(self, teacher_rows: list[int], student_rows: int) -> Match:
        """Return the alignment of the teachers of the student's tokens; of others the shared tokens are in words."""
        same = [rows for number, rows in enumerate(teacher_rows) if number not in self.others]
        found = super().match(same, student_rows) if same else Match(None, "")
        routes = list(self.source.groups)
        apart = [
            f"{routes[self.source.route_of(n)]}: {other.match([teacher_rows[n]], student_rows).vocabulary_note}"
            for n, other in self.others.items()
        ]
        return found._replace(vocabulary_note="; ".join(filter(None, [found.vocabulary_note, *apart])))
