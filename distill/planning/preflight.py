"""`distill check`: memory, time and errors of a run, before anything is downloaded.

    report = check(recipe, find_gpu("H100"), gpus=8)
    print(report.fits, report.memory.peak, report.advice)

Models are built on the meta device from their configurations alone, so that parameters are counted exactly. Where a
section of the recipe names a `config`, that is read, else the config.json of its `model` (the only file that may be
fetched). Data and tokenizers are read where they are on this machine or in the hub's cache.

Of a recipe with `stages:` every stage is planned, of which none need have been trained. A later stage starts from the
student of the one before: its configuration, and its tokenizer where that is on this machine, are written into a
temporary folder in place of the trained student, which gives all sizes without weights.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from distill.core import files
from distill.core.folders import runs_folder
from distill.core.units import GIB
from distill.data.load import Splits
from distill.data.report import DataReport
from distill.data.sources import STDLIB, local_path, missing_file
from distill.models.dtypes import Precision
from distill.models.load.save_check import end_ids, turn_end_problem
from distill.models.load.source import resolve_model_source, resolve_tokenizer_source
from distill.models.meta_models import meta_config, pruned_config, size_note, weights_problem
from distill.models.precision.quantised_formats import formats_of
from distill.models.shape import USABLE, ModelSizes
from distill.objectives.losses import is_soft
from distill.planning.cache_memory import describe_cache_memory
from distill.planning.device_plan import DevicePlan, device_plan
from distill.planning.devices import Device
from distill.planning.layer_memory import layer_problems, router_note
from distill.planning.memory import Memory, step_memory
from distill.planning.placement import place, teacher_server_memory
from distill.planning.run_plan import plan_run
from distill.planning.step_time import RolloutEstimate, StepTokens, estimate_rollouts, step_time
from distill.planning.steps import FUSED, missing_packages, require_arguments, small_data_warnings
from distill.planning.teacher_server import choose_teacher_server, teacher_server_problem, training_gpus
from distill.recipe import Lora, ModelSection, Recipe
from distill.recipe.resume_policy import tokens_of_step
from distill.recipe.unusual_values import unusual_settings
from distill.teachers.base import TeacherPlan
from distill.teachers.opening import length_problem, loading_problems
from distill.teachers.registry import source_of
from distill.teachers.vocabulary import Vocabulary

log = logging.getLogger(__name__)


@dataclass
class Preflight:
    """Result of `check_run`; sizes in bytes, times in seconds, None where unknown beforehand.

    Attributes:
        device, gpus, strategy: hardware and placement of the plan; `training` of the GPUs train, the others
            serve the teacher, each with `teacher_server_bytes` bytes of it.
        memory: Memory of one device in a training step.
        advice: changes that save memory, the largest first: setting, GiB saved, whether the run then fits.
        flops_per_step, seconds_per_step, seconds: the arithmetic of a step on all devices, and the time it takes.
        rollouts: Rollouts of a step, whose seconds are included in the step's; None without on-policy data.
        disk, disk_free: bytes for checkpoints and the student, and those left where runs are written.
        host, moved: bytes of an offloaded teacher: in host memory for all devices, and over the bus to each in a step.
        teacher_text: the teacher's size, or what a cache holds.
        vocabulary: result of comparing the tokenizers; `vocabulary_ok` None where they are not available.
        data: the data's report as lines; `trained_share` of its tokens are trained on.
        problems: errors that keep the run from working.
        notes: warnings: too few data, sizes that are not the model's own.
    """

    device: Device
    gpus: int
    training: int
    strategy: str = field(init=False)  # known once the data are read, as memory is
    teacher: ModelSizes
    student: ModelSizes
    memory: Memory = field(init=False)
    fits: bool = field(init=False)
    accumulation: int
    tokens_per_step: int
    steps: int | None = None
    advice: list[tuple[str, float, bool]] = field(default_factory=list)
    flops_per_step: float | None = None
    seconds_per_step: float | None = None
    rollouts: RolloutEstimate | None = None
    disk: float = 0.0
    disk_free: float = 0.0
    host: float = 0.0
    teacher_server_bytes: float = 0.0
    moved: float = 0.0
    teacher_text: str = ""
    vocabulary: str = ""
    vocabulary_ok: bool | None = None
    data: str = ""
    trained_share: float | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float | None:
        return None if self.seconds_per_step is None or self.steps is None else self.seconds_per_step * self.steps

    @property
    def ok(self) -> bool:
        return not self.problems


def check_run(
    recipe: Recipe, device: Device, *, gpus: int = 1, read_data: bool = True, untrained: bool = False
) -> Preflight:
    """Estimate memory and time of `recipe` on `gpus` devices such as `device`, and check that it can work.

    Args:
        read_data: Read and tokenise data that are on this machine (the run finds them in the cache).
        untrained: `student.model` is a folder without weights, of a student that an earlier stage will make.

    Raises:
        ValueError: a setting that no run can have.
    """
    require_arguments(recipe.train.arguments)
    recipe = choose_teacher_server(device_plan(recipe, device, gpus))
    plan = device_plan(recipe, device, training_gpus(recipe, gpus) if device.cuda else gpus)
    source = plan.source
    student = plan.student
    report = Preflight(
        device,
        gpus,
        plan.world,
        _combined_shape(source.shapes()),
        student.shape,
        plan.accumulation,
        tokens_of_step(recipe, plan.world),
    )
    if recipe.student.compute == "fp8":
        report.notes.append(
            "student.compute: fp8: linear layers large enough to gain, but not the head; the run measures and prints "
            "its effect on the loss and on the gradients"
        )
    report.problems += [*_length_problems(plan), *layer_problems(plan), *plan.source.loss_problems()]
    report.notes += unusual_settings(recipe)
    of_routers = router_note(plan)
    report.notes += [] if of_routers is None else [of_routers]
    if recipe.student.quantise is not None:
        note = formats_of(student.model, recipe.student.quantise).note()
        report.notes += [f"student.quantise: {note}"] if note else []
    report.problems += missing_packages(recipe.train)
    models = {"teacher": source.config_section(), "student": recipe.student}
    report.notes += [note for name, section in models.items() if (note := size_note(section, name))]
    loaded = source.sections if untrained else {**source.sections, "student": recipe.student}
    report.problems += [fault for name, section in loaded.items() if (fault := weights_problem(section, name))]
    vocabulary = _check_vocabulary(source, report)
    splits = _check_data(plan, vocabulary, report) if read_data else None
    facts = None if splits is None else splits.report
    # placed when the data are read, as by a run: of a teacher whose outputs for them are stored no weights are held
    plan = plan._replace(longest=0 if facts is None else facts.longest)
    run = plan_run(plan, 0 if splits is None else len(splits.train))
    sharded = run.placement.teacher_sharded
    report.strategy = run.placement.short
    report.steps = recipe.train.steps if splits is None else run.steps
    report.problems[:0] = loading_problems(source, cuda=device.cuda, sharded=sharded, family=device.family)
    report.memory = memory = _memory(plan)
    report.fits = memory.peak <= plan.usable
    if memory.shared:
        report.notes.append(
            f"teacher and student hold one copy of {memory.shared / GIB:.2f} GiB of frozen weights, counted as the "
            "teacher's"
        )
    if not report.fits:
        report.problems.insert(
            0,
            f"memory: the peak of {memory.peak / GIB:.1f} GiB exceeds {USABLE:.0%} of the "
            f"{device.memory_bytes / GIB:.1f} GiB of {device.name}",
        )
    if recipe.parallel.teacher_gpus is not None:
        _teacher_server(plan, report)
    footprint = plan.footprint(sharded)
    report.host = footprint.host * gpus
    report.moved = footprint.moved * plan.accumulation * is_soft(recipe.loss)
    report.advice = advise(plan)
    report.teacher_text = source.size_text()
    if device.cuda and source.is_to_be_made():
        report.teacher_text += f"; {describe_cache_memory(plan)}"
    _estimate_time(plan, facts, report)
    _estimate_disk(recipe, student.shape, plan.precision, report)
    return report


def _combined_shape(teachers: Sequence[ModelSizes]) -> ModelSizes:
    """Return several teachers' shapes as one: all are held in memory, and run one after another."""
    first = teachers[0]
    return first._replace(
        parameters=sum(shape.parameters for shape in teachers), linear=sum(shape.linear for shape in teachers)
    )


