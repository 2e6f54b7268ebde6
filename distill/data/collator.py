"""Collation of rows of different lengths into a batch, with the list of trained positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from distill.core.labels import IGNORE_INDEX, mask_document_starts, shift_labels

BatchRow = Mapping[str, Any]


class BatchColumns(Protocol):
    """Function that makes further columns of a batch, such as what a teacher reads.

    It is pickled where worker processes load the data, and therefore holds no model and no connection.
    """

    def __call__(self, rows: Sequence[BatchRow], batch: Mapping[str, Any], collator: Collator, /) -> Mapping[str, Any]:
        """Return columns by name; tensors are in host memory.

        Args:
            rows: Rows of the batch; none for a batch of padding.
            batch: Their batch, with `valid_rows` and the columns made before.
            collator: Collator of the batch, whose padding a batch of other tokens of the same rows has too.
        """
        ...


@dataclass(frozen=True)
class Collator:
    """Collator that pads rows to one length, lists the trained positions and adds columns.

    Padding is a separate document: its positions restart at 0, so that attention over `position_ids` never mixes it
    with text, and its labels are -100. The tokenizer's padding side is ignored, and a padding token that equals the
    end-of-text token masks nothing: labels were set when the data was made, except for each document's first token,
    which no token predicts. No random numbers are used, so a resumed run gets the same batches.

    Attributes:
        pad_to_multiple_of: Round the batch's length up to a multiple of this.
        padding_side: Side of padding; the loss does not depend on it.
        omit_plain_positions: Omit `position_ids` where every row is one document and padding is on the right: causal
            attention then needs none, and attention kernels without support for packed documents can run.
        columns: Functions that add columns, in their order; a teacher has those that it needs (`Teacher.columns`).
        custom: Function that makes the batch of one or more rows in place of padding them here.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None
    padding_side: Literal["right", "left"] = "right"
    omit_plain_positions: bool = False
    columns: Sequence[BatchColumns] = ()
    custom: Callable[[list[Any]], Mapping[str, Any]] | None = None

    def __call__(self, rows: Sequence[BatchRow]) -> dict[str, torch.Tensor]:
        """Return a batch of `rows`, each with `input_ids`, `labels` (not shifted) and `position_ids`.

        A row without `labels` is trained on whole, and one without `position_ids` is one document. Tokens at a row's
        ends that its `attention_mask` masks are left out, and in a custom batch a token that follows masked ones is
        not trained on. An empty list gives a row of padding, for a process that has no rows left.

        Raises:
            ValueError: a row's `attention_mask` has zeros between its ones, or ones nowhere.

        Returns:
            `input_ids`, `labels`, `position_ids`: int64 [B, S]; `valid_rows`: int64 [M], the flat indices
            `b * S + i` whose next token is trained on (`labels[b, i + 1] != -100`); and the further columns. There is
            no attention mask.
        """
        if self.custom is not None and rows:
            return self.extend(rows, _mask_after_padding(self.custom(list(rows))))
        rows = [_without_padding(row) if "attention_mask" in row else row for row in rows]
        return self.extend(rows, self._padded(rows))

    def extend(self, rows: Sequence[BatchRow], batch: Mapping[str, Any]) -> dict[str, Any]:
        batch = dict(batch)
        if self.columns:
            batch["valid_rows"] = trained_rows(batch)
        for columns in self.columns:
            batch |= columns(rows, batch, self)
        return batch

    def begin(self, width: int, length: int) -> int:
        """Return the column at which a row of `length` tokens begins in a batch of this width."""
        return width - length if self.padding_side == "left" else 0

    def _padded(self, rows: Sequence[BatchRow]) -> dict[str, torch.Tensor]:
        # two tokens: models take a single token for a decoding step
        rows = rows or [{"input_ids": [self.pad_token_id] * 2, "labels": [IGNORE_INDEX] * 2, "position_ids": [0, 1]}]
        rows = [{"position_ids": range(len(row["input_ids"])), "labels": row["input_ids"], **row} for row in rows]
        length = max(len(row["input_ids"]) for row in rows)
        multiple = self.pad_to_multiple_of or 1
        length = -(-length // multiple) * multiple
        batch = {
            "input_ids": torch.full((len(rows), length), self.pad_token_id, dtype=torch.int64),
            "labels": torch.full((len(rows), length), IGNORE_INDEX, dtype=torch.int64),
            "position_ids": torch.zeros((len(rows), length), dtype=torch.int64),
        }
        arrays = {name: tensor.numpy() for name, tensor in batch.items()}  # numpy reads lists five times as fast
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


def move_batch(batch: Mapping[str, Any], device: torch.device | str, *, non_blocking: bool = False) -> dict[str, Any]:
    """Return a batch with its tensors on a device; other columns, such as a query to servers, stay in host memory."""
    moved = dict(batch)
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):  # torch and accelerate skip the others, too
            moved[name] = value.to(device, non_blocking=non_blocking)
    return moved


