"""Teachers elsewhere and kept ones, random weights.

At the flagship's shapes (8B to 1B, 2 x 4,096 tokens a step):

    launched the run trains on GPU 0 and starts a teacher server on GPU 1 itself
    ddp      both GPUs hold both models
    served   the teacher on GPU 1 behind HTTP on loopback: to a run on GPU 0, then to clients
    keep     one GPU: the epoch that asks the teacher, and the second, which reads

At those of 70B to 8B, all weights of the student trained, on two GPUs, each beside what `check` works out for it:

    large    a teacher in fp8 served from a GPU of its own; everything in shards, in bf16; the teacher in fp8 on both

Cases are measured in the order in which they are named, each within its share of seconds (`LIMITS`) and what those
before it have left over. Each measurement is a process of its own, which is ended with all that it has started once it
has logged enough, or when its time is over; rows are printed as they come, and one that fails costs only itself. The
rate that a served or distant teacher can reach is that of the slower side: of the teacher's forward alone, and of the
student's step, loss and optimizer alone, which are phases of the same run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.harness import Row, table
from scripts.bench.many_gpus import DRY, FEWEST, PHASES, RECIPE, ROOT, metrics_of, run_until, summary

LENGTH, ROWS = 4096, 2
STEPS = 14
EPOCH, LOG_EVERY = 24, 4  # steps of 64 MiB: 1.5 GiB on disk
LIMITS = {"launched": 150.0, "ddp": 110.0, "served": 60.0, "keep": 80.0, "large": 180.0}  # seconds
SERVER_GPU = "1"
SMALLER: list[str] = []  # overrides, for a trial without GPUs
PROGRAM = "import sys; from scripts.bench import elsewhere; elsewhere.serve(int(sys.argv[1]), sys.argv[2:])"
LAUNCHED = ["parallel.teacher=served", "parallel.teacher_gpus=1"]
LARGE_RECIPE = ROOT / "recipes" / "llama3-70b-to-8b-lora.yaml"
LARGE = ["student.lora=null", "train.save_every=null", "train.eval_every=null", "data.validation={max_rows: 2}"]
LARGE_WAYS = {
    "teacher in fp8 served from a GPU of its own, 1 trains": ["teacher.dtype=fp8", *LAUNCHED],
    "both in shards, bf16": ["parallel.strategy=fsdp", "parallel.teacher=sharded"],
    "teacher in fp8 on both, student in shards": [
        "teacher.dtype=fp8",
        "parallel.strategy=fsdp",
        "parallel.teacher=copied",
    ],
}


def serve(port: int, overrides: Sequence[str]) -> None:
    """The server's process: says what its forward takes and that it is there; told so, what clients get."""
    from distill.recipe import load
    from distill.serving.app import RequestLimits, make_app
    from distill.serving.open import open_engine, running
    from scripts.bench import served

    engine = open_engine(load(RECIPE, overrides), 65_536)
    rows, length = ROWS, load(RECIPE, overrides).data.max_length

    def say(**values: object) -> None:
        print(json.dumps(values), flush=True)

    say(forward=served.seconds_of_forward(engine, rows, length))
    with running(make_app(engine, None, RequestLimits()), port):
        sys.stdin.readline()
    served.CLIENTS = (1, 4, 16)
    shape = f"8B, rows of {length} tokens, {engine.identity.dtype}"
    for row in served.compare(engine, length=length, requests=32, limits=RequestLimits(), shape=shape):
        say(row=dataclasses.asdict(row))


def row_of(candidate: str, found: dict[str, Any], note: str, shape: str = "") -> Row:
    """A row of a run's medians."""
    split = ", ".join(f"{phase} {found[f'time_{phase}'] * 1e3:.1f}" for phase in PHASES)
    speed = found["tokens_per_second"]
    return Row(
        "elsewhere",
        shape or f"8B to 1B, {ROWS} x {LENGTH} tokens a GPU and step, bf16",
        candidate,
        ms=found["tokens"] / speed * 1e3,
        peak_mib=found["peak_memory_gib"] * 1024,
        tokens_per_s=speed,
        note=f"{note}; {split}",
    )


def against_slower(found: dict[str, Any], forward: float) -> str:
    """The rate of a run beside that of its slower side alone, a teacher's forward of a micro-batch in seconds."""
    tokens = found["tokens"]
    student = tokens / sum(found[f"time_{phase}"] for phase in ("student", "loss", "optimizer"))
    teacher = tokens / forward
    share = found["tokens_per_second"] / min(student, teacher)
    return f"{share:.3f} x its slower side's (teacher alone {teacher:,.0f}, student alone {student:,.0f} tokens/s)"


def command(recipe: Path, overrides: Sequence[str], name: str, processes: int = 1) -> list[str]:
    """Return the command line of one measurement."""
    launcher = (
        [
            "torch.distributed.run",
            f"--nproc-per-node={processes}",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0",
            "-m",
        ]
        if processes > 1
        else []
    )
    return [sys.executable, "-m", *launcher, "distill", "run", str(recipe), *DRY, *overrides, *SMALLER, "--name", name]


