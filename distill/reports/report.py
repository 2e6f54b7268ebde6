"""`distill report RUN`: everything about one run on one page, `report.html`, that loads nothing from anywhere.

Whatever people or models wrote (names, prompts, answers, the recipe) goes through `html.escape`; the page holds no
script, so that it can be mailed, archived and opened offline.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distill.core.console import visible
from distill.core.faults import RecipeError
from distill.core.files import write_text
from distill.core.folders import RECIPE_FILE, RESULT_FILE, RUNS
from distill.reports.curves import Panel, panels_of
from distill.reports.style import STYLE
from distill.reports.svg_plot import Series, line_chart, short
from distill.teachers.identity import model_name
from distill.teachers.measure import Measure, shown
from distill.teachers.registry import measure_of, source_of

MEMORY = Panel("peak_memory_gib", "peak memory (GiB)", from_zero=True)
# the report's words for what training.phases times
PHASES = {
    "teacher": "teacher", "student, both ways": "student", "loss": "loss", "optimizer": "optimizer",
    "data and host": "data",
}  # fmt: skip
WHO = {"teacher": "teacher", "before": "student before", "after": "student after"}


class Run(NamedTuple):
    """What a run's folder tells.

    Attributes:
        folder: where it lies.
        recipe: the resolved recipe, YAML.
        metrics: rows of `metrics.jsonl`.
        before: held-out figures and samples from before training; empty before the first evaluation.
        result: `result.json`; empty while the run is unfinished.
    """

    folder: Path
    recipe: str
    metrics: list[dict[str, Any]]
    before: dict[str, Any]
    result: dict[str, Any]

    @property
    def held_out(self) -> dict[str, dict[str, float]]:
        """Held-out figures by `before` and `after`, those there are, named as in `HeldOut` whatever the measure."""
        found = {"before": self.before.get("held_out"), "after": self.result.get("after")}
        # a figure that is not finite is null in the file
        return {
            name: {key: math.nan if value is None else value for key, value in self.measure.read(figures).items()}
            for name, figures in found.items()
            if figures
        }

    @property
    def measure(self) -> Measure:
        """What its divergence is."""
        from distill.recipe import parse

        stored = self.result.get("measure") or self.before.get("measure")
        return measure_of(parse(self.recipe, name=self.folder.name, origin=str(self.folder / RECIPE_FILE)), stored)

    @property
    def processes(self) -> int:
        """That it began on, as its lock.yaml says; 1 where there is none."""
        from distill.training.lock import LOCK_FILE, read_lock

        path = self.folder / LOCK_FILE
        return int(read_lock(path)["processes"]) if path.is_file() else 1


def find_run(argument: str | Path) -> Path:
    """The folder of a run: a path, or its name under `runs/`.

    Raises:
        RecipeError: there is none.
    """
    for folder in (Path(argument), RUNS / argument):
        if (folder / RECIPE_FILE).is_file():
            return folder
    names = sorted(path.parent.name for path in RUNS.glob(f"*/{RECIPE_FILE}"))
    known = f"; runs here: {', '.join(names)}" if names else "; there are no runs here"
    raise RecipeError([f"{str(argument)!r}: no such run (a folder with a {RECIPE_FILE}){known}"])


def read_run(folder: Path) -> Run:
    """Read a run, finished or not.

    Raises:
        RecipeError: a file of it is damaged.
    """
    from distill.training.progress import read_metrics

    def read(name: str) -> dict[str, Any]:
        path = folder / name
        if not path.is_file():
            return {}
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise RecipeError([f"{path}: cannot be read: {error}"]) from None
        return value if isinstance(value, dict) else {}

    return Run(
        folder,
        (folder / RECIPE_FILE).read_text(encoding="utf-8"),
        read_metrics(folder / "metrics.jsonl"),
        read("before.json"),
        read(RESULT_FILE),
    )


def write_report(folder: Path, destination: Path | None = None) -> Path:
    """Write the page about the run in `folder` to `destination` (`report.html` in the folder); returns its path."""
    target = destination or folder / "report.html"
    write_text(target, visible(page(read_run(folder))))
    return target


def page(run: Run) -> str:
    """The whole page as HTML."""
    name = html.escape(run.folder.name)
    sections = [
        _summary(run),
        _section("Held out", _held_out(run)),
        _section("Training, by optimizer step", _charts(run.metrics, run.measure)),
        _section("Time", _time(run.metrics)),
        _section("Samples", _samples(run)),
        _section(
            "Recipe",
            f"<details><summary>every setting, as YAML</summary><pre>{html.escape(run.recipe.strip())}</pre></details>",
        ),
        _section("Environment", _pairs(run.result.get("environment", {}))),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{STYLE}</style></head>\n<body><main>\n<h1>{name}</h1>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main></body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>\n{body}\n</section>" if body else ""


def _recipe_facts(run: Run) -> dict[str, str]:
    from distill.recipe import parse

    recipe = parse(run.recipe, name=run.folder.name, origin=str(run.folder / RECIPE_FILE))
    weighted = [term for term in recipe.loss.terms if term.weight > 0]
    plain = len(weighted) == 1 and weighted[0].weight == 1
    terms = " + ".join(("" if plain else f"{term.weight:g} ") + _term(term, run.measure) for term in weighted)
    return {
        "teacher": source_of(recipe).title(),
        "student": model_name(recipe.student),
        "data": recipe.data.source,
        "loss": f"{terms}, temperature {recipe.loss.temperature:g}",
    }


def _term(term: Any, measure: Measure) -> str:
    """A loss term in words; one of a person's own by its function's name."""
    name = str(getattr(term, "function", term.type))
    return (name.removesuffix("_kl") + f" {measure.name}" * name.endswith("_kl")).replace("_", " ")


def _summary(run: Run) -> str:
    facts = "".join(f"<span><b>{key}</b> {html.escape(value)}</span>" for key, value in _recipe_facts(run).items())
    cards, name = [], html.escape(run.measure.name)
    if "gap_closed" in run.result and run.result["gap_closed"] is not None:
        cards.append(("gap closed", f"{run.result['gap_closed']:.1%}", f"of the {name} to the teacher"))
    after, before = run.held_out.get("after"), run.held_out.get("before")
    if after:
        was = f"was {before['forward_kl']:.4f}" if before else ""
        cards.append((f"{name} to teacher", f"{after['forward_kl']:.4f}", was))
        was = f"was {before['agreement']:.1%}" if before else ""
        cards.append(("agreement", f"{after['agreement']:.1%}", was))
    speeds = sorted(row["tokens_per_second"] for row in run.metrics if row.get("tokens_per_second"))
    if speeds:
        cards.append(("tokens a second", short(speeds[len(speeds) // 2]), "median"))
    boxes = "".join(
        f'<div class="card"><div class="what">{what}</div><div class="figure">{figure}</div>'
        f'<div class="note">{note}</div></div>'
        for what, figure, note in cards
    )
    unfinished = "" if run.result else '<p class="warning">This run has not finished; figures so far.</p>'
    return f'<p class="facts">{facts}</p>{unfinished}<div class="cards">{boxes}</div>'


def _held_out(run: Run) -> str:
    figures = run.held_out
    if not figures:
        return ""
    last = figures.get("after") or figures["before"]

    def perplexity(value: float) -> str:
        return f"{math.exp(value):,.2f}" if value < 700 else "inf"

    rows = [["teacher", "0", "0", "100 %", perplexity(last["teacher_cross_entropy"]), f"{last['teacher_entropy']:.3f}"]]
    for name, row in figures.items():
        rows.append(
            [
                WHO[name], shown(row["forward_kl"]), shown(row["reverse_kl"]), f"{100 * row['agreement']:.1f} %",
                perplexity(row["student_cross_entropy"]), f"{row['student_entropy']:.3f}",
            ]
        )  # fmt: skip
    measure = run.measure
    head = ["", f"forward {measure.name}", f"reverse {measure.name}", "agreement", "perplexity", "entropy"]
    note = f"Means over {last['tokens']:,} held-out {measure.unit}s, in nats; teacher and student see the same text."
    return table(head, rows) + f'<p class="note">{html.escape(note)}</p>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table that scrolls sideways where it is too wide; the first column holds names."""
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def points(rows: Sequence[Mapping[str, Any]], key: str, factor: float = 1.0) -> list[tuple[float, float]]:
    """(step, figure) of the rows that have it."""
    return [
        (float(row["step"]), float(row[key]) * factor)
        for row in rows
        if isinstance(row.get(key), int | float) and isinstance(row.get("step"), int | float)
    ]


