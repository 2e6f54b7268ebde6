"""Settings of other tools: the field that each corresponds to, and how its value is written where that differs.

    other_tools().fields["micro_batch_size"]            # Alias(field="train.batch_size", cure="")
    names_elsewhere()["train.batch_size"]["axolotl"]    # "micro_batch_size"

The tables are data, in other_tools.yaml. They are read when a message or `distill settings` needs them.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml

from distill.core.errors import Alias, FieldNames
from distill.recipe.fields import PATTERNS
from distill.recipe.train import OWNED_ARGUMENTS

FILE = Path(__file__).with_name("other_tools.yaml")


@functools.cache
def _tables() -> dict[str, Any]:
    tables: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return tables


def names_elsewhere() -> dict[str, dict[str, str]]:
    """Return the names of settings in TRL, torchtune and axolotl, by our setting and tool."""
    tools: dict[str, dict[str, str]] = _tables()["tools"]
    return tools


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
