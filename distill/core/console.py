"""What the commands print: colours and tables in a terminal, plain text in a file or pipe, one line for an error."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

# what moves a terminal's cursor, changes its colours or turns text around, and halves of surrogate pairs
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_KEY = re.compile(r" *\S[^:\n]{0,17}?(?:: +|  +)")  # of a line such as `steps       40 of 512 tokens`
_FIGURES = re.compile(r"(?<=\S)  +(?=\S)")  # what stands between them


def visible(text: str) -> str:
    """`text` with its control characters but tabs and line ends written out, so that none reaches a terminal."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


@contextlib.contextmanager
def terminal_may_be_lost() -> Iterator[None]:
    """A write to a terminal that is gone fails before the signal that says so is heard; what was to be shown is lost,
    and the work goes on to where the signal is looked at."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise


class VisibleFormatter(logging.Formatter):
    """Log lines without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


if logging.lastResort is not None:  # it prints warnings where nobody set up logging, as our commands do not
    logging.lastResort.setFormatter(VisibleFormatter())


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> None:
    """Print a table whose columns have the words of their cells below one another where it is wider than the screen;
    where standard output is no terminal nothing is cut, not even a word that is too long.

    Args:
        numbers: align all columns but the first to the right.
    """
    console, table = Console(emoji=False), Table(header_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if numbers and index else "left"
        table.add_column(escape(visible(column)), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(escape(visible(cell)) for cell in row))
    if not console.is_terminal:
        console.width = max(console.width, console.measure(table).minimum)
    with console.capture() as shown:
        console.print(table)
    print("\n".join(map(str.rstrip, shown.get().splitlines())))


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show on standard error that something takes a while; nothing where that is no terminal, or from later ranks."""
    console = Console(stderr=True)
    if not console.is_terminal or os.environ.get("RANK", "0") != "0":
        yield
        return
    with console.status(escape(visible(what))):
        yield


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """A progress bar on standard error; yields the function that moves it on, None where that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(escape(visible(what)), total=total)
        yield lambda count: bar.advance(task, count)


def say(line: str) -> None:
    """Print lines, broken between words at the width of the terminal, at COLUMNS of the environment, or at 80."""
    width = Console().width
    say_verbatim("\n".join(part for whole in line.split("\n") for part in wrap_line(visible(whole), width)))


def say_verbatim(text: str) -> None:
    """Print what is to be copied or read by programs: JSON, commands, text of the data. Nothing is broken."""
    with terminal_may_be_lost():
        print(visible(text), flush=True)


def wrap_line(line: str, width: int) -> list[str]:
    """A line in parts of at most `width` columns, the later ones below what follows the key (`steps       40 of ...`,
    `  teacher: The ...`). No word is cut, and neither a figure's name nor its unit is taken from it."""
    if len(line) <= width:
        return [line]
    lead, own = _KEY.match(line), len(line) - len(line.lstrip())
    together = r"(?<=\S) (?=\S)" if len(_FIGURES.findall(line)) > 2 else r"(?<=\d) (?=[^\W\d])"
    line = re.sub(together, "\0", line)
    parts = textwrap.wrap(
        line, width, subsequent_indent=" " * (lead.end() if lead else own), break_long_words=False,
        break_on_hyphens=False, replace_whitespace=False,
    )  # fmt: skip
    return [part.replace("\0", " ") for part in parts] or [line]


def complain(message: str) -> None:
    """One line a fault on standard error, with the rank in a run of several processes."""
    rank = os.environ.get("RANK", "0")
    prefix = "distill: " if rank == "0" else f"distill (rank {rank}): "
    with terminal_may_be_lost():
        for line in message.split("\n"):
            print(prefix + visible(line), file=sys.stderr, flush=True)


def plain(value: object) -> object:
    """`value` as what JSON knows: dicts, lists, text, finite numbers, null where one is not finite."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def plain_fields(value: object) -> dict[str, object]:
    """The fields of a dataclass or a named tuple, each as `plain` makes it."""
    fields = plain(value)
    assert isinstance(fields, dict), type(value)
    return fields
