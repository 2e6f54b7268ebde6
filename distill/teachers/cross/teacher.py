"""A teacher with another tokenizer than the student's.

Each model reads the text by its own tokenizer; they are compared wherever both have read the same bytes (spans.py).
Figures are means over aligned spans: the divergence of spans.py at T = 1 in place of a KL, cross-entropies and
perplexities of the spans' texts, so that both models' are over the same bytes, and agreement where both find the same
token, by its bytes, likeliest.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from distill_kernels import LossTerm
from torch import nn

from distill.data.chat import with_template
from distill.data.load import Splits
from distill.models.head import LogitTransform, last_hidden
from distill.models.load import load_tokenizer
from distill.models.shape import Shape
from distill.models.work import Work
from distill.recipe import Data, Generate, ModelSection, Recipe, Student
from distill.teachers.base import (
    Batch,
    Collate,
    CutStudent,
    Footprint,
    FootprintContext,
    HeadCall,
    LossResult,
    OpenContext,
    Pairing,
    SmallerTeacher,
    TargetFormat,
    Teacher,
    TeacherSource,
)
from distill.teachers.cross.alignment import Shared
from distill.teachers.cross.data import CrossCollator, load_cross_data
from distill.teachers.cross.encode import Reader
from distill.teachers.cross.loss import CHUNK_SHARE, CrossTokenizerLoss, Spans
from distill.teachers.cross.vocabularies import Vocabularies, compare_by_bytes, readers_of, require_rows
from distill.teachers.hidden import HiddenFormat
from distill.teachers.losses import (
    DIVERGENCES,
    LogitTransforms,
    LossSpec,
    TargetLoss,
    build_loss,
    scaled_by_temperature,
)
from distill.teachers.measure import SPANS, Measure
from distill.teachers.model import LoadedTeacher, ModelSource
from distill.teachers.vocabulary import Match, Vocabulary, is_synthetic

CHUNK_COPIES = 24  # bytes of about six fp32 copies of a chunk's logits


class SpanTargets(NamedTuple):
    """The teacher's last hidden states over its own reading, and where they are compared.

    Attributes:
        hidden: [B, S', hidden].
        spans: aligned spans.
        student_ids: int64 [B, S]; likewise `teacher_ids` [B, S'].
    """

    hidden: torch.Tensor
    spans: Spans
    student_ids: torch.Tensor
    teacher_ids: torch.Tensor


class SpansFormat(TargetFormat):
    """Hidden states over another reading of the text, compared by aligned spans.

    Args:
        inner: of the teacher by itself.
        shared: the ids of the same tokens in both vocabularies.
    """

    measure = SPANS  # of no KL: a part of it is by size

    def __init__(self, inner: HiddenFormat, shared: Shared) -> None:
        self.inner = inner
        self.shared = tuple(torch.as_tensor(ids) for ids in shared)

    @property
    def terms(self) -> frozenset[str]:
        """Every divergence."""
        return DIVERGENCES

    def pair(self, student: LogitTransform, rows: int, vocab_size: int | None) -> Pairing:
        """Every token of both heads counts."""
        return Pairing(student, rows, None)

    def loss(self, section: LossSpec, pairing: Pairing) -> CrossTokenizerLoss:
        """The same terms over spans."""
        plain = build_loss(section, self.inner.transforms(pairing))
        return self.over_spans(plain.terms, pairing, plain.objective.temperature, scaled_by_temperature(plain))

    def over_spans(
        self, terms: Sequence[LossTerm], pairing: Pairing, temperature: float = 1.0, scaled: bool = True
    ) -> CrossTokenizerLoss:
        """A loss of these terms."""
        transforms = LogitTransforms(pairing.student, self.inner.transform)
        return CrossTokenizerLoss(terms, self.shared, temperature, scaled, **transforms)  # type: ignore[arg-type]

    def held_out(self, pairing: Pairing) -> TargetLoss:
        """The divergence of forward KL with its statistics, and that of reverse KL."""
        kinds = ("forward_kl", "reverse_kl")
        return HeldOutAcross(*(self.over_spans([LossTerm(kind, 1.0)], pairing) for kind in kinds))

    def apply(self, loss: TargetLoss, pairing: Pairing, call: HeadCall) -> LossResult:
        """The statistics are a span's each, [M]."""
        targets: Any = call.inputs.targets
        with self.inner.head.open() as teacher:
            return loss(
                call.hidden, call.head.weight, targets.hidden, teacher.weight, targets.spans, targets.student_ids,
                targets.teacher_ids, student_bias=call.head.bias, teacher_bias=teacher.bias,
                student_lora=call.head.lora, num_items=call.inputs.num_items, return_stats=call.inputs.statistics,
            )  # fmt: skip

    def needs_targets(self, loss: TargetLoss) -> bool:
        """Always: hard labels too are over spans."""
        return True


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


class CrossTeacher(Teacher):
    """A loaded teacher that reads by its own tokenizer; its batches come from `CrossCollator`.

    Args:
        inner: the teacher by itself, or a causal language model.
        shared: the ids of the same tokens in both vocabularies.
    """

    judges_new_rows = False

    def __init__(self, inner: LoadedTeacher | nn.Module, shared: Shared) -> None:
        self.inner = inner if isinstance(inner, LoadedTeacher) else LoadedTeacher(inner)
        self.models = self.inner.models
        self.format = SpansFormat(self.inner.format, shared)

    def collate(self, plain: Collate) -> Collate:
        """Batches with the teacher's reading and the spans."""
        return CrossCollator(plain, getattr(self.inner.model.config, "pad_token_id", None) or 0)

    def student_batch(self, batch: Batch, needs_targets: bool) -> dict[str, torch.Tensor]:
        """Without the teacher's reading."""
        if missing := sorted({"input_ids", "labels", "teacher_input_ids", "spans"} - set(batch)):
            raise ValueError(
                f"batch: expected {', '.join(missing)} too, as CrossCollator gives them; got {sorted(batch)}"
            )
        return {name: value for name, value in batch.items() if name != "spans" and not name.startswith("teacher_")}

    def targets(self, batch: Batch) -> SpanTargets:
        """The teacher's hidden states over its own reading."""
        reading = {name.removeprefix("teacher_"): value for name, value in batch.items() if name.startswith("teacher_")}
        spans = batch["spans"]
        return SpanTargets(
            last_hidden(self.inner.model, reading), Spans(spans[:, :2], spans[:, 2:]), batch["input_ids"],
            batch["teacher_input_ids"],
        )  # fmt: skip

    def work(self) -> Work | None:
        """Of one forward pass."""
        return self.inner.work()

    def parameters_text(self) -> str:
        """How many parameters."""
        return self.inner.parameters_text()

    def to(self, device: torch.device) -> None:
        """Move the model."""
        self.inner.to(device)

    def cut_student(self, section: Student, device: torch.device, dtype: torch.dtype) -> CutStudent:
        """A copy of some of its layers."""
        return self.inner.cut_student(section, device, dtype)

    @torch.no_grad()
    def prove(self, batch: Batch, student: nn.Module, pairing: Pairing) -> list[str]:
        """How much of what the teacher says is said in tokens that the student has."""
        targets = self.targets(batch)
        loss = self.format.over_spans([LossTerm("forward_kl", 1.0)], pairing)
        with self.inner.format.head.open() as head:
            share = loss.matched(targets.hidden, head, targets.teacher_ids, targets.spans, pairing.columns).item()
        matched = (
            f"{share:.1%} of the teacher's probability is on shared tokens, over {len(targets.spans.student):,} "
            "aligned places of held-out text; figures are means over such places"
        )
        return [f"{'matched':<12}{matched}"]

    def respond(self, prompts: Sequence[str], settings: Generate) -> list[str] | None:
        """Greedy answers, put by its own tokenizer."""
        return self.inner.respond(prompts, settings)

    @property
    def is_collective(self) -> bool:
        """Where it lies in shards."""
        return self.inner.is_collective

    def small(self, layers: Sequence[int]) -> CrossTeacher:
        """Of a copy with only these layers."""
        return CrossTeacher(self.inner.small(layers), Shared(*(ids.numpy() for ids in self.format.shared)))

    def fingerprint(self) -> dict[str, object]:
        """Of its weights."""
        return self.inner.fingerprint()


class CrossSource(TeacherSource):
    """The recipe's teacher beside a student with `vocabulary: cross`."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.inner = recipe, ModelSource(recipe)
        self.sections, self.shardable = self.inner.sections, self.inner.shardable

    @property
    def config_section(self) -> ModelSection:
        """The model itself."""
        return self.inner.section

    @property
    def tokenizer_section(self) -> ModelSection:
        """The model itself."""
        return self.inner.section

    def shapes(self) -> list[Shape]:
        """Its own."""
        return self.inner.shapes()

    def vocabulary(self) -> CrossVocabulary:
        """Each model reads by its own tokenizer."""
        return CrossVocabulary(self.recipe, self.inner.section)

    def measure(self) -> Measure:
        """Means over aligned spans, of no KL."""
        return SPANS

    def problems(self, *, cuda: bool, sharded: bool) -> list[str]:
        """Those of the model."""
        return self.inner.problems(cuda=cuda, sharded=sharded)

    def footprint(self, context: FootprintContext) -> Footprint:
        """The model's; the loss's chunks are cut by the device's memory."""
        return self.inner.footprint(context)._replace(
            workspace=context.memory_bytes / CHUNK_SHARE * CHUNK_COPIES, wide_head_gradient=True
        )

    def smaller(self) -> list[SmallerTeacher]:
        """In host memory: fp8 does not work across tokenizers."""
        return self.inner.smaller(fp8=False)

    def title(self) -> str:
        """The model's name."""
        return self.inner.title()

    def size_text(self) -> str:
        """Parameters."""
        return self.inner.size_text()

    def open(self, context: OpenContext, vocabulary: Vocabulary) -> CrossTeacher:
        """Load the model."""
        assert isinstance(vocabulary, CrossVocabulary)
        return CrossTeacher(self.inner.open(context, vocabulary), vocabulary.vocabularies.shared)


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
        """There are no random tokens."""
        return None

    def read(self, data: Data, seed: int) -> Splits:
        """Rows that hold both readings."""
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
