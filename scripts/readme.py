"""Tables of measurements in README.md and docs/, made of rows; `python -m scripts.docs` fills them in.

A table stands between two comments, the first of which says what it shows:

    <!-- rows: case=losses shape="8192 x 128256 ..." columns=ms,floor_ratio,peak_mib,error -->
    <!-- end rows -->

The README's table of one line a claim stands after `<!-- headlines -->`, see HEADLINES. The study's tables and its
verdict in words stand between `<!-- study -->` and `<!-- end rows -->`, those of its other plans after `<!-- study
teachers -->` and the like, made from the rows in scripts/study/results. Of a plan without rows the
block is empty: its first line comes with the rows too. Of each candidate the newest row counts whose commit is known.
Nothing in such a block is typed by hand.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts" / "bench" / "results"
END = "<!-- end rows -->"
# a figure within a sentence: the comment that says whose it is, the figure, the end
FIGURE = re.compile(r"(<!-- figure: ([^>]*?) -->)[^<]*(<!-- end -->)")
GPU = "NVIDIA H200"  # whose rows are shown where a comment names no other: gpu="NVIDIA H100 80GB HBM3"
# by marker: the plan, and the line in front of its tables
STUDIES = {
    "<!-- study -->": (
        "objectives",
        "Which loss brings a student closest to its teacher: held-out forward KL and top-1 agreement, mean and spread "
        "over seeds, SmolLM2-135M-Instruct cut to fewer layers, equal tokens "
        "(`python -m scripts.study --plan objectives`):",
    ),
    "<!-- study teachers -->": (
        "teachers",
        "Training from cached teacher outputs compared with a loaded teacher, and a second, on-policy stage "
        "(`python -m scripts.study --plan teachers`):",
    ),
    "<!-- study fp8 -->": (
        "fp8",
        "SmolLM2-135M-Instruct to 15 of its layers, all evaluated against the teacher in bf16 "
        "(`python -m scripts.study --plan fp8`; fp8 also in layers that are too small to become faster):",
    ),
    "<!-- study privileged -->": (
        "privileged",
        "SmolLM2-135M-Instruct distilled from itself with privileged context, exact match on held-out questions "
        "(`python -m scripts.study --plan privileged`):",
    ),
}
# words of the study's rows, and the terms that the pages use
_TERMS = {
    "The student's own words": "Student-generated outputs",
    "teacher a running average": "EMA teacher",
    "own answers": "student-generated outputs",
    "on own words": "on student-generated outputs",
    "own words: KL": "student-generated: KL",
    "own reverse KL": "student-generated reverse KL",
    "M learned": "M tokens",
    "not told apart from it": "not significantly different",
    "not told apart": "not significant",
    "the teacher's answers": "the teacher's responses",
    "the data's answers": "the data's responses",
    "A teacher on disk": "Cached teacher outputs",
    "others as one": "bucket tail",
    "cached, drawn": "cached, sampled tail",
}
STUDY_RESULTS = ROOT / "scripts" / "study" / "results"

HEADINGS = {
    "shape": "shape",
    "candidate": "",
    "ms": "ms",
    "floor_ratio": "x lower bound",
    "peak_mib": "peak MiB",
    "error": "relative error",
    "tb_per_s": "TB/s",
    "tflop_per_s": "TFLOP/s",
    "host_us": "host us",
    "tokens_per_s": "tokens/s",
    "joules": "energy, J",
    "mfu": "MFU",
    "note": "note",
}


class Headline(NamedTuple):
    """One line of the README's table.

    Attributes:
        claim: what was measured.
        where: case and shape of the rows.
        ours: our candidate.
        rivals: those it is compared with; the best of them is shown.
        figure: the column.
        gpu: whose rows.
    """

    claim: str
    where: tuple[str, str]
    ours: str
    rivals: tuple[str, ...]
    figure: str
    gpu: str = GPU


_LOSS = ("linear forward_kl", "8192 x 128256, H 2048 / 4096")
_H100 = "NVIDIA H100 80GB HBM3"
_LOSS_RIVALS = (
    "eager, full logits",
    "torch.compile, full logits",
    *(
        f"torch.compile, chunks of {rows} rows, {bits} logits"
        for rows in ("2,048", "4,096")
        for bits in ("bf16", "fp32")
    ),
    "Liger LigerFusedLinearJSD",
    "Liger LigerFusedLinearJSDLoss, compiled",
    "Liger LigerFusedLinearKLDivLoss",
    "TRL ChunkedDivergenceFunction",
)
_EXACT = tuple(name for name in _LOSS_RIVALS if not name.endswith(("full logits", "bf16 logits", "compiled")))
_STEP = "llama-3.1-8b to llama-3.2-1b, 2 x 4096 tokens, bf16"
HEADLINES = (
    Headline("fused forward KL, forward and backward, time (H100)", _LOSS, "ours", _LOSS_RIVALS, "ms", _H100),
    Headline("the same, of losses whose gradients are as exact", _LOSS, "ours", _EXACT, "ms", _H100),
    Headline("the same, peak memory above the inputs", _LOSS, "ours", _LOSS_RIVALS, "peak_mib", _H100),
    Headline(
        "training step, 8B to 1B (H100)", ("step", _STEP), "ours", ("plain", "compile", "liger"), "tokens_per_s", _H100
    ),
    Headline(
        "the same, both models in fp8 (H200)",
        ("fp8_step", _STEP.removesuffix(", bf16")),
        "ours, fp8 teacher and student",
        ("plain", "compile", "torchao fp8 + compile"),
        "tokens_per_s",
    ),
    Headline(
        "training step, SmolLM2-135M teacher and student",
        ("small", "smollm2-135m to smollm2-135m, 8 x 1024 tokens"),
        "ours",
        ("plain", "compile: layers", "compile: layers, reduce-overhead", "compile: layers, in one graph"),
        "tokens_per_s",
    ),
    Headline(
        "on-policy step, 8B to 1B (TRL with transformers' `generate`; its vLLM engine was not run)",
        ("on_policy", "8b-to-1b, 64 prompts x 256 new tokens"),
        "ours",
        ("TRL, 16 x 4", "TRL, 64 x 1", "TRL, 16 x 4, liger", "TRL, 16 x 4, static cache"),
        "tokens_per_s",
    ),
    Headline(
        "training step, 8B to 1B, cached teacher outputs",
        ("teacher_cache", _STEP),
        "top-64 from disk",
        ("online",),
        "tokens_per_s",
    ),
    Headline(
        "AdamW, 1.24 B parameters",
        ("adamw", "1.24 B bf16, 146 tensors"),
        "ours",
        ("torch fused", "torch foreach"),
        "ms",
    ),
    Headline(
        "attention, forward and backward",
        ("attention", "B=2 H=32/8 T=4096 D=128 forward + backward"),
        "ours",
        ("SDPA FlashAttention-2", "SDPA cuDNN", "SDPA memory-efficient"),
        "ms",
    ),
    Headline(
        "generation with a 1B model, batch of 32",
        ("generate", "llama-3.2-1b, 32 prompts of 64 to 128, 128 new, bf16"),
        "ours",
        ("generate, default cache", "generate, static cache, compiled"),
        "tokens_per_s",
    ),
    Headline(
        "generation with Granite 3.3 8B, Triton kernels only",
        ("cuda_free", "granite-3.3-8b, 2 x 512 in, 256 out, bf16"),
        "Triton only",
        ("ours on cuBLAS, CUDA graph", "transformers' layers on cuBLAS, CUDA graph", "generate, eager"),
        "tokens_per_s",
    ),
)


def all_rows(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Every row that was ever measured, oldest first."""
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def newest_rows(folder: Path = RESULTS, gpu: str = "") -> list[dict[str, Any]]:
    """The newest row of each (GPU, case, shape, candidate), of one GPU or of all, in order of first appearance."""
    kept = {_key(row): row for row in all_rows(folder) if gpu in ("", row["gpu"])}
    return list(kept.values())


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return (row["gpu"], row["case"], row["shape"], row["candidate"])


