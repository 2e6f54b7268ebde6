"""A teacher with another tokenizer than the student's.

Each model reads the text by its own tokenizer; they are compared wherever both have read the same bytes (spans.py).
Figures are means over aligned spans: the divergence of spans.py at T = 1 in place of a KL, cross-entropies and
perplexities of the spans' texts, so that both models' are over the same bytes, and agreement where both find the same
token, by its bytes, likeliest.
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
from distill.models.head import LogitTransform, last_hidden
from distill.models.load import load_tokenizer
from distill.recipe import Data, ModelSection, Recipe
from distill.teachers.base import Batch, Collate, HeadCall, LossResult, OpenContext, Pairing, TargetFormat
from distill.teachers.cross.alignment import Shared
from distill.teachers.cross.data import CrossCollator, load_cross_data
from distill.teachers.cross.encode import Reader
from distill.teachers.cross.loss import CHUNK_SHARE, ELEMENT_BYTES, CrossTokenizerLoss, Spans, SpanTargets
from distill.teachers.cross.vocabularies import Vocabularies, compare_by_bytes, readers_of, require_rows
from distill.teachers.footprint import Footprint, FootprintContext, SmallerTeacher
from distill.teachers.hidden import HiddenFormat
from distill.teachers.losses import HeldOutLoss, LossSpec, TargetLoss, build_loss
from distill.teachers.measure import SPANS, Measure
from distill.teachers.model import LoadedTeacher, ModelSource, shortened
from distill.teachers.reading import PREFIX, reading_of, without_reading
from distill.teachers.vocabulary import Match, Vocabulary, is_synthetic


class SpansFormat(TargetFormat):
    """Hidden states over another reading of the text, compared by aligned spans.

    Args:
        inner: of the teacher by itself.
        shared: the ids of the same tokens in both vocabularies.
    """

    measure = SPANS  # of no KL: a part of it is by size
    reads_valid_rows = False  # a span's tokens need not all have labels

    def __init__(self, inner: HiddenFormat, shared: Shared) -> None:
        self.inner = inner
        self.shared = tuple(torch.as_tensor(ids) for ids in shared)

    def pair(self, student: LogitTransform, rows: int, vocab_size: int | None) -> Pairing:
        """Every token of both heads counts."""
        return Pairing(student, rows, None)

    def loss(self, section: LossSpec, pairing: Pairing) -> CrossTokenizerLoss:
        return CrossTokenizerLoss(build_loss(section, self.inner.transforms(pairing)), self.shared)

    def held_out(self, pairing: Pairing) -> TargetLoss:
        return HeldOutLoss(lambda term: self.loss([term], pairing))

    def apply(self, loss: TargetLoss, pairing: Pairing, call: HeadCall) -> LossResult:
        """The statistics are a span's each, [M]."""
        with self.inner.head.open() as teacher:
            return loss(
                call.hidden, call.head, teacher, call.inputs.targets,
                num_items=call.inputs.num_items, return_stats=call.inputs.statistics,
            )  # fmt: skip

    def needs_targets(self, loss: TargetLoss) -> bool:
        """Always: hard labels too are over spans."""
        return True


