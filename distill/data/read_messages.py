"""Messages of a row, from the layouts of other tools to OpenAI's: a role, a text, reasoning, calls.

What a message says ends up in `role`, `content`, `reasoning_content`, `tool_calls`, `name` and `tool_call_id`, or the
row is refused with a `RowFault`; keys that nothing reads are named. Where the meaning of a key is another tool's, that
tool's documentation and code were followed: ms-swift (`loss`, roles `tool_call` and `tool_response`, turns as `human`
and `assistant`), axolotl (`train`, `train_detail`), LLaMA-Factory (roles `function_call` and `observation`), OpenAI
(`weight`, `function_call`, `refusal`, harmony's `channel`), OpenRouter (`reasoning_details`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from distill.data.known_columns import MEDIA, READ_KEYS, REASONING, REASONING_ALIASES, TRAINED, TRAINED_PARTS, is_blank
from distill.data.rendering import Message, Tools
from distill.data.rows import RowFault

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "tool_response": "tool",
    "function": "tool",
}
CALL_ROLES = ("function_call", "tool_call")  # a message that is a call, as JSON text
# roles known to common chat templates; other roles are passed to the template unchanged, and reported
KNOWN_ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython"}
TEXT_PARTS = ("text", "input_text", "output_text", "None")
THOUGHT_PARTS = ("reasoning", "thinking", "think")
# keys of ms-swift's turns
ASKED = ("human", "user")
ANSWERED = ("assistant", "gpt", "bot")


class Conversation(NamedTuple):
    """Messages as they are read.

    Attributes:
        messages: The messages.
        tools: Tools on offer, of a system message; None if it has none.
        unread: Keys that are not read, as `messages.KEY`.
    """

    messages: list[Message]
    tools: Tools
    unread: frozenset[str]


def read_messages(
    value: object,
    column: str,
    *,
    adds_nulls: bool = False,
    ignored: Collection[str] = (),
    template_reads: Collection[str] = (),
) -> Conversation:
    """Read the messages of a column.

    Args:
        adds_nulls: The row is of a table that gives every object the keys of all: those that are null go. In other
            rows a null is what was written, and stays in a call's arguments.
        ignored: Keys that are not read on purpose, as `messages.KEY`.
        template_reads: Keys that the chat template reads, as `messages.KEY`.

    Raises:
        RowFault: They are no messages, or hold what is not text.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):  # a csv holds a chat as JSON text
        value = parsed_json(value, column)
    if value is None:
        raise RowFault("null", f"column {column!r}")
    if isinstance(value, Mapping):  # one message, as LLaMA-Factory's chosen
        value = [value]
    if not isinstance(value, list):
        raise RowFault("wrong type", f"column {column!r}: expected a list of messages, got {type(value).__name__}")
    if not value:
        raise RowFault("empty", f"column {column!r}: no messages")
    reader = _Reader(column, adds_nulls, ignored, template_reads)
    messages = [reader.message(message) for item in value for message in _turns_of(item)]
    messages = _joined_calls(_without_channels(messages, column))
    return Conversation(messages, reader.tools, frozenset(reader.unread))


def read_history(value: Any, column: str) -> list[Message]:
    """Read earlier turns: pairs of question and answer, as a list or as JSON text."""
    if isinstance(value, str):
        value = parsed_json(value, column)
    pairs = value if isinstance(value, list) else [value]
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise RowFault("wrong type", f"column {column!r}: expected pairs of question and answer")
    messages = []
    for question, answer in pairs:
        if not isinstance(question, str) or not isinstance(answer, str):
            raise RowFault("wrong type", f"column {column!r}: expected texts of question and answer")
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def read_tools(value: Any, column: str, *, adds_nulls: bool = False) -> Tools:
    """Read JSON schemas of tools, or JSON text of all or each; OpenAI's older `functions` get a level `function`."""
    if isinstance(value, str) and value.strip():
        value = parsed_json(value, column)
    if is_blank(value):
        return None
    if not isinstance(value, list):
        raise RowFault("wrong type", f"column {column!r}: expected a list, got {type(value).__name__}")
    tools = [parsed_json(tool, column) if isinstance(tool, str) else tool for tool in value]
    if adds_nulls:
        tools = [without_nulls(tool) for tool in tools]
    if column.endswith("functions"):
        tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    return tools


