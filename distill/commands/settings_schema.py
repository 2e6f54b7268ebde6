"""Settings of a recipe from its schema (type, default, description), and the JSON schema for editors.

A field's description stands in its section's docstring under `Attributes:`.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from distill.core.errors import Section, did_you_mean
from distill.recipe import Recipe
from distill.recipe.aliases import answer_of, names_elsewhere
from distill.recipe.fields import Usual
from distill.recipe.renamed import RENAMED

WORDS = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true | false", "null": "null"}
BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
Node = dict[str, Any]  # node of a JSON schema
LARGEST = 2**20  # larger bounds only catch typing errors and are not shown


class Setting(NamedTuple):
    """Field of a recipe.

    Attributes:
        name: Path of the setting, as in overrides; `[]` follows a list.
        type: Accepted values.
        default: Default as YAML; `required` where there is none, empty for a section.
        elsewhere: Name of the setting in other tools, by tool.
    """

    name: str
    type: str
    default: str
    meaning: str
    elsewhere: dict[str, str]


@functools.cache
def settings() -> list[Setting]:
    schema = json_schema()
    elsewhere = names_elsewhere()
    found: dict[str, Setting] = {}
    whole = {**schema, "required": schema["then"]["required"]}  # as of a recipe that extends none
    for name, node, is_required in _fields(whole, schema["$defs"], "", ()):
        kind = _type(node)
        other = found.get(name)
        default = "required" if is_required else "" if "$ref" in node else node.get("default", "")
        default = default if isinstance(default, str) else json.dumps(default)
        if other is not None:  # a field of several types of teacher or term
            kind = " | ".join(dict.fromkeys([*other.type.split(" | "), *kind.split(" | ")]))
            default = other.default if default == "required" else default
        meaning = other.meaning if other is not None and other.meaning else node["description"]
        found[name] = Setting(name, kind, default, meaning, elsewhere.get(name, {}))
    return list(found.values())


class Found(NamedTuple):
    """Settings that a name means.

    Attributes:
        settings: Settings; none where another tool's argument has no counterpart.
        text: How another tool's argument is written here, or why there is none; may be empty.
        option: Option of `distill run` that an argument is, in place of a setting.
    """

    settings: list[Setting]
    text: str = ""
    option: str = ""


def find_settings(name: str) -> Found:
    """Return the settings that match a name: a path or its end, a section, a prefix, a former or another tool's name.

    Raises:
        ValueError: None matches; the message suggests the nearest.
    """
    plain = re.sub(r"\[\]|\.\d+(?=\.|$)", "", name.strip().strip("."))
    plain = RENAMED.get(plain, plain)
    paths = {setting.name.replace("[]", ""): setting for setting in settings()}
    exact = [setting for path, setting in paths.items() if path == plain or path.startswith(f"{plain}.")]
    if exact and plain:
        return Found(exact)
    argument = plain.lstrip("-").replace("-", "_")  # as on another tool's command line
    answer = answer_of(argument) or answer_of(argument.rpartition(".")[2])
    ends = [setting for path, setting in paths.items() if path.endswith(f".{plain}")]
    if answer is not None and answer.setting.startswith("--"):
        return Found([], answer.text, answer.setting)
    if answer is not None and answer.setting:
        meant = [
            setting for setting in [_setting(answer.setting, paths)] if setting is not None and setting not in ends
        ]
        return Found([*meant, *ends], "" if ends else answer.text)
    # from the most exact to the loosest: the first one that matches anything decides
    last = {path: path.rpartition(".")[2] for path in paths}
    tests = (
        lambda path: path.endswith(f".{plain}"),
        lambda path: any(plain in re.findall(r"[\w.]+", text) for text in paths[path].elsewhere.values()),
        lambda path: answer is None and path.startswith(plain),
        lambda path: answer is None and plain in last[path],
    )
    for test in tests if plain else ():
        matches = [setting for path, setting in paths.items() if test(path)]
        if matches:
            return Found(matches)
    if answer is not None:
        return Found([], answer.text)
    hint = did_you_mean(plain, dict.fromkeys([*last.values(), *paths]))
    hint = hint if hint.startswith("did") else "distill settings lists them all"
    raise ValueError(f"expected the name of a setting, got {name!r}; {hint}")


def _setting(name: str, paths: Mapping[str, Setting]) -> Setting | None:
    """Return the setting of this path, or the field of `train.arguments`; None where neither is there."""
    if name.startswith("train.arguments."):
        return paths["train.arguments"]._replace(name=name, type="as in transformers", default="")
    return paths.get(name)


def json_schema() -> Node:
    """Return the recipe's JSON schema (draft 2020-12), for editors."""
    schema = Recipe.model_json_schema()
    sections = dict(_sections(Section))
    for name, part in _parts(schema):
        section = sections[name]
        texts = field_descriptions(sections[name])
        part["description"] = " ".join(inspect.cleandoc(section.__doc__ or "").split("\n\n")[0].split())
        for key, node in part["properties"].items():
            usual = Usual.of(section.model_fields[key])
            node["description"] = texts.get(key, "") + (f" In use: {usual}." if usual else "")
            node.pop("title", None)
            factory = section.model_fields[key].default_factory
            if factory is not None:
                made: Any = factory()  # type: ignore[call-arg]
                node["default"] = made and [one.model_dump() if isinstance(one, BaseModel) else one for one in made]
        part.pop("title", None)
    # fields that validators make optional, or accept in another form
    required = [name for name in schema.pop("required") if name not in ("name", "teacher")]
    del schema["$defs"]["Data"]["required"]
    schema["if"] = {"not": {"required": ["extends"]}}  # a recipe that extends another need not be complete
    schema["then"] = {
        "required": required,
        "anyOf": [{"required": ["teacher"]}, {"required": ["teachers"]}],
        "properties": {"data": {"anyOf": [{"required": ["source"]}, {"required": ["sources"]}]}},
    }
    reports = schema["$defs"]["Train"]["properties"]["report_to"]
    reports["anyOf"] = [{"type": reports.pop("type"), "items": reports.pop("items")}, {"type": "string"}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "a recipe of distill", **schema}


