"""Routers of a mixture of experts: where they stand in a model's layers, and what they output in a forward.

Which modules are routers, and which of their outputs are the logits, is what transformers' model class declares for its
own `output_router_logits`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from distill.models.head import decoder_of, unwrap_peft
from distill.models.layers import find_layers
from distill.models.routing import Routing, routing_of


class Router(NamedTuple):
    """A router of a layer.

    Attributes:
        module: Module whose output has the logits.
        output: Index of the logits among its outputs.
    """

    module: nn.Module
    output: int


class RouterOutput(NamedTuple):
    """Output of a router in one forward, over N tokens.

    Attributes:
        logits: [N, experts], before softmax or sigmoid.
        chosen: int64 [N, experts per token], the experts that compute each token.
    """

    logits: torch.Tensor
    chosen: torch.Tensor


def routing_of_model(model: nn.Module) -> Routing | None:
    """Return the routing of a model, bare or inside PEFT; None for a dense one."""
    return routing_of(unwrap_peft(model).config.get_text_config())  # type: ignore[union-attr,operator]


def find_routers(model: nn.Module) -> dict[int, list[Router]]:
    """Return the routers of a model by the number of their layer.

    Empty for a dense model, and for one whose class declares no router logits or has no single list of layers.
    """
    if routing_of_model(model) is None:
        return {}
    declared = (getattr(decoder_of(model), "_can_record_outputs", None) or {}).get("router_logits", ())
    kinds = declared if isinstance(declared, Sequence) else [declared]
    indices = {kind.target_class: kind.index for kind in kinds if hasattr(kind, "target_class")}
    try:
        _, layers = find_layers(model)
    except ValueError:
        return {}
    found = {
        number: [
            Router(module, index)
            for module in layer.modules()
            for kind, index in indices.items()
            if isinstance(module, kind)
        ]
        for number, layer in enumerate(layers)
    }
    return {number: routers for number, routers in found.items() if routers}


def freeze_parts(model: nn.Module, parts: Collection[str]) -> None:
    """Freeze the parts of a student, bare or inside PEFT, that a recipe's `student.freeze` names.

    Raises:
        ValueError: `router`, and the model has no routers.
    """
    if "router" not in parts:
        return
    routers = [router.module for layer in find_routers(model).values() for router in layer]
    if not routers:
        raise ValueError(
            "student.freeze: router: expected a mixture of experts, whose class declares router logits; got "
            f"{type(unwrap_peft(model)).__name__}"
        )
    for module in routers:
        inside = set(module.modules()) - {module}
        if inside.isdisjoint(routers):  # JetMoe's attention returns its router's logits, and is more than a router
            module.requires_grad_(False)


def read_router(output: Any, index: int, routing: Routing) -> RouterOutput | None:
    """Return what a router's module has output; None where it has no logit for each token and expert.

    The chosen experts are the indices that the router returns. Of one that returns none they are the experts of the
    largest logits, as with a router without groups or a bias of the choice.
    """
    outputs = output if isinstance(output, tuple | list) else (output,)
    logits = outputs[index] if index < len(outputs) else None
    if not isinstance(logits, torch.Tensor) or logits.shape[-1] != routing.experts or logits.dim() > 3:
        return None
    logits = logits.reshape(-1, routing.experts)
    shape = (len(logits), routing.per_token)
    for other in outputs:
        if isinstance(other, torch.Tensor) and other.dtype == torch.int64 and other.shape == shape:
            return RouterOutput(logits, other)
    return RouterOutput(logits, logits.detach().topk(routing.per_token, dim=-1).indices)
