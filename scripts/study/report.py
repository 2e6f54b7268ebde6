"""What the rows of a study come to: tables, a verdict in words and a picture, as its plan asks for them.

A table of a plan has, for each combination of the axes `of`, a `title`, and a line for each combination of the axes
`lines`. A column is [heading, function of CELLS, path of a figure in the rows, options]; `each` repeats it for every
seed, or for every key of a figure. Several seeds give a mean with their standard deviation ("spread") or with
Student's 95 % interval of it ("share"), and Welch's t-test (1947); with one seed there is no test, and the table says
so. "range" is the widest that the seeds' bootstrap intervals span: what the choice of the held-out rows leaves open.
Answers to the same questions are compared by question, each the mean over seeds: signs of the differences are drawn
anew. (A test over seeds alone, of which there are few, calls two seeds that happen to agree certain.)
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distill.evaluation.bootstrap import mean_intervals
from distill.reports.compare_runs import mean_and_spread, welch_p_value
from scripts.study.planner import Plan

Row = Mapping[str, Any]
Rows = Sequence[Row]
Options = Mapping[str, Any]
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's quantile by degrees of freedom
DRAWS = 10_000
SURE = 0.05


# ---------------------------------------------------------------- rows


def finished(folder: Path, plan: str) -> list[dict[str, Any]]:
    """Return the rows of a plan in all files of `folder`; a line cut short by a kill is left out."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = as_today(json.loads(line))
            except json.JSONDecodeError:
                logging.getLogger(__name__).warning("%s: a line is cut short, and its run is made again", path)
                continue
            if row["plan"] == plan:
                rows.append(row)
    return rows


def as_today(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the names that rows have now; those of November 2026 had others in each study."""
    plan = row.get("plan", "objectives")
    if plan == "shrink" and isinstance(row.get("kl"), float):
        row = row | {"before": {"forward_kl": row["kl"]}, "chosen": re.sub(r", seed \d+$", "", row["chosen"])}
        if "trained_kl" in row:
            row |= {"after": {"forward_kl": [row["trained_kl"], *row["interval"]]}}
            plan = "shrink-trained"
    elif plan == "hidden state":
        row = row | {"after": {"forward_kl": [row["kl"], *row["interval"]]}}
        plan = "hidden-state"
    elif plan == "shrink quantise":
        row = row | {"after": {"forward_kl": row["kl"]}}
        plan = "quantise"
    return row | {"plan": plan}


def values(rows: Rows, path: str) -> list[Any]:
    """Return a figure of each row that has it, by its keys with dots between."""
    found: list[Any] = list(rows)
    for key in path.split("."):
        found = [part[key] for part in found if key in part]
    return found


def numbers(rows: Rows, path: str) -> list[float]:
    """Return a figure of each row, without its interval."""
    return [value[0] if isinstance(value, list) else value for value in values(rows, path)]


def group(rows: Rows, axes: Sequence[str], plan: Plan | None = None) -> dict[tuple[Any, ...], list[Row]]:
    """Return rows by their levels of axes, as they come; with a plan the last axis' levels are in its order."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[axis] for axis in axes), []).append(row)
    if plan is None:
        return found
    firsts = list(dict.fromkeys(levels[:-1] for levels in found))
    last = list(plan.levels(axes[-1]))
    ordered = sorted(found, key=lambda levels: (firsts.index(levels[:-1]), _place(levels[-1], last)))
    return {levels: found[levels] for levels in ordered}


def _place(level: Any, order: Sequence[Any]) -> int:
    return order.index(level) if level in order else len(order)


def selected(rows: Rows, where: Options) -> list[Row]:
    """Return the rows that have these levels."""
    return [row for row in rows if all(row.get(axis) == level for axis, level in where.items())]


# ---------------------------------------------------------------- cells


def shown_p(value: float | None) -> str:
    """Return a p-value as a table shows it."""
    if value is None:
        return "one seed"
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"


def perplexity(cross_entropy: float) -> str:
    """Return exp of a cross-entropy as text."""
    return f"{math.exp(cross_entropy):,.2f}" if cross_entropy < 700 else "inf"


def shares(rows: Rows, path: str) -> list[float]:
    """Return each row's share of right answers, which it holds as a text of 1 and 0."""
    return [bits.count("1") / len(bits) for bits in values(rows, path)]


def mean_and_interval(found: Sequence[float]) -> str:
    """Return the mean in per cent, of several values with half of Student's 95 % interval."""
    mean = f"{100 * statistics.fmean(found):.1f}"
    if len(found) < 2:
        return mean
    half = T_975[min(len(found) - 2, len(T_975) - 1)] * statistics.stdev(found) / math.sqrt(len(found))
    return f"{mean} ± {100 * half:.1f}"


def right_by_question(rows: Rows, path: str) -> NDArray[np.float64]:
    """Return the share of the rows' seeds that answered each question correctly."""
    return np.array([[int(bit) for bit in bits] for bits in values(rows, path)], dtype=np.float64).mean(0)


def of_questions(rows: Rows, path: str) -> str:
    """Return the mean's 95 % interval in per cent over the choice of questions, the same ones for all seeds."""
    right = right_by_question(rows, path)
    (found,) = mean_intervals(right[:, None], np.ones(len(right)))
    return f"{100 * found.low:.0f} to {100 * found.high:.0f}"


def change_by_question(base: Rows, rows: Rows, path: str) -> tuple[float, float | None]:
    """Return the difference of the mean shares over the domains in points, and its p-value (None: one seed)."""
    domains = list(base[0][path])
    weighed = [
        right_by_question(rows, f"{path}.{name}") - right_by_question(base, f"{path}.{name}") for name in domains
    ]
    parts = np.concatenate([each / len(each) / len(domains) for each in weighed])
    change = float(parts.sum())
    if min(len(base), len(rows)) < 2:
        return 100 * change, None
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (DRAWS, len(parts)))
    return 100 * change, float(((np.abs(signs @ parts) >= abs(change) - 1e-12).sum() + 1) / (DRAWS + 1))


