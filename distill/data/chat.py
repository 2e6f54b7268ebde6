"""Chats through any chat template: the text, and which parts of it the assistant wrote.

A template with `{% generation %}` markers says itself what the assistant wrote. For one without, a chat is rendered
turn by turn: the text before an assistant turn, closed by the generation prompt, must be a prefix of the whole text,
and so must the text up to the turn's end; what lies between is what a model is asked to write. A template that
rewrites earlier turns once later ones exist (Qwen3 drops their reasoning) breaks the second prefix only; the turn then
ends at the end-of-turn token that closed it when it was the last. Where the first prefix breaks, or an earlier turn is
closed otherwise than the last one (gpt-oss), the template is refused with an error: a mask that is off by a few tokens
trains silently wrong.

What is learned includes the turn's end-of-turn token and nothing after it (not the newline that many templates put
there, which no model is asked to write).
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from distill.core.faults import first_line
from distill.data.limits import limited
from distill.data.sources import RowFault

TEMPLATE_SECONDS = 10.0  # for one chat: the longest in use take milliseconds
TEMPLATE_BYTES = 1 << 30
TEMPLATE_CHARACTERS = 1 << 26
TEMPLATE_SOURCE = 1 << 20  # bytes of a template's own text
FROZEN_DAY = datetime.date(2025, 1, 1)
_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_TODAY = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>.*?)(?P=quote)\s*\)""")

Message = dict[str, Any]
Tools = list[Any] | None  # JSON schemas
Span = tuple[int, int]


class TemplateError(ValueError):
    """The template cannot be used for training; no row would be right."""


class RenderedChat(NamedTuple):
    """A chat as text.

    Attributes:
        text: what the template makes of it.
        spans: character ranges to learn, in order, not overlapping.
    """

    text: str
    spans: list[Span]


