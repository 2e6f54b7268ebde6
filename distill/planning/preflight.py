"""`distill check`: what a run will take and whether it can work, before anything is downloaded or spent.

    report = check(recipe, find_gpu("H100"), gpus=8)
    print(report.fits, report.memory.peak, report.advice)

Models are built without memory from their configurations alone, so that parameters are counted, not guessed. Where a
section of the recipe names a `config`, that is read, else the config.json of its `model` (the only file that may be
fetched). Data and tokenizers are looked at where they lie on this machine or in the hub's cache.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from distill.core.units import GIB
from distill.models.load import load_tokenizer
from distill.models.meta import _config, _meta, meta_models
from distill.models.precision import Precision, resolve_precision
from distill.models.shape import USABLE, Shape, shape_of
from distill.models.sharding import ALONE, Sharing
from distill.models.work import NO_WORK, Work, work_of
from distill.planning.caching import what_caching_takes
from distill.planning.devices import Device
from distill.planning.memory import Memory, step_memory
from distill.planning.sharing import SHARDED_FP8, sharing_of
from distill.planning.step_time import asks_teacher, step_time
from distill.planning.steps import FUSED, accumulation_steps, require_arguments, total_steps
from distill.planning.teacher_weights import cannot_be_held, in_host_memory
from distill.recipe import Lora, ModelSection, Recipe, Teacher
from distill.recipe.models import EIGHT_BITS
from distill.teachers.cache.format import MANIFEST, bytes_a_token
from distill.teachers.cache.identity import on_disk
from distill.teachers.cache.read import TeacherCache
from distill.teachers.cache.settings import Settings

log = logging.getLogger(__name__)


@dataclass
class Preflight:
    """What `check` found; sizes in bytes, times in seconds, None where it cannot be known beforehand.

    Attributes:
        device, gpus, strategy: what the run was planned for.
        teacher, student: sizes of the models.
        memory: of one device in a training step.
        fits: whether that fits.
        advice: changes that save memory, the largest first: setting, GiB saved, whether the run then fits.
        steps, accumulation, tokens_per_step: of the run.
        flops_per_step, seconds_per_step, seconds: the arithmetic of a step on all devices, and the time it takes.
        disk, disk_free: bytes for checkpoints and the student, and those left where runs are written.
        host, moved: bytes of an offloaded teacher: in host memory for all devices, and over the bus to each in a step.
        cache: what a teacher on disk holds; empty where a teacher is loaded.
        vocabulary: the verdict in words; `vocabulary_ok` None where the tokenizers are not at hand.
        data: the data's report as lines; `trained_share` of its tokens are learned.
        problems: why the run cannot work as it is.
    """

    device: Device
    gpus: int
    strategy: str
    teacher: Shape
    student: Shape
    memory: Memory
    fits: bool
    accumulation: int
    tokens_per_step: int
    steps: int | None = None
    advice: list[tuple[str, float, bool]] = field(default_factory=list)
    flops_per_step: float | None = None
    seconds_per_step: float | None = None
    disk: float = 0.0
    disk_free: float = 0.0
    host: float = 0.0
    moved: float = 0.0
    cache: str = ""
    vocabulary: str = ""
    vocabulary_ok: bool | None = None
    data: str = ""
    trained_share: float | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float | None:
        """Time for all steps."""
        return None if self.seconds_per_step is None or self.steps is None else self.seconds_per_step * self.steps

    @property
    def ok(self) -> bool:
        """Nothing was found that keeps the run from working."""
        return not self.problems


def _together(teachers: Sequence[Shape]) -> Shape:
    """Several teachers as one: they are all held, and run one after another."""
    first = teachers[0]
    return first._replace(
        parameters=sum(shape.parameters for shape in teachers), linear=sum(shape.linear for shape in teachers)
    )


def planned_precision(recipe: Recipe, device: Device) -> Precision:
    """`resolve_precision` for a device that may not be in this machine."""
    if device.cuda and recipe.train.precision == "auto":
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": "bfloat16"})})
    return resolve_precision(recipe, torch.device("cpu"))


def check(recipe: Recipe, device: Device, *, gpus: int = 1, look_at_data: bool = True) -> Preflight:
    """Work out what `recipe` takes on `gpus` devices such as `device`.

    Args:
        recipe: What to look at.
        device: From `find_device`.
        gpus: How many; `parallel.strategy` says how they share the work.
        look_at_data: Read and tokenise data that are on this machine (the run finds them in the cache).

    Raises:
        ValueError: a setting that no run can have.
    """
    require_arguments(recipe.train.arguments)
    teacher, student = meta_models(recipe)
    others = [_meta(_config(section, "teachers"), "teachers") for section in recipe.teachers[1:]]
    shapes = _together([shape_of(model) for model in (teacher, *others)]), shape_of(student)
    accumulation = accumulation_steps(recipe.train, recipe.data, gpus)
    sharing = _sharing(recipe, *shapes, device, gpus)
    memory = _memory(recipe, *shapes, device, gpus)
    report = Preflight(
        device, gpus, sharing.short, *shapes, memory, _fits(memory, device), accumulation,
        recipe.train.batch_size * recipe.data.max_length * accumulation * gpus, recipe.train.steps,
    )  # fmt: skip
    if not report.fits:
        report.problems.append(_too_much(memory, device))
    report.problems += cannot_be_held(recipe, teacher.config, student.config, cuda=device.cuda)
    if sharing.teacher_sharded and recipe.teacher.dtype == "fp8":
        report.problems.append(f"teacher.dtype: {SHARDED_FP8}; use bfloat16")
    weights = in_host_memory(recipe.teacher, shapes[0], planned_precision(recipe, device))
    report.host, report.moved = weights * gpus, weights * accumulation * asks_teacher(recipe)
    report.advice = advise(recipe, *shapes, device, gpus)
    _check_lengths(recipe, teacher, student, report)
    tokenizer = _check_vocabulary(recipe, report)
    pairs = _check_data(recipe, tokenizer, shapes, report, gpus) if look_at_data else None
    works = [work_of(model, trains=False) for model in (teacher, *others)]
    if recipe.teacher.path is not None:
        works, report.cache = [NO_WORK], _cache_of(recipe, report)
    _time(recipe, works, work_of(student, trains=True), pairs, report)
    _disk(recipe, shapes[1], planned_precision(recipe, device), report)
    return report


def _cache_of(recipe: Recipe, report: Preflight) -> str:
    """What the cache holds; of one that is still to be made by the model beside it, what it will take."""
    section, teacher, device = recipe.teacher, report.teacher, report.device
    assert section.path is not None
    if (section.model is None and section.init != "random") or (Path(section.path).expanduser() / MANIFEST).is_file():
        return on_disk(section.path)
    each = bytes_a_token({"kind": "top_k", "k": Settings().k, "vocabulary": teacher.vocabulary, "dtype": "float16"})
    line = (
        f"not loaded: {section.path}, which is still to be made: distill cache takes {each} bytes a learned token "
        f"(k = {Settings().k}), {each * 1e8 / GIB:.1f} GiB for each 100 M"
    )
    if not device.cuda:
        return line
    takes = what_caching_takes(
        recipe, teacher, report.student, planned_precision(recipe, device), memory_bytes=device.memory_bytes,
        world=report.gpus,
    )  # fmt: skip
    return f"{line}; {takes}"


def _sharing(recipe: Recipe, teacher: Shape, student: Shape, device: Device, gpus: int) -> Sharing:
    """How the devices share the two models, as the run will choose it."""
    asked = recipe.parallel.strategy
    if gpus == 1:
        return ALONE
    if recipe.teacher.is_cached or not device.cuda:
        return Sharing("fsdp" if asked == "fsdp" else "ddp", recipe.parallel.teacher == "sharded", True)
    return sharing_of(
        recipe, teacher, student, planned_precision(recipe, device), memory_bytes=device.memory_bytes,
        usable=USABLE * device.memory_bytes, world=gpus,
    )  # fmt: skip


def _memory(recipe: Recipe, teacher: Shape, student: Shape, device: Device, gpus: int) -> Memory:
    sharing = _sharing(recipe, teacher, student, device, gpus)
    return step_memory(
        recipe, teacher, student, planned_precision(recipe, device), memory_bytes=device.memory_bytes,
        accumulation=accumulation_steps(recipe.train, recipe.data, gpus), world=gpus,
        sharded=sharing.student_sharded, teacher_sharded=sharing.teacher_sharded,
    )  # fmt: skip


def _fits(memory: Memory, device: Device) -> bool:
    return memory.peak <= USABLE * device.memory_bytes


def _too_much(memory: Memory, device: Device) -> str:
    return (
        f"memory: the peak of {memory.peak / GIB:.1f} GiB exceeds {USABLE:.0%} of the "
        f"{device.memory_bytes / GIB:.1f} GiB of {device.name}"
    )


def _with(recipe: Recipe, section: str, **values: Any) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})


def _changes(recipe: Recipe, teacher: Shape, device: Device, gpus: int) -> list[tuple[str, Recipe]]:
    """Settings that may save memory, and the recipe with each."""
    train, changes = recipe.train, []
    if not train.gradient_checkpointing:
        changes.append(("train.gradient_checkpointing=true", _with(recipe, "train", gradient_checkpointing=True)))
    if train.batch_size > 1:
        changes.append(("train.batch_size=1", _with(recipe, "train", batch_size=1)))
    if recipe.data.max_length >= 1024:
        half = recipe.data.max_length // 2
        changes.append((f"data.max_length={half}", _with(recipe, "data", max_length=half)))
    precision = planned_precision(recipe, device)
    if train.optimizer != FUSED:
        changes.append((f"train.optimizer={FUSED}", _with(recipe, "train", optimizer=FUSED)))
    elif train.optimizer_states == "float32" or (train.optimizer_states == "auto" and precision.student.itemsize > 2):
        label = "train.optimizer_states=bfloat16"
        changes.append((label, _with(recipe, "train", optimizer_states="bfloat16")))
    alone = not (recipe.teachers or recipe.teacher.is_cached or recipe.student.vocabulary == "cross")
    whole = recipe.teacher.offload is None and recipe.teacher.dtype not in EIGHT_BITS
    if device.cuda and alone and whole and precision.teacher != torch.float32:
        label = "teacher.dtype=fp8 (moves the teacher a little: the run prints by how much)"
        changes.append((label, _with(recipe, "teacher", dtype="fp8")))
    if device.cuda and whole and not (recipe.teachers or recipe.teacher.is_cached):
        offloaded = _with(recipe, "teacher", offload="cpu")
        moved = in_host_memory(offloaded.teacher, teacher, precision) / GIB
        label = f"teacher.offload=cpu ({moved:.1f} GiB cross the bus in every micro-batch)"
        changes.append((label, _with(offloaded, "parallel", teacher="copied")))
    if precision.teacher == torch.float32 and not recipe.teacher.is_cached:
        changes.append(("teacher.dtype=bfloat16", _with(recipe, "teacher", dtype="bfloat16")))
    if recipe.student.lora is None:
        lora = _with(recipe, "student", lora=Lora(), dtype="bfloat16" if device.cuda else recipe.student.dtype)
        changes.append(("student.lora.r=16 student.dtype=bfloat16", lora))
        if precision.student == torch.float32 and device.cuda:
            how = "rounded at random" if train.optimizer == FUSED else "small updates are lost"
            label = f"student.dtype=bfloat16 (weights without float32 copies: {how})"
            changes.append((label, _with(recipe, "student", dtype="bfloat16")))
    if gpus > 1 and recipe.parallel.strategy != "fsdp":
        changes.append(("parallel.strategy=fsdp", _with(recipe, "parallel", strategy="fsdp")))
    if gpus > 1 and recipe.parallel.teacher != "sharded" and not recipe.teacher.is_cached:
        label = "parallel.strategy=fsdp parallel.teacher=sharded"
        changes.append((label, _with(recipe, "parallel", strategy="fsdp", teacher="sharded")))
    return changes


def advise(recipe: Recipe, teacher: Shape, student: Shape, device: Device, gpus: int) -> list[tuple[str, float, bool]]:
    """Changes that save memory, the largest first: the setting, GiB saved at the peak, whether the run then fits."""
    now = _memory(recipe, teacher, student, device, gpus).peak
    found = []
    for label, changed in _changes(recipe, teacher, device, gpus):
        shape = student
        if (changed.student.lora is None) != (recipe.student.lora is None):
            shape = shape_of(meta_models(changed)[1])
        memory = _memory(changed, teacher, shape, device, gpus)
        if (saved := (now - memory.peak) / GIB) >= 0.05:
            found.append((label, saved, _fits(memory, device)))
    return sorted(found, key=lambda row: -row[1])


def _check_lengths(recipe: Recipe, teacher: Any, student: Any, report: Preflight) -> None:
    for model, name in ((teacher, "teacher"), (student, "student")):
        most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if most and recipe.data.max_length > most:
            report.problems.append(f"data.max_length: {recipe.data.max_length} exceeds the {name}'s {most} positions")


def _check_vocabulary(recipe: Recipe, report: Preflight) -> Any:
    """Compare the tokenizers that are at hand; returns the teacher's."""
    rows = report.teacher.vocabulary, report.student.vocabulary
    teacher, problem = _tokenizer(recipe.teacher, "teacher")
    cross = recipe.student.vocabulary == "cross"
    own = cross or (recipe.student.from_teacher is None and recipe.student.init == "pretrained")
    student, student_problem = _tokenizer(recipe.student, "student") if own else (teacher, problem)
    problem = problem or student_problem
    if teacher is None or student is None:
        report.vocabulary = f"not compared ({problem}); heads of {rows[0]:,} and {rows[1]:,} rows"
        return None if cross else teacher
    if cross:
        from distill.teachers.cross.objective import compare_by_bytes, readers_of

        try:
            readers = readers_of(student, teacher, recipe.data.chat_template)
            report.vocabulary = str(compare_by_bytes(*readers, rows[::-1]))
            report.vocabulary_ok = True
        except ValueError as error:
            report.problems.append(str(error))
        return student if report.vocabulary_ok else None
    from distill.models.vocabulary import compare

    verdict = compare(teacher, student, *rows)
    report.vocabulary = str(verdict)
    try:
        verdict.require()
        report.vocabulary_ok = True
    except ValueError as error:
        report.vocabulary_ok = recipe.student.vocabulary == "extend"
        if not report.vocabulary_ok:
            report.problems.append(f"vocabulary: {error}")
    return teacher


