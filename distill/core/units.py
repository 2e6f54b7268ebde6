"""Units, and formatted counts."""

from __future__ import annotations

GIB = 2**30


def plural(number: int, noun: str) -> str:
    """Return a count with its noun: `1 micro-batch`, `2 micro-batches`, `1,000 rows`."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number:,} {noun}{ending}"
