"""Teachers elsewhere and kept ones at the flagship's shapes (8B to 1B, 2 x 4,096 tokens a step), random weights.

    served   the teacher on GPU 1 behind HTTP on loopback: to clients, then to a run on GPU 0
    ranks    one rank trains and one holds the teacher, NCCL between them
    ddp      both GPUs hold both models
    keep     one GPU: the epoch that asks the teacher, and the second, which reads

Each measurement is a process of its own with a limit; rows are printed as they come, and one that fails costs only
itself. The rate that a served or distant teacher can reach is that of the slower side: of the teacher's forward alone,
and of the student's step, loss and optimizer alone, which are phases of the same run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench.harness import Row, table
from scripts.bench.many_gpus import DRY, PHASES, RECIPE, ROOT, command, summary

LENGTH, ROWS = 4096, 2
STEPS = 14
EPOCH = 20  # steps of 64 MiB: 1.3 GiB on disk
LIMIT_S = 110.0  # of one measurement
PROGRAM = "import sys; from scripts.bench import elsewhere; elsewhere.serve(sys.argv[1:])"


def serve(overrides: Sequence[str]) -> None:
    """The server's process: writes what its forward takes, what clients got, and where it is; ends with its input."""
    from distill.recipe import load
    from distill.serving.app import Limits, make_app
    from distill.serving.open import open_engine, running
    from scripts.bench import served

    engine = open_engine(load(RECIPE, overrides), 65_536)
    rows, length = ROWS, load(RECIPE, overrides).data.max_length

    def say(**values: object) -> None:
        print(json.dumps(values), flush=True)

    own = served.seconds_of_forward(engine, rows, length)
    say(forward=own)
    served.CLIENTS = (1, 4, 16)
    shape = f"8B, rows of {length} tokens, {engine.identity.dtype}"
    for row in served.compare(engine, length=length, requests=32, limits=Limits(), shape=shape):
        say(row=dataclasses.asdict(row))
    with running(make_app(engine, None, Limits())) as url:
        say(url=url)
        sys.stdin.read()


def environment(gpus: str) -> dict[str, str]:
    """Of a process on these GPUs."""
    places = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": gpus, "PYTHONPATH": os.pathsep.join(places), "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"),
    }  # fmt: skip


