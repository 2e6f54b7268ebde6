"""The study's picture: held-out KL to the teacher over the tokens seen, one panel a data set and depth."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

from scripts.study.plan import KNOWN
from scripts.study.verdict import Rows, by_objective, settings_of

COLORS = ("#6b7280", "#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#db2777", "#65a30d")


def draw(rows: Rows, path: Path, *, figure: str = "forward_kl") -> None:
    """Write the picture as SVG: means over seeds as lines, the seeds' range shaded.

    Args:
        rows: Of the results; objectives that the plan does not name are left out.
        path: The file.
        figure: Of the curves' points: forward_kl, reverse_kl, agreement or student_cross_entropy.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    matplotlib.rcParams.update({"svg.hashsalt": "distill", "font.size": 9})
    panels = settings_of(rows)
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    drawing, axes = plt.subplots(
        lines, columns, figsize=(4.8 * columns, 3.0 * lines + 0.5), layout="constrained", squeeze=False
    )
    for place, (data, layers) in zip(axes.flat, panels, strict=False):
        for name, color in zip(KNOWN, COLORS, strict=False):
            group = by_objective(rows, data, layers).get(name)
            if group:
                _line(place, [row["curve"] for row in group], figure, name, color)
        place.set_title(f"{data}, {layers} layers", loc="left", fontsize=10)
        place.set(xlabel="tokens seen, M", yscale="linear" if figure == "agreement" else "log")
        for axis in (place.yaxis.set_major_formatter, place.yaxis.set_minor_formatter):
            axis(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "1235" else "")
        place.tick_params(axis="y", which="both", labelsize=8)
        place.grid(True, alpha=0.25, which="both")
        for side in ("top", "right"):
            place.spines[side].set_visible(False)
    for place in list(axes.flat)[len(panels) :]:
        place.set_visible(False)
    for row in axes:
        row[0].set_ylabel({"forward_kl": "held-out KL, nats a token"}.get(figure, figure))
    handles, labels = axes[0][0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    beside = path.with_name(path.name + ".unfinished")
    drawing.savefig(beside, format="svg", facecolor="white", metadata={"Date": None})
    os.replace(beside, path)
    plt.close(drawing)


def _line(axes: Any, curves: list[list[dict[str, float]]], figure: str, name: str, color: str) -> None:
    tokens = [point["tokens"] / 1e6 for point in curves[0]]
    values = [[curve[i][figure] for curve in curves] for i in range(min(map(len, curves)))]
    axes.plot(tokens[: len(values)], [statistics.fmean(v) for v in values], color=color, lw=1.5, marker="o", ms=2.5,
              label=name)  # fmt: skip
    if len(curves) > 1:
        low, high = [min(v) for v in values], [max(v) for v in values]
        axes.fill_between(tokens[: len(values)], low, high, color=color, alpha=0.15, lw=0)
