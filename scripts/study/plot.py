"""Pictures of studies: held-out figures over the tokens seen, or the KL before and after training."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distill.core.files import write_text
from distill.reports.plots import draw_legend, new_figure, to_svg
from distill.reports.style import LIGHT, standalone
from scripts.study.planner import Plan
from scripts.study.report import Rows, compared, group, numbers, values

COLORS = [LIGHT["quiet"], *(LIGHT[f"series-{number}"] for number in range(8))]
TICKS = (0.3, 1, 3, 10)  # of a logarithmic axis of KLs


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


def draw(plan: Plan, rows: Rows, path: Path) -> None:
    """Write the picture that a plan asks for, as SVG."""
    wanted = plan.fields["picture"]
    if "before_and_after" in wanted:
        draw_before_and_after(plan, rows, wanted["before_and_after"], path)
        return
    panels = []
    for levels, here in group(rows, wanted["of"]).items():
        named = dict(zip(wanted["of"], levels, strict=True))
        figures = wanted["figures"]
        for figure in figures[named["part"]] if isinstance(figures, dict) else figures:
            heading = wanted["title"].format(**named, figure=figure.replace("_kl", " KL"))
            panels.append(Panel(heading, compared(plan, here, wanted["lines"]), figure))
    drawn = {name for panel in panels for name in panel.groups}
    draw_panels(panels, [name for name in plan.levels(wanted["lines"]) if name in drawn], path)


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


def draw_before_and_after(plan: Plan, rows: Rows, axes: Sequence[str], path: Path) -> None:
    """Write the KL before and after training of each student, with intervals."""
    found = group(rows, axes, plan)
    places = range(len(found), 0, -1)
    before = [statistics.fmean(numbers(here, "before.forward_kl")) for here in found.values()]
    after = [statistics.fmean(numbers(here, "after.forward_kl")) for here in found.values()]
    lows = [min(low for _, low, _ in values(here, "after.forward_kl")) for here in found.values()]
    highs = [max(high for _, _, high in values(here, "after.forward_kl")) for here in found.values()]
    names = [", ".join(levels) for levels in found]
    spans = [
        [value - low for value, low in zip(after, lows, strict=True)],
        [high - value for value, high in zip(after, highs, strict=True)],
    ]
    with new_figure(6.4, 0.9 + 0.34 * len(found)) as figure:
        axis = figure.subplots()
        axis.plot(before, places, "o", color=LIGHT["quiet"], ms=5, label="before training")
        axis.errorbar(after, places, xerr=spans, fmt="o", color=LIGHT["series-0"], ms=5, label="after training")
        axis.set_xscale("log")
        axis.set_yticks(places, names)
        axis.minorticks_off()
        axis.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
        axis.set_xlabel("KL to the teacher, nats a token")
        figure.legend(loc="outside upper right", ncols=2, frameon=False)
        heading = "; ".join(f"{name}: {value:.3f}" for name, value in zip(names, after, strict=True))
        write_text(path, standalone(to_svg(figure, f"KL after training: {heading}")))
