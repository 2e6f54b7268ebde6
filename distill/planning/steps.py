"""The arithmetic of a run's steps: micro-batches in an optimizer step, steps in a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainingArguments

from distill.recipe import Data, Train

FUSED = "fused_adamw"


def accumulation_steps(train: Train, data: Data, world: int) -> int:
    """Micro-batches of one optimizer step: `tokens_per_step` over `batch_size * max_length * world`.

    Raises:
        ValueError: where that is no whole number, naming the nearest values that are.
    """
    micro = train.batch_size * data.max_length * world
    if train.tokens_per_step is None:
        return 1
    steps, rest = divmod(train.tokens_per_step, micro)
    if rest or not steps:
        near = f"{steps * micro} or {(steps + 1) * micro}" if steps else str(micro)
        raise ValueError(
            f"train.tokens_per_step: expected a multiple of train.batch_size x data.max_length x devices = "
            f"{train.batch_size} x {data.max_length} x {world} = {micro}, such as {near}; came {train.tokens_per_step}"
        )
    return steps


def total_steps(train: Train, rows: int, accumulation: int, world: int) -> int:
    """Optimizer steps of the run; an epoch's last step may be smaller."""
    if train.steps is not None:
        return train.steps
    assert train.epochs is not None
    per_epoch = -(-rows // (train.batch_size * world * accumulation))
    return max(int(-(-train.epochs * per_epoch // 1)), 1)


def require_arguments(given: Mapping[str, Any]) -> None:
    """Refuse `train.arguments` that do not exist, and numbers and switches that are none: transformers looks at few.

    Raises:
        ValueError: naming the first one.
    """
    unknown = sorted(set(given) - set(TrainingArguments.__dataclass_fields__))
    if unknown:
        raise ValueError(f"train.arguments.{unknown[0]}: transformers.TrainingArguments has no such argument")
    if given.get("use_liger_kernel"):
        raise ValueError(
            "train.arguments.use_liger_kernel: it would take the place of the forward that computes this loss; leave "
            "it out"
        )
    for name, value in given.items():
        field = TrainingArguments.__dataclass_fields__[name]
        kind = float if "float" in str(field.type) and field.default is not None else type(field.default)
        fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
        if kind in (bool, int, float) and (not fits or (kind is not bool and isinstance(value, bool))):
            wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
            raise ValueError(f"train.arguments.{name}: expected {wanted}, came {value!r}")