def compared(line: Headline, rows: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Our row, the best rival's, and how many times better ours is (below 1: worse).

    Raises:
        ValueError: a row is missing.
    """
    here = [row for row in rows if (row["gpu"], row["case"], row["shape"]) == (line.gpu, *line.where)]
    found = {row["candidate"]: row for row in here if line.figure in row}
    if missing := {line.ours, *line.rivals} - found.keys():
        raise ValueError(f"no benchmark row of {line.where} for {sorted(missing)}")
    more = line.figure == "tokens_per_s"
    better = max if more else min
    best = better((found[name] for name in line.rivals), key=lambda row: row[line.figure])
    ours = found[line.ours]
    ratio = ours[line.figure] / best[line.figure]
    return ours, best, ratio if more else 1 / ratio


UNITS = {"ms": "ms", "peak_mib": "MiB", "tokens_per_s": "tokens/s"}


def headlines(rows: list[dict[str, Any]]) -> str:
    """The README's table: a claim a line, ours beside the best of its rivals."""
    lines = ["| | distill | best alternative measured | ratio | commit |", "|---|---:|---:|---:|---|"]
    used = []
    for line in HEADLINES:
        ours, best, ratio = compared(line, rows)
        unit, used = UNITS[line.figure], [*used, ours, best]
        commit = ours["commit"] if ours["commit"] == best["commit"] else f"{ours['commit']}, {best['commit']}"
        lines.append(
            f"| {line.claim} | {cell(ours, line.figure)} {unit} | {cell(best, line.figure)} {unit}, "
            f"{shown(best['candidate'].removesuffix(', full logits'))} | {ratio:.2f} | {commit} |"
        )
    newest = max(used, key=lambda row: row["date"])
    return "\n".join(
        [*lines, "", f"<sub>{GPU} where none is named, torch {newest['torch']}, triton {newest['triton']}</sub>"]
    )


# how a row's candidate is shown, by what its name begins with or is
_SHOWN = {
    "floor: bare products": "lower bound: the GEMMs alone",
    "floor: the student's bare products": "lower bound: the student's GEMMs alone",
    "floor: the student's products": "lower bound: the student's GEMMs",
    "floor: one teacher's bare products, 2,048 rows": "lower bound: one teacher's GEMMs, 2,048 rows",
    "floor: without dW": "lower bound: without dW",
    "online": "loaded teacher",
    "top-64 from disk": "cached top-64",
    "hidden states from disk": "cached hidden states",
    "write top-64 from disk": "writing the top-64 cache",
    "write hidden states from disk": "writing the hidden-state cache",
    "keep, first epoch": "online caching, first epoch",
    "keep, second epoch": "online caching, second epoch",
    "plain": "eager PyTorch",
    "products": "GEMMs",
    "ours, ahead": "ours, rollouts of 2 steps at once",
    "ours, ahead 3": "ours, rollouts of 4 steps at once",
    "ours, launched": "ours, without CUDA graphs",
    "ours, LoRA, launched": "ours, LoRA, without CUDA graphs",
    "ours, packed, fp32 weights, launched": "ours, packed, fp32 weights, without CUDA graphs",
}


def shown(candidate: str) -> str:
    """Return a candidate's name in the tables: rows keep the names that they were measured under."""
    return _SHOWN.get(candidate, candidate)


def cell(row: dict[str, Any], column: str) -> str:
    """One table cell; empty where the row has no such figure."""
    value = shown(row[column]) if column == "candidate" else row.get(column)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if column == "error":
        return " / ".join(f"{error:.1e}" for error in value.values())
    if column in ("peak_mib", "tokens_per_s"):
        return f"{value:,.0f}"
    if column in ("floor_ratio", "tb_per_s", "mfu"):
        return f"{value:.2f}"
    if column in ("tflop_per_s", "host_us"):
        return f"{value:.0f}"
    return (
        f"{value:.3f}"
        if isinstance(value, float) and value < 1
        else f"{value:.1f}"
        if column in ("ms", "joules")
        else str(value)
    )


def markdown(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """The rows as a Markdown table; one candidate or shape a line."""
    leading = ["candidate"] if len({row["shape"] for row in rows}) == 1 else ["shape", "candidate"]
    columns = leading + columns
    lines = ["| " + " | ".join(HEADINGS[column] for column in columns) + " |"]
    lines.append("|" + "|".join("---" if column in leading else "---:" for column in columns) + "|")
    for row in rows:
        cells = [cell(row, column) for column in columns]
        if row["candidate"].startswith("ours"):
            cells = [f"**{text}**" if text else "" for text in cells]
        lines.append("| " + " | ".join(cells) + " |")
    newest = max(rows, key=lambda row: row["date"])
    made = f"{newest['gpu']}, torch {newest['torch']}, triton {newest['triton']}, driver {newest['driver']}"
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    return "\n".join([*lines, "", f"<sub>{made}, commit {commits}, {newest['date']}</sub>"])


def block(settings: str, rows: list[dict[str, Any]]) -> str:
    """The table that a `rows:` comment asks for.

    Raises:
        ValueError: no row answers to the comment.
    """
    wanted = {"gpu": GPU} | dict(part.split("=", 1) for part in shlex.split(settings))
    columns = wanted.pop("columns").split(",")
    candidates = [name.strip() for name in wanted.pop("candidates", "").split(";") if name.strip()]
    chosen = [row for row in rows if all(str(row.get(key)) == value for key, value in wanted.items())]
    if candidates:
        chosen = [row for name in candidates for row in chosen if row["candidate"] == name]
    if not chosen:
        raise ValueError(f"no benchmark row for {settings!r}")
    return markdown(chosen, columns)


def fill(text: str, rows: list[dict[str, Any]], studies: Path = STUDY_RESULTS) -> str:
    """`text` with every block filled from `rows`, and the studies' from the rows in their folder."""
    lines, inside = [], False
    for line in text.splitlines():
        if line == END:
            inside = False
        if not inside:
            lines.append(line)
        if line in STUDIES:
            inside = True
            lines += study(*STUDIES[line], studies)
        if line == "<!-- headlines -->":
            inside = True
            lines.append(headlines(rows))
        if line.startswith("<!-- rows: "):
            inside = True
            lines += [block(line.removeprefix("<!-- rows: ").removesuffix("-->").strip(), rows)]
    return FIGURE.sub(lambda found: f"{found[1]}{figure(found[2], rows)}{found[3]}", "\n".join(lines) + "\n")


def figure(settings: str, rows: list[dict[str, Any]]) -> str:
    """Return the one value that a `figure:` comment within a sentence asks for, formatted as in the tables.

    Raises:
        ValueError: not exactly one row answers to the comment.
    """
    wanted = {"gpu": GPU} | dict(part.split("=", 1) for part in shlex.split(settings))
    column = wanted.pop("column")
    chosen = [row for row in rows if all(str(row.get(key)) == value for key, value in wanted.items())]
    if len(chosen) != 1 or column not in chosen[0]:
        raise ValueError(f"expected one benchmark row with {column} for {settings!r}, got {len(chosen)}")
    return cell(chosen[0], column)


def study(plan: str, title: str, folder: Path) -> list[str]:
    """A plan's tables and verdict, what they were made on, and its picture; nothing where there are no rows of it."""
    from scripts.study import report
    from scripts.study.planner import read_plan

    rows = report.finished(folder, plan)
    if not rows:
        return []
    newest = max(rows, key=lambda row: row["date"])
    made = f"{newest['gpu']}, torch {newest['torch']}, commit {newest['commit']}, {newest['date']}"
    known = read_plan(plan)
    tables = STUDY_RESULTS.relative_to(ROOT) / known.fields["tables"]
    picture = known.fields.get("picture", {}).get("file")
    where = f"; every figure, with intervals and tests: `{tables}`" if picture else ""
    drawn = ["", f"![quality over tokens](assets/{picture})"] if picture else []
    overview = report.overview(known, rows)
    for measured, term in _TERMS.items():
        overview = overview.replace(measured, term)
    return [title, "", overview, f"<sub>{made}{where}</sub>", *drawn]