class CrossTeacher(LoadedTeacher):
    """A loaded teacher that reads by its own tokenizer; its batches come from `CrossCollator`.

    Args:
        model, tokenizer: as of `LoadedTeacher`.
        shared: the ids of the same tokens in both vocabularies.
    """

    judges_new_rows = False
    prefix = PREFIX

    def __init__(self, model: nn.Module, shared: Shared, tokenizer: Any = None) -> None:
        super().__init__(model, tokenizer=tokenizer)
        self.shared = shared
        self.format = self.spans = SpansFormat(self.hidden, shared)

    def collate(self, plain: Collate) -> Collate:
        return CrossCollator(plain, getattr(self.model.config, "pad_token_id", None) or 0)

    def student_batch(self, batch: Batch, needs_targets: bool) -> dict[str, torch.Tensor]:
        return without_reading(batch, ("teacher_input_ids", "spans"), "CrossCollator")

    def targets(self, batch: Batch) -> SpanTargets:
        spans = batch["spans"]
        return SpanTargets(
            last_hidden(self.model, reading_of(batch)), Spans(spans[:, :2], spans[:, 2:]), batch["input_ids"],
            batch["teacher_input_ids"],
        )  # fmt: skip

    @torch.no_grad()
    def prove(self, batch: Batch, student: nn.Module, pairing: Pairing) -> list[str]:
        """How much of what the teacher says is said in tokens that the student has."""
        targets, loss = self.targets(batch), self.spans.loss([LossTerm("forward_kl", 1.0)], pairing)
        with self.hidden.head.open() as head:
            share = loss.matched(targets, head, pairing.columns).item()
        matched = (
            f"{share:.1%} of the teacher's probability is on shared tokens, over {len(targets.spans.student):,} "
            "aligned places of held-out text; figures are means over such places"
        )
        return [f"{'matched':<12}{matched}"]

    def small(self, layers: Sequence[int]) -> CrossTeacher:
        return CrossTeacher(shortened(self.model, layers), self.shared)


class CrossSource(ModelSource):
    """The recipe's teacher beside a student with `vocabulary: cross`."""

    def vocabulary(self) -> CrossVocabulary:
        return CrossVocabulary(self.recipe, self.section)

    def measure(self) -> Measure:
        return SPANS

    def footprint(self, context: FootprintContext) -> Footprint:
        """The model's; the loss's chunks are cut by the device's memory."""
        workspace = context.memory_bytes / CHUNK_SHARE * ELEMENT_BYTES
        return super().footprint(context)._replace(workspace=workspace, wide_head_gradient=True)

    def smaller(self, family: str | None = None) -> list[SmallerTeacher]:
        """In host memory: fp8 does not work across tokenizers."""
        return [way for way in super().smaller(family) if way.same_targets]

    def open(self, context: OpenContext, vocabulary: Vocabulary) -> CrossTeacher:
        assert isinstance(vocabulary, CrossVocabulary)
        return CrossTeacher(self.load(context), vocabulary.vocabularies.shared, vocabulary.teacher_tokenizer)


class CrossVocabulary(Vocabulary):
    """Two tokenizers: the student's makes the data, the teacher's a second reading of them."""

    def __init__(self, recipe: Recipe, teacher: ModelSection) -> None:
        if is_synthetic(recipe.data):
            raise ValueError(
                f"data.source: {recipe.data.source} has no text, by which student.vocabulary: cross compares"
            )
        self.recipe = recipe
        template = recipe.data.chat_template
        self.tokenizer = with_template(load_tokenizer(recipe.student, "student"), template)
        self.student_tokenizer = self.tokenizer
        self.teacher_tokenizer = with_template(load_tokenizer(teacher), template)

    @functools.cached_property
    def readers(self) -> tuple[Reader, Reader]:
        """How student and teacher read."""
        return readers_of(self.tokenizer, self.teacher_tokenizer, self.recipe.data.chat_template)

    @functools.cached_property
    def vocabularies(self) -> Vocabularies:
        """What the two share."""
        return compare_by_bytes(*self.readers)

    def tokenizers(self) -> list[Any]:
        """`Reader`s: the teacher's and the student's."""
        return list(reversed(self.readers))

    @property
    def id_bound(self) -> int | None:
        return None

    def read(self, data: Data, seed: int) -> Splits:
        return load_cross_data(data, self.tokenizer, self.teacher_tokenizer, seed=seed)

    def prepare(self) -> None:
        """Both tokenizers must be of bytes."""
        _ = self.readers

    def fit(self, student: Any) -> None:
        """The student keeps its tokens."""

    def match(self, teacher_rows: list[int], student_rows: int) -> Match:
        """By the bytes of tokens."""
        for reader, rows in zip(self.readers, (student_rows, teacher_rows[0]), strict=True):
            require_rows(reader, rows)
        return Match(None, str(self.vocabularies))
