"""`distill cache`, from a recipe to a folder: load, plan, say the size, run the teacher, close."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distill.caching.write import Job, missing_shards, open_folder, plan_work, require_room, write_shards
from distill.core.ranks import broadcast_from_rank0, is_main_process, world_size
from distill.core.units import counted
from distill.data.load import Splits
from distill.data.report import DataReport
from distill.models.attention_choice import AttentionChoices
from distill.models.head import LogitTransform, probe_logits
from distill.models.precision import Precision, resolve_device, resolve_precision
from distill.models.sharding import ALONE, Sharing
from distill.planning.caching import plan_caching
from distill.recipe import Recipe
from distill.recipe.compatibility import require_command
from distill.recipe.models import EIGHT_BITS
from distill.teachers.base import OpenContext
from distill.teachers.cache.format import ANSWERS, Plan, bytes_a_token, write_signed
from distill.teachers.cache.plan import (
    EncodableTeacher,
    LogitHead,
    Origin,
    close_cache,
    encodable,
    hidden_content,
    plan_of,
    write_companions,
)
from distill.teachers.cache.settings import Settings
from distill.teachers.cache.teacher import section_to_load
from distill.teachers.identity import teacher_identity
from distill.teachers.model import ModelSource
from distill.teachers.opening import Pair, open_pair, patch_models


class Loaded(NamedTuple):
    """The recipe's parts, loaded and ready to be asked.

    Attributes:
        recipe, splits, pair: as a run has them.
        precision: of the student and the teacher.
        teacher: in the parts that caching needs.
        student_transform: how the student makes logits.
        cut: the student as it was cut from the teacher, on the CPU; None for any other.
        ids_below: of random tokens; None for text.
        sharing: how several processes hold the teacher.
    """

    recipe: Recipe
    splits: Splits
    pair: Pair
    precision: Precision
    teacher: EncodableTeacher
    student_transform: LogitTransform
    cut: PreTrainedModel | None = None
    ids_below: int | None = None
    sharing: Sharing = ALONE

    @property
    def columns(self) -> int:
        """Of the vocabulary that teacher and student share."""
        return self.pair.vocab_size or len(self.teacher.head.weight)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Of the data."""
        return self.pair.tokenizer


def load(recipe: Recipe, batch_size: int | None = None) -> Loaded:
    """Load data, teacher and student as a run would; of a recipe that reads a cache, the teacher it names beside it.

    Args:
        recipe: what to cache.
        batch_size: rows given to the teacher at once, by which several GPUs choose copies or shards of it; None for
            the recipe's.

    Raises:
        ValueError: as `distill run` would say.
    """
    require_command(recipe, "cache")
    recipe = recipe.model_copy(update={"teacher": section_to_load(recipe)})
    transformers.utils.logging.disable_progress_bar()
    device = resolve_device(recipe.train)
    precision = resolve_precision(recipe, device)
    source = ModelSource(recipe)
    vocabulary = source.vocabulary()
    splits = vocabulary.read(recipe.data, recipe.train.seed)
    sharing, choices = plan_caching(recipe, device, world_size(), batch_size), AttentionChoices(recipe)
    if sharing.teacher_sharded:
        PartialState(cpu=device.type == "cpu")
    pair = open_pair(source, vocabulary, OpenContext(device, precision, sharing, choices))
    student_transform = probe_logits(pair.student, "student")
    cut = None
    if pair.layer_indices is not None and is_main_process():  # before its layers are patched
        without_lora = recipe.student.model_copy(update={"lora": None})
        cut = pair.teacher.cut_student(without_lora, torch.device("cpu"), precision.student).model
    if device.type == "cuda":
        patch_models(pair, choices)
    pair.teacher.quantise()
    teacher = encodable(pair.teacher, device)
    return Loaded(recipe, splits, pair, precision, teacher, student_transform, cut, vocabulary.id_bound, sharing)


def make_plan(loaded: Loaded, settings: Settings) -> dict[str, Any]:
    """What the cache will be, all but the documents.

    Raises:
        ValueError: more tokens than there are.
    """
    if not settings.hidden and settings.k > loaded.columns:
        raise ValueError(f"--top-k: expected at most {loaded.columns}, the size of the vocabulary, got {settings.k}")
    digest, layers = loaded.splits.report.digest, loaded.pair.layer_indices
    origin = Origin(loaded.recipe, digest, loaded.tokenizer, loaded.ids_below, layers)
    head = LogitHead(loaded.teacher.head, loaded.teacher.transform)
    section, dtype = loaded.recipe.teacher, str(loaded.teacher.head.weight.dtype).removeprefix("torch.")
    maker = teacher_identity(section) | {"dtype": section.held if section.dtype in EIGHT_BITS else dtype}
    return plan_of(origin, hidden_content(settings, head, loaded.columns, loaded.recipe.loss.temperature), maker)


