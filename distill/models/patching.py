"""Put our kernels into a transformers model, teacher or student, and take them out again.

Modules are recognised by what they compute, not by their model's name: a module that looks like an RMSNorm (one
weight vector, an epsilon), a gated MLP (two projections up, one down) or a pre-norm layer is run once on a small
random input, and is swapped only if one of our formulas gives its output. What matches nothing stays as it is and is
listed. Only `forward` methods of instances are replaced, so parameters, names, saving, LoRA and hooks are untouched,
and `unpatch` restores everything.

    report = patch(model, role="teacher")
    print(report)                          # llama: 65 rms_norm, 32 glu, 32 rope, 32 residual_norm, attention triton
                                           # and 64 shared_input (projections with one input gradient) of a student
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import types
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from distill_kernels.layers.glu import geglu, swiglu
from distill_kernels.layers.layer_norm import layer_norm
from distill_kernels.layers.rms_norm import add_rms_norm, rms_norm, rms_norm_and_input
from distill_kernels.layers.rope import rope
from distill_kernels.matmul.fp8 import Fp8Linear, fp8_rms_norm
from torch import nn
from transformers.pytorch_utils import Conv1D

from distill.core.eval_mode import eval_mode
from distill.models import output_rows
from distill.models.bias_gelu_mlp import APPROXIMATIONS, bias_gelu_forward, two_products
from distill.models.head import bare, decoder_of
from distill.models.lora_forward import down_of_gated, is_lora_linear, lora_forward
from distill.models.packed import keeps_apart
from distill.models.padding import hidden_of_padded
from distill.models.pruning import find_layers
from distill.models.residual_norms import LAYER_FORWARDS, fusable_layers, is_close, layer_matches, takes_residual
from distill.models.shared_input import GROUP, SharedInput, groups_of
from distill.models.teacher_layout import GATED, gated_product, separate

log = logging.getLogger(__name__)

Role = Literal["teacher", "student"]
UNDO = "_distill_undo"
ROTARY = "apply_rotary_pos_emb"
GATED_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("gate_up_proj", None, "down_proj"))
ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "silu": swiglu,
    "gelu_tanh": functools.partial(geglu, approximate="tanh"),
    "gelu": geglu,
}


@dataclass
class PatchReport:
    """What `patch` did.

    Attributes:
        model_type: The configuration's model type.
        swapped: How many modules of each kind run our kernels now.
        left: Class names that looked alike but compute something else, with the reason.
        attention: Back end in use, or None where the model kept its own attention.
        loss: Whether a call with labels computes the fused loss and no logits.
        generate: Whether `generate` has our cache and decode kernel.
        verdicts: What was found about each kind of module, for a model of the same parts without weights.
    """

    model_type: str
    swapped: Counter[str] = field(default_factory=Counter)
    left: dict[str, str] = field(default_factory=dict)
    attention: str | None = None
    loss: bool = False
    generate: bool = False
    verdicts: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        parts = [f"{count} {kind}" for kind, count in self.swapped.items()]
        if self.attention:
            parts.append(f"attention {self.attention}")
        parts += [name for name, ours in (("loss", self.loss), ("generate", self.generate)) if ours]
        text = f"{self.model_type}: {', '.join(parts) or 'nothing swapped'}"
        if self.left:
            text += "; left as they are: " + ", ".join(f"{name} ({reason})" for name, reason in self.left.items())
        return text


def patch(
    model: nn.Module,
    role: Role = "student",
    *,
    attention: str | None = "triton",
    layers: bool = True,
    judged: Mapping[Any, Any] | None = None,
    log_it: bool = True,
) -> PatchReport:
    """Swap the parts of `model` that our kernels compute.

    Call it before the model is sharded; adapters may be added before or after.

    Args:
        model: A causal language model of transformers, bare or inside PEFT, on its final device.
        attention: "triton", "cudnn" or "flash" (see `distill.models.attention`); None keeps the model's own.
        layers: Swap norms, gated MLPs, rotary embeddings and residual additions.
        judged: `verdicts` of a model of the same configuration with fewer layers; modules they cover are not tried
            out, so that `model` may be on the meta device (modules they do not cover are then left).
        log_it: Log the report, in one line.

    Raises:
        ValueError: The model is patched already, or an argument has an unknown value.
    """
    if role not in ("teacher", "student"):
        raise ValueError(f"role: expected 'teacher' or 'student', got {role!r}")
    inner = bare(model)
    if UNDO in inner.__dict__:
        raise ValueError("model: it is patched already; call unpatch first")
    report = PatchReport(getattr(inner.config, "model_type", type(inner).__name__), verdicts=dict(judged or {}))
    undo: list[Callable[[], None]] = []
    inner.__dict__[UNDO] = undo
    with eval_mode(inner):
        if layers:
            _swap_layers(inner, undo, report, role)
        if attention is not None:
            _swap_attention(inner, attention, undo, report)
    if log_it:
        log.info("patched %s (%s)", report, role)
    return report


def unpatch(model: nn.Module) -> None:
    """Give every module of `model` its own forward back; a model that is not patched is left alone."""
    for restore in reversed(bare(model).__dict__.pop(UNDO, [])):
        restore()


def replace_forward(module: nn.Module, forward: Callable[..., Any], undo: list[Callable[[], None]]) -> None:
    """Give one module a forward of ours; what is put into `undo` gives it back what it had."""
    before = module.__dict__.get("forward")
    module.forward = types.MethodType(forward, module)

    def restore() -> None:
        del module.forward
        if before is not None:
            module.forward = before

    undo.append(restore)


def share_input(module: nn.Module, group: SharedInput, undo: list[Callable[[], None]]) -> None:
    """Have the projections of `group`, which are `module`'s, computed by the first of them that is called."""
    for member in (module, *group.layers.values()):
        member.__dict__[GROUP] = group
        undo.append(functools.partial(member.__dict__.pop, GROUP, None))
    for member, ours in group.forwards(module):
        replace_forward(member, ours, undo)


