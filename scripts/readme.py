"""Fill README.md's tables and its loss plot from the benchmark rows: `python -m scripts.readme [--check]`.

A table stands between two comments, the first of which says what it shows:

    <!-- rows: case=losses shape="8192 x 128256 ..." columns=ms,floor_ratio,peak_mib,error -->
    <!-- end rows -->

The study's tables and its verdict in words stand between `<!-- study -->` and `<!-- end rows -->`, those of its second
plan behind `<!-- study teachers -->`, made from the rows in scripts/study/results. Of a plan without rows the block is
empty: its first line comes with the rows too.

Of each candidate the newest row counts. Nothing in such a block is typed by hand; `--check` fails where a block
differs from what the rows give.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for _folder in (ROOT, ROOT / "kernels"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))
RESULTS = ROOT / "scripts" / "bench" / "results"
END = "<!-- end rows -->"
# by marker: the plan, and the line in front of its tables
STUDIES = {
    "<!-- study -->": (
        "objectives",
        "Which loss brings a student closest to its teacher: held-out forward KL and top-1 agreement, mean and spread "
        "over seeds, SmolLM2-135M-Instruct cut to fewer layers, equal tokens (`python -m scripts.study`):",
    ),
    "<!-- study teachers -->": (
        "teachers",
        "A teacher on disk beside the loaded one, and a second stage on the student's own words "
        "(`python -m scripts.study --plan teachers`):",
    ),
}  # fmt: skip
STUDY_RESULTS = ROOT / "scripts" / "study" / "results"
PLOT = ("linear forward_kl", "8192 x 128256, H 2048 / 4096")

HEADINGS = {
    "shape": "shape",
    "candidate": "",
    "ms": "ms",
    "floor_ratio": "x floor",
    "peak_mib": "peak MiB",
    "error": "relative error",
    "tb_per_s": "TB/s",
    "tflop_per_s": "TFLOP/s",
    "host_us": "host us",
    "tokens_per_s": "tokens/s",
    "mfu": "MFU",
    "note": "note",
}


def newest_rows(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The newest row of each (GPU, case, shape, candidate), in order of first appearance."""
    kept: dict[tuple[str, ...], dict[str, Any]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            kept[(row["gpu"], row["case"], row["shape"], row["candidate"])] = row
    return list(kept.values())


def cell(row: dict[str, Any], column: str) -> str:
    """One table cell; empty where the row has no such figure."""
    value = row.get(column)
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
        f"{value:.3f}" if isinstance(value, float) and value < 1 else f"{value:.1f}" if column == "ms" else str(value)
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
    return "\n".join([*lines, "", f"<sub>{made}, commit {newest['commit']}, {newest['date']}</sub>"])


def block(settings: str, rows: list[dict[str, Any]]) -> str:
    """The table that a `rows:` comment asks for.

    Raises:
        ValueError: no row answers to the comment.
    """
    wanted = dict(part.split("=", 1) for part in shlex.split(settings))
    columns = wanted.pop("columns").split(",")
    candidates = [name.strip() for name in wanted.pop("candidates", "").split(";") if name.strip()]
    chosen = [row for row in rows if all(str(row.get(key)) == value for key, value in wanted.items())]
    if candidates:
        chosen = [row for name in candidates for row in chosen if row["candidate"] == name]
    if not chosen:
        raise ValueError(f"README.md: no benchmark row for {settings!r}")
    return markdown(chosen, columns)


def fill(text: str, rows: list[dict[str, Any]]) -> str:
    """`text` with every `rows:` block filled from `rows`, and the study's from its own."""
    lines, inside = [], False
    for line in text.splitlines():
        if line == END:
            inside = False
        if not inside:
            lines.append(line)
        if line in STUDIES:
            inside = True
            lines += study(*STUDIES[line])
        if line.startswith("<!-- rows: "):
            inside = True
            lines += [block(line.removeprefix("<!-- rows: ").removesuffix("-->").strip(), rows)]
    return "\n".join(lines) + "\n"


def study(plan: str, title: str, folder: Path = STUDY_RESULTS) -> list[str]:
    """A plan's tables and verdict, what they were made on, and its picture; nothing where there are no rows of it."""
    from scripts.study.__main__ import plan_of
    from scripts.study.runs import finished

    rows = finished(folder, plan)
    if not rows:
        return []
    newest = max(rows, key=lambda row: row["date"])
    made = f"{newest['gpu']}, torch {newest['torch']}, commit {newest['commit']}, {newest['date']}"
    known = plan_of(plan)
    tables, picture = (STUDY_RESULTS.relative_to(ROOT) / name for name in known.names)
    where = f"every figure, with intervals and tests: [{tables.name}]({tables})"
    return [title, "", known.overview(rows), f"<sub>{made}; {where}</sub>", "", f"![quality over tokens]({picture})"]


def plot_losses(rows: list[dict[str, Any]], path: Path) -> None:
    """Time against peak memory of the fused losses, coloured by the error of dW, as an SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import LogNorm

    chosen = [row for row in rows if row["case"] == PLOT[0] and row["shape"] == PLOT[1]]
    floor = next(row["ms"] for row in chosen if "floor_ratio" in row and row["candidate"].startswith("floor"))
    chosen = [row for row in chosen if "error" in row and "peak_mib" in row]
    matplotlib.rcParams.update({"svg.hashsalt": "distill", "font.size": 10})
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    errors = [row["error"]["dW"] for row in chosen]
    dots = axes.scatter(
        [row["ms"] for row in chosen], [row["peak_mib"] for row in chosen], c=errors, s=110,
        norm=LogNorm(2e-3, 4e-2), cmap="viridis_r", edgecolors="black", zorder=3,
    )  # fmt: skip
    for row in chosen:
        ours = row["candidate"].startswith("ours")
        axes.annotate(
            row["candidate"], (row["ms"], row["peak_mib"]), xytext=(8, 6), textcoords="offset points",
            fontweight="bold" if ours else "normal",
        )  # fmt: skip
    axes.axvline(floor, color="grey", linestyle=":", label=f"the matrix products alone, {floor:.1f} ms")
    axes.set(xlabel="forward + backward, ms", ylabel="peak memory above the inputs, MiB", yscale="log")
    axes.set_xlim(floor * 0.93, max(row["ms"] for row in chosen) * 1.4)
    axes.set_title(f"Forward KL from hidden states, {PLOT[1]}, {chosen[0]['gpu']}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(loc="center right", frameon=False)
    figure.colorbar(dots, label="relative error of dW against fp64")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if README.md is not what the rows give")
    args = parser.parse_args()
    path = ROOT / "README.md"
    text = path.read_text()
    filled = fill(text, newest_rows())
    if args.check:
        if filled != text:
            print("README.md: tables differ from the benchmark rows; run python -m scripts.readme", file=sys.stderr)
        return int(filled != text)
    path.write_text(filled)
    plot_losses(newest_rows(), RESULTS / "losses.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