def field_descriptions(section: type[Section]) -> dict[str, str]:
    """Return the descriptions of a section's fields, from its docstring and those of its bases."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__[: section.__mro__.index(Section)]):
        _, _, listed = inspect.cleandoc(vars(base).get("__doc__") or "").partition("Attributes:")
        for entry in re.split(r"\n    (?=\S)", listed)[1:]:
            names, _, text = entry.partition(":")
            found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found


def _sections(section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    for one in section.__subclasses__():
        yield one.__name__, one
        yield from _sections(one)


def _parts(schema: Node) -> list[tuple[str, Node]]:
    parts = [*schema["$defs"].items(), ("Recipe", schema)]
    return [(name, part) for name, part in parts if "properties" in part]


def _fields(part: Node, known: Node, prefix: str, above: tuple[str, ...]) -> Iterator[tuple[str, Node, bool]]:
    """Yield path, schema and whether it is required, for every field of a section and of nested sections."""
    for key, node in part["properties"].items():
        yield f"{prefix}{key}", node, key in part.get("required", ())
        for inner, is_item in _references(node, False):
            if inner not in above:
                yield from _fields(known[inner], known, f"{prefix}{key}{'[]' if is_item else ''}.", (*above, inner))


def _references(node: Node, is_item: bool) -> Iterator[tuple[str, bool]]:
    """Yield the sections that a field can hold, and whether it holds a list of them."""
    if "$ref" in node:
        yield node["$ref"].rpartition("/")[2], is_item
    for inner in [*node.get("anyOf", ()), *node.get("oneOf", ())]:
        yield from _references(inner, is_item)
    if isinstance(node.get("items"), dict):
        yield from _references(node["items"], True)


def _type(node: Node) -> str:
    if "$ref" in node:
        return "section"
    inner = node.get("anyOf") or node.get("oneOf")
    if inner:
        return " | ".join(dict.fromkeys(_type(one) for one in inner))
    if "enum" in node or "const" in node:
        values = node.get("enum", [node.get("const")])
        return " | ".join(value if isinstance(value, str) else json.dumps(value) for value in values)
    if node.get("type") == "array":
        return f"list of {_type(node['items'])}"
    if "type" not in node:
        return "anything"
    bounds = [f"{sign} {node[key]:,}" for key, sign in BOUNDS.items() if key in node and node[key] < LARGEST]
    return " ".join([WORDS.get(node["type"], "section"), ", ".join(bounds)]).strip()
