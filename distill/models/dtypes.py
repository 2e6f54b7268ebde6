"""Compute dtype, weight dtypes and device of a run; the format of a quantised student."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import nn

from distill.models.head import unwrap_peft
from distill.recipe import Recipe, Train
from distill.recipe.models import EIGHT_BITS

QUANTISED = "_distill_quantised"  # of a bare model: its `QuantisedWeights`
MARK_OF_4_BITS = "is_loaded_in_4bit"  # of a bare model whose linear layers are those of bitsandbytes in 4 bits
COMPUTE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def quantised_weights(model: nn.Module) -> Any:
    """Return the `QuantisedWeights` of a model; None where it is not quantised."""
    return unwrap_peft(model).__dict__.get(QUANTISED)


def is_in_4_bits(model: nn.Module) -> bool:
    """Return whether linear layers of a model are in 4 bits (`precision/nf4.py`)."""
    return bool(getattr(unwrap_peft(model), MARK_OF_4_BITS, False))


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the shape of a weight, also where its numbers are packed in 4 bits."""
    state = getattr(parameter, "quant_state", None)
    return parameter.shape if state is None else torch.Size(state.shape)


class Precision(NamedTuple):
    """Dtypes of the student's computation, of its weights and of the teacher."""

    compute: torch.dtype
    student: torch.dtype
    teacher: torch.dtype
    lora: bool = False

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of autocast, None where all weights are in the compute dtype already.

        PEFT keeps adapters in float32 beside frozen 16-bit weights: without autocast their products would be float32.
        """
        return None if self.compute in (torch.float32, None if self.lora else self.student) else self.compute


def resolve_device(train: Train) -> torch.device:
    """`train.device` on this machine.

    Raises:
        ValueError: CUDA asked for and absent.
    """
    if train.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("train.device: expected a CUDA device, and torch finds none; use cpu or auto")
    if train.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def resolve_precision(recipe: Recipe, device: torch.device) -> Precision:
    """Fill in `auto`: bf16 on GPUs that have it (a T4 and a V100 only emulate it), fp32 elsewhere.

    A student that is trained in full keeps fp32 weights under autocast, since bf16 weights would round small updates
    away; frozen weights (the teacher's, and a LoRA student's base) are kept in what is computed in.
    """
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    setting = recipe.train.precision
    compute = (torch.bfloat16 if bf16 else torch.float32) if setting == "auto" else COMPUTE[setting]
    whole = recipe.student.lora is None or recipe.student.quantise is not None
    frozen = torch.float32 if whole else compute
    student = COMPUTE.get(recipe.student.dtype, frozen)  # also of what is not in 4 bits
    named = "bfloat16" if recipe.teacher.dtype in EIGHT_BITS else recipe.teacher.dtype
    teacher = COMPUTE.get(named, compute)
    return Precision(compute, student, teacher, lora=recipe.student.lora is not None)
