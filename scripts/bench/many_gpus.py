"""Training on several GPUs of this machine, through `distill run` itself: random weights, random tokens.

    flagship    Llama-3.1-8B to 3.2-1B shapes, everything copied (DDP), on 1, 2, 4, 8 GPUs: tokens a second beside one
    large       Llama-3.1-70B to 8B shapes, teacher and student in shards (FSDP2), on the most GPUs there are

Figures are those of `metrics.jsonl`: medians over the logging steps after the first two, in which everything compiles.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from scripts.bench.harness import Row

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "llama3-8b-to-1b.yaml"
DRY = [
    "teacher.init=random",
    "student.init=random",
    "data.source=synthetic",
    "data.workers=0",
    "data.max_rows=512",
    "data.validation={max_rows: 8}",
    "generate.prompts=[]",
    "student.dtype=bfloat16",
    "train.tokens_per_step=null",
    "train.log_every=2",
    "train.report_to=none",
]
SHAPES: dict[str, list[str]] = {
    "flagship": ["parallel.strategy=ddp", "train.steps=12"],
    "large": [
        "parallel.strategy=fsdp",
        "parallel.teacher=sharded",
        "teacher.config=llama-3.1-70b",
        "student.config=llama-3.1-8b",
        "train.batch_size=1",
        "train.gradient_checkpointing=true",
        "train.steps=6",
    ],
}
LIMIT_S = 600.0
FEWEST = 3  # logging steps, in the first two of which everything compiles
PHASES = ("data", "teacher", "student", "loss", "optimizer")


def command(shape: str, processes: int, name: str) -> list[str]:
    """Return the command line of one measurement."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={processes}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        "-m",
        "distill",
        "run",
        str(RECIPE),
        *DRY,
        *SHAPES[shape],
        "--name",
        name,
    ]


def summary(metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the logging steps after the first two, peak memory over all."""
    steady = [row for row in metrics if "tokens_per_second" in row][FEWEST - 1 :]
    if not steady:
        raise ValueError("metrics.jsonl: expected at least three logging steps")
    keys = ["tokens_per_second", *(f"time_{phase}" for phase in PHASES), *(["mfu"] if "mfu" in steady[0] else [])]
    return {key: statistics.median(row[key] for row in steady) for key in keys} | {
        "peak_memory_gib": max(row["peak_memory_gib"] for row in steady),
        "tokens": statistics.median(row["tokens_seen"] for row in steady[-1:]) / steady[-1]["step"],
    }


def environment(gpus: str) -> dict[str, str]:
    """Return the environment of a process on these GPUs."""
    places = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": gpus,
        "PYTHONPATH": os.pathsep.join(places),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "240",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"),
    }


def end(process: subprocess.Popen[str]) -> None:
    """End a process and all that it has started: ranks and workers in sessions of their own keep GPUs and pipes."""
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(process.pid)
        for each in [top, *top.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


@contextlib.contextmanager
def ending(process: subprocess.Popen[str], seconds: float) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended, with all that it has started, as the context ends or after so many seconds."""
    late = threading.Timer(max(seconds, 0.0), end, [process])
    late.start()
    try:
        yield process
    finally:
        late.cancel()
        end(process)
        process.wait()


def run_until(
    words: Sequence[str], folder: Path, gpus: str, until: float, **streams: Any
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Start a process on these GPUs that is `ending` at the time `until` (monotonic)."""
    process = subprocess.Popen(words, cwd=folder, env=environment(gpus), text=True, **streams)
    return ending(process, until - time.monotonic())


def metrics_of(folder: Path, words: Sequence[str], gpus: str, lines: int, until: float) -> list[dict[str, Any]]:
    """The metrics of a run in `folder`, whose name is the last word; it is ended once it has logged so many `lines` of
    speed, since nobody wants its student, or at the time `until` with what it has.

    Raises:
        RuntimeError: fewer than a summary takes.
    """
    found: list[dict[str, Any]] = []
    with (
        open(folder / "said", "w+") as log,
        run_until(words, folder, gpus, until, stdout=log, stderr=log) as process,
    ):
        ended = False
        while len(found) < lines and not ended:
            ended = process.poll() is not None
            time.sleep(0.05)
            found = logged(folder / "runs" / words[-1] / "metrics.jsonl")
    text = (folder / "said").read_text()
    facts = [line for line in text.splitlines() if line.startswith(("served", "teacher at", "teacher ", "student "))]
    print("\n".join(f"    {line}" for line in facts), flush=True)
    if len(found) < FEWEST:
        late = "no end in its time" if time.monotonic() >= until else f"ended with {process.returncode}"
        raise RuntimeError(f"{words[-1]}: {late}\n{text[-4000:]}")
    return found


def logged(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics with a speed, but for one that is being written."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return [row for row in found if "tokens_per_second" in row]


def measure(shape: str, processes: int, folder: Path) -> dict[str, Any]:
    """Run one measurement in `folder`."""
    words, gpus = command(shape, processes, f"{shape}-{processes}"), ",".join(map(str, range(processes)))
    steps = next(int(word.partition("=")[2]) for word in words if word.startswith("train.steps="))
    return summary(metrics_of(folder, words, gpus, steps // 2, time.monotonic() + LIMIT_S))


def run(quick: bool, only: str) -> Iterator[Row]:
    """`quick` leaves out all but one and the most GPUs; `only` names shapes, separated by commas."""
    import torch

    most = torch.cuda.device_count()
    counts = [count for count in (1, 2, 4, 8) if count <= most]
    with tempfile.TemporaryDirectory() as folder:
        for shape in only.split(",") if only else SHAPES:
            one = None
            for count in [most] if shape == "large" else [counts[0], counts[-1]] if quick else counts:
                found = measure(shape, count, Path(folder))
                speed = found["tokens_per_second"]
                one = speed if count == 1 else one
                split = ", ".join(f"{phase} {found[f'time_{phase}'] * 1e3:.1f}" for phase in PHASES)
                note = f"{speed / one:.2f} x one GPU; {split}" if one else split
                yield Row(
                    case="many_gpus",
                    shape=f"{shape}, {found['tokens'] / count:,.0f} tokens a GPU and step, bf16",
                    candidate=f"ours, {count} GPUs",
                    ms=found["tokens"] / speed * 1e3,
                    peak_mib=found["peak_memory_gib"] * 1024,
                    tokens_per_s=speed,
                    mfu=found.get("mfu"),
                    note=note,
                )
