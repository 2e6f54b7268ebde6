"""Local teacher whose linear layers and experts are in fp8, and its cost: the divergence from before, on a real batch.

`teacher.dtype: fp8` loads the teacher in bf16 and quantises its linear layers and its experts, but not its head, once
the run's own batches exist to measure the damage on. The figure is printed beside the student's own divergence: a
teacher that moves by a hundredth of what the student has to learn is worth its speed, one that moves by half of it is
not. `fp8_offers` measures which layers are worth leaving out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from distill_kernels import FusedKLLoss
from distill_kernels.matmul.fp8_experts import Fp8Experts
from torch import nn

from distill.core.eval_mode import eval_mode
from distill.core.labels import shift_labels
from distill.models.fp8_teacher import ModelPart, in_fp8, model_parts, quantise_part, quantise_teacher
from distill.models.head import HeadWeights, LogitTransform, decoder_of, find_head, last_hidden, read_head, unwrap_peft
from distill.models.quantised_checkpoints import is_quantised
from distill.objectives.hidden import HiddenFormat
from distill.objectives.losses import LogitTransforms
from distill.objectives.targets import Batch, VocabularyAlignment
from distill.recipe.teacher_config import sort_parts
from distill.teachers.backends.local import LoadedTeacher


class Fp8Teacher(LoadedTeacher):
    """A causal language model that was quantised while it was loaded, or is by its first batch or `quantise_teacher`.

    Args:
        model: Model of transformers; other arguments as of `LoadedTeacher`.
        skip: Layers that stay in 16 bits, as `teacher.fp8_skip` names them.
    """

    def __init__(self, model: nn.Module, *, skip: Sequence[str] = (), **given: Any) -> None:
        super().__init__(model, **given)
        self.skip = skip

    def quantise(self) -> None:
        if not is_quantised(self.model):
            quantise_teacher(self.model, self.skip)

    def validate_first_batch(
        self, batch: Batch, student: nn.Module | None, alignment: VocabularyAlignment
    ) -> list[str]:
        if is_quantised(self.model):
            cost = "quantised while it was loaded, since it does not fit whole: the cost is not measured"
        else:
            cost = str(quantise_and_measure(self.model, self.hidden, batch, student, alignment, self.skip))
        return [f"{'fp8':<12}{cost}"]


class Fp8Cost(NamedTuple):
    """Divergence caused by quantising a teacher.

    Attributes:
        layers: Number of linear layers now in fp8.
        experts: Number of modules of experts now in fp8, one for each layer that is a mixture.
        teacher_kl: KL(teacher before || teacher after), nats per trained token of the batch.
        student_kl: KL(teacher before || student), nats per trained token; None where the student reads other tokens.
        skip: Layers left in 16 bits, in the notation of `teacher.fp8_skip`.
    """

    layers: int
    teacher_kl: float
    student_kl: float | None
    skip: Sequence[str] = ()
    experts: int = 0

    def __str__(self) -> str:
        left = f" and {', '.join(self.skip)}" if self.skip else ""
        beside = "" if self.student_kl is None else f" beside KL(teacher, student) {self.student_kl:.4f}"
        mixtures = f" and the experts of {self.experts} layers" if self.experts else ""
        return (
            f"{self.layers} linear layers{mixtures} in fp8, the head{left} as before; on one batch "
            f"KL(teacher, fp8 teacher) {self.teacher_kl:.4f}{beside}"
        )


class Before:
    """Outputs of a teacher for a batch before it is quantised, the reference of comparisons.

    Args:
        teacher: The teacher, patched and not sharded.
        batch: Collated batch on the device: `input_ids`, `labels` [B, S].
        vocab_size: Number of columns that are compared; None for all.
    """

    def __init__(self, teacher: nn.Module, format: HiddenFormat, batch: Batch, vocab_size: int | None = None) -> None:
        self.teacher = teacher
        self.transform = format.transform
        self.batch = batch
        self.vocab_size = vocab_size
        self.labels = shift_labels(batch["labels"])
        self.head = read_head(find_head(teacher))
        self.hidden = last_hidden(teacher, batch).to(self.head.weight.dtype)

    def divergence(self, hidden: torch.Tensor, head: HeadWeights, transform: LogitTransform) -> float:
        """Return KL(teacher before || distribution of these hidden states), nats a trained token."""
        loss = FusedKLLoss(**LogitTransforms(transform, self.transform))
        return float(
            loss(
                hidden.to(head.weight.dtype),
                head.weight,
                self.hidden,
                self.head.weight,
                self.labels,
                student_bias=head.bias,
                teacher_bias=self.head.bias,
                student_lora=head.lora,
                valid_rows=self.batch.get("valid_rows"),
                vocab_size=self.vocab_size,
            )
        )

    def moved(self) -> float:
        """Return the divergence of the teacher as it is now, nats a trained token."""
        return self.divergence(last_hidden(self.teacher, self.batch), self.head, self.transform)


@torch.no_grad()
def quantise_and_measure(
    teacher: nn.Module,
    format: HiddenFormat,
    batch: Batch,
    student: nn.Module | None,
    alignment: VocabularyAlignment,
    skip: Sequence[str] = (),
) -> Fp8Cost:
    """Quantise the teacher in place and measure the divergence from before.

    Args:
        teacher: The teacher, patched and not sharded.
        batch: Collated batch on the models' device: `input_ids`, `labels` [B, S].
        student: The student with its present weights; None where it reads other tokens.
        alignment: Alignment of both models' vocabularies.
        skip: Layers that stay in 16 bits, in the notation of `teacher.fp8_skip`.

    Raises:
        ValueError: the teacher has no linear layer whose sizes divide by 16, or not what `skip` names.
    """
    before = Before(teacher, format, batch, alignment.vocab_size)
    hidden = None
    if student is not None:
        inputs = {name: value for name, value in batch.items() if name not in ("labels", "valid_rows")}
        with eval_mode(student):
            hidden = decoder_of(student)(**inputs, use_cache=False).last_hidden_state
    layers = quantise_teacher(teacher, skip)
    of_student = None
    if student is not None and hidden is not None:
        of_student = before.divergence(hidden, read_head(find_head(student)), alignment.student)
    experts = sum(isinstance(module, Fp8Experts) for module in teacher.modules())
    return Fp8Cost(layers, before.moved(), of_student, skip, experts)


class Offer(NamedTuple):
    """A choice of the layers that an fp8 teacher keeps in 16 bits.

    Attributes:
        skip: Layers that stay in 16 bits, in the notation of `teacher.fp8_skip`.
        kl: KL(teacher in 16 bits || in fp8 except these layers), nats per trained token.
        weights: Number of elements in these layers.
        ms: Time of a forward pass over the batch in milliseconds; None where it was not timed.
    """

    skip: tuple[str, ...]
    kl: float
    weights: int
    ms: float | None


@torch.no_grad()
def fp8_offers(
    teacher: nn.Module, format: HiddenFormat, batch: Batch, timed: Callable[[Callable[[], object]], float] | None = None
) -> list[Offer]:
    """Return the cost of fp8 with 0, 1, 2, 4, ... parts of the layers left out, the costliest first, up to all.

    Each part alone is put into fp8 once; errors of parts are nearly independent, so that their divergences add up.
    Then parts are quantised for good, in the order of their divergence per weight (every weight costs the same
    arithmetic), and each offer is measured as a whole: a forward pass per part, and a dozen more.

    Args:
        teacher: The teacher in 16 or 32 bits, patched; all its parts are in fp8 afterwards.
        batch: Collated batch on the device: `input_ids`, `labels` [B, S].
        timed: Function that returns the milliseconds of a call; None to measure no time.

    Raises:
        ValueError: a model without a list of layers.
    """
    whole = unwrap_peft(teacher)
    before = Before(teacher, format, batch)
    price = dict[ModelPart, float]()
    for part in model_parts(whole):
        with in_fp8(whole, part):
            price[part] = before.moved() / part.weights
    parts = sorted(price, key=price.__getitem__, reverse=True)
    offers = []
    offered = {0, len(parts), *(2**n for n in range(len(parts).bit_length()))}
    for count in range(len(parts), -1, -1):
        if count < len(parts):
            quantise_part(whole, parts[count])
        if count in offered:
            names = sort_parts([part.name for part in parts[:count]])
            weights = sum(p.weights for p in parts[:count])
            ms = None if timed is None else timed(lambda: last_hidden(teacher, batch))
            offers.append(Offer(tuple(names), before.moved(), weights, ms))
    return offers[::-1]
