"""Conversion of conversations to the message layout that a chat template renders completely.

Data and templates differ in layout, not in meaning: arguments of a call as an object or as JSON text, content as a
string or in parts, content next to a call empty, null or absent, reasoning in a field or as `<think>` in the text. The
layout that a template renders is found by rendering small conversations with markers, once per template.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

from distill.data.known_columns import REASONING, TRAINED, TRAINED_PARTS
from distill.data.rendering import Message, Renderer, TextSpan
from distill.data.rows import RowFault

THOUGHT = re.compile(r"\s*<think>(?P<thought>.*?)</think>(?P<answer>.*)", re.DOTALL)
DEVELOPER = re.compile(r"""(?P<quote>['"])developer(?P=quote)""")
QUESTION = {"role": "user", "content": "zqquestionqz"}
ABSENT = ...  # a singleton even when sent to another process
CALL_ID = "zq0000001"  # Mistral's ids have nine characters


class MessageContent(NamedTuple):
    """Content of an assistant's message.

    Attributes:
        thought: Reasoning, from a field or from the text before the answer.
        calls: Tool calls, each a mapping with `name` and `arguments`.
    """

    answer: str
    thought: str
    calls: list[Mapping[str, Any]]


def content_of(message: Message) -> MessageContent:
    content = message.get("content")
    text = content if isinstance(content, str) else ""
    thought = next((str(message[name]) for name in REASONING if isinstance(message.get(name), str)), "")
    if not thought.strip() and message.get("role") == "assistant" and (found := THOUGHT.match(text)):
        text = found["answer"]
        thought = found["thought"]
    calls = message.get("tool_calls")
    functions = [_function(call) for call in calls] if isinstance(calls, list) else []
    return MessageContent(text, thought, [_with_object(call) for call in functions if call is not None])


def _with_object(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a call's function with its arguments as an object, if they are JSON text of one."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return function
    try:
        made = json.loads(arguments)
    except (ValueError, RecursionError):
        return function
    return {**function, "arguments": made} if isinstance(made, Mapping) else function


def is_trained(message: Message) -> bool:
    return all(message.get(name, 1) for name in TRAINED)


def untrained_ranges(message: Message) -> list[TextSpan]:
    """Return the ranges of a message's text that its `train_detail` (axolotl) excludes.

    The ranges of `train_detail` include both ends, and what none of them covers is not trained on; [] without any.
    """
    details = message.get(TRAINED_PARTS[0])
    content = message.get("content")
    if not details or not isinstance(content, str):
        return []
    trained = [False] * len(content)
    # exclusions last: they win where ranges overlap
    for wanted in (True, False):
        for part in details:
            if bool(part["train"]) == wanted:
                begin = max(part["begin_offset"], 0)
                end = min(part["end_offset"] + 1, len(content))
                trained[begin:end] = [wanted] * max(end - begin, 0)
    bounds = [0, *(n for n in range(1, len(content)) if trained[n] != trained[n - 1]), len(content)]
    return [(begin, end) for begin, end in pairwise(bounds) if end > begin and not trained[begin]]


def without_reasoning(message: Message) -> Message:
    if message.get("role") != "assistant":
        return message
    kept = {name: value for name, value in message.items() if name not in REASONING}
    if isinstance(kept.get("content"), str) and (found := THOUGHT.match(kept["content"])):
        kept["content"] = found["answer"].lstrip()
    return kept


class MessageAdapter:
    """Converter of messages to the layout that one template renders.

    Attributes of the template, found on first use:
        parts: Content is read in parts (`[{"type": "text", "text": ...}]`), not as a string.
        calls: Content next to a call if the data have none ("", None or ABSENT), and the type of its arguments (dict,
            or str for JSON text); None if no layout renders a call.
        splits: Reasoning is read from a field, so that of the text (`<think>`) must be moved there.
        knows_developer: The template has a role `developer`.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def __call__(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages in the template's layout; the input is not modified."""
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> Message:
        message = dict(message)
        if message.get("role") == "developer" and not self.knows_developer:
            message["role"] = "system"
        if message.get("role") == "assistant":
            content = message.get("content")
            if isinstance(content, str) and "<think>" in content and (found := THOUGHT.match(content)) and self.splits:
                message |= {"content": found["answer"].lstrip("\n"), REASONING[0]: found["thought"].strip("\n")}
            thought = next((message[name] for name in REASONING if message.get(name)), None)
            if thought is not None:
                message = dict.fromkeys(REASONING, thought) | message
            calls = message.get("tool_calls")
            if isinstance(calls, list) and calls:
                message = self._with_calls(message, calls)
        if self.parts and isinstance(message.get("content"), str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        return message

    def _with_calls(self, message: Message, calls: list[Any]) -> Message:
        beside, kind = self.calls or ("", dict)
        message["tool_calls"] = [_call(call, kind) for call in calls]
        if not message.get("content"):
            message["content"] = beside
            if beside is ABSENT:
                del message["content"]
        return message

    def _shows(self, messages: Sequence[Message], *markers: str) -> bool:
        try:
            text = self._renderer.raw(messages).text
        except RowFault:
            return False
        return all(marker in text for marker in markers)

    @functools.cached_property
    def parts(self) -> bool:
        marker = str(QUESTION["content"])
        as_parts = {**QUESTION, "content": [{"type": "text", "text": marker}]}
        return not self._shows([QUESTION], marker) and self._shows([as_parts], marker)

    @functools.cached_property
    def calls(self) -> tuple[object, type] | None:
        shown = None
        # the first layout whose call the template writes, else the first that it accepts without writing the call
        for beside, arguments in product(("", None, ABSENT), ({"a": True}, '{"a": true}')):
            function = {"name": "zqcallqz", "arguments": arguments}
            call = {"id": CALL_ID, "type": "function", "function": function}
            content = {} if beside is ABSENT else {"content": beside}
            answer = {"role": "assistant", **content, "tool_calls": [call]}
            try:
                text = self._renderer.raw([self._plain(QUESTION), self._plain(answer)]).text
            except RowFault:
                continue
            # a Python value printed as it is: the template expects another layout
            if "{'a'" in text or "None" in text:
                continue
            if "zqcallqz" in text:
                return beside, type(arguments)
            shown = shown or (beside, type(arguments))
        return shown

    @functools.cached_property
    def splits(self) -> bool:
        answer = {"role": "assistant", "content": "zqanswerqz"} | dict.fromkeys(REASONING, "zqthoughtqz")
        return self._shows([self._plain(QUESTION), self._plain(answer)], "zqthoughtqz", "zqanswerqz")

    @functools.cached_property
    def knows_developer(self) -> bool:
        if DEVELOPER.search(self._renderer.source):
            return True
        return not self._shows(
            [self._plain({"role": "system", "content": "zqsystemqz"}), self._plain(QUESTION)], "zqsystemqz"
        )

    def _plain(self, message: Message) -> Message:
        if self.parts and isinstance(message.get("content"), str):
            return {**message, "content": [{"type": "text", "text": message["content"]}]}
        return message


def _function(call: Any) -> Mapping[str, Any] | None:
    """Return the function of a call; some data lack the level `function`."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else None


def _call(call: Any, kind: type) -> Any:
    """Return a call with its arguments as `kind`, if possible, and with its level `function`."""
    function = _function(call)
    if function is None:
        return call
    arguments = function.get("arguments")
    made: object = arguments
    if kind is dict and isinstance(arguments, str):
        try:
            made = json.loads(arguments)
        except (ValueError, RecursionError):
            made = None
    elif kind is str and isinstance(arguments, Mapping):
        made = json.dumps(arguments, ensure_ascii=False)
    # `function is call` where the level `function` is missing; this must still hold for the changed one
    if isinstance(made, kind) and made is not arguments:
        changed = {**function, "arguments": made}
        call, function = (changed, changed) if function is call else (call, changed)
    if function is call:
        inner = {name: value for name, value in function.items() if name in ("name", "arguments")}
        return {"type": "function", **{name: call[name] for name in call if name not in inner}, "function": inner}
    return {"type": "function", **call, "function": dict(function)}
