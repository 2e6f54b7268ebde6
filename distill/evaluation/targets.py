"""Targets of `eval`, `generate` and `export`: a run, whose recipe names teacher and data, or a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distill.core.folders import RECIPE_FILE, RUNS
from distill.data.chat import load_template, template_kwargs_of, with_template_kwargs
from distill.data.load import columns_of, load_data
from distill.data.sampled_rows import vocabulary_hash
from distill.data.sources import open_source
from distill.models.adapters import base_of, load_and_merge
from distill.models.loading import load_student, load_teacher, load_tokenizer
from distill.objectives.measure import KL, DivergenceUnit
from distill.recipe import (
    Data,
    LoadedTeacherConfig,
    LocalTeacherConfig,
    ModelSection,
    Recipe,
    Student,
    Validation,
    load,
)
from distill.recipe.compatibility import require_command
from distill.recipe.teachers import teacher_kwargs
from distill.teachers.backends.sharded import load_sharded_teacher
from distill.teachers.backends.stored.maker import section_to_load
from distill.teachers.registry import measure_of, source_of
from distill.teachers.rows.retokenised.data import load_cross_data

CONFIGS = ("config.json", "adapter_config.json")  # of a whole student, of an adapter


class Target(NamedTuple):
    """Student named by a command-line argument.

    Attributes:
        recipe: Recipe of the run that trained it; None for a model.
        folder: Folder of the run; None for a model.
        adapter: Folder of a LoRA adapter to be merged into `student`, its base model; None for a whole student.
    """

    student: Student
    recipe: Recipe | None = None
    folder: Path | None = None
    adapter: Path | None = None


def find_target(argument: str) -> Target:
    """Return the target for a run's folder or name, an exported folder, or anything that `student.model` accepts.

    Raises:
        ValueError: The run has no student yet.
    """
    for folder in (Path(argument), RUNS / argument):
        if (folder / RECIPE_FILE).is_file():
            places = (folder / "student", folder)
            at = next((place for place in places if any((place / name).is_file() for name in CONFIGS)), None)
            if at is None:
                raise ValueError(f"{argument}: this run has no student yet; distill run ... --resume finishes it")
            recipe = load(folder / RECIPE_FILE)
            return target_from_model(str(at), recipe)._replace(recipe=recipe, folder=folder)
    return target_from_model(argument)


def target_from_model(model: str, recipe: Recipe | None = None) -> Target:
    """Return a folder or hub id as a target; an adapter of the run of a recipe over the base that it was trained on."""
    base = base_of(Path(model))
    if not base:
        return Target(Student(model=model))
    student = Student.model_validate(base)
    # the adapter was trained over the rounded base, and is merged into what these 4 bits stand for
    if recipe is not None and recipe.student.dtype == "nf4":
        student = student.model_copy(update={"dtype": "nf4"})
    return Target(student, adapter=Path(model))


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_target(target: Target) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the student in eval mode, and its tokenizer."""
    device = default_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return load_merged(target, device, dtype).eval(), tokenizer_of(target)


def tokenizer_of(target: Target) -> PreTrainedTokenizerBase:
    return load_tokenizer(Student(model=str(target.adapter)) if target.adapter else target.student, "student")


def load_merged(target: Target, device: torch.device | str, dtype: torch.dtype | None) -> PreTrainedModel:
    """Return the student in train mode, an adapter merged; `dtype` None for that of its files."""
    student = load_student(target.student, device=device, dtype=dtype)
    if target.adapter is None:
        return student
    return load_and_merge(student, str(target.adapter), "student").to(device)  # type: ignore[arg-type]


def teacher_section(target: Target, teacher: str | None, command: str = "eval") -> LoadedTeacherConfig:
    """Return the section of the named teacher, else of the recipe's teacher, for a command of `COMMANDS`.

    Raises:
        ValueError: There is neither, or the run's teacher is not a single model that can be loaded.
    """
    if teacher is not None:
        return LocalTeacherConfig(model=teacher)
    if target.recipe is None:
        raise ValueError(
            f"--teacher: required for a model; only a run has a teacher, and {target.student.model} is not a run"
        )
    require_command(target.recipe, command)
    if isinstance(target.recipe.teacher, LoadedTeacherConfig):
        return target.recipe.teacher
    try:
        return section_to_load(target.recipe)
    except ValueError:
        kind = target.recipe.teacher.type
        raise ValueError(f"--teacher: this run read its teacher from a {kind}; name that model") from None


def tokenizer_section(target: Target, teacher: str | None) -> ModelSection:
    """Return the section of the model whose tokenizer the teacher uses."""
    if teacher is not None or target.recipe is None:
        return teacher_section(target, teacher)
    return source_of(target.recipe).tokenizer_section()


def teacher_kwargs_of(target: Target, teacher: str | None) -> dict[str, Any] | None:
    """Return `teacher.chat_template_kwargs` of the target's recipe; None without, or where another teacher is named."""
    return target.recipe.teacher.chat_template_kwargs if target.recipe is not None and teacher is None else None


