"""Formats of rows: running text, a prompt with its completion, or a chat.

`detect` decides by the columns; `RowFormat.sample` turns one row into a `ConversationSample`, or raises `RowFault` with
the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

from distill.data.known_columns import (
    CHAT,
    CHAT_COLUMNS,
    COLUMNS,
    NEEDS_TEMPLATE,
    PAIR,
    PAIR_COLUMNS,
    PROMPTS,
    TEXT_COLUMNS,
    Known,
    carries_words,
    is_blank,
)
from distill.data.row_reader import ConversationSample, RowReader, Unread
from distill.data.rows import RawRow, RowFault

MOST_LAYOUTS = 1024  # different sets of columns in the rows of one source that are remembered
MAIN = {"text", "prompt", "completion", "messages", "rendered"}  # roles that a format is made of; others are beside it


class FieldMap(Protocol):
    """Mapping of `data.fields`: the column of each field, None where not set."""

    text: str | None
    prompt: str | None
    completion: str | None
    messages: str | None


@dataclass(frozen=True)
class RowFormat:
    """Format of a source's rows.

    Attributes:
        kind: `text`, `prompt_completion`, `chat` or `prompts`.
        columns: role (text, prompt, completion, messages, rendered, then those of `known_columns.COLUMNS`) to column.
        keeps_empty: an empty answer is no fault of a row.
        pairs_as_chat: a pair becomes a user's and an assistant's turn, since there is a chat template.
        ignored: columns, and keys as `messages.KEY`, that are not read on purpose (`data.unread`).
        template_reads: what the chat templates read, as of `known_columns.template_names`.
    """

    kind: str
    columns: dict[str, str] = field(default_factory=dict)
    pairs_as_chat: bool = False
    keeps_empty: bool = False
    ignored: tuple[str, ...] = ()
    template_reads: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = ", ".join(role if role == column else f"{role}: {column}" for role, column in self.columns.items())
        shape = ", as chat turns" if self.pairs_as_chat else ""
        return f"{self.kind} ({names}{shape})"

    def without(self, columns: Sequence[str]) -> RowFormat:
        """Return the format that leaves these columns to others, such as those that only the teacher reads."""
        kept = {role: name for role, name in self.columns.items() if role in MAIN or name not in columns}
        return replace(self, columns=kept, ignored=(*self.ignored, *columns))

    @property
    def renders_chats(self) -> bool:
        """Return whether a chat template renders the rows, so that system prompts, tools and reasoning can be read."""
        return self.kind == CHAT or self.pairs_as_chat

    def columns_of(self, row: RawRow) -> dict[str, str]:
        """Return the columns of a row by their roles: rows of one file may have more than the first ones."""
        names = tuple(row)
        if names not in self._columns_by_names:
            if len(self._columns_by_names) >= MOST_LAYOUTS:
                self._columns_by_names.clear()
            self._columns_by_names[names] = self.columns | columns_beside(self, names)
        return self._columns_by_names[names]

    @functools.cached_property
    def _columns_by_names(self) -> dict[tuple[str, ...], dict[str, str]]:
        return {}

    def sample(self, row: RawRow) -> ConversationSample:
        """Convert one row.

        A pair with a chat template becomes a chat of two turns; without one, prompt and completion are concatenated,
        with a newline if neither has white space at the joint.

        Raises:
            RowFault: A value is missing, empty or of the wrong type, or the row is not to be trained on.
        """
        return RowReader(self, row).sample()

    def unread_columns(self, row: RawRow, used: Collection[str] = ()) -> list[Unread]:
        """Return the columns of a row that hold something and are not read.

        Args:
            used: Texts of the conversation as it is read.
        """
        read = {*self.columns_of(row).values(), *self.ignored}
        names = [name for name, value in row.items() if name not in read and not is_blank(value)]
        return [Unread(name, carries_words(name, row[name], row, self.kind, used)) for name in names]


def prompt_columns(columns: Sequence[str], fields: FieldMap) -> dict[str, str]:
    """Return which column holds prompts, by its role: `rendered` (stored rollouts), `messages` or `prompt`; or none."""
    if {"prompt_ids", "answer_ids", "prompt"} <= set(columns):
        return {"rendered": "prompt"}
    named = {role: name for role in ("messages", "prompt") if (name := getattr(fields, role))}
    chat = next(({"messages": name} for name in CHAT_COLUMNS if name in columns), None)
    names = (*(name for name, _ in PAIR_COLUMNS), *TEXT_COLUMNS)
    return named or chat or next(({"prompt": name} for name in names if name in columns), {})


def detect(
    columns: Iterable[str],
    fields: FieldMap,
    format: str = "auto",
    *,
    source: str = "",
    has_template: bool = False,
    rows: Callable[[], Iterable[RawRow | RowFault]] = tuple,
    ignored: Sequence[str] = (),
) -> RowFormat:
    """Determine the format of rows.

    Args:
        fields: The recipe's `data.fields`; columns that it names must exist.
        format: The recipe's `data.format`; `auto` decides by mapped fields, then by column names.
        source: Name of the data, for error messages.
        has_template: Whether pairs can be rendered as chats.
        rows: Function that reads the rows; the first one decides the advice where no format is found.
        ignored: The recipe's `data.unread`.

    Raises:
        ValueError: A named column is missing, or no format is found; the message lists the columns.
    """
    columns = list(dict.fromkeys(columns))
    there = f"the columns of {source or 'the data'} are {', '.join(map(repr, columns)) or 'none'}"
    mapped = {role: name for role in ("text", "prompt", "completion", "messages") if (name := getattr(fields, role))}
    for role, name in mapped.items():
        if name not in columns:
            raise ValueError(f"data.fields.{role}: no column {name!r}; {there}")

    def made(kind: str, main: dict[str, str]) -> RowFormat:
        as_chat = has_template and kind in (PAIR, PROMPTS)
        format = RowFormat(kind, main, pairs_as_chat=as_chat, ignored=tuple(ignored))
        return with_columns_beside(format, columns, fields)

    if format == "prompts":
        prompts = prompt_columns([name for name in columns if name not in ignored], fields)
        if not prompts:
            raise ValueError(f"data.fields: expected a column prompt, or a column messages; {there}")
        if "messages" in prompts and not has_template:
            raise ValueError(
                "data.chat_template: expected a chat template for prompts that are chats, got none; give a .jinja "
                "file, or the tokenizer of an instruct model"
            )
        return made("prompts", prompts)
    kind, found = _shape([name for name in columns if name not in ignored], mapped, format)
    if found is None:
        needs = {
            "text": "a column text",
            "prompt_completion": "columns prompt and completion",
            "chat": "a column messages",
        }
        expected = needs.get(format, "a column text, columns prompt and completion, or a column messages")
        raise ValueError(f"data.fields: expected {expected}; {there}; {_cure(columns, format, rows())}")
    if kind == "chat" and not has_template:
        raise ValueError(
            "data.chat_template: expected a chat template for data that are chats, got none; give a .jinja file, or "
            "the tokenizer of an instruct model"
        )
    return made(kind, found)


def with_columns_beside(format: RowFormat, columns: Sequence[str], fields: FieldMap) -> RowFormat:
    """Return the format with the columns that are read beside its own: as the recipe maps them, else by their names.

    Raises:
        ValueError: A mapped column is missing, or cannot be read in rows of this format.
    """
    format = replace(format, columns=format.columns | _mapped_beside(format, columns, fields))
    return replace(format, columns=format.columns | columns_beside(format, columns))


def columns_beside(format: RowFormat, columns: Iterable[str]) -> dict[str, str]:
    """Return the columns that are read beside those of the prompt, the completion or the messages, by their roles."""
    main = format.columns
    found = dict[str, str]()
    there = [name for name in columns if name not in format.ignored and name not in main.values()]
    for known in COLUMNS:
        if known.role in main or known.role == "media" or not _is_read(known, format):
            continue
        name = next((name for name in known.names if name in there), None)
        if name is not None:
            found[known.role] = name
    if "prompt" not in main:  # messages hold these
        return {role: name for role, name in found.items() if role not in ("context", "input", "history")}
    if main["prompt"] != "instruction":
        found.pop("input", None)  # its meaning beside another prompt is not known
    elif "context" in found and "input" not in {*found, *main}:
        found["input"] = found.pop("context")  # Dolly calls context what Alpaca calls input
    return found


def _is_read(known: Known, format: RowFormat) -> bool:
    return format.kind in known.kinds and (format.renders_chats or known.role not in NEEDS_TEMPLATE)


def _mapped_beside(format: RowFormat, columns: Collection[str], fields: FieldMap) -> dict[str, str]:
    """Return the columns that the recipe maps beside those of the prompt, the completion or the messages."""
    found = {}
    for known in COLUMNS:
        name = getattr(fields, known.role, None)
        if name is None:
            continue
        if name not in columns:
            there = ", ".join(map(repr, columns)) or "none"
            raise ValueError(f"data.fields.{known.role}: no column {name!r}; the columns are {there}")
        in_messages = "messages" in format.columns and known.role in ("context", "input", "history")
        if in_messages or not _is_read(known, format):
            why = f"in rows of format {format}" if in_messages or format.kind not in known.kinds else "by no template"
            why = "without a chat template" if why == "by no template" else why
            raise ValueError(f"data.fields.{known.role}: the column {name!r} cannot be read {why}")
        found[known.role] = name
    route = getattr(fields, "teacher", None)
    return found if route is None else found | {"teacher": route}


def _shape(columns: list[str], mapped: dict[str, str], format: str) -> tuple[str, dict[str, str] | None]:
    chat = {"messages": mapped["messages"]} if "messages" in mapped else None
    pair = None
    if "prompt" in mapped or "completion" in mapped:
        ends = {"prompt": mapped.get("prompt", "prompt"), "completion": mapped.get("completion", "completion")}
        pair = ends if set(ends.values()) <= set(columns) else None
    text = {"text": mapped["text"]} if "text" in mapped else None
    if format != "auto" or not mapped:
        chat = chat or next(({"messages": name} for name in CHAT_COLUMNS if name in columns), None)
        for first, second in PAIR_COLUMNS:
            if pair is None and first in columns and second in columns:
                pair = {"prompt": first, "completion": second}
        text = text or next(({"text": name} for name in TEXT_COLUMNS if name in columns), None)
    if format == "auto" and not mapped and text is None and len(columns) == 1 and not (chat or pair):
        text = {"text": columns[0]}
    shapes = {"chat": chat, "prompt_completion": pair, "text": text}
    if format != "auto":
        return format, shapes[format]
    return next(((kind, found) for kind, found in shapes.items() if found), ("text", None))


def _cure(columns: Sequence[str], format: str, rows: Iterable[RawRow | RowFault]) -> str:
    """Return a setting with which these columns can be read: another `data.format` if they have a known one."""
    known = None if format == "auto" else _shape(list(columns), {}, "auto")
    if known is not None and known[1] is not None:
        return f"they are {known[0]}: data.format={known[0]}"
    first: RawRow = next((row for row in islice(rows, 20) if isinstance(row, dict)), {})
    from distill.data.suggestions import field_settings

    return f"map them, as in {field_settings(columns, format, first)}"
