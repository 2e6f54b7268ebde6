"""Divergences over K tokens: a teacher's stored ones (`FusedTopKKLLoss`), or the student's (`FusedStudentTopKKLLoss`).

Hidden states and heads go through the same driver as for divergences over all tokens (linear.py, fused.py); the rows'
arithmetic is in topk_reference.py, its kernel in topk_kernel.py, the choice of the student's tokens in topk_select.py.
"""

from __future__ import annotations

import torch

from distill_kernels.losses.arguments import MAX_TOP_K, Lora, check_top_k, checked_direction, expect, unpack_lora
from distill_kernels.losses.mixture import LossTarget
from distill_kernels.losses.modules import FusedDistillationLoss
from distill_kernels.losses.operands import Head, TokenArguments
from distill_kernels.losses.operator import fused_loss
from distill_kernels.losses.terms import Clip, LossTerm, Temperatures, TokenStats
from distill_kernels.losses.topk_reference import TAILS, StudentTopK, TopK


class FusedTopKKLLoss(FusedDistillationLoss):
    """KL divergence from a teacher's K log-probabilities a token, plus hard labels, without the logits of the batch.

    The bias of each tail:

    - `tail="bucket"`: the exact divergence between both distributions with all other tokens taken as one. By the data
      processing inequality it is at most the full divergence: it is blind to how the tail's mass is spread, and its
      gradient moves the tail's tokens together. It goes to the full divergence as the teacher's tail goes to 0.
    - `tail="renormalize"`: the exact divergence between both distributions given that the token is among the K. It
      ignores the mass outside: the tokens there get no gradient, and a student that puts 99 % of its
      probability outside can have loss 0. Use it with a cross-entropy term, or where the tail is unknown.
    - `tail="sampled"`: K tokens drawn from the teacher, with logarithms of target weights `w` in the place of
      log-probabilities (Sparse Logit Sampling, Anshumann et al. 2025, arXiv 2503.16870). Draw n times from a proposal
      `q`, and give the token drawn c times the weight `w = (c / n) p_t / q`; where q = p_t this is c / n. Then
      E[w] = p_t for every token, and the gradient `(W p_s(v) - w_v) / T`, `W = sum w`, is an unbiased estimate of the
      full forward KL's, `(p_s(v) - p_t(v)) / T`: noisy, not biased, also in the tail. The value,
      `sum_i w_i log(w_i / p_s(i)) - W + 1 >= 0`, is biased upwards, since a sample is more peaked than its source.
      Weights divided by their sum (self-normalised) are biased by O(1 / n). Forward KL only.

    Args:
        direction: "forward", KL(p_t || p_s), or "reverse". Reverse KL in the bucket is inf where the teacher's
            log-probabilities add up to 1 and the student's do not.
        tail: "bucket", "renormalize" or "sampled".
        temperature: softmax temperature T > 0 of the divergence, or `Temperatures(teacher, student)`.
        scale_by_temperature_squared: multiply the divergence by T^2.
        divergence_weight: factor of the divergence.
        ce_weight: weight of the hard-label term at T = 1; above 0, labels are needed.
        teacher_temperature: temperature of the teacher's log-probabilities; None: that of the loss. Only `renormalize`
            can convert from one to the other: the tail's mass at another temperature does not follow from K tokens.
        clip: caps of the divergence, or None. Each outcome is an entry, the bucket too. Sampled weights have no cap of
            entries: the value with caps is not what the sample's would be on average.
        settings: label_smoothing, z_loss, ignore_index, reduction, student_logit_scale, student_softcap,
            max_workspace_mib, skip_ignored_rows: see `FusedDistillationLoss`.

    Raises:
        ValueError: naming the field, what was expected and what came.
    """

    def __init__(
        self,
        direction: str = "forward",
        tail: str = "bucket",
        temperature: float | Temperatures = 1.0,
        scale_by_temperature_squared: bool = True,
        divergence_weight: float = 1.0,
        ce_weight: float = 0.0,
        teacher_temperature: float | None = None,
        clip: Clip | None = None,
        **settings: object,
    ) -> None:
        checked_direction(direction)
        expect(tail in TAILS, "tail", " or ".join(TAILS), repr(tail))
        if tail == "sampled" and direction != "forward":
            raise ValueError("direction: expected forward, since sampled weights say nothing of log p_t, got 'reverse'")
        if tail == "sampled" and clip is not None and clip.entry is not None:
            raise ValueError(f"clip.entry: expected None with tail sampled, whose weights are noisy, got {clip.entry}")
        super().__init__(
            [LossTerm(f"{direction}_kl", divergence_weight, clip=clip), LossTerm("cross_entropy", ce_weight)],
            temperature,
            scale_by_temperature_squared,
            **settings,  # type: ignore[arg-type]
        )
        # Scaled logarithms are normalised again over the K. The mass outside cannot be converted, so other tails
        # refuse.
        expected_temperature = self.objective.teacher_temperature
        given = expected_temperature if teacher_temperature is None else float(teacher_temperature)
        if not given > 0 or (tail != "renormalize" and given != expected_temperature):
            expected = (
                "a number above 0" if tail == "renormalize" else f"the loss's temperature {expected_temperature:g}"
            )
            raise ValueError(f"teacher_temperature: expected {expected}, got {teacher_temperature!r}")
        self.teacher_factor = given / expected_temperature
        self.tail = tail

    def forward(  # type: ignore[override]
        self,
        student_hidden: torch.Tensor,
        student_weight: torch.Tensor,
        teacher_ids: torch.Tensor,
        teacher_logprobs: torch.Tensor,
        labels: torch.Tensor | None = None,
        student_bias: torch.Tensor | None = None,
        student_lora: Lora | None = None,
        token_weights: torch.Tensor | None = None,
        num_items: torch.Tensor | int | None = None,
        valid_rows: torch.Tensor | None = None,
        vocab_size: int | None = None,
        return_stats: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, TokenStats]:
        """Compute the loss, and its gradient for the student's tensors if autograd requires it.

        Args:
            student_hidden: [N, H] or [..., H]; gets a gradient.
            teacher_ids: integers [..., K], distinct within a row, below the number of columns that count; K to 511.
            teacher_logprobs: floating [..., K], natural logarithms of probabilities over the whole vocabulary, or of
                the target weights for `tail="sampled"`; -inf for places that are not used, whatever their ids: their
                tokens are none of the K.
            student_weight, labels, student_bias, student_lora, token_weights, num_items, valid_rows, vocab_size:
                as in `FusedDistillationLoss.forward`.
            return_stats: return `(loss, TokenStats)`. Its divergence is the loss's, without T^2 but at T; agreement is
                1 where the teacher's likeliest of the K is the student's likeliest; teacher_entropy and
                teacher_label_logprob, which K tokens do not tell, are 0.

        Returns:
            fp32 scalar (fp64 for fp64 inputs); with reduction "none" the leading shape of `student_hidden`.

        Raises:
            ValueError: naming the argument whose shape or dtype does not fit.
        """
        check_top_k(teacher_ids, teacher_logprobs, student_hidden.shape[:-1])
        logprobs = teacher_logprobs.detach()
        if self.teacher_factor != 1.0:
            # In fp32 at least: 16 bits would round the logarithms a second time.
            logprobs = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32)) * self.teacher_factor
        student = Head(student_hidden, student_weight, student_bias, *unpack_lora(student_lora))
        target = LossTarget(chosen=TopK(teacher_ids, logprobs, self.tail))
        tokens = TokenArguments(labels, token_weights, num_items, valid_rows)
        return fused_loss(self._settings(), student, target, tokens, vocab_size, return_stats=return_stats)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tail={self.tail!r}"


