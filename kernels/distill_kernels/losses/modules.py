"""Fused linear distillation losses: from hidden states and head weights to the loss, without full logits.

All modules take the same tensors (see `FusedDistillationLoss.forward`); only the student's get gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from distill_kernels.losses.arguments import (
    REDUCTIONS,
    Lora,
    checked_direction,
    expect,
    unpack_lora,
    workspace_bytes,
)
from distill_kernels.losses.mixture import LossTarget, TeacherHead
from distill_kernels.losses.operands import Head, TokenArguments
from distill_kernels.losses.operator import LossSettings, fused_loss
from distill_kernels.losses.terms import Clip, LossTerm, Temperatures, TokenStats, make_objective


class FusedDistillationLoss(nn.Module):
    """Weighted sum of divergences at one temperature, plus hard labels, computed in one pass over the logits.

    The loss of a token is `sum_i weight_i * T^2 * D_i + weight_ce * (CE + z_loss * lse^2)`; divergences are those of
    `softmax(z / T)`, cross-entropy is at T = 1. See `divergence.py` for definitions and sources.

    Args:
        terms: `LossTerm(type, weight, beta, alpha, clip)`, several of one type allowed.
        temperature: softmax temperature T > 0 of the divergences, or `Temperatures(teacher, student)`.
        scale_by_temperature_squared: multiply divergences by T^2 (Hinton et al., 2015), of the student's T.
        label_smoothing: share of the hard target that is spread over the vocabulary, [0, 1].
        z_loss: weight of the squared log-normaliser beside the cross-entropy (PaLM, Chowdhery et al., 2022).
        ignore_index: label of tokens that do not count.
        reduction: "mean" over `num_items` or the tokens that count, "sum", or "none" (per token; its gradient
            cannot be made in the forward pass, so backward makes the logits again).
        student_logit_scale, teacher_logit_scale: factor on the logits (Granite, Cohere).
        student_softcap, teacher_softcap: `cap * tanh(z / cap)` after the factor (Gemma), or None.
        max_workspace_mib: bound for the logits' buffers in MiB; None chooses by device and shapes.
        skip_ignored_rows: find the rows that count by one host sync and compute only those, where there are labels or
            token weights but no `valid_rows`. False computes all rows and never syncs.

    Raises:
        ValueError: naming the field, what was expected and what came.
    """

    def __init__(
        self,
        terms: Sequence[LossTerm],
        temperature: float | Temperatures = 1.0,
        scale_by_temperature_squared: bool = True,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "mean",
        student_logit_scale: float = 1.0,
        student_softcap: float | None = None,
        teacher_logit_scale: float = 1.0,
        teacher_softcap: float | None = None,
        max_workspace_mib: float | None = None,
        skip_ignored_rows: bool = True,
    ) -> None:
        super().__init__()
        expect(reduction in REDUCTIONS, "reduction", "one of mean, sum, none", repr(reduction))
        self.terms = tuple(LossTerm(*term) for term in terms)
        self.objective = make_objective(
            self.terms,
            temperature=temperature,
            scale_by_temperature_squared=scale_by_temperature_squared,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            student_logit_scale=student_logit_scale,
            student_softcap=student_softcap,
            teacher_logit_scale=teacher_logit_scale,
            teacher_softcap=teacher_softcap,
        )
        # Text, since an operator takes plain arguments only; made once, and not in every forward.
        self._encoded = self.objective.encode()
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.workspace = workspace_bytes(max_workspace_mib)
        self.skip_ignored_rows = skip_ignored_rows

    def forward(
        self,
        student_hidden: torch.Tensor,
        student_weight: torch.Tensor,
        teacher_hidden: torch.Tensor | None = None,
        teacher_weight: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        student_bias: torch.Tensor | None = None,
        teacher_bias: torch.Tensor | None = None,
        student_lora: Lora | None = None,
        token_weights: torch.Tensor | None = None,
        num_items: torch.Tensor | int | None = None,
        valid_rows: torch.Tensor | None = None,
        vocab_size: int | None = None,
        return_stats: bool = False,
        teachers: Sequence[TeacherHead] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, TokenStats]:
        """Compute the loss, and its gradient for the student's tensors if autograd requires it.

        Args:
            student_hidden: [N, Hs] or [..., Hs], fp32, bf16, fp16 (or fp64 on the CPU); gets a gradient.
            student_weight: [Vs, Hs], same dtype (any floating dtype under autocast); gets a gradient.
            teacher_hidden: [N, Ht] with the same leading dimensions; not needed for pure cross-entropy.
            teacher_weight: [Vt, Ht]; no gradient.
            labels: integers, [N] or [...], already shifted: row i of the hidden states predicts labels[i]. Rows with
                `ignore_index` do not count. None: every row counts (cross-entropy needs labels). Where cross-entropy
                or statistics look one up, it lies within the columns that count.
            student_bias: [Vs]; gets a gradient.
            teacher_bias: [Vt] or None; no gradient.
            student_lora: `(A [r, Hs], B [Vs, r], scale)`: the head is `weight + scale * B A`; A and B get gradients.
            token_weights: [N] or [...], factor of each token's loss. Not differentiable.
            num_items: divisor of the mean (int64 tensor on the device, or int): tokens of the whole step.
            valid_rows: int64 [M], flat indices of the rows to compute, each once; spares the host sync. With M = N all
                rows are read in place, without gathering them.
            vocab_size: columns that both vocabularies share; the rest is padding: no probability, no gradient.
            return_stats: return `(loss, TokenStats)`.
            teachers: several teachers in place of `teacher_hidden`, `teacher_weight` and `teacher_bias`: the divergence
                is from the mixture of their probabilities at the temperature. Each brings its own scale and soft cap.

        Returns:
            fp32 scalar (fp64 for fp64 inputs); with reduction "none" the leading shape of `student_hidden`.

        Raises:
            ValueError: naming the argument whose kind, shape, dtype, device or value does not fit; values are checked
                as described in arguments.py. In backward, for `create_graph=True`, and for reduction "none" where a
                teacher's tensor, labels or `valid_rows` were modified in place.
        """
        student = Head(student_hidden, student_weight, student_bias, *unpack_lora(student_lora))
        if teachers is None:
            heads = self._one_teacher(teacher_hidden, teacher_weight, teacher_bias)
        else:
            alone = teacher_hidden is None and teacher_weight is None
            expect(alone, "teachers", "either teachers or teacher_hidden and teacher_weight", "both")
            expect(len(teachers) > 0, "teachers", "at least one TeacherHead", "none")
            heads = tuple(teachers)
        tokens = TokenArguments(labels, token_weights, num_items, valid_rows)
        return fused_loss(self._settings(), student, LossTarget(heads), tokens, vocab_size, return_stats=return_stats)

    def _one_teacher(
        self, hidden: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> tuple[TeacherHead, ...]:
        """Return the teacher with the module's scale and soft cap; none where its hidden states or head are not given.

        Raises:
            ValueError: where the loss needs what is not given.
        """
        needed = self.objective.needs_teacher
        expect(hidden is not None or not needed, "teacher_hidden", "the teacher's hidden states", None)
        expect(weight is not None or not needed, "teacher_weight", "the teacher's head", None)
        if hidden is None or weight is None:
            return ()
        scale = self.objective.teacher_scale
        return (
            TeacherHead(hidden, weight, bias=bias, logit_scale=scale, softcap=self.objective.teacher_softcap or None),
        )

    def _settings(self) -> LossSettings:
        return LossSettings(
            self.objective, self._encoded, self.ignore_index, self.reduction, self.workspace, self.skip_ignored_rows
        )

    def extra_repr(self) -> str:
        parts = [f"{term.weight:g} * {term.type}{_as_text(term.clip)}" for term in self.terms]
        objective = self.objective
        temperature = f"{objective.temperature:g}"
        if objective.teacher_temperature != objective.temperature:
            temperature = f"(teacher={objective.teacher_temperature:g}, student={temperature})"
        return f"{' + '.join(parts)}, temperature={temperature}, reduction={self.reduction!r}"


def _as_text(clip: Clip | None) -> str:
    """Return a term's caps for its module's text."""
    if clip is None:
        return ""
    return f" clipped ({', '.join(f'{name}={cap:g}' for name, cap in clip._asdict().items() if cap is not None)})"


class _OneDivergence(FusedDistillationLoss):
    """One divergence and the hard-label term."""

    def __init__(
        self,
        divergence: LossTerm,
        temperature: float | Temperatures,
        scale_by_temperature_squared: bool,
        ce_weight: float,
        settings: dict[str, object],
    ) -> None:
        terms = [divergence, LossTerm("cross_entropy", ce_weight)]
        super().__init__(terms, temperature, scale_by_temperature_squared, **settings)  # type: ignore[arg-type]


class FusedKLLoss(_OneDivergence):
    """Forward or reverse KL divergence from the heads, plus hard labels.

    Args:
        direction: "forward", KL(p_t || p_s), or "reverse", KL(p_s || p_t).
        temperature: softmax temperature T > 0 of the divergence, or `Temperatures(teacher, student)`.
        scale_by_temperature_squared: multiply the divergence by T^2.
        divergence_weight: factor of the divergence.
        ce_weight: weight of the hard-label term; above 0, labels are needed.
        clip: caps of the divergence, or None.
        settings: label_smoothing, z_loss, ignore_index, reduction, student_logit_scale, student_softcap,
            teacher_logit_scale, teacher_softcap, max_workspace_mib, skip_ignored_rows: see `FusedDistillationLoss`.
    """

    def __init__(
        self,
        direction: str = "forward",
        temperature: float | Temperatures = 1.0,
        scale_by_temperature_squared: bool = True,
        divergence_weight: float = 1.0,
        ce_weight: float = 0.0,
        clip: Clip | None = None,
        **settings: object,
    ) -> None:
        term = LossTerm(f"{checked_direction(direction)}_kl", divergence_weight, clip=clip)
        super().__init__(term, temperature, scale_by_temperature_squared, ce_weight, settings)


class FusedJSDLoss(_OneDivergence):
    """Generalised Jensen-Shannon divergence of GKD: with m = b p_t + (1-b) p_s, b KL(p_t || m) + (1-b) KL(p_s || m).

    Args:
        beta: b, the weight of the teacher in the mixture m; 0 is defined as forward KL, 1 as reverse KL.
        settings: see `FusedKLLoss`.
    """

    def __init__(
        self,
        beta: float = 0.5,
        temperature: float | Temperatures = 1.0,
        scale_by_temperature_squared: bool = True,
        divergence_weight: float = 1.0,
        ce_weight: float = 0.0,
        clip: Clip | None = None,
        **settings: object,
    ) -> None:
        term = LossTerm("jsd", divergence_weight, beta=beta, clip=clip)
        super().__init__(term, temperature, scale_by_temperature_squared, ce_weight, settings)


class FusedSkewKLLoss(_OneDivergence):
    """Skewed KL (DistiLLM): KL(p_t || alpha p_t + (1-alpha) p_s), or with both exchanged for "reverse".

    Args:
        alpha: the skew, in [0, 1).
        direction: "forward" or "reverse".
        settings: see `FusedKLLoss`.
    """

    def __init__(
        self,
        alpha: float = 0.1,
        direction: str = "forward",
        temperature: float | Temperatures = 1.0,
        scale_by_temperature_squared: bool = True,
        divergence_weight: float = 1.0,
        ce_weight: float = 0.0,
        clip: Clip | None = None,
        **settings: object,
    ) -> None:
        term = LossTerm(f"skew_{checked_direction(direction)}_kl", divergence_weight, alpha=alpha, clip=clip)
        super().__init__(term, temperature, scale_by_temperature_squared, ce_weight, settings)


class FusedTVDLoss(_OneDivergence):
    """Total variation distance, half the sum of |p_t - p_s|; `settings` as in `FusedKLLoss`."""

    def __init__(
        self,
        temperature: float | Temperatures = 1.0,
        scale_by_temperature_squared: bool = True,
        divergence_weight: float = 1.0,
        ce_weight: float = 0.0,
        clip: Clip | None = None,
        **settings: object,
    ) -> None:
        super().__init__(
            LossTerm("tvd", divergence_weight, clip=clip),
            temperature,
            scale_by_temperature_squared,
            ce_weight,
            settings,
        )


class FusedCrossEntropyLoss(FusedDistillationLoss):
    """Hard-label cross-entropy from the head, without a teacher.

    Args:
        settings: label_smoothing, z_loss, ignore_index, reduction, student_logit_scale, student_softcap,
            max_workspace_mib, skip_ignored_rows: see `FusedDistillationLoss`.
    """

    def __init__(self, **settings: object) -> None:
        super().__init__([LossTerm("cross_entropy", 1.0)], **settings)  # type: ignore[arg-type]

    def forward(  # type: ignore[override]
        self,
        student_hidden: torch.Tensor,
        student_weight: torch.Tensor,
        labels: torch.Tensor,
        student_bias: torch.Tensor | None = None,
        student_lora: Lora | None = None,
        token_weights: torch.Tensor | None = None,
        num_items: torch.Tensor | int | None = None,
        valid_rows: torch.Tensor | None = None,
        vocab_size: int | None = None,
        return_stats: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, TokenStats]:
        """Compute the loss; arguments as in `FusedDistillationLoss.forward`, without the teacher's."""
        return super().forward(
            student_hidden,
            student_weight,
            None,
            None,
            labels,
            student_bias,
            None,
            student_lora,
            token_weights,
            num_items,
            valid_rows,
            vocab_size,
            return_stats,
        )
