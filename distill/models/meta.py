"""Models without memory, built from their configurations alone."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from distill.models.adapters import add_lora
from distill.models.load import load_config
from distill.models.pruning import check_kept, cut_config, layers_to_keep
from distill.models.source import ModelSource, loading
from distill.recipe import ModelSection, Recipe


def meta_models(recipe: Recipe) -> tuple[Any, Any]:
    """Teacher and student without memory (device `meta`), the student with its adapters.

    Raises:
        ValueError: a configuration that cannot be found or makes no causal language model.
    """
    teacher_config = _config(recipe.teacher, "teacher")
    section = recipe.student
    if section.from_teacher is not None and section.init == "pretrained":
        total = teacher_config.get_text_config().num_hidden_layers
        cut = section.from_teacher
        kept = check_kept(cut.keep, total) if cut.keep is not None else layers_to_keep(total, cut.layers or total)
        student_config = cut_config(teacher_config, kept)
    else:
        student_config = _config(section, "student")
    teacher, student = _meta(teacher_config, "teacher"), _meta(student_config, "student")
    teacher.requires_grad_(False)
    return teacher, student if section.lora is None else add_lora(student, section.lora)


def _config(section: ModelSection, field: str) -> Any:
    """Of `config` where it is named, which costs no download, else of `model`."""
    return load_config(section.model_copy(update={"init": "random"}) if section.config else section, field)


def _meta(config: Any, field: str) -> Any:
    with loading("this configuration", ModelSource(""), field), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
