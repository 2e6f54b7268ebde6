"""`distill cache`, from a recipe to a folder: load, plan, report the size, run the teacher, close."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from accelerate import PartialState

from distill.core.ranks import is_main_process, world_size
from distill.core.units import plural
from distill.data.load import Splits
from distill.evaluation.cache_error import Sample, take_sample
from distill.models.dtypes import resolve_device, resolve_precision
from distill.models.head import LogitTransform, probe_logits
from distill.models.patch.attention_choice import AttentionChoices
from distill.models.sharding import SINGLE_PROCESS
from distill.planning.cache_memory import plan_caching
from distill.recipe import Recipe
from distill.recipe.compatibility import require_command
from distill.teachers.backends.stored.contents import LogitHead, head_of
from distill.teachers.backends.stored.epoch import fill_store
from distill.teachers.backends.stored.format import KEY_BYTES, MANIFEST, Plan, bytes_a_token, read_store_json
from distill.teachers.backends.stored.maker import section_to_load
from distill.teachers.backends.stored.plan import StoredPlan
from distill.teachers.backends.stored.settings import CacheOptions
from distill.teachers.backends.stored.store import Store
from distill.teachers.backends.stored.teacher import StoredTeacher
from distill.teachers.base import Teacher
from distill.teachers.kernels import patch_models
from distill.teachers.load_context import LoadContext, calibration_of
from distill.teachers.opening import ModelPair, open_pair
from distill.teachers.registry import source_of
from distill.teachers.rows.reading import ReadingTeacher
from distill.teachers.vocabulary import Vocabulary


class Loaded(NamedTuple):
    """The recipe's parts, loaded and ready to be queried.

    Attributes:
        recipe, splits, pair: Recipe, data and models, as of a run.
        keep: the store's plan, which has noted the rows as the teacher reads them.
        backend: the teacher without other rows.
        context: device, dtypes and placement that it was opened with.
        head: LM head of the backend; None where a server sends K tokens.
        student_transform: scale and soft cap of the student's logits.
        is_ready: Whether both models are already patched and the teacher is quantised.
    """

    recipe: Recipe
    splits: Splits
    pair: ModelPair
    keep: StoredPlan
    backend: Teacher
    context: LoadContext
    vocabulary: Vocabulary
    head: LogitHead | None
    student_transform: LogitTransform
    is_ready: bool = False

    @property
    def columns(self) -> int:
        return self.pair.vocab_size or self.backend.format.properties.columns[0]

    @property
    def measures(self) -> bool:
        """True where the error of what is stored can be measured: for hidden states, and one tokenizer."""
        return self.head is not None and self.pair.teacher.rows.reading != "retokenised"

    def sample(self, positions: int = 512) -> Sample:
        """Return outputs of both models at held-out positions, to measure the error on; every process calls this."""
        assert self.head is not None
        rows = self.splits.validation
        return take_sample(self.pair, self.head, self.student_transform, rows, self.columns, positions)


def recipe_to_store(recipe: Recipe) -> Recipe:
    """Return the recipe with the teacher to query: of one that reads a cache, the model that it names beside it.

    Raises:
        ValueError: a teacher whose outputs cannot be stored, or that is not named.
    """
    require_command(recipe, "cache")
    section = recipe.teacher if recipe.teacher.urls else section_to_load(recipe)
    plain = section.without("online_cache") if section.urls else section.without("online_cache", "top_k")
    return recipe.model_copy(update={"teacher": plain})


def load(recipe: Recipe, batch_size: int | None = None) -> Loaded:
    """Load data, teacher and student as a run would; of a recipe that reads a cache, the teacher it names beside it.

    Args:
        batch_size: rows given to the teacher at once, by which several GPUs choose copies or shards of it; None for
            the recipe's.
    """
    recipe = recipe_to_store(recipe)
    device = resolve_device(recipe.train)
    precision = resolve_precision(recipe, device)
    # planned twice: with a store around the teacher, for what the cache will hold, and below without, to be opened
    stored = source_of(recipe, stores="everywhere")
    vocabulary = stored.vocabulary()
    splits = vocabulary.read(recipe.data, recipe.train.seed)
    placement = plan_caching(recipe, device, world_size(), batch_size)
    choices = AttentionChoices(recipe)
    if placement.teacher_sharded:
        PartialState(cpu=device.type == "cpu")
    context = LoadContext(device, precision, placement, choices, calibration_of(recipe, splits))
    pair = open_pair(source_of(recipe), vocabulary, context)
    (keep,) = (plan for plan in stored.unwrap_all() if isinstance(plan, StoredPlan))
    *_, backend = pair.teacher.unwrap_all()
    inside = vocabulary.of_backend()
    student_transform = probe_logits(pair.student, "student")
    return Loaded(recipe, splits, pair, keep, backend, context, inside, head_of(backend), student_transform)


def make_cache(
    loaded: Loaded,
    folder: Path,
    settings: CacheOptions,
    *,
    say: Callable[[str], None],
    progress: Callable[[int], AbstractContextManager[Callable[[int], None]]],
) -> Plan | None:
    """Write the cache, or what is missing of it.

    Args:
        loaded: Result of `load`, its models not yet patched.
        say: prints a line; called by the first process only.
        progress: makes a context manager for the number of positions; its value is called with those that are stored.

    Every process must call this.

    Returns:
        The manifest; None in processes that are not the first.

    Raises:
        ValueError: the folder holds another cache, the disk is too small.
    """
    recipe = loaded.recipe
    keep = loaded.keep
    if not settings.hidden and loaded.head is not None:
        if settings.k > loaded.columns:
            raise ValueError(
                f"--top-k: expected at most {loaded.columns}, the size of the vocabulary, got {settings.k}"
            )
        if not loaded.measures:
            raise ValueError("--hidden: needed with student.vocabulary: cross, which compares whole distributions")
    assert keep.noted is not None
    if not keep.required:
        raise ValueError("data.source: expected tokens to train on, got none, so nothing to cache")
    keep.folder = folder
    keep.option = "--out"
    keep.chosen = settings
    kept = keep.around(loaded.backend, loaded.context, loaded.vocabulary, loaded.head)
    store = kept.store
    splits = [keep.noted.train, *keep.noted.held_out.values()]
    if is_main_process():
        _announce(loaded, store, say)
    ready(loaded)
    section = recipe.generate  # shards answer together
    if section.prompts:
        with_store(loaded.pair.teacher, kept).respond(section.prompts, section)
    rows = settings.batch_size or recipe.train.batch_size
    with progress(sum(store.required.values())) as advance:
        fill_store(kept, splits, batch_size=rows, part_bytes=settings.shard_bytes, advance=advance)
    return read_store_json(folder / MANIFEST) if is_main_process() else None


def ready(loaded: Loaded) -> None:
    """Install our kernels in the models and quantise the teacher, where that has not been done."""
    if loaded.is_ready:
        return
    if loaded.context.device.type == "cuda":
        patch_models(loaded.pair, loaded.context.attention)
    loaded.pair.teacher.quantise()


def with_store(teacher: Teacher, kept: StoredTeacher) -> Teacher:
    """Return the teacher with the store around its backend, inside the rows that it reads."""
    if not isinstance(teacher, ReadingTeacher):
        return kept
    twin = copy.copy(teacher)
    twin.inner = with_store(teacher.inner, kept)
    return twin


def _announce(loaded: Loaded, store: Store, say: Callable[[str], None]) -> None:
    width = bytes_a_token(store.manifest)
    count = sum(store.required.values())
    placement = loaded.context.placement
    left = width * sum(store.required[key] for key in store.missing)
    total = width * count + (KEY_BYTES + 16) * len(store.required)
    state = f"{_size(left)} to be written" if left else "complete already"
    if placement is not SINGLE_PROCESS:
        say(f"{'devices':<12}{placement.teacher_text}: {placement.why}")
    say(
        f"{store.folder}: {plural(count, 'position')} of {plural(len(store.required), 'document')}, {width} bytes "
        f"each, {_size(total)}; {state}"
    )


def _size(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 2**29 else f"{count / 2**20:,.1f} MiB"
