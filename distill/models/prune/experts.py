"""Experts of a mixture: their modules and routers, their importance, and a model that never routes to some of them.

With `g_t[e]` the weight that the router gives expert `e` for token `t`, and `T_e` the tokens that are routed to it:

    router_weight   score[e] = 1 / T    sum_{t in T_e}  g_t[e]
    reap            score[e] = 1 / |T_e|  sum_{t in T_e}  g_t[e] ||f_e(x_t)||_2      0 where no token is routed to e
    columns         g_t[e] h_t[e, column], aggregated over T_e by the metric of dense MLPs

`g` is as the family computes it: after softmax or sigmoid, normalised over a token's experts or not, scaled or not; `f`
is an expert's output and `h` the input of its down projection, before they are multiplied by it. `reap` is equation 9
of Lasby et al., 2025, arXiv 2510.13999 (github.com/CerebrasResearch/reap); sums of router weights are the weighted
expert frequency there, which goes back to SEER-MoE (Muzio et al., 2024, arXiv 2404.05089). Columns are weighted since
what they add to the layer's output is: Megatron-Core multiplies the input of the down projection by the router's
weight, and NVIDIA's ModelOpt scores `moe_ffn_hidden_size` by that input. Every token of a row counts; rows have no
padding.

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

from distill.models.prune.scores import ImportanceScore
from distill.models.prune.width_layout import WidthLayout

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


def expert_modules(model: nn.Module, layout: WidthLayout) -> dict[int, ExpertModules]:
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


class ExpertStatistics:
    """Statistics of one layer's experts over tokens.

    Attributes:
        tokens: number of tokens.
        routed: number of tokens that are routed to each expert.
        weights: Sums of the router's weights, float64 [experts].
        outputs: Sums of the router's weight times the norm of an expert's output, float64 [experts].
        columns: Scores of each expert's columns.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.tokens = 0
        self.routed = [0] * count
        self.weights, self.outputs = torch.zeros(2, count, dtype=torch.float64, device=device)
        self.columns = [ImportanceScore() for _ in range(count)]

    def scores(self, kind: str) -> torch.Tensor:
        """Return the score of each expert, float64 [experts], by `importance.experts`, on the CPU."""
        if kind == "reap":
            return self.outputs.cpu() / torch.tensor(self.routed).clamp_min(1)
        return (self.weights / self.tokens).cpu()


@contextlib.contextmanager
def expert_statistics(model: nn.Module, layout: WidthLayout, metric: str) -> Iterator[dict[str, ExpertStatistics]]:
    """Gather statistics of the experts whose number or columns are cut while the model runs inside this context.

    Experts are computed one after another, whatever the model's implementation of them.

    Args:
        model: Model, not patched.
        layout: Its layout.
        metric: Aggregate of the columns' activations.

    Yields:
        Statistics by module, of those that ran.

    Raises:
        ValueError: experts that do not follow the interface of transformers' `use_experts_implementation`.
    """
    found: dict[str, ExpertStatistics] = {}
    names = {name for name, mlp in layout.mlps.items() if mlp.experts}
    if any(layout.on("experts")):
        names |= {each.experts for each in expert_modules(model, layout).values()}
    with contextlib.ExitStack() as forwards:
        for name in sorted(names):
            module = model.get_submodule(name)
            if not hasattr(module, "is_transposed") or not hasattr(module, "down_proj"):
                raise ValueError(
                    f"student.from_teacher: expected experts that follow transformers' use_experts_implementation, got "
                    f"{name} ({type(module).__name__}); leave experts and their columns out"
                )
            module.__dict__["forward"] = _measured(module, found, name, metric if name in layout.mlps else None)
            forwards.callback(module.__dict__.pop, "forward")
        yield found


def _measured(
    module: nn.Module, found: dict[str, ExpertStatistics], name: str, metric: str | None
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a forward of experts that adds to their statistics; the columns' where there is a metric."""

    def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the sum [tokens, hidden] of each token's experts, both [tokens, experts per token], by weight."""
        count = len(module.down_proj)  # type: ignore[arg-type]
        per_token = index.shape[1]
        mine = found.setdefault(name, ExpertStatistics(count, index.device))
        mine.tokens += len(index)
        mine.weights.index_add_(0, index.flatten(), weights.flatten().double())
        sums = torch.zeros_like(hidden)
        places = index.flatten().argsort(stable=True)
        for expert, of_expert in enumerate(places.split(index.flatten().bincount(minlength=count).tolist())):
            if not len(of_expert):
                continue
            tokens = of_expert // per_token
            weight = weights.flatten()[of_expert, None]
            inner = _inner(module, hidden[tokens], expert)
            output = _project(module, "down_proj", inner, expert)
            mine.routed[expert] += len(tokens)
            mine.outputs[expert] += (weight * output.float().norm(dim=-1, keepdim=True)).sum()
            if metric is not None:
                mine.columns[expert].add(inner * weight, metric)
            sums.index_add_(0, tokens, (output * weight).to(sums.dtype))
        return sums

    return forward


def _inner(module: nn.Module, inputs: torch.Tensor, expert: int) -> torch.Tensor:
    """Return the input of an expert's down projection, [tokens, columns]."""
    if module.has_gate:
        return module._apply_gate(_project(module, "gate_up_proj", inputs, expert))  # type: ignore[operator]
    return module.act_fn(_project(module, "up_proj", inputs, expert))  # type: ignore[operator]


def _project(module: nn.Module, name: str, inputs: torch.Tensor, expert: int) -> torch.Tensor:
    weight = getattr(module, name)[expert]
    output = inputs @ weight if module.is_transposed else F.linear(inputs, weight)
    return output + getattr(module, f"{name}_bias")[expert] if module.has_bias else output


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

    def __init__(self, model: nn.Module, layout: WidthLayout, dropped: Dropped) -> None:
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
