"""Shared tokens of two tokenizers' vocabularies, by their bytes."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from distill.data.chat import load_template
from distill.teachers.rows.retokenised.alignment import Shared, shared_tokens
from distill.teachers.rows.retokenised.encode import Reader, end_pairs


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


def compare_by_bytes(student: Reader, teacher: Reader) -> Vocabularies:
    """Return the shared tokens of two readers' vocabularies."""
    ends = end_pairs(student, teacher)
    return Vocabularies(
        shared_tokens(student.spelled, teacher.spelled, ends),
        ends,
        sum(token is not None for token in student.spelled),
        sum(token is not None for token in teacher.spelled),
    )


def readers_of(
    student_tokenizer: PreTrainedTokenizerBase, teacher_tokenizer: PreTrainedTokenizerBase, chat_template: str
) -> tuple[Reader, Reader]:
    """Return both models' readers; `chat_template` as of the recipe's data section, `tokenizer` meaning each its own.

    Raises:
        ValueError: a tokenizer whose tokens are not bytes, or an invalid template.
    """

    def reader(tokenizer: PreTrainedTokenizerBase, side: str) -> Reader:
        return Reader(
            tokenizer, load_template(chat_template, tokenizer, f"the {side}'s chat template"), f"{side}.model"
        )

    return reader(student_tokenizer, "student"), reader(teacher_tokenizer, "teacher")


def require_rows(reader: Reader, rows: int) -> None:
    """Check that each id of a tokenizer has a row in its model's head. Added tokens that no text needs may lack one.

    Raises:
        ValueError: one has none.
    """
    added = reader.tokenizer.added_tokens_decoder
    last = max(n for n in reader.tokenizer.get_vocab().values() if n not in added or n == reader.end)
    if last >= rows:
        raise ValueError(
            f"{reader.side}.model: expected a row of the head for each of its tokenizer's ids, up to {last:,}; "
            f"got {rows:,} rows"
        )