class ChatTemplate:
    """A chat template bound to a tokenizer's special tokens, with its date frozen."""

    def __init__(self, source: str, tokenizer: Any) -> None:
        """Bind a template.

        Raises:
            TemplateError: the text is not valid Jinja, or stamps a date that cannot be frozen.
        """
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import _compile_jinja_template

        self.source, self.frozen_date = freeze_date(source)
        self.marked = bool(_MARKER.search(source))
        self.special_tokens = dict(tokenizer.special_tokens_map)
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        added.sort(key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, added)) or r"\Z.")
        if len(self.source) > TEMPLATE_SOURCE:
            raise TemplateError(f"data.chat_template: expected at most {TEMPLATE_SOURCE:,} characters of template")
        try:
            with limited(TEMPLATE_SECONDS, TEMPLATE_BYTES):
                _compile_jinja_template(self.source)
        except TemplateSyntaxError as error:
            raise TemplateError(
                f"data.chat_template: not a valid Jinja template, line {error.lineno}: {error}"
            ) from error
        except Exception as error:  # constants are computed while it is compiled
            raise TemplateError(f"data.chat_template: cannot be compiled: {_reason(error)}") from error

    def render(
        self, messages: Sequence[Message], tools: Tools = None, *, prompt: bool = False, mark: bool = False
    ) -> RenderedChat:
        """The template's text for `messages`; `spans` only with `mark`, from its generation markers.

        Args:
            messages: dictionaries with `role` and `content`, and what else the template reads.
            tools: JSON schemas of tools on offer.
            prompt: end with the words that ask the assistant to speak.
            mark: note the ranges inside generation markers.

        Raises:
            RowFault: the template refuses these messages.
        """
        if any(message.get("tool_calls") for message in messages):
            messages = [_with_arguments(message, self._arguments) for message in messages]
        return self._rendered(messages, tools, prompt, mark)

    def _rendered(
        self, messages: Sequence[Message], tools: Tools = None, prompt: bool = False, mark: bool = False
    ) -> RenderedChat:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with limited(TEMPLATE_SECONDS, TEMPLATE_BYTES):
                rendered: Any = render_jinja_template(
                    [list(messages)],
                    tools=tools,
                    chat_template=self.source,
                    return_assistant_tokens_mask=mark,
                    add_generation_prompt=prompt,
                    **self.special_tokens,
                )
        except (TimeoutError, MemoryError) as error:
            raise TemplateError(f"data.chat_template: the template does not end well: {_reason(error)}") from error
        except Exception as error:  # a template is a program (in a sandbox): it may raise anything
            raise RowFault("the chat template refuses the row", _reason(error)) from error
        texts, spans = rendered
        if len(texts[0]) > TEMPLATE_CHARACTERS:
            raise RowFault("the chat template writes too much", f"{len(texts[0]):,} characters")
        return RenderedChat(texts[0], list(spans[0]) if mark else [])

    def render_for_training(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        *,
        train_on: Literal["all", "last"] = "all",
        first_trained: int = 0,
    ) -> RenderedChat:
        """A whole chat and the ranges the assistant wrote.

        Args:
            messages: the chat: any number of turns, with or without a system prompt and tool turns.
            tools: JSON schemas of tools on offer.
            train_on: learn all assistant turns, or only the last.
            first_trained: learn no turn before this one (the messages before it are the prompt).

        Raises:
            RowFault: no assistant turn, or the template refuses these messages.
            TemplateError: the template's text for the first turns is not a prefix of its text for all.
        """
        roles = [message.get("role") for message in messages]
        turns = [turn for turn, role in enumerate(roles) if role == "assistant" and turn >= first_trained]
        if not turns:
            raise RowFault("no assistant turn", f"roles: {', '.join(map(str, roles[:8]))}")
        if self.marked:
            return self._from_markers(messages, tools, train_on, turns[0] if first_trained else 0)
        whole = self.render(messages, tools).text
        chosen = turns[-1:] if train_on == "last" else turns
        spans = [self._turn(messages, number, tools, whole) for number in chosen]
        for number, (_, end), (following, _) in zip(chosen, spans, spans[1:], strict=False):
            if end > following:  # what closes the turn as the last one does not close it here
                upto = self.render(messages[: number + 1], tools).text
                raise TemplateError(self._refusal(messages, number, upto, whole, closed=True))
        return RenderedChat(whole, spans)

    def _from_markers(self, messages: Sequence[Message], tools: Tools, train_on: str, first_turn: int) -> RenderedChat:
        whole, spans = self.render(messages, tools, mark=True)
        spans = [self._with_end_of_turn(whole, span) for span in _joined(spans)]
        if first_turn:
            before = self.render(messages[:first_turn], tools, prompt=True).text
            if not whole.startswith(before):
                raise TemplateError(self._refusal(messages, first_turn, before, whole))
            spans = [span for span in spans if span[0] >= len(before)]
        if not spans:
            raise RowFault("the template marks nothing as the assistant's")
        return RenderedChat(whole, spans[-1:] if train_on == "last" else spans)

    def _with_end_of_turn(self, text: str, span: Span) -> Span:
        """A marked range, lengthened by the special token that follows it where it does not hold one at its end."""
        start, end = span
        closings = list(self._special.finditer(text, start, end))
        if closings and not text[closings[-1].end() : end].strip():
            return start, closings[-1].end()
        following = self._special.match(text, end)
        return start, following.end() if following else end

    def _turn(self, messages: Sequence[Message], number: int, tools: Tools, whole: str) -> Span:
        """The range of assistant turn `number`, by prefix difference."""
        if number == 0:
            raise RowFault("the chat begins with the assistant", "no prompt to learn an answer to")
        before = self.render(messages[:number], tools, prompt=True).text
        if not whole.startswith(before):
            before = self._shortened_prompt(messages, number, tools, whole, before)
        start = len(before)
        upto = self.render(messages[: number + 1], tools).text
        if not upto.startswith(before):
            raise TemplateError(self._refusal(messages, number, upto, whole, closed=True))
        end = self._end_of_turn(upto, start)
        if whole.startswith(upto[:end]):
            return start, end
        closings = [match[0] for match in self._special.finditer(upto, start, end)]
        ends = [match.end() for match in self._special.finditer(whole, start) if match[0] in closings[-1:]]
        count = closings.count(closings[-1]) if closings else 0
        run = self._closing_run(upto, start)
        # the same words, and something else after them: no telling what closes the turn
        same = not run or whole.startswith(upto[: run[0].start()].rstrip())
        if same or count > len(ends):
            raise TemplateError(self._refusal(messages, number, upto, whole, closed=True))
        return start, ends[count - 1]

    def _end_of_turn(self, upto: str, start: int) -> int:
        """Where the assistant stops: after the turn's closing special token, else at the end of the turn's text.

        A template may end a whole chat with a token more (Phi-3): what closes a turn stands directly after the words.
        """
        run = self._closing_run(upto, start)
        return ([match for match in run if match[0] == self._closing] or run)[-1].end() if run else len(upto)

    def _closing_run(self, text: str, start: int) -> list[re.Match[str]]:
        """The special tokens that end a text, with only white space between and after them."""
        run: list[re.Match[str]] = []
        end = len(text)
        for match in reversed(list(self._special.finditer(text, start))):
            if text[match.end() : end].strip():
                break
            run.insert(0, match)
            end = match.start()
        return run

    @functools.cached_property
    def _arguments(self) -> type | None:
        """How the template reads the arguments of a tool call: as an object, or as JSON text (str, as DeepSeek's).

        Data hold either, and the wrong one is quoted twice, or printed as Python. None where the template takes none.
        """
        question = {"role": "user", "content": "a"}
        for arguments in ({"a": True}, '{"a": true}'):
            function = {"name": "f", "arguments": arguments}
            call = {"id": "abcdefghi", "type": "function", "function": function}  # Mistral's ids have nine letters
            try:
                text = self._rendered([question, {"role": "assistant", "content": "", "tool_calls": [call]}]).text
            except RowFault:
                continue
            if "{'a'" not in text:
                return type(arguments)
        return None

    @functools.cached_property
    def _closing(self) -> str | None:
        """The special token that stands directly after an assistant's plain words."""
        try:
            text = self.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]).text
        except RowFault:
            return None
        run = self._closing_run(text, 0)
        return run[0][0] if run else None

    def _shortened_prompt(self, messages: Sequence[Message], number: int, tools: Tools, whole: str, before: str) -> str:
        """A generation prompt that says more than a finished turn does (DeepSeek-R1 opens a `<think>`), cut to what
        both share, where the cut falls between special tokens."""
        closed = self.render(messages[:number], tools).text
        if not (whole.startswith(closed) and before.startswith(closed)):
            raise TemplateError(self._refusal(messages, number, before, whole))
        position = len(closed)
        for match in self._special.finditer(before, len(closed)):
            if match.start() != position or not whole.startswith(before[: match.end()]):
                break
            position = match.end()
        if position == len(closed):
            raise TemplateError(self._refusal(messages, number, before, whole))
        return before[:position]

    def _refusal(self, messages: Sequence[Message], number: int, part: str, whole: str, *, closed: bool = False) -> str:
        """Why turn `number` cannot be told: `part`, the text before it (with it, if `closed`), is not in `whole`."""
        later = any(message.get("role") == "assistant" for message in messages[number + 1 :])
        differing = (at for at, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b)
        same = next(differing, min(len(part), len(whole)))
        return (
            "data.chat_template: what the assistant wrote cannot be told from this template, since its text for the "
            f"first {number + closed} messages is not the beginning of its text for the whole chat: they part after "
            f"{part[max(0, same - 40) : same]!r}, as {part[same : same + 40]!r} and {whole[same : same + 40]!r}. "
            "Give a .jinja file with {% generation %} markers around the assistant's words"
            + (", or set data.train_on: last" if later else "")
        )


