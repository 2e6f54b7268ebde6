"""Breakdown of a step's milliseconds and joules by class of kernel, and its heaviest kernels: flagship and small pair.

    python -m scripts.bench breakdown --only flagship
    python -m scripts.bench breakdown --only small

Steps of ours are traced by torch's profiler and their kernels are put into classes by name. What one of the three
heaviest classes draws in watts is read off NVML's energy counter while one operation of that class repeats for
`SECONDS`; its joules are its milliseconds times these watts. The optimizer moves memory as norms do, and of the loss
the most is its products: their watts are taken. Beside the sum stands what the counter says of whole steps; how long
each part of the measurement took is told on standard error.
"""

from __future__ import annotations

import collections
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from distill_kernels import swiglu
from distill_kernels.optim.adamw import FusedAdamW
from torch.nn.functional import scaled_dot_product_attention

from distill.commands.bench import Clock, make_batch, our_step
from distill.teachers.objective import DistillationObjective
from scripts.bench.harness import Row
from scripts.bench.small import Meter
from scripts.bench.step import BATCH, LENGTH, STUDENT, TEACHER, random_model, use_kernels

STEPS, SECONDS = 2, 2.0
CLASSES = {  # the first that matches
    "optimizer": r"adamw",
    "attention": r"cudnn|fmha|flash|sdpa|_attention_kernel|_key_gradient|_query_gradient|_row_terms|_ranges",
    "loss: logits and their rows": r"_project|_row_kernel|_scale_kernel|_accumulate|_reduce_tiles|_normalisers",
    "products": r"nvjet|gemm|cutlass|xmma|splitk|_tiled_kernel",
    "norms, gates, rotary, additions": r"",
}


def class_of(kernel: str) -> str:
    """The class of a kernel of this name."""
    return next(name for name, pattern in CLASSES.items() if re.search(pattern, kernel, re.IGNORECASE))


PAIRS = {  # teacher, student, rows, tokens of each
    "flagship": (TEACHER, STUDENT, BATCH, LENGTH),
    "small": ("smollm2-135m", "smollm2-135m", 8, 1024),
}
HEAVIEST = 30  # kernels that are listed

WATTS_OF = {"loss: logits and their rows": "products", "optimizer": "norms, gates, rotary, additions"}


def spent(kernels: Iterable[tuple[str, float]], steps: int) -> dict[str, float]:
    """Milliseconds a step by class, from the names and microseconds of the kernels of `steps` steps."""
    by_class = dict.fromkeys(CLASSES, 0.0)
    for name, microseconds in kernels:
        by_class[class_of(name)] += microseconds / 1e3 / steps
    return by_class


def heaviest(kernels: Iterable[tuple[str, float]], steps: int) -> list[str]:
    """Lines on the kernels that take the most time: milliseconds and launches a step, microseconds each."""
    by_name: dict[str, list[float]] = collections.defaultdict(list)
    for name, microseconds in kernels:
        by_name[name].append(microseconds)
    ordered = sorted(by_name.items(), key=lambda pair: -sum(pair[1]))
    lines = [
        f"{sum(each) / 1e3 / steps:8.3f} ms  {len(each) / steps:6.0f} x {sum(each) / len(each):8.1f} us  {name[:100]}"
        for name, each in ordered[:HEAVIEST]
    ]
    total, launches = sum(map(sum, by_name.values())), sum(map(len, by_name.values()))
    return [*lines, f"{total / 1e3 / steps:8.3f} ms  {launches / steps:6.0f} kernels, {len(by_name)} names"]


class Stopwatch:
    """Says how long each part of the measurement took."""

    def __init__(self) -> None:
        self.began = time.perf_counter()

    def lap(self, part: str) -> None:
        """End of `part`."""
        now = time.perf_counter()
        print(f"breakdown: {part} {now - self.began:.1f} s", file=sys.stderr, flush=True)
        self.began = now


def repeat(run: Callable[[], object], least: int = 1) -> dict[str, float]:
    """`Meter.stop` of as many calls as last `SECONDS`."""
    meter = Meter()
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    meter.start()
    calls, began = 0, time.perf_counter()
    while calls < least or time.perf_counter() - began < SECONDS:
        for _ in range(least):
            run()
        torch.cuda.synchronize()
        calls += least
    return meter.stop(calls)


def run(quick: bool, only: str) -> Iterator[Row]:
    """`only` names pairs; `quick` changes nothing."""
    for name, pair in PAIRS.items():
        if only in name:
            yield from _breakdown(*pair)


def _breakdown(teacher_name: str, student_name: str, rows: int, length: int) -> Iterator[Row]:
    watch = Stopwatch()
    teacher, student = random_model(teacher_name, 0).requires_grad_(False), random_model(student_name, 1).train()
    batch = make_batch(rows, length, student.config.vocab_size)
    watch.lap("models")
    chosen = use_kernels(teacher, student, rows=rows, length=length)
    optimizer = FusedAdamW(student.parameters(), lr=1e-5)
    step = our_step(DistillationObjective(teacher, student), student, batch, optimizer)
    watch.lap("choosing attention, patching")
    step(Clock())
    torch.cuda.synchronize()
    watch.lap("first step")
    whole = repeat(lambda: step(Clock()), least=4)
    watch.lap("joules of steps")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step(Clock())
        torch.cuda.synchronize()
    events: Any = profiler.events()
    on_gpu = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    # a range that somebody has named covers kernels that are counted themselves
    kernels = [(e.name, e.time_range.elapsed_us()) for e in on_gpu if not getattr(e, "is_user_annotation", False)]
    by_class = spent(kernels, STEPS)
    watch.lap(f"trace of {len(kernels):,} kernels")
    print("\n".join(heaviest(kernels, STEPS)), flush=True)

    mlp, attention = teacher.model.layers[0].mlp, teacher.config
    x = torch.randn(rows * length, attention.hidden_size, device="cuda", dtype=torch.bfloat16)
    weight = mlp.gate_proj.weight.contiguous()
    gate = torch.nn.functional.linear(x, weight)
    heads = torch.randn(
        rows, attention.num_attention_heads, length, attention.head_dim, device="cuda", dtype=torch.bfloat16
    )
    operations: dict[str, Callable[[], object]] = {
        "products": lambda: torch.nn.functional.linear(x, weight),
        "attention": lambda: scaled_dot_product_attention(heads, heads, heads, is_causal=True),
        "norms, gates, rotary, additions": lambda: swiglu(gate, gate),
    }
    watts = {}
    with torch.no_grad():
        for name, operation in operations.items():
            measured = repeat(operation, least=8)
            watts[name] = measured["joules"] / measured["ms"] * 1e3
    watts |= {name: watts[other] for name, other in WATTS_OF.items()}
    watch.lap("joules of classes")

    shape = f"{teacher_name} to {student_name}, {rows} x {length} tokens, bf16"
    joules = {name: ms * watts[name] / 1e3 for name, ms in by_class.items()}
    for name, ms in sorted(by_class.items(), key=lambda pair: -pair[1]):
        yield Row("breakdown", shape, name, ms, note=f"{joules[name]:.1f} J at {watts[name]:.0f} W")
    total = f"{whole['joules']:.1f} J counted, {sum(joules.values()):.1f} J by classes, attention {' / '.join(chosen)}"
    yield Row("breakdown", shape, "the step", whole["ms"], peak_mib=whole["peak_mib"], note=total)
