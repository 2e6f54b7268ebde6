"""Tables of the study of context distillation: exact answers to held-out questions, with confidence intervals.

A cell is the mean over seeds with Student's 95 % interval of it (of one seed without), and beside it the interval that
the choice of the held-out questions leaves: questions are drawn anew, the same ones for all seeds. Two methods are told
apart by their answers to the same questions, each the mean over seeds: signs of the differences are drawn anew. (A test
over seeds alone, of which there are few, calls two seeds that happen to agree certain.)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distill.evaluation.bootstrap import mean_intervals
from scripts.study.privileged_plan import runs
from scripts.study.verdict import SURE, shown_p

Rows = Sequence[Mapping[str, Any]]
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's quantile by degrees of freedom
DRAWS = 10_000
COMPARED = {  # of each part the method that the others are tested against
    "few-shot prompt": "cross-entropy, the teacher's answers",
    "worked solutions": "cross-entropy, the solutions",
    "two teachers": "one teacher tuned on both",
    "two prompts": "one prompt with half of each",
}


def shares(rows: Rows, domain: str) -> list[float]:
    """Share of right answers of each row, in the order of the rows."""
    return [row["right"][domain].count("1") / len(row["right"][domain]) for row in rows]


def mean_and_interval(values: Sequence[float]) -> str:
    """The mean in per cent, of several values with half of Student's 95 % interval."""
    mean = f"{100 * statistics.fmean(values):.1f}"
    if len(values) < 2:
        return mean
    half = T_975[min(len(values) - 2, len(T_975) - 1)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean} ± {100 * half:.1f}"


def _right(rows: Rows, domain: str) -> NDArray[np.float64]:
    """Return the share of the rows' seeds that answered each question correctly."""
    return np.array([[int(bit) for bit in row["right"][domain]] for row in rows], dtype=np.float64).mean(0)


def of_questions(rows: Rows, domain: str) -> str:
    """Return the half-width in per cent of the mean's 95 % interval over the choice of questions."""
    right = _right(rows, domain)
    (found,) = mean_intervals(right[:, None], np.ones(len(right)))
    return f"{100 * found.low:.0f} to {100 * found.high:.0f}"


def table(rows: Rows, part: str, task: str) -> str:
    """One task of one part as a Markdown table, in the order of the plan."""
    here = [row for row in rows if (row["part"], row["task"]) == (part, task)]
    whole = [row for row in here if "error" not in row]
    if not whole:
        return ""
    domains = list(whole[0]["right"])
    questions = ", ".join(f"{len(whole[0]['right'][domain])} of {domain}" for domain in domains)
    groups: dict[str, list[Mapping[str, Any]]] = {}
    order = ["", *dict.fromkeys(run.method for run in runs(1))]
    for row in sorted(
        whole, key=lambda row: (order.index(row["method"]) if row["method"] in order else 0, row["seed"])
    ):
        groups.setdefault(row["method"], []).append(row)
    against = COMPARED[part]
    base = groups.get(against, [])
    heads = [f"{domain}, % exact | 95 % of questions" for domain in domains]
    lines = [
        f"**{part}: {task}** (held out: {questions})",
        "",
        f"| method | seeds | {' | '.join(heads)} | KL to its teacher | p, by question, against {against} |",
        "|---|---:|" + "---:|---:|" * len(domains) + "---:|---:|",
    ]
    for method, group in groups.items():
        cells = [method, str(len(group))]
        for domain in domains:
            cells += [mean_and_interval(shares(group, domain)), of_questions(group, domain)]
        trained = [row["kl"] for row in group if "kl" in row]
        moved = f"{trained[0][0]:.2f} to {statistics.fmean(kl[1] for kl in trained):.2f}" if trained else ""
        cells += [moved, shown_p(_change(base, group)[1]) if base and trained and method != against else ""]
        lines.append("| " + " | ".join(cells) + " |")
    broken = [f"{row['method']}, seed {row['seed']}: {row['error']}" for row in here if "error" in row]
    lines += sentences(groups, against) + (["", "No row: " + "; ".join(broken)] if broken else [])
    return "\n".join(lines)


def _change(base: Rows, group: Rows) -> tuple[float, float | None]:
    """Difference of the mean shares over the domains in points, and how likely by chance (None: one seed)."""
    domains = list(base[0]["right"])
    weighed = [(_right(group, domain) - _right(base, domain)) for domain in domains]
    parts = np.concatenate([each / len(each) / len(domains) for each in weighed])
    change = float(parts.sum())
    if min(len(base), len(group)) < 2:
        return 100 * change, None
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (DRAWS, len(parts)))
    return 100 * change, float(((np.abs(signs @ parts) >= abs(change) - 1e-12).sum() + 1) / (DRAWS + 1))


def sentences(groups: Mapping[str, Rows], against: str) -> list[str]:
    """Return the conclusions as sentences: differences in points of the mean over the domains."""
    base = groups.get(against, [])
    if not base:
        return []
    verdicts: dict[str, list[str]] = {"better": [], "not told apart": [], "worse": [], "one seed, so untested": []}
    for method, group in groups.items():
        if method == against or "kl" not in group[0]:
            continue
        change, p = _change(base, group)
        kind = "not told apart" if p is not None and p > SURE else "better" if change > 0 else "worse"
        verdicts["one seed, so untested" if p is None else kind].append(f"{method} ({change:+.1f} points)")
    parts = [f"{kind}: {'; '.join(names)}" for kind, names in verdicts.items() if names]
    return ["", f"Against {against}:", "", *(f"- {part}." for part in parts)] if parts else []


def markdown(rows: Rows) -> str:
    """All tables."""
    places = dict.fromkeys((row["part"], row["task"]) for row in rows)
    return "\n\n".join(filter(None, (table(rows, *place) for place in places))) + "\n"
