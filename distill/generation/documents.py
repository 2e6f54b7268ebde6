"""A collated batch taken apart into its documents, and put together again.

A document of a chat or of a prompt with its completion begins with what is not learned: its labels tell where the
answer starts. Packed rows tell their documents apart by positions that restart.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from distill.core.labels import IGNORE_INDEX, document_bounds

Row = dict[str, list[int]]


@dataclass
class Document:
    """One document of a batch.

    Attributes:
        ids: its tokens, up to the last one that is learned: nothing depends on what follows.
        labels: as in the batch, not shifted.
        row: of the batch.
        teacher_ids: what the teacher reads in their place, which ends with the same answer; None for the same.
        route: the number of its teacher's route; None where there is one teacher.
        sample: the number of its answer, where a document is answered several times.
        drawn_log_p: of the tokens of an answer of the student's, when it gave it; None for the data's answers.
        advantage: of an answer that a reward function judged, within the answers to its prompt.
    """

    ids: list[int]
    labels: list[int]
    row: int
    teacher_ids: list[int] | None = None
    route: int | None = None
    sample: int = 0
    drawn_log_p: Sequence[float] | None = None
    advantage: float | None = None

    @property
    def length(self) -> int:
        """Tokens, of the longer reading."""
        return max(len(self.ids), len(self.teacher_ids or ()))

    @property
    def prompt_length(self) -> int:
        """Tokens before the last stretch that is learned, of the longer reading."""
        return self.length - (len(self.ids) - len(self.prompt))

    @functools.cached_property
    def prompt(self) -> list[int]:
        """What stands before the last stretch that is learned: of several answers of a chat, the last is given anew."""
        learned = self.labels[::-1].index(IGNORE_INDEX) if IGNORE_INDEX in self.labels else len(self.labels)
        return self.ids[: len(self.labels) - learned]

    @functools.cached_property
    def _text(self) -> str:
        return ",".join(map(str, self.ids))

    def hash(self, *more: int) -> bytes:
        """16 bytes that follow from the document, its sample and the integers `more`."""
        text = ",".join([*map(str, (*more, *[self.sample] * (self.sample > 0), -1)), *[self._text] * bool(self.ids)])
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def answered(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        drawn_log_p: Sequence[float] | None = None,
        advantage: float | None = None,
    ) -> Document:
        """The document with another answer, which alone is learned."""
        other = self.teacher_ids
        if other is not None:
            other = [*other[: len(other) - (len(self.ids) - len(prompt))], *answer]
        labels = [IGNORE_INDEX] * len(prompt) + list(answer)
        return Document([*prompt, *answer], labels, self.row, other, self.route, self.sample, drawn_log_p, advantage)


def documents_of(batch: Mapping[str, torch.Tensor]) -> list[Document]:
    """The documents of a collated batch of which something is learned, row by row.

    Args:
        batch: `input_ids` and `labels` [B, S]; `position_ids` [B, S] if rows hold several documents; padded on the
            right. Where it has `teacher_input_ids`, the teacher's reading too, which `teacher_rows` aligns with
            `valid_rows`.
    """
    ids, labels = batch["input_ids"].tolist(), batch["labels"].tolist()
    own, others, found = _bounds(batch, ""), _bounds(batch, "teacher_"), []
    if others:
        teacher = batch["teacher_input_ids"].tolist()
        place_of = dict(zip(batch["valid_rows"].tolist(), batch["teacher_rows"].tolist(), strict=True))
    for row, bounds in enumerate(own):
        for number, (start, end) in enumerate(bounds):
            # padding, or what follows an answer in a template
            while end > start and labels[row][end - 1] == IGNORE_INDEX:
                end -= 1
            if end > start:
                other = None
                if others:
                    predicts_last = place_of[row * len(ids[row]) + end - 2] % len(teacher[row])
                    other = teacher[row][others[row][number][0] : predicts_last + 2]
                route = int(batch["routes"][row, start]) if "routes" in batch else None
                found.append(Document(ids[row][start:end], labels[row][start:end], row, other, route))
    return found


def _bounds(batch: Mapping[str, torch.Tensor], prefix: str) -> list[list[tuple[int, int]]]:
    """Of each row where its documents, and padding after them, begin and end; nothing where there is no such
    reading."""
    ids, positions = batch.get(f"{prefix}input_ids"), batch.get(f"{prefix}position_ids")
    if ids is None:
        return []
    return [[(0, ids.shape[1])]] * len(ids) if positions is None else list(map(document_bounds, positions.tolist()))


def drawn_log_probs(rows: Sequence[Sequence[Document]], shape: torch.Size) -> torch.Tensor:
    """Each token's log-probability when the student gave it, [B, S] as `input_ids`; NaN for all others."""
    precision = torch.float32 if torch.backends.mps.is_available() else torch.float64
    tokens = torch.full(shape, torch.nan, dtype=precision)
    for row, documents in enumerate(rows):
        end = 0
        for document in documents:
            end += len(document.ids)
            if document.drawn_log_p:
                tokens[row, end - len(document.drawn_log_p) : end] = torch.tensor(document.drawn_log_p, dtype=precision)
    return tokens


def token_advantages(rows: Sequence[Sequence[Document]], shape: torch.Size) -> torch.Tensor:
    """The advantage of the answer that each token belongs to, float32 [B, S] as `input_ids`; 0 for all others."""
    tokens = torch.zeros(shape)
    for row, documents in enumerate(rows):
        end = 0
        for document in documents:
            end += len(document.ids)
            if document.advantage is not None:
                tokens[row, end - (len(document.ids) - len(document.prompt)) : end] = document.advantage
    return tokens


def as_row(documents: Sequence[Document]) -> Row:
    """Documents after each other as one row, as `distill.data` makes them."""
    row = {
        "input_ids": [token for document in documents for token in document.ids],
        "labels": [label for document in documents for label in document.labels],
        "position_ids": [position for document in documents for position in range(len(document.ids))],
    }
    readings = [document.teacher_ids for document in documents if document.teacher_ids is not None]
    if readings:
        row["teacher_input_ids"] = [token for ids in readings for token in ids]
        row["teacher_position_ids"] = [position for ids in readings for position in range(len(ids))]
    if routes := [document.route for document in documents if document.route is not None]:
        row["route"] = routes
    return row
