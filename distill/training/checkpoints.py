"""Checkpoints of a run: their names, rotation, validation, weights, and the one that a failure after training leaves.

    last, lines = find_valid_checkpoint(folder)
    load_weights(student, last)

A checkpoint is written into `.unfinished/` and renamed, so that a folder called `checkpoint-N` is complete, whenever
the process was killed (`TransformersCompat._save_checkpoint`). `trainer_state.json` is the last file that `Trainer`
writes; `manifest.json` with the checksums of all files follows it.

One from a bad disk, an interrupted copy or an untrusted source may be incomplete all the same. Before a run continues
from it, its files are compared with the manifest (`core/manifest.py`) and its weights must be finite. Weights are read
from safetensors alone. Files in which a pickle could hide code are read by torch's restricted unpickler
(`weights_only`), tensors memory-mapped, so that the check is cheap at any size. torch reads the index and the numbers
of a sharded checkpoint with plain pickle: here the index is read with a list of the classes that it may name, and the
numbers by the restricted unpickler.

Files hold weights under the names in which a model family is published, which for mixtures of experts and many others
are not those of its modules: transformers converts them on saving and loading. So a checkpoint is read as any model
is, and its names are compared afterwards.
"""

from __future__ import annotations

import copy
import enum
import io
import json
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from transformers.trainer_pt_utils import safe_globals

from distill.core.errors import RunError, disk_code, first_line
from distill.core.interrupts import RunStopped
from distill.core.manifest import MANIFEST, first_damaged_file, read_manifest
from distill.models.head import unwrap_peft
from distill.models.load.read_weights import read_weights

CHECKPOINT = "checkpoint-"
UNFINISHED = ".unfinished"
STATE = "trainer_state.json"
ADAPTER = "adapter_model.safetensors"
WEIGHTS = ("model.safetensors", ADAPTER)
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


# ------------------------------------------------------------------ folders


def checkpoints(folder: Path, *, damaged: bool = False) -> list[Path]:
    """Return complete checkpoints in `folder` by step; with `damaged` also those without trainer_state.json."""
    steps = {path: path.name.removeprefix(CHECKPOINT) for path in folder.glob(CHECKPOINT + "*")}
    numbered = [path for path, step in steps.items() if step.isascii() and step.isdecimal()]
    numbered.sort(key=lambda path: int(steps[path]))
    return [path for path in numbered if damaged or (path / STATE).is_file()]


def unfinished_checkpoints(folder: Path) -> list[Path]:
    """Return checkpoints in `folder` whose writing was interrupted; they are never loaded."""
    return sorted((folder / UNFINISHED).glob(CHECKPOINT + "*"))


def rotate_checkpoints(folder: Path, limit: int | None, best: str | None = None) -> None:
    """Keep the newest `limit` checkpoints and `best`; others are moved to `.unfinished/`, to be deleted."""
    for old in checkpoints(folder)[: -limit if limit else 0]:
        if best is None or old.name != Path(best).name:
            # A rename happens at once, a deletion file by file: a process killed in it would leave a damaged folder of
            # this name.
            os.replace(old, folder / UNFINISHED / f"old-{old.name}")


@contextmanager
def checkpoint_on_failure(trainer: Any, *, together: bool = False) -> Iterator[None]:
    """Write a checkpoint of the last step if the body of the block raises.

    Args:
        together: One of several processes may fail alone in the block, without a collective that others wait in: they
            agree afterwards and write the checkpoint together. If False, several processes write none.

    Raises:
        RunError: Names the failure, the checkpoint and the next command. Errors of the disk and of exhausted memory
            are raised unchanged: `translate_errors` turns them into advice.
        RunStopped, KeyboardInterrupt: The run was stopped in the block; the command names what continues it.
    """
    fault: Exception | None = None
    several = trainer.accelerator.num_processes > 1
    folder = Path(trainer.args.output_dir)
    kept = f"{CHECKPOINT}{trainer.state.global_step}"
    try:
        yield
    except (RunStopped, KeyboardInterrupt):  # as in training, a run that is stopped leaves a checkpoint
        if not several and folder / kept not in checkpoints(folder):
            trainer.save_checkpoint()
        raise
    except Exception as error:  # any failure: the trained weights must be kept
        fault = error
    failed = fault is not None
    # every process comes here, failed or not, so that this collective tells all of them whether one has failed
    if several and together:
        failed = trainer.mean_over_ranks(float(failed)) > 0
    if not failed:
        return
    # on a full disk a checkpoint would fail as well, and hide the first error behind its own
    full = fault is not None and disk_code(fault) is not None
    if (together or not several) and folder / kept not in checkpoints(folder) and not full:
        trainer.save_checkpoint()
    if fault is None:
        raise RunError("another process of this run failed after the last step")
    if full or isinstance(fault, torch.OutOfMemoryError | MemoryError):
        raise fault
    ways = "continue with --resume"
    if folder / kept in checkpoints(folder):
        ways = (
            f"its weights are in {folder / kept}: --resume continues from there, and distill export {folder / kept} "
            "-o FOLDER writes them as a student"
        )
    raise RunError(f"{first_line(fault)}; the student is trained, {ways}") from fault


