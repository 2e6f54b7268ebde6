"""`python -m scripts.study.rewards`: does a reward beside the teacher help? Sums and differences of small numbers.

    python -m scripts.study.rewards --out scripts/study/results --work FOLDER             all that has no row yet
    python -m scripts.study.rewards --out scripts/study/results --work FOLDER --most 1    one run of it

SmolLM2-135M-Instruct learns `17 + 5 =` from itself after three worked examples, on its own answers: by the reverse KL
alone, and by the reverse KL and a reward of 1 for each right answer; equal steps, prompts and draws of the first step.
Judged by the right greedy answers to the 200 prompts that it learned and to 200 others. Each run adds a row to
<gpu>-rewards.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distill.core.files import write_text

PLAN = "rewards"
RECIPE = Path(__file__).parent / "rewards.yaml"
BEFORE, INFORMED, ALONE, REWARDED = "before training", "the teacher", "reverse KL", "reverse KL + reward"
REWARD = f"{{type: policy_gradient, reward: '{Path(__file__)}:right', teacher_weight: 0}}"
METHODS = {ALONE: "loss.terms=[{type: reverse_kl}]", REWARDED: f"loss.terms=[{{type: reverse_kl}}, {REWARD}]"}
COUNT = 200  # prompts to learn, and as many held out
LONGEST = 4  # tokens of an answer
SHOTS = "7 + 6 = 13\n19 - 4 = 15\n12 + 9 = 21"


def right(prompt: object, answer: str, row: Mapping[str, object]) -> float:
    """The reward: 1 for an answer that begins with the right number."""
    found = re.match(r"\s*(-?\d+)", answer)
    return float(found is not None and found[1] == row["right"])


def rows_of() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows to learn and rows held out, the same in every process; no prompt is of both, or of the examples."""
    draw, found = random.Random("rewards"), dict[str, dict[str, str]]()
    shown = {line.partition(" =")[0] for line in SHOTS.splitlines()}
    while len(found) < 2 * COUNT:
        a, b, sign = draw.randint(2, 30), draw.randint(2, 30), draw.choice("+-")
        a, b = (a, b) if sign == "+" else (max(a, b), min(a, b))
        value, text = str(a + b if sign == "+" else a - b), f"{a} {sign} {b}"
        if text not in shown:
            found[text] = {"prompt": f"{text} =", "completion": f" {value}", "right": value, "shots": SHOTS}
    rows = list(found.values())
    return rows[:COUNT], rows[COUNT:]


def judged(model: Any, tokenizer: Any, before: str = "") -> dict[str, str]:
    """A 1 or a 0 for the greedy answer to each prompt, learned and held out."""
    from scripts.study.privileged import answers

    found = {}
    for name, rows in zip(("learned", "held out"), rows_of(), strict=True):
        said = answers(model, tokenizer, [before + row["prompt"] for row in rows], LONGEST)
        found[name] = "".join(str(int(right("", text, row))) for text, row in zip(said, rows, strict=True))
    return found


def prepare(folder: Path) -> None:
    """The rows, and the model as a folder."""
    import torch

    from distill.models.loading import load_student, load_tokenizer
    from distill.recipe import load

    for name, rows in zip(("train", "held-out"), rows_of(), strict=True):
        write_text(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    if not (folder / "base" / "config.json").is_file():
        section = load(RECIPE).student
        load_student(section, device=torch.device("cpu"), dtype=torch.float32).save_pretrained(folder / "base")
        load_tokenizer(section).save_pretrained(folder / "base")


def run_one(method: str, seed: int, folder: Path, more: Sequence[str]) -> dict[str, Any]:
    """Train a student and judge it; the models before training are judged as they are."""
    from distill.commands.arguments import plugin_override
    from distill.recipe import load
    from distill.run import run
    from distill.training.progress import read_metrics
    from scripts.study.privileged import load_model

    if method in (BEFORE, INFORMED):
        return {"right": judged(*load_model(folder / "base", "cpu"), f"{SHOTS}\n\n" if method == INFORMED else "")}
    file = Path(__file__) if method == REWARDED else None
    recipe = load(
        RECIPE,
        [
            f"data.source={folder}/train.jsonl",
            f"data.validation.source={folder}/held-out.jsonl",
            f"student.model={folder}/base",
            "student.config=null",
            f"train.seed={seed}",
            f"output_dir={folder}/runs",
            METHODS[method],
            *plugin_override(file),
            *more,
        ],
    )
    name = f"{list(METHODS).index(method)}-{seed}"
    shutil.rmtree(folder / "runs" / name, ignore_errors=True)
    result = run(recipe, name=name, plugin=file)
    names = ("reward", "reward_zero_std", "kl", "rollout_length")
    curve = [
        {key: row[key] for key in ("step", *names) if key in row}
        for row in read_metrics(result.folder / "metrics.jsonl")
    ]
    found = {"right": judged(*load_model(result.folder / "student", "cpu")), "steps": result.steps, "curve": curve}
    shutil.rmtree(result.folder)
    return found


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Shares of right answers: means over seeds with Student's 95 % interval, and the difference of the methods."""
    from scripts.study.privileged_verdict import mean_and_interval, shares

    lines = ["| | seeds | prompts learned, % right | held-out prompts, % right |", "|---|---:|---:|---:|"]
    by_method = {method: [row for row in rows if row["method"] == method] for method in (BEFORE, INFORMED, *METHODS)}
    for method, own in by_method.items():
        if own:
            cells = [mean_and_interval(shares(own, name)) for name in ("learned", "held out")]
            lines.append(f"| {method} | {len(own)} | {' | '.join(cells)} |")
    pairs = [by_method[method] for method in (REWARDED, ALONE)]
    seeds = sorted({row["seed"] for row in pairs[0]} & {row["seed"] for row in pairs[1]})
    if seeds:
        ordered = [[next(row for row in own if row["seed"] == seed) for seed in seeds] for own in pairs]
        gaps = []
        for name in ("learned", "held out"):
            more = [a - b for a, b in zip(*(shares(own, name) for own in ordered), strict=True)]
            above = f"{sum(gap > 0 for gap in more)} of {len(more)} seeds above 0"
            gaps.append(f"{mean_and_interval(more)} points ({name}; {above})")
        lines += ["", f"The reward adds {' and '.join(gaps)}."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Make the rows that are missing, and say what they come to."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study.rewards",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of rows")
    parser.add_argument("--work", type=Path, required=True, help="folder of data and models")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--most", type=int, default=None, help="make no more rows than this")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="recipe settings of every run")
    args = parser.parse_args()
    from scripts.bench.harness import environment
    from scripts.study.runs import finished

    facts = environment()
    path = args.out / (facts["gpu"].replace(" ", "-").lower() + f"-{PLAN}.jsonl")
    done = {(row["method"], row["seed"]) for row in finished(args.out, PLAN)}
    wanted = [(BEFORE, 0), (INFORMED, 0), *((method, seed) for seed in range(args.seeds) for method in METHODS)]
    waiting = [each for each in wanted if each not in done]
    if waiting:
        args.work.mkdir(parents=True, exist_ok=True)
        prepare(args.work)
    for method, seed in waiting[: args.most]:
        row = {
            "plan": PLAN,
            "method": method,
            "seed": seed,
            "settings": args.set,
            **run_one(method, seed, args.work, args.set),
        }
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | facts) + "\n")
        print(f"{method}, seed {seed}: {statistics.fmean(map(int, row['right']['held out'])):.1%} held out", flush=True)
    print(markdown(finished(args.out, PLAN)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
