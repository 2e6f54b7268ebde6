"""Row of data, fault of a row that cannot be used, and the size limit of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

MOST_BYTES = 64 << 20  # limit of a line, a row of a table, an item of a JSON list, a JSON file without a list
TOO_LONG = f"expected at most {MOST_BYTES >> 20} MiB"


class RowFault(ValueError):
    """Fault of one row; faults are counted by `reason`, `detail` is shown for the first such row."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[RowFault], tuple[str, str]]:
        return RowFault, (self.reason, self.detail)


Row = dict[str, Any]


class TableRow(Row):
    """Row of an Arrow table, whose objects have the keys of all objects of their column, null where they have none."""


Rows = Iterator[Row | RowFault]


def row_size(row: Row, most: int = MOST_BYTES) -> int:
    """Return the characters of a row's texts plus 16 per value, about its size as JSON; counted up to `most`."""
    total = 0
    waiting = [row]
    while waiting and total <= most:
        value: Any = waiting.pop()
        if isinstance(value, str | bytes):
            total += len(value)
        elif isinstance(value, dict | list):
            total += 16 * len(value)
            if total <= most:
                waiting.extend(value.values() if isinstance(value, dict) else value)
    return total


def drop_oversized_rows(rows: Iterable[Row | RowFault], name: str) -> Rows:
    """Yield rows read by a library, with a fault in place of each that is too large."""
    for number, row in enumerate(rows):
        large = isinstance(row, dict) and row_size(row) > MOST_BYTES
        yield RowFault("row too long", f"{name}, row {number}: {TOO_LONG}") if large else row
