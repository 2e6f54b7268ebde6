"""Is a checkpoint whole, and nothing but data? Asked before a run is continued from it.

    last, lines = resumable(folder)

A checkpoint of ours is whole by construction. One that a bad disk, a copy cut short or a stranger made may not be: it
is held against its manifest (`core/manifest.py`), its weights have to be finite, and
files that a pickle could hide code in are read here by torch's restricted reader (`weights_only`), tensors left on the
disk, so that the look is cheap at any size; of a sharded checkpoint, whose index and whose numbers torch reads with
plain pickle, the index is read with a list of the classes that it may name, and the numbers by the restricted reader;
weights are taken from safetensors alone.
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

from distill.core.faults import RunError
from distill.core.manifest import MANIFEST, fault_of_files, read_manifest
from distill.training.checkpoints import STATE, checkpoints

WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
INDEX = "model.safetensors.index.json"
STATES = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state*.pth")
REQUIRED = {
    "optimizer*": "state of the optimizer (train.arguments.save_only_model leaves it out)",
    "scheduler.pt": "state of the learning rate's schedule",
    "rng_state*.pth": "state of the random numbers",
}
SHARDED = ".metadata"  # a file of torch.distributed.checkpoint, in folders that hold shards
PLAIN = {
    "builtins": {"set", "frozenset", "list", "dict", "tuple", "int"},
    "collections": {"OrderedDict", "defaultdict"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta",
    },
}  # fmt: skip


def resumable(folder: Path, *, unverified: bool = False) -> tuple[Path | None, list[str]]:
    """The newest checkpoint in `folder` that can be used, with a line for each newer one that cannot.

    Args:
        unverified: One without a manifest may be used.

    Returns:
        None where there is no checkpoint at all. A line also says where the one in use has no manifest.

    Raises:
        RunError: there are some, and none is of use.
    """
    refused: list[str] = []
    for path in reversed(checkpoints(folder, damaged=True)):
        fault, summed = fault_of(path), (path / MANIFEST).exists()
        if fault is None and not summed and not unverified:
            fault = f"it has no {MANIFEST}, so that nothing shows whether it is as written; --unverified takes it so"
        if fault is None:
            unsummed = [] if summed else [f"{path} has no {MANIFEST}: its contents are not checked"]
            return path, refused + unsummed
        refused.append(f"{path} cannot be used: {fault}")
    if refused:
        raise RunError(f"--resume: {'; '.join(refused)}; move these folders away to start again at step 0")
    return None, []


def fault_of(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be used, in words; None where it can."""
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"{STATE} cannot be read ({_first(error)})"
    if not isinstance(state, dict) or not isinstance(state.get("global_step"), int):
        return f"{STATE} names no step"
    try:
        manifest = read_manifest(checkpoint)
    except (OSError, ValueError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({_first(error)})"
    fault = None if manifest is None else fault_of_files(checkpoint, manifest.get("files"))
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
            if (name := not_finite(path)) is not None:
                return f"{path.name}: {name} is not finite"
        except (OSError, SafetensorError) as error:
            return f"{path.name} cannot be read ({_first(error)})"
    for path in shards:
        try:
            _look_into_shards(path)
        except Exception as error:  # a pickle that is damaged may raise anything
            return f"{path.name}/{SHARDED} cannot be read as what it should hold ({_first(error)})"
    return None


def _fault_of_states(checkpoint: Path) -> str | None:
    for pattern, what in REQUIRED.items():
        if not any(checkpoint.glob(pattern)):
            return f"it holds no {what}"
    for path in [path for pattern in STATES for path in sorted(checkpoint.glob(pattern))]:
        try:
            with safe_globals():  # what random states of numpy and python are made of
                state = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
            groups = state["param_groups"] if path.name.startswith("optimizer") else []
            empty = any("betas" in group for group in groups) and not state["state"]
        except Exception as error:  # a file that is damaged may raise anything
            return f"{path.name} cannot be read as tensors and numbers alone ({_first(error)})"
        if empty:
            return f"{path.name} holds moments of no weight"
    return None


def shapes_of(path: Path) -> dict[str, list[int]]:
    """Shapes of the tensors in a safetensors file."""
    with safe_open(str(path), framework="pt") as file:
        return {str(name): list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def not_finite(path: Path) -> str | None:
    """The first tensor of a safetensors file that holds NaN or infinity; None where all are finite."""
    with safe_open(str(path), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - no dictionary
            tensor = file.get_tensor(name)
            if tensor.is_floating_point() and tensor.numel() and tensor.itemsize > 1:
                low, high = torch.aminmax(tensor)
                if not torch.isfinite(low - low + (high - high)):
                    return str(name)
    return None


def _look_into_shards(folder: Path) -> None:
    """Read the index, and what torch will unpickle of the shards; raises where something else than data is found."""
    with (folder / SHARDED).open("rb") as file:
        index = _OnlyIndexes(file).load()
    for entry, place in (index.storage_data or {}).items():
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"it names {place.relative_path}, outside of the folder")
        if isinstance(index.state_dict_metadata.get(entry.fqn), BytesStorageMetadata):
            with (folder / place.relative_path).open("rb") as shard:
                shard.seek(place.offset)
                torch.load(io.BytesIO(shard.read(place.length)), weights_only=True)


class _OnlyIndexes(pickle.Unpickler):
    """Reads the index of a sharded checkpoint; what names anything else is refused before it is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        """The class, if it is one of those that an index is made of."""
        if name in PLAIN.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # how early releases of Python 3.11 write an enum's member
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _member(owner: Any, name: str) -> Any:
    """A member of an enum that the index may name, and no other attribute."""
    if not (isinstance(owner, enum.EnumMeta) and name in owner.__members__):
        raise pickle.UnpicklingError(f"it names attribute {name} of {owner!r:.80}")
    return owner.__members__[name]


def _first(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].split('. ')[0]:.160}" if text else type(error).__name__
