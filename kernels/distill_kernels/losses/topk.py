"""Divergence from a teacher that is data: its top-k tokens and their log-probabilities, [N, K].

Two readings of what the teacher did not say. With `P = sum_i p(i)` over the K tokens,

    bucket        outcomes are the K tokens and "any other", of probability 1 - P, on both sides;
    renormalize   outcomes are the K tokens, of probability p(i) / P on both sides.

A divergence on these outcomes has `f` and `g` of the table in divergence.py per outcome. Let `s = g - p_s sum(g)`; the
gradient for the student's logits is `s_i / T` at token i and, in the bucket, `s_rest q_v / T` at any other token v,
where `q = softmax` over the other tokens.

The student's tail is summed over the other tokens, not taken as 1 - P, so a small tail keeps its digits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distill_kernels.losses.chunked import RowLoss, Rows, chunked_loss, workspace_bytes
from distill_kernels.losses.divergence import reference_rows, reference_terms, transform_logits
from distill_kernels.losses.terms import LossTerm, Objective, make_objective

TAILS = ("bucket", "renormalize")


def outcomes(
    scaled: torch.Tensor, ids: torch.Tensor, teacher_logprobs: torch.Tensor, tail: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Log-probabilities of the outcomes.

    Args:
        scaled: student logits over T, [n, V].
        ids: int64 [n, K].
        teacher_logprobs: [n, K], at temperature T.
        tail: one of `TAILS`.

    Returns:
        The student's and the teacher's, [n, K + 1] (the tail last) or [n, K]; and the student's distribution over the
        other tokens, [n, V], 0 at the K, or None without a tail.
    """
    top = scaled.gather(-1, ids)
    if tail == "renormalize" or ids.shape[1] == scaled.shape[1]:  # no token is left for a tail
        return torch.log_softmax(top, -1), torch.log_softmax(teacher_logprobs, -1), None
    others = scaled.scatter(-1, ids, -torch.inf)
    lse_others = torch.logsumexp(others, -1, keepdim=True)
    rest = torch.where(lse_others > -torch.inf, (others - lse_others).exp(), 0.0)
    log_s = torch.log_softmax(torch.cat([top, lse_others], -1), -1)
    missing = (1 - teacher_logprobs.exp().sum(-1, keepdim=True)).clamp_min(0)
    return log_s, torch.cat([teacher_logprobs, missing.log()], -1), rest


