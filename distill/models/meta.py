"""Models without memory (device `meta`), built from their configurations alone, each once."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from distill.models.adapters import add_lora
from distill.models.load import load_config
from distill.models.pruning import check_kept, cut_config, layers_to_keep
from distill.models.shape import Shape, shape_of
from distill.models.source import ModelSource, loading
from distill.models.work import Work, work_of
from distill.recipe import Lora, ModelSection, Student


class MetaModel:
    """A model without memory.

    Attributes:
        config: of transformers.
        model: on the device `meta`, with adapters where there are some; not to be changed.
    """

    def __init__(self, config: Any, field: str, lora: Lora | None = None, *, trains: bool) -> None:
        self.config = config
        with loading("this configuration", ModelSource(""), field), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.trains = trains
        if not trains:
            model.requires_grad_(False)
        self.model = model if lora is None else add_lora(model, lora)

    @functools.cached_property
    def shape(self) -> Shape:
        """Its sizes."""
        return shape_of(self.model)

    @functools.cached_property
    def work(self) -> Work | None:
        """Its arithmetic."""
        return work_of(self.model, trains=self.trains)


_built: dict[tuple[str, ...], MetaModel] = {}


def meta_model(config: Any, field: str, lora: Lora | None = None, *, trains: bool = False) -> MetaModel:
    """The model of a configuration, built once for each configuration and adapter.

    Raises:
        ValueError: a configuration that makes no causal language model.
    """
    key = (type(config).__name__, config.to_json_string(use_diff=False), repr(lora), str(trains))
    if key not in _built:
        if len(_built) >= 32:
            _built.clear()
        _built[key] = MetaModel(config, field, lora, trains=trains)
    return _built[key]


def meta_config(section: ModelSection, field: str) -> Any:
    """The configuration of `config` where that is named, which costs no download, else of `model`.

    Raises:
        ValueError: it cannot be found.
    """
    return load_config(section.model_copy(update={"init": "random"}) if section.config else section, field)


def meta_student(section: Student, teacher_config: Any) -> MetaModel:
    """The student without memory, with its adapters; cut from the teacher's configuration where it is cut from it."""
    if section.is_cut:
        assert section.from_teacher is not None
        total, cut = teacher_config.get_text_config().num_hidden_layers, section.from_teacher
        indices = check_kept(cut.keep, total) if cut.keep is not None else layers_to_keep(total, cut.layers or total)
        config = cut_config(teacher_config, indices)
    else:
        config = meta_config(section, "student")
    return meta_model(config, "student", section.lora, trains=True)
