"""Rows of different lengths into one batch, and the list of the positions that are learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from distill.core.labels import IGNORE_INDEX, mask_document_starts, shift_labels


@dataclass(frozen=True)
class Collator:
    """Pads rows to one length and names the positions that count.

    Padding is a document of its own: its positions start again at 0, so that attention which follows `position_ids`
    never mixes it with the text, and its labels are -100. The tokenizer's padding side plays no part, and a padding
    token that is also the end-of-text token masks nothing: what is learned was decided when the data was made, but for
    each document's first token, which nothing before it predicts. No random numbers are drawn, so that a resumed run
    sees the same batches.

    Attributes:
        pad_token_id: the id put into padding.
        pad_to_multiple_of: round the batch's length up to a multiple of this.
        padding_side: where padding goes; the loss is the same either way.
        omit_plain_positions: leave `position_ids` out where every row is one document and padding is on the right:
            causal attention then needs none, and attention kernels that cannot take packed documents may run.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None
    padding_side: Literal["right", "left"] = "right"
    omit_plain_positions: bool = False

    def __call__(self, rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
        """Make a batch of `rows`, each with `input_ids`, `labels` (not shifted) and `position_ids`.

        Of no rows a row of padding is made: what a process passes through the models that has no rows left.

        Returns:
            `input_ids`, `labels`, `position_ids`: int64 [B, S]; `valid_rows`: int64 [M], the flat indices
            `b * S + i` whose next token is learned (`labels[b, i + 1] != -100`). There is no attention mask.
        """
        # two tokens, since one is what decoding looks like
        rows = rows or [{"input_ids": [self.pad_token_id] * 2, "labels": [IGNORE_INDEX] * 2, "position_ids": [0, 1]}]
        length = max(len(row["input_ids"]) for row in rows)
        multiple = self.pad_to_multiple_of or 1
        length = -(-length // multiple) * multiple
        batch = {
            "input_ids": torch.full((len(rows), length), self.pad_token_id, dtype=torch.int64),
            "labels": torch.full((len(rows), length), IGNORE_INDEX, dtype=torch.int64),
            "position_ids": torch.zeros((len(rows), length), dtype=torch.int64),
        }
        arrays = {name: tensor.numpy() for name, tensor in batch.items()}  # which read lists five times as fast
        for number, row in enumerate(rows):
            padding = length - len(row["input_ids"])
            text = slice(0, length - padding) if self.padding_side == "right" else slice(padding, length)
            gap = slice(length - padding, length) if self.padding_side == "right" else slice(0, padding)
            for name, array in arrays.items():
                array[number, text] = row[name]
            arrays["position_ids"][number, gap] = np.arange(padding)
        batch["labels"] = mask_document_starts(batch["labels"], batch["position_ids"])
        if self.omit_plain_positions and self.padding_side == "right" and all(map(_is_one_document, rows)):
            del batch["position_ids"]
        batch["valid_rows"] = valid_rows(batch["labels"])
        return batch


def _is_one_document(row: Mapping[str, Sequence[int]]) -> bool:
    """Positions that end at the row's length less one have never restarted."""
    return row["position_ids"][-1] == len(row["input_ids"]) - 1


def valid_rows(labels: torch.Tensor) -> torch.Tensor:
    """The flat positions whose next token is learned: int64 [M], from labels [B, S] that are not shifted."""
    return (shift_labels(labels) != IGNORE_INDEX).flatten().nonzero().squeeze(1)


class PlainRows:
    """A collator for rows that may lack `position_ids` (one document a row) or `labels` (every token is learned)."""

    def __init__(self, collator: Collator) -> None:
        self.collator = collator

    def __call__(self, rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
        """Complete the rows and collate them."""
        rows = [{"position_ids": range(len(row["input_ids"])), "labels": row["input_ids"], **row} for row in rows]
        return self.collator(rows)


def padding_token(*owners: object) -> int:
    """Any id will do: padding is masked and is a document of its own."""
    for owner in owners:
        for name in ("pad_token_id", "eos_token_id"):
            token = getattr(owner, name, None)
            if isinstance(token, list) and token:
                token = token[0]
            if isinstance(token, int):
                return token
    return 0
