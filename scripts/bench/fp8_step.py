"""The flagship step in fp8: time, joules and memory beside bf16 and torchao, and what its parts take.

8B to 1B shapes, 2 x 4,096 random tokens, every one learned. All but one in one process, one after the other, each
`WARM` steps and then at least `SECONDS` by the wall clock; joules are NVML's counter over the same steps.

    plain                     transformers' layers, sdpa, logits in full, KL in fp32, torch's fused AdamW
    compile                   the same, each decoder layer and the divergence under torch.compile
    torchao fp8 + compile     the same, the student's linear layers torchao's float8 training and the teacher's its
                              dynamic float8 inference, both row-wise, heads in bf16
    ours, ours fp8 teacher, ours fp8 teacher and student

torchao's candidate has a process of its own and BENCH_LIMIT seconds (150), compiling included; as in `small`, what it
compiled is kept. `quantize_` would set inductor's `coordinate_descent_tuning`, in all directions: the layers' 62
Triton kernels (27 in bf16) are then compiled 5 to 30 times more each, one after the other, when first called. That is
some 1,000 compilations of 0.3 s each; here inductor is as it comes, as for `compile`.

With `--only parts`: the student's products and what quantises their operands, alone.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from distill_kernels.matmul import fp8_train
from distill_kernels.optim.adamw import FusedAdamW

from distill.commands.bench import Clock, make_batch, our_step, plain_step, timed_steps
from distill.recipe.loss import Loss
from distill.teachers.objective import DistillationObjective
from scripts.bench.harness import Row, time_in_turn
from scripts.bench.small import Meter, candidate, tell
from scripts.bench.step import BATCH, LENGTH, STUDENT, TEACHER, random_model, use_kernels
from scripts.bench.step_variants import compile_layers

WARM, SECONDS = 5, 2.5
TOKENS = BATCH * LENGTH
CANDIDATES = ("plain", "ours", "ours, fp8 teacher", "ours, fp8 teacher and student", "compile", "torchao fp8 + compile")


def our_candidate(name: str, teacher: Any, student: Any, batch: dict[str, torch.Tensor]) -> Callable[[Clock], Any]:
    """`distill run`'s step."""
    use_kernels(teacher, student, fp8_teacher="fp8 teacher" in name, fp8_student=name.endswith("student"))
    objective = DistillationObjective(teacher, student, Loss())
    return our_step(objective, student, batch, FusedAdamW(student.parameters(), lr=1e-5))


def rival(name: str, teacher: Any, student: Any, batch: dict[str, torch.Tensor]) -> Callable[[Clock], Any]:
    """transformers' models, compiled by layers and in torchao's fp8 as the name says."""
    if name.startswith("torchao"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

        def body(module: torch.nn.Module, path: str) -> bool:
            return isinstance(module, torch.nn.Linear) and "lm_head" not in path

        convert_to_float8_training(
            student, config=Float8LinearConfig.from_recipe_name("rowwise"), module_filter_fn=body
        )
        row_wise = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)
        quantize_(teacher, row_wise, filter_fn=body)
        gc.collect()
        torch.cuda.empty_cache()
    compiled = "compile" in name
    if compiled:
        torch._dynamo.reset()
        for model in (teacher, student):
            compile_layers(model)
    return plain_step(teacher, student, batch, torch.optim.AdamW(student.parameters(), lr=1e-5, fused=True), compiled)


def measured(name: str) -> Row:
    """One candidate; in a function of its own, so that nothing of it outlives it."""
    teacher, student = random_model(TEACHER, 0).requires_grad_(False), random_model(STUDENT, 1).train()
    batch = make_batch(BATCH, LENGTH, student.config.vocab_size)
    make = our_candidate if name.startswith("ours") else rival
    step = make(name, teacher, student, batch)
    meter, began = Meter(), time.perf_counter()
    for number in range(WARM):
        if number == WARM - 1:
            meter.start()
            warm = meter.began - began
        loss = step(Clock())
    steps = math.ceil(SECONDS / meter.stop(1)["ms"] * 1e3)
    torch.cuda.reset_peak_memory_stats()
    meter.start()
    timed = timed_steps(step, steps)
    result, phases = meter.stop(steps), timed()
    split = [
        f"{phase} {statistics.median(each[phase] for each in phases) * 1e3:.1f}" for phase, s in phases[0].items() if s
    ]
    if "compile" in name:
        split.append(f"compiled in {warm:.0f} s")
    return Row(
        case="fp8_step",
        shape=f"{TEACHER} to {STUDENT}, {BATCH} x {LENGTH} tokens",
        candidate=name,
        ms=result["ms"],
        peak_mib=result["peak_mib"],
        tokens_per_s=TOKENS / result["ms"] * 1e3,
        joules=result["joules"],
        note=", ".join([*split, f"loss {float(loss):.4f}"]),
    )


