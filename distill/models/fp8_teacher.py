"""A model whose linear layers and experts, but not its head, are in fp8: made so, or read so a layer at a time."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from distill_kernels.matmul.fp8 import Fp8Linear, swap_linears_for_fp8
from distill_kernels.matmul.fp8_experts import MULTIPLE
from torch import nn

from distill.models.head import unwrap_peft
from distill.models.layers import find_layers
from distill.models.loading import (
    TEACHER_SEED,
    draw_weights,
    load_config,
    load_teacher,
    model_options,
    without_memory,
)
from distill.models.names import EXPERT_WEIGHTS
from distill.models.patch.corrections import correct_forward
from distill.models.patch.experts import experts_form, fp8_experts, looks_like_experts
from distill.models.patch.swaps import forget_module
from distill.models.trial import Mismatch
from distill.recipe import LoadedTeacherConfig

log = logging.getLogger(__name__)

HEAD = "lm_head"


class ModelPart(NamedTuple):
    """Linear layers and experts that are in fp8 together or not at all.

    Attributes:
        name: Name as in `teacher.fp8_skip`: `29.mlp`.
        modules: dotted names of the linear layers, and of the modules of experts, in the model.
        weights: elements of their weights.
    """

    name: str
    modules: tuple[str, ...]
    weights: int


def model_parts(model: nn.Module) -> list[ModelPart]:
    """The modules of each decoder layer that hold what fp8 can take, such as attention and MLP.

    Raises:
        ValueError: a model without a list of layers.
    """
    prefix, layers = find_layers(model)
    found = []
    for number, layer in enumerate(layers):
        for child, module in layer.named_children():
            name = f"{number}.{child}"
            inside = {at: each for at, each in _multiplying(module, f"{prefix}.{name}") if _fits(each)}
            if inside:
                found.append(ModelPart(name, tuple(inside), sum(map(_weights, inside.values()))))
    return found


def find_skipped(model: nn.Module, skip: Sequence[str]) -> ModelPart:
    """The linear layers and experts that `teacher.fp8_skip` names, as one part.

    Raises:
        ValueError: an entry that names none of the model.
    """
    if not skip:
        return ModelPart("", (), 0)
    prefix, layers = find_layers(model)
    whole = unwrap_peft(model)
    found = dict[str, int]()
    for part in skip:
        try:
            inside = {at: _weights(m) for at, m in _multiplying(layers.get_submodule(part), f"{prefix}.{part}")}
        except AttributeError:
            inside = {}
        if not inside:
            raise ValueError(
                f"teacher.fp8_skip: expected layers 0 to {len(layers) - 1}, or modules inside one that hold linear "
                f"layers, such as {', '.join(p.name for p in model_parts(whole)[:2])}; got {part}"
            )
        found |= inside
    return ModelPart(" ".join(skip), tuple(found), sum(found.values()))


def expert_weights(model: nn.Module, skip: Sequence[str] = ()) -> int:
    """Return how many weights of experts fp8 takes, of a model that may have no memory; `skip` as of the recipe."""
    left = find_skipped(model, skip).modules
    return sum(
        _weights(module)
        for name, module in _multiplying(unwrap_peft(model), "")
        if looks_like_experts(module) and _fits(module) and name not in left
    )


def quantise_part(model: nn.Module, part: ModelPart) -> list[nn.Module]:
    """Put a part's linear layers and experts into fp8, in place; returns them as they were."""
    before = [model.get_submodule(name) for name in part.modules]
    for name, module in zip(part.modules, before, strict=True):
        model.set_submodule(name, _quantised(module))
    return before


@contextlib.contextmanager
def in_fp8(model: nn.Module, part: ModelPart) -> Iterator[None]:
    before = quantise_part(model, part)
    try:
        yield
    finally:
        for name, module in zip(part.modules, before, strict=True):
            model.set_submodule(name, module)


