"""Check that a chat template renders all content of a conversation.

The words of each row are searched in the rendered text, ignoring white space and escapes: those of a trained turn in
what is trained of it, all others outside of what is trained. A template may render a field for some rows and cut it in
others (DeepSeek cuts text before `</think>`), so that every row is checked.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from distill.data.assistant_turns import RenderedChat
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


class Coverage(NamedTuple):
    """What the examples of a conversation contain of it, where they contain all that they must.

    Attributes:
        thoughts: Whether they contain all reasoning of trained turns.
        named: Descriptions of fields that they lack, and that rows are trained on without.
    """

    thoughts: bool
    named: tuple[str, ...]


def omission_fault(field: str, template: str) -> str:
    return f"{field}: {NOT_RENDERED} {template}; {CURES.get(field, CURE)}"


def _named(tool: Any) -> str:
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return str(inner.get("name", "")) if isinstance(inner, Mapping) else ""


def _described(tool: Any) -> str:
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    description = inner.get("description") if isinstance(inner, Mapping) else None
    return description if isinstance(description, str) else ""


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
        # first after the words found last, since messages come in order, then anywhere
        for begin in {self._at: None, 0: None}:
            at = self._dense.find(dense, begin)
            if at >= 0:
                self._at = at + len(dense) if ordered else self._at
                return True
        # a template may write its own marks between the words: each of them, in their order
        at = 0
        for word in _WORDS.findall(words):
            at = self._text.find(word, at)
            if at < 0:
                return False
            at += len(word)
        if _WORDS.search(words):
            return True
        # symbols alone, which JSON escapes
        return any(dense.replace("\\", "") in text.replace("\\", "") for text in (self._dense, self._dense_plain))

    def holds_times(self, words: str, times: int) -> bool:
        """Return whether words that the text holds unchanged stand in it so many times."""
        dense = _dense(words)
        found = max(self._dense.count(dense), self._dense_plain.count(dense))
        return found == 0 or found >= times


def _dense(text: str) -> str:
    return "".join(text.split())


def check_words(
    examples: Examples, messages: Sequence[Message], tools: Tools, turns: Sequence[int], template: str
) -> Coverage:
    """Check that the rendered examples contain a row's own words.

    Raises:
        RowFault: A message, tool call or tool of the row is missing or incomplete.
    """
    last = examples[-1]
    around = _Text(_outside(last))
    written = _texts_of(examples)
    thoughts = True
    named: dict[str, None] = {}
    repeats: Counter[tuple[_Text, str]] = Counter()
    for number, message in enumerate(messages[: turns[-1] + 1]):
        text = written.get(number, around)
        said = content_of(message)
        role = str(message.get("role"))
        field = role if role != "assistant" else BESIDE if said.calls else TEXT
        _require(text, said.answer, field, template, ordered=number not in written)
        # what two messages say stands in the text twice
        repeats[text, _dense(said.answer)] += 1
        if said.answer.strip() and not text.holds_times(said.answer, repeats[text, _dense(said.answer)]):
            raise RowFault(omission_fault(field, template), f"missing: message {number}")
        for index, (call, json_text) in enumerate(zip(said.calls, _json_arguments(message), strict=True)):
            call_field = PARALLEL if index else CALLS
            called = str(call.get("name", ""))
            _require(text, called, call_field, template)
            repeats[text, f"call {called}"] += 1
            if called and not text.holds_times(called, repeats[text, f"call {called}"]):
                raise RowFault(omission_fault(call_field, template), f"missing: call {index} of message {number}")
            if json_text is None or not text.holds(json_text):  # a template may print the arguments' JSON text as it is
                for words in _leaves(call.get("arguments")):
                    _require(text, words, call_field, template)
        thoughts = thoughts and (number not in written or text.holds(said.thought))
        name = message.get("name")
        if role != "tool" and name and not _Text(last.text).holds(str(name)):
            named[f"the field name of messages of {role}"] = None
        prompts = [example.text for example in examples[:-1] if max(example.turns) > number]
        if role == "system" and any(
            said.answer.strip() not in prompt and not _Text(prompt).holds(said.answer) for prompt in prompts
        ):
            named["messages of system in the prompts of some turns, as in inference"] = None
    for tool in tools or ():
        _require(around, _named(tool), TOOLS, template)
        if not around.holds(_described(tool)):
            named["descriptions of tools"] = None
    return Coverage(thoughts, tuple(named))


def _outside(example: RenderedChat) -> str:
    """Return the text of an example without what is trained of it."""
    parts = []
    begin = 0
    for start, end in example.spans:
        parts.append(example.text[begin:start])
        begin = end
    return "\n".join([*parts, example.text[begin:]])


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