def _charts(rows: Sequence[Mapping[str, Any]], measure: Measure) -> str:
    charts = []
    for panel in (*panels_of(measure), MEMORY):
        if panel.key == "loss" and all(_same(row.get("loss"), row.get(measure.key)) for row in rows if "loss" in row):
            continue  # the loss is the divergence: one chart is enough
        lines = [
            Series("training", points(rows, panel.key, panel.factor), 0),
            Series("held out", points(rows, f"eval_{panel.key}", panel.factor), 1),
        ]
        lines = [line for line in lines if line.points]
        if not lines:
            continue
        last = lines[-1].points[-1][1]
        legend = ' <span class="held-out">held out</span>' if len(lines) > 1 or lines[0].color == 1 else ""
        charts.append(
            f"<figure><figcaption>{html.escape(panel.title)}{legend}<b>{short(last)}</b></figcaption>"
            f"{line_chart(lines, panel.title, from_zero=panel.from_zero)}</figure>"
        )
    return f'<div class="charts">{"".join(charts)}</div>' if charts else ""


def _same(loss: Any, other: Any) -> bool:
    return isinstance(loss, float) and isinstance(other, float) and math.isclose(loss, other, rel_tol=1e-3)


def _time(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where the time and the arithmetic went, as far as the run measured it."""
    trained = [row for row in rows if isinstance(row.get("seconds"), int | float)]
    if not trained:
        return ""
    seconds = sum(row["seconds"] for row in trained)
    tokens = sum(row["seconds"] * row.get("tokens_per_second", 0.0) for row in trained)
    text = f"<p>{duration(seconds)} of training for {tokens:,.0f} tokens; evaluations and checkpoints not counted.</p>"
    shares = {
        name: sum(row["seconds"] * row[f"mfu_{name}"] for row in trained if row.get(f"mfu_{name}") is not None)
        / max(seconds, 1e-9)
        for name in ("teacher", "student")
    }
    text += _bar(_phases(trained))
    if not any(shares.values()):
        return text
    parts = [("teacher's arithmetic", shares["teacher"]), ("student's arithmetic", shares["student"])]
    return text + _bar([*parts, ("below the GPU's peak", max(0.0, 1 - sum(shares.values())))])


def _phases(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Shares of the phases of a step over the whole run; empty where they were not measured."""
    totals = dict.fromkeys(PHASES, 0.0)
    last = 0
    for row in rows:
        steps, last = row["step"] - last, row["step"]
        for name, phase in PHASES.items():
            totals[name] += steps * (row.get(f"time_{phase}") or 0.0)
    whole = sum(totals.values())
    return [(name, seconds / whole) for name, seconds in totals.items()] if whole > 0 else []


def _bar(parts: Sequence[tuple[str, float]]) -> str:
    """Shares of 1 beside each other, and a key to them; the last part of three is the rest."""
    if not parts:
        return ""
    kinds = [f"part-{i}" if len(parts) > 3 or i < 2 else "part-rest" for i in range(len(parts))]
    shown = list(zip(kinds, parts, strict=True))
    bars = "".join(
        f'<span class="{kind}" style="flex-grow:{share:.4f}"></span>' for kind, (_, share) in shown if share >= 5e-5
    )
    keys = "".join(
        f'<span class="entry"><span class="key {kind}"></span>{name} {share:.1%}</span> '
        for kind, (name, share) in shown
    )
    return f'<div class="bar">{bars}</div><p class="note">{keys}</p>'


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _samples(run: Run) -> str:
    answers: dict[str, Any] = run.result.get("answers") or run.before.get("answers") or {}
    if not answers:
        return ""
    prompts = run.result.get("prompts") or run.before.get("prompts") or _prompts(run)
    blocks = []
    for number, prompt in enumerate(prompts):
        said = "".join(
            f"<div><h4>{html.escape(WHO.get(who, who))}</h4>"
            f"<pre>{html.escape(texts[number]) or '(nothing)'}</pre></div>"
            for who, texts in answers.items()
            if number < len(texts)
        )
        blocks.append(f'<h3>{html.escape(prompt)}</h3><div class="answers">{said}</div>')
    return "".join(blocks)


def _prompts(run: Run) -> list[str]:
    from distill.recipe import parse

    return parse(run.recipe, name=run.folder.name).generate.prompts


def _pairs(values: Mapping[str, Any]) -> str:
    rows = [[str(key), str(value)] for key, value in values.items()]
    return table(["", ""], rows).replace("<thead><tr><th></th><th></th></tr></thead>", "") if rows else ""
