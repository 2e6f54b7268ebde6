"""Routed teachers over one vocabulary: each row has its own teacher (`teachers` with routes).

A route is one teacher, loaded, served or cached, or a mixture of such. Each gets a batch of its own documents, packed
as they are in the student's rows; its hidden states are scattered to the student's positions, and the losses of the
routes, each over its own tokens and divided by the tokens of all, are added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from distill_kernels import TokenStats
from torch import nn

from distill.core.labels import IGNORE_INDEX
from distill.data.tokenise import Encoder
from distill.models.head import LogitTransform
from distill.models.load.fingerprint import model_identity
from distill.objectives.hidden import pairing_of
from distill.objectives.losses import PER_ROUTE, LossOfParts, LossSpec, TargetLoss
from distill.objectives.measure import combine_measures
from distill.objectives.span_loss import SpanTargets
from distill.objectives.targets import (
    Batch,
    HeadForward,
    LossResult,
    TargetFormat,
    TargetProperties,
    Targets,
    VocabularyAlignment,
)
from distill.objectives.top_k import TopKFormat
from distill.teachers.base import Constructor
from distill.teachers.base import Teacher as AnyTeacher
from distill.teachers.combination.mixture import (
    MixtureTeacher,
    SeveralTeachers,
    models_of,
)
from distill.teachers.combination.route_data import POINTERS, RouteColumns
from distill.teachers.rows.reading import PREFIX, at_positions
from distill.teachers.rows.retokenised.teacher import SpansFormat

E = TypeVar("E", bound=Encoder)


class RouteTargets(NamedTuple):
    """Targets of a route, as its format takes them for the student's batch, and its flat positions there, int64 [M]."""

    targets: Targets
    rows: torch.Tensor


class RoutedLoss(LossOfParts):
    """The same loss for every route, each with its teachers' scales and soft caps.

    Attributes:
        members: Losses by route.
        counts: True if sums per route follow the statistics.
        measured: Loss of the first route; all have the same terms.
    """

    def __init__(self, members: Sequence[TargetLoss], counts: bool) -> None:
        self.members = list(members)
        self.counts = counts
        self.measured = self.members[0]
        self.terms = self.measured.terms
        self.objective = self.measured.objective

    @property
    def parts(self) -> Sequence[TargetLoss]:
        return self.members


