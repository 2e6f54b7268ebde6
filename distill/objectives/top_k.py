"""Targets that are K stored tokens of each position, in the fused top-k loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from distill_kernels import FusedDistillationLoss, FusedTopKKLLoss, LossTerm, Temperatures, TokenStats

from distill.models.head import HeadWeights, LogitTransform
from distill.objectives.losses import (
    HeldOutLoss,
    LogitTransforms,
    LossSpec,
    TargetLoss,
    build_loss,
    scaled_by_temperature,
    soft_terms,
)
from distill.objectives.measure import cache_measure
from distill.objectives.sampled_tail import SampledTail, TailTargets
from distill.objectives.targets import HeadForward, LossResult, TargetFormat, TargetProperties, VocabularyAlignment
from distill.objectives.term_loss import CompositeLoss
from distill.objectives.top_k_encoding import normalised, surplus_of
from distill.recipe.loss import SEPARATE, Loss


class TopKTargets(NamedTuple):
    """K tokens of each position of a batch, and statistics of the whole distribution.

    Attributes:
        ids: int32 [B, S, K].
        logprobs: fp32 [B, S, K].
        entropy, label_logprob: fp32 [B * S], 0 where no token is trained.
        surplus: fp32 [B * S], by how much the loss on sampled weights exceeds the full one on average; else None.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    entropy: torch.Tensor
    label_logprob: torch.Tensor
    surplus: torch.Tensor | None = None


