"""Counts of a source's rows: read, dropped and why, truncated or changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distill.data.read_messages import KNOWN_ROLES
from distill.data.rows import RowFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distill.data.chat import TrainingChat
    from distill.data.rendering import Message
    from distill.data.row_reader import Unread

MOST_ROLES = 20
MOST_UNREAD = 100


@dataclass
class RowCounts:
    """Counts of rows.

    Attributes:
        examples: First dropped row by reason.
        truncated: Number of chats and pairs truncated at `max_length`.
        left_out: Number of turns (with one example per turn) whose prompts leave no room within `max_length`.
        rewritten: Number of chats with one example per turn, since the template rewrites earlier turns.
        unrendered: Number of rows trained on without a field, by field that the template does not render.
        merged: Number of chats and pairs in which one token spans the end of the prompt; it is not trained on.
        by_ids: Number of rows trained on by the token ids that were sampled (`distill sample`).
        without_end: Number of rows whose answers were cut off when they were generated: no end is trained on.
        roles: Number of rows by unusual role, which is passed to the template unchanged.
        unread: Number of rows by column, or key of messages (`messages.KEY`), that holds something and is not read.
        unread_words: Number of them in which it carries words of the conversation.
    """

    rows_read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    truncated: int = 0
    left_out: int = 0
    rewritten: int = 0
    unrendered: Counter[str] = field(default_factory=Counter)
    merged: int = 0
    by_ids: int = 0
    without_end: int = 0
    roles: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    unread_words: Counter[str] = field(default_factory=Counter)

    @property
    def reasons(self) -> str:
        """Return the three most frequent reasons for dropped rows, each with its first row."""
        return "; ".join(f"{count:,} {why} ({self.examples[why]})" for why, count in self.dropped.most_common(3))

    def drop(self, number: int, fault: RowFault) -> None:
        """Count a row that cannot be used, the first one being number 0; messages count from 1, as lines of a file."""
        self.dropped[fault.reason] += 1
        example = f"row {number + 1}: {fault.detail}"[:300]
        self.examples.setdefault(fault.reason, "".join(c if c.isprintable() else " " for c in example))

    def see_roles(self, messages: Iterable[Message]) -> None:
        for role in sorted({str(message.get("role")) for message in messages} - KNOWN_ROLES):
            if role in self.roles or len(self.roles) < MOST_ROLES:
                self.roles[role] += 1

    def see_unread(self, items: Sequence[Unread]) -> None:
        for item in items:
            if item.name in self.unread or len(self.unread) < MOST_UNREAD:
                self.unread[item.name] += 1
                if item.carries_words:
                    self.unread_words[item.name] += 1

    def see_chat(self, made: TrainingChat) -> None:
        self.rewritten += made.rewritten
        self.left_out += made.left_out
        self.unrendered.update(made.named)

    def add(self, other: RowCounts) -> None:
        self.rows_read += other.rows_read
        self.dropped.update(other.dropped)
        self.examples = other.examples | self.examples
        self.truncated += other.truncated
        self.left_out += other.left_out
        self.rewritten += other.rewritten
        self.unrendered.update(other.unrendered)
        self.merged += other.merged
        self.by_ids += other.by_ids
        self.without_end += other.without_end
        self.roles.update(other.roles)
        self.unread.update(other.unread)
        self.unread_words.update(other.unread_words)

    @contextmanager
    def row(self, number: int) -> Iterator[None]:
        """Count a fault raised in the block as a dropped row."""
        try:
            yield
        except RowFault as fault:
            self.drop(number, fault)
        except RecursionError:
            self.drop(number, RowFault("nested too deeply"))