class RoutedFormat(TargetFormat):
    """Format of targets that are `RouteTargets` by the number of the route.

    Args:
        members: Target formats by route.
    """

    def __init__(self, members: Sequence[TargetFormat], routes: Sequence[str]) -> None:
        self.members = list(members)
        self.routes = tuple(routes)
        each = [member.properties for member in self.members]
        self.properties = TargetProperties(
            tuple(column for own in each for column in own.columns),
            combine_measures([own.measure for own in each]),
            "; ".join(dict.fromkeys(own.caveat for own in each if own.caveat)) or None,
            frozenset.intersection(*(own.divergences for own in each)),
            self.routes,
            labels_are_tokens=all(own.labels_are_tokens for own in each),
            needed_by_hard_labels=True,  # the targets determine which tokens are of which route
        )

    def pair(self, student: LogitTransform, rows: int, vocab_size: int | None) -> VocabularyAlignment:
        """Return a pairing over the columns of all teachers of the student's tokens; others take all of both heads."""
        heads = {"student": rows}
        for member in self.members:
            if not isinstance(member, SpansFormat):
                heads |= {f"teachers.{len(heads) - 1}": columns for columns in member.properties.columns}
        alignment = pairing_of(student, heads, vocab_size)
        for member in self.members:
            if isinstance(member, TopKFormat):
                member.pair(student, alignment.columns, None)  # raises where a token is none of all models'
        return alignment

    def loss(self, section: LossSpec, alignment: VocabularyAlignment) -> RoutedLoss:
        return RoutedLoss([member.loss(section, alignment) for member in self.members], counts=True)

    def held_out(self, alignment: VocabularyAlignment) -> RoutedLoss:
        return RoutedLoss([member.held_out(alignment) for member in self.members], counts=False)

    def likeliest(self, targets: object, rows: torch.Tensor, most: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        assert isinstance(targets, dict)
        found = {}
        for number, own in targets.items():
            for tokens in self.members[number].likeliest(own.targets, own.rows, most).values():
                found[self.routes[number]] = tokens
        return found

    def overlap(self, alignment: VocabularyAlignment, call: HeadForward, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        assert isinstance(call.inputs.targets, dict)
        shares = {}
        for number, own in call.inputs.targets.items():
            mine = call._replace(inputs=replace(call.inputs, targets=own.targets, num_items=None))
            for share in self.members[number].overlap(alignment, mine, rows).values():
                shares[self.routes[number]] = share.masked_fill(~torch.isin(rows, own.rows), torch.nan)
        return shares

    def apply(self, loss: TargetLoss, alignment: VocabularyAlignment, call: HeadForward) -> LossResult:
        """Return the sums of losses and of statistics over the routes, then those of `PER_ROUTE` for each route."""
        assert isinstance(loss, RoutedLoss) and isinstance(call.inputs.targets, dict)
        results: list[LossResult | None] = []
        items = call.divisor()  # of all routes
        flat = call.labels.flatten()
        for number, (member, own) in enumerate(zip(self.members, loss.members, strict=True)):
            targets: RouteTargets | None = call.inputs.targets.get(number)
            if targets is None:
                results.append(None)
                continue
            # tokens of other routes have no label here, and the divisor is that of all routes: the losses add up to the
            # batch's
            labels = torch.full_like(flat, IGNORE_INDEX)
            labels[targets.rows] = flat[targets.rows]
            inputs = replace(call.inputs, targets=targets.targets, num_items=items)
            mine = call._replace(inputs=inputs, labels=labels.view_as(call.labels), valid_rows=targets.rows)
            found = member.apply(own, alignment, mine)
            # statistics of spans go to the positions of their labels, so that those of all routes can be added
            if isinstance(targets.targets, SpanTargets) and isinstance(found, tuple):  # one number a span
                total, each = found
                spread_out = (one.new_zeros(len(flat)).index_copy(0, targets.rows, one) for one in each)
                found = total, list(spread_out)
            results.append(found)
        occurring = [result for result in results if result is not None]
        if not call.inputs.statistics:
            return sum(occurring[1:], occurring[0])
        total = sum(result[0] for result in occurring[1:]) + occurring[0][0]
        statistics = [sum(each[1:], each[0]) for each in zip(*(result[1] for result in occurring), strict=True)]
        if not loss.counts:
            return total, statistics
        for number, result in enumerate(results):
            # A route that does not occur has zeros: the number of sums is the same in every batch, and on every
            # process, which add them up.
            ones = torch.zeros_like(statistics[0])
            if result is None:
                statistics += [ones] * len(PER_ROUTE)
                continue
            ones[call.inputs.targets[number].rows] = 1
            statistics += [ones, *(result[1][TokenStats._fields.index(name)] for name in PER_ROUTE[1:])]
        return total, statistics


class RoutedTeacher(SeveralTeachers):
    """Several teachers, by route.

    Args:
        members: For each route a teacher, a causal language model or a mixture.
    """

    def __init__(self, members: Sequence[AnyTeacher | nn.Module], routes: Sequence[str]) -> None:
        if len(members) != len(routes) or len(set(routes)) < len(routes) or not routes:
            raise ValueError(f"teachers: expected a route of its own for each of {len(members)}, got {list(routes)}")
        super().__init__(members)
        self.routes = tuple(routes)
        self.format = RoutedFormat([member.format for member in self.members], self.routes)
        self.columns = (RouteColumns([member.columns for member in self.members]),)

    def student_batch(self, batch: Batch, needs_targets: bool) -> dict[str, torch.Tensor]:
        if "routes" not in batch:
            raise ValueError(
                f"batch: expected routes too, which Collator adds with columns=teacher.columns; got {sorted(batch)}"
            )
        for _, member, own in self.batches(batch):
            member.student_batch(own, needs_targets)  # raises where a column is missing
        return {name: value for name, value in batch.items() if not name.startswith(("route", PREFIX, *POINTERS))}

    def prefix_of(self, number: int) -> str:
        return f"route{number}_"

    def member_batch(self, number: int, batch: Batch) -> Batch | None:
        """Return the documents of a route; None where none occurs."""
        own = self.prefix_of(number)
        if f"{own}rows" not in batch:
            return None
        return {name.removeprefix(own): value for name, value in batch.items() if name.startswith(own)}

    def targets(self, batch: Batch) -> dict[int, RouteTargets]:
        return {
            number: RouteTargets(
                at_positions(member.targets(own), own["at"], own["rows"], batch["input_ids"]), own["rows"]
            )
            for number, member, own in self.batches(batch)
        }

    def size_text(self) -> str:
        return ", ".join(f"{name} {member.size_text()}" for name, member in self._named())

    def groups(self) -> list[list[AnyTeacher]]:
        return [member.members if isinstance(member, MixtureTeacher) else [member] for member in self.members]

    def validate_first_batch(
        self, batch: Batch, student: nn.Module | None, alignment: VocabularyAlignment
    ) -> list[str]:
        """Report also each route's number of tokens; a teacher that does not occur in the batch is not checked."""
        counts = {name: len(batch.get(f"route{n}_rows", ())) for n, name in enumerate(self.routes)}
        shares = ", ".join(f"{count:,} by {name}" for name, count in counts.items())
        line = f"{'routes':<12}of the first held-out batch's trained tokens {shares}"
        inner = (member.validate_first_batch(own, student, alignment) for _, member, own in self.batches(batch))
        return [line, *(each for lines in inner for each in lines)]

    def constructor(self) -> Constructor:
        return RoutedTeacher, (self.members, self.routes)

    def truncated_copy(self, layers: Sequence[int]) -> RoutedTeacher:
        return RoutedTeacher([member.truncated_copy(layers) for member in self.members], self.routes)

    def fingerprint(self) -> dict[str, object]:
        models = [each for group in self.groups() for member in group for each in models_of(member).items()]
        loaded: dict[str, object] = {name: model_identity(model) for name, model in models}
        for name, member in self._named():
            if isinstance(member, MixtureTeacher):
                loaded |= {f"route {name} {which}": own for which, own in member.elsewhere().items()}
            elif not models_of(member):
                loaded[f"route {name}"] = member.fingerprint()
        return loaded

    def _named(self) -> Iterator[tuple[str, AnyTeacher]]:
        return zip(self.routes, self.members, strict=True)
