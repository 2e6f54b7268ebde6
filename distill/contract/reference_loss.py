"""The loss straight from its definitions, on full logits in fp64: what the fused loss is held against."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from distill.recipe.loss import Loss
from distill.training.objective import IGNORE


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Labels [..., S] moved so that position i holds the token after it; the last is not learned."""
    return F.pad(labels, (0, 1), value=IGNORE)[..., 1:]


def reference_loss(student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, loss: Loss) -> torch.Tensor:
    """The recipe's loss from full logits [B, S, V] and labels [B, S] that are not shifted: the mean over the trained
    tokens, in fp64, straight from the definitions."""
    keep = shifted(labels) != IGNORE
    z_s, z_t, wanted = student[keep].double(), teacher[keep].double(), shifted(labels)[keep]
    log_s, log_t = (F.log_softmax(z / loss.temperature, dim=-1) for z in (z_s, z_t))
    scale = loss.temperature**2 if loss.scale_by_temperature_squared else 1.0
    total = z_s.new_zeros(())
    for term in loss.terms:
        if term.type == "cross_entropy":
            hard = F.cross_entropy(z_s, wanted, label_smoothing=loss.label_smoothing, reduction="none")
            value = hard + loss.z_loss * torch.logsumexp(z_s, dim=-1) ** 2
        else:
            value = scale * _divergence(term, log_s, log_t)
        total = total + term.weight * value.sum()
    return total / keep.sum().clamp_min(1)


def _divergence(term: Any, log_s: torch.Tensor, log_t: torch.Tensor) -> torch.Tensor:
    def kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    def mixed(share: float) -> torch.Tensor:
        return (share * log_t.exp() + (1 - share) * log_s.exp()).log()

    if term.type == "tvd":
        return 0.5 * (log_t.exp() - log_s.exp()).abs().sum(-1)
    if term.type == "forward_kl" or (term.type == "jsd" and term.beta == 0):
        return kl(log_t, log_s)
    if term.type == "reverse_kl" or (term.type == "jsd" and term.beta == 1):
        return kl(log_s, log_t)
    if term.type == "jsd":
        return term.beta * kl(log_t, mixed(term.beta)) + (1 - term.beta) * kl(log_s, mixed(term.beta))
    if term.type == "skew_forward_kl":
        return kl(log_t, mixed(term.alpha))
    return kl(log_s, mixed(1 - term.alpha))
