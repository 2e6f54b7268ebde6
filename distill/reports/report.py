"""`distill report RUN`: self-contained HTML page about a run, `report.html`.

All text from users and models (names, prompts, responses, the recipe) goes through `html.escape`; the page has no
scripts and loads nothing, so it can be mailed, archived and opened offline.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from distill.core.console import printable
from distill.core.errors import RecipeError, first_line, quote
from distill.core.files import write_text
from distill.core.folders import RECIPE_FILE, RESULT_FILE, RUNS
from distill.core.manifest import entry_mismatch
from distill.objectives.measure import DivergenceUnit, metric_text, perplexity
from distill.recipe import Recipe, parse
from distill.recipe.loss import clip_text
from distill.reports.curves import Panel, Rows, charts_of, same_axes
from distill.reports.plots import HINT, Series, line_chart, matplotlib_is_installed, short
from distill.reports.run_summary import TITLES
from distill.reports.style import document
from distill.teachers.identity import model_name
from distill.teachers.registry import measure_of, source_of

# display names of the phases of training.phases
PHASES = {
    "teacher": "teacher",
    "student, both ways": "student",
    "loss": "loss",
    "optimizer": "optimizer",
    "data and host": "data",
}
# lines of a run's summary that say more than the recipe: parameters, kept layers, size of the data
SIZES = ("teacher", "student", "data", "steps")
# lines of it that warn
WARNINGS = ("few data", "metrics", "file")
# definition of agreement, after "the share of tokens"
AGREEMENT = "for which student and teacher have the same top-1 token"


class ReportedRun(NamedTuple):
    """Content of a run's folder.

    Attributes:
        before: Held-out metrics and samples from before training; empty before the first evaluation.
        result: Content of `result.json`; empty while the run is unfinished.
    """

    folder: Path
    recipe: str
    metrics: list[dict[str, Any]]
    before: dict[str, Any]
    result: dict[str, Any]

    @property
    def held_out(self) -> dict[str, dict[str, float]]:
        """Return held-out metrics under `before` and `after`, as far as they exist, named as in `HeldOut`."""
        found = {"before": self.before.get("held_out"), "after": self.result.get("after")}
        return {name: self._figures(figures) for name, figures in found.items() if figures}

    @property
    def sets(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return the same for each named held-out set."""
        found = self.result.get("sets") or {
            name: {"before": figures} for name, figures in self.before.get("sets", {}).items()
        }
        return {name: {when: self._figures(figures) for when, figures in own.items()} for name, own in found.items()}

    def _figures(self, figures: dict[str, Any]) -> dict[str, float]:
        # values that are not finite are null in the file
        return {key: math.nan if value is None else value for key, value in self.measure.read(figures).items()}

    @property
    def summary(self) -> list[tuple[str, str]]:
        """Return titles and texts of the lines that described the run before it started; none of earlier versions'."""
        lines = self.before.get("summary")
        lines = [line for line in lines if isinstance(line, str)] if isinstance(lines, list) else []
        return [(line[:12].strip(), "; ".join(filter(None, map(str.strip, line[12:].splitlines())))) for line in lines]

    @property
    def settings(self) -> Recipe:
        return parse(self.recipe, name=self.folder.name, origin=str(self.folder / RECIPE_FILE))

    @property
    def measure(self) -> DivergenceUnit:
        return measure_of(self.settings, self.result.get("measure") or self.before.get("measure"))

    @property
    def processes(self) -> int:
        """Return the number of processes that the run began on, from its lock.yaml; 1 without one."""
        from distill.training.lock_file import LOCK_FILE, read_lock

        path = self.folder / LOCK_FILE
        return int(read_lock(path)["processes"]) if path.is_file() else 1


def find_run(argument: str | Path) -> Path:
    """Return the folder of a run from its path or its name under `runs/`."""
    for folder in (Path(argument), RUNS / argument):
        if (folder / RECIPE_FILE).is_file():
            return folder
    names = sorted(path.parent.name for path in RUNS.glob(f"*/{RECIPE_FILE}"))
    known = f"; runs here: {', '.join(names)}" if names else "; there are no runs here"
    raise RecipeError([f"{str(argument)!r}: no such run (a folder with a {RECIPE_FILE}){known}"])


