"""`python -m scripts.study --plan NAME`: make the rows of a plan that are not there yet, and say what all come to.

    python -m scripts.study --plan objectives --data gsm8k_train.jsonl --out scripts/study/results
    python -m scripts.study --plan fp8 --out scripts/study/results
    python -m scripts.study --plan teachers --data gsm8k_train.jsonl --out /tmp/study --quick     the path, on a CPU
    python -m scripts.study --plan privileged --out scripts/study/results --only-tables           from the rows alone

Plans are files of scripts/study/plans, or a YAML file of yours; planner.py says what stands in one. A run whose row is
in --out is not made again: stopped at any moment, the same command goes on. Several processes may work on one plan, on
a GPU each or on one. --out gets a row a run in <gpu>-<plan>.jsonl, tables and a picture.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "kernels"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from scripts.study.planner import Plan, plan_names, read_plan  # noqa: E402


def arguments(given: list[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", required=True, help=f"{', '.join(plan_names())}, or a YAML file")
    parser.add_argument("--data", type=Path, help="GSM8K's training split, jsonl of question and answer")
    parser.add_argument("--out", type=Path, required=True, help="folder of rows, tables and picture")
    parser.add_argument("--work", type=Path, help="folder of files and models that runs read; default: temporary files")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--quick", action="store_true", help="one seed, two steps: does the path work?")
    parser.add_argument("--minutes", type=float, help="begin no run that would end later than this")
    parser.add_argument("--seeds", type=int, help="the first seeds alone")
    parser.add_argument("--only", nargs="+", default=[], metavar="LEVEL", help="runs of one of these levels")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="recipe settings of every run")
    parser.add_argument("--only-tables", action="store_true", help="train nothing")
    return parser.parse_args(given)


def make_rows(args: argparse.Namespace, plan: Plan) -> None:
    """Run what has no row yet.

    Raises:
        ValueError: The plan reads data and --data names no file.
    """
    import transformers

    from scripts.study import runner

    transformers.utils.logging.disable_progress_bar()
    runs = runner.chosen(plan, 1 if args.quick else args.seeds, args.only)
    reads = any("{data}" in setting for run in runs for setting in run.settings)
    if reads and (args.data is None or not args.data.is_file()):
        raise ValueError(f"--data: expected GSM8K's train split as a jsonl file, got {args.data}")
    work = (args.work or Path(tempfile.gettempdir()) / f"study-{plan.name}").absolute()
    quick = plan.fields["quick"] if args.quick else []
    more = [*quick, f"train.device={args.device}", *args.set]
    data = args.data.absolute() if args.data else None
    runner.make_rows(runs, runner.Lab(plan, work, data, more), args.out, minutes=args.minutes)


def main(given: list[str] | None = None) -> int:
    """Make what is missing, then write tables and picture; 2 for a mistake of the user's."""
    args = arguments(given)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        plan = read_plan(args.plan)
        args.out.mkdir(parents=True, exist_ok=True)
        if not args.only_tables:
            make_rows(args, plan)
    except ValueError as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    from scripts.study import plot, report

    rows = report.finished(args.out, plan.name)
    if not rows:
        print(f"study: no rows in {args.out}", file=sys.stderr)
        return 2
    text = report.markdown(plan, rows)
    (args.out / plan.fields["tables"]).write_text(text, encoding="utf-8")
    if "picture" in plan.fields:
        plot.draw(plan, rows, args.out / plan.fields["picture"]["file"])
    print(f"\n{text}\nwrote {args.out / plan.fields['tables']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
