"""Errors of recipes and runs: one line per error with the field, what was expected and what came.

`Section` is the strict base model of every part of a recipe; `explain` turns pydantic's errors into such lines.
"""

from __future__ import annotations

import errno
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from distill.core.files import mount_of

IN_QUOTES = " (put it in quotes)"  # a cure for values that YAML reads as something else than text
EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": f"text{IN_QUOTES}",
    "list_type": "a list",
    "dict_type": "a section of key: value lines",
    "model_type": "a section of key: value lines",
    "model_attributes_type": "a section of key: value lines",
    "finite_number": "a finite number",
    "string_too_short": "text that is not empty",
    "invalid_key": "text as a key",
}

UNION_MEMBER = re.compile(r"(literal|list)\[")  # how pydantic names members of a union that have no field `type`
BOUNDS = {"greater_than": "above", "greater_than_equal": "at least", "less_than": "below", "less_than_equal": "at most"}
DISK = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than this system allows (ulimit -f)",
    errno.EROFS: "the disk is read-only",
    errno.EACCES: "access is not permitted",
    errno.EPERM: "access is not permitted",
    errno.EIO: "the disk reports an error",
    errno.EMFILE: "too many files are open (ulimit -n)",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ENOTDIR: "a file stands where a folder is expected",
    errno.ELOOP: "the link leads to itself",
}
FULL = (errno.ENOSPC, errno.EDQUOT)
# native libraries put the system's message into exceptions of their own, without an errno
_SAID = {code: os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)}


def disk_code(error: BaseException) -> int | None:
    """Return the errno of `DISK` that an exception is about; None for any other exception."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in DISK else None
    return next((code for code, words in _SAID.items() if words in str(error)), None)


def disk_line(error: BaseException) -> str | None:
    """Return a line for an error of the disk, with the file where it is known; None for any other exception."""
    code = disk_code(error)
    if code is None:
        return None
    name = getattr(error, "filename", None)
    if not name:
        return DISK[code]
    disk = f" (mounted at {mount_of(Path(str(name)))})" if code in FULL else ""
    return f"{quote(str(name)) if len(str(name)) > 200 else name}: {DISK[code]}{disk}"


class RecipeError(ValueError):
    """Error of a recipe that cannot be used; `faults` holds one line for each mistake."""

    def __init__(self, faults: Iterable[str]):
        self.faults = [" ".join(fault.split()) for fault in faults]
        super().__init__("\n".join(self.faults))


class RunError(RuntimeError):
    """Error that ends a run for a reason outside of the recipe; the message is one line that includes the cure."""


class TeacherUnavailableError(RunError):
    """Error of a remote teacher that does not respond, or whose model changed.

    Attributes:
        agreed: every rank raises it at the same step, before that step has begun.
    """

    def __init__(self, message: str, agreed: bool = False) -> None:
        super().__init__(message)
        self.agreed = agreed


class Section(BaseModel):
    """Strict base model of a recipe's parts: refuses unknown fields, wrong types, NaN and infinity; immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