def _swap_layers(model: nn.Module, undo: list[Callable[[], None]], report: PatchReport, role: Role) -> None:
    verdicts = report.verdicts

    def judged(kind: str, module: nn.Module, judge: Callable[[nn.Module], Any]) -> Any:
        # modules of one class with the same shapes and settings get one verdict
        shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())
        key = (kind, type(module), shapes, _epsilon(module))
        if key not in verdicts:
            if any(parameter.is_meta for parameter in module.parameters()):
                report.left[type(module).__name__] = "no verdict on it, and no weights to try"
                return None
            verdicts[key] = judge(module)
        if not verdicts[key]:
            report.left[type(module).__name__] = f"not a {kind} of ours"
        return verdicts[key]

    for module in list(model.modules()):
        if module in (model, bare(model)):  # its forward may be the objective's; none of ours takes its place here
            continue
        if "forward" in module.__dict__:  # somebody's hook (accelerate's offloading, say) that must go on running
            report.left[type(module).__name__] = "has a forward of its own already"
        elif type(module) is nn.LayerNorm and len(module.normalized_shape) == 1:
            replace_forward(module, _layer_norm_forward, undo)
            report.swapped["layer_norm"] += 1
        elif is_lora_linear(module):
            replace_forward(module, lora_forward, undo)
            report.swapped["lora"] += 1
        elif _looks_like_rms_norm(module):
            form = judged("rms_norm", module, _rms_norm_form)
            if form is not None:
                replace_forward(module, _rms_norm_forward(form, _epsilon(module)), undo)
                report.swapped["rms_norm"] += 1
        elif names := _gated_names(module):
            activation = judged("glu", module, functools.partial(_gated_activation, names=names))
            if activation is not None:
                replace_forward(module, _gated_forward(names, activation), undo)
                if names[1] is not None:
                    module.__dict__[GATED] = (names[0], names[1], activation)
                undo.append(functools.partial(separate, module))
                report.swapped["glu"] += 1
        elif products := two_products(module):
            approximate = judged("bias_gelu", module, functools.partial(_gelu_of, names=products))
            if approximate is not None:
                replace_forward(module, bias_gelu_forward(products, approximate), undo)
                report.swapped["bias_gelu"] += 1
        elif (rotary := _rotary_function(module)) and judged("rope", module, _rotary_matches):
            replace_forward(module, _with_our_rotary(rotary), undo)
            report.swapped["rope"] += 1
    for module, group in list(groups_of(model)) if role == "student" else []:  # a teacher has no gradients to share
        share_input(module, group, undo)
        report.swapped["shared_input"] += 1
    fused = []
    for kind, layer in fusable_layers(model):
        forward = LAYER_FORWARDS[kind]
        form = judged("residual_norm", layer, functools.partial(layer_matches, model=model, forward=forward))
        if form is not None:
            replace_forward(layer, forward(form == "casts", takes_residual(layer.mlp)), undo)
            report.swapped["residual_norm"] += 1
            fused.append(layer)
    if fused and find_layers(model)[1][-1] is fused[-1]:
        output_rows.mark(decoder_of(model), fused[-1], undo, verdicts)


