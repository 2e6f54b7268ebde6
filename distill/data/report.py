"""What became of the data: counts by which a person sees what is learned, what was dropped and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np

from distill.core.units import counted
from distill.data.coverage import NOT_RENDERED
from distill.data.packing import IDS, Documents
from distill.data.tally import Tally
from distill.data.token_cache import key_of


@dataclass
class DataReport(Tally):
    """What was read, what was dropped and why, what is left.

    Attributes:
        source: what was read.
        digest: hash of its content.
        format: what the rows were taken for.
        max_length: tokens in a row at most.
        documents: pieces of text, chats and pairs to train on; none is split further.
        tokens: in them.
        teacher_tokens: in them as the teacher reads them, where that is another reading.
        trained_tokens: of `tokens` the ones that are learned.
        longest: tokens of the longest of them, as the student reads it.
        copies: rows read whose text another row holds too.
        rows: rows they are packed into.
        validation_documents: documents held out, and likewise the tokens and rows of them.
        answer_room: tokens that each answer to train on may have in its row, if it is longer than the data's; 0 for the
            data's alone.
        frozen_date: the day a chat template stamps instead of today, if it stamps one.
        from_cache: nothing was tokenised anew.
        parts: of several sources the report of each, of which the counts above are the sums.
        epoch_rows: of one of several sources, rows of it that an epoch holds.
    """

    source: str = ""
    digest: str = ""
    format: str = ""
    max_length: int = 0
    documents: int = 0
    tokens: int = 0
    teacher_tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    copies: int = 0
    rows: int = 0
    validation_documents: int = 0
    validation_tokens: int = 0
    validation_rows: int = 0
    answer_room: int = 0
    frozen_date: str | None = None
    from_cache: bool = False
    parts: list[DataReport] = field(default_factory=list)
    epoch_rows: int = 0

    @classmethod
    def of(cls, parts: list[Self], epoch_rows: Sequence[int]) -> Self:
        """The sums over several sources, of which an epoch holds `epoch_rows` each."""
        total = cls(source=" + ".join(part.source for part in parts), max_length=parts[0].max_length)
        total.digest = key_of([part.digest for part in parts])
        total.format = ", ".join(sorted({part.format for part in parts}, key=lambda name: not name.startswith("text")))
        total.frozen_date = max((part.frozen_date for part in parts if part.frozen_date), default=None)
        total.from_cache = all(part.from_cache for part in parts)
        total.longest = max(part.longest for part in parts)
        total.answer_room = parts[0].answer_room
        apart = {"max_length", "longest", "answer_room", *(one.name for one in fields(Tally))}
        for part, count in zip(parts, epoch_rows, strict=True):
            total.add(part)
            part.epoch_rows = count
            for one in fields(cls):
                if one.type == "int" and one.name not in apart:
                    setattr(total, one.name, getattr(total, one.name) + getattr(part, one.name))
        total.parts = list(parts)
        return total

    @property
    def trained_share(self) -> float:
        """Share of the tokens that are learned."""
        return self.trained_tokens / max(1, self.tokens)

    @property
    def packing_efficiency(self) -> float:
        """Share of the rows' room that holds tokens."""
        return self.tokens / max(1, self.rows * self.max_length)

    def count(self, documents: Documents, chosen: np.ndarray, held_out_of: Documents, held_out: np.ndarray) -> None:
        """Count what is trained and what is held out, by the documents' numbers."""
        self.documents, self.validation_documents = len(chosen), len(held_out)
        self.longest = int(documents.columns[IDS].lengths[chosen].max(initial=0))
        self.tokens, self.validation_tokens = documents.tokens(chosen), held_out_of.tokens(held_out)
        reading = f"teacher_{IDS}" if f"teacher_{IDS}" in documents.columns else IDS
        self.teacher_tokens, self.trained_tokens = documents.tokens(chosen, reading), documents.trained_tokens(chosen)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the fields and the two shares."""
        parts = {"parts": [part.as_dict() for part in self.parts]}
        return vars(self) | parts | {name: getattr(self, name) for name in ("trained_share", "packing_efficiency")}

    def __str__(self) -> str:
        lines = [
            f"{self.source}: {self.format}, {counted(self.rows_read, 'row')} read"
            + (" (cached)" if self.from_cache else ""),
            f"train: {counted(self.documents, 'document')}, {counted(self.tokens, 'token')} "
            f"({self.trained_share:.0%} learned) in {counted(self.rows, 'row')} of {self.max_length:,} "
            f"({self.packing_efficiency:.1%} full"
            + (f", with room for own answers of {counted(self.answer_room, 'token')})" if self.answer_room else ")"),
            f"held out: {counted(self.validation_documents, 'document')}, {counted(self.validation_tokens, 'token')}",
            *self._shares(),
        ]
        for reason, count in sorted(self.dropped.items(), key=lambda item: -item[1]):
            lines.append(f"dropped {count:,}: {reason} ({self.examples.get(reason, '')})")
        if self.copies:
            used = self.rows_read - sum(self.dropped.values())
            same = (
                "all are equal, so that what is held out is trained as well"
                if self.copies + 1 == used
                else "learned again"
            )
            lines.append(f"copies of other rows: {self.copies:,} of {used:,} ({same})")
        if self.truncated:
            lines.append(f"cut off at {self.max_length:,} tokens: {self.truncated:,}")
        if self.left_out:
            lines.append(f"turns left out, their prompts being {self.max_length:,} tokens or longer: {self.left_out:,}")
        lines += [f"{what} in {counted(count, 'row')}: {NOT_RENDERED} this chat template; learned without"
                  for what, count in self.unrendered.items()]  # fmt: skip
        if self.rewritten:
            lines.append(
                f"the chat template rewrites earlier turns: one example a turn (data.train_on: each) of "
                f"{counted(self.rewritten, 'chat')}"
            )
        if self.merged:
            lines.append(f"one token across the end of the prompt, not learned: {self.merged:,}")
        if self.roles:
            roles = ", ".join(f"{role!r:.40} in {counted(count, 'row')}" for role, count in self.roles.items())
            lines.append(f"roles that templates do not usually know, given to this one as they are: {roles}")
        if self.frozen_date:
            lines.append(f"the chat template's date is frozen at {self.frozen_date}")
        return "\n".join(lines)

    def _shares(self) -> Iterator[str]:
        """Of several sources a line each: what an epoch holds of it."""
        learned = [part.trained_tokens * part.epoch_rows / max(part.rows, 1) for part in self.parts]
        for part, tokens in zip(self.parts, learned, strict=True):
            share, times = part.epoch_rows / self.rows, part.epoch_rows / max(part.rows, 1)
            yield (
                f"{part.source}: {part.epoch_rows:,} of an epoch's {self.rows:,} rows ({share:.1%}), "
                f"{times:.2f} times its {counted(part.rows, 'row')} ({counted(part.documents, 'document')}); "
                f"{tokens / max(sum(learned), 1):.1%} of the learned tokens"
            )