def read_run(folder: Path) -> ReportedRun:
    from distill.training.progress import read_metrics

    def read(name: str) -> dict[str, Any]:
        path = folder / name
        if not path.is_file():
            return {}
        damage = entry_mismatch(folder, name)
        if damage is not None:
            raise RecipeError([f"{folder}: {damage}"])
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError, RecursionError) as error:
            raise RecipeError([f"{path}: cannot be read: {first_line(error)}"]) from None
        _require_metrics(path, value)
        return dict(value)

    recipe = (folder / RECIPE_FILE).read_text(encoding="utf-8")
    metrics = read_metrics(folder / "metrics.jsonl")
    return ReportedRun(folder, recipe, metrics, read("before.json"), read(RESULT_FILE))


def _require_metrics(path: Path, value: object) -> None:
    """Raise for a file whose metrics are not numbers by their names, as in a run of before there were checksums."""
    if not isinstance(value, dict):
        raise RecipeError([f"{path}: expected a section of JSON, got {quote(value)}"])
    for section in ("before", "after", "held_out"):
        metrics = value.get(section, {})
        if not isinstance(metrics, dict):
            raise RecipeError([f"{path}: {section}: expected metrics by name, got {quote(metrics)}"])
        for name, number in metrics.items():
            if number is not None and (isinstance(number, bool) or not isinstance(number, int | float)):
                raise RecipeError([f"{path}: {section}.{name}: expected a number, got {quote(number)}"])
    for section in ("answers", "environment"):
        if not isinstance(value.get(section, {}), dict):
            raise RecipeError([f"{path}: {section}: expected a section of JSON, got {quote(value[section])}"])


def write_report(folder: Path, destination: Path | None = None) -> Path:
    """Write the page about the run in `folder` to `destination` (default `report.html` in it); returns its path."""
    target = destination or folder / "report.html"
    write_text(target, printable(report_html(read_run(folder))))
    return target


def report_html(run: ReportedRun) -> str:
    name = html.escape(run.folder.name)
    sections = [
        _header(run),
        _summary(run),
        _section("Held out", _held_out(run)),
        _section("Tasks", _tasks(run)),
        _section("Training, by optimizer step", _charts(run.metrics, run.measure)),
        _section("Time", _time(run.metrics)),
        _section("Samples", _samples(run)),
        _section(
            "Recipe",
            f"<details><summary>every setting, as YAML</summary><pre>{html.escape(run.recipe.strip())}</pre></details>",
        ),
        _section("Environment", table([], [*run.result.get("environment", {}).items()], "pairs")),
    ]
    return document(name, "\n".join([f"<h1>{name}</h1>", *filter(None, sections)]))


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>\n{body}\n</section>" if body else ""


def _warnings(run: ReportedRun) -> str:
    lines = [(title, text) for title, text in run.summary if title in WARNINGS]
    return "".join(f'<p class="warning">{html.escape(f"{title}: {text}")}</p>' for title, text in lines)


def _recipe_facts(run: ReportedRun) -> dict[str, str]:
    recipe = run.settings
    weighted = [term for term in recipe.loss.terms if term.weight > 0]
    plain = len(weighted) == 1 and weighted[0].weight == 1
    terms = " + ".join(("" if plain else f"{term.weight:g} ") + _term(term, run.measure) for term in weighted)
    return {
        "teacher": source_of(recipe).title(),
        "student": model_name(recipe.student),
        "data": recipe.data.source,
        "loss": f"{terms}, temperature {recipe.loss.temperature_text}",
    } | {title: text for title, text in run.summary if title in SIZES}


def _term(term: Any, measure: DivergenceUnit) -> str:
    """Return a loss term in words; a custom one by its function's name."""
    name = str(getattr(term, "function", term.type))
    return (name.removesuffix("_kl") + f" {measure.name}" * name.endswith("_kl")).replace("_", " ") + clip_text(term)