# ------------------------------------------------------------------ validation


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
        fault = checkpoint_error(path)
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


def checkpoint_error(checkpoint: Path) -> str | None:
    """Return the reason why a checkpoint cannot be used, in words; None where it can."""
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"{STATE} cannot be read ({_short(error)})"
    if not isinstance(state, dict) or not isinstance(state.get("global_step"), int):
        return f"{STATE} has no global_step"
    try:
        manifest = read_manifest(checkpoint)
    except (OSError, ValueError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({_short(error)})"
    fault = None if manifest is None else first_damaged_file(checkpoint, manifest.get("files"))
    return fault or _weights_error(checkpoint) or _states_error(checkpoint)


def _weights_error(checkpoint: Path) -> str | None:
    shards = sorted(path.parent for path in checkpoint.glob(f"*/{SHARDED}"))
    files = [checkpoint / name for name in WEIGHTS if (checkpoint / name).exists()]
    if (checkpoint / INDEX).exists():
        try:
            names = set(json.loads((checkpoint / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{INDEX} cannot be read ({_short(error)})"
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
            return f"{path.name} cannot be read ({_short(error)})"
    for path in shards:
        try:
            _check_shards(path)
        except Exception as error:  # a damaged pickle may raise anything
            return f"{path.name}/{SHARDED} cannot be read as a checkpoint's index ({_short(error)})"
    return None


def _states_error(checkpoint: Path) -> str | None:
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
            return f"{path.name} cannot be read as tensors and numbers alone ({_short(error)})"
        if empty:
            return f"{path.name} holds no optimizer moments"
    return None


def shapes_of(path: Path) -> dict[str, list[int]]:
    with safe_open(str(path), framework="pt") as file:
        return {str(name): list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def not_finite(path: Path) -> str | None:
    """Return the first tensor of a safetensors file with NaN or infinity; None where all are finite."""
    with safe_open(str(path), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - no dictionary
            tensor = file.get_tensor(name)
            if tensor.is_floating_point() and tensor.numel() and tensor.itemsize > 1:
                low, high = torch.aminmax(tensor)
                # infinity minus itself is NaN: the difference is 0 for finite numbers alone, and the extremes need no
                # mask in memory
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
        # Entries that are no tensors are read by plain pickle when the checkpoint is loaded. Here the restricted
        # unpickler reads them first, and raises where it meets code.
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


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].split('. ')[0]:.160}" if text else type(error).__name__


# ------------------------------------------------------------------ weights


@torch.no_grad()
def load_weights(student: nn.Module, checkpoint: Path) -> None:
    """Copy the weights of a checkpoint into a student, bit-exactly.

    Args:
        student: Unsharded student: bare, or inside PEFT, whose base model is not changed.
        checkpoint: Folder with the model's or the adapter's safetensors.

    Raises:
        RunError: Weights are missing, or are not part of this student; the message names one.
    """
    if hasattr(student, "peft_config"):
        _load_adapter(student, checkpoint)
        return
    model: Any = unwrap_peft(student)
    dtypes = {value.dtype for value in model.state_dict().values() if value.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32  # float32 holds every other dtype without rounding
    try:
        saved = read_weights(
            type(model), checkpoint, "--resume", config=copy.deepcopy(model.config), dtype=dtype, use_safetensors=True
        )
    except ValueError as error:
        raise _refused(checkpoint, str(error)) from error
    there = saved.state_dict()
    own = model.state_dict()
    wrong = sorted(there.keys() ^ own.keys())
    if wrong:
        raise _refused(checkpoint, f"{wrong[0]} exists in only one of checkpoint and student")
    for name, value in own.items():
        value.copy_(there[name])


def _load_adapter(student: Any, checkpoint: Path) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    with safe_open(str(checkpoint / ADAPTER), framework="pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dictionary
    own = get_peft_model_state_dict(student)
    missing = sorted(own.keys() - saved.keys())
    if missing:
        raise _refused(checkpoint, f"{missing[0]} is missing in its files")
    wrong = sorted(name for name in saved if name not in own or own[name].shape != saved[name].shape)
    if wrong:
        raise _refused(checkpoint, f"{wrong[0]} is not a weight of this student's adapter, or has another shape")
    set_peft_model_state_dict(student, saved, adapter_name=student.active_adapter)


def _refused(checkpoint: Path, reason: str) -> RunError:
    return RunError(f"--resume: {checkpoint}: {reason}; move the folder away to use an older checkpoint")
