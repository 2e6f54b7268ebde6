"""Formats of rows: running text, a prompt with its completion, or a chat.

`detect` decides by the columns; `Reader` turns one row into a `Sample`, or raises `RowFault` with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from distill.data.messages import REASONING, TRAINED
from distill.data.rows import Row, RowFault

if TYPE_CHECKING:
    from distill.data.chat import Message, Tools

# column names in common use, tried in this order when the recipe maps none
CHAT_COLUMNS = ("messages", "conversations", "conversation", "chat")
PAIR_COLUMNS = (
    ("prompt", "completion"),
    ("question", "answer"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("prompt", "response"),
    ("query", "response"),
    ("input", "output"),
)
TEXT_COLUMNS = ("text", "content")
SYSTEM = "system"  # column of system prompts, in the layouts of ShareGPT and Alpaca
# columns of pairs that are not read, and what they mean in common layouts
UNREAD = {
    "history": "earlier turns of the conversation (Alpaca): write them into a column messages",
    "label": "responses that are not wanted, where it is false (KTO): leave these rows out",
}
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
# roles known to common chat templates; other roles are passed to the template unchanged, and reported
KNOWN_ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython"}


class FieldMap(Protocol):
    """Mapping of `data.fields`: the column of each field, None where not set."""

    text: str | None
    prompt: str | None
    completion: str | None
    messages: str | None


class Sample(NamedTuple):
    """Document before tokenisation.

    Attributes:
        text: Running text, or None.
        messages: Chat, or None.
        prompt: Prompt of a pair, masked from the loss, before `text`.
        tools: JSON schemas of the tools available in a chat.
        first_trained: Index of the first message that may be trained on.
    """

    text: str | None = None
    messages: list[Message] | None = None
    prompt: str | None = None
    tools: Tools = None
    first_trained: int = 0


@dataclass(frozen=True)
class Format:
    """Format of a source's rows.

    Attributes:
        kind: `text`, `prompt_completion`, `chat` or `prompts`.
        columns: role (text, prompt, completion, messages, rendered, system) to column.
        keeps_empty: an empty answer is no fault of a row.
        pairs_as_chat: a pair becomes a user's and an assistant's turn, since there is a chat template.
    """

    kind: str
    columns: dict[str, str] = field(default_factory=dict)
    pairs_as_chat: bool = False
    keeps_empty: bool = False

    def __str__(self) -> str:
        names = ", ".join(role if role == column else f"{role}: {column}" for role, column in self.columns.items())
        shape = ", as chat turns" if self.pairs_as_chat else ""
        return f"{self.kind} ({names}{shape})"

    def sample(self, row: Row) -> Sample:
        """Convert one row.

        A pair with a chat template becomes a chat of two turns; without one, prompt and completion are concatenated,
        with a newline if neither has white space at the joint.

        Raises:
            RowFault: A value is missing, empty or of the wrong type.
        """
        if self.kind == "text":
            return Sample(text=_text(row, self.columns["text"]))
        sample = self._prompt(row) if self.kind == "prompts" else self._pair_or_chat(row)
        system = row.get(SYSTEM) if SYSTEM in self.columns else None
        if sample.messages is None or not isinstance(system, str) or not system.strip():
            return sample
        if sample.messages[0]["role"] in ("system", "developer"):
            return sample
        messages = [{"role": "system", "content": system}, *sample.messages]
        return sample._replace(messages=messages, first_trained=sample.first_trained + 1)

    def _pair_or_chat(self, row: Row) -> Sample:
        if self.kind == "chat":
            return Sample(messages=_messages(row, self.columns["messages"]), tools=_tools(row))
        prompt, completion = self.columns["prompt"], self.columns["completion"]
        if isinstance(row.get(prompt), list):
            if not self.pairs_as_chat:
                raise RowFault(
                    "a chat without a chat template",
                    f"column {prompt!r} holds messages; give data.chat_template a .jinja file, or the tokenizer of an "
                    "instruct model",
                )
            turns, reply = _messages(row, prompt), _messages(row, completion)
            return Sample(messages=turns + reply, tools=_tools(row), first_trained=len(turns))
        question, answer = _question(row, prompt), _text(row, completion, keeps_empty=self.keeps_empty)
        if self.pairs_as_chat:
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            return Sample(messages=turns, tools=_tools(row))
        joint = "" if question[-1:].isspace() or answer[:1].isspace() else "\n"
        return Sample(text=answer, prompt=question + joint)

    def _prompt(self, row: Row) -> Sample:
        (role, column), *_ = self.columns.items()
        if role == "messages" or isinstance(row.get(column), list):
            return Sample(messages=_without_last_answer(_messages(row, column)), tools=_tools(row))
        text = _question(row, column)
        if role == "prompt" and self.pairs_as_chat:
            return Sample(messages=[{"role": "user", "content": text}], tools=_tools(row))
        return Sample(text="", prompt=text if role == "rendered" or text[-1:].isspace() else text + "\n")


def _without_last_answer(messages: list[Message]) -> list[Message]:
    """Return messages up to the last one that the assistant did not write."""
    count = len(messages)
    while count and messages[count - 1]["role"] == "assistant":
        count -= 1
    if not count:
        raise RowFault("no question", "nothing precedes the assistant's messages")
    return messages[:count]


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
    rows: Callable[[], Iterable[Row | RowFault]] = tuple,
) -> Format:
    """Determine the format of rows.

    Args:
        columns: Columns of the data.
        fields: The recipe's `data.fields`; columns that it names must exist.
        format: The recipe's `data.format`; `auto` decides by mapped fields, then by column names.
        source: Name of the data, for error messages.
        has_template: Whether pairs can be rendered as chats.
        rows: Function that reads the rows; the first one decides the advice where no format is found.

    Raises:
        ValueError: A named column is missing, or no format is found; the message lists the columns.
    """
    columns = list(dict.fromkeys(columns))
    there = f"the columns of {source or 'the data'} are {', '.join(map(repr, columns)) or 'none'}"
    mapped = {role: name for role in ("text", "prompt", "completion", "messages") if (name := getattr(fields, role))}
    for role, name in mapped.items():
        if name not in columns:
            raise ValueError(f"data.fields.{role}: no column {name!r}; {there}")
    if format == "prompts":
        if not (prompts := prompt_columns(columns, fields)):
            raise ValueError(f"data.fields: expected a column prompt, or a column messages; {there}")
        if "messages" in prompts and not has_template:
            raise ValueError(
                "data.chat_template: expected a chat template for prompts that are chats, got none; give a .jinja "
                "file, or the tokenizer of an instruct model"
            )
        return Format("prompts", prompts | system_column(columns, has_template), pairs_as_chat=has_template)
    kind, found = _shape(columns, mapped, format)
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
    if kind != "text":
        found = found | system_column(columns, has_template)
    return Format(kind, found, pairs_as_chat=kind == "prompt_completion" and has_template)


def system_column(columns: Iterable[str], has_template: bool) -> dict[str, str]:
    """Return the column of system prompts by its role, where there is one and chats are rendered."""
    return {SYSTEM: SYSTEM} if has_template and SYSTEM in columns else {}


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


def _cure(columns: Sequence[str], format: str, rows: Iterable[Row | RowFault]) -> str:
    """Return a setting with which these columns can be read: another `data.format` if they have a known one."""
    known = None if format == "auto" else _shape(list(columns), {}, "auto")
    if known is not None and known[1] is not None:
        return f"they are {known[0]}: data.format={known[0]}"
    first: Row = next((row for row in islice(rows, 20) if isinstance(row, dict)), {})
    from distill.data.suggestions import field_settings

    return f"map them, as in {field_settings(columns, format, first)}"


def _question(row: Row, column: str) -> str:
    """Return the text of a prompt; an instruction is followed by its input, as in Alpaca's rows."""
    text, extra = _text(row, column), row.get("input") if column == "instruction" else None
    return f"{text}\n\n{extra}" if isinstance(extra, str) and extra.strip() else text


