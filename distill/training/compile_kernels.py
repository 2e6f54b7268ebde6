"""Compilation of a run's kernels side by side, before its models are patched and its first step is taken.

Triton compiles a kernel at its first launch: one after another they took 25 of the 53 s until the first step of an 8B
and a 1B model on an H100. Here both models are patched, and one micro-batch goes forward and backward, while launches
only hand their kernels to threads; then everything is undone. Nothing that was computed is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from typing import TYPE_CHECKING

import torch
from distill_kernels import tuning
from distill_kernels.compile_ahead import cache_folder, compiling_ahead

from distill.core import console
from distill.core.ranks import is_main_process
from distill.models.gpu_specs import runs_our_kernels
from distill.models.patch.forward_comparison import FORWARD_ERRORS, first_line
from distill.models.patch.patching import unpatch
from distill.models.patch.swaps import Role
from distill.models.sharding import is_sharded
from distill.teachers.capabilities import storing
from distill.teachers.kernels import patch_model
from distill.teachers.opening import ModelPair

if TYPE_CHECKING:
    from distill.models.patch.attention_choice import AttentionChoices
    from distill.objectives.targets import Batch
    from distill.training.trainer import DistillationTrainer

log = logging.getLogger(__name__)


def compile_kernels(
    trainer: DistillationTrainer, pair: ModelPair, choices: AttentionChoices, batch: Batch, recipe: str
) -> None:
    """Compile the kernels of patching and of a training step, unless Triton's cache holds those of this recipe.

    Those of sharded models are left to their first launches, and those of a step whose teacher stores its outputs.

    Args:
        trainer: Trainer of the run.
        pair: Its models, not patched yet.
        choices: Attention back ends; the one that may be chosen is compiled.
        batch: A collated batch on the device.
        recipe: Text of the recipe.
    """
    device, models = trainer.args.device, pair.models()
    if not runs_our_kernels(device) or any(is_sharded(model) for _, model in models):
        return
    known = f"{tuning.cache_file(device).stem}\n{recipe}"
    done = cache_folder() / f"distill-{hashlib.sha256(known.encode()).hexdigest()[:16]}"
    if done.exists():
        return
    progress = console.announced("compiling", "kernels") if is_main_process() else contextlib.nullcontext()
    try:
        with (
            progress,
            torch.random.fork_rng([device]),
            compiling_ahead(console.advance),
            contextlib.ExitStack() as undo,
        ):
            for number, (field, model) in enumerate(models):
                undo.callback(unpatch, model)
                role: Role = "student" if field == "student" else "teacher"
                ours = choices.is_ours(role, 0 if role == "student" else number)
                patch_model(model, role, "triton" if ours else None)
            if not storing(pair.teacher):
                undo.callback(trainer.model.zero_grad)
                _micro_batch(trainer, batch)
        done.touch()
    except FORWARD_ERRORS as error:
        log.info("kernels: the others are compiled at their first launch (%s)", first_line(error))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def _micro_batch(trainer: DistillationTrainer, batch: Batch) -> None:
    """Take a micro-batch forward and backward, on copies of its tensors, to which kernels' results may be attached."""
    copies = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    training = trainer.model.training
    trainer.model.train()
    try:
        with trainer.compute_loss_context_manager():
            output = trainer.model(**trainer.objective.student_inputs(copies, num_items=1))
        output["loss"].backward()
    finally:
        trainer.model.train(training)
