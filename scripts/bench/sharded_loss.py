"""Heads cut over the vocabulary of 1, 2, 4 and 8 GPUs: time over each rank's own products, memory, gradient errors.

The same 8,192 tokens are on every rank, with 1/P of all heads. The floor of P ranks is what one rank's slices need:
the bare products of losses.py on V/P columns, timed in turn with the loss (a teacher of K tokens: the student's alone).
Errors are those of dx and of the rank's rows of dW against fp64. The case starts one process a GPU and reads what the
first one found. One rank, of which nothing is cut off, times the path of a cut vocabulary beside that of one GPU.

Predicted for two H200 before any run, where one needs 20.8 ms (bucket), 19.0 (sampled) and two teachers 45.5, and the
forward KL cut in two takes 1.5 ms more than half: 11.9, 11.0 and, of a second teacher as wide as the first, 24.9 ms.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distill_kernels import FusedDistillationLoss, FusedTopKKLLoss, TeacherHead
from distill_kernels.losses.mixture import Mixture
from distill_kernels.losses.operands import Head
from distill_kernels.losses.terms import make_objective
from distill_kernels.losses.topk_reference import TAILS

from scripts.bench import topk_losses
from scripts.bench.harness import Row, time_in_turn
from scripts.bench.losses import (
    HARD,
    JSD,
    KL,
    MAIN,
    Inputs,
    exact_gradients,
    exact_gradients_from,
    floor,
    gradient_errors,
)

ROOT = Path(__file__).resolve().parents[2]
CASES = {
    "forward KL": ([KL], False),
    "forward KL, statistics": ([KL], True),
    "JSD(0.5) + cross-entropy": ([JSD, HARD], False),
}
TOP_K = 64
SHARES = (0.7, 0.3)


def losses_of(inputs: Inputs, own: slice, group: Any) -> dict[str, tuple[Callable[[Inputs], torch.Tensor], Any]]:
    """Each case's loss of this rank's inputs, and its exact gradients of the whole ones where they are compared.

    `inputs` are whole, and cut to the rows `own` when this returns.
    """
    second = inputs.w_teacher.roll(1, 0)
    ids, given = topk_losses.teacher_tokens(inputs, TOP_K)
    heads = tuple(Head(inputs.x_teacher.double(), weight.double()) for weight in (inputs.w_teacher, second))
    mixture = Mixture(heads, SHARES, (1.0, 1.0), (0.0, 0.0))
    both_exact = exact_gradients_from(inputs, mixture, make_objective([KL]), labels=inputs.labels, rows=256)
    exact: dict[str, Any] = {"forward KL": exact_gradients(inputs, KL), "two teachers": both_exact}
    del heads, mixture
    tops = {f"K = {TOP_K}, {tail}": FusedTopKKLLoss(tail=tail, skip_ignored_rows=False) for tail in TAILS}
    exact |= {name: topk_losses.exact_gradients(inputs, module, ids, given) for name, module in tops.items()}
    exact = {name: (dx, dw[own].clone()) for name, (dx, dw) in exact.items()}
    inputs.w = inputs.w.detach()[own].clone().requires_grad_()
    inputs.w_teacher, second = inputs.w_teacher[own].clone(), second[own].clone()
    inputs.shape = MAIN._replace(vocab=own.stop - own.start)
    both = FusedDistillationLoss([KL], skip_ignored_rows=False)

    def over(group: Any) -> dict[str, Callable[[Inputs], torch.Tensor]]:
        losses: dict[str, Callable[[Inputs], torch.Tensor]] = {}
        for name, (terms, stats) in CASES.items():
            module = FusedDistillationLoss(terms, skip_ignored_rows=False)

            def loss(i: Inputs, module=module, stats=stats) -> torch.Tensor:
                out = module(i.x, i.w, i.x_teacher, i.w_teacher, i.labels, return_stats=stats, tp_group=group)
                return out[0] if stats else out

            losses[name] = loss
        for name, module in tops.items():
            losses[name] = lambda i, m=module: m(i.x, i.w, ids, given, i.labels, tp_group=group)

        def of_two(i: Inputs) -> torch.Tensor:
            pairs = zip((i.w_teacher, second), SHARES, strict=True)
            teachers = [TeacherHead(i.x_teacher, weight, share) for weight, share in pairs]
            return both(i.x, i.w, labels=i.labels, teachers=teachers, tp_group=group)

        return losses | {"two teachers": of_two}

    losses = over(group)
    if dist.get_world_size() == 1:
        losses |= {f"{name}, not cut": loss for name, loss in over(None).items()}
    return {name: (loss, exact.get(name.removesuffix(", not cut"))) for name, loss in losses.items()}


def measure(rounds: int) -> list[Row]:
    """Measure on one rank; all ranks time the same calls in the same order."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs = Inputs(MAIN)
    own = slice(rank * MAIN.vocab // ranks, (rank + 1) * MAIN.vocab // ranks)
    losses = losses_of(inputs, own, dist.group.WORLD)
    torch.cuda.empty_cache()
    bare = {f"floor: products of 1/{ranks}": floor(inputs)}
    bare[f"floor: the student's of 1/{ranks}"] = floor(inputs, teacher=False)
    steps, rows = dict(bare), []
    for name, (loss, exact) in losses.items():
        steps[name] = inputs.run(loss)
        rows.append(
            Row(
                "sharded head",
                str(MAIN),
                f"{name}, 1 rank" if ranks == 1 else f"{name}, {ranks} ranks",
                math.nan,
                peak_mib=inputs.peak(steps[name]),
            )
        )
        if exact is not None:
            rows[-1].error = gradient_errors(inputs, steps[name], exact)
    times = time_in_turn(steps, rounds=rounds, calls=2, settle=1)
    whole, student = (times[name] for name in bare)
    for row, name in zip(rows, losses, strict=True):
        row.ms = times[name]
        teachers = 0 if name.startswith("K = ") else 2 if name == "two teachers" else 1
        row.floor_ratio = row.ms / (student + teachers * (whole - student))
    return [*(Row("sharded head", str(MAIN), name, times[name], 1.0) for name in bare), *rows]


def run(quick: bool = False, only: str = "") -> Iterator[Row]:
    """1, 2, 4 and 8 ranks, as many as there are GPUs; `quick`: 1 and 2; `only`: part of "sharded head, 2"."""
    for ranks in (1, 2) if quick else (1, 2, 4, 8):
        if ranks > torch.cuda.device_count() or only not in f"sharded head, {ranks}":
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.json"
            command = [
                *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"),
                *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "-m", "scripts.bench.sharded_loss", str(out)),
            ]
            paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
            subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, check=True)
            yield from (Row(**row) for row in json.loads(out.read_text()))


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    found = measure(rounds=5)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps([asdict(row) for row in found]))
    dist.barrier()
    dist.destroy_process_group()
