"""Our kernels in any training script: one line where the model is loaded, or one after it.

    model = AutoFusedModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")
    model = AutoModelForCausalLM.from_pretrained(...); distill.patch(model)

From then on, `model(input_ids, attention_mask, labels=labels)` gives the same loss and gradients as before, computed
from the hidden states without logits; norms, MLPs, rotary embeddings and attention run our kernels.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM

from distill.models.head import unwrap_peft
from distill.models.load.read_weights import refuse_incomplete
from distill.models.patch.corrections import correct_forward
from distill.models.patch.fused_loss import FusedLosses
from distill.models.patch.patching import patch as patch_parts
from distill.models.patch.swaps import PatchReport, Role, swap_module

log = logging.getLogger(__name__)


def patch(
    model: nn.Module,
    role: Role = "student",
    *,
    attention: str | None = "auto",
    layers: bool = True,
    keep_logits: bool = False,
) -> PatchReport:
    """Have `model` run our kernels, in place; `distill.unpatch(model)` undoes it.

    A call with `labels` returns the mean cross-entropy of the next tokens as the model itself would (`shift_labels`,
    `num_items_in_batch`, `ignore_index`, an adapter on the head and what the model does to its logits included), but
    computes no logits: `outputs.logits` are computed when they are first used, with a graph where gradients are
    enabled, and a warning says so once. Such a call returns no key-value cache unless it asks for one. A call without
    labels, as of `generate`, is as before.

    An `attention_mask` of padding on the left, the right or none takes our attention without a look at it. One with
    gaps takes PyTorch's on a CPU; on a GPU its outputs are NaN and a later call raises: `attention=None` is for these.

    Call it when the model is on its device, before it is sharded, compiled or handed to a trainer; adapters of PEFT may
    be added before or after. What keeps its own implementation is logged in one line.

    Args:
        role: "student", or "teacher" for a model that gets no labels.
        attention: "triton", "cudnn", "flash" (which serve what PyTorch's back ends of that name do), or None to keep
            the model's own.
        layers: Swap norms, MLPs, rotary embeddings and residual additions.
        keep_logits: Leave loss and logits to the model.

    Raises:
        ValueError: The model is patched already, or an argument has an unknown value.
    """
    report = patch_parts(model, role, attention=attention, layers=layers, log_it=False)
    inner: Any = unwrap_peft(model)
    if role == "student" and not keep_logits:
        swap = FusedLosses()
        reason = swap.applies(inner)
        report.loss = reason is None
        if reason is None:
            swap_module(inner, swap, inner)
        else:
            report.left["loss"] = reason
    log.log(logging.WARNING if report.left else logging.INFO, "patched %s (%s)", report, role)
    return report


class AutoFusedModelForCausalLM:
    """`transformers.AutoModelForCausalLM` with our kernels in place: a one-line change for any training script."""

    @classmethod
    def from_pretrained(
        cls,
        *args: Any,
        role: Role = "student",
        attention: str | None = "auto",
        keep_logits: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Load with `AutoModelForCausalLM.from_pretrained`, then `patch(model, role, ...)`.

        Args:
            args: Positional arguments of `AutoModelForCausalLM.from_pretrained`.
            role: See `patch`, also for `attention` and `keep_logits`.
            attention: See there.
            keep_logits: See there.
            kwargs: Keyword arguments of `AutoModelForCausalLM.from_pretrained`; with `output_loading_info=True` the
                result is the model and a dictionary, as there.

        Raises:
            UnfitWeightsError: Files that lack tensors of the model, which transformers alone draws at random with a
                warning.
        """
        with_info = kwargs.pop("output_loading_info", False)
        loaded: Any = AutoModelForCausalLM.from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded  # a model alone by its annotation
        refuse_incomplete(info["missing_keys"], ())  # transformers refuses other shapes unless told to ignore them
        correct_forward(model, kwargs.get("attn_implementation") or "auto", survives_unpatch=False)
        patch(model, role, attention=attention, keep_logits=keep_logits)
        return (model, info) if with_info else model
