"""Settings and values under their former names, read until 1.0 with one log line, and settings that were removed."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence

from distill.core.errors import RecipeError

log = logging.getLogger(__name__)

# former name: present name; those of `teacher` are those of each entry of `teachers` too
RENAMED = {
    "data.on_policy.ahead": "data.on_policy.max_staleness",
    "parallel.teacher_ranks": "parallel.teacher_gpus",
    "teacher.as": "teacher.online_cache_format",
    "teacher.keep": "teacher.online_cache",
    "teacher.keep_as": "teacher.online_cache_format",
    "teacher.send": "teacher.transfer_dtype",
    "teacher.wait": "teacher.timeout",
}
# setting: present value by former value
RENAMED_VALUES = {"parallel.teacher": {"ranks": "served"}}
# removed name: the one value that changes nothing, and what to use in its place
REMOVED = {"train.compile": (False, "leave it out: train.cuda_graph, auto by itself, is faster")}
_logged: set[str] = set()


def rename_settings(tree: dict[str, object]) -> None:
    """Move the values of former names in a recipe's tree, stages included, to the present names, in place.

    Raises:
        RecipeError: a setting is given under both names, or one that was removed is used.
    """
    for former, present in RENAMED.items():
        section, _, old = former.rpartition(".")
        new = present.rpartition(".")[2]
        for values in _sections(tree, section.split(".")):
            if old not in values:
                continue
            if new in values:
                raise RecipeError([f"{former}: is the former name of {present}, expected one of them, got both"])
            values[new] = values.pop(old)
            _log(former, present)
    for setting, present_values in RENAMED_VALUES.items():
        section, _, name = setting.rpartition(".")
        for values in _sections(tree, section.split(".")):
            value = values.get(name)
            if isinstance(value, str) and value in present_values:
                values[name] = present_values[value]
                _log(f"{setting}: {value}", f"{setting}: {present_values[value]}")
    for removed, (unused, cure) in REMOVED.items():
        section, _, name = removed.rpartition(".")
        for values in _sections(tree, section.split(".")):
            if values.pop(name, unused) != unused:
                raise RecipeError([f"{removed}: was removed; {cure}"])


def rename_overrides(overrides: Sequence[str]) -> list[str]:
    return [_renamed(override) for override in overrides]


def _renamed(override: str) -> str:
    key, equals, value = override.partition("=")
    name = re.sub(r"^stages\.\d+\.", "", key.strip())
    name = re.sub(r"^teachers\.\d+\.", "teacher.", name)
    if not equals or name not in RENAMED:
        return override
    _log(name, RENAMED[name])
    return f"{key.strip().rpartition('.')[0]}.{RENAMED[name].rpartition('.')[2]}={value}"


def _sections(tree: dict[str, object], path: Sequence[str]) -> Iterator[dict[str, object]]:
    """Yield the mapping at `path` of the recipe and of each stage; for `teacher`, also those of `teachers`."""
    stages = tree.get("stages")
    for level in [tree, *(stages if isinstance(stages, list) else [])]:
        node: object = level
        for part in path:
            node = node.get(part) if isinstance(node, dict) else None
        several = level.get("teachers") if isinstance(level, dict) and list(path) == ["teacher"] else None
        for found in [node, *(several if isinstance(several, list) else [])]:
            if isinstance(found, dict):
                yield found


def _log(former: str, present: str) -> None:
    if former not in _logged:
        _logged.add(former)
        log.warning("%s is now %s; the former name is read until 1.0", former, present)
