"""The listeners of a training: those of every `DistillationTrainer`, and those of a recipe's run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerState

from distill.core.heartbeat import count_micro_batch, watched_training
from distill.data.stream import StreamedRows
from distill.models.flops import count_flops
from distill.models.gpu_specs import runs_our_kernels
from distill.objectives.losses import LossSpec
from distill.objectives.targets import Batch, StepInputs
from distill.recipe import Loss, Recipe
from distill.teachers.objective import DistillationObjective
from distill.training.checkpoints import checkpoints
from distill.training.cuda_graphs import CudaGraphCallback
from distill.training.divergence_monitor import DivergenceMonitor
from distill.training.early_stopping import StopWithoutImprovement
from distill.training.embedding_noise import EmbeddingNoise
from distill.training.listeners import StepListener
from distill.training.loss_metrics import LayerTerms, RouterMetrics, TokenWeightMetrics
from distill.training.loss_schedule import LossSchedule
from distill.training.metrics import Meter
from distill.training.module_cache import cache_modules, clear_module_cache
from distill.training.phases import PAUSED
from distill.training.prefetch import TeacherPrefetcher
from distill.training.progress import MetricsFile, ProgressReport
from distill.training.rollout_files import StoredRollouts
from distill.training.rollout_monitor import RolloutMonitor
from distill.training.step_guard import LIMIT, StepGuard
from distill.training.transformers_compat import TransformersCompat

if TYPE_CHECKING:
    from distill.core.run_lock import RunLock
    from distill.generation.on_policy import OnPolicyRollouts
    from distill.generation.rollout_steps import Collated
    from distill.generation.tasks import StudentTasks
    from distill.teachers.opening import ModelPair
    from distill.training.trainer import DistillationTrainer


def training_listeners(
    trainer: TransformersCompat, objective: DistillationObjective, loss: LossSpec
) -> list[TrainerCallback]:
    """Return the listeners of every trainer, in their order: the guard's signal handlers are the outermost context.

    Args:
        loss: Loss that the objective was made with, which may have a schedule.

    Raises:
        ValueError: A scheduled loss that this teacher's outputs do not allow.
    """
    folder = Path(trainer.args.output_dir or ".")
    scaler = trainer.accelerator.scaler
    guard = StepGuard(
        trainer.sum_over_ranks,
        trainer.accelerator.num_processes,
        folder,
        limit=LIMIT if scaler is None else 10 * LIMIT,  # float16: the scaler finds its scale by steps that overflow
        diagnose=teacher_diagnosis(trainer, objective),
    )
    flops = objective.teacher.flops_per_token(), count_flops(trainer.model, trains=True)
    meter = Meter(trainer.args.device, *flops, objective.divergence, objective.routes, objective.clips)
    found: list[TrainerCallback] = [guard]
    if trainer.accelerator.num_processes > 1:
        found.append(RankWatch(folder))
    found.append(TeacherPrefetcher(objective, trainer))
    found += [CachedModules(trainer), TeacherUpdates(trainer, objective)]
    found.append(TrainingMetrics(meter, trainer.sum_over_ranks))
    section = Loss.model_validate(loss) if isinstance(loss, Mapping) else loss
    if isinstance(section, Loss) and section.schedule:
        found.append(LossSchedule(objective, section))
    if objective.weighting is not None:
        found.append(TokenWeightMetrics(trainer))
    alpha = trainer.args.neftune_noise_alpha
    if alpha is not None:
        found.append(EmbeddingNoise(objective.student, alpha))
    if objective.layers is not None:
        found.append(LayerTerms(objective.layers, trainer))
    if objective.routers is not None:
        found.append(RouterMetrics(trainer.sum_over_ranks))
    if isinstance(trainer.train_dataset, StreamedRows):
        found.append(StreamPosition(trainer, trainer.train_dataset))
    return found


def run_listeners(
    trainer: TransformersCompat,
    objective: DistillationObjective,
    recipe: Recipe,
    pair: ModelPair,
    rollouts: OnPolicyRollouts | None,
    run_lock: RunLock,
) -> list[TrainerCallback]:
    """Return the listeners of a recipe's run beside those of every trainer.

    Args:
        pair: Teacher and student, with our kernels in them.
        rollouts: Rollouts that training is on; None for the data's own responses.
    """
    folder = run_lock.folder
    section = recipe.data.on_policy
    found: list[TrainerCallback] = [
        MetricsFile(folder / "metrics.jsonl", run_lock.check),
        ProgressReport(measure=objective.measure, loss=recipe.loss),
        DivergenceMonitor(recipe, objective.columns),
    ]
    stopping = recipe.train.early_stopping
    if stopping is not None and recipe.train.keep_best is not None:
        found.append(
            StopWithoutImprovement(
                recipe.train.keep_best,
                higher_is_better=recipe.figure_directions[recipe.train.keep_best],
                patience=stopping.patience,
                min_delta=stopping.min_delta,
            )
        )
    if rollouts is not None:
        found += [RolloutBatches(rollouts, trainer), RolloutMonitor()]
        if section is not None and section.store_every:
            found.append(StoredRollouts(folder, section.store_every, pair.tokenizer, objective.routes))
    setting = recipe.train.cuda_graph
    device = trainer.args.device
    if device.type == "cuda" and (setting is True or (setting and runs_our_kernels(device))):
        found.append(CudaGraphCallback(pair.models(), always=setting is True, mean=trainer.mean_over_ranks))
    return found


class HeldOutSets(StepListener):
    """Listener that measures further held-out sets in each evaluation.

    Args:
        sets: Rows by the set's name.
    """

    def __init__(self, trainer: DistillationTrainer, sets: Mapping[str, Any]) -> None:
        self.trainer = trainer
        self.sets = sets

    def held_out(self) -> dict[str, float]:
        """Return the figures of each set, with its name before theirs."""
        found: dict[str, float] = {}
        for name, rows in self.sets.items():
            # the loader of tests: that of evaluations is kept under one name for all data sets
            figures = self.trainer.held_out_figures(self.trainer.get_test_dataloader(rows))
            found |= {f"{name}_{figure}": value for figure, value in figures.items()}
        return found


class TaskFigures(StepListener):
    """Listener that has the student answer its tasks in evaluations."""

    def __init__(self, trainer: DistillationTrainer, tasks: StudentTasks) -> None:
        self.trainer = trainer
        self.tasks = tasks

    def held_out(self) -> dict[str, float]:
        """Return the accuracy of each task that is due, with its interval."""
        state = self.trainer.state
        # from the step alone, so that a resumed run goes on with the same evaluations
        number = -(-state.global_step // state.eval_steps) if state.eval_steps else 0
        found: dict[str, float] = {}
        for questions in self.tasks.questions:
            if number % questions.task.every and state.global_step < state.max_steps:
                continue
            accuracy = self.tasks.measure(questions, state.global_step)
            low, high = accuracy.interval
            name = f"{questions.name}_accuracy"
            found |= {name: accuracy.value, f"{name}_low": low, f"{name}_high": high}
        return found


class RankWatch(StepListener):
    """Listener that has the heartbeat of this process watch the other ranks while they train.

    Args:
        folder: Folder of the run's checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def training(self) -> AbstractContextManager[None]:
        """End this process in the context where another rank has stopped or hangs."""
        return watched_training(self._advice)

    def phase(self, name: str) -> AbstractContextManager[None]:
        if name == "student":
            count_micro_batch()
        return nullcontext()

    def _advice(self) -> str:
        last = checkpoints(self.folder)[-1:]
        return f"continue from {last[0]} with --resume" if last else "there is no checkpoint"


