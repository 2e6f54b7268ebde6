"""Report of the rows: a table for each data set and depth, the spread over seeds, significant differences.

Welch's t-test (1947) over seeds on the held-out forward KL, against training on the hard labels alone and against plain
forward KL. With one seed there is no spread and no test, and the table says so. The interval of a cell is the widest
that its seeds' bootstrap intervals span: what the choice of the held-out rows alone leaves open.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from distill.reports.compare_runs import mean_and_spread, welch_p_value
from scripts.study.plan import BASELINE, KNOWN

Rows = Sequence[Mapping[str, Any]]
PLAIN = "forward KL"
SURE = 0.05


def settings_of(rows: Rows) -> list[tuple[str, int]]:
    """Data sets and depths there are rows of, in order of first appearance."""
    return list(dict.fromkeys((row["data"], row["layers"]) for row in rows))


def by_objective(rows: Rows, data: str, layers: int) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of one data set and depth by objective, the plan's first and in its order."""
    here = [row for row in rows if (row["data"], row["layers"]) == (data, layers)]
    names = list(dict.fromkeys(row["objective"] for row in here))
    order = list(KNOWN)
    names.sort(key=lambda name: order.index(name) if name in order else len(order))
    return {name: [row for row in here if row["objective"] == name] for name in names}


def after(rows: Rows, name: str) -> list[float]:
    """One figure of each run after training."""
    return [row["after"][name][0] for row in rows]


def table(rows: Rows, data: str, layers: int) -> str:
    """One data set and depth as a Markdown table."""
    groups = by_objective(rows, data, layers)
    first = next(iter(groups.values()))[0]
    base, plain = (after(groups.get(name, []), "forward_kl") for name in (BASELINE, PLAIN))
    lines = [
        f"**{data}, {layers} layers** ({first['tokens'] / 1e6:.2g} M tokens; before training KL "
        f"{first['before']['forward_kl']:.3f}, agreement {first['before']['agreement']:.1%}, perplexity "
        f"{_perplexity(first['before']['student_cross_entropy'])}; teacher "
        f"{_perplexity(first['before']['teacher_cross_entropy'])})",
        "",
        "| objective | seeds | KL to teacher | 95 % of rows | reverse KL | agreement | perplexity | KL reduction "
        f"| p, {BASELINE} | p, {PLAIN} |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    best = min(statistics.fmean(after(group, "forward_kl")) for group in groups.values())
    for name, group in groups.items():
        kl = after(group, "forward_kl")
        low = min(row["after"]["forward_kl"][1] for row in group)
        high = max(row["after"]["forward_kl"][2] for row in group)
        cells = [
            name,
            str(len(group)),
            mean_and_spread(kl),
            f"{low:.3f} to {high:.3f}",
            f"{statistics.fmean(after(group, 'reverse_kl')):.3f}",
            f"{statistics.fmean(after(group, 'agreement')):.1%}",
            _perplexity(statistics.fmean(after(group, "student_cross_entropy"))),
            f"{statistics.fmean(row['gap_closed'][0] for row in group):.1%}",
            "" if name == BASELINE else shown_p(welch_p_value(base, kl)),
            "" if name == PLAIN else shown_p(welch_p_value(plain, kl)),
        ]
        if statistics.fmean(kl) == best:
            cells = [f"**{cell}**" if cell else "" for cell in cells]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def overview(rows: Rows) -> str:
    """All data sets and depths in one table, held-out KL and agreement alone, and the verdict in words."""
    places = [(data, layers) for data, layers in settings_of(rows)]
    columns = [by_objective(rows, *place) for place in places]
    lines = [
        "| objective | " + " | ".join(f"{data}, {layers} layers" for data, layers in places) + " |",
        "|---" + "|---:" * len(places) + "|",
    ]
    best = [min(statistics.fmean(after(group, "forward_kl")) for group in groups.values()) for groups in columns]
    for name in dict.fromkeys(name for groups in columns for name in groups):
        cells = [name]
        for groups, least in zip(columns, best, strict=True):
            group = groups.get(name)
            if group is None:
                cells.append("")
                continue
            kl = after(group, "forward_kl")
            cell = f"{mean_and_spread(kl)}, {statistics.fmean(after(group, 'agreement')):.0%}"
            cells.append(f"**{cell}**" if statistics.fmean(kl) == least else cell)
        lines.append("| " + " | ".join(cells) + " |")
    words = sentences(rows)
    told = [
        "",
        "Held-out forward KL after the same tokens, change of the mean against cross-entropy alone:",
        "",
        *words,
    ]
    return "\n".join([*lines, *(told if words else [])]) + "\n"


def _perplexity(cross_entropy: float) -> str:
    return f"{math.exp(cross_entropy):,.2f}" if cross_entropy < 700 else "inf"


def shown_p(value: float | None) -> str:
    """A p-value in a table."""
    return "one seed" if value is None else f"{value:.3f}" if value >= 0.001 else "< 0.001"


def sentences(rows: Rows) -> list[str]:
    """Return the conclusions as sentences, by the held-out forward KL."""
    said = []
    for data, layers in settings_of(rows):
        groups = by_objective(rows, data, layers)
        if BASELINE not in groups:
            continue
        base = after(groups[BASELINE], "forward_kl")
        verdicts: dict[str, list[str]] = {"closer": [], "no different": [], "further": [], "untested": []}
        for name, group in groups.items():
            if name not in KNOWN or name == BASELINE:
                continue
            kl = after(group, "forward_kl")
            change = statistics.fmean(kl) / statistics.fmean(base) - 1
            p = welch_p_value(base, kl)
            kind = "untested" if p is None else "no different" if p > SURE else "closer" if change < 0 else "further"
            verdicts[kind].append(f"{name} ({change:+.0%})")
        words = {
            "closer": "closer to the teacher than cross-entropy alone",
            "no different": "not told apart from it",
            "further": "further away",
            "untested": "one seed, so untested",
        }
        parts = [f"{words[kind]}: {', '.join(names)}" for kind, names in verdicts.items() if names]
        if parts:
            said.append(f"- {data}, {layers} layers: " + "; ".join(parts) + ".")
    return said


def markdown(rows: Rows) -> str:
    """All tables and the verdict in words."""
    parts = [table(rows, data, layers) for data, layers in settings_of(rows)]
    words = sentences(rows)
    if words:
        parts.append("Held-out forward KL after the same tokens, change of the mean against cross-entropy alone:\n")
        parts[-1] += "\n" + "\n".join(words)
    return "\n\n".join(parts) + "\n"
