"""Routed teachers over one vocabulary: each row has its own teacher (`teachers` with routes).

A route is one teacher, loaded, served or cached, or a mixture of such. Each gets a batch of its own documents, packed
as they are in the student's rows; its hidden states are scattered to the student's positions, and the losses of the
routes, each over its own tokens and divided by the tokens of all, are added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar, cast

import torch
from distill_kernels import LossTerm, TokenStats
from torch import nn

from distill.core.labels import IGNORE_INDEX
from distill.data.chat import ChatOptions, load_template
from distill.data.formats import Format
from distill.data.load import Splits, load_rows
from distill.data.report import DataReport
from distill.data.tokenise import Encoder
from distill.models.flops import sum_flops
from distill.models.head import LogitTransform
from distill.models.load.fingerprint import model_identity
from distill.objectives.hidden import HiddenFormat, pairing_of
from distill.objectives.losses import PER_ROUTE, LossSpec, TargetLoss
from distill.objectives.targets import (
    Batch,
    HeadForward,
    LossResult,
    TargetFormat,
    TargetProperties,
    VocabularyAlignment,
)
from distill.objectives.token_comparison import ComparesTokens
from distill.objectives.top_k import spread
from distill.recipe import Data, Generate, Part, Recipe
from distill.recipe.teachers import TeacherDescription
from distill.teachers.backends.stored.teacher import CacheSource
from distill.teachers.capabilities import (
    ChecksFirstBatch,
    CopiesTruncated,
    DescribesSize,
    Prompt,
    Responds,
    first_batch_lines,
    head_tensors,
    size_text,
    truncated_copy,
)
from distill.teachers.combination.mixture import (
    MixtureFormat,
    MixtureSource,
    MixtureTeacher,
    MixtureVocabulary,
    SeveralTeachers,
)
from distill.teachers.combination.route_data import RoutedCollator, RoutedEncoder, RouteRows
from distill.teachers.footprint import Footprint, FootprintContext
from distill.teachers.interface import Collate, LoadContext, TeacherSource
from distill.teachers.interface import Teacher as AnyTeacher
from distill.teachers.rows.context.data import ContextEncoder, ContextReport
from distill.teachers.rows.reading import PREFIX
from distill.teachers.source_capabilities import note_data

E = TypeVar("E", bound=Encoder)


class RouteTargets(NamedTuple):
    """Targets of a route: its teachers' hidden states at the student's positions, and its flat positions, int64 [M]."""

    hidden: torch.Tensor | tuple[torch.Tensor, ...]
    rows: torch.Tensor


class RoutedLoss(TargetLoss):
    """The same loss for every route, each with its teachers' scales and soft caps.

    Attributes:
        members: the losses by route.
        counts: whether the sums of each route follow the statistics.
        measured: the first route's; all have the same terms.
    """

    def __init__(self, members: Sequence[TargetLoss], counts: bool) -> None:
        self.members, self.counts = list(members), counts
        self.measured = self.members[0]
        self.objective = self.measured.objective

    @property
    def terms(self) -> Sequence[LossTerm]:
        """Terms of the loss, the same for all routes."""
        return self.members[0].terms

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Raise NotImplementedError: the format calls each member with its own targets."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; `reduction` and `workspace` are set on all members too."""
        super().__setattr__(name, value)
        if name in ("reduction", "workspace"):
            for member in self.members:
                setattr(member, name, value)


