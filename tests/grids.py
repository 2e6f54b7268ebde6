"""Grids of tests: every pair of values in a plain `pytest`, the rest of the product under `pytest -m full`.

@pytest.mark.parametrize(*pairwise({"dtype": DTYPES, "rows, columns": [(1, 1), (3, 7)], "mask": MASKS}))
def test_masks(dtype, rows, columns, mask): ...
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def pairwise(axes: Mapping[str, Iterable[Any]]) -> tuple[str, list]:
    """Arguments of `parametrize` for the product of `axes`, whose names may be of several arguments ("rows, columns").

    A few combinations, in which each value of an axis meets each value of every other one, are left unmarked; of two
    axes, where all pairs are the product, those in which each value occurs. All others are marked `full`. The choice is
    the same each time: greedily, the combination that adds most, of values that were used least.
    """
    values = [list(axis) for axis in axes.values()]
    combinations = list(itertools.product(*(range(len(axis)) for axis in values)))
    together = 2 if len(values) > 2 else 1
    covers = {each: set(itertools.combinations(enumerate(each), together)) for each in combinations}
    missing, chosen, uses = set().union(*covers.values()), set(), Counter()
    while missing:
        best = max(combinations, key=lambda each: (len(covers[each] & missing), -sum(uses[v] for v in enumerate(each))))
        chosen.add(best)
        missing -= covers[best]
        uses.update(enumerate(best))
    made = []
    for each in combinations:
        arguments: list[Any] = []
        for name, axis, index in zip(axes, values, each, strict=True):
            arguments += axis[index] if "," in name else [axis[index]]
        name = "-".join(_name(argument) for argument in arguments)
        made.append(pytest.param(*arguments, id=name, marks=() if each in chosen else pytest.mark.full))
    return ", ".join(axes), made


def chosen(request: pytest.FixtureRequest, argument: str) -> list:
    """The values of a parametrized argument that this file's tests to be run without a GPU have: what to make."""
    items = [item for item in request.session.items if item.path == request.path and "gpu" not in item.keywords]
    calls = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return list(dict.fromkeys(params[argument] for params in calls if argument in params))


def _name(value: Any) -> str:
    for attribute in ("__name__", "type"):
        if isinstance(name := getattr(value, attribute, None), str):
            return name
    return str(value)
