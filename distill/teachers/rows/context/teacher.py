"""Context distillation: a teacher that reads the student's answers after a prompt of its own.

The prompt holds a context that the student lacks, or the chat template renders it with other variables, such as a
thinking teacher beside a student that does not think.

The teacher may be any other, loaded, served or stored, or the student's own checkpoint, which then differs from the
student only by what it reads (self-distillation). Its outputs are moved to the student's positions that predict the
same tokens, so that every loss takes them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from distill.data.load import Splits
from distill.generation.tasks import TaskQuestions
from distill.objectives.targets import Batch, Targets, VocabularyAlignment
from distill.recipe import Data, Generate
from distill.recipe.teachers import TeacherPrompt
from distill.teachers.base import Constructor, Prompt, Teacher, TeacherPlan
from distill.teachers.footprint import Footprint, FootprintContext
from distill.teachers.load_context import LoadContext
from distill.teachers.rows.context.data import ContextColumns, context_of_row, load_context_data
from distill.teachers.rows.reading import ReadingPlan, ReadingTeacher, at_positions
from distill.teachers.vocabulary import Vocabulary


class ContextTeacher(ReadingTeacher):
    """A teacher with a prompt of its own.

    Args:
        teacher: the inner teacher, or a causal language model.
        prompt: The teacher's prompts, for `respond`; None where that is not used.
    """

    reading = "context"
    reads = ContextColumns
    needed = ("teacher_input_ids", "teacher_rows")

    def __init__(self, teacher: Teacher | nn.Module, prompt: TeacherPrompt | None = None) -> None:
        super().__init__(teacher)
        self.prompt = prompt

    def targets(self, batch: Batch) -> Targets:
        targets = self.inner.targets(self.inner_batch(batch))
        return at_positions(targets, batch["teacher_rows"], batch["valid_rows"], batch["input_ids"])

    def validate_first_batch(
        self, batch: Batch, student: nn.Module | None, alignment: VocabularyAlignment
    ) -> list[str]:
        """Check the inner teacher on the student's rows, and report how much more the teacher reads."""
        mine = batch["input_ids"].numel()
        other = batch["teacher_input_ids"].numel()
        line = (
            f"the teacher reads {other:,} tokens where the student reads {mine:,} (first held-out batch, with "
            f"padding); the {len(batch['valid_rows']):,} that are trained on are the same for both"
        )
        own = (self.student_batch(batch, True), student) if self.models else (self.inner_batch(batch), None)
        return [*self.inner.validate_first_batch(*own, alignment), f"{'context':<12}{line}"]

    def choose(self, questions: TaskQuestions) -> list[str] | None:
        """Return nothing: the options would stand after the context, or after another template."""
        return None

    def respond(self, prompts: Sequence[Prompt], settings: Generate) -> list[str] | None:
        """Return responses after a context that is the same for all; None where it depends on a row of the data."""
        if self.prompt is None or getattr(self.inner.tokenizer, "chat_template", None) is None:
            return None
        context = self.prompt.context
        if context is None:  # the tokenizer of the teacher's prompts has their variables of the chat template
            return self.inner.respond(prompts, settings)
        if context.columns or context.of_the_run or not all(isinstance(prompt, str) for prompt in prompts):
            return None
        place = context.place
        wrap = {"system": "{1}", "before": "{0}\n\n{1}", "after": "{1}\n\n{0}"}.get(place, "{0}")
        turns: list[Prompt] = []
        for prompt in prompts:
            text = context_of_row(context, {}, str(prompt))
            system = [{"role": "system", "content": text}] if place == "system" and text else []
            content = wrap.format(text, prompt) if text else str(prompt)
            turns.append([*system, {"role": "user", "content": content}])
        return self.inner.respond(turns, settings)

    def constructor(self) -> Constructor:
        return ContextTeacher, (self.inner, self.prompt)

    def truncated_copy(self, layers: Sequence[int]) -> ContextTeacher:
        return ContextTeacher(self.inner.truncated_copy(layers), self.prompt)


class ContextPlan(ReadingPlan):
    """The plan of a teacher that reads after prompts of its own."""

    reads = ContextColumns

    def __init__(self, inner: TeacherPlan, prompt: TeacherPrompt) -> None:
        super().__init__(inner)
        self.prompt = prompt

    def vocabulary(self) -> Vocabulary:
        inner = self.inner.vocabulary()

        def read(data: Data, seed: int) -> Splits:
            splits = load_context_data(data, inner.tokenizer, self.prompt, seed=seed)
            self.note_data(splits)
            return splits

        return inner.with_reader(read)

    def footprint(self, context: FootprintContext) -> Footprint:
        plain = self.inner.footprint(context)
        return plain._replace(token_bytes=2 * plain.token_bytes)

    def title(self) -> str:
        own = "a chat template's variables" if self.prompt.context is None else "a context"
        return f"{self.inner.title()} with {own} of its own"

    def open(self, context: LoadContext, vocabulary: Vocabulary) -> ContextTeacher:
        return ContextTeacher(self.inner.open(context, vocabulary), self.prompt)
