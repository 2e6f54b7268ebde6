"""Comparison of two models' vocabularies, token by token.

A divergence between two next-token distributions is defined only where each id is the same token in both models.
`compare` checks more than sizes: every id's token, the special tokens, the padding rows of a model's matrices, how
each tokenizer begins a text, and whether sample texts are encoded to the same ids.

    comparison = compare(teacher_tokenizer, student_tokenizer, teacher_vocab_size=152_064, student_vocab_size=151_936)
    print(comparison)                       # one line
    loss_vocab_size = comparison.require()  # ValueError with the first differing ids where it is undefined
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SHOWN = 3
# text on which tokenizers with one vocabulary but different rules (merges, normalisation, digits, spaces) part
PROBES = (
    "The quick brown fox jumps over the lazy dog; it's 12:34 on 2024-05-06, isn't it?",
    "def mean(values):\n    return sum(values) / len(values)  # 3.14159\n\n\tif not x:\r\n        pass\n",
    "Größe, naïve café, 日本語の文章、Привет мир, مرحبا, 🤖👩‍💻 e\u0301 ﬁne ½",
    "1234567890 x^2 + y^2 = z^2; 0xDEADBEEF $1,000,000.00   trailing spaces   \n\n\n",
    "ALL CAPS, camelCase, snake_case, <b>markup</b>, https://example.org/?q=a&b=c",
)


class Difference(NamedTuple):
    """An id with different tokens in the two vocabularies; None where one has no such id."""

    id: int
    teacher: str | None
    student: str | None

    def __str__(self) -> str:
        return f"id {self.id} is {_shown(self.teacher)} to the teacher and {_shown(self.student)} to the student"


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)


@dataclass(frozen=True)
class VocabularyComparison:
    """Result of `compare`.

    Attributes:
        shared: rows that both models' heads have: the loss reads that many (`vocab_size`).
        teacher_tokens: number of the teacher's token ids, one more than the largest; likewise `student_tokens`.
        teacher_rows: rows of the teacher's head; likewise `student_rows`.
        differing: ids that are different tokens, in order.
        teacher_only: ids that only the teacher's tokenizer knows; likewise `student_only`.
        cut: ids of real tokens for which one of the models has no row.
        probe: Difference of the first probe text whose ids differ; None if all agree.
        notes: Remarks that do not stop a run.
    """

    shared: int
    teacher_tokens: int
    student_tokens: int
    teacher_rows: int
    student_rows: int
    differing: tuple[Difference, ...] = ()
    teacher_only: tuple[Difference, ...] = ()
    student_only: tuple[Difference, ...] = ()
    cut: tuple[Difference, ...] = ()
    probe: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def compatible(self) -> bool:
        """Return whether every id that can occur is the same token in both, and has a row in both heads."""
        return not (self.differing or self.teacher_only or self.student_only or self.cut or self.probe)

    @property
    def extensible(self) -> bool:
        """Return whether only tokens of the teacher are missing, which could be added to the student."""
        other = self.differing or self.student_only or self.teacher_tokens > self.teacher_rows
        return bool(self.teacher_only) and not other

    def __str__(self) -> str:
        if not self.compatible:
            return f"vocabularies differ: {self._fault()}"
        padded = [
            f"{side} {rows - tokens:,} padded rows"
            for side, rows, tokens in (
                ("teacher", self.teacher_rows, self.teacher_tokens),
                ("student", self.student_rows, self.student_tokens),
            )
            if rows > tokens
        ]
        text = f"vocabularies match: {self.teacher_tokens:,} tokens, the loss over {self.shared:,} rows"
        return text + (f" ({', '.join(padded)})" if padded else "") + "".join(f"; {note}" for note in self.notes)

    def _fault(self) -> str:
        for found, what in (
            (self.differing, "with different tokens"),
            (self.teacher_only, "known to the teacher only"),
            (self.student_only, "known to the student only"),
            (self.cut, "without a row in one of the models"),
        ):
            if found:
                first = "; ".join(map(str, found[:SHOWN]))
                return f"{len(found):,} {'id' if len(found) == 1 else 'ids'} {what}: {first}"
        return self.probe or "no difference"

    def require(self, *, field: str = "student.model") -> int:
        """Return the number of head rows to compare.

        Raises:
            ValueError: with the first differing ids and tokens, and what would work.
        """
        if self.compatible:
            return self.shared
        if self.extensible:
            remedy = "set student.vocabulary: extend to give the student the teacher's extra tokens"
        elif self.student_only and not (self.differing or self.teacher_only):
            remedy = "choose a student without tokens of its own, or a teacher that has them"
        elif self.probe and not (self.differing or self.teacher_only or self.student_only):
            remedy = "the ids agree but the rules differ: save the teacher's tokenizer with the student and load that"
        else:
            remedy = (
                "choose a student of the teacher's family (one tokenizer), a copy of the teacher with fewer layers "
                "(student.from_teacher), or train a student from scratch (student.init: random) with the "
                "teacher's tokenizer"
            )
        raise ValueError(f"{field}: teacher and student cannot be compared token by token: {self._fault()}; {remedy}")


def compare(
    teacher_tokenizer: PreTrainedTokenizerBase,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_vocab_size: int | None = None,
    student_vocab_size: int | None = None,
) -> VocabularyComparison:
    """Compare two tokenizers id by id and on sample texts.

    Args:
        teacher_vocab_size: rows of the teacher's LM head; by default as many as it has tokens.
        student_vocab_size: likewise for the student.

    Returns:
        The comparison; print it, and call `require()`.
    """
    teacher = _by_id(teacher_tokenizer)
    student = _by_id(student_tokenizer)
    teacher_tokens = max(teacher, default=-1) + 1
    student_tokens = max(student, default=-1) + 1
    teacher_rows = teacher_vocab_size or teacher_tokens
    student_rows = student_vocab_size or student_tokens
    differing = []
    teacher_only = []
    student_only = []
    cut = []
    for number in sorted(teacher.keys() | student.keys()):
        item = Difference(number, teacher.get(number), student.get(number))
        if item.teacher is None:
            student_only.append(item)
        elif item.student is None:
            teacher_only.append(item)
        elif item.teacher != item.student:
            differing.append(item)
        elif number >= min(teacher_rows, student_rows):
            cut.append(item)
    same = not (differing or teacher_only or student_only)
    return VocabularyComparison(
        min(teacher_rows, student_rows),
        teacher_tokens,
        student_tokens,
        teacher_rows,
        student_rows,
        tuple(differing),
        tuple(teacher_only),
        tuple(student_only),
        tuple(cut),
        _probe(teacher_tokenizer, student_tokenizer) if same else None,
        tuple(_notes(teacher_tokenizer, student_tokenizer, teacher_rows, student_rows)),
    )


def _by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return tokens by id, without the names that GGUF files give to rows of the head that no token uses."""
    return {number: token for token, number in tokenizer.get_vocab().items() if token != f"[PAD{number}]"}


