"""Heads cut over the vocabulary of 2, 4 and 8 GPUs: time over each rank's own products, peak memory, gradient errors.

The same 8,192 tokens are on every rank, with 1/P of both heads. The floor of P ranks is what one rank's slices need:
the bare products of losses.py on V/P columns, timed in turn with the loss. Errors are those of dx and of the rank's
rows of dW against fp64. The case starts one process a GPU and reads what the first one found.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from distill_kernels import FusedDistillationLoss

from scripts.bench.harness import Row, time_in_turn
from scripts.bench.losses import HARD, JSD, KL, MAIN, Inputs, exact_gradients, floor, gradient_errors

ROOT = Path(__file__).resolve().parents[2]
CASES = {
    "forward KL": ([KL], False),
    "forward KL, statistics": ([KL], True),
    "JSD(0.5) + cross-entropy": ([JSD, HARD], False),
}


def measure(rounds: int) -> list[Row]:
    """What every rank does; all time the same calls in the same order."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs = Inputs(MAIN)
    right = exact_gradients(inputs, KL)
    own = slice(rank * MAIN.vocab // ranks, (rank + 1) * MAIN.vocab // ranks)
    inputs.w = inputs.w.detach()[own].clone().requires_grad_()
    inputs.w_teacher = inputs.w_teacher[own].clone()
    inputs.shape = MAIN._replace(vocab=own.stop - own.start)
    right = right[0], right[1][own].clone()
    group = dist.group.WORLD
    steps, rows = {f"floor: products of 1/{ranks}": floor(inputs)}, []
    for name, (terms, stats) in CASES.items():
        module = FusedDistillationLoss(terms, skip_ignored_rows=False)

        def loss(i: Inputs, module=module, stats=stats) -> torch.Tensor:
            out = module(i.x, i.w, i.x_teacher, i.w_teacher, i.labels, return_stats=stats, tp_group=group)
            return out[0] if stats else out

        steps[name] = inputs.run(loss)
        row = Row("sharded head", str(MAIN), f"{name}, {ranks} ranks", math.nan, peak_mib=inputs.peak(steps[name]))
        if terms == [KL]:
            row.error = gradient_errors(inputs, steps[name], right)
        rows.append(row)
    times = time_in_turn(steps, rounds=rounds, calls=2, settle=1)
    base = times[f"floor: products of 1/{ranks}"]
    for row, name in zip(rows, CASES, strict=True):
        row.ms, row.floor_ratio = times[name], times[name] / base
    return [Row("sharded head", str(MAIN), f"floor: products of 1/{ranks}", base, 1.0), *rows]


def run(quick: bool = False, only: str = "") -> list[Row]:
    """2, 4 and 8 ranks, as many as there are GPUs; `quick`: 2 only; `only`: part of "sharded head"."""
    rows: list[Row] = []
    for ranks in (2,) if quick else (2, 4, 8):
        if ranks > torch.cuda.device_count() or only not in "sharded head":
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.json"
            command = [
                *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"),
                *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "-m", "scripts.bench.sharded_loss", str(out)),
            ]
            paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
            subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, check=True)
            rows += [Row(**row) for row in json.loads(out.read_text())]
    if not rows:
        print("sharded head: needs at least two CUDA devices", file=sys.stderr)
    return rows


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    found = measure(rounds=5)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps([asdict(row) for row in found]))
    dist.barrier()
    dist.destroy_process_group()
