"""What models are called where a person reads of them."""

from __future__ import annotations

from distill.recipe import ModelSection, Recipe, Teacher
from distill.teachers.cache.identity import cached_name


def model_name(section: ModelSection) -> str:
    """What a model is called in the preamble and on the model card."""
    if isinstance(section, Teacher) and section.is_cached:
        return f"{cached_name(section)} (cached)"
    if section.init == "random":
        return f"{section.config} (random weights)"
    return section.model or "cut from the teacher"


def teacher_name(recipe: Recipe) -> str:
    """The teacher, or several with their shares of the mixture."""
    if not recipe.teachers:
        return model_name(recipe.teacher)
    total = sum(teacher.weight for teacher in recipe.teachers)
    return " + ".join(
        f"{teacher.weight / total:.2f} x {model_name(teacher)}"
        + (f" with {teacher.adapter}" if teacher.adapter else "")
        for teacher in recipe.teachers
    )
