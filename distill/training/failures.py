"""What can break a run from outside, said in one line with what to do: disk, memory, a worker that died."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from distill.faults import DISK, RunError
from distill.recipe import Recipe
from distill.recipe.models import EIGHT_BITS
from distill.training.checkpoints import checkpoints

GIB = 2**30
# what libraries that are not Python's put into exceptions of their own
CUT_SHORT = (
    "inline_container",
    "PytorchStreamWriter",
    "iostream error",
)  # torch.save, which keeps the reason to itself
SAID = {code: os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)}


@contextmanager
def explained(recipe: Recipe, folder: Path) -> Iterator[None]:
    """Turn failures of the machine into `RunError`, one line that says what to change; others pass through."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(out_of_memory(recipe, error)) from error
    except OSError as error:
        if error.errno not in DISK:
            raise
        raise RunError(_disk(error.errno, error.filename or folder, folder)) from error
    except Exception as error:  # libraries wrap what the system said into their own exceptions
        text = str(error)
        full = next((code for code, words in SAID.items() if words in text), None)
        if full is None and any(words in text for words in CUT_SHORT):
            full = errno.ENOSPC if _free(folder) < GIB else errno.EFBIG
        if full is not None:
            raise RunError(_disk(full, folder, folder)) from error
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
            raise RunError(
                f"the machine is out of memory ({(text.splitlines() or ['no more to be had'])[0]:.120}); lower "
                f"train.batch_size (now {recipe.train.batch_size}) or data.max_length (now {recipe.data.max_length}), "
                f"or close what else runs{_continue(folder)}"
            ) from error
        if "DataLoader worker" in text:
            raise RunError(
                f"a data worker died ({text.splitlines()[0]}); most often the machine ran out of memory: lower "
                f"data.workers (now {recipe.data.workers}){_continue(folder)}"
            ) from error
        raise


def out_of_memory(recipe: Recipe, error: BaseException) -> str:
    """What to lower, and by how much, when the GPU's memory is used up."""
    batch, length = recipe.train.batch_size, recipe.data.max_length
    ways = []
    if batch > 1:
        keeps = "" if recipe.train.tokens_per_step is None else " (the step stays the same: more micro-batches)"
        ways.append(f"train.batch_size from {batch} to {max(batch // 2, 1)}, half of the activations{keeps}")
    if not recipe.train.gradient_checkpointing:
        ways.append("train.gradient_checkpointing to true, one layer's activations at a time")
    if recipe.student.lora is None:
        ways.append("student.lora to {}, no gradients and optimizer states of the base weights")
    if recipe.train.optimizer_states != "bfloat16" and recipe.train.optimizer == "fused_adamw":
        ways.append("train.optimizer_states to bfloat16, half of the optimizer's memory")
    whole = not recipe.teacher.is_cached and recipe.teacher.offload is None and recipe.teacher.dtype not in EIGHT_BITS
    if whole and not recipe.teachers:
        ways.append("teacher.dtype to fp8, half of the teacher's layers")
        ways.append("teacher.offload to cpu, all but two of the teacher's layers, which cross the bus instead")
    if batch == 1:
        ways.append(f"data.max_length from {length} to {length // 2}, half of the activations")
    said = ". ".join(str(error).splitlines()[0].split(". ")[:2]).rstrip(".")  # then come figures and torch's own advice
    return (
        f"the GPU is out of memory: {said}; set {'; or '.join(ways)}. "
        "`distill check` ranks the ways by the GiB they save"
    )


def _disk(code: int, where: object, folder: Path) -> str:
    advice = (
        f"({_free(folder) / GIB:.1f} GiB free); make room there"
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        else "; make it writable, or start in another folder"
    )
    return f"{where}: {DISK[code]} {advice}{_continue(folder)}".replace(" ;", ";")


def _free(folder: Path) -> int:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def _continue(folder: Path) -> str:
    whole = checkpoints(folder) if folder.is_dir() else []
    return f", then continue from {whole[-1]} with --resume" if whole else ", then start again"
