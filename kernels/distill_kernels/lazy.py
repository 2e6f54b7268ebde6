"""Names of a package whose modules are imported when a name is first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`.

    Args:
        package: The package's `__name__`.
        modules: The names that each module holds, separated by spaces, by module. The package imports the same names
            under TYPE_CHECKING, for type checkers and editors.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[package], name, found)  # found without this function from now on
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return find, names