def parsed_json(text: str, column: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowFault("invalid JSON", f"column {column!r}: {error}") from error


def without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _turns_of(item: object) -> Iterator[object]:
    """Yield a message, or the two of a turn: an object with `human` and `assistant`, or a pair of texts."""
    if isinstance(item, Mapping) and not {"role", "from", "content"} & item.keys():
        asked = next((name for name in (*ASKED, "tool") if not is_blank(item.get(name))), None)
        answered = next((name for name in ANSWERED if not is_blank(item.get(name))), None)
        if asked and answered:
            system = item.get("system")
            if not is_blank(system):
                yield {"role": "system", "content": system}
            rest = {name: value for name, value in item.items() if name not in (asked, answered, "system")}
            yield {"role": "user" if asked in ASKED else asked, "content": item[asked]}
            yield {"role": "assistant", "content": item[answered], **rest}
            return
    if isinstance(item, list) and len(item) == 2 and all(isinstance(text, str) for text in item):
        yield {"role": "user", "content": item[0]}
        yield {"role": "assistant", "content": item[1]}
        return
    yield item


class _Reader:
    """Reader of one conversation's messages; it collects tools of system messages and keys that are not read."""

    def __init__(
        self, column: str, adds_nulls: bool, ignored: Collection[str], template_reads: Collection[str]
    ) -> None:
        self.column = column
        self.adds_nulls = adds_nulls
        self.ignored = ignored
        self.template_reads = template_reads
        self.tools: Tools = None
        self.unread: set[str] = set()

    def fault(self, reason: str, detail: str) -> RowFault:
        return RowFault(reason, f"column {self.column!r}: {detail}")

    def message(self, given: Any) -> Message:
        if not isinstance(given, Mapping):
            raise self.fault("wrong type", f"expected messages, got {type(given).__name__}")
        message = without_nulls(given) if self.adds_nulls else _without_null_keys(given)
        message = {name: item for name, item in message.items() if f"messages.{name}" not in self.ignored}
        self._name_unread(message)
        if "role" not in message and "from" in message:  # the ShareGPT layout
            message["role"] = message.pop("from")
            message["content"] = message.pop("value", None)
        role = message.get("role")
        if not isinstance(role, str):
            raise self.fault("wrong type", "a message without a role")
        plain = role.strip().lower()
        message["role"] = ROLES.get(plain, plain if plain in KNOWN_ROLES or plain in CALL_ROLES else role)
        if message["role"] in CALL_ROLES:
            message |= {"role": "assistant", "content": "", "tool_calls": self._calls_of(message.get("content"))}
            message["is_call"] = True
        # in this order: parts of the content may hold reasoning, and the check is of what the others have made
        self._read_content(message)
        self._read_calls(message)
        self._read_reasoning(message)
        self._read_flags(message)
        if message["role"] in ("system", "developer"):
            self._read_tools(message)
        self._check(message, role)
        return message

    def _name_unread(self, message: Message) -> None:
        for name, value in message.items():
            if name not in READ_KEYS and not is_blank(value):
                self._not_read(name)

    def _calls_of(self, content: object) -> list[Any]:
        made: Any = parsed_json(content, self.column) if isinstance(content, str) else content
        calls = made if isinstance(made, list) else [made]
        if not all(isinstance(call, Mapping) and "name" in call for call in calls):
            raise self.fault("wrong type", "expected a call with name and arguments")
        return [{"type": "function", "function": dict(call)} for call in calls]

    def _read_content(self, message: Message) -> None:
        """Join content in parts; a template that knows no parts would print them as Python."""
        parts = message.get("content")
        if not isinstance(parts, list):
            return
        texts = list[str]()
        thoughts = list[str]()
        for part in parts:
            kind = str(part.get("type")) if isinstance(part, Mapping) else "text"
            text: object = part
            if isinstance(part, Mapping):
                text = part.get("text") if kind in TEXT_PARTS else part.get(kind, part.get("text"))
            if not isinstance(text, str) or kind not in (*TEXT_PARTS, *THOUGHT_PARTS):
                kinds = sorted({str(p.get("type")) if isinstance(p, Mapping) else type(p).__name__ for p in parts})
                raise self.fault("not text", f"content in parts of {', '.join(kinds)}")
            (thoughts if kind in THOUGHT_PARTS else texts).append(text)
        message["content"] = "".join(texts)
        if thoughts:
            self._add_reasoning(message, "\n".join(thoughts), "content")

    def _read_calls(self, message: Message) -> None:
        """Hold that tool calls are what templates take for them; without calls there is no such key."""
        calls = message.pop("tool_calls", None)
        if isinstance(calls, str) and calls.strip():
            calls = parsed_json(calls, self.column)
        legacy = message.pop("function_call", None)  # OpenAI's before 2024
        if isinstance(legacy, str) and legacy.strip():
            legacy = parsed_json(legacy, self.column)
        if not is_blank(legacy):
            if not is_blank(calls):
                raise self.fault("wrong type", "a message with both tool_calls and function_call")
            calls = [{"type": "function", "function": legacy}]
        if is_blank(calls):
            return
        if not isinstance(calls, list) or any(not isinstance(call, Mapping) for call in calls):
            raise self.fault("wrong type", "expected tool_calls as a list of objects")
        message["tool_calls"] = [self._call(_without_null_keys(call)) for call in calls]

    def _call(self, call: Message) -> Message:
        function = call.get("function", call)
        if not isinstance(function, Mapping):
            raise self.fault("wrong type", "expected the function of a tool call as an object")
        arguments = function.get("arguments")
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            arguments = {}
        try:
            made = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError) as error:
            raise self.fault("arguments of a tool call are no JSON", f"{arguments!r:.80}: {error}") from error
        if not isinstance(made, Mapping):
            raise self.fault("arguments of a tool call are no JSON", f"expected an object, got {arguments!r:.80}")
        changed = {**_without_null_keys(function), "arguments": arguments}
        return changed if function is call else {**call, "function": changed}

    def _read_reasoning(self, message: Message) -> None:
        for name in (*REASONING, *REASONING_ALIASES):
            if not isinstance(message.get(name, ""), str):
                raise self.fault("wrong type", f"expected {name} as text")
        for name in REASONING_ALIASES:
            self._add_reasoning(message, message.pop(name, ""), name)
        details = message.pop("reasoning_details", None)
        if not is_blank(details):
            found = [detail for detail in details if isinstance(detail, Mapping)] if isinstance(details, list) else []
            texts = [detail[key] for detail in found for key in ("text", "summary") if isinstance(detail.get(key), str)]
            given = any(not is_blank(message.get(name)) for name in REASONING)
            if not texts and not given:
                raise self.fault("reasoning that is no text", "reasoning_details")
            if not given:  # else the same once more, in parts
                message[REASONING[0]] = "".join(texts)
        given_texts = {message[name].strip() for name in REASONING if not is_blank(message.get(name))}
        if len(given_texts) > 1:
            raise self.fault("two different reasonings", f"of {' and '.join(n for n in REASONING if message.get(n))}")

    def _add_reasoning(self, message: Message, text: str, name: str) -> None:
        if not text.strip():
            return
        earlier = next((message[key] for key in REASONING if not is_blank(message.get(key))), text)
        if earlier.strip() != text.strip():
            raise self.fault("two different reasonings", f"another one in {name}")
        message.setdefault(REASONING[0], text)

    def _read_flags(self, message: Message) -> None:
        is_assistant = message["role"] == "assistant"
        for name in TRAINED:
            if message.get(name, 1) not in (0, 1):
                raise self.fault("wrong type", f"expected {name} of 0 or 1, got {message[name]!r}")
            if not is_assistant and message.pop(name, 0) and name in ("train", "training"):
                self._not_read(f"{message['role']}.{name}")  # axolotl trains on such a message of a user
        details = [message.pop(name) for name in TRAINED_PARTS if name in message]
        details = [detail for detail in details if not is_blank(detail)]
        if details and is_assistant:
            message[TRAINED_PARTS[0]] = [self._range(detail) for detail in details[0]]
        elif any(bool(part.get("train")) for detail in details for part in detail if isinstance(part, Mapping)):
            self._not_read(f"{message['role']}.{TRAINED_PARTS[0]}")

    def _not_read(self, name: str) -> None:
        if f"messages.{name}" not in (*self.template_reads, *self.ignored):
            self.unread.add(f"messages.{name}")

    def _range(self, part: Any) -> Message:
        names = ("begin_offset", "end_offset", "train")
        if not isinstance(part, Mapping) or not all(isinstance(part.get(name), int) for name in names):
            raise self.fault("wrong type", f"expected {TRAINED_PARTS[0]} with {', '.join(names)}")
        return {name: part[name] for name in names}

    def _read_tools(self, message: Message) -> None:
        """Take the tools of a system message, unless the template reads them there itself."""
        for name in ("tools", "functions"):
            if name not in message or f"messages.{name}" in self.template_reads:
                continue
            tools = read_tools(message.pop(name), name, adds_nulls=self.adds_nulls)
            if tools and self.tools and tools != self.tools:
                raise self.fault("tools in two places", "of system messages")
            self.tools = tools or self.tools

    def _check(self, message: Message, role: str) -> None:
        """Raise for what cannot be trained on: nothing, no text, a refusal, an unfinished answer."""
        for name in MEDIA:
            if not is_blank(message.pop(name, None)):
                raise self.fault("not text", f"{name} of a message")
        if message.get("prefix") is True and message["role"] == "assistant":
            raise self.fault("an answer that is to be continued", "a message with prefix: true")
        content = message.get("content")
        refusal = message.pop("refusal", None)
        if not is_blank(refusal):
            raise self.fault("a refusal", f"{refusal!r:.80}")
        has_more = message.get("tool_calls") or any(message.get(name) for name in REASONING)
        if content is None and not has_more and not (message["role"] in ("system", "developer") and self.tools):
            raise self.fault("null", f"a message of {role} without content")
        if content is not None and not isinstance(content, str):
            raise self.fault("wrong type", f"content is {type(content).__name__}")
        if content is None:
            message["content"] = ""
        if message["role"] == "user" and not message["content"].strip():  # of the assistant's see data.empty_answers
            raise self.fault("empty", f"a message of {role} without content")


