"""Seconds from `distill run` to its first optimizer step, by phase: a profile of the first minute of a run.

    python -m scripts.bench first_step --only quickstart        SmolLM2-135M on this machine's cores
    python -m scripts.bench first_step --only flagship          Llama-3.1-8B to 3.2-1B shapes, random weights, on a GPU

Each command runs twice with caches of its own: the first run compiles, tunes and tokenises, the second finds the
results on disk. The bytecode of Python's modules is cached beforehand, as an installation by pip leaves it; where it is
missing and nothing may be written, every start compiles thousands of files, for 15 s or more. A thread samples the
stack of the main thread (`sampler.py`); a sample counts to the innermost function of its `PHASES`, or to `imports`
while a module is executed. Both the wall time and the processor time of a phase are shown: on a busy machine only the
latter can be compared. Kernels are listed with when and how long Triton compiled them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.bench.harness import Row
from scripts.bench.many_gpus import DRY, ROOT, ending
from scripts.bench.sampler import WRITTEN_S

NEEDS_CUDA = False
COMMANDS = {
    "quickstart": ["recipes/quickstart.yaml", "train.log_every=1"],
    "flagship": ["recipes/llama3-8b-to-1b.yaml", *DRY, "train.tokens_per_step=65536", "train.log_every=1"],
}
IMPORTED = (
    "distill.cli",
    "distill.run",
    "distill.teachers.backends.local",
    "distill.models.meta_models",
    "transformers.models.llama.modeling_llama",
    "triton.backends.nvidia.compiler",
)
LIMIT_S = 400.0


def environment_of(folder: Path) -> dict[str, str]:
    """Return the environment of a run whose caches are in `folder`."""
    places = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(places),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "COLUMNS": "160",
        "DISTILL_CACHE": str(folder / "tokens"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


def cache_bytecode(folder: Path) -> None:
    """Import what a run imports, so that its bytecode is cached."""
    words = [sys.executable, "-c", f"import {', '.join(IMPORTED)}"]
    subprocess.run(words, cwd=ROOT, env=environment_of(folder), check=True)


def measure(arguments: list[str], folder: Path) -> tuple[dict[str, list[list[Any]]], list[tuple[float, str]]]:
    """Run a command until its first step is logged; return what `Sampler` wrote, and its lines with their times.

    Args:
        arguments: Arguments of `distill run`.
        folder: Folder of its caches and its run.

    Raises:
        RuntimeError: It ended before its first step.
    """
    result = folder / "phases.json"
    words = [sys.executable, "-m", "scripts.bench.sampler", str(result), "run", *arguments]
    words += ["--output-dir", str(folder / "runs")]
    lines: list[tuple[float, str]] = []
    start = time.perf_counter()
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment_of(folder), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    with ending(process, LIMIT_S):
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((time.perf_counter() - start, line.rstrip()))
            if line.startswith("step 1/"):
                time.sleep(2 * WRITTEN_S)
                return json.loads(result.read_text(encoding="utf-8")), lines
    raise RuntimeError("\n".join(["first_step: expected a first step, got:", *(text for _, text in lines[-20:])]))


def run(quick: bool, only: str) -> Iterator[Row]:
    """`quick` leaves out the second run; `only` names a command."""
    import torch

    for name, arguments in COMMANDS.items():
        if only not in name or (name == "flagship" and not torch.cuda.is_available()):
            continue
        with tempfile.TemporaryDirectory() as folder:
            cache_bytecode(Path(folder))
            for turn in ("first run",) if quick else ("first run", "second run"):
                found, lines = measure(arguments, Path(folder))
                phases = found["phases"]
                print(f"\n{name}, {turn}\n{'begins':>8}{'wall s':>8}{'cpu s':>8}", flush=True)
                for phase, begun, wall, processor in phases:
                    print(f"{begun:8.1f}{wall:8.1f}{processor:8.1f}  {phase}", flush=True)
                for kernel, ended, taken in found["kernels"]:
                    print(f"{ended - taken:8.1f}{taken:8.1f}          {kernel}", flush=True)
                for second, text in lines:
                    print(f"{second:8.1f}  | {text}", flush=True)
                wall, processor = (sum(row[column] for row in phases) for column in (2, 3))
                yield Row(
                    case="first step",
                    shape=name,
                    candidate=turn,
                    ms=lines[-1][0] * 1e3,
                    note=f"first line after {lines[0][0]:.1f} s; {wall:.1f} s sampled, {processor:.1f} s of processors",
                )