class Cell(NamedTuple):
    """What a function of CELLS makes a text of.

    Attributes:
        rows: Rows of the line; fewer where the column has `where`.
        path: Figure of the column.
        options: Options of the column.
        level: Level of the line's last axis.
        lines: Rows of every line of the table, by that level.
        against: Level that the table's verdict compares with.
    """

    rows: Rows
    path: str
    options: Options
    level: Any
    lines: Mapping[Any, Rows]
    against: str

    @property
    def numbers(self) -> list[float]:
        """The figure of each row."""
        return numbers(self.rows, self.path)

    @property
    def base(self) -> Rows:
        """Rows of the line that the column compares with; none for itself."""
        return self.lines.get(self.options["against"], [])

    def beside_base(self) -> list[tuple[float, float]]:
        """Return the figure of each row and that of the base's row of the same seed."""
        base = {row["seed"]: number for row, number in zip(self.base, numbers(self.base, self.path), strict=True)}
        pairs = zip(self.rows, self.numbers, strict=True)
        return [(number, base[row["seed"]]) for row, number in pairs if row["seed"] in base]


def _range(cell: Cell) -> str:
    intervals = values(cell.rows, cell.path)
    return f"{min(low for _, low, _ in intervals):.3f} to {max(high for _, _, high in intervals):.3f}"


def _extent(cell: Cell) -> str:
    return f"{min(cell.numbers):.3f} to {max(cell.numbers):.3f}" if cell.numbers else ""


def _solved(cell: Cell) -> str:
    found = values(cell.rows, cell.path)
    return f"{sum(right for right, _ in found)} of {sum(asked for _, asked in found)}"


def _moved(cell: Cell) -> str:
    found = values(cell.rows, cell.path)
    return f"{found[0][0]:.2f} to {statistics.fmean(after for _, after in found):.2f}" if found else ""


