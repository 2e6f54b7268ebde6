"""YAML for recipes: plain data without aliases or duplicate keys; and overrides of the parsed tree.

Scalars follow YAML 1.2: `true` and `false` are the only booleans (`no` is text), `1e-4` is a number, dates are text.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence

import yaml

from distill.core.errors import RecipeError, first_line, quote

MAX_CHARACTERS = 1 << 20
MAX_DEPTH = 32
_RESOLVERS = [
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("tag:yaml.org,2002:int", r"^[-+]?(?:0|[1-9][0-9_]*)$", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"^[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$",
        list("-+0123456789."),
    ),
]
# an override of one of these removes the other, which the file may have set
ALTERNATIVES = [
    ("train.steps", "train.epochs"),
    ("student.model", "student.from_teacher"),
    ("student.from_teacher.layers", "student.from_teacher.keep"),
]
ListDefaults = Mapping[tuple[str, ...], list[dict[str, object]]]  # items of a list that the file does not have


class _Loader(yaml.SafeLoader):
    """Loader that refuses aliases (with which a small file can expand without bound) and duplicate keys."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "anchors and aliases (& and *) are not supported", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen = set()
        for key, _ in node.value:
            name = (key.tag, str(key.value))
            if name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value} comes twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Dumper of YAML that `_Loader` reads, with lists indented under their key."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)


for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}
    for _tag, _pattern, _first in _RESOLVERS:
        _class.add_implicit_resolver(_tag, re.compile(_pattern), _first)


def _read(text: str, origin: str) -> object:
    """Parse one YAML document into plain data; every fault in it is a `RecipeError`."""
    if len(text) > MAX_CHARACTERS:
        raise RecipeError([f"{origin}: {len(text)} characters are too many for a recipe (at most {MAX_CHARACTERS})"])
    try:
        tree = yaml.load(text, Loader=_Loader)
        _check_plain(tree)
        return tree
    except RecursionError:
        raise RecipeError([f"{origin}: nested too deeply"]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        hint = "; a key is followed by a colon and a space" if "mapping values" in str(error.problem) else ""
        raise RecipeError([f"{origin}: not valid YAML{place}: {error.problem or error.context}{hint}"]) from None
    except yaml.YAMLError as error:
        raise RecipeError([f"{origin}: not valid YAML: {first_line(error)}"]) from None
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:  # from a tag such as !!int x
        raise RecipeError([f"{origin}: not valid YAML: {error}"]) from None


def _check_plain(value: object, depth: int = 0) -> None:
    """Refuse values that YAML tags can make and a recipe cannot hold: dates, bytes, sets, keys that are not text."""
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"keys must be text, got {quote(key)}")
            if item is None and (pair := re.fullmatch(r"(\w+):([^\s:]+)", key)):
                raise ValueError(f"{quote(key)}: YAML wants a space after the colon, as in {pair[1]}: {pair[2]}")
            _check_plain(key, depth + 1)
            _check_plain(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item, depth + 1)
    elif isinstance(value, str):
        value.encode("utf-8")
    elif value is not None and not isinstance(value, bool | int | float):
        raise ValueError(f"expected text, numbers, true, false, null, lists and sections, got {type(value).__name__}")


def parse_yaml(text: str, origin: str) -> dict[str, object]:
    """Parse the text of a recipe into its tree.

    Raises:
        RecipeError: not YAML, or not a mapping; names line and column.
    """
    tree = _read(text, origin)
    if not isinstance(tree, dict):
        raise RecipeError(
            [f"{origin}: expected sections such as teacher:, student:, data: and train:, got {quote(tree)}"]
        )
    return tree


def to_yaml(tree: object) -> str:
    """Return YAML that `parse_yaml` reads back as the same tree, in the given order."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def apply_overrides(tree: dict[str, object], overrides: Sequence[str], list_defaults: ListDefaults) -> None:
    """Set `key.sub=value` in the tree, in place and in order.

    The value is YAML (`loss.terms=[{type: tvd}]`, `train.warmup=0.1`, nothing for null). A number in the key is an
    index, from 0, into a list (`loss.terms.0.weight=0.5`), which is the one of `list_defaults` where the file has none.
    Of two fields that exclude each other (`ALTERNATIVES`) the one set last is kept.

    Raises:
        RecipeError: no `=`, an empty key, a value that is not YAML, or a key that leads into a plain value.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        path = tuple(key.strip().split("."))
        if not equals or not all(path):
            raise RecipeError([f"{quote(override)}: expected an override key.sub=value such as train.steps=100"])
        _assign(tree, path, _read(text, f"override {key}"), list_defaults)


def merge(tree: dict[str, object], changes: Mapping[str, object], path: tuple[str, ...] = ()) -> None:
    """Set every value of `changes` in the tree, in place, as overrides would; sections are merged, lists replaced.

    A section within one takes the place of a number or text, as `temperature: {student: 1.1}` that of `temperature: 2`.
    """
    for name, value in changes.items():
        if isinstance(value, dict) and value:
            if path and isinstance(_value_at(tree, (*path, name)), str | int | float):
                _assign(tree, (*path, name), {}, {})
            merge(tree, value, (*path, name))
        else:
            _assign(tree, (*path, name), value, {})


def _value_at(tree: object, path: tuple[str, ...]) -> object:
    for part in path:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _assign(tree: dict[str, object], path: tuple[str, ...], value: object, list_defaults: ListDefaults) -> None:
    key = ".".join(path)
    for pair in ALTERNATIVES:
        for chosen, other in (pair, pair[::-1]):
            if (value is not None and key == chosen) or key.startswith(chosen + "."):
                _drop(tree, other.split("."))
    _set(tree, path, value, list_defaults)


def _drop(tree: object, path: list[str]) -> None:
    for part in path[:-1]:
        tree = tree.get(part) if isinstance(tree, dict) else None
    if isinstance(tree, dict):
        tree.pop(path[-1], None)


def _set(tree: dict[str, object], path: tuple[str, ...], value: object, list_defaults: ListDefaults) -> None:
    node: object = tree
    for depth, part in enumerate(path):
        here = ".".join(path[:depth])
        last = depth == len(path) - 1
        if isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                raise RecipeError([f"{'.'.join(path)}: {here} is a list of {len(node)}, numbered from 0; got {part}"])
            if last:
                node[int(part)] = value
            else:
                node = node[int(part)]
        elif isinstance(node, dict):
            if last:
                node[part] = value
            else:
                if node.get(part) is None:
                    node[part] = [dict(item) for item in list_defaults.get(path[: depth + 1], [])] or {}
                node = node[part]
        else:
            raise RecipeError([f"{'.'.join(path)}: {here} is {quote(node)}, not a section"])