def _without_padding(row: BatchRow) -> BatchRow:
    """Return a row without the padding that its `attention_mask` [S] masks at its ends."""
    mask = np.asarray(row["attention_mask"]) != 0
    (kept,) = mask.nonzero()
    if not len(kept) or not mask[kept[0] : kept[-1]].all():
        raise ValueError(f"attention_mask: expected zeros at a row's ends only, got {mask.astype(int).tolist()}")
    lists = {name: row[name][kept[0] : kept[-1] + 1] for name in ("input_ids", "labels", "position_ids") if name in row}
    return {**row, **lists}


def _mask_after_padding(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a batch without the labels of tokens that follow padding, as with padding on the left."""
    labels = batch.get("labels")
    mask = batch.get("attention_mask")
    if not isinstance(labels, torch.Tensor) or not isinstance(mask, torch.Tensor) or mask.shape != labels.shape:
        return batch
    follows = torch.nn.functional.pad(mask[:, :-1] == 0, (1, 0))
    return {**batch, "labels": labels.masked_fill(follows, IGNORE_INDEX)}


def _is_one_document(row: BatchRow) -> bool:
    return row["position_ids"][-1] == len(row["input_ids"]) - 1


def valid_rows(labels: torch.Tensor) -> torch.Tensor:
    """Return the flat positions whose next token is trained on: int64 [M], from labels [B, S], not shifted."""
    return (shift_labels(labels) != IGNORE_INDEX).flatten().nonzero().squeeze(1)


def trained_rows(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if "valid_rows" in batch:
        return batch["valid_rows"]
    return valid_rows(mask_document_starts(batch["labels"], batch.get("position_ids")))


def content_mask(rows: Sequence[BatchRow], batch: Mapping[str, Any], collator: Collator) -> dict[str, torch.Tensor]:
    """Return the column `content_mask`, bool [B, S]: False at padding, True at all tokens of documents.

    Losses and figures that are over all tokens, such as those of a mixture's routers, leave padding out by it.
    """
    if isinstance(batch.get("attention_mask"), torch.Tensor):
        return {"content_mask": batch["attention_mask"] != 0}
    mask = torch.zeros(batch["input_ids"].shape, dtype=torch.bool)
    if collator.custom is not None and rows:
        return {"content_mask": ~mask}
    length = mask.shape[1]
    for number, row in enumerate(rows):
        begin = collator.begin(length, len(row["input_ids"]))
        mask[number, begin : begin + len(row["input_ids"])] = True
    return {"content_mask": mask}


def padding_token(*owners: object) -> int:
    """Return the first padding or end-of-text token id of `owners`, else 0.

    Any id is valid: padding is masked and a separate document.
    """
    for owner in owners:
        for name in ("pad_token_id", "eos_token_id"):
            token = getattr(owner, name, None)
            if isinstance(token, list) and token:
                token = token[0]
            if isinstance(token, int):
                return token
    return 0
