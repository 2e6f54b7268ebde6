"""Reference of routed teachers: each document's loss against its own teachers, one document at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from distill_kernels import LossTerm
from torch import nn

from distill.core.labels import IGNORE_INDEX
from distill.doctor.reference import MixtureReference, Reads, Reference, Verdict
from distill.doctor.reference_context import column_prefix, inner_of, member_logits
from distill.doctor.reference_loss import SampledTokens, token_loss
from distill.doctor.remote_outputs import reopen_spec, reopen_teacher
from distill.doctor.rewards import advantage_of
from distill.doctor.rows import RoutedRows, Row, bounds
from distill.objectives.targets import Batch
from distill.recipe.loss import Loss
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.combination.mixture import MixtureTeacher
from distill.teachers.combination.routes import RoutedTeacher
from distill.teachers.interface import Teacher
from distill.teachers.rows.context.teacher import ContextTeacher


class RoutedReference(Reference):
    """Reference of several teachers by route; `weights` has one per teacher, route after route."""

    rows = RoutedRows

    @property
    def groups(self) -> list[list[tuple[float, Any]]]:
        """Return the teachers of each route with their weights, from the recipe."""
        shares = iter(self.weights)
        return [[(next(shares), member) for member in group] for group in self.teacher.groups()]

    def loss(self, student: Any, rows: Sequence[Row], batch: Batch, loss: Loss, columns: int | None) -> torch.Tensor:
        """Return the mean loss over the trained tokens of all documents."""
        total, count, device = torch.zeros((), dtype=torch.float64), 0, batch["labels"].device
        heads = self.teacher.format.properties.columns
        columns = columns or min(student.get_output_embeddings().weight.shape[0], *heads)
        for row in rows:
            for document in self.rows.documents(row):
                ids, labels = (torch.tensor(document[name], device=device) for name in ("input_ids", "labels"))
                at = (labels[1:] != IGNORE_INDEX).nonzero().squeeze(1)
                if len(at) == 0:
                    continue
                with torch.no_grad():
                    group = self.groups[document["route"][0]]
                    teachers = [
                        (share, member_logits(member, document, device)[:, :columns]) for share, member in group
                    ]
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
        same, detail = super().same_tokens(batch, columns, student_rows)
        routes = batch["routes"].flatten()[batch["valid_rows"]].tolist()
        counts = ", ".join(f"{routes.count(n):,} of {name}" for n, name in enumerate(self.teacher.routes))
        return same and -1 not in routes, f"{detail}; documents go to their own teacher; trained tokens: {counts}"

    def description(self) -> dict[str, Any]:
        """Return the routes and, for each of their teachers, how to open it."""
        members = [[(reopen_spec(inner_of(m)), column_prefix(m)) for _, m in group] for group in self.groups]
        return {"routes": list(self.teacher.routes), "members": members}

    @staticmethod
    def rebuilt(models: list[nn.Module], weights: Sequence[float], description: Mapping[str, Any]) -> Teacher:
        """Return the routed teacher from its models, weights and description."""
        left, numbered, members = iter(models), enumerate(weights), []
        for group in description["members"]:
            own, shares = [], []
            for (place, prefix), (number, share) in zip(group, numbered, strict=False):
                teacher: Any = reopen_teacher(place) if place else LoadedTeacher(next(left), field=f"teachers.{number}")
                own.append(ContextTeacher(teacher) if prefix else teacher)
                shares.append(share)
            members.append(own[0] if len(own) == 1 else MixtureTeacher(own, shares))
        return RoutedTeacher(members, description["routes"])