def _teacher_server(plan: DevicePlan, report: Preflight) -> None:
    side = teacher_server_memory(plan)
    count = plan.recipe.parallel.teacher_gpus or 0
    how = "shards" if side.sharded else "a copy each" if count > 1 else "whole"
    report.strategy += f" on {plan.world}, teacher on {count}"
    report.teacher_server_bytes = side.held
    report.notes.append(
        f"parallel.teacher: {count} of {report.gpus} serve the teacher ({how}, {side.held / GIB:.1f} GiB each); a step "
        "takes as long as the slower side"
    )
    if report.device.cuda and (fault := teacher_server_problem(plan, side)):
        report.fits = False
        report.problems.append(fault)


def _memory(plan: DevicePlan) -> Memory:
    placement = place(plan)
    return step_memory(plan, sharded=placement.student_sharded, teacher_sharded=placement.teacher_sharded)


def _with(recipe: Recipe, section: str, **values: object) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})


def _memory_savers(plan: DevicePlan) -> list[tuple[str, Recipe]]:
    """Return settings that may save memory, and the recipe with each."""
    recipe = plan.recipe
    device = plan.device
    precision = plan.precision
    source = plan.source
    train = recipe.train
    changes = list[tuple[str, Recipe]]()

    def offer(section: str, note: str = "", **values: object) -> None:
        label = " ".join(f"{section}.{name}={str(value).lower()}" for name, value in values.items())
        changes.append((label + note, _with(recipe, section, **values)))

    if not train.gradient_checkpointing:
        offer("train", gradient_checkpointing=True)
    if train.batch_size > (least := recipe.data.samples):
        offer("train", batch_size=least)
    if recipe.data.max_length >= 1024:
        offer("data", max_length=recipe.data.max_length // 2)
    if train.optimizer != FUSED:
        offer("train", optimizer=FUSED)
    elif train.optimizer_states == "float32" or (train.optimizer_states == "auto" and precision.student.itemsize > 2):
        offer("train", optimizer_states="bfloat16")
    wide = precision.teacher == torch.float32
    for way in source.smaller(device.family) if device.cuda else []:
        if way.same_targets or not wide:
            moved = device_plan(way.recipe, device, plan.world).footprint().moved
            note = f"{moved / GIB:.1f} GiB cross the bus in every micro-batch" if moved else way.note
            changes.append((f"{way.override} ({note})", way.recipe))
    if wide and source.sections:
        offer("teacher", dtype="bfloat16")
    if recipe.student.lora is None:
        lora = _with(recipe, "student", lora=Lora(), dtype="bfloat16" if device.cuda else recipe.student.dtype)
        changes.append(("student.lora.r=16 student.dtype=bfloat16", lora))
        if precision.student == torch.float32 and device.cuda:
            how = "stochastic rounding" if train.optimizer == FUSED else "small updates round to zero"
            offer("student", f" (weights without float32 copies: {how})", dtype="bfloat16")
    if plan.world > 1 and recipe.parallel.strategy != "fsdp":
        offer("parallel", strategy="fsdp")
    if plan.world > 1 and recipe.parallel.teacher != "sharded" and source.shardable:
        offer("parallel", strategy="fsdp", teacher="sharded")
    return changes


def advise(plan: DevicePlan) -> list[tuple[str, float, bool]]:
    """Return changes that save memory, the largest first: setting, GiB saved at the peak, whether the run then fits."""
    now = _memory(plan).peak
    advice = []
    for label, recipe in _memory_savers(plan):
        changed = device_plan(recipe, plan.device, plan.world)
        changed.source.copy_cached_state(plan.source)
        memory = _memory(changed)
        saved = (now - memory.peak) / GIB
        if saved >= 0.05:
            advice.append((label, saved, memory.peak <= changed.usable))
    return sorted(advice, key=lambda row: -row[1])


def _length_problems(plan: DevicePlan) -> list[str]:
    teacher = meta_config(plan.source.config_section(), "teacher")
    problems = [
        length_problem(plan.recipe, teacher, "teacher"),
        length_problem(plan.recipe, plan.student.config, "student"),
    ]
    return [problem for problem in problems if problem]


def _check_vocabulary(source: TeacherPlan, report: Preflight) -> Vocabulary | None:
    """Compare the tokenizers that are available; return them, or None where they are not or cannot be compared."""
    recipe = source.recipe
    rows = [shape.vocabulary for shape in source.shapes()]
    sections: list[tuple[ModelSection, str]] = [(source.tokenizer_section(), "teacher")]
    if recipe.student.has_tokenizer:
        sections.append((recipe.student, "student"))
    absent = [why for section, name in sections if (why := missing_tokenizer_reason(section, name))]
    heads = f"heads of {rows[0]:,} and {report.student.vocabulary:,} rows"
    try:
        vocabulary = source.vocabulary() if not absent else None
    except ValueError as error:
        absent = [str(error)]
        vocabulary = None
    if vocabulary is None or vocabulary.tokenizer is None:
        report.vocabulary = f"not compared ({absent[0] if absent else 'random tokens'}); {heads}"
        return vocabulary
    try:
        vocabulary.prepare()
        report.vocabulary = vocabulary.match(rows, report.student.vocabulary).vocabulary_note
        report.vocabulary_ok = True
    except ValueError as error:
        report.vocabulary = str(error)
        report.vocabulary_ok = False
        report.problems.append(str(error))
    return vocabulary


def missing_tokenizer_reason(section: ModelSection, name: str) -> str:
    """Return why a model's tokenizer is not available without fetching it; empty where it is local."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if section.model is None:
        return "random weights"
    try:
        source = resolve_tokenizer_source(section.model, f"{name}.model")
        here = source.local or isinstance(
            try_to_load_from_cache(source.location, "tokenizer_config.json", revision=section.revision), str
        )
    except HFValidationError:
        here = False
    except ValueError as error:
        return str(error)
    return "" if here else f"{section.model} is not on this machine"


def _check_data(plan: DevicePlan, vocabulary: Vocabulary | None, report: Preflight) -> Splits | None:
    source = plan.source
    data = plan.recipe.data
    synthetic = data.is_synthetic
    names = {part.data.source: part.field for part in data.parts}
    away = [name for name in names if name != STDLIB and not local_path(name).exists()]
    local = synthetic or not away
    if not local or (vocabulary is None and not synthetic):
        report.problems += [fault for name in away if not synthetic and (fault := missing_file(name, names[name]))]
        report.data = f"{data.source}: not read ({'not on this machine' if not local else 'no tokenizer available'})"
        return None
    try:
        if vocabulary is None:
            vocabulary = source.vocabulary()
        splits = vocabulary.read(data, plan.recipe.train.seed)
    except ValueError as error:
        report.problems.append(str(error).splitlines()[0])
        report.data = f"{data.source}: cannot be used"
        return None
    report.problems += source.data_problems(splits)
    facts = splits.report
    report.data = str(facts)
    report.trained_share = facts.trained_share
    if facts.trained_share < 0.02:
        report.problems.append(
            f"data: only {facts.trained_share:.1%} of the tokens are trained on; check data.train_on"
        )
    report.notes += small_data_warnings(plan.recipe, facts, report.accumulation, report.training)
    problem = _turn_end_problem(plan, vocabulary) if "chat" in facts.format else None
    report.notes += [] if problem is None else [problem]
    return splits


def _turn_end_problem(plan: DevicePlan, vocabulary: Vocabulary) -> str | None:
    """Return why rollouts of the student would not end, by the files of a model on this machine; else None."""
    recipe = plan.recipe
    section = plan.source.config_section() if recipe.student.is_cut else recipe.student
    template = vocabulary.template
    if recipe.data.active_on_policy is None or template is None or section.model is None or section.init == "random":
        return None
    source = resolve_model_source(section.model, "student.model")
    if not source.local or source.gguf_file:
        return None
    ends = end_ids(plan.student.config.eos_token_id)
    path = Path(source.location, "generation_config.json")
    if path.is_file():  # transformers' generation reads it in place of the configuration
        try:
            ends = end_ids(json.loads(path.read_text(encoding="utf-8")).get("eos_token_id"))
        except (ValueError, AttributeError):
            return f"student.model: {path} is damaged: expected a section of JSON"
    return turn_end_problem(ends, vocabulary.tokenizer, template.closings())


def _estimate_time(plan: DevicePlan, facts: DataReport | None, report: Preflight) -> None:
    """Estimate the step time from the tokens that each model reads; a row is as long as its longer input."""
    length = plan.recipe.data.max_length
    facts = facts or DataReport(documents=1, tokens=length, teacher_tokens=length, trained_tokens=length, rows=1)
    rows = report.tokens_per_step / max(facts.tokens, facts.teacher_tokens, 1)  # this share of the data is a step

    def read(tokens: int) -> StepTokens:
        pairs = tokens * (tokens / max(facts.documents, 1) + 1) / 2
        return StepTokens(rows * tokens, rows * facts.trained_tokens, rows * pairs)

    found = step_time(plan, read(facts.tokens), read(facts.teacher_tokens))
    if found:
        report.flops_per_step, report.seconds_per_step = found
    report.rollouts = own = estimate_rollouts(plan, facts, report.tokens_per_step / length)
    if own is not None and report.seconds_per_step is not None:
        report.seconds_per_step = None if own.seconds is None else report.seconds_per_step + own.seconds


def _estimate_disk(recipe: Recipe, student: ModelSizes, precision: Precision, report: Preflight) -> None:
    """The saved student, with `save_every` two checkpoints and a third being written, with `keep_best` the best one."""
    weight = precision.student.itemsize
    lora = student.rank > 0
    final = (student.parameters - student.trained * lora) * weight + 4 * student.trained * lora
    trained = student.trained * (4 if lora else weight)
    checkpoint = (trained if lora else student.parameters * weight) + 2 * trained
    limit = recipe.train.arguments.get("save_total_limit", 2)
    train = recipe.train
    count = (limit if isinstance(limit, int) else 2) + 1 + (train.keep_best is not None)
    written = [every for every in (train.save_every, train.keep_best and train.eval_every) if every]
    if written and report.steps:
        count = min(count, sum(report.steps // every for every in written))
    report.disk = final + (count * checkpoint if written else 0)
    report.disk_free = float(files.free_bytes(runs_folder(recipe.output_dir)))
    if report.disk > report.disk_free:
        free = f"{report.disk_free / GIB:.1f} GiB"
        report.problems.append(f"disk: expected {report.disk / GIB:.1f} GiB free in {recipe.output_dir}, got {free}")


def check_stages(
    recipe: Recipe, device: Device, *, gpus: int = 1, read_data: bool = True
) -> list[tuple[str, Recipe, Preflight]]:
    """Return name, recipe and report of each stage of a recipe; see `check_run`. Problems name the stage."""
    found = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, recipe.name)
        here = str(folder)
        there = str(runs_folder(recipe.output_dir) / recipe.name)
        made: set[str] = set()
        for number, (own, stage) in enumerate(recipe.stage_runs(folder)):
            field = f"stages.{number} ({recipe.stages[number].name})"
            untrained = stage.student.model in made
            try:
                report = check_run(stage, device, gpus=gpus, read_data=read_data, untrained=untrained)
                _write_planned(stage, own / "student", tokenizer=report.vocabulary_ok is not None)
            except ValueError as error:
                raise ValueError(f"{field}: {str(error).replace(here, there)}") from error
            report.problems = [f"{field}: {line.replace(here, there)}" for line in report.problems]
            report.notes = [line.replace(here, there) for line in report.notes]
            report.vocabulary = report.vocabulary.replace(here, there)
            made.add(str(own / "student"))
            found.append((recipe.stages[number].name, stage, report))
    return found


def _write_planned(stage: Recipe, student: Path, *, tokenizer: bool) -> None:
    """Write what the next stage's plan reads of the student of a stage: the files of a trained one but its weights."""
    source = source_of(stage)
    teacher = meta_config(source.config_section(), "teacher") if stage.student.is_cut else None
    student.mkdir(parents=True)
    pruned_config(stage.student, teacher).save_pretrained(student)
    save_file({}, student / "model.safetensors")  # without it the folder would not be taken for a model's
    if tokenizer:
        read = source.vocabulary().tokenizer
        if read is not None:
            read.save_pretrained(student)
