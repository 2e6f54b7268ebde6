"""Readers of parquet and Arrow files within limits: a compressed value may be shared by thousands of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distill.core.errors import first_line
from distill.data.limits import limit_resources
from distill.data.rows import MOST_BYTES, TOO_LONG, RowFault, Rows, TableRow

MOST_TABLE_BYTES = 4 << 30  # memory limit for unpacking a batch of rows
TABLE_ROWS = 1024  # largest number of rows in a batch
TABLE_SECONDS = 600.0  # time limit for a batch


def read_parquet(path: Path) -> Rows:
    """Yield the rows of a parquet file."""
    from pyarrow import parquet

    with _opening("parquet"):
        file = parquet.ParquetFile(path)
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        widest = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
    with file:
        yield from _rows_of(file.iter_batches(min(TABLE_ROWS, max(1, MOST_BYTES // max(widest, 1)))), path.name)


def read_arrow(path: Path) -> Rows:
    """Yield the rows of an Arrow stream, as the datasets library writes it, or of an Arrow file."""
    from pyarrow import ArrowInvalid, ipc, memory_map

    with _opening("arrow"):
        file = memory_map(str(path))
    with file:
        with _opening("arrow"):
            try:
                reader = ipc.open_stream(file)
            except ArrowInvalid:
                reader = ipc.open_file(file)
        is_stream = hasattr(reader, "read_next_batch")
        batches = iter(reader) if is_stream else map(reader.get_batch, range(reader.num_record_batches))
        yield from _rows_of(batches, path.name)


def _rows_of(batches: Iterator[Any], name: str) -> Rows:
    """Yield the rows of a table's record batches, validated: wrong offsets would read outside of the buffers."""
    number = 0
    try:
        while True:
            with limit_resources(TABLE_SECONDS, MOST_TABLE_BYTES):
                batch = next(batches, None)
                if batch is None:
                    return
                batch.validate(full=True)
                batch = _unshared(batch)
            for part in _small(batch):
                if part.num_rows == 1 and part.nbytes > MOST_BYTES:
                    yield RowFault("row too long", f"{name}, row {number}: {TOO_LONG}")
                else:
                    yield from map(TableRow, part.to_pylist())
                number += part.num_rows
    except MemoryError as error:
        raise ValueError(
            f"takes more than {MOST_TABLE_BYTES >> 30} GiB to unpack at row {number}: {TOO_LONG} a row"
        ) from error
    except (ValueError, NotImplementedError, TimeoutError) as error:  # base classes of Arrow's errors
        raise EOFError(first_line(error).rstrip(".")) from error


def _unshared(batch: Any) -> Any:
    """Return a record batch whose rows share no memory, so that its size is that of its rows."""
    import pyarrow

    schema = pyarrow.schema([field.with_type(_plain(field.type)) for field in batch.schema])
    return batch if schema.equals(batch.schema) else batch.cast(schema)


def _plain(kind: Any) -> Any:
    """Return the type of the same values without dictionaries, run-length encoding and views."""
    import pyarrow
    from pyarrow import types

    if isinstance(kind, pyarrow.BaseExtensionType):
        return _plain(kind.storage_type)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _plain(kind.value_type)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return pyarrow.large_string() if types.is_string_view(kind) else pyarrow.large_binary()
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_plain(field.type)) for field in kind])
    if types.is_map(kind):
        return pyarrow.map_(_plain(kind.key_type), kind.item_field.with_type(_plain(kind.item_type)))
    if types.is_fixed_size_list(kind):
        return pyarrow.list_(kind.value_field.with_type(_plain(kind.value_type)), kind.list_size)
    if types.is_list(kind) or types.is_list_view(kind):
        return pyarrow.list_(kind.value_field.with_type(_plain(kind.value_type)))
    if types.is_large_list(kind) or types.is_large_list_view(kind):
        return pyarrow.large_list(kind.value_field.with_type(_plain(kind.value_type)))
    return kind


def _small(batch: Any) -> Iterator[Any]:
    """Yield a record batch in parts of at most `MOST_BYTES`, or of one row."""
    if batch.num_rows <= 1 or batch.nbytes <= MOST_BYTES:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _small(batch.slice(0, half))
    yield from _small(batch.slice(half))


@contextlib.contextmanager
def _opening(kind: str) -> Iterator[None]:
    """Raise a ValueError for a file that is no table at all, unlike one that breaks off."""
    try:
        with limit_resources(TABLE_SECONDS, MOST_TABLE_BYTES):
            yield
    except (OSError, ValueError, MemoryError) as error:
        raise ValueError(f"cannot be read as {kind}: {first_line(error).rstrip('.')}") from error
