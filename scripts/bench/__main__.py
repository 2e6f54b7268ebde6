"""Kernel benchmarks: `python -m scripts.bench losses [--quick] [--no-record] [--only TEXT]`.

Each case is a module `scripts/bench/<case>.py` with a generator `run(quick: bool, only: str) -> Iterator[Row]`: its
rows are kept as they come, whatever ends the rest.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "kernels"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

NOT_CASES = {"__init__", "__main__", "harness", "loss_rivals", "sampler", "step_variants"}


def end(*_: object) -> NoReturn:
    """Unwind, so that what is measured is shown; a second SIGTERM, as `timeout` may send, must not stop that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def main() -> int:
    """Run the benchmarks named on the command line; return the exit status."""
    cases = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in NOT_CASES)
    parser = argparse.ArgumentParser(prog="python -m scripts.bench", description=__doc__)
    parser.add_argument("cases", nargs="+", choices=cases, help="what to measure")
    parser.add_argument("--quick", action="store_true", help="the main shapes only")
    parser.add_argument("--only", default="", help="only shapes or kernels whose name contains this")
    parser.add_argument("--no-record", action="store_true", help="print, do not append to the results file")
    parser.add_argument("--results", type=Path, default=None, help="folder of the results file")
    args = parser.parse_args()

    import torch

    cuda = torch.cuda.is_available()
    modules = [importlib.import_module(f"scripts.bench.{name}") for name in args.cases]
    if not cuda and any(getattr(module, "NEEDS_CUDA", True) for module in modules):
        print("benchmarks need a CUDA device", file=sys.stderr)
        return 2
    from scripts.bench import harness

    if cuda and not args.no_record and harness.environment()["commit"] == "unknown":
        print("rows without a commit are not kept, and git names none: BENCH_COMMIT, or --no-record", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, end)
    for module in modules:
        rows = []
        try:
            for row in module.run(quick=args.quick, only=args.only):
                rows.append(row)
                if cuda and not args.no_record:  # figures of a CPU are shown, not kept
                    kept = harness.record(row, args.results)
        finally:
            if rows:
                print(harness.table(rows), flush=True)
            if cuda and not args.no_record and rows:
                print(f"\nrecorded in {kept}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