def served_rows(folder: Path, until: float) -> Iterator[Row]:
    """The server to a run, then to clients; both begin at once, and the run waits for it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-c", PROGRAM, str(port), *DRY, *SMALLER]
    with run_until(words, ROOT, SERVER_GPU, until, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        overrides = [f"train.steps={STEPS}", "teacher.type=server", f"teacher.url=http://127.0.0.1:{port}"]
        found = summary(metrics_of(folder, command(RECIPE, overrides, "served"), "0", STEPS // 2, until))
        assert server.stdin and server.stdout
        forward = next((said["forward"] for line in server.stdout if "forward" in (said := said_in(line))), None)
        if forward is None:
            raise RuntimeError("the server has ended, or took too long")
        yield show(row_of("served from GPU 1, trained on GPU 0", found, against_slower(found, forward)))
        with contextlib.suppress(BrokenPipeError):
            print(file=server.stdin, flush=True)
        yield from (show(Row(**said["row"])) for line in server.stdout if "row" in (said := said_in(line)))


def said_in(line: str) -> dict[str, Any]:
    """Return the report in a line of the server's output."""
    found: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
    return found


def launched_rows(folder: Path, until: float) -> list[Row]:
    """One GPU trains, one serves; and what `check` says of that."""
    overrides = [f"train.steps={STEPS}", *LAUNCHED]
    return [_of_two(folder, until, "launch serves from GPU 1, trains on GPU 0", RECIPE, overrides, STEPS // 2)]


def ddp_rows(folder: Path, until: float) -> list[Row]:
    """Both models on each GPU."""
    overrides = [f"train.steps={STEPS}", "parallel.strategy=ddp", "parallel.teacher=copied"]
    return [_of_two(folder, until, "both on each GPU, DDP", RECIPE, overrides, STEPS // 2)]


def large_rows(folder: Path, until: float) -> Iterator[Row]:
    """70B to 8B in three ways, each with a third of the time."""
    begun = time.monotonic()
    for number, (title, overrides) in enumerate(LARGE_WAYS.items(), 1):
        words = [*LARGE, "train.steps=6", "train.log_every=1", *overrides]
        end = begun + (until - begun) * number / len(LARGE_WAYS)
        try:
            yield _of_two(folder, end, title, LARGE_RECIPE, words, FEWEST + 1)
        except RuntimeError as error:
            print(f"large: {title} failed: {error}", flush=True)


def _of_two(folder: Path, until: float, title: str, recipe: Path, overrides: Sequence[str], lines: int) -> Row:
    from distill.recipe import load

    processes = 1 if "parallel.teacher=served" in overrides else 2
    words = command(recipe, overrides, title.replace(" ", "-").replace(",", ""), processes)
    found = summary(metrics_of(folder, words, "0,1", lines, until))
    expected, chosen = planned(recipe, overrides)
    resolved = load(recipe, [*DRY, *overrides, *SMALLER])
    shape = f"{'70B to 8B' if recipe == LARGE_RECIPE else '8B to 1B'}, {resolved.train.batch_size} x "
    shape += f"{resolved.data.max_length} tokens a GPU and step, bf16"
    note = f"by its arithmetic {expected:,.0f} tokens/s{', what auto takes' if chosen else ''}"
    return show(row_of(title, found, note, shape))


def planned(recipe: Path, overrides: Sequence[str]) -> tuple[float, bool]:
    """Tokens a second on two H200 as `distill check` works them out, and whether `parallel`'s `auto` comes to this."""
    from distill.planning.device_plan import device_plan
    from distill.planning.devices import find_device
    from distill.planning.placement import estimate_placement
    from distill.planning.step_time import StepTokens, step_time
    from distill.planning.teacher_server import choose_teacher_server, training_gpus
    from distill.recipe import Parallel, load

    device = find_device("H200")
    given = load(recipe, [*DRY, *overrides])
    plan = device_plan(given, device, training_gpus(given, 2))
    tokens = float(given.train.batch_size * given.data.max_length * plan.world)
    time = step_time(plan, StepTokens(tokens, tokens, tokens * (given.data.max_length + 1) / 2))
    open_ = device_plan(given.model_copy(update={"parallel": Parallel()}), device, 2)
    chosen = choose_teacher_server(open_)
    same = chosen.parallel.teacher_gpus == given.parallel.teacher_gpus
    if given.parallel.teacher_gpus is None:
        same = same and estimate_placement(open_)[:2] == estimate_placement(plan)[:2]
    return (float("nan") if time is None or time.seconds is None else tokens / time.seconds), same


def keep_rows(folder: Path, until: float) -> list[Row]:
    """Two epochs, of which the second asks nothing; one row is held out."""
    overrides = [
        f"data.max_rows={ROWS * EPOCH + 1}",
        f"train.steps={2 * EPOCH}",
        f"train.log_every={LOG_EVERY}",
        "teacher.online_cache=kept",
    ]
    lines = metrics_of(folder, command(RECIPE, overrides, "keep"), "0", 2 * EPOCH // LOG_EVERY, until)
    first, second = (summary([line for line in lines if low < line["step"] <= low + EPOCH]) for low in (0, EPOCH))
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


CASES: dict[str, Callable[[Path, float], Iterable[Row]]] = {
    "launched": launched_rows,
    "ddp": ddp_rows,
    "served": served_rows,
    "keep": keep_rows,
    "large": large_rows,
}


def run(quick: bool, only: str) -> Iterator[Row]:
    """`only` names cases, separated by commas; else all that these GPUs can do, `quick` without `large`."""
    import torch

    two = [name for name in CASES if name != "large" or not quick] if torch.cuda.device_count() > 1 else ["keep"]
    begun = until = time.monotonic()
    for name in only.split(",") if only else two:
        until += LIMITS[name]
        with tempfile.TemporaryDirectory() as folder:
            try:
                yield from CASES[name](Path(folder), until)
            except (RuntimeError, ValueError, OSError) as error:
                print(f"{name} failed: {error}", flush=True)
        print(f"{name}: {time.monotonic() - begun:.0f} s since the first case began", flush=True)
