"""Where the flagship step's milliseconds and joules go, by class of kernel.

Three steps of ours are traced by torch's profiler and their kernels are put into classes by name. What a class draws
in watts is read off NVML's energy counter while one operation of that class repeats for `SECONDS`; its joules are its
milliseconds times these watts. Beside the sum stands what the counter says of whole steps.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from distill_kernels import swiglu
from distill_kernels.optim.adamw import FusedAdamW
from torch.nn.functional import scaled_dot_product_attention

from distill.commands.bench import Clock, make_batch, our_step
from distill.models.attention import choose_attention
from distill.models.patching import patch
from distill.teachers.objective import DistillationObjective
from scripts.bench.harness import Row
from scripts.bench.small import Meter
from scripts.bench.step import BATCH, LENGTH, STUDENT, TEACHER, random_model

STEPS, SECONDS = 3, 2.5
CLASSES = {  # the first that matches
    "optimizer": r"adamw",
    "attention": r"cudnn|fmha|flash|sdpa|_key_gradient|_query_gradient|_row_terms|_ranges",
    "loss: logits and their rows": r"_project|_row_kernel|_scale_kernel|_accumulate|_fold",
    "products": r"nvjet|gemm|cutlass|xmma|splitk",
    "norms, gates, rotary, additions": r"",
}


def class_of(kernel: str) -> str:
    """The class of a kernel of this name."""
    return next(name for name, pattern in CLASSES.items() if re.search(pattern, kernel, re.IGNORECASE))


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


def run(quick: bool, only: str) -> list[Row]:
    """One breakdown; `quick` and `only` change nothing."""
    teacher, student = random_model(TEACHER, 0).requires_grad_(False), random_model(STUDENT, 1).train()
    batch = make_batch(BATCH, LENGTH, student.config.vocab_size)
    chosen = [choose_attention(m, BATCH, LENGTH, backward=m is student)[0] for m in (teacher, student)]
    for model, role, attention in zip((teacher, student), ("teacher", "student"), chosen, strict=True):
        patch(model, role, attention=attention)  # type: ignore[arg-type]
    optimizer = FusedAdamW(student.parameters(), lr=1e-5)
    step = our_step(DistillationObjective(teacher, student), student, batch, optimizer)
    whole = repeat(lambda: step(Clock()), least=4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step(Clock())
        torch.cuda.synchronize()
    events: Any = profiler.events()
    spent = Counter[str]()
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[class_of(event.name)] += event.time_range.elapsed_us() / 1e3 / STEPS

    mlp, attention = teacher.model.layers[0].mlp, teacher.config
    x = torch.randn(BATCH * LENGTH, attention.hidden_size, device="cuda", dtype=torch.bfloat16)
    gate = torch.nn.functional.linear(x, mlp.gate_proj.weight)
    heads = torch.randn(
        BATCH, attention.num_attention_heads, LENGTH, attention.head_dim, device="cuda", dtype=torch.bfloat16
    )
    operations: dict[str, Callable[[], object]] = {
        "products": lambda: torch.nn.functional.linear(x, mlp.gate_proj.weight),
        "attention": lambda: scaled_dot_product_attention(heads, heads, heads, is_causal=True),
        "norms, gates, rotary, additions": lambda: swiglu(gate, gate),
        "optimizer": optimizer.step,
    }
    watts = {}
    with torch.no_grad():
        for p in student.parameters():
            p.grad = torch.full_like(p, 1e-6)
        for name, operation in operations.items():
            measured = repeat(operation, least=8)
            watts[name] = measured["joules"] / measured["ms"] * 1e3
    watts["loss: logits and their rows"] = watts["products"]  # the most of it is the logits' product

    shape = f"{TEACHER} to {STUDENT}, {BATCH} x {LENGTH} tokens, bf16"
    joules = {name: ms * watts[name] / 1e3 for name, ms in spent.items()}
    rows = [
        Row("breakdown", shape, name, ms, note=f"{joules[name]:.1f} J at {watts[name]:.0f} W")
        for name, ms in spent.most_common()
    ]
    total = f"{whole['joules']:.1f} J counted, {sum(joules.values()):.1f} J by classes, attention {' / '.join(chosen)}"
    return [*rows, Row("breakdown", shape, "the step", whole["ms"], peak_mib=whole["peak_mib"], note=total)]
