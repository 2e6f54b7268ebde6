"""Mixtures of experts on our kernels: the module with all experts' weights, and the router beside it.

Both are recognised as the dense parts are, by running them: a small copy of a module, with a few of its experts, runs
on random tokens, and each of our forms of its kind is compared with it. Experts are what transformers'
`use_experts_implementation` decorates, modules with `gate_up_proj` and `down_proj` of three dimensions; a router has
`weight` [experts, hidden] and `top_k`, and returns logits, weights and indices. Either may be replaced without the
other. Experts that are computed on several devices (expert or tensor parallel) keep their own forward.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from distill_kernels.decoding.experts import MAX_TOKENS, decode_experts, is_decoding
from distill_kernels.layers.experts import ExpertActivation, experts
from distill_kernels.layers.router import MAX_EXPERTS, Score, route
from distill_kernels.matmul.fp8_experts import Fp8Experts
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from distill.models.names import EXPERT_WEIGHTS
from distill.models.patch.swaps import ModulePattern
from distill.models.trial import FORWARD_ERRORS, Mismatch, compare_forwards

TRIAL_EXPERTS = 4
TRIAL_CHOICES = 2
TRIAL_TOKENS = 2 * MAX_TOKENS  # more than a decoding step's, which have kernels of their own


# ---- experts


class ExpertsForm(NamedTuple):
    """What a module's experts compute.

    Attributes:
        activation: As `experts` takes it.
        interleaved: Columns of gate and up take turns.
        transposed: Weights are [experts, inputs, outputs].
    """

    activation: ExpertActivation
    interleaved: bool
    transposed: bool


def looks_like_experts(module: nn.Module) -> bool:
    held = [module._parameters.get(name) for name in EXPERT_WEIGHTS]
    return all(weight is not None and weight.dim() == 3 for weight in held)


def experts_form(module: nn.Module, *, gradients: bool, **_: object) -> ExpertsForm | Mismatch:
    """Return the form of a module of experts, found by running a copy with few of them, or how it differs from all."""
    if not all(type(p) is nn.Parameter and p.is_floating_point() and p.itemsize > 1 for p in module.parameters()):
        return Mismatch("its weights are quantised or sharded")
    if any(p.device.type == "cuda" and not _fits_grouped_mm(p) for p in module.parameters() if p.dim() == 3):
        return Mismatch("its sizes do not fit torch's grouped_mm")
    small = _with_few_experts(module)
    weight = small.gate_up_proj
    down = small.down_proj
    forms = []
    for activation, interleaved, transposed in itertools.product(
        ("silu", "gelu_tanh", "gelu", "clamped_silu"), (False, True), (False, True)
    ):
        fits = (weight.shape[1], weight.shape[2]) == (
            (down.shape[2], 2 * down.shape[1]) if transposed else (2 * down.shape[2], down.shape[1])
        )
        known = activation != "clamped_silu" or None not in (_number(module, "alpha"), _number(module, "limit"))
        if fits and known:
            forms.append(ExpertsForm(cast(ExpertActivation, activation), interleaved, transposed))
    if not forms:
        return Mismatch("its projections have other shapes")
    hidden = down.shape[2 if forms[0].transposed else 1]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TRIAL_TOKENS, hidden, generator=generator) * 4
    scores = torch.rand(TRIAL_TOKENS, small.num_experts, generator=generator)
    weights, index = scores.topk(min(TRIAL_CHOICES, small.num_experts))
    x = x.to(weight.device, weight.dtype)
    weights = weights.to(weight.device, weight.dtype)
    index = index.to(weight.device)

    def own(x: torch.Tensor, weights: torch.Tensor) -> object:
        return type(small).forward(small, x, index, weights)

    def ours(form: ExpertsForm, x: torch.Tensor, weights: torch.Tensor) -> object:
        return experts_forward(form)(small, x, index, weights)

    try:
        with torch.no_grad():
            expected = own(x, weights).double()  # type: ignore[attr-defined]
            errors = [(ours(form, x, weights).double() - expected).norm().item() for form in forms]  # type: ignore[attr-defined]
    except torch.OutOfMemoryError:
        raise
    except FORWARD_ERRORS as error:
        return Mismatch(f"it does not run on tokens, indices and weights ({error!s:.120})")
    form = forms[min(range(len(forms)), key=errors.__getitem__)]
    return compare_forwards(small, own, functools.partial(ours, form), x, weights, gradients=gradients) or form


def experts_forward(form: ExpertsForm) -> Callable[..., torch.Tensor]:
    def forward(
        self: Any, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        if getattr(self, "_is_expert_parallel", False) or isinstance(self.gate_up_proj, DTensor):
            own: torch.Tensor = type(self).forward(self, x, index, weights)
            return own if residual is None else residual + own
        dtype = self.gate_up_proj.dtype
        adds = residual is not None and residual.dtype == x.dtype == dtype
        rows = x.to(dtype)  # under autocast a norm may have made it wider
        compute = decode_experts if is_decoding(rows) else functools.partial(experts, keep_rows=True)
        y = compute(
            rows,
            index,
            weights,
            self.gate_up_proj,
            self.down_proj,
            getattr(self, "gate_up_proj_bias", None),
            getattr(self, "down_proj_bias", None),
            **_settings(self, form),
            residual=residual if adds else None,
        ).to(x.dtype)
        return y if residual is None or adds else residual + y

    return forward


def fp8_experts(module: Any, form: ExpertsForm) -> Fp8Experts:
    """Return a module of experts of a form, quantised to fp8."""
    return Fp8Experts(
        module.gate_up_proj,
        module.down_proj,
        getattr(module, "gate_up_proj_bias", None),
        getattr(module, "down_proj_bias", None),
        **_settings(module, form),
    )


def _settings(module: Any, form: ExpertsForm) -> dict[str, Any]:
    """Return the arguments of `experts` that say what a module's experts compute."""
    return {
        "activation": form.activation,
        "interleaved": form.interleaved,
        "transposed": form.transposed,
        "alpha": _number(module, "alpha") or 1.0,
        "limit": _number(module, "limit") or 0.0,
    }


