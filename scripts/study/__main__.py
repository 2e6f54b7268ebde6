"""`python -m scripts.study`: train all configurations, judge them, say what helps.

    python -m scripts.study --data gsm8k_train.jsonl --out scripts/study/results --device cuda
    python -m scripts.study --data gsm8k_train.jsonl --out /tmp/study --quick       the whole path, tiny, on a CPU
    python -m scripts.study --out scripts/study/results --only-verdict              tables and plot from the rows
    python -m scripts.study --plan teachers --data gsm8k_train.jsonl --out scripts/study/results --device cuda
    python -m scripts.study --plan fp8 --sources python-stdlib --out scripts/study/results --device cuda

A configuration whose row is in FOLDER is not run again: stopped at any moment, the same command goes on. Several GPUs
take a --share each, into folders of their own, whose rows are put together by hand (cat). FOLDER gets
<gpu>.jsonl (a row a run), verdict.md and study.svg; of the plan `teachers`, which compares cached teachers and the
student's own words on GSM8K, <gpu>-teachers.jsonl, teachers.md and teachers.svg; of the plan `fp8`, which puts a
student of 15 layers, its teacher or both into fp8, <gpu>-fp8.jsonl, fp8.md and fp8.svg.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "kernels"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


class Plan(NamedTuple):
    """Runs of a study and the report made of their rows.

    Attributes:
        setups: the configurations, in the order of running.
        bench: makes what they share from those that have no row yet.
        run_one: trains and judges a configuration.
        markdown, overview, draw: tables, what of them suits a first look, and picture from rows.
        suffix: of the file of rows, behind the GPU's name.
        names: of the tables' and the picture's file.
    """

    setups: Any
    bench: Any
    run_one: Any
    markdown: Any
    overview: Any
    draw: Any
    suffix: str
    names: tuple[str, str]


def plan_of(name: str) -> Plan:
    """The plan called `name`; of `privileged`, which scripts/study/privileged.py runs, what is made of its rows."""
    if name == "privileged":
        from scripts.study.privileged_verdict import markdown

        return Plan(None, None, None, markdown, markdown, None, "-privileged.jsonl", ("privileged.md", ""))
    if name == "teachers":
        from scripts.study import teacher_runs, teacher_verdict

        return Plan(
            teacher_setups,
            teacher_runs.TeacherBench,
            teacher_runs.run_one,
            teacher_verdict.markdown,
            teacher_verdict.markdown,
            teacher_verdict.draw,
            "-teachers.jsonl",
            ("teachers.md", "teachers.svg"),
        )
    from scripts.study import plot, runs, verdict

    fp8 = name == "fp8"
    return Plan(
        setups,
        runs.Bench,
        runs.run_one,
        verdict.markdown,
        verdict.markdown if fp8 else verdict.overview,
        plot.draw,
        "-fp8.jsonl" if fp8 else ".jsonl",
        ("fp8.md", "fp8.svg") if fp8 else ("verdict.md", "study.svg"),
    )


def share(text: str) -> tuple[int, int]:
    """`I/N`, the part of the work that this process does, beside N - 1 others on other GPUs.

    Raises:
        ValueError: not 0 <= I < N.
    """
    index, _, count = text.partition("/")
    if not 0 <= int(index) < int(count):
        raise ValueError(text)
    return int(index), int(count)


def arguments(given: list[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    from scripts.study.plan import KNOWN
    from scripts.study.teachers import BASES

    parser = argparse.ArgumentParser(
        prog="python -m scripts.study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    plans = ("objectives", "teachers", "fp8")
    parser.add_argument("--plan", choices=plans, default=plans[0], help="what is compared")
    parser.add_argument("--data", type=Path, help="GSM8K's training split, jsonl of question and answer")
    parser.add_argument("--out", type=Path, required=True, help="folder of rows, tables and plot")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--quick", action="store_true", help="one depth, one seed, two steps: does the path work?")
    parser.add_argument("--minutes", type=float, default=None, help="start no run that would end later than this")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs="+", default=None, help="10 and 15; of the plan teachers 15")
    parser.add_argument("--parts", nargs="+", choices=tuple(BASES), default=list(BASES), help="of the plan teachers")
    parser.add_argument("--objectives", nargs="+", default=None, metavar="NAME", help=", ".join(KNOWN))
    parser.add_argument("--sources", nargs="+", choices=("gsm8k", "python-stdlib"), default=["gsm8k", "python-stdlib"])
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="recipe settings of every run")
    parser.add_argument(
        "--share", type=share, default=(0, 1), metavar="I/N", help="every Nth run from I on, 0 <= I < N"
    )
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
    if ("gsm8k" in args.sources or args.plan == "teachers") and (args.data is None or not args.data.is_file()):
        raise ValueError(f"--data: expected GSM8K's train split as a jsonl file, got {args.data}")
    return {name: known[name] for name in (["gsm8k"] if args.plan == "teachers" else args.sources)}


def setups(args: argparse.Namespace) -> list[Any]:
    """The configurations, in the order of running."""
    from scripts.study.plan import FP8, OBJECTIVES, QUICK, grid

    more = [*(QUICK if args.quick else ()), f"train.device={args.device}", *args.set]
    fp8 = args.plan == "fp8"
    layers = args.layers or ([15] if fp8 else [10, 15])
    objectives = args.objectives or (["forward KL", *FP8] if fp8 else list(OBJECTIVES))
    return grid(
        sources(args),
        layers=layers[:1] if args.quick else layers,
        objectives=objectives,
        seeds=1 if args.quick else args.seeds,
        more=more,
        probe_rates=not (args.quick or args.no_rates or fp8),
    )


def teacher_setups(args: argparse.Namespace) -> list[Any]:
    """The configurations of the plan `teachers`, in the order of running."""
    from scripts.study.teachers import grid

    return grid(
        sources(args)["gsm8k"],
        layers=(args.layers or [15])[: 1 if args.quick else None],
        parts=args.parts,
        seeds=1 if args.quick else args.seeds,
        more=[f"train.device={args.device}", *args.set],
        quick=args.quick,
    )


def train(args: argparse.Namespace, plan: Plan) -> None:
    """Run what has no row yet."""
    from distill.core.errors import RunError
    from scripts.bench.harness import environment
    from scripts.study.runs import finished

    wanted, done = (
        plan.setups(args)[args.share[0] :: args.share[1]],
        {row["key"] for row in finished(args.out, args.plan)},
    )
    waiting = [setup for setup in wanted if setup.key not in done]
    print(f"{len(wanted)} configurations, {len(wanted) - len(waiting)} have their row", flush=True)
    if not waiting:
        return
    import transformers

    transformers.utils.logging.disable_progress_bar()
    began = time.perf_counter()
    bench, facts = plan.bench(waiting, held_out=6 if args.quick else 128), environment()
    print(f"teacher and {len(bench.cuts)} students: {time.perf_counter() - began:.0f} s, {facts['gpu']}", flush=True)
    path = args.out / (facts["gpu"].replace(" ", "-").lower() + plan.suffix)
    longest = 0.0
    for number, setup in enumerate(waiting, 1):
        start = time.perf_counter()
        if args.minutes is not None and start - began + longest > 60 * args.minutes:
            print(f"stopped: {len(waiting) - number + 1} configurations wait; the same command goes on", flush=True)
            return
        try:
            row = plan.run_one(setup, bench)
        except RunError as error:  # not finite, at twice the learning rate for example: that is a result too
            print(f"{number}/{len(waiting)} {setup}: no row, since it broke: {str(error).splitlines()[0]}", flush=True)
            continue
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"plan": args.plan, **row, **facts}) + "\n")
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
    plan = plan_of(args.plan)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        if not args.only_verdict:
            train(args, plan)
    except ValueError as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    from scripts.study.runs import finished

    rows = finished(args.out, args.plan)
    if not rows:
        print(f"study: no rows in {args.out}", file=sys.stderr)
        return 2
    text = plan.markdown(rows)
    tables, picture = plan.names
    (args.out / tables).write_text(text, encoding="utf-8")
    plan.draw(rows, args.out / picture)
    print(f"\n{text}\nwrote {args.out}/{tables} and {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
