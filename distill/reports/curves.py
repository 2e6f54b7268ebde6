"""Charts of `metrics.jsonl` over the optimizer steps, for a run's page and for `curves.svg`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distill.core import console
from distill.core.files import write_text
from distill.objectives.measure import KL, DivergenceUnit
from distill.reports.plots import HINT, Chart, Series, matplotlib_is_installed, picture

Rows = Sequence[Mapping[str, Any]]  # rows of metrics.jsonl


class Panel(NamedTuple):
    """Chart of one metric.

    Attributes:
        key: Key of the metric in a row; with the prefix `eval_` the held-out value.
        title: Title with unit.
        factor: Factor of the values (100 to show a fraction as a percentage).
        from_zero: Start the axis at 0.
        axis: Name that panels of one vertical axis share; empty for an axis of its own.
    """

    key: str
    title: str
    factor: float = 1.0
    from_zero: bool = False
    axis: str = ""


def panels_of(measure: DivergenceUnit = KL) -> list[Panel]:
    """Return the charts of a run whose divergence is `measure`; divergences other than KL are logged as
    `divergence`.
    """
    name = measure.display_name("divergence")
    return [
        Panel("loss", f"loss ({measure.unit_label})"),
        Panel("kl", f"{measure.name} to teacher ({measure.unit_label})", from_zero=True),
        Panel("divergence", f"{name} to teacher ({measure.unit_label})", from_zero=True),
        Panel("agreement", "agreement with teacher (%)", 100.0),
        Panel("clipped_tokens", "clipped tokens (%)", 100.0, True),
        Panel("clipped_value", "divergence beyond the caps (%)", 100.0, True),
        Panel("student_entropy", "student's entropy (nats)", from_zero=True, axis="entropy"),
        Panel("teacher_entropy", "teacher's entropy (nats)", from_zero=True, axis="entropy"),
        Panel("router_load", "router load (busiest expert over mean)"),
        Panel("router_entropy", "entropy of the mean routing (nats)", from_zero=True),
        Panel("router_agreement", "experts in common with teacher (%)", 100.0),
        Panel("router_balance", "load-balancing loss, without coefficient"),
        Panel("router_z", "router z-loss, without coefficient", from_zero=True),
        Panel("rollout_length", "rollout length (tokens)", from_zero=True),
        Panel("rollout_truncated", "truncated rollouts (%)", 100.0, True),
        Panel("rollout_repeated", "repetitive rollouts (%)", 100.0, True),
        Panel("rollout_gap", "log-probability gap, engine to trainer (nats)", from_zero=True),
        Panel("learning_rate", "learning rate", from_zero=True),
        Panel("tokens_per_second", "tokens per second", from_zero=True),
        Panel("grad_norm", "gradient norm", from_zero=True),
        Panel("peak_memory_gib", "peak memory (GiB)", from_zero=True),
    ]


def charts_of(rows: Rows, measure: DivergenceUnit = KL) -> list[tuple[Panel, list[Series]]]:
    """Return the panels with at least two values in `rows`, and their lines.

    The loss is left out where it equals the divergence.
    """
    charts = []
    for panel in panels_of(measure):
        if panel.key == "loss" and all(_same(row.get("loss"), row.get(measure.key)) for row in rows if "loss" in row):
            continue
        lines = [
            Series(name, points(rows, prefix + panel.key, panel.factor), color)
            for color, (name, prefix) in enumerate((("training", ""), ("held out", "eval_")))
        ]
        if any(len(line.points) > 1 for line in lines):
            charts.append((panel, [line for line in lines if line.points]))
    names = [key[7:] for key in (rows[-1] if rows else ()) if key.startswith("tokens_")]
    for panel in panels_of(measure)[1:4]:
        own = ((name, points(rows, f"{panel.key}_{name}", panel.factor)) for name in names)
        lines = [Series(name, line, 2 + number % 6) for number, (name, line) in enumerate(own) if line]
        if any(len(line.points) > 1 for line in lines):
            charts.append((panel._replace(title=f"{panel.title}, by route"), lines))
    return charts


def same_axes(charts: Sequence[tuple[Panel, Sequence[Series]]]) -> list[Chart]:
    """Return the charts over the same steps, those that share a vertical axis with the same range."""
    steps = [x for _, lines in charts for line in lines for x, _ in line.points]
    span = (min(steps), max(steps)) if steps else None
    values: dict[str, list[float]] = {}
    for panel, lines in charts:
        values.setdefault(panel.axis, []).extend(y for line in lines for _, y in line.points)
    return [
        Chart(panel.title, lines, panel.from_zero, span, values[panel.axis] if panel.axis else ())
        for panel, lines in charts
    ]


def points(rows: Rows, key: str, factor: float = 1.0) -> list[tuple[float, float]]:
    return [
        (float(row["step"]), float(row[key]) * factor)
        for row in rows
        if isinstance(row.get(key), int | float) and isinstance(row.get("step"), int | float)
    ]


def _same(loss: object, other: object) -> bool:
    return isinstance(loss, float) and isinstance(other, float) and math.isclose(loss, other, rel_tol=1e-3)


def draw_curves(
    rows: Rows,
    path: Path,
    title: str = "",
    *,
    measure: DivergenceUnit = KL,
    keys: Sequence[str] = (),
    theme: str = "",
) -> bool:
    """Draw the metrics in `rows` as an SVG file; returns False, without a file, where there is nothing to draw.

    Without matplotlib there is no file either, and a line says how to get it.

    Args:
        rows: Rows of `metrics.jsonl`: `step` and metrics by name; a metric may be missing or None.
        title: Title of the picture, such as the run's name.
        keys: Keys of the panels to draw; empty for all.
        theme: `light` or `dark`; empty to follow the viewer's preference.
    """
    charts = [(panel, lines) for panel, lines in charts_of(rows, measure) if not keys or panel.key in keys]
    if charts and not matplotlib_is_installed():
        console.print_lines(f"curves      not drawn: {HINT}")
    elif charts:
        write_text(path, picture(same_axes(charts), title, theme))
    return bool(charts) and matplotlib_is_installed()