def make_cache(
    loaded: Loaded,
    folder: Path,
    settings: Settings,
    *,
    say: Callable[[str], None],
    progress: Callable[[int], AbstractContextManager[Callable[[int], None]]],
) -> Plan | None:
    """Write the cache, or what is missing of it.

    Args:
        loaded: from `load`.
        folder: where to.
        settings: checked.
        say: prints a line; called by the first process only.
        progress: makes a context manager for the number of positions; entered, it is told of those that are stored.

    Every process must call this.

    Returns:
        The manifest; None in processes that are not the first.

    Raises:
        ValueError: the folder holds another cache, the disk is too small.
    """
    recipe = loaded.recipe
    plan = make_plan(loaded, settings)
    splits = [loaded.splits.train, loaded.splits.validation]
    work = plan_work(
        splits, width=bytes_a_token(plan), max_length=recipe.data.max_length, packing=recipe.data.packing,
        shard_bytes=settings.shard_bytes,
    )  # fmt: skip
    plan["work"] = work.digest()
    job = Job(folder, plan, work)

    def begin() -> list[int]:
        finished = open_folder(folder, plan, first=is_main_process())
        if is_main_process():
            _announce(loaded, job, say, finished)
        return missing_shards(folder, work)

    missing = broadcast_from_rank0(begin) if loaded.teacher.sharded else begin()
    batch_size = settings.batch_size or recipe.train.batch_size
    with progress(work.learned) as advance:
        write_shards(job, splits, loaded.teacher, batch_size=batch_size, missing=missing, advance=advance)
    section = recipe.generate  # shards answer together
    answers = loaded.pair.teacher.respond(section.prompts, section) if section.prompts else None
    if not is_main_process():
        return None
    if answers is not None:
        paired = dict(zip(section.prompts, answers, strict=True))
        write_signed(folder / ANSWERS, {"max_new_tokens": section.max_new_tokens, "answers": paired})
    (model,) = loaded.pair.teacher.models.values()
    write_companions(
        folder, model.config, loaded.tokenizer, loaded.teacher.head if settings.hidden else None, loaded.cut
    )
    return close_cache(folder, plan)


def _announce(loaded: Loaded, job: Job, say: Callable[[str], None], finished: bool) -> None:
    (folder, plan, work), extra = job, 0
    if plan["kind"] == "hidden":
        extra += loaded.teacher.head.weight.nbytes
    if loaded.cut is not None:
        extra += sum(parameter.nbytes for parameter in loaded.cut.parameters())
    total, left = require_room(job, extra)
    state = "complete already" if finished else f"{_size(left)} to be written"
    if loaded.sharing is not ALONE:
        held = "in shards (FSDP2)" if loaded.sharing.teacher_sharded else "copied"
        say(f"{'devices':<12}teacher {held}: {loaded.sharing.why}")
    say(
        f"{folder}: "
        f"{counted(work.learned, 'position')} of {counted(len(work.entries), 'document')}, "
        f"{bytes_a_token(plan)} bytes each, {_size(total)} in {counted(len(work.shards), 'shard')}; {state}"
    )
    if (advice := fewer_rows(loaded.recipe, loaded.splits.report)) is not None:
        say(advice)


def fewer_rows(recipe: Recipe, report: DataReport) -> str | None:
    """A run of few steps sees a part of the data: how to cache no more than that; None where it sees all."""
    train = recipe.train
    if train.steps is None or report.tokens == 0:
        return None
    step = train.tokens_per_step or train.batch_size * recipe.data.max_length * world_size()
    share = train.steps * step / report.tokens
    if share > 0.8:
        return None
    rows = max(int(report.rows_read * share * 1.1) + 1, 2)
    if rows >= report.rows_read:  # few rows of many tokens, such as text files
        return None
    return (
        f"{train.steps:,} steps see {share:.0%} of these {report.tokens:,} tokens: data.max_rows={rows}, here and "
        "in the run, would cache about that part alone"
    )


def _size(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 2**29 else f"{count / 2**20:,.1f} MiB"
