"""Warnings about values far outside of the range in use, such as a learning rate of 0.5 or a temperature of 200.

The ranges are annotations of the fields (`Usual`, in fields.py). A value within a factor of ten of its range is not
reported.
"""

from __future__ import annotations

from collections.abc import Iterator

from distill.core.errors import Section
from distill.recipe.fields import Usual
from distill.recipe.schema import Recipe

DECADE = 10.0


def unusual_settings(recipe: Recipe) -> list[str]:
    """Return a line for each setting whose value is more than a factor of ten outside of the range in use."""
    return list(_unusual(recipe, ""))


def _unusual(section: Section, prefix: str) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        path = f"{prefix}{name}"
        parts = enumerate(value) if isinstance(value, list) else [("", value)]
        for number, part in parts:
            if isinstance(part, Section):
                yield from _unusual(part, f"{path}.{number}." if number != "" else f"{path}.")
        usual = Usual.of(field)
        if usual is None or not value or isinstance(value, Section) or not usual.applies(section):
            continue
        if not usual.low / DECADE <= value <= usual.high * DECADE:
            yield f"{path}: {value:g} is far outside of what is in use, {usual}"
