"""Experts of a mixture: their modules and routers, their importance, and a model that never routes to some of them.

An expert's score is the mean over tokens of the weight that its router gives its output, 0 for a token that is routed
to others:

    score[e] = 1 / T  sum_t  g_t[e]  if e is among the experts of token t

`g` is as the family computes it: after softmax or sigmoid, normalised over a token's experts or not, scaled or not.
Sums of router weights over the routed tokens are the weighted expert frequency in the code of REAP (Lasby et al., 2025,
arXiv 2510.13999, github.com/CerebrasResearch/reap); counting by router weights goes back to SEER-MoE (Muzio et al.,
2024, arXiv 2404.05089). Every token of a row counts; rows have no padding.

With groups (`n_group` of DeepSeek-V3) each keeps equally many of its experts, since a group is so many neighbours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from distill.models.prune.width_layout import Layout

Dropped = Mapping[int, Sequence[int]]  # by layer, indices of experts


class ExpertModules(NamedTuple):
    """Modules of a layer's experts, by name.

    Attributes:
        experts: Module that holds the weights of all experts, [experts, ...].
        router: Parameter [experts, hidden] that a token's logits are computed with.
        biases: Parameters and buffers with one number for each expert.
    """

    experts: str
    router: str
    biases: tuple[str, ...]


def expert_modules(model: nn.Module, layout: Layout) -> dict[int, ExpertModules]:
    """Return by layer the modules of its experts.

    Raises:
        ValueError: a layer without exactly one router and one module of experts.
    """
    names: dict[int, list[str]] = {}
    for name in layout.on("experts"):
        layer = layout.layer_of(name)
        if layer is None:
            raise ValueError(f"student.from_teacher.experts: {name} outside of layers has experts; leave experts out")
        names.setdefault(layer, []).append(name)
    shapes = {name: tensor.shape for name, tensor in model.state_dict(keep_vars=True).items()}
    found = {}
    for layer, here in sorted(names.items()):
        holders = {_owner(name) for name in here if len(shapes[name]) > 2}
        others = [name for name in here if _owner(name) not in holders]
        routers = [name for name in others if min(shapes[name]) > 1 and len(shapes[name]) == 2]
        if len(holders) != 1 or len(routers) != 1:
            raise ValueError(
                f"student.from_teacher.experts: expected one router and one module of experts in layer {layer} of "
                f"{type(model).__name__}, got {routers or 'no router'} and {sorted(holders) or 'no module'}; leave "
                "experts out"
            )
        biases = tuple(name for name in others if name not in routers)
        found[layer] = ExpertModules(holders.pop(), routers[0], biases)
    return found


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


class RouterWeights:
    """Sums of the router's weights for each expert of a layer over tokens.

    Attributes:
        total: Sums, float64 [experts].
        tokens: Number of tokens.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.total = torch.zeros(count, dtype=torch.float64, device=device)
        self.tokens = 0

    def add(self, index: torch.Tensor, weights: torch.Tensor) -> None:
        """Add the experts of each token and their weights, both [tokens, experts per token]."""
        self.total.index_add_(0, index.flatten().long(), weights.flatten().double())
        self.tokens += index.shape[0]

    def mean(self) -> torch.Tensor:
        """Return the score of each expert, on the CPU."""
        return (self.total / self.tokens).cpu()


@contextlib.contextmanager
def router_weights(model: nn.Module, layout: Layout) -> Iterator[dict[int, RouterWeights]]:
    """Gather the router's weights of every layer while the model runs inside this context.

    Yields:
        Sums by layer, of the layers that ran.
    """
    found: dict[int, RouterWeights] = {}
    with contextlib.ExitStack() as hooks:
        for layer, (name, _, _) in expert_modules(model, layout).items():
            hook = _hook(found, layer, layout.full.experts, type(model).__name__)
            hooks.callback(model.get_submodule(name).register_forward_pre_hook(hook).remove)
        yield found


def _hook(found: dict[int, RouterWeights], layer: int, count: int, kind: str) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: tuple[object, ...]) -> None:
        given = [value for value in arguments[1:] if isinstance(value, torch.Tensor)]
        if len(given) != 2 or given[0].is_floating_point() or given[0].shape != given[1].shape:
            raise ValueError(
                f"student.from_teacher.experts: expected the experts of {kind} to be given each token's experts and "
                f"their weights, got {[tuple(value.shape) for value in given]}; leave experts out"
            )
        found.setdefault(layer, RouterWeights(count, given[0].device)).add(*given)

    return hook


def largest_experts(scores: torch.Tensor, count: int, groups: int) -> list[int]:
    """Return the indices of the experts with the largest scores, as many of each group; of equal ones the lower."""
    each = scores.view(groups, -1)
    best = each.argsort(dim=1, descending=True, stable=True)[:, : count // groups]
    first = torch.arange(groups)[:, None] * each.shape[1]
    return sorted((best + first).flatten().tolist())


class MaskedRouters(TorchFunctionMode):
    """A context in which a model's routers give the logit -inf to some experts.

    Their biases (`e_score_correction_bias`) are -inf meanwhile, so that they are not chosen by those either.

    Args:
        model: Model whose routers multiply by their weight with `F.linear`.
        layout: Its layout on the axis of experts.
        dropped: Experts that get no tokens.
    """

    def __init__(self, model: nn.Module, layout: Layout, dropped: Dropped) -> None:
        super().__init__()
        state = model.state_dict(keep_vars=True)
        modules = {layer: found for layer, found in expert_modules(model, layout).items() if layer in dropped}
        self._columns = {id(state[found.router]): list(dropped[layer]) for layer, found in modules.items()}
        self._biases = [
            (state[name], list(dropped[layer])) for layer, found in modules.items() for name in found.biases
        ]
        self._before: list[torch.Tensor] = []

    def __enter__(self) -> MaskedRouters:
        self._before = [bias.detach().clone() for bias, _ in self._biases]
        with torch.no_grad():
            for bias, columns in self._biases:
                bias[..., columns] = -torch.inf
        super().__enter__()
        return self

    def __exit__(self, *unused: object) -> None:
        super().__exit__(*unused)
        with torch.no_grad():
            for (bias, _), before in zip(self._biases, self._before, strict=True):
                bias.copy_(before)

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Compute `func`, and mask the columns of a router's logits."""
        output = func(*args, **(kwargs or {}))
        if func is F.linear and len(args) > 1 and (columns := self._columns.get(id(args[1]))):
            assert isinstance(output, torch.Tensor)
            output[..., columns] = -torch.inf
        return output
