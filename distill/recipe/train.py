"""The `train:` and `parallel:` sections of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, model_validator

from distill.core.errors import Section, expected_got
from distill.recipe.data import Data
from distill.recipe.fields import (
    Count,
    DType,
    Every,
    NotNegative,
    Text,
    Usual,
    no_reports,
    rate_or_share,
    steps_or_ratio,
)
from distill.recipe.library_names import argument_names, optimizer_names, unknown_name

# fields of TrainingArguments that a field of the recipe sets
OWNED_ARGUMENTS = {
    "max_steps": "train.steps",
    "num_train_epochs": "train.epochs",
    "per_device_train_batch_size": "train.batch_size",
    "per_device_eval_batch_size": "eval.batch_size",
    "gradient_accumulation_steps": "train.tokens_per_step",
    "learning_rate": "train.learning_rate",
    "lr_scheduler_type": "train.schedule",
    "warmup_steps": "train.warmup",
    "warmup_ratio": "train.warmup",
    "weight_decay": "train.weight_decay",
    "max_grad_norm": "train.max_grad_norm",
    "optim": "train.optimizer",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "bf16_full_eval": "train.precision",
    "fp16_full_eval": "train.precision",
    "gradient_checkpointing": "train.gradient_checkpointing",
    "gradient_checkpointing_kwargs": "train.gradient_checkpointing",
    "activation_checkpointing": "train.gradient_checkpointing",
    "activation_checkpointing_kwargs": "train.gradient_checkpointing",
    "torch_compile": "train.cuda_graph",
    "torch_compile_backend": "train.cuda_graph",
    "torch_compile_mode": "train.cuda_graph",
    "label_smoothing_factor": "loss.label_smoothing",
    "seed": "train.seed",
    "save_steps": "train.save_every",
    "save_strategy": "train.save_every",
    "eval_steps": "train.eval_every",
    "eval_strategy": "train.eval_every",
    "logging_steps": "train.log_every",
    "report_to": "train.report_to",
    "full_determinism": "train.deterministic",
    "use_cpu": "train.device",
    "dataloader_num_workers": "data.workers",
    "fsdp": "parallel.strategy",
    "fsdp_config": "parallel.strategy",
    "deepspeed": "parallel.strategy",
    "parallelism_config": "parallel.strategy",
    "output_dir": "output_dir",
    "resume_from_checkpoint": "--resume",
}
# flags of TrainingArguments with which a run goes wrong, and why
UNFIT_ARGUMENTS = {
    "accelerator_config.split_batches": "train.batch_size is the batch of each process, not of all",
    "enable_jit_checkpoint": "it takes SIGTERM from the run, which writes a checkpoint then and stops",
    "ignore_data_skip": "a resumed run would train on the epoch's first rows again instead of the remaining ones",
    "use_liger_kernel": "it replaces the forward that computes this loss",
}

# arguments of lr_scheduler_kwargs that a field of the recipe sets
OWNED_SCHEDULER_KWARGS = ("min_lr", "min_lr_rate", "min_lr_ratio", "lr_end")
# schedules that decay to a rate that can be chosen
DECAYING = ("cosine", "cosine_with_min_lr", "linear", "polynomial", "warmup_stable_decay")


def is_adam(train: Train) -> bool:
    """Return whether the optimizer is of the Adam family; SGD takes learning rates that are far larger."""
    return "adam" in train.optimizer


class EarlyStopping(Section):
    """End of training before its last step.

    Attributes:
        patience: number of held-out evaluations in a row without an improvement of `train.keep_best` after which
            training ends.
        min_delta: an evaluation counts as an improvement where its figure is better than the best before it by more
            than this, in the figure's unit.
    """

    patience: Count
    min_delta: NotNegative = 0.0


class Train(Section):
    """Length, batch, optimizer, precision and logging of a run: exactly one of `steps` and `epochs`.

    Attributes:
        steps: number of optimizer steps; exactly one of `steps` and `epochs` is given.
        epochs: number of passes over the data, which may be a fraction.
        tokens_per_step: tokens of an optimizer step over all devices, padding and prompts included; null for one
            micro-batch per device, without gradient accumulation.
        batch_size: sequences per micro-batch and device.
        learning_rate: peak learning rate, reached after warm-up.
        schedule: learning-rate schedule after warm-up: `cosine`, `linear` and `polynomial` decay to `min_lr`,
            `warmup_stable_decay` does in the last fifth of the steps, `cosine_with_restarts` and `inverse_sqrt` decay
            without it, `constant` does not decay. `constant_with_warmup` is `constant`, `cosine_with_min_lr` is
            `cosine`. `arguments.lr_scheduler_kwargs` sets what else one has: `num_cycles` (restarts), `power`
            (polynomial), `timescale` (inverse_sqrt), `num_decay_steps`, `decay_type` (warmup_stable_decay).
        min_lr: learning rate that the schedule decays to: a rate such as 2e-6, or a share of `learning_rate` such as
            `10%`; null for 0. The warm-up of `warmup_stable_decay` begins there too.
        warmup: length of the learning-rate warm-up: a number of steps W, or below 1 a fraction of all steps; the first
            step has 1/W of the peak.
        weight_decay: weight decay per step, decoupled from the gradient (AdamW) and multiplied by the learning rate.
        max_grad_norm: maximum L2 norm of all gradients, which are clipped to it; 0 for no clipping.
        neftune_alpha: scale of the uniform noise that training adds to the student's embeddings (NEFTune): each entry
            of a document of L tokens gets up to `neftune_alpha` / sqrt(L x hidden size); null for none.
        optimizer: `fused_adamw` (built in; for float32 weights on a CPU, PyTorch's AdamW), or a name of transformers'
            `optim` argument.
        optimizer_states: dtype of fused_adamw's two moments; `auto` is the dtype of the weights.
        master_weights: keep a float32 master copy of bfloat16 weights (fused_adamw); without it, updates are rounded
            stochastically.
        precision: compute dtype; weights of another dtype run under autocast. `auto` is bfloat16 on GPUs with native
            bfloat16, else float32.
        gradient_checkpointing: store fewer activations and recompute them in the backward pass.
        cuda_graph: replay both models' decoders as CUDA graphs, so that small models are not bound by the host; `auto`
            times a few steps of the run both ways and keeps the faster.
        seed: seed of new adapters, data order, dropout and sampling; the weights of `init: random` do not depend on it.
        save_every: steps between checkpoints, of which the last two are kept; null or 0 for the final model only.
        eval_every: steps between held-out evaluations; null or 0 for evaluations before and after training only.
        keep_best: held-out figure by which the student of the best evaluation is kept, instead of that of the last
            step: `kl`, `agreement`, `cross_entropy`, `perplexity`, `loss`, or another one that `metrics.jsonl` has with
            the prefix `eval_`. Each evaluation (`eval_every`) that is the best so far writes a checkpoint, which is
            kept. null for the student of the last step.
        early_stopping: end training once `keep_best` no longer improves; null to make all steps.
        log_every: steps between log lines.
        on_divergence: `warn` or `stop` the run where, in 3 consecutive log entries or evaluations, the loss exceeds
            3 times its first value + 1 nat, or the perplexity returns to that of uniform probabilities.
        report_to: names of transformers' logging integrations, such as `wandb` or `tensorboard`.
        deterministic: make results bit-identical from run to run, at some cost in speed.
        device: device of the run; `auto` is CUDA where it is available, else the CPU.
        arguments: further fields of `transformers.TrainingArguments`, such as `{adam_beta2: 0.95}`.
    """

    steps: Count | None = None
    epochs: Annotated[float, Field(gt=0)] | None = None
    tokens_per_step: Count | None = None
    batch_size: Count = 1
    learning_rate: Annotated[float, Field(gt=0), Usual(1e-6, 1e-3, is_adam)] = 2e-5
    schedule: Literal[
        "cosine",
        "linear",
        "constant",
        "warmup_stable_decay",
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
        "constant_with_warmup",
        "cosine_with_min_lr",
    ] = "cosine"
    min_lr: Annotated[float | str | None, AfterValidator(rate_or_share)] = None
    warmup: Annotated[int | float, BeforeValidator(steps_or_ratio)] = 0.03
    weight_decay: Annotated[NotNegative, Usual(1e-3, 0.3)] = 0.0
    max_grad_norm: Annotated[NotNegative, Usual(0.1, 10)] = 1.0
    neftune_alpha: Annotated[Annotated[float, Field(gt=0)] | None, Usual(5, 15)] = None
    optimizer: Text = "fused_adamw"
    optimizer_states: Literal["auto", "float32", "bfloat16"] = "auto"
    master_weights: bool = False
    precision: DType = "auto"
    gradient_checkpointing: bool = False
    cuda_graph: Literal["auto", True, False] = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    save_every: Every = None
    eval_every: Every = None
    keep_best: Text | None = None
    early_stopping: EarlyStopping | None = None
    log_every: Count = 10
    on_divergence: Literal["warn", "stop"] = "warn"
    report_to: Annotated[list[Text], BeforeValidator(no_reports)] = Field(default_factory=list)
    deterministic: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    arguments: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            came = "neither" if self.steps is None else f"steps {self.steps} and epochs {self.epochs:g}"
            raise ValueError(f"give exactly one of steps and epochs; got {came}")
        if self.optimizer != "fused_adamw" and (self.master_weights or self.optimizer_states != "auto"):
            raise ValueError(f"master_weights and optimizer_states belong to fused_adamw; got {self.optimizer}")
        if self.optimizer != "fused_adamw" and (wrong := unknown_name(self.optimizer, optimizer_names())):
            raise ValueError(f"optimizer: expected fused_adamw or a name of transformers' optim argument, {wrong}")
        return self

    @model_validator(mode="after")
    def _best_is_evaluated(self) -> Self:
        if self.early_stopping is not None and self.keep_best is None:
            raise ValueError("early_stopping: expected keep_best, the held-out figure that it watches; got none")
        if self.keep_best is None:
            return self
        if self.eval_every is None:
            raise ValueError(f"keep_best: {self.keep_best} is a held-out figure: expected eval_every, got none")
        for name in ("load_best_model_at_end", "metric_for_best_model", "greater_is_better"):
            if name in self.arguments:
                raise ValueError(f"arguments.{name}: expected none with keep_best {self.keep_best}, which sets it")
        return self

    @model_validator(mode="after")
    def _leaves_the_runs_own_arguments(self) -> Self:
        for name in self.arguments:
            if name in OWNED_ARGUMENTS:
                raise ValueError(f"arguments.{name} is set by {OWNED_ARGUMENTS[name]}; set it there")
            wrong = unknown_name(name, argument_names())
            if wrong:
                raise ValueError(f"arguments.{name}: expected a field of transformers' TrainingArguments, {wrong}")
        for name, why in UNFIT_ARGUMENTS.items():
            section, _, flag = name.rpartition(".")
            given = self.arguments.get(section) if section else self.arguments
            if isinstance(given, dict) and given.get(flag):
                raise ValueError(f"arguments.{name}: expected false, since {why}; leave it out")
        return self

    @model_validator(mode="after")
    def _has_one_noise(self) -> Self:
        if self.neftune_alpha is not None and self.arguments.get("neftune_noise_alpha") is not None:
            raise ValueError("arguments.neftune_noise_alpha is the same as train.neftune_alpha; expected one, got both")
        return self

    @model_validator(mode="after")
    def _decays_below_its_peak(self) -> Self:
        kwargs = self.arguments.get("lr_scheduler_kwargs") or {}
        if not isinstance(kwargs, dict):
            raise ValueError(f"arguments.lr_scheduler_kwargs: {expected_got('a section', kwargs)}")
        for name in OWNED_SCHEDULER_KWARGS:
            if name in kwargs:
                raise ValueError(f"arguments.lr_scheduler_kwargs.{name} is set by train.min_lr; set it there")
        if self.min_lr is None:
            if self.schedule == "cosine_with_min_lr":
                raise ValueError("min_lr: expected a rate or a share such as 10% for cosine_with_min_lr, got null")
            return self
        if self.schedule not in DECAYING:
            raise ValueError(f"min_lr: expected a schedule of {', '.join(DECAYING)}; got {self.schedule}")
        if self.min_learning_rate >= self.learning_rate:
            raise ValueError(
                f"min_lr: expected less than learning_rate {self.learning_rate:g}, or a share of it such as 10%; "
                f"got {self.min_lr}"
            )
        return self

    @property
    def min_learning_rate(self) -> float:
        if isinstance(self.min_lr, str):
            return self.learning_rate * float(self.min_lr.removesuffix("%")) / 100
        return self.min_lr or 0.0


def micro_batch_tokens(train: Train, data: Data, processes: int = 1) -> int:
    """Return the positions of one micro-batch over all processes, padding included."""
    return train.batch_size * data.max_length * processes


class Parallel(Section):
    """Distribution of the models over several devices; a single device needs none of it.

    Attributes:
        strategy: distribution of the student: `ddp` replicates it on every device, `fsdp` shards it (FSDP2), `auto`
            replicates it where it fits.
        teacher: distribution of the teacher: `copied` replicates it on every device, `sharded` shards it (FSDP2,
            gathered one layer at a time), `served` starts a teacher server on GPUs that do not train (`teacher_gpus`),
            and `auto` replicates it where it fits next to the student, shards it where it does not, and serves it where
            no other placement fits.
        teacher_gpus: number of GPUs (on a CPU, of processes) for the teacher server, the last ones of this machine; the
            others train. Required with `teacher: served`.
        teacher_layout: distribution of the teacher over the server's GPUs: `copied`, one replica per GPU, or `sharded`;
            `auto` replicates it where it fits.
        teacher_timeout: seconds for the teacher server of a run to load the teacher, after which the run ends.
    """

    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    teacher: Literal["auto", "copied", "sharded", "served"] = "auto"
    teacher_gpus: Count | None = None
    teacher_layout: Literal["auto", "copied", "sharded"] = "auto"
    # as long as the processes of a launch wait for one that reads weights (core/ranks.py)
    teacher_timeout: Annotated[float, Field(gt=0, le=14_400)] = 14_400.0

    @model_validator(mode="after")
    def _has_gpus_for_the_teacher(self) -> Self:
        served = self.teacher == "served"
        if served and self.teacher_gpus is None:
            raise ValueError("teacher_gpus is missing: how many of the GPUs hold the teacher")
        if not served and (self.teacher_gpus is not None or self.teacher_layout != "auto"):
            raise ValueError("teacher_gpus and teacher_layout belong to teacher: served")
        return self
