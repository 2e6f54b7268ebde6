"""Patching of a transformers model, teacher or student, with the fused kernels, and its reversal.

Modules are recognised by what they compute, not by their model's name: a module that looks like an RMSNorm (one
weight vector, an epsilon), a gated MLP (two projections up, one down) or a pre-norm layer is run on a small random
input and perturbed parameters, and is swapped only if one of our formulas gives its output and, in a student, its
gradients (`forward_comparison.py`). A module that matches nothing is left and listed with the reason. Only `forward`
methods of instances are replaced, so parameters, names, saving, LoRA and hooks are untouched, and `unpatch` restores
everything.

    report = patch(model, role="teacher")
    print(report)                          # llama: 65 rms_norm, 32 glu, 32 rope, 32 residual_norm, attention triton
                                           # and 64 shared_input (projections with one input gradient) of a student
"""

from __future__ import annotations

import functools
import logging
import types
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from distill.core.eval_mode import eval_mode
from distill.models.head import bare, decoder_of
from distill.models.layers import find_layers
from distill.models.patch import output_rows
from distill.models.patch.bias_gelu_mlp import bias_gelu_forward, two_products
from distill.models.patch.forward_comparison import FORWARD_ERRORS, Mismatch, first_line
from distill.models.patch.lora_forward import is_lora_linear, lora_forward
from distill.models.patch.packed import distances, keeps_apart, lowered_limits
from distill.models.patch.padding import hidden_of_padded
from distill.models.patch.recognition import (
    epsilon_of,
    gated_activation,
    gated_forward,
    gated_names,
    gelu_of,
    layer_norm_forward,
    looks_like_rms_norm,
    rms_norm_form,
    rms_norm_forward,
    rotary_form,
    rotary_function,
    with_our_rotary,
)
from distill.models.patch.residual_norms import LAYER_FORWARDS, fusable_layers, layer_matches, takes_residual
from distill.models.patch.shared_input import GROUP, SharedInput, groups_of
from distill.models.patch.teacher_layout import GATED, separate

log = logging.getLogger(__name__)

Role = Literal["teacher", "student"]
UNDO = "_distill_undo"
NEAR = 0.1  # of two attentions: relative, since in 16 bits another order of sums changes which experts tokens get
JUMPS = 2  # times what rounding the embedding otherwise does to the median token


@dataclass
class PatchReport:
    """Result of `patch`.

    Attributes:
        model_type: The configuration's model type.
        swapped: How many modules of each kind run our kernels now.
        left: Class names that looked alike but compute something else, with the reason.
        attention: Back end in use, or None where the model kept its own attention.
        loss: Whether a call with labels computes the fused loss and no logits.
        verdicts: What was found about each kind of module, for a model of the same parts without weights.
    """

    model_type: str
    swapped: Counter[str] = field(default_factory=Counter)
    left: dict[str, str] = field(default_factory=dict)
    attention: str | None = None
    loss: bool = False
    verdicts: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        parts = [f"{count} {kind}" for kind, count in self.swapped.items()]
        if self.attention:
            parts.append(f"attention {self.attention}")
        parts += ["loss"] if self.loss else []
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
        attention: "triton", "cudnn" or "flash" (see `distill.models.patch.attention`); None keeps the model's own.
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
    verdicts, gradients = report.verdicts, role == "student"

    def judged(kind: str, module: nn.Module, judge: Callable[[nn.Module], Any]) -> Any:
        # modules of one class with the same shapes and settings get one verdict
        shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())
        key = (kind, type(module), shapes, epsilon_of(module))
        if key not in verdicts:
            if any(parameter.is_meta for parameter in module.parameters()):
                report.left[type(module).__name__] = "no verdict on it, and no weights to try"
                return None
            verdicts[key] = judge(module)
        if isinstance(verdict := verdicts[key], Mismatch):
            report.left[type(module).__name__] = f"not a {kind} of ours: {verdict.reason}"
            return None
        return verdict

    for module in list(model.modules()):
        if module in (model, bare(model)):  # its forward may be the objective's; none of ours takes its place here
            continue
        if "forward" in module.__dict__:  # somebody's hook (accelerate's offloading, say) that must go on running
            if any(True for _ in module.parameters()):  # else none of ours would take its place
                report.left[type(module).__name__] = "has a forward of its own already"
        elif type(module) is nn.LayerNorm and len(module.normalized_shape) == 1:
            replace_forward(module, layer_norm_forward, undo)
            report.swapped["layer_norm"] += 1
        elif is_lora_linear(module):
            replace_forward(module, lora_forward, undo)
            report.swapped["lora"] += 1
        elif looks_like_rms_norm(module):
            form = judged("rms_norm", module, functools.partial(rms_norm_form, gradients=gradients))
            if form is not None:
                replace_forward(module, rms_norm_forward(form, epsilon_of(module)), undo)
                report.swapped["rms_norm"] += 1
        elif names := gated_names(module):
            activation = judged("glu", module, functools.partial(gated_activation, names=names, gradients=gradients))
            if activation is not None:
                replace_forward(module, gated_forward(names, activation), undo)
                if names[1] is not None:
                    module.__dict__[GATED] = (names[0], names[1], activation)
                undo.append(functools.partial(separate, module))
                report.swapped["glu"] += 1
        elif products := two_products(module):
            approximate = judged("bias_gelu", module, functools.partial(gelu_of, names=products, gradients=gradients))
            if approximate is not None:
                replace_forward(module, bias_gelu_forward(products, approximate), undo)
                report.swapped["bias_gelu"] += 1
        elif (rotary := rotary_function(module)) and judged(
            "rope", module, functools.partial(rotary_form, gradients=gradients)
        ):
            replace_forward(module, with_our_rotary(rotary), undo)
            report.swapped["rope"] += 1
    for module, group in list(groups_of(model)) if role == "student" else []:  # a teacher has no gradients to share
        share_input(module, group, undo)
        report.swapped["shared_input"] += 1
    fused = []
    for kind, layer in fusable_layers(model):
        forward = LAYER_FORWARDS[kind]
        form = judged(
            "residual_norm", layer, functools.partial(layer_matches, model=model, forward=forward, gradients=gradients)
        )
        if form is not None:
            replace_forward(layer, forward(form == "casts", takes_residual(layer.mlp)), undo)
            report.swapped["residual_norm"] += 1
            fused.append(layer)
    if fused and find_layers(model)[1][-1] is fused[-1]:
        output_rows.mark(decoder_of(model), fused[-1], undo, verdicts)


