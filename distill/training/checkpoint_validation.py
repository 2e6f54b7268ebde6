"""Validation of checkpoints before a run continues from one: complete, uncorrupted, and nothing but data.

    last, lines = find_valid_checkpoint(folder)

A checkpoint of ours is complete by construction. One from a bad disk, an interrupted copy or an untrusted source may
not be. Its files are compared with the manifest (`core/manifest.py`) and its weights must be finite; weights are read
from safetensors alone. Files in which a pickle could hide code are read by torch's restricted unpickler
(`weights_only`), tensors memory-mapped, so that the check is cheap at any size. torch reads the index and the numbers
of a sharded checkpoint with plain pickle: here the index is read with a list of the classes that it may name, and the
numbers by the restricted unpickler.
"""

from __future__ import annotations

import enum
import io
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from transformers.trainer_pt_utils import safe_globals

from distill.core.errors import RunError
from distill.core.manifest import MANIFEST, first_damaged_file, read_manifest
from distill.training.checkpoints import STATE, checkpoints

WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
INDEX = "model.safetensors.index.json"
STATES = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state*.pth")
REQUIRED = {
    "optimizer*": "optimizer state (train.arguments.save_only_model leaves it out)",
    "scheduler.pt": "state of the learning rate schedule",
    "rng_state*.pth": "random number state",
}
SHARDED = ".metadata"  # index file of torch.distributed.checkpoint, in folders that hold shards
PLAIN = {
    "builtins": {"set", "frozenset", "list", "dict", "tuple", "int"},
    "collections": {"OrderedDict", "defaultdict"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
        "StorageMeta",
    },
}


def find_valid_checkpoint(folder: Path, *, unverified: bool = False) -> tuple[Path | None, list[str]]:
    """Return the newest valid checkpoint in `folder`, with a line for each newer one that is not.

    Args:
        unverified: Accept a checkpoint without a manifest.

    Returns:
        The checkpoint, None where there is none at all; lines, also where the one in use has no manifest.

    Raises:
        RunError: There are checkpoints, but none is valid.
    """
    refused: list[str] = []
    for path in reversed(checkpoints(folder, damaged=True)):
        fault = fault_of(path)
        summed = (path / MANIFEST).exists()
        if fault is None and not summed and not unverified:
            fault = f"it has no {MANIFEST} to verify it against; --unverified loads it all the same"
        if fault is None:
            unsummed = [] if summed else [f"{path} has no {MANIFEST}: its contents are not verified"]
            return path, refused + unsummed
        refused.append(f"{path} cannot be used: {fault}")
    if refused:
        raise RunError(f"--resume: {'; '.join(refused)}; move these folders away to start again at step 0")
    return None, []


def fault_of(checkpoint: Path) -> str | None:
    """Return the reason why a checkpoint cannot be used, in words; None where it can."""
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"{STATE} cannot be read ({_first(error)})"
    if not isinstance(state, dict) or not isinstance(state.get("global_step"), int):
        return f"{STATE} has no global_step"
    try:
        manifest = read_manifest(checkpoint)
    except (OSError, ValueError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({_first(error)})"
    fault = None if manifest is None else first_damaged_file(checkpoint, manifest.get("files"))
    return fault or _fault_of_weights(checkpoint) or _fault_of_states(checkpoint)


def _fault_of_weights(checkpoint: Path) -> str | None:
    shards = sorted(path.parent for path in checkpoint.glob(f"*/{SHARDED}"))
    files = [checkpoint / name for name in WEIGHTS if (checkpoint / name).exists()]
    if (checkpoint / INDEX).exists():
        try:
            names = set(json.loads((checkpoint / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{INDEX} cannot be read ({_first(error)})"
        if any(not isinstance(name, str) or Path(name).name != name for name in names):
            return f"{INDEX} names files outside of the checkpoint"
        files += [checkpoint / name for name in sorted(names)]
    if not files and not shards:
        return "it holds no safetensors weights"
    for path in files:
        try:
            name = not_finite(path)
            if name is not None:
                return f"{path.name}: {name} is not finite"
        except (OSError, SafetensorError) as error:
            return f"{path.name} cannot be read ({_first(error)})"
    for path in shards:
        try:
            _check_shards(path)
        except Exception as error:  # a damaged pickle may raise anything
            return f"{path.name}/{SHARDED} cannot be read as a checkpoint's index ({_first(error)})"
    return None


def _fault_of_states(checkpoint: Path) -> str | None:
    for pattern, what in REQUIRED.items():
        if not any(checkpoint.glob(pattern)):
            return f"it has no {what}"
    for path in [path for pattern in STATES for path in sorted(checkpoint.glob(pattern))]:
        try:
            with safe_globals():  # the classes of numpy's and Python's random states
                state = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
            groups = state["param_groups"] if path.name.startswith("optimizer") else []
            empty = any("betas" in group for group in groups) and not state["state"]
        except Exception as error:  # a damaged file may raise anything
            return f"{path.name} cannot be read as tensors and numbers alone ({_first(error)})"
        if empty:
            return f"{path.name} holds no optimizer moments"
    return None


def shapes_of(path: Path) -> dict[str, list[int]]:
    """Return the shapes of the tensors in a safetensors file."""
    with safe_open(str(path), framework="pt") as file:
        return {str(name): list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def not_finite(path: Path) -> str | None:
    """Return the first tensor of a safetensors file with NaN or infinity; None where all are finite."""
    with safe_open(str(path), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - no dictionary
            tensor = file.get_tensor(name)
            if tensor.is_floating_point() and tensor.numel() and tensor.itemsize > 1:
                low, high = torch.aminmax(tensor)
                if not torch.isfinite(low - low + (high - high)):
                    return str(name)
    return None


def _check_shards(folder: Path) -> None:
    """Read the index and torch's pickled entries of the shards; raises where they hold anything but data."""
    with (folder / SHARDED).open("rb") as file:
        index = _IndexUnpickler(file).load()
    for entry, place in (index.storage_data or {}).items():
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"it names {place.relative_path}, outside of the folder")
        if isinstance(index.state_dict_metadata.get(entry.fqn), BytesStorageMetadata):
            with (folder / place.relative_path).open("rb") as shard:
                shard.seek(place.offset)
                torch.load(io.BytesIO(shard.read(place.length)), weights_only=True)


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler for the index of a sharded checkpoint; refuses any other class before looking it up."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class, if an index may contain it."""
        if name in PLAIN.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # early releases of Python 3.11 pickle an enum's member so
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _member(owner: Any, name: str) -> Any:
    """Return a member of an enum that the index may name; any other attribute is refused."""
    if not (isinstance(owner, enum.EnumMeta) and name in owner.__members__):
        raise pickle.UnpicklingError(f"it names attribute {name} of {owner!r:.80}")
    return owner.__members__[name]


def _first(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].split('. ')[0]:.160}" if text else type(error).__name__
