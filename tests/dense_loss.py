"""The losses from their definitions, over full logits, differentiated by autograd: what ours is held against."""

from __future__ import annotations

import torch
from distill_kernels import LossTerm, Temperatures

ALL_TERMS = [
    LossTerm("forward_kl", 1.0),
    LossTerm("reverse_kl", 1.0),
    LossTerm("jsd", 1.0, beta=0.3),
    LossTerm("skew_forward_kl", 1.0, alpha=0.2),
    LossTerm("skew_reverse_kl", 1.0, alpha=0.2),
    LossTerm("tvd", 1.0),
    LossTerm("cross_entropy", 1.0),
]
# inf where the student's probability is 0 and the teacher's is not; all others stay finite
UNBOUNDED = {"forward_kl"}


def kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Sum of p (log p - log q) over the last dimension."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def mix(log_p: torch.Tensor, log_q: torch.Tensor, share: float) -> torch.Tensor:
    """log(share p + (1 - share) q)."""
    return (share * log_p.exp() + (1 - share) * log_q.exp()).log()


def dense_divergence(term: LossTerm, log_s: torch.Tensor, log_t: torch.Tensor) -> torch.Tensor:
    """One divergence per row from log-probabilities of student and teacher."""
    if term.type == "forward_kl":
        return kl(log_t, log_s)
    if term.type == "reverse_kl":
        return kl(log_s, log_t)
    if term.type == "tvd":
        return 0.5 * (log_t.exp() - log_s.exp()).abs().sum(-1)
    if term.type == "jsd":
        log_m = mix(log_t, log_s, term.beta)
        return term.beta * kl(log_t, log_m) + (1 - term.beta) * kl(log_s, log_m)
    if term.type == "skew_forward_kl":
        return kl(log_t, mix(log_t, log_s, term.alpha))
    assert term.type == "skew_reverse_kl"
    return kl(log_s, mix(log_s, log_t, term.alpha))


def entries(term: LossTerm, log_s: torch.Tensor, log_t: torch.Tensor) -> torch.Tensor:
    """Each entry's part of a divergence, in the form of which none is negative; their sum is the divergence."""
    p_s = log_s.exp()
    p_t = log_t.exp()
    if term.type == "forward_kl":
        return p_t * (log_t - log_s) - p_t + p_s
    if term.type == "reverse_kl":
        return p_s * (log_s - log_t) - p_s + p_t
    if term.type == "tvd":
        return 0.5 * (p_t - p_s).abs()
    if term.type == "jsd":
        log_m = mix(log_t, log_s, term.beta)
        return term.beta * p_t * (log_t - log_m) + (1 - term.beta) * p_s * (log_s - log_m)
    if term.type == "skew_forward_kl":
        log_m = mix(log_t, log_s, term.alpha)
        return p_t * (log_t - log_m) - p_t + log_m.exp()
    assert term.type == "skew_reverse_kl"
    log_m = mix(log_s, log_t, term.alpha)
    return p_s * (log_s - log_m) - p_s + log_m.exp()


def clipped_divergence(term: LossTerm, log_s: torch.Tensor, log_t: torch.Tensor) -> torch.Tensor:
    """One divergence per row with its caps, whose gradient is autograd's: 0 beyond a cap."""
    if term.clip is None:
        return dense_divergence(term, log_s, log_t)
    parts = entries(term, log_s, log_t)
    if term.clip.entry is not None:
        parts = parts.clamp(max=term.clip.entry)
    value = parts.sum(-1)
    return value if term.clip.token is None else value.clamp(max=term.clip.token)


def dense_rows(
    z: torch.Tensor,
    z_teacher: torch.Tensor | None,
    terms: list[LossTerm],
    labels: torch.Tensor | None = None,
    *,
    temperature: float | Temperatures = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Row losses [N] from logits after scale and soft cap."""
    both = temperature if isinstance(temperature, Temperatures) else Temperatures(temperature, temperature)
    total = z.new_zeros(z.shape[0], dtype=torch.float64 if z.dtype == torch.float64 else torch.float32)
    for term in terms:
        if term.type == "cross_entropy":
            hard = torch.nn.functional.cross_entropy(
                z.to(total.dtype), labels, reduction="none", label_smoothing=label_smoothing
            )
            total = total + term.weight * (hard + z_loss * z.to(total.dtype).logsumexp(-1).square())
        elif term.weight:
            assert z_teacher is not None
            log_s = (z.to(total.dtype) / both.student).log_softmax(-1)
            log_t = (z_teacher.to(total.dtype) / both.teacher).log_softmax(-1)
            total = total + term.weight * both.student**2 * clipped_divergence(term, log_s, log_t)
    return total


def softcap(z: torch.Tensor, scale: float = 1.0, cap: float | None = None) -> torch.Tensor:
    """cap * tanh(scale z / cap)."""
    return scale * z if cap is None else cap * torch.tanh(scale * z / cap)
