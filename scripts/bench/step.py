"""The training step at flagship shapes under each variant of `distill.commands.bench`, random weights and tokens.

Every variant's very first loss must be that of the first variant, up to rounding; joules are those of a step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from distill.commands.bench import RIVALS, Batch, Rival, Step, StepTime, bench_step, make_batch, plain_step
from distill.recipe.loss import Loss
from scripts.bench.harness import Row

ARCHITECTURES = "recipes/architectures"
TEACHER, STUDENT = "llama-3.1-8b", "llama-3.2-1b"
BATCH, LENGTH = 2, 4096
NAMES = {
    "distill": "ours", "distill-fp8": "ours, fp8 teacher", "distill-compile": "ours, compiled layers",
    "distill-all-rows": "ours, all rows of the last layers", "distill-gated": "ours, gate and up as one product",
}  # fmt: skip


def random_model(name: str, seed: int) -> Any:
    """A model of a shipped architecture with random bf16 weights on the GPU."""
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(f"{ARCHITECTURES}/{name}")).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def pair() -> tuple[Any, Any]:
    """A fresh teacher and student."""
    return random_model(TEACHER, 0).requires_grad_(False), random_model(STUDENT, 1)


def whole_model(teacher: Any, student: Any, batch: Batch, optimizer: torch.optim.Optimizer) -> Step:
    """The plain step with both models whole under torch.compile; minutes of compiling."""
    compiled = [torch.compile(model, mode="max-autotune-no-cudagraphs") for model in (teacher, student)]
    return plain_step(*compiled, batch, optimizer, compiled=True)  # type: ignore[arg-type]


OTHERS: dict[str, Rival] = {**RIVALS, "compile-model": whole_model}


def rows_of(results: list[StepTime], case: str, shape: str) -> list[Row]:
    """A row for each result; one whose first loss is another than the first result's has no time."""
    rows = []
    for result in results:
        error = abs(result.loss / results[0].loss - 1)
        right = error < (0.2 if result.variant == "distill-fp8" else 0.02)
        split = ", ".join(f"{name} {ms:.1f}" for name, ms in result.phases.items())
        rows.append(
            Row(
                case=case,
                shape=shape,
                candidate=NAMES.get(result.variant, result.variant),
                ms=result.ms if right else math.nan,
                peak_mib=result.peak_gib * 1024,
                tokens_per_s=result.tokens_per_second,
                mfu=result.mfu,
                joules=None if math.isnan(result.joules) else result.joules,
                error={"loss": error},
                note=f"{split}; {result.note}" if result.note else split,
            )
        )
    return rows


def run(quick: bool, only: str) -> list[Row]:
    """`quick` leaves out torch.compile; `only` names variants, separated by commas."""
    variants = tuple(only.split(",")) if only else (
        "plain", "compile", "liger", "distill", "distill-gated", "distill-compile", "distill-fp8"
    )  # fmt: skip
    if quick and not only:
        variants = tuple(name for name in variants if "compile" not in name)
    results = bench_step(pair, lambda words: make_batch(BATCH, LENGTH, words), Loss(), variants=variants, rivals=OTHERS)
    return rows_of(results, "step", f"{TEACHER} to {STUDENT}, {BATCH} x {LENGTH} tokens, bf16")
