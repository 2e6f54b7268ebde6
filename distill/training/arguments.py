"""A recipe's `train:` and `parallel:` sections as transformers' TrainingArguments, and the arithmetic between them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from distill_kernels.optim.adamw import FusedAdamW
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.integrations import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from distill.recipe import Data, Recipe, Train
from distill.recipe.models import EIGHT_BITS

FUSED = "fused_adamw"
# fail at their first step over FSDP2's shards (transformers 5.23, torch 2.13), with a traceback
NOT_IN_SHARDS = {
    "adagrad": "it makes its states before the student is cut",
    "adafactor": "it adds whole tensors to shards",
}
COMPUTE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Precision(NamedTuple):
    """What the student computes in, what its weights are kept in, and what the teacher's are."""

    compute: torch.dtype
    student: torch.dtype
    teacher: torch.dtype
    lora: bool = False

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of autocast, None where all weights are in the compute dtype already.

        PEFT keeps adapters in float32 beside frozen 16-bit weights: without autocast their products would be float32.
        """
        return None if self.compute in (torch.float32, None if self.lora else self.student) else self.compute


def resolve_device(train: Train) -> torch.device:
    """`train.device` on this machine.

    Raises:
        ValueError: CUDA asked for and absent.
    """
    if train.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("train.device: cuda was asked for, and torch sees no CUDA device here; use cpu or auto")
    if train.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def resolve_precision(recipe: Recipe, device: torch.device) -> Precision:
    """Fill in `auto`: bf16 on GPUs that have it, fp32 on the CPU.

    A student that is trained in full keeps fp32 weights under autocast, since bf16 weights would round small updates
    away; frozen weights (the teacher's, and a LoRA student's base) are kept in what is computed in.
    """
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    asked = recipe.train.precision
    compute = (torch.bfloat16 if bf16 else torch.float32) if asked == "auto" else COMPUTE[asked]
    frozen = compute if recipe.student.lora is not None else torch.float32
    student = frozen if recipe.student.dtype == "auto" else COMPUTE[recipe.student.dtype]
    if student == torch.float16 and recipe.student.lora is None:
        raise ValueError("student.dtype: float16 weights cannot be trained; use float32 with train.precision: float16")
    named = "bfloat16" if recipe.teacher.dtype in EIGHT_BITS else recipe.teacher.dtype
    teacher = compute if named == "auto" else COMPUTE[named]
    return Precision(compute, student, teacher, lora=recipe.student.lora is not None)


def world_size() -> int:
    """Processes of this run, as torchrun and accelerate announce them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def accumulation_steps(train: Train, data: Data, world: int) -> int:
    """Micro-batches of one optimizer step: `tokens_per_step` over `batch_size * max_length * world`.

    Raises:
        ValueError: where that is no whole number, naming the nearest values that are.
    """
    micro = train.batch_size * data.max_length * world
    if train.tokens_per_step is None:
        return 1
    steps, rest = divmod(train.tokens_per_step, micro)
    if rest or not steps:
        near = f"{steps * micro} or {(steps + 1) * micro}" if steps else str(micro)
        raise ValueError(
            f"train.tokens_per_step: expected a multiple of train.batch_size x data.max_length x devices = "
            f"{train.batch_size} x {data.max_length} x {world} = {micro}, such as {near}; came {train.tokens_per_step}"
        )
    return steps


