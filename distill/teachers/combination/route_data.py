"""Data for routed teachers: every document has a route, and each route's teachers get a batch of its documents.

A row holds one more number per document, `route`: the route's number, in the order in which the recipe first names the
routes. A batch holds `routes` int64 [B, S], the number at each position (-1 in padding), and for each route r that
occurs the batch of its teachers (`route{r}_input_ids` and all else that their collator makes; the documents of a row
follow each other), the flat positions there that predict trained tokens (`route{r}_at`), and the student's flat
positions of the same tokens (`route{r}_rows`).

Where the teacher of a route has a context, every document has the teacher's reading beside its own, as in
`distill.teachers.rows.context.data`; for other routes both readings are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from distill.core.labels import document_bounds
from distill.data.collator import Collator
from distill.data.rows import RowFault
from distill.data.tally import Tally
from distill.data.tokenise import Batch, Document, Encoder
from distill.teachers.interface import Collate
from distill.teachers.rows.context.data import ContextCollator, ContextEncoder
from distill.teachers.rows.reading import PREFIX

OWN = ("input_ids", "labels", "position_ids")
READ = {"": OWN, PREFIX: ("input_ids", "position_ids")}  # by reading
Places = dict[str, list[int]]  # of a row, by reading


class OfRoute(NamedTuple):
    """A document with the number of its route; `twice` adds a teacher's reading, its own if it has no other."""

    document: Document
    route: int
    twice: bool

    @property
    def origin(self) -> int:
        """Hash of the text."""
        return self.document.origin

    def columns(self) -> dict[str, np.ndarray]:
        """Return the columns of `RoutedEncoder.columns`."""
        own = self.document.columns()
        again = {"teacher_input_ids": own["input_ids"]} if self.twice else {}
        return {**again, **own, "route": np.array([self.route], dtype=np.int32)}


class RoutedEncoder(Encoder):
    """An encoder of rows by one tokenizer, each with its route, as set by `by`."""

    columns: Mapping[str, tuple[str, ...]] = {"input_ids": (), "labels": (), "route": ()}
    column: str | None
    route: str | None
    routes: Sequence[str]
    readers: Mapping[int, ContextEncoder] | None = None

    def by(self, column: str | None, routes: Sequence[str], route: str | None = None) -> RoutedEncoder:
        """Return this encoder, with the column that names a row's route or the route of all, and all routes."""
        self.column, self.routes, self.route = column, routes, route
        return self

    def with_readers(self, readers: Mapping[int, ContextEncoder]) -> RoutedEncoder:
        """Return this encoder, with the encoders of routes, by number, whose teacher has a context."""
        self.readers, self.columns = readers, {"teacher_input_ids": (), **self.columns}
        return self

    def settings(self) -> list[object]:
        contexts = [[route, reader.context.model_dump()] for route, reader in (self.readers or {}).items()]
        return [*super().settings(), self.column, list(self.routes), *filter(None, [self.route]), *contexts]

    def documents(self, batch: Batch, tally: Tally) -> Iterator[Document]:
        groups: list[Batch] = [[] for _ in self.routes]
        for number, row in batch:
            with tally.row(number):
                name: object = self.route or self.routes[0]  # any route for a faulty row, which is counted below
                if self.column is not None and isinstance(row, dict):
                    name = row.get(self.column)
                if name not in self.routes:
                    tally.rows_read += 1
                    names = ", ".join(self.routes)
                    raise RowFault("no teacher of this name", f"column {self.column!r}: {name!r:.40}, not of {names}")
                groups[self.routes.index(name)].append((number, row))
        for route, rows in enumerate(groups):
            reader = (self.readers or {}).get(route)
            for document in super().documents(rows, tally) if reader is None else reader.documents(rows, tally):
                yield OfRoute(document, route, self.readers is not None)


class RouteRows(Sequence[Mapping[str, np.ndarray]]):
    """Documents of one route in some rows; a row without any has no tokens."""

    def __init__(self, rows: Sequence[Mapping[str, Sequence[int]]], route: int) -> None:
        self.rows, self.route = rows, route

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        row, found = self.rows[number], dict[str, np.ndarray]()
        for reading, names in READ.items():
            if f"{reading}input_ids" in row:
                own = zip(document_bounds(row[f"{reading}position_ids"]), row["route"], strict=True)
                places = [place for bounds, route in own if route == self.route for place in range(*bounds)]
                found |= {f"{reading}{name}": np.asarray(row[f"{reading}{name}"])[places] for name in names}
        return found


class RoutedCollator:
    """A collator that adds the batch of each route's teachers to a plain collator's batch.

    Args:
        plain: collator of the student's batch.
        pad_token_id: of the teachers' batches; any id does.
        members: for each route the function that wraps the collator of its teachers' batches; empty for plain ones.
    """

    def __init__(self, plain: Collate, pad_token_id: int, members: Sequence[Callable[[Collate], Collate]] = ()) -> None:
        self.plain = plain
        inner = getattr(plain, "collator", plain)
        self.on_the_left = getattr(inner, "padding_side", "right") == "left"
        self.teacher = Collator(pad_token_id, getattr(inner, "pad_to_multiple_of", None))
        self.members = [member(self.teacher) for member in members]

    def __call__(self, rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
        """Collate rows; see the head of this file.

        Raises:
            ValueError: rows without a route.
        """
        if any("route" not in row for row in rows):
            raise ValueError("rows: expected route, the number of each document's, which the recipe's data have")
        readings = ("", PREFIX) if rows and f"{PREFIX}input_ids" in rows[0] else ("",)
        plain = self.plain if len(readings) == 1 else ContextCollator(self.plain, self.teacher.pad_token_id)
        batch = plain(rows)
        width = batch["input_ids"].shape[1]
        routes = torch.full_like(batch["input_ids"], -1)
        by_route: dict[int, list[tuple[int, int, Places]]] = {}  # the teachers' rows: row and offset in the batch
        for number, row in enumerate(rows):
            at = (width - len(row["input_ids"])) * self.on_the_left
            bounds = [document_bounds(row[f"{reading}position_ids"]) for reading in readings]
            places_of: dict[int, Places] = {}
            for route, *spans in zip(row["route"], *bounds, strict=True):
                routes[number, at + spans[0][0] : at + spans[0][1]] = route
                for reading, span in zip(readings, spans, strict=True):
                    places_of.setdefault(route, {}).setdefault(reading, []).extend(range(*span))
            for route, places in places_of.items():
                by_route.setdefault(route, []).append((number, at, places))
        is_learned = torch.zeros(batch["labels"].numel(), dtype=torch.bool)
        is_learned[batch["valid_rows"]] = True
        for route, groups in sorted(by_route.items()):
            own = [
                {r + name: [rows[n][r + name][p] for p in at] for r, at in places.items() for name in READ[r]}
                for n, _, places in groups
            ]
            teacher_batch = (self.members[route] if self.members else self.teacher)(own)
            longest, at_teacher, at_student = teacher_batch["input_ids"].shape[1], [], []
            for line, (number, at, places) in enumerate(groups):
                flat = number * width + at + torch.tensor(places[""])
                positions = is_learned[flat].nonzero().squeeze(1)
                at_teacher.append(line * longest + positions)
                at_student.append(flat[positions])
            batch |= {f"route{route}_{name}": value for name, value in teacher_batch.items()}
            batch |= {f"route{route}_at": torch.cat(at_teacher), f"route{route}_rows": torch.cat(at_student)}
        return batch | {"routes": routes}
