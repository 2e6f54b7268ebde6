"""Conversion of a recipe's `train:` and `parallel:` sections to transformers' TrainingArguments."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from distill_kernels.optim.adamw import FusedAdamW
from transformers import Trainer, TrainingArguments, get_scheduler

from distill.models.dtypes import COMPUTE, Precision, resolve_precision
from distill.planning.run_plan import RunPlan
from distill.planning.steps import FUSED
from distill.recipe import Recipe, Train
from distill.recipe.held_out_figures import PREFIX

log = logging.getLogger(__name__)

# fields of TrainingArguments with a value for every run, which `train.arguments` may replace
DEFAULTS_OF_A_RUN = {"save_total_limit", "logging_first_step", "disable_tqdm", "dataloader_pin_memory"}
# optimizers that fail with a traceback at their first step over FSDP2 shards (transformers 5.23, torch 2.13)
NOT_IN_SHARDS = {
    "adagrad": "it creates its states before the student is sharded",
    "adafactor": "it adds unsharded tensors to shards",
}

# arguments of `Trainer` that only methods read which `DistillationTrainer` overrides, and what to use in their place
NOT_READ = {
    "compute_loss_func": "loss=",
    "compute_metrics": "the metrics of evaluate(), since no logits are computed",
    "preprocess_logits_for_metrics": "the metrics of evaluate(), since no logits are computed",
    "label_smoothing_factor": "label_smoothing of loss=Loss(...)",
    "bf16_full_eval": "bf16, or models in bfloat16",
    "fp16_full_eval": "fp16, or models in float16",
    "enable_jit_checkpoint": "nothing: SIGTERM writes a checkpoint without it",
    "use_liger_kernel": "nothing: the loss is fused already, and Liger's forward would replace it",
}


def fused_optimizer(recipe: Recipe, arguments: TrainingArguments) -> tuple[type[Any], dict[str, Any]] | None:
    """Return FusedAdamW and its arguments for `Trainer(optimizer_cls_and_kwargs=)`; None for another optimizer.

    For float32 weights with float32 states on a CPU the same algorithm runs as torch's AdamW, which is faster there
    than the kernel's reference. torch's has neither master weights, stochastic rounding nor states of another dtype.
    """
    train = recipe.train
    if train.optimizer != FUSED:
        return None
    precision = resolve_precision(recipe, arguments.device)
    # adapters are float32 whatever their base is
    weights = torch.float32 if precision.lora else precision.student
    states = None if train.optimizer_states == "auto" else COMPUTE[train.optimizer_states]
    if arguments.device.type == "cpu" and weights == torch.float32 and states in (None, torch.float32):
        return None
    return FusedAdamW, {
        "lr": arguments.learning_rate,
        "betas": (arguments.adam_beta1, arguments.adam_beta2),
        "eps": arguments.adam_epsilon,
        "state_dtype": states,
        "stochastic_rounding": not train.master_weights,
        "master_weights": train.master_weights,
        "seed": train.seed,
    }


def require_optimizer(arguments: TrainingArguments, student: torch.nn.Module) -> None:
    """Check that the optimizer's package is installed and accepts the arguments."""
    try:
        Trainer.get_optimizer_cls_and_kwargs(arguments, student)  # type: ignore[arg-type]
    except (ImportError, ValueError) as error:
        name = getattr(arguments.optim, "value", arguments.optim)
        raise ValueError(f"train.optimizer: {name}: {str(error).splitlines()[0]}") from error


