"""A loaded teacher that reads the student's answers after a prompt of its own: context distillation.

The teacher may be another model, or the student's own checkpoint, which then differs from the student by what it reads
alone (self-distillation): frozen, or following the student as a running average of its weights.

Its hidden states are spread to the positions of the student's that predict the same tokens, so that the losses of
hidden states take them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from distill.core.ranks import is_first
from distill.data.chat import ChatOptions, load_template
from distill.data.formats import Format
from distill.data.load import Splits, load_rows
from distill.generation.answers import generate
from distill.models.average import RunningAverage
from distill.models.head import last_hidden
from distill.recipe import Data, Generate, Part, Recipe
from distill.recipe import Teacher as TeacherSection
from distill.recipe.models import Context
from distill.recipe.teachers import describe_teacher
from distill.teachers.base import Batch, Collate, OpenContext, Pairing
from distill.teachers.cache.top_k import spread
from distill.teachers.context.data import ContextCollator, ContextEncoder, ContextReport, filled
from distill.teachers.footprint import Footprint, FootprintContext
from distill.teachers.hidden import HiddenFormat
from distill.teachers.model import LoadedTeacher, ModelSource, shortened
from distill.teachers.reading import PREFIX, reading_of, without_reading
from distill.teachers.vocabulary import Vocabulary


class ContextFormat(HiddenFormat):
    """Hidden states over another reading of the rows, at the student's positions."""


class ContextTeacher(LoadedTeacher):
    """A loaded teacher with a prompt of its own; its batches come from `ContextCollator`.

    Args:
        teacher: as it is loaded; a causal language model too.
        context: what it reads, for the answers it is asked for; None where it is not asked.
        ema: the share of itself that it keeps where it follows the student; None for a frozen one.
    """

    prefix = PREFIX

    def __init__(
        self, teacher: LoadedTeacher | nn.Module, context: Context | None = None, ema: float | None = None
    ) -> None:
        given = teacher if isinstance(teacher, LoadedTeacher) else LoadedTeacher(teacher)
        field = next(iter(given.models))
        super().__init__(given.model, field=field, tokenizer=given.tokenizer, fp8=given.fp8, skip=given.skip)
        self.context, self.ema = context, ema
        self.average = None if ema is None else RunningAverage(self.model, ema)
        self.format = ContextFormat(self.hidden.head, self.hidden.transform)

    def collate(self, plain: Collate) -> Collate:
        return ContextCollator(plain, getattr(self.model.config, "pad_token_id", None) or 0)

    def student_batch(self, batch: Batch, needs_targets: bool) -> dict[str, torch.Tensor]:
        return without_reading(batch, ("teacher_input_ids", "teacher_rows"), "ContextCollator")

    def targets(self, batch: Batch) -> torch.Tensor:
        """Its last hidden states [B, S, hidden] at the student's positions; 0 where nothing is learned."""
        shape = batch["input_ids"].shape
        reading = {**reading_of(batch), "valid_rows": batch["teacher_rows"]}
        hidden = last_hidden(self.model, reading).flatten(0, 1)[batch["teacher_rows"]]
        return spread(hidden, batch["valid_rows"], shape)

    def prove(self, batch: Batch, student: nn.Module, pairing: Pairing) -> list[str]:
        """What fp8 costs on the student's rows, and how much more the teacher reads."""
        own, other = (batch[name].numel() for name in ("input_ids", "teacher_input_ids"))
        line = (
            f"the teacher reads {other:,} tokens where the student reads {own:,} (first held-out batch, with padding); "
            f"the {len(batch['valid_rows']):,} that are learned are the same to both"
        )
        return [*super().prove(self.student_batch(batch, True), student, pairing), f"{'context':<12}{line}"]

    def respond(self, prompts: Sequence[str], settings: Generate) -> list[str] | None:
        """After a context that is the same for all; None where it depends on a row, which no prompt here has."""
        if self.context is None or self.context.columns or getattr(self.tokenizer, "chat_template", None) is None:
            return None
        if not (is_first() or self.is_collective):
            return None
        text, place = filled(self.context, {}), self.context.place
        system = [{"role": "system", "content": text}] if place == "system" else []
        wrap = {"system": "{1}", "before": "{0}\n\n{1}", "after": "{1}\n\n{0}"}[place]
        turns = [[*system, {"role": "user", "content": wrap.format(text, prompt)}] for prompt in prompts]
        return generate(self.model, self.tokenizer, turns, settings.max_new_tokens)

    def small(self, layers: Sequence[int]) -> ContextTeacher:
        return ContextTeacher(shortened(self.model, layers), self.context, self.ema)

    def follow(self, student: nn.Module) -> None:
        if self.average is not None:
            self.average.follow(student)

    def save(self, checkpoint: Path) -> None:
        if self.average is not None:
            self.average.save(checkpoint)

    def restore(self, checkpoint: Path) -> None:
        if self.average is not None:
            self.average.restore(checkpoint)


class ContextSource(ModelSource):
    """The recipe's teacher with a context, or one of several; arguments as of `ModelSource`."""

    def __init__(self, recipe: Recipe, section: TeacherSection | None = None, field: str = "teacher") -> None:
        super().__init__(recipe, section or describe_teacher(recipe).members["teacher"], field)

    def vocabulary(self) -> ContextVocabulary:
        return ContextVocabulary(self.recipe, self.section)

    def footprint(self, context: FootprintContext) -> Footprint:
        """The model's, its hidden states over both readings, and a running average in float32 of narrow weights."""
        plain, size = super().footprint(context), context.precision.teacher.itemsize
        average = 4 * self.meta().shape.parameters if self.section.ema is not None and size < 4 else 0
        return plain._replace(weights=plain.weights + average, token_bytes=2 * plain.token_bytes)

    def title(self) -> str:
        return f"{super().title()} with a context of its own"

    def open(self, context: OpenContext, vocabulary: Vocabulary) -> ContextTeacher:
        if self.section.ema is not None and context.sharing.student_sharded:
            raise ValueError(f"{self.field}.ema: a running average needs the student whole; set parallel.strategy: ddp")
        return ContextTeacher(super().open(context, vocabulary), self.section.context, self.section.ema)


class ContextVocabulary(Vocabulary):
    """One tokenizer, and two prompts to each answer."""

    def read(self, data: Data, seed: int) -> Splits:
        template, context = load_template(data.chat_template, self.tokenizer), self.recipe.teacher.context
        assert context is not None

        def encoder(format: Format, part: Part) -> ContextEncoder:
            own = part.data
            options = ChatOptions.of(own)
            made = ContextEncoder(self.tokenizer, format, template, max_length=own.max_length, options=options)
            return made.after(context)

        return load_rows(data, encoder, [template], seed=seed, report_type=ContextReport)
