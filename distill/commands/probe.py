"""`distill check --probe`: two real steps of a recipe on this machine's GPU, to hold the prediction against."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PrinterCallback

from distill.core.console import working
from distill.models.precision import resolve_device
from distill.recipe import Recipe
from distill.teachers.base import open_context
from distill.teachers.registry import source_of
from distill.training.arguments import fused_optimizer, training_arguments


class Measured(NamedTuple):
    """What a step took: the most that torch's allocator held, bytes, and seconds of the second step."""

    peak: float
    seconds: float


def probe(recipe: Recipe) -> Measured:
    """Load both models, train two steps on random tokens of the recipe's shape, and measure; nothing is kept.

    Two, since the optimizer's states exist from the second on.

    Raises:
        ValueError: no GPU here, or models that cannot be loaded.
    """
    from distill.models.fp8_student import compute_in_fp8
    from distill.teachers.opening import opened_pair, patch_models
    from distill.training.trainer import DistillationTrainer

    device = resolve_device(recipe.train)
    if device.type != "cuda":
        raise ValueError("--probe: expected a CUDA device in this machine, got none; the prediction needs none")
    rows = 3 * (recipe.train.tokens_per_step or 0) // recipe.data.max_length + 4 * recipe.train.batch_size
    # random tokens take the same memory; `epochs` and figures along the way are of no interest here
    quick: dict[str, Any] = {"steps": 2, "epochs": None, "save_every": None, "eval_every": None, "log_every": 1}
    update = {"source": "synthetic", "sources": [], "max_rows": max(rows, 8), "cache": False}
    data = recipe.data.model_copy(update=update)
    recipe = recipe.model_copy(
        update={"train": recipe.train.model_copy(update=quick | {"report_to": []}), "data": data}
    )
    with contextlib.ExitStack() as opened:
        with working("loading both models"):
            context = open_context(recipe)
            source = source_of(recipe)
            vocabulary = source.vocabulary()
            pair = opened.enter_context(opened_pair(source, vocabulary, context))
            splits = vocabulary.read(data, 0)
        folder = opened.enter_context(tempfile.TemporaryDirectory())
        opened.enter_context(working("two steps"))
        # what loading and patching say belongs beside the result, not into it
        opened.enter_context(contextlib.redirect_stdout(sys.stderr))
        arguments = training_arguments(
            recipe, Path(folder), rows=len(splits.train), device=device, precision=context.precision
        )
        trainer = DistillationTrainer(
            pair.student, pair.teacher, arguments, loss=recipe.loss, vocab_size=pair.vocab_size,
            train_dataset=splits.epochs, optimizer_cls_and_kwargs=fused_optimizer(recipe, arguments),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        patch_models(pair, context.attention)
        pair.teacher.quantise()
        if recipe.student.compute == "fp8":
            compute_in_fp8(pair.student)
        torch.cuda.reset_peak_memory_stats(device)
        trainer.train()
    second = next(logs for logs in trainer.state.log_history if logs["step"] == 2 and "seconds" in logs)
    return Measured(float(torch.cuda.max_memory_allocated(device)), second["seconds"])
