"""Grids of tests: a few points in which every pair of values occurs.

@pytest.mark.plain("torch.float32-1-1-causal", "torch.bfloat16-3-7-window")
@pytest.mark.parametrize(*pairwise({"dtype": DTYPES, "rows, columns": [(1, 1), (3, 7)], "mask": MASKS}))
def test_masks(dtype, rows, columns, mask): ...

Nothing takes every combination: what two values do together is tried, what only three do together is not. Which points
a plain `pytest` runs is said at the test: enough that each value occurs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

Point = tuple[int, ...]  # of each axis, the number of a value


def covering(sizes: Sequence[int], together: int) -> list[Point]:
    """A few points of a grid in which each value of `together` axes meets each value of the others.

    The choice is the same each time: greedily, the point that adds most, of values that were used least.
    """
    points = list(itertools.product(*map(range, sizes)))
    covers = {point: set(itertools.combinations(enumerate(point), together)) for point in points}
    missing, chosen, uses = set().union(*covers.values()), set(), Counter()
    while missing:
        best = max(points, key=lambda point: (len(covers[point] & missing), -sum(uses[v] for v in enumerate(point))))
        chosen.add(best)
        missing -= covers[best]
        uses.update(enumerate(best))
    return sorted(chosen)


def pairwise(axes: Mapping[str, Iterable[Any]]) -> tuple[str, list]:
    """Arguments of `parametrize` for `axes`, whose names may be of several arguments ("rows, columns")."""
    values = [list(axis) for axis in axes.values()]
    made = []
    for point in covering([len(axis) for axis in values], 2):
        arguments: list[Any] = []
        for name, axis, index in zip(axes, values, point, strict=True):
            arguments += axis[index] if "," in name else [axis[index]]
        made.append(pytest.param(*arguments, id="-".join(_name(argument) for argument in arguments)))
    return ", ".join(axes), made


def chosen(request: pytest.FixtureRequest, argument: str) -> list:
    """The values of a parametrized argument that this file's tests to be run without a GPU have: what to make."""
    items = [item for item in request.session.items if item.path == request.path and "gpu" not in item.keywords]
    calls = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return list(dict.fromkeys(params[argument] for params in calls if argument in params))


def _name(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(value) if len(value) in range(1, 4) else f"{len(value)} settings"
    for attribute in ("__name__", "type"):
        if isinstance(name := getattr(value, attribute, None), str):
            return name
    return str(value)