def trained(folder: Path, words: Sequence[str], gpus: str) -> list[dict[str, Any]]:
    """The metrics of a run, in `folder`; the name of the run is the last word.

    Raises:
        RuntimeError: it failed, or took longer than the limit.
    """
    try:
        done = subprocess.run(words, cwd=folder, env=environment(gpus), capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"{words[-1]}: no end within {LIMIT_S:.0f} s\n{str(late.stderr)[-3000:]}") from None
    if done.returncode:
        raise RuntimeError(f"{words[-1]} ended with {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    facts = [line for line in done.stdout.splitlines() if line.startswith(("served", "teacher at", "teacher ", "keep"))]
    print("\n".join(f"    {line}" for line in facts), flush=True)
    lines = (folder / "runs" / words[-1] / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def row_of(candidate: str, found: dict[str, Any], note: str) -> Row:
    """A row of a run's medians."""
    split = ", ".join(f"{phase} {found[f'time_{phase}'] * 1e3:.1f}" for phase in PHASES)
    speed = found["tokens_per_second"]
    return Row(
        "elsewhere", f"8B to 1B, {ROWS} x {LENGTH} tokens a GPU and step, bf16", candidate,
        ms=found["tokens"] / speed * 1e3, peak_mib=found["peak_memory_gib"] * 1024, tokens_per_s=speed,
        note=f"{note}; {split}",
    )  # fmt: skip


def against_slower(found: dict[str, Any], forward: float) -> str:
    """The rate of a run beside that of its slower side alone, a teacher's forward of a micro-batch in seconds."""
    tokens = found["tokens"]
    student = tokens / sum(found[f"time_{phase}"] for phase in ("student", "loss", "optimizer"))
    teacher = tokens / forward
    share = found["tokens_per_second"] / min(student, teacher)
    return f"{share:.3f} x its slower side's (teacher alone {teacher:,.0f}, student alone {student:,.0f} tokens/s)"


def served_rows(folder: Path) -> list[Row]:
    """The server to clients, then to a run."""
    rows: list[Row] = []
    server = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *DRY, *SMALLER], cwd=ROOT, env=environment(SERVER_GPU), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    late = threading.Timer(LIMIT_S, server.kill)
    late.start()
    forward, url = 0.0, ""
    try:
        for line in server.stdout or ():
            said = json.loads(line) if line.startswith("{") else {}
            forward = said.get("forward", forward)
            if "row" in said:
                rows.append(show(Row(**said["row"])))
            if url := said.get("url", ""):
                break
        late.cancel()
        if not url:
            raise RuntimeError("the server has ended, or took too long")
        words = [sys.executable, "-m", "distill", "run", str(RECIPE), *DRY, *SMALLER, f"train.steps={STEPS}",
                 "teacher.type=server", f"teacher.url={url}", "--name", "served"]  # fmt: skip
        found = summary(trained(folder, words, "0"))
        rows.append(show(row_of("served from GPU 1, trained on GPU 0", found, against_slower(found, forward))))
    finally:
        late.cancel()
        server.kill()
        server.wait()
    return rows


def ranks_rows(folder: Path) -> list[Row]:
    """One rank trains, one teaches; and what `check` says of that."""
    return _of_two(folder, "1 rank trains, 1 teaches", ["parallel.teacher=ranks", "parallel.teacher_ranks=1"])


def ddp_rows(folder: Path) -> list[Row]:
    """Both models on each GPU."""
    return _of_two(folder, "both on each GPU, DDP", ["parallel.strategy=ddp", "parallel.teacher=copied"])


def _of_two(folder: Path, title: str, overrides: Sequence[str]) -> list[Row]:
    words = command("flagship", 2, "two")
    at = words.index("parallel.strategy=ddp")  # of the shape's own, with its steps
    words[at : at + 2] = [*SMALLER, f"train.steps={STEPS}", *overrides]
    found = summary(trained(folder, words, "0,1"))
    return [show(row_of(title, found, f"by its arithmetic {planned(overrides):,.0f} tokens/s"))]


def planned(overrides: Sequence[str]) -> float:
    """Tokens a second on two GPUs as `distill check` works them out."""
    from distill.planning.devices import find_device
    from distill.planning.preflight import situation_of
    from distill.planning.ranks import training_ranks
    from distill.planning.step_time import StepTokens, step_time
    from distill.recipe import load

    recipe, device = load(RECIPE, [*DRY, *SMALLER, *overrides]), find_device("H200")
    situation = situation_of(recipe, device, training_ranks(recipe, 2))
    tokens = float(recipe.train.batch_size * recipe.data.max_length * situation.world)
    time = step_time(situation, device, StepTokens(tokens, tokens, tokens * (recipe.data.max_length + 1) / 2))
    return float("nan") if time is None or time.seconds is None else tokens / time.seconds


def keep_rows(folder: Path) -> list[Row]:
    """Two epochs, of which the second asks nothing; one row is held out."""
    words = [sys.executable, "-m", "distill", "run", str(RECIPE), *DRY, *SMALLER, f"data.max_rows={ROWS * EPOCH + 1}",
             f"train.steps={2 * EPOCH - 1}", "train.log_every=1", "teacher.keep=kept", "--name", "keep"]  # fmt: skip
    lines = [line for line in trained(folder, words, "0") if "tokens_per_second" in line]
    first, second = (
        summary([line for line in lines if low < line["step"] <= high])
        for low, high in ((1, EPOCH), (EPOCH + 1, 2 * EPOCH))
    )
    gain = second["tokens_per_second"] / first["tokens_per_second"]
    size = sum(path.stat().st_size for path in (folder / "kept").glob("shard-*")) / 2**30
    return [
        show(row_of("keep, first epoch", first, f"{size:.2f} GiB stored in all")),
        show(row_of("keep, second epoch", second, f"{gain:.2f} x the first")),
    ]


def show(row: Row) -> Row:
    """Print a row as it comes."""
    print(table([row]), flush=True)
    return row


CASES = {"ranks": ranks_rows, "served": served_rows, "ddp": ddp_rows, "keep": keep_rows}
SERVER_GPU = "1"
SMALLER: list[str] = []  # overrides, for a trial without GPUs


def run(quick: bool, only: str) -> list[Row]:
    """`only` names cases, separated by commas; those of two GPUs are left out where there is one."""
    import torch

    rows: list[Row] = []
    names = only.split(",") if only else [name for name in CASES if name == "keep" or torch.cuda.device_count() > 1]
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows += CASES[name](Path(folder))
            except (RuntimeError, ValueError, OSError) as error:
                print(f"{name} failed: {error}", flush=True)
    return rows
