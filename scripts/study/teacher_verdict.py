"""Report of the second plan's rows: a table for each part and depth, with conclusions as sentences.

Welch's t-test (1947) over seeds; with one seed there is none. Whether right answers can tell students apart is decided
by figures too: of n problems the shares p of two students must differ by 1.96 sqrt(2 p (1 - p) / n) to be told apart,
and where that exceeds the teacher's own share, no student between nothing and the teacher can be.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distill.reports.compare_runs import mean_and_spread, welch_p_value
from scripts.study.teachers import BASES, CACHE, NAMES, OWN
from scripts.study.verdict import SURE, after, shown_p

Rows = Sequence[Mapping[str, Any]]
Groups = dict[str, list[Mapping[str, Any]]]


def groups_of(rows: Rows, part: str, layers: int) -> Groups:
    """The rows of a part and depth by what is compared, in the plan's order."""
    here = [row for row in rows if (row["part"], row["layers"]) == (part, layers)]
    found = {name: [row for row in here if row["objective"] == name] for name in NAMES[part]}
    return {name: group for name, group in found.items() if group}


def places_of(rows: Rows) -> list[tuple[str, int]]:
    """Parts and depths there are rows of, the plan's first part first."""
    found = {(row["part"], row["layers"]) for row in rows}
    return sorted(found, key=lambda place: (list(NAMES).index(place[0]), place[1]))


def own(rows: Rows, name: str) -> list[float]:
    """One figure of each run on the student's own words."""
    return [row["own"][name][0] for row in rows]


def _mean(values: Sequence[float], form: str) -> str:
    return format(statistics.fmean(values), form)


