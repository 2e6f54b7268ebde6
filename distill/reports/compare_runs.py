"""`distill compare`: runs in one table, with a test of whether differences exceed the variation over seeds.

Runs whose recipes differ only in `name`, `train.seed` and settings that do not change an optimizer step (micro-batches,
checkpointing, intervals: `recipe/resume_policy.py`) form one group. Groups are compared with the first by Welch's
t-test (1947) on the held-out divergence, one value per run. A group of a single run has no spread and no test; nor is
there one between different measures, such as KL and the divergence of aligned spans. Runs with another teacher or other
held-out rows are refused unless requested.
"""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from distill.core.diff_settings import diff_settings
from distill.core.errors import quote
from distill.objectives.measure import DivergenceUnit
from distill.recipe import parse
from distill.recipe.resume_policy import settings_of_steps
from distill.reports.curves import points
from distill.reports.plots import Chart, Series, line_chart
from distill.reports.report import AGREEMENT, ReportedRun, legend
from distill.reports.style import document

# settings that held-out metrics depend on besides the student; `config` matters for random weights alone
JUDGED_BY = (
    *(f"teacher.{name}." for name in ("model", "init", "config", "revision", "adapter")),
    "teachers.",
    *(
        f"data.{name}."
        for name in (
            "source",
            "subset",
            "split",
            "format",
            "fields",
            "chat_template",
            "chat_template_kwargs",
            "max_length",
            "train_on",
            "reasoning",
            "empty_answers",
            "max_rows",
            "validation",
        )
    ),
    "eval.tasks.",
)


class RunGroup(NamedTuple):
    """Runs of one recipe under several seeds.

    Attributes:
        name: Name of the first run.
        divergence, agreement, gap: Values of the metrics, one per run.
        further: Values of the divergence on each named held-out set and of the accuracy in each task, by a title.
        differs: Settings in which this group's training differs from the first group's.
        p_value: p-value of the difference from the first group; None where there is no test.
    """

    name: str
    runs: list[str]
    measure: DivergenceUnit
    divergence: list[float]
    agreement: list[float]
    gap: list[float]
    further: dict[str, list[float]]
    differs: dict[str, object]
    p_value: float | None = None

    def as_dict(self) -> dict[str, object]:
        """Return the group for JSON, with the divergence under its key in `metrics.jsonl`."""
        found = self._asdict()
        figures = found.pop("divergence")
        return {self.measure.key: figures, **found, "measure": self.measure.name}


def describe_changes(changes: Mapping[str, object]) -> str:
    """Return differing settings as `train.seed=1, no loss.terms.1.type`."""
    return ", ".join(f"no {key}" if value is None else f"{key}={value}" for key, value in changes.items())


def evaluation_differences(runs: Sequence[ReportedRun]) -> list[str]:
    """Return a line for each run with another teacher or other held-out rows than the first of its measure."""
    lines: list[str] = []
    first: dict[DivergenceUnit, tuple[str, dict[str, object]]] = {}
    for run in runs:
        recipe = parse(run.recipe, name=run.folder.name)
        steps = settings_of_steps(recipe, 1)
        settings = {name: value for name, value in steps.items() if f"{name}.".startswith(JUDGED_BY)}
        if recipe.teacher.init != "random":
            settings.pop("teacher.config", None)
        if recipe.teacher.model is None:  # a cache that names no model: its teacher is unknown here
            settings = {name: value for name, value in settings.items() if not name.startswith("teacher")}
        other, before = first.setdefault(run.measure, (run.folder.name, settings))
        changed = [name for name in settings if name in before and settings[name] != before[name]]
        if changed:
            differences = "; ".join(f"{name} {quote(settings[name])}, not {quote(before[name])}" for name in changed)
            lines.append(f"{run.folder.name} was evaluated differently from {other}: {differences}")
    return lines


def group_runs(runs: Sequence[ReportedRun]) -> list[RunGroup]:
    """Group finished runs by recipe, in the given order.

    Raises:
        ValueError: A run has no result yet, or is given twice.
    """
    require_results(runs)
    first: dict[str, object] | None = None
    made: list[RunGroup] = []
    for settings, members in _by_recipe(runs).values():
        first = settings if first is None else first
        after = [run.held_out["after"] for run in members]
        gaps = [math.nan if run.result["gap_closed"] is None else run.result["gap_closed"] for run in members]
        divergence = [figures["forward_kl"] for figures in after]
        measure = members[0].measure
        comparable = bool(made) and made[0].measure == measure
        made.append(
            RunGroup(
                members[0].folder.name,
                [run.folder.name for run in members],
                measure,
                divergence,
                [figures["agreement"] for figures in after],
                gaps,
                _further(members),
                _changes(settings, first),
                welch_p_value(made[0].divergence, divergence) if comparable else None,
            )
        )
    return made


def require_results(runs: Sequence[ReportedRun]) -> None:
    """Require different runs, each finished."""
    names = [str(run.folder) for run in runs]
    if len(set(names)) < len(names):
        raise ValueError("runs: the same run was given twice")
    for run in runs:
        if "after" not in run.result:
            raise ValueError(f"{run.folder}: has no result yet; distill run ... --resume finishes it")


