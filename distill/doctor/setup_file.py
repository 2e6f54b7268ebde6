"""A test setup in a folder, for another process: its models as `save_pretrained` writes them, the rest pickled.

Teachers are pickled by their constructors, so that connections are opened anew and nothing is on a GPU.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from distill.doctor.check_setup import CheckSetup
from distill.models.head import unwrap_peft
from distill.models.load.read_weights import read_weights
from distill.teachers.base import Teacher

FILE = "setup.pickle"


def without_adapters(model: Any) -> Any:
    """Return a model that `from_pretrained` can load: LoRA merged into a copy; any other as it is."""
    adapted = [name for name, module in unwrap_peft(model).named_modules() if hasattr(module, "lora_A")]
    if not adapted:
        return model
    plain: Any = unwrap_peft(copy.deepcopy(model))
    for name in adapted:
        layer = plain.get_submodule(name)
        layer.merge()
        plain.set_submodule(name, layer.get_base_layer())
    return plain


class _Writer(pickle.Pickler):
    """Pickler of a setup: models by their names, teachers by their constructors."""

    def __init__(self, file: IO[bytes], names: dict[int, str]) -> None:
        super().__init__(file)
        self.names = names

    def persistent_id(self, obj: object) -> str | None:
        """Return a model's name; None for anything else."""
        return self.names.get(id(obj))

    def reducer_override(self, obj: object) -> Any:
        """Return a teacher's constructor; NotImplemented for anything else."""
        return (isinstance(obj, Teacher) and obj.constructor()) or NotImplemented


class _Reader(pickle.Unpickler):
    """Unpickler of a setup, which reads the models in float32 from their folders."""

    def __init__(self, file: IO[bytes], folder: Path) -> None:
        super().__init__(file)
        self.folder = folder
        self.models: dict[str, nn.Module] = {}

    def persistent_load(self, name: str) -> nn.Module:
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
    with (folder / FILE).open("rb") as file:
        setup: CheckSetup = _Reader(file, folder).load()
    return setup
