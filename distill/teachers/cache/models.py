"""Loading a run whose teacher is a cache: no teacher in memory, the student held against what is stored."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from distill.models.adapters import add_lora
from distill.models.head import find_head
from distill.models.load import load_student, load_tokenizer
from distill.models.pruning import check_kept, layers_to_keep
from distill.models.vocabulary import compare, extend_student, shared_columns
from distill.recipe import FromTeacher, Recipe
from distill.teachers.cache.format import STUDENT, TEACHER, read_json
from distill.teachers.cache.identity import require_same_teacher
from distill.teachers.cache.objective import HiddenObjective, TopKObjective
from distill.teachers.cache.read import TeacherCache

if TYPE_CHECKING:
    from distill.models.precision import Precision
    from distill.teachers.opening import Models


def load_cached(recipe: Recipe, tokenizer: Any, device: torch.device, precision: Precision) -> Models:
    """Open the recipe's cache, hold that it is this recipe's, and load the student.

    Raises:
        ValueError: with the first difference between the cache and the recipe; a student that cannot be had.
    """
    from distill.teachers.opening import Models, check_length, check_packing

    assert recipe.teacher.path is not None
    cache = TeacherCache(recipe.teacher.path)
    require_same_teacher(recipe, tokenizer, cache.manifest, cache.path)
    section, kept = recipe.student, None
    if section.init == "pretrained" and section.from_teacher is not None:
        kept = kept_of(section.from_teacher, cache)
        section = section.model_copy(update={"from_teacher": None, "model": str(cache.path / STUDENT)})
    own = section.init == "pretrained" and kept is None and tokenizer is not None
    student_tokenizer = load_tokenizer(section, "student") if own else tokenizer
    extend = section.vocabulary == "extend"
    if own and not extend:  # before gigabytes are read
        compare(tokenizer, student_tokenizer).require()
    student = load_student(section.model_copy(update={"lora": None}), device=device, dtype=precision.student)
    if own and extend:
        extend_student(student, student_tokenizer, tokenizer)
        student_tokenizer = tokenizer
    check_length(recipe, student, "student")
    check_packing(recipe, student, "student")
    rows = [cache.columns, len(find_head(student).linear.weight)]  # type: ignore[arg-type]
    shared, verdict = shared_columns(tokenizer, student_tokenizer, *rows)
    if section.lora is not None:
        student = add_lora(student, section.lora, seed=recipe.train.seed)
    kind = HiddenObjective if cache.is_hidden else TopKObjective
    # K tokens were taken among the cache's columns: the objective holds that the student has them all
    columns = shared if cache.is_hidden else None
    objective = functools.partial(kind, cache=cache)
    return Models(None, student, tokenizer, columns, verdict, kept, objective=objective, cache=cache)


def kept_of(cut: FromTeacher, cache: TeacherCache) -> list[int]:
    """The layers of the student that lies in the cache, which must be those that the recipe asks for.

    Raises:
        ValueError: it holds no student, or one of other layers.
    """
    there = cache.manifest["student_layers"]
    config = read_json(cache.path / TEACHER / "config.json") or {}
    total = int(config.get("num_hidden_layers") or config.get("n_layer") or 0)
    asked = check_kept(cut.keep, total) if cut.keep is not None else layers_to_keep(total, cut.layers or total)
    if there != asked:
        has = "no student" if there is None else f"the student of layers {there}"
        raise ValueError(
            f"student.from_teacher: a cached teacher has no weights to cut from; {cache.path} holds {has}, asked for "
            f"are {asked}. Cache with this student in the recipe, which stores it, or give student.model: the folder "
            "of one that is cut already"
        )
    return asked
