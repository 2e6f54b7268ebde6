"""Data for routed teachers: every document knows its teacher, and each teacher gets a batch of its own documents.

A row holds one number a document more, `route`: of the route in the order in which the recipe first names it. A batch
holds `routes` int64 [B, S], that of each position (-1 in padding), and for each route that occurs, by its number r,
the batch of its teachers (`route{r}_input_ids` and all else that their collator makes: the documents of a row one after
the other) and the flat positions there that predict what is learned, with those of the student (`route{r}_at`,
`route{r}_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from distill.core.labels import document_bounds
from distill.data.collator import Collator
from distill.data.sources import RowFault
from distill.data.tokenise import Batch, Document, Encoder, Tally
from distill.teachers.base import Collate

OWN = ("input_ids", "labels", "position_ids")


class OfRoute(NamedTuple):
    """A document with the number of its route."""

    document: Document
    route: int

    @property
    def origin(self) -> int:
        """The hash of its text."""
        return self.document.origin

    def columns(self) -> dict[str, np.ndarray]:
        """As `RoutedEncoder.columns`."""
        return {**self.document.columns(), "route": np.array([self.route], dtype=np.int32)}


class RoutedEncoder(Encoder):
    """The rows as one tokenizer reads them, each with its route; `by` says which."""

    columns: Mapping[str, tuple[str, ...]] = {"input_ids": (), "labels": (), "route": ()}
    column: str | None
    route: str | None
    routes: Sequence[str]

    def by(self, column: str | None, routes: Sequence[str], route: str | None = None) -> RoutedEncoder:
        """This encoder, with the column that names a row's route or the route of all, and all routes."""
        self.column, self.routes, self.route = column, routes, route
        return self

    def settings(self) -> list[object]:
        return [*super().settings(), self.column, list(self.routes), *filter(None, [self.route])]

    def documents(self, batch: Batch, tally: Tally) -> Iterator[Document]:
        groups: list[Batch] = [[] for _ in self.routes]
        for number, row in batch:
            with tally.row(number):
                name: object = self.route or self.routes[0]  # of a row that is a fault any: it is counted below
                if self.column is not None and isinstance(row, dict):
                    name = row.get(self.column)
                if name not in self.routes:
                    tally.rows_read += 1
                    names = ", ".join(self.routes)
                    raise RowFault("no teacher of this name", f"column {self.column!r}: {name!r:.40}, not of {names}")
                groups[self.routes.index(name)].append((number, row))
        for route, rows in enumerate(groups):
            for document in super().documents(rows, tally):
                yield OfRoute(document, route)


class RouteRows(Sequence[Mapping[str, np.ndarray]]):
    """Of some rows the documents of one route; a row without any has no tokens."""

    def __init__(self, rows: Sequence[Mapping[str, Sequence[int]]], route: int) -> None:
        self.rows, self.route = rows, route

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        row = self.rows[number]
        own = zip(document_bounds(row["position_ids"]), row["route"], strict=True)
        places = [place for bounds, route in own if route == self.route for place in range(*bounds)]
        return {name: np.asarray(row[name])[places] for name in OWN}


class RoutedCollator:
    """Adds to a plain collator's batch what each route's teachers read.

    Args:
        plain: makes the student's batch.
        pad_token_id: of the teachers'; any id does.
        members: of each route, what wraps the collator of its teachers' batches; none for plain ones.
    """

    def __init__(self, plain: Collate, pad_token_id: int, members: Sequence[Callable[[Collate], Collate]] = ()) -> None:
        self.plain = plain
        inner = getattr(plain, "collator", plain)
        self.on_the_left = getattr(inner, "padding_side", "right") == "left"
        self.teacher: Collate = Collator(pad_token_id, getattr(inner, "pad_to_multiple_of", None))
        self.members = [member(self.teacher) for member in members]

    def __call__(self, rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
        """See the head of this file.

        Raises:
            ValueError: rows without a route.
        """
        if any("route" not in row for row in rows):
            raise ValueError("rows: expected route, the number of each document's, which the recipe's data have")
        batch = self.plain([{name: row[name] for name in OWN} for row in rows])
        width = batch["input_ids"].shape[1]
        routes = torch.full_like(batch["input_ids"], -1)
        by_route: dict[int, list[list[int]]] = {}  # the teachers' rows: row and offset in the batch, positions in it
        for number, row in enumerate(rows):
            at = (width - len(row["input_ids"])) * self.on_the_left
            bounds = document_bounds(row["position_ids"])
            places_of: dict[int, list[int]] = {}
            for (start, end), route in zip(bounds, row["route"], strict=True):
                routes[number, at + start : at + end] = route
                places_of.setdefault(route, []).extend(range(start, end))
            for route, places in places_of.items():
                by_route.setdefault(route, []).append([number, at, *places])
        is_learned = torch.zeros(batch["labels"].numel(), dtype=torch.bool)
        is_learned[batch["valid_rows"]] = True
        for route, groups in sorted(by_route.items()):
            own = [{name: [rows[n][name][p] for p in places] for name in OWN} for n, _, *places in groups]
            teacher_batch = (self.members[route] if self.members else self.teacher)(own)
            longest, at_teacher, at_student = teacher_batch["input_ids"].shape[1], [], []
            for line, (number, at, *places) in enumerate(groups):
                flat = number * width + at + torch.tensor(places)
                positions = is_learned[flat].nonzero().squeeze(1)
                at_teacher.append(line * longest + positions)
                at_student.append(flat[positions])
            batch |= {f"route{route}_{name}": value for name, value in teacher_batch.items()}
            batch |= {f"route{route}_at": torch.cat(at_teacher), f"route{route}_rows": torch.cat(at_student)}
        return batch | {"routes": routes}