def _along(cell: Cell) -> str:
    """Return a metric's mean over the rows at the first, the middle and the last point of their curves."""
    curves = [[point[cell.path] for point in row["curve"] if cell.path in point] for row in cell.rows if "curve" in row]
    if not curves:
        return ""
    ends = [(curve[0], curve[len(curve) // 2], curve[-1]) for curve in curves]
    return ", ".join(f"{statistics.fmean(points):{cell.options['format']}}" for points in zip(*ends, strict=True))


def _collapsed(cell: Cell) -> str:
    """Return how many of the rows collapsed.

    That is, the share of right answers is below half of that of the line `against`, or the entropy of the student at
    the last point of its curve is outside of the option `entropy`, two factors of that at the first point.
    """
    trained = [row for row in cell.rows if "curve" in row]
    if not trained or not cell.base:
        return ""
    start = statistics.fmean(shares(cell.base, cell.path))
    lowest, highest = cell.options["entropy"]
    count = 0
    for row in trained:
        entropies = [point["student_entropy"] for point in row["curve"] if "student_entropy" in point]
        change = entropies[-1] / entropies[0]
        count += shares([row], cell.path)[0] < start / 2 or not lowest <= change <= highest
    return f"{count} of {len(trained)}"


def _intervals(cell: Cell) -> str:
    found = values(cell.rows, cell.path)
    return "; ".join(f"{middle:.2f} ({low:.2f} to {high:.2f})" for middle, low, high in found)


def _cut(cell: Cell) -> str:
    return "`{" + ", ".join(f"{name}: {value}" for name, value in cell.rows[0][cell.path].items()) + "}`"


def _level(cell: Cell) -> str:
    level = cell.rows[0][cell.path]
    return str(cell.options.get("called", {}).get(level, level))


def _p(cell: Cell) -> str:
    if cell.level == cell.options["against"]:
        return ""
    return shown_p(welch_p_value(numbers(cell.base, cell.path), cell.numbers))


def _p_by_question(cell: Cell) -> str:
    base = cell.lines.get(cell.against, [])
    if not base or cell.level == cell.against or not values(cell.rows, "kl"):
        return ""
    return shown_p(change_by_question(base, cell.rows, cell.path)[1])


def _difference(cell: Cell) -> str:
    found = [number - base for number, base in cell.beside_base()]
    if len(found) < 2:
        return f"{found[0]:+.4f}" if found else ""
    return f"{statistics.fmean(found):+.4f} ± {statistics.stdev(found) / math.sqrt(len(found)):.4f}"


def _ratio(cell: Cell) -> str:
    found = sorted(number / base for number, base in cell.beside_base())
    return f"{found[len(found) // 2]:.3f} x" if found else ""


CELLS: dict[str, Callable[[Cell], str]] = {
    "name": lambda cell: str(cell.level),
    "level": _level,
    "count": lambda cell: str(len(cell.rows)),
    "spread": lambda cell: mean_and_spread(cell.numbers),
    "range": _range,
    "extent": _extent,
    "perplexity": lambda cell: perplexity(statistics.fmean(cell.numbers)),
    "share": lambda cell: mean_and_interval(shares(cell.rows, cell.path)),
    "questions": lambda cell: of_questions(cell.rows, cell.path),
    "solved": _solved,
    "moved": _moved,
    "along": _along,
    "collapsed": _collapsed,
    "intervals": _intervals,
    "cut": _cut,
    "code": lambda cell: f"`{cell.rows[0][cell.path]}`",
    "millions": lambda cell: f"{statistics.fmean(number / 1e6 for number in cell.numbers):.2f}",
    "mega": lambda cell: f"{cell.numbers[0] / 1e6:,.1f} M",
    "p": _p,
    "p by question": _p_by_question,
    "difference": _difference,
    "ratio": _ratio,
}


def text_of(how: str, cell: Cell) -> str:
    """Return a cell: by a function of CELLS, or the mean or the first of the figures in a format, as "mean .3f"."""
    if how in CELLS:
        return CELLS[how](cell)
    which, _, form = how.partition(" ")
    if not cell.numbers:
        return cell.options.get("absent", "")
    return format(statistics.fmean(cell.numbers) if which == "mean" else cell.numbers[0], form)


# ---------------------------------------------------------------- tables


def tables(plan: Plan, rows: Rows) -> str:
    """Return all tables of a plan, each with its sentences where it has them."""
    parts = []
    for table in plan.fields["table"]:
        for levels, here in group(selected(rows, table.get("where", {})), table.get("of", [])).items():
            parts.append(one_table(plan, table, dict(zip(table.get("of", []), levels, strict=True)), here))
    return "\n\n".join(parts)


def one_table(plan: Plan, table: Mapping[str, Any], levels: Mapping[str, Any], rows: Rows) -> str:
    """Return the table of some levels, under its title."""
    grouped = group(rows, table["lines"], plan)
    lines = {level[-1]: here for level, here in grouped.items()}
    against = str(_of_part(plan.fields.get("against", ""), levels.get("part")))
    columns = _columns(table["columns"], rows, against)
    left = len(columns) if table.get("left") == "all" else 1
    text = [title(table["title"], levels, rows), ""] if "title" in table else []
    text.append("|" + "|".join(f" {heading} " if heading else " " for heading, *_ in columns) + "|")
    text.append("|---" * left + "|---:" * (len(columns) - left) + "|")
    best = min((_mean(here, table["best"]) for here in grouped.values()), default=None) if "best" in table else None
    for level, here in grouped.items():
        cells = []
        for _, how, path, options in columns:
            chosen = selected(here, options["where"])
            cells.append(text_of(how, Cell(chosen, path, options, level[-1], lines, against)))
        if best is not None and _mean(here, table["best"]) == best:
            cells = [f"**{cell}**" if cell else "" for cell in cells]
        text.append("| " + " | ".join(cells) + " |")
    if table.get("sentences") == "by question":
        text += verdict_by_question(lines, against)
    return "\n".join(text)


def _columns(columns: Sequence[Sequence[Any]], rows: Rows, against: str) -> list[tuple[str, str, str, Options]]:
    """Return the columns; neighbours that are repeated for each seed, or for each key of a figure, stay together."""
    whole = [(*column, *("", {})[len(column) - 2 :]) for column in columns]
    found = []
    for each, together in itertools.groupby(whole, key=lambda column: column[3].get("each")):
        names = [""] if each is None else sorted({row[each] for row in rows}) if each == "seed" else rows[0][each]
        same = list(together)
        for name in names:
            for heading, how, path, options in same:
                heading = re.sub(r"\{(\w+)\}", against if each is None else str(name), heading)
                where = options.get("where", {}) | ({"seed": name} if each == "seed" else {})
                found.append((heading, how, path.replace("{domain}", str(name)), options | {"where": where}))
    return found


def _mean(rows: Rows, path: str) -> float:
    return statistics.fmean(numbers(rows, path))


def _of_part(value: Any, part: Any) -> Any:
    """Return a field of the plan, or where it has a value for each part that of this one."""
    return value.get(part, "") if isinstance(value, dict) else value


def title(template: str, levels: Mapping[str, Any], rows: Rows) -> str:
    """Return a title with figures in place: the first row's, or "mean", in a format or as millions or perplexity."""

    def filled(found: re.Match[str]) -> str:
        path, _, how = found[1].partition(":")
        if path in levels:
            return str(levels[path])
        if how == "questions":
            return ", ".join(f"{len(bits)} of {domain}" for domain, bits in rows[0][path].items())
        first = numbers(rows, path)[0]
        if how == "millions":
            return f"{first / 1e6:.2g}"
        if how == "perplexity":
            return perplexity(first)
        return format(_mean(rows, path), how[5:]) if how.startswith("mean ") else format(first, how)

    return re.sub(r"\{([^}]+)\}", filled, template)


# ---------------------------------------------------------------- verdicts in words


def compared(plan: Plan, rows: Rows, axis: str) -> dict[Any, list[Row]]:
    """Return rows by a level of the plan that is no question of its own."""
    known = plan.levels(axis)
    return {
        level: here
        for (level,), here in group(rows, [axis], plan).items()
        if level in known and not known[level].get("probe")
    }


def changes(plan: Plan, rows: Rows) -> str:
    """Return for each data set and depth which losses bring the student closer than the hard labels alone."""
    against = plan.fields["against"]
    said = []
    for (data, layers), here in group(rows, ["data", "layers"]).items():
        groups = compared(plan, here, "objective")
        if against not in groups:
            continue
        base = numbers(groups.pop(against), "after.forward_kl")
        verdicts: dict[str, list[str]] = {}
        for name, own in groups.items():
            kl = numbers(own, "after.forward_kl")
            change = statistics.fmean(kl) / statistics.fmean(base) - 1
            verdicts.setdefault(_kind(change, welch_p_value(base, kl)), []).append(f"{name} ({change:+.0%})")
        words = {
            "less": f"closer to the teacher than {against} alone",
            "not told apart": "not told apart from it",
            "more": "further away",
            "untested": "one seed, so untested",
        }
        parts = [f"{text}: {', '.join(verdicts[kind])}" for kind, text in words.items() if kind in verdicts]
        if parts:
            said.append(f"- {data}, {layers} layers: " + "; ".join(parts) + ".")
    heading = f"Held-out forward KL after the same tokens, change of the mean against {against} alone:"
    return "\n".join([heading, "", *said]) if said else ""


def _kind(change: float, p: float | None) -> str:
    if p is None:
        return "untested"
    return "not told apart" if p > SURE else "more" if change > 0 else "less"


def verdict_by_question(lines: Mapping[str, Rows], against: str) -> list[str]:
    """Return the conclusions over questions as lines: differences in points of the mean over the domains."""
    base = lines.get(against, [])
    if not base:
        return []
    verdicts: dict[str, list[str]] = {}
    for method, rows in lines.items():
        if method == against or "kl" not in rows[0]:
            continue
        change, p = change_by_question(base, rows, "right")
        verdicts.setdefault(_kind(change or -1.0, p), []).append(f"{method} ({change:+.1f} points)")
    words = {
        "more": "better",
        "not told apart": "not told apart",
        "less": "worse",
        "untested": "one seed, so untested",
    }
    parts = [f"- {text}: {'; '.join(verdicts[kind])}." for kind, text in words.items() if kind in verdicts]
    return ["", f"Against {against}:", "", *parts] if parts else []


def sources(plan: Plan, rows: Rows) -> str:
    """Return what a cache costs, and what a student's own answers bring, against the base of each part."""
    said = []
    for (part, layers), here in group(rows, ["part", "layers"]).items():
        groups = compared(plan, here, "objective")
        against = plan.fields["against"][part]
        base = groups.pop(against, [])
        if not base:
            continue
        for name, own in groups.items():
            forward = _change(base, own, "after.forward_kl")
            if not values(own, "own"):
                said.append(f"- {name}, {layers} layers: {forward}; {_along(base, own)}.")
                continue
            told = [f"held-out forward KL {forward}", f"held-out reverse KL {_change(base, own, 'after.reverse_kl')}"]
            told.append(f"on own words, reverse KL {_change(base, own, 'own.reverse_kl')}")
            said.append(f"- {name} against {against}, {layers} layers: " + "; ".join(told) + ".")
        if values(base, "teacher_right"):
            ordered = compared(plan, here, "objective")
            said.append(f"- Right answers, {layers} layers: {_worth(ordered)}")
    return "\n".join(said)


def _change(base: Rows, rows: Rows, path: str) -> str:
    """Return the change of the mean, and whether it is more than the seeds' luck."""
    before = numbers(base, path)
    now = numbers(rows, path)
    p = welch_p_value(before, now)
    sure = "one seed, untested" if p is None else f"p {shown_p(p)}" + ("" if p <= SURE else ", not told apart")
    return f"{statistics.fmean(now) / statistics.fmean(before) - 1:+.1%} ({sure})"


def _along(base: Rows, rows: Rows) -> str:
    """Return at how many moments of the run the mean lies within the range of the base's seeds."""
    if len(base) < 2:
        return "one online seed, which has no range"
    many = min(len(row["curve"]) for row in (*base, *rows))
    inside = 0
    for moment in range(1, many):  # all start alike
        seeds = [row["curve"][moment]["forward_kl"] for row in base]
        mean = statistics.fmean(row["curve"][moment]["forward_kl"] for row in rows)
        inside += min(seeds) <= mean <= max(seeds)
    return f"along the run its mean lies within the range of the online seeds at {inside} of {many - 1} moments"


def _worth(groups: Mapping[str, Rows]) -> str:
    """Return whether right answers can tell students apart.

    Of n problems the shares p of two students must differ by 1.96 sqrt(2 p (1 - p) / n); where that exceeds the
    teacher's own share, no student between nothing and the teacher can be told apart.
    """
    correct, asked = next(iter(groups.values()))[0]["teacher_right"]
    share = correct / asked
    least = 1.96 * math.sqrt(2 * share * (1 - share) / asked)
    teacher = f"the teacher itself gets {correct} of {asked} right ({share:.1%})"
    if not correct:
        return f"{teacher}: they say nothing here."
    if share <= least:
        return f"{teacher}; two students must differ by {least:.1%} to be told apart: they say nothing here."
    found = ", ".join(
        f"{name} {statistics.fmean(right / of for right, of in values(rows, 'right')):.1%}"
        for name, rows in groups.items()
    )
    return f"{teacher}; {found}; differences below {least:.1%} are not told apart."


def added(plan: Plan, rows: Rows) -> str:
    """Return what the second of two methods adds to the first's right answers, seed by seed."""
    ((more, less),) = plan.fields["against"].items()
    pairs = [{row["seed"]: row["right"] for row in selected(rows, {"method": method})} for method in (more, less)]
    seeds = sorted(pairs[0].keys() & pairs[1].keys())
    if not seeds:
        return ""
    gaps = []
    for name in ("learned", "held out"):
        shares_of = [[own[seed][name].count("1") / len(own[seed][name]) for seed in seeds] for own in pairs]
        gains = [a - b for a, b in zip(*shares_of, strict=True)]
        above = f"{sum(gain > 0 for gain in gains)} of {len(gains)} seeds above 0"
        gaps.append(f"{mean_and_interval(gains)} points ({name}; {above})")
    return f"The reward adds {' and '.join(gaps)}."


def kl_and_agreement(plan: Plan, rows: Rows) -> str:
    """Return all data sets and depths in one table: held-out KL and agreement alone, the best of each in bold."""
    columns = group(rows, ["data", "layers"])
    by_objective = [
        {name: own for (name,), own in group(here, ["objective"], plan).items()} for here in columns.values()
    ]
    best = [min(_mean(own, "after.forward_kl") for own in groups.values()) for groups in by_objective]
    lines = [
        "| objective | " + " | ".join(f"{data}, {layers} layers" for data, layers in columns) + " |",
        "|---" + "|---:" * len(columns) + "|",
    ]
    for name in dict.fromkeys(name for groups in by_objective for name in groups):
        cells = [name]
        for groups, least in zip(by_objective, best, strict=True):
            own = groups.get(name, [])
            kl = numbers(own, "after.forward_kl")
            text = f"{mean_and_spread(kl)}, {_mean(own, 'after.agreement'):.0%}" if own else ""
            cells.append(f"**{text}**" if own and statistics.fmean(kl) == least else text)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


WORDS: dict[str, Callable[[Plan, Rows], str]] = {
    "tables": tables,
    "KL and agreement": kl_and_agreement,
    "changes": changes,
    "sources": sources,
    "added": added,
}


def markdown(plan: Plan, rows: Rows) -> str:
    """Return all tables of a plan and the verdict in words."""
    return _joined(plan, rows, ["tables", *([plan.fields["verdict"]] if plan.fields.get("verdict") else [])])


def overview(plan: Plan, rows: Rows) -> str:
    """Return what of them suits a first look."""
    return _joined(plan, rows, plan.fields.get("overview") or ["tables"])


def _joined(plan: Plan, rows: Rows, names: Sequence[str]) -> str:
    return "\n\n".join(filter(None, (WORDS[name](plan, rows) for name in names))) + "\n"
