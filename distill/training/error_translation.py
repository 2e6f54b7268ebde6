"""Translation of failures outside the recipe (disk, memory, a dead worker) into one line with the cure."""

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from distill.core.errors import DISK, RunError, disk_code
from distill.core.files import free_bytes, mount_of
from distill.core.folders import has_begun, root_of
from distill.core.ranks import world_size
from distill.core.startup import cache_root
from distill.core.units import GIB
from distill.models.dtypes import resolve_device
from distill.models.gpu_specs import family_in
from distill.recipe.resume_policy import why_batch_size_stays
from distill.recipe.teachers import teacher_sections
from distill.teachers.registry import source_of
from distill.training.checkpoints import checkpoints
from distill.training.resuming import smaller_batch

if TYPE_CHECKING:
    from distill.recipe import Recipe
    from distill.teachers.footprint import SmallerTeacher

MOST_WAYS = 4  # ways to save memory named in the message, so that it stays one line; `distill check` lists all
CUT_SHORT = ("inline_container", "PytorchStreamWriter", "iostream error")  # of torch.save, which gives no reason


@contextlib.contextmanager
def translate_errors(recipe: Recipe, folder: Path) -> Iterator[None]:
    """Turn failures of the machine into `RunError`, one line that names the cure; others pass through."""
    try:
        yield
    except Exception as error:
        line = translated(error, recipe, folder)
        if line is None:
            raise
        raise RunError(line) from error


def translated(error: Exception, recipe: Recipe, folder: Path) -> str | None:
    """Return the line on a failure of the machine that names the cure; None for any other error."""
    if isinstance(error, torch.OutOfMemoryError):
        return out_of_memory(recipe, error, folder)
    text = str(error)
    code = disk_code(error)
    if code is None and any(words in text for words in CUT_SHORT):
        code = errno.ENOSPC if free_bytes(_fullest(recipe, folder)) < GIB else errno.EFBIG
    if code is not None:
        return _disk(code, getattr(error, "filename", None), recipe, folder)
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        return (
            f"the machine is out of memory ({(text.splitlines() or ['allocation failed'])[0]:.120}); lower "
            f"train.batch_size (now {recipe.train.batch_size}), or data.max_length (now {recipe.data.max_length}) "
            f"in a new run, or close other programs{_continue(folder)}"
        )
    if world_size() > 1 and "by peer" in text:  # gloo's message; the other process has printed its reason
        return f"another process of this run ended, so this one does too{_continue(folder)}"
    if "DataLoader worker" in text:
        return (
            f"a data worker died ({text.splitlines()[0]}), most often because the machine ran out of memory: lower "
            f"data.workers (now {recipe.data.workers}){_continue(folder)}"
        )
    return None


def out_of_memory(recipe: Recipe, error: BaseException, folder: Path | None = None) -> str:
    """Return a message that names the settings to lower, and by how much, when GPU memory is exhausted.

    Args:
        folder: The run's folder; the message gives the command that resumes from its last checkpoint.
    """
    lossless = _ways_without_loss(recipe)
    lossy = _ways_of_a_new_run(recipe)
    whole = checkpoints(folder) if folder is not None and folder.is_dir() else []
    sentences = str(error).splitlines()[0].split(". ")  # the third and later ones are torch's figures and advice
    first = ". ".join(sentences[:2]).rstrip(".")
    fault = f"the GPU is out of memory: {first}; "
    ranked = "`distill check` ranks the ways by the GiB they save"
    if not whole or folder is None:
        return f"{fault}set {'; or '.join([*lossless.values(), *lossy][:MOST_WAYS])}. {ranked}"
    lossy = lossy[: max(MOST_WAYS - len(lossless), 1)]
    new = f"a new run can set {'; or '.join(lossy)}" if lossy else ""
    if not lossless:
        return f"{fault}{new or 'no setting of the recipe saves more'}. {ranked}"
    return (
        f"{fault}set {'; or '.join(lossless.values())}{new and f' ({new})'}. {ranked}. {whole[-1]} is kept: "
        f"continue with the same command and --name {root_of(folder).name} --resume {next(iter(lossless))}"
    )


def _ways_without_loss(recipe: Recipe) -> dict[str, str]:
    """Return settings that a run may be resumed with, from override to description."""
    train = recipe.train
    ways = {}
    if train.batch_size > 1 and why_batch_size_stays(recipe) is None:
        smaller, tokens = smaller_batch(recipe, world_size())
        if train.tokens_per_step is None:
            override = f"train.batch_size={smaller} train.tokens_per_step={tokens}"
            keeps = f"with train.tokens_per_step {tokens} the step is unchanged"
        else:
            override = f"train.batch_size={smaller}"
            keeps = "the step is unchanged: more micro-batches"
        share = "half" if 2 * smaller == train.batch_size else f"{smaller}/{train.batch_size}"
        ways[override] = f"train.batch_size from {train.batch_size} to {smaller}, {share} of the activations ({keeps})"
    if not train.gradient_checkpointing:
        words = "train.gradient_checkpointing to true, one layer's activations at a time"
        ways["train.gradient_checkpointing=true"] = words
    return ways | {way.override: way.words for way in _smaller_teachers(recipe) if way.same_targets}


def _ways_of_a_new_run(recipe: Recipe) -> list[str]:
    """Return descriptions of settings that change what is trained, for a new run."""
    train = recipe.train
    ways = []
    halves = train.batch_size > 1 and train.batch_size // 2 % recipe.data.samples == 0
    if halves and why_batch_size_stays(recipe) is not None:
        ways.append(f"train.batch_size from {train.batch_size} to {train.batch_size // 2}, half of the activations")
    if train.batch_size == 1:
        length = recipe.data.max_length
        ways.append(f"data.max_length from {length} to {length // 2}, half of the activations")
    if recipe.student.lora is None:
        ways.append("student.lora to {}, no gradients or optimizer states of the base weights")
    if train.optimizer_states != "bfloat16" and train.optimizer == "fused_adamw":
        ways.append("train.optimizer_states to bfloat16, half of the optimizer's memory")
    return ways + [way.words for way in _smaller_teachers(recipe) if not way.same_targets]


def _smaller_teachers(recipe: Recipe) -> list[SmallerTeacher]:
    family = family_in(resolve_device(recipe.train))
    return [] if recipe.parallel.teacher == "sharded" else source_of(recipe).smaller(family)


def _disk(code: int, name: str | None, recipe: Recipe, folder: Path) -> str:
    where = Path(name or folder)
    advice = "; make it writable, or start in another folder"
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        where = where if name else _fullest(recipe, folder)
        advice = f" ({mount_of(where)} has {free_bytes(where) / GIB:.1f} GiB free); make room there"
    return f"{where}: {DISK[code]}{advice}{_continue(folder)}"


def _fullest(recipe: Recipe, folder: Path) -> Path:
    """Return the place that a run writes to with the least free space, the run's folder in a tie."""
    kept = [Path(own.store).expanduser() for own in teacher_sections(recipe).values() if own.store]
    return min((folder, *kept, cache_root(), Path(tempfile.gettempdir())), key=free_bytes)


def _continue(folder: Path) -> str:
    """Return the rest of a message: how to go on. A stage is continued by the command of the whole run."""
    run = root_of(folder)
    whole = checkpoints(folder) if folder.is_dir() else []
    if whole:
        name = "" if run == folder else f"--name {run.name} "
        return f", then continue from {whole[-1]} with {name}--resume"
    if has_begun(run):
        return f", then start again with --name {run.name} --resume, since {run} has begun"
    return ", then start again"
