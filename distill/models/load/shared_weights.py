"""One copy in memory of a checkpoint that several models of a run hold frozen.

    pool = SharedCheckpoints([teacher_weights, student_weights])       # of the models that will be loaded
    teacher = pool.load(teacher_weights, read)                         # reads the checkpoint
    student = pool.load(student_weights, read)                         # other modules over the same parameters

Each model has its own modules, and with them its own adapters, mode, hooks, forwards and buffers; only the `Parameter`
objects are the same. So each computes exactly what it would with a copy of its own, nothing is switched between two
forwards, and whatever is done to one model (kernels, checkpointing, a captured graph, DDP) does not reach the others.
What holds of a parameter holds of all: none of them may train it or write to it, and where one moves or lays it out
otherwise in memory, all have it there.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from distill.models.dtypes import full_shape
from distill.models.load.source import resolve_model_source
from distill.recipe import ModelSection
from distill.recipe.models import LOW_BITS
from distill.recipe.shipped import find_architecture

Loader = Callable[[], PreTrainedModel]


class FrozenWeights(NamedTuple):
    """Weights that a model holds frozen. Where two are equal and `unlike_files` is empty, one copy serves both.

    Attributes:
        files: Folder or hub id and GGUF file; the configuration of random weights and their seed.
        revision, trust_remote_code: As in the recipe.
        dtype: Dtype in memory.
        attention: Attention implementation that the model is built with.
        quantised: Format of the linear layers, `nf4`; empty where they are in `dtype`.
        unlike_files: Setting for which the model does not hold the values of the files, whole and in one dtype.
    """

    files: tuple[str, str | int | None]
    revision: str | None
    trust_remote_code: bool
    dtype: torch.dtype
    attention: str
    quantised: str = ""
    unlike_files: str = ""

    def reads_the_files_of(self, other: FrozenWeights) -> bool:
        return self.files == other.files and self.revision == other.revision


def frozen_weights(
    section: ModelSection, field: str, dtype: torch.dtype, seed: int, unlike_files: str = ""
) -> FrozenWeights:
    """Return the weights that a section of the recipe names; no file is read.

    Args:
        seed: Seed of random weights.
        unlike_files: As of `FrozenWeights`.

    """
    files: tuple[str, str | int | None]
    if section.init == "random":
        files = str(find_architecture(str(section.config), f"{field}.config")), seed
    else:
        files = _named_files(str(section.model), f"{field}.model")
    quantised = section.dtype if section.dtype in LOW_BITS else ""
    code = section.trust_remote_code
    return FrozenWeights(files, section.revision, code, dtype, section.attention, quantised, unlike_files)


def _named_files(model: str, field: str) -> tuple[str, str | None]:
    try:
        source = resolve_model_source(model, field)
    except ValueError:
        # not there yet, or broken: `check` plans it by its name alone, and reading it says what is wrong
        return model, None
    return str(Path(source.location).resolve()) if source.local else source.location, source.gguf_file


class SharedCheckpoints:
    """Checkpoints that are read once for all models that hold them frozen.

    Args:
        planned: Weights of the models that will be loaded; those that are there once are not kept.
    """

    def __init__(self, planned: Iterable[FrozenWeights] = ()) -> None:
        counts = Counter(weights for weights in planned if not weights.unlike_files)
        self._several = {weights for weights, count in counts.items() if count > 1}
        self._loaded: dict[FrozenWeights, PreTrainedModel] = {}  # as loaded: nobody else has these modules

    def load(self, weights: FrozenWeights | None, load: Loader) -> PreTrainedModel:
        """Return what `load` loads, or modules of their own over the parameters that it loaded before.

        Args:
            weights: Weights of the model; None for one that is not held frozen.
        """
        if weights not in self._several:
            return load()
        if weights not in self._loaded:
            # modules that nobody patches, adapts or freezes, from which the next model gets its own
            model = load()
            self._loaded[weights] = with_same_parameters(model)
            return model
        return with_same_parameters(self._loaded[weights])


def with_same_parameters(model: Any) -> Any:
    """Return a copy of a model whose parameters are those of the model itself; buffers are copied."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


class SharedParameters(NamedTuple):
    """Parameters that several models have.

    Attributes:
        holders: Names of the models.
        numbers: How many numbers they hold, each counted once.
        saved: Bytes that as many copies would take more.
    """

    holders: list[str]
    numbers: int
    saved: int


def shared_among(models: Mapping[str, nn.Module]) -> SharedParameters:
    """Return the parameters that several of the models have; no holders where there are none."""
    parameters = {name: {id(p): p for p in model.parameters()} for name, model in models.items()}
    copies = Counter(key for own in parameters.values() for key in own)
    shared = {key: p for own in parameters.values() for key, p in own.items() if copies[key] > 1}
    return SharedParameters(
        holders=[name for name, own in parameters.items() if not shared.keys().isdisjoint(own)],
        numbers=sum(full_shape(parameter).numel() for parameter in shared.values()),
        saved=sum((copies[key] - 1) * parameter.nbytes for key, parameter in shared.items()),
    )
