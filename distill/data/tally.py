"""What happened to the rows of a source: how many were read, dropped and why, cut off or changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from distill.data.chat import Message, TrainingChat
from distill.data.formats import KNOWN_ROLES
from distill.data.sources import RowFault

MOST_ROLES = 20


@dataclass
class Tally:
    """What happened to the rows.

    Attributes:
        rows_read: rows the source gave, usable or not.
        dropped: reason to number of rows.
        examples: reason to the first row it hit.
        truncated: chats and pairs whose end exceeded `max_length`.
        left_out: turns of chats, each an example of its own, whose prompts leave no room within `max_length`.
        rewritten: chats made one example a turn, since the template writes earlier turns otherwise.
        unrendered: a field that the template does not write, to number of rows that are trained without it.
        merged: chats and pairs in which one token holds the last of the prompt and the first of the answer; that
            token is not learned.
        roles: a role in chats that templates do not usually know, to number of rows; the template got it as it is.
    """

    rows_read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    truncated: int = 0
    left_out: int = 0
    rewritten: int = 0
    unrendered: Counter[str] = field(default_factory=Counter)
    merged: int = 0
    roles: Counter[str] = field(default_factory=Counter)

    @property
    def reasons(self) -> str:
        """The three commonest reasons for which rows were dropped, each with the first row it hit."""
        return "; ".join(f"{count:,} {why} ({self.examples[why]})" for why, count in self.dropped.most_common(3))

    def drop(self, number: int, fault: RowFault) -> None:
        """Count a row that cannot be used."""
        self.dropped[fault.reason] += 1
        example = f"row {number}: {fault.detail}"[:300]
        self.examples.setdefault(fault.reason, "".join(c if c.isprintable() else " " for c in example))

    def see_roles(self, messages: Iterable[Message]) -> None:
        """Count a chat's unusual roles; of endlessly many the first ones."""
        for role in sorted({str(message.get("role")) for message in messages} - KNOWN_ROLES):
            if role in self.roles or len(self.roles) < MOST_ROLES:
                self.roles[role] += 1

    def see_chat(self, made: TrainingChat) -> None:
        """Count what a chat's template did with it."""
        self.rewritten += made.rewritten
        self.left_out += made.left_out
        self.unrendered.update(made.named)

    def add(self, other: Tally) -> None:
        """Add the counts of later rows."""
        self.rows_read += other.rows_read
        self.dropped.update(other.dropped)
        self.examples = other.examples | self.examples
        self.truncated += other.truncated
        self.left_out += other.left_out
        self.rewritten += other.rewritten
        self.unrendered.update(other.unrendered)
        self.merged += other.merged
        self.roles.update(other.roles)

    @contextmanager
    def row(self, number: int) -> Iterator[None]:
        """Count what makes row `number` unusable, instead of raising it."""
        try:
            yield
        except RowFault as fault:
            self.drop(number, fault)
        except RecursionError:
            self.drop(number, RowFault("nested too deeply"))
