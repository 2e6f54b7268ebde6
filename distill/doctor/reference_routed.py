"""Doctor's reference of routed teachers: each document's loss against its own teachers, one document at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from distill_kernels import LossTerm
from torch import nn

from distill.core.labels import IGNORE_INDEX
from distill.doctor.elsewhere import ELSEWHERE, place_of, teacher_at
from distill.doctor.reference import MixtureReference, Reads, Reference, Verdict
from distill.doctor.reference_loss import token_loss
from distill.doctor.rows import RoutedRows, Row, bounds
from distill.recipe.loss import Loss
from distill.teachers.base import Batch, Teacher
from distill.teachers.mixture import MixtureTeacher
from distill.teachers.routed.teacher import RoutedTeacher


class RoutedReference(Reference):
    """Of several teachers by route. The weights, one a teacher, come route after route, as the models do."""

    rows = RoutedRows

    @property
    def groups(self) -> list[list[tuple[float, Any]]]:
        """Of each route its models with their shares, by the recipe's weights; None is a model that is elsewhere."""
        shares = iter(self.weights)
        models = [list(member.models.values()) or [None] for member in self.teacher.members]
        return [[(next(shares), model) for model in group] for group in models]

    def loss(self, student: Any, rows: Sequence[Row], batch: Batch, loss: Loss, columns: int | None) -> torch.Tensor:
        total, count, device = torch.zeros((), dtype=torch.float64), 0, batch["labels"].device
        columns = columns or min(student.get_output_embeddings().weight.shape[0], *self.teacher.head_rows())
        for row in rows:
            for document in self.rows.documents(row):
                ids, labels = (torch.tensor(document[name], device=device) for name in ("input_ids", "labels"))
                at = (labels[1:] != IGNORE_INDEX).nonzero().squeeze(1)
                if len(at) == 0:
                    continue

                def logits(
                    model: Any, route: int, ids: torch.Tensor = ids, at: torch.Tensor = at, document: Row = document
                ) -> torch.Tensor:
                    if model is not None:
                        return model(input_ids=ids[None], use_cache=False).logits[0, at, :columns]
                    member, alone = self.teacher.members[route], {"input_ids": ids[None], "valid_rows": at}
                    return ELSEWHERE[type(member)].logits(member, [document], alone)[:, :columns]

                route = document["route"][0]
                with torch.no_grad():
                    teachers = [(share, logits(model, route)) for share, model in self.groups[route]]
                mean = token_loss(logits(student, route), teachers, labels[at + 1], loss, at)
                total = total.to(device) + len(at) * mean
                count += len(at)
        return total / max(count, 1)

    def from_itself(self, batch: Batch, terms: Sequence[LossTerm]) -> tuple[str, float]:
        worst = []
        for number, member, own in self.teacher.batches(batch):
            kind = MixtureReference if isinstance(member, MixtureTeacher) else Reference
            weights = [share for share, _ in self.groups[number]]
            worst.append(kind(member, weights).from_itself(own, terms)[1])
        return f"each of {len(worst)} routes", max(worst)

    def reads(self, student: nn.Module, batch: Batch) -> Reads:
        """Each model its route's documents, row by row, padded to the longest row."""
        calls: Reads = []
        for number, group in enumerate(self.groups):
            lines = []
            for ids, positions, routes in zip(*(batch[n].tolist() for n in READ), strict=True):
                parts = [(a, b) for a, b in bounds(positions) if routes[a] == number]
                if parts:
                    lines.append([[values[i] for a, b in parts for i in range(a, b)] for values in (ids, positions)])
            longest = max((len(ids) for ids, _ in lines), default=0)
            for _, positions in lines:
                positions += range(longest - len(positions))
            padded = [ids + [0] * (longest - len(ids)) for ids, _ in lines]
            made = {"input_ids": torch.tensor(padded), "position_ids": torch.tensor([at for _, at in lines])}
            here = [model for _, model in group if model is not None]
            calls += [(model, {n: t.to(batch["labels"].device) for n, t in made.items()}) for model in here]
        return [*calls, (student, {name: batch[name] for name in ("input_ids", "position_ids")})]

    def same_tokens(self, batch: Batch, columns: int, student_rows: int) -> Verdict:
        """As for one teacher; and how many tokens are learned from each route."""
        same, detail = super().same_tokens(batch, columns, student_rows)
        routes = batch["routes"].flatten()[batch["valid_rows"]].tolist()
        counts = ", ".join(f"{routes.count(n):,} of {name}" for n, name in enumerate(self.teacher.routes))
        return same and -1 not in routes, f"{detail}; each document at its own teacher: tokens learned {counts}"

    def description(self) -> dict[str, Any]:
        members = self.teacher.members
        return {"routes": list(self.teacher.routes), "sizes": [len(member.models) for member in members],
                "places": [place_of(member) for member in members]}  # fmt: skip

    @staticmethod
    def rebuilt(models: list[nn.Module], weights: Sequence[float], description: Mapping[str, Any]) -> Teacher:
        members: list[Teacher | nn.Module] = []
        shares, left = iter(weights), iter(models)
        for size, place in zip(description["sizes"], description["places"], strict=True):
            own = [next(left) for _ in range(size)], [next(shares) for _ in range(size or 1)]
            members.append(teacher_at(place) if place else own[0][0] if size == 1 else MixtureTeacher(*own))
        return RoutedTeacher(members, description["routes"])


READ = ("input_ids", "position_ids", "routes")
