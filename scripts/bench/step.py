"""The training step at flagship shapes under each variant of step_variants.py, random weights and tokens.

Every variant's very first loss must be that of the first variant, up to rounding; joules are those of a step.
`--only "plain,distill"` runs these variants of the flagship's pair, `--only "qwen2.5 compile,distill"` of another pair.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from distill.commands.bench import Batch, Rival, Step, StepTime, bench_step, make_batch, plain_step
from distill.recipe.loss import Loss
from scripts.bench.harness import Row
from scripts.bench.step_variants import RIVALS, variants_of

ARCHITECTURES = "recipes/architectures"
TEACHER, STUDENT = "llama-3.1-8b", "llama-3.2-1b"
BATCH, LENGTH = 2, 4096
FLAGSHIP = ("plain", "compile", "liger", "distill", "distill-fp8")
PAIRS = {  # teacher, student, variants; Liger takes no heads of different sizes
    "flagship": (TEACHER, STUDENT, FLAGSHIP),
    "qwen2.5": ("qwen2.5-7b", "qwen2.5-1.5b", ("plain", "compile", "distill", "distill-fp8")),
    "mixture": ("qwen3-30b-a3b", "qwen3-1.7b", ("plain", "compile", "distill", "distill-fp8")),
}
LAYERS = {"qwen3-30b-a3b": 12}  # of 48, so that the teacher fits in 16 bits beside a whole step
NAMES = {
    "distill": "ours",
    "distill-fp8": "ours, fp8 teacher",
    "distill-apart": "ours, weights where they came",
}


def random_model(name: str, seed: int, **settings: Any) -> Any:
    """A model of a shipped architecture, with other `settings` of its configuration, with random bf16 weights on the
    GPU."""
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(f"{ARCHITECTURES}/{name}", **settings)
            ).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def pair(teacher: str = TEACHER, student: str = STUDENT) -> tuple[Any, Any]:
    """A fresh teacher and student, of as many layers as fit."""
    cut = {"num_hidden_layers": LAYERS[teacher]} if teacher in LAYERS else {}
    return random_model(teacher, 0, **cut).requires_grad_(False), random_model(student, 1)


def use_kernels(
    teacher: Any,
    student: Any,
    *,
    rows: int = BATCH,
    length: int = LENGTH,
    fp8_teacher: bool = False,
    fp8_student: bool = False,
) -> list[str]:
    """Prepare both for steps of `rows` of `length` tokens as `distill run` does; the attention of both."""
    from distill.models.fp8_teacher import quantise_teacher
    from distill.models.gpu_specs import joins_on
    from distill.models.patch.attention import choose_attention
    from distill.models.patch.joined_projections import join_projections
    from distill.models.patch.patching import patch
    from distill.models.precision.fp8_student import compute_in_fp8

    models = (teacher, student)
    chosen = [choose_attention(model, rows, length, backward=model is student)[0] for model in models]
    patch(teacher, "teacher", attention=chosen[0])
    patch(student, "student", attention=chosen[1])
    if fp8_teacher:
        quantise_teacher(teacher)
        gc.collect()
        torch.cuda.empty_cache()
    if fp8_student:
        compute_in_fp8(student)
    for model in models if joins_on(torch.device("cuda")) else ():
        join_projections(model, trains=True)
    return chosen


def whole_model(teacher: Any, student: Any, batch: Batch, optimizer: torch.optim.Optimizer) -> Step:
    """The plain step with both models whole under torch.compile; minutes of compiling."""
    compiled = [torch.compile(model, mode="max-autotune-no-cudagraphs") for model in (teacher, student)]
    return plain_step(*compiled, batch, optimizer, compiled=True)  # type: ignore[arg-type]


OTHERS: dict[str, Rival] = {**RIVALS, "compile-model": whole_model}


def rows_of(results: Iterable[StepTime], case: str, shape: str) -> Iterator[Row]:
    """A row for each result; one whose first loss is another than the first result's has no time."""
    first = 0.0
    for result in results:
        first = first or result.loss
        error = abs(result.loss / first - 1)
        right = error < (0.2 if result.variant == "distill-fp8" else 0.02)
        split = ", ".join(f"{name} {ms:.1f}" for name, ms in result.phases.items())
        yield Row(
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


def chosen(quick: bool, only: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """Teacher, student and variants of each pair that is to run."""
    name, _, variants = only.partition(" ") if only.split(" ")[0] in PAIRS else ("flagship" if only else "", "", only)
    picked = {name: PAIRS[name]} if name else {"flagship": PAIRS["flagship"]} if quick else PAIRS
    return [
        (
            teacher,
            student,
            tuple(variants.split(","))
            if variants
            else tuple(each for each in every if not (quick and "compile" in each)),
        )
        for teacher, student, every in picked.values()
    ]


def run(quick: bool, only: str) -> Iterator[Row]:
    """`quick` leaves out torch.compile and all pairs but the flagship's; `only` names a pair, variants, or both."""
    for teacher, student, variants in chosen(quick, only):
        results = bench_step(
            functools.partial(pair, teacher, student),
            lambda words: make_batch(BATCH, LENGTH, words),
            Loss(),
            variants=variants_of(variants, OTHERS),
        )
        cut = f", {LAYERS[teacher]} layers" if teacher in LAYERS else ""
        yield from rows_of(results, "step", f"{teacher}{cut} to {student}, {BATCH} x {LENGTH} tokens, bf16")
