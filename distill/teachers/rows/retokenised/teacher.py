"""A teacher with another tokenizer than the student's.

Each model reads the text by its own tokenizer; they are compared wherever both have read the same bytes (spans.py).
Figures are means over aligned spans: the divergence of spans.py at T = 1 in place of a KL, cross-entropies and
perplexities of the spans' texts, so that both models' are over the same bytes, and top-1 agreement: both models' most
probable tokens have the same bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from distill_kernels import LossTerm
from torch import nn

from distill.data.chat import with_template
from distill.data.load import Splits
from distill.models.head import LogitTransform
from distill.models.loading import load_tokenizer
from distill.objectives.hidden import HiddenFormat
from distill.objectives.losses import HeldOutLoss, LossSpec, TargetLoss, build_loss
from distill.objectives.measure import KL, SPANS, DivergenceUnit
from distill.objectives.span_loss import CHUNK_SHARE, ELEMENT_BYTES, CrossTokenizerLoss, Spans, SpanTargets
from distill.objectives.targets import (
    Batch,
    HeadForward,
    LossResult,
    TargetFormat,
    TargetProperties,
    VocabularyAlignment,
)
from distill.recipe import Data
from distill.teachers.base import Constructor, Teacher
from distill.teachers.footprint import Footprint, FootprintContext
from distill.teachers.load_context import LoadContext
from distill.teachers.rows.reading import ReadingPlan, ReadingTeacher
from distill.teachers.rows.retokenised.alignment import Shared
from distill.teachers.rows.retokenised.answers import TeacherReader
from distill.teachers.rows.retokenised.data import CrossColumns, load_cross_data
from distill.teachers.rows.retokenised.encode import TokenisedReader
from distill.teachers.rows.retokenised.vocabularies import Vocabularies, compare_by_bytes, readers_of, require_rows
from distill.teachers.vocabulary import Match, Vocabulary

NEEDS_HIDDEN_STATES = "student.vocabulary: cross compares whole distributions; expected hidden states, got top k"


class SpansFormat(TargetFormat):
    """Hidden states over another reading of the text, compared by aligned spans.

    Args:
        inner: format of the inner teacher.
        shared: the ids of the same tokens in both vocabularies.
    """

    def __init__(self, inner: HiddenFormat, shared: Shared) -> None:
        self.inner = inner
        # no KL: one part compares sorted probabilities; a span's tokens need not all have labels; hard labels too are
        # over spans
        self.properties = TargetProperties(
            inner.properties.columns, SPANS, labels_are_tokens=False, needed_by_hard_labels=True
        )
        self.shared = tuple(torch.as_tensor(ids) for ids in shared)

    def pair(self, student: LogitTransform, rows: int, vocab_size: int | None) -> VocabularyAlignment:
        """Return a pairing over every token of both heads."""
        return VocabularyAlignment(student, rows, None)

    def loss(self, section: LossSpec, alignment: VocabularyAlignment) -> CrossTokenizerLoss:
        return CrossTokenizerLoss(build_loss(section, self.inner.transforms(alignment)), self.shared)

    def held_out(self, alignment: VocabularyAlignment) -> TargetLoss:
        return HeldOutLoss(lambda term: self.loss([term], alignment))

    def apply(self, loss: TargetLoss, alignment: VocabularyAlignment, call: HeadForward) -> LossResult:
        """Return the loss; statistics have an entry per span, [M]."""
        assert isinstance(loss, CrossTokenizerLoss | HeldOutLoss)
        weights = call.inputs.token_weights
        if weights is not None:  # spans are in the order of their labels, at their first tokens
            weights = weights.flatten()[call.trained_rows()]
        with self.inner.head.open() as teacher:
            result: LossResult = loss(
                call.hidden,
                call.head,
                teacher,
                call.inputs.targets,
                num_items=call.inputs.num_items,
                return_stats=call.inputs.statistics,
                span_weights=weights,
            )
        return result


class CrossTeacher(ReadingTeacher):
    """A teacher that reads by its own tokenizer.

    Args:
        teacher: the inner teacher, with hidden states and a head, or a causal language model.
        shared: the ids of the same tokens in both vocabularies.

    Raises:
        ValueError: it gives K tokens of each distribution, which are of another vocabulary than the student's.
    """

    reading = "retokenised"
    reads = CrossColumns
    needed = ("teacher_input_ids", "spans")
    only_for_rollouts = ("answer_starts",)

    def __init__(self, teacher: Teacher | nn.Module, shared: Shared) -> None:
        super().__init__(teacher)
        if not isinstance(self.inner.format, HiddenFormat):
            raise ValueError(NEEDS_HIDDEN_STATES)
        self.hidden = self.inner.format
        self.shared = shared
        self.format = self.spans = SpansFormat(self.hidden, shared)

    def targets(self, batch: Batch) -> SpanTargets:
        spans = batch["spans"]
        hidden = self.inner.targets(self.inner_batch(batch))
        assert isinstance(hidden, torch.Tensor)
        return SpanTargets(hidden, Spans(spans[:, :2], spans[:, 2:]), batch["input_ids"], batch["teacher_input_ids"])

    @torch.no_grad()
    def validate_first_batch(
        self, batch: Batch, student: nn.Module | None, alignment: VocabularyAlignment
    ) -> list[str]:
        """Check the inner teacher, and report the share of its probability on tokens that the student has."""
        lines = self.inner.validate_first_batch(self.inner_batch(batch), None, alignment)
        targets = self.targets(batch)
        loss = self.spans.loss([LossTerm("forward_kl", 1.0)], alignment)
        with self.hidden.head.open() as head:
            share = loss.matched(targets, head, alignment.columns).item()
        matched = (
            f"{share:.1%} of the teacher's probability is on shared tokens, over {len(targets.spans.student):,} "
            "aligned places of held-out text; figures are means over such places"
        )
        return [*lines, f"{'matched':<12}{matched}"]

    def constructor(self) -> Constructor:
        return CrossTeacher, (self.inner, self.shared)

    def truncated_copy(self, layers: Sequence[int]) -> CrossTeacher:
        return CrossTeacher(self.inner.truncated_copy(layers), self.shared)


class CrossPlan(ReadingPlan):
    """The plan of a teacher for a student with `vocabulary: cross`."""

    reads = CrossColumns

    def vocabulary(self) -> CrossVocabulary:
        return CrossVocabulary(self)

    def measure(self) -> DivergenceUnit:
        return SPANS

    def loss_problems(self) -> list[str]:
        # only a cache tells by its file what it holds; every other teacher of K tokens is refused by its settings
        of_k_tokens = self.inner.measure() != KL and not self.inner.is_to_be_made()
        return [NEEDS_HIDDEN_STATES] if of_k_tokens else super().loss_problems()

    def footprint(self, context: FootprintContext) -> Footprint:
        workspace = context.memory_bytes / CHUNK_SHARE * ELEMENT_BYTES
        return self.inner.footprint(context)._replace(workspace=workspace, wide_head_gradient=True)

    def open(self, context: LoadContext, vocabulary: Vocabulary) -> CrossTeacher:
        assert isinstance(vocabulary, CrossVocabulary)
        return CrossTeacher(self.inner.open(context, vocabulary.of_backend()), vocabulary.vocabularies.shared)


class CrossVocabulary(Vocabulary):
    """Two tokenizers: the student's makes the data, the teacher's a second reading of them."""

    def __init__(self, source: CrossPlan) -> None:
        recipe = source.recipe
        if recipe.data.is_synthetic:
            raise ValueError(
                f"data.source: {recipe.data.source} has no text, by which student.vocabulary: cross compares"
            )
        self.recipe = recipe
        self.source = source
        self.inner = source.inner.vocabulary()
        self.tokenizer = with_template(load_tokenizer(recipe.student, "student"), recipe.data)
        self.student_tokenizer = self.tokenizer
        self.teacher_tokenizer = self.inner.teacher_tokenizer

    @functools.cached_property
    def readers(self) -> tuple[TokenisedReader, TokenisedReader]:
        return readers_of(
            self.tokenizer, self.teacher_tokenizer, self.recipe.data, self.recipe.teacher.chat_template_kwargs
        )

    @functools.cached_property
    def vocabularies(self) -> Vocabularies:
        return compare_by_bytes(*self.readers)

    def tokenizers(self) -> list[Any]:
        """Return the `TokenisedReader`s of the teacher and the student."""
        return list(reversed(self.readers))

    @property
    def id_bound(self) -> int | None:
        return None

    def of_backend(self) -> Vocabulary:
        return self.inner

    def read(self, data: Data, seed: int) -> Splits:
        kwargs = self.recipe.teacher.chat_template_kwargs
        splits = load_cross_data(data, self.tokenizer, self.teacher_tokenizer, seed=seed, teacher_kwargs=kwargs)
        self.source.note_data(splits)
        return splits

    def prepare(self) -> None:
        """Check that both tokenizers' tokens are bytes; ValueError otherwise."""
        _ = self.readers

    def answer_readers(self) -> dict[int | None, TeacherReader]:
        return {None: TeacherReader(*self.readers)}

    def fit(self, student: Any) -> None:
        """Leave the student's tokens as they are."""

    def match(self, teacher_rows: list[int], student_rows: int) -> Match:
        for reader, rows in zip(self.readers, (student_rows, teacher_rows[0]), strict=True):
            require_rows(reader, rows)
        return Match(None, str(self.vocabularies))
