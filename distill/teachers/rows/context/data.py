"""Data of context distillation: each response after the student's prompt, and after the teacher's.

A row holds the student's `input_ids`, `labels`, `position_ids` and what the teacher reads in their place,
`teacher_input_ids` and `teacher_position_ids`, document by document. From the first trained token on, both
readings of a document are the same tokens: they are aligned from their ends. `data.max_length` bounds both, and what
exceeds it is cut off both.

Where the chat template renders both prompts alike but for the context, the answers after it are the template's too, and
a row in which they differ is dropped. With other variables of the template (`teacher.chat_template_kwargs`) the
teacher's prompt is rendered and the student's answer follows: one example per turn, since a template may render later
turns of one conversation otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from distill.core.labels import IGNORE_INDEX, document_bounds
from distill.data.assistant_turns import RenderedChat
from distill.data.chat import ChatOptions, ChatTemplate, TrainingChat, template_of
from distill.data.collator import BatchRow, Collator
from distill.data.formats import RowFormat
from distill.data.load import Splits, load_rows
from distill.data.report import DataReport
from distill.data.row_counts import RowCounts
from distill.data.row_reader import ConversationSample
from distill.data.rows import RawRow as DataRow
from distill.data.rows import RowFault
from distill.data.tokenise import TOO_LONG, DocumentSlice, Encoder, MaskedText, RowBatch, TokenisedDocument, encodable
from distill.generation.rollout_contexts import prompt_variables
from distill.recipe import Context, Data, DataPart
from distill.recipe.context_template import render
from distill.recipe.teachers import TeacherPrompt
from distill.teachers.rows.reading import PREFIX, ReadingColumns

SHORT = 16  # characters: a shorter text may stand in a prompt by chance
LEAK = "the student's prompt holds what only the teacher reads"


class TwoPrompts(NamedTuple):
    """An answer after two prompts: int32 ids of both readings, the student's labels, and where it comes from."""

    ids: np.ndarray
    labels: np.ndarray
    teacher_ids: np.ndarray
    origin: int
    row: int
    message: int

    def columns(self) -> dict[str, np.ndarray]:
        return {"input_ids": self.ids, "labels": self.labels, "teacher_input_ids": self.teacher_ids}


