"""Check families of models and record what was found: `python -m scripts.families [NAME ...]` (all without names).

Each is examined in a process of its own, with a limit of time and memory; its row takes the place of an earlier one in
`results.jsonl`. `python -m scripts.docs` makes the page of supported models from these rows.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(folder) for folder in (ROOT, ROOT / "kernels") if str(folder) not in sys.path]

import torch  # noqa: E402
import transformers  # noqa: E402

from scripts.families.checks import examine  # noqa: E402
from scripts.families.configs import families  # noqa: E402
from scripts.families.page import read_rows, write_rows  # noqa: E402

SECONDS, GIBIBYTES = 600, 6


def main() -> int:
    """Examine the families that are named; return 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="model types of transformers")
    parser.add_argument("--missing", action="store_true", help="only those without a row of this version and commit")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "commit": _commit()}
    known = read_rows()
    current = {name for name, row in known.items() if versions.items() <= row.items()}
    names = [name for name in chosen.names or families() if not (chosen.missing and name in current)]
    failed = 0
    for number, name in enumerate(names, 1):
        row = {"family": name} | _in_its_own_process(name) | versions
        failed += bool(row["failed"])
        write_rows(read_rows() | {name: row})
        print(f"{number}/{len(names)} {name}: {'; '.join(row['failed']) or 'all hold'}", flush=True)
    return 1 if failed else 0


def _in_its_own_process(name: str) -> dict[str, Any]:
    """Return what `examine` finds, or what became of the process."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_examine, args=(name, theirs))
    process.start()
    theirs.close()
    try:
        if ours.poll(SECONDS):
            found: dict[str, Any] = ours.recv()
            return found
        process.kill()
        return {"failed": [f"it took more than {SECONDS} s"]}
    except EOFError:
        process.join()
        return {"failed": [f"the process ended with {process.exitcode}"]}
    finally:
        process.join(10)


def _examine(name: str, found: Connection) -> None:
    limit = GIBIBYTES * 2**30
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with tempfile.TemporaryDirectory() as folder:
        found.send(examine(name, Path(folder)))


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
