"""Shared tokens of two tokenizers' vocabularies, by their bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from distill.data.chat import ChatTemplate, load_template, template_of
from distill.recipe import Data
from distill.teachers.rows.retokenised.alignment import Shared, shared_tokens
from distill.teachers.rows.retokenised.encode import TokenisedReader, end_pairs


class Vocabularies(NamedTuple):
    """Shared tokens of two vocabularies.

    Attributes:
        shared: Ids of tokens with the same bytes in both vocabularies.
        ends: Pairs of ids among them that end a turn or a text, with any text.
        student_tokens, teacher_tokens: Number of tokens of each vocabulary.
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


def compare_by_bytes(student: TokenisedReader, teacher: TokenisedReader) -> Vocabularies:
    ends = end_pairs(student, teacher)
    return Vocabularies(
        shared_tokens(student.spelled, teacher.spelled, ends),
        ends,
        sum(token is not None for token in student.spelled),
        sum(token is not None for token in teacher.spelled),
    )


def teacher_template(
    data: Data, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any] | None
) -> ChatTemplate | None:
    """Return the chat template that renders the rows of a teacher with a tokenizer of its own.

    Args:
        data: The recipe's `data` section.
        kwargs: `teacher.chat_template_kwargs`; None for those of the data, of which the template may not read all.

    Raises:
        ValueError: An invalid template, or one that does not read a variable of the teacher's own.
    """
    name = "the teacher's chat template"
    if kwargs is None:
        return load_template(data.chat_template, tokenizer, name, data.chat_template_kwargs)
    return template_of(data, tokenizer, name, kwargs=kwargs, field="teacher")


def readers_of(
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    data: Data,
    teacher_kwargs: Mapping[str, Any] | None = None,
) -> tuple[TokenisedReader, TokenisedReader]:
    """Return both models' readers.

    Args:
        data: The recipe's `data` section; with `chat_template: tokenizer` each model has its own template.
        teacher_kwargs: `teacher.chat_template_kwargs`; None for those of the data that the teacher's template reads.

    Raises:
        ValueError: a tokenizer whose tokens are not bytes, or an invalid template.
    """
    student = template_of(data, student_tokenizer, "the student's chat template")
    teacher = teacher_template(data, teacher_tokenizer, teacher_kwargs)
    return TokenisedReader(student_tokenizer, student, "student.model"), TokenisedReader(
        teacher_tokenizer, teacher, "teacher.model"
    )


def require_rows(reader: TokenisedReader, rows: int) -> None:
    """Check that each id of a tokenizer has a row in its model's head. Added tokens that no text needs may lack one."""
    added = reader.tokenizer.added_tokens_decoder
    last = max(n for n in reader.tokenizer.get_vocab().values() if n not in added or n == reader.end)
    if last >= rows:
        raise ValueError(
            f"{reader.side}.model: expected a row of the head for each of its tokenizer's ids, up to {last:,}; "
            f"got {rows:,} rows"
        )