class ContextEncoder(Encoder):
    """An encoder of both readings of a row, the student's and the teacher's. Arguments as of `Encoder`, and the
    teacher's prompts, set by `after`.

    Attributes:
        texts: Contexts by the number of the row, in place of those that the rows give; empty for no context.
    """

    columns: Mapping[str, tuple[str, ...]] = {"input_ids": (), "labels": (), "teacher_input_ids": ()}
    prompt: TeacherPrompt
    teacher_template: ChatTemplate | None

    def after(self, prompt: TeacherPrompt) -> ContextEncoder:
        """Return this encoder, with the teacher's prompts set.

        Raises:
            ValueError: the rows are running text, or prompts that a run has rendered and stored.
        """
        if self.format.kind == "text" or "rendered" in self.format.columns:
            raise ValueError(
                f"teacher.{'context' if prompt.context else 'chat_template_kwargs'}: expected prompts, with responses "
                f"or without, got {self.format} data; use chats, prompts with completions, or prompts alone"
            )
        self.prompt = prompt
        self.texts: Mapping[int, str] = {}
        self.teacher_template = self.template and self.template.with_kwargs(prompt.chat_template_kwargs)
        if prompt.context is not None:
            self.format = self.format.without(prompt.context.columns)  # only the teacher reads these
        return self

    def settings(self) -> list[object]:
        context, kwargs, _ = self.prompt
        return [*super().settings(), context and context.of_the_row, kwargs]

    def documents(self, batch: RowBatch, tally: RowCounts) -> Iterator[TokenisedDocument]:
        # First the texts of all rows in both readings, then their ids: the tokenizer takes many texts at once. Rows
        # with sampled ids are yielded on the way: their response is not tokenised anew.
        rows: list[MaskedText] = []
        others: list[MaskedText] = []
        for number, row in batch:
            with tally.row(number):
                sample = self.sample(row, tally)
                assert isinstance(row, dict)
                private, secrets = self._private(number, row, sample)
                if self.takes_ids(sample):
                    yield self._sampled(number, sample, private, secrets, tally)
                    continue
                sample = self.as_text(sample)
                tally.without_end += sample.truncated
                made = self.chat(sample, None if self.prompt.rendered_alike else self._per_turn())
                asked = self._for_teacher(sample, private)
                own = self.partly(number, sample, made)
                teacher = self.partly(number, asked, self._teacher_chat(sample, asked, made))
                pairs = list(zip(own, teacher, strict=False))  # a longer prompt may leave no room for the last turns
                for part, other in pairs:
                    prompt, answer = part.cut()
                    if answer != other.cut()[1]:
                        raise RowFault("the chat template renders the response differently after the teacher's context")
                    if any(secret in prompt for secret in secrets):
                        raise RowFault(LEAK, "the column of the prompt, or the messages, hold it too")
                rows += [part for part, _ in pairs]
                others += [other for _, other in pairs]
                tally.see_chat(made)
                tally.left_out += len(own) - len(pairs)
                tally.see_roles(sample.messages or ())
        # by the object: `encode_partly` leaves texts out, and a row may have several
        readings = dict(zip(map(id, rows), self._readings(others), strict=True))
        kept = set[int]()
        faults = dict[int, list[RowFault]]()
        for encoded in self.encode_partly(rows, tally):
            number = encoded.part.number
            whole = DocumentSlice(encoded.ids, encoded.labels, encoded.part.origin, number)
            try:
                both = self._both(whole, readings[id(encoded.part)], tally)
            except RowFault as fault:
                faults.setdefault(number, []).append(fault)
                continue
            kept.add(number)
            yield both._replace(message=encoded.last_message(len(both.ids)))
        self.count_faults(kept, faults, tally)

    def _private(self, number: int, row: DataRow, sample: ConversationSample) -> tuple[str, list[str]]:
        """Return the text that only the teacher reads of a row, and what of it no student's prompt may contain."""
        context = self.prompt.context
        if context is None:
            return "", []
        private = self.texts.get(number)
        if private is None:
            private = context_of_row(context, row, self._prompt_of(sample))
        return private, [secret for secret in _secrets(context, row, private) if len(secret) >= SHORT]

    def _prompt_of(self, sample: ConversationSample) -> Sequence[Mapping[str, Any]] | str:
        """Return the student's messages before the first response that is trained on, or its prompt."""
        if sample.messages is None:
            return sample.prompt or ""
        return sample.messages[: self._first_response(sample)]

    def _first_response(self, sample: ConversationSample) -> int:
        """Return the index of the first response that is trained on; of prompts alone the number of messages."""
        assert sample.messages is not None
        if self.format.kind == "prompts":  # whose response follows the last message
            return len(sample.messages)
        turns = [
            turn
            for turn, message in enumerate(sample.messages)
            if message["role"] == "assistant" and turn >= sample.first_trained
        ]
        if not turns:
            raise RowFault("no assistant turn")
        return turns[-1] if self.options.train_on == "last" else turns[0]

    def _sampled(
        self, number: int, sample: ConversationSample, private: str, secrets: Sequence[str], tally: RowCounts
    ) -> TwoPrompts:
        """Return the answer of a row of `distill sample` after both prompts: the ids that were sampled.

        Args:
            private: Text that only the teacher reads.
            secrets: What of it no student's prompt may contain.
        """
        piece = self.sampled_piece(number, sample, tally)
        assert sample.sampled is not None
        asked = self._for_teacher(sample, private)
        prompt = self.tokenizer.decode(sample.sampled.prompt)
        if any(secret in prompt for secret in secrets):
            raise RowFault(LEAK, "the column of the prompt, or the messages, hold it too")
        before = list[int]()
        if asked.messages is not None:
            assert self.teacher_template is not None
            text = self.teacher_template.prompt(asked.messages[:-1], asked.tools, asked.template_kwargs)
        else:
            text = asked.prompt or ""
            before = self.beginning
        ids = self.ids_of([encodable(text)])[0]
        teacher_prompt = ids if ids[: len(before)] == before else [*before, *ids]
        other = np.array([*teacher_prompt, *sample.sampled.completion], dtype=np.int32)
        return self._both(piece, other, tally)

    def _readings(self, parts: Sequence[MaskedText]) -> Iterator[np.ndarray]:
        """Yield the teacher's ids of each text, int32; templates include the tokens that begin and end a text."""
        texts = [part.text for part in parts]
        for part, ids in zip(parts, self.ids_of(texts) if texts else [], strict=True):
            before, last = ([], []) if part.templated else self.around(ids)
            yield np.array([*before, *ids, *last], dtype=np.int32)

    def _both(self, piece: DocumentSlice, other: np.ndarray, tally: RowCounts) -> TwoPrompts:
        """Return both readings of the student's whole document, cut where one of them has no more room."""
        ids = piece.ids
        labels = piece.labels
        answer = ids[int((labels != IGNORE_INDEX).argmax()) :]
        if len(other) <= len(answer) or not np.array_equal(other[len(other) - len(answer) :], answer):
            raise RowFault("the response has other tokens after the teacher's context", f"{len(answer)} tokens")
        # The answer ends both readings. The longer one says how many tokens go, and the same number goes from both
        # ends, so that what is left of the answer is the same in both.
        surplus = max(len(ids), len(other), self.max_length) - self.max_length
        keep = len(ids) - surplus
        other_keep = len(other) - surplus
        if keep < 2 or (labels[:keep] == IGNORE_INDEX).all():
            raise RowFault(f"{TOO_LONG}, the teacher's or the student's", f"{len(other)} tokens")
        tally.truncated += surplus > 0
        return TwoPrompts(
            ids[:keep], labels[:keep], other[:other_keep], piece.origin, row=piece.row, message=piece.message
        )

    def _per_turn(self) -> ChatOptions:
        return self.options if self.options.train_on == "last" else self.options._replace(train_on="each")

    def _teacher_chat(self, sample: ConversationSample, asked: ConversationSample, made: TrainingChat) -> TrainingChat:
        """Return the teacher's reading of the student's examples.

        Args:
            sample: The row, as the student reads it.
            asked: The row, as the teacher reads it.
            made: The student's examples.
        """
        if self.prompt.rendered_alike or sample.messages is None or asked.messages is None:
            return self.chat(asked, self._per_turn() if len(made.examples) > 1 else None)
        assert self.teacher_template is not None
        more = len(asked.messages) - len(sample.messages)  # a system message with the context
        examples = []
        for example in made.examples:
            # The template of the teacher renders the prompt alone; from the response on the text is the student's,
            # moved by the difference of the prompts' lengths. So the response has the same characters in both.
            turn = example.turns[0]
            begin = example.spans[0][0]
            prompt = self.teacher_template.prompt(asked.messages[: turn + more], asked.tools, asked.template_kwargs)
            moved = [(start - begin + len(prompt), end - begin + len(prompt)) for start, end in example.spans]
            examples.append(RenderedChat(prompt + example.text[begin:], moved, [turn + more] * len(moved)))
        return TrainingChat(examples)

    def _for_teacher(self, sample: ConversationSample, text: str) -> ConversationSample:
        """Return the sample with the context in its place; unchanged where there is none."""
        if self.prompt.context is None or not text:
            return sample
        text = encodable(text)
        place = self.prompt.context.place
        if sample.messages is None:
            prompt = sample.prompt or ""
            # the white space between prompt and response stays right before the response: its tokens may begin with it
            joint = prompt[len(prompt.rstrip()) :]
            joined = {"after": f"{prompt.rstrip()}\n\n{text}{joint}", "user": text + joint, "prompt": text + joint}
            return sample._replace(prompt=joined.get(place, f"{text}\n\n{prompt}"))
        roles = [message["role"] for message in sample.messages]
        first = self._first_response(sample)
        if place == "prompt":
            return sample._replace(
                messages=[{"role": "user", "content": text}, *sample.messages[first:]],
                first_trained=max(sample.first_trained - first + 1, 0),
            )
        holders = ("system", "developer") if place == "system" else ("user",)
        at = [turn for turn in range(first) if roles[turn] in holders]
        messages = list(sample.messages)
        if place == "system" and not at:
            return sample._replace(
                messages=[{"role": "system", "content": text}, *messages],
                first_trained=sample.first_trained + 1 if sample.first_trained else 0,
            )
        if not at:
            raise RowFault("no user message to place the teacher's context at")
        content = messages[at[-1]]["content"]
        joined = {"before": f"{text}\n\n{content}", "user": text}
        messages[at[-1]] = {**messages[at[-1]], "content": joined.get(place, f"{content}\n\n{text}")}
        return sample._replace(messages=messages)


