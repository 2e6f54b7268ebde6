"""A test setup in a folder, for another process: its models as `save_pretrained` writes them, the rest pickled.

Teachers are pickled by what they are made of, so that connections are opened anew and nothing is on a GPU.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from distill.doctor.check_setup import CheckSetup
from distill.models.load.read_weights import read_weights
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.backends.served.source import reconnected
from distill.teachers.backends.served.teacher import ServerTeacher
from distill.teachers.backends.stored.archived import teacher_of_cache
from distill.teachers.backends.stored.format import Plan
from distill.teachers.backends.stored.store import Store
from distill.teachers.backends.stored.teacher import StoredTeacher
from distill.teachers.combination.mixture import MixtureTeacher
from distill.teachers.combination.routes import RoutedTeacher
from distill.teachers.interface import Teacher
from distill.teachers.rows.context.teacher import ContextTeacher
from distill.teachers.rows.retokenised.teacher import CrossTeacher

FILE = "setup.pickle"
Parts = tuple[Callable[..., Teacher], tuple[object, ...]]


def without_adapters(model: Any) -> Any:
    """Return a model that `from_pretrained` can load: LoRA merged into a copy; any other as it is."""
    return copy.deepcopy(model).merge_and_unload() if hasattr(model, "merge_and_unload") else model


def stored_nowhere(inner: Teacher, manifest: Plan) -> StoredTeacher:
    """Return a teacher whose outputs are those of a store, and are not kept."""
    return StoredTeacher(inner, Store(manifest, None, {}))


def _parts_of_stored(teacher: StoredTeacher) -> Parts:
    if teacher.filled is None:
        return teacher_of_cache, (str(teacher.store.path.absolute()),)
    return stored_nowhere, (teacher.inner, dict(teacher.store.manifest))


# by teacher: the function that makes it, and its arguments
PARTS: dict[type[Teacher], Callable[[Any], Parts]] = {
    LoadedTeacher: lambda teacher: (
        functools.partial(LoadedTeacher, field=next(iter(teacher.models))),
        (teacher.model,),
    ),
    ServerTeacher: lambda teacher: (reconnected, (teacher.place(),)),
    StoredTeacher: _parts_of_stored,
    ContextTeacher: lambda teacher: (ContextTeacher, (teacher.inner, teacher.context)),
    CrossTeacher: lambda teacher: (CrossTeacher, (teacher.inner, teacher.shared)),
    MixtureTeacher: lambda teacher: (MixtureTeacher, (teacher.members, teacher.weights)),
    RoutedTeacher: lambda teacher: (RoutedTeacher, (teacher.members, teacher.routes)),
}


class _Writer(pickle.Pickler):
    """Pickler of a setup: models by their names, teachers by their parts."""

    def __init__(self, file: IO[bytes], names: dict[int, str]) -> None:
        super().__init__(file)
        self.names = names

    def persistent_id(self, obj: object) -> str | None:
        """Return a model's name; None for anything else."""
        return self.names.get(id(obj))

    def reducer_override(self, obj: object) -> Any:
        """Return the parts of a teacher of this package."""
        parts = next((PARTS[kind] for kind in type(obj).__mro__ if kind in PARTS), None)
        return NotImplemented if parts is None else parts(obj)


class _Reader(pickle.Unpickler):
    """Unpickler of a setup, which reads the models in float32 from their folders."""

    def __init__(self, file: IO[bytes], folder: Path) -> None:
        super().__init__(file)
        self.folder = folder
        self.models: dict[str, nn.Module] = {}

    def persistent_load(self, name: str) -> nn.Module:
        """Return a model."""
        if name not in self.models:
            self.models[name] = read_weights(AutoModelForCausalLM, self.folder / name, name, dtype=torch.float32)
        return self.models[name]


def write_setup(setup: CheckSetup, folder: Path) -> None:
    """Write a setup; its models move to the CPU, in float32."""
    names = {id(model): f"model.{number}" for number, model in enumerate(setup.models)}
    for model in setup.models:
        without_adapters(model).cpu().float().save_pretrained(folder / names[id(model)])
    with (folder / FILE).open("wb") as file:
        _Writer(file, names).dump(setup)


def read_setup(folder: Path) -> CheckSetup:
    """Return the setup that `write_setup` wrote, on the CPU."""
    with (folder / FILE).open("rb") as file:
        setup: CheckSetup = _Reader(file, folder).load()
    return setup