def _header(run: ReportedRun) -> str:
    """Return the header: start, duration, device, command, models, data and loss."""
    stored = run.before.get("started"), run.result.get("finished")
    times = [datetime.fromisoformat(time) for time in stored if time]
    when = [f"{times[0].day} {times[0]:%B %Y, %H:%M} UTC"] if times else []
    if len(times) == 2:
        when.append(f"{duration((times[1] - times[0]).total_seconds())} from start to end")
    device = run.before.get("device")
    if device:
        when.append(f"{run.processes} × {device}" if run.processes > 1 else device)
    facts = _recipe_facts(run) | ({"command": run.before["command"]} if run.before.get("command") else {})
    items = "".join(f"<dt>{key}</dt><dd>{html.escape(value)}</dd>" for key, value in facts.items())
    unfinished = "" if run.result else '<p class="warning">This run has not finished; figures so far.</p>'
    return f'<p class="when">{html.escape(" · ".join(when))}</p>{unfinished}{_warnings(run)}<dl>{items}</dl>'


def _summary(run: ReportedRun) -> str:
    cards = []
    name = html.escape(run.measure.name)
    after = run.held_out.get("after")
    before = run.held_out.get("before")
    if after:
        was = f"; it was {before['forward_kl']:.4f}" if before else ""
        perfect = f"{run.measure.unit_label}, 0 is a perfect match{was}"
        cards.append((f"{name} to teacher", f"{after['forward_kl']:.4f}", perfect))
    closed = run.result.get("gap_closed")
    if closed is not None:
        gone = f"{name} to the teacher, relative to before training"
        worse = f"worse than before training: the {name} to the teacher has increased"
        shown = (f"{closed:.1%}", gone) if closed >= 0 else ("none", worse)
        cards.append((f"{name} reduction", *shown))
    if after:
        was = f"; it was {before['agreement']:.1%}" if before else ""
        cards.append(("agreement", f"{after['agreement']:.1%}", f"of held-out {run.measure.unit}s {AGREEMENT}{was}"))
    speeds = sorted(row["tokens_per_second"] for row in run.metrics if row.get("tokens_per_second"))
    if speeds:
        cards.append(("tokens per second", short(speeds[len(speeds) // 2]), "in training, the median"))
    boxes = "".join(
        f'<div class="card"><div class="what">{what}</div><div class="figure">{figure}</div>'
        f'<div class="note">{note}</div></div>'
        for what, figure, note in cards
    )
    return f'<div class="cards">{boxes}</div>' if boxes else ""


def _held_out(run: ReportedRun) -> str:
    figures = run.held_out
    if not figures:
        return ""
    last = figures.get("after") or figures["before"]

    fit = perplexity(last["teacher_cross_entropy"])
    rows = [["teacher", "0", "0", "100 %", f"{fit:,.2f}", f"{last['teacher_entropy']:.3f}"]]
    measured = {TITLES[name]: row for name, row in figures.items()}
    for held_out, own in run.sets.items():
        measured |= {f"{held_out}: {TITLES[name]}": row for name, row in own.items()}
    for title, row in measured.items():
        rows.append(
            [
                title,
                metric_text(row["forward_kl"]),
                metric_text(row["reverse_kl"]),
                f"{100 * row['agreement']:.1f} %",
                f"{perplexity(row['student_cross_entropy']):,.2f}",
                f"{row['student_entropy']:.3f}",
            ]
        )
    measure = run.measure
    head = ["", f"forward {measure.name}", f"reverse {measure.name}", "agreement", "perplexity", "entropy"]
    note = (
        f"Means over {last['tokens']:,} held-out {measure.unit}s, in nats. "
        f"Agreement: the share of {measure.unit}s {AGREEMENT}. Perplexity: of the text, lower is better."
    )
    return table(head, rows) + f'<p class="note">{html.escape(note)}</p>'


def _tasks(run: ReportedRun) -> str:
    found: dict[str, Any] = run.result.get("tasks") or run.before.get("tasks") or {}
    rows = []
    for name, own in found.items():
        for who, figures in own.items():
            interval = f"{figures['low']:.1%} to {figures['high']:.1%}"
            rows.append([f"{name}: {TITLES[who]}", f"{figures['accuracy']:.1%}", interval, f"{figures['prompts']:,}"])
    if not rows:
        return ""
    note = "Share of prompts whose greedy answer is right, with its 95 % interval (Wilson)."
    return table(["", "accuracy", "interval", "prompts"], rows) + f'<p class="note">{html.escape(note)}</p>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """Return an HTML table in a box that scrolls sideways; the first column holds names."""
    top = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    head_row = f"<thead><tr>{top}</tr></thead>" if head else ""
    return f'<div class="wide" tabindex="0"><table class="{kind}">{head_row}<tbody>{body}</tbody></table></div>'


def _charts(rows: Rows, measure: DivergenceUnit) -> str:
    charts = charts_of(rows, measure)
    if not charts:
        few = "No curves: a line needs two logged steps; lower train.log_every."
        return f'<p class="note">{few}</p>' if rows else ""
    if not matplotlib_is_installed():
        return f'<p class="note">{html.escape(HINT)}</p>{_values(charts)}'
    figures = []
    for (panel, lines), drawn in zip(charts, same_axes(charts), strict=True):
        last = short(lines[-1].points[-1][1])
        if lines[-1].name == "held out":
            last = f"<small>held out</small> {last}"
        chart = line_chart(drawn._replace(title=""), panel.title)
        figures.append(f"<figure><figcaption>{html.escape(panel.title)}<b>{last}</b></figcaption>{chart}</figure>")
    names = {line.color: line.name for _, lines in charts for line in lines}
    return f'{legend(names)}<div class="charts">{"".join(figures)}</div>'


def _values(charts: Sequence[tuple[Panel, list[Series]]]) -> str:
    """Return a table of the lines' values at about ten steps each."""
    rows = []
    for panel, lines in charts:
        for line in lines:
            every = -(-len(line.points) // 10)
            kept = [*line.points[:-1:every], line.points[-1]]
            values = ", ".join(f"{short(y)} at step {x:g}" for x, y in kept)
            rows.append([f"{panel.title}, {line.name}", values])
    return table([], rows, "pairs")


def legend(names: Mapping[int, str]) -> str:
    """Return a legend of line colours as an HTML list; nothing for one line."""
    entries = [
        f'<li><span class="key" style="background:var(--series-{color})"></span>{html.escape(name)}</li>'
        for color, name in sorted(names.items())
    ]
    return f'<ul class="legend">{"".join(entries)}</ul>' if len(entries) > 1 else ""


def _time(rows: Rows) -> str:
    """Return a section on training time by phase and on GPU utilisation, as far as it was measured."""
    trained = [row for row in rows if isinstance(row.get("seconds"), int | float)]
    if not trained:
        return ""
    seconds = sum(row["seconds"] for row in trained)
    tokens = sum(row["seconds"] * row.get("tokens_per_second", 0.0) for row in trained)
    text = f"<p>{duration(seconds)} of training for {tokens:,.0f} tokens, without evaluations and checkpoints.</p>"
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


def _phases(rows: Rows) -> list[tuple[str, float]]:
    """Return each phase's share of the step time over the whole run; empty where not measured."""
    totals = dict.fromkeys(PHASES, 0.0)
    last = 0
    for row in rows:
        steps = row["step"] - last
        last = row["step"]
        for name, phase in PHASES.items():
            totals[name] += steps * (row.get(f"time_{phase}") or 0.0)
    whole = sum(totals.values())
    return [(name, seconds / whole) for name, seconds in totals.items()] if whole > 0 else []


def _bar(parts: Sequence[tuple[str, float]]) -> str:
    """Return a stacked bar of shares that sum to 1, with a key; the last of three parts is the rest."""
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
    return f'<div class="bar">{bars}</div><p class="note keys">{keys}</p>'


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _samples(run: ReportedRun) -> str:
    answers: dict[str, Any] = run.result.get("answers") or run.before.get("answers") or {}
    if not answers:
        return ""
    prompts = run.result.get("prompts") or run.before.get("prompts") or run.settings.generate.prompts
    blocks = []
    for number, prompt in enumerate(prompts):
        columns = "".join(
            f"<div><h4>{html.escape(TITLES.get(who, who))}</h4>"
            f"<pre>{html.escape(texts[number]) or '(nothing)'}</pre></div>"
            for who, texts in answers.items()
            if number < len(texts)
        )
        blocks.append(f'<h3>{html.escape(prompt)}</h3><div class="answers">{columns}</div>')
    return "".join(blocks)
