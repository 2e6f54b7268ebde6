"""The row of the data that a document comes from: its place in a batch, and its columns on disk.

A packed row has three numbers for each of its documents (column `ROW`): the source, the row there, and the message that
the document's last trained tokens are of. `SourceRowColumn` puts them into a batch, `StoredRows` reads a row by its
number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from distill.data.collator import BatchRow, Collator
from distill.data.packing import ROW
from distill.data.rows import RawRow, RowFault, TableRow
from distill.data.sources import DataSource
from distill.data.token_cache import cache_key, cached_folder

SOURCE_ROWS = "source_rows"  # of a batch: int64 [B, D, 3], -1 beyond a row's documents
PER_DOCUMENT = 3  # numbers


class SourceRow(NamedTuple):
    """Row of the data that a document comes from.

    Attributes:
        source: Index of the source; -1 for held-out data of their own.
        row: Index of the row in the source.
        message: Index of the message that the document's last trained tokens are of; -1 where the row is no chat.
    """

    source: int
    row: int
    message: int


@dataclass(frozen=True)
class SourceRowColumn:
    """Column `SOURCE_ROWS` of a batch, for reward functions and environments."""

    def __call__(self, rows: Sequence[BatchRow], batch: Mapping[str, Any], collator: Collator) -> dict[str, Any]:
        """Return the column; documents of padding have -1.

        Raises:
            ValueError: Rows without the column `row`.
        """
        if any(ROW not in row for row in rows):
            raise ValueError(
                f"rows: expected {ROW}, the source, row and message of each document, which load_data adds"
            )
        numbers = [torch.as_tensor(row[ROW], dtype=torch.int64).reshape(-1, PER_DOCUMENT) for row in rows]
        count = max(map(len, numbers), default=0)
        column = torch.full((len(rows), count, PER_DOCUMENT), -1, dtype=torch.int64)
        for index, own in enumerate(numbers):
            column[index, : len(own)] = own
        return {SOURCE_ROWS: column}


def source_row_at(batch: Mapping[str, Any], row: int, document: int) -> SourceRow | None:
    """Return where a document of a batch comes from; None where the batch does not have the column."""
    if SOURCE_ROWS not in batch:
        return None
    return SourceRow(*batch[SOURCE_ROWS][row, document].tolist())


class StoredRows:
    """Rows of one source, as JSON in a memory-mapped file; values that JSON lacks, such as dates, are text."""

    def __init__(self, folder: Path) -> None:
        self._offsets = np.load(folder / "offsets.npy")
        self._text = np.memmap(folder / "rows.json", np.uint8, "r")

    def __getitem__(self, number: int) -> RawRow:
        text = self._text[self._offsets[number] : self._offsets[number + 1]].tobytes()
        is_table, row = json.loads(text)
        return TableRow(row) if is_table else row


def store_rows(source: DataSource, *, max_rows: int | None, cache: bool) -> StoredRows:
    """Read a source once and keep its rows on disk, so that each is found by its number.

    Args:
        source: Rows, numbered as they are read, faulty ones included.
        max_rows: Number of rows to read; None for all.
    """

    def build(folder: Path) -> None:
        offsets = [0]
        with (folder / "rows.json").open("wb") as file:
            for row in islice(source.rows(), max_rows):
                # no document comes from a faulty row
                content = None if isinstance(row, RowFault) else row
                file.write(json.dumps([isinstance(row, TableRow), content], default=str).encode())
                offsets.append(file.tell())
        np.save(folder / "offsets.npy", np.array(offsets, dtype=np.int64))

    folder, _ = cached_folder(cache_key("rows as JSON", source.digest, max_rows), build, cache=cache)
    return StoredRows(folder)
