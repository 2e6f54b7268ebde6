"""The recipe: the complete configuration of one distillation run, as a YAML file that is validated field by field.

    teacher: {model: meta-llama/Llama-3.1-8B-Instruct}     # or teachers: [{model: ..., weight: 0.7}, ...]
    student: {model: meta-llama/Llama-3.2-1B-Instruct}
    data: {source: chats.jsonl}
    train: {steps: 1000}

`load` reads a file, applies `key.sub=value` overrides and validates; `dump` writes the recipe with every default filled
in, and reading that text back gives the same recipe. Mistakes raise `RecipeError` with one line per fault. This module
imports no torch, so that recipes are checked without its start-up time. Paths are relative to the working directory.
"""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from distill.core.errors import RecipeError, Section, explain
from distill.core.folders import STAGES
from distill.recipe.aliases import other_tools
from distill.recipe.compatibility import conflicts
from distill.recipe.data import Data, DataPart
from distill.recipe.evaluation import Evaluation
from distill.recipe.extends import parse_extended, read_recipe_text
from distill.recipe.fields import NAME, Text
from distill.recipe.held_out_figures import OF_DIVERGENCE, figure_directions
from distill.recipe.loss import Loss
from distill.recipe.models import Student
from distill.recipe.renamed import rename_overrides, rename_settings
from distill.recipe.reward import reward_of
from distill.recipe.stages import Export, Stage
from distill.recipe.teacher_config import (
    TEACHER,
    WEIGHTED_TEACHER,
    AnyTeacher,
    AnyWeightedTeacher,
    LocalTeacherConfig,
    every_field,
)
from distill.recipe.train import Parallel, Train, micro_batch_tokens
from distill.recipe.yaml_text import apply_overrides, to_yaml

PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that reverses a string.",
    "Explain in one sentence why the sky is blue.",
)


class Generate(Section):
    """Samples of the teacher, the untrained student and the trained student, generated greedily.

    Attributes:
        prompts: prompts; an empty list for no samples.
        max_new_tokens: maximum length of a sample in tokens.
    """

    prompts: list[Text] = Field(default_factory=lambda: list(PROMPTS))
    max_new_tokens: Annotated[int, Field(ge=1, le=2**20)] = 48