def spread(values: torch.Tensor, rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return `values` [M, ...] scattered to the flat positions `rows` int64 [M] of [*shape, ...], 0 elsewhere."""
    full = values.new_zeros(shape.numel(), *values.shape[1:])
    return full.index_copy_(0, rows, values).view(*shape, *values.shape[1:])


def top_k_targets(stored: Mapping[str, torch.Tensor], rows: torch.Tensor, shape: torch.Size, tail: str) -> TopKTargets:
    """Return the targets of `rows` of a batch at their positions; 0 where no token is trained.

    Args:
        stored: fields of `EncodedTopK` by name, for M positions.
        rows: int64 [M], flat positions.
        shape: Shape of the batch, [B, S].
        tail: Representation of the other tokens in the cache.
    """
    logprobs = stored["logprobs"].float()
    surplus = None
    if tail == "sampled":
        surplus = spread(surplus_of(logprobs, stored["tail"]), rows, shape).flatten()
    else:
        logprobs = normalised(logprobs, stored["tail"])
    return TopKTargets(
        spread(stored["ids"], rows, shape),
        spread(logprobs, rows, shape),
        spread(stored["entropy"].float(), rows, shape).flatten(),
        spread(stored["label_logprob"].float(), rows, shape).flatten(),
        surplus,
    )


class TopKFormat(TargetFormat):
    """The divergence to K stored tokens of each position, and the hard labels.

    `divergence` among the statistics is at the loss's temperature: that of `FusedTopKKLLoss`, over K + 1 outcomes or K;
    of sampled tokens an unbiased estimate of the full one. The teacher's entropy and cross-entropy are exact: stored.
    """

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        self.manifest = manifest
        self.tail = manifest["tail"]
        self.temperature = float(manifest["temperature"])
        self.transform = LogitTransform(manifest["scale"], manifest["softcap"])
        self.columns = int(manifest["vocabulary"])
        at = f"at temperature {self.temperature:g}"
        # K tokens are not the whole distribution
        caveat = {
            "bucket": f"over the stored tokens and all others as one, {at}: at most the full divergence",
            "renormalize": f"over the stored tokens alone, {at}: blind to what the student does elsewhere",
            "sampled": f"estimates of the full forward KL from sampled tokens, {at}, unbiased; no reverse KL; "
            "agreement is with a drawn token of most weight, where probabilities are flat not always the likeliest",
        }[self.tail]
        divergences = frozenset(["forward_kl"] if self.tail == "sampled" else ["forward_kl", "reverse_kl"])
        self.properties = TargetProperties((self.columns,), cache_measure(manifest), caveat, divergences)

    def pair(self, student: LogitTransform, rows: int, vocab_size: int | None) -> VocabularyAlignment:
        """Return a pairing over the columns that the stored tokens were taken from; the student must have them all."""
        if vocab_size is None and rows < self.columns:
            raise ValueError(
                f"teacher.path: the cache's probabilities are over {self.columns:,} tokens, and the student's head has "
                f"{rows:,} rows; make the cache with this student in the recipe"
            )
        columns = vocab_size or self.columns
        return VocabularyAlignment(student, columns, None if columns == max(rows, self.columns) else columns)

    def loss(self, section: LossSpec, alignment: VocabularyAlignment) -> TargetLoss:
        if isinstance(section, Loss) and section.tailed is not None:
            return stored_tail_loss(section, alignment, self)
        if isinstance(section, Loss) and section.has(*SEPARATE):
            raise ValueError(
                f"loss.terms: {' and '.join(SEPARATE)} expect hidden states of the teacher, got its "
                "top K tokens; use top_k_reverse_kl with tail: sampled"
            )
        return top_k_loss(build_loss(section, LogitTransforms(alignment.student, self.transform)), self)

    def held_out(self, alignment: VocabularyAlignment) -> TargetLoss:
        """Return the loss over the stored outcomes; sampled tokens do not determine the reverse KL."""
        student = alignment.student

        def of(term: LossTerm) -> FusedTopKKLLoss:
            return FusedTopKKLLoss(
                term.type.removesuffix("_kl"),
                self.tail,
                self.temperature,
                scale_by_temperature_squared=False,
                student_logit_scale=student.scale,
                student_softcap=student.softcap,
            )

        return HeldOutLoss(of, reverse="reverse_kl" in self.properties.divergences)

    def apply(self, loss: TargetLoss, alignment: VocabularyAlignment, call: HeadForward) -> LossResult:
        """Return the loss; its statistics are completed with stored ones."""
        targets: Any = call.inputs.targets

        def of_fused(fused: Any) -> LossResult:
            arguments = alignment.arguments(call) | {"return_stats": call.inputs.statistics}
            if targets is None:  # hard labels alone
                return fused(call.hidden, call.head.weight, labels=call.labels, **arguments)
            return fused(call.hidden, call.head.weight, targets.ids, targets.logprobs, call.labels, **arguments)

        result = loss.compute(call, None, of_fused) if isinstance(loss, CompositeLoss) else of_fused(loss)
        if targets is None or not isinstance(result, tuple):
            return result
        value, statistics = result
        return value, completed(statistics, targets, sum(loss.objective.divergence_weights))


def completed(statistics: Any, targets: TopKTargets, weight: float) -> Any:
    """Return the statistics, with the teacher's stored ones in the places that K tokens cannot fill.

    Args:
        statistics: `TokenStats`, or those of a held-out loss.
        weight: Weight of the divergence in the loss.
    """
    if isinstance(statistics, TokenStats):
        stored = statistics._replace(teacher_entropy=targets.entropy, teacher_label_logprob=targets.label_logprob)
        if targets.surplus is None:
            return stored
        # The surplus depends on the teacher alone: it has no gradient, so the loss keeps it and only the metric is
        # corrected.
        return stored._replace(divergence=statistics.divergence - weight * targets.surplus)
    *first, reverse = statistics
    return (*completed(TokenStats(*first), targets, weight), reverse)


def top_k_loss(loss: FusedDistillationLoss, format: TopKFormat) -> FusedDistillationLoss:
    """Return the loss over K stored tokens in place of `loss`; one without a divergence stays as it is.

    Raises:
        ValueError: a term that cannot be computed from K tokens, or a temperature at which they were not taken.
    """
    soft = soft_terms(loss.terms)
    hard = sum(term.weight for term in loss.terms if term.type == "cross_entropy")
    if not soft:
        return loss
    kinds = {term.type for term in soft}
    possible = format.properties.divergences
    if len(kinds) > 1 or kinds - possible:
        got = " + ".join(f"{term.weight:g} {term.type}" for term in soft)
        raise ValueError(
            f"loss.terms: expected {' or '.join(sorted(possible))}, alone or with cross_entropy, since the cache "
            f"holds K tokens of each distribution (tail: {format.tail}); got {got}; a cache made with --hidden takes "
            "every term"
        )
    if format.tail == "sampled" and any(term.clip is not None for term in soft):
        raise ValueError(
            "loss.terms: expected clip null over sampled tokens of the teacher, whose weights are noisy one by one and "
            "whose value for a token is above the divergence; cache a bucket tail (--tail bucket), of which each "
            "outcome is an entry"
        )
    clips = {term.clip for term in soft}
    if len(clips) > 1:
        raise ValueError(f"loss.terms: expected one clip for all terms over K tokens, got {len(clips)}")
    settings = loss.objective
    if format.temperature != settings.teacher_temperature:
        raise ValueError(
            f"loss.temperature: the cache's probabilities are at temperature {format.temperature:g}, the recipe's loss "
            f"is at {settings.teacher_temperature:g}; cache again at that temperature, or with --hidden, which serves "
            "every one"
        )
    return FusedTopKKLLoss(
        soft[0].type.removesuffix("_kl"),
        format.tail,
        Temperatures(format.temperature, settings.temperature),
        scale_by_temperature_squared=scaled_by_temperature(loss),
        divergence_weight=sum(term.weight for term in soft),
        ce_weight=hard,
        label_smoothing=settings.label_smoothing,
        z_loss=settings.z_loss,
        ignore_index=loss.ignore_index,
        reduction=loss.reduction,
        student_logit_scale=settings.student_scale,
        student_softcap=settings.student_softcap or None,
        clip=soft[0].clip,
    )


class StoredTailLoss(SampledTail):
    """The term `top_k_reverse_kl` with `tail: sampled` over a teacher's K tokens.

    The other tokens are estimated from the sampled one, whose log-probability is stored.
    """

    def tail_targets(self, call: HeadForward, teacher: HeadWeights | None) -> TailTargets:
        targets: Any = call.inputs.targets
        return TailTargets(targets.ids, targets.logprobs, targets.label_logprob)


def stored_tail_loss(section: Loss, alignment: VocabularyAlignment, format: TopKFormat) -> CompositeLoss:
    """Return the loss of the term `top_k_reverse_kl` with `tail: sampled`; metrics are of the forward KL over K tokens.

    Raises:
        ValueError: other terms, K tokens that were sampled, or a temperature other than 1, that of the stored label.
    """
    term = section.tailed
    assert term is not None
    others = [other.type for other in section.terms if other.weight > 0 and other is not term]
    if others:
        raise ValueError(
            "loss.terms: expected top_k_reverse_kl with tail: sampled alone, since the teacher gives K tokens; got "
            f"also {', '.join(others)}"
        )
    if format.tail == "sampled":
        raise ValueError(
            "loss.terms: top_k_reverse_kl expects the teacher's top K tokens, got sampled ones; cache a bucket tail"
        )
    if section.tempered or format.temperature != 1.0:
        raise ValueError(
            "loss.temperature: expected 1 with tail: sampled over a teacher's K tokens, whose log-probability of "
            f"the drawn token is at 1; got {section.temperature_text}"
        )
    student = alignment.student
    measured = FusedTopKKLLoss(
        "forward", format.tail, student_logit_scale=student.scale, student_softcap=student.softcap
    )
    return CompositeLoss([StoredTailLoss(term, section, alignment, format.transform)], None, measured)