def _tokenizer(section: ModelSection, name: str) -> tuple[Any, str]:
    """The tokenizer if it is on this machine, and why not."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from distill.models.source import resolve_model_source

    stored = isinstance(section, Teacher) and section.is_cached
    random = section.init == "random" and getattr(section, "vocabulary", "keep") != "cross"  # text is read there
    if not stored and (section.model is None or random):
        return None, "random weights"
    try:
        if stored or section.model is None:
            return load_tokenizer(section, name), ""
        source = resolve_model_source(section.model, f"{name}.model")
        cached = source.local or isinstance(
            try_to_load_from_cache(source.location, "tokenizer_config.json", revision=section.revision), str
        )
        return (load_tokenizer(section, name), "") if cached else (None, f"{section.model} is not on this machine")
    except HFValidationError:
        return None, f"{section.model} is not on this machine"
    except ValueError as error:
        return None, str(error)


def _check_data(
    recipe: Recipe, tokenizer: Any, shapes: tuple[Shape, Shape], report: Preflight, gpus: int
) -> float | None:
    """Read data that are on this machine; returns (query, key) pairs a token."""
    from distill.data.load import load_data
    from distill.teachers.cross.data import load_cross_data

    source = recipe.data.source
    synthetic = source.partition(":")[0] == "synthetic"
    local = synthetic or source == "python-stdlib" or Path(source).expanduser().exists()
    if not local or (tokenizer is None and not synthetic):
        # a path that does not exist is a mistake; a name may be a hub's data set
        if not local and Path(source).suffix in (".json", ".jsonl", ".parquet", ".csv", ".txt"):
            report.problems.append(f"data.source: {source} does not exist")
        report.data = f"{source}: not read ({'not on this machine' if not local else 'no tokenizer at hand'})"
        return None
    try:
        if recipe.student.vocabulary == "cross":
            splits = load_cross_data(recipe.data, tokenizer, load_tokenizer(recipe.teacher), seed=recipe.train.seed)
        else:
            splits = load_data(
                recipe.data, None if synthetic else tokenizer, seed=recipe.train.seed,
                vocab_size=min(shape.vocabulary for shape in shapes),
            )  # fmt: skip
    except ValueError as error:
        report.problems.append(str(error).splitlines()[0])
        report.data = f"{source}: cannot be used"
        return None
    if recipe.teacher.path is not None:
        try:
            TeacherCache(recipe.teacher.path).require_data(recipe, splits)
        except ValueError as error:
            report.problems.append(str(error))
    found = splits.report
    report.data, report.trained_share = str(found), found.trained_share
    if found.trained_share < 0.02:
        report.problems.append(f"data: only {found.trained_share:.1%} of the tokens are learned; look at data.train_on")
    report.steps = total_steps(recipe.train, len(splits.train), report.accumulation, gpus)
    return (found.tokens / max(found.documents, 1) + 1) / 2


def _time(
    recipe: Recipe, teachers: Sequence[Work | None], student: Work | None, pairs: float | None, report: Preflight
) -> None:
    known = [work for work in teachers if work is not None]
    if student is None or len(known) < len(teachers):
        return
    tokens = report.tokens_per_step
    share = report.trained_share if report.trained_share is not None else 1.0
    report.flops_per_step, report.seconds_per_step = step_time(
        recipe, known, student, report.device, gpus=report.gpus, tokens=tokens, learned=tokens * share,
        pairs=tokens * (pairs or (recipe.data.max_length + 1) / 2),
        compute=planned_precision(recipe, report.device).compute, moved=report.moved,
    )  # fmt: skip


def _disk(recipe: Recipe, student: Shape, precision: Precision, report: Preflight) -> None:
    """The saved student, and with `save_every` two checkpoints and a third being written."""
    weight = precision.student.itemsize
    lora = student.rank > 0
    final = (student.parameters - student.trained * lora) * weight + 4 * student.trained * lora
    trained = student.trained * (4 if lora else weight)
    kept = (trained if lora else student.parameters * weight) + 2 * trained
    limit = recipe.train.arguments.get("save_total_limit", 2)
    count = (limit if isinstance(limit, int) else 2) + 1
    if recipe.train.save_every and report.steps:
        count = min(count, report.steps // recipe.train.save_every)
    report.disk = final + (count * kept if recipe.train.save_every else 0)
    folder = Path("runs") if Path("runs").is_dir() else Path()
    report.disk_free = float(shutil.disk_usage(folder).free)
    if report.disk > report.disk_free:
        report.problems.append(
            f"disk: {report.disk / GIB:.1f} GiB are needed in runs/, {report.disk_free / GIB:.1f} GiB are free"
        )
