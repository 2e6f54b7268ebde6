"""The study's picture: held-out KL to the teacher over the tokens seen, one panel a data set and depth."""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distill.core.files import write_text
from distill.reports.style import DARK, LIGHT, SANS
from scripts.study.plan import KNOWN
from scripts.study.verdict import Rows, by_objective, settings_of

# of lines, for light and for dark paper: contrast of at least 4.5 with both
COLORS = {
    LIGHT["quiet"]: DARK["quiet"],
    **{LIGHT[f"series-{number}"]: DARK[f"series-{number}"] for number in range(6)},
    "#a16207": "#facc15",
    "#4d7c0f": "#a3e635",
}


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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    matplotlib.rcParams.update({"svg.hashsalt": "distill", "svg.fonttype": "none", "font.size": 10.5})
    matplotlib.rc("text", color=LIGHT["ink"])
    matplotlib.rc("axes", edgecolor=LIGHT["rule"], labelcolor=LIGHT["quiet"])
    matplotlib.rc("grid", color=LIGHT["rule"])
    for axis in ("xtick", "ytick"):
        matplotlib.rc(axis, color=LIGHT["quiet"])
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    drawing, axes = plt.subplots(
        lines, columns, figsize=(4.1 * columns, 2.8 * lines + 0.6), layout="constrained", squeeze=False
    )
    colors = dict(zip(names, COLORS, strict=False))
    for place, panel in zip(axes.flat, panels, strict=False):
        for name, group in panel.groups.items():
            _line(place, [row["curve"] for row in group], panel.figure, name, colors[name])
        place.set_title(panel.title, loc="left", fontsize=11)
        place.set(xlabel="tokens seen, M")
        drawn = [point[panel.figure] for group in panel.groups.values() for row in group for point in row["curve"]]
        if panel.figure != "agreement" and max(drawn) > 3 * min(drawn) > 0:  # a narrow range has too few round numbers
            place.set_yscale("log")
            for axis in (place.yaxis.set_major_formatter, place.yaxis.set_minor_formatter):
                axis(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "1235" else "")
        place.tick_params(which="both", labelsize=10, length=0)
        place.grid(True, axis="y", which="both", linewidth=0.7)
        place.set_axisbelow(True)
        for side in ("top", "right", "left"):
            place.spines[side].set_visible(False)
    for place in list(axes.flat)[len(panels) :]:
        place.set_visible(False)
    for number, row in enumerate(axes):
        figure = panels[number * columns].figure
        row[0].set_ylabel("held-out KL, nats a token" if figure.endswith("_kl") else figure)
    lines_drawn = {
        label: handle for place in axes.flat for handle, label in zip(*place.get_legend_handles_labels(), strict=True)
    }
    drawing.legend(lines_drawn.values(), lines_drawn.keys(), loc="outside lower center", ncols=3, frameon=False)
    text = io.StringIO()
    drawing.savefig(text, format="svg", facecolor=LIGHT["paper"], metadata={"Date": None})
    plt.close(drawing)
    write_text(path, both_themes(text.getvalue()))


def both_themes(svg: str) -> str:
    """A picture in the light palette, with rules that exchange its colours where the reader prefers dark."""
    pairs = {**COLORS, **{LIGHT[name]: DARK[name] for name in ("paper", "ink", "rule")}}
    rules = [
        f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important; }}'
        for light, dark in pairs.items()
        for kind in ("fill", "stroke")
    ]
    style = f"text {{ font-family: {SANS} !important; }} @media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}"
    head, body = svg.split("<defs>", 1)
    return f'{head}<defs>\n  <style type="text/css">{style}</style>{body}'


def _line(axes: Any, curves: list[list[dict[str, float]]], figure: str, name: str, color: str) -> None:
    tokens = [point["tokens"] / 1e6 for point in curves[0]]
    values = [[curve[i][figure] for curve in curves] for i in range(min(map(len, curves)))]
    axes.plot(
        tokens[: len(values)],
        [statistics.fmean(v) for v in values],
        color=color,
        lw=1.5,
        marker="o",
        ms=2.5,
        label=name,
    )
    if len(curves) > 1:
        low, high = [min(v) for v in values], [max(v) for v in values]
        axes.fill_between(tokens[: len(values)], low, high, color=color, alpha=0.15, lw=0)