class FusedStudentTopKKLLoss(FusedDistillationLoss):
    """KL divergence over the student's own K most probable tokens, from both models' hidden states and heads.

    The tokens are those of the student as it is now (stop-gradient), chosen from logits that the loss computes anyway.
    `tail` is what becomes of all others, as of `FusedTopKKLLoss`: with "bucket" they are one outcome, and the loss is
    at most the full divergence; with "renormalize" they are left out.

    Args:
        k: number of tokens, 1 to 511; with all columns it is the full divergence.
        direction: "reverse", KL(p_s || p_t), which is inf where one of the K has teacher probability 0; or "forward".
        tail: "bucket" or "renormalize". With 16-bit heads the teacher's probability outside of the K counts as at least
            1e-6, what sums of K probabilities resolve.
        temperature, scale_by_temperature_squared, divergence_weight, ce_weight, clip: see `FusedTopKKLLoss`.
        settings: label_smoothing, z_loss, ignore_index, reduction, student_logit_scale, student_softcap,
            teacher_logit_scale, teacher_softcap, max_workspace_mib, skip_ignored_rows: see `FusedDistillationLoss`.

    Raises:
        ValueError: naming the field, what was expected and what came.
    """

    def __init__(
        self,
        k: int = 64,
        direction: str = "reverse",
        tail: str = "bucket",
        temperature: float | Temperatures = 1.0,
        scale_by_temperature_squared: bool = True,
        divergence_weight: float = 1.0,
        ce_weight: float = 0.0,
        clip: Clip | None = None,
        **settings: object,
    ) -> None:
        checked_direction(direction)
        expect(tail in TAILS[:2], "tail", " or ".join(TAILS[:2]), repr(tail))
        expect(1 <= k <= MAX_TOP_K, "k", f"1 to {MAX_TOP_K}", k)
        super().__init__(
            [LossTerm(f"{direction}_kl", divergence_weight, clip=clip), LossTerm("cross_entropy", ce_weight)],
            temperature,
            scale_by_temperature_squared,
            **settings,  # type: ignore[arg-type]
        )
        self.k = int(k)
        self.tail = tail

    def forward(  # type: ignore[override]
        self,
        student_hidden: torch.Tensor,
        student_weight: torch.Tensor,
        teacher_hidden: torch.Tensor,
        teacher_weight: torch.Tensor,
        labels: torch.Tensor | None = None,
        student_bias: torch.Tensor | None = None,
        teacher_bias: torch.Tensor | None = None,
        student_lora: Lora | None = None,
        token_weights: torch.Tensor | None = None,
        num_items: torch.Tensor | int | None = None,
        valid_rows: torch.Tensor | None = None,
        vocab_size: int | None = None,
        return_stats: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, TokenStats]:
        """Compute the loss, and its gradient for the student's tensors if autograd requires it.

        Arguments as of `FusedDistillationLoss.forward`. With `return_stats` the result is `(loss, TokenStats)` as
        `FusedTopKKLLoss.forward` describes them.

        Raises:
            ValueError: naming the argument whose shape or dtype does not fit, among them heads that are cut over ranks.
        """
        student = Head(student_hidden, student_weight, student_bias, *unpack_lora(student_lora))
        teachers = self._one_teacher(teacher_hidden, teacher_weight, teacher_bias)
        target = LossTarget(teachers, StudentTopK(self.k, self.tail))
        tokens = TokenArguments(labels, token_weights, num_items, valid_rows)
        return fused_loss(self._settings(), student, target, tokens, vocab_size, return_stats=return_stats)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, k={self.k}, tail={self.tail!r}"
