"""Splitting of packed rows into documents, and joining them again, for the invariants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np

from distill.core.labels import IGNORE_INDEX

Row = Mapping[str, Sequence[int]]
Document = dict[str, list[int]]
OWN = ("input_ids", "labels", "position_ids")
OTHERS = ("teacher_input_ids", "teacher_position_ids")


class Rows:
    """Operations on rows of `input_ids`, `labels`, `position_ids`."""

    @staticmethod
    def documents(row: Row) -> list[Document]:
        """Return the documents of a packed row, split where positions restart."""
        return [{name: list(values[a:b]) for name, values in row.items()} for a, b in bounds(row["position_ids"])]

    @staticmethod
    def joined(parts: Sequence[Row]) -> Document:
        """Return documents joined to one row."""
        return {name: [item for part in parts for item in part[name]] for name in parts[0]}

    @staticmethod
    def shortened(document: Row, tokens: int) -> Document | None:
        """Return a document cut after the first trained tokens, about `tokens` long; None without trained tokens."""
        first = first_trained(document)
        return None if first is None else {name: list(v[: cut_length(first, tokens)]) for name, v in document.items()}

    @staticmethod
    def with_masked_end(row: Row, token: int) -> Document:
        """Return the row with one more, masked token."""
        longer = {name: list(values) for name, values in row.items()}
        for reader in ("", "teacher_"):
            if f"{reader}input_ids" in row:
                longer[f"{reader}input_ids"].append(token)
                longer[f"{reader}position_ids"].append(row[f"{reader}position_ids"][-1] + 1)
        longer["labels"].append(IGNORE_INDEX)
        return longer


class TwoPromptRows(Rows):
    """Rows that hold each response after the student's and after the teacher's prompt (`teachers.rows.context`)."""

    @staticmethod
    def documents(row: Row) -> list[Document]:
        """Split where the positions of both inputs restart."""
        return [
            {name: list(row[name][a:b]) for name in OWN} | {name: list(row[name][c:d]) for name in OTHERS}
            for (a, b), (c, d) in zip(bounds(row["position_ids"]), bounds(row["teacher_position_ids"]), strict=True)
        ]

    @staticmethod
    def shortened(document: Row, tokens: int) -> Document | None:
        """Cut both inputs by the same number of tokens, since they end alike."""
        short = Rows.shortened({name: document[name] for name in OWN}, tokens)
        if short is None:
            return None
        left = len(document["teacher_input_ids"]) - (len(document["input_ids"]) - len(short["input_ids"]))
        return short | {name: list(document[name][:left]) for name in OTHERS}


class RoutedRows(Rows):
    """Rows whose documents have a route each (`distill.teachers.combination.routes`)."""

    @staticmethod
    def documents(row: Row) -> list[Document]:
        """Split where positions restart, each document with its route."""
        own = {name: values for name, values in row.items() if name != "route"}
        documents = RoutedRows._form(row).documents(own)
        return [each | {"route": [route]} for each, route in zip(documents, row["route"], strict=True)]

    @staticmethod
    def joined(parts: Sequence[Row]) -> Document:
        """Join rows, with the route of each document."""
        own = [{name: values for name, values in part.items() if name != "route"} for part in parts]
        return RoutedRows._form(parts[0]).joined(own) | {"route": [route for part in parts for route in part["route"]]}

    @staticmethod
    def shortened(document: Row, tokens: int) -> Document | None:
        """Cut the document and keep its route."""
        form, kept = RoutedRows._form(document), {"route": list(document["route"])}
        if form is SpanRows and not document["spans"]:  # both read the same tokens
            form, kept = TwoPromptRows, kept | {name: list(document[name]) for name in SpanRows.POINTERS}
        short = form.shortened(document, tokens)
        return short and short | kept

    @staticmethod
    def _form(row: Row) -> type[Rows]:
        """Return the row type below the routes: two inputs per document where a teacher reads other tokens."""
        if "spans" in row:
            return SpanRows
        return TwoPromptRows if OTHERS[0] in row else Rows


class SpanRows(Rows):
    """Rows that hold each text in two tokenisations, their `spans` and where answers start (`teachers.cross.data`)."""

    # which tokenisation each number is an index into
    POINTERS: ClassVar = {"spans": (0, 0, 1, 1), "answer_starts": (0, 1)}

    @staticmethod
    def documents(row: Row) -> list[Document]:
        """Split where the positions of both tokenisations restart, with the spans inside of each."""
        documents = []
        for (a, b), (c, d) in zip(bounds(row["position_ids"]), bounds(row["teacher_position_ids"]), strict=True):
            document = {name: list(row[name][a:b]) for name in OWN} | {name: list(row[name][c:d]) for name in OTHERS}
            for name, sides in SpanRows.POINTERS.items():
                places = _pointers(row, name)
                inside = places[(places[:, 0] >= a) & (places[:, 0] < b)] - np.array([a, c])[list(sides)]
                document[name] = inside.ravel().tolist()
            documents.append(document)
        return documents

    @staticmethod
    def joined(parts: Sequence[Row]) -> Document:
        """Join rows and shift their spans."""
        row: Document = {name: [] for name in (*OWN, *OTHERS, *SpanRows.POINTERS)}
        for part in parts:
            begins = np.array([len(row["input_ids"]), len(row["teacher_input_ids"])])
            for name, sides in SpanRows.POINTERS.items():
                row[name] += (_pointers(part, name) + begins[list(sides)]).ravel().tolist()
            for name in (*OWN, *OTHERS):
                row[name] += list(part[name])
        return row

    @staticmethod
    def shortened(document: Row, tokens: int) -> Document | None:
        """Cut after the last span that ends before the limit."""
        spans, starts = _pointers(document, "spans"), _pointers(document, "answer_starts")
        if len(spans) == 0:
            return None
        spans = spans[spans[:, 1] <= max(cut_length(int(spans[0, 0]), tokens), int(spans[0, 1]))]
        starts = starts[starts[:, 0] <= spans[-1, 0]]
        own = {name: list(document[name][: spans[-1, 1]]) for name in OWN}
        others = {name: list(document[name][: spans[-1, 3]]) for name in OTHERS}
        return own | others | {"spans": spans.ravel().tolist(), "answer_starts": starts.ravel().tolist()}


def shortened_rows(rows: Iterable[Row], form: type[Rows], *, whole: bool, count: int, tokens: int) -> list[Row]:
    """Return rows of at most two documents, each cut to about `tokens` around its trained tokens.

    Args:
        rows: Rows of the training data.
        form: Row type that splits them.
        whole: Documents must not be cut; those of a length nearest to `tokens` are used.
        count: Maximum number of rows.
        tokens: Tokens of a document.

    Raises:
        ValueError: Fewer than two rows have trained tokens.
    """
    chosen: list[Row] = []
    if whole:
        documents = [part for row in rows for part in form.documents(row) if first_trained(part) is not None]
        documents = nearest_in_length(documents, 2 * count, tokens)
        chosen += [form.joined(documents[at : at + 2]) for at in range(0, len(documents), 2)]
    else:
        for row in rows:
            parts = [part for document in form.documents(row) if (part := form.shortened(document, tokens))]
            if parts:
                chosen.append(form.joined(parts[:2]))
            if len(chosen) == count:
                break
    if len(chosen) < 2:
        raise ValueError(f"data.source: expected at least 2 rows with trained tokens, got {len(chosen)}")
    return chosen


def last_tokens(rows: Iterable[Row], form: type[Rows], max_length: int) -> list[int]:
    """Return the last trained token of each document that was not truncated."""
    documents = [part for row in rows for part in form.documents(row)]
    whole = [part for part in documents if all(len(v) < max_length for name, v in part.items() if "input_ids" in name)]
    learned = [[label for label in part["labels"] if label != IGNORE_INDEX] for part in whole]
    return [labels[-1] for labels in learned if labels]


def nearest_in_length(documents: Sequence[Document], count: int, tokens: int) -> list[Document]:
    """Return the documents whose lengths are nearest to `tokens`."""
    return sorted(documents, key=lambda document: abs(len(document["input_ids"]) - tokens))[:count]


def packing_fault(rows: Iterable[Row], alone: Iterable[Row], form: type[Rows]) -> str | None:
    """Return a description of wrongly packed rows; None where each of their documents is one of the data's.

    Documents are split where positions restart, and compared with their labels, positions and spans.

    Args:
        rows: Rows as training gets them.
        alone: The same data with one document per row.
        form: Row type that splits them.
    """
    known = {_key(row) for row in alone}
    for number, row in enumerate(rows):
        documents = form.documents(row)
        if unknown := [len(document["input_ids"]) for document in documents if _key(document) not in known]:
            return (
                f"row {number} of the training data, split where its positions restart, holds {len(documents)} "
                f"documents, {len(unknown)} of which are not in the data (the first has {unknown[0]} tokens): "
                "position_ids must restart at 0 with each document"
            )
    return None


def bounds(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Return begin and end of each document in a packed row."""
    starts = [index for index, position in enumerate(positions) if position == 0]
    return list(zip(starts, [*starts[1:], len(positions)], strict=True))


def first_trained(document: Row) -> int | None:
    """Return the first position with a trained label; None without one."""
    return next((at for at, label in enumerate(document["labels"]) if label != IGNORE_INDEX), None)


def cut_length(first: int, tokens: int) -> int:
    """Return the length to which a document is cut whose trained tokens begin at `first`."""
    return max(tokens // 2, min(first + tokens // 4, 8 * tokens))


def _pointers(row: Row, name: str) -> np.ndarray:
    """Return a column of indices into both tokenisations, int64 [n, 4] or [n, 2]."""
    return np.asarray(row.get(name, ()), dtype=np.int64).reshape(-1, len(SpanRows.POINTERS[name]))


def _key(row: Row) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, row[name])) for name in sorted(row))
