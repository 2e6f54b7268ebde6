"""Output of the commands: colours and tables in a terminal, plain text in a file or pipe, one line per error."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import math
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

# characters that move a terminal's cursor, change its colours or reverse text, and halves of surrogate pairs
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_KEY = re.compile(r" *\S[^:\n]{0,17}?(?:: +|  +)")  # the key of a line such as `steps       40 of 512 tokens`
_FIGURES = re.compile(r"(?<=\S)  +(?=\S)")  # the gap between two figures of a line


def printable(text: str) -> str:
    """Return `text` with control characters except tabs and newlines escaped, so that none reaches a terminal."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


@contextlib.contextmanager
def ignore_lost_terminal() -> Iterator[None]:
    """Ignore EIO from a write to a terminal that is gone: it comes before the SIGHUP that ends the run in order."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise


class VisibleFormatter(logging.Formatter):
    """Logging formatter that escapes control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


if logging.lastResort is not None:  # the handler of programs that configure no logging, as our commands
    logging.lastResort.setFormatter(VisibleFormatter())


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> None:
    """Print a table, wrapping cells where it is wider than the terminal; other outputs get it at full width.

    Args:
        numbers: align all columns but the first to the right.
    """
    console = Console(emoji=False)
    table = Table(header_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if numbers and index else "left"
        table.add_column(escape(printable(column)), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(escape(printable(cell)) for cell in row))
    if not console.is_terminal:
        console.width = max(console.width, console.measure(table).minimum)
    with console.capture() as shown:
        console.print(table)
    print("\n".join(map(str.rstrip, shown.get().splitlines())))


class _Activity:
    """Activity that takes a while: a line of a terminal's bar; in a log, a line every `LOGGED_EVERY_S` seconds."""

    def __init__(self, what: str, total: int | None, bar: Progress) -> None:
        self.what = what
        self.total = total
        self.bar = bar
        self.task = bar.add_task(escape(printable(what)), total=total, count="")
        self.done = 0
        self.logged = 0
        self.begun = time.monotonic()

    def advance(self, count: int, total: int | None) -> None:
        """Count what is done; once all is, the next of several things is counted from 0, with a total of its own."""
        if self.total and self.done >= self.total:
            self.done = 0
            self.total = None
        self.done = self.done + count
        self.total = total or self.total
        done = f"{self.done:,} of {self.total:,}" if self.total else f"{self.done:,}"
        self.bar.update(self.task, completed=self.done, total=self.total, count=done)
        seconds = time.monotonic() - self.begun
        if self.bar.disable and seconds // LOGGED_EVERY_S > self.logged:
            self.logged = int(seconds // LOGGED_EVERY_S)
            with ignore_lost_terminal():
                print(f"{printable(self.what)}: {done} after {seconds:.0f} s", file=sys.stderr, flush=True)


LOGGED_EVERY_S = 10.0
_activities: list[_Activity] = []  # the innermost last
_training_bar: list[Progress] = []  # at most one, which gets the lines of activities: a terminal shows one display


@contextlib.contextmanager
def spinner(what: str, total: int | None = None) -> Iterator[None]:
    """Show the name of an activity, its time and what `advance` counts, on standard error, while the body runs.

    A terminal shows a line that disappears at the end. Ranks other than 0 show nothing.

    Args:
        total: Number of things to do; None where it is not known.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    terminal = Console(stderr=True)
    bars = _training_bar + [each.bar for each in _activities]
    columns = SpinnerColumn(), TextColumn("{task.description}  {task.fields[count]}"), TimeElapsedColumn()
    bar = bars[0] if bars else Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal)
    with contextlib.nullcontext() if bars else bar:
        _activities.append(_Activity(what, total, bar))
        try:
            yield
        finally:
            bar.remove_task(_activities.pop().task)


@contextlib.contextmanager
def announced(activity: str, what: str, total: int | None = None) -> Iterator[None]:
    """Print an activity that takes a while, before it begins, and show its progress; rank 0 alone does."""
    if os.environ.get("RANK", "0") == "0":
        print_lines(f"{activity:<12}{what}")
    with spinner(activity, total):
        yield


def advance(count: int = 1, total: int | None = None) -> None:
    """Count things done in the innermost activity that is shown; does nothing without one.

    Args:
        total: Number of things to do, where it is known only now.
    """
    if _activities:
        _activities[-1].advance(count, total)


def share_bar(*bar: Progress) -> None:
    """Have the lines of activities added to a bar that a terminal shows; without one, they have their own again."""
    _training_bar[:] = bar


def print_lines(line: str) -> None:
    """Print lines, broken between words at the width of the terminal, at COLUMNS of the environment, or at 80."""
    width = Console().width
    print_verbatim("\n".join(part for whole in line.split("\n") for part in wrap_line(printable(whole), width)))


def print_verbatim(text: str) -> None:
    """Print text for copying or for programs (JSON, commands, data) without wrapping it."""
    with ignore_lost_terminal():
        print(printable(text), flush=True)


def wrap_line(line: str, width: int) -> list[str]:
    """Wrap a line at `width` columns, indenting later lines below the text after the key (`steps       40 of ...`)."""
    if len(line) <= width:
        return [line]
    lead = _KEY.match(line)
    own = len(line) - len(line.lstrip())
    # \0 stands for spaces that no line may break at: in a line of several figures those between single words, elsewhere
    # those between a number and its unit
    together = r"(?<=\S) (?=\S)" if len(_FIGURES.findall(line)) > 2 else r"(?<=\d) (?=[^\W\d])"
    line = re.sub(together, "\0", line)
    parts = textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * (lead.end() if lead else own),
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    return [part.replace("\0", " ") for part in parts] or [line]


def print_error(message: str) -> None:
    """Print an error on standard error, one line per fault, with the rank in a run of several processes."""
    rank = os.environ.get("RANK", "0")
    prefix = "distill: " if rank == "0" else f"distill (rank {rank}): "
    with ignore_lost_terminal():
        for line in message.split("\n"):
            print(prefix + printable(line), file=sys.stderr, flush=True)


def to_jsonable(value: object) -> object:
    """Return `value` in JSON types: dicts, lists, strings, finite numbers, and null for a number that is not finite."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return to_jsonable(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def fields_to_jsonable(value: object) -> dict[str, object]:
    """Return the fields of a dataclass or a named tuple, each converted by `to_jsonable`."""
    fields = to_jsonable(value)
    assert isinstance(fields, dict), type(value)
    return fields
