"""`distill cache`, from a recipe to a folder: load, plan, report the size, run the teacher, close."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import PartialState

from distill.caching.write import Work, fill, missing_shards, plan_work
from distill.core.ranks import broadcast_from_rank0, is_main_process, world_size
from distill.core.units import plural
from distill.data.load import Splits
from distill.data.report import DataReport
from distill.models.head import LogitTransform, probe_logits
from distill.models.patch.attention_choice import AttentionChoices
from distill.models.precision.dtypes import resolve_device, resolve_precision
from distill.models.sharding import SINGLE_PROCESS
from distill.planning.cache_memory import plan_caching
from distill.recipe import Recipe
from distill.recipe.compatibility import require_command
from distill.teachers.backends.stored.format import KEY_BYTES, MANIFEST, Plan, bytes_a_token, read_json, rows_of
from distill.teachers.backends.stored.online_source import KeepSource
from distill.teachers.backends.stored.online_store import Store
from distill.teachers.backends.stored.online_teacher import KeptTeacher
from distill.teachers.backends.stored.plan import LogitHead, head_of
from distill.teachers.backends.stored.settings import Settings
from distill.teachers.backends.stored.teacher import section_to_load
from distill.teachers.calibration import calibration_of
from distill.teachers.capabilities import is_collective, quantise_layers, responses_of
from distill.teachers.interface import LoadContext, Teacher
from distill.teachers.kernels import patch_models
from distill.teachers.opening import ModelPair, open_pair
from distill.teachers.registry import source_of
from distill.teachers.vocabulary import Vocabulary
from distill.teachers.wrapping import WrappingSource, WrappingTeacher


class Loaded(NamedTuple):
    """The recipe's parts, loaded and ready to be queried.

    Attributes:
        recipe, splits, pair: Recipe, data and models, as of a run.
        keep: the store's source, which has noted the rows as the teacher reads them.
        backend: the teacher without other rows.
        context: device, dtypes and placement that it was opened with.
        vocabulary: Tokenizers of the recipe.
        head: LM head of the backend; None where a server sends K tokens.
        student_transform: scale and soft cap of the student's logits.
        is_ready: Whether both models are already patched and the teacher is quantised.
    """

    recipe: Recipe
    splits: Splits
    pair: ModelPair
    keep: KeepSource
    backend: Teacher
    context: LoadContext
    vocabulary: Vocabulary
    head: LogitHead | None
    student_transform: LogitTransform
    is_ready: bool = False

    @property
    def columns(self) -> int:
        """Columns of the vocabulary that teacher and student share."""
        return self.pair.vocab_size or self.backend.format.properties.columns[0]

    @property
    def retokenises(self) -> bool:
        """True where the teacher reads the text by a tokenizer of its own."""
        return self.pair.teacher.rows.reading == "retokenised"

    @property
    def measures(self) -> bool:
        """True where the error of what is stored can be measured: for hidden states, and one tokenizer."""
        return self.head is not None and not self.retokenises


def recipe_to_store(recipe: Recipe) -> Recipe:
    """Return the recipe with the teacher to query: of one that reads a cache, the model that it names beside it.

    Raises:
        ValueError: a teacher whose outputs cannot be stored, or that is not named.
    """
    require_command(recipe, "cache")
    section = recipe.teacher if recipe.teacher.urls else section_to_load(recipe)
    return recipe.model_copy(update={"teacher": section.model_copy(update={"online_cache": None})})


def load(recipe: Recipe, batch_size: int | None = None) -> Loaded:
    """Load data, teacher and student as a run would; of a recipe that reads a cache, the teacher it names beside it.

    Args:
        recipe: Recipe whose teacher is cached.
        batch_size: rows given to the teacher at once, by which several GPUs choose copies or shards of it; None for
            the recipe's.

    Raises:
        ValueError: as `distill run` would say.
    """
    recipe = recipe_to_store(recipe)
    device = resolve_device(recipe.train)
    precision = resolve_precision(recipe, device)
    stored = source_of(
        recipe.model_copy(update={"teacher": recipe.teacher.model_copy(update={"online_cache": os.devnull})})
    )
    vocabulary = stored.vocabulary()
    splits = vocabulary.read(recipe.data, recipe.train.seed)
    placement, choices = plan_caching(recipe, device, world_size(), batch_size), AttentionChoices(recipe)
    if placement.teacher_sharded:
        PartialState(cpu=device.type == "cpu")
    context = LoadContext(device, precision, placement, choices, calibration_of(recipe, splits))
    pair = open_pair(source_of(recipe), vocabulary, context)
    keep, backend, inside = stored, pair.teacher, vocabulary
    while isinstance(keep, WrappingSource) and not isinstance(keep, KeepSource):
        assert isinstance(backend, WrappingTeacher)
        keep, backend, inside = keep.inner, backend.inner, inside.inner  # type: ignore[attr-defined]
    assert isinstance(keep, KeepSource)
    return Loaded(
        recipe, splits, pair, keep, backend, context, inside, head_of(backend), probe_logits(pair.student, "student")
    )


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
        loaded: Result of `load`, its models not yet patched.
        folder: Folder of the cache.
        settings: checked.
        say: prints a line; called by the first process only.
        progress: makes a context manager for the number of positions; its value is called with those that are stored.

    Every process must call this.

    Returns:
        The manifest; None in processes that are not the first.

    Raises:
        ValueError: the folder holds another cache, the disk is too small.
    """
    recipe, keep = loaded.recipe, loaded.keep
    if not settings.hidden and loaded.head is not None:
        if settings.k > loaded.columns:
            raise ValueError(
                f"--top-k: expected at most {loaded.columns}, the size of the vocabulary, got {settings.k}"
            )
        if loaded.retokenises:
            raise ValueError("--hidden: needed with student.vocabulary: cross, which compares whole distributions")
    assert keep.noted is not None
    if not keep.required:
        raise ValueError("data.source: expected tokens to train on, got none, so nothing to cache")
    keep.folder, keep.option, keep.chosen = folder, "--out", settings
    kept = keep.around(loaded.backend, loaded.context, loaded.vocabulary, loaded.head)
    splits = [keep.noted.train, keep.noted.validation]
    work = plan_work(
        splits,
        width=bytes_a_token(kept.store.manifest),
        max_length=longest_of(splits, loaded),
        packing=recipe.data.packing,
        shard_bytes=settings.shard_bytes,
    )

    def begin() -> list[int]:
        missing = missing_shards(kept.store, work)
        if is_main_process():
            _announce(loaded, kept.store, work, missing, say)
        return missing

    ready(loaded)
    missing = broadcast_from_rank0(begin) if is_collective(kept) else begin()
    batch_size = settings.batch_size or recipe.train.batch_size
    section = recipe.generate  # shards answer together
    if section.prompts:
        responses_of(with_store(loaded.pair.teacher, kept), section.prompts, section)
    with progress(work.learned) as advance:
        fill(kept, work, splits, batch_size=batch_size, missing=missing, advance=advance)
    return read_json(folder / MANIFEST) if is_main_process() else None


