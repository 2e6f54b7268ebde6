"""Row of data, fault of a row that cannot be used, and the size limit of lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MOST_BYTES = 64 << 20  # limit of a line
TOO_LONG = f"expected at most {MOST_BYTES >> 20} MiB"


class RowFault(ValueError):
    """Fault of one row; faults are counted by `reason`, `detail` is shown for the first such row."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[RowFault], tuple[str, str]]:
        return RowFault, (self.reason, self.detail)


RawRow = dict[str, Any]


class TableRow(RawRow):
    """Row of an Arrow table, whose objects have the keys of all objects of their column, null where they have none."""


Rows = Iterator[RawRow | RowFault]


def row_size(row: RawRow, most: int = MOST_BYTES) -> int:
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
