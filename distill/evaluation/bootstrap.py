"""Confidence intervals of means over tokens, by resampling rows with replacement (Efron, 1979).

Tokens of one text are correlated, so resampling single tokens would give too narrow intervals: whole rows are drawn,
and the mean is the ratio of sums, as over the whole set. Two models measured on the same rows are compared by drawing
the same rows for both. The interval of a single row is NaN. A row may be a document or another unit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

DRAWS = 2000
LEVEL = 0.95
EDGES = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)  # quantiles of an interval
AT_ONCE = 1 << 22  # largest draws x rows held in memory


class Interval(NamedTuple):
    """Value with its percentile interval."""

    value: float
    low: float
    high: float


def mean_intervals(sums: np.ndarray, counts: np.ndarray, *, draws: int = DRAWS, seed: int = 0) -> list[Interval]:
    """Return the means `sums.sum(0) / counts.sum()` with their intervals.

    Args:
        sums: float64 [rows, metrics], sums over each row's tokens.
        counts: float64 [rows], tokens in each row.
        seed: Seed of the resampling; the same seed draws the same rows.

    Raises:
        ValueError: There are no tokens.
    """
    if counts.sum() <= 0:
        raise ValueError("counts: expected at least one token, got none")
    rows = np.flatnonzero(counts > 0)
    drawn = _resampled(np.column_stack([sums[rows], counts[rows]]), draws, seed)
    low, high = np.quantile(drawn[:, :-1] / drawn[:, -1:], EDGES, axis=0)
    means = sums.sum(0) / counts.sum()
    return [Interval(*map(float, one)) for one in zip(means, low, high, strict=True)]


def reduction_interval(before: np.ndarray, after: np.ndarray) -> Interval:
    """Return `(before - after) / before` of the totals, the relative reduction, with its interval.

    Args:
        before, after: float64 [rows], sums over the same rows' tokens.
    """
    total, left = _resampled(np.column_stack([before, after]), DRAWS, 0).T
    shares = (total - left) / np.where(total > 0, total, np.nan)
    known = shares[~np.isnan(shares)]
    low, high = np.quantile(known, EDGES) if len(known) else (np.nan, np.nan)
    return Interval(float((before.sum() - after.sum()) / before.sum()), float(low), float(high))


def _resampled(values: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """Return sums over resamples of the rows of `values` [rows, k]: float64 [draws, k]; NaN for a single row."""
    rows = len(values)
    if rows < 2:
        return np.full((draws, values.shape[1]), np.nan)
    random = np.random.default_rng(seed)
    at_once = max(1, AT_ONCE // rows)
    parts = []
    for start in range(0, draws, at_once):
        # How often each row is drawn, instead of which: the resampled sums are one matrix product, and equal seeds draw
        # equal rows for any metrics.
        often = random.multinomial(rows, np.full(rows, 1 / rows), size=min(at_once, draws - start))
        parts.append(often.astype(np.float64) @ values)
    return np.concatenate(parts)
