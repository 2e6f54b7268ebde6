"""Line charts by matplotlib (the extra `plots`) as SVG that loads nothing and follows the reader's colour scheme."""

from __future__ import annotations

import contextlib
import html
import importlib.util
import io
import itertools
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from distill.core.console import printable
from distill.reports.style import LIGHT, standalone

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HINT = "plots need matplotlib: pip install 'distill-toolkit[plots]'"
# up to FEW points are drawn as dots too, more than MANY as a thin line
FEW = 24
MANY = 150
SETTINGS = {
    "svg.hashsalt": "distill",  # the same figures give the same file
    "svg.fonttype": "none",
    "font.size": 10.0,
    "text.color": LIGHT["ink"],
    "text.parse_math": False,
    "figure.facecolor": LIGHT["paper"],
    "axes.facecolor": LIGHT["paper"],
    "axes.edgecolor": LIGHT["rule"],
    "axes.labelcolor": LIGHT["quiet"],
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "grid.color": LIGHT["rule"],
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "xtick.color": LIGHT["quiet"],
    "ytick.color": LIGHT["quiet"],
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "xtick.minor.size": 0.0,
    "ytick.minor.size": 0.0,
}


class Series(NamedTuple):
    """Line of a chart: name, (x, y) points sorted by x, colour index, and (x, low, high) of a band around it."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int = 0
    band: Sequence[tuple[float, float, float]] = ()


class Chart(NamedTuple):
    """Lines over the optimizer steps.

    Attributes:
        title: Title of the chart, empty where the page around it has one.
        lines: Lines, with at least one finite point among them.
        from_zero: Start the vertical axis at 0.
        steps: First and last step of the horizontal axis; None for those of the lines.
        beside: Values of charts beside this one, whose vertical axis is the same.
    """

    title: str
    lines: Sequence[Series]
    from_zero: bool = False
    steps: tuple[float, float] | None = None
    beside: Sequence[float] = ()


def matplotlib_is_installed() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


@contextlib.contextmanager
def new_figure(width: float, height: float) -> Iterator[Figure]:
    """Open an empty figure in the style of reports; sizes in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):  # type: ignore[arg-type]
        yield Figure(figsize=(width, height), layout="constrained")


def to_svg(figure: Figure, title: str) -> str:
    """Return the figure as an `<svg>` element in the light palette, with an accessible name."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    element = re.sub(r"^.*?<svg|<metadata>.*?</metadata>\s*|\s+$", "", text.getvalue(), flags=re.DOTALL)
    name = html.escape(printable(title), quote=True)
    return f'<svg role="img" aria-label="{name}"{element}'


def line_chart(chart: Chart, name: str, width: float = 3.4, height: float = 2.1) -> str:
    """Return a chart as an `<svg>` for a page, whose accessible name ends with each line's last value."""
    last = [f"{line.name} {short(line.points[-1][1])}" for line in chart.lines if line.points]
    with new_figure(width, height) as figure:
        draw_lines(figure.subplots(), chart)
        return to_svg(figure, f"{name}; last: {', '.join(last)}")


def picture(charts: Sequence[Chart], title: str, theme: str = "") -> str:
    """Return charts in a grid as a standalone SVG file; `theme` is light, dark, or empty for the reader's own."""
    columns = min(2, len(charts))
    rows = -(-len(charts) // columns)
    with new_figure(3.6 * columns, 2.2 * rows + 0.5) as figure:
        named: dict[str, object] = {}
        for chart, axes in itertools.zip_longest(charts, figure.subplots(rows, columns, squeeze=False).flat):
            if chart is None:
                axes.set_visible(False)
                continue
            draw_lines(axes, chart)
            named |= dict(zip((line.name for line in chart.lines), axes.get_lines(), strict=True))
        figure.suptitle(printable(title), x=0.01, ha="left")
        draw_legend(figure, named)
        return standalone(to_svg(figure, title), theme)


def draw_legend(figure: Figure, lines: Mapping[str, object]) -> None:
    figure.legend(lines.values(), map(printable, lines), loc="outside lower left", ncols=3)  # type: ignore[call-overload]


def draw_lines(axes: Axes, chart: Chart) -> None:
    """Draw the lines of a chart; values that are not finite break a line, few far outliers stand in a note."""
    from matplotlib.ticker import MaxNLocator

    finite = [y for line in chart.lines for _, y in line.points if math.isfinite(y)]
    if not finite:
        raise ValueError("lines: expected at least one finite point")
    edges = [y for line in chart.lines for _, *pair in line.band for y in pair if math.isfinite(y)]
    low, high = limits([*finite, *edges, *filter(math.isfinite, chart.beside)], chart.from_zero)
    for line in chart.lines:
        x, y = zip(*line.points, strict=True) if line.points else ((), ())
        color = LIGHT[f"series-{line.color}"]
        thin = len(x) > MANY
        axes.plot(x, y, color=color, lw=0.9 if thin else 1.5, marker="o" if len(x) <= FEW else None, ms=2.8)
        if len(line.band) > 1:
            steps, lowest, highest = zip(*line.band, strict=True)
            axes.fill_between(steps, lowest, highest, color=color, alpha=0.16, lw=0)
    above = [y for y in finite if y > high]
    if above:
        note = f"▲ {len(above)} {'point' if len(above) == 1 else 'points'} up to {short(max(above))}"
        axes.set_title(note, loc="right", fontsize=8, color=LIGHT["quiet"])
    if chart.steps is not None and chart.steps[0] < chart.steps[1]:
        margin = 0.05 * (chart.steps[1] - chart.steps[0])  # as matplotlib's own
        axes.set_xlim(chart.steps[0] - margin, chart.steps[1] + margin)
    room = 0.05 * (high - low)
    axes.set_ylim(low if chart.from_zero and low == 0 else low - room, high + room)
    axes.set_title(printable(chart.title))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    axes.set_xlabel("step")


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


def limits(values: Sequence[float], from_zero: bool = False) -> tuple[float, float]:
    """Return the range of an axis over all values except a few far outliers, which would flatten the others.

    Outliers lie beyond Tukey's outer fence (1977), three interquartile ranges above the quartile; at most two, or 2 %,
    are excluded, and only if the others would fill less than an eighth of the axis.
    """
    floor = from_zero and min(values) >= 0
    low = 0.0 if floor else min(values)
    high = max(values)
    if len(values) >= 8:
        first, _, third = statistics.quantiles(values, n=4, method="inclusive")
        near = [value for value in values if value <= third + 3 * (third - first)]
        few = len(values) - len(near) <= max(2, len(values) // 50)
        if few and 0 < 8 * (max(near) - low) < high - low:
            high = max(near)
    if high == low:
        low = low - (abs(low) * 0.1 or 0.5) * (not floor)
        high = high + (abs(high) * 0.1 or 0.5)
    return low, high
