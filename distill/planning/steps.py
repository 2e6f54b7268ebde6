"""The arithmetic of a run's steps: micro-batches in an optimizer step, steps in a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers import TrainingArguments
from transformers.integrations import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from distill.core.units import plural
from distill.recipe.library_names import optimizer_problem
from distill.recipe.train import micro_batch_tokens

if TYPE_CHECKING:
    from distill.data.report import DataReport
    from distill.recipe import Data, Recipe, Train

FUSED = "fused_adamw"
# below these a run's figures are mostly chance
MIN_STEPS = 20
MIN_HELD_OUT_TOKENS = 2_000


def accumulation_steps(train: Train, data: Data, world: int) -> int:
    """Return the micro-batches of one optimizer step: `tokens_per_step` over `batch_size * max_length * world`.

    Raises:
        ValueError: where that is no whole number, naming the nearest values that are.
    """
    micro = micro_batch_tokens(train, data, world)
    if train.tokens_per_step is None:
        return 1
    steps, rest = divmod(train.tokens_per_step, micro)
    if rest or not steps:
        near = f"{steps * micro} or {(steps + 1) * micro}" if steps else str(micro)
        raise ValueError(
            f"train.tokens_per_step: expected a multiple of train.batch_size x data.max_length x devices = "
            f"{train.batch_size} x {data.max_length} x {world} = {micro}, such as {near}; got {train.tokens_per_step}"
        )
    return steps


def require_settings(train: Train, data: Data, world: int) -> None:
    """Refuse settings of `train` that no run on so many processes can have.

    Raises:
        ValueError: A step that is no whole number of micro-batches, unknown arguments, an absent package of the
            optimizer or to report to.
    """
    accumulation_steps(train, data, world)
    require_arguments(train.arguments)
    for problem in missing_packages(train):
        raise ValueError(problem)


def missing_packages(train: Train) -> list[str]:
    """Return the errors of an optimizer and of trackers whose packages are not installed; empty where all are."""
    problems = (report_to_problem(train.report_to), optimizer_problem(train.optimizer))
    return [problem for problem in problems if problem]


def data_rows_per_micro_batch(train: Train, data: Data) -> int:
    """Return the data's rows in a micro-batch: each of several responses per prompt takes one of its rows."""
    return train.batch_size // data.samples


def total_steps(train: Train, data: Data, rows: int, accumulation: int, world: int) -> int:
    """Return the optimizer steps of a run over so many rows of the data; an epoch's last step may be smaller."""
    if train.steps is not None:
        return train.steps
    assert train.epochs is not None
    per_epoch = -(-rows // (data_rows_per_micro_batch(train, data) * world * accumulation))
    return max(int(-(-train.epochs * per_epoch // 1)), 1)


def small_data_warnings(recipe: Recipe, data: DataReport, accumulation: int, world: int) -> list[str]:
    """Return warnings of data or steps that are too few to train on or to measure, with the settings to change.

    Args:
        data: report on the data; random tokens get no warnings.
        accumulation: micro-batches of a step on a device.
    """
    if recipe.data.is_synthetic:
        return []
    train = recipe.train
    micro_rows = data_rows_per_micro_batch(recipe.train, recipe.data) * world
    micro = micro_batch_tokens(train, recipe.data, world)
    steps = total_steps(train, recipe.data, data.rows, accumulation, world)
    faults = []
    cures = []
    notes = []
    if accumulation * micro_rows > data.rows and not data.is_sample:
        faults.append(f"a step of {accumulation * micro:,} tokens is more than all of the data ({data.tokens:,})")
    if steps < MIN_STEPS:
        faults.append(f"{plural(steps, 'optimizer step')} are too few to train on")
    # as many micro-batches as leave MIN_STEPS steps to a run, or 1
    if faults and accumulation > 1 and not data.is_sample:
        fewer = max(int(data.rows * train.epochs / MIN_STEPS) if train.epochs else data.rows, micro_rows) // micro_rows
        then = total_steps(train, recipe.data, data.rows, fewer, world)
        if fewer < accumulation:  # else a step is small enough, and train.steps alone says how many there are
            more = f" (makes {plural(then, 'step')})" if then > steps else ""
            cures.append(f"train.tokens_per_step={fewer * micro}{more}")
    if steps < MIN_STEPS:
        cures.append("increase train.epochs" if train.epochs else "increase train.steps")
    if faults:
        cures.append("use more data")
        notes.append(f"{'; '.join(faults)}: {_alternatives(cures)}")
    if data.validation_tokens < MIN_HELD_OUT_TOKENS:
        notes.append(
            f"{plural(data.validation_tokens, 'held-out token')} (under {MIN_HELD_OUT_TOKENS:,}) are too few "
            f"for reliable metrics: {_alternatives(_larger_held_out(recipe.data, data))}"
        )
    return notes


def _larger_held_out(section: Data, data: DataReport) -> list[str]:
    """Return the settings that would hold out more; one that does not limit the held-out data is not among them."""
    validation = section.validation
    limited = validation.max_rows is not None and data.validation_documents >= validation.max_rows
    if limited:
        cures = ["increase data.validation.max_rows"]
    elif validation.source is None and not data.is_sample:
        cures = ["increase data.validation.fraction"]
    else:
        cures = []
    cures.append("set data.validation.source" if validation.source is None else "use a larger data.validation.source")
    if validation.source is None and not limited:
        cures.append("use more data" if section.max_rows is None else "increase data.max_rows")
    return cures


def _alternatives(ways: Sequence[str]) -> str:
    return ", or ".join(filter(None, [", ".join(ways[:-1]), ways[-1]]))


def report_to_problem(names: Sequence[str]) -> str | None:
    """Return the error of the first entry of `train.report_to` that is unknown or not installed; None without one."""
    installed = get_available_reporting_integrations()
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK and name != "all":
            return f"train.report_to: expected some of {', '.join(INTEGRATION_TO_CALLBACK)}; got {name}"
        if name not in (*installed, "all", "flyte"):  # flyte is not looked for there
            return f"train.report_to: {name} is not installed here; install its package, or leave it out"
    return None


def require_arguments(given: Mapping[str, Any]) -> None:
    """Raise ValueError for `train.arguments` of a wrong type, which transformers does not check."""
    for name, value in given.items():
        field = TrainingArguments.__dataclass_fields__[name]
        kind = float if "float" in str(field.type) and field.default is not None else type(field.default)
        fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
        if kind in (bool, int, float) and (not fits or (kind is not bool and isinstance(value, bool))):
            expected = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
            raise ValueError(f"train.arguments.{name}: expected {expected}, got {value!r}")