def _further(runs: Sequence[ReportedRun]) -> dict[str, list[float]]:
    """Return the values of figures that all of some runs of one recipe have beside those of the held-out rows."""
    found: dict[str, list[float]] = {}
    for name in runs[0].sets:
        found[f"{name}: {runs[0].measure.name}"] = [run.sets[name]["after"]["forward_kl"] for run in runs]
    for name in runs[0].result.get("tasks", {}):
        found[f"{name}: accuracy"] = [run.result["tasks"][name]["after"]["accuracy"] for run in runs]
    return found


def _by_recipe(runs: Sequence[ReportedRun]) -> dict[str, tuple[dict[str, object], list[ReportedRun]]]:
    """Return the settings of each recipe with its runs, in order."""
    groups: dict[str, tuple[dict[str, object], list[ReportedRun]]] = {}
    for run in runs:
        settings = settings_of_steps(run.settings, run.processes)
        for name in ("name", "train.seed", "data.validation.seed"):
            settings.pop(name, None)
        groups.setdefault(repr(sorted(settings.items())), (settings, []))[1].append(run)
    return groups


def _changes(settings: dict[str, object], first: dict[str, object]) -> dict[str, object]:
    return {name: now for name, _, now in sorted(diff_settings(first, settings))}


def mean_and_spread(values: Sequence[float]) -> str:
    """Return `mean ± standard deviation`, the mean alone for one value."""
    mean = statistics.fmean(values)
    return f"{mean:.4f}" if len(values) < 2 else f"{mean:.4f} ± {statistics.stdev(values):.4f}"


def welch_p_value(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the two-sided p-value of Welch's t-test for equal means; None with fewer than two values on a side."""
    if len(a) < 2 or len(b) < 2:
        return None
    spread = [statistics.variance(a) / len(a), statistics.variance(b) / len(b)]
    difference = statistics.fmean(a) - statistics.fmean(b)
    if sum(spread) == 0:
        return 1.0 if difference == 0 else 0.0
    t = abs(difference) / math.sqrt(sum(spread))
    freedom = sum(spread) ** 2 / (spread[0] ** 2 / (len(a) - 1) + spread[1] ** 2 / (len(b) - 1))
    return _tail(t, freedom)


def _tail(t: float, freedom: float) -> float:
    """Return P(|T| > t) of Student's distribution: 1 minus the density's integral from -t to t, by the midpoint
    rule.
    """
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    # substituting x = sqrt(freedom) tan(angle) makes the density bounded and the range finite
    steps = 100_000
    end = math.atan(t / math.sqrt(freedom))
    mean = float((np.cos((np.arange(steps) + 0.5) * (end / steps)) ** (freedom - 1)).mean())
    return min(1.0, max(0.0, 1 - 2 * scale * end * mean))


def curves_page(runs: Sequence[ReportedRun]) -> str:
    """Return an HTML page with divergence and agreement of all runs over steps, held out and in training.

    Runs of one recipe under several seeds are one line, their mean, with a band from the lowest to the highest.
    """
    groups = list(_by_recipe(runs).values())
    names = []
    for settings, members in groups:
        seeds = f" ({len(members)} seeds)" if len(members) > 1 else ""
        changes = describe_changes(_changes(settings, groups[0][0]))
        names.append(f"{members[0].folder.name}{seeds}{': ' if changes else ''}{changes}")
    measures = list(dict.fromkeys(run.measure for run in runs))
    wanted = [(one.key, f"{one.name} to the teacher ({one.unit_label})", 1.0, [one]) for one in measures]
    charts = []
    for key, title, factor, among in [*wanted, ("agreement", "agreement with the teacher (%)", 100.0, measures)]:
        for prefix, where in (("eval_", "held out"), ("", "in training")):
            lines = [
                over_seeds(
                    members[0].folder.name, [points(run.metrics, prefix + key, factor) for run in members], number % 8
                )
                for number, (_, members) in enumerate(groups)
                if members[0].measure in among
            ]
            lines = [line for line in lines if line.points]
            if lines:
                chart = line_chart(Chart("", lines, key != "agreement"), f"{title}, {where}", 4.2, 2.3)
                charts.append(f"<figure><figcaption>{html.escape(f'{title}, {where}')}</figcaption>{chart}</figure>")
    has_seeds = len(runs) > len(groups)
    note = "Lines are means over seeds, bands the range from lowest to highest. " if has_seeds else ""
    title = html.escape(" · ".join(run.folder.name for run in runs))
    about = f'<h1>Runs compared</h1><p class="note">{note}Agreement: the share of tokens {AGREEMENT}.</p>'
    return document(title, f'{about}{legend(dict(enumerate(names)))}<div class="charts pairs">{"".join(charts)}</div>')


def over_seeds(name: str, curves: Sequence[Sequence[tuple[float, float]]], color: int) -> Series:
    """Return the mean and the range of several curves, over the steps that all of them cover."""
    curves = [curve for curve in curves if curve]
    if len(curves) < 2:
        return Series(name, curves[0] if curves else [], color)
    start = max(curve[0][0] for curve in curves)
    end = min(curve[-1][0] for curve in curves)
    steps = sorted({x for curve in curves for x, _ in curve if start <= x <= end})
    values = [np.interp(steps, [x for x, _ in curve], [y for _, y in curve]) for curve in curves]
    mean = np.mean(values, axis=0).tolist()
    low = np.min(values, axis=0).tolist()
    high = np.max(values, axis=0).tolist()
    return Series(name, list(zip(steps, mean, strict=True)), color, list(zip(steps, low, high, strict=True)))