def top_k_rows(
    raw: torch.Tensor,
    ids: torch.Tensor,
    teacher_logprobs: torch.Tensor,
    objective: Objective,
    tail: str,
    row_scale: torch.Tensor,
    with_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scaled row losses [n] and their sum's gradient for raw logits [n, V] of the divergences of `objective`."""
    o, kept = objective, row_scale != 0
    z = transform_logits(raw, o.student_scale, o.student_softcap)
    log_s, log_t, rest = outcomes(z / o.temperature, ids, teacher_logprobs, tail)
    p_s, p_t = log_s.exp(), log_t.exp()
    loss, slope = row_scale.new_zeros(raw.shape[0]), torch.zeros_like(log_s)
    for kind, weight, parameter in zip(o.kinds, o.weights, o.parameters, strict=True):
        f, g = reference_terms(kind, parameter, log_s, log_t, p_s, p_t)
        loss += weight * f.sum(-1).clamp_min(0)
        slope += weight * (g - p_s * g.sum(-1, keepdim=True))
    loss = torch.where(kept, loss * row_scale, 0.0)
    if not with_gradient:
        return loss, None
    slope *= (row_scale / o.temperature)[:, None]
    k = ids.shape[1]
    gradient = torch.zeros_like(z) if rest is None else rest.mul_(slope[:, k:])
    gradient.scatter_(-1, ids, slope[:, :k])
    if o.student_softcap:
        gradient.mul_((z / o.student_softcap).square_().neg_().add_(1.0))
    return loss, gradient.mul_(o.student_scale).masked_fill_(~kept[:, None], 0.0)


class FusedTopKKLLoss(nn.Module):
    """KL divergence from a teacher's top-k log-probabilities, plus hard labels, without the logits of the batch.

    Which is biased, and how:

    - `tail="bucket"`: the exact divergence between both distributions with all other tokens taken as one. By the data
      processing inequality it is at most the full divergence: it is blind to how the tail's mass is spread, and its
      gradient moves the tail's tokens together. It goes to the full divergence as the teacher's tail goes to 0.
    - `tail="renormalize"`: the exact divergence between both distributions given that the token is among the K. It
      says nothing about the mass outside: the tokens there get no gradient, and a student that puts 99 % of its
      probability outside can have loss 0. Use it with a cross-entropy term, or where the tail is unknown.

    Args:
        direction: "forward", KL(p_t || p_s), or "reverse". Reverse KL in the bucket is inf where the teacher's
            log-probabilities add up to 1 and the student's do not.
        tail: "bucket" or "renormalize".
        temperature: T > 0 of the divergence.
        scale_by_temperature_squared: multiply the divergence by T^2.
        divergence_weight: what the divergence is multiplied by.
        ce_weight: weight of the hard-label term at T = 1; above 0, labels are needed.
        teacher_temperature: at which the teacher's log-probabilities were taken; None: at T. The bucket needs T,
            since the tail's mass at another temperature does not follow from the K tokens.
        label_smoothing, z_loss, ignore_index, student_logit_scale, student_softcap: see `FusedDistillationLoss`.
        reduction: "mean" or "sum".
        max_workspace_mib: bound for a chunk's buffers, or None to choose.

    Raises:
        ValueError: naming the field, what was expected and what came.
    """

    def __init__(
        self,
        direction: str = "forward",
        tail: str = "bucket",
        temperature: float = 1.0,
        scale_by_temperature_squared: bool = True,
        divergence_weight: float = 1.0,
        ce_weight: float = 0.0,
        teacher_temperature: float | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "mean",
        student_logit_scale: float = 1.0,
        student_softcap: float | None = None,
        max_workspace_mib: float | None = None,
    ) -> None:
        super().__init__()
        for name, value, allowed in (
            ("direction", direction, ("forward", "reverse")),
            ("tail", tail, TAILS),
            ("reduction", reduction, ("mean", "sum")),
        ):
            if value not in allowed:
                raise ValueError(f"{name}: expected {' or '.join(allowed)}, got {value!r}")
        terms = [LossTerm(f"{direction}_kl", divergence_weight), LossTerm("cross_entropy", ce_weight)]
        self.objective = make_objective(
            terms,
            temperature=temperature,
            scale_by_temperature_squared=scale_by_temperature_squared,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            student_logit_scale=student_logit_scale,
            student_softcap=student_softcap,
        )
        given = temperature if teacher_temperature is None else float(teacher_temperature)
        if not given > 0 or (tail == "bucket" and given != temperature):
            expected = f"the loss's temperature {temperature:g}" if tail == "bucket" else "a number above 0"
            raise ValueError(f"teacher_temperature: expected {expected}, got {teacher_temperature!r}")
        self.teacher_factor = given / temperature
        self.tail, self.ignore_index, self.reduction = tail, ignore_index, reduction
        self.workspace = workspace_bytes(max_workspace_mib)

    def forward(
        self,
        student_hidden: torch.Tensor,
        student_weight: torch.Tensor,
        teacher_ids: torch.Tensor,
        teacher_logprobs: torch.Tensor,
        labels: torch.Tensor | None = None,
        student_bias: torch.Tensor | None = None,
        student_lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,
        token_weights: torch.Tensor | None = None,
        num_items: torch.Tensor | int | None = None,
        valid_rows: torch.Tensor | None = None,
        vocab_size: int | None = None,
    ) -> torch.Tensor:
        """The loss, fp32 scalar (fp64 for fp64).

        Args:
            teacher_ids: integers [..., K], distinct within a row, below the number of columns that count.
            teacher_logprobs: floating [..., K], natural logarithms of probabilities over the whole vocabulary.
            student_hidden, student_weight, labels, student_bias, student_lora, token_weights, num_items, valid_rows,
                vocab_size: as in `FusedDistillationLoss.forward`.

        Raises:
            ValueError: naming the argument whose shape or dtype does not fit.
        """
        o = self.objective
        leading = student_hidden.shape[:-1]
        fits = teacher_ids.shape[:-1] == leading and teacher_ids.dim() == student_hidden.dim()
        if not fits or teacher_ids.is_floating_point():
            raise ValueError(
                f"teacher_ids: expected integers of shape {[*leading, 'K']}, got {list(teacher_ids.shape)} of "
                f"{teacher_ids.dtype}"
            )
        if teacher_logprobs.shape != teacher_ids.shape or not teacher_logprobs.is_floating_point():
            raise ValueError(
                f"teacher_logprobs: expected floating {list(teacher_ids.shape)} as teacher_ids, got "
                f"{list(teacher_logprobs.shape)} of {teacher_logprobs.dtype}"
            )
        if labels is None and o.hard_weight:
            raise ValueError("labels: expected token indices, since the loss has a cross-entropy term, got None")
        hard = o._replace(kinds=(), weights=(), parameters=(), divergence_weights=())
        ids, logprobs = teacher_ids.flatten(0, -2), teacher_logprobs.detach().flatten(0, -2)
        flat_labels = None if labels is None else labels.flatten()

        def make(scale: torch.Tensor, vocab: int, dtype: torch.dtype) -> RowLoss:
            if ids.shape[1] > vocab:
                raise ValueError(f"teacher_ids: expected K of at most {vocab} columns, got {ids.shape[1]}")

            def row_loss(raw: torch.Tensor, rows: Rows, with_gradient: bool) -> tuple[torch.Tensor, Any]:
                factor = scale[rows]
                columns = torch.where((factor != 0)[:, None], ids[rows].long(), 0)
                given = logprobs[rows].to(raw.dtype) * self.teacher_factor
                loss, gradient = raw.new_zeros(raw.shape[0]), None
                if o.kinds:
                    loss, gradient = top_k_rows(raw, columns, given, o, self.tail, factor, with_gradient)
                if o.hard_weight:
                    targets = None if flat_labels is None else flat_labels[rows]
                    result = reference_rows(
                        raw, None, hard, labels=targets, row_scale=factor, with_gradient=with_gradient
                    )
                    loss = loss + result.loss
                    if gradient is None:
                        gradient = result.gradient
                    elif result.gradient is not None:
                        gradient.add_(result.gradient)
                return loss, gradient

            return row_loss

        return chunked_loss(
            make, student_hidden, student_weight, labels, student_bias, student_lora, token_weights, num_items,
            valid_rows, vocab_size, ignore_index=self.ignore_index, reduction=self.reduction, workspace=self.workspace,
        )  # fmt: skip
