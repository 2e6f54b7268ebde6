"""The recipe: everything one distillation run is told, as a YAML file checked field by field.

    teacher: {model: meta-llama/Llama-3.1-8B-Instruct}
    student: {model: meta-llama/Llama-3.2-1B-Instruct}
    data: {source: chats.jsonl}
    train: {steps: 1000}

`load` reads a file, applies `key.sub=value` overrides and validates; `dump` writes the recipe with every default
filled in, and reading that text back gives the same recipe. A mistake raises `RecipeError` with one line a fault.
This module imports no torch, so that recipes are checked at once. Paths are relative to the working directory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, ValidationError, model_validator

from distill.faults import RecipeError, Section, explain, refuse
from distill.recipe_loss import Loss, NotNegative
from distill.recipe_yaml import apply_overrides, parse_yaml, to_yaml

__all__ = ["Data", "Loss", "Recipe", "RecipeError", "Student", "Teacher", "Train", "dump", "load", "parse"]

DType = Literal["auto", "float32", "bfloat16", "float16"]
Weights = Literal["auto", "float32", "bfloat16", "float16", "fp8"]
Count = Annotated[int, Field(ge=1, le=2**53)]
Text = Annotated[str, Field(min_length=1)]


def _text_or_list(value: Any) -> Any:
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(item, str) and item for item in items):
        raise ValueError(refuse("text or a list of texts", value))
    return value


def _steps_or_ratio(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(refuse("a number of steps, or a share of them below 1", value))
    if not 0 <= value <= 2**53 or (value >= 1 and value != int(value)):
        raise ValueError(refuse("a whole number of steps, or a share of them between 0 and 1", value))
    return int(value) if value >= 1 else float(value)


def _no_reports(value: Any) -> Any:
    return [] if value in (None, "none") else [value] if isinstance(value, str) else value


class ModelSection(Section):
    """What teacher and student have in common.

    Attributes:
        model: hub id, local folder, .gguf file, or `package:NAME/FILE.gguf` (a file an installed package carries).
        init: `pretrained` reads `model`; `random` makes random weights in the shape of `config`, for dry runs.
        config: a config.json, its folder, or the name of a shipped architecture such as `llama-3.2-1b`; only read
            when `init` is `random`.
        dtype: what the weights are kept in; `auto` is float32 for weights that are trained, and what is computed in
            (`train.precision`) for frozen ones: the teacher's, and a LoRA student's. `fp8` is for teachers: bfloat16
            with the linear layers but the head in fp8; by how much that moves the teacher is measured and printed.
        revision: branch, tag or commit of a hub model.
        trust_remote_code: run the Python code a hub model brings.
        attention: `auto`, or a transformers attention implementation.
    """

    model: Text | None = None
    init: Literal["pretrained", "random"] = "pretrained"
    config: Text | None = None
    dtype: Weights = "auto"
    revision: Text | None = None
    trust_remote_code: bool = False
    attention: Text = "auto"

    @model_validator(mode="after")
    def _random_needs_a_shape(self) -> Self:
        if self.init == "random" and self.config is None:
            raise ValueError("init: random needs config: a config.json or a shipped architecture such as llama-3.2-1b")
        return self


class Teacher(ModelSection):
    """The large model, never trained.

    Attributes:
        adapter: a PEFT LoRA (hub id or folder) merged into the teacher when it is loaded.
    """

    adapter: Text | None = None

    @model_validator(mode="after")
    def _has_a_source(self) -> Self:
        if self.init == "pretrained" and self.model is None:
            raise ValueError("model is missing: a hub id, a local folder, a .gguf file or package:NAME/FILE.gguf")
        return self


class FromTeacher(Section):
    """A student cut from the teacher: exactly one of the two fields.

    Attributes:
        layers: how many of the teacher's layers to keep.
        keep: which layers to keep, counted from 0, ascending.
    """

    layers: Count | None = None
    keep: list[Annotated[int, Field(ge=0, le=2**31)]] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.layers is None) == (self.keep is None):
            raise ValueError("give exactly one of layers (how many to keep) and keep (which, counted from 0)")
        if self.keep is not None and (not self.keep or sorted(set(self.keep)) != self.keep):
            raise ValueError(refuse("keep to be an ascending list of layer numbers, none twice", self.keep))
        return self


class Lora(Section):
    """Low-rank adapters (Hu et al., 2021): the base weights stay as they are and W + (alpha / r) B A is used.

    Attributes:
        r: rank.
        alpha: the adapters' scale is alpha / r.
        dropout: on the adapters' input.
        targets: module names, or `all-linear` (every linear layer but the head).
        head: adapt the language-model head as well.
    """

    r: Count = 16
    alpha: Annotated[float, Field(gt=0)] = 32.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: Annotated[str | list[str], BeforeValidator(_text_or_list)] = "all-linear"
    head: bool = False


class Student(ModelSection):
    """The small model: exactly one of `model`, `from_teacher`, and `init: random` with `config`.

    `init: random` overrules the other two, so that one override turns any recipe into a dry run.

    Attributes:
        from_teacher: a copy of the teacher with fewer layers.
        lora: train adapters instead of all weights.
        vocabulary: `keep`, or `extend` by the tokens that only the teacher has.
    """

    from_teacher: FromTeacher | None = None
    lora: Lora | None = None
    vocabulary: Literal["keep", "extend"] = "keep"

    @model_validator(mode="after")
    def _trains_in_a_dtype_with_gradients(self) -> Self:
        if self.dtype == "fp8":
            raise ValueError("dtype: fp8 is for teachers; a student is trained in float32, bfloat16 or float16")
        return self

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if self.init == "pretrained" and (self.model is None) == (self.from_teacher is None):
            came = "none" if self.model is None else "both model and from_teacher"
            raise ValueError(f"give exactly one of model, from_teacher, and init: random with config; came {came}")
        return self


class Fields(Section):
    """Which column holds what; a field left out is looked for under its own name."""

    text: Text | None = None
    prompt: Text | None = None
    completion: Text | None = None
    messages: Text | None = None

    def column(self, name: Literal["text", "prompt", "completion", "messages"]) -> str:
        """The column that holds `name`: as mapped, else `name` itself."""
        return getattr(self, name) or name


class Validation(Section):
    """What is held out.

    Attributes:
        source: a data set of its own, or null to hold out a share of the training documents.
        fraction: that share.
        max_rows: hold out no more documents than this.
    """

    source: Text | None = None
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.02
    max_rows: Count | None = 512


class Data(Section):
    """What is learned from.

    Attributes:
        source: `python-stdlib` (the installed Python's own library), `synthetic` or `synthetic:zipf` (random tokens),
            a hub id, or a local json, jsonl, parquet, csv or txt file, or a folder of them.
        subset: configuration of a hub data set.
        split: its split.
        format: `auto` decides by the columns.
        fields: which column holds what.
        chat_template: `tokenizer` for its own, `none`, or a .jinja file.
        max_length: tokens in a sequence.
        packing: put several documents into one sequence, without attention between them.
        train_on: which assistant turns of a chat are learned.
        validation: what is held out.
        max_rows: read no more documents than this.
        workers: processes that tokenise and load.
        cache: keep the tokenised data for the next run.
    """

    source: Text
    subset: Text | None = None
    split: Text = "train"
    format: Literal["auto", "text", "prompt_completion", "chat"] = "auto"
    fields: Fields = Fields()
    chat_template: Text = "tokenizer"
    max_length: Annotated[int, Field(ge=2, le=2**24)] = 1024
    packing: bool = True
    train_on: Literal["all", "last"] = "all"
    validation: Validation = Validation()
    max_rows: Count | None = None
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    cache: bool = True


# TrainingArguments that a field of the recipe owns
OWNED_ARGUMENTS = {
    "max_steps": "train.steps",
    "num_train_epochs": "train.epochs",
    "per_device_train_batch_size": "train.batch_size",
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
    "gradient_checkpointing": "train.gradient_checkpointing",
    "activation_checkpointing": "train.gradient_checkpointing",
    "seed": "train.seed",
    "save_steps": "train.save_every",
    "eval_steps": "train.eval_every",
    "logging_steps": "train.log_every",
    "report_to": "train.report_to",
    "full_determinism": "train.deterministic",
    "use_cpu": "train.device",
    "dataloader_num_workers": "data.workers",
    "fsdp": "parallel.strategy",
    "output_dir": "--name",
}


class Train(Section):
    """How it is learned: exactly one of `steps` and `epochs`.

    Attributes:
        steps: optimizer steps.
        epochs: passes over the data.
        tokens_per_step: tokens in an optimizer step over all devices, padding and prompts included; null for one
            micro-batch a device, without accumulation.
        batch_size: sequences in a micro-batch of one device.
        learning_rate: its peak.
        schedule: of the learning rate, after warm-up.
        warmup: a number of steps, or below 1 a share of all steps.
        weight_decay: decoupled (AdamW).
        max_grad_norm: gradients are clipped to this norm; 0 for no clipping.
        optimizer: `fused_adamw` (ours; on a CPU torch's), or a transformers optimizer name.
        optimizer_states: dtype of fused_adamw's two moments; `auto` is that of the weights.
        master_weights: fused_adamw keeps a float32 copy of bfloat16 weights; without it they are rounded at random.
        precision: what the student computes in, weights of another dtype through autocast.
        gradient_checkpointing: keep fewer activations and compute them again.
        seed: of initialisation, data order, split and dropout.
        save_every: steps between checkpoints; null for none but the final model.
        eval_every: steps between held-out evaluations; null for before and after only.
        log_every: steps between log lines.
        report_to: transformers integrations such as `wandb` or `tensorboard`.
        deterministic: the same bits every time, at some cost in speed.
        device: `auto` takes CUDA where there is one.
        arguments: anything else `transformers.TrainingArguments` takes.
    """

    steps: Count | None = None
    epochs: Annotated[float, Field(gt=0)] | None = None
    tokens_per_step: Count | None = None
    batch_size: Count = 1
    learning_rate: Annotated[float, Field(gt=0)] = 2e-5
    schedule: Literal["cosine", "linear", "constant", "warmup_stable_decay"] = "cosine"
    warmup: Annotated[int | float, BeforeValidator(_steps_or_ratio)] = 0.03
    weight_decay: NotNegative = 0.0
    max_grad_norm: NotNegative = 1.0
    optimizer: Text = "fused_adamw"
    optimizer_states: Literal["auto", "float32", "bfloat16"] = "auto"
    master_weights: bool = False
    precision: DType = "auto"
    gradient_checkpointing: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    save_every: Count | None = None
    eval_every: Count | None = None
    log_every: Count = 10
    report_to: Annotated[list[Text], BeforeValidator(_no_reports)] = Field(default_factory=list)
    deterministic: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    arguments: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            came = "neither" if self.steps is None else f"steps {self.steps} and epochs {self.epochs:g}"
            raise ValueError(f"give exactly one of steps and epochs; came {came}")
        if self.optimizer != "fused_adamw" and (self.master_weights or self.optimizer_states != "auto"):
            raise ValueError(f"master_weights and optimizer_states belong to fused_adamw; came {self.optimizer}")
        for name in self.arguments:
            if name in OWNED_ARGUMENTS:
                raise ValueError(f"arguments.{name} is set by {OWNED_ARGUMENTS[name]}; set it there")
        return self


class Parallel(Section):
    """How several devices share the work: `auto` is DDP, or FSDP where the models do not fit one device."""

    strategy: Literal["auto", "ddp", "fsdp"] = "auto"


PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that reverses a string.",
    "Explain in one sentence why the sky is blue.",
)


class Generate(Section):
    """The samples that close a run: teacher, student before and student after, greedy.

    Attributes:
        prompts: what is asked; an empty list for no samples.
        max_new_tokens: length of an answer.
    """

    prompts: list[Text] = Field(default_factory=lambda: list(PROMPTS))
    max_new_tokens: Annotated[int, Field(ge=1, le=2**20)] = 48


class Recipe(Section):
    """One distillation run; `name` is that of the run's folder and is the recipe file's where it is left out."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    teacher: Teacher
    student: Student
    data: Data
    loss: Loss = Loss()
    train: Train
    parallel: Parallel = Parallel()
    generate: Generate = Generate()

    @model_validator(mode="after")
    def _a_step_holds_a_micro_batch(self) -> Self:
        micro_batch = self.train.batch_size * self.data.max_length
        if self.train.tokens_per_step is not None and self.train.tokens_per_step < micro_batch:
            raise ValueError(
                f"train.tokens_per_step: expected at least one micro-batch, train.batch_size {self.train.batch_size} "
                f"x data.max_length {self.data.max_length} = {micro_batch}; came {self.train.tokens_per_step}"
            )
        return self


def parse(text: str, overrides: Sequence[str] = (), *, name: str = "recipe", origin: str = "recipe") -> Recipe:
    """Recipe from YAML text.

    Args:
        text: the YAML.
        overrides: `key.sub=value` strings, applied in order; see `recipe_yaml.apply_overrides`.
        name: the run's name where the text gives none.
        origin: what error lines call the text.

    Raises:
        RecipeError: one line a fault: field, what was expected, what came.
    """
    tree = parse_yaml(text, origin)
    tree.setdefault("name", re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:100] or "recipe")
    apply_overrides(tree, overrides, list_defaults={("loss", "terms"): Loss().model_dump()["terms"]})
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise RecipeError([f"{origin}: {fault}" for fault in explain(error, Recipe)]) from None


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Recipe from a YAML file, with `key.sub=value` overrides.

    Raises:
        RecipeError: the file cannot be read, is not YAML, or a field is wrong.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError([f"{path}: no such recipe; `distill recipes` lists those that ship"]) from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = (
            "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", None) or error
        )
        raise RecipeError([f"{str(path)!r}: cannot be read as a recipe: {reason}"]) from None
    return parse(text, overrides, name=path.stem, origin=str(path))


def dump(recipe: Recipe) -> str:
    """The recipe as YAML with every field written out; `parse(dump(recipe)) == recipe`."""
    return to_yaml(recipe.model_dump(mode="json"))
