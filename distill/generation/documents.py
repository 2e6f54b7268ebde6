"""A collated batch taken apart into its documents, and put together again.

A document of a chat or of a prompt with its completion begins with what is not learned: its labels tell where the
answer starts. Packed rows tell their documents apart by positions that restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from distill.core.labels import IGNORE_INDEX

Row = dict[str, list[int]]


@dataclass
class Document:
    """One document of a batch.

    Attributes:
        ids: its tokens, up to the last one that is learned: nothing depends on what follows.
        labels: as in the batch, not shifted.
        row: of the batch.
    """

    ids: list[int]
    labels: list[int]
    row: int

    @property
    def prompt(self) -> list[int]:
        """What stands before the last stretch that is learned: of several answers of a chat, the last is given anew."""
        end = len(self.labels)
        while end > 0 and self.labels[end - 1] != IGNORE_INDEX:
            end -= 1
        return self.ids[:end]

    def hash(self, *more: int) -> bytes:
        """16 bytes that follow from the document and the integers `more`."""
        text = ",".join(map(str, (*more, -1, *self.ids)))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def answered(self, prompt: Sequence[int], answer: Sequence[int]) -> Document:
        """The document with another answer, which alone is learned."""
        return Document([*prompt, *answer], [IGNORE_INDEX] * len(prompt) + list(answer), self.row)


def documents_of(batch: Mapping[str, torch.Tensor]) -> list[Document]:
    """The documents of a collated batch of which something is learned, row by row.

    Args:
        batch: `input_ids` and `labels` [B, S]; `position_ids` [B, S] if rows hold several documents.
    """
    ids, labels = batch["input_ids"].tolist(), batch["labels"].tolist()
    positions = batch.get("position_ids")
    starts = [[0]] * len(ids)
    if positions is not None:
        starts = [[number for number, position in enumerate(row) if position == 0] for row in positions.tolist()]
    found = []
    for row, first in enumerate(starts):
        for start, end in zip(first, [*first[1:], len(ids[row])], strict=True):
            # padding, or what follows an answer in a template
            while end > start and labels[row][end - 1] == IGNORE_INDEX:
                end -= 1
            if end > start:
                found.append(Document(ids[row][start:end], labels[row][start:end], row))
    return found


def as_row(documents: Sequence[Document]) -> Row:
    """Documents after each other as one row, as `distill.data` makes them."""
    return {
        "input_ids": [token for document in documents for token in document.ids],
        "labels": [label for document in documents for label in document.labels],
        "position_ids": [position for document in documents for position in range(len(document.ids))],
    }
