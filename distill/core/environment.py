"""Versions of the libraries, the GPU and its driver, and the machine that a run used."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess

import torch

from distill.core.units import GIB

LIBRARIES = ("torch", "triton", "transformers", "datasets", "accelerate", "peft")


def environment() -> dict[str, str]:
    """Return component names and versions for display; components that are absent are left out."""
    values = {"distill": version_of("distill-toolkit"), "python": platform.python_version()}
    values |= {name: version_of(name) for name in LIBRARIES}
    values["system"] = f"{platform.system()} {platform.machine()}"
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(torch.cuda.current_device())
        values["gpu"] = f"{facts.name}, {facts.total_memory / GIB:.0f} GiB"
        values["cuda"] = torch.version.cuda or ""
        values["driver"] = _driver()
    return {name: value for name, value in values.items() if value}


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.system()} {platform.machine()} {device.type.upper()}, {os.cpu_count()} cores"


def version_of(name: str) -> str:
    """Return the version of an installed distribution; empty if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.splitlines()[0].strip() if answer.stdout else ""
