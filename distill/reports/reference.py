"""`distill compare RUN --reference NAME`: does a run give what the same recipe gave here?

`reference_results.json` holds the rows of docs/reference/results.md: of each the recipe, the tokens trained on, and the
held-out figures of several seeds. A further seed falls into the interval

    mean ± t s sqrt(1 + 1/n)      n seeds of standard deviation s, t the 97.5 % quantile of Student's t with n - 1

in 19 of 20 cases, if figures of seeds are normally distributed. A run of another pair of models, other data or other
tokens has no place in it and is refused; any other setting that differs is named beside the figures.
"""

from __future__ import annotations

import importlib.resources
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from distill.core.diff_settings import diff_settings
from distill.core.errors import quote
from distill.recipe import parse
from distill.recipe.resume_policy import settings_of_steps, tokens_of_step
from distill.reports.compare_runs import JUDGED_BY
from distill.reports.report import ReportedRun

FILE = "reference_results.json"
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantile by number of seeds
TITLES = {"forward_kl": "KL to teacher", "agreement": "agreement", "student_cross_entropy": "perplexity"}
# the same rows can be had under several names: the held-out tokens tell whether they are the same
NAMES_OF_DATA = ("data.source", "data.subset", "data.split", "data.format", "data.fields", "data.unread")
# settings that make another pair of models
PAIR = (
    *(f"teacher.{name}." for name in ("type", "model", "init", "adapter", "context")),
    *(f"student.{name}." for name in ("model", "init", "from_teacher", "quantise", "lora")),
)
# what a run may choose without being another run; `config` matters for random weights alone
FREE = ("name", "train.seed", "train.device", "student.config", "teacher.config", "data.validation.source", "generate")


class ReferenceRow(NamedTuple):
    """A row of the reference results.

    Attributes:
        title: What is trained, as the page names it.
        recipe: Text of the recipe that rows of a section share.
        settings: Settings of the row over it.
        tokens: Tokens trained on, padding included.
        held_out_tokens: Tokens that the figures are over.
        figures: Values by figure, one for each seed, named as in `HeldOut`; those of tasks as `NAME accuracy`.
        made_with: Device, versions, commit and date.
    """

    title: str
    recipe: str
    settings: list[str]
    tokens: int
    held_out_tokens: int
    figures: dict[str, list[float]]
    made_with: dict[str, str]


class Comparison(NamedTuple):
    """A figure of a run beside those of the reference.

    Attributes:
        mean, low, high: Of the reference: its mean, and where a further seed falls in 19 of 20 cases.
    """

    figure: str
    value: float
    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """`inside`, `below` or `above` the interval."""
        if self.value < self.low:
            return "below"
        return "above" if not self.value <= self.high else "inside"  # NaN is not inside

    @property
    def title(self) -> str:
        return TITLES.get(self.figure, self.figure)

    def shown(self, value: float) -> str:
        """Return a value of this figure as it is read: a cross-entropy as perplexity."""
        if self.figure == "student_cross_entropy":
            return f"{math.exp(value):,.2f}"
        return f"{value:.4f}" if self.figure == "forward_kl" else f"{value:.1%}"

    @property
    def interval(self) -> str:
        return f"{self.shown(self.low)} to {self.shown(self.high)}"

    def as_dict(self) -> dict[str, Any]:
        return self._asdict() | {"verdict": self.verdict}


def another_seed(values: Sequence[float]) -> tuple[float, float]:
    """Return the range in which the next value falls with 95 %, if they are normally distributed."""
    count = len(values)
    half = STUDENT_T[count] * statistics.stdev(values) * math.sqrt(1 + 1 / count)
    mean = statistics.fmean(values)
    return mean - half, mean + half


def read_references() -> dict[str, ReferenceRow]:
    content = json.loads(importlib.resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
    recipes = content["recipes"]
    return {name: ReferenceRow(**{**row, "recipe": recipes[row["recipe"]]}) for name, row in content["rows"].items()}


def find_reference(name: str) -> ReferenceRow:
    rows = read_references()
    if name not in rows:
        raise ValueError(f"--reference: expected one of {', '.join(rows)}; got {name!r}")
    return rows[name]


def differing_settings(run: ReportedRun, row: ReferenceRow) -> dict[str, tuple[object, object]]:
    """Return settings of the optimizer steps in which a run differs from a reference: its own value, the reference's.

    Seeds, names and the names of data are left out: the held-out tokens say whether data are the same.
    """
    own = settings_of_steps(run.settings, run.processes)
    other = settings_of_steps(parse(row.recipe, row.settings), 1)
    changes = diff_settings(other, own)
    left_out = tuple(f"{name}." for name in (*FREE, *NAMES_OF_DATA))
    return {name: (now, before) for name, before, now in changes if not f"{name}.".startswith(left_out)}


def why_not_comparable(run: ReportedRun, row: ReferenceRow) -> list[str]:
    """Return a line for each reason why a finished run is none of the reference's kind; empty where it is one."""
    name = run.folder.name
    lines = []
    for setting, (own, other) in differing_settings(run, row).items():
        if f"{setting}.".startswith((*PAIR, *JUDGED_BY)):
            lines.append(f"{name}: {setting}: expected {quote(other)}, as the reference has, got {quote(own)}")
    steps = int(run.result["steps"])
    tokens = steps * tokens_of_step(run.settings, run.processes)
    if tokens != row.tokens:
        lines.append(
            f"{name}: tokens: expected {row.tokens:,} trained on, got {tokens:,} ({steps:,} steps of "
            f"{tokens_of_step(run.settings, run.processes):,})"
        )
    held_out = int(run.held_out["after"]["tokens"])
    if held_out != row.held_out_tokens:
        lines.append(
            f"{name}: data: expected {row.held_out_tokens:,} held-out tokens, got {held_out:,}: these are other data, "
            "or another version of them"
        )
    return lines


def compare_with_reference(run: ReportedRun, row: ReferenceRow) -> list[Comparison]:
    """Return each figure of the reference that the run has too."""
    figures: dict[str, float] = dict(run.held_out["after"])
    for task, scores in run.result.get("tasks", {}).items():
        figures[f"{task} accuracy"] = scores["after"]["accuracy"]
    return [
        Comparison(name, figures[name], statistics.fmean(values), *another_seed(values))
        for name, values in row.figures.items()
        if name in figures
    ]


def versions_line(run: ReportedRun, made_with: Mapping[str, str]) -> str:
    """Return what the run and the reference were made with."""
    own = run.result.get("environment", {})
    here = ", ".join(f"{key} {own[key]}" for key in ("torch", "transformers", "distill") if key in own)
    there = ", ".join(
        [f"torch {made_with['torch']}", made_with["gpu"], f"commit {made_with['commit']}", made_with["date"]]
    )
    return f"made with {here or 'versions unknown'}; the reference with {there}"
