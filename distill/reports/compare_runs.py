"""`distill compare`: several runs side by side, and whether a difference is more than the luck of the seed.

Runs whose recipes differ in nothing but `name`, `train.seed` and what leaves an optimizer step as it is (micro-batches,
checkpointing, intervals: `recipe/same_step.py`) are one group. Groups are compared with the first by Welch's t-test
(1947) on the held-out divergence, one figure a run: with a single run in a group there is no spread, so no test, and
the table says so; nor is there one between measures, such as KL and the divergence of aligned spans. Figures against
another teacher, or over other held-out rows, are no figures of one table: they are refused unless asked for.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from distill.core.faults import show
from distill.recipe import parse
from distill.recipe.same_step import settings_of_steps
from distill.reports.report import Run, points
from distill.reports.svg_plot import Series, line_chart
from distill.teachers.measure import Measure

# what a held-out figure depends on besides the student; `config` is read of random weights alone
JUDGED_BY = (
    *(f"teacher.{name}" for name in ("model", "init", "config", "revision", "adapter")), "teachers",
    *(f"data.{name}" for name in (
        "source", "subset", "split", "format", "fields", "chat_template", "max_length", "train_on", "max_rows",
        "validation",
    )),
)  # fmt: skip


class Group(NamedTuple):
    """Runs of one recipe under several seeds.

    Attributes:
        name: of the first run.
        runs: names.
        measure: what the divergence is.
        divergence, agreement, gap: one figure a run.
        differs: settings by which this group's steps differ from the first group's.
        p_value: that a difference from the first group as large comes from seeds alone; None where it cannot be told.
    """

    name: str
    runs: list[str]
    measure: Measure
    divergence: list[float]
    agreement: list[float]
    gap: list[float]
    differs: dict[str, Any]
    p_value: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the divergence by its key in `metrics.jsonl`."""
        found = self._asdict()
        figures = found.pop("divergence")
        return {self.measure.key: figures, **found, "measure": self.measure.name}


def differently_judged(runs: Sequence[Run]) -> list[str]:
    """Which runs had another teacher or other held-out rows than the first of the same measure, a line each."""
    lines: list[str] = []
    first: dict[Measure, tuple[str, dict[str, object]]] = {}
    for run in runs:
        recipe = parse(run.recipe, name=run.folder.name, of_run=True)
        settings = {name: value for name, value in settings_of_steps(recipe, 1).items() if _judges(name)}
        if recipe.teacher.init != "random":
            settings.pop("teacher.config", None)
        if recipe.teacher.model is None:  # a cache that names no model: nothing is known of it here
            settings = {name: value for name, value in settings.items() if not name.startswith("teacher")}
        other, before = first.setdefault(run.measure, (run.folder.name, settings))
        changed = [name for name in settings if name in before and settings[name] != before[name]]
        if changed:
            told = "; ".join(f"{name} {show(settings[name])}, there {show(before[name])}" for name in changed)
            lines.append(f"{run.folder.name} was not judged as {other}: {told}")
    return lines


def _judges(name: str) -> bool:
    return f"{name}.".startswith(tuple(f"{part}." for part in JUDGED_BY))


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group finished runs by recipe, in the order given.

    Raises:
        ValueError: a run that has no result yet, or the same run twice.
    """
    names = [str(run.folder) for run in runs]
    if len(set(names)) < len(names):
        raise ValueError("runs: the same run was given twice")
    groups: dict[str, tuple[dict[str, Any], list[Run]]] = {}
    for run in runs:
        if "after" not in run.result:
            raise ValueError(f"{run.folder}: has no result yet; distill run ... --resume finishes it")
        settings = settings_of_steps(parse(run.recipe, name=run.folder.name, of_run=True), run.processes)
        for name in ("name", "train.seed", "data.validation.seed"):
            settings.pop(name, None)
        groups.setdefault(repr(sorted(settings.items())), (settings, []))[1].append(run)
    first: dict[str, Any] | None = None
    made: list[Group] = []
    for settings, members in groups.values():
        first = settings if first is None else first
        changed = {
            key: settings.get(key)
            for key in sorted({*settings, *first})
            if settings.get(key) != first.get(key)
        }  # fmt: skip
        after = [run.held_out["after"] for run in members]
        gaps = [math.nan if run.result["gap_closed"] is None else run.result["gap_closed"] for run in members]
        divergence = [figures["forward_kl"] for figures in after]
        measure = members[0].measure
        alike = bool(made) and made[0].measure == measure
        made.append(
            Group(
                members[0].folder.name, [run.folder.name for run in members], measure, divergence,
                [figures["agreement"] for figures in after], gaps, changed,
                welch(made[0].divergence, divergence) if alike else None,
            )
        )  # fmt: skip
    return made


def mean_and_spread(values: Sequence[float]) -> str:
    """`mean ± standard deviation`, the mean alone for one value."""
    mean = statistics.fmean(values)
    return f"{mean:.4f}" if len(values) < 2 else f"{mean:.4f} ± {statistics.stdev(values):.4f}"


def welch(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Two-sided p-value of Welch's t-test for equal means; None with fewer than two values on a side."""
    if len(a) < 2 or len(b) < 2:
        return None
    spread = [statistics.variance(a) / len(a), statistics.variance(b) / len(b)]
    difference = statistics.fmean(a) - statistics.fmean(b)
    if sum(spread) == 0:
        return 1.0 if difference == 0 else 0.0
    t = abs(difference) / math.sqrt(sum(spread))
    freedom = sum(spread) ** 2 / (spread[0] ** 2 / (len(a) - 1) + spread[1] ** 2 / (len(b) - 1))
    return _tail(t, freedom)


def _tail(t: float, freedom: float, steps: int = 20_000) -> float:
    """P(|T| > t) of Student's distribution: 1 minus the density's integral from -t to t, by Simpson's rule."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    # in the angle whose tangent is x / sqrt(freedom) the density is bounded and the range finite
    end = math.atan(t / math.sqrt(freedom))
    width = end / steps
    total = 0.0
    for number in range(steps + 1):
        weight = 1 if number in (0, steps) else 4 if number % 2 else 2
        total += weight * math.cos(number * width) ** (freedom - 1)
    return min(1.0, max(0.0, 1 - 2 * scale * math.sqrt(freedom) * total * width / 3))


def curves_page(runs: Sequence[Run]) -> str:
    """The held-out divergence of all runs over the steps (in training where none was held out), as an HTML page."""
    import html

    from distill.reports.style import STYLE

    charts = []
    measures = dict.fromkeys(run.measure for run in runs)
    wanted = [(one.key, f"{one.name} to the teacher ({one.each})", [one]) for one in measures]
    for key, title, among in [*wanted, ("agreement", "top-1 agreement with the teacher", list(measures))]:
        lines = [
            Series(run.folder.name, points(run.metrics, f"eval_{key}") or points(run.metrics, key), number % 6)
            for number, run in enumerate(runs)
            if run.measure in among
        ]
        if any(line.points for line in lines):
            charts.append(f"<figure><figcaption>{title}</figcaption>{line_chart(lines, title)}</figure>")
    names = "".join(
        f'<p class="note"><svg viewBox="0 0 12 12" style="width:12px;display:inline">'
        f'<circle class="dot series-{i % 6}" '
        f'cx="6" cy="6" r="5"/></svg> {html.escape(run.folder.name)}</p>'
        for i, run in enumerate(runs)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>runs</title><style>{STYLE}</style></head><body><main><h1>Runs, by optimizer step</h1>"
        f'{names}<div class="charts">{"".join(charts)}</div></main></body></html>\n'
    )
