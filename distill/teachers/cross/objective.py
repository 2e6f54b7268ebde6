"""A student that keeps its own tokenizer: what a run with `student.vocabulary: cross` loads, and its objective.

Each model reads the text by its own tokenizer; they are compared wherever both have read the same bytes
(cross_spans.py). Figures are means over aligned spans: the divergence of cross_spans.py at T = 1 in place of a KL,
cross-entropies and perplexities of the spans' texts, so that both models' are over the same bytes, and agreement where
both find the same token, by its bytes, likeliest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from distill_kernels import FusedDistillationLoss, LossTerm
from torch import nn

from distill.data.chat import load_template, with_template
from distill.models.head import HeadWeights, find_head, whole
from distill.models.load import load_tokenizer
from distill.models.precision import Precision
from distill.recipe import Recipe
from distill.teachers.cross.alignment import Shared, shared_tokens
from distill.teachers.cross.data import CrossCollator
from distill.teachers.cross.encode import Reader, end_pairs
from distill.teachers.cross.loss import CrossTokenizerLoss, Spans
from distill.teachers.measure import SPANS, Measure
from distill.teachers.objective import Comparison, DistillationObjective, Reading, last_hidden


class Vocabularies(NamedTuple):
    """What two vocabularies share.

    Attributes:
        shared: the ids of the same tokens.
        ends: of these the pairs that end a turn or a text, whatever their texts.
        student_tokens, teacher_tokens: how many there are of each.
    """

    shared: Shared
    ends: tuple[tuple[int, int], ...]
    student_tokens: int
    teacher_tokens: int

    def __str__(self) -> str:
        count = len(self.shared.student)
        return (
            f"two tokenizers, compared by bytes: {count:,} tokens are the same, {count / self.student_tokens:.1%} of "
            f"the student's {self.student_tokens:,} and {count / self.teacher_tokens:.1%} of the teacher's "
            f"{self.teacher_tokens:,}; the rest by sorted probabilities"
        )


def compare_by_bytes(student: Reader, teacher: Reader, rows: tuple[int, int] | None = None) -> Vocabularies:
    """What the vocabularies of two readers share.

    Args:
        student, teacher: how both models read.
        rows: of the student's head and of the teacher's, where they are known.

    Raises:
        ValueError: a tokenizer whose ids have no row in its model. Added tokens that no text needs may lack one.
    """
    for reader, count in zip((student, teacher), rows or (), strict=False):
        added = reader.tokenizer.added_tokens_decoder
        last = max(n for n in reader.tokenizer.get_vocab().values() if n not in added or n == reader.end)
        if last >= count:
            raise ValueError(
                f"{reader.side}.model: expected a row of the head for each of its tokenizer's ids, up to {last:,}; "
                f"came {count:,} rows"
            )
    ends = end_pairs(student, teacher)
    return Vocabularies(
        shared_tokens(student.spelled, teacher.spelled, ends),
        ends,
        sum(token is not None for token in student.spelled),
        sum(token is not None for token in teacher.spelled),
    )


def readers_of(student_tokenizer: Any, teacher_tokenizer: Any, chat_template: str) -> tuple[Reader, Reader]:
    """How both models read; `chat_template` as of the recipe's data section, `tokenizer` meaning each its own.

    Raises:
        ValueError: a tokenizer whose tokens are not bytes, or a template that is none.
    """
    return (
        Reader(student_tokenizer, load_template(chat_template, student_tokenizer), "student.model"),
        Reader(teacher_tokenizer, load_template(chat_template, teacher_tokenizer), "teacher.model"),
    )


def load_cross(
    recipe: Recipe, tokenizer: Any, device: torch.device, precision: Precision, sharing: Any, choices: Any
) -> Any:
    """What `load_models` gives, for a student with a tokenizer of its own (`tokenizer`).

    Raises:
        ValueError: a tokenizer whose tokens are not bytes, terms that do not work across tokenizers.
    """
    from distill.teachers.opening import load_models

    for name in ("label_smoothing", "z_loss"):
        if getattr(recipe.loss, name):
            raise ValueError(
                f"loss.{name}: expected 0 with student.vocabulary: cross, whose cross-entropy is that of spans of "
                f"text; came {getattr(recipe.loss, name)}"
            )
    teacher_tokenizer = with_template(load_tokenizer(recipe.teacher), recipe.data.chat_template)
    readers = readers_of(tokenizer, teacher_tokenizer, recipe.data.chat_template)  # before gigabytes are read
    apart = recipe.model_copy(update={"student": recipe.student.model_copy(update={"vocabulary": "keep"})})
    models = load_models(apart, None, device, precision, sharing, choices)
    rows = [len(find_head(model).linear.weight) for model in (models.student, models.teacher)]  # type: ignore[arg-type]
    found = compare_by_bytes(*readers, (rows[0], rows[1]))
    return models._replace(
        vocab_size=None,
        tokenizer=tokenizer,
        teacher_tokenizer=teacher_tokenizer,
        vocabulary=str(found),
        objective=functools.partial(CrossObjective, shared=found.shared),
    )


class Heard(NamedTuple):
    """What the teacher says of a batch: its last hidden states, and where they are compared.

    Attributes:
        hidden: [B, S', hidden].
        spans: aligned spans.
        student_ids: int64 [B, S]; likewise `teacher_ids` [B, S'].
    """

    hidden: torch.Tensor
    spans: Spans
    student_ids: torch.Tensor
    teacher_ids: torch.Tensor


class CrossObjective(DistillationObjective):
    """`DistillationObjective` for two tokenizers; its batches come from `CrossCollator`.

    Args:
        teacher, student, loss: as of `DistillationObjective`.
        vocab_size: plays no part: every token of both heads counts.
        shared: the ids of the same tokens in both vocabularies.
    """

    def __init__(
        self, teacher: nn.Module, student: nn.Module, loss: Any = "forward_kl", *, shared: Shared,
        vocab_size: int | None = None,
    ) -> None:  # fmt: skip
        self.shared = tuple(torch.as_tensor(ids) for ids in shared)
        super().__init__(teacher, student, loss)
        plain: FusedDistillationLoss = self.loss
        self.loss = self._across(
            plain.terms, plain.objective.temperature, self._scales(plain)
        )  # fmt: skip

    @staticmethod
    def _scales(plain: FusedDistillationLoss) -> bool:
        """Whether the divergences of a plain loss are multiplied by T^2."""
        o = plain.objective
        return o.weights != o.divergence_weights or o.temperature == 1.0

    def _across(self, terms: Any, temperature: float = 1.0, scaled: bool = True) -> CrossTokenizerLoss:
        return CrossTokenizerLoss(terms, self.shared, temperature, scaled, **self.reading.shapes())  # type: ignore[arg-type]

    def read(self, student: nn.Module, vocab_size: int | None) -> Reading:
        """As of `DistillationObjective`; no columns are cut."""
        return super().read(student, None)._replace(vocab_size=None)

    @property
    def columns(self) -> int:
        """Rows of the student's head."""
        return len(find_head(self.student).linear.weight)  # type: ignore[arg-type]

    @property
    def divergence(self) -> tuple[str | None, float]:
        """Never called a KL: a part of it is by size."""
        name, weight = super().divergence
        return None if name is None else self.measure.key, weight

    @property
    def measure(self) -> Measure:
        """Means over aligned spans, of no KL."""
        return SPANS

    def collator(self, plain: Callable[[list[Any]], dict[str, Any]]) -> Callable[[list[Any]], dict[str, Any]]:
        """Batches with the teacher's reading and the spans."""
        return CrossCollator(plain, getattr(self.teacher.config, "pad_token_id", None) or 0)

    def compare(
        self, inputs: Mapping[str, Any], num_items: torch.Tensor | int | None = None, *, statistics: bool = True
    ) -> dict[str, Any]:
        """As of `DistillationObjective`, for a batch of `CrossCollator`."""
        if missing := sorted({"input_ids", "labels", "teacher_input_ids", "spans"} - set(inputs)):
            raise ValueError(
                f"batch: expected {', '.join(missing)} too, as CrossCollator gives them; got {sorted(inputs)}"
            )
        own = {name: value for name, value in inputs.items() if name != "spans" and not name.startswith("teacher_")}
        return {**own, "comparison": Comparison(self.signal(inputs), num_items, statistics)}

    def signal(self, inputs: Mapping[str, Any]) -> Heard:
        """The teacher's hidden states over its own reading."""
        reading = {
            name.removeprefix("teacher_"): value for name, value in inputs.items() if name.startswith("teacher_")
        }
        spans = inputs["spans"]
        return Heard(
            last_hidden(self.teacher, reading), Spans(spans[:, :2], spans[:, 2:]), inputs["input_ids"],
            inputs["teacher_input_ids"],
        )  # fmt: skip

    def loss_of(
        self,
        hidden: torch.Tensor,
        head: HeadWeights,
        comparison: Comparison,
        labels: torch.Tensor,
        valid_rows: torch.Tensor | None,
    ) -> Any:
        """As of `DistillationObjective`; the statistics are a span's each, [M]."""
        heard: Heard = comparison.signal
        with whole(find_head(self.teacher)) as teacher_head:
            return self.loss(
                hidden, head.weight, heard.hidden, teacher_head.weight, heard.spans, heard.student_ids,
                heard.teacher_ids, student_bias=head.bias, teacher_bias=teacher_head.bias, student_lora=head.lora,
                num_items=comparison.num_items, return_stats=comparison.statistics,
            )  # fmt: skip

    def held_out_loss(self) -> Any:
        """The divergence of forward KL with its statistics, and that of reverse KL."""
        return HeldOutAcross(*(self._across([LossTerm(kind, 1.0)]) for kind in ("forward_kl", "reverse_kl")))

    @torch.no_grad()
    def describe(self, inputs: Mapping[str, Any]) -> str:
        """How much of what the teacher says is said in tokens that the student has, on a batch: a line."""
        heard = self.signal(inputs)
        with whole(find_head(self.teacher)) as head:
            share = self.loss.matched(heard.hidden, head, heard.teacher_ids, heard.spans, self.columns).item()
        return (
            f"{share:.1%} of the teacher's probability is on shared tokens, over {len(heard.spans.student):,} aligned "
            "places of held-out text; figures are means over such places"
        )


class HeldOutAcross(nn.Module):
    """Forward divergence with its statistics, and the reverse one as one statistic more."""

    def __init__(self, forward: CrossTokenizerLoss, reverse: CrossTokenizerLoss) -> None:
        super().__init__()
        self.ahead, self.reverse = forward, reverse
        self.terms, self.objective = forward.terms, forward.objective

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As `CrossTokenizerLoss.forward` with `return_stats`."""
        loss, statistics = self.ahead(*args, **kwargs)
        _, reverse = self.reverse(*args, **kwargs)
        return loss, (*statistics, reverse.divergence)