def measured_apart(name: str) -> Row:
    """`measured` in a process of its own.

    Raises:
        RuntimeError: nothing came of it in time, or it failed.
    """
    found = candidate(__name__, name, limit=float(os.environ.get("BENCH_LIMIT", 150)))
    if "ms" not in found:
        raise RuntimeError(found["note"])
    return Row(**found)


def parts() -> Iterator[Row]:
    """Each kernel of the student's layers in fp8 with its bytes, each product with its operations and bf16's."""
    hidden, inner, qkv = 2048, 8192, 3072

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x, h, gate, up, w = (
        draw(TOKENS, hidden),
        draw(TOKENS, inner),
        draw(TOKENS, inner),
        draw(TOKENS, inner),
        draw(inner, hidden),
    )
    dq = [draw(TOKENS, 2048), draw(TOKENS, 512), draw(TOKENS, 512)]
    _, sw = fp8_train.quantize([draw(2 * inner, hidden)])
    sw = sw.view(-1)
    dy8, c = fp8_train.quantize([gate, up, h], "swiglu_backward", sw)
    x8, sx = fp8_train.quantize([x])
    small, token = sw[:qkv].contiguous(), c * sx
    dq8, _ = fp8_train.quantize(dq, factor=small)
    kernels: dict[str, tuple[Callable[[], object], int]] = {
        "quantize x": (lambda: fp8_train.quantize([x]), 3 * x.numel()),
        "quantize silu(gate) up": (lambda: fp8_train.quantize([gate, up], "swiglu"), 5 * h.numel()),
        "quantize dq dk dv": (lambda: fp8_train.quantize(dq, factor=small), 3 * TOKENS * qkv),
        "quantize dgate dup": (lambda: fp8_train.quantize([gate, up, h], "swiglu_backward", sw), 8 * h.numel()),
        "quantize w": (lambda: fp8_train.quantize([w]), 3 * w.numel()),
        "transpose w": (lambda: fp8_train.transpose_weights([w], sw[:inner]), 3 * w.numel()),
        "transpose x": (lambda: fp8_train.transpose_bytes(x8), 2 * x.numel()),
        "dq dk dv by columns": (lambda: fp8_train.by_columns(dq8, token, small), 3 * TOKENS * qkv),
        "dgate dup by columns": (lambda: fp8_train.by_columns(dy8, token, sw), 6 * h.numel()),
    }
    shape = f"{TOKENS} tokens, {STUDENT}"
    times = time_in_turn({name: run for name, (run, _) in kernels.items()}, calls=10)
    for name, (_, moved) in kernels.items():
        yield Row("fp8_parts", shape, name, times[name], tb_per_s=moved / times[name] / 1e9)
    # every product as [M, K] x [N, K]: M, N, K
    shapes = {
        "y, q k v": (TOKENS, qkv, hidden),
        "dx, q k v": (TOKENS, hidden, qkv),
        "dW, q k v": (qkv, hidden, TOKENS),
        "y, gate": (TOKENS, inner, hidden),
        "dx, gate up": (TOKENS, hidden, 2 * inner),
        "dW, gate up": (2 * inner, hidden, TOKENS),
        "y, down": (TOKENS, hidden, inner),
        "dh, down": (TOKENS, inner, hidden),
        "dW, down": (hidden, inner, TOKENS),
    }
    for name, (m, n, k) in shapes.items():
        a, b = draw(m, k), draw(n, k)
        (a8, a_scale), (b8, b_scale) = fp8_train.quantize([a]), fp8_train.quantize([b])
        in_fp8 = functools.partial(
            torch._scaled_mm, a8, b8.t(), scale_a=a_scale, scale_b=b_scale.t(), out_dtype=torch.bfloat16
        )
        runs: dict[str, Callable[[], torch.Tensor]] = {
            "fp8": functools.partial(in_fp8, use_fast_accum=True),
            "fp8, exact sums": in_fp8,
            "bf16": functools.partial(torch.mm, a, b.t()),
        }
        exact = a8.float() @ b8.float().t() * a_scale * b_scale.t()
        for label, ms in time_in_turn(runs, calls=20).items():
            error = {"error": float((runs[label]().float() - exact).norm() / exact.norm())}
            rate = 2 * m * n * k / ms / 1e9
            yield Row("fp8_parts", shape, f"{name}: {label}", ms, error=error, tflop_per_s=rate)


def run(quick: bool, only: str) -> Iterator[Row]:
    """`quick` leaves out what compiles; `only` is a part of a candidate's name, or "parts"."""
    if only == "parts":
        yield from parts()
        return
    for name in CANDIDATES:
        if only not in name or (quick and "compile" in name):
            continue
        try:
            measure = measured_apart if name.startswith("torchao") else measured
            row = measure(name)
        except Exception as error:  # a rival that fails leaves the others' rows
            if name.startswith("ours"):
                raise
            print(f"fp8_step: {name}: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        print(f"{name:<36}{row.ms:8.1f} ms {row.joules:6.1f} J  {row.peak_mib or 0:8.0f} MiB  {row.note}", flush=True)
        yield row


if __name__ == "__main__":
    tell(asdict(measured(sys.argv[1])))