class Recipe(Section):
    """Configuration of one distillation run.

    Attributes:
        extends: recipe that this one takes every setting from that it does not set itself: a .yaml file next to this
            one, or the name of a shipped recipe. Sections are merged, lists replaced.
        name: name of the run's folder; by default the recipe file's name.
        output_dir: folder of all runs; `~` and variables such as `$SCRATCH` are expanded on the machine of the run.
        teacher: the teacher model; with `teachers` the first of them, whose tokenizer tokenises the data.
        teachers: several teachers over one vocabulary: a weighted mixture of their distributions, or per-domain
            teachers (`route`).
        student: the student model, which is trained.
        data: training data and held-out data.
        loss: weighted sum of divergences and cross-entropy.
        train: length of the run, batch, optimizer, checkpoints.
        parallel: distribution of the models over several devices.
        eval: tasks that the student answers while it trains, and the batch of held-out evaluations.
        generate: samples of teacher and student, generated greedily before and after training.
        export: GGUF file of the student, written and measured at the end of a run; null for none.
        stages: consecutive runs, such as prune, train, quantise. Each overrides settings of this recipe, and starts
            from the student of the previous stage. The folder of the last stage is that of the run.
    """

    # merged into the tree by `parse`: a recipe that is written out, or locked, is complete without it
    extends: Annotated[Text | None, Field(exclude=True)] = None
    name: Annotated[str, Field(pattern=NAME)]
    output_dir: Text = "runs"
    teacher: AnyTeacher
    teachers: list[AnyWeightedTeacher] = Field(default_factory=list)
    student: Student
    data: Data
    loss: Loss = Loss()
    train: Train
    parallel: Parallel = Parallel()
    eval: Evaluation = Evaluation()
    generate: Generate = Generate()
    export: Export | None = None
    stages: list[Stage] = Field(default_factory=list)

    @property
    def runs_code(self) -> bool:
        """Return whether a run calls functions of a file: loss terms, token weights, a reward, environment, checker."""
        answers = self.data.active_on_policy
        has_environment = answers is not None and answers.environment is not None
        has_function = reward_of(self.loss, answers) is not None or self.loss.weighs_by_function
        has_checker = any(task.checker_file for task in self.eval.tasks)
        return self.loss.plugin is not None or has_function or has_environment or has_checker

    @model_validator(mode="after")
    def _is_resolved(self) -> Self:
        if self.extends is not None:
            raise ValueError(f"extends: expected it in a recipe's file, got {self.extends!r} as an override")
        return self

    @property
    def figure_directions(self) -> dict[str, bool]:
        """Names of the held-out figures that `train.keep_best` may choose, each with whether higher is better."""
        absent: set[str] = set()
        for loss in self._evaluated_losses():
            absent |= self._absent_figures(loss)
        return self._figures_without(absent)

    def _figures_without(self, absent: set[str]) -> dict[str, bool]:
        routes = [teacher.route for teacher in self.teachers if teacher.route]
        tasks = [task.name for task in self.eval.tasks if task.every == 1]  # in every evaluation
        sets = [held_out.name for held_out in self.data.validation.sets]
        return figure_directions(routes, sets, tasks, absent)

    def _absent_figures(self, loss: Loss) -> set[str]:
        """Return the figures of a divergence that an evaluation with this loss does not have."""
        measured = loss.divergence_figure
        if measured is None:
            return set(OF_DIVERGENCE)
        if self.student.vocabulary == "cross":  # of spans or of tokens: that is known once the tokenizers are read
            return set()
        return {"kl", "divergence"} - {measured}

    def _evaluated_losses(self) -> list[Loss]:
        """Return the losses of evaluations, one for each stretch of the schedule in which the student is evaluated."""
        points = sorted({step for line in self.loss.schedule for step in line.steps})
        if not points:
            return [self.loss]
        last = points[-1] + 1 if self.train.steps is None else self.train.steps
        every = self.train.eval_every or last
        # an evaluation has the loss of the step before it
        steps = [step - 1 for step in (*range(every, min(last, points[-1] + 1) + 1, every), last)]
        # between two points the same terms have a weight
        of_stretches = {(bisect_left(points, step), bisect_right(points, step)): step for step in steps}
        return [self.loss.at(step) for step in of_stretches.values()]

    @model_validator(mode="before")
    @classmethod
    def _teacher_or_teachers(cls, tree: object) -> object:
        """Set `teacher` to the first of `teachers` where those are given."""
        if not isinstance(tree, dict) or not (given := tree.get("teachers")):
            return tree
        first: AnyTeacher = LocalTeacherConfig(model="unknown")  # a fault is reported under teachers
        teacher = tree.get("teacher")
        if isinstance(given, list):
            with contextlib.suppress(ValidationError):
                first = WEIGHTED_TEACHER.validate_python(given[0]).alone()
        if teacher is not None:
            with contextlib.suppress(ValidationError):  # then it is another than the first
                teacher = TEACHER.validate_python(teacher)
            if teacher != first:
                raise ValueError("teachers: expected teacher or teachers, got both (teacher= removes the first)")
        return {**tree, "teacher": first}

    @model_validator(mode="after")
    def _weights_some_teacher(self) -> Self:
        if self.teachers and not any(teacher.weight for teacher in self.teachers):
            raise ValueError("teachers: every weight is 0: give at least one teacher a weight above 0")
        routes = [teacher.route for teacher in self.teachers]
        if any(routes) and not all(routes):
            raise ValueError("teachers: expected a route for each teacher, or for none; got some without")
        whole = [DataPart("", self.data)] if self.data.validation.source is not None else []
        for part in [*self.data.parts, *whole, *self.data.set_parts]:
            if [part.data.fields.teacher, part.teacher].count(None) != (1 if any(routes) else 2):
                raise ValueError(
                    "data.fields.teacher: names the column of a row's teacher where teachers have routes, and where "
                    "the row's source (data.sources) does not name it by teacher"
                )
            if part.teacher not in (None, *routes):
                known = ", ".join(dict.fromkeys(map(str, routes)))
                raise ValueError(f"{part.field[:-6]}teacher: expected a route of {known}, got {part.teacher!r}")
        for route, own in groupby(self.teachers if any(routes) else [], lambda teacher: teacher.route):
            if routes.count(route) != len(weights := [teacher.weight for teacher in own]) or not any(weights):
                raise ValueError(f"teachers: expected those of route {route} together, and a weight above 0")
        return self

    @model_validator(mode="after")
    def _tasks_have_a_tokenizer(self) -> Self:
        if self.eval.tasks and self.data.is_synthetic:
            raise ValueError("eval.tasks: expected a data.source of text, got random tokens, which need no tokenizer")
        return self

    @model_validator(mode="after")
    def _best_is_a_figure(self) -> Self:
        if self.train.keep_best is not None and self.train.keep_best not in self.figure_directions:
            known = ", ".join(self.figure_directions)
            of_others = self.train.keep_best in self._figures_without(set())
            why = ", which not every evaluation has with this loss" if of_others else ""
            raise ValueError(f"train.keep_best: expected a held-out figure, {known}; got {self.train.keep_best!r}{why}")
        return self

    @model_validator(mode="after")
    def _settings_go_together(self) -> Self:
        for message in conflicts(self):
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _stages_are_recipes(self) -> Self:
        for number in range(len(self.stages)):
            try:
                self.of_stage(number, "the student of the stage before" if number else None)
            except ValidationError as error:
                faults = "; ".join(explain(error, Recipe, other_tools))
                raise ValueError(f"stages.{number}: {faults}") from None
        return self

    def stage_runs(self, folder: Path) -> Iterator[tuple[Path, Recipe]]:
        """Yield the folder and the recipe of each stage's run; the last one, or the only one, is in `folder` itself."""
        start = None
        for number, stage in enumerate(self.stages[:-1]):
            own = folder / STAGES / f"{number + 1}-{stage.name}"
            yield own, self.of_stage(number, start)
            start = str(own / "student")
        yield folder, self.of_stage(len(self.stages) - 1, start) if self.stages else self

    def of_stage(self, number: int, start: str | None) -> Recipe:
        """Return the recipe of a stage, without stages; `start` is the folder of the student that it starts from."""
        dropped = ("stages",) if number + 1 == len(self.stages) else ("stages", "export")
        tree = {name: value for name, value in _tree(self).items() if name not in dropped}
        return Recipe.model_validate(self.stages[number].applied(tree, start))

    @model_validator(mode="after")
    def _a_step_holds_a_micro_batch(self) -> Self:
        micro_batch = micro_batch_tokens(self.train, self.data)
        if self.train.tokens_per_step is not None and self.train.tokens_per_step < micro_batch:
            raise ValueError(
                f"train.tokens_per_step: expected at least one micro-batch, train.batch_size {self.train.batch_size} "
                f"x data.max_length {self.data.max_length} = {micro_batch}; got {self.train.tokens_per_step}"
            )
        return self


