"""Models on the `meta` device, built from their configurations alone and cached."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from distill.models.adapters import add_lora
from distill.models.flops import FlopCounts, count_flops
from distill.models.layers import layer_count, layer_indices
from distill.models.load.config_validation import check_gguf, read_json
from distill.models.load.read_weights import weights_fault
from distill.models.load.source import ModelFiles, loading, resolve_model_source
from distill.models.loading import load_config
from distill.models.names import HIDDEN, LAYERS
from distill.models.prune.pruning import student_config
from distill.models.prune.widths import target_widths
from distill.models.quantised_checkpoints import quantisation_of
from distill.models.routers import freeze_parts
from distill.models.shape import ModelSizes, model_sizes
from distill.recipe import Lora, ModelSection, Student


class MetaModel:
    """Model on the meta device.

    Attributes:
        config: Configuration of transformers.
        model: model on the device `meta`, with its adapters; not to be changed.
    """

    def __init__(
        self, config: Any, field: str, lora: Lora | None = None, *, trains: bool, freeze: Sequence[str] = ()
    ) -> None:
        self.config = config
        with loading("this configuration", ModelFiles(""), field), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.trains = trains
        if not trains:
            model.requires_grad_(False)
        self.model = model if lora is None else add_lora(model, lora)
        freeze_parts(self.model, freeze)

    @functools.cached_property
    def shape(self) -> ModelSizes:
        return model_sizes(self.model)

    @functools.cached_property
    def flops(self) -> FlopCounts | None:
        return count_flops(self.model, trains=self.trains)


log = logging.getLogger(__name__)
_logged: set[str] = set()  # warnings, each logged once
_built: dict[tuple[str, ...], MetaModel] = {}


def meta_model(
    config: Any, field: str, lora: Lora | None = None, *, trains: bool = False, freeze: Sequence[str] = ()
) -> MetaModel:
    """Return the model of a configuration, built once for each configuration, adapter and parts that are frozen.

    Raises:
        ValueError: the configuration is not one of a causal language model, or has no such parts.
    """
    key = (type(config).__name__, config.to_json_string(use_diff=False), repr(lora), str(trains), *freeze)
    if key not in _built:
        if len(_built) >= 32:
            _built.clear()
        _built[key] = MetaModel(config, field, lora, trains=trains, freeze=freeze)
    return _built[key]


def weights_problem(section: ModelSection, field: str) -> str | None:
    """Return why a local model's safetensors are not its weights, as loading would report it; None otherwise.

    None also for GGUF files, quantised models and hub models, which are checked when they are loaded.
    """
    if section.model is None or section.init == "random":
        return None
    try:
        source = resolve_model_source(section.model, f"{field}.model")
    except ValueError:
        if section.config is None or Path(section.model).expanduser().exists():
            raise
        return None  # a model that does not exist yet, such as another run's student, whose configuration is named
    if not source.local or source.gguf_file or quantisation_of(config := load_config(section, field)):
        return None
    model = meta_model(config, f"{field}.model").model
    fault = weights_fault(Path(source.location), model, f"{field}.model", file_config=config)
    return fault and f"{field}.model: cannot load {section.model}: {fault}"


def meta_config(section: ModelSection, field: str) -> Any:
    """Return the configuration of `model` where that is local or no `config` is named, else of `config`.

    Nothing is downloaded for a recipe that names both; a `config` of another model than a local `model` is not used.
    """
    if section.config is None or section.init == "random" or warn_of_mismatch(section, field):
        return load_config(section, field)
    return load_config(section.model_copy(update={"init": "random"}), field)


def warn_of_mismatch(section: ModelSection, field: str) -> bool:
    """Return whether `config` differs from the local `model` in layers or hidden size; warns once."""
    if section.config is None or section.init == "random" or (own := _layers_and_hidden(section, field)) is None:
        return False
    text = load_config(section.model_copy(update={"init": "random"}), field).get_text_config()
    named = getattr(text, "num_hidden_layers", None), getattr(text, "hidden_size", None)
    if own == named:
        return False
    line = (
        f"{field}.config: {section.config} ({named[0]} layers of {named[1]}) is not {section.model} ({own[0]} of "
        f"{own[1]}) and is not used; leave it out"
    )
    if line not in _logged:
        _logged.add(line)
        log.warning(line)
    return True


def size_note(section: ModelSection, field: str) -> str:
    """Return a note that a model's sizes are those of its `config`, since it is not on this machine; else empty."""
    alone = section.config is None or section.init == "random" or section.model is None
    if alone or _layers_and_hidden(section, field) is not None:
        return ""
    return f"{field}: {section.model} is not on this machine; sizes are those of {field}.config {section.config}"


def _layers_and_hidden(section: ModelSection, field: str) -> tuple[object, object] | None:
    """Return layers and hidden size from a model's own files, without weights; None where it is not local."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        source = resolve_model_source(section.model or "", f"{field}.model")
        if source.gguf_file:
            return check_gguf(Path(source.location, source.gguf_file), f"{field}.model")
        path = source.location if source.local else None
        if path is None:
            cached = try_to_load_from_cache(source.location, "config.json", revision=section.revision)
            if not isinstance(cached, str):
                return None
            path = str(Path(cached).parent)
    except (ValueError, HFValidationError):  # reported where the model is loaded
        return None
    values = read_json(Path(path, "config.json"), f"{field}.model")
    values = values.get("text_config") or values
    return _first_of(values, LAYERS), _first_of(values, HIDDEN)


def _first_of(values: Mapping[str, object], names: tuple[str, ...]) -> object:
    return next((values[name] for name in names if name in values), None)


def pruned_config(section: Student, teacher_config: Any) -> PreTrainedConfig:
    """Return the student's configuration; pruned from the teacher's where the recipe says so."""
    config = teacher_config if section.is_cut else meta_config(section, "student")
    cut = section.cut
    if cut is not None:
        widths = target_widths(cut, config)
        config = student_config(config, layer_indices(cut, layer_count(config)), widths)
    return config


def meta_student(section: Student, teacher_config: PreTrainedConfig | None) -> MetaModel:
    config = pruned_config(section, teacher_config)
    return meta_model(config, "student", section.lora, trains=True, freeze=section.freeze)


def check_lora_targets(student: Student, teacher: ModelSection) -> None:
    """Check that each of `student.lora.targets` names a linear layer, where the architecture is on this machine.

    Raises:
        ValueError: one names none; the message lists the layers.
    """
    section, field = (teacher, "teacher") if student.is_cut else (student, "student")
    if section.config is not None or (section.model is not None and _layers_and_hidden(section, field) is not None):
        meta_student(student, meta_config(teacher, "teacher") if student.is_cut else None)
