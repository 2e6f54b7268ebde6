"""Suggestions of `data.fields` for unrecognised columns, from their names and one row."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# common names of prompt and completion columns; the column of a preference file comes first
ASKED = re.compile(
    r"prompt|question|instruction|query|ask(ed)?|user(_.*)?|human|request|problem|input|source|src|article|document|"
    r"context|title"
)
ANSWERED = re.compile(
    r"chosen|completion|answers?|response|output|say|said|reply|assistant(_.*)?|bot|target|tgt|solution|summary|"
    r"translation|label"
)
RUNNING = re.compile(r"text|content|body|story|passage|sentence|code|raw|markdown|document|article|.*_text")
ASIDE = re.compile(r"(.*[._-])?(id|idx|index|uuid|hash|url|source|lang|language|date|split|score|model|category|n)")
REJECTED = re.compile(r"rejected(_.*)?")
Shown = Mapping[str, object]


def field_settings(columns: Sequence[str], format: str, row: Shown) -> str:
    """Return settings under `data.fields` that fit unrecognised columns.

    Args:
        row: One row, to distinguish chats and texts from numbers; empty where none can be read.

    Returns:
        Command-line overrides, with a remark where a column is not used.
    """
    chats = [name for name in columns if _is_chat(row.get(name))]
    preference = any(REJECTED.fullmatch(name.lower()) for name in columns) and "chosen" in columns
    remark = " (trains on the chosen responses; the rejected ones are not used)" if preference else ""
    usable = [name for name in columns if name not in row or isinstance(row[name], str) or name in chats]
    named = [name for name in usable if not REJECTED.fullmatch(name.lower())] or list(columns)
    if format == "chat" or (chats and format == "auto"):
        chat = next((name for name in ("chosen", *chats) if name in chats), named[0])
        asked = row.get("prompt")
        if not (preference and _is_chat(asked) and _begins_with_answer(row.get(chat))):
            return f"data.fields.messages={chat}{remark}"
    translated = {"source"} & set(named if "target" in named else ())
    told = [name for name in named if name in translated or not ASIDE.fullmatch(name.lower())] or named
    asked_in = next((name for name in told if ASKED.fullmatch(name.lower())), None)
    said_in = next((name for name in told if ANSWERED.fullmatch(name.lower()) and name != asked_in), None)
    if preference:
        said_in = "chosen"
    running = next((name for name in told if RUNNING.fullmatch(name.lower())), None)
    if format == "text" or (format == "auto" and (len(told) == 1 or (running and not (asked_in and said_in)))):
        return f"data.fields.text={running or told[0]}{remark}"
    if format == "auto" and preference and asked_in is None:
        return f"data.fields.text=chosen{remark}"
    others = [name for name in told if name not in (asked_in, said_in)]
    first = asked_in or (others.pop(0) if others else "NAME")
    second = said_in or (others.pop(0) if others else "NAME")
    return f"data.fields.prompt={first} data.fields.completion={second}{remark}"


def _is_chat(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _begins_with_answer(value: object) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and first.get("role") == "assistant"