def filled(context: Context, row: DataRow) -> str:
    """Return the context's template, filled with a row's columns.

    Raises:
        RowFault: a column is missing, empty or no text.
    """
    return "".join(text + ("" if column is None else _value(row, column)) for text, column in context.parts)


def context_of_row(context: Context, row: DataRow, prompt: Sequence[Mapping[str, Any]] | str) -> str:
    """Return the context of a row alone, without what a run adds to it; empty for none.

    Args:
        prompt: The student's messages before the response, or its prompt.

    Raises:
        RowFault: there is none, and no run can make one.
    """
    if context.syntax == "columns":
        try:
            return filled(context, row)
        except RowFault:
            if context.missing == "skip":
                raise
            return ""
    text = render(context.template, {"row": row, **prompt_variables(prompt)})
    if not text and context.missing == "skip" and not context.of_the_run:
        raise RowFault("nothing for the teacher's context", "teacher.context.template writes nothing for it")
    return text


def _value(row: DataRow, column: str) -> str:
    value = row.get(column)
    given = value if isinstance(value, list) else [value]
    parts = [part for part in given if isinstance(part, str) and part.strip()]
    if not parts or len(parts) < len(given):
        raise RowFault("nothing for the teacher's context", f"column {column!r} of teacher.context.template")
    return "\n\n".join(parts)


