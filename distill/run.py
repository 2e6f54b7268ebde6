"""One training run: load, evaluate, train, evaluate again, save.

    result = run(load("recipes/quickstart.yaml"))

Mistakes of the user are found before the run's folder exists. Then `<output_dir>/<name>/` gets:

    recipe.yaml         the resolved recipe; after a resume with other settings the latest one, changes in comments
    attention.json      the fastest attention back ends on this machine; a resumed run keeps them
    kernels.json        kernel configurations that were autotuned on this GPU, if any; a resumed run keeps them
    lock.yaml           everything that metrics depend on: versions, hashes, seeds; `--lock` compares a run with it
    before.json         start of the run; held-out metrics and samples from before training, measured after it
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import transformers
from accelerate import PartialState
from distill_kernels import tuning
from torch import nn

from distill.core import console
from distill.core.files import write_text
from distill.core.folders import KERNELS_FILE, RECIPE_FILE, check_folder_free, run_folder, runs_folder
from distill.core.heartbeat import end_together
from distill.core.interrupts import RunStopped, stop_run_on_sigterm
from distill.core.launch import drop_accelerate_settings
from distill.core.ranks import broadcast_from_rank0, is_main_process, require_equal_on_ranks, restart_store, world_size
from distill.core.run_lock import RunLock
from distill.evaluation.evaluate import relative_reduction
from distill.generation.decode_loop import DecodeEngine
from distill.generation.from_recipe import require_prompts, rollout_columns, rollouts_from_recipe
from distill.generation.option_scores import OptionScorer
from distill.generation.tasks import BATCH, StudentTasks, TaskQuestions, read_tasks
from distill.models.dtypes import resolve_device, resolve_precision
from distill.models.gpu_specs import runs_our_kernels
from distill.models.load.save_check import add_turn_end_tokens, check_saving, fix_generation_config
from distill.models.meta_models import warn_of_mismatch
from distill.models.patch.attention_choice import AttentionChoices, read_attention_choices
from distill.objectives.plugin import allowed_plugin
from distill.planning.device_plan import DevicePlan
from distill.planning.devices import device_here
from distill.planning.run_plan import plan_run
from distill.planning.steps import require_settings
from distill.planning.teacher_server import teacher_servers
from distill.recipe import Recipe, dump
from distill.recipe.unusual_values import unusual_settings
from distill.recipe.yaml_text import to_yaml
from distill.reports.first_batch_report import first_batch_report
from distill.reports.run_manifest import Measured, record_start
from distill.reports.run_summary import run_summary
from distill.run_results import RunResult, RunResults, earlier_measurement
from distill.run_stages import run_stages
from distill.teachers.load_context import LoadContext, calibration_of
from distill.teachers.opening import ModelPair, opened_pair, use_plugin
from distill.teachers.registry import source_of
from distill.teachers.rows.context.rollouts import run_contexts
from distill.training.arguments import fused_optimizer, require_optimizer, training_arguments
from distill.training.checkpoints import checkpoint_on_failure
from distill.training.error_translation import translate_errors
from distill.training.lock_file import (
    LOCK_FILE,
    Plain,
    build_lock,
    check_same,
    check_same_run,
    check_same_teachers,
    locked_attention,
    locked_recipe,
    read_lock,
)
from distill.training.metrics import held_out_figures
from distill.training.quantise import quantise_for_training
from distill.training.resuming import resume_point
from distill.training.step_guard import StoppedBySignal
from distill.training.step_listeners import HeldOutSets, TaskFigures, run_listeners
from distill.training.trainer import DistillationTrainer
from distill.training.transformers_compat import without_known_warnings
from distill.training.untrained import UntrainedWeights

if TYPE_CHECKING:
    from distill.data.load import Splits
    from distill.data.stream import RowStream, StreamedRows
    from distill.generation.on_policy import OnPolicyRollouts
    from distill.objectives.plugin import Plugin
    from distill.planning.run_plan import RunPlan
    from distill.teachers.base import TeacherPlan
    from distill.teachers.vocabulary import Vocabulary
    from distill.training.resuming import ResumePlan

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
        plugin: File of loss functions, token weights, rewards or an environment that the recipe was resolved with; its
            code is run.

    Raises:
        ValueError: Invalid user input, one line per error; nothing has been written then.
        RunError: A failure of the machine or of training, one line with the cure.
        SystemExit: Code 0, after SIGTERM and a checkpoint, or where a finished run has nothing left to do.
    """
    transformers.utils.logging.disable_progress_bar()
    drop_accelerate_settings(os.environ)
    with end_together():  # joining included: the others wait there for a rank that was refused
        process = PartialState(cpu=resolve_device(recipe.train).type == "cpu", **restart_store())
        # the recipe has the hashes of the user's files, as this rank has read them
        require_equal_on_ranks({"recipe": locked_recipe(recipe)})
        if recipe.runs_code or plugin is not None:  # refused before a folder is chosen
            allowed_plugin(recipe.loss, plugin, recipe.data.active_on_policy, recipe.eval.tasks)
        runs = runs_folder(recipe.output_dir)
        folder = broadcast_from_rank0(lambda: run_folder(recipe.name, name=name, resume=bool(resume), runs=runs))
        run_one = functools.partial(_run_one, process=process, resume=resume, plugin=plugin)
        return run_stages(recipe, folder, run_one, resumes=bool(resume), lock=lock)


