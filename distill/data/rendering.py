"""Rendering of chat templates, which run in Jinja's sandbox: they read what they are given, and nothing else."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distill.core.errors import first_line
from distill.data.rows import RowFault

TEMPLATE_SOURCE = 1 << 20  # largest size of a template's text, characters
NOT_RENDERED = "not rendered by"  # of reasons for which rows are dropped
NOT_LOCATED = (
    "the assistant's text cannot be located in the chat template's output; a .jinja file with {% generation %} markers "
    "around it tells where it stands"
)
FROZEN_DAY = datetime.date(2025, 1, 1)
_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_TODAY = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>.*?)(?P=quote)\s*\)""")

Message = dict[str, Any]
Tools = list[Any] | None  # JSON schemas
TextSpan = tuple[int, int]


class TemplateError(ValueError):
    """Error of a template that cannot be used for training at all."""


class Rendered(NamedTuple):
    """Rendered text, and the character ranges inside its generation markers."""

    text: str
    spans: list[TextSpan]


def variables_of(source: str) -> frozenset[str]:
    """Return the names of the variables that a chat template reads and does not set itself.

    Raises:
        jinja2.TemplateSyntaxError: It is not valid Jinja.
    """
    from jinja2 import Environment, nodes
    from jinja2.ext import Extension
    from jinja2.meta import find_undeclared_variables
    from jinja2.parser import Parser

    class Generation(Extension):
        """The block {% generation %} of transformers, which stands for its content here."""

        tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    # the options with which transformers compiles templates
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    return frozenset(find_undeclared_variables(environment.parse(source)))


class Renderer:
    """Chat template bound to a tokenizer's special tokens and to keyword arguments, with its date frozen.

    Attributes:
        source: Text of the template as it is run.
        kwargs: Variables that the template reads beside messages and tools, such as `enable_thinking`.
        reads: Names of the variables that the template reads.
        frozen_date: Day that replaces today's date; None if it writes no date.
        marked: Whether it has `{% generation %}` markers.
        stops: Texts of stop tokens, from the tokenizer and the configuration files next to it.
        eos: Text of the tokenizer's end-of-text token; None if it has none.
        special: Pattern that matches the tokenizer's special tokens.
    """

    def __init__(self, source: str, tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        """Bind a template.

        Raises:
            TemplateError: The text is not valid Jinja, or writes a date that cannot be frozen.
        """
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        self.source, self.frozen_date = freeze_date(source)
        self.kwargs = dict(kwargs or {})
        self.marked = bool(_MARKER.search(source))
        self.special_tokens = dict(tokenizer.special_tokens_map)
        self.eos: str | None = tokenizer.eos_token
        self.stops = stop_tokens(tokenizer)
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        # longest first, since an alternation takes the first that matches; without tokens, a pattern that never does
        added.sort(key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, added)) or r"\Z.")
        if len(self.source) > TEMPLATE_SOURCE:
            raise TemplateError(f"data.chat_template: expected at most {TEMPLATE_SOURCE:,} characters of template")
        try:
            render_jinja_template([], chat_template=self.source)  # compiles it, for no conversation
            self.reads = variables_of(self.source)
        except TemplateSyntaxError as error:
            raise TemplateError(
                f"data.chat_template: not a valid Jinja template, line {error.lineno}: {error}"
            ) from error
        except Exception as error:  # compilation evaluates constants, which may raise anything
            raise TemplateError(f"data.chat_template: cannot be compiled: {first_line(error)}") from error

    def raw(
        self, messages: Sequence[Message], tools: Tools = None, *, prompt: bool = False, mark: bool = False
    ) -> Rendered:
        """Render messages unchanged.

        Args:
            messages: Dictionaries with `role`, `content` and other keys that the template reads.
            tools: JSON schemas of the available tools.
            prompt: Append the generation prompt.
            mark: Return the ranges inside generation markers.

        Raises:
            RowFault: The template refuses these messages.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                [list(messages)],
                tools=tools,
                chat_template=self.source,
                return_assistant_tokens_mask=mark,
                add_generation_prompt=prompt,
                **{**self.special_tokens, **self.kwargs},
            )
        except Exception as error:  # a template is a sandboxed program and may raise anything
            raise RowFault("the chat template refuses the row", first_line(error)) from error
        (text, *_), spans = rendered
        return Rendered(text, list(spans[0]) if mark else [])


def stop_tokens(tokenizer: Any) -> frozenset[str]:
    """Return the texts of a tokenizer's stop tokens.

    Its end-of-text token, and the `eos_token_id` of `generation_config.json` and `config.json` next to its files.
    """
    ids = {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        path = _beside(str(tokenizer.name_or_path), name)
        if path is not None:
            with contextlib.suppress(OSError, ValueError):
                tree = json.loads(path.read_text(encoding="utf-8"))
                own = tree.get("eos_token_id") if isinstance(tree, dict) else None
                ids.update(own if isinstance(own, list) else [own])
    added = tokenizer.added_tokens_decoder
    return frozenset(added[number].content for number in ids if isinstance(number, int) and number in added)


def _beside(place: str, name: str) -> Path | None:
    """Return a file from a tokenizer's folder or hub repository; None if it is not available."""
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
    """Replace today's date in a template by a fixed day, so that the same data always give the same tokens.

    Args:
        template: Jinja text that may call `strftime_now("FORMAT")`.

    Returns:
        The template, and the day if it was used.

    Raises:
        TemplateError: The date format is not a literal.
    """
    moment = datetime.datetime.combine(day, datetime.time())
    frozen, count = _TODAY.subn(lambda match: repr(moment.strftime(match["format"])), template)
    # every call with a literal format is replaced by now: what is left computes its format
    if "strftime_now(" in frozen.replace(" ", ""):
        raise TemplateError(
            "data.chat_template: expected literal date formats in the template, got a computed one; use a .jinja file "
            "with a fixed date"
        )
    return frozen, day if count else None