def total_steps(train: Train, rows: int, accumulation: int, world: int) -> int:
    """Optimizer steps of the run; an epoch's last step may be smaller."""
    if train.steps is not None:
        return train.steps
    assert train.epochs is not None
    per_epoch = -(-rows // (train.batch_size * world * accumulation))
    return max(int(-(-train.epochs * per_epoch // 1)), 1)


def fused_optimizer(recipe: Recipe, arguments: TrainingArguments) -> tuple[type[Any], dict[str, Any]] | None:
    """FusedAdamW and its settings, as `Trainer(optimizer_cls_and_kwargs=)` takes them; None for another optimizer.

    On a CPU the same algorithm runs as torch's AdamW, which is faster there than the kernel's reference.
    """
    train = recipe.train
    if train.optimizer != FUSED or arguments.device.type == "cpu":
        return None
    states = None if train.optimizer_states == "auto" else COMPUTE[train.optimizer_states]
    return FusedAdamW, {
        "lr": arguments.learning_rate,
        "betas": (arguments.adam_beta1, arguments.adam_beta2),
        "eps": arguments.adam_epsilon,
        "state_dtype": states,
        "stochastic_rounding": not train.master_weights,
        "master_weights": train.master_weights,
        "seed": train.seed,
    }


def require_reports(names: Sequence[str]) -> None:
    """Hold that what `train.report_to` names is known to transformers and installed.

    Raises:
        ValueError: naming the first that is not.
    """
    found = get_available_reporting_integrations()
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK and name != "all":
            raise ValueError(f"train.report_to: expected some of {', '.join(INTEGRATION_TO_CALLBACK)}; came {name}")
        if name not in (*found, "all", "flyte"):  # flyte is not looked for there
            raise ValueError(f"train.report_to: {name} is not installed here; install its package, or leave it out")


def require_optimizer(arguments: TrainingArguments, student: torch.nn.Module) -> None:
    """Hold that the package which brings the optimizer is installed, and that it has what it needs.

    Raises:
        ValueError: in transformers' words.
    """
    try:
        Trainer.get_optimizer_cls_and_kwargs(arguments, student)  # type: ignore[arg-type]
    except (ImportError, ValueError) as error:
        name = getattr(arguments.optim, "value", arguments.optim)
        raise ValueError(f"train.optimizer: {name}: {str(error).splitlines()[0]}") from error


def training_arguments(
    recipe: Recipe,
    folder: Path,
    *,
    rows: int,
    device: torch.device,
    precision: Precision,
    student_sharded: bool = False,
) -> TrainingArguments:
    """TrainingArguments for this recipe.

    Args:
        folder: Where checkpoints go.
        rows: Sequences in the training data.
        device: From `resolve_device`.
        precision: From `resolve_precision`.
        student_sharded: The student goes through FSDP2; from `plan_sharing`.

    Raises:
        ValueError: naming the field that does not fit, `train.arguments` included.
    """
    train, world = recipe.train, world_size()
    require_reports(train.report_to)
    accumulation = accumulation_steps(train, recipe.data, world)
    steps = total_steps(train, rows, accumulation, world)
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": train.batch_size,
        "per_device_eval_batch_size": train.batch_size,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": train.learning_rate,
        # what transformers calls "constant" leaves out the warm-up
        "lr_scheduler_type": "constant_with_warmup" if train.schedule == "constant" else train.schedule,
        "warmup_steps": train.warmup if train.warmup >= 1 else round(train.warmup * steps),
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm,
        "optim": "adamw_torch" if train.optimizer == FUSED else train.optimizer,
        "bf16": precision.autocast == torch.bfloat16,
        "fp16": precision.autocast == torch.float16,
        "seed": train.seed,
        "full_determinism": train.deterministic,
        "save_strategy": "steps" if train.save_every else "no",
        "save_steps": train.save_every or 0.1,
        "save_total_limit": 2,
        "eval_strategy": "steps" if train.eval_every else "no",
        "eval_steps": train.eval_every,
        "logging_steps": train.log_every,
        "logging_first_step": True,
        "report_to": train.report_to or "none",
        "disable_tqdm": True,
        "use_cpu": device.type == "cpu",
        "dataloader_num_workers": recipe.data.workers,
        "dataloader_pin_memory": device.type == "cuda",
    }
    if train.schedule == "warmup_stable_decay":
        values["lr_scheduler_kwargs"] = {"num_decay_steps": max(steps // 5, 1)}
    if train.gradient_checkpointing:
        # transformers 5.23 renamed it
        known = TrainingArguments.__dataclass_fields__
        name = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
        values |= {name: True, f"{name}_kwargs": {"use_reentrant": False}}
    if student_sharded and world > 1:
        if why := NOT_IN_SHARDS.get(train.optimizer):
            raise ValueError(
                f"train.optimizer: {train.optimizer} cannot train a student sharded by FSDP ({why}); expected "
                f"{FUSED}, adamw_torch, rmsprop or sgd, or parallel.strategy: ddp"
            )
        values |= {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    if clash := sorted(set(values) & set(train.arguments) - {"save_total_limit", "logging_first_step"}):
        raise ValueError(f"train.arguments.{clash[0]}: a field of the recipe sets it; leave it out")
    require_arguments(train.arguments)
    values |= train.arguments
    if device.type == "cuda":  # batches are copied while the GPU computes; otherwise every copy would wait for it
        asked = values.get("accelerator_config")
        values["accelerator_config"] = {"non_blocking": True, **(asked if isinstance(asked, dict) else {})}
    try:
        made = TrainingArguments(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"train: transformers refused these arguments: {str(error).splitlines()[0]}") from error
    try:  # otherwise refused behind the evaluation that comes before training
        tried, settings = torch.optim.SGD([torch.zeros(1)], lr=made.learning_rate), made.lr_scheduler_kwargs
        get_scheduler(
            made.lr_scheduler_type, tried, made.get_warmup_steps(steps), steps,
            scheduler_specific_kwargs={} if settings is None else dict(settings),  # type: ignore[arg-type]
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise ValueError(f"train.arguments.lr_scheduler_kwargs: {str(error).splitlines()[0]}") from error
    return made


def require_arguments(given: Mapping[str, Any]) -> None:
    """Refuse `train.arguments` that do not exist, and numbers and switches that are none: transformers looks at few.

    Raises:
        ValueError: naming the first one.
    """
    unknown = sorted(set(given) - set(TrainingArguments.__dataclass_fields__))
    if unknown:
        raise ValueError(f"train.arguments.{unknown[0]}: transformers.TrainingArguments has no such argument")
    if given.get("use_liger_kernel"):
        raise ValueError(
            "train.arguments.use_liger_kernel: it would take the place of the forward that computes this loss; leave "
            "it out"
        )
    for name, value in given.items():
        field = TrainingArguments.__dataclass_fields__[name]
        kind = float if "float" in str(field.type) and field.default is not None else type(field.default)
        fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
        if kind in (bool, int, float) and (not fits or (kind is not bool and isinstance(value, bool))):
            wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
            raise ValueError(f"train.arguments.{name}: expected {wanted}, came {value!r}")
