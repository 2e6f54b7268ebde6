"""Readers of parquet and Arrow files, by pyarrow, a batch of rows in memory at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from distill.core.errors import first_line
from distill.data.rows import MOST_BYTES, Rows, TableRow

TABLE_ROWS = 1024  # largest number of rows in a batch


def read_parquet(path: Path) -> Rows:
    from pyarrow import parquet  # 0.3 s

    with _opening("parquet"):
        file = parquet.ParquetFile(path)
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        # bytes a row in the widest row group: of wide rows a batch has fewer
        widest = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
    with file:
        yield from _rows_of(file.iter_batches(min(TABLE_ROWS, max(1, MOST_BYTES // max(widest, 1)))))


def read_arrow(path: Path) -> Rows:
    """Yield the rows of an Arrow stream, as the datasets library writes it, or of an Arrow file."""
    from pyarrow import ArrowInvalid, ipc, memory_map  # 0.3 s

    with _opening("arrow"):
        file = memory_map(str(path))
    with file:
        with _opening("arrow"):
            try:
                batches: Iterable[Any] = ipc.open_stream(file)
            except ArrowInvalid:
                reader = ipc.open_file(file)
                batches = map(reader.get_batch, range(reader.num_record_batches))
        yield from _rows_of(batches)


def _rows_of(batches: Iterable[Any]) -> Rows:
    """Yield the rows of a table's record batches, validated: wrong offsets would read outside of the buffers."""
    try:
        for batch in batches:
            batch.validate(full=True)
            yield from map(TableRow, batch.to_pylist())
    except (ValueError, NotImplementedError) as error:  # base classes of Arrow's errors
        raise EOFError(first_line(error).rstrip(".")) from error


@contextlib.contextmanager
def _opening(kind: str) -> Iterator[None]:
    """Raise a ValueError for a file that is no table at all, unlike one that breaks off."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot be read as {kind}: {first_line(error).rstrip('.')}") from error
