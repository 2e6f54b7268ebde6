"""One training run: load, evaluate, train, evaluate again, save.

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
    stages/             the stages before the last, each a run; only with stages
    export/             student and file to serve; only with export
    result.json, samples.md, curves.svg
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import transformers
from accelerate import PartialState
from distill_kernels import tuning

from distill.core import console
from distill.core.ending import end_together
from distill.core.errors import RunError
from distill.core.files import write_text
from distill.core.finished_run import finished_result, require_finished_student
from distill.core.folders import KERNELS_FILE, RECIPE_FILE, check_folder_free, run_folder, runs_folder
from distill.core.launch import drop_accelerate_settings
from distill.core.ranks import broadcast_from_rank0, is_main_process, require_equal_on_ranks, restart_store, world_size
from distill.core.run_lock import RunLock
from distill.evaluation.evaluate import relative_reduction
from distill.generation.from_recipe import require_prompts, rollout_columns, rollouts_from_recipe
from distill.models.dtypes import resolve_device, resolve_precision
from distill.models.gpu_specs import runs_our_kernels
from distill.models.load.save_check import add_turn_end_tokens, check_saving, fix_generation_config
from distill.models.meta_models import warn_of_mismatch
from distill.models.patch.attention_choice import AttentionChoices, read_choices
from distill.objectives.plugin import allowed_plugin
from distill.planning.run_plan import plan_run
from distill.planning.steps import require_settings
from distill.planning.teacher_server import teacher_servers
from distill.recipe import Recipe, dump
from distill.recipe.unusual_values import unusual_settings
from distill.recipe.yaml_text import to_yaml
from distill.reports.first_batch_report import first_batch_report
from distill.reports.run_manifest import record_start
from distill.reports.run_summary import run_summary
from distill.run_phases import Loaded, Opened, Prepared, Start
from distill.run_results import RunResult, RunResults
from distill.teachers.load_context import LoadContext, calibration_of
from distill.teachers.opening import ModelPair, opened_pair, use_plugin
from distill.teachers.registry import source_of
from distill.training.arguments import fused_optimizer, require_optimizer, training_arguments
from distill.training.error_translation import translated
from distill.training.failure_checkpoint import checkpoint_on_failure
from distill.training.lock_file import (
    LOCK_FILE,
    Plain,
    build_lock,
    check_same,
    check_same_run,
    check_same_teachers,
    hash_rows,
    locked_attention,
    locked_data,
    locked_recipe,
    read_lock,
)
from distill.training.quantise import quantise_for_training
from distill.training.resuming import resume_plan, resume_point
from distill.training.step_guard import StepGuard
from distill.training.step_listeners import run_listeners
from distill.training.trainer import DistillationTrainer
from distill.training.transformers_compat import without_known_warnings

__all__ = ["Run", "RunResult", "run"]

log = logging.getLogger(__name__)


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
    drop_accelerate_settings(os.environ)
    with end_together():  # joining included: the others wait there for a rank that was refused
        process = PartialState(cpu=resolve_device(recipe.train).type == "cpu", **restart_store())
        return _run_stages(recipe, process, name=name, resume=resume, lock=lock, plugin=plugin)


def _run_stages(
    recipe: Recipe,
    process: PartialState,
    *,
    name: str | None,
    resume: bool | Literal["unverified"],
    lock: Path | None,
    plugin: Path | None,
) -> RunResult:
    """Run the stages of a recipe that are not finished, and write the file that it names."""
    # the recipe has the hashes of the user's files, as this rank has read them
    require_equal_on_ranks({"recipe": locked_recipe(recipe)})
    if recipe.runs_code or plugin is not None:  # refused before a folder is chosen
        allowed_plugin(recipe.loss, plugin, recipe.data.active_on_policy)
    runs = runs_folder(recipe.output_dir)
    folder = broadcast_from_rank0(lambda: run_folder(recipe.name, name=name, resume=bool(resume), runs=runs))
    *earlier, (folder, recipe) = stages = list(recipe.stage_runs(folder))
    if recipe.export is not None:
        from distill.reports.served_file import check_export  # gguf takes a fifth of a second

        check_export(stages)
    before: tuple[Path, ...] = ()
    for own, stage in earlier:
        finished = bool(resume) and broadcast_from_rank0(functools.partial(finished_result, own)) is not None
        if is_main_process():
            console.print_lines(f"{'stage':<12}{own}{', finished' if finished else ''}")
        if finished:
            _check_finished_stage(stage, own)
        else:
            _run_one(stage, own, process, resume, None, plugin, before)
        # read before the next stage loads it: a damaged student would train on without a word
        broadcast_from_rank0(functools.partial(require_finished_student, own))
        before = (*before, own)
    try:
        result = _run_one(recipe, folder, process, resume, lock, plugin, before)
    except SystemExit:  # of a run that was finished before, and may have been ended while it wrote its file
        _export(recipe, folder)
        raise
    _export(recipe, folder)
    return result


def _export(recipe: Recipe, folder: Path) -> None:
    """Write the file of a finished run where the recipe has one, unless it is there already."""
    there = (folder / "export").is_dir()
    if recipe.export is not None and is_main_process() and not there and finished_result(folder) is not None:
        from distill.reports.served_file import export_run  # gguf takes a fifth of a second

        export_run(folder)


def _check_finished_stage(recipe: Recipe, folder: Path) -> None:
    """Check that a finished stage was made by this recipe, from these data; every rank reads them.

    Its teacher is compared by the next stage that loads it, since that reads the weights anyway.

    Raises:
        ValueError: A setting or the data differ; the message names the first difference.
    """
    path = folder / LOCK_FILE
    lock = read_lock(path)
    resume_plan(recipe, folder, processes=lock["processes"])
    vocabulary = source_of(recipe).vocabulary()
    with console.announced("reading", recipe.data.source):
        splits = vocabulary.read(recipe.data, recipe.train.seed)
    data = locked_data(splits.train, vocabulary, splits.report.digest)
    check_same(
        {"data": lock["data"]}, {"data": data}, f"--resume: {path} (move {folder} away to train the stage again)"
    )


def _run_one(
    recipe: Recipe,
    folder: Path,
    process: PartialState,
    resume: bool | Literal["unverified"],
    lock: Path | None,
    plugin: Path | None,
    earlier: tuple[Path, ...] = (),
) -> RunResult:
    """Run a recipe without stages in `folder`; a stage that has not begun is not resumed."""
    user_code = None
    if recipe.runs_code or plugin is not None:
        user_code = allowed_plugin(recipe.loss, plugin, recipe.data.active_on_policy)
    begun = bool(resume) and broadcast_from_rank0((folder / RECIPE_FILE).is_file)
    with translate_errors(recipe, folder), RunLock(folder) as run_lock, contextlib.ExitStack() as resources:
        phases = Run(recipe, Start(resume if begun else False, lock, user_code, earlier), run_lock, resources, process)
        return phases.conclude(phases.train(phases.open(phases.prepare())))


@dataclass(frozen=True)
class Run:
    """One run in four phases, each of which takes what the one before returns: prepare, open, train, conclude.

    Attributes:
        recipe: Recipe of the run.
        start: Arguments that it was started with.
        run_lock: Lock on the run's folder.
        resources: Closes what the phases open.
        process: State of this process among those of the run.
    """

    recipe: Recipe
    start: Start
    run_lock: RunLock
    resources: contextlib.ExitStack
    process: PartialState

    def prepare(self) -> Prepared:
        """Read the data and plan the run; nothing is written."""
        recipe = self.recipe
        folder = self.run_lock.folder
        device = resolve_device(self.recipe.train)
        resumed = None
        last = None
        if self.start.resume:
            unverified = self.start.resume == "unverified"
            resumed, last = resume_point(recipe, self.run_lock, unverified=unverified)
        if is_main_process():
            for line in unusual_settings(recipe):
                log.warning(line)
            for field, section in (("teacher", recipe.teacher), ("student", recipe.student)):
                if section.config is not None:
                    warn_of_mismatch(section, field)
        require_settings(recipe.train, recipe.data, world_size())  # refused before the data are read
        if recipe.parallel.teacher == "served":
            self.resources.enter_context(teacher_servers(recipe, device))
        # cuBLAS reads the determinism setting at its first GEMM, so it is set before the models are loaded
        (transformers.enable_full_determinism if recipe.train.deterministic else transformers.set_seed)(
            recipe.train.seed
        )
        required = None if self.start.lock is None else read_lock(self.start.lock)
        recorded = read_choices(folder) if resumed else locked_attention(required, str(self.start.lock))
        tuning.preset_choices(tuning.read_choices(folder / KERNELS_FILE) if resumed else {})
        source = source_of(recipe)
        vocabulary = source.vocabulary()
        with console.announced("reading", recipe.data.source):
            splits = vocabulary.read(recipe.data, recipe.train.seed)
        plan = plan_run(recipe, splits, device)
        if not plan.placement.student_sharded:  # a launcher or an earlier run may have set it; the recipe decides
            os.environ.pop("ACCELERATE_USE_FSDP", None)
        calibration = calibration_of(recipe, splits)
        if recipe.data.active_on_policy is not None:
            require_prompts(recipe, vocabulary.tokenizer, splits.report.format)
        attention = AttentionChoices(recipe, recorded)
        precision = resolve_precision(recipe, device)
        context = LoadContext(device, precision, plan.placement, attention, calibration)
        return Prepared(context, source, vocabulary, splits, plan, required, resumed, last)

    def open(self, prepared: Prepared) -> Opened:
        """Load the models, make the trainer and begin the run's folder."""
        recipe = self.recipe
        splits = prepared.splits
        context = prepared.context
        pair, arguments, locked, notes = self._load(prepared)
        trainer = DistillationTrainer(
            pair.student,
            pair.teacher,
            arguments,
            loss=recipe.loss.with_kept_layers(pair.layer_indices),
            vocab_size=pair.vocab_size,
            train_dataset=splits.epochs,
            eval_dataset=splits.validation,
            batch_columns=rollout_columns(recipe),
            processing_class=pair.tokenizer,
            optimizer_cls_and_kwargs=fused_optimizer(recipe, arguments),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        if recipe.student.quantise is not None:
            resumed = prepared.last is not None
            notes.append(quantise_for_training(trainer, recipe.student.quantise, splits.train, resumed=resumed))
        with console.spinner("patching the models, trying the first batch"):
            lines = self._prepare_models(prepared, pair, trainer)
        rollouts = None
        if recipe.data.active_on_policy is not None:
            rollouts = rollouts_from_recipe(
                recipe,
                pair.student,
                pair.tokenizer,
                template=pair.vocabulary.template,
                report=splits.report,
                vocab_size=trainer.objective.columns,
                autocast=context.precision.autocast,
                sharded=context.placement.student_sharded,
                models=[model for _, model in pair.models()],
                readers=pair.vocabulary.answer_readers(),
                code=None if self.start.plugin is None else self.start.plugin.code,
                folder=self.run_lock.folder,
            )
        for listener in run_listeners(trainer, trainer.objective, recipe, pair, rollouts, self.run_lock):
            trainer.add_callback(listener)
        # --- the run's folder is written from here on
        if locked is not None:
            self._begin_folder(prepared, locked)
            self._print_summary(prepared, pair, trainer, [*lines, *notes])
        self.run_lock.share(self.process.wait_for_everyone)
        tuning.record_choices(self.run_lock.folder / KERNELS_FILE)
        results = RunResults(prepared.source, pair, trainer, splits, context.precision.autocast, self.run_lock)
        untrained = results.untrained(resumed=prepared.last is not None)
        if locked is not None:
            record_start(self.run_lock.folder)
        trainer.add_callback(untrained)
        return Opened(trainer, results, untrained, prepared.last)

    def train(self, opened: Opened) -> Opened:
        """Train the student in place.

        Raises:
            SystemExit: Code 0, after a signal and a checkpoint.
        """
        trainer = opened.trainer
        try:
            with without_known_warnings():
                trainer.train(resume_from_checkpoint=str(opened.last) if opened.last else None)
        except SystemExit:
            guard = trainer.listeners.find(StepGuard)
            step = trainer.state.global_step
            if not guard.stopping:  # a plugin's
                raise
            if is_main_process():
                console.print_lines(f"stopped by {guard.ended_by_signal} after step {step}; continue with --resume")
            raise SystemExit(0) from None
        return opened

    def conclude(self, trained: Opened) -> RunResult:
        """Evaluate the trained student and save it."""
        trainer = trained.trainer
        results = trained.results
        self.run_lock.check()
        with checkpoint_on_failure(trainer):
            before, answers = trained.untrained.result()
            with console.announced("evaluating", "the trained student"):
                after = results.held_out()
            reduction = relative_reduction(before, after)
            result = RunResult(self.run_lock.folder, before, after, reduction, trainer.state.global_step)
        with checkpoint_on_failure(trainer, together=True):
            results.save(result, answers)
        self.process.wait_for_everyone()
        return result

    def _load(self, prepared: Prepared) -> Loaded:
        """Load both models, and check them and the data against the lock files."""
        recipe = self.recipe
        context = prepared.context
        splits = prepared.splits
        with console.announced("loading", "teacher and student"):
            pair = self.resources.enter_context(opened_pair(prepared.source, prepared.vocabulary, context))
        problems = prepared.source.data_problems(splits)
        if problems:
            raise ValueError(problems[0])
        if self.start.plugin is not None and self.start.plugin.terms:
            use_plugin(pair.teacher, self.start.plugin)
        locked = self._lock_contents(prepared, pair)
        arguments = training_arguments(
            recipe, self.run_lock.folder, prepared.plan, device=context.device, precision=context.precision
        )
        require_optimizer(arguments, pair.student)
        notes = fix_generation_config(pair.student, "student.model")
        template = pair.vocabulary.template
        if template is not None and "chat" in splits.report.format:
            notes += add_turn_end_tokens(pair.student, pair.tokenizer, template.closings())
        notes += broadcast_from_rank0(lambda: check_saving(pair.student, pair.tokenizer, "student.model"))
        if prepared.resumed is not None:
            notes += prepared.resumed.notes(arguments, pair.student, rows=len(splits.train))
        return Loaded(pair, arguments, locked, notes)

    def _lock_contents(self, prepared: Prepared, pair: ModelPair) -> Plain | None:
        """Return the contents of this run's lock file, compared with those of the locks it must equal.

        Returns:
            None on all processes but the first.
        """
        locked = build_lock(
            self.recipe,
            teacher=pair.teacher,
            student=pair.student,
            vocabulary=pair.vocabulary,
            rows=prepared.splits.train,
            processes=world_size(),
            source=prepared.splits.report.digest,
        )
        # each rank hashes what it has read itself: another file behind the same path would train on without a word
        held_out = {"rows_sha256": hash_rows(prepared.splits.validation)}
        compared = {name: locked[name] for name in ("data", "teacher", "student")}
        require_equal_on_ranks({**compared, "validation": held_out})
        if not is_main_process():
            return None
        if prepared.required is not None:
            check_same(prepared.required, locked, f"--lock {self.start.lock}")
        check_same_teachers((stage / LOCK_FILE for stage in self.start.earlier), locked)
        own = self.run_lock.folder / LOCK_FILE
        if prepared.resumed is not None and own.exists():
            check_same_run(read_lock(own), locked, own)
        return locked

    def _prepare_models(self, prepared: Prepared, pair: ModelPair, trainer: DistillationTrainer) -> list[str]:
        """Put our kernels into the models, try the first held-out batch and return lines on it."""
        recipe = self.recipe
        device = prepared.context.device
        splits = prepared.splits
        if device.type == "cuda":
            from distill.teachers.kernels import patch_models

            patch_models(pair, prepared.context.attention)
        first_rows = list(itertools.islice(splits.validation, trainer.args.per_device_eval_batch_size))
        first = trainer._prepare_inputs(trainer.data_collator(first_rows))
        objective = trainer.objective
        lines = pair.teacher.validate_first_batch(first, objective.student, objective.pairing)
        lines += first_batch_report(trainer, first, splits.train, recipe)
        if runs_our_kernels(device) and not prepared.plan.placement.student_sharded:
            from distill.teachers.kernels import join_models

            join_models(pair)
        return lines

    def _begin_folder(self, prepared: Prepared, locked: Plain) -> None:
        """Write the first files of the run's folder; the first process calls it."""
        folder = self.run_lock.folder
        resumed = prepared.resumed
        attention = prepared.context.attention
        if resumed is None:
            self.run_lock.acquire()
            check_folder_free(folder)
        locked["attention"] = {role: choice["backend"] for role, choice in attention.found.items()}
        write_text(folder / RECIPE_FILE, dump(self.recipe) if resumed is None else resumed.recipe_text(prepared.last))
        if resumed is None or not (folder / LOCK_FILE).exists():
            write_text(folder / LOCK_FILE, to_yaml(locked))
        attention.write(folder)

    def _print_summary(
        self, prepared: Prepared, pair: ModelPair, trainer: DistillationTrainer, lines: list[str]
    ) -> None:
        """Print the summary of the run, and lines that were found while it was opened."""
        plan = prepared.plan
        data = prepared.splits.report
        device = prepared.context.device
        summary = run_summary(prepared.source, pair, trainer.objective, plan=plan, data=data, device=device.type)
        console.print_lines("\n".join([*summary, *lines, f"{'run':<12}{self.run_lock.folder}"]))


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