def _without_null_keys(message: Mapping[str, Any]) -> Message:
    """Return a message without its own null keys; what its values hold stays as it is written."""
    return {key: value for key, value in message.items() if value is not None}


def _without_channels(messages: list[Message], column: str) -> list[Message]:
    """Return messages with those of harmony's channel `analysis` as the reasoning of the answer that follows."""
    made = list[Message]()
    thoughts = list[str]()
    for message in messages:
        channel = message.pop("channel", None) if message["role"] == "assistant" else None
        if channel == "analysis" and not message.get("tool_calls"):
            thoughts.append(message["content"])
            continue
        if thoughts:
            if message["role"] != "assistant" or any(message.get(name) for name in REASONING):
                raise RowFault("reasoning without an answer", f"column {column!r}: a message of channel analysis")
            message[REASONING[0]] = "\n".join(thoughts)
            thoughts = []
        made.append(message)
    if thoughts:
        raise RowFault("reasoning without an answer", f"column {column!r}: a message of channel analysis")
    return made


def _joined_calls(messages: list[Message]) -> list[Message]:
    made = list[Message]()
    for message in messages:
        is_call = message.pop("is_call", False)
        before = made[-1] if made else {}
        same = all(bool(before.get(name, 1)) == bool(message.get(name, 1)) for name in TRAINED)
        # a call in a message of its own belongs to the turn before it, unless only one of the two is trained on
        if is_call and same and before.get("role") == "assistant":
            before["tool_calls"] = [*before.get("tool_calls", ()), *message["tool_calls"]]
            continue
        made.append(message)
    return made
