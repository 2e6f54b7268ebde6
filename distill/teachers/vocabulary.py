"""Tokenizers of teacher and student: how data are made with them, and whether both models can be compared by them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from distill.data.chat import ChatTemplate, load_template, template_of, with_template, with_template_kwargs
from distill.data.load import Splits, load_data
from distill.data.rows import RowFault
from distill.models.load.vocabulary import compare, extend_student, shared_columns
from distill.models.loading import load_config, load_tokenizer
from distill.recipe.teachers import teacher_kwargs

if TYPE_CHECKING:
    from distill.generation.documents import Readers
    from distill.recipe import Data, ModelSection, Recipe


class Match(NamedTuple):
    """Alignment of two models' vocabularies.

    Attributes:
        columns: Number of vocabulary columns that are compared; None for those of the teacher's format.
        vocabulary_note: Result of the comparison, one line.
    """

    columns: int | None
    vocabulary_note: str


class Vocabulary:
    """The vocabulary of two models that read the same ids.

    Attributes:
        tokenizer: Tokenizer of the data, with the recipe's chat template; None for random tokens.
        teacher_tokenizer: Tokenizer of the teacher's prompts.
    """

    top_k = False
    _reader: Callable[[Data, int], Splits] | None = None

    def __init__(self, recipe: Recipe, teacher: ModelSection, id_bound: int | None = None, top_k: bool = False) -> None:
        """Read the teacher's tokenizer.

        Args:
            teacher: Section that names the tokenizer.
            id_bound: Exclusive upper bound of random ids; None for the smaller of the two vocabularies.
            top_k: True if the targets are K tokens per position, whose format checks the student's columns.
        """
        self.top_k = top_k
        self.recipe = recipe
        self._teacher = teacher
        self._id_bound = id_bound
        self.tokenizer: Any = None
        if not recipe.data.is_synthetic:
            self.tokenizer = with_template(load_tokenizer(teacher), recipe.data)
        self.teacher_tokenizer = self.tokenizer
        kwargs = teacher_kwargs(recipe.data, recipe.teacher)
        if self.tokenizer is not None and kwargs != recipe.data.chat_template_kwargs:
            self.teacher_tokenizer = with_template_kwargs(self.tokenizer, kwargs)
        self.student_tokenizer = self.tokenizer

    @property
    def id_bound(self) -> int | None:
        """Exclusive upper bound of random token ids; None for text."""
        if self.tokenizer is not None:
            return None
        if self._id_bound is not None:
            return self._id_bound
        student = self.recipe.student
        sections: list[tuple[ModelSection, str]] = [(self._teacher, "teacher")]
        sections += [] if student.is_cut else [(student, "student")]
        return min(load_config(section, field).get_text_config().vocab_size for section, field in sections)

    @functools.cached_property
    def template(self) -> ChatTemplate | None:
        return None if self.tokenizer is None else template_of(self.recipe.data, self.tokenizer)

    def tokenizers(self) -> list[Any] | None:
        """Return the tokenizers of every teacher and, last, of the student, as read; None for random tokens."""
        return None if self.tokenizer is None else [self.tokenizer, self.student_tokenizer]

    def with_reader(
        self, reader: Callable[[Data, int], Splits], id_bound: int | None = None, top_k: bool = False
    ) -> Vocabulary:
        """Return the same vocabulary, with data that are read in another way.

        Args:
            reader: Function from a recipe's `data` section and a seed to the rows.
            id_bound: Exclusive upper bound of random ids; None for the present one.
            top_k: True if the targets are K tokens per position here, whatever the present ones are.
        """
        other = copy.copy(self)
        other._reader = reader
        other._id_bound = self._id_bound if id_bound is None else id_bound
        other.top_k = self.top_k or top_k
        return other

    def of_backend(self) -> Vocabulary:
        """Return the vocabulary that the teacher's backend is opened with, inside another tokenizer's."""
        return self

    def read(self, data: Data, seed: int) -> Splits:
        if self._reader is not None:
            return self._reader(data, seed)
        return load_data(data, self.tokenizer, seed=seed, vocab_size=self.id_bound)

    def prepare(self) -> None:
        """Compare the tokenizers, before weights are read.

        Raises:
            ValueError: ids that stand for different tokens.
        """
        student = self.recipe.student
        if not student.has_tokenizer or self.tokenizer is None:
            return
        self.student_tokenizer = load_tokenizer(student, "student")
        if student.vocabulary != "extend":
            compare(self.tokenizer, self.student_tokenizer).require()

    def answer_readers(self) -> Readers:
        """Return the readers of rollouts by other tokenizers of teachers; none where they read the same ids."""
        return {}

    def fit(self, student: Any) -> None:
        """Extend a loaded student by the tokens that only the teacher has, where the recipe says so."""
        if self.student_tokenizer is not self.tokenizer and self.recipe.student.vocabulary == "extend":
            extend_student(student, self.student_tokenizer, self.tokenizer)
            self.student_tokenizer = self.tokenizer

    def match(self, teacher_rows: list[int], student_rows: int) -> Match:
        """Return the alignment of the heads.

        Args:
            teacher_rows: Number of rows of each teacher's head.
            student_rows: Number of rows of the student's head.
        """
        shared, verdict = shared_columns(self.tokenizer, self.student_tokenizer, teacher_rows[0], student_rows)
        return Match(None if self.top_k else min(shared, *teacher_rows), verdict + self.other_prompt())

    def other_prompt(self) -> str:
        """Return where the student's own chat template renders a prompt differently from the data's; empty where it
        does not. The student is trained, and generates, with the data's.
        """
        if self.tokenizer is None or self.student_tokenizer is self.tokenizer:
            return ""
        kwargs = self.recipe.data.chat_template_kwargs
        templates = self.template, load_template("tokenizer", self.student_tokenizer, kwargs=kwargs)
        turns = [{"role": "user", "content": "Hello"}]
        try:
            texts = [template.render(turns, prompt=True) for template in templates if template is not None]
        except RowFault:
            return ""
        if len(set(texts)) < 2:
            return ""
        at = next((n for n, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
        before = texts[0][max(0, at - 20) : at]
        ours = texts[0][at : at + 30]
        own = texts[1][at : at + 30]
        data = f"the data's continue with {ours!r} (which is trained on)"
        student = f"the student's with {own!r}"
        return f"; prompts differ after {before!r}: {data}, {student}"
