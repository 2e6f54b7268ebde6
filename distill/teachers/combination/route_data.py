"""Data for routed teachers: every document has a route, and each route's teachers get a batch of its documents.

A row holds one more number per document, `route`: the route's number, in the order in which the recipe first names the
routes. A batch holds `routes` int64 [B, S], the number at each position (-1 in padding), and for each route r that
occurs the batch of its teachers (`route{r}_input_ids` and all else that they read; the documents of a row follow each
other), the flat positions there that predict trained tokens (`route{r}_at`), and the student's flat
positions of the same tokens (`route{r}_rows`). A batch of padding alone has such a batch of route 0.

Where the teacher of a route reads other tokens, every document has the teacher's reading beside its own, after a
context (`distill.teachers.rows.context.data`) or by another tokenizer (`distill.teachers.rows.retokenised.data`); for
other routes both readings are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from distill.core.labels import IGNORE_INDEX, document_bounds
from distill.data.collator import BatchColumns, BatchRow, Collator
from distill.data.row_counts import RowCounts
from distill.data.rows import RowFault
from distill.data.tokenise import Encoder, RowBatch, RowEncoder, TokenisedDocument
from distill.teachers.rows.context.data import ContextColumns
from distill.teachers.rows.reading import PREFIX
from distill.teachers.rows.retokenised.data import CrossColumns

OWN = ("input_ids", "labels", "position_ids")
READ = {"": OWN, PREFIX: ("input_ids", "position_ids")}  # by reading
POINTERS = {"spans": 2, "answer_starts": 1}  # columns of places in both readings, and how many of each
Places = dict[str, list[int]]  # of a row, by reading


class OfRoute(NamedTuple):
    """A document with the number of its route.

    Attributes:
        document: Document from the encoder of its route.
        route: Index of the route.
        names: Columns of all routes; a teacher's tokens that the document lacks equal the student's.
    """

    document: TokenisedDocument
    route: int
    names: Sequence[str]

    @property
    def origin(self) -> int:
        return self.document.origin

    @property
    def row(self) -> int:
        return self.document.row

    @property
    def message(self) -> int:
        return self.document.message

    def columns(self) -> dict[str, np.ndarray]:
        own = self.document.columns()
        same: dict[str, np.ndarray] = {f"{PREFIX}input_ids": own["input_ids"], "spans": np.zeros(0, dtype=np.int32)}
        if "answer_starts" in self.names and "answer_starts" not in own:
            learned = own["labels"] != IGNORE_INDEX
            begins = np.flatnonzero(learned[1:] & ~learned[:-1]) + 1  # of responses
            same["answer_starts"] = np.repeat(begins[-1:], 2).astype(np.int32)
        all_columns = {**same, **own, "route": np.array([self.route], dtype=np.int32)}
        return {name: all_columns[name] for name in self.names}


class RoutedEncoder(Encoder):
    """An encoder of rows by one tokenizer, each with its route, as set by `by`."""

    columns: Mapping[str, tuple[str, ...]] = {"input_ids": (), "labels": (), "route": ()}
    column: str | None
    route: str | None
    routes: Sequence[str]
    readers: Mapping[int, RowEncoder]

    def by(self, column: str | None, routes: Sequence[str], route: str | None = None) -> RoutedEncoder:
        """Return this encoder, with the column that names a row's route or the route of all, and all routes."""
        self.column = column
        self.routes = routes
        self.route = route
        self.readers = {}
        return self

    def with_readers(self, readers: Mapping[int, RowEncoder], kinds: Sequence[type[RowEncoder]]) -> RoutedEncoder:
        """Return this encoder, with the encoders of routes whose teachers read other tokens.

        Args:
            readers: Encoders by index of the route.
            kinds: Classes of all such encoders of the recipe, whose columns every row has.
        """
        self.readers = readers
        for kind in kinds:
            self.columns = {**kind.columns, **self.columns}
        return self

    def settings(self) -> list[object]:
        readers = [[route, reader.settings()] for route, reader in self.readers.items()]
        return [*super().settings(), self.column, list(self.routes), *filter(None, [self.route]), *readers]

    def documents(self, batch: RowBatch, tally: RowCounts) -> Iterator[TokenisedDocument]:
        groups: list[RowBatch] = [[] for _ in self.routes]
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
            reader = self.readers.get(route)
            for document in super().documents(rows, tally) if reader is None else reader.documents(rows, tally):
                yield OfRoute(document, route, tuple(self.columns))


