"""Pictures of README and tutorial, for light and dark, from rows in the repository: `python -m scripts.pictures`.

    docs/assets/losses-{light,dark}.svg       bars, from scripts/bench/results/*.jsonl
    docs/assets/tutorial-{light,dark}.svg     curves, from docs/assets/tutorial.jsonl

`--run runs/first` takes that run's metrics.jsonl into the repository first. In Markdown:

    <picture>
      <source media="(prefers-color-scheme: dark)" srcset="docs/assets/losses-dark.svg">
      <img alt="..." src="docs/assets/losses-light.svg">
    </picture>
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distill.core.files import write_text
from distill.reports.curves import draw_curves
from distill.reports.svg_plot import label, standalone
from distill.training.progress import read_metrics
from scripts.readme import GPU, ROOT, newest_rows

ASSETS = ROOT / "docs" / "assets"
THEMES = ("light", "dark")
CASE, SHAPE = "linear forward_kl", "8192 x 128256, H 2048 / 4096"
FLOOR = "floor: bare products"
# names of rows, and what the picture calls them
CANDIDATES = {
    "ours": "ours",
    "torch.compile, full logits": "torch.compile",
    "eager, full logits": "eager",
    "TRL ChunkedDivergenceFunction": "TRL",
    "Liger LigerFusedLinearJSD": "Liger",
}
WIDTH, FONT, PITCH, EDGE, NAMES = 560, 16, 30, 20, 122


class Column(NamedTuple):
    """One figure of all candidates: its heading, the figure of each in order, and decimals."""

    heading: str
    values: Sequence[float]
    places: int = 1


def losses(rows: Sequence[Mapping[str, Any]], theme: str) -> str:
    """Time, memory and error of a fused loss and its rivals as bars.

    Args:
        rows: Benchmark rows, one of each candidate.
        theme: `light` or `dark`.

    Returns: an SVG file.

    Raises:
        KeyError: a candidate has no row.
    """
    by_name = {row["candidate"]: row for row in rows if (row["case"], row["shape"]) == (CASE, SHAPE)}
    chosen, floor = [by_name[name] for name in CANDIDATES], by_name[FLOOR]
    columns = [
        Column("time, ms", [row["ms"] for row in chosen]),
        Column("memory, GiB", [row["peak_mib"] / 1024 for row in chosen]),
        Column("error, %", [100 * max(row["error"].values()) for row in chosen], 2),
    ]
    title, top = "Fused forward KL, forward and backward", 126.0
    about = (
        "8,192 tokens, vocabulary 128,256, from hidden states in bf16",
        f"of sizes 2,048 and 4,096, on one {floor['gpu']}; shorter is better",
    )
    parts = [label(EDGE, 34, title, "start", "title")]
    parts += [label(EDGE, 58 + 20 * number, line, "start", "note") for number, line in enumerate(about)]
    for number, name in enumerate(CANDIDATES.values()):
        kind = "name strong" if name == "ours" else "name"
        parts.append(label(EDGE, top + number * PITCH + 15, name, "start", kind))
    wide = (WIDTH - 2 * EDGE - NAMES) / len(columns)
    for number, column in enumerate(columns):
        left = EDGE + NAMES + number * wide
        parts.append(label(left, top - 12, column.heading, "start", "note"))
        longest = wide - 20 - 0.58 * FONT * len(f"{max(column.values):.{column.places}f}")
        for line, value in enumerate(column.values):
            y, length = top + line * PITCH, longest * value / max(column.values)
            kind = "ours" if line == 0 else "rest"
            parts.append(f'<rect class="{kind}" x="{left:.1f}" y="{y:.1f}" width="{length:.1f}" height="20" rx="2"/>')
            shown = "name strong" if line == 0 else "name"
            parts.append(label(left + length + 6, y + 15, f"{value:.{column.places}f}", "start", shown))
        if number == 0:
            x = left + longest * floor["ms"] / max(column.values)
            end = top + len(CANDIDATES) * PITCH - 8
            parts.append(f'<path class="floor" d="M{x:.1f} {top - 6:.1f}V{end:.1f}"/>')
    below = top + len(CANDIDATES) * PITCH + 16
    commits = ", ".join(sorted({row["commit"] for row in [*chosen, floor]}))
    notes = (
        f"Dashed: the matrix products alone, {floor['ms']:.1f} ms. Commit {commits}.",
        "Memory: peak above the inputs. Error: gradients' against fp64.",
    )
    parts += [label(EDGE, below + 20 * number, note, "start", "note") for number, note in enumerate(notes)]
    return standalone("".join(parts), WIDTH, below + 38, title, FONT, theme)


def draw(assets: Path = ASSETS) -> None:
    """Write all pictures to a folder, from the rows in the repository."""
    for theme in THEMES:
        write_text(assets / f"losses-{theme}.svg", losses(newest_rows(gpu=GPU), theme))
        metrics = read_metrics(ASSETS / "tutorial.jsonl")
        draw_curves(metrics, assets / f"tutorial-{theme}.svg", "first", keys=("kl", "agreement"), theme=theme)


def main() -> None:
    """Draw the pictures of the documentation."""
    parser = argparse.ArgumentParser(prog="python -m scripts.pictures", description=__doc__)
    parser.add_argument("--run", type=Path, help="folder of the tutorial's run, whose metrics are taken")
    run = parser.parse_args().run
    if run is not None:
        shutil.copyfile(run / "metrics.jsonl", ASSETS / "tutorial.jsonl")
    draw()


if __name__ == "__main__":
    main()
