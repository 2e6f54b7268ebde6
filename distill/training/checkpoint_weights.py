"""Load a checkpoint's weights into a student, by the names of its modules.

Files hold weights under the names in which a model family is published, which for mixtures of experts and many others
are not those of its modules: transformers converts them on saving and loading. So a checkpoint is read as any model
is, and its names are compared afterwards.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from distill.core.errors import RunError
from distill.models.head import bare
from distill.models.load.read_weights import read_weights

ADAPTER = "adapter_model.safetensors"


@torch.no_grad()
def load_weights(student: nn.Module, checkpoint: Path) -> None:
    """Copy the weights of a checkpoint into a student, bit-exactly.

    Args:
        student: Unsharded student: bare, or inside PEFT, whose base model is not changed.
        checkpoint: Folder with the model's or the adapter's safetensors.

    Raises:
        RunError: Weights are missing, or are not part of this student; the message names one.
    """
    if hasattr(student, "peft_config"):
        _load_adapter(student, checkpoint)
        return
    model: Any = bare(student)
    dtypes = {value.dtype for value in model.state_dict().values() if value.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32  # float32 holds every other dtype without rounding
    try:
        saved = read_weights(
            type(model), checkpoint, "--resume", config=copy.deepcopy(model.config), dtype=dtype, use_safetensors=True
        )
    except ValueError as error:
        raise _refused(checkpoint, str(error)) from error
    there = saved.state_dict()
    own = model.state_dict()
    wrong = sorted(there.keys() ^ own.keys())
    if wrong:
        raise _refused(checkpoint, f"{wrong[0]} exists in only one of checkpoint and student")
    for name, value in own.items():
        value.copy_(there[name])


def _load_adapter(student: Any, checkpoint: Path) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    with safe_open(str(checkpoint / ADAPTER), framework="pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dictionary
    own = get_peft_model_state_dict(student)
    missing = sorted(own.keys() - saved.keys())
    if missing:
        raise _refused(checkpoint, f"{missing[0]} is missing in its files")
    wrong = sorted(name for name in saved if name not in own or own[name].shape != saved[name].shape)
    if wrong:
        raise _refused(checkpoint, f"{wrong[0]} is not a weight of this student's adapter, or has another shape")
    set_peft_model_state_dict(student, saved, adapter_name=student.active_adapter)


def _refused(checkpoint: Path, reason: str) -> RunError:
    return RunError(f"--resume: {checkpoint}: {reason}; move the folder away to use an older checkpoint")
