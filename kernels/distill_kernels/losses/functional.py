"""Functional forms of the fused losses, with every setting a keyword argument.

    loss = fused_kl_loss(student_hidden, student_weight, teacher_hidden, teacher_weight, labels, direction="reverse")

Each takes the tensors of `FusedDistillationLoss.forward` (positionally or by name) and, by name, the settings of its
module's constructor; returns what the module returns. Modules are made once for each set of settings.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from distill_kernels.losses.modules import (
    FusedCrossEntropyLoss,
    FusedDistillationLoss,
    FusedJSDLoss,
    FusedKLLoss,
    FusedSkewKLLoss,
    FusedTVDLoss,
)
from distill_kernels.losses.policy import FusedPolicyGradientLoss
from distill_kernels.losses.terms import LossTerm, TokenStats, plain_number
from distill_kernels.losses.topk import FusedStudentTopKKLLoss, FusedTopKKLLoss

Result = torch.Tensor | tuple[torch.Tensor, TokenStats]


@functools.lru_cache(maxsize=128)
def _module(kind: type[FusedDistillationLoss], settings: tuple[tuple[str, Hashable], ...]) -> FusedDistillationLoss:
    return kind(**dict(settings))  # type: ignore[arg-type]


@functools.cache
def _inputs_of(kind: type[FusedDistillationLoss]) -> frozenset[str]:
    return frozenset(inspect.signature(kind.forward).parameters)


def _call(kind: type[FusedDistillationLoss], tensors: tuple[Any, ...], named: dict[str, Any]) -> Result:
    inputs = _inputs_of(kind)  # type: ignore[arg-type]
    settings = tuple((name, plain_number(named[name], name)) for name in sorted(named) if name not in inputs)
    return _module(kind, settings)(*tensors, **{name: value for name, value in named.items() if name in inputs})  # type: ignore[arg-type]


def fused_kl_loss(*tensors: torch.Tensor | None, direction: str = "forward", **named: Any) -> Result:
    """Forward or reverse KL divergence from hidden states and heads, plus hard labels: `FusedKLLoss`.

    Args:
        tensors: student_hidden [..., Hs], student_weight [Vs, Hs], teacher_hidden [..., Ht], teacher_weight [Vt, Ht],
            labels [...] or None.
        direction: "forward", KL(p_t || p_s), or "reverse", KL(p_s || p_t).
        named: other inputs of `FusedDistillationLoss.forward` and settings of `FusedKLLoss`.

    Raises:
        ValueError: as the module, naming the field.
    """
    return _call(FusedKLLoss, tensors, {"direction": direction, **named})


def fused_jsd_loss(*tensors: torch.Tensor | None, beta: float = 0.5, **named: Any) -> Result:
    """Generalised Jensen-Shannon divergence: `FusedJSDLoss`; arguments as in `fused_kl_loss`."""
    return _call(FusedJSDLoss, tensors, {"beta": beta, **named})


def fused_skew_kl_loss(
    *tensors: torch.Tensor | None, alpha: float = 0.1, direction: str = "forward", **named: Any
) -> Result:
    """Skewed KL divergence: `FusedSkewKLLoss`; arguments as in `fused_kl_loss`."""
    return _call(FusedSkewKLLoss, tensors, {"alpha": alpha, "direction": direction, **named})


def fused_tvd_loss(*tensors: torch.Tensor | None, **named: Any) -> Result:
    """Total variation distance: `FusedTVDLoss`; arguments as in `fused_kl_loss`."""
    return _call(FusedTVDLoss, tensors, named)


def fused_cross_entropy_loss(*tensors: torch.Tensor | None, **named: Any) -> Result:
    """Hard-label cross-entropy: `FusedCrossEntropyLoss`; tensors are student_hidden, student_weight, labels."""
    return _call(FusedCrossEntropyLoss, tensors, named)


STUDENT_SETTINGS = ("bias", "lora", "logit_scale", "softcap")


def fused_log_probs(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, **named: Any) -> torch.Tensor:
    """Log-probability of each label under a model, from its hidden states and head, without materialised logits.

    The computation is the per-token cross-entropy's.

    Backward makes the logits again and, since each row's log sum of exps is known by then, writes their gradient in
    their place: four products in all. Under a frozen head the forward pass makes two. Where the upstream gradient is
    known beforehand or follows from each row's own log-probability, as in a policy gradient,
    `fused_policy_gradient_loss` takes three.

    Args:
        hidden: [..., H], of a dtype as `FusedDistillationLoss.forward` takes it; gets a gradient.
        weight: [V, H] of the head; gets a gradient.
        labels: int64 [...], already shifted: row i of the hidden states predicts labels[i].
        named: bias [V], lora, logit_scale and softcap of the model; valid_rows, vocab_size, ignore_index,
            max_workspace_mib: as of `FusedCrossEntropyLoss`.

    Returns:
        fp32 [...] (fp64 of fp64), natural logarithms at temperature 1; 0 where the label is `ignore_index`.

    Raises:
        ValueError: as the module, naming the field.
    """
    own = {f"student_{name}" if name in STUDENT_SETTINGS else name: value for name, value in named.items()}
    unknown = own.keys() & {"reduction", "num_items", "token_weights", "return_stats", "label_smoothing", "z_loss"}
    if unknown:
        raise ValueError(f"{min(unknown)}: log-probabilities are neither summed, weighted nor smoothed")
    return -_call(FusedCrossEntropyLoss, (hidden, weight, labels), {**own, "reduction": "none"})  # type: ignore[operator]


def fused_policy_gradient_loss(*tensors: torch.Tensor | None, **named: Any) -> Result:
    """Policy-gradient loss of sampled tokens: `FusedPolicyGradientLoss`.

    Args:
        tensors: student_hidden, student_weight, labels, advantages, old_logprobs or None, reference_logprobs or None.
        named: other inputs of `FusedPolicyGradientLoss.forward` and settings of the module.
    """
    return _call(FusedPolicyGradientLoss, tensors, named)


def fused_student_top_k_kl_loss(
    *tensors: torch.Tensor | None, k: int = 64, direction: str = "reverse", tail: str = "bucket", **named: Any
) -> Result:
    """KL divergence over the student's K most probable tokens: `FusedStudentTopKKLLoss`; tensors as `fused_kl_loss`."""
    return _call(FusedStudentTopKKLLoss, tensors, {"k": k, "direction": direction, "tail": tail, **named})


def fused_top_k_kl_loss(*tensors: torch.Tensor | None, tail: str = "bucket", **named: Any) -> Result:
    """KL divergence from a teacher's K log-probabilities a token: `FusedTopKKLLoss`.

    Args:
        tensors: student_hidden, student_weight, teacher_ids [..., K], teacher_logprobs [..., K], labels or None.
        tail: "bucket", "renormalize" or "sampled".
        named: other inputs of `FusedTopKKLLoss.forward` and settings of the module.
    """
    return _call(FusedTopKKLLoss, tensors, {"tail": tail, **named})


def fused_distillation_loss(*tensors: torch.Tensor | None, terms: Sequence[LossTerm], **named: Any) -> Result:
    """A weighted sum of divergences and cross-entropy: `FusedDistillationLoss`; arguments as in `fused_kl_loss`."""
    return _call(
        FusedDistillationLoss, tensors, {"terms": tuple(LossTerm(*map(plain_number, term)) for term in terms), **named}
    )