class RoutedFormat(TargetFormat, ComparesTokens):
    """Format of targets that are `RouteTargets` by the number of the route.

    Args:
        members: the formats of the routes.
        routes: their names.
    """

    def __init__(self, members: Sequence[HiddenFormat | MixtureFormat], routes: Sequence[str]) -> None:
        self.members, self.routes = list(members), tuple(routes)
        # the targets determine which tokens are of which route
        columns = tuple(column for member in self.members for column in member.properties.columns)
        self.properties = TargetProperties(columns, routes=self.routes, needed_by_hard_labels=True)

    def pair(self, student: LogitTransform, rows: int, vocab_size: int | None) -> VocabularyAlignment:
        heads = {f"teachers.{number}": columns for number, columns in enumerate(self.properties.columns)}
        return pairing_of(student, {"student": rows, **heads}, vocab_size)

    def loss(self, section: LossSpec, pairing: VocabularyAlignment) -> RoutedLoss:
        return RoutedLoss([member.loss(section, pairing) for member in self.members], counts=True)

    def held_out(self, pairing: VocabularyAlignment) -> RoutedLoss:
        return RoutedLoss([member.held_out(pairing) for member in self.members], counts=False)

    def likeliest(
        self, targets: object, rows: torch.Tensor, most: int
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
        assert isinstance(targets, dict)
        likeliest = {n: self.members[n].likeliest(own.hidden, own.rows, most) for n, own in targets.items()}
        return {self.routes[number]: each for number, of_one in likeliest.items() for each in of_one.values()}

    def overlap(self, pairing: VocabularyAlignment, call: HeadForward, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        assert isinstance(call.inputs.targets, dict)
        shares = {}
        for number, own in call.inputs.targets.items():
            mine = call._replace(inputs=call.inputs.with_targets(own.hidden, None))
            (share,) = self.members[number].overlap(pairing, mine, rows).values()
            shares[self.routes[number]] = share.masked_fill(~torch.isin(rows, own.rows), torch.nan)
        return shares

    def apply(self, loss: TargetLoss, pairing: VocabularyAlignment, call: HeadForward) -> LossResult:
        """Return the sums of losses and of statistics over the routes, then those of `PER_ROUTE` for each route."""
        assert isinstance(loss, RoutedLoss) and isinstance(call.inputs.targets, dict)
        results: list[LossResult | None] = []
        items = call.inputs.num_items
        if items is None:
            items = (call.labels != IGNORE_INDEX).sum().clamp_min(1)
        flat = call.labels.flatten()
        for number, (member, own) in enumerate(zip(self.members, loss.members, strict=True)):
            targets: RouteTargets | None = call.inputs.targets.get(number)
            if targets is None:
                results.append(None)
                continue
            labels = torch.full_like(flat, IGNORE_INDEX)
            labels[targets.rows] = flat[targets.rows]
            inputs = call.inputs.with_targets(targets.hidden, items)
            mine = call._replace(inputs=inputs, labels=labels.view_as(call.labels), valid_rows=targets.rows)
            results.append(member.apply(own, pairing, mine))
        occurring = [result for result in results if result is not None]
        if not call.inputs.statistics:
            return sum(occurring[1:], occurring[0])
        total = sum(result[0] for result in occurring[1:]) + occurring[0][0]
        statistics = [sum(each[1:], each[0]) for each in zip(*(result[1] for result in occurring), strict=True)]
        if not loss.counts:
            return total, statistics
        for number, result in enumerate(results):
            ones = torch.zeros_like(statistics[0])
            if result is None:
                statistics += [ones] * len(PER_ROUTE)
                continue
            ones[call.inputs.targets[number].rows] = 1
            statistics += [ones, *(result[1][TokenStats._fields.index(name)] for name in PER_ROUTE[1:])]
        return total, statistics


class RoutedTeacher(SeveralTeachers, ChecksFirstBatch, CopiesTruncated, DescribesSize, Responds):
    """Several teachers, by route.

    Args:
        members: of each route: a teacher that gives hidden states, a causal language model, or a mixture.
        routes: their names.
    """

    def __init__(self, members: Sequence[AnyTeacher | nn.Module], routes: Sequence[str]) -> None:
        if len(members) != len(routes) or len(set(routes)) < len(routes) or not routes:
            raise ValueError(f"teachers: expected a route of its own for each of {len(members)}, got {list(routes)}")
        super().__init__(members)
        self.routes = tuple(routes)
        formats = [cast("HiddenFormat | MixtureFormat", member.format) for member in self.members]
        self.format = RoutedFormat(formats, self.routes)

    def collate(self, plain: Collate) -> Collate:
        return RoutedCollator(plain, 0, [member.collate for member in self.members])

    def student_batch(self, batch: Batch, needs_targets: bool) -> dict[str, torch.Tensor]:
        if "routes" not in batch:
            raise ValueError(f"batch: expected routes too, as RoutedCollator gives them; got {sorted(batch)}")
        for _, member, own in self.batches(batch):
            member.student_batch(own, needs_targets)  # raises where a column is missing
        return {name: value for name, value in batch.items() if not name.startswith(("route", PREFIX))}

    def prefix_of(self, number: int) -> str:
        return f"route{number}_"

    def member_batch(self, number: int, batch: Batch) -> Batch | None:
        """Return the documents of a route; None where none occurs."""
        own = self.prefix_of(number)
        if f"{own}rows" not in batch:
            return None
        return {name.removeprefix(own): value for name, value in batch.items() if name.startswith(own)}

    def targets(self, batch: Batch) -> dict[int, RouteTargets]:
        """Return hidden states [B, S, hidden] by route that occurs, for each of its teachers; 0 elsewhere."""
        shape, targets = batch["input_ids"].shape, {}
        for number, member, own in self.batches(batch):
            at, rows, hidden = own["at"], own["rows"], member.targets(own)
            spread_out = tuple(
                spread(each.flatten(0, 1)[at], rows, shape)
                for each in (hidden if isinstance(hidden, tuple) else (hidden,))
            )
            targets[number] = RouteTargets(spread_out if isinstance(hidden, tuple) else spread_out[0], rows)
        if not targets:  # padding alone: a loss of 0 with a graph
            width, rows = self.head_widths(0), batch["valid_rows"]
            nothing = tuple(torch.zeros(*shape, size, device=rows.device, dtype=dtype) for size, dtype in width)
            targets[0] = RouteTargets(nothing if isinstance(self.members[0], MixtureTeacher) else nothing[0], rows)
        return targets

    def size_text(self) -> str:
        return ", ".join(f"{name} {size_text(member)}" for name, member in self._named())

    def groups(self) -> list[list[AnyTeacher]]:
        """Return the teachers of each route."""
        return [member.members if isinstance(member, MixtureTeacher) else [member] for member in self.members]

    def head_widths(self, route: int) -> list[tuple[int, torch.dtype]]:
        """Return hidden size and dtype of a route's heads."""
        weights = [tensor for _, tensor in head_tensors(self.members[route]) if tensor.dim() == 2]
        return [(weight.shape[1], weight.dtype) for weight in weights]

    def respond(self, prompts: Sequence[Prompt], settings: Generate) -> list[str] | None:
        """Return None: a prompt names no teacher."""
        return None

    def validate_first_batch(self, batch: Batch, student: nn.Module | None, pairing: VocabularyAlignment) -> list[str]:
        """Check the first held-out batch: report each route's number of tokens, and check each teacher that occurs."""
        counts = {name: len(batch.get(f"route{n}_rows", ())) for n, name in enumerate(self.routes)}
        shares = ", ".join(f"{count:,} by {name}" for name, count in counts.items())
        line = f"{'routes':<12}of the first held-out batch's trained tokens {shares}"
        inner = (first_batch_lines(member, own, student, pairing) for _, member, own in self.batches(batch))
        return [line, *(each for lines in inner for each in lines)]

    def truncated_copy(self, layers: Sequence[int]) -> RoutedTeacher:
        return RoutedTeacher([truncated_copy(member, layers) for member in self.members], self.routes)

    def fingerprint(self) -> dict[str, object]:
        loaded: dict[str, object] = {name: model_identity(model) for name, model in self.models.items()}
        for name, member in self._named():
            if isinstance(member, MixtureTeacher):
                loaded |= {f"route {name} {which}": own for which, own in member.elsewhere().items()}
            elif not member.models:
                loaded[f"route {name}"] = member.fingerprint()
        return loaded

    def _named(self) -> Iterator[tuple[str, AnyTeacher]]:
        return zip(self.routes, self.members, strict=True)


class RoutedSource(MixtureSource):
    """Several teachers of a recipe, by route; arguments as of `MixtureSource`."""

    def __init__(self, recipe: Recipe, description: TeacherDescription, members: Sequence[TeacherSource]) -> None:
        super().__init__(recipe, description, members)
        self.routes = description.routes
        self.contexts = {
            route: section.context
            for route, section in zip(self.routes, self.all_sections.values(), strict=True)
            if section.context is not None
        }

    def problems(self, *, cuda: bool, sharded: bool, family: str | None = None) -> list[str]:
        caches = {n: member for n, member in enumerate(self.members) if isinstance(member, CacheSource)}
        return super().problems(cuda=cuda, sharded=sharded, family=family) + [
            f"teachers.{n}.path: expected a cache of hidden states, got {made['kind']}; distill cache --hidden"
            for n, cache in caches.items() if (made := cache.manifest) and made["kind"] != "hidden"
        ]  # fmt: skip

    def member_splits(self, number: int, splits: Splits) -> Splits:
        """Return the documents of a member's route."""
        route = list(dict.fromkeys(self.routes)).index(self.routes[number])
        train, validation = (RouteRows(rows, route) for rows in splits[:2])
        return splits._replace(train=train, validation=validation)

    def vocabulary(self) -> RoutedVocabulary:
        return RoutedVocabulary(self)

    def footprint(self, context: FootprintContext) -> Footprint:
        """All teachers are held; each token goes through the teachers of one route, at most the costliest."""
        parts = [member.footprint(context) for member in self.members]
        owned = list(zip(self.routes, parts, strict=True))
        works = [[part.flops for own, part in owned if own == route] for route in set(self.routes)]
        work = [total for own in works if (total := sum_flops(own)) is not None]
        costliest = max(work, key=lambda each: each.total(1, 1, 1)) if len(work) == len(works) else None
        token_bytes = 2 * sum(part.token_bytes for part in parts)
        return super().footprint(context)._replace(flops=costliest, token_bytes=token_bytes)

    def title(self) -> str:
        named = zip(self.routes, self.members, strict=True)
        return ", ".join(f"{route}: {member.title()}" for route, member in named)

    def open(self, context: LoadContext, vocabulary: MixtureVocabulary) -> RoutedTeacher:  # type: ignore[override]
        opened = [member.open(context, vocabulary) for member in self.members]
        groups = {route: [n for n, own in enumerate(self.routes) if own == route] for route in self.routes}
        return RoutedTeacher(
            [
                opened[own[0]] if len(own) == 1
                else MixtureTeacher([opened[n] for n in own], [self.weights[n] for n in own])
                for own in groups.values()
            ],
            list(groups),
        )  # fmt: skip


class RoutedVocabulary(MixtureVocabulary):
    """One tokenizer for all teachers and the student; each row has its route."""

    def read(self, data: Data, seed: int) -> Splits:
        template = load_template(data.chat_template, self.tokenizer)
        assert isinstance(self.source, RoutedSource)
        routes, contexts = list(dict.fromkeys(self.source.routes)), self.source.contexts

        def encoder(format: Format, part: Part) -> RoutedEncoder:
            own = part.data

            def made(kind: type[E]) -> E:
                return kind(self.tokenizer, format, template, max_length=own.max_length, options=ChatOptions.of(own))

            here = {route: context for route, context in contexts.items() if part.teacher in (None, route)}
            readers = {routes.index(route): made(ContextEncoder).after(context) for route, context in here.items()}
            rows = made(RoutedEncoder).by(own.fields.teacher, routes, part.teacher)
            return rows.with_readers(readers) if contexts else rows

        report = ContextReport if contexts else DataReport
        splits = load_rows(data, encoder, [template], seed=seed, report_type=report)
        note_data(self.source, splits)
        return splits
