"""Every kind of teacher, in one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distill.recipe import Recipe
from distill.recipe.teachers import Kind, kind_of
from distill.teachers.base import TeacherSource
from distill.teachers.cache.teacher import CacheSource
from distill.teachers.context.teacher import ContextSource
from distill.teachers.cross.teacher import CrossSource
from distill.teachers.keep.source import KeepSource
from distill.teachers.measure import Measure
from distill.teachers.mixture import MixtureSource
from distill.teachers.model import ModelSource
from distill.teachers.routed.teacher import RoutedSource
from distill.teachers.server.launched import LaunchedSource
from distill.teachers.server.teacher import ServerSource

SOURCES: dict[Kind, Callable[[Recipe], TeacherSource]] = {
    "model": ModelSource,
    "cache": CacheSource,
    "server": ServerSource,
    "keep": KeepSource,
    "launched": LaunchedSource,
    "mixture": MixtureSource,
    "routed": RoutedSource,
    "cross": CrossSource,
    "context": ContextSource,
}


def source_of(recipe: Recipe) -> TeacherSource:
    """The recipe's teacher, before it is loaded."""
    return SOURCES[kind_of(recipe)](recipe)


def measure_of(recipe: Recipe, stored: Mapping[str, Any] | None = None) -> Measure:
    """The measure of a run, by what its result.json or before.json keeps of it, else by its recipe."""
    return Measure(**stored) if stored else source_of(recipe).measure()