def teacher_tokenizer(
    target: Target, teacher: str | None, student_tokenizer: PreTrainedTokenizerBase
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the teacher's prompts.

    It is the student's, with the teacher's variables of the chat template; a teacher of other tokens has its own.
    """
    if teacher is not None:
        own = load_tokenizer(LocalTeacherConfig(model=teacher), "teacher")
        return student_tokenizer if vocabulary_hash(own) == vocabulary_hash(student_tokenizer) else own
    if target.recipe is None:
        return student_tokenizer
    if target.recipe.student.vocabulary == "cross":
        return source_of(target.recipe).vocabulary().teacher_tokenizer
    return with_template_kwargs(student_tokenizer, teacher_kwargs(target.recipe.data, target.recipe.teacher))


def target_measure(target: Target, teacher: str | None) -> DivergenceUnit:
    """Return the divergence that compares student and teacher; the teacher of a cache is loaded here."""
    if target.recipe is None:
        return KL
    alone = {"teacher": teacher_section(target, teacher), "teachers": []}
    return measure_of(target.recipe.model_copy(update=alone))


def load_teacher_of(
    target: Target, teacher: str | None, *, in_shards: bool = False, command: str = "eval"
) -> PreTrainedModel:
    """Return the named teacher, else the recipe's, for a command; with `in_shards` sharded over the process group."""
    section = teacher_section(target, teacher, command)
    device = default_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if in_shards:
        device = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
        return load_sharded_teacher(section, device=device, dtype=dtype)[0]
    return load_teacher(section, device=device, dtype=dtype)


def needs_sharding(target: Target, teacher: str | None, processes: int, batch_size: int) -> bool:
    """Return whether so many processes shard the teacher for an evaluation.

    The run's recipe decides (`parallel.teacher`); a target that is not a run is evaluated on one device.
    """
    if processes <= 1 or target.recipe is None:
        return False
    from distill.planning.cache_memory import shards_for_queries

    recipe = target.recipe.model_copy(update={"teacher": teacher_section(target, teacher), "student": target.student})
    return shards_for_queries(recipe, default_device(), processes, batch_size=batch_size)


def missing_teacher(target: Target, command: str) -> str | None:
    """Return why `load_teacher_of` needs a name for a command; None where it does not."""
    try:
        teacher_section(target, None, command)
    except ValueError as error:
        return str(error)
    return None


def held_out_rows(
    target: Target,
    data: str | None,
    tokenizer: PreTrainedTokenizerBase,
    max_rows: int,
    max_length: int,
    teacher_tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    teacher_kwargs: Mapping[str, Any] | None = None,
    packing: bool = True,
) -> Sequence[Any]:
    """Return the run's held-out rows, or up to `max_rows` texts or chats of `data`, tokenised as in the run.

    With `teacher_tokenizer` the rows hold both tokenisations, with `teacher_kwargs` in place of the data's variables of
    the teacher's chat template. Without `packing` each text has its own row, even if the
    run packed them: the evaluated models may lack attention that separates packed documents.

    Raises:
        ValueError: The target is not a run, and `data` is None.
    """

    def read(section: Data, seed: int) -> Sequence[Any]:
        if teacher_tokenizer is None:
            return load_data(section, tokenizer, seed=seed).validation
        splits = load_cross_data(section, tokenizer, teacher_tokenizer, seed=seed, teacher_kwargs=teacher_kwargs)
        return splits.validation

    if data is not None:
        held_out = Validation(fraction=0.999, max_rows=max_rows)
        own: dict[str, Any] = (
            _as_saved_with(tokenizer_of(target), tokenizer)
            if target.recipe is None
            else _as_read_by(target.recipe.data, data)
        )
        own |= {"validation": held_out, "packing": packing, "max_length": max_length}
        return read(Data(source=data, cache=False, **own), 0)
    if target.recipe is None:
        raise ValueError("--data: required for a model; only a run has held-out rows")
    section = target.recipe.data
    return read(section if packing else section.model_copy(update={"packing": False}), target.recipe.train.seed)


def calibration_rows(
    target: Target, data: str | None, tokenizer: PreTrainedTokenizerBase, tokens: int, max_length: int
) -> Sequence[Mapping[str, Sequence[int]]]:
    """Return rows of `data` with about so many tokens, else the training rows of the target's run.

    Raises:
        ValueError: The target is not a run, and `data` is None.
    """
    if data is not None:
        return held_out_rows(target, data, tokenizer, max(2, tokens // 16), max_length)
    if target.recipe is None:
        raise ValueError("--data: required for a model; only a run has training rows")
    return load_data(target.recipe.data, tokenizer, seed=target.recipe.train.seed).train


def _as_saved_with(saved: PreTrainedTokenizerBase, rendering: PreTrainedTokenizerBase) -> dict[str, dict[str, Any]]:
    """Return the variables that a student was saved with, as far as the template that renders the rows reads them."""
    kwargs = template_kwargs_of(saved)
    template = load_template("tokenizer", rendering)
    unread = list(kwargs) if template is None else template.unread(kwargs)
    return {"chat_template_kwargs": {name: value for name, value in kwargs.items() if name not in unread}}


def _as_read_by(section: Data, source: str) -> dict[str, Any]:
    """Return the data settings of a run that apply to `source`: chat template, trained turns, and columns if it has
    them.
    """
    names = ("chat_template", "chat_template_kwargs", "train_on", "reasoning", "empty_answers")
    settings: dict[str, Any] = {name: getattr(section, name) for name in names}
    mapped = section.fields.model_dump(exclude_none=True)
    if mapped and set(mapped.values()) <= set(columns_of(open_source(source, field="--data"))):
        settings |= {"fields": section.fields, "format": section.format}
    return settings
