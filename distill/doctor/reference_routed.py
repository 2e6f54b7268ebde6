"""Reference of routed teachers: each document's loss against its own teachers, one document at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from distill_kernels import LossTerm
from torch import nn

from distill.core.labels import document_bounds
from distill.doctor.reference import Reads, Reference, Verdict
from distill.doctor.reference_spans import SpansReference, figures_of
from distill.doctor.reference_top_k import TopKReference
from distill.doctor.remote_outputs import column_prefix
from distill.doctor.rows import DoctorRow, split_row
from distill.models.head import LogitTransform
from distill.objectives.targets import Batch, TargetFormat
from distill.objectives.top_k import TopKFormat
from distill.recipe.loss import Loss
from distill.teachers.base import Teacher
from distill.teachers.combination.routes import RoutedTeacher
from distill.teachers.rows.retokenised.teacher import SpansFormat

OTHERS: dict[type[TargetFormat], type[Reference]] = {SpansFormat: SpansReference, TopKFormat: TopKReference}


class RoutedReference(Reference):
    """Reference of several teachers by route; `weights` has one per teacher, route after route."""

    @functools.cached_property
    def by_route(self) -> list[Reference]:
        """Return the reference of each route, with the weights of its teachers from the recipe."""
        found: list[Reference] = []
        ends = accumulate(map(len, self.teacher.groups()))
        for part, group, end in zip(self.teacher.parts(), self.teacher.groups(), ends, strict=True):
            begin = end - len(group)
            kind = OTHERS.get(type(part.teacher.format), Reference)
            both = None if self.tokenizers is None else (self.tokenizers[begin], self.tokenizers[-1])
            found.append(kind(part.teacher, self.weights[begin:end], both))
        return found

    @property
    def spans(self) -> list[SpansReference]:
        """Return the references of the routes whose teachers have tokenizers of their own."""
        return [own for own in self.by_route if isinstance(own, SpansReference)]

    def loss(
        self, student: Any, rows: Sequence[DoctorRow], batch: Batch, loss: Loss, columns: int | None
    ) -> torch.Tensor:
        """Return the mean loss over the trained tokens of all documents."""
        device = batch["labels"].device
        total = torch.zeros((), dtype=torch.float64, device=device)
        count = 0
        heads = self.teacher.format.pair(LogitTransform(), student.get_output_embeddings().weight.shape[0], columns)
        for row in rows:
            for document in split_row(row):
                own = self.by_route[document["route"][0]]
                own.dtype = self.dtype
                losses, learned = own.document_loss(student, document, device, loss, heads.columns)
                total = total + losses
                count = count + learned
        return total / max(count, 1)

    @property
    def temperature(self) -> float:
        """Return the temperature of the routes of K tokens; all have that of the loss."""
        return max(own.temperature for own in self.by_route)

    def at_temperature_2(self) -> Teacher:
        return RoutedTeacher([own.at_temperature_2() for own in self.by_route], self.teacher.routes)

    def each(self, loss_of: Callable[..., Any], objective: Any, call: Sequence[Any]) -> torch.Tensor:
        """Return each token's loss; with aligned spans, which a loss adds up, their statistics and those of tokens."""
        return figures_of(loss_of, call)[call[-1]] if self.spans else super().each(loss_of, objective, call)

    def from_itself(self, batch: Batch, terms: Sequence[LossTerm]) -> tuple[str, float]:
        worst = [self.by_route[number].from_itself(own, terms)[1] for number, _, own in self.teacher.batches(batch)]
        return f"each of {len(worst)} routes", max(worst)

    def reads(self, student: nn.Module, batch: Batch) -> Reads:
        """Return each model with its route's documents, row by row, padded to the longest row."""
        calls: Reads = []
        groups = self.teacher.groups()
        prefixes = [sorted(set(map(column_prefix, group))) for group in groups]
        for number, reading in [(n, prefix) for n, found in enumerate(prefixes) for prefix in found]:
            group = [member for member in groups[number] if column_prefix(member) == reading]
            lines = []
            read = (batch[f"{reading}{name}"].tolist() for name in ("input_ids", "position_ids"))
            own = (batch[name].tolist() for name in ("position_ids", "routes"))
            for ids, positions, plain, routes in zip(*read, *own, strict=True):
                # padding is a document too
                both = zip(document_bounds(positions), document_bounds(plain), strict=False)
                parts = [place for place, (begin, _) in both if routes[begin] == number]
                if parts:
                    lines.append([[values[i] for a, b in parts for i in range(a, b)] for values in (ids, positions)])
            if not lines:  # no document of this route
                continue
            longest = max(len(ids) for ids, _ in lines)
            for _, positions in lines:
                positions += range(longest - len(positions))
            padded = [ids + [0] * (longest - len(ids)) for ids, _ in lines]
            made = {"input_ids": torch.tensor(padded), "position_ids": torch.tensor([at for _, at in lines])}
            here = [model for member in group for model in member.models.values()]
            calls += [(model, {n: t.to(batch["labels"].device) for n, t in made.items()}) for model in here]
        return [*calls, (student, {name: batch[name] for name in ("input_ids", "position_ids")})]

    def same_tokens(self, batch: Batch, columns: int, student_rows: int) -> Verdict:
        """Extend the check of one teacher by the number of trained tokens per route."""
        verdicts = [] if len(self.spans) == len(self.by_route) else [super().same_tokens(batch, columns, student_rows)]
        for number, _, own in self.teacher.batches(batch):
            spans = self.by_route[number]
            if spans in self.spans:
                verdicts.append(spans.same_tokens(own, columns, student_rows))
        same = all(fine for fine, _ in verdicts)
        detail = "; ".join(text for _, text in verdicts)
        routes = batch["routes"].flatten()[batch["valid_rows"]].tolist()
        counts = ", ".join(f"{routes.count(n):,} of {name}" for n, name in enumerate(self.teacher.routes))
        return same and -1 not in routes, f"{detail}; documents go to their own teacher; trained tokens: {counts}"
