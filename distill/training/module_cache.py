"""Cached lists of a model's modules and parameters, which `Trainer` would otherwise walk four times per step.

`Trainer` sets train mode, clips gradients and clears them by walking all modules: 2,500 for 210 LoRA layers, some ten
milliseconds of a step whose kernels take thirty.

    cache_modules(model)                   # `model.train()` and `model.zero_grad()` use the cached lists from here on
    cached_parameters(model)
    clear_module_cache(model)
"""

from __future__ import annotations

import types
from weakref import WeakKeyDictionary

from torch import nn

# kept outside of the model: a copy of it has no lists, and may be changed, e.g. by merging its adapters
LISTS: WeakKeyDictionary[nn.Module, tuple[list[nn.Module], list[nn.Parameter]]] = WeakKeyDictionary()


def cache_modules(model: nn.Module) -> None:
    """Cache the modules and parameters of `model` until `clear_module_cache`; later ones are not in the lists."""
    clear_module_cache(model)
    if not {"train", "zero_grad"} & {*model.__dict__}:  # leave methods that other code has replaced
        LISTS[model] = list(model.modules())[1:], list(model.parameters())  # the model itself would keep its key alive
        model.__dict__ |= {"train": types.MethodType(train, model), "zero_grad": types.MethodType(zero_grad, model)}


def cached_parameters(model: nn.Module) -> list[nn.Parameter]:
    return LISTS[model][1] if model in LISTS else list(model.parameters())


def clear_module_cache(model: nn.Module) -> None:
    """Restore the model's own methods and drop the cached lists."""
    if LISTS.pop(model, None) is not None:
        del model.__dict__["train"], model.__dict__["zero_grad"]


def train(model: nn.Module, mode: bool = True) -> nn.Module:
    """Replacement of `model.train`: returns at once where all modules are in the requested mode."""
    if model in LISTS and all(module.training is mode for module in (model, *LISTS[model][0])):
        return model
    return type(model).train(model, mode)


def zero_grad(model: nn.Module, set_to_none: bool = True) -> None:
    if model not in LISTS or not set_to_none:
        type(model).zero_grad(model, set_to_none)
        return
    for parameter in LISTS[model][1]:
        if parameter.grad is not None:
            parameter.grad = None
