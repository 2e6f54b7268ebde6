"""The `stages:` of a recipe, runs that each start from the student of the one before, and the `export:` at the end."""

from __future__ import annotations

import copy
from typing import Annotated, Literal

from pydantic import Field

from distill.core.errors import Section
from distill.recipe.fields import ROUTE
from distill.recipe.yaml_text import merge

Settings = Annotated[dict[str, object], Field(default_factory=dict)]


class Stage(Section):
    """One stage of a recipe: overrides of the recipe's settings.

    The student of a later stage is that of the stage before, unless the stage names another `model`. With
    `from_teacher` it is cut from that student; the `from_teacher` of the recipe itself is for the first stage.

    Attributes:
        name: name of the stage, part of its folder's name.
        teacher: overrides of the recipe's `teacher` in this stage.
        student: overrides of `student`.
        data: overrides of `data`.
        loss: overrides of `loss`.
        train: overrides of `train`.
        parallel: overrides of `parallel`.
        eval: overrides of `eval`.
        generate: overrides of `generate`.
    """

    name: Annotated[str, Field(pattern=ROUTE)] = "stage"
    teacher: Settings
    student: Settings
    data: Settings
    loss: Settings
    train: Settings
    parallel: Settings
    eval: Settings
    generate: Settings

    def applied(self, tree: dict[str, object], start: str | None) -> dict[str, object]:
        """Return a recipe's tree with this stage's settings.

        Args:
            tree: recipe without its stages; not changed.
            start: folder of the student that the stage starts from; None for the first stage.
        """
        tree = copy.deepcopy(tree)
        if start is not None:
            merge(tree, {"student": {"model": start}})
        merge(tree, {name: section for name, section in self.model_dump(exclude={"name"}).items() if section})
        student = tree["student"]
        assert isinstance(student, dict)
        if start is not None and "from_teacher" in self.student:
            student.setdefault("model", start)
        return tree


class Export(Section):
    """File that the student is served from, written at the end of a run into its folder `export`.

    With llama.cpp on this machine its KL to the teacher, size and speed are printed, beside those of the teacher as a
    q8_0 file.

    Attributes:
        gguf: type of the GGUF file, as in `distill export --gguf`; with `student.quantise` that of its format.
        tokens: minimum number of held-out tokens that both files are measured on; 0 for no measurement.
    """

    gguf: Literal["f32", "f16", "bf16", "q8_0", "q6_k", "q5_0", "q4_0", "q4_k_m"] = "q8_0"
    tokens: Annotated[int, Field(ge=0)] = 512
