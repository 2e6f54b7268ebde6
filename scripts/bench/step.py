"""The training step at flagship shapes under each variant of `distill.commands.bench`, random weights and tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from distill.commands.bench import bench_step
from distill.recipe.loss import Loss
from scripts.bench.harness import Row

ARCHITECTURES = "recipes/architectures"
TEACHER, STUDENT = "llama-3.1-8b", "llama-3.2-1b"
BATCH, LENGTH = 2, 4096


def random_model(name: str, seed: int) -> Any:
    """A model of a shipped architecture with random bf16 weights on the GPU."""
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(f"{ARCHITECTURES}/{name}")).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def run(quick: bool, only: str) -> list[Row]:
    """`quick` leaves out torch.compile; `only` names variants, separated by commas."""
    variants = tuple(only.split(",")) if only else ("plain", "compile", "liger", "distill", "distill-fp8")
    if quick and not only:
        variants = tuple(name for name in variants if name != "compile")
    load: Callable[[], tuple[Any, Any]] = lambda: (  # noqa: E731
        random_model(TEACHER, 0).requires_grad_(False),
        random_model(STUDENT, 1),
    )
    rows = []
    for result in bench_step(load, BATCH, LENGTH, Loss(), variants=variants):
        split = ", ".join(f"{name} {ms:.1f}" for name, ms in result.phases.items())
        rows.append(
            Row(
                case="step",
                shape=f"{TEACHER} to {STUDENT}, {BATCH} x {LENGTH} tokens, bf16",
                candidate="ours, fp8 teacher" if result.variant == "distill-fp8" else
                "ours" if result.variant == "distill" else result.variant,
                ms=result.ms,
                peak_mib=result.peak_gib * 1024,
                tokens_per_s=result.tokens_per_second,
                mfu=result.mfu,
                note=split,
            )
        )  # fmt: skip
    return rows