def ready(loaded: Loaded) -> None:
    """Install our kernels in the models and quantise the teacher, where that has not been done."""
    if loaded.is_ready:
        return
    if loaded.context.device.type == "cuda":
        patch_models(loaded.pair, loaded.context.attention)
    quantise_layers(loaded.pair.teacher)


def with_store(teacher: Teacher, kept: KeptTeacher) -> Teacher:
    """Return the teacher with the store around its backend."""
    if not isinstance(teacher, WrappingTeacher):
        return kept
    twin = copy.copy(teacher)
    twin.inner = with_store(teacher.inner, kept)
    return twin


def longest_of(splits: Sequence[Any], loaded: Loaded) -> int:
    """Return the tokens of a row that the teacher reads: the student's bound, by another tokenizer the longest row."""
    if not loaded.retokenises:
        return loaded.recipe.data.max_length
    return max(len(row["input_ids"]) for rows in splits for row in rows_of(rows))


def _announce(loaded: Loaded, store: Store, work: Work, missing: Sequence[int], say: Callable[[str], None]) -> None:
    plan, folder, placement = store.manifest, store.folder, loaded.context.placement
    width = bytes_a_token(plan)
    left = sum(width * work.learned_in(number) for number in missing)
    total = width * work.learned + (KEY_BYTES + 16) * len(work.entries)
    state = f"{_size(left)} to be written" if missing else "complete already"
    if placement is not SINGLE_PROCESS:
        say(f"{'devices':<12}{placement.teacher_text}: {placement.why}")
    say(
        f"{folder}: "
        f"{plural(work.learned, 'position')} of {plural(len(work.entries), 'document')}, "
        f"{width} bytes each, {_size(total)} in {plural(len(work.shards), 'shard')}; {state}"
    )
    if (advice := fewer_rows(loaded.recipe, loaded.splits.report)) is not None:
        say(advice)


def fewer_rows(recipe: Recipe, report: DataReport) -> str | None:
    """Return advice on caching only the data that a run of few steps sees; None where it sees all."""
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
