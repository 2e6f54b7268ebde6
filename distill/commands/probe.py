"""Measurements of `distill check --probe`: two real training steps, and the error of an fp8 teacher by layer."""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PrinterCallback

from distill.core.console import spinner
from distill.data.collator import Collator, move_batch, padding_token
from distill.models.dtypes import resolve_device
from distill.models.gpu_specs import family_in, runs_our_kernels
from distill.models.patch.patching import patch
from distill.models.quantised_checkpoints import is_quantised
from distill.planning.run_plan import plan_steps
from distill.recipe import Recipe
from distill.teachers.backends.fp8 import Fp8Teacher, Offer, fp8_offers
from distill.teachers.load_context import load_context
from distill.teachers.registry import source_of
from distill.training.arguments import fused_optimizer, training_arguments


class ProbeResult(NamedTuple):
    """Peak memory of torch's allocator in bytes, and seconds of the second step."""

    peak: float
    seconds: float


def probe(recipe: Recipe) -> ProbeResult:
    """Load both models, train two steps on random tokens of the recipe's shape, and measure; nothing is kept.

    Two steps, since the optimizer's states exist from the second on.

    Raises:
        ValueError: This machine has no GPU, or the models cannot be loaded.
    """
    from distill.models.precision.fp8_student import compute_in_fp8
    from distill.teachers.kernels import patch_models
    from distill.teachers.opening import opened_pair
    from distill.training.trainer import DistillationTrainer

    device = resolve_device(recipe.train)
    if not probe_available(recipe):
        raise ValueError("--probe: expected a CUDA device in this machine, got none; check without --probe needs none")
    # enough for two steps beside the rows that are held out
    rows = 3 * (recipe.train.tokens_per_step or 0) // recipe.data.max_length + 4 * recipe.train.batch_size
    # random tokens take the same memory; epochs, evaluations and checkpoints are not needed here
    quick: dict[str, Any] = {"steps": 2, "epochs": None, "save_every": None, "eval_every": None, "log_every": 1}
    update = {"source": "synthetic", "sources": [], "max_rows": max(rows, 8), "cache": False}
    data = recipe.data.model_copy(update=update)
    train = recipe.train.model_copy(update=quick | {"report_to": []})
    recipe = recipe.model_copy(update={"train": train, "data": data})
    with contextlib.ExitStack() as opened:
        with spinner("loading both models"):
            source = source_of(recipe)
            vocabulary = source.vocabulary()
            splits = vocabulary.read(data, 0)
            context = load_context(recipe, splits)
            pair = opened.enter_context(opened_pair(source, vocabulary, context))
        folder = opened.enter_context(tempfile.TemporaryDirectory())
        opened.enter_context(spinner("two steps"))
        # messages of loading and patching go to standard error, not into the result
        opened.enter_context(contextlib.redirect_stdout(sys.stderr))
        arguments = training_arguments(
            recipe, Path(folder), plan_steps(recipe, len(splits.train)), device=device, precision=context.precision
        )
        trainer = DistillationTrainer(
            pair.student,
            pair.teacher,
            arguments,
            loss=recipe.loss.unweighted,
            vocab_size=pair.vocab_size,
            train_dataset=splits.epochs,
            optimizer_cls_and_kwargs=fused_optimizer(recipe, arguments),
        )
        trainer.remove_callback(PrinterCallback)
        patch_models(pair, context.attention)
        pair.teacher.quantise()
        if recipe.student.compute == "fp8":
            compute_in_fp8(pair.student)
        torch.cuda.reset_peak_memory_stats(device)
        trainer.train()
    second = next(logs for logs in trainer.state.log_history if logs["step"] == 2 and "seconds" in logs)
    return ProbeResult(float(torch.cuda.max_memory_allocated(device)), second["seconds"])


def probe_available(recipe: Recipe) -> bool:
    return resolve_device(recipe.train).type == "cuda"


def probe_fp8(recipe: Recipe) -> list[Offer]:
    """Return the error of an fp8 teacher with some layers left in 16 bits; empty for any other teacher.

    On a GPU it is measured with our kernels, as in a run, and timed.

    Raises:
        ValueError: `distill run` would refuse the recipe.
    """
    if recipe.teacher.dtype != "fp8":
        return []
    context = load_context(recipe)
    source = source_of(recipe)
    device = context.device
    for problem in source.problems(cuda=device.type == "cuda", sharded=False, family=family_in(device)):
        raise ValueError(problem)
    with spinner("measuring the fp8 error of each layer"):
        vocabulary = source.vocabulary()
        rows = vocabulary.read(recipe.data, recipe.train.seed).validation
        teacher = source.open(context, vocabulary)
        if not isinstance(teacher, Fp8Teacher) or is_quantised(teacher.model):
            return []
        if runs_our_kernels(device) and device.type == "cuda":
            patch(teacher.model, "teacher", attention=context.attention.of(teacher.model, "teacher"))
        collate = Collator(padding_token(vocabulary.tokenizer, teacher.model.config), omit_plain_positions=True)
        batch = collate([rows[index] for index in range(min(recipe.train.batch_size, len(rows)))])
        batch = move_batch(batch, device)
        return fp8_offers(teacher.model, teacher.hidden, batch, _milliseconds if device.type == "cuda" else None)


def _milliseconds(run: Callable[[], object]) -> float:
    """Return the median time of a call on the GPU, over five after two warm-up calls."""
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])
