"""What a teacher reads in the place of the student's rows: a second reading of each row, in batches of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from distill.data.collator import Collator
from distill.teachers.base import Batch, Collate

OWN = ("input_ids", "labels", "position_ids")
PREFIX = "teacher_"


class SecondReading:
    """Makes batches of rows that hold `teacher_input_ids` and `teacher_position_ids` beside the student's columns.

    Args:
        plain: makes the student's batch.
        pad_token_id: the teacher's; any id does.
    """

    def __init__(self, plain: Collate, pad_token_id: int) -> None:
        self.plain = plain
        inner = getattr(plain, "collator", plain)
        self.padding_side: Literal["right", "left"] = getattr(inner, "padding_side", "right")
        self.teacher = Collator(
            pad_token_id, getattr(inner, "pad_to_multiple_of", None), self.padding_side,
            getattr(inner, "omit_plain_positions", True),
        )  # fmt: skip

    def both(
        self, rows: Sequence[Mapping[str, Sequence[int]]]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The student's batch, and `teacher_input_ids` with `teacher_position_ids` where a row holds several documents.

        Raises:
            ValueError: rows without the teacher's reading.
        """
        if any(f"{PREFIX}input_ids" not in row for row in rows):
            raise ValueError("rows: expected teacher_input_ids and teacher_position_ids, which the recipe's data have")
        batch = self.plain([{name: row[name] for name in OWN} for row in rows])
        readings = [(row[f"{PREFIX}input_ids"], row[f"{PREFIX}position_ids"]) for row in rows]
        teacher = self.teacher([{"input_ids": ids, "labels": ids, "position_ids": at} for ids, at in readings])
        return batch, {PREFIX + name: teacher[name] for name in ("input_ids", "position_ids") if name in teacher}

    def begin(self, width: int, length: int) -> int:
        """Where a row of so many tokens begins in a batch of this width."""
        return (width - length) * (self.padding_side == "left")


def reading_of(batch: Batch) -> dict[str, torch.Tensor]:
    """The teacher's part of a batch, by the names that a model takes."""
    names = ("input_ids", "position_ids")
    return {name: batch[PREFIX + name] for name in names if PREFIX + name in batch}


def without_reading(batch: Batch, needed: Sequence[str], maker: str) -> dict[str, torch.Tensor]:
    """The student's part of a batch.

    Raises:
        ValueError: a batch without what is needed, which `maker` adds.
    """
    if missing := sorted({"input_ids", "labels", *needed} - set(batch)):
        raise ValueError(f"batch: expected {', '.join(missing)} too, as {maker} gives them; got {sorted(batch)}")
    return {name: value for name, value in batch.items() if name != "spans" and not name.startswith(PREFIX)}
