"""Line charts as SVG text, for pages that load nothing: colours come from the page's CSS, so light and dark both work.

Classes in the drawing: `axis` (grid and ticks), `tick` (numbers), `line series-N` and `dot series-N`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 420, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 26


class Series(NamedTuple):
    """One line: its name in the tooltip, (x, y) points in order of x, and which of the page's colours it takes."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int = 0


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) between `low` and `high`."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def short(value: float) -> str:
    """A number in few characters."""
    size = abs(value)
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    if 0 < size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.4g}"


def line_chart(series: Sequence[Series], label: str, *, from_zero: bool = False) -> str:
    """The chart as `<svg>`; points that are not finite break a line.

    Args:
        series: At least one, with at least one finite point between them.
        label: What a screen reader calls the chart.
        from_zero: The vertical axis starts at 0.
    """
    finite = [(x, y) for s in series for x, y in s.points if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        raise ValueError("series: expected at least one finite point")
    x_low, x_high = min(x for x, _ in finite), max(x for x, _ in finite)
    y_low, y_high = min(y for _, y in finite), max(y for _, y in finite)
    if from_zero:
        y_low, y_high = min(0.0, y_low), max(0.0, y_high)
    if y_high == y_low:
        y_low, y_high = y_low - (abs(y_low) * 0.1 or 0.5), y_high + (abs(y_high) * 0.1 or 0.5)
    x_span, y_span = (x_high - x_low) or 1.0, y_high - y_low
    y_high += 0.04 * y_span

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / x_span if x_high > x_low else 0.5
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (
            HEIGHT - TOP - BOTTOM
        )

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label, quote=True)}">']
    for value in ticks(y_low, y_high):
        _, y = place(x_low, value)
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{short(value)}</text>')
    for value in ticks(x_low, x_high, 5):
        x, _ = place(value, y_low)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 7}" text-anchor="middle">{short(value)}</text>')
    for line in series:
        parts += _line(line, place)
    return "".join([*parts, "</svg>"])


def _line(series: Series, place: Callable[[float, float], tuple[float, float]]) -> list[str]:
    pieces: list[list[tuple[float, float, float, float]]] = [[]]
    for x, y in series.points:
        if math.isfinite(x) and math.isfinite(y):
            pieces[-1].append((x, y, *place(x, y)))
        elif pieces[-1]:
            pieces.append([])
    drawn = []
    few = sum(map(len, pieces)) <= 40
    for piece in pieces:
        if len(piece) > 1:
            path = " ".join(f"{left:.1f},{top:.1f}" for _, _, left, top in piece)
            drawn.append(f'<polyline class="line series-{series.color}" points="{path}"/>')
        for x, y, left, top in piece if few or len(piece) == 1 else []:
            title = html.escape(f"{series.name}, step {short(x)}: {short(y)}")
            drawn.append(
                f'<circle class="dot series-{series.color}" cx="{left:.1f}" cy="{top:.1f}" r="2.4">'
                f"<title>{title}</title></circle>"
            )
    return drawn
