"""Variants of the training step beside those of `distill bench`: torch.compile, Liger, and parts of ours left out.

compile           plain transformers, each decoder layer and the divergence under torch.compile
liger             Liger Kernel's patches on both models and its fused linear JSD at beta = 0 (forward KL)
distill-apart     ours without joined projections
distill-fp8       ours with the teacher's linear layers (but not its head) and experts in fp8
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from distill.commands.bench import (
    VARIANTS,
    Batch,
    Clock,
    Rival,
    Step,
    Variant,
    decoder_inputs,
    join_both,
    optimize,
    ours,
    patch_both,
    plain_step,
    rival,
)
from distill.core.labels import shift_labels
from distill.models.fp8_teacher import quantise_teacher
from distill.models.head import decoder_of, find_head, unwrap_peft
from distill.models.layers import find_layers

log = logging.getLogger(__name__)


def compile_layers(model: nn.Module) -> None:
    """Have each decoder layer of a model compiled when it is first called: all layers share one graph."""
    for layer in find_layers(model)[1]:
        layer.compile()


def compiled_step(teacher: nn.Module, student: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> Step:
    """Return the plain step with each decoder layer and the divergence compiled."""
    for model in (teacher, student):
        compile_layers(model)
    return plain_step(teacher, student, batch, optimizer, compiled=True)


def apply_liger(model: Any) -> None:
    """Apply Liger Kernel's patches to a model, except to its cross-entropy."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=unwrap_peft(model), fused_linear_cross_entropy=False, cross_entropy=False)


def liger_loss(
    teacher: nn.Module, student: nn.Module, batch: Batch, rows: torch.Tensor | None = None
) -> Callable[[Clock], torch.Tensor]:
    """Return Liger's fused linear JSD at beta = 0 over hidden states; the models must carry Liger's patches.

    Args:
        rows: Flat positions of the loss, int64 [N]; None for all with a label.
    """
    from liger_kernel.transformers import LigerFusedLinearJSD

    loss_fn = LigerFusedLinearJSD(jsd_beta=0.0)
    inputs = decoder_inputs(batch)
    shifted = shift_labels(batch["labels"]).flatten()
    shifted = shifted if rows is None else shifted[rows]

    def hidden_of(model: nn.Module) -> torch.Tensor:
        hidden: torch.Tensor = decoder_of(model)(**inputs).last_hidden_state.flatten(0, 1)
        return hidden if rows is None else hidden.index_select(0, rows)

    def loss_of(clock: Clock) -> torch.Tensor:
        with torch.no_grad():
            teacher_hidden = hidden_of(teacher)
        clock.enter("student")
        hidden = hidden_of(student)
        clock.enter("loss")
        weights = (find_head(model).linear.weight for model in (student, teacher))
        loss: torch.Tensor = loss_fn(hidden, next(weights), teacher_hidden, next(weights), shifted)
        return loss

    return loss_of


def liger_step(
    teacher: nn.Module,
    student: nn.Module,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    rows: torch.Tensor | None = None,
) -> Step:
    """Return the step with Liger's patches and loss; `rows` as in `liger_loss`."""
    apply_liger(teacher)
    apply_liger(student)
    loss_of = liger_loss(teacher, student, batch, rows)
    return lambda clock: optimize(loss_of(clock), optimizer, clock)


def _prepare_fp8_teacher(teacher: nn.Module, student: nn.Module, batch: Batch) -> str:
    note = patch_both(teacher, student, batch)
    quantise_teacher(teacher)
    gc.collect()
    torch.cuda.empty_cache()
    join_both(teacher, student, batch["input_ids"].device)
    return note


RIVALS: dict[str, Rival] = {"plain": plain_step, "compile": compiled_step, "liger": liger_step}
OURS: dict[str, Variant] = {
    "distill": VARIANTS["distill"],
    "distill-graphs": VARIANTS["distill-graphs"],
    "distill-apart": functools.partial(ours, prepare=patch_both),
    "distill-fp8": functools.partial(ours, prepare=_prepare_fp8_teacher),
}


def variants_of(names: Iterable[str], rivals: Mapping[str, Rival] = RIVALS) -> dict[str, Variant]:
    """Return the variants of these names, Liger's last: its patches change the modelling file for the whole process."""
    known = {name: rival(step) for name, step in rivals.items()} | OURS
    chosen = {name: known[name] for name in sorted(names, key=lambda name: name == "liger")}
    if "liger" in chosen and importlib.util.find_spec("liger_kernel") is None:
        log.warning("bench: liger-kernel is not installed; skipped")
        del chosen["liger"]
    return chosen
