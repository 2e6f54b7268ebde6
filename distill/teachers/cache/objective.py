"""Training from a teacher on disk: objectives that read what it said in the place of running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from distill_kernels import FusedDistillationLoss, FusedTopKKLLoss, TokenStats
from torch import nn

from distill.models.head import HeadWeights, LogitShape, find_head, probe_logits
from distill.teachers.cache.encode import normalised, surplus_of
from distill.teachers.cache.format import HEAD
from distill.teachers.cache.read import PREFIX, CachedRows, TeacherCache, spread
from distill.teachers.measure import Measure, over_stored
from distill.teachers.objective import Comparison, DistillationObjective, LossSpec, Reading


class Signal(NamedTuple):
    """What the teacher said of a batch: K tokens of each position, and figures of the whole distribution.

    Attributes:
        ids: int32 [B, S, K].
        logprobs: fp32 [B, S, K].
        entropy, label_logprob: fp32 [B * S], 0 where nothing is learned.
        surplus: fp32 [B * S], by how much a loss of sampled weights is above the full one on average; None otherwise.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    entropy: torch.Tensor
    label_logprob: torch.Tensor
    surplus: torch.Tensor | None = None


class CachedObjective(DistillationObjective):
    """An objective whose teacher is a cache; what both kinds of caches have in common.

    Args:
        cache: the teacher.
        student, loss, vocab_size: as of `DistillationObjective`; its `teacher` must be None.
    """

    def __init__(
        self, teacher: None, student: nn.Module, loss: LossSpec = "forward_kl", *, cache: TeacherCache,
        vocab_size: int | None = None,
    ) -> None:  # fmt: skip
        assert teacher is None
        self.cache = cache
        super().__init__(None, student, loss, vocab_size=vocab_size)

    def read(self, student: nn.Module, vocab_size: int | None) -> Reading:
        """The student's head as it is; the teacher's as it was when the cache was made."""
        rows = len(find_head(student).linear.weight)  # type: ignore[arg-type]
        columns = vocab_size or self._columns(rows)
        scale, softcap = self.cache.manifest["scale"], self.cache.manifest["softcap"]
        return Reading(
            probe_logits(student, "student"), LogitShape(scale, softcap),
            None if columns == max(rows, self.cache.columns) else columns,
        )  # fmt: skip

    def _columns(self, rows: int) -> int:
        return min(rows, self.cache.columns)

    @property
    def columns(self) -> int:
        """Columns of the vocabulary that the loss is over."""
        return self.reading.vocab_size or self.cache.columns

    def collator(self, plain: Callable[[list[Any]], dict[str, Any]]) -> Callable[[list[Any]], dict[str, Any]]:
        """`plain` with what the teacher said of the rows beside it."""
        return CachedRows(plain, self.cache)

    def compare(
        self, inputs: Mapping[str, Any], num_items: torch.Tensor | int | None = None, *, statistics: bool = True
    ) -> dict[str, Any]:
        """As `DistillationObjective.compare`; what was cached goes into the comparison, not to the student."""
        if self.loss.objective.needs_teacher and not any(name.startswith(PREFIX) for name in inputs):
            raise ValueError("batch: expected what the teacher said of it; batches come from objective.collator(...)")
        arguments = super().compare(inputs, num_items, statistics=statistics)
        return {name: value for name, value in arguments.items() if not name.startswith(PREFIX)}