class TrainingMetrics(StepListener):
    """Listener that measures steps.

    Args:
        meter: Sums of the logging interval.
        reduce: Function that sums a tensor over the ranks.
    """

    def __init__(self, meter: Meter, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.meter = meter
        self.reduce = reduce

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        self.meter.restart()

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Count the time of the context as that of a phase; none of it of `PAUSED`."""
        return self.meter.paused() if name == PAUSED else self.meter.phases.measure(name)

    def forward_done(self, batch: Batch, inputs: StepInputs, output: dict[str, torch.Tensor]) -> None:
        drawn = output.get("drawn")
        self.meter.add(batch, output["statistics"], inputs.weight, drawn, output.get("token_weights"))

    def micro_batch_done(self, batch: Batch, loss: torch.Tensor, is_last: bool) -> None:
        if is_last:
            self.meter.phases.enter("optimizer")

    def on_step_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        self.meter.phases.enter("data")
        self.meter.phases.steps += 1

    def metrics(self) -> dict[str, float]:
        return self.meter.read(self.reduce)


class TeacherUpdates(StepListener):
    """Listener that updates a moving-average teacher, and saves what training changes in a teacher."""

    def __init__(self, trainer: TransformersCompat, objective: DistillationObjective) -> None:
        self.args = trainer.args
        self.objective = objective

    def on_step_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        self.objective.teacher.update_ema(self.objective.student)

    def on_epoch_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Flush teacher outputs that were cached in this epoch, so that all processes can read them."""
        self.objective.teacher.flush()

    def save(self, checkpoint: Path) -> None:
        """Flush cached outputs, and write what training has changed in the teacher."""
        self.objective.teacher.flush()
        if self.args.should_save:
            self.objective.teacher.save(checkpoint)

    def restore(self, checkpoint: Path) -> None:
        self.objective.teacher.restore(checkpoint)


class StreamPosition(StepListener):
    """Listener that saves where a stream is, restores it and counts the rows that were read."""

    def __init__(self, trainer: TransformersCompat, rows: StreamedRows) -> None:
        self.trainer = trainer
        self.rows = rows

    @contextmanager
    def training(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.rows.close()

    def metrics(self) -> dict[str, float]:
        args = self.trainer.args
        totals = self.trainer.sum_over_ranks(torch.tensor(self.rows.totals(), device=args.device))
        return dict(zip(("data_rows_read", "data_rows_dropped"), totals.tolist(), strict=True))

    def save(self, checkpoint: Path) -> None:
        """Write the place of the next step's first row; what was read ahead of it is read again."""
        args = self.trainer.args
        rows = self.trainer.state.global_step * args.gradient_accumulation_steps * self.rows.batch_rows
        self._file(checkpoint).write_text(json.dumps(self.rows.state(rows)))

    def restore(self, checkpoint: Path) -> None:
        """Raise a ValueError where the checkpoint has no place of this process's rows."""
        path = self._file(checkpoint)
        if not path.is_file():
            raise ValueError(f"--resume: expected {path}, the place of the rows of data.streaming; got no such file")
        self.rows.restore(json.loads(path.read_text()))

    def _file(self, checkpoint: Path) -> Path:
        return checkpoint / f"stream-{self.trainer.args.process_index}.json"


class CachedModules(StepListener):
    """Listener that caches the lists of the student's modules while it trains."""

    def __init__(self, trainer: TransformersCompat) -> None:
        self.trainer = trainer

    @contextmanager
    def training(self) -> Iterator[None]:
        try:
            yield
        finally:
            clear_module_cache(self.trainer.model)

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Cache the lists: the model is wrapped and placed by now."""
        cache_modules(self.trainer.model)


class RolloutBatches(StepListener):
    """Listener that replaces responses of a step's micro-batches by the student's rollouts."""

    replaces_batches = True

    def __init__(self, rollouts: OnPolicyRollouts, trainer: TransformersCompat) -> None:
        self.rollouts = rollouts
        self.trainer = trainer
        self.provides_rewards = rollouts.rewards is not None

    def epoch_batches(self, batches: Iterator[Collated], count: int, are_final: bool) -> Iterator[Collated]:
        """Return the epoch as an iterator in which rollouts of later steps can look ahead."""
        return self.rollouts.epoch(batches)

    def replace(self, batches: list[Collated], step: int, following: int) -> list[Collated]:
        return self.rollouts.replace(batches, step, self.trainer.data_collator, following)

    def upcoming(self) -> Iterable[Collated]:
        return self.rollouts.upcoming_batches(self.trainer.data_collator)

    def metrics(self) -> dict[str, float]:
        return self.rollouts.pop_metrics(self.trainer.sum_over_ranks, self.trainer.args.device)

    def save(self, checkpoint: Path) -> None:
        self.rollouts.save(checkpoint, self.trainer.args.process_index)

    def restore(self, checkpoint: Path) -> None:
        self.rollouts.restore(checkpoint)


def teacher_diagnosis(
    trainer: TransformersCompat, objective: DistillationObjective
) -> Callable[[list[Batch]], str | None]:
    """Return the function that finds where the teacher is not finite on a skipped step's batches.

    Every rank calls it; None where the teacher is finite on all ranks.
    """

    def diagnose(batches: list[Batch]) -> str | None:
        from distill.teachers.diagnose import diagnose_teacher

        with trainer.compute_loss_context_manager():
            fault = diagnose_teacher(objective, [trainer._prepare_inputs(dict(batch)) for batch in batches])
        anywhere = torch.tensor(float(fault is not None), device=trainer.args.device)
        if trainer.sum_over_ranks(anywhere) == 0:
            return None
        return fault or "on another rank"

    return diagnose
