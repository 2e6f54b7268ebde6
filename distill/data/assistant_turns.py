"""Location of assistant turns in a template's text: the characters that a model is trained to write.

A template with `{% generation %}` markers marks the assistant's text itself. Without them, the text before a turn, with
the generation prompt, is a prefix of the text with the turn; the rest is the text to train on. Both are rendered as in
inference: with nothing after the turn.

If every turn, rendered so, is also a prefix of the whole conversation's text, the conversation is one example. A
template that rewrites history (Qwen3 and GLM-4.5 drop earlier reasoning, gpt-oss ends the last turn differently) needs
one example per turn.

A turn ends with the special token with which the template closes it. Without one, inference stops at the special token
that begins the next message, if that is one of the model's stop tokens (GLM: `<|user|>`, `<|observation|>`), else at
the tokenizer's end-of-text token, which is added. Nothing after it is trained on.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from distill.data.messages import CALL_ID, QUESTION, MessageAdapter, content_of
from distill.data.rendering import NOT_LOCATED, Message, Renderer, TextSpan, Tools
from distill.data.rows import RowFault

WHOLE = 64  # messages up to which turns are compared with the whole conversation before them
CHUNK = 8  # turns of a longer conversation that are rendered after the same few messages
ANSWER = {"role": "assistant", "content": "zqanswerqz"}
END_MARK = "zqendqz"  # put after the words of an earlier message, to find what a template writes after them
EARLIER = 4  # messages before a turn that are tried with this mark, from the last one on
LARGER = 1.25  # growth of an example, relative to the last one that fitted, after which it is checked again


class AssistantTurn(NamedTuple):
    """Assistant turn after its prompt, as in inference.

    Attributes:
        text: Prompt and turn, up to its end.
        spans: Character ranges that a model writes, in order; the last one ends at the end of the text.
    """

    text: str
    spans: list[TextSpan]


class RenderedChat(NamedTuple):
    """Rendered chat.

    Attributes:
        text: Rendered text.
        spans: Character ranges to train on, in order, not overlapping.
        turns: Index of each range's message: a template may write one message in several ranges.
    """

    text: str
    spans: list[TextSpan]
    turns: list[int]


class Turns:
    """Locator of the assistant turns of conversations, in the layout of `adapter`."""

    def __init__(self, renderer: Renderer, adapter: MessageAdapter) -> None:
        self._renderer = renderer
        self._adapter = adapter

    def whole(self, messages: Sequence[Message], tools: Tools, turns: Sequence[int]) -> RenderedChat | None:
        """Return the whole conversation as one example; None where a turn's text differs from that of inference."""
        text = self._renderer.raw(messages, tools).text
        spans = []
        turn_of_span = []
        for number, turn, end, place in self._located(messages, tools, turns):
            piece = turn.text[end:]
            is_last = number == len(messages) - 1
            # The turn's own text has a stop token that `_end` added, where the template does not close the last turn:
            # the whole text gets it too. Earlier turns need none: the next message's header ends them.
            if is_last and not text.startswith(piece, place) and piece.startswith(text[place:].rstrip()):
                text = text[:place] + piece
            if not text.startswith(piece, place):
                return None
            # from positions in the turn's own text to those in the whole text
            spans += [(start - end + place, stop - end + place) for start, stop in turn.spans]
            turn_of_span += [number] * len(turn.spans)
        return RenderedChat(text, spans, turn_of_span)

    def each(
        self, messages: Sequence[Message], tools: Tools, turns: Sequence[int], fits: Callable[[str], bool] | None = None
    ) -> Iterator[RenderedChat]:
        """Yield one example per turn: the prompt as in inference, and the turn.

        Args:
            fits: Function that returns whether a text is short enough; called when examples have grown by a quarter. If
                not, that turn and those after it are left out.
        """
        tried = 0.0
        for number in turns:
            turn = self.turn(messages, tools, number)
            length = turn.spans[0][0]
            if fits is not None and length > tried:
                if not fits(turn.text[:length]):
                    return
                tried = LARGER * length
            yield RenderedChat(turn.text, turn.spans, [number] * len(turn.spans))

    def turn(self, messages: Sequence[Message], tools: Tools, number: int) -> AssistantTurn:
        """Return message `number` after those before it.

        Raises:
            RowFault: It is the first message, the template refuses the messages up to it, or the assistant's text
                cannot be located in the template's output.
        """
        if number == 0:
            raise RowFault("the chat begins with the assistant", "no prompt before the response")
        # `before` is what the model is given in inference, `upto` the same chat with its answer. The answer is what
        # `upto` has after `before`. The rest of this method is for templates in which `before` is no prefix of `upto`.
        before = self._renderer.raw(messages[:number], tools, prompt=True).text
        upto, marks = self._renderer.raw(messages[: number + 1], tools, mark=self._renderer.marked)
        message = messages[number]
        marks = merge_ranges(marks)
        place = len(before) if upto.startswith(before) else self._place(messages, tools, number, before, upto)
        if place is not None:  # the prompt as in inference, whatever earlier messages have become
            upto = before + upto[place:]
            marks = [(start - place + len(before), end - place + len(before)) for start, end in marks if end > place]
        if self._renderer.marked:
            return self._marked(messages, tools, number, before, upto, marks)
        if place is not None:
            start = len(before)
        else:
            start = self._shared_prompt(messages, tools, number, before, upto)
            # a model writes its reasoning first, and the template drops it from a finished turn: it is put back
            thought = self._lost_thought(message, before, upto[start:])
            if thought:
                turn = thought + self._end(upto, start, message)[start:].lstrip("\n")
                return AssistantTurn(before + turn, [(len(before), len(before) + len(turn))])
        text = self._end(upto, start, message)
        if self._header and text.startswith(self._header, start) and not before.endswith(self._header):
            start += len(self._header)  # the generation prompt lacks the turn's header, which a model does not write
        return AssistantTurn(text, [(start, len(text))])

    def _place(self, messages: Sequence[Message], tools: Tools, number: int, before: str, upto: str) -> int | None:
        """Return where turn `number` begins in `upto`, whose earlier messages differ from those in `before`.

        Both texts are compared from the last words of an earlier message on: what `before` has there, the end of that
        message and the generation prompt, is where the turn begins in `upto`. The words are found by a mark after
        them, not by themselves: the same text may stand in any other turn.

        Returns:
            None where `upto` has other text there than the generation prompt.
        """
        for earlier in reversed(range(max(0, number - EARLIER), number)):
            marked = _with_end_mark(messages[earlier])
            if marked is None:
                continue
            changed = [*messages[:earlier], marked, *messages[earlier + 1 : number]]
            try:
                prompt = _after_mark(self._renderer.raw(changed, tools, prompt=True).text, before)
                rest = _after_mark(self._renderer.raw([*changed, messages[number]], tools).text, upto)
            except RowFault:
                continue
            if prompt is None or rest is None:  # not rendered, or the mark has changed more than its message
                continue
            found = bool(prompt.strip()) and rest.startswith(prompt)
            return len(upto) - len(rest) + len(prompt) if found else None
        return None

    def _marked(
        self, messages: Sequence[Message], tools: Tools, number: int, before: str, upto: str, marks: list[TextSpan]
    ) -> AssistantTurn:
        """Return the marked ranges of this turn: those after everything that the messages before it render."""
        end = len(before)
        # A generation prompt may write text that a finished turn does not have: what comes before the turn is then the
        # history without that prompt.
        if not upto.startswith(before):
            closed = self._renderer.raw(messages[:number], tools).text
            if not upto.startswith(closed):
                raise self._not_located(number, before, upto)
            end = len(closed)
        # the generation prompt may contain the beginning of the marked range
        spans = [(max(start, end), stop) for start, stop in marks if stop > end]
        if spans and upto.startswith(before) and not upto[end : spans[0][0]].strip():
            spans[0] = end, spans[0][1]
        if not spans:
            raise RowFault("the template marks no assistant text")
        text = self._end(upto, spans[-1][0], messages[number], spans[-1][1])
        return AssistantTurn(text, [*spans[:-1], (spans[-1][0], len(text))])

    def _end(self, upto: str, start: int, message: Message, marked: int | None = None) -> str:
        """Return the text up to the turn's end, closed by the token at which inference stops.

        A template may end a whole chat with another token (Phi-3): a turn is closed by the one directly after the text.
        """
        run = self._closing_run(upto, start)
        if run:
            if marked is not None:  # the first token after the markers
                run = [match for match in run if match.end() <= marked][-1:] or run[:1]
            # the run may go on with the token that ends a whole chat: it is cut after the one that closes every answer
            known = [match for match in run if match[0] == self._closing]
            text = upto[: (known or run)[-1].end()]
            # a template may close turns with a token at which inference does not stop: the one at which it does follows
            ended = known or any(match[0] in self._renderer.stops for match in run)
            return text if ended else text + self._stop_after(bool(content_of(message).calls))
        # white space after the turn is the template's, unless the turn is nothing but white space
        text = upto.rstrip()
        if len(text) < start or not upto[start:].strip():
            text = upto
        return text + self._stop_after(bool(content_of(message).calls))

    def _closing_run(self, text: str, start: int) -> list[re.Match[str]]:
        """Return the special tokens at the end of a text, with only white space between and after them."""
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
        """Return the special token that ends an assistant's plain text.

        Of adjoining ones, the first stop token, else the first.
        """
        try:
            text = self._renderer.raw(self._adapter([QUESTION, ANSWER])).text
        except RowFault:
            return None
        run = self._closing_run(text, 0)
        for place, match in enumerate(run):
            if match[0] in self._renderer.stops:
                return match[0]
            if place + 1 == len(run) or run[place + 1].start() != match.end():
                break
        return run[0][0] if run else None

    def _stop_after(self, calls: bool) -> str:
        """Return the token that ends a turn which the template does not close; "" if none."""
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
        """Return the stop token that directly follows these messages when another one does."""
        try:
            upto = self._renderer.raw(self._adapter(messages)).text.rstrip()
            longer = self._renderer.raw(self._adapter([*messages, following])).text
        except RowFault:
            return None
        rest = longer[len(upto) :].lstrip() if longer.startswith(upto) else ""
        first = self._renderer.special.match(rest)
        return first[0] if first is not None and first[0] in self._renderer.stops else None

    def closings(self) -> set[str]:
        """Return the special tokens that end plain responses and tool calls: the stop tokens of a trained model."""
        function = {"name": "zqcallqz", "arguments": {"a": "b"}}
        call = {"role": "assistant", "tool_calls": [{"id": CALL_ID, "type": "function", "function": function}]}
        ends = set()
        for answer in (ANSWER, call):
            try:
                text = self.turn(self._adapter([QUESTION, answer]), None, 1).text
            except RowFault:
                continue
            ends |= {match[0] for match in self._closing_run(text, 0)[-1:]}
        return ends

    @functools.cached_property
    def _header(self) -> str:
        """Return the part of the generation prompt that a finished turn has too."""
        try:
            asked = self._renderer.raw(self._adapter([QUESTION]), prompt=False).text
            prompt = self._renderer.raw(self._adapter([QUESTION]), prompt=True).text
            answered = self._renderer.raw(self._adapter([QUESTION, ANSWER])).text
        except RowFault:
            return ""
        return prompt[len(asked) : _shared(prompt, answered)] if prompt.startswith(asked) else ""

    def _shared_prompt(self, messages: Sequence[Message], tools: Tools, number: int, before: str, upto: str) -> int:
        """Return the length of the prefix that a generation prompt shares with a finished turn.

        For generation prompts with additional text (DeepSeek-R1 opens a `<think>`).
        """
        closed = self._renderer.raw(messages[:number], tools).text
        if upto.startswith(closed) and before.startswith(closed):
            # An answer of other words: what it shares with the prompt is the template's, not the words with which this
            # answer happens to begin.
            other = self._renderer.raw([*messages[:number], *self._adapter([ANSWER])], tools).text
            shared = min(_shared(before, other), _shared(before, upto))
            if shared > len(closed):
                return shared
        raise self._not_located(number, before, upto)

    def _lost_thought(self, message: Message, before: str, turn: str) -> str:
        """Return reasoning that the template omits from a turn whose generation prompt opens it, with its end."""
        thought = content_of(message).thought.strip()
        if not thought or thought in turn or not before.rstrip().endswith("<think>"):
            return ""
        return f"{thought}\n</think>\n\n"

    @staticmethod
    def _not_located(number: int, part: str, whole: str) -> RowFault:
        """Return the fault of a row whose turn `number` is not found: `part`, the text before it, is not in `whole`."""
        same = _shared(part, whole)
        return RowFault(
            NOT_LOCATED,
            f"its text for the first {number} messages is not a prefix of its text for one more; they differ after "
            f"{part[max(0, same - 40) : same]!r}: {part[same : same + 40]!r} and {whole[same : same + 40]!r}",
        )

    def _located(
        self, messages: Sequence[Message], tools: Tools, turns: Sequence[int]
    ) -> Iterator[tuple[int, AssistantTurn, int, int]]:
        """Yield each turn with a position in its own text up to which it was compared, and in the whole text.

        Turns of a long conversation are rendered after the messages before the first response and a few before the
        turn: a template's output for a turn may depend on those, and time stays linear.
        """
        if len(messages) <= WHOLE:
            yield from ((number, self.turn(messages, tools, number), 0, 0) for number in turns)
            return
        answers = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
        head = list(messages[: answers[0]])
        rank = {number: place for place, number in enumerate(answers)}
        # `skipped` messages after the head are left out of the window. A window begins one answer before the last turn
        # of the previous chunk; that turn, rendered again in this window, ends at `end`, and in the whole text at
        # `place`. What follows `end` in the window is compared with what follows `place` in the whole text.
        skipped = place = end = reached = 0
        for first in range(0, len(turns), CHUNK):
            chunk = turns[first : first + CHUNK]
            if first:
                skipped = answers[max(0, rank[turns[first - 1]] - 1)] - len(head)
            window = [*head, *messages[len(head) + skipped : chunk[-1] + 1]]
            if first:
                end = len(self.turn(window, tools, turns[first - 1] - skipped).text)
                place = reached
            for number in chunk:
                turn = self.turn(window, tools, number - skipped)
                yield number, turn, end, place
                reached = place + len(turn.text) - end


def _shared(one: str, other: str) -> int:
    # length of the common prefix by bisection: a few comparisons of long slices, not one of each character
    low = 0
    high = min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if other.startswith(one[low:middle], low) else (low, middle - 1)
    return low


def _with_end_mark(message: Message) -> Message | None:
    """Return a message with `END_MARK` after its last words; None for one without words."""
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        return {**message, "content": content + END_MARK}
    if isinstance(content, list) and content and str(content[-1].get("text", "")).strip():
        return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + END_MARK}]}
    return None


def _after_mark(marked: str, text: str) -> str | None:
    """Return what follows `END_MARK`; None where it is not written, or where `text`, without it, ends otherwise."""
    _, mark, rest = marked.rpartition(END_MARK)
    return rest if mark and text.endswith(rest) else None


def merge_ranges(spans: Sequence[TextSpan]) -> list[TextSpan]:
    """Return ranges with touching ones merged and empty ones removed."""
    found: list[TextSpan] = []
    for start, end in sorted((start, end) for start, end in spans if end > start):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
