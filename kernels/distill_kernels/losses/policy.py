"""Policy-gradient losses of sampled tokens, from hidden states and the head: `FusedPolicyGradientLoss`.

Hidden states and the head go through the driver of all fused losses (linear.py, fused.py); the formulas are in
policy_reference.py, the kernels in policy_kernel.py. Advantages are known beforehand, so a row's gradient follows from
its own logits: the forward pass makes loss and gradients with three GEMMs, where log-probabilities with a graph
(`fused_log_probs`) take four.
"""

from __future__ import annotations

import torch

from distill_kernels.losses.arguments import Lora, expect, unpack_lora
from distill_kernels.losses.mixture import LossTarget
from distill_kernels.losses.modules import FusedDistillationLoss
from distill_kernels.losses.operands import Head, TokenArguments
from distill_kernels.losses.operator import fused_loss
from distill_kernels.losses.policy_reference import KL_ESTIMATORS, NO_CLIP, Policy, PolicySettings
from distill_kernels.losses.terms import LossTerm, TokenStats


class FusedPolicyGradientLoss(FusedDistillationLoss):
    """Policy-gradient loss of sampled tokens (PPO, GRPO, REINFORCE), without the logits of the batch.

    With `l = log p(y)` of the sampled token y and H the entropy of its row's distribution, both at the temperature, the
    loss of a token is

        -min(r A, clip(r, 1 - clip, 1 + clip_high) A) + kl_weight K(l, reference) - entropy_weight H
        r = exp(l - old_logprobs), or 1 in value and exp(l - sg(l)) in gradient where there are none

    Args:
        clip: clipping range of the importance ratio, above 0; None for no clipping.
        clip_high: the range above 1, where it differs from that below (DAPO); None for `clip`.
        kl_weight: weight of the KL penalty to the reference model, >= 0.
        kl_estimator: "k3", `exp(d) - d - 1` with `d = reference - l` (GRPO); "k2", `d^2 / 2`; or "reward", which adds
            `kl_weight sg(d)` to the advantage (distillation on policy: the reference is the teacher).
        entropy_weight: weight of the entropy bonus, >= 0; costs one more sweep over the logits.
        temperature: T > 0 that the tokens were sampled at; logits are divided by it.
        settings: ignore_index, reduction, student_logit_scale, student_softcap, max_workspace_mib, skip_ignored_rows:
            see `FusedDistillationLoss`. With reduction "none" and a head that learns, backward makes the logits again.

    Raises:
        ValueError: naming the field, what was expected and what came.
    """

    def __init__(
        self,
        clip: float | None = None,
        clip_high: float | None = None,
        kl_weight: float = 0.0,
        kl_estimator: str = "k3",
        entropy_weight: float = 0.0,
        temperature: float = 1.0,
        **settings: object,
    ) -> None:
        # The term stands in for the sampled tokens' own: with it the driver asks for labels, and makes no teacher's
        # logits.
        super().__init__([LossTerm("cross_entropy", 1.0)], temperature, **settings)  # type: ignore[arg-type]
        for name, value in (("clip", clip), ("clip_high", clip_high)):
            expect(value is None or 0 < value < float("inf"), name, "None or a number above 0", repr(value))
        expect(clip is not None or clip_high is None, "clip", "a number beside clip_high", "None")
        for name, weight in (("kl_weight", kl_weight), ("entropy_weight", entropy_weight)):
            expect(0 <= weight < float("inf"), name, "a finite number of at least 0", repr(weight))
        expect(kl_estimator in KL_ESTIMATORS, "kl_estimator", " or ".join(KL_ESTIMATORS), repr(kl_estimator))
        low = NO_CLIP if clip is None else float(clip)
        # Both are NO_CLIP without a range; the kernel asks for the lower one alone.
        high = low if clip_high is None else float(clip_high)
        self.policy = PolicySettings(low, high, float(kl_weight), kl_estimator, float(entropy_weight))

    def forward(  # type: ignore[override]
        self,
        student_hidden: torch.Tensor,
        student_weight: torch.Tensor,
        labels: torch.Tensor,
        advantages: torch.Tensor | None = None,
        old_logprobs: torch.Tensor | None = None,
        reference_logprobs: torch.Tensor | None = None,
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
            student_hidden: [N, H] or [..., H].
            labels: integers [...], the sampled tokens, already shifted: row i of the hidden states predicts labels[i].
            advantages: floating [...]; no gradient flows to them. None for 0: the KL penalty and the entropy alone.
            old_logprobs: floating [...], log-probabilities of the labels when they were sampled, natural logarithms at
                the temperature; None for the present ones. Rows that do not count may hold anything.
            reference_logprobs: floating [...], the same under the reference model; needed with a `kl_weight`.
            student_weight, student_bias, student_lora, token_weights, num_items, valid_rows, vocab_size:
                as in `FusedDistillationLoss.forward`.
            return_stats: return `(loss, TokenStats)`. At the loss's temperature: student_label_logprob,
                cross_entropy, student_entropy and, of a reference, teacher_label_logprob and k3 as the divergence;
                teacher_entropy and agreement are 0.

        Returns:
            fp32 scalar (fp64 for fp64 inputs); with reduction "none" the leading shape of `student_hidden`.

        Raises:
            ValueError: naming the argument whose shape or dtype does not fit.
        """
        s = self.policy
        expect(not s.kl_weight or reference_logprobs is not None, "reference_logprobs", "a tensor with kl_weight", None)
        # Without old log-probabilities every ratio is 1, and a clipping range would never act.
        expect(s.clip_low == NO_CLIP or old_logprobs is not None, "old_logprobs", "a tensor with clip", None)
        some = advantages is not None or s.kl_weight or s.entropy_weight
        expect(bool(some), "advantages", "a tensor without kl_weight and entropy_weight", None)
        student = Head(student_hidden, student_weight, student_bias, *unpack_lora(student_lora))
        target = LossTarget(chosen=Policy(advantages, old_logprobs, reference_logprobs, s))
        tokens = TokenArguments(labels, token_weights, num_items, valid_rows)
        return fused_loss(self._settings(), student, target, tokens, vocab_size, return_stats=return_stats)

    def extra_repr(self) -> str:
        return f"{self.policy}, temperature={self.objective.temperature:g}"
