"""Assistant turns in a template's text: which characters a model is asked to write.

A template with `{% generation %}` markers says itself what the assistant wrote. For one without, the text before a
turn, closed by the generation prompt, is the beginning of the text with the turn; what follows is what a model is
asked to write. Both are rendered as inference would have them: with nothing after the turn.

Where every turn, rendered so, is also the beginning of the whole conversation's text, the conversation is one example.
A template that rewrites history (Qwen3 and GLM-4.5 drop earlier reasoning, gpt-oss ends a turn otherwise when it is the
last) needs an example a turn.

A turn ends with the special token that the template closes it with. Where it closes it with none, inference stops at
the special token that begins whatever comes next, if that is one of the model's stop tokens (GLM: `<|user|>`,
`<|observation|>`), else at the tokenizer's end-of-text token, which is added. Nothing after it is learned.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from distill.data.messages import CALL_ID, QUESTION, Adapter, said_by
from distill.data.rendering import Message, Renderer, Span, TemplateError, Tools
from distill.data.sources import RowFault

WHOLE = 64  # messages of a conversation whose turns are compared with all that stands before them
CHUNK = 8  # turns of a longer one that are rendered after the same few messages before them
ANSWER = {"role": "assistant", "content": "zqanswerqz"}
SHORTEST = 64  # characters by which the end of a prompt is found again
LARGER = 1.25  # an example so many times longer than the last one that fitted is tried anew


class Turn(NamedTuple):
    """One assistant turn after its prompt, as inference would have it.

    Attributes:
        text: the prompt and the turn, up to its end.
        spans: what a model writes of it, in order; the last one ends where the text does.
    """

    text: str
    spans: list[Span]


class RenderedChat(NamedTuple):
    """A chat as text.

    Attributes:
        text: what the template makes of it.
        spans: character ranges to learn, in order, not overlapping.
        turns: numbers of the messages that these ranges write.
    """

    text: str
    spans: list[Span]
    turns: list[int]


class Turns:
    """Finds the assistant turns of conversations, in the layout of `adapter`."""

    def __init__(self, renderer: Renderer, adapter: Adapter) -> None:
        self._renderer, self._adapter = renderer, adapter

    def whole(self, messages: Sequence[Message], tools: Tools, turns: Sequence[int]) -> RenderedChat | None:
        """All of a conversation as one example; None where a turn would be another text than inference has."""
        text, spans = self._renderer.raw(messages, tools).text, []
        for number, turn, end, place in self._located(messages, tools, turns):
            piece = turn.text[end:]
            is_last = number == len(messages) - 1
            if is_last and not text.startswith(piece, place) and piece.startswith(text[place:].rstrip()):
                text = text[:place] + piece  # the template leaves the last turn open
            if not text.startswith(piece, place):
                return None
            spans += [(start - end + place, stop - end + place) for start, stop in turn.spans]
        return RenderedChat(text, spans, list(turns))

    def each(
        self, messages: Sequence[Message], tools: Tools, turns: Sequence[int], fits: Callable[[str], bool] | None = None
    ) -> Iterator[RenderedChat]:
        """An example of each turn: the prompt that inference would have, and the turn.

        Args:
            fits: whether a text is short enough; asked when examples have become longer by a quarter, and where it
                says no, that turn and those after it are left out.
        """
        tried = 0.0
        for number in turns:
            turn = self.turn(messages, tools, number)
            if fits is not None and (length := turn.spans[0][0]) > tried:
                if not fits(turn.text[:length]):
                    return
                tried = LARGER * length
            yield RenderedChat(turn.text, turn.spans, [number])

    def turn(self, messages: Sequence[Message], tools: Tools, number: int) -> Turn:
        """Message `number` after those before it.

        Raises:
            RowFault: it is the first, or the template refuses the messages up to it.
            TemplateError: what the assistant wrote cannot be told.
        """
        if number == 0:
            raise RowFault("the chat begins with the assistant", "no prompt to learn an answer to")
        before = self._renderer.raw(messages[:number], tools, prompt=True).text
        upto, marks = self._renderer.raw(messages[: number + 1], tools, mark=self._renderer.marked)
        if self._renderer.marked:
            return self._marked(messages, tools, number, before, upto, joined(marks))
        message = messages[number]
        if upto.startswith(before):
            start = len(before)
        elif (place := _after(before, upto)) is not None:  # an earlier message is written otherwise now
            upto, start = before + upto[place:], len(before)
        else:
            start = self._shared_prompt(messages, tools, number, before, upto)
            if thought := self._lost_thought(message, before, upto[start:]):
                turn = thought + self._end(upto, start, message)[start:].lstrip("\n")
                return Turn(before + turn, [(len(before), len(before) + len(turn))])
        text = self._end(upto, start, message)
        if self._header and text.startswith(self._header, start) and not before.endswith(self._header):
            start += len(self._header)  # the generation prompt lacks the turn's header, which no model is to write
        return Turn(text, [(start, len(text))])

    def _marked(
        self, messages: Sequence[Message], tools: Tools, number: int, before: str, upto: str, marks: list[Span]
    ) -> Turn:
        """The ranges that markers set off, of this turn: those that the messages before it do not have."""
        earlier = joined(self._renderer.raw(messages[:number], tools, mark=True).spans)
        spans = marks[len(earlier) :]
        if upto.startswith(before):  # the generation prompt may hold the first of what the markers set off
            spans = [(max(start, len(before)), end) for start, end in spans if end > len(before)]
            if spans and not upto[len(before) : spans[0][0]].strip():
                spans[0] = len(before), spans[0][1]
        if not spans:
            raise RowFault("the template marks nothing as the assistant's")
        text = self._end(upto, spans[-1][0], messages[number], spans[-1][1])
        return Turn(text, [*spans[:-1], (spans[-1][0], len(text))])

    def _end(self, upto: str, start: int, message: Message, marked: int | None = None) -> str:
        """The text up to the turn's end, closed by the token at which inference stops.

        A template may end a whole chat with a token more (Phi-3): what closes a turn stands directly after the words.
        """
        if run := self._closing_run(upto, start):
            if marked is not None:  # of tokens after the markers the first one
                run = [match for match in run if match.end() <= marked][-1:] or run[:1]
            known = [match for match in run if match[0] == self._closing]
            text = upto[: (known or run)[-1].end()]
            ended = known or any(match[0] in self._renderer.stops for match in run)
            return text if ended else text + self._stop_after(bool(said_by(message).calls))
        text = upto.rstrip()
        if len(text) < start or not upto[start:].strip():
            text = upto
        return text + self._stop_after(bool(said_by(message).calls))

    def _closing_run(self, text: str, start: int) -> list[re.Match[str]]:
        """The special tokens that end a text, with only white space between and after them."""
        run: list[re.Match[str]] = []
        end = len(text)
        for match in reversed(list(self._renderer.special.finditer(text, start))):
            if text[match.end() : end].strip():
                break
            run.insert(0, match)
            end = match.start()
        return run

    @functools.cached_property
    def _closing(self) -> str | None:
        """The special token that ends an assistant's plain words: of those that adjoin the first at which inference
        stops, else the first."""
        try:
            text = self._renderer.raw(self._adapter([QUESTION, ANSWER])).text
        except RowFault:
            return None
        run = self._closing_run(text, 0)
        for match, following in zip(run, [*run[1:], None], strict=True):
            if match[0] in self._renderer.stops:
                return match[0]
            if following is None or following.start() != match.end():
                break
        return run[0][0] if run else None

    def _stop_after(self, calls: bool) -> str:
        """What ends a turn that the template does not close: see the head of this file; "" where nothing can."""
        return self._stop_after_calls if calls else self._stop_after_words

    @functools.cached_property
    def _stop_after_words(self) -> str:
        return self._begins_next([QUESTION, ANSWER], QUESTION) or self._renderer.eos or ""

    @functools.cached_property
    def _stop_after_calls(self) -> str:
        function = {"name": "zqcallqz", "arguments": {"a": "b"}}
        call = {**ANSWER, "tool_calls": [{"id": CALL_ID, "type": "function", "function": function}]}
        result = {"role": "tool", "content": "zqresultqz", "name": "zqcallqz", "tool_call_id": CALL_ID}
        return self._begins_next([QUESTION, call], result) or self._renderer.eos or ""

    def _begins_next(self, messages: list[Message], following: Message) -> str | None:
        """The stop token that directly follows these messages when another one does."""
        try:
            upto = self._renderer.raw(self._adapter(messages)).text.rstrip()
            longer = self._renderer.raw(self._adapter([*messages, following])).text
        except RowFault:
            return None
        rest = longer[len(upto) :].lstrip() if longer.startswith(upto) else ""
        first = self._renderer.special.match(rest)
        return first[0] if first is not None and first[0] in self._renderer.stops else None

    def closings(self) -> set[str]:
        """Special tokens that end plain answers and tool calls: what a trained model stops at."""
        function = {"name": "zqcallqz", "arguments": {"a": "b"}}
        call = {"role": "assistant", "tool_calls": [{"id": CALL_ID, "type": "function", "function": function}]}
        ends = set()
        for answer in (ANSWER, call):
            try:
                text = self.turn(self._adapter([QUESTION, answer]), None, 1).text
            except (RowFault, TemplateError):
                continue
            ends |= {match[0] for match in self._closing_run(text, 0)[-1:]}
        return ends

    @functools.cached_property
    def _header(self) -> str:
        """What a generation prompt adds to a plain question, as far as a finished answer has it too."""
        try:
            asked, prompt = (self._renderer.raw(self._adapter([QUESTION]), prompt=end).text for end in (False, True))
            answered = self._renderer.raw(self._adapter([QUESTION, ANSWER])).text
        except RowFault:
            return ""
        return prompt[len(asked) : _shared(prompt, answered)] if prompt.startswith(asked) else ""

    def _shared_prompt(self, messages: Sequence[Message], tools: Tools, number: int, before: str, upto: str) -> int:
        """Length of what a generation prompt shares with a finished turn, where it says more than that
        (DeepSeek-R1 opens a `<think>`)."""
        closed = self._renderer.raw(messages[:number], tools).text
        if upto.startswith(closed) and before.startswith(closed):
            other = self._renderer.raw([*messages[:number], *self._adapter([ANSWER])], tools).text
            shared = min(_shared(before, other), _shared(before, upto))
            if shared > len(closed):
                return shared
        raise TemplateError(self._refusal(number, before, upto))

    def _lost_thought(self, message: Message, before: str, turn: str) -> str:
        """Reasoning that the template leaves out of a turn whose generation prompt opens it, with its end."""
        thought = said_by(message).thought.strip()
        if not thought or thought in turn or not before.rstrip().endswith("<think>"):
            return ""
        return f"{thought}\n</think>\n\n"

    def _refusal(self, number: int, part: str, whole: str) -> str:
        """Why turn `number` cannot be told: `part`, the text before it, is not in `whole`."""
        same = _shared(part, whole)
        return (
            "data.chat_template: what the assistant wrote cannot be told from this template, since its text for the "
            f"first {number} messages is not the beginning of its text for one more: they part after "
            f"{part[max(0, same - 40) : same]!r}, as {part[same : same + 40]!r} and {whole[same : same + 40]!r}. "
            "Give a .jinja file with {% generation %} markers around the assistant's words"
        )

    def _located(
        self, messages: Sequence[Message], tools: Tools, turns: Sequence[int]
    ) -> Iterator[tuple[int, Turn, int, int]]:
        """Each turn with a place in its own text up to which all is compared already, and the same place in the
        whole text.

        Of a long conversation the turns are rendered after the messages before the first answer and a few before the
        turn: what the template writes of a turn may depend on those, and time stays linear.
        """
        if len(messages) <= WHOLE:
            yield from ((number, self.turn(messages, tools, number), 0, 0) for number in turns)
            return
        answers = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
        head, rank = list(messages[: answers[0]]), {number: place for place, number in enumerate(answers)}
        skipped = place = end = reached = 0
        for first in range(0, len(turns), CHUNK):
            chunk = turns[first : first + CHUNK]
            if first:
                skipped = answers[max(0, rank[turns[first - 1]] - 1)] - len(head)
            window = [*head, *messages[len(head) + skipped : chunk[-1] + 1]]
            if first:
                end, place = len(self.turn(window, tools, turns[first - 1] - skipped).text), reached
            for number in chunk:
                turn = self.turn(window, tools, number - skipped)
                yield number, turn, end, place
                reached = place + len(turn.text) - end


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if other.startswith(one[low:middle], low) else (low, middle - 1)
    return low


def _after(before: str, upto: str) -> int | None:
    """Where in `upto` the end of `before` ends, if it stands there once; None otherwise."""
    length = SHORTEST
    while length < len(before):
        count = upto.count(before[-length:])
        if count < 2:
            return upto.index(before[-length:]) + length if count else None
        length *= 4
    return None


def joined(spans: Sequence[Span]) -> list[Span]:
    """Ranges with those that touch made one; empty ones left out."""
    found: list[Span] = []
    for start, end in sorted((start, end) for start, end in spans if end > start):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
