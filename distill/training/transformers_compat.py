"""`Trainer` with those of its methods overridden that train, resume or save wrongly here.

Every override of a private method of transformers stands in this file. Its docstring names what upstream does
instead, and a test (tests/runs/test_transformers_compat.py) fails when upstream does it otherwise: the override is then
adapted or deleted. They were read in transformers 5.17 and 5.23.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Sampler, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME

from distill.core.files import sync
from distill.core.labels import count_trained_tokens
from distill.core.manifest import write_manifest
from distill.data.packing import BLOCK
from distill.data.stream import StreamedRows
from distill.models.sharding import has_no_state, use_fsdp2
from distill.training.checkpoints import CHECKPOINT, UNFINISHED, load_weights, rotate_checkpoints
from distill.training.listeners import Listeners, StepListener
from distill.training.module_cache import cached_parameters
from distill.training.phases import PAUSED
from distill.training.samplers import BlockSampler, without_repeated_rows
from distill.training.step_guard import clip_in_optimizer, ignore_signals_in_workers


class TransformersCompat(Trainer):
    """`Trainer` with corrections of its own methods, and its listeners.

    Args:
        arguments, settings: See `Trainer`.
    """

    model: nn.Module

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._blocks: Sampler[int] | None = None  # sampler of rows that belong together; None for other rows
        self._checkpoint_folder: str | None = None
        super().__init__(*arguments, **settings)
        self.model_accepts_loss_kwargs = True  # 5.17 divides the losses of other models by the micro-batches once more
        self.add_callback(ResumedState(self))
        self.listeners = Listeners(self.callback_handler)

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(values, "sum")

    def mean_over_ranks(self, value: float) -> float:
        return self.accelerator.reduce(torch.tensor(value, device=self.args.device), "mean").item()

    def save_checkpoint(self) -> None:
        """Write a checkpoint of the present step; every process calls it."""
        self._save_checkpoint(self.model, None)

    # ------------------------------------------------ public methods: devices, data, learning rate

    def create_accelerator_and_postprocess(self) -> None:
        """Use FSDP2 where it was requested, on CPUs too, where `Trainer` trains copies by DDP without a word."""
        super().create_accelerator_and_postprocess()
        if self.args.fsdp and self.accelerator.num_processes > 1:
            use_fsdp2(self.accelerator, self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True

    def get_train_dataloader(self) -> Any:
        """Return `Trainer`'s loader without the rows that it repeats at an epoch's end over several processes."""
        return self._corrected(super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self._corrected(super().get_eval_dataloader(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self._corrected(super().get_test_dataloader(test_dataset))

    def _corrected(self, loader: Any) -> Any:
        ignore_signals_in_workers(getattr(loader, "base_dataloader", loader))  # accelerate wraps a torch DataLoader
        processes = self.accelerator.num_processes
        return loader if processes == 1 else without_repeated_rows(loader, processes)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Return `Trainer`'s schedule with a rate above 0 in the first step of a warm-up, where `Trainer` has 0."""
        is_new = self.lr_scheduler is None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if is_new:
            begin_above_zero(scheduler, self.args.get_warmup_steps(num_training_steps))
        return scheduler

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: `Trainer` walks all parameters for each micro-batch."""
        return 0

    # ------------------------------------------------ private methods

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Keep rows that belong together (turns of a chat) adjacent, and a stream in order; `Trainer` shuffles them."""
        rows = self.train_dataset if train_dataset is None else train_dataset
        if isinstance(rows, StreamedRows):
            self._blocks = None
            return SequentialSampler(rows)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        has_blocks = BLOCK in (getattr(rows, "column_names", None) or ())
        self._blocks = BlockSampler(rows, seed) if has_blocks else None
        return self._blocks or super()._get_train_sampler(train_dataset)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | None:
        """Return the trained tokens of all micro-batches and ranks, int64 on the device, at least 1.

        `Trainer` counts the first tokens of packed documents too, which nothing predicts, and returns 0 for a step in
        which every label is masked.
        """
        if not batch_samples:
            return None
        count = torch.as_tensor(sum(map(count_trained_tokens, batch_samples)), dtype=torch.int64).to(device)
        return self.accelerator.reduce(count, "sum").clamp_min(1)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip inside the optimizer where it can; `Trainer` walks all modules, and reads and writes each gradient."""
        if self.accelerator.scaler or self.is_fsdp_enabled:
            norm = super()._clip_grad_norm(model)
        else:
            parameters = cached_parameters(self.model)
            max_norm = self.args.max_grad_norm
            norm = clip_in_optimizer(parameters, self.optimizer, max_norm)
            norm = self.accelerator.clip_grad_norm_(parameters, max_norm) if norm is None else norm
        self.listeners.notify(StepListener.gradient_norm_computed, norm)
        return norm

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load weights by the model's own names; `Trainer` takes a file's names for them and ignores missing ones."""
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            load_weights(self.model if model is None else model, Path(resume_from_checkpoint))

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Write a checkpoint of each new best evaluation; `Trainer` writes it only where one is due by `save_steps`."""
        is_best = super()._determine_best_metric(metrics, trial)
        if is_best and self.args.load_best_model_at_end:
            self.control.should_save = True
        return is_best

    def _load_best_model(self) -> None:
        """Load weights by the model's own names, and all else that belongs to the checkpoint, as on resume.

        `Trainer` takes a file's names for them and ignores missing ones, and knows weights only: master weights and
        scales of a quantised student and projections of layers would stay those of the last step.
        """
        best = Path(str(self.state.best_model_checkpoint))
        if self.is_fsdp_enabled:
            super()._load_best_model()
        else:
            load_weights(self.model, best)
        self.listeners.notify(StepListener.restore, best)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore a sharded student without optimizer state, which `Trainer` cannot, and what else a checkpoint has."""
        if checkpoint is None:
            return
        self.listeners.notify(StepListener.restore, Path(checkpoint))
        if not (self.is_fsdp_enabled and has_no_state(self.optimizer)):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        assert self.optimizer is not None and self.lr_scheduler is not None
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))
        for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate  # a scheduler sets it after a step, for the next one

    def _get_output_dir(self, trial: Any) -> str:
        """Return the temporary folder while a checkpoint is written; `Trainer` writes it where it is read from."""
        return self._checkpoint_folder or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint to a temporary folder and rename it, so that a folder named checkpoint-N is complete.

        `Trainer` writes into checkpoint-N, and deletes old checkpoints before the new one is whole.
        """
        folder = Path(super()._get_output_dir(trial))
        unfinished = folder / UNFINISHED
        name = f"{CHECKPOINT}{self.state.global_step}"
        limit = self.args.save_total_limit
        with self.listeners.phase(PAUSED):  # no step time
            if self.args.should_save:
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            # every process may write from here on, since the folder is there and empty
            self._checkpoint_folder = str(unfinished)
            self.args.save_total_limit = None  # `Trainer` would delete old ones before the new one has its name
            try:
                super()._save_checkpoint(model, trial)
                self.listeners.notify(StepListener.save, unfinished / name)
            finally:
                self._checkpoint_folder = None
                self.args.save_total_limit = limit
            self.accelerator.wait_for_everyone()
            # All files of all processes are there. The best checkpoint may be this one: its state file then names the
            # temporary folder. The manifest comes last, since it holds the checksum of that file.
            if self.state.best_model_checkpoint == str(unfinished / name):
                self.state.best_model_checkpoint = str(folder / name)
                if self.args.should_save:
                    self.state.save_to_json(str(unfinished / name / TRAINER_STATE_NAME))
            if self.args.should_save:
                if (folder / name).exists():
                    # A run that was resumed from an older checkpoint reaches this step again. A folder that is not
                    # empty cannot be replaced, so the old one is moved away first.
                    os.replace(folder / name, unfinished / "replaced")
                write_manifest(unfinished / name, step=self.state.global_step)
                os.replace(unfinished / name, folder / name)
                # the new name must be on the disk before an older checkpoint goes
                sync(folder, deep=False)
                rotate_checkpoints(folder, limit, self.state.best_model_checkpoint)
                shutil.rmtree(unfinished, ignore_errors=True)
            self.accelerator.wait_for_everyone()


def begin_above_zero(scheduler: LRScheduler, steps: int) -> None:
    """Shift the warm-up of a new schedule by one step: step k of W has (k + 1) / W of the peak, not k / W.

    With transformers' warm-up, the first step changes no weight. After the warm-up both have the same rates.
    """
    if not isinstance(scheduler, LambdaLR) or steps == 0:
        return
    scheduler.lr_lambdas = [_one_step_ahead(factor, steps) for factor in scheduler.lr_lambdas]
    # the scheduler has set the first rates by the old factors when it was made
    rates = [base * factor(0) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    scheduler._last_lr = rates
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _one_step_ahead(factor: Callable[[int], float], steps: int) -> Callable[[int], float]:
    # a bool counts as 1: one step ahead in the warm-up, unchanged after it
    return lambda step: factor(step + (step < steps))


def lacks_evaluation(args: TrainingArguments, state: TrainerState) -> bool:
    """Return whether a run ended in the evaluation that was due after the step that it resumes from."""
    step = state.global_step
    every = state.eval_steps
    if args.eval_strategy != "steps" or not step or not every or step % every:
        return False
    here = [row for row in state.log_history if row.get("step") == step]
    return bool(here) and not any(key.startswith("eval_") for row in here for key in row)


class ResumedState(TrainerCallback):
    """Callback that corrects the state of a resumed run.

    `Trainer` logs, saves and evaluates at the checkpoint's intervals in place of the present ones, makes one more step
    of a run that is resumed after its last one, and leaves out an evaluation in which the run ended.
    """

    def __init__(self, trainer: TransformersCompat) -> None:
        self.trainer = trainer
        self._is_over = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Take the intervals and the batch size of the present arguments."""
        state.compute_steps(args, state.max_steps)
        if not args.auto_find_batch_size:
            state.train_batch_size = args.train_batch_size
        if state.best_model_checkpoint is not None:  # the run's folder may have been moved since
            state.best_model_checkpoint = str(Path(str(args.output_dir)) / Path(state.best_model_checkpoint).name)
        self._is_over = state.global_step >= state.max_steps

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Put the rows into the epoch's order, and make the evaluation in which the run ended."""
        ordered: tuple[Any, ...] = (self.trainer.train_dataset, self.trainer._blocks)
        for each in ordered:
            if hasattr(each, "set_epoch"):
                each.set_epoch(int(state.epoch))
        if lacks_evaluation(args, state):
            self._evaluate(args, state)
        if control.should_training_stop:  # by that evaluation, or by one before the checkpoint
            self._is_over = True
            control.should_save = False

    def _evaluate(self, args: TrainingArguments, state: TrainerState) -> None:
        """Make the evaluation of the step that the run resumes from, whose checkpoint is there already."""
        metrics = self.trainer.evaluate()
        checkpoint = Path(str(args.output_dir)) / f"{CHECKPOINT}{state.global_step}"
        if self.trainer._determine_best_metric(metrics, None) and checkpoint.is_dir():
            state.best_model_checkpoint = str(checkpoint)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Log, evaluate and save nothing in an epoch without a step."""
        if self._is_over:
            control.should_training_stop = True
            control.should_log = control.should_evaluate = control.should_save = False


@contextmanager
def without_known_warnings() -> Iterator[None]:
    """Suppress `Trainer`'s warning of the settings that a resumed run may change."""
    logger = logging.getLogger("transformers.trainer_utils")

    def other(record: logging.LogRecord) -> bool:
        return "do not match the ones in the `trainer_state.json`" not in str(record.msg)

    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)