def _swap_attention(model: nn.Module, backend: str, undo: list[Callable[[], None]], report: PatchReport) -> None:
    from distill.models.patch.attention import leave_padded_batches, stop_fused_attention, use_fused_attention

    if not getattr(model, "_supports_attention_backend", False):
        report.left["attention"] = "the model does not take other attention implementations"
        return
    decoder = decoder_of(model)
    use_fused_attention(model, decoder, backend)
    has_weights = not any(parameter.is_meta for parameter in model.parameters())
    if "attention" not in report.verdicts and has_weights:
        report.verdicts["attention"] = _attention_mismatch(model, decoder, backend)
    if verdict := report.verdicts.get("attention"):
        stop_fused_attention(model, decoder)
        report.left["attention"] = verdict
        return
    if "padding" not in report.verdicts and has_weights:
        with lowered_limits(model):
            ours = hidden_of_padded(decoder)
            stop_fused_attention(model, decoder)
            own = hidden_of_padded(decoder)
        report.verdicts["padding"] = bool((ours - own).norm() <= NEAR * own.norm())
        use_fused_attention(model, decoder, backend)
    if not report.verdicts.get("padding", True):
        leave_padded_batches(decoder)
        report.left["attention of padded batches"] = "it comes out different"
    undo.append(lambda: stop_fused_attention(model, decoder))
    report.attention = backend


@torch.no_grad()
def _attention_mismatch(model: nn.Module, decoder: nn.Module, backend: str) -> str | None:
    """Return why a model whose attention is ours already has to keep its own; it is ours again afterwards."""
    from distill.models.patch.attention import stop_fused_attention, use_fused_attention

    weight: torch.Tensor = decoder.get_input_embeddings().weight  # type: ignore[operator]
    ids = torch.arange(24, device=weight.device).view(2, 12) % len(weight)

    def hidden(**given: torch.Tensor) -> torch.Tensor:
        with lowered_limits(model):
            found: torch.Tensor = decoder(**(given or {"input_ids": ids}), use_cache=False).last_hidden_state
            return found.float()

    def rounding(own: torch.Tensor) -> float:
        """Return what the median token moves by when its embedding is rounded otherwise; 0 for most dense models."""
        embedded = decoder.get_input_embeddings()(ids)  # type: ignore[operator]
        generator = torch.Generator(embedded.device).manual_seed(0)
        noise = torch.randn(embedded.shape, generator=generator, device=embedded.device, dtype=torch.float32)
        eps = torch.finfo(embedded.dtype).eps
        try:
            moved = distances(hidden(inputs_embeds=(embedded * (1 + eps * noise)).to(embedded.dtype)), own)
        except FORWARD_ERRORS:  # it takes token ids alone
            return 0.0
        return float(moved.median()) if moved.max() > NEAR else 0.0

    try:
        ours = hidden()
    except torch.OutOfMemoryError:
        raise
    except FORWARD_ERRORS as error:
        return f"the model does not run with another one ({first_line(error)})"
    packs = keeps_apart(model)
    stop_fused_attention(model, decoder)
    try:
        own, own_packs = hidden(), packs or keeps_apart(model)
        differs = not (ours - own).norm() <= NEAR * own.norm()
        # where rounding alone changes which experts some tokens get, most of the tokens still tell
        if differs and (most := rounding(own)):
            differs = not distances(ours, own).median() <= max(NEAR, JUMPS * most)
    finally:
        use_fused_attention(model, decoder, backend)
    if differs:
        return "it comes out different: the model makes masks of its own"
    if own_packs and not packs:
        return "the model makes masks of its own, or its layers do not hand on where documents end"
    return None
