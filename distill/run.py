"""A whole run: load, evaluate, train, evaluate again, save.

    result = run(load("recipes/quickstart.yaml"))

Mistakes of the user are found before the run's folder exists. Then `<output_dir>/<name>/` gets:

    recipe.yaml         the resolved recipe; after a resume with other settings the latest one, changes in comments
    attention.json      the fastest attention back ends on this machine; a resumed run keeps them
    kernels.json        kernel configurations that were autotuned on this GPU, if any; a resumed run keeps them
    lock.yaml           everything that metrics depend on: versions, hashes, seeds; `--lock` compares a run with it
    before.json         held-out metrics and samples from before training, reused by --resume
    manifest.json       checksums of these files and of the final ones
    metrics.jsonl       one row per logging step
    checkpoint-N/       always complete; only with train.save_every
    student/            model, tokenizer and model card, for `from_pretrained`
    rollouts/           on-policy rollouts of some steps; only with data.on_policy.store_every
    result.json, samples.md, curves.svg
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import logging
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import transformers
from accelerate import PartialState
from distill_kernels import tuning

from distill.core import console
from distill.core.environment import device_name, environment
from distill.core.files import write_json, write_text
from distill.core.folders import KERNELS_FILE, RECIPE_FILE, RESULT_FILE, check_folder_free, run_folder, runs_folder
from distill.core.launch import command_line, drop_accelerate_settings
from distill.core.manifest import file_checksums
from distill.core.ranks import broadcast_from_rank0, is_main_process, restart_store, world_size
from distill.core.run_lock import RunLock, now
from distill.evaluation.evaluate import HeldOut, evaluate, gap_closed
from distill.evaluation.samples import write_samples
from distill.generation.from_recipe import add_turn_end_tokens, require_prompts, rollouts_from_recipe
from distill.generation.greedy import generate
from distill.models.attention_choice import AttentionChoices, read_choices
from distill.models.compiling import uncompiled
from distill.models.gpu_specs import runs_our_kernels
from distill.models.load import save_student
from distill.models.precision import Precision, resolve_device, resolve_precision
from distill.models.sharding import is_sharded, whole_student
from distill.models.trial_save import mend_generation_config, try_saving
from distill.planning.sharing import plan_sharing
from distill.planning.steps import accumulation_steps
from distill.recipe import Recipe, dump
from distill.recipe.usual import unusual
from distill.recipe.yaml_text import to_yaml
from distill.reports.first_batch_report import first_look
from distill.reports.run_manifest import BEFORE_FILE, note_beginning, note_end, read_before
from distill.reports.run_summary import Plan, preamble, result_table, show_samples
from distill.teachers.base import LoadContext, TeacherSource
from distill.teachers.identity import model_name
from distill.teachers.opening import ModelPair, opened_pair, use_plugin
from distill.teachers.plugin import allowed_plugin
from distill.teachers.registry import source_of
from distill.training.arguments import fused_optimizer, require_optimizer, training_arguments
from distill.training.checkpoint_validation import find_valid_checkpoint
from distill.training.divergence_monitor import DivergenceMonitor
from distill.training.error_translation import translate_errors
from distill.training.failure_checkpoint import checkpoint_on_failure
from distill.training.lock_file import LOCK_FILE, build_lock, check_same, check_same_run, locked_attention, read_lock
from distill.training.progress import MetricsFile, ProgressReport, read_metrics
from distill.training.resuming import is_finished, print_resume_point, resume_plan, without_known_warnings
from distill.training.trainer import DistillationTrainer

if TYPE_CHECKING:
    from distill.data.load import Splits

log = logging.getLogger(__name__)


class RunResult(NamedTuple):
    """Result of a run.

    Attributes:
        folder: Folder of the run.
        before: Held-out metrics of the untrained student.
        after: Held-out metrics of the trained student.
        gap_closed: Relative reduction of the forward KL by training.
        steps: Number of optimizer steps.
    """

    folder: Path
    before: HeldOut
    after: HeldOut
    gap_closed: float
    steps: int


def run(
    recipe: Recipe,
    *,
    name: str | None = None,
    resume: bool | Literal["unverified"] = False,
    lock: Path | None = None,
    plugin: Path | None = None,
) -> RunResult:
    """Run `recipe`.

    Args:
        recipe: Recipe to run.
        name: Name of the run's folder under `output_dir`; None for the recipe's name or the next free one.
        resume: Continue the run in that folder from its last complete checkpoint; "unverified": also from one without
            a manifest.
        lock: Path of a lock.yaml; the run is refused if anything differs from it.
        plugin: File of loss functions that the recipe was resolved with; its code is run.

    Raises:
        ValueError: Invalid user input, one line per error; nothing has been written then.
        RunError: A failure of the machine or of training, one line with the cure.
        SystemExit: Code 0, after SIGTERM and a checkpoint, or where a finished run has nothing left to do.
    """
    transformers.utils.logging.disable_progress_bar()
    own_terms = allowed_plugin(recipe.loss, plugin, recipe.data.own_answers)
    device = resolve_device(recipe.train)
    drop_accelerate_settings(os.environ)
    runs = runs_folder(recipe.output_dir)
    process = PartialState(cpu=device.type == "cpu", **restart_store())
    folder = broadcast_from_rank0(lambda: run_folder(recipe.name, name=name, resume=bool(resume), runs=runs))
    with translate_errors(recipe, folder), RunLock(folder) as run_lock, contextlib.ExitStack() as resources:
        if recipe.parallel.teacher == "served":
            from distill.planning.served import is_sharded_where_served
            from distill.teachers.server.launched import launched_servers

            sharded = is_sharded_where_served(recipe, device, world_size())
            resources.enter_context(launched_servers(recipe, device, sharded=sharded))
        return _run(recipe, run_lock, resources, process, resume, lock, own_terms)


def _run(
    recipe: Recipe, run_lock: RunLock, resources: contextlib.ExitStack, process: PartialState,
    resume: bool | Literal["unverified"], lock: Path | None, own_terms: Any,
) -> RunResult:  # fmt: skip
    # --- recipe, resume point, placement
    folder, device, last, resumed = run_lock.folder, resolve_device(recipe.train), None, None
    if resume:
        if is_main_process():
            run_lock.acquire()
        resumed = resume_plan(recipe, folder, processes=world_size())
        last, refused = broadcast_from_rank0(lambda: find_valid_checkpoint(folder, unverified=resume == "unverified"))
        if is_main_process():
            print_resume_point(folder, last, [*refused, *resumed.lines()])
        if is_finished(folder, last):
            raise SystemExit(0)
    precision = resolve_precision(recipe, device)
    accumulation = accumulation_steps(recipe.train, recipe.data, world_size())
    # cuBLAS reads the determinism setting at its first GEMM, so it is set before the models are loaded
    (transformers.enable_full_determinism if recipe.train.deterministic else transformers.set_seed)(recipe.train.seed)
    sharing = plan_sharing(recipe, device, world_size())
    if is_main_process():
        for line in unusual(recipe):
            log.warning(line)
        for field, section in (("teacher", recipe.teacher), ("student", recipe.student)):
            if section.config is not None:
                from distill.models.meta import follows_model

                follows_model(section, field)  # warns if `config` is that of another model
    if not sharing.student_sharded:  # set by a launcher or an earlier run in this process; the recipe decides
        os.environ.pop("ACCELERATE_USE_FSDP", None)
    required = None if lock is None else read_lock(lock)
    attention = AttentionChoices(recipe, read_choices(folder) if resume else locked_attention(required, str(lock)))
    tuning.preset_choices(tuning.read_choices(folder / KERNELS_FILE) if resume else {})

    # --- data and models, nothing written yet
    source = source_of(recipe)
    vocabulary = source.vocabulary()
    with console.spinner(f"reading {recipe.data.source}"):
        splits = vocabulary.read(recipe.data, recipe.train.seed)
    require_prompts(recipe, vocabulary.tokenizer, splits.report.format)
    with console.spinner("loading teacher and student"):
        context = LoadContext(device, precision, sharing, attention)
        pair = resources.enter_context(opened_pair(source, vocabulary, context))
    if problems := source.data_problems(splits):
        raise ValueError(problems[0])
    if own_terms is not None and own_terms.terms:
        use_plugin(pair.teacher, own_terms)
    locked = None
    if is_main_process() or pair.teacher.is_collective:  # collective: a sharded teacher is gathered for its hash
        locked = build_lock(
            recipe, teacher=pair.teacher, student=pair.student, tokenizer=pair.tokenizer, rows=splits.train,
            processes=world_size(), source=splits.report.digest,
        )  # fmt: skip
    locked = locked if is_main_process() else None
    if required is not None and locked is not None:
        check_same(required, locked, f"--lock {lock}")
    if resume and locked is not None and (folder / LOCK_FILE).exists():
        check_same_run(read_lock(folder / LOCK_FILE), locked, folder / LOCK_FILE)
    arguments = training_arguments(
        recipe, folder, rows=len(splits.train), device=device, precision=precision,
        student_sharded=sharing.student_sharded,
    )  # fmt: skip
    require_optimizer(arguments, pair.student)
    notes = mend_generation_config(pair.student, "student.model")
    notes += add_turn_end_tokens(recipe, pair.student, vocabulary.tokenizer, splits.report.format)
    notes += broadcast_from_rank0(lambda: try_saving(pair.student, pair.tokenizer, "student.model"))
    notes += [] if resumed is None else resumed.notes(arguments, pair.student, rows=len(splits.train))
    progress = ProgressReport()
    trainer = DistillationTrainer(
        pair.student, pair.teacher, arguments, loss=recipe.loss, vocab_size=pair.vocab_size,
        train_dataset=splits.epochs, eval_dataset=splits.validation,
        processing_class=pair.tokenizer,
        callbacks=[MetricsFile(folder / "metrics.jsonl", run_lock.check), progress],
        optimizer_cls_and_kwargs=fused_optimizer(recipe, arguments),
    )  # fmt: skip
    progress.measure = trainer.objective.measure
    trainer.add_callback(DivergenceMonitor(recipe, trainer.objective.columns))
    trainer.remove_callback(transformers.PrinterCallback)
    has_kernels = runs_our_kernels(device)
    if device.type == "cuda":
        from distill.teachers.kernels import patch_models

        patch_models(pair, attention)
    first_rows = list(itertools.islice(splits.validation, arguments.per_device_eval_batch_size))
    first = trainer._prepare_inputs(trainer.data_collator(first_rows))
    first_batch_lines = pair.teacher.validate_first_batch(first, trainer.objective.student, trainer.objective.pairing)
    first_batch_lines += first_look(trainer, first, splits.train, recipe)
    if device.type == "cuda" or recipe.train.compile:
        from distill.teachers.kernels import prepare_models

        prepare_models(pair, joins=has_kernels and not sharing.student_sharded, compiles=recipe.train.compile)
    trainer.on_policy = rollouts_from_recipe(
        recipe, pair.student, pair.tokenizer, report=splits.report, vocab_size=trainer.objective.columns,
        autocast=precision.autocast, sharded=sharing.student_sharded,
        models=[model for _, model in pair.models()], reader=pair.vocabulary.answer_reader(),
        code=None if own_terms is None else own_terms.code, folder=folder,
    )  # fmt: skip
    if recipe.data.on_policy is not None:
        from distill.training.rollout_files import store_rollouts

        store_rollouts(trainer, recipe.data.on_policy, folder)
    if device.type == "cuda" and (recipe.train.cuda_graph is True or (recipe.train.cuda_graph and has_kernels)):
        from distill.training.cuda_graphs import CudaGraphCallback

        trainer.add_callback(
            CudaGraphCallback(pair.models(), always=recipe.train.cuda_graph is True, mean=trainer.mean)
        )
    tokens = recipe.train.batch_size * recipe.data.max_length * accumulation * world_size()
    plan = Plan(arguments.max_steps, tokens, accumulation, world_size())

    # --- the run's folder is written from here on
    if locked is not None:
        if not resume:
            run_lock.acquire()
            check_folder_free(folder)
        locked["attention"] = {role: choice["backend"] for role, choice in attention.found.items()}
        write_text(folder / RECIPE_FILE, dump(recipe) if resumed is None else resumed.recipe_text(last))
        if not (resume and (folder / LOCK_FILE).exists()):
            write_text(folder / LOCK_FILE, to_yaml(locked))
        attention.write(folder)
        lines = preamble(
            source, pair, trainer.objective, plan=plan, data=splits.report, device=str(device.type),
            sharing=str(sharing) if world_size() > 1 else None,
        )  # fmt: skip
        console.print_lines("\n".join([*lines, *first_batch_lines, *notes, f"{'run':<12}{folder}"]))
    run_lock.share(process.wait_for_everyone)
    tuning.record_choices(folder / KERNELS_FILE)
    before, answers = _before(recipe, pair, trainer, splits, precision, run_lock)
    if locked is not None:
        note_beginning(folder)

    # --- train
    try:
        with without_known_warnings():
            trainer.train(resume_from_checkpoint=str(last) if last else None)
    finally:
        progress.stop()
    if trainer.step_guard.stopping and trainer.state.global_step < arguments.max_steps:
        if is_main_process():
            step = trainer.state.global_step
            console.print_lines(
                f"stopped by {trainer.step_guard.ended_by_signal} after step {step}; continue with --resume"
            )
        raise SystemExit(0)

    # --- evaluate and save
    run_lock.check()
    exports = recipe.student.lora is None or recipe.student.model is not None
    with checkpoint_on_failure(trainer, exports=exports):
        _announce("measuring", "the trained student")
        after = _held_out(recipe, pair, trainer, splits, precision)
        result = RunResult(folder, before, after, gap_closed(before, after), trainer.state.global_step)
    with checkpoint_on_failure(trainer, together=True, exports=exports):
        _save(source, pair, trainer, splits, result, answers)
    process.wait_for_everyone()
    return result


def _announce(activity: str, what: str) -> None:
    """Print an activity that takes a while, before it begins."""
    if is_main_process():
        console.print_lines(f"{activity:<12}{what}")


def _held_out(
    recipe: Recipe, pair: ModelPair, trainer: DistillationTrainer, splits: Splits, precision: Precision
) -> HeldOut:
    """Return metrics on the held-out rows; a student sharded by FSDP is called through its wrapper."""
    return evaluate(
        trainer.model_wrapped if trainer.is_fsdp_enabled else trainer.model,
        pair.teacher,
        splits.validation,
        batch_size=recipe.train.batch_size,
        autocast=precision.autocast,
        objective=trainer.objective,
    )


def _before(
    recipe: Recipe,
    pair: ModelPair,
    trainer: DistillationTrainer,
    splits: Splits,
    precision: Precision,
    run_lock: RunLock,
) -> tuple[HeldOut, dict[str, list[str]]]:
    """Return metrics and samples from before training; a resumed run reuses those of its first start."""
    if (found := read_before(run_lock.folder, trainer.objective.measure)) is not None:
        return found
    _announce("measuring", "the student before training, on held-out rows")
    before = _held_out(recipe, pair, trainer, splits, precision)
    answers: dict[str, list[str]] = {}
    if recipe.generate.prompts:
        _announce("answering", "the prompts of the samples, teacher and student")
        with uncompiled():
            texts = pair.teacher.respond(recipe.generate.prompts, recipe.generate)
        answers |= {} if texts is None else {"teacher": texts}
        if pair.tokenizer is not None and (is_main_process() or is_sharded(pair.student)):
            answers["before"] = _generate(recipe, pair, pair.student)
    if is_main_process():
        measure = trainer.objective.measure
        command = shlex.join(["distill", *command_line]) if command_line else None
        record: dict[str, Any] = {
            "started": run_lock.started,
            "command": command,
            "device": device_name(trainer.args.device),
        }
        record |= {"held_out": measure.written(before._asdict()), "measure": measure, "answers": answers}
        write_json(run_lock.folder / BEFORE_FILE, console.to_jsonable(record))
    return before, answers


def _generate(recipe: Recipe, pair: ModelPair, student: Any) -> list[str]:
    # greedy: no random numbers are used, so training is the same with and without samples
    with uncompiled():
        return generate(student, pair.tokenizer, recipe.generate.prompts, recipe.generate.max_new_tokens)


def _save(
    source: TeacherSource, pair: ModelPair, trainer: DistillationTrainer, splits: Splits, result: RunResult,
    answers: dict[str, list[str]],
) -> None:  # fmt: skip
    """Save the student with its model card, samples, curves and the result; print the table."""
    from distill.reports.curves import draw_curves
    from distill.reports.model_card import hub_ids, licence_of, write_model_card

    recipe, folder, sharded = source.recipe, result.folder, trainer.is_fsdp_enabled
    student: Any = trainer.accelerator.unwrap_model(trainer.model)
    if pair.tokenizer is not None and recipe.generate.prompts and (is_main_process() or sharded):
        _announce("answering", "the prompts of the samples again")
        answers["after"] = _generate(recipe, pair, student)
    if sharded:
        student = whole_student(trainer.accelerator, student)
    if not is_main_process():
        return
    save_student(student, pair.tokenizer, folder / "student", recipe.student.lora)
    measure = trainer.objective.measure
    write_model_card(
        folder / "student",
        name=recipe.name,
        teacher=source.title(),
        student=model_name(recipe.student),
        data=splits.report.source,
        recipe=dump(recipe),
        before=result.before,
        after=result.after,
        versions={name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        hub_models=hub_ids(*(s.model for s in (recipe.student, recipe.teacher, *source.sections.values()))),
        datasets=hub_ids(*(part.data.source for part in recipe.data.parts), recipe.data.validation.source),
        licence=licence_of(recipe.student.model or recipe.teacher.model or ""),
        measure=measure,
    )
    if answers:
        write_samples(folder / "samples.md", recipe.generate.prompts, answers)
        show_samples(recipe.generate.prompts, answers)
    draw_curves(read_metrics(folder / "metrics.jsonl"), folder / "curves.svg", title=folder.name, measure=measure)
    heading, rows, closing = result_table(result.before, result.after, measure)
    console.print_lines("")
    console.show_table(heading, rows, numbers=True)
    console.print_lines(f"{closing}\nstudent     {folder / 'student'}")
    summary = {
        "before": measure.written(result.before._asdict()),
        "after": measure.written(result.after._asdict()),
        "measure": measure,
        "gap_closed": result.gap_closed,
        "steps": result.steps,
        "finished": now(),
        "prompts": recipe.generate.prompts,
        "answers": answers,
        "environment": environment(),
        "files": file_checksums(folder / "student"),
    }
    write_json(folder / RESULT_FILE, console.to_jsonable(summary))
    note_end(folder)
