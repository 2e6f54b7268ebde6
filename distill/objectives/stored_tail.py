"""The term `top_k_reverse_kl` with `tail: sampled` over a teacher's K tokens and the sampled token's probability."""

from __future__ import annotations

from typing import Any

import torch
from distill_kernels import FusedTopKKLLoss, LossTerm

from distill.objectives.sampled_tail import SampledTail, TailTargets
from distill.objectives.targets import HeadForward, LossResult, VocabularyAlignment
from distill.recipe.loss import Loss


class StoredTailLoss(SampledTail):
    """Loss over the teacher's K tokens; others are estimated from the sampled token, whose log-probability is stored.

    Args:
        section: the recipe's loss, which has no other term.
        pairing: Alignment of the two vocabularies.
        tail: Representation of the other tokens in the cache.
        temperature: Temperature of the stored log-probabilities.

    Attributes:
        measured: the forward KL over the K tokens, for metrics only.

    Raises:
        ValueError: other terms, K tokens that were sampled, or a temperature other than 1, that of the stored label.
    """

    def __init__(self, section: Loss, pairing: VocabularyAlignment, tail: str, temperature: float) -> None:
        term = section.tailed
        assert term is not None
        others = [other.type for other in section.terms if other.weight > 0 and other is not term]
        if others:
            raise ValueError(
                "loss.terms: expected top_k_reverse_kl with tail: sampled alone, since the teacher gives K tokens; got "
                f"also {', '.join(others)}"
            )
        if tail == "sampled":
            raise ValueError(
                "loss.terms: top_k_reverse_kl expects the teacher's top K tokens, got sampled ones; cache a bucket tail"
            )
        if section.temperature != 1.0 or temperature != 1.0:
            raise ValueError(
                "loss.temperature: expected 1 with tail: sampled over a teacher's K tokens, whose log-probability of "
                f"the drawn token is at 1; got {section.temperature:g}"
            )
        super().__init__(term, section, pairing)
        student = pairing.student
        self.measured = FusedTopKKLLoss(
            "forward", tail, student_logit_scale=student.scale, student_softcap=student.softcap
        )
        self.objective = self.measured.objective
        self.terms = [LossTerm(term.type, term.weight)]

    def __call__(self, call: HeadForward) -> LossResult:
        """Return the loss inside the student head's own call, with the statistics if requested."""
        targets: Any = call.inputs.targets
        value = self.of(call, TailTargets(targets.ids, targets.logprobs, targets.label_logprob))
        if not call.inputs.statistics:
            return value
        with torch.no_grad():
            both = (call.hidden, call.head.weight, targets.ids, targets.logprobs, call.labels)
            _, statistics = self.measured(*both, **self.pairing.arguments(call))
        return value, statistics
