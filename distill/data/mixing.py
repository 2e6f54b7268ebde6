"""Mixing of several sources: the rows of each epoch.

An epoch has as many rows as all sources together. Each source contributes its mixing weight's share, the same in every
epoch; the next epoch continues in the source where this one ended, cyclically: a source with fewer rows than its share
is repeated within an epoch, one with more rows needs several epochs. Nothing is random, so the number of the epoch
alone defines its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Mix(NamedTuple):
    """Number of rows of each source, and its number of rows in an epoch."""

    sizes: tuple[int, ...]
    counts: tuple[int, ...]


def epoch_mix(sizes: Sequence[int], shares: Sequence[float]) -> Mix:
    """Return an epoch's mix by largest remainders: each count is within one row of its exact share.

    Args:
        sizes: Number of rows of each source.
        shares: Mixing weights, summing to 1.

    Raises:
        ValueError: A share is less than one row.
    """
    exact = np.array(shares) * sum(sizes)
    # 1e-9: an exact share of n rows may be computed as slightly less than n
    counts = np.floor(exact + 1e-9).astype(np.int64)
    rest = sum(sizes) - int(counts.sum())
    # the sources with the largest remainders get one row more; of equal ones the first (stable)
    counts[np.argsort(counts - exact, kind="stable")[:rest]] += 1
    for number, count in enumerate(counts):
        if count == 0:
            raise ValueError(
                f"data.sources.{number}.weight: expected at least one of an epoch's {sum(sizes):,} rows, got a "
                f"fraction of {shares[number]:.2g}; raise it, or remove the source"
            )
    return Mix(tuple(sizes), tuple(counts.tolist()))


class MixedRows:
    """Map-style data set of one epoch's rows after another.

    Args:
        rows: Rows of all sources, one source after the other.
        mix: Number of rows of each source in total and per epoch.
    """

    def __init__(self, rows: Any, mix: Mix) -> None:
        self.rows = rows
        self.mix = mix
        self.set_epoch(0)

    @property
    def column_names(self) -> list[str]:
        names: list[str] = self.rows.column_names
        return names

    def set_epoch(self, epoch: int) -> None:
        """Select the rows of this epoch, counted from 0."""
        begins = np.cumsum([0, *self.mix.sizes[:-1]])
        self.numbers = np.concatenate(
            [
                begin + (epoch * count + np.arange(count)) % size
                for begin, size, count in zip(begins, *self.mix, strict=True)
            ]
        )

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        return self.rows[int(self.numbers[number])]

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, list[int]]]:
        """Return several rows at once, for torch's data loaders."""
        return [self[number] for number in numbers]
