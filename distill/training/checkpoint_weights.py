"""A checkpoint's weights, put into a student by the student's own names.

A file holds them by the names under which a family is published, which for a mixture of experts and many others are
not those of its modules: transformers converts them when it saves and when it loads. So a checkpoint is read as any
model is, and compared once it is.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from distill.core.faults import RunError
from distill.models.head import bare
from distill.models.read_weights import read_weights

ADAPTER = "adapter_model.safetensors"


@torch.no_grad()
def load_weights(student: nn.Module, checkpoint: Path) -> None:
    """Give a student the weights that a checkpoint holds of it, equal to the bit.

    Args:
        student: Whole on this process: bare, or inside PEFT, whose base model is left as it is.
        checkpoint: A folder with the model's or the adapter's safetensors.

    Raises:
        RunError: naming weights that it lacks, or that this student does not have.
    """
    if hasattr(student, "peft_config"):
        _load_adapter(student, checkpoint)
        return
    model: Any = bare(student)
    dtypes = {value.dtype for value in model.state_dict().values() if value.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32  # the wider one: nothing is rounded on the way
    try:
        saved = read_weights(
            type(model), checkpoint, "--resume", config=copy.deepcopy(model.config), dtype=dtype, use_safetensors=True
        )
    except ValueError as error:
        raise _refused(checkpoint, str(error)) from error
    there, own = saved.state_dict(), model.state_dict()
    if wrong := sorted(there.keys() ^ own.keys()):
        raise _refused(checkpoint, f"{wrong[0]} is in one of it and the student and not in the other")
    for name, value in own.items():
        value.copy_(there[name])


def _load_adapter(student: Any, checkpoint: Path) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    with safe_open(str(checkpoint / ADAPTER), framework="pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dictionary
    own = get_peft_model_state_dict(student)
    if missing := sorted(own.keys() - saved.keys()):
        raise _refused(checkpoint, f"its files lack {missing[0]}")
    if wrong := sorted(name for name in saved if name not in own or own[name].shape != saved[name].shape):
        raise _refused(checkpoint, f"{wrong[0]} is no weight of this student's adapter, or has another shape")
    set_peft_model_state_dict(student, saved, adapter_name=student.active_adapter)


def _refused(checkpoint: Path, reason: str) -> RunError:
    return RunError(f"--resume: {checkpoint}: {reason}; move it away to use another")
