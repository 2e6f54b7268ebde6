"""Field types that several sections of a recipe share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field, JsonValue
from pydantic.fields import FieldInfo

from distill.core.errors import expected_got

DType = Literal["auto", "float32", "bfloat16", "float16"]
Count = Annotated[int, Field(ge=1, le=2**53)]
Text = Annotated[str, Field(min_length=1)]
NotNegative = Annotated[float, Field(ge=0)]
Every = Annotated[Annotated[int, Field(ge=0, le=2**53)] | None, AfterValidator(lambda steps: steps or None)]


NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
ROUTE = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
FUNCTION = r"^.+\.py:[A-Za-z_]\w*$"
SHA256 = r"^[0-9a-f]{64}$"
PART = r"^\d{1,5}(\.\w+)*$"  # a decoder layer, `29`, or a module inside one, `29.mlp`
# what a text that matches is, for error messages
PATTERNS = {
    NAME: "letters, digits, '.', '_' and '-' (at most 100, first a letter or digit)",
    ROUTE: "letters, digits, '.', '_' and '-' (at most 63, first a letter or digit)",
    FUNCTION: "FILE.py:FUNCTION, such as rewards.py:exact_match",
    SHA256: "64 hexadecimal digits, the SHA-256 of the file",
    PART: "a decoder layer, such as 29, or a module inside one, such as 29.mlp",
}


class Usual(NamedTuple):
    """Annotation with the range of a field's values in published recipes; warned about at ten times outside of it.

    Attributes:
        low, high: the range; 0 and null, which switch a setting off, are always within.
        applies: whether the range applies to a section that has the field.
    """

    low: float
    high: float
    applies: Callable[[object], bool] = lambda section: True

    @staticmethod
    def of(field: FieldInfo) -> Usual | None:
        return next((mark for mark in field.metadata if isinstance(mark, Usual)), None)

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


# arguments of a template that the toolkit itself gives, or that change what is returned
TEMPLATE_ARGUMENTS = {
    "messages",
    "conversation",
    "conversations",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
    "return_assistant_tokens_mask",
    "return_tensors",
    "return_dict",
    "padding",
    "truncation",
    "max_length",
    "tokenizer_kwargs",
}


def template_kwargs_error(kwargs: dict[str, JsonValue]) -> str | None:
    """Return what is wrong with keyword arguments of a chat template; None where nothing is."""
    for name in kwargs:
        if not name.isidentifier():
            return expected_got("names of a chat template's variables, such as enable_thinking", name)
        if name in TEMPLATE_ARGUMENTS:
            return f"expected variables of the chat template, got {name}, which is given by the data and the run"
    return None


def _checked_kwargs(kwargs: dict[str, JsonValue]) -> dict[str, JsonValue]:
    error = template_kwargs_error(kwargs)
    if error is not None:
        raise ValueError(error)
    return kwargs


TemplateKwargs = Annotated[dict[str, JsonValue], AfterValidator(_checked_kwargs)]


def text_or_list(value: object) -> object:
    """Return a text, or a list of texts that is not empty, unchanged."""
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(item, str) and item for item in items):
        raise ValueError(expected_got("text or a list of texts", value))
    return value


def no_code(value: str) -> str:
    """Return a plain name unchanged: for a name with a slash transformers fetches compiled code from the hub."""
    if not value.isidentifier():
        raise ValueError(expected_got("auto or the name of an attention implementation such as sdpa or eager", value))
    return value


def steps_or_ratio(value: object) -> object:
    """Return a whole number of steps from 1 as an int, or a fraction of all steps below 1 as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(expected_got("a number of steps, or a fraction of all steps below 1", value))
    if not 0 <= value <= 2**53 or (value >= 1 and value != int(value)):
        raise ValueError(expected_got("a whole number of steps, or a fraction of all steps between 0 and 1", value))
    return int(value) if value >= 1 else float(value)


def rate_or_share(value: float | str | None) -> float | str | None:
    """Return a rate that is not negative, or a share such as `10%`, unchanged."""
    if isinstance(value, str):
        valid = re.fullmatch(r"\d+(\.\d+)?%", value) is not None
    else:
        valid = value is None or value >= 0
    if not valid:
        raise ValueError(expected_got("a learning rate of at least 0, or a share such as 10%", value))
    return value


def no_reports(value: object) -> object:
    """Return `none`, one name or a list of names as a list."""
    return [] if value in (None, "none") else [value] if isinstance(value, str) else value
