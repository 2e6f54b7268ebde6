"""Splitting of packed rows into documents, and joining them again, for the invariants.

A row may hold a teacher's reading beside the student's (after another prompt, or by another tokenizer), indices into
both, and the route of each document; the columns that it has tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from distill.core.labels import IGNORE_INDEX, document_bounds
from distill.data.packing import ROW
from distill.data.source_rows import PER_DOCUMENT as ROW_NUMBERS

DoctorRow = Mapping[str, Sequence[int]]
DoctorDocument = dict[str, list[int]]
OTHERS = ("teacher_input_ids", "teacher_position_ids")
# columns of indices into the student's reading (0) and the teacher's (1), by place
POINTERS = {"spans": (0, 0, 1, 1), "answer_starts": (0, 1)}
PER_DOCUMENT = {"route": 1, ROW: ROW_NUMBERS}  # numbers of each document, whatever its length


def split_row(row: DoctorRow) -> list[DoctorDocument]:
    """Return the documents of a packed row, split where the positions of both readings restart."""
    own = [name for name in row if name not in (*OTHERS, *POINTERS, *PER_DOCUMENT)]
    begins = document_bounds(row["position_ids"])
    found = list[DoctorDocument]()
    others = document_bounds(row[OTHERS[1]]) if OTHERS[1] in row else begins
    for number, ((a, b), (c, d)) in enumerate(zip(begins, others, strict=True)):
        document = {name: list(row[name][a:b]) for name in own}
        document |= {name: list(row[name][c:d]) for name in OTHERS if name in row}
        for name in (name for name in POINTERS if name in row):
            places = _pointers(row, name)
            inside = places[(places[:, 0] >= a) & (places[:, 0] < b)] - np.array([a, c])[list(POINTERS[name])]
            document[name] = inside.ravel().tolist()
        for name, width in PER_DOCUMENT.items():
            if name in row:
                document[name] = list(row[name][width * number : width * (number + 1)])
        found.append(document)
    return found


def join_rows(parts: Sequence[DoctorRow]) -> DoctorDocument:
    """Return documents joined to one row; indices are shifted."""
    row: DoctorDocument = {name: [] for name in parts[0]}
    for part in parts:
        begins = np.array([len(row["input_ids"]), len(row.get(OTHERS[0], ()))])
        for name, values in row.items():
            if name in POINTERS:
                values += (_pointers(part, name) + begins[list(POINTERS[name])]).ravel().tolist()
            else:
                values += part[name]
    return row


def shorten(document: DoctorRow, tokens: int) -> DoctorDocument | None:
    """Return a document cut after the first trained tokens, about `tokens` long; None without trained tokens.

    Aligned spans are cut after the last one that ends before the limit; readings with the same answer, which end alike,
    by the same number of tokens.
    """
    first = first_trained(document)
    length = len(document["input_ids"])
    if first is None:
        return None
    stop = min(cut_length(first, tokens), length)
    other = len(document.get(OTHERS[0], ())) - (length - stop)
    cut = {name: list(values) for name, values in document.items()}
    if len(spans := _pointers(document, "spans")):
        spans = spans[spans[:, 1] <= max(stop, int(spans[0, 1]))]
        starts = _pointers(document, "answer_starts")
        stop = int(spans[-1, 1])
        other = int(spans[-1, 3])
        cut |= {"spans": spans.ravel().tolist(), "answer_starts": starts[starts[:, 0] <= spans[-1, 0]].ravel().tolist()}
    kept = (*POINTERS, *PER_DOCUMENT)
    return {
        name: values if name in kept else values[: other if name in OTHERS else stop] for name, values in cut.items()
    }


def with_masked_end(row: DoctorRow, token: int) -> DoctorDocument:
    """Return the row with one more, masked token."""
    longer = {name: list(values) for name, values in row.items()}
    for reader in ("", "teacher_"):
        if f"{reader}input_ids" in row:
            longer[f"{reader}input_ids"].append(token)
            longer[f"{reader}position_ids"].append(row[f"{reader}position_ids"][-1] + 1)
    longer["labels"].append(IGNORE_INDEX)
    return longer


def shortened_rows(rows: Iterable[DoctorRow], *, whole: bool, count: int, tokens: int) -> list[DoctorRow]:
    """Return rows of at most two documents, each cut to about `tokens` around its trained tokens.

    Args:
        whole: Documents must not be cut; those of a length nearest to `tokens` are used.

    Raises:
        ValueError: Fewer than two rows have trained tokens.
    """
    chosen: list[DoctorRow] = []
    if whole:
        documents = [part for row in rows for part in split_row(row) if first_trained(part) is not None]
        documents = nearest_in_length(documents, 2 * count, tokens)
        chosen += [join_rows(documents[at : at + 2]) for at in range(0, len(documents), 2)]
    else:
        for row in rows:
            parts = [part for document in split_row(row) if (part := shorten(document, tokens))]
            if parts:
                chosen.append(join_rows(parts[:2]))
            if len(chosen) == count:
                break
    if len(chosen) < 2:
        raise ValueError(f"data.source: expected at least 2 rows with trained tokens, got {len(chosen)}")
    return chosen


def last_tokens(rows: Iterable[DoctorRow], max_length: int) -> list[int]:
    """Return the last trained token of each document that was not truncated."""
    documents = [part for row in rows for part in split_row(row)]
    whole = [part for part in documents if all(len(v) < max_length for name, v in part.items() if "input_ids" in name)]
    learned = [[label for label in part["labels"] if label != IGNORE_INDEX] for part in whole]
    return [labels[-1] for labels in learned if labels]


def nearest_in_length(documents: Sequence[DoctorDocument], count: int, tokens: int) -> list[DoctorDocument]:
    """Return the documents whose lengths are nearest to `tokens`."""
    return sorted(documents, key=lambda document: abs(len(document["input_ids"]) - tokens))[:count]


def packing_fault(rows: Iterable[DoctorRow], alone: Iterable[DoctorRow]) -> str | None:
    """Return a description of wrongly packed rows; None where each of their documents is one of the data's.

    Documents are split where positions restart, and compared with their labels, positions and spans.

    Args:
        alone: The same data with one document per row.
    """
    known = {_key(row) for row in alone}
    for number, row in enumerate(rows):
        documents = split_row(row)
        unknown = [len(document["input_ids"]) for document in documents if _key(document) not in known]
        if unknown:
            return (
                f"row {number} of the training data, split where its positions restart, holds {len(documents)} "
                f"documents, {len(unknown)} of which are not in the data (the first has {unknown[0]} tokens): "
                "position_ids must restart at 0 with each document"
            )
    return None


def first_trained(document: DoctorRow) -> int | None:
    """Return the first position with a trained label; None without one."""
    return next((at for at, label in enumerate(document["labels"]) if label != IGNORE_INDEX), None)


def cut_length(first: int, tokens: int) -> int:
    """Return the length to which a document is cut whose trained tokens begin at `first`."""
    return max(tokens // 2, min(first + tokens // 4, 8 * tokens))


def _pointers(row: DoctorRow, name: str) -> np.ndarray:
    """Return a column of indices into both tokenisations, int64 [n, 4] or [n, 2]."""
    return np.asarray(row.get(name, ()), dtype=np.int64).reshape(-1, len(POINTERS[name]))


def _key(row: DoctorRow) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, row[name])) for name in sorted(row))