def parse(
    text: str,
    overrides: Sequence[str] = (),
    *,
    name: str = "recipe",
    origin: str = "recipe",
    file: Path | None = None,
) -> Recipe:
    """Parse and validate a recipe given as YAML text.

    Args:
        text: recipe as YAML text.
        overrides: `key.sub=value` strings, applied in order; see `yaml_text.apply_overrides`.
        name: the run's name where the text gives none.
        origin: name of the text in error messages.
        file: file that the text was read from; a file in `extends` is next to it, else in the working directory.

    Raises:
        RecipeError: one line per fault: field, what was expected, what came.
    """
    folder = Path() if file is None else file.parent
    # present names first, in the file and in the overrides' keys: an override then meets the field that it replaces
    tree = parse_extended(text, origin, folder, () if file is None else (file.resolve(),))
    tree.setdefault("name", re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:100] or "recipe")
    terms: dict[tuple[str, ...], list[dict[str, object]]] = {("loss", "terms"): Loss().model_dump()["terms"]}
    apply_overrides(tree, rename_overrides(overrides), list_defaults=terms)
    rename_settings(tree)  # in the values of overrides
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise RecipeError([f"{origin}: {fault}" for fault in explain(error, Recipe, other_tools)]) from None


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe from a YAML file, with `key.sub=value` overrides.

    Raises:
        RecipeError: the file cannot be read, is not YAML, or a field is wrong.
    """
    path = Path(path)
    return parse(read_recipe_text(path), overrides, name=path.stem, origin=str(path), file=path)


def dump(recipe: Recipe) -> str:
    """Return the recipe as YAML with every field written out; `parse(dump(recipe)) == recipe`."""
    return to_yaml(_tree(recipe))


def _tree(recipe: Recipe) -> dict[str, object]:
    tree = recipe.model_dump(mode="json")
    if recipe.teachers:  # each of the two is derived from the other when it is read
        del tree["teacher"]
        tree["teachers"] = [every_field(teacher) for teacher in tree["teachers"]]
    else:
        del tree["teachers"]
        tree["teacher"] = every_field(tree["teacher"])
    del tree["data"]["source" if recipe.data.sources else "sources"]
    return tree
