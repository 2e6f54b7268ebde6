"""Choice of each model's attention back end: timed once, recorded, and kept when the run is resumed.

    choices = AttentionChoices(recipe, read_choices(folder) if resume else {})
    patch(teacher, "teacher", attention=choices.of(teacher, "teacher"))
    choices.write(folder)            # attention.json

Back ends differ in their roundings, so a resumed run that chose again could end with other weights than the same run
left alone. Under `train.deterministic`, where the same run must have the same bits anywhere, nothing is timed: ours is
taken. Rows of several documents are ours as well. On an H200, in a step of 289 ms on packed chats, torch's
variable-length attention took 1.5 to 2 times as long; cuDNN's, which needs a package of its own, would win 0.4 ms with
the teacher's heads of 128 columns and lose with the student's of 64.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from torch import nn

from distill.core.files import write_json
from distill.core.ranks import is_main_process
from distill.models.patch import attention
from distill.recipe import Recipe

ATTENTION_FILE = "attention.json"


class AttentionChoices:
    """The back ends of one run.

    Args:
        recipe: `attention` of teacher and student; `auto` is timed, any other implementation stays the model's own.
        recorded: Choices of the same run from `read_attention_choices`; not timed again.
    """

    def __init__(self, recipe: Recipe, recorded: Mapping[str, Any] | None = None) -> None:
        self.recipe = recipe
        self.found: dict[str, Any] = dict(recorded or {})

    def of(self, model: nn.Module, role: str, number: int = 0) -> str | None:
        """The back end for `model`; None where it keeps its own attention. The same on every process.

        Args:
            model: Model on its device; only its heads are read.
        """
        teachers = [self.recipe.teacher, *self.recipe.teachers[1:]]
        section = teachers[number] if role == "teacher" else self.recipe.student
        place = f"{role} {number + 1}" if number else role
        if section.attention != "auto":
            return None
        if place not in self.found:
            choice = None
            if self.recipe.train.deterministic:
                choice = {"backend": "triton", "milliseconds": {}}
            elif is_main_process():
                name, times = attention.choose_attention(
                    model, self.recipe.train.batch_size, self.recipe.data.max_length, backward=role == "student"
                )
                choice = {"backend": name, "milliseconds": {key: round(value, 4) for key, value in times.items()}}
            (self.found[place],) = broadcast_object_list([choice])
        return str(self.found[place]["backend"])

    def write(self, folder: Path) -> None:
        if self.found:
            write_json(folder / ATTENTION_FILE, self.found)


def read_attention_choices(folder: Path) -> dict[str, Any]:
    """The choices that a run wrote down; none where it timed nothing.

    Raises:
        ValueError: the file is there and is not what a run writes.
    """
    path = folder / ATTENTION_FILE
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        for choice in found.values():
            if choice["backend"] not in attention.BACKENDS:
                raise ValueError(f"{choice['backend']!r} is none of {', '.join(attention.BACKENDS)}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path}: expected the attention back ends of this run: {error}; delete it to choose again"
        ) from None
    return dict(found)
