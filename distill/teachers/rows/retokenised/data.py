"""Data for two tokenizers: rows that both models can hold, and their batches.

A row holds the student's `input_ids`, `labels`, `position_ids`, the teacher's `teacher_input_ids`,
`teacher_position_ids`, `spans`, four numbers each, and `answer_starts`, two numbers each (encode.TokenizedPair). Labels
stand at the first token of each span, so that the trained tokens of a batch are its spans: what the loss is a mean
over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from distill.core.labels import IGNORE_INDEX
from distill.data.chat import ChatOptions
from distill.data.collator import BatchRow, Collator
from distill.data.formats import RowFormat
from distill.data.load import Splits, load_rows
from distill.data.packing import Documents
from distill.data.report import DataReport
from distill.recipe import Data, DataPart
from distill.teachers.rows.reading import ReadingColumns
from distill.teachers.rows.retokenised.encode import PairEncoder
from distill.teachers.rows.retokenised.vocabularies import readers_of

NAMES = ("input_ids", "labels", "position_ids", "teacher_input_ids", "teacher_position_ids", "spans", "answer_starts")


@dataclass
class CrossReport(DataReport):
    """Report on the data of two tokenizers. Tokens and rows are the student's.

    Attributes:
        spans: aligned spans to train on.
        single: spans among them that are one token of each model.
        span_tokens, teacher_span_tokens: tokens in them.
    """

    spans: int = 0
    single: int = 0
    span_tokens: int = 0
    teacher_span_tokens: int = 0

    def count(self, documents: Documents, chosen: np.ndarray, held_out_of: Documents, held_out: np.ndarray) -> None:
        """Count the documents; all tokens of a span are trained tokens."""
        super().count(documents, chosen, held_out_of, held_out)
        spans = documents.columns["spans"].take(chosen)[0].reshape(-1, 2, 2)
        widths = spans[:, :, 1] - spans[:, :, 0]
        self.spans = len(widths)
        self.single = int((widths == 1).all(1).sum())
        self.span_tokens, self.teacher_span_tokens = widths.sum(0, dtype=np.int64).tolist()
        self.trained_tokens += self.span_tokens - self.spans  # a span has one label

    def __str__(self) -> str:
        spans = max(self.spans, 1)
        return (
            f"{super().__str__()}\naligned: {self.spans:,} spans, {self.single / spans:.1%} of them one token of each; "
            f"{self.single / max(self.span_tokens, 1):.1%} of the student's tokens and "
            f"{self.single / max(self.teacher_span_tokens, 1):.1%} of the teacher's stand one to one"
        )


def load_cross_data(
    data: Data,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    teacher_kwargs: Mapping[str, Any] | None = None,
) -> Splits:
    """Load data for a student and a teacher whose tokenizers differ, as `load_data` does for one tokenizer.

    Args:
        data: the recipe's `data` section; `max_length` bounds both readings, `chat_template: tokenizer` means each its
            own.
        seed: fixes which documents are held out and the order of the rows.
        teacher_kwargs: `teacher.chat_template_kwargs`; None for those of the data.
    """
    if data.is_synthetic:
        raise ValueError(
            f"data.source: {data.source} has no text, which student.vocabulary: cross needs to compare two tokenizers"
        )
    student, teacher = readers_of(student_tokenizer, teacher_tokenizer, data, teacher_kwargs)

    def encoder(format: RowFormat, part: DataPart) -> PairEncoder:
        options = ChatOptions.of(part.data)
        return PairEncoder(student, teacher, format, max_length=data.max_length, options=options)

    return load_rows(data, encoder, [student.template, teacher.template], seed=seed, report_type=CrossReport)


class CrossColumns(ReadingColumns):
    """Columns of a teacher with another tokenizer, and what aligns its positions with the student's."""

    def __call__(
        self, rows: Sequence[BatchRow], batch: Mapping[str, Any], collator: Collator
    ) -> dict[str, torch.Tensor]:
        """Return the teacher's columns, whose labels are the tokens of spans, and the alignment.

        Returns:
            The teacher's batch, and in flat positions `spans` int64 [M, 4] and `answer_starts` int64 [D, 2], of the
            documents that are prompts with answers.
        """
        teacher = super().__call__(rows, batch, collator)
        widths = batch["input_ids"].shape[1], teacher["teacher_input_ids"].shape[1]

        def flat(column: str, each: int) -> torch.Tensor:
            """Return a column of places in rows, `each` of them in one of both readings, as places in the batch."""
            found = [torch.zeros(0, 2 * each, dtype=torch.int64)]
            for number, row in enumerate(rows):
                own = torch.as_tensor(row.get(column, ()), dtype=torch.int64).reshape(-1, 2, each).clone()
                for side, name in enumerate(("input_ids", "teacher_input_ids")):
                    own[:, side] += number * widths[side] + collator.begin(widths[side], len(row[name]))
                found.append(own.reshape(-1, 2 * each))
            return torch.cat(found)

        return teacher | {"spans": flat("spans", 2), "answer_starts": flat("answer_starts", 1)}

    @staticmethod
    def teacher_row(row: BatchRow) -> dict[str, Any]:
        """Return the teacher's row, with labels at the tokens of spans; none of documents that both read alike."""
        ids = np.asarray(row["teacher_input_ids"])
        labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int64)
        for _, _, start, stop in np.asarray(row.get("spans", ()), dtype=np.int64).reshape(-1, 4).tolist():
            labels[start:stop] = ids[start:stop]
        return {"input_ids": ids, "labels": labels, "position_ids": row["teacher_position_ids"]}