def _run_one(
    recipe: Recipe,
    folder: Path,
    earlier: tuple[Path, ...],
    lock: Path | None,
    *,
    process: PartialState,
    resume: bool | Literal["unverified"],
    plugin: Path | None,
) -> RunResult:
    """Run one stage in `folder`; a stage that has not begun is not resumed."""
    user_code = None
    if recipe.runs_code or plugin is not None:
        user_code = allowed_plugin(recipe.loss, plugin, recipe.data.active_on_policy, recipe.eval.tasks)
    begun = bool(resume) and broadcast_from_rank0((folder / RECIPE_FILE).is_file)
    with translate_errors(recipe, folder), RunLock(folder) as run_lock, contextlib.ExitStack() as resources:
        phases = Run(recipe, resume if begun else False, lock, user_code, earlier, run_lock, resources, process)
        prepared = phases.prepare()
        opened = phases.open(prepared)
        trained = phases.train(opened)
        # training has a handler of its own; of several processes one that left would let the others wait for it
        stops = stop_run_on_sigterm("measuring the trained student") if world_size() == 1 else contextlib.nullcontext()
        with stops:
            return phases.conclude(trained)


class Prepared(NamedTuple):
    """A run whose recipe and data are known; no weights have been read.

    Attributes:
        tasks: Tasks that the student answers, with their prompts.
        context: Device, dtypes, placement and attention back ends that the models are loaded with.
        source: Source of the teacher.
        vocabulary: Tokenizers of teacher and student.
        splits: Training and held-out data.
        plan: Placement and number of steps.
        required: Contents of the lock file that the run must agree with; None without one.
        resumed: Changes since the start of a resumed run; None for a new one.
        last: Checkpoint that a resumed run continues from; None for step 0.
    """

    tasks: Sequence[TaskQuestions]
    context: LoadContext
    source: TeacherPlan
    vocabulary: Vocabulary
    splits: Splits
    plan: RunPlan
    required: Plain | None
    resumed: ResumePlan | None
    last: Path | None


class Opened(NamedTuple):
    """A run whose trainer is made and whose folder is written.

    Attributes:
        trainer: Trainer of the student.
        results: Measures the student and writes the results.
        untrained: Measurement of the untrained student, or the weights with which it is made after training.
        last: Checkpoint to continue from; None for step 0.
    """

    trainer: DistillationTrainer
    results: RunResults
    untrained: Measured | UntrainedWeights
    last: Path | None


