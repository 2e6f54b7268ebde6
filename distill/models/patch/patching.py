"""Patching of a transformers model, teacher or student, with the fused kernels, and its reversal.

Modules are recognised by what they compute, not by their model's name: a module that looks like an RMSNorm (one
weight vector, an epsilon), a gated MLP (two projections up, one down) or a pre-norm layer is run on a small random
input and perturbed parameters, and is swapped only if one of our formulas gives its output and, in a student, its
gradients (`models/trial.py`). A module that matches nothing is left and listed with the reason. Only `forward`
methods of instances are replaced, so parameters, names, saving, LoRA and hooks are untouched, and `unpatch` restores
everything.

    report = patch(model, role="teacher")
    print(report)                          # llama: 65 rms_norm, 32 glu, 32 rope, 32 residual_norm, attention triton
                                           # and 64 shared_input (projections with one input gradient) of a student
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from distill.core.errors import first_line
from distill.core.eval_mode import eval_mode
from distill.models.head import decoder_of, unwrap_peft
from distill.models.patch.attention import (
    AUTO,
    default_attention,
    leave_padded_batches,
    stop_fused_attention,
    use_fused_attention,
)
from distill.models.patch.corrections import correct_forward
from distill.models.patch.document_rope import follows_length
from distill.models.patch.experts import EXPERTS, ROUTER, SPARSE_BLOCK
from distill.models.patch.joined_projections import SharedInputs
from distill.models.patch.lora_forward import LORA_LINEAR
from distill.models.patch.packed import isolates_documents, lowered_limits
from distill.models.patch.padding import hidden_of_padded
from distill.models.patch.recognition import (
    BIAS_GELU_MLP,
    GATED_MLP,
    LAYER_NORM,
    RMS_NORM,
    ROTARY_EMBEDDING,
)
from distill.models.patch.residual_norms import RESIDUAL_NORM
from distill.models.patch.swaps import (
    OTHER,
    ModulePattern,
    PatchReport,
    Role,
    Swap,
    is_patched,
    restore_swaps,
    swap_module,
)
from distill.models.trial import FORWARD_ERRORS, OTHER_KERNEL, distances

log = logging.getLogger(__name__)

# in their order; a module gets the first swap of each line that applies to it, and none where one says why it does not
SWAPS: tuple[tuple[ModulePattern | type[SharedInputs], ...], ...] = (
    (LAYER_NORM, LORA_LINEAR, RMS_NORM, GATED_MLP, BIAS_GELU_MLP, ROTARY_EMBEDDING, EXPERTS, ROUTER),
    (SharedInputs,),
    (SPARSE_BLOCK,),
    (RESIDUAL_NORM,),
)
JUMPS = 2  # times what rounding the embedding otherwise does to the median token


def patch(
    model: nn.Module,
    role: Role = "student",
    *,
    attention: str | None = AUTO,
    layers: bool = True,
    judged: Mapping[Any, Any] | None = None,
    log_it: bool = True,
) -> PatchReport:
    """Swap the parts of `model` that our kernels compute.

    Call it before the model is sharded; adapters may be added before or after.

    Args:
        model: A causal language model of transformers, bare or inside PEFT, on its final device.
        attention: "triton", "cudnn" or "flash" (see `distill.models.patch.attention`), or "auto" for the fastest on
            this GPU of rows without packing or padding; those that are packed or padded take "triton" in any case.
            None keeps the model's own.
        layers: Swap norms, gated MLPs, rotary embeddings and residual additions.
        judged: `trial_results` of a model of the same configuration with fewer layers; modules they cover are not tried
            out, so that `model` may be on the meta device (modules they do not cover are then left).
        log_it: Log the report, in one line.

    Raises:
        ValueError: The model is patched already, or an argument has an unknown value.
    """
    if role not in ("teacher", "student"):
        raise ValueError(f"role: expected 'teacher' or 'student', got {role!r}")
    inner = unwrap_peft(model)
    if is_patched(inner):
        raise ValueError("model: it is patched already; call unpatch first")
    correct_forward(model, survives_unpatch=False)
    report = PatchReport(getattr(inner.config, "model_type", type(inner).__name__), trial_results=dict(judged or {}))
    with eval_mode(inner):
        for number, makers in enumerate(SWAPS if layers else ()):
            modules = list(inner.modules()) if number else _without_own_forward(inner, report)
            _swap_modules(inner, [make(inner, role, report) for make in makers], modules, report)
        if attention is not None:
            if attention == AUTO:
                attention = default_attention(inner, backward=role == "student")
            swap = FusedAttention(inner, attention, report)
            reason = swap.applies(inner)
            if reason is None:
                swap_module(inner, swap, inner)
            else:
                report.left["attention"] = reason
    if log_it:
        log.info("patched %s (%s)", report, role)
    return report


def unpatch(model: nn.Module) -> None:
    """Give every module of `model` its own forward back; a model that is not patched is left alone."""
    restore_swaps(model)


def _without_own_forward(model: nn.Module, report: PatchReport) -> Iterator[nn.Module]:
    """Yield the modules whose forward is their class's, and report the others."""
    for module in list(model.modules()):
        if module is model:  # its forward may be the objective's; none of ours takes its place here
            continue
        if "forward" not in module.__dict__:
            yield module
        elif any(
            True for _ in module.parameters()
        ):  # somebody's hook (accelerate's offloading, say) must go on running
            report.left[type(module).__name__] = "has a forward of its own already"


