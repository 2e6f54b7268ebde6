"""The distillation objective: the teacher, the loss, and a student forward that computes it without logits.

The objective holds the teacher and patches `student.forward`. A call that carries a `Comparison` runs the student's
decoder through its own modules, then the fused loss inside the head's own `__call__`, all within the (possibly DDP-
or FSDP-wrapped) student's forward, so that every wrapper's hooks fire; any other call falls through to the original,
so `generate` and `save_pretrained` work as before. The teacher is no submodule of the student: its weights are
neither trained, saved, sharded nor broadcast with it.

    objective = DistillationObjective(teacher, student, loss={"terms": [{"type": "reverse_kl"}]})
    output = student(**objective.compare(batch, num_items=n))     # {"loss": scalar, "statistics": [7]}

The mean is over `num_items`, the valid tokens of the whole optimizer step. Labels are shifted here, once.

Another kind of teacher is a subclass: `read` says what is known of the models, `collator` adds what is known of a batch
beforehand, `signal` asks the teacher about a batch, `loss_of` compares, `held_out_loss` measures.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from distill_kernels import FusedDistillationLoss, LossTerm, TokenStats
from torch import nn
from torch.nn import functional as F

from distill.models.head import HeadWeights, LogitShape, bare, call_head, decoder_of, find_head, probe_logits, whole
from distill.recipe.loss import Loss
from distill.teachers.measure import KL as KL_MEASURE
from distill.teachers.measure import Measure

IGNORE = -100
KL = ({"forward_kl"}, {"reverse_kl"})
STATISTICS = TokenStats._fields

LossSpec = Loss | Mapping[str, Any] | Sequence[LossTerm] | str | FusedDistillationLoss


class Comparison:
    """What the objective hands to the student's forward beside the batch.

    A plain class on purpose: DDP and FSDP2 look for tensors in keyword arguments (FSDP2 casts floating ones to
    bf16) and leave an object they do not know alone.

    Attributes:
        signal: what the teacher says of the batch, [B, S, teacher hidden] last hidden states unless a subclass of the
            objective says otherwise; None if the loss has no divergence.
        num_items: int64 tensor or int that the summed loss is divided by; None for this batch's valid tokens.
        statistics: whether sums of the token statistics are wanted.
    """

    def __init__(self, signal: Any, num_items: torch.Tensor | int | None, statistics: bool) -> None:
        self.signal = signal
        self.num_items = num_items
        self.statistics = statistics


class Reading(NamedTuple):
    """What was read from the two models when the objective was made."""

    student: LogitShape
    teacher: LogitShape
    vocab_size: int | None

    def shapes(self) -> dict[str, Any]:
        """Scale and soft cap of both, as the fused losses name them."""
        return {
            "student_logit_scale": self.student.scale,
            "student_softcap": self.student.softcap,
            "teacher_logit_scale": self.teacher.scale,
            "teacher_softcap": self.teacher.softcap,
        }


def loss_terms(loss: Loss) -> list[LossTerm]:
    """The recipe's terms as the kernels take them; terms of weight 0 are left out."""
    return [
        LossTerm(term.type, term.weight, beta=getattr(term, "beta", None), alpha=getattr(term, "alpha", None))
        for term in loss.terms
        if term.weight > 0
    ]


