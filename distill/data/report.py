"""Report of the data: counts of trained, dropped and held-out documents and tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np

from distill.core.units import plural
from distill.data.packing import IDS, Documents
from distill.data.rendering import NOT_RENDERED
from distill.data.row_counts import RowCounts
from distill.data.token_cache import cache_key

MOST_SHOWN = 12  # names of columns in a line


@dataclass
class DataReport(RowCounts):
    """Report of the data that were read.

    Attributes:
        max_length: Maximum tokens in a row.
        documents: Number of pieces of text, chats and pairs to train on.
        teacher_tokens: Number of tokens in the teacher's input, where that differs.
        trained_tokens: Trained tokens among `tokens`.
        longest: Tokens of the longest document in the student's input.
        copies: Number of rows whose text occurs in another row.
        rows: Number of rows that the documents are packed into.
        validation_documents, validation_tokens: The same for held-out data.
        answer_room: Room in a row for each rollout, tokens; 0 without on-policy data.
        frozen_date: Day that replaces today's date in a chat template, if it writes one.
        from_cache: Whether tokens came from the cache.
        parts: Reports of several sources, of which the counts above are the sums.
        epoch_rows: Rows of this source in an epoch.
        is_sample: Whether the data are a stream, of which only the first rows were read.
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
    answer_room: int = 0
    frozen_date: str | None = None
    from_cache: bool = False
    parts: list[DataReport] = field(default_factory=list)
    epoch_rows: int = 0
    is_sample: bool = False

    @classmethod
    def of(cls, parts: list[Self], epoch_rows: Sequence[int]) -> Self:
        """Return the sums over several sources, with `epoch_rows` rows of each in an epoch."""
        total = cls(source=" + ".join(part.source for part in parts), max_length=parts[0].max_length)
        total.digest = cache_key([part.digest for part in parts])
        total.format = ", ".join(sorted({part.format for part in parts}, key=lambda name: not name.startswith("text")))
        total.frozen_date = max((part.frozen_date for part in parts if part.frozen_date), default=None)
        total.from_cache = all(part.from_cache for part in parts)
        total.longest = max(part.longest for part in parts)
        total.answer_room = parts[0].answer_room
        # all counts are summed but these: the same in every source, maxima, or summed by `add`
        apart = {"max_length", "longest", "answer_room", *(one.name for one in fields(RowCounts))}
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
        return self.trained_tokens / max(1, self.tokens)

    @property
    def packing_efficiency(self) -> float:
        return self.tokens / max(1, self.rows * self.max_length)

    def count(self, documents: Documents, chosen: np.ndarray, held_out_of: Documents, held_out: np.ndarray) -> None:
        self.documents = len(chosen)
        self.validation_documents = len(held_out)
        self.longest = int(documents.columns[IDS].lengths[chosen].max(initial=0))
        self.tokens = documents.tokens(chosen)
        self.validation_tokens = held_out_of.tokens(held_out)
        reading = f"teacher_{IDS}" if f"teacher_{IDS}" in documents.columns else IDS
        self.teacher_tokens = documents.tokens(chosen, reading)
        self.trained_tokens = documents.trained_tokens(chosen)

    def as_dict(self) -> dict[str, Any]:
        parts = {"parts": [part.as_dict() for part in self.parts]}
        return vars(self) | parts | {name: getattr(self, name) for name in ("trained_share", "packing_efficiency")}

    def __str__(self) -> str:
        lines = [
            f"{self.source}: {self.format}, {plural(self.rows_read, 'row')} read"
            + (" (cached)" if self.from_cache else ""),
            f"train: {plural(self.documents, 'document')}, {plural(self.tokens, 'token')} "
            f"({self.trained_share:.0%} trained) in {plural(self.rows, 'row')} of {self.max_length:,} "
            f"({self.packing_efficiency:.1%} full"
            + (f", with room for rollouts of {plural(self.answer_room, 'token')})" if self.answer_room else ")"),
            f"held out: {plural(self.validation_documents, 'document')}, {plural(self.validation_tokens, 'token')}",
            *self._shares(),
        ]
        if self.is_sample:
            lines.insert(1, "streaming: figures are estimates from these first rows; the others are read in training")
        for reason, count in sorted(self.dropped.items(), key=lambda item: -item[1]):
            lines.append(f"dropped {count:,}: {reason} ({self.examples.get(reason, '')})")
        if self.copies:
            used = self.rows_read - sum(self.dropped.values())
            same = (
                "all are equal, so that held-out rows are trained on as well"
                if self.copies + 1 == used
                else "trained on again"
            )
            lines.append(f"copies of other rows: {self.copies:,} of {used:,} ({same})")
        if self.truncated:
            lines.append(f"truncated at {self.max_length:,} tokens: {self.truncated:,}")
        if self.left_out:
            lines.append(
                f"turns dropped because their prompts have {self.max_length:,} tokens or more: {self.left_out:,}"
            )
        lines += [
            f"{what} in {plural(count, 'row')}: {NOT_RENDERED} this chat template; trained on without it"
            for what, count in self.unrendered.items()
        ]
        lines += self._unread_lines()
        if self.rewritten:
            lines.append(
                f"the chat template rewrites earlier turns: one example a turn (data.train_on: each) of "
                f"{plural(self.rewritten, 'chat')}"
            )
        if self.merged:
            lines.append(f"tokens across the end of the prompt, not trained on: {self.merged:,}")
        if self.by_ids:
            lines.append(f"trained on by their sampled token ids: {plural(self.by_ids, 'row')}")
        if self.without_end:
            lines.append(f"answers that were cut off, trained on without an end: {plural(self.without_end, 'row')}")
        if self.roles:
            roles = ", ".join(f"{role!r:.40} in {plural(count, 'row')}" for role, count in self.roles.items())
            lines.append(f"unusual roles, passed to the chat template unchanged: {roles}")
        if self.frozen_date:
            lines.append(f"the chat template's date is frozen at {self.frozen_date}")
        return "\n".join(lines)

    def _unread_lines(self) -> Iterator[str]:
        for what, in_messages in (("columns", False), ("keys", True)):
            names = sorted(name for name in self.unread if ("." in name) == in_messages)
            if names:
                shown = ", ".join(f"{name} in {plural(self.unread[name], 'row')}" for name in names[:MOST_SHOWN])
                more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
                yield f"{what} not read: {shown}{more}; data.unread=[{','.join(names[:MOST_SHOWN])}] silences this"

    def _shares(self) -> Iterator[str]:
        learned = [part.trained_tokens * part.epoch_rows / max(part.rows, 1) for part in self.parts]
        for part, tokens in zip(self.parts, learned, strict=True):
            share = part.epoch_rows / self.rows
            times = part.epoch_rows / max(part.rows, 1)
            yield (
                f"{part.source}: {part.epoch_rows:,} of an epoch's {self.rows:,} rows ({share:.1%}), "
                f"{times:.2f} times its {plural(part.rows, 'row')} ({plural(part.documents, 'document')}); "
                f"{tokens / max(sum(learned), 1):.1%} of the trained tokens"
            )
