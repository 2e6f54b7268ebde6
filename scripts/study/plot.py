"""The study's picture: held-out KL to the teacher over the tokens seen, one panel a data set and depth."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distill.core.files import write_text
from distill.reports.plots import draw_legend, new_figure, to_svg
from distill.reports.style import LIGHT, standalone
from scripts.study.plan import KNOWN
from scripts.study.verdict import Rows, by_objective, settings_of

COLORS = [LIGHT["quiet"], *(LIGHT[f"series-{number}"] for number in range(8))]


class Panel(NamedTuple):
    """One plot.

    Attributes:
        title: above it.
        groups: rows by what is compared; a line each.
        figure: of the curves' points: forward_kl, reverse_kl, agreement or student_cross_entropy.
    """

    title: str
    groups: Mapping[str, Sequence[Mapping[str, Any]]]
    figure: str = "forward_kl"


def draw(rows: Rows, path: Path, *, figure: str = "forward_kl") -> None:
    """Write the first plan's picture; objectives that it does not name are left out."""
    panels = []
    for data, layers in settings_of(rows):
        groups = by_objective(rows, data, layers)
        known = {name: groups[name] for name in KNOWN if name in groups}
        panels.append(Panel(f"{data}, {layers} layers", known, figure))
    drawn = {name for panel in panels for name in panel.groups}
    draw_panels(panels, [name for name in KNOWN if name in drawn], path)


def draw_panels(panels: Sequence[Panel], names: Sequence[str], path: Path) -> None:
    """Write a picture as SVG: means over seeds as lines, the seeds' range shaded.

    Args:
        panels: What is drawn.
        names: Of all lines; each has its colour in every panel.
        path: The file.
    """
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    colors = dict(zip(names, COLORS, strict=False))
    with new_figure(4.1 * columns, 2.8 * lines + 0.6) as drawing:
        axes = drawing.subplots(lines, columns, squeeze=False)
        named: dict[str, Any] = {}
        for place, panel in itertools.zip_longest(axes.flat, panels):
            if panel is None:
                place.set_visible(False)
                continue
            for name, group in panel.groups.items():
                named[name] = _line(place, [row["curve"] for row in group], panel.figure, colors[name])
            place.set_title(panel.title)
            place.set_xlabel("tokens seen, M")
            drawn = [point[panel.figure] for group in panel.groups.values() for row in group for point in row["curve"]]
            # a narrow range has too few round numbers for a logarithmic axis
            if panel.figure != "agreement" and max(drawn) > 3 * min(drawn) > 0:
                place.set_yscale("log")
                for set_formatter in (place.yaxis.set_major_formatter, place.yaxis.set_minor_formatter):
                    set_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "1235" else "")
                place.grid(True, axis="y", which="minor")
        for number, row in enumerate(axes):
            figure = panels[number * columns].figure
            row[0].set_ylabel("held-out KL, nats a token" if figure.endswith("_kl") else figure)
        draw_legend(drawing, named)
        write_text(path, standalone(to_svg(drawing, "; ".join(panel.title for panel in panels))))


def _line(axes: Any, curves: list[list[dict[str, float]]], figure: str, color: str) -> Any:
    tokens = [point["tokens"] / 1e6 for point in curves[0]]
    values = [[curve[i][figure] for curve in curves] for i in range(min(map(len, curves)))]
    tokens = tokens[: len(values)]
    if len(curves) > 1:
        axes.fill_between(tokens, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.15, lw=0)
    (line,) = axes.plot(tokens, [statistics.fmean(v) for v in values], color=color, lw=1.5, marker="o", ms=2.5)
    return line
