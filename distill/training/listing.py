"""A model's modules and parameters, listed once and not walked over four times a step.

`Trainer` puts a model in train mode, clips its gradients and drops them by walks over all modules: of 210 LoRA layers
2,500, some ten milliseconds of a step whose kernels take thirty.

    list_parts(model)                   # `model.train()` and `model.zero_grad()` look at the lists from here on
    parameters_of(model)
    unlist(model)
"""

from __future__ import annotations

import types
from weakref import WeakKeyDictionary

from torch import nn

# not in the model: a copy of it has none, and may be changed, as by merging its adapters
LISTS: WeakKeyDictionary[nn.Module, tuple[list[nn.Module], list[nn.Parameter]]] = WeakKeyDictionary()


def list_parts(model: nn.Module) -> None:
    """List what `model` has, until `unlist`; modules and parameters that it gets later are not in the lists."""
    unlist(model)
    if not {"train", "zero_grad"} & {*model.__dict__}:  # else somebody else's, who has a reason
        LISTS[model] = list(model.modules())[1:], list(model.parameters())  # itself would keep it alive
        model.__dict__ |= {"train": types.MethodType(train, model), "zero_grad": types.MethodType(zero_grad, model)}


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """All of a model."""
    return LISTS[model][1] if model in LISTS else list(model.parameters())


def unlist(model: nn.Module) -> None:
    """Give a model its own methods back."""
    if LISTS.pop(model, None) is not None:
        del model.__dict__["train"], model.__dict__["zero_grad"]


def train(model: nn.Module, mode: bool = True) -> nn.Module:
    """What takes the place of `model.train`: nothing is to be done where all modules are in that mode."""
    if model in LISTS and all(module.training is mode for module in (model, *LISTS[model][0])):
        return model
    return type(model).train(model, mode)


def zero_grad(model: nn.Module, set_to_none: bool = True) -> None:
    """What takes the place of `model.zero_grad`."""
    if model not in LISTS or not set_to_none:
        type(model).zero_grad(model, set_to_none)
        return
    for parameter in LISTS[model][1]:
        if parameter.grad is not None:
            parameter.grad = None
