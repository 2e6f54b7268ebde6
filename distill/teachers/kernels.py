"""Installation of our kernels in the models of a pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from distill.core import console
from distill.core.ranks import is_main_process
from distill.models.gpu_specs import family_in, joins_on, path_of, runs_our_kernels
from distill.models.patch.joined_projections import join_projections
from distill.models.patch.patching import patch
from distill.models.patch.swaps import Role
from distill.models.sharding import is_sharded

if TYPE_CHECKING:
    from distill.models.patch.attention_choice import AttentionChoices
    from distill.teachers.opening import ModelPair


def patch_models(pair: ModelPair, choices: AttentionChoices) -> None:
    """Install our kernels in all models (a sharded teacher has them already), where this device runs them."""
    if not runs_our_kernels(device := next(pair.student.parameters()).device):
        if is_main_process():
            console.print_lines(
                f"{'kernels':<12}{torch.cuda.get_device_name(device)}: {path_of(family_in(device) or '')}"
            )
        return
    for number, (field, model) in enumerate(pair.models()):
        if is_sharded(model):
            continue
        role: Role = "student" if field == "student" else "teacher"
        attention = choices.of(model, role, 0 if role == "student" else number)
        report = patch(model, role, attention=attention)
        if is_main_process():
            console.print_lines(f"{'kernels':<12}{role}: {report}")


def join_models(pair: ModelPair) -> None:
    """Join weights of projections that read the same activations; called once a teacher's layers are in fp8, if they
    are to be.
    """
    for _, model in pair.models() if joins_on(next(pair.student.parameters()).device) else ():
        join_projections(model, trains=True)
