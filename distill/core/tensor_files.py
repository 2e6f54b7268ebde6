"""Safetensors files, written as every other file is: whole, on the disk, and readable by whom the umask says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from distill.core.files import atomic_path


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file atomically; tensors on a GPU or with gaps are copied first."""
    with atomic_path(path) as temporary:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary)