def _swap_modules(model: nn.Module, swaps: Sequence[Swap], modules: Iterable[nn.Module], report: PatchReport) -> None:
    """Swap each module by the first of the swaps that applies to it."""
    for module in modules:
        for swap in swaps:
            reason = swap.applies(module)
            if reason is None:
                swap_module(model, swap, module)
                report.swapped[swap.kind] += 1
            elif reason:
                report.left[type(module).__name__] = reason
            if reason != OTHER:
                break


class FusedAttention(Swap):
    """Swap of a model's attention implementation.

    Args:
        model: Bare model.
        backend: "triton", "cudnn" or "flash".
        report: Report of `patch`.
    """

    kind = "attention"

    def __init__(self, model: nn.Module, backend: str, report: PatchReport) -> None:
        self.decoder = decoder_of(model)
        self.backend = backend
        self.report = report

    def applies(self, module: nn.Module) -> str | None:
        """Compare the hidden states of both, unless a model of the same parts has been compared."""
        if not getattr(module, "_supports_attention_backend", False):
            return "the model does not take other attention implementations"
        verdicts = self.report.trial_results
        if any(parameter.is_meta for parameter in module.parameters()):
            return verdicts.get("attention")
        use_fused_attention(module, self.decoder, self.backend)
        try:
            if "attention" not in verdicts:
                verdicts["attention"] = _attention_mismatch(module, self.decoder, self.backend)
            if verdicts["attention"] is None and "padding" not in verdicts:
                with lowered_limits(module):
                    ours = hidden_of_padded(self.decoder)
                    stop_fused_attention(module, self.decoder)
                    own = hidden_of_padded(self.decoder)
                verdicts["padding"] = bool((ours - own).norm() <= OTHER_KERNEL * own.norm())
                use_fused_attention(module, self.decoder, self.backend)
        finally:
            stop_fused_attention(module, self.decoder)
        return verdicts["attention"]

    def swap(self, module: nn.Module) -> None:
        """Switch to ours; padded batches stay with the model's own where they come out different."""
        use_fused_attention(module, self.decoder, self.backend)
        if not self.report.trial_results.get("padding", True):
            leave_padded_batches(self.decoder)
            self.report.left["attention of padded batches"] = "it comes out different"
        self.report.attention = self.backend

    def restore(self, module: nn.Module) -> None:
        stop_fused_attention(module, self.decoder)


@torch.no_grad()
def _attention_mismatch(model: nn.Module, decoder: nn.Module, backend: str) -> str | None:
    """Return why a model whose attention is ours already has to keep its own; it is ours again afterwards."""
    weight: torch.Tensor = decoder.get_input_embeddings().weight  # type: ignore[operator]
    ids = torch.arange(24, device=weight.device).view(2, 12) % len(weight)
    plain: dict[str, torch.Tensor] = {"input_ids": ids}
    if follows_length(model):  # which asks for positions; other decoders may take none
        plain["position_ids"] = torch.arange(12, device=weight.device).expand(2, -1)

    def hidden(**given: torch.Tensor) -> torch.Tensor:
        with lowered_limits(model):
            found: torch.Tensor = decoder(**(given or plain), use_cache=False).last_hidden_state
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
        return float(moved.median()) if moved.max() > OTHER_KERNEL else 0.0

    try:
        ours = hidden()
    except torch.OutOfMemoryError:
        raise
    except FORWARD_ERRORS as error:
        return f"the model does not run with another one ({first_line(error):.120})"
    packs = isolates_documents(model)
    stop_fused_attention(model, decoder)
    try:
        own = hidden()
        own_packs = packs or isolates_documents(model)
        differs = not (ours - own).norm() <= OTHER_KERNEL * own.norm()
        # where rounding alone changes which experts some tokens get, most of the tokens still tell
        if differs and (most := rounding(own)):
            differs = not distances(ours, own).median() <= max(OTHER_KERNEL, JUMPS * most)
    finally:
        use_fused_attention(model, decoder, backend)
    if differs:
        return "it comes out different: the model makes masks of its own"
    if own_packs and not packs:
        return "the model makes masks of its own, or its layers do not hand on where documents end"
    return None