def _reason(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return f"it takes more than {TEMPLATE_BYTES >> 20:,} MiB of memory for one chat"
    return first_line(error)


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Ranges with those that touch made one; empty ones left out."""
    joined: list[Span] = []
    for start, end in sorted((start, end) for start, end in spans if end > start):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def freeze_date(template: str, day: datetime.date = FROZEN_DAY) -> tuple[str, datetime.date | None]:
    """Replace today's date in a template by a fixed day, so that the same data gives the same tokens tomorrow.

    Args:
        template: Jinja text that may call `strftime_now("FORMAT")`.
        day: the day to stamp.

    Returns:
        The template, and the day if it was needed.

    Raises:
        TemplateError: the date is made from something other than a literal format.
    """
    moment = datetime.datetime.combine(day, datetime.time())
    frozen, count = _TODAY.subn(lambda match: repr(moment.strftime(match["format"])), template)
    if "strftime_now(" in frozen.replace(" ", ""):
        raise TemplateError(
            "data.chat_template: the template stamps today's date by a format that is not written out in it; "
            "give a .jinja file that writes the date itself"
        )
    return frozen, day if count else None


def _with_arguments(message: Message, kind: type | None) -> Message:
    """The message with the arguments of its tool calls as `kind`, where they can be."""
    calls = message.get("tool_calls")
    if kind is None or not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_call(call, kind) for call in calls]}


def _call(call: Any, kind: type) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else None  # some data leave "function" out
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if kind is dict and isinstance(arguments, str):
        try:
            made = json.loads(arguments)
        except (ValueError, RecursionError):
            return call
    elif kind is str and isinstance(arguments, Mapping):
        made = json.dumps(arguments, ensure_ascii=False)
    else:
        return call
    if not isinstance(made, kind):
        return call
    changed = {**function, "arguments": made}  # type: ignore[dict-item]
    return {**call, "function": changed} if "function" in call else changed


def load_template(choice: str, tokenizer: Any) -> ChatTemplate | None:
    """The template a recipe's `data.chat_template` names: `tokenizer`, `none`, or a .jinja file.

    Returns:
        None where the tokenizer has no template, or none is wanted.

    Raises:
        ValueError: the file does not exist or is not a template.
    """
    if choice == "none":
        return None
    if choice == "tokenizer":
        source = getattr(tokenizer, "chat_template", None)
        if isinstance(source, dict):  # named templates
            source = source.get("default")
        return ChatTemplate(source, tokenizer) if source else None
    return ChatTemplate(_file(choice), tokenizer)


def with_template(tokenizer: Any, choice: str) -> Any:
    """The tokenizer with the chat template that a recipe's `data.chat_template` names, where that is a file.

    Raises:
        ValueError: the file does not exist.
    """
    if choice not in ("tokenizer", "none"):
        tokenizer.chat_template = _file(choice)
    return tokenizer


def _file(choice: str) -> str:
    path = Path(choice).expanduser()
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no plain file")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data.chat_template: expected tokenizer, none or a .jinja file; {choice!r} cannot be read: {error}"
        ) from error