@dataclass(frozen=True)
class Run:
    """One run in four phases, each of which takes what the one before returns: prepare, open, train, conclude.

    Attributes:
        recipe: Recipe of the run.
        resume: Whether it continues an earlier run; "unverified": also from a checkpoint without a manifest.
        lock: Path of a lock.yaml that it must agree with.
        plugin: Loss functions, token weights, rewards or an environment of the user.
        earlier: Folders of the stages before this one; empty for a run without stages, and for its first.
        run_lock: Lock on the run's folder.
        resources: Closes what the phases open.
        process: State of this process among those of the run.
    """

    recipe: Recipe
    resume: bool | Literal["unverified"]
    lock: Path | None
    plugin: Plugin | None
    earlier: tuple[Path, ...]
    run_lock: RunLock
    resources: contextlib.ExitStack
    process: PartialState

    # ------------------------------------------------------------------ prepare

    def prepare(self) -> Prepared:
        """Read the data and plan the run; nothing is written."""
        recipe = self.recipe
        device = resolve_device(recipe.train)
        resumed = None
        last = None
        if self.resume:
            resumed, last = resume_point(recipe, self.run_lock, unverified=self.resume == "unverified")
        if is_main_process():
            self._warn_of_settings()
        require_settings(recipe.train, recipe.data, world_size())  # refused before the data are read
        if recipe.parallel.teacher == "served":
            self.resources.enter_context(teacher_servers(recipe, device))
        # cuBLAS reads the determinism setting at its first GEMM, so it is set before the models are loaded
        if recipe.train.deterministic:
            transformers.enable_full_determinism(recipe.train.seed)
        else:
            transformers.set_seed(recipe.train.seed)
        required = None if self.lock is None else read_lock(self.lock)
        attention = AttentionChoices(recipe, self._recorded_choices(required, is_resumed=resumed is not None))
        source = source_of(recipe)
        vocabulary = source.vocabulary()
        tasks = read_tasks(recipe, None if self.plugin is None else self.plugin.code)
        with console.announced("reading", recipe.data.source):
            splits = vocabulary.read(recipe.data, recipe.train.seed)
        precision = resolve_precision(recipe, device)
        devices = DevicePlan(recipe, source, precision, device_here(device), world_size(), splits.report.longest)
        plan = plan_run(devices, len(splits.train))
        if not plan.placement.student_sharded:  # a launcher or an earlier run may have set it; the recipe decides
            os.environ.pop("ACCELERATE_USE_FSDP", None)
        if recipe.data.active_on_policy is not None:
            require_prompts(recipe, vocabulary.tokenizer, splits.report.format)
        context = LoadContext(device, precision, plan.placement, attention, calibration_of(recipe, splits))
        return Prepared(tasks, context, source, vocabulary, splits, plan, required, resumed, last)

    def _warn_of_settings(self) -> None:
        recipe = self.recipe
        for line in unusual_settings(recipe):
            log.warning(line)
        for field, section in (("teacher", recipe.teacher), ("student", recipe.student)):
            if section.config is not None:
                warn_of_mismatch(section, field)

    def _recorded_choices(self, required: Plain | None, *, is_resumed: bool) -> Plain:
        """Return the attention back ends of an earlier start or a lock, and preset the kernels of an earlier start."""
        folder = self.run_lock.folder
        tuning.preset_choices(tuning.read_choices(folder / KERNELS_FILE) if is_resumed else {})
        return read_attention_choices(folder) if is_resumed else locked_attention(required, str(self.lock))

    # ------------------------------------------------------------------ open

    def open(self, prepared: Prepared) -> Opened:
        """Load the models, make the trainer and begin the run's folder."""
        pair = self._load_models(prepared)
        locked = self._checked_lock(prepared, pair)
        trainer, notes = self._make_trainer(prepared, pair)
        with console.spinner("patching the models, trying the first batch"):
            lines = self._try_first_batch(prepared, pair, trainer)
        rollouts = self._make_rollouts(prepared, pair, trainer)
        tasks = self._make_tasks(prepared, pair, trainer)
        if tasks is not None:
            trainer.add_callback(TaskFigures(trainer, tasks))
        if prepared.splits.sets:
            trainer.add_callback(HeldOutSets(trainer, prepared.splits.sets))
        for listener in run_listeners(trainer, trainer.objective, self.recipe, pair, rollouts, self.run_lock):
            trainer.add_callback(listener)
        # --- the run's folder is written from here on
        summary: list[str] = []
        if is_main_process():
            self._begin_folder(prepared, locked)
            summary = [*self._summary(prepared, pair, trainer), *lines, *notes]
            console.print_lines("\n".join([*summary, f"{'run':<12}{self.run_lock.folder}"]))
        self.run_lock.share(self.process.wait_for_everyone)
        tuning.record_choices(self.run_lock.folder / KERNELS_FILE)
        autocast = prepared.context.precision.autocast
        results = RunResults(prepared.source, pair, trainer, prepared.splits, autocast, self.run_lock, tasks, summary)
        untrained = results.untrained()  # before a checkpoint replaces the weights
        if is_main_process():
            record_start(self.run_lock.folder)
        return Opened(trainer, results, untrained, prepared.last)

    def _load_models(self, prepared: Prepared) -> ModelPair:
        with console.announced("loading", "teacher and student"):
            pair = self.resources.enter_context(opened_pair(prepared.source, prepared.vocabulary, prepared.context))
        for problem in prepared.source.data_problems(prepared.splits):
            raise ValueError(problem)
        if self.plugin is not None and self.plugin.terms:
            use_plugin(pair.teacher, self.plugin)
        return pair

    def _checked_lock(self, prepared: Prepared, pair: ModelPair) -> Plain:
        """Return the contents of this run's lock file, the same on every rank and as every lock that binds it."""
        splits = prepared.splits
        locked = build_lock(
            self.recipe,
            teacher=pair.teacher,
            student=pair.student,
            vocabulary=pair.vocabulary,
            splits=splits,
            processes=world_size(),
        )
        # each rank hashes what it has read itself: another file behind the same path would train on without a word
        if prepared.tasks:
            locked["tasks"] = {each.name: each.sha256 for each in prepared.tasks}
        compared = ("data", "teacher", "student", "tasks")
        require_equal_on_ranks({name: locked[name] for name in compared if name in locked})
        if not is_main_process():
            return locked
        if prepared.required is not None:
            check_same(prepared.required, locked, f"--lock {self.lock}")
        check_same_teachers((stage / LOCK_FILE for stage in self.earlier), locked)
        own = self.run_lock.folder / LOCK_FILE
        if prepared.resumed is not None and own.exists():
            check_same_run(read_lock(own), locked, own)
        return locked

    def _make_trainer(self, prepared: Prepared, pair: ModelPair) -> tuple[DistillationTrainer, list[str]]:
        """Return the trainer, and lines on what was done to the student."""
        recipe = self.recipe
        splits = prepared.splits
        context = prepared.context
        student = pair.student
        arguments = training_arguments(
            recipe, self.run_lock.folder, prepared.plan, device=context.device, precision=context.precision
        )
        require_optimizer(arguments, student)
        notes = fix_generation_config(student, "student.model")
        template = pair.vocabulary.template
        if template is not None and "chat" in splits.report.format:
            notes += add_turn_end_tokens(student, pair.tokenizer, template.closings())
        notes += broadcast_from_rank0(lambda: check_saving(student, pair.tokenizer, "student.model"))
        if prepared.resumed is not None:
            notes += prepared.resumed.notes(arguments, student, rows=len(splits.train))
        trainer = DistillationTrainer(
            student,
            pair.teacher,
            arguments,
            loss=recipe.loss.with_kept_layers(pair.layer_indices),
            vocab_size=pair.vocab_size,
            train_dataset=splits.epochs if splits.stream is None else self._streamed(splits.stream, prepared.plan),
            eval_dataset=splits.validation,
            batch_columns=rollout_columns(recipe),
            token_weights=None if self.plugin is None else self.plugin.token_weights,
            processing_class=pair.tokenizer,
            optimizer_cls_and_kwargs=fused_optimizer(recipe, arguments),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        self._require_figure(trainer, splits)
        if recipe.student.quantise is not None:
            resumed = prepared.last is not None
            # The checkpoint has the weights; but where the run was stopped before the untrained student was measured,
            # that is measured as the run began.
            begins = not resumed or earlier_measurement(self.run_lock.folder, recipe, trainer, splits) is None
            section = recipe.student.quantise
            notes.append(quantise_for_training(trainer, section, splits.train, resumed=resumed, begins=begins))
        return trainer, notes

    def _streamed(self, stream: RowStream, plan: RunPlan) -> StreamedRows:
        """Return the rows of all steps of the run, of which this process reads its share."""
        rank = self.process.process_index
        count = plan.steps * plan.accumulation * plan.rows * plan.world
        return stream.rows(count, batch_rows=plan.rows, rank=rank, ranks=plan.world)

    def _require_figure(self, trainer: DistillationTrainer, splits: Splits) -> None:
        """Check that evaluations have the figure of `train.keep_best`, by the loss and the held-out rows."""
        figure = self.recipe.train.keep_best
        if figure is None:
            return
        objective = trainer.objective
        of_the_loss = held_out_figures(objective.divergence, objective.routes)
        measured = {f"{task.name}_accuracy" for task in self.recipe.eval.tasks}
        for prefix, rows in splits.held_out.items():
            # a route of which no document is held out has no figures
            found = {number for own in rows["route"] for number in own} if objective.routes else set()
            routes = [name for number, name in enumerate(objective.routes) if number in found]
            measured |= {prefix + name for name in held_out_figures(objective.divergence, routes)}
        if figure in measured:
            return
        if any(figure == prefix + name for prefix in splits.held_out for name in of_the_loss):
            raise ValueError(f"train.keep_best: {figure}: expected held-out documents of this route, got none")
        among = ", ".join(name for name in self.recipe.figure_directions if name in measured)
        raise ValueError(f"train.keep_best: expected a held-out figure, {among}; got {figure!r}")

    def _try_first_batch(self, prepared: Prepared, pair: ModelPair, trainer: DistillationTrainer) -> list[str]:
        """Put our kernels into the models, try the first held-out batch and return lines on it."""
        device = prepared.context.device
        splits = prepared.splits
        if device.type == "cuda":
            from distill.teachers.kernels import patch_models  # imports Triton, a second

            patch_models(pair, prepared.context.attention)
        first_rows = list(itertools.islice(splits.validation, trainer.args.per_device_eval_batch_size))
        first = trainer._prepare_inputs(trainer.data_collator(first_rows))
        objective = trainer.objective
        lines = pair.teacher.validate_first_batch(first, objective.student, objective.alignment)
        lines += first_batch_report(trainer, first, splits.train, self.recipe)
        if runs_our_kernels(device) and not prepared.plan.placement.student_sharded:
            from distill.teachers.kernels import join_models

            join_models(pair)  # after the teacher's layers are in fp8, if they are to be
        return lines

    def _make_rollouts(
        self, prepared: Prepared, pair: ModelPair, trainer: DistillationTrainer
    ) -> OnPolicyRollouts | None:
        recipe = self.recipe
        if recipe.data.active_on_policy is None:
            return None
        return rollouts_from_recipe(
            recipe,
            pair.student,
            pair.tokenizer,
            template=pair.vocabulary.template,
            report=prepared.splits.report,
            vocab_size=trainer.objective.columns,
            autocast=prepared.context.precision.autocast,
            sharded=prepared.context.placement.student_sharded,
            models=[model for _, model in pair.models()],
            readers=pair.vocabulary.answer_readers(),
            contexts=run_contexts(recipe, pair.vocabulary.tokenizer),
            code=None if self.plugin is None else self.plugin.code,
            folder=self.run_lock.folder,
        )

    def _make_tasks(self, prepared: Prepared, pair: ModelPair, trainer: DistillationTrainer) -> StudentTasks | None:
        """Return the tasks that the student answers; None where there are none."""
        recipe = self.recipe
        if not recipe.eval.tasks:
            return None
        from distill.generation.engines import TransformersEngine, engine_for, settings_for

        settings = settings_for(
            pair.student, pair.tokenizer, pair.vocabulary.template, autocast=prepared.context.precision.autocast
        )
        is_sharded = prepared.context.placement.student_sharded
        batch_size = recipe.eval.batch_size or BATCH
        # of a sharded student the model that holds the shards, which exists only once training has begun
        whole = None if is_sharded else engine_for("distill", pair.student, settings, trains=True, field="eval.tasks")

        def model() -> nn.Module:
            return trainer.accelerator.unwrap_model(trainer.model) if is_sharded else pair.student

        def engine() -> DecodeEngine:
            return TransformersEngine(model(), settings, collective=True) if whole is None else whole

        def scorer() -> OptionScorer:
            transform = trainer.objective.alignment.student
            return OptionScorer(model(), pair.tokenizer, transform, batch_size, settings.autocast)

        return StudentTasks(
            prepared.tasks,
            engine,
            scorer,
            pair.tokenizer,
            settings.ends,
            is_sharded=is_sharded,
            folder=self.run_lock.folder,
            batch_size=batch_size,
        )

    def _begin_folder(self, prepared: Prepared, locked: Plain) -> None:
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

    def _summary(self, prepared: Prepared, pair: ModelPair, trainer: DistillationTrainer) -> list[str]:
        data = prepared.splits.report
        device = prepared.context.device.type
        return run_summary(prepared.source, pair, trainer.objective, plan=prepared.plan, data=data, device=device)

    # ------------------------------------------------------------------ train

    def train(self, opened: Opened) -> Opened:
        """Train the student in place.

        Raises:
            RunStopped: Code 0, after a signal and a checkpoint.
        """
        trainer = opened.trainer
        try:
            with without_known_warnings():
                trainer.train(resume_from_checkpoint=str(opened.last) if opened.last else None)
        except StoppedBySignal as stop:
            if is_main_process():
                step = trainer.state.global_step
                console.print_lines(f"stopped by {stop.signal} after step {step}; continue with --resume")
            raise RunStopped(0) from None
        return opened

    # ------------------------------------------------------------------ conclude

    def conclude(self, trained: Opened) -> RunResult:
        """Evaluate the trained student and save it."""
        trainer = trained.trainer
        results = trained.results
        self.run_lock.check()
        # Evaluation has collectives: others would wait in one for a process that fails, so several write no checkpoint.
        # Saving has none, and they agree on one.
        with checkpoint_on_failure(trainer):
            before = results.before(trained.untrained)
            with console.announced("evaluating", "the trained student"):
                after = results.measure()
            reduction = relative_reduction(before.held_out, after.held_out)
            sets = {name: (before.sets[name], figures) for name, figures in after.sets.items()}
            tasks = {
                name: {**before.teacher_tasks_of(name), "before": before.tasks[name], "after": accuracy}
                for name, accuracy in after.tasks.items()
            }
            result = RunResult(
                self.run_lock.folder,
                before.held_out,
                after.held_out,
                reduction,
                trainer.state.global_step,
                sets,
                tasks,
            )
        with checkpoint_on_failure(trainer, together=True):
            results.save(result, before.answers)
        self.process.wait_for_everyone()
        return result