def _probe(teacher: PreTrainedTokenizerBase, student: PreTrainedTokenizerBase) -> str | None:
    for text in PROBES:
        ours = teacher(text, add_special_tokens=False, verbose=False)["input_ids"]
        theirs = student(text, add_special_tokens=False, verbose=False)["input_ids"]
        if ours != theirs:
            pairs = enumerate(zip(ours, theirs, strict=False))
            at = next((place for place, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
            pieces = [
                tokenizer.convert_ids_to_tokens(ids[at : at + 4])
                for tokenizer, ids in ((teacher, ours), (student, theirs))
            ]
            return (
                f"the same text becomes different ids: after {teacher.decode(ours[:at])[-30:]!r} the teacher reads "
                f"{pieces[0]} (ids {ours[at : at + 4]}), the student {pieces[1]} (ids {theirs[at : at + 4]})"
            )
    return None


def _notes(
    teacher: PreTrainedTokenizerBase, student: PreTrainedTokenizerBase, teacher_rows: int, student_rows: int
) -> list[str]:
    """Return differences that do not matter for training, which uses one tokenizer, but for generation."""
    notes = []
    for name in ("bos_token", "eos_token", "pad_token"):
        ours = getattr(teacher, name, None)
        theirs = getattr(student, name, None)
        if ours != theirs:
            notes.append(f"{name} is {_shown(ours)} to the teacher and {_shown(theirs)} to the student")
    begins = []
    for tokenizer in (teacher, student):
        text = tokenizer("a")["input_ids"]
        begins.append(tokenizer.bos_token_id is not None and text[:1] == [tokenizer.bos_token_id])
    if begins[0] != begins[1]:
        notes.append(f"only the {'teacher' if begins[0] else 'student'}'s tokenizer begins a text with bos_token")
    if student_rows > teacher_rows:
        notes.append(
            f"the student's last {student_rows - teacher_rows:,} rows have no counterpart and stay as they are"
        )
    return notes


def extend_student(
    student: PreTrainedModel, student_tokenizer: PreTrainedTokenizerBase, teacher_tokenizer: PreTrainedTokenizerBase
) -> tuple[str, ...]:
    """Add the tokens that only the teacher has to the student, which then uses the teacher's tokenizer.

    A new token's rows, in the input embedding and in the head, start as the mean of the rows of the tokens that the
    student's own tokenizer makes of its text (`<|turn_end|>` becomes the mean of `<`, `|`, `turn`, ...). A row that
    holds one of the student's tokens is never changed, and none is ever cut. Call it before LoRA is added.

    Args:
        student: the model, changed in place; its configuration follows.
        teacher_tokenizer: tokenizer to train and to save with.

    Raises:
        ValueError: the two disagree on an id, or the student has tokens that the teacher lacks.
    """
    import torch

    embedding: Any = student.get_input_embeddings()
    rows: int = embedding.weight.shape[0]
    verdict = compare(teacher_tokenizer, student_tokenizer, student_vocab_size=rows)
    if verdict.differing or verdict.student_only:
        verdict.require(field="student.vocabulary")
    if not verdict.teacher_only:
        return ()
    needed = verdict.teacher_tokens
    if needed > rows:
        student.resize_token_embeddings(needed, mean_resizing=False)
    embedding = student.get_input_embeddings()
    head: Any = student.get_output_embeddings()
    matrices = [embedding.weight]
    if head is not None and head.weight is not matrices[0]:
        matrices.append(head.weight)
    if head is not None and getattr(head, "bias", None) is not None:
        matrices.append(head.bias)
    with torch.no_grad():
        for matrix in matrices:
            if needed > rows:  # ids that are nobody's token start as the mean of all
                matrix[rows:] = matrix[:rows].float().mean(0).to(matrix.dtype)
            for item in verdict.teacher_only:
                text = teacher_tokenizer.convert_tokens_to_string([item.teacher or ""])
                parts = student_tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
                matrix[item.id] = (matrix[parts] if parts else matrix[:rows]).float().mean(0).to(matrix.dtype)
    added = tuple(item.teacher or "" for item in verdict.teacher_only)
    logger.info("student.vocabulary: %d tokens added, from %s", len(added), ", ".join(map(repr, added[:SHOWN])))
    return added


def shared_columns(
    teacher: PreTrainedTokenizerBase | None, student: PreTrainedTokenizerBase, *rows: int
) -> tuple[int, str]:
    """Return the number of logits that a loss over two heads compares, and a description.

    Args:
        teacher, student: Tokenizers; no `teacher` where the data are random tokens.
        rows: Number of rows of both heads, the teacher's first.

    Raises:
        ValueError: the vocabularies do not match, naming the first token that differs.
    """
    if teacher is None:
        return min(rows), f"not compared, the data are random tokens; the loss is over {min(rows):,} rows"
    found = compare(teacher, student, *rows)
    return found.require(), str(found)
