"""GPU specifications from data sheets, and the kernels used on each architecture family.

One table for the plan of a run (`distill check`), utilisation, `distill doctor --machine` and docs/reference/gpus.md.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import torch
from distill_kernels.launch import FAMILIES, OLDER, device_facts

from distill.core.units import GIB

if TYPE_CHECKING:
    from distill.recipe.models import Student


class GpuSpec(NamedTuple):
    """One GPU.

    Attributes:
        memory_gib: Total memory as torch reports it.
        bandwidth: Memory bandwidth, GB/s.
        bf16, fp8: dense tensor-core TFLOP/s summed in fp32; None where there is no such product.
        family: Architecture family as in `distill_kernels.launch`.
        link: GB/s that its PCIe link carries in one direction, after encoding; 16 lanes but for the L4.
        peers: GB/s to the GPUs of its host in one direction, by NVLink or Infinity Fabric; None where that is PCIe.
    """

    memory_gib: float
    bandwidth: float
    bf16: float | None
    fp8: float | None
    family: str
    link: float
    peers: float | None = None

    @property
    def flops(self) -> float | None:
        """Dense bf16 FLOP/s."""
        return None if self.bf16 is None else self.bf16 * 1e12


# of GPUs on which training steps take joined projections and clipping within the optimizer's step: on an H200 a
# SmolLM2-135M pair's takes 5 % less
JOINING_FAMILIES = frozenset({"sm_90"})

PCIE_3 = 15.8
PCIE_4 = 31.5
PCIE_5 = 63.0
# NVIDIA: data sheets of the cards (T4, V100, A10, A100, L4, L40, L40S, H100, H200, DGX B200) and, for GeForce and RTX,
# the appendices of the GA102, Ada, Blackwell and RTX PRO Blackwell architecture white papers; where a sheet states
# rates with sparsity, half of them. AMD: the MI300X data sheet. A10G: what AWS states for g5.
GPU_SPECS = {
    "T4": GpuSpec(14.6, 320, None, None, OLDER, PCIE_3),
    "V100 16GB": GpuSpec(15.8, 900, None, None, OLDER, PCIE_3),
    "V100 32GB": GpuSpec(31.7, 900, None, None, OLDER, PCIE_3),
    "A10G": GpuSpec(22.1, 600, 70, None, "sm_86", PCIE_4),
    "A100 80GB": GpuSpec(79.2, 2039, 312, None, "sm_80", PCIE_4, 300),
    "A100 40GB": GpuSpec(39.4, 1555, 312, None, "sm_80", PCIE_4, 300),
    "L4": GpuSpec(22.0, 300, 121, 242, "sm_89", PCIE_4 / 2),
    "L40": GpuSpec(44.4, 864, 181, 362, "sm_89", PCIE_4),
    "L40S": GpuSpec(44.4, 864, 362, 733, "sm_89", PCIE_4),
    "H100": GpuSpec(79.1, 3350, 989.4, 1979, "sm_90", PCIE_5, 450),
    "H100 PCIe": GpuSpec(79.1, 2039, 756, 1513, "sm_90", PCIE_5),
    "H100 NVL": GpuSpec(93.1, 3938, 835, 1671, "sm_90", PCIE_5, 300),
    "H200": GpuSpec(139.8, 4800, 989.4, 1979, "sm_90", PCIE_5, 450),
    "B200": GpuSpec(178.0, 8000, 2250, 4500, "sm_100", PCIE_5, 900),
    "RTX 3090": GpuSpec(23.6, 936, 71, None, "sm_86", PCIE_4),
    "RTX 4090": GpuSpec(23.5, 1008, 165.2, 330.3, "sm_89", PCIE_4),
    "RTX 5090": GpuSpec(31.4, 1792, 209.5, 419, "sm_120", PCIE_5),
    "RTX PRO 6000": GpuSpec(95.0, 1792, 503.8, 1007.6, "sm_120", PCIE_5),
    "MI300X": GpuSpec(191.7, 5300, 1307.4, 2614.9, "gfx942", PCIE_5, 448),
}
# how far the kernels' paths of a family were tried
TRIED = {"sm_90": "run on an H100 and an H200"}
COMPILED = "compiled in tests, never run"


def find_gpu_spec(name: str) -> str | None:
    """The key of GPU_SPECS that somebody means by `4090`, `a100-40`, `RTX 4090`; None for none of them."""

    def bare(text: str) -> str:
        return re.sub(r"nvidia|geforce|amd|instinct|rtx|gb|[^a-z0-9]", "", text.lower())

    whole = {bare(key): key for key in reversed(GPU_SPECS)}
    first = {
        bare(re.sub(r" \d+GB$", "", key)): key for key in reversed(GPU_SPECS)
    }  # of two memories, the one listed first
    return (first | whole).get(bare(name))


def match_gpu_spec(name: str, memory_bytes: float) -> GpuSpec | None:
    """Return the specification for a driver's device name; None if unlisted, a laptop's, or a slice (MIG)."""
    if "Laptop" in name or "MIG" in name:
        return None
    parts = {key: re.sub(r" \d+GB$", "", key) for key in GPU_SPECS}
    longest = max((len(part) for part in parts.values() if part in name), default=0)
    known = [GPU_SPECS[key] for key, part in parts.items() if part in name and len(part) == longest]
    return min(known, key=lambda gpu_spec: abs(gpu_spec.memory_gib * GIB - memory_bytes), default=None)


def gpu_spec_of(device: torch.device) -> GpuSpec | None:
    """Return the specification of a CUDA device of this machine; None if it is not listed."""
    if device.type != "cuda":
        return None
    facts = torch.cuda.get_device_properties(device)
    return match_gpu_spec(facts.name, facts.total_memory)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a GPU by its name, None for one not listed."""
    gpu_spec = gpu_spec_of(device)
    return None if gpu_spec is None else gpu_spec.flops


def family_in(device: torch.device) -> str | None:
    return device_facts(device).family if device.type == "cuda" else None


def runs_our_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and device_facts(device).has_kernels


def has_fp8(family: str | None) -> bool:
    """Return whether a family has e4m3 matrix units; True for the CPU and an unknown GPU (None)."""
    return family is None or (family in FAMILIES and FAMILIES[family].fp8)


def fp8_problem(student: Student, family: str | None) -> str | None:
    """Return why a student cannot compute in fp8 on GPUs of `family` (None for a CPU); None where it can."""
    if student.compute != "fp8" or has_fp8(family):
        return None
    return (
        "student.compute: fp8 needs a GPU with FP8 (e4m3) tensor cores (Ada, Hopper, Blackwell), and this one "
        f"({family}) has none; leave compute out"
    )


def joins_on(device: torch.device) -> bool:
    """Return whether joined projections were measured to be faster on this device; see `JOINING_FAMILIES`."""
    return device.type == "cuda" and device_facts(device).family in JOINING_FAMILIES


def path_of(family: str) -> str:
    """Return a description of the kernels that run on a family, and how far they were tested."""
    if family not in FAMILIES:
        which = "GPUs older than Ampere (sm_80)" if family == OLDER else "GPUs of its architecture"
        return f"PyTorch computes: our kernels do not run on {which}"
    known = FAMILIES[family]
    how = "pointer-based loads, losses by cuBLAS GEMMs and a reduction kernel"
    if known.tma:
        how = "TMA loads, losses by GEMM kernels that also reduce"
    return f"Triton kernels, {how}; {tried(family)}"


def tried(family: str) -> str:
    """Return a description of how far a family's kernels were tested."""
    return TRIED.get(family, COMPILED)
