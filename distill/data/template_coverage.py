"""Check that a chat template renders all content of a conversation.

Once per shape of conversation (sequence of roles, set of fields) each field is filled with a marker, which is searched
in the rendered text. A template may still cut real text in a marker's place (DeepSeek cuts text before `</think>`), so
the words of each row are searched too, ignoring white space and escapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from distill.data.assistant_turns import RenderedChat
from distill.data.known_columns import REASONING
from distill.data.messages import MessageContent, content_of
from distill.data.rendering import NOT_RENDERED, Message, Tools
from distill.data.rows import RowFault

CALLS = "tool_calls"
PARALLEL = "the second of parallel tool_calls"
BESIDE = "content beside tool_calls"
TEXT = "content"
THOUGHT = "reasoning"
TOOLS = "tools"
DOCUMENTS = "documents"
MOST_KINDS = 256  # largest number of messages in a shape
CURES = {
    CALLS: "choose a template with tools",
    PARALLEL: "choose a template with parallel tool calls",
    BESIDE: "choose a template that writes text beside a tool call",
    TOOLS: "choose a template with tools",
    DOCUMENTS: "choose a template with documents",
    "tool": "choose a template with tools",
    THOUGHT: "choose a template with reasoning, or set data.reasoning",
}
CURE = "choose a template that writes it"
_WORDS = re.compile(r"\w+")
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")

Examples = Sequence[RenderedChat]
Render = Callable[[Sequence[Message], Tools, list[int]], Examples]


class Omission(NamedTuple):
    """Content that a template omits.

    Attributes:
        fault: First omitted field that changes the meaning of a row; None where there is none.
        thought: Whether reasoning of a trained turn is omitted.
        named: Descriptions of other omitted fields.
    """

    fault: str | None = None
    thought: bool = False
    named: tuple[str, ...] = ()


def omission_fault(field: str, template: str) -> str:
    """Return the reason why a row is dropped, with the cure."""
    return f"{field}: {NOT_RENDERED} {template}; {CURES.get(field, CURE)}"


def chat_shape(messages: Sequence[Message], tools: Tools, turns: Sequence[int]) -> tuple[tuple[object, ...], list[int]]:
    """Return a conversation's shape, and the indices of the messages that define it; none for too many kinds.

    Repetitions are removed: messages between two alike whose pairs of neighbours all occur before.
    """
    learned = set(turns)
    kept = list[int]()
    signs = [_signature(message, number in learned) for number, message in enumerate(messages)]

    def neighbours(numbers: list[int]) -> set[tuple[object, object]]:
        return {(signs[one], signs[other]) for one, other in pairwise(numbers)}

    for number, sign in enumerate(signs):
        alike = [place for place, other in enumerate(kept) if signs[other] == sign]
        if len(alike) > 1 and neighbours([*kept[alike[-1] :], number]) <= neighbours(kept[: alike[-1] + 1]):
            del kept[alike[-1] :]
        kept.append(number)
        if len(kept) > MOST_KINDS:
            return (), []
    first = tools[0] if tools else None
    offered = (len(tools or ()) > 1, isinstance(first, Mapping) and "function" in first) if tools else None
    return (offered, *(signs[number] for number in kept)), kept


def _signature(message: Message, learned: bool) -> tuple[object, ...]:
    """Return the properties of a message that affect rendering, apart from its words."""
    said = content_of(message)
    content = message.get("content")
    kind = None if content is None else isinstance(content, str) and (bool(content.strip()), "<think>" in content)
    calls = tuple(bool(call.get("arguments")) for call in said.calls[:2])
    fields = tuple(name in message for name in (*REASONING, "name", "tool_call_id"))
    ids = tuple(isinstance(call, Mapping) and "id" in call for call in (message.get("tool_calls") or ())[:2])
    return (message.get("role"), kind, bool(said.thought.strip()), calls, ids, fields, learned)


def find_omission(render: Render, messages: Sequence[Message], tools: Tools, turns: list[int]) -> Omission | None:
    """Return the content that a template omits for this shape; None where it refuses the conversation with markers.

    Args:
        render: Function that renders rows as `ChatTemplate` does.
        messages: Conversation of this shape; its words are replaced.
        turns: Indices of the messages to train on.
    """
    filled = [_filled(message, number) for number, message in enumerate(messages)]
    offered = [_tool(number) for number in range(min(2, len(tools)))] if tools else None
    try:
        examples = render(filled, offered, turns)
    except RowFault:
        return None
    written = {turn: "".join(e.text[a:b] for a, b in e.spans) for e in examples for turn in e.turns}
    everything = examples[-1].text
    lost = list[str]()
    named = dict[str, None]()
    thought = False
    for number, message in enumerate(filled[: turns[-1] + 1]):
        text = written.get(number, everything)
        said = content_of(message)
        role = str(message.get("role"))
        if said.calls and not _written(said.calls[0], text):
            lost.append(CALLS)
        elif any(not _written(call, text) for call in said.calls[1:]):
            lost.append(PARALLEL)
        if said.answer.strip() and said.answer.strip() not in text:
            lost.append(BESIDE if said.calls else TEXT if role == "assistant" else role)
        thought = thought or (number in written and bool(said.thought.strip()) and said.thought.strip() not in text)
        prompts = [example.text for example in examples if max(example.turns) > number]
        if (
            role == "system"
            and said.answer.strip() in everything
            and any(said.answer.strip() not in p for p in prompts)
        ):
            named["messages of system in the prompts of some turns, as in inference"] = None
        if role != "tool" and (name := message.get("name")) and name not in everything:
            named[f"the field name of messages of {role}"] = None
    if offered is not None:
        if any(_named(tool) not in everything for tool in offered):
            lost.append(TOOLS)
        elif any(tool["function"]["description"] not in everything for tool in offered):
            named["descriptions of tools"] = None
    return Omission(lost[0] if lost else None, thought, tuple(named))


def _marker(what: str, number: int, part: int = 0) -> str:
    return f"zq{what}{number}x{part}qz"


def _filled(message: Message, number: int) -> Message:
    """Return the message with a marker in each field that has content."""
    made = dict(message)
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        found = content_of(message).thought if not any(message.get(name) for name in REASONING) else ""
        thought = f"<think>\n{_marker('thought', number)}\n</think>\n\n" if found.strip() else ""
        made["content"] = thought + _marker("content", number)
    for name in REASONING:
        if isinstance(message.get(name), str):
            made[name] = _marker("thought", number)
    if message.get("name") and message.get("role") != "tool":
        made["name"] = _marker("name", number)
    calls = content_of(message).calls
    if calls:
        made["tool_calls"] = [
            {
                **{name: value for name, value in outer.items() if name in ("id", "type")},
                "function": {
                    "name": _marker("call", number, part),
                    "arguments": {_marker("key", number, part): _marker("value", number, part)}
                    if call.get("arguments")
                    else {},
                },
            }
            for part, (outer, call) in enumerate(zip(message["tool_calls"], calls, strict=False))
        ][:2]
    return made


def _written(call: Mapping[str, Any], text: str) -> bool:
    arguments = call.get("arguments")
    words = [call.get("name"), *(arguments or {}), *(arguments or {}).values()]
    return all(str(word) in text for word in words)


def _tool(number: int) -> dict[str, Any]:
    text = {"type": "string", "description": _marker("parameterdescription", number)}
    parameters = {"type": "object", "properties": {_marker("parameter", number): text}, "required": []}
    described = {"name": _marker("tool", number), "description": _marker("description", number)}
    return {"type": "function", "function": {**described, "parameters": parameters}}


def _named(tool: Any) -> str:
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return str(inner.get("name", "")) if isinstance(inner, Mapping) else ""


class _Text:
    """Text with a search for words in their order."""

    def __init__(self, text: str) -> None:
        plain = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text)
        if plain != text:  # an escape may be half of a character beyond the first 65,536
            plain = plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        self._text = plain
        self._dense = _dense(text)
        self._dense_plain = _dense(plain)
        self._at = 0

    def holds(self, words: str, *, ordered: bool = False) -> bool:
        """Return whether the text contains the words, ignoring white space, or each of them in turn."""
        dense = _dense(words)
        for begin in {self._at: None, 0: None}:
            at = self._dense.find(dense, begin)
            if at >= 0:
                self._at = at + len(dense) if ordered else self._at
                return True
        at = 0
        for word in _WORDS.findall(words):
            at = self._text.find(word, at)
            if at < 0:
                return False
            at += len(word)
        if _WORDS.search(words):
            return True
        return any(dense.replace("\\", "") in text.replace("\\", "") for text in (self._dense, self._dense_plain))


def _dense(text: str) -> str:
    return "".join(text.split())


def check_words(
    examples: Examples, messages: Sequence[Message], tools: Tools, turns: Sequence[int], template: str
) -> bool:
    """Check that the rendered examples contain a row's own words.

    Returns:
        Whether they also contain all reasoning of trained turns.

    Raises:
        RowFault: A message, tool call or tool of the row is missing or incomplete.
    """
    everything = _Text(examples[-1].text)
    written = _texts_of(examples)
    thoughts = True
    for number, message in enumerate(messages[: turns[-1] + 1]):
        text = written.get(number, everything)
        said = content_of(message)
        role = str(message.get("role"))
        field = role if role != "assistant" else BESIDE if said.calls else TEXT
        _require(text, said.answer, field, template, ordered=number not in written)
        for call, json_text in zip(said.calls, _json_arguments(message), strict=True):
            _require(text, str(call.get("name", "")), CALLS, template)
            if json_text is None or not text.holds(json_text):  # a template may print the arguments' JSON text as it is
                for words in _leaves(call.get("arguments")):
                    _require(text, words, CALLS, template)
        thoughts = thoughts and (number not in written or text.holds(said.thought))
    for tool in tools or ():
        _require(everything, _named(tool), TOOLS, template)
    return thoughts


def check_documents(examples: Examples, kwargs: Mapping[str, Any], template: str) -> None:
    """Check that the prompts contain the documents of `chat_template_kwargs`.

    Raises:
        RowFault: The text of one is missing.
    """
    documents = kwargs.get(DOCUMENTS)
    everything = _Text(examples[-1].text)
    for document in documents if isinstance(documents, list) else ():
        texts = document if isinstance(document, Mapping) else {"text": document}
        for name in ("text", "content", "contents"):
            if isinstance(texts.get(name), str):
                _require(everything, texts[name], DOCUMENTS, template)


def _texts_of(examples: Examples) -> dict[int, _Text]:
    """Return the trained text of each turn; turns of one example share it."""
    made = dict[int, _Text]()
    for example in examples:
        text = _Text("".join(example.text[start:end] for start, end in example.spans))
        made |= dict.fromkeys(example.turns, text)
    return made


def _require(text: _Text, words: str, field: str, template: str, *, ordered: bool = False) -> None:
    if words.strip() and not text.holds(words, ordered=ordered):
        raise RowFault(omission_fault(field, template), f"missing or incomplete: {' '.join(words.split())[:80]!r}")


def _json_arguments(message: Message) -> list[str | None]:
    """Return the arguments of each call that are JSON text in the data; None for the others."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    arguments = [function.get("arguments") for function in calls if isinstance(function, Mapping)]
    return [value if isinstance(value, str) else None for value in arguments]


def _leaves(arguments: Any) -> list[str]:
    """Return keys, texts and numbers of a call's arguments; JSON text unchanged."""
    if isinstance(arguments, Mapping):
        return [leaf for key, value in arguments.items() for leaf in (str(key), *_leaves(value))]
    if isinstance(arguments, list):
        return [leaf for value in arguments for leaf in _leaves(value)]
    if isinstance(arguments, str):
        return [arguments]
    return [str(arguments)] if isinstance(arguments, int | float) and not isinstance(arguments, bool) else []


def is_empty(said: MessageContent, thoughts: bool) -> bool:
    """Return whether an assistant's message is an empty response; `thoughts`: its reasoning is rendered."""
    return not (said.answer.strip() or said.calls or (thoughts and said.thought.strip()))
