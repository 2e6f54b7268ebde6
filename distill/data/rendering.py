"""A chat template as a bounded program: its text for messages, within limits of time, memory and characters.

A template is code that others wrote, run in Jinja's sandbox. `Renderer.bounded` holds everything that one conversation
needs, however often it is rendered, to one budget.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distill.core.faults import first_line
from distill.data.limits import limited
from distill.data.sources import RowFault

TEMPLATE_SECONDS = 10.0  # for a conversation, all its renderings together: the longest in use take milliseconds
TEMPLATE_BYTES = 1 << 30
TEMPLATE_CHARACTERS = 1 << 26  # in one rendering
CONVERSATION_CHARACTERS = 1 << 29  # in all renderings of a conversation
CONVERSATION_MESSAGES = 1 << 17
TEMPLATE_SOURCE = 1 << 20  # bytes of a template's own text
FEW_RENDERINGS = 3  # a template that exceeds its time within so many does not end; after more the conversation is long
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
        self._spent: list[int] | None = None  # renderings and characters of the conversation under way
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
        """Bounds on everything that is rendered inside; one inside another changes nothing.

        Raises:
            RowFault: the conversation takes longer, or more characters, than it may.
            TemplateError: the template itself does not end, or takes more memory than it may.
        """
        if self._spent is not None:
            yield
            return
        if len(messages) > CONVERSATION_MESSAGES:
            raise RowFault("conversation too long", f"{len(messages):,} messages")
        self._spent = [0, 0]
        try:
            with limited(TEMPLATE_SECONDS, TEMPLATE_BYTES):
                yield
        except (TimeoutError, MemoryError) as error:
            if isinstance(error, TimeoutError) and self._spent[0] > FEW_RENDERINGS and len(messages) > FEW_RENDERINGS:
                raise RowFault(
                    "conversation too long", f"{len(messages):,} messages: {first_line(error)} to render"
                ) from error
            raise TemplateError(f"data.chat_template: the template does not end well: {_reason(error)}") from error
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
            assert self._spent is not None
            self._spent[0] += 1
            try:
                rendered: Any = render_jinja_template(
                    [list(messages)],
                    tools=tools,
                    chat_template=self.source,
                    return_assistant_tokens_mask=mark,
                    add_generation_prompt=prompt,
                    **self.special_tokens,
                )
            except (TimeoutError, MemoryError):
                raise
            except Exception as error:  # a template is a program (in a sandbox): it may raise anything
                raise RowFault("the chat template refuses the row", _reason(error)) from error
            (text, *_), spans = rendered
            self._spent[1] += len(text)
            if len(text) > TEMPLATE_CHARACTERS:
                raise RowFault("the chat template writes too much", f"{len(text):,} characters")
            if self._spent[1] > CONVERSATION_CHARACTERS:
                raise RowFault("conversation too long", f"{self._spent[1]:,} characters in all its renderings")
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
    """A file beside a tokenizer's own: in its folder, or in the cache of the hub; None where there is none."""
    if not place:
        return None
    if Path(place).is_dir():
        return Path(place, name)
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(place, name)
    except ValueError:  # no id of a repository
        return None
    return Path(found) if isinstance(found, str) else None


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
