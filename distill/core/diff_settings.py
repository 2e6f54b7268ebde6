"""Differences between two sets of settings: for resuming, lock files, stored outputs, ranks and comparisons of runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Change(NamedTuple):
    """A setting that differs: its name with dots, and both values; None where one side lacks it."""

    name: str
    before: Any
    now: Any


def diff_settings(before: object, now: object) -> list[Change]:
    """Return what differs between two trees of plain data, in the order of the first.

    Mappings are compared by key and lists by position, so that each difference has the name of one setting, such as
    `loss.terms.0.weight`. A setting that one side lacks equals None.
    """
    return list(_diff(before, now, ""))


def _diff(before: object, now: object, name: str) -> Iterator[Change]:
    old = _settings_in(before)
    new = _settings_in(now)
    if old is None or new is None:
        if before != now:
            yield Change(name, before, now)
        return
    for key in [*old, *(key for key in new if key not in old)]:
        yield from _diff(old.get(key), new.get(key), f"{name}.{key}" if name else str(key))


def _settings_in(value: object) -> Mapping[Any, object] | None:
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return value if isinstance(value, Mapping) else None
