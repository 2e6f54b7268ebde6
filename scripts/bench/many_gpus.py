"""Training on several GPUs of this machine, through `distill run` itself: random weights, random tokens.

    flagship    Llama-3.1-8B to 3.2-1B shapes, everything copied (DDP), on 1, 2, 4, 8 GPUs: tokens a second beside one
    large       Llama-3.1-70B to 8B shapes, teacher and student in shards (FSDP2), on the most GPUs there are

Figures are those of `metrics.jsonl`: medians over the logging steps after the first two, in which everything compiles.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench.harness import Row

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "llama3-8b-to-1b.yaml"
DRY = ["teacher.init=random", "student.init=random", "data.source=synthetic", "data.workers=0", "data.max_rows=512",
       "data.validation={max_rows: 8}", "generate.prompts=[]", "student.dtype=bfloat16", "train.tokens_per_step=null",
       "train.log_every=2", "train.report_to=none"]  # fmt: skip
SHAPES: dict[str, list[str]] = {
    "flagship": ["parallel.strategy=ddp", "train.steps=12"],
    "large": ["parallel.strategy=fsdp", "parallel.teacher=sharded", "teacher.config=llama-3.1-70b",
              "student.config=llama-3.1-8b", "train.batch_size=1", "train.gradient_checkpointing=true",
              "train.steps=6"],
}  # fmt: skip
PHASES = ("data", "teacher", "student", "loss", "optimizer")


def command(shape: str, processes: int, name: str) -> list[str]:
    """What runs one measurement."""
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0", "-m", "distill", "run", str(RECIPE), *DRY, *SHAPES[shape], "--name", name,
    ]  # fmt: skip


def summary(metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the logging steps after the first two, peak memory over all."""
    steady = [row for row in metrics if "tokens_per_second" in row][2:]
    if not steady:
        raise ValueError("metrics.jsonl: expected at least three logging steps")
    keys = ["tokens_per_second", *(f"time_{phase}" for phase in PHASES), *(["mfu"] if "mfu" in steady[0] else [])]
    return {key: statistics.median(row[key] for row in steady) for key in keys} | {
        "peak_memory_gib": max(row["peak_memory_gib"] for row in steady),
        "tokens": statistics.median(row["tokens_seen"] for row in steady[-1:]) / steady[-1]["step"],
    }


def measure(shape: str, processes: int, folder: Path) -> dict[str, Any]:
    """Run one measurement in `folder`."""
    name = f"{shape}-{processes}"
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(processes))),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"),
    }
    done = subprocess.run(command(shape, processes, name), cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    print(done.stdout, flush=True)
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return summary([json.loads(line) for line in lines])


def run(quick: bool, only: str) -> list[Row]:
    """`quick` leaves out all but one and the most GPUs; `only` names shapes, separated by commas."""
    import torch

    most = torch.cuda.device_count()
    counts = [count for count in (1, 2, 4, 8) if count <= most]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in only.split(",") if only else SHAPES:
            one = None
            for count in [most] if shape == "large" else [counts[0], counts[-1]] if quick else counts:
                found = measure(shape, count, Path(folder))
                speed = found["tokens_per_second"]
                one = speed if count == 1 else one
                split = ", ".join(f"{phase} {found[f'time_{phase}'] * 1e3:.1f}" for phase in PHASES)
                note = f"{speed / one:.2f} x one GPU; {split}" if one else split
                rows.append(
                    Row(
                        case="many_gpus",
                        shape=f"{shape}, {found['tokens'] / count:,.0f} tokens a GPU and step, bf16",
                        candidate=f"ours, {count} GPUs",
                        ms=found["tokens"] / speed * 1e3,
                        peak_mib=found["peak_memory_gib"] * 1024,
                        tokens_per_s=speed,
                        mfu=found.get("mfu"),
                        note=note,
                    )
                )
    return rows