def load_a_layer_at_a_time(section: LoadedTeacherConfig, *, device: torch.device, dtype: torch.dtype) -> Any:
    """An fp8 teacher that in `dtype` would not fit the device: read into host memory, quantised layer by layer.

    The device never holds more than the quantised layers and one that is not yet. What fp8 costs is not measured then,
    since the teacher as it was is never there to compare with. Random weights are drawn on the device instead.

    Args:
        dtype: Dtype of unquantised parts: embedding, norms, head, and what `fp8_skip` names.

    Raises:
        ValueError: as `load_teacher`; a teacher without linear layers whose sizes divide by 16.
    """
    drawn = section.init == "random"
    if drawn:
        model = without_memory(load_config(section, "teacher"), model_options(section, dtype))
        correct_forward(model, section.attention, "teacher.attention")
    else:
        model = load_teacher(section, device="cpu", dtype=dtype)
    left = set(find_skipped(model, section.fp8_skip).modules)
    prefix, layers = find_layers(model)
    with torch.random.fork_rng([device] if drawn and device.type == "cuda" else []):
        if drawn:
            torch.manual_seed(TEACHER_SEED)
        for number, layer in enumerate(layers):
            draw_weights(model, layer, device)
            layer.to(device)
            at = f"{prefix}.{number}"
            kept = [HEAD, *(name.removeprefix(f"{at}.") for name in left)]
            inside = {name: module for name, module in _multiplying(layer, at) if name not in left and _fits(module)}
            swap_experts_for_fp8(layer, kept)
            if not left or any(isinstance(module, nn.Linear) for module in inside.values()):
                swap_linears_for_fp8(layer, kept)
        draw_weights(model, model, device)
    model.tie_weights()
    return model.to(device)


def quantise_teacher(model: nn.Module, skip: Sequence[str] = ()) -> int:
    """Put the linear layers but the head, and the experts, but what `teacher.fp8_skip` names, into fp8, in place.

    Returns:
        How many linear layers.

    Raises:
        ValueError: the model has no linear layer whose sizes divide by 16, or not what `skip` names.
    """
    whole = unwrap_peft(model)
    kept = [HEAD, *find_skipped(model, skip).modules]
    swap_experts_for_fp8(whole, kept)
    return len(swap_linears_for_fp8(whole, kept))


def swap_experts_for_fp8(model: nn.Module, keep: Sequence[str] = ()) -> list[str]:
    """Replace the experts of a frozen model by `Fp8Experts`, in place, one layer after another.

    Args:
        model: Model or layer.
        keep: Modules left as they are: every one whose dotted name contains one of these.

    Returns:
        The dotted names of those replaced.
    """
    replaced = []
    for name in [name for name, module in _multiplying(model, "") if looks_like_experts(module)]:
        module = model.get_submodule(name)
        if not _fits(module) or any(part in name for part in keep):
            continue
        quantised = _quantised(module)
        if quantised is not module:
            forget_module(model, module)
            model.set_submodule(name, quantised)
            replaced.append(name)
    return replaced


def _quantised(module: nn.Module) -> nn.Module:
    """Return a linear layer or experts in fp8; experts that compute something else than we know, as they are."""
    if isinstance(module, nn.Linear):
        return Fp8Linear.from_linear(module)
    form = experts_form(module, gradients=False)
    if isinstance(form, Mismatch):
        log.warning("%s stay in 16 bits, not in fp8: %s", type(module).__name__, form.reason)
        return module
    return fp8_experts(module, form)


def _multiplying(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers and experts at or below `module`, by their dotted names where its own is `name`."""
    for inner, each in module.named_modules():
        if isinstance(each, nn.Linear) or looks_like_experts(each):
            yield f"{name}.{inner}".strip("."), each


def _weights(module: nn.Module) -> int:
    names = ("weight",) if isinstance(module, nn.Linear) else EXPERT_WEIGHTS
    return sum(module.get_parameter(name).numel() for name in names)


def _fits(module: nn.Module) -> bool:
    """Return whether fp8 takes a linear layer or experts, by kind and sizes."""
    if isinstance(module, nn.Linear):
        return type(module) is nn.Linear and module.in_features % 16 == 0 and module.out_features % 16 == 0
    # tokens, indices and weights beside `self`: not Llama 4, whose experts are given tokens alone
    takes = len(inspect.signature(type(module).forward).parameters) == 4
    sizes = [size for name in EXPERT_WEIGHTS for size in module.get_parameter(name).shape[1:]]
    return takes and all(size % MULTIPLE == 0 for size in sizes)