def _text(row: Row, column: str, *, keeps_empty: bool = False) -> str:
    value = row.get(column)
    if value is None:
        raise RowFault("null", f"column {column!r}") if column in row else RowFault("no value", f"column {column!r}")
    if not isinstance(value, str):
        raise RowFault("wrong type", f"column {column!r}: expected text, got {type(value).__name__}")
    if not value.strip() and not keeps_empty:
        raise RowFault("empty", f"column {column!r}")
    return value


def _messages(row: Row, column: str) -> list[Message]:
    value = row.get(column)
    if isinstance(value, str) and value.lstrip().startswith("["):  # a csv holds a chat as JSON text
        value = _parsed(value, column)
    if value is None:
        raise RowFault("null", f"column {column!r}")
    if not isinstance(value, list):
        raise RowFault("wrong type", f"column {column!r}: expected a list of messages, got {type(value).__name__}")
    if not value:
        raise RowFault("empty", f"column {column!r}: no messages")
    return [_message(message, column) for message in value]


def _parsed(text: str, column: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowFault("invalid JSON", f"column {column!r}: {error}") from error


def _message(message: Any, column: str) -> Message:
    if not isinstance(message, dict):
        raise RowFault("wrong type", f"column {column!r}: expected messages, got {type(message).__name__}")
    message = _without_nulls(message)
    if "role" not in message and "from" in message:  # the ShareGPT layout
        message["role"] = message.pop("from")
        message["content"] = message.pop("value", None)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise RowFault("wrong type", f"column {column!r}: a message without a role")
    plain = role.strip().lower()
    message["role"] = ROLES.get(plain, plain if plain in KNOWN_ROLES else role)
    if isinstance(content, list):
        message["content"] = content = _joined_parts(content, column)
    _check_calls(message, column)
    for name in TRAINED:
        if message.get(name, 1) not in (0, 1):
            raise RowFault("wrong type", f"column {column!r}: expected {name} of 0 or 1, got {message[name]!r}")
    if content is None and not message.get("tool_calls") and not any(message.get(name) for name in REASONING):
        raise RowFault("null", f"column {column!r}: a message of {role} without content")
    if content is not None and not isinstance(content, str):
        raise RowFault("wrong type", f"column {column!r}: content is {type(content).__name__}")
    if content is None:
        message["content"] = ""
    if message["role"] == "user" and not message["content"].strip():  # of the assistant's see data.empty_answers
        raise RowFault("empty", f"column {column!r}: a message of {role} without content")
    return message


def _check_calls(message: Message, column: str) -> None:
    """Hold that tool calls and reasoning are what templates take for them; without calls there is no such key."""
    if isinstance(legacy := message.pop("function_call", None), dict):
        message.setdefault("tool_calls", [{"type": "function", "function": legacy}])  # OpenAI's before 2024
    calls = message.pop("tool_calls", None)
    if isinstance(calls, str) and calls.strip():
        calls = _parsed(calls, column)
    if calls:
        if not isinstance(calls, list) or any(not isinstance(call, dict) for call in calls):
            raise RowFault("wrong type", f"column {column!r}: expected tool_calls as a list of objects")
        if any(not isinstance(call.get("function", call), dict) for call in calls):
            raise RowFault("wrong type", f"column {column!r}: expected the function of a tool call as an object")
        message["tool_calls"] = calls
    for name in REASONING:
        if not isinstance(message.get(name, ""), str):
            raise RowFault("wrong type", f"column {column!r}: expected {name} as text")


def _joined_parts(parts: list[Any], column: str) -> str:
    """The text of a content that comes in parts; a template that knows no parts would print them as Python."""
    texts = [part if isinstance(part, str) else part.get("text") for part in parts if isinstance(part, str | dict)]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        kinds = sorted({str(p.get("type")) if isinstance(p, dict) else type(p).__name__ for p in parts})
        raise RowFault("not text", f"column {column!r}: content in parts of {', '.join(kinds)}")
    return "".join(texts)  # type: ignore[arg-type]


def _without_nulls(value: Any) -> Any:
    """Drop keys whose value is None: a table gives every message the keys of all."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _tools(row: Row) -> Tools:
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = _parsed(tools, "tools")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise RowFault("wrong type", f"column 'tools': expected a list, got {type(tools).__name__}")
    return [_without_nulls(tool) for tool in tools]
