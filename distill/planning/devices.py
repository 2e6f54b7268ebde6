"""What a run is planned for: this machine's GPU, one named, a size, or a CPU; and the rate of its bus.

An offloaded teacher's layers cross the bus once in every micro-batch, while the layer before computes, so that its
forward takes max(arithmetic, bytes / rate). The rate is taken to be 80 % of what the GPU's PCIe link is made for in one
direction, 16 lanes wide; of a GPU that is not listed nothing is said.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import torch

from distill.core.faults import RecipeError, did_you_mean
from distill.core.units import GIB
from distill.models.work import PEAK_FLOPS

# what torch reports as total memory, GiB
GPU_MEMORY = {
    "A10G": 22.1, "A100": 79.2, "L4": 22.0, "L40": 44.4, "L40S": 44.4, "H100": 79.1, "H100 PCIe": 79.1,
    "H100 NVL": 93.1, "H200": 139.8, "B200": 178.0, "RTX 3090": 23.6, "RTX 4090": 23.5,
}  # fmt: skip


# bytes/s that 16 lanes of PCIe carry in one direction, after encoding: generation 4 and 5
PCIE_4, PCIE_5 = 31.5e9, 63.0e9
LINKS = {
    "A10G": PCIE_4, "A100": PCIE_4, "L4": PCIE_4 / 2, "L40": PCIE_4, "L40S": PCIE_4, "H100": PCIE_5,
    "H100 PCIe": PCIE_5, "H100 NVL": PCIE_5, "H200": PCIE_5, "B200": PCIE_5, "RTX 3090": PCIE_4, "RTX 4090": PCIE_4,
}  # fmt: skip
REACHED = 0.8


class Device(NamedTuple):
    """What a run is planned for.

    Attributes:
        name: for people.
        memory_bytes: of one device (of the machine, for a CPU).
        flops: dense bf16 peak; None where unknown.
        cuda: False for a CPU.
    """

    name: str
    memory_bytes: int
    flops: float | None
    cuda: bool = True


def find_device(name: str | None) -> Device:
    """The device called `name`: a GPU's name, a size such as 24GB, `cpu`; None for what this machine has.

    Raises:
        RecipeError: unknown.
    """
    if name is None and torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        return Device(facts.name, facts.total_memory, by_name(PEAK_FLOPS, facts.name))
    if name is None or name.lower() == "cpu":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
        return Device("this machine's CPU", pages, None, cuda=False)
    for known_name, gib in GPU_MEMORY.items():
        if name.lower() == known_name.lower():
            return Device(known_name, int(gib * GIB), PEAK_FLOPS[known_name])
    digits = name.upper().removesuffix("GB").removesuffix("G").strip()
    if digits.replace(".", "", 1).isdigit() and float(digits) > 0:
        return Device(f"a GPU of {digits} GB", int(float(digits) * 1e9), None)
    hint = did_you_mean(name, map(str.lower, GPU_MEMORY))
    raise RecipeError([f"--gpu: expected a GPU's name, a size such as 24GB, or cpu; got {name!r}; {hint}"])


def bus_rate(name: str) -> float | None:
    """Bytes/s to a GPU by its name, None for one that is not listed."""
    rate = by_name(LINKS, name)
    return None if rate is None else REACHED * rate


def by_name(table: Mapping[str, float], name: str) -> float | None:
    """The entry whose key is the longest part of a device's name; None without one."""
    known = [part for part in table if part in name]
    return table[max(known, key=len)] if known else None