class TopKObjective(CachedObjective):
    """The divergence to K stored tokens of each position, and the hard labels.

    `divergence` among the statistics is at the loss's temperature: that of `FusedTopKKLLoss`, over K + 1 outcomes or K;
    of sampled tokens an unbiased estimate of the full one. The teacher's entropy and cross-entropy are exact: stored.
    """

    def __init__(self, teacher: None, student: nn.Module, loss: LossSpec = "forward_kl", **more: Any) -> None:
        super().__init__(teacher, student, loss, **more)
        manifest = self.cache.manifest
        self.loss = top_k_loss(self.loss, manifest["tail"], float(manifest["temperature"]))

    @property
    def caveat(self) -> str | None:
        """K tokens are not the whole distribution."""
        at = f"at temperature {self.cache.manifest['temperature']:g}"
        return {
            "bucket": f"over the stored tokens and all others as one, {at}: at most the full divergence",
            "renormalize": f"over the stored tokens alone, {at}: blind to what the student does elsewhere",
            "sampled": f"estimates of the full forward KL from sampled tokens, {at}, unbiased; no reverse KL; "
            "agreement is with a drawn token of most weight, where probabilities are flat not always the likeliest",
        }[self.cache.manifest["tail"]]

    @property
    def measure(self) -> Measure:
        """Over the outcomes that are stored."""
        return over_stored(self.cache.manifest)

    def _columns(self, rows: int) -> int:
        if rows < self.cache.columns:
            raise ValueError(
                f"teacher.path: the cache's probabilities are over {self.cache.columns:,} tokens, and the student's "
                f"head has {rows:,} rows; make the cache with this student in the recipe"
            )
        return self.cache.columns

    def signal(self, inputs: Mapping[str, Any]) -> Signal | None:
        """The batch's cached tensors, each at its position."""
        if not self.loss.objective.needs_teacher:
            return None
        said = {name: inputs[PREFIX + name] for name in ("ids", "logprobs", "tail", "entropy", "label_logprob")}
        shape, rows = inputs["input_ids"].shape, inputs["valid_rows"]
        logprobs, surplus, count = said["logprobs"].float(), None, shape.numel()
        if self.loss.tail == "sampled":
            surplus = spread(surplus_of(logprobs, said["tail"]), rows, count)
        else:
            logprobs = normalised(logprobs, said["tail"])
        return Signal(
            spread(said["ids"], rows, count).view(*shape, -1),
            spread(logprobs, rows, count).view(*shape, -1),
            spread(said["entropy"].float(), rows, count),
            spread(said["label_logprob"].float(), rows, count),
            surplus,
        )

    def loss_of(
        self,
        hidden: torch.Tensor,
        head: HeadWeights,
        comparison: Comparison,
        labels: torch.Tensor,
        valid_rows: torch.Tensor | None,
    ) -> Any:
        """`FusedTopKKLLoss` of the batch, its statistics completed by what was stored."""
        said = comparison.signal
        shared = self.arguments(head, comparison, valid_rows)
        if said is None:  # hard labels alone
            return self.loss(hidden, head.weight, labels=labels, **shared)
        result = self.loss(hidden, head.weight, said.ids, said.logprobs, labels, **shared)
        if not comparison.statistics:
            return result
        loss, statistics = result
        return loss, completed(statistics, said, sum(self.loss.objective.divergence_weights))

    def held_out_loss(self) -> Any:
        """Forward KL over the stored outcomes with its statistics, and the reverse KL (NaN where sampled)."""
        manifest = self.cache.manifest
        return HeldOutTopK(manifest["tail"], float(manifest["temperature"]), self.reading.student)


def completed(statistics: Any, said: Signal, weight: float) -> Any:
    """The statistics with the teacher's stored figures in the places that K tokens cannot fill.

    Args:
        statistics: `TokenStats`, or those of a held-out loss.
        said: of the batch.
        weight: of the divergence in the loss.
    """
    if isinstance(statistics, TokenStats):
        divergence = statistics.divergence if said.surplus is None else statistics.divergence - weight * said.surplus
        return statistics._replace(
            divergence=divergence, teacher_entropy=said.entropy, teacher_label_logprob=said.label_logprob
        )
    *first, reverse = statistics
    return (*completed(TokenStats(*first), said, weight), reverse)


