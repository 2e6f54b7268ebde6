"""Features named by a table, `package.module:attribute`, and imported when a recipe or a command asks for one."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load_named(target: str) -> Any:
    """Return the attribute of a module that `target` names, such as `distill.teachers.model:ModelSource`."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)