class DistillationObjective:
    """Teacher, loss and the patched student.

    Args:
        teacher: A causal language model on the student's device; put in eval mode, its parameters frozen.
        student: A causal language model, bare or inside PEFT, before any DDP or FSDP wrapping. Its forward is
            patched (`detach` restores it). Adapters may still be added later.
        loss: A recipe's `loss` section (object or mapping), the name of one divergence, a sequence of `LossTerm`,
            or a fused loss module, which is then used as it is.
        vocab_size: Both models' logits are cut to this many columns; None for the smaller of the two heads.

    Raises:
        ValueError: for a head that the fused loss would read wrongly, an unknown loss, a vocabulary too large.
    """

    def __init__(
        self,
        teacher: nn.Module | None,
        student: nn.Module,
        loss: LossSpec = "forward_kl",
        *,
        vocab_size: int | None = None,
    ) -> None:
        if teacher is not None:
            teacher.eval().requires_grad_(False)
        self.teacher: Any = teacher
        self.reading = self.read(student, vocab_size)
        self.loss: Any = build_loss(loss, self.reading)
        self._student: nn.Module | None = None
        self.attach(student)

    def read(self, student: nn.Module, vocab_size: int | None) -> Reading:
        """How both models make logits of hidden states, and the columns that are compared."""
        return Reading(
            probe_logits(student, "student"),
            probe_logits(self.teacher, "teacher"),
            _shared(student, self.teacher, vocab_size),
        )

    def attach(self, student: nn.Module) -> None:
        """Patch `student.forward`; the innermost transformers model is patched, whatever wraps it."""
        _refuse_prompt_learning(student)
        self.detach()
        inner = bare(student)
        original = inner.__dict__.get("forward")
        objective = self

        @functools.wraps(type(inner).forward)
        def forward(model: Any, *args: Any, comparison: Comparison | None = None, **kwargs: Any) -> Any:
            if comparison is not None:
                return objective._student_forward(model, comparison, **kwargs)
            return original(*args, **kwargs) if original else type(model).forward(model, *args, **kwargs)

        inner._forward_before_distillation = original  # type: ignore[assignment]
        inner.forward = types.MethodType(forward, inner)
        self._student = inner

    @property
    def student(self) -> Any:
        """The transformers model whose forward is patched, inside whatever wraps it."""
        assert self._student is not None, "the objective is detached"
        return self._student

    def detach(self) -> None:
        """Give the student its own forward back."""
        if self._student is None:
            return
        original = self._student.__dict__.pop("_forward_before_distillation", None)
        self._student.__dict__.pop("forward", None)
        if original is not None:
            self._student.forward = original
        self._student = None

    def collator(self, plain: Callable[[list[Any]], dict[str, Any]]) -> Callable[[list[Any]], dict[str, Any]]:
        """What makes batches for this objective: `plain`, or something around it that adds to its batches."""
        return plain

    def signal(self, inputs: Mapping[str, Any]) -> Any:
        """What the teacher says of a batch; made before the student's forward, None where the loss needs none."""
        return self.teacher_hidden(inputs) if self.loss.objective.needs_teacher else None

    def teacher_hidden(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """The teacher's last hidden states, [B, S, hidden], without a graph."""
        return last_hidden(self.teacher, inputs)

    def compare(
        self, inputs: Mapping[str, Any], num_items: torch.Tensor | int | None = None, *, statistics: bool = True
    ) -> dict[str, Any]:
        """Run the teacher and return the keyword arguments to call the student with.

        Args:
            inputs: A collated batch: `input_ids`, `labels` [B, S] int64, not shifted, -100 where nothing is
                learned; `position_ids` and `valid_rows` if the collator gives them.
            num_items: What the summed loss is divided by; None for the valid tokens of this batch.
            statistics: Also return sums of the token statistics.
        """
        if "labels" not in inputs or "input_ids" not in inputs:
            raise ValueError(f"batch: expected input_ids and labels, got {sorted(inputs)}")
        return {**inputs, "comparison": Comparison(self.signal(inputs), num_items, statistics)}

    def loss_of(
        self,
        hidden: torch.Tensor,
        head: HeadWeights,
        comparison: Comparison,
        labels: torch.Tensor,
        valid_rows: torch.Tensor | None,
    ) -> Any:
        """The loss inside the student head's own call.

        Args:
            hidden: The student's last hidden states, [B, S, hidden].
            head: The student's head as it is inside the call.
            comparison: The teacher's signal and what the sum is divided by.
            labels: int64 [B, S], already shifted.
            valid_rows: int64 [M], the flat rows with a label, if the collator found them.

        Returns:
            The loss, a scalar; with `comparison.statistics` a pair of it and the token statistics, each [B * S].
        """
        shared = self.arguments(head, comparison, valid_rows)
        # the teacher's head is not used where the loss has no divergence
        with whole(find_head(self.teacher)) as teacher_head:
            both = (hidden, head.weight, comparison.signal, teacher_head.weight)
            return self.loss(*both, labels, teacher_bias=teacher_head.bias, **shared)

    def arguments(self, head: HeadWeights, comparison: Comparison, valid_rows: torch.Tensor | None) -> dict[str, Any]:
        """What every fused loss takes beside hidden states, weights and labels, whatever the teacher is."""
        return {
            "student_bias": head.bias, "student_lora": head.lora, "num_items": comparison.num_items,
            "valid_rows": valid_rows, "vocab_size": self.reading.vocab_size, "return_stats": comparison.statistics,
        }  # fmt: skip

    def held_out_loss(self) -> Any:
        """What takes the place of `loss` in an evaluation: forward KL with its statistics, and the reverse KL."""
        return HeldOutLoss(self.reading)

    @property
    def terms(self) -> Sequence[LossTerm]:
        """Of the loss, each with its weight."""
        return self.loss.terms

    @property
    def caveat(self) -> str | None:
        """What must be known of the divergences reported; None where they are those of two whole distributions."""
        return None

    @property
    def measure(self) -> Measure:
        """What the divergences reported are called, and what they are means over."""
        return KL_MEASURE

    @property
    def columns(self) -> int:
        """Columns of the vocabulary that the loss is over."""
        return self.reading.vocab_size or len(find_head(self.teacher).linear.weight)  # type: ignore[arg-type]

    @property
    def divergence(self) -> tuple[str | None, float]:
        """What the statistics' `divergence` is called, `kl` or `divergence` (None: there is none), and its weight."""
        soft = [term for term in self.terms if term.type != "cross_entropy" and term.weight > 0]
        if not soft:
            return None, 1.0
        return "kl" if {term.type for term in soft} in KL else "divergence", sum(term.weight for term in soft)

    def _student_forward(
        self,
        student: nn.Module,
        comparison: Comparison,
        labels: torch.Tensor,
        valid_rows: torch.Tensor | None = None,
        **inputs: Any,
    ) -> dict[str, torch.Tensor]:
        """The student's forward with the loss in place of logits.

        Returns `loss`, a scalar, and `statistics`, fp32 sums over this batch's valid tokens in the order of
        `STATISTICS`, if they were asked for.
        """
        inputs = {key: value for key, value in inputs.items() if value is not None}
        # what PEFT passes along for the full forward
        for key in ("output_attentions", "output_hidden_states", "return_dict", "use_cache"):
            inputs.pop(key, None)
        hidden = decoder_of(student)(**inputs, use_cache=False).last_hidden_state
        shifted = F.pad(labels, (0, 1), value=IGNORE)[..., 1:]

        def compute(hidden: torch.Tensor, head: HeadWeights) -> dict[str, torch.Tensor]:
            result = self.loss_of(hidden, head, comparison, shifted, valid_rows)
            if not comparison.statistics:
                return {"loss": result}
            loss, stats = result
            return {"loss": loss, "statistics": torch.stack(tuple(stats)).sum(dim=1)}

        return call_head(find_head(student), hidden, compute)


class HeldOutLoss(FusedDistillationLoss):
    """Forward KL with its statistics, and the reverse KL as one statistic more."""

    def __init__(self, reading: Reading) -> None:
        super().__init__([LossTerm("forward_kl", 1.0)], **reading.shapes())
        self.reverse = FusedDistillationLoss([LossTerm("reverse_kl", 1.0)], **reading.shapes())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        loss, statistics = super().forward(*args, **kwargs)
        _, reverse = self.reverse(*args, **kwargs)
        return loss, (*statistics, reverse.divergence)


def build_loss(loss: LossSpec, reading: Reading) -> FusedDistillationLoss:
    """The fused loss for two models that make their logits as `reading` says."""
    shapes = reading.shapes()
    if isinstance(loss, FusedDistillationLoss):
        _check_shapes(loss, shapes)
        return loss
    if isinstance(loss, str):
        loss = {"terms": [{"type": loss}]}
    if isinstance(loss, Mapping):
        loss = Loss.model_validate(loss)
    if not isinstance(loss, Loss):
        return FusedDistillationLoss(list(loss), **shapes)
    return FusedDistillationLoss(
        loss_terms(loss),
        temperature=loss.temperature,
        scale_by_temperature_squared=loss.scale_by_temperature_squared,
        label_smoothing=loss.label_smoothing,
        z_loss=loss.z_loss,
        **shapes,
    )


def last_hidden(teacher: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """A teacher's last hidden states for a batch, [B, S, hidden], without a graph.

    `use_cache=False` matters: with a cache, packed documents would attend to each other.
    """
    body = {key: value for key, value in inputs.items() if key not in ("labels", "valid_rows") and value is not None}
    # FSDP2 keeps one set of gathered weights, which must not be made under inference mode and read outside it
    decoder = decoder_of(teacher)
    with torch.no_grad() if hasattr(decoder, "unshard") else torch.inference_mode():
        return decoder(**body, use_cache=False).last_hidden_state


def _check_shapes(loss: FusedDistillationLoss, shapes: Mapping[str, Any]) -> None:
    """A ready-made loss must treat the logits as these two models do."""
    made = loss.objective
    for name, wanted in shapes.items():
        field = name.replace("_logit_scale", "_scale")
        if getattr(made, field) != (wanted or 0.0):
            raise ValueError(f"loss.{name}: these models need {wanted}, got {getattr(made, field)}")


def _shared(student: nn.Module, teacher: nn.Module, vocab_size: int | None) -> int | None:
    """The columns both heads are cut to; None where they are equal and nothing is cut."""
    widths = {
        "student": len(find_head(student).linear.weight),  # type: ignore[arg-type]
        "teacher": len(find_head(teacher).linear.weight),  # type: ignore[arg-type]
    }
    smallest = min(widths.values())
    if vocab_size is not None and not 0 < vocab_size <= smallest:
        raise ValueError(f"vocab_size: expected 1 to {smallest} (heads: {widths}), got {vocab_size}")
    vocab_size = vocab_size or smallest
    return None if vocab_size == max(widths.values()) else vocab_size


def _refuse_prompt_learning(student: nn.Module) -> None:
    for name, config in (getattr(student, "peft_config", None) or {}).items():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(f"student: adapter {name!r} is prompt learning ({config.peft_type}), which adds positions")
