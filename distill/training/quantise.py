"""Quantisation of a run's student: formats, the start's rounding, and the callback that rounds after every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from distill_kernels.quantisation.formats import FORMATS
from torch import nn

from distill.core import console
from distill.models.dtypes import quantised_weights
from distill.models.head import unwrap_peft
from distill.models.precision.gptq import calibration_batches, round_weights
from distill.models.precision.quantised_formats import Formats, formats_of
from distill.models.precision.quantised_student import QuantisedWeights, quantise_student
from distill.recipe.quantise import Quantise
from distill.training.listeners import StepListener
from distill.training.trainer import DistillationTrainer

if TYPE_CHECKING:
    from distill.models.precision.quantised_adapters import Adapter


class QuantiseCallback(StepListener):
    """Listener that gives the optimizer the master weights, and rounds them after each of its steps.

    Args:
        trainer: Trainer of the student, which FSDP2 shards when training begins.
    """

    def __init__(self, weights: QuantisedWeights, trainer: DistillationTrainer) -> None:
        self.weights = weights
        self.trainer = trainer

    def on_train_begin(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self.weights.use_shards(self.trainer.model)

    def on_pre_optimizer_step(self, args: object, state: object, control: object, **kwargs: Any) -> None:
        """Put the master weights into the parameters, and update learned scales."""
        self.weights.before_step(float(kwargs["optimizer"].param_groups[0]["lr"]))

    def on_optimizer_step(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self.weights.after_step()

    def save(self, checkpoint: Path) -> None:
        self.weights.save(checkpoint if self.trainer.args.should_save else None)

    def restore(self, checkpoint: Path) -> None:
        self.weights.use_shards(self.trainer.model)
        self.weights.restore(checkpoint)


def quantise_at_once(student: nn.Module, section: Quantise) -> None:
    """Quantise a student by a recipe's section, each weight to its nearest value."""
    found = formats_of(student, section)
    quantise_student(student, found, learned=section.scales == "learned", adapters=_adapters(student, found))


def add_quantiser(trainer: DistillationTrainer) -> None:
    """Have a trainer round the weights of its student after every step, where the student is quantised."""
    weights = quantised_weights(trainer.model)
    if weights is not None:
        trainer.add_callback(QuantiseCallback(weights, trainer))


def _adapters(student: nn.Module, found: Formats) -> Mapping[str, Adapter] | None:
    if not hasattr(student, "peft_config"):
        return None
    from distill.models.precision.quantised_adapters import use_merged

    return use_merged(unwrap_peft(student), set(found.by_name))


def quantise_for_training(
    trainer: DistillationTrainer,
    section: Quantise,
    rows: Sequence[Mapping[str, Sequence[int]]],
    *,
    resumed: bool,
    begins: bool,
) -> str:
    """Quantise the student of a trainer, from now on and through training.

    Args:
        trainer: Trainer with a float32 student on its device, which is sharded when training begins, if at all.
        rows: Tokenised training data, which GPTQ reads.
        resumed: A checkpoint will replace the weights.
        begins: The weights are needed as a run begins with them: rounded by GPTQ, where the recipe says so.

    Returns:
        A line for the summary of the run.

    Raises:
        ValueError: The student cannot be quantised so, or it has adapters and will be sharded.
    """
    student = trainer.model
    if trainer.is_fsdp_enabled and hasattr(student, "peft_config"):
        raise ValueError(
            "student.quantise: expected a student with adapters that each process holds whole, since a merged weight "
            "is made of all rows of A; set parallel.strategy: ddp, or leave student.lora out"
        )
    found = formats_of(student, section)
    adapters = _adapters(student, found)
    narrow = {name: form for name, form in found.by_name.items() if FORMATS[form].is_learned}
    start = {}
    how = "each to its nearest value"
    if section.starts_from_gptq and narrow and begins:
        batches = calibration_batches(rows, section.calibration_tokens, trainer.args.device)
        with console.spinner("rounding by GPTQ"), _autocast(trainer):
            start = round_weights(student, narrow, batches)
        how = f"{len(start)} by GPTQ on {sum(batch['input_ids'].numel() for batch in batches):,} tokens"
    learned = section.scales == "learned"
    sharded = trainer.is_fsdp_enabled
    weights = quantise_student(student, found, learned=learned, adapters=adapters, start=start, sharded=sharded)
    add_quantiser(trainer)
    line = f"{'quantise':<12}student: {weights}; " + ("from the checkpoint" if resumed else f"rounded {how}")
    return "; ".join(part for part in (line, found.note()) if part)


def _autocast(trainer: DistillationTrainer) -> torch.autocast:
    dtype = torch.bfloat16 if trainer.args.bf16 else torch.float16
    return torch.autocast(trainer.args.device.type, dtype, enabled=trainer.args.bf16 or trainer.args.fp16)