def _swap_attention(model: nn.Module, backend: str, undo: list[Callable[[], None]], report: PatchReport) -> None:
    from distill.models.attention import leave_padded_batches, stop_fused_attention, use_fused_attention

    if not getattr(model, "_supports_attention_backend", False):
        report.left["attention"] = "the model does not take other attention implementations"
        return
    decoder = decoder_of(model)
    use_fused_attention(model, decoder, backend)
    if "attention" not in report.verdicts and not any(parameter.is_meta for parameter in model.parameters()):
        report.verdicts["attention"] = keeps_apart(model)
        if not report.verdicts["attention"]:  # unless the model does not keep them apart by itself either
            stop_fused_attention(model, decoder)
            report.verdicts["attention"] = not keeps_apart(model)
            use_fused_attention(model, decoder, backend)
    if not report.verdicts.get("attention", True):
        stop_fused_attention(model, decoder)
        report.left["attention"] = "the model makes masks of its own, or its layers do not hand on where documents end"
        return
    if "padding" not in report.verdicts and not any(parameter.is_meta for parameter in model.parameters()):
        ours = hidden_of_padded(decoder)
        stop_fused_attention(model, decoder)
        own = hidden_of_padded(decoder)
        report.verdicts["padding"] = bool((ours - own).norm() <= 0.1 * own.norm())
        use_fused_attention(model, decoder, backend)
    if not report.verdicts.get("padding", True):
        leave_padded_batches(decoder)
        report.left["attention of padded batches"] = "it comes out different"
    undo.append(lambda: stop_fused_attention(model, decoder))
    report.attention = backend


def _random(module: nn.Module, *shape: int, scale: float = 1.0) -> torch.Tensor:
    held = next(itertools.chain(module.parameters(), module.buffers()))
    dtype = held.dtype if held.is_floating_point() and held.itemsize > 1 else torch.bfloat16  # quantised weights
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(*shape, generator=generator) * scale).to(held.device, dtype)


# ---- norms


