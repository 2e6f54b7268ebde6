"""Plan of a recipe on given devices: the model sizes, precision and step that follow from both."""

from __future__ import annotations

from typing import NamedTuple

import torch
from distill_kernels.launch import OLDER

from distill.models.dtypes import Precision, resolve_precision
from distill.models.meta_models import MetaModel, meta_config, meta_student
from distill.models.shape import USABLE
from distill.planning.devices import Device, device_here
from distill.planning.steps import accumulation_steps
from distill.recipe import Recipe
from distill.teachers.base import TeacherPlan
from distill.teachers.footprint import Footprint, FootprintContext
from distill.teachers.registry import source_of


class DevicePlan(NamedTuple):
    """Recipe on some devices.

    Attributes:
        precision: dtypes of both models.
        longest: tokens of the data's longest document; 0 where they have not been read.
    """

    recipe: Recipe
    source: TeacherPlan
    precision: Precision
    device: Device
    world: int = 1
    longest: int = 0

    @staticmethod
    def here(recipe: Recipe, device: torch.device, world: int) -> DevicePlan:
        precision = resolve_precision(recipe, device)
        return DevicePlan(recipe, source_of(recipe), precision, device_here(device), world)

    def with_recipe(self, recipe: Recipe) -> DevicePlan:
        """Return the plan of another recipe on the same devices, in the same precision."""
        return self._replace(recipe=recipe, source=source_of(recipe))

    @property
    def usable(self) -> float:
        """Bytes of one device that a run may use."""
        return USABLE * self.device.memory_bytes

    @property
    def student(self) -> MetaModel:
        """The student on the meta device, with its adapters."""
        section = self.recipe.student
        config = meta_config(self.source.config_section(), "teacher") if section.is_cut else None
        return meta_student(section, config)

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step on a device."""
        return accumulation_steps(self.recipe.train, self.recipe.data, self.world)

    def footprint(self, sharded: bool = False) -> Footprint:
        return self.source.footprint(FootprintContext(self.precision, self.device.memory_bytes, self.world, sharded))


def planned_precision(recipe: Recipe, device: Device) -> Precision:
    """Return `resolve_precision` for a device that may not be in this machine."""
    if device.cuda and device.family != OLDER and recipe.train.precision == "auto":
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": "bfloat16"})})
    return resolve_precision(recipe, torch.device("cpu"))


def device_plan(recipe: Recipe, device: Device, gpus: int) -> DevicePlan:
    """Return the plan of a recipe on `gpus` devices such as `device`, which may not be in this machine."""
    return DevicePlan(recipe, source_of(recipe), planned_precision(recipe, device), device, gpus)
