"""Settings that leave an optimizer step unchanged: settings of memory, speed and logging.

A step trains on batch_size x accumulation x processes rows, and its loss is the mean over all trained tokens of these
rows: the size of a micro-batch does not matter, as long as the number of rows stays the same. A run may be resumed with
other values of these settings, and runs that differ in nothing else are runs of one recipe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from distill.recipe.schema import Recipe
from distill.recipe.train import micro_batch_tokens

STEP = ("train.batch_size", "train.tokens_per_step")  # as long as the step has the same rows
FREE = (
    "output_dir",
    "student.lora.save",
    "train.gradient_checkpointing",
    "train.cuda_graph",
    "train.save_every",
    "train.eval_every",
    "train.log_every",
    "train.on_divergence",
    "train.report_to",
    "teacher.offload",
    "teacher.url",
    "teacher.folder",
    "teacher.prefetch",
    "teacher.timeout",
    "teacher.token_file",
    "parallel.teacher_timeout",
    "data.workers",
    "data.cache",  # the hash of the rows in lock.yaml identifies the data
    "data.on_policy.batch_size",
    "data.on_policy.store_every",
    "eval.batch_size",
)
NUMBERED = r"^teachers\.\d+\."


def is_free(name: str) -> bool:
    """Return whether a setting, by its name with dots, is one of `FREE`, or that of one of several teachers."""
    return f"{re.sub(NUMBERED, 'teacher.', name)}.".startswith(tuple(f"{free}." for free in FREE))


def tokens_of_step(recipe: Recipe, processes: int) -> int:
    """Return the tokens of an optimizer step over all processes, padding included."""
    return recipe.train.tokens_per_step or micro_batch_tokens(recipe.train, recipe.data, processes)


def rows_of_step(recipe: Recipe, processes: int) -> int:
    """Return the rows of an optimizer step over all processes."""
    return tokens_of_step(recipe, processes) // recipe.data.max_length


def why_batch_size_stays(recipe: Recipe) -> str | None:
    """Return the reason why another `train.batch_size` would change a step of as many rows; None where it would not."""
    if recipe.data.samples > 1:
        return "data.on_policy.samples puts all answers of a prompt into one micro-batch"
    if recipe.train.arguments.get("auto_find_batch_size"):
        return "train.arguments.auto_find_batch_size takes it from the checkpoint"
    return None


def settings_of_steps(recipe: Recipe, processes: int) -> dict[str, object]:
    """Return the settings that the optimizer steps of a run depend on, by name with dots.

    Args:
        processes: number of processes. The size of a step is given in tokens, under `train.tokens_per_step`, also where
            it follows from `train.batch_size`.
    """
    settings = dict(_named(recipe.model_dump(mode="json")))
    settings["train.tokens_per_step"] = tokens_of_step(recipe, processes)
    if why_batch_size_stays(recipe) is None:
        del settings["train.batch_size"]
    return {name: value for name, value in settings.items() if not is_free(name)}


def _named(tree: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield every leaf of a tree by its name with dots; items of lists by index."""
    if not (isinstance(tree, dict | list) and tree):
        yield name, tree
        return
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from _named(value, f"{name}.{key}" if name else str(key))
