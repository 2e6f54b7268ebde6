"""`python -m scripts.study`: train all configurations, judge them, say what helps.

    python -m scripts.study --data gsm8k_train.jsonl --out scripts/study/results --device cuda
    python -m scripts.study --data gsm8k_train.jsonl --out /tmp/study --quick       the whole path, tiny, on a CPU
    python -m scripts.study --out scripts/study/results --only-verdict              tables and plot from the rows

A configuration whose row is in FOLDER is not run again: stopped at any moment, the same command goes on. FOLDER gets
<gpu>.jsonl (a row a run), verdict.md and study.svg.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "kernels"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def arguments(given: list[str] | None) -> argparse.Namespace:
    """What was asked for."""
    from scripts.study.plan import KNOWN, OBJECTIVES

    parser = argparse.ArgumentParser(
        prog="python -m scripts.study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="GSM8K's training split, jsonl of question and answer")
    parser.add_argument("--out", type=Path, required=True, help="folder of rows, tables and plot")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--quick", action="store_true", help="one depth, one seed, two steps: does the path work?")
    parser.add_argument("--minutes", type=float, default=None, help="start no run that would end later than this")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs="+", default=[10, 15])
    parser.add_argument("--objectives", nargs="+", default=list(OBJECTIVES), metavar="NAME", help=", ".join(KNOWN))
    parser.add_argument("--sources", nargs="+", choices=("gsm8k", "python-stdlib"), default=["gsm8k", "python-stdlib"])
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="recipe settings of every run")
    parser.add_argument("--no-rates", action="store_true", help="leave out the runs at other learning rates")
    parser.add_argument("--only-verdict", action="store_true", help="train nothing")
    return parser.parse_args(given)


def sources(args: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Recipe settings of each data set.

    Raises:
        ValueError: GSM8K is wanted and its file is not there.
    """
    known = {
        "gsm8k": (f"data.source={args.data}", "data.fields={prompt: question, completion: answer}"),
        "python-stdlib": ("data.source=python-stdlib",),
    }
    if "gsm8k" in args.sources and (args.data is None or not args.data.is_file()):
        raise ValueError(f"--data: expected GSM8K's train split as a jsonl file, came {args.data}")
    return {name: known[name] for name in args.sources}


def setups(args: argparse.Namespace) -> list[Any]:
    """The configurations, in the order of running."""
    from scripts.study.plan import QUICK, grid

    more = [*(QUICK if args.quick else ()), f"train.device={args.device}", *args.set]
    return grid(
        sources(args), layers=args.layers[:1] if args.quick else args.layers, objectives=args.objectives,
        seeds=1 if args.quick else args.seeds, more=more, probe_rates=not (args.quick or args.no_rates),
    )  # fmt: skip


def train(args: argparse.Namespace) -> None:
    """Run what has no row yet."""
    from distill.faults import RunError
    from scripts.bench.harness import environment
    from scripts.study import runs

    wanted, done = setups(args), {row["key"] for row in runs.finished(args.out)}
    waiting = [setup for setup in wanted if setup.key not in done]
    print(f"{len(wanted)} configurations, {len(wanted) - len(waiting)} have their row", flush=True)
    if not waiting:
        return
    import transformers

    transformers.utils.logging.disable_progress_bar()
    began = time.perf_counter()
    bench, facts = runs.Bench(waiting, held_out=6 if args.quick else 128), environment()
    print(f"teacher and {len(bench.cuts)} students: {time.perf_counter() - began:.0f} s, {facts['gpu']}", flush=True)
    path = args.out / (facts["gpu"].replace(" ", "-").lower() + ".jsonl")
    longest = 0.0
    for number, setup in enumerate(waiting, 1):
        start = time.perf_counter()
        if args.minutes is not None and start - began + longest > 60 * args.minutes:
            print(f"stopped: {len(waiting) - number + 1} configurations wait; the same command goes on", flush=True)
            return
        try:
            row = runs.run_one(setup, bench)
        except RunError as error:  # not finite, at twice the learning rate for example: that is a result too
            print(f"{number}/{len(waiting)} {setup}: no row, since it broke: {str(error).splitlines()[0]}", flush=True)
            continue
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, **facts}) + "\n")
        took = time.perf_counter() - start
        longest = max(longest, took) if number > 2 else took  # the first also reads data and compiles kernels
        kl = row["after"]["forward_kl"]
        print(
            f"{number}/{len(waiting)} {setup}: KL {row['before']['forward_kl']:.3f} to {kl[0]:.3f} "
            f"({kl[1]:.3f} to {kl[2]:.3f}), agreement {row['after']['agreement'][0]:.1%}, "
            f"{row['tokens_per_s']:,} tokens/s, {took:.1f} s",
            flush=True,
        )


def main(given: list[str] | None = None) -> int:
    """Train what is missing, then write tables and plot; 2 for a mistake of the user's."""
    args = arguments(given)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        if not args.only_verdict:
            train(args)
    except ValueError as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    from scripts.study.plot import draw
    from scripts.study.runs import finished
    from scripts.study.verdict import markdown

    rows = finished(args.out)
    if not rows:
        print(f"study: no rows in {args.out}", file=sys.stderr)
        return 2
    text = markdown(rows)
    (args.out / "verdict.md").write_text(text, encoding="utf-8")
    draw(rows, args.out / "study.svg")
    print(f"\n{text}\nwrote {args.out}/verdict.md and study.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
