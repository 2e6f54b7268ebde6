"""Several sources in one run: which of their rows an epoch holds.

An epoch has as many rows as all sources together. Of these each source gives its share, the same in every epoch, and
the next epoch goes on in the source where this one ended, from its beginning again after its end: a source with a
larger share than it has rows comes several times an epoch, one with a smaller share takes several epochs to come once.
Nothing is drawn by chance, so that the number of the epoch alone says which rows it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Mix(NamedTuple):
    """Rows of each source, one source after the other, and how many of each an epoch holds."""

    sizes: tuple[int, ...]
    counts: tuple[int, ...]


def mix_of(sizes: Sequence[int], shares: Sequence[float]) -> Mix:
    """An epoch by largest remainders: each count is within one row of its share of all.

    Args:
        sizes: rows of each source.
        shares: summing to 1.

    Raises:
        ValueError: a share of less than one row.
    """
    exact = np.array(shares) * sum(sizes)
    counts = np.floor(exact + 1e-9).astype(np.int64)
    rest = sum(sizes) - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:rest]] += 1
    for number, count in enumerate(counts):
        if count == 0:
            raise ValueError(
                f"data.sources.{number}.weight: expected at least one of an epoch's {sum(sizes):,} rows, got a share "
                f"of {shares[number]:.2g}"
            )
    return Mix(tuple(sizes), tuple(counts.tolist()))


class MixedRows:
    """The rows of one epoch after another; a map-style data set, whose length is that of an epoch.

    Args:
        rows: of all sources, one source after the other.
        mix: how they are divided.
    """

    def __init__(self, rows: Any, mix: Mix) -> None:
        self.rows, self.mix = rows, mix
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """From now on it is this epoch, counted from 0."""
        begins = np.cumsum([0, *self.mix.sizes[:-1]])
        self.numbers = np.concatenate([
            begin + (epoch * count + np.arange(count)) % size
            for begin, size, count in zip(begins, *self.mix, strict=True)
        ])  # fmt: skip

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        return self.rows[int(self.numbers[number])]

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, list[int]]]:
        """Several rows at once, as torch's loaders ask for them."""
        return [self[number] for number in numbers]