def _secrets(context: Context, row: DataRow, private: str) -> list[str]:
    """Return texts that no student prompt may contain: the columns'; all of a text that is only added."""
    if context.only_adds:
        return [_value(row, column).strip() for column in context.columns] or [private.strip()]
    values = [row.get(column) for column in context.columns]
    texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
    return [text.strip() for text in texts if isinstance(text, str)]


def context_room(data: Data, prompts: Iterable[TeacherPrompt | None]) -> int:
    """Return the tokens that rows leave for contexts that a run makes, for each response."""
    own = data.active_on_policy
    if own is None:
        return 0
    contexts = [prompt.context for prompt in prompts if prompt is not None and prompt.context is not None]
    return max((context.room or 2 * own.max_new_tokens for context in contexts if context.of_the_run), default=0)


def load_context_data(data: Data, tokenizer: Any, prompt: TeacherPrompt, *, seed: int) -> Splits:
    """Load data whose answers stand after the student's prompt and after the teacher's.

    Args:
        data: The recipe's `data` section.
    """
    template = template_of(data, tokenizer)
    if not prompt.rendered_alike:
        template_of(data, tokenizer, kwargs=prompt.chat_template_kwargs, field="teacher")  # reads them, or is refused

    def encoder(format: RowFormat, part: DataPart) -> ContextEncoder:
        options = ChatOptions.of(part.data)
        most = part.data.max_length
        return ContextEncoder(tokenizer, format, template, max_length=most, options=options).after(prompt)

    room = context_room(data, [prompt])
    return load_rows(data, encoder, [template], seed=seed, report_type=ContextReport, room=room)


class ContextReport(DataReport):
    """Report on the data, with the tokens that the teacher reads in addition."""

    def __str__(self) -> str:
        more = (self.teacher_tokens - self.tokens) / max(self.documents, 1)
        return f"{super().__str__()}\ncontext: {more:+,.1f} tokens per document in the teacher's rows"


class ContextColumns(ReadingColumns):
    """Columns of a teacher that reads another prompt; trained tokens have labels in its reading too."""

    def __call__(
        self, rows: Sequence[BatchRow], batch: Mapping[str, Any], collator: Collator
    ) -> dict[str, torch.Tensor]:
        """Return the teacher's columns; `teacher_rows` int64 [M] are the teacher's flat positions that correspond to
        `valid_rows`.

        Raises:
            ValueError: rows without the teacher's reading, or with another answer in it.
        """
        reading = super().__call__(rows, batch, collator)
        return reading | {"teacher_rows": reading[f"{PREFIX}valid_rows"]}

    @staticmethod
    def teacher_row(row: BatchRow) -> dict[str, Any]:
        """Return the teacher's row, with the student's labels at the same tokens of each document."""
        own = np.asarray(row["labels"])
        ids = np.asarray(row[f"{PREFIX}input_ids"])
        labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int64)
        bounds = (document_bounds(row[f"{reader}position_ids"]) for reader in ("", PREFIX))
        for (start, end), (_, other_end) in zip(*bounds, strict=True):
            learned = np.flatnonzero(own[start + 1 : end] != IGNORE_INDEX) + start + 1
            places = learned + (other_end - end)
            if not np.array_equal(ids[places], own[learned]):
                raise ValueError("rows: expected the same response tokens for teacher and student")
            labels[places] = own[learned]
        return {"input_ids": ids, "labels": labels, "position_ids": row[f"{PREFIX}position_ids"]}
