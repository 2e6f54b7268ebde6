"""Confidence intervals of means over tokens, by resampling rows (Efron, 1979).

Tokens of one text are alike, so that resampling single tokens would promise too much: whole rows are drawn, with
replacement, and the mean is the ratio of sums, as it is over the whole set. Two models measured on the same rows are
compared by drawing the same rows for both.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """A figure and the percentile interval around it."""

    value: float
    low: float
    high: float


def interval(
    sums: np.ndarray, counts: np.ndarray, *, draws: int = 2000, level: float = 0.95, seed: int = 0
) -> Interval:
    """The mean `sum(sums) / sum(counts)` with its interval.

    Args:
        sums: float64 [rows], sums over each row's tokens.
        counts: float64 [rows], tokens in each row.
        draws: Resamples.
        level: Share of resamples inside the interval.
        seed: Of the resampling; the same seed draws the same rows.

    Raises:
        ValueError: no tokens.
    """
    if counts.sum() <= 0:
        raise ValueError("counts: expected at least one token")
    rows = np.flatnonzero(counts > 0)
    weights = _weights(len(rows), draws, seed)
    means = (weights @ sums[rows]) / (weights @ counts[rows])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(sums.sum() / counts.sum()), float(low), float(high))


def share_interval(
    before: np.ndarray, after: np.ndarray, *, draws: int = 2000, level: float = 0.95, seed: int = 0
) -> Interval:
    """`(before - after) / before` of the totals, with its interval: the share of a gap that was closed.

    Args:
        before, after: float64 [rows], sums over the same rows' tokens.
    """
    weights = _weights(len(before), draws, seed)
    total = weights @ before
    shares = (total - weights @ after) / np.where(total > 0, total, np.nan)
    low, high = np.nanquantile(shares, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float((before.sum() - after.sum()) / before.sum()), float(low), float(high))


def _weights(rows: int, draws: int, seed: int) -> np.ndarray:
    """How often each resample draws each row: float64 [draws, rows]."""
    return np.random.default_rng(seed).multinomial(rows, np.full(rows, 1 / rows), size=draws).astype(np.float64)
