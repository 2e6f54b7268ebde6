"""Reference of routed teachers: each document's loss against its own teachers, one document at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from distill_kernels import LossTerm
from torch import nn

from distill.core.labels import IGNORE_INDEX
from distill.doctor.reference import MixtureReference, Reads, Reference, Verdict
from distill.doctor.reference_loss import SampledTokens, token_loss
from distill.doctor.remote_outputs import logits_of, place_of, teacher_at
from distill.doctor.rewards import advantage_of
from distill.doctor.rows import RoutedRows, Row, bounds
from distill.recipe.loss import Loss
from distill.teachers.base import Batch, Teacher
from distill.teachers.context.data import ContextCollator
from distill.teachers.context.teacher import ContextTeacher
from distill.teachers.mixture import MixtureTeacher
from distill.teachers.model import LoadedTeacher
from distill.teachers.reading import PREFIX
from distill.teachers.routed.teacher import RoutedTeacher


class RoutedReference(Reference):
    """Reference of several teachers by route; `weights` has one per teacher, route after route."""

    rows = RoutedRows

    @property
    def groups(self) -> list[list[tuple[float, Any]]]:
        """Return the teachers of each route with their weights, from the recipe."""
        shares = iter(self.weights)
        groups = [route.members if isinstance(route, MixtureTeacher) else [route] for route in self.teacher.members]
        return [[(next(shares), member) for member in group] for group in groups]

    def loss(self, student: Any, rows: Sequence[Row], batch: Batch, loss: Loss, columns: int | None) -> torch.Tensor:
        """Return the mean loss over the trained tokens of all documents."""
        total, count, device = torch.zeros((), dtype=torch.float64), 0, batch["labels"].device
        columns = columns or min(student.get_output_embeddings().weight.shape[0], *self.teacher.head_rows())
        for row in rows:
            for document in self.rows.documents(row):
                ids, labels = (torch.tensor(document[name], device=device) for name in ("input_ids", "labels"))
                at = (labels[1:] != IGNORE_INDEX).nonzero().squeeze(1)
                if len(at) == 0:
                    continue
                with torch.no_grad():
                    group = self.groups[document["route"][0]]
                    teachers = [(share, _logits(member, document, device)[:, :columns]) for share, member in group]
                own = student(input_ids=ids[None], use_cache=False).logits[0, at, :columns]
                advantages = torch.full((len(at),), advantage_of(document["labels"])) if loss.rewarded else None
                mean = token_loss(own, teachers, labels[at + 1], loss, SampledTokens(at, advantages), self.dtype)
                total = total.to(device) + len(at) * mean
                count += len(at)
        return total / max(count, 1)

    def from_itself(self, batch: Batch, terms: Sequence[LossTerm]) -> tuple[str, float]:
        """Compare each route's teachers with themselves."""
        worst = []
        for number, member, own in self.teacher.batches(batch):
            kind = MixtureReference if isinstance(member, MixtureTeacher) else Reference
            weights = [share for share, _ in self.groups[number]]
            worst.append(kind(member, weights).from_itself(own, terms)[1])
        return f"each of {len(worst)} routes", max(worst)

    def reads(self, student: nn.Module, batch: Batch) -> Reads:
        """Return each model with its route's documents, row by row, padded to the longest row."""
        calls: Reads = []
        for number, group in enumerate(self.groups):
            lines, reading = [], PREFIX if group[0][1].reading == "context" else ""
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
            pad = group[0][1].pad_token_id if reading else 0
            padded = [ids + [pad] * (longest - len(ids)) for ids, _ in lines]
            made = {"input_ids": torch.tensor(padded), "position_ids": torch.tensor([at for _, at in lines])}
            here = [model for _, member in group for model in member.models.values()]
            calls += [(model, {n: t.to(batch["labels"].device) for n, t in made.items()}) for model in here]
        return [*calls, (student, {name: batch[name] for name in ("input_ids", "position_ids")})]

    def same_tokens(self, batch: Batch, columns: int, student_rows: int) -> Verdict:
        """Extend the check of one teacher by the number of trained tokens per route."""
        same, detail = super().same_tokens(batch, columns, student_rows)
        routes = batch["routes"].flatten()[batch["valid_rows"]].tolist()
        counts = ", ".join(f"{routes.count(n):,} of {name}" for n, name in enumerate(self.teacher.routes))
        return same and -1 not in routes, f"{detail}; documents go to their own teacher; trained tokens: {counts}"

    def description(self) -> dict[str, Any]:
        """Return the routes and, for each of their teachers, how to open it."""
        members = [[(place_of(_inside(m)), m.reading) for _, m in group] for group in self.groups]
        return {"routes": list(self.teacher.routes), "members": members}

    @staticmethod
    def rebuilt(models: list[nn.Module], weights: Sequence[float], description: Mapping[str, Any]) -> Teacher:
        """Return the routed teacher from its models, weights and description."""
        left, numbered, members = iter(models), enumerate(weights), []
        for group in description["members"]:
            own, shares = [], []
            for (place, reading), (number, share) in zip(group, numbered, strict=False):
                teacher: Any = teacher_at(place) if place else LoadedTeacher(next(left), field=f"teachers.{number}")
                own.append(ContextTeacher(teacher) if reading == "context" else teacher)
                shares.append(share)
            members.append(own[0] if len(own) == 1 else MixtureTeacher(own, shares))
        return RoutedTeacher(members, description["routes"])


def _inside(member: Any) -> Any:
    """The teacher that computes what one with a context of its own gives."""
    return member.inner if member.reading == "context" else member


def _logits(member: Any, document: Row, device: torch.device) -> torch.Tensor:
    """Return one teacher's logits after the positions `at` of a document, [N, V]."""
    row = ContextCollator.teacher_row(document) if member.reading == "context" else document
    return logits_of(_inside(member), row, device)