def quote(value: object) -> str:
    """Return a value as an error message quotes it, truncated where it is long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list):
        return ("a section" if isinstance(value, dict) else "a list") + f" of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    quoted = repr(value)
    return quoted if len(quoted) <= 80 else quoted[:76] + "..."


def expected_got(expected: str, value: object) -> str:
    return f"expected {expected}, got {quote(value)}"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its class name where the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return a suffix that suggests the nearest of `known`, or lists them all."""
    known = list(known)
    near = get_close_matches(str(word).lower(), known, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"


class Missing(NamedTuple):
    """Annotation of a required field: what it is, for the message of its absence."""

    what: str


class Alias(NamedTuple):
    """Our field for a field name of another tool.

    Attributes:
        field: ours, with dots; empty where there is none.
        cure: Instruction for writing the value here, where it differs too.
    """

    field: str
    cure: str = ""


class FieldNames(NamedTuple):
    """Names that other tools use, for suggestions in error messages.

    Attributes:
        fields: our field, by their name or by section and name.
        values: our value, by the last part of our field and their value.
        short: sections that other tools write as one value: our spelling, and the value to show where none is given.
        patterns: texts that match a field's pattern, in words, by the pattern.
    """

    fields: Mapping[str, Alias]
    values: Mapping[str, Mapping[str, str]]
    short: Mapping[str, tuple[str, str]]
    patterns: Mapping[str, str]


ReadNames = Callable[[], FieldNames]


def explain(error: ValidationError, model: type[BaseModel], names: ReadNames) -> list[str]:
    """Return one line for each error that pydantic found in data for `model`; `names` is called where it is needed."""
    lines = [_line(fault, model, names) for fault in error.errors(include_url=False) if not _of_unmeant_member(fault)]
    return list(dict.fromkeys(lines))


def _of_unmeant_member(fault: ErrorDetails) -> bool:
    """Return whether it is a complaint of that member of `word | list` which the value was not meant for."""
    members = [part for part in fault["loc"] if isinstance(part, str) and UNION_MEMBER.match(part)]
    if not members:
        return False
    if isinstance(fault["input"], list):
        return fault["type"] == "literal_error"
    return fault["type"] == "list_type" and isinstance(fault["input"], str)


def _unknown(path: list[str], section: list[str], model: type[BaseModel], names: ReadNames) -> str:
    """Return a suggestion for the unknown field at `path`; `section` lists the fields known there."""
    parents = [part for part in path[:-1] if not part.isdigit()]
    name = path[-1].strip().lower().replace("-", "_")
    fields = names().fields
    alias = fields.get(".".join([*parents, name])) or fields.get(name)
    if alias:
        field = alias.field
        last = alias.field.rpartition(".")[2]
        if last in section and ".".join(parents) != field.rpartition(".")[0]:
            field = ".".join([*path[:-1], last])  # the same field of the other model
        return " ".join(filter(None, [_meant(field, name) if field else "", alias.cure]))
    near = did_you_mean(name, section)
    everywhere = _paths(model)
    same = dict.fromkeys(path for path in everywhere if path.rpartition(".")[2] == name)
    if near.startswith("known") and same:
        return _meant(" or ".join(same), name)
    return near


def _meant(field: str, name: str) -> str:
    where = " of the recipe itself" if field == name else ""
    return f"did you mean {field}{where}?"


def _paths(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the dotted path of every field below `model` that is not part of a list."""
    paths = []
    for name, field in model.model_fields.items():
        paths.append(prefix + name)
        if "list" not in str(field.annotation):
            paths += [path for section in _sections(field.annotation) for path in _paths(section, f"{prefix}{name}.")]
    return paths


def _line(fault: ErrorDetails, model: type[BaseModel], names: ReadNames) -> str:
    place = _locate(fault["loc"], model)
    path = place.path
    where = ".".join(path)
    came = fault["input"]
    kind = fault["type"]
    context = fault.get("ctx", {})
    head = f"{where}: " if where else ""
    if kind == "extra_forbidden":
        if place.types_with_field:
            *others, last = place.types_with_field
            types = f"{', '.join(others)} or {last}" if others else last
            return f"{head}belongs to type: {types}; got type: {place.tag}"
        return f"{head}unknown field; {_unknown(path, place.fields, model, names)}"
    if kind == "missing":
        found = [section.model_fields[path[-1]] for section in place.sections]
        marks = [mark for field in found for mark in field.metadata if isinstance(mark, Missing)]
        return f"{where} is missing: {marks[0].what}" if marks else f"{head}required field is missing"
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        tags = _literals(model, [*path, "type"])
        tag = context.get("tag")
        if kind == "union_tag_not_found":
            return f"{head}type is missing; known: {', '.join(tags)}"
        return f"{head}unknown type {quote(tag)}; {_value_meant('type', tag, tags, names)}"
    if kind == "literal_error":
        options = _literals(model, path)
        hint = _value_meant(path[-1], came, options, names)
        hint = f"; {hint}" if hint.startswith("did") else ""
        return f"{head}expected one of {', '.join(options)}, got {quote(came)}{hint}"
    if kind == "value_error":
        text = str(context["error"])
        fields = {name for found in _sections_at(model, path) for name in found.model_fields}
        return f"{where}.{text}" if where and re.split(r"\W", text)[0] in fields else head + text
    if kind in BOUNDS:
        limit = next(context[key] for key in ("gt", "ge", "lt", "le") if key in context)
        return head + expected_got(f"a number {BOUNDS[kind]} {limit:g}", came)
    if kind == "string_pattern_mismatch":
        return head + expected_got(names().patterns[context["pattern"]], came)
    if kind == "too_short":
        return head + expected_got(f"a list of at least {context['min_length']}", came)
    if kind in EXPECTED:
        error = head + expected_got(EXPECTED[kind].removesuffix(IN_QUOTES) if came is None else EXPECTED[kind], came)
        section_path = ".".join(part for part in path if not part.isdigit())
        pair = re.match(r"(\w+):([^\s:/]+)", came) if isinstance(came, str) else None
        if pair and EXPECTED[kind].startswith(("a section", "a list")) and pair[1] in str(_paths(model)):
            return (
                f"{head}{expected_got(EXPECTED[kind], came)}; YAML needs a space after the colon: {pair[1]}: {pair[2]}"
            )
        short = names().short.get(section_path)
        if short is None or not EXPECTED[kind].startswith(("a section", "a list")):
            return error
        value = came if isinstance(came, str | int | float) and not isinstance(came, bool) else short[1]
        return f"{error}; as in {section_path}: {short[0].format(value)}"
    return f"{head}{fault['msg']}, got {quote(came)}"


def _value_meant(field: str, value: object, options: list[str], names: ReadNames) -> str:
    ours = names().values.get(field, {}).get(str(value).strip().lower().replace(" ", "_"), "")
    return f"did you mean {ours}?" if ours.split(" ")[0] in options else did_you_mean(value, options)


def _annotation_parts(annotation: object) -> list[object]:
    if get_origin(annotation) is Annotated:
        return _annotation_parts(get_args(annotation)[0])
    if isinstance(annotation, types.UnionType) or get_origin(annotation) in (list, Union):
        return [part for inner in get_args(annotation) for part in _annotation_parts(inner)]
    return [annotation]


def _sections(annotation: object) -> list[type[BaseModel]]:
    return [p for p in _annotation_parts(annotation) if isinstance(p, type) and issubclass(p, BaseModel)]


def _sections_at(model: type[BaseModel], path: list[str]) -> list[type[BaseModel]]:
    """Return the sections that the field at `path` holds; none where it is a plain value."""
    sections = [model]
    for name in (part for part in path if not part.isdigit()):
        sections = [s for m in sections if name in m.model_fields for s in _sections(m.model_fields[name].annotation)]
    return sections


def _literals(model: type[BaseModel], path: list[str]) -> list[str]:
    fields = [
        found.model_fields[path[-1]] for found in _sections_at(model, path[:-1]) if path[-1] in found.model_fields
    ]
    values = [value for field in fields for part in _annotation_parts(field.annotation) for value in get_args(part)]
    return list(dict.fromkeys(value if isinstance(value, str) else quote(value) for value in values))


class _Place(NamedTuple):
    """Where a fault is.

    Attributes:
        path: the path as the user wrote it.
        sections: the section that it ends in; all members of a union whose `type` is not known.
        tag: the `type` of that section; empty where it is no member of a union.
        union: the members of that union.
    """

    path: list[str]
    sections: list[type[BaseModel]]
    tag: str
    union: list[type[BaseModel]]

    @property
    def fields(self) -> list[str]:
        return list(dict.fromkeys(name for section in self.sections for name in section.model_fields))

    @property
    def types_with_field(self) -> list[str]:
        """The types of the union whose sections have the field that the path ends in."""
        having = [section for section in self.union if self.path[-1] in section.model_fields]
        return [name for section in having for name in _types(section)]


def _locate(loc: tuple[int | str, ...], model: type[BaseModel]) -> _Place:
    """Return the place of a fault in data for `model`.

    pydantic adds parts of its own, neither an index nor a field: the `type` of a union's member, `[key]`, `list[int]`,
    the tag of a value's form, which we write in brackets.
    """
    place = _Place([], [model], "", [])
    for position, part in enumerate(loc):
        fields = {name: field for section in place.sections for name, field in section.model_fields.items()}
        if isinstance(part, int):
            place.path.append(str(part))
        elif part.startswith("("):
            continue
        elif len(place.sections) > 1 and any(part in _types(section) for section in place.sections):
            # first of all, since a type may have the name of a field: a teacher of type `model` has a `model`
            members = [section for section in place.sections if part in _types(section)]
            place = _Place(place.path, members, part, place.sections)
        elif part in fields and position < len(loc) - 1:
            place = _Place([*place.path, part], _sections(fields[part].annotation), "", [])
        elif UNION_MEMBER.match(part):
            continue
        elif position == len(loc) - 1 or not place.sections:
            place.path.append(part)
    return place


def _types(section: type[BaseModel]) -> tuple[str, ...]:
    """Return the values of `type` that select a member of a union; none for any other section."""
    field = section.model_fields.get("type")
    return () if field is None else get_args(field.annotation)
