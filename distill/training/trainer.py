"""`DistillationTrainer`: transformers' Trainer with a teacher, a fused loss and token-weighted metrics.

    trainer = DistillationTrainer(student, teacher, args=TrainingArguments("out", max_steps=100), train_dataset=rows)
    trainer.train()

The loss is the mean over the trained tokens of the whole optimizer step: all micro-batches, all ranks. Each micro-batch
divides its sum by the step's token count (int64: a float would be rounded to bf16 under FSDP2). With token weights
that are divided by their mean, the sum of the whole step's weights is taken beforehand as well. DDP and FSDP average
gradients over the ranks, so the loss is multiplied by the number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

from distill.core.labels import count_trained_tokens
from distill.data.collator import BatchColumns, Collator, content_mask, padding_token
from distill.models.head import find_head
from distill.models.load.vocabulary import compare, shared_columns
from distill.models.loading import load_student, load_teacher, load_tokenizer
from distill.models.patch.document_rope import follows_length
from distill.models.sharding import is_sharded
from distill.objectives.losses import LossSpec
from distill.objectives.measure import perplexity
from distill.objectives.targets import Batch
from distill.objectives.token_weights import WeightFunction
from distill.recipe import LocalTeacherConfig, Loss, Student
from distill.teachers.base import Teacher
from distill.teachers.objective import DistillationObjective
from distill.training.arguments import overwrite_arguments
from distill.training.listeners import StepListener
from distill.training.loss_metrics import RouterMetrics
from distill.training.metrics import count_sums, metrics_from_sums
from distill.training.phases import PAUSED
from distill.training.step_listeners import training_listeners
from distill.training.transformers_compat import TransformersCompat


class DistillationTrainer(TransformersCompat):
    """Trainer of a student `model` that matches `teacher`.

    Rows hold `input_ids`, `labels` (not shifted, -100 where masked from the loss; without them every token is trained
    on) and, if several documents share a row, `position_ids` that restart; `distill.data.load_data` makes such rows.

    Args:
        model: The student: a causal language model, bare or wrapped by PEFT, whose forward is patched. Or its name (a
            hub id or a folder): it is loaded as a recipe's `student.model`, in float32.
        teacher: A causal language model over the same vocabulary, or any other kind of
            `distill.teachers.base.Teacher`; moved to the student's device and frozen. Or its name: it is loaded as a
            recipe's `teacher.model`, in the dtype that is computed in.
        args: `Trainer`'s arguments. Five are overwritten, since other values give wrong losses or gradients here:
            `remove_unused_columns`, `logging_nan_inf_filter`, `ddp_find_unused_parameters` and
            `accelerator_config.dispatch_batches` (which slices every tensor of a batch to its number of rows) to
            False, `average_tokens_across_devices` to True.
        loss: Loss for `DistillationObjective`: a divergence's name, a recipe's loss section, terms, or a module.
        vocab_size: Number of logits that both heads are cut to; None for that of the smaller head.
        train_dataset, eval_dataset, processing_class, callbacks: See `Trainer`. Models that are named bring their
            tokenizer where no `processing_class` is given.
        data_collator: None for `distill.data.collator.Collator` with the tokenizer's (or the student's) padding token.
            On several processes each row of an epoch is used once (`samplers.py`).
        batch_columns: Columns of training batches beside the teacher's.
        token_weights: Function of the tokens' weights, see `DistillationObjective`.
        more: Further arguments of `Trainer`.

    Raises:
        ValueError: The models cannot be compared (see `DistillationObjective`), or an argument has no effect here.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: str | nn.Module,
        teacher: str | nn.Module | Teacher,
        args: TrainingArguments,
        *,
        loss: LossSpec = "forward_kl",
        vocab_size: int | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        batch_columns: Sequence[BatchColumns] = (),
        token_weights: WeightFunction | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        **more: Any,
    ) -> None:
        overwrite_arguments(args, more)
        model, teacher, tokenizer, columns_of_both = _load_named_models(model, teacher, args)
        processing_class = tokenizer if processing_class is None else processing_class
        vocab_size = columns_of_both if vocab_size is None else vocab_size
        loaded = {"teacher": teacher} if isinstance(teacher, nn.Module) else teacher.models
        padding = padding_token(processing_class, getattr(model, "config", None))
        omit_positions = not any(map(follows_length, (model, *loaded.values())))
        collator = Collator(padding, omit_plain_positions=omit_positions, custom=data_collator)
        if isinstance(data_collator, Collator):
            collator = data_collator
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=collator,
            processing_class=processing_class,
            callbacks=callbacks,
            **more,
        )
        if not isinstance(teacher, nn.Module):
            teacher.move_to(args.device)
        elif not is_sharded(teacher):
            teacher.to(args.device)
        # FSDP moves the student later; the objective needs both models on the device now
        device = next(model.parameters()).device
        if device.type != "meta" and device != args.device:
            model.to(args.device)
        self.objective: DistillationObjective = DistillationObjective(
            teacher, model, loss, vocab_size=vocab_size, token_weights=token_weights
        )
        self._weight_sum: torch.Tensor | None = None  # of the present step's tokens, where it is a divisor
        # the objective, made of both models, has the teacher in its final form, and with it the columns that it reads
        noisy = args.neftune_noise_alpha is not None
        columns = (*self.objective.teacher.columns, *batch_columns)
        if self.objective.routers is not None:
            columns = (*columns, content_mask)
        self.data_collator = replace(
            collator,
            columns=columns,
            # the noise on a document depends on its length, also where rows of several lengths are padded
            omit_plain_positions=collator.omit_plain_positions and not noisy,
        )
        self.neftune_noise_alpha = None  # in place of `Trainer`'s hook, which scales by rows, stands `EmbeddingNoise`
        section = Loss.model_validate(loss) if isinstance(loss, Mapping) else loss
        self._needs_rewards = isinstance(section, Loss) and section.rewarded is not None
        self.objective.watch(self.listeners)
        for listener in training_listeners(self, self.objective, loss):
            self.add_callback(listener)

    # ------------------------------------------------------------------ loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return the micro-batch's summed loss, divided by the step's token count, times the number of ranks."""
        # The targets go into the student's forward with its inputs: the loss is computed at the student's head, chunk
        # by chunk, so that the logits of a batch never exist together.
        with self.listeners.phase("teacher"):
            student_inputs = self.objective.student_inputs(inputs, num_items_in_batch, weight_sum=self._weight_sum)
        output = model(**student_inputs)
        if model.training:
            step_inputs = student_inputs["step_inputs"].value
            self.listeners.notify(StepListener.forward_done, inputs, step_inputs, output)
        loss = output["loss"]
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        return (loss, output) if return_outputs else loss

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Extend `Trainer`'s method: notify the listeners after each micro-batch."""
        with self.listeners.phase("student"):
            loss = super().training_step(model, inputs, *args, **kwargs)
        self.listeners.notify(StepListener.micro_batch_done, inputs, loss, self.accelerator.sync_gradients)
        return loss

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Extend `Trainer`'s method: listeners may replace the micro-batches, e.g. by rollouts.

        Raises:
            ValueError: The loss needs rewards and no listener provides them.
        """
        # resumed after its last step, or after one that was the last by an evaluation
        is_over = self.state.global_step >= self.state.max_steps or self.control.should_training_stop
        if self.is_in_train and is_over:
            return [], None
        if self._needs_rewards and not any(each.provides_rewards for each in self.listeners):
            raise ValueError("loss.terms: a reward needs a callback of RolloutBatches with rewards; got none")
        # `Trainer` calls this once per optimizer step, before any of its micro-batches runs: here alone the whole step
        # is known, and its divisor can be counted.
        step = self.state.global_step
        are_final = not any(each.replaces_batches for each in self.listeners)
        self.listeners.notify(StepListener.begin_step, step)
        for each in self.listeners:
            epoch_iterator = each.epoch_batches(epoch_iterator, num_batches, are_final)
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches and not are_final:
            for each in self.listeners:
                batches = each.replace(batches, step, self.state.max_steps - step - 1)
            # counted again: a rollout has other trained tokens than the response in whose place it stands
            count = self._get_num_items_in_batch(batches, device)
        self._weight_sum = self._sum_token_weights(batches, device)
        upcoming = itertools.chain.from_iterable(self.listeners.notify(StepListener.upcoming))
        self.listeners.notify(StepListener.batches_taken, batches, upcoming)
        return batches, count

    def _sum_token_weights(self, batches: list[Any], device: torch.device) -> torch.Tensor | None:
        """Return the sum of the token weights of all micro-batches and ranks; None where it is no divisor."""
        weighting = self.objective.weighting
        if weighting is None or not weighting.normalises or not batches:
            return None
        total = torch.stack([weighting.sum_of(batch).to(device) for batch in batches]).sum()
        return self.accelerator.reduce(total, "sum")

    # --------------------------------------------------------------- metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the listeners' metrics to a training step's log; every rank calls it."""
        if "loss" in logs and self.is_in_train:
            for metrics in self.listeners.notify(StepListener.metrics):
                logs = logs | metrics
        super().log(logs, start_time)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Extend `Trainer`'s method: signals end it after the current step and its checkpoint.

        A script must not go on with a student that is trained in part, so the exceptions of the signals are raised.

        Raises:
            RunError: Loss or gradients stay NaN or infinite.
            ValueError: They were NaN or infinite in every step, so that the student is unchanged.
            KeyboardInterrupt: Ctrl-C.
            SystemExit: SIGTERM (code 143) or SIGHUP (129).
        """
        with self.listeners.inside(StepListener.training):
            return super().train(*args, **kwargs)

    @torch.no_grad()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return held-out metrics, means over the trained tokens of the whole set (`Trainer` averages over batches).

        Returns:
            The loss and the training metrics with the prefix `eval_`; for a dictionary of data sets `eval_NAME_`.
        """
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(rows, dict):
            sets = {name: name if eval_dataset is None else rows[name] for name in rows}
            each = [self.evaluate(own, ignore_keys, f"{metric_key_prefix}_{name}") for name, own in sets.items()]
            return {name: value for figures in each for name, value in figures.items()}
        with self.listeners.phase(PAUSED):
            figures = self.held_out_figures(self.get_eval_dataloader(eval_dataset))
            if eval_dataset is None:
                for more in self.listeners.notify(StepListener.held_out):
                    figures |= more
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ValueError: `Trainer` would return sums of statistics as predictions, and means over batches."""
        raise ValueError("predict: no logits are computed; for metrics use evaluate(rows, metric_key_prefix='test')")

    def held_out_figures(self, batches: Any) -> dict[str, float]:
        """Return loss and metrics, means over the trained tokens of all batches and ranks; every rank calls it."""
        # in training the wrapper, whose forward gathers the weights that FSDP has sharded
        model = self.model_wrapped if self.is_in_train else self.model
        objective = self.objective
        training = model.training
        model.eval()
        sums = torch.zeros(count_sums(objective.routes) + 2, dtype=torch.float64, device=self.args.device)
        of_routers = RouterMetrics(self.sum_over_ranks)
        with self.compute_loss_context_manager():
            for batch in self.objective.prefetch(batches):
                # num_items 1 leaves sums, which add up over batches and ranks of any size; they are divided once, at
                # the end
                inputs = self._prepare_inputs(batch)
                student_inputs = objective.student_inputs(inputs, num_items=1, weighted=False)
                output = model(**student_inputs)
                of_routers.add(student_inputs["step_inputs"].value)
                more = torch.stack([output["loss"].double(), count_trained_tokens(inputs).double()])
                sums += torch.cat([output["statistics"].double(), more])
        model.train(training)
        *statistics, loss, trained = self.accelerator.reduce(sums, "sum").tolist()
        if trained == 0:
            raise ValueError("eval_dataset: no trained tokens (every label is -100)")
        figures = metrics_from_sums(statistics, trained, objective.divergence, objective.routes)
        return {
            "loss": loss / trained,
            **figures,
            "perplexity": perplexity(figures["cross_entropy"]),
            **of_routers.metrics(),
        }


def _load_named_models(
    student: str | nn.Module, teacher: str | nn.Module | Teacher, args: TrainingArguments
) -> tuple[nn.Module, nn.Module | Teacher, PreTrainedTokenizerBase | None, int | None]:
    """Return student and teacher, each loaded where it is a name, with the tokenizer of a named one.

    A name is a hub id, a folder, a .gguf file or `package:NAME/FILE.gguf`. The teacher is loaded in the dtype that is
    computed in (`bf16` or `fp16` of the arguments, else float32), the student in float32, in which small updates are
    kept.

    The last value are the columns of the vocabulary that two named models share, None for others.

    Raises:
        ValueError: There is no such model; or both are named and an id of their tokenizers means different tokens.
    """
    tokenizer = None
    teacher_tokenizer = None
    columns = None
    # tokenizers first: a pair that cannot be compared is refused before weights are read
    if isinstance(student, str):
        student_section = Student(model=student)
        tokenizer = load_tokenizer(student_section, "student")
    if isinstance(teacher, str):
        teacher_section = LocalTeacherConfig(model=teacher)
        teacher_tokenizer = load_tokenizer(teacher_section, "teacher")
    if tokenizer is not None and teacher_tokenizer is not None:
        compare(teacher_tokenizer, tokenizer).require()
    if isinstance(teacher, str):
        computed = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
        teacher = load_teacher(teacher_section, device=args.device, dtype=computed)
    if isinstance(student, str):
        loaded: nn.Module = load_student(student_section, device=args.device, dtype=torch.float32)
    else:
        loaded = student
    if tokenizer is not None and teacher_tokenizer is not None:
        assert isinstance(teacher, nn.Module)
        rows = [len(find_head(model).linear.weight) for model in (teacher, loaded)]  # type: ignore[arg-type]
        columns, _ = shared_columns(teacher_tokenizer, tokenizer, *rows)
    return loaded, teacher, tokenizer or teacher_tokenizer, columns
