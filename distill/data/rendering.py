"""A chat template as a bounded program: its text for messages, within limits of time, memory and characters.

A template is code that others wrote, run in Jinja's sandbox. `Renderer.bounded` holds everything that one conversation
needs, however often it is rendered, to one budget.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distill.core.errors import first_line
from distill.data.limits import limited
from distill.data.sources import RowFault

TEMPLATE_SECONDS = 10.0  # for one rendering: the longest in use take milliseconds
TEMPLATE_BYTES = 1 << 30
TEMPLATE_CHARACTERS = 1 << 26  # in one rendering
CONVERSATION_CHARACTERS = 1 << 29  # in all renderings of a conversation
CONVERSATION_MESSAGES = 1 << 17
TEMPLATE_SOURCE = 1 << 20  # bytes of a template's own text
CONVERSATION_SECONDS = 120.0  # a guard only: what decides is the number of characters, the same on every machine
TOO_LONG = "conversation too long"
FROZEN_DAY = datetime.date(2025, 1, 1)
_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_TODAY = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>.*?)(?P=quote)\s*\)""")

Message = dict[str, Any]
Tools = list[Any] | None  # JSON schemas
Span = tuple[int, int]


class TemplateError(ValueError):
    """The template cannot be used for training; no row would be right."""


class Rendered(NamedTuple):
    """A text of a template, and the character ranges inside its generation markers."""

    text: str
    spans: list[Span]


class _Spent:
    """What the renderings of a conversation have taken."""

    def __init__(self, begun: float) -> None:
        self.begun, self.characters = begun, 0

    def add(self, text: str) -> None:
        """Count a rendering.

        Raises:
            RowFault: the conversation takes more than it may.
        """
        self.characters += len(text)
        if self.characters > CONVERSATION_CHARACTERS:
            raise RowFault(TOO_LONG, f"more than {CONVERSATION_CHARACTERS:,} characters in all its renderings")
        if time.monotonic() - self.begun > CONVERSATION_SECONDS:
            raise RowFault(TOO_LONG, f"more than {CONVERSATION_SECONDS:g} s to render")


class Renderer:
    """A chat template bound to a tokenizer's special tokens, with its date frozen.

    Attributes:
        source: the template's text, as it is run.
        frozen_date: the day it stamps in place of today; None if it stamps none.
        marked: it has `{% generation %}` markers.
        stops: texts of the tokens at which inference stops, by the tokenizer and the configuration beside it.
        eos: text of the tokenizer's end-of-text token; None if it has none.
        special: matches the tokenizer's special tokens.
    """

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
        self.eos: str | None = tokenizer.eos_token
        self.stops = stop_tokens(tokenizer)
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        added.sort(key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, added)) or r"\Z.")
        self._spent: _Spent | None = None  # on the conversation under way
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

    @contextlib.contextmanager
    def bounded(self, messages: Sequence[Message] = ()) -> Iterator[None]:
        """One budget for everything that is rendered inside; one inside another changes nothing.

        Raises:
            RowFault: a conversation of more messages than may be; `raw` raises one where the budget is spent.
        """
        if self._spent is not None:
            yield
            return
        if len(messages) > CONVERSATION_MESSAGES:
            raise RowFault(TOO_LONG, f"{len(messages):,} messages")
        self._spent = _Spent(time.monotonic())
        try:
            yield
        finally:
            self._spent = None

    def raw(
        self, messages: Sequence[Message], tools: Tools = None, *, prompt: bool = False, mark: bool = False
    ) -> Rendered:
        """Render messages as they are.

        Args:
            messages: dictionaries with `role` and `content`, and what else the template reads.
            tools: JSON schemas of tools on offer.
            prompt: end with the generation prompt.
            mark: note the ranges inside generation markers.

        Raises:
            RowFault: the template refuses these messages, or writes too much.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        with self.bounded(messages):
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
            (text, *_), spans = rendered
            if len(text) > TEMPLATE_CHARACTERS:
                raise RowFault("the chat template writes too much", f"{len(text):,} characters")
            assert self._spent is not None
            self._spent.add(text)
        return Rendered(text, list(spans[0]) if mark else [])


def _reason(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return f"it takes more than {TEMPLATE_BYTES >> 20:,} MiB of memory for one chat"
    return first_line(error)


def stop_tokens(tokenizer: Any) -> frozenset[str]:
    """Texts of the tokens at which a tokenizer's model stops: its end-of-text token, and the `eos_token_id` of
    `generation_config.json` and `config.json` beside the tokenizer's files."""
    ids = {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        if (path := _beside(str(tokenizer.name_or_path), name)) is not None:
            with contextlib.suppress(OSError, ValueError):
                tree = json.loads(path.read_text(encoding="utf-8"))
                own = tree.get("eos_token_id") if isinstance(tree, dict) else None
                ids.update(own if isinstance(own, list) else [own])
    added = tokenizer.added_tokens_decoder
    return frozenset(added[number].content for number in ids if isinstance(number, int) and number in added)


def _beside(place: str, name: str) -> Path | None:
    """A file beside a tokenizer's own: in its folder, or on the hub; None where there is none in reach."""
    if not place:
        return None
    if Path(place).is_dir():
        return Path(place, name)
    from transformers.utils import cached_file

    with contextlib.suppress(OSError, ValueError):  # no id of a repository, or out of reach
        found = cached_file(place, name, _raise_exceptions_for_missing_entries=False)
        return None if found is None else Path(found)
    return None


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