def places_by_route(row: BatchRow) -> dict[int, Places]:
    """Return the places of each route's documents in a row, by reading."""
    readings = [reading for reading in READ if f"{reading}input_ids" in row]
    bounds = [document_bounds(row[f"{reading}position_ids"]) for reading in readings]
    found: dict[int, Places] = {}
    for route, *spans in zip(row["route"], *bounds, strict=True):
        places = found.setdefault(int(route), {reading: [] for reading in readings})
        for reading, span in zip(readings, spans, strict=True):
            places[reading].extend(range(*span))
    return found


def row_at(row: BatchRow, places: Places) -> dict[str, np.ndarray]:
    """Return the documents at some places of a row, as a row of their own."""
    found = {
        reading + name: np.asarray(row[reading + name])[at] for reading, at in places.items() for name in READ[reading]
    }
    sides = [np.asarray(at, dtype=np.int64) for at in places.values()]
    for name, each in POINTERS.items():
        if name in row:
            pairs = np.asarray(row[name], dtype=np.int64).reshape(-1, 2, each)
            pairs = pairs[np.isin(pairs[:, 0, 0], sides[0])]
            after = np.arange(each)  # a first token, and the one after the last
            moved = [np.searchsorted(side, pairs[:, n] - after) + after for n, side in enumerate(sides)]
            found[name] = np.stack(moved, 1).reshape(-1)
    return found


class RouteRows(Sequence[Mapping[str, np.ndarray]]):
    """Documents of one route in some rows; a row without any has no tokens."""

    def __init__(self, rows: Sequence[BatchRow], route: int) -> None:
        self.rows = rows
        self.route = route

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        row = self.rows[number]
        readings = [reading for reading in READ if f"{reading}input_ids" in row]
        return row_at(row, places_by_route(row).get(self.route, {reading: [] for reading in readings}))


@dataclass(frozen=True)
class RouteColumns:
    """Columns of routed teachers: `routes`, and the batch of each route's teachers.

    Attributes:
        members: For each route its teachers' columns.
    """

    members: Sequence[Sequence[BatchColumns]]

    def __call__(
        self, rows: Sequence[BatchRow], batch: Mapping[str, Any], collator: Collator
    ) -> dict[str, torch.Tensor]:
        """Return the columns; see the head of this file.

        Raises:
            ValueError: rows without a route.
        """
        if any("route" not in row for row in rows):
            raise ValueError("rows: expected route, the number of each document's, which the recipe's data have")
        columns: dict[str, torch.Tensor] = {}
        if any(f"{PREFIX}input_ids" in row for row in rows):  # by which responses are replaced (on-policy)
            kind = CrossColumns if any("spans" in row for row in rows) else ContextColumns
            columns = kind()(rows, batch, collator)
        width = batch["input_ids"].shape[1]
        begins = [collator.begin(width, len(row["input_ids"])) for row in rows]
        columns["routes"] = torch.full_like(batch["input_ids"], -1)
        by_route: dict[int, list[tuple[int, Places]]] = {}  # the teachers' rows: row in the batch, and places in it
        for number, row in enumerate(rows):
            for route, places in places_by_route(row).items():
                columns["routes"][number, begins[number] + torch.tensor(places[""])] = route
                by_route.setdefault(route, []).append((number, places))
        is_learned = torch.zeros(batch["labels"].numel(), dtype=torch.bool)
        is_learned[batch["valid_rows"]] = True
        for route, groups in sorted((by_route or {0: []}).items()):
            collate = Collator(0, collator.pad_to_multiple_of, columns=self.members[route])
            teacher_batch = collate([row_at(rows[number], places) for number, places in groups])
            longest = teacher_batch["input_ids"].shape[1]
            at_teacher = at_student = [torch.zeros(0, dtype=torch.int64)]
            for line, (number, places) in enumerate(groups):
                flat = number * width + begins[number] + torch.tensor(places[""])
                positions = is_learned[flat].nonzero().squeeze(1)
                at_teacher = [*at_teacher, line * longest + positions]
                at_student = [*at_student, flat[positions]]
            columns |= {f"route{route}_{name}": value for name, value in teacher_batch.items()}
            columns |= {f"route{route}_at": torch.cat(at_teacher), f"route{route}_rows": torch.cat(at_student)}
        return columns
