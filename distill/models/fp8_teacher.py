"""A model whose linear layers, but not its head, are in fp8: made so, or read so a layer at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from distill_kernels.matmul.fp8 import Fp8Linear, swap_linears_for_fp8
from torch import nn

from distill.models.head import unwrap_peft
from distill.models.layers import find_layers
from distill.models.loading import TEACHER_SEED, load_config, load_teacher, model_options, without_memory
from distill.models.patch.corrections import correct_forward
from distill.recipe import LoadedTeacherConfig

HEAD = "lm_head"


class ModelPart(NamedTuple):
    """Linear layers that are in fp8 together or not at all.

    Attributes:
        name: Name as in `teacher.fp8_skip`: `29.mlp`.
        linears: dotted names of the linear layers in the model.
        weights: elements of these layers' weights.
    """

    name: str
    linears: tuple[str, ...]
    weights: int


def model_parts(model: nn.Module) -> list[ModelPart]:
    """The modules of each decoder layer that hold linear layers which fp8 can take, such as attention and MLP.

    Raises:
        ValueError: a model without a list of layers.
    """
    prefix, layers = find_layers(model)
    found = []
    for number, layer in enumerate(layers):
        for child, module in layer.named_children():
            name = f"{number}.{child}"
            linears = {at: linear for at, linear in _linears(module, f"{prefix}.{name}") if _fits(linear)}
            if linears:
                found.append(ModelPart(name, tuple(linears), sum(m.weight.numel() for m in linears.values())))
    return found


def find_skipped(model: nn.Module, skip: Sequence[str]) -> ModelPart:
    """The linear layers that `teacher.fp8_skip` names, as one part.

    Raises:
        ValueError: an entry that names no linear layer of the model.
    """
    if not skip:
        return ModelPart("", (), 0)
    prefix, layers = find_layers(model)
    whole = unwrap_peft(model)
    found = dict[str, int]()
    for part in skip:
        try:
            inside = {at: m.weight.numel() for at, m in _linears(layers.get_submodule(part), f"{prefix}.{part}")}
        except AttributeError:
            inside = {}
        if not inside:
            raise ValueError(
                f"teacher.fp8_skip: expected layers 0 to {len(layers) - 1}, or modules inside one that hold linear "
                f"layers, such as {', '.join(p.name for p in model_parts(whole)[:2])}; got {part}"
            )
        found |= inside
    return ModelPart(" ".join(skip), tuple(found), sum(found.values()))


def quantise_part(model: nn.Module, part: ModelPart) -> list[nn.Module]:
    """Put a part's linear layers into fp8, in place; returns them as they were."""
    before = [model.get_submodule(name) for name in part.linears]
    for name, linear in zip(part.linears, before, strict=True):
        model.set_submodule(name, Fp8Linear.from_linear(linear))  # type: ignore[arg-type]
    return before


@contextlib.contextmanager
def in_fp8(model: nn.Module, part: ModelPart) -> Iterator[None]:
    before = quantise_part(model, part)
    try:
        yield
    finally:
        for name, linear in zip(part.linears, before, strict=True):
            model.set_submodule(name, linear)


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
    left = set(find_skipped(model, section.fp8_skip).linears)
    prefix, layers = find_layers(model)
    with torch.random.fork_rng([device] if drawn and device.type == "cuda" else []):
        if drawn:
            torch.manual_seed(TEACHER_SEED)
        for number, layer in enumerate(layers):
            _draw(model, layer, device)
            layer.to(device)
            at = f"{prefix}.{number}"
            if not left or any(_fits(linear) and name not in left for name, linear in _linears(layer, at)):
                swap_linears_for_fp8(layer, [HEAD, *(name.removeprefix(f"{at}.") for name in left)])
        _draw(model, model, device)
    model.tie_weights()
    return model.to(device)


@torch.no_grad()
def _draw(model: Any, part: nn.Module, device: torch.device) -> None:
    """Give the parameters of a part of `model` that have no memory yet some on `device`, with random weights."""
    for module in part.modules():
        empty = {name: weight for name, weight in module._parameters.items() if weight is not None and weight.is_meta}
        for name, weight in empty.items():
            module._parameters[name] = nn.Parameter(torch.empty_like(weight, device=device), requires_grad=False)
        if empty:
            model._init_weights(module)


def quantise_teacher(model: nn.Module, skip: Sequence[str] = ()) -> int:
    """Put the linear layers but the head, and but what `teacher.fp8_skip` names, into fp8, in place; how many.

    Raises:
        ValueError: the model has no linear layer whose sizes divide by 16, or not what `skip` names.
    """
    return len(swap_linears_for_fp8(unwrap_peft(model), [HEAD, *find_skipped(model, skip).linears]))


def _linears(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers at or below `module`, by their dotted names where its own is `name`."""
    for inner, each in module.named_modules():
        if isinstance(each, nn.Linear):
            yield f"{name}.{inner}" if inner else name, each


def _fits(linear: nn.Linear) -> bool:
    return type(linear) is nn.Linear and linear.in_features % 16 == 0 and linear.out_features % 16 == 0
