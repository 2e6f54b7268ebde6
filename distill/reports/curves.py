"""`curves.png`: what `metrics.jsonl` tells, as one picture of small plots over the optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distill.core.files import replacing
from distill.teachers.measure import KL, Measure

INK, QUIET, TRAIN, HELD_OUT = "#1f2937", "#9ca3af", "#2563eb", "#dc2626"


class Panel(NamedTuple):
    """One small plot.

    Attributes:
        key: the figure in a row; `eval_` before it is the held-out one.
        title: with the unit.
        factor: multiplies the figure (100 for a share shown as a percentage).
        from_zero: the axis starts at 0.
    """

    key: str
    title: str
    factor: float = 1.0
    from_zero: bool = False


def panels_of(measure: Measure = KL) -> list[Panel]:
    """The plots of a run whose divergence is `measure`; one trained by another than the KL logs `divergence`."""
    name = measure.called("divergence")
    return [
        Panel("loss", f"loss ({measure.each})"),
        Panel("kl", f"{measure.name} to teacher ({measure.each})", from_zero=True),
        Panel("divergence", f"{name} to teacher ({measure.each})", from_zero=True),
        Panel("agreement", "agreement with teacher (%)", 100.0),
        Panel("learning_rate", "learning rate", from_zero=True),
        Panel("tokens_per_second", "tokens per second", from_zero=True),
        Panel("grad_norm", "gradient norm", from_zero=True),
    ]


def draw_curves(rows: Sequence[Mapping[str, Any]], path: Path, title: str = "", *, measure: Measure = KL) -> bool:
    """Draw the figures in `rows` into a PNG; a half-written file is never left.

    Args:
        rows: Of `metrics.jsonl`: `step` and figures by name; a figure may be missing or None in any of them.
        path: The PNG.
        title: Above the picture, such as the run's name.
        measure: What the divergence is.

    Returns:
        False where there was nothing to draw, and then no file.
    """
    panels = [panel for panel in panels_of(measure) if _points(rows, panel) or _points(rows, panel, "eval_")]
    if not panels:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 2.7 * lines + 0.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(lines, columns, number + 1)
        _draw(axes, rows, panel)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if number + columns >= len(panels):
            axes.set_xlabel("step", color=INK, fontsize=8)
    if title:
        figure.suptitle(_plain(title), color=INK, fontsize=12, x=0.01, ha="left")
    with replacing(path) as beside:
        figure.savefig(beside, format="png", facecolor="white")
    return True


def _draw(axes: Any, rows: Sequence[Mapping[str, Any]], panel: Panel) -> None:
    training, held_out = _points(rows, panel), _points(rows, panel, "eval_")
    for points, color, label in ((training, TRAIN, "training"), (held_out, HELD_OUT, "held out")):
        if points:
            few = len(points) <= 30 or color == HELD_OUT
            axes.plot(*zip(*points, strict=True), color=color, lw=1.4, marker="o" if few else "", ms=2.8, label=label)
    _, last = (held_out or training)[-1]
    axes.set_title(
        f"{last:,.4g}" if abs(last) < 1e4 else f"{last:,.0f}", fontsize=9, color=INK, loc="right", weight="bold"
    )
    axes.set_title(panel.title, fontsize=9, color=INK, loc="left")
    axes.tick_params(labelsize=8, colors=INK, length=0)
    axes.grid(True, axis="y", color=QUIET, alpha=0.3, lw=0.6)
    axes.margins(y=0.15)
    axes.ticklabel_format(axis="y", scilimits=(-3, 6))
    axes.yaxis.get_offset_text().set_fontsize(7)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(QUIET)
    if panel.from_zero and min(value for _, value in training + held_out) >= 0:
        axes.set_ylim(bottom=0)
    if training and held_out:
        axes.legend(frameon=False, fontsize=8)


def _points(rows: Sequence[Mapping[str, Any]], panel: Panel, prefix: str = "") -> list[tuple[int, float]]:
    """Steps and values of one figure, rows without it left out."""
    found = [(row["step"], row.get(prefix + panel.key)) for row in rows if "step" in row]
    return [(step, float(value) * panel.factor) for step, value in found if isinstance(value, int | float)]


def _plain(text: str) -> str:
    """No mathematics and no line breaks in a title that a person or a folder's name gave."""
    return " ".join(text.split()).replace("$", r"\$")[:120]