def _number(module: nn.Module, name: str) -> float | None:
    value = getattr(module, name, None)
    return float(value) if isinstance(value, int | float) else None


def _fits_grouped_mm(weight: torch.Tensor) -> bool:
    # its rows are copied 16 bytes at a time
    return all(size * weight.element_size() % 16 == 0 for size in weight.shape[1:])


def _with_few_experts(module: Any) -> Any:
    small = copy.copy(module)
    small.__dict__["_parameters"] = {
        name: None if p is None else nn.Parameter(p.detach()[:TRIAL_EXPERTS].clone(), p.requires_grad)
        for name, p in module._parameters.items()
    }
    small.num_experts = len(small.gate_up_proj)
    return small


EXPERTS = ModulePattern("experts", looks_like_experts, lambda module, form: experts_forward(form), experts_form)


# ---- routers


class RouterForm(NamedTuple):
    """What a router computes.

    Attributes:
        wide: Logits are computed in fp32.
        score: As `route` takes it.
        normalised: Weights are divided by their sum.
        scaled: Weights are multiplied by `routed_scaling_factor`.
        by_max: Groups are judged by their largest score.
        logits, weights: dtypes that it returns.
    """

    wide: bool
    score: Score
    normalised: bool
    scaled: bool
    by_max: bool
    logits: torch.dtype
    weights: torch.dtype


def looks_like_router(module: nn.Module) -> bool:
    """Return whether a module computes logits of experts from one weight, and takes the largest."""
    weight = module._parameters.get("weight")
    return (
        weight is not None
        and weight.dim() == 2
        and isinstance(getattr(module, "top_k", None), int)
        and isinstance(getattr(module, "num_experts", None), int)
        and weight.shape[0] == module.num_experts
    )


def router_form(module: Any, *, gradients: bool, **_: object) -> RouterForm | Mismatch:
    """Return the form of a router, found by running it, or how it differs from all."""
    weight = module.weight
    count, hidden = weight.shape
    if not weight.is_floating_point() or weight.itemsize < 2 or type(weight) is not nn.Parameter:
        return Mismatch("its weight is quantised or sharded")
    if count > MAX_EXPERTS or (_groups(module)[0] > 1 and count & (count - 1)):
        return Mismatch(f"groups of {count} experts, or more than {MAX_EXPERTS}")
    small = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(0)
    # logits far from each other, so that rounding decides no choice
    small.weight.data = (torch.randn(count, hidden, generator=generator) * hidden**-0.5).to(weight)
    bias = _selection_bias(small)
    if bias is not None:
        bias.data = (torch.rand(bias.shape, generator=generator) * 0.5).to(bias)
    x = (torch.randn(TRIAL_TOKENS, hidden, generator=generator) * 2).to(weight)
    parameters = _extra_arguments(small)
    extra = [(torch.rand(count, generator=generator) * 0.5).to(weight.device) for _ in range(parameters)]

    def dense(result: Any) -> list[torch.Tensor]:
        logits, weights, index = result
        return [
            logits,
            torch.zeros(logits.shape, dtype=weights.dtype, device=weights.device).scatter(1, index, weights),
        ]

    def own(x: torch.Tensor) -> list[torch.Tensor]:
        return dense(type(small).forward(small, x, *extra))

    try:
        with torch.no_grad():
            logits, weights, index = type(small).forward(small, x, *extra)
        if index.is_floating_point() or index.shape != (TRIAL_TOKENS, module.top_k) or weights.shape != index.shape:
            return Mismatch("it returns something else than logits, weights and indices")
    except torch.OutOfMemoryError:
        raise
    except (*FORWARD_ERRORS, AssertionError) as error:
        return Mismatch(f"it does not return logits, weights and indices of hidden states ({error!s:.120})")
    found: Mismatch | None = None
    for score, normalised, scaled, by_max, wide in itertools.product(
        ("softmax", "sigmoid"), (True, False), (True, False), (False, True), (False, True)
    ):
        unscaled = _number(module, "routed_scaling_factor") is None
        if (scaled and unscaled) or (by_max and _groups(module)[0] == 1):
            continue
        form = RouterForm(wide, cast(Score, score), normalised, scaled, by_max, logits.dtype, weights.dtype)
        forward = router_forward(form)
        mismatch = compare_forwards(
            small, own, lambda x, forward=forward: dense(forward(small, x, *extra)), x, gradients=gradients
        )
        if mismatch is None:
            return form
        found = found or mismatch
    return found or Mismatch("its output differs")


