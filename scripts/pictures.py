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
from distill.reports.plots import new_figure, to_svg
from distill.reports.style import LIGHT, standalone
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
    title = "Fused forward KL, forward and backward"
    commits = ", ".join(sorted({row["commit"] for row in [*chosen, floor]}))
    about = (
        "8,192 tokens, vocabulary 128,256, from hidden states in bf16 of sizes 2,048 and 4,096,\n"
        f"on one {floor['gpu']}; shorter is better"
    )
    notes = (
        f"Dashed: the matrix products alone, {floor['ms']:.1f} ms. Commit {commits}.\n"
        "Memory: peak above the inputs. Error: gradients' against fp64."
    )
    with new_figure(6.4, 3.4) as figure:
        figure.suptitle(f"{title}\n", x=0.01, ha="left", fontweight="bold")
        figure.text(0.01, 0.925, about, va="top", fontsize=9, color=LIGHT["quiet"])
        figure.supxlabel(notes, x=0.01, ha="left", fontsize=9, color=LIGHT["quiet"])
        for axes, column in zip(figure.subplots(1, len(columns), sharey=True), columns, strict=True):
            colors = [LIGHT["series-0"], *[LIGHT["rest"]] * (len(chosen) - 1)]
            bars = axes.barh(list(CANDIDATES.values()), column.values, height=0.68, color=colors)
            axes.bar_label(bars, [f"{value:.{column.places}f}" for value in column.values], padding=4)
            axes.set(xlim=(0, 1.35 * max(column.values)), xticks=[])
            axes.set_title(f"\n\n{column.heading}", fontsize=9, color=LIGHT["quiet"])
            axes.grid(False)
            axes.spines["bottom"].set_visible(False)
            axes.tick_params(axis="y", labelcolor=LIGHT["ink"])
            if column is columns[0]:
                axes.invert_yaxis()
                axes.axvline(floor["ms"], color=LIGHT["ink"], lw=1.2, ls="--")
        return standalone(to_svg(figure, title), theme)


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
