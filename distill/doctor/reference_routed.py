"""Reference of routed teachers: each document's loss against its own teachers, one document at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from distill_kernels import LossTerm
from torch import nn

from distill.core.labels import IGNORE_INDEX
from distill.doctor.reference import Description, MixtureReference, Reads, Reference, Verdict
from distill.doctor.reference_context import column_prefix, inner_of, member_logits
from distill.doctor.reference_loss import SampledTokens, token_loss
from distill.doctor.reference_spans import SpansReference, figures_of
from distill.doctor.reference_top_k import TopKReference
from distill.doctor.remote_outputs import reopen_spec, reopen_teacher
from distill.doctor.rewards import advantage_of
from distill.doctor.rows import RoutedRows, Row, bounds
from distill.models.head import LogitTransform
from distill.objectives.targets import Batch, TargetFormat
from distill.objectives.top_k import TopKFormat
from distill.recipe.loss import Loss
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.backends.stored.store import Store
from distill.teachers.backends.stored.teacher import StoredTeacher
from distill.teachers.combination.mixture import MixtureTeacher
from distill.teachers.combination.routes import RoutedTeacher
from distill.teachers.interface import Teacher
from distill.teachers.rows.context.teacher import ContextTeacher
from distill.teachers.rows.retokenised.alignment import Shared
from distill.teachers.rows.retokenised.teacher import CrossTeacher, SpansFormat

OTHERS: dict[type[TargetFormat], type[Reference]] = {SpansFormat: SpansReference, TopKFormat: TopKReference}


def more_of(member: Teacher) -> dict[str, object]:
    """Return what the teacher of a route is rebuilt with beside its model."""
    if isinstance(member, CrossTeacher):
        return {"shared": [ids.tolist() for ids in member.shared]}
    if isinstance(member, StoredTeacher) and member.models:
        return {"manifest": dict(member.store.manifest)}
    return {}


def rebuilt_with(teacher: Teacher, prefix: str, more: Description) -> Teacher:
    """Return the teacher of a route around the one that computes its outputs."""
    if "shared" in more:
        return CrossTeacher(teacher, Shared(*map(np.array, more["shared"])))
    if "manifest" in more:
        teacher = StoredTeacher(teacher, Store(more["manifest"], None, {}))
    return ContextTeacher(teacher) if prefix else teacher


class RoutedReference(Reference):
    """Reference of several teachers by route; `weights` has one per teacher, route after route."""

    rows = RoutedRows

    @property
    def groups(self) -> list[list[tuple[float, Any]]]:
        """Return the teachers of each route with their weights, from the recipe."""
        shares = iter(self.weights)
        return [[(next(shares), member) for member in group] for group in self.teacher.groups()]

    @functools.cached_property
    def by_route(self) -> list[Reference | None]:
        """Return the reference of each route whose targets are aligned spans or K tokens; None of hidden states."""
        found: list[Reference | None] = []
        for number, part in enumerate(self.teacher.parts()):
            kind = OTHERS.get(type(part.teacher.format))
            both = None if self.tokenizers is None else (self.tokenizers[number], self.tokenizers[-1])
            found.append(None if kind is None else kind(part.teacher, tokenizers=both))
        return found

    @property
    def spans(self) -> list[SpansReference]:
        """Return the references of the routes whose teachers have tokenizers of their own."""
        return [own for own in self.by_route if isinstance(own, SpansReference)]

    def loss(self, student: Any, rows: Sequence[Row], batch: Batch, loss: Loss, columns: int | None) -> torch.Tensor:
        """Return the mean loss over the trained tokens of all documents."""
        device = batch["labels"].device
        total, count = torch.zeros((), dtype=torch.float64, device=device), 0
        heads = self.teacher.format.pair(LogitTransform(), student.get_output_embeddings().weight.shape[0], columns)
        for row in rows:
            for document in self.rows.documents(row):
                own = self.by_route[document["route"][0]]
                made = self if own is None else own
                losses, learned = made.document_loss(student, document, device, loss, heads.columns)
                total, count = total + losses, count + learned
        return total / max(count, 1)

    def document_loss(
        self, student: nn.Module, document: Row, device: torch.device, loss: Loss, columns: int
    ) -> tuple[torch.Tensor, int]:
        ids, labels = (torch.tensor(document[name], device=device) for name in ("input_ids", "labels"))
        at = (labels[1:] != IGNORE_INDEX).nonzero().squeeze(1)
        if len(at) == 0:
            return torch.zeros((), device=device), 0
        with torch.no_grad():
            group = self.groups[document["route"][0]]
            teachers = [(share, member_logits(member, document, device)[:, :columns]) for share, member in group]
        own = student(input_ids=ids[None], use_cache=False).logits[0, at, :columns]
        advantages = torch.full((len(at),), advantage_of(document["labels"])) if loss.rewarded else None
        mean = token_loss(own, teachers, labels[at + 1], loss, SampledTokens(at, advantages), self.dtype)
        return len(at) * mean, len(at)

    @property
    def temperature(self) -> float:
        """Return the temperature of the routes of K tokens; all have that of the loss."""
        return max([1.0, *(own.temperature for own in self.by_route if own is not None)])

    def at_temperature_2(self) -> Teacher:
        pairs = zip(self.by_route, self.teacher.parts(), strict=True)
        members = [part.teacher if own is None else own.at_temperature_2() for own, part in pairs]
        return RoutedTeacher(members, self.teacher.routes)

    def each(self, loss_of: Callable[..., Any], objective: Any, call: Sequence[Any]) -> torch.Tensor:
        """Return each token's loss; with aligned spans, which a loss adds up, their statistics and those of tokens."""
        return figures_of(loss_of, call)[call[-1]] if self.spans else super().each(loss_of, objective, call)

    def from_itself(self, batch: Batch, terms: Sequence[LossTerm]) -> tuple[str, float]:
        """Compare each route's teachers with themselves."""
        worst = []
        for number, member, own in self.teacher.batches(batch):
            kind = MixtureReference if isinstance(member, MixtureTeacher) else Reference
            reference = self.by_route[number] or kind(member, [share for share, _ in self.groups[number]])
            worst.append(reference.from_itself(own, terms)[1])
        return f"each of {len(worst)} routes", max(worst)

    def reads(self, student: nn.Module, batch: Batch) -> Reads:
        """Return each model with its route's documents, row by row, padded to the longest row."""
        calls: Reads = []
        prefixes = [sorted({column_prefix(member) for _, member in group}) for group in self.groups]
        for number, reading in [(n, prefix) for n, found in enumerate(prefixes) for prefix in found]:
            group, lines = [member for _, member in self.groups[number] if column_prefix(member) == reading], []
            read = (batch[f"{reading}{name}"].tolist() for name in ("input_ids", "position_ids"))
            own = (batch[name].tolist() for name in ("position_ids", "routes"))
            for ids, positions, plain, routes in zip(*read, *own, strict=True):
                both = zip(bounds(positions), bounds(plain), strict=False)  # padding is a document too
                parts = [place for place, (begin, _) in both if routes[begin] == number]
                if parts:
                    lines.append([[values[i] for a, b in parts for i in range(a, b)] for values in (ids, positions)])
            if not lines:  # no document of this route
                continue
            longest = max(len(ids) for ids, _ in lines)
            for _, positions in lines:
                positions += range(longest - len(positions))
            pad = group[0].pad_token_id if reading else 0
            padded = [ids + [pad] * (longest - len(ids)) for ids, _ in lines]
            made = {"input_ids": torch.tensor(padded), "position_ids": torch.tensor([at for _, at in lines])}
            here = [model for member in group for model in member.models.values()]
            calls += [(model, {n: t.to(batch["labels"].device) for n, t in made.items()}) for model in here]
        return [*calls, (student, {name: batch[name] for name in ("input_ids", "position_ids")})]

    def same_tokens(self, batch: Batch, columns: int, student_rows: int) -> Verdict:
        """Extend the check of one teacher by the number of trained tokens per route."""
        verdicts = [] if len(self.spans) == len(self.by_route) else [super().same_tokens(batch, columns, student_rows)]
        for number, _, own in self.teacher.batches(batch):
            if (spans := self.by_route[number]) in self.spans:
                verdicts.append(spans.same_tokens(own, columns, student_rows))
        same, detail = all(fine for fine, _ in verdicts), "; ".join(text for _, text in verdicts)
        routes = batch["routes"].flatten()[batch["valid_rows"]].tolist()
        counts = ", ".join(f"{routes.count(n):,} of {name}" for n, name in enumerate(self.teacher.routes))
        return same and -1 not in routes, f"{detail}; documents go to their own teacher; trained tokens: {counts}"

    def description(self) -> Description:
        """Return the routes and, for each of their teachers, how to open it."""
        members = [[(reopen_spec(inner_of(m)), column_prefix(m), more_of(m)) for _, m in own] for own in self.groups]
        return {"routes": list(self.teacher.routes), "members": members}

    @staticmethod
    def rebuilt(models: list[nn.Module], weights: Sequence[float], description: Description) -> Teacher:
        """Return the routed teacher from its models, weights and description."""
        left, numbered, members = iter(models), enumerate(weights), []
        for group in description["members"]:
            own, shares = [], []
            for (place, prefix, more), (number, share) in zip(group, numbered, strict=False):
                teacher: Any = reopen_teacher(place) if place else LoadedTeacher(next(left), field=f"teachers.{number}")
                own.append(rebuilt_with(teacher, prefix, more))
                shares.append(share)
            members.append(own[0] if len(own) == 1 else MixtureTeacher(own, shares))
        return RoutedTeacher(members, description["routes"])