def training_arguments(
    recipe: Recipe,
    folder: Path,
    plan: RunPlan,
    *,
    device: torch.device,
    precision: Precision,
) -> TrainingArguments:
    """Return the TrainingArguments of a recipe.

    Args:
        plan: Number of steps and micro-batches, and whether FSDP2 shards the student.
        precision: Dtypes of computing and of the weights.

    Raises:
        ValueError: A field, `train.arguments` included, does not fit; the message names it.
    """
    train = recipe.train
    steps = plan.steps
    schedule, settings_of_schedule = _schedule(train, steps)
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": plan.rows,
        "per_device_eval_batch_size": recipe.eval.batch_size or train.batch_size,
        "gradient_accumulation_steps": plan.accumulation,
        "learning_rate": train.learning_rate,
        "lr_scheduler_type": schedule,
        "warmup_steps": train.warmup if train.warmup >= 1 else round(train.warmup * steps),
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm,
        "optim": "adamw_torch" if train.optimizer == FUSED else train.optimizer,
        "bf16": precision.autocast == torch.bfloat16,
        "fp16": precision.autocast == torch.float16,
        "seed": train.seed,
        "full_determinism": train.deterministic,
        # with keep_best alone at the last step too: best and last evaluation can differ
        "save_strategy": "steps" if train.save_every or train.keep_best else "no",
        "save_steps": train.save_every or (steps if train.keep_best else 0.1),
        "save_total_limit": 2,
        "eval_strategy": "steps" if train.eval_every else "no",
        "eval_steps": train.eval_every,
        "logging_steps": train.log_every,
        "logging_first_step": True,
        "report_to": train.report_to or "none",
        "disable_tqdm": True,
        "use_cpu": device.type == "cpu",
        # of a stream they tokenise for the main process, which packs: rows then do not depend on their number
        "dataloader_num_workers": 0 if recipe.data.streaming else recipe.data.workers,
        "dataloader_pin_memory": device.type == "cuda",
    }
    if train.neftune_alpha is not None:
        values["neftune_noise_alpha"] = train.neftune_alpha
    if train.gradient_checkpointing:
        # transformers 5.23 renamed it
        known = TrainingArguments.__dataclass_fields__
        name = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
        values |= {name: True, f"{name}_kwargs": {"use_reentrant": False}}
    if plan.placement.student_sharded and plan.world > 1:
        why = NOT_IN_SHARDS.get(train.optimizer)
        if why:
            raise ValueError(
                f"train.optimizer: {train.optimizer} cannot train a student sharded by FSDP ({why}); expected "
                f"{FUSED}, adamw_torch, rmsprop or sgd, or parallel.strategy: ddp"
            )
        values |= {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    clash = set(values) & set(train.arguments) - DEFAULTS_OF_A_RUN
    assert not clash, f"arguments that the recipe should have refused: {clash}"
    values |= train.arguments
    if settings_of_schedule:  # those of `train.arguments` are among them
        values["lr_scheduler_kwargs"] = settings_of_schedule
    try:
        made = TrainingArguments(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"train: transformers refused these arguments: {str(error).splitlines()[0]}") from error
    if train.keep_best is not None:
        # Set afterwards: TrainingArguments would refuse intervals of which save_every is no multiple of eval_every,
        # since `Trainer` alone loses a best evaluation without a checkpoint; ours writes one (transformers_compat.py).
        made.load_best_model_at_end = True
        made.metric_for_best_model = PREFIX + train.keep_best
        made.greater_is_better = recipe.figure_directions[train.keep_best]
    try:  # a bad schedule would otherwise fail only after the evaluation that precedes training
        tried = torch.optim.SGD([torch.zeros(1)], lr=made.learning_rate)
        settings = made.lr_scheduler_kwargs
        get_scheduler(
            made.lr_scheduler_type,
            tried,
            made.get_warmup_steps(steps),
            steps,
            scheduler_specific_kwargs={} if settings is None else dict(settings),  # type: ignore[arg-type]
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"train.arguments.lr_scheduler_kwargs: {str(error).splitlines()[0]}") from error
    return made


def _schedule(train: Train, steps: int) -> tuple[str, dict[str, Any]]:
    """Return the type and the arguments of transformers' schedule; each that decays has another name for its end."""
    name = train.schedule
    own: dict[str, Any] = {}
    if name in ("constant", "constant_with_warmup"):
        name = "constant_with_warmup"  # "constant" of transformers has no warm-up
    elif name == "warmup_stable_decay":
        own["num_decay_steps"] = max(steps // 5, 1)
        if train.min_lr is not None:
            own["min_lr_ratio"] = train.min_learning_rate / train.learning_rate
    elif name == "polynomial":
        own["lr_end"] = train.min_learning_rate
    elif train.min_lr is not None and name == "linear":
        name = "polynomial"  # of the first degree, since "linear" ends at 0
        own |= {"lr_end": train.min_learning_rate, "power": 1.0}
    elif train.min_lr is not None:
        name = "cosine_with_min_lr"
        own["min_lr"] = train.min_learning_rate
    given = train.arguments.get("lr_scheduler_kwargs")
    return name, own | (given if isinstance(given, dict) else {})


def overwrite_arguments(args: TrainingArguments, more: Mapping[str, Any]) -> None:
    """Set the arguments whose other values would train wrongly, or slower, with `DistillationTrainer`.

    Raises:
        ValueError: `args`, or `more` that `Trainer` is given, have an argument that would have no effect.
    """
    for name, instead in NOT_READ.items():
        if more.get(name) or getattr(args, name, None):
            raise ValueError(f"{name}: expected none, since DistillationTrainer does not read it; use {instead}")
    args.remove_unused_columns = False
    args.logging_nan_inf_filter = False
    args.ddp_find_unused_parameters = False
    args.average_tokens_across_devices = True
    args.accelerator_config.dispatch_batches = False  # type: ignore[union-attr]
    if args.device.type == "cuda" and args.dataloader_pin_memory:
        # a copy that blocks would wait for the GPU, so that it idles until the next step's kernels are launched
        args.accelerator_config.non_blocking = True  # type: ignore[union-attr]
    if args.n_gpu > 1:
        from distill.teachers.backends.served.launched import LaunchedServers

        if LaunchedServers.current is None:  # else a teacher server uses the others
            log.warning("%d GPUs are visible to one process; using one. Use torchrun for all.", args.n_gpu)
        args._n_gpu = 1
