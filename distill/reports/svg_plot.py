"""Line charts as SVG without external resources; a page's CSS, or the file's own, sets light or dark colours.

Classes in the drawing: `axis` (grid), `tick` (numbers), `line`, `dot` and `band`, each with `series-N`.
"""

from __future__ import annotations

import html
import itertools
import math
import re
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from distill.core.console import visible
from distill.reports.style import CHART, DARK, LIGHT

RIGHT, FEW, MANY = 12, 24, 150  # FEW points are drawn as dots too, MANY as a thin line


class Series(NamedTuple):
    """Line of a chart: name, (x, y) points sorted by x, colour index, and (x, low, high) of a band around it."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int = 0
    band: Sequence[tuple[float, float, float]] = ()


class Size(NamedTuple):
    """Size of a chart and of its font, in units of its view box."""

    width: int = 340
    height: int = 200
    font: int = 12


IN_PAGE = Size()


def ticks(low: float, high: float, count: int = 5, least: float = 0.0) -> list[float]:
    """Return about `count` round numbers from `low` to `high`, at least 2: 1, 2, 5 times a power of ten or `least`
    apart.
    """
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = max(least, next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    if last <= first and step > least:
        return ticks(low, high, 2 * count, least)
    return [number * step for number in range(first, last + 1)]


def short(value: float) -> str:
    """Return a number in few characters."""
    size = abs(value)
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    if 0 < size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.4g}"


def tick_labels(values: Sequence[float]) -> list[str]:
    """Return axis labels for numbers: distinct, without an offset to add."""
    largest = max(map(abs, values))
    apart = min((b - a for a, b in itertools.pairwise(values)), default=largest) or 1.0
    scale, unit = next(((s, u) for s, u in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if largest >= max(s, 1e4)), (1.0, ""))
    if 0 < largest < 1e-3:
        digits = max(0, math.floor(math.log10(largest)) - math.floor(math.log10(apart) + 1e-9))
        texts = [f"{value:.{digits}e}".split("e") for value in values]
        parts = [(re.sub(r"\.?0+$", "", a) if "." in a else a, int(b)) for a, b in texts]
        return ["0" if value == 0 else f"{a}e{b}" for value, (a, b) in zip(values, parts, strict=True)]
    places = max(0, -math.floor(math.log10(apart / scale) + 1e-9))
    return ["0" if value == 0 else f"{value / scale:,.{places}f}{unit}" for value in values]


def limits(values: Sequence[float], from_zero: bool = False) -> tuple[float, float]:
    """Return the range of an axis over all values except a few far outliers, which would flatten the others.

    Outliers lie beyond Tukey's outer fence (1977), three interquartile ranges above the quartile; at most two, or 2 %,
    are excluded, and only if the others would fill less than an eighth of the axis.
    """
    floor = from_zero and min(values) >= 0
    low, high = 0.0 if floor else min(values), max(values)
    if len(values) >= 8:
        first, _, third = statistics.quantiles(values, n=4, method="inclusive")
        near = [value for value in values if value <= third + 3 * (third - first)]
        few = len(values) - len(near) <= max(2, len(values) // 50)
        if few and 0 < 8 * (max(near) - low) < high - low:
            high = max(near)
    if high == low:
        low, high = low - (abs(low) * 0.1 or 0.5) * (not floor), high + (abs(high) * 0.1 or 0.5)
    return low, high


class _Axes:
    """Axes of a chart; values beyond the limits lie on the edge."""

    def __init__(self, series: Sequence[Series], size: Size, from_zero: bool) -> None:
        points = [point for line in series for point in line.points]
        points += [(x, y) for line in series for x, *ys in line.band for y in ys]
        points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
        if not points:
            raise ValueError("series: expected at least one finite point")
        self.size = size
        self.x = min(x for x, _ in points), max(x for x, _ in points)
        count = max(3, int((size.height - 40) / (2.5 * size.font)))
        self.low, self.high = limits([y for _, y in points], from_zero)
        marks = ticks(self.low, self.high, count)
        step = marks[1] - marks[0] if len(marks) > 1 else self.high - self.low
        # the axis ends at round numbers outside of all values
        self.low = min(self.low, step * math.floor(self.low / step + 1e-9))
        self.high = max(self.high, step * math.ceil(self.high / step - 1e-9))
        self.marks = ticks(self.low, self.high, round((self.high - self.low) / step))
        self.labels = tick_labels(self.marks)
        self.left = 10 + 0.6 * size.font * max(map(len, self.labels), default=0)
        self.top, self.bottom = 1.5 * size.font, size.height - 2.0 * size.font

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return the position of a point, from the left and from the top."""
        span = self.x[1] - self.x[0]
        across = (x - self.x[0]) / span if span else 0.5
        up = min(1.0, max(0.0, (y - self.low) / (self.high - self.low)))
        return self.left + across * (self.size.width - RIGHT - self.left), self.bottom - up * (self.bottom - self.top)


