"""Devices that runs are planned for: this machine's GPU, a named one, a memory size, or a CPU.

An offloaded teacher's layers are copied over the bus once in every micro-batch, while the layer before computes, so
that its forward takes max(arithmetic, bytes / rate). The rate, and that between GPUs, is assumed to be 80 % of the data
sheet's in one direction; for a GPU that is not listed there is no estimate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from distill.core.errors import RecipeError, did_you_mean
from distill.core.units import GIB
from distill.models.gpu_specs import GPU_SPECS, GpuSpec, family_in, find_gpu_spec, gpu_spec_of, path_of

LINK_EFFICIENCY = 0.8


class Device(NamedTuple):
    """Device that a run is planned for.

    Attributes:
        name: Display name.
        memory_bytes: Memory of one device (of the machine, for a CPU).
        gpu_spec: rates of the GPU; None where they are not known.
        family: Architecture family; None for a CPU and for a GPU of which only the size is known.
        cuda: False for a CPU.
    """

    name: str
    memory_bytes: int
    gpu_spec: GpuSpec | None = None
    family: str | None = None
    cuda: bool = True

    @property
    def path(self) -> str:
        """Return a description of the kernels used on it; empty where its family is unknown."""
        if not self.cuda:
            return "PyTorch reference implementations, on a CPU"
        return "" if self.family is None else path_of(self.family)


def device_here(device: torch.device) -> Device:
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return Device(facts.name, facts.total_memory, gpu_spec_of(device), family_in(device))
    import psutil  # comes with accelerate

    return Device("this machine's CPU", psutil.virtual_memory().total, cuda=False)


def find_device(name: str | None) -> Device:
    """Return the device called `name`: a GPU's name, a size such as 24GB, or `cpu`; None for this machine's."""
    if name is None and torch.cuda.is_available():
        return device_here(torch.device("cuda", 0))
    if name is None or name.lower() == "cpu":
        return device_here(torch.device("cpu"))
    key = find_gpu_spec(name)
    if key:
        return Device(key, int(GPU_SPECS[key].memory_gib * GIB), GPU_SPECS[key], GPU_SPECS[key].family)
    digits = name.upper().removesuffix("GB").removesuffix("G").strip()
    if digits.replace(".", "", 1).isdigit() and 0 < float(digits) < 1000:
        return Device(f"a GPU of {digits} GB", int(float(digits) * 1e9))
    hint = did_you_mean(name, map(str.lower, GPU_SPECS))
    raise RecipeError([f"--gpu: expected a GPU's name, a size such as 24GB, or cpu; got {name!r}; {hint}"])
