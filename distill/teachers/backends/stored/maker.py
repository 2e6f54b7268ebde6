"""Section of the model that computes, or has computed, the outputs of a recipe's store."""

from __future__ import annotations

import logging
from pathlib import Path

from distill.recipe import LoadedTeacherConfig, LocalTeacherConfig, Recipe, StoredTeacherConfig
from distill.teachers.backends.stored.format import manifest_of

log = logging.getLogger(__name__)


def section_to_load(recipe: Recipe) -> LoadedTeacherConfig:
    """Return the section of the recipe's teacher as one to load: for a cache, the model that makes it.

    Raises:
        ValueError: the section does not name that model.
    """
    section = recipe.teacher
    if isinstance(section, LoadedTeacherConfig):
        return section
    if section.model is None and section.init != "random":
        raise ValueError(
            f"teacher.model: expected the model to compute outputs with (type: {section.type}), got none; set it"
        )
    return section.loaded()


def maker_section(recipe: Recipe) -> LoadedTeacherConfig:
    """Return the section of the recipe's teacher as one to load: for a complete cache, the model that made it.

    Raises:
        ValueError: there is no complete cache.
    """
    section = recipe.teacher
    if not isinstance(section, StoredTeacherConfig):
        assert isinstance(section, LoadedTeacherConfig)
        return section
    folder = Path(section.path).expanduser()
    manifest = manifest_of(folder)
    named = {name: manifest["teacher"][name] for name in ("model", "revision", "adapter", "init", "config")}
    if section.model is not None:
        named = {"model": section.model, "revision": section.revision, "adapter": section.adapter}
    log.info("loading %s, the teacher of the cache %s, for its weights", named["model"] or named["config"], folder)
    rest = {name: getattr(section, name) for name in ("dtype", "attention", "trust_remote_code")}
    return LocalTeacherConfig(**named, **rest)