def line_chart(series: Sequence[Series], title: str, *, from_zero: bool = False, size: Size = IN_PAGE) -> str:
    """Return the chart as `<svg>`; points that are not finite break a line, outliers are triangles on the edge.

    Args:
        series: Lines, with at least one finite point among them.
        title: Accessible name of the chart; each line's last value is added.
        from_zero: Start the vertical axis at 0.
    """
    axes = _Axes(series, size, from_zero)
    last = [f"{line.name} {short(line.points[-1][1])}" for line in series if line.points]
    text = html.escape(f"{title}; last: {', '.join(last)}", quote=True)
    parts = [f'<svg viewBox="0 0 {size.width} {size.height}" role="img" aria-label="{text}">']
    for value, name in zip(axes.marks, axes.labels, strict=True):
        _, y = axes.place(axes.x[0], value)
        parts.append(f'<line class="axis" x1="{axes.left:.1f}" x2="{size.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(label(axes.left - 6, y + 0.35 * size.font, name, "end"))
    marks = ticks(*axes.x, max(2, size.width // (5 * size.font)), least=1.0)
    names, y = tick_labels(marks), size.height - 0.5 * size.font
    # the last label carries the name of the axis and needs more room
    end = min(axes.place(marks[-1], axes.low)[0] + 0.3 * size.font * len(names[-1]), size.width - 2.0)
    parts.append(label(end, y, f"step {names[-1]}", "end"))
    room = end - 0.6 * size.font * (len(f"step {names[-1]}") + 1)
    for value, name in zip(marks[:-1], names[:-1], strict=True):
        x, _ = axes.place(value, axes.low)
        if x + 0.3 * size.font * len(name) < room:
            parts.append(label(x, y, name, "middle"))
    for line in series:
        parts += _line(line, axes)
    return "".join([*parts, *_beyond(series, axes), "</svg>"])


def label(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    """Return a text element; `anchor` is start, middle or end."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(visible(text))}</text>'


def _line(series: Series, axes: _Axes) -> list[str]:
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in series.points:
        if math.isfinite(x) and math.isfinite(y):
            pieces[-1].append((x, y))
        elif pieces[-1]:
            pieces.append([])
    drawn, color = [], f"series-{series.color}"
    if len(series.band) > 1:
        edge = [(x, high) for x, _, high in series.band] + [(x, low) for x, low, _ in reversed(series.band)]
        drawn.append(f'<polygon class="band {color}" points="{_path(edge, axes)}"/>')
    count = sum(map(len, pieces))
    weight = "thin " if count > MANY else ""
    for piece in pieces:
        if len(piece) > 1:
            drawn.append(f'<polyline class="line {weight}{color}" points="{_path(piece, axes)}"/>')
        for x, y in piece:
            (left, top), title = axes.place(x, y), html.escape(f"{series.name}, step {short(x)}: {short(y)}")
            if y > axes.high:
                outline = f"M{left - 4.5:.1f} {top:.1f}h9l-4.5 -8z"
                drawn.append(f'<path class="dot {color}" d="{outline}"><title>{title}</title></path>')
            elif count <= FEW or len(piece) == 1:
                place = f'cx="{left:.1f}" cy="{top:.1f}" r="2.6"'
                drawn.append(f'<circle class="dot {color}" {place}><title>{title}</title></circle>')
    return drawn


def _path(points: Sequence[tuple[float, float]], axes: _Axes) -> str:
    return " ".join(f"{left:.1f},{top:.1f}" for left, top in (axes.place(x, y) for x, y in points))


def _beyond(series: Sequence[Series], axes: _Axes) -> list[str]:
    """Return a label with the number of points above the chart, and the highest."""
    above = [y for line in series for _, y in line.points if math.isfinite(y) and y > axes.high]
    text = f"▲ {len(above)} {'point' if len(above) == 1 else 'points'} up to {short(max(above, default=0))}"
    return [label(axes.size.width - RIGHT, 0.9 * axes.size.font, text, "end")] if above else []


def picture(
    panels: Sequence[tuple[str, str]],
    *,
    title: str,
    legend: Sequence[Series] = (),
    theme: str = "",
    size: Size = IN_PAGE,
) -> str:
    """Return charts in a grid, as a standalone SVG file.

    Args:
        panels: Title and `line_chart` output of each chart, of size `size`.
        title: Title of the picture.
        legend: Lines to name in the legend.
        theme: `light` or `dark`; empty to follow the viewer's preference.
        size: Size of each chart.
    """
    font, gap = size.font, 2 * size.font
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    width, row = columns * (size.width + gap) + gap, size.height + 2.6 * font
    height = 4 * font + lines * row
    parts = [label(gap, 2.2 * font, title, "start", "title")] if title else []
    right = float(width - gap)
    for line in reversed(legend):
        parts.append(label(right, 2.1 * font, line.name, "end", "name"))
        right -= 0.56 * font * len(line.name) + 1.6 * font
        parts.append(f'<path class="line series-{line.color}" d="M{right:.1f} {1.75 * font:.1f}h{1.2 * font:.1f}"/>')
        right -= font
    for number, (name, chart) in enumerate(panels):
        x, y = gap + number % columns * (size.width + gap), 3.6 * font + number // columns * row
        squeezed = f'<text textLength="{size.width}"' if 0.56 * font * len(name) > size.width else "<text"
        parts.append(label(x, y + font, name, "start", "name").replace("<text", squeezed))
        parts.append(f'<svg x="{x}" y="{y + 1.6 * font:.1f}" width="{size.width}" height="{size.height}"' + chart[4:])
    return standalone("".join(parts), width, height, title, font, theme)


def standalone(body: str, width: float, height: float, title: str, font: int, theme: str = "") -> str:
    """Return an SVG file around a drawing; colours are literal, since few viewers but browsers support variables."""

    def rules(palette: dict[str, str]) -> str:
        values = palette | {"font": f"{font}px", "large": f"{1.2 * font:g}px", "small": f"{0.88 * font:g}px"}
        return re.sub(r"var\(--([\w-]+)\)", lambda found: values[found[1]], CHART)

    both = f"{rules(LIGHT)}@media (prefers-color-scheme: dark) {{ {rules(DARK)} }}"
    style = both if not theme else rules(DARK if theme == "dark" else LIGHT)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{html.escape(visible(title), quote=True)}"><style>{style}</style>'
        f'<rect class="paper" width="100%" height="100%" rx="8"/>{body}</svg>\n'
    )
