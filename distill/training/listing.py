"""A model's modules and parameters, listed once and not walked over four times a step.

`Trainer` puts a model in train mode, clips its gradients and drops them by walks over all modules: of 210 LoRA layers
2,500, some ten milliseconds of a step whose kernels take thirty.

    Listing(model)                      # `model.train()` and `model.zero_grad()` look at the lists from here on
    parameters_of(model)
    unlist(model)
"""

from __future__ import annotations

import types

from torch import nn

NAME = "_distill_listing"


class Listing:
    """Lists of `model`, until `unlist`; modules and parameters that it gets later are not in them.

    A copy of the model has no lists: it may be changed, as by merging its adapters.
    """

    def __init__(self, model: nn.Module) -> None:
        unlist(model)
        self.modules, self.parameters = list(model.modules()), list(model.parameters())
        if {"train", "zero_grad"} & {*model.__dict__}:  # somebody else's, who has a reason
            return
        model.__dict__[NAME] = self
        model.__dict__ |= {"train": types.MethodType(train, model), "zero_grad": types.MethodType(zero_grad, model)}

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def parameters_of(model: nn.Module | None) -> list[nn.Parameter]:
    """All of a model."""
    assert model is not None
    listing = model.__dict__.get(NAME)
    return list(model.parameters()) if listing is None else listing.parameters


def unlist(model: nn.Module | None) -> None:
    """Give a model its own methods back."""
    if model is not None and NAME in model.__dict__:
        for name in (NAME, "train", "zero_grad"):
            del model.__dict__[name]


def train(model: nn.Module, mode: bool = True) -> nn.Module:
    """What takes the place of `model.train`: nothing is to be done where all modules are in that mode."""
    listing = model.__dict__.get(NAME)
    if listing is not None and all(module.training is mode for module in listing.modules):
        return model
    return type(model).train(model, mode)


def zero_grad(model: nn.Module, set_to_none: bool = True) -> None:
    """What takes the place of `model.zero_grad`."""
    listing = model.__dict__.get(NAME)
    if listing is None or not set_to_none:
        type(model).zero_grad(model, set_to_none)
        return
    for parameter in listing.parameters:
        if parameter.grad is not None:
            parameter.grad = None
