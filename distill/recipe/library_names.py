"""Names that transformers knows, read from its source: `distill validate` imports neither it nor torch."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

# packages of transformers' optimizers that come neither with it nor with torch, by a part of the optimizer's name; the
# first part that fits counts (transformers 5.23, trainer_optimizer.py)
OPTIMIZER_PACKAGES = {
    "galore": "galore_torch",
    "apollo": "apollo_torch",
    "lomo": "lomo_optim",
    "grokadamw": "grokadamw",
    "schedule_free": "schedulefree",
    "stable_adamw": "optimi",
    "anyprecision": "torchdistx",
    "torch_xla": "torch_xla",
    "torch_npu": "torch_npu",
    "adamw_torch_4bit": "torchao",
    "adamw_torch_8bit": "torchao",
    "8bit": "bitsandbytes",
    "bnb": "bitsandbytes",
    "paged": "bitsandbytes",
    "lion": "bitsandbytes",
    "ademamix": "bitsandbytes",
}


def optimizer_problem(optimizer: str) -> str | None:
    """Return the error of an optimizer whose package is not installed here; None where it is, or none is needed."""
    package = next((package for part, package in OPTIMIZER_PACKAGES.items() if part in optimizer), None)
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    return (
        f"train.optimizer: {optimizer}: expected its package {package}, which is not installed here; install it, or "
        "choose another optimizer"
    )


@functools.cache
def optimizer_names() -> tuple[str, ...]:
    """Return the values of transformers' `OptimizerNames`; none where they cannot be read."""
    assigned = (node for node in _class("OptimizerNames") if isinstance(node, ast.Assign))
    values = (node.value.value for node in assigned if isinstance(node.value, ast.Constant))
    return tuple(value for value in values if isinstance(value, str))


@functools.cache
def argument_names() -> tuple[str, ...]:
    """Return the fields of transformers' `TrainingArguments`; none where they cannot be read."""
    fields = (node.target for node in _class("TrainingArguments") if isinstance(node, ast.AnnAssign))
    return tuple(field.id for field in fields if isinstance(field, ast.Name))


def unknown_name(name: str, known: Sequence[str]) -> str | None:
    """Return the end of a message for a name that is none of those known; None for a known one, or where none are."""
    if not known or name in known:
        return None
    near = get_close_matches(name, known, n=3)
    return f"got {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else "")


def _class(name: str) -> list[ast.stmt]:
    spec = importlib.util.find_spec("transformers")  # of a top-level package: nothing is imported
    if spec is None or spec.origin is None:
        return []
    path = Path(spec.origin).with_name("training_args.py")
    if not path.is_file():
        return []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node.body
    return []