def _base(groups: Groups, part: str) -> list[Mapping[str, Any]]:
    return groups.get(BASES[part], [])


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [title, "", "| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows)])


def cache_table(groups: Groups, layers: int) -> str:
    """The first part: a cached teacher beside the loaded one."""
    first = next(iter(groups.values()))[0]
    title = (
        f"**A teacher on disk, {layers} layers** ({first['tokens'] / 1e6:.2g} M tokens each; before training KL "
        f"{first['before']['forward_kl']:.3f}; all judged against the loaded teacher)"
    )
    base = after(_base(groups, CACHE), "forward_kl")
    rows = [
        [
            name,
            str(len(group)),
            mean_and_spread(after(group, "forward_kl")),
            _mean(after(group, "reverse_kl"), ".3f"),
            _mean(after(group, "agreement"), ".1%"),
            _mean([row["gap_closed"][0] for row in group], ".1%"),
            _mean([row["tokens_per_s"] for row in group], ",.0f"),
            "" if name == BASES[CACHE] else shown_p(welch_p_value(base, after(group, "forward_kl"))),
        ]
        for name, group in groups.items()
    ]
    heads = ["teacher", "seeds", "KL to teacher", "reverse KL", "agreement", "KL reduction", "tokens/s", "p, online"]
    return _table(title, heads, rows)


def own_table(groups: Groups, layers: int) -> str:
    """The second part: the data's answers or the student's own in a second stage."""
    everyone = [row for group in groups.values() for row in group]
    first = everyone[0]
    title = (
        f"**The student's own words, {layers} layers** (second stage of {first['tokens'] / 1e6:.2g} M tokens after "
        f"the same first one, where held-out KL was {_mean([row['before']['forward_kl'] for row in everyone], '.3f')})"
    )
    base = _base(groups, OWN)
    rows = [
        [
            name,
            str(len(group)),
            *(mean_and_spread(after(group, f"{way}_kl")) for way in ("forward", "reverse")),
            *(mean_and_spread(own(group, f"{way}_kl")) for way in ("forward", "reverse")),
            f"{sum(row['right'][0] for row in group)} of {sum(row['right'][1] for row in group)}",
            _mean([row["learned_tokens"] / 1e6 for row in group], ".2f"),
            "" if name == BASES[OWN] else shown_p(welch_p_value(own(base, "reverse_kl"), own(group, "reverse_kl"))),
        ]
        for name, group in groups.items()
    ]
    heads = [
        "second stage",
        "seeds",
        "held out: KL",
        "reverse KL",
        "own words: KL",
        "reverse KL",
        "right",
        "M learned",
        "p, own reverse KL",
    ]
    return _table(title, heads, rows)


def sentences(rows: Rows) -> list[str]:
    """Return the conclusions that the rows support, as sentences."""
    said = []
    for part, layers in places_of(rows):
        groups = groups_of(rows, part, layers)
        base = _base(groups, part)
        if not base:
            continue
        others = {name: group for name, group in groups.items() if name != BASES[part]}
        if part == CACHE:
            said += [
                f"- {name}, {layers} layers: {_change(after, 'forward_kl', base, group)}; {_along(base, group)}."
                for name, group in others.items()
            ]
            continue
        for name, group in others.items():
            told = [
                f"held-out {way} KL {_change(after, f'{way}_kl', base, group)}" for way in ("forward", "reverse")
            ] + [f"on own words, reverse KL {_change(own, 'reverse_kl', base, group)}"]
            said.append(f"- {name} against {BASES[part]}, {layers} layers: " + "; ".join(told) + ".")
        said.append(f"- Right answers, {layers} layers: {_worth(groups)}")
    return said


def _change(
    figure: Callable[[Rows, str], list[float]], name: str, base: Rows, group: Rows
) -> str:  # the mean's, and whether it is more than the seeds' luck
    before, now = figure(base, name), figure(group, name)
    p = welch_p_value(before, now)
    sure = "one seed, untested" if p is None else f"p {shown_p(p)}" + ("" if p <= SURE else ", not told apart")
    return f"{statistics.fmean(now) / statistics.fmean(before) - 1:+.1%} ({sure})"


def _along(base: Rows, group: Rows) -> str:
    """At how many moments of the run the mean lies within the range of the base's seeds."""
    if len(base) < 2:
        return "one online seed, which has no range"
    many = min(len(row["curve"]) for row in (*base, *group))
    inside = 0
    for moment in range(1, many):  # all start alike
        seeds = [row["curve"][moment]["forward_kl"] for row in base]
        mean = statistics.fmean(row["curve"][moment]["forward_kl"] for row in group)
        inside += min(seeds) <= mean <= max(seeds)
    return f"along the run its mean lies within the range of the online seeds at {inside} of {many - 1} moments"


def _worth(groups: Groups) -> str:
    """Return whether the share of correct answers is informative, given the teacher's own."""
    correct, asked = next(iter(groups.values()))[0]["teacher_right"]
    share = correct / asked
    least = 1.96 * math.sqrt(2 * share * (1 - share) / asked)
    teacher = f"the teacher itself gets {correct} of {asked} right ({share:.1%})"
    if not correct:
        return f"{teacher}: they say nothing here."
    if share <= least:
        return f"{teacher}; two students must differ by {least:.1%} to be told apart: they say nothing here."
    found = ", ".join(
        f"{name} {statistics.fmean(row['right'][0] / row['right'][1] for row in group):.1%}"
        for name, group in groups.items()
    )
    return f"{teacher}; {found}; differences below {least:.1%} are not told apart."


def draw(rows: Rows, path: Path) -> None:
    """Write the picture: held-out KL along the runs, of the second part both ways over the second stage."""
    from scripts.study.plot import Panel, draw_panels

    panels = []
    for part, layers in places_of(rows):
        groups = groups_of(rows, part, layers)
        for figure in ("forward_kl",) if part == CACHE else ("forward_kl", "reverse_kl"):
            panels.append(Panel(f"{part}, {layers} layers: {figure.replace('_kl', ' KL')}", groups, figure))
    draw_panels(panels, [name for names in NAMES.values() for name in names], path)


def markdown(rows: Rows) -> str:
    """All tables and the verdict in words."""
    parts = []
    for part, layers in places_of(rows):
        table = cache_table if part == CACHE else own_table
        parts.append(table(groups_of(rows, part, layers), layers))
    if words := sentences(rows):
        parts.append("\n".join(words))
    return "\n\n".join(parts) + "\n"