def top_k_loss(loss: FusedDistillationLoss, tail: str, temperature: float) -> FusedDistillationLoss:
    """The loss over K stored tokens that stands for `loss`; one without a divergence stays as it is.

    Raises:
        ValueError: a term that K tokens cannot give, or a temperature at which they were not taken.
    """
    soft = [term for term in loss.terms if term.type != "cross_entropy" and term.weight > 0]
    hard = sum(term.weight for term in loss.terms if term.type == "cross_entropy")
    if not soft:
        return loss
    allowed = ["forward_kl"] if tail == "sampled" else ["forward_kl", "reverse_kl"]
    kinds = {term.type for term in soft}
    if len(kinds) > 1 or kinds - set(allowed):
        came = " + ".join(f"{term.weight:g} {term.type}" for term in soft)
        raise ValueError(
            f"loss.terms: expected {' or '.join(allowed)}, alone or with cross_entropy, since the cache holds K tokens "
            f"of each distribution (tail: {tail}); came {came}; a cache made with --hidden takes every term"
        )
    o = loss.objective
    if temperature != o.temperature:
        raise ValueError(
            f"loss.temperature: the cache's probabilities are at temperature {temperature:g}, the recipe's loss is at "
            f"{o.temperature:g}; cache again at that temperature, or with --hidden, which serves every one"
        )
    return FusedTopKKLLoss(
        soft[0].type.removesuffix("_kl"),
        tail,
        temperature,
        scale_by_temperature_squared=o.weights[0] != o.divergence_weights[0] or temperature == 1.0,
        divergence_weight=sum(term.weight for term in soft),
        ce_weight=hard,
        label_smoothing=o.label_smoothing,
        z_loss=o.z_loss,
        ignore_index=loss.ignore_index,
        reduction=loss.reduction,
        student_logit_scale=o.student_scale,
        student_softcap=o.student_softcap or None,
    )


class HeldOutTopK(FusedTopKKLLoss):
    """Forward KL over the stored outcomes with its statistics, and the reverse KL as one statistic more."""

    def __init__(self, tail: str, temperature: float, student: LogitShape) -> None:
        shape = {"student_logit_scale": student.scale, "student_softcap": student.softcap}
        super().__init__("forward", tail, temperature, scale_by_temperature_squared=False, **shape)  # type: ignore[arg-type]
        self.reverse: FusedTopKKLLoss | None = None
        if tail != "sampled":
            self.reverse = FusedTopKKLLoss("reverse", tail, temperature, scale_by_temperature_squared=False, **shape)  # type: ignore[arg-type]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        loss, statistics = super().forward(*args, **kwargs)
        if self.reverse is None:
            return loss, (*statistics, torch.full_like(statistics.divergence, torch.nan))
        _, reverse = self.reverse(*args, **kwargs)
        return loss, (*statistics, reverse.divergence)


class HiddenObjective(CachedObjective):
    """Stored hidden states and the stored head in the fused loss: as with a loaded teacher, every divergence and T."""

    def __init__(self, teacher: None, student: nn.Module, loss: LossSpec = "forward_kl", **more: Any) -> None:
        super().__init__(teacher, student, loss, **more)
        device = next(student.parameters()).device
        self.head = read_stored_head(self.cache, device)

    def signal(self, inputs: Mapping[str, Any]) -> torch.Tensor | None:
        """The stored hidden states [B, S, H], 0 where nothing is learned."""
        if not self.loss.objective.needs_teacher:
            return None
        shape = inputs["input_ids"].shape
        return spread(inputs[f"{PREFIX}hidden"], inputs["valid_rows"], shape.numel()).view(*shape, -1)

    def loss_of(
        self,
        hidden: torch.Tensor,
        head: HeadWeights,
        comparison: Comparison,
        labels: torch.Tensor,
        valid_rows: torch.Tensor | None,
    ) -> Any:
        """The loss against the stored hidden states."""
        signal = None if comparison.signal is None else comparison.signal.to(self.head.weight.dtype)
        shared = self.arguments(head, comparison, valid_rows)
        both = (hidden, head.weight, signal, self.head.weight)
        return self.loss(*both, labels, teacher_bias=self.head.bias, **shared)


def read_stored_head(cache: TeacherCache, device: torch.device) -> HeadWeights:
    """The teacher's head from the cache's folder."""
    from safetensors.torch import load_file

    tensors = load_file(cache.path / HEAD, device=str(device))
    return HeadWeights(tensors["weight"], tensors.get("bias"), None)
