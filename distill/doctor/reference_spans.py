"""The divergence across two tokenizers from its definition, span by span and outcome by outcome, on full logits.

What counts as an outcome is told in `distill.teachers.cross.spans`. Here each span's outcomes are written down one
after the other: no gradient by hand, no chunks, no places precomputed; autograd differentiates it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def dense_spans(
    z_s: torch.Tensor, z_t: torch.Tensor, ids_s: Sequence[int], ids_t: Sequence[int], spans: Any, shared: Any,
    terms: Sequence[Any], temperature: float, *, scaled: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Losses of aligned spans, [M], in the logits' dtype.

    Args:
        z_s: the student's logits [S, V_s] over one text; likewise `z_t` [S', V_t].
        ids_s: the student's tokens, S of them; likewise `ids_t`.
        spans: `student` and `teacher`, int64 [M, 2] each: first token and the one behind the last.
        shared: ids of the same tokens, [C] of the student's and [C] of the teacher's.
        terms: each with `type`, `weight`, and `beta` or `alpha`.
        temperature: of the divergences; `scaled`, whether they are multiplied by its square.
    """
    log_s, log_t = ((z / temperature).log_softmax(-1).unbind() for z in (z_s, z_t))
    hard = z_s.log_softmax(-1).unbind()
    soft = [term for term in terms if term.type != "cross_entropy"]
    ce = sum(term.weight for term in terms if term.type == "cross_entropy")
    scale = temperature**2 if scaled else 1.0
    mine, theirs = (torch.as_tensor(ids, device=z_s.device) for ids in shared)
    known = (mine < z_s.shape[-1]) & (theirs < z_t.shape[-1])
    mine, theirs = mine[known], theirs[known]
    losses = []
    for (a, b), (c, d) in zip(spans.student.tolist(), spans.teacher.tolist(), strict=True):
        text_s, text_t = _text(log_s, ids_s, a, b), _text(log_t, ids_t, c, d)
        p, q = log_s[a - 1].exp(), log_t[c - 1].exp()
        u, w = ids_s[a], ids_t[c]
        ones, others = mine, theirs
        pairs_p, pairs_q = [], []
        if (b - a, d - c) != (1, 1) or not bool(((mine == u) & (theirs == w)).any()):
            # the text is an outcome of its own, and no more a part of the tokens that it begins with
            pairs_p, pairs_q = [text_s.exp()[None]], [text_t.exp()[None]]
            p, q = _less(p, u, text_s.exp()), _less(q, w, text_t.exp())
            apart = (mine == u) | (theirs == w)
            ones, others = mine[~apart], theirs[~apart]
        both = torch.cat([*pairs_p, p[ones]]), torch.cat([*pairs_q, q[others]])
        rest_s, rest_t = _without(p, ones), _without(q, others)
        total = sum(term.weight for term in soft) * _by_size(rest_s, rest_t)
        total = total + sum(term.weight * _part(term, *both).sum() for term in soft)
        losses.append(scale * total - ce * _text(hard, ids_s, a, b))
    return torch.stack(losses) if losses else z_s.new_zeros(0)


def _text(log_p: Sequence[torch.Tensor], ids: Sequence[int], start: int, stop: int) -> torch.Tensor:
    """Log-probability of some tokens, each given those before it."""
    return torch.stack([log_p[at - 1][ids[at]] for at in range(start, stop)]).sum()


def _less(p: torch.Tensor, token: int, mass: torch.Tensor) -> torch.Tensor:
    return p.index_add(0, torch.tensor([token], device=p.device), -mass[None])


def _without(p: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    keep = torch.ones(len(p), dtype=torch.bool, device=p.device)
    keep[ids] = False
    return p[keep]


def _by_size(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The likeliest of one against the likeliest of the other, and so on: the sum of the differences."""
    width = max(len(p), len(q))
    p, q = (torch.nn.functional.pad(x, (0, width - len(x))).sort(descending=True).values for x in (p, q))
    return (p - q).abs().sum()


def _part(term: Any, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """A divergence's terms from probabilities of the student `p` and the teacher `q`, which need not add up to 1: each
    is 0 where both are equal, and never negative."""

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * (a / b).log() - a + b

    if term.type == "tvd":
        return 0.5 * (p - q).abs()
    if term.type == "forward_kl" or (term.type == "jsd" and term.beta == 0):
        return kl(q, p)
    if term.type == "reverse_kl" or (term.type == "jsd" and term.beta == 1):
        return kl(p, q)
    if term.type == "jsd":
        m = term.beta * q + (1 - term.beta) * p
        return term.beta * kl(q, m) + (1 - term.beta) * kl(p, m)
    if term.type == "skew_forward_kl":
        return kl(q, term.alpha * q + (1 - term.alpha) * p)
    return kl(p, term.alpha * p + (1 - term.alpha) * q)