def _epsilon(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps", "epsilon"):
        if isinstance(value := getattr(module, name, None), float):
            return value
    return None


def _looks_like_rms_norm(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    return (
        list(parameters) == ["weight"]
        and parameters["weight"].dim() == 1
        and not list(module.children())
        and _epsilon(module) is not None
        and _takes_one_input(module)
    )


def _takes_one_input(module: nn.Module) -> bool:
    """Whether hidden states are all that a module is given: no gate (Mamba 2) and no number of a layer beside them."""
    inputs = inspect.signature(module.forward).parameters.values()
    return len([one for one in inputs if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]) == 1


@torch.no_grad()
def _rms_norm_form(module: Any) -> str | None:
    x = _random(module, 3, module.weight.shape[0], scale=3.0)
    expected = module(x)
    for form in ("llama", "gemma"):
        if is_close(rms_norm(x, module.weight, _epsilon(module), form), expected):  # type: ignore[arg-type]
            return form
    return None


def _rms_norm_forward(form: str, eps: float | None) -> Callable[..., Any]:
    def forward(
        self: Any, hidden_states: torch.Tensor, residual: torch.Tensor | None = None,
        dtype: torch.dtype | None = None, and_input: bool = False, fp8: bool = False,
    ) -> Any:  # fmt: skip
        if fp8:
            return fp8_rms_norm(hidden_states, self.weight, eps, form, residual)  # type: ignore[arg-type]
        if residual is not None:
            return add_rms_norm(hidden_states, residual, self.weight, eps, form, dtype)  # type: ignore[arg-type]
        norm = rms_norm_and_input if and_input else rms_norm
        return norm(hidden_states, self.weight, eps, form, dtype)  # type: ignore[arg-type]

    return forward


def _layer_norm_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return layer_norm(x, self.weight, self.bias, self.eps)


# ---- gated MLPs


def _gated_names(module: nn.Module) -> tuple[str, str | None, str] | None:
    for names in GATED_NAMES:
        if all(isinstance(getattr(module, name, None), nn.Module) for name in names if name):
            return names
    return None


@torch.no_grad()
def _gated_activation(module: nn.Module, names: tuple[str, str | None, str]) -> str | None:
    first = getattr(module, names[0])
    if not hasattr(first, "in_features") or not _takes_one_input(module):
        return None
    return _which(module, first.in_features, {name: _gated_forward(names, name) for name in ACTIVATIONS})


def _which(module: nn.Module, width: int, forwards: Mapping[str, Callable[..., torch.Tensor]]) -> str | None:
    """The forward that computes what the module does, by its name."""
    x = _random(module, 3, width, scale=8.0)  # large, so that the activations differ by more than rounding
    try:
        expected = module(x)
    except (TypeError, ValueError):  # takes more than hidden states
        return None
    return next((name for name, forward in forwards.items() if is_close(forward(module, x), expected)), None)


def _gated_forward(names: tuple[str, str | None, str], activation: str) -> Callable[..., Any]:
    gate_name, up_name, down_name = names
    gated = ACTIVATIONS[activation]

    def forward(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        down = getattr(self, down_name)
        if (both := gated_product(self, x)) is not None:
            return down_of_gated(down, lambda hidden: hidden, both, residual=residual)
        parts = [getattr(self, name)(x) for name in (gate_name, up_name) if name is not None]
        if type(down) is Fp8Linear and len(parts) == 2 and not (down._forward_hooks or down._forward_pre_hooks):
            y = down.of_gated(parts[0], parts[1], activation)  # type: ignore[arg-type]
            return y if residual is None else residual + y
        return down_of_gated(down, gated, *parts, residual=residual)

    return forward


@torch.no_grad()
def _gelu_of(module: Any, names: tuple[str, str]) -> str | None:
    """Which GELU an MLP with two products has."""
    weight = getattr(module, names[0]).weight
    width = weight.shape[0] if isinstance(getattr(module, names[0]), Conv1D) else weight.shape[1]
    return _which(module, width, {name: bias_gelu_forward(names, name) for name in APPROXIMATIONS})


# ---- rotary embeddings


def _rotary_function(module: nn.Module) -> Any:
    """The forward of an attention module that calls `apply_rotary_pos_emb` from its own file, undecorated."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return forward if code is not None and ROTARY in code.co_names and ROTARY in forward.__globals__ else None


def _with_our_rotary(forward: Any) -> Callable[..., Any]:
    """The same code with `apply_rotary_pos_emb` bound to our kernel; other users of that file are not touched."""
    namespace = dict(forward.__globals__)
    namespace[ROTARY] = _apply_rotary
    ours = types.FunctionType(forward.__code__, namespace, forward.__name__, forward.__defaults__, forward.__closure__)
    ours.__kwdefaults__ = forward.__kwdefaults__
    return ours


def _apply_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    # projections are used nowhere else, so that they may be overwritten where no gradient is recorded
    in_place = not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad))
    if unsqueeze_dim == 1:
        return rope(q, k, cos, sin, in_place=in_place)
    q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, in_place=in_place)
    return q.transpose(1, 2), k.transpose(1, 2)


@torch.no_grad()
def _rotary_matches(module: nn.Module) -> bool:
    forward = _rotary_function(module)
    width = getattr(module, "head_dim", None)
    if not isinstance(width, int):
        return False
    q, k = _random(module, 1, 4, 5, width), _random(module, 1, 2, 5, width).flip(-1)
    angle = torch.rand(1, 5, width // 2, generator=torch.Generator().manual_seed(0)) * 6
    angle = torch.cat([angle, angle], -1).to(q)
    try:
        expected = forward.__globals__[ROTARY](q.clone(), k.clone(), angle.cos(), angle.sin())
        ours = _apply_rotary(q.clone(), k.clone(), angle.cos(), angle.sin())
    except (TypeError, ValueError, RuntimeError):  # a rotary embedding of another signature or layout
        return False
    return is_close(ours[0], expected[0]) and is_close(ours[1], expected[1])