def router_forward(form: RouterForm) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    def forward(
        self: Any, hidden_states: torch.Tensor, selection_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        bias = getattr(self, "bias", None)
        if form.wide:
            with torch.autocast(hidden.device.type, enabled=False):
                logits = linear(hidden.float(), self.weight.float(), None if bias is None else bias.float())
        else:
            logits = linear(hidden.to(self.weight.dtype), self.weight, bias)
        if selection_bias is None:
            selection_bias = _selection_bias(self)
        groups, kept = _groups(self)
        weights, index = route(
            logits,
            self.top_k,
            None if selection_bias is None else selection_bias.detach().flatten(),
            form.score,
            normalised=form.normalised,
            scale=self.routed_scaling_factor if form.scaled else 1.0,
            groups=groups,
            kept_groups=kept,
            by_max=form.by_max,
        )
        return logits.to(form.logits), weights.to(form.weights), index

    return forward


def _selection_bias(module: Any) -> torch.Tensor | None:
    """Return what a router adds to its scores for the choice alone: its own, or that of ERNIE's `moe_statics`."""
    for owner in (module, getattr(module, "moe_statics", None)):
        bias = getattr(owner, "e_score_correction_bias", None)
        if isinstance(bias, torch.Tensor):
            return bias
    return None


def _groups(module: Any) -> tuple[int, int]:
    """Return a router's number of groups and how many are kept; 1 and 1 where it does not limit them."""
    groups = getattr(module, "num_group", None) or 1
    if getattr(module, "topk_method", "") == "greedy":  # DeepSeek-V2 Lite has groups in its configuration alone
        groups = 1
    return (groups, module.topk_group) if groups > 1 else (1, 1)


def _extra_arguments(module: nn.Module) -> int:
    """Return how many inputs a router takes beside the hidden states (MiniMax M2: the bias of the choice)."""
    return len(inspect.signature(type(module).forward).parameters) - 2


# ---- blocks of a router and experts


def looks_like_block(module: nn.Module) -> bool:
    """Return whether a module has a router and experts on our kernels and nothing else."""
    children = dict(module.named_children())
    return children.keys() == {"gate", "experts"} and all(
        "forward" in child.__dict__ or isinstance(child, Fp8Experts) for child in children.values()
    )


def block_form(module: Any, *, gradients: bool, **_: object) -> str | Mismatch:
    """Return "plain" for a block that adds nothing to its experts' output, found by running it.

    Gradients are compared with those of the whole layer.
    """
    weight = module.gate.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, TRIAL_TOKENS // 2, weight.shape[1], generator=generator).to(weight)
    own = functools.partial(type(module).forward, module)
    ours = functools.partial(block_forward, module)
    return compare_forwards(nn.Module(), own, ours, x, gradients=False) or "plain"


def block_forward(self: Any, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """The residual is added in the sum over a token's experts."""
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    _, weights, index = self.gate(x)
    flat = None if residual is None else residual.reshape(x.shape)
    y: torch.Tensor = self.experts(x, index, weights, flat)
    return y.view(hidden_states.shape)


SPARSE_BLOCK = ModulePattern("sparse_block", looks_like_block, lambda module, form: block_forward, block_form)
ROUTER = ModulePattern("router", looks_like_router, lambda module, form: router_forward(form), router_form)
