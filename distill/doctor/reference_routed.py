"""Doctor's reference of routed teachers: each document's loss against its own teachers, one document at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from distill_kernels import LossTerm
from torch import nn

from distill.core.labels import IGNORE_INDEX
from distill.doctor.reference import MixtureReference, Reads, Reference, Verdict
from distill.doctor.reference_loss import token_loss
from distill.doctor.rows import RoutedRows, Row, bounds
from distill.recipe.loss import Loss
from distill.teachers.base import Batch, Teacher
from distill.teachers.mixture import MixtureTeacher
from distill.teachers.routed.teacher import RoutedTeacher


class RoutedReference(Reference):
    """Of several teachers by route. The models of `teacher.models` come route after route."""

    rows = RoutedRows

    @property
    def groups(self) -> list[list[tuple[float, nn.Module]]]:
        """Of each route its models with their shares, by the recipe's weights."""
        pairs = zip(self.weights, self.teacher.models.values(), strict=True)
        return [[next(pairs) for _ in member.models] for member in self.teacher.members]

    def loss(
        self, student: nn.Module, rows: Sequence[Row], batch: Batch, loss: Loss, columns: int | None
    ) -> torch.Tensor:
        total, count, device = torch.zeros((), dtype=torch.float64), 0, batch["labels"].device
        models = [student, *self.teacher.models.values()]
        columns = columns or min(model.get_output_embeddings().weight.shape[0] for model in models)
        for row in rows:
            for document in self.rows.documents(row):
                ids, labels = (torch.tensor(document[name], device=device) for name in ("input_ids", "labels"))
                at = (labels[1:] != IGNORE_INDEX).nonzero().squeeze(1)
                if len(at) == 0:
                    continue

                def logits(model: nn.Module, ids: torch.Tensor = ids, at: torch.Tensor = at) -> torch.Tensor:
                    return model(input_ids=ids[None], use_cache=False).logits[0, at, :columns]

                with torch.no_grad():
                    teachers = [(share, logits(model)) for share, model in self.groups[document["route"][0]]]
                total = total.to(device) + len(at) * token_loss(logits(student), teachers, labels[at + 1], loss)
                count += len(at)
        return total / max(count, 1)

    def from_itself(self, batch: Batch, terms: Sequence[LossTerm]) -> tuple[str, float]:
        worst = []
        for number, member in enumerate(self.teacher.members):
            if f"route{number}_input_ids" not in batch:
                continue
            own = {name: batch[f"route{number}_{name}"] for name in ("input_ids", "position_ids")}
            kind = MixtureReference if isinstance(member, MixtureTeacher) else Reference
            weights = [share for share, _ in self.groups[number]]
            worst.append(kind(member, weights).from_itself({**own, "labels": own["input_ids"]}, terms)[1])
        return f"each of {len(worst)} routes", max(worst)

    def reads(self, student: nn.Module, batch: Batch) -> Reads:
        """Each model its route's documents, row by row, padded to the longest row."""
        found: Reads = []
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
            found += [(model, {n: t.to(batch["labels"].device) for n, t in made.items()}) for _, model in group]
        return [*found, (student, {name: batch[name] for name in ("input_ids", "position_ids")})]

    def same_tokens(self, batch: Batch, columns: int, student_rows: int) -> Verdict:
        """As for one teacher; and how many tokens are learned from each route."""
        same, detail = super().same_tokens(batch, columns, student_rows)
        routes = batch["routes"].flatten()[batch["valid_rows"]].tolist()
        counts = ", ".join(f"{routes.count(n):,} of {name}" for n, name in enumerate(self.teacher.routes))
        return same and -1 not in routes, f"{detail}; each document at its own teacher: tokens learned {counts}"

    def description(self) -> dict[str, Any]:
        return {"routes": list(self.teacher.routes), "sizes": [len(member.models) for member in self.teacher.members]}

    @staticmethod
    def rebuilt(models: list[nn.Module], weights: Sequence[float], description: Mapping[str, Any]) -> Teacher:
        members, at = [], 0
        for size in description["sizes"]:
            own, at = slice(at, at + size), at + size
            members.append(models[own][0] if size == 1 else MixtureTeacher(models[own], weights[own]))
        return RoutedTeacher(members, description["routes"])


READ = ("input_ids", "position_ids", "routes")
