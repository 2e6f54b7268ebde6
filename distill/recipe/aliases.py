"""Settings of other tools: the field that each corresponds to, and how its value is written where that differs.

    other_tools().fields["micro_batch_size"]            # Alias(field="train.batch_size", cure="")
    names_elsewhere()["train.batch_size"]["axolotl"]    # "micro_batch_size"

    answer_of("seq_kd")                                 # Answer(setting="", text="the teacher's answers are ...")

The tables are data, in other_tools.yaml and, of all arguments of five tools, tool_arguments.yaml. They are read when a
message or `distill settings` needs them.
"""

from __future__ import annotations

import fnmatch
import functools
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from distill.core.errors import Alias, FieldNames
from distill.recipe.fields import PATTERNS
from distill.recipe.library_names import argument_names
from distill.recipe.train import OWNED_ARGUMENTS, UNFIT_ARGUMENTS

FILE = Path(__file__).with_name("other_tools.yaml")
ARGUMENTS_FILE = Path(__file__).with_name("tool_arguments.yaml")


@functools.cache
def _tables() -> dict[str, Any]:
    tables: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return tables


def names_elsewhere() -> dict[str, dict[str, str]]:
    """Return the names of settings in TRL, torchtune and axolotl, by our setting and tool."""
    tools: dict[str, dict[str, str]] = _tables()["tools"]
    return tools


class Answer(NamedTuple):
    """What an argument of another tool is here.

    Attributes:
        setting: Ours, with dots; empty where there is none.
        text: How its value is written here, or why there is none.
    """

    setting: str
    text: str


@functools.cache
def _arguments() -> list[tuple[str, Answer]]:
    """Return the patterns of arguments with their answers, the most exact ones first."""
    tables: dict[str, Any] = yaml.safe_load(ARGUMENTS_FILE.read_text(encoding="utf-8"))
    rows = [
        (pattern, Answer(setting, entry.get("hint", "")))
        for setting, entries in tables["settings"].items()
        for entry in entries
        for pattern in entry["names"]
    ]
    rows += [(pattern, Answer("", entry["because"])) for entry in tables["none"] for pattern in entry["names"]]
    return sorted(rows, key=lambda row: ("*" in row[0], -len(row[0])))


def answer_of(name: str) -> Answer | None:
    """Return what an argument of TRL, axolotl, LLaMA-Factory, ms-swift, KDFlow or transformers is here.

    None for a name that none of them has.
    """
    alias = other_tools().fields.get(name)
    if alias is not None:
        return Answer(alias.field, alias.cure)
    for pattern, answer in _arguments():
        if fnmatch.fnmatchcase(name, pattern):
            return answer
    if name in UNFIT_ARGUMENTS:
        return Answer("", UNFIT_ARGUMENTS[name])
    if name in argument_names():
        return Answer(f"train.arguments.{name}", "passed on to transformers' TrainingArguments as it is")
    return None


@functools.cache
def other_tools() -> FieldNames:
    """Return the names of settings, values and sections in other tools, for error messages."""
    tables = _tables()
    fields = OWNED_ARGUMENTS | {name: setting for setting, names in tables["names"].items() for name in names}
    hints = {name: entry["hint"] for entry in tables["hints"] for name in entry["names"]}
    return FieldNames(
        {name: Alias(setting, hints.get(name, "")) for name, setting in fields.items()},
        tables["values"],
        {section: (entry["form"], entry["value"]) for section, entry in tables["short"].items()},
        PATTERNS,
    )
