"""Names that people know from other tools: what each is called here, and how it is written where that differs.

    ALIASES["micro_batch_size"]     # Alias(field="train.batch_size", tools="axolotl", cure="")

The error line of an unknown field and the settings reference read these tables; nothing is renamed in silence.
"""

from __future__ import annotations

import re

from distill.core.faults import Alias, Names
from distill.recipe.train import OWNED_ARGUMENTS

# our field: its names elsewhere (and whose names they are), with a section where the name alone means something else;
# those of transformers that a field of the recipe owns are in OWNED_ARGUMENTS
_ELSEWHERE = {
    "train.tokens_per_step": (
        "gradient_accumulation_steps (transformers, axolotl); global_batch_size (Megatron, NeMo); "
        "effective_batch_size gradient_accumulation grad_accum_steps"
    ),
    "train.precision": "bf16 fp16 (transformers, axolotl); mixed_precision (accelerate)",
    "train.learning_rate": "lr (torchtune, PyTorch); max_lr (Megatron)",
    "train.steps": "train_steps train_iters (Megatron); max_iters (nanoGPT); max_steps_per_epoch (torchtune)",
    "train.epochs": "num_epochs (axolotl)",
    "train.batch_size": (
        "micro_batch_size (axolotl); per_device_eval_batch_size (transformers); train_batch_size (DeepSpeed)"
    ),
    "train.schedule": "lr_scheduler (axolotl, torchtune); lr_schedule scheduler",
    "train.warmup": "num_warmup_steps (torchtune)",
    "train.max_grad_norm": (
        "max_norm (PyTorch); clip_grad_norm (torchtune); grad_clip (nanoGPT, Megatron); gradient_clipping "
        "(DeepSpeed); gradient_clip_val (Lightning)"
    ),
    "train.arguments.tf32": "tf32 (transformers)",
    "train.gradient_checkpointing": "enable_activation_checkpointing (torchtune); use_gradient_checkpointing (unsloth)",
    "train.seed": "random_state (unsloth); random_seed; data_seed (transformers)",
    "train.eval_every": "evals_per_epoch (axolotl)",
    "train.save_every": "saves_per_epoch (axolotl)",
    "train.log_every": "log_every_n_steps (torchtune)",
    "train.report_to": "use_wandb; wandb_project (axolotl)",
    "train.arguments.save_total_limit": "save_total_limit (transformers)",
    "train.arguments.adam_beta1": "adam_beta1 (transformers)",
    "train.arguments.adam_beta2": "adam_beta2 (transformers)",
    "train.arguments.adam_epsilon": "adam_epsilon (transformers)",
    "name": "run_name (transformers)",
    "output_dir": "out_dir (nanoGPT); log_dir",
    "data.source": (
        "data.path datasets (axolotl); data.name data_files (datasets); dataset (LLaMA-Factory, torchtune, "
        "DistillKit); dataset_name (TRL); dataset_path data_path train_data; train_file (transformers)"
    ),
    "data.subset": "dataset_config (TRL); dataset_config_name (transformers)",
    "data.split": "train_split",
    "data.format": "data.type (axolotl); dataset_format",
    "data.max_length": (
        "max_seq_length (unsloth, TRL, DistillKit); max_seq_len (torchtune); sequence_len (axolotl); seq_length "
        "(Megatron, NeMo); cutoff_len (LLaMA-Factory); block_size (nanoGPT); model_max_length (transformers)"
    ),
    "data.packing": "sample_packing (axolotl); packed (torchtune)",
    "data.max_rows": "max_samples (LLaMA-Factory); num_samples (DistillKit); max_train_samples (transformers)",
    "data.workers": "num_proc (datasets); dataset_num_proc (TRL); preprocessing_num_workers (LLaMA-Factory)",
    "data.fields.text": "text_field; dataset_text_field (TRL)",
    "data.fields.messages": "field_messages (axolotl)",
    "data.chat_template": "template (LLaMA-Factory)",
    "data.train_on": "train_on_inputs (axolotl); completion_only_loss assistant_only_loss (TRL)",
    "data.validation.fraction": "val_set_size (axolotl); val_size (LLaMA-Factory); test_size (datasets)",
    "data.validation.source": "test_datasets (axolotl); eval_dataset (LLaMA-Factory); validation_file (transformers)",
    "data.validation.seed": "split_seed",
    "data.on_policy.fraction": "lmbda (TRL)",
    "student.model": (
        "base_model (axolotl); model_name_or_path (TRL, LLaMA-Factory); model_name (unsloth); name_or_path model; "
        "student_model (DistillKit)"
    ),
    "teacher.model": "teacher_model (DistillKit); teacher_model_name_or_path (TRL)",
    "teachers": "teacher.weight",
    "student.dtype": "torch_dtype (transformers)",
    "teacher.dtype": "load_in_8bit (transformers); quantization",
    "": "load_in_4bit (transformers); use_dora (PEFT)",
    "student.attention": "attn_implementation (transformers); flash_attention (axolotl); use_flash_attention",
    "student.from_teacher.layers": "num_hidden_layers (transformers); num_layers",
    "student.lora": "adapter (axolotl); lora use_lora peft; use_peft (TRL); finetuning_type (LLaMA-Factory)",
    "student.lora.r": "lora_r (axolotl, TRL); lora_rank (LLaMA-Factory, torchtune); rank",
    "student.lora.alpha": "lora_alpha use_rslora (PEFT)",
    "student.lora.dropout": "lora_dropout (PEFT)",
    "student.lora.targets": (
        "target_modules (PEFT); lora_target_modules lora_target_linear (axolotl); lora_target (LLaMA-Factory); "
        "lora_attn_modules (torchtune)"
    ),
    "loss.temperature": "kd_temperature (KDFlow); loss.temp",
    "loss.terms": (
        "loss.type loss.divergence loss.alpha loss.lambda loss.kd_ratio loss.kd_weight loss.kl_weight "
        "loss.ce_weight loss.ce_ratio loss.hard_weight; loss_type (TRL); loss_functions (DistillKit); kd_loss "
        "(KDFlow); loss.beta (TRL)"
    ),
}
# how it is written here, where another name alone would not do
_CURES = {
    "gradient_accumulation_steps global_batch_size effective_batch_size gradient_accumulation grad_accum_steps": (
        "tokens of a whole step: batch_size x data.max_length x accumulation x devices"
    ),
    "warmup_ratio": "below 1 it is a share of all steps",
    "bf16 fp16 mixed_precision": "one of float32, bfloat16, float16, as in train.precision: bfloat16",
    "fsdp fsdp_config": "as in parallel.strategy: fsdp",
    "deepspeed": "fsdp shards the student as ZeRO-3 does",
    "data_seed": "it orders the rows; data.validation.seed chooses what is held out",
    "use_wandb": "as in train.report_to: wandb",
    "wandb_project": "report_to: wandb, and WANDB_PROJECT in the environment",
    "run_name": "names the run, --output-dir or output_dir the folder of all runs",
    "output_dir": "it stands at the top of the recipe",
    "data.name": "a configuration of a hub data set is data.subset",
    "datasets": "one source: a file, a hub id, or a folder of files",
    "data_files": "a file, or a folder of them",
    "data.type": "left out, it is told by the columns",
    "template": "tokenizer for its own, or a .jinja file",
    "train_on_inputs completion_only_loss assistant_only_loss": "answers alone are learned: all of them, or the last",
    "model": "teacher.model names the large one",
    "teacher.weight": "several teachers stand under teachers:, each with its weight",
    "load_in_8bit load_in_4bit quantization": (
        "a frozen model in 8 bits is teacher.dtype: int8 or fp8; a model in 4 bits is named by its checkpoint"
    ),
    "flash_attention use_flash_attention": "left out, the fastest attention here is measured",
    "adapter": "as in student.lora: {r: 16, alpha: 32}; teacher.adapter merges one",
    "lora use_lora use_peft peft finetuning_type": "as in student.lora: {r: 16, alpha: 32}",
    "lora_target_linear": "as in student.lora.targets: all-linear",
    "use_dora": "there is no DoRA here, plain LoRA alone",
    "use_rslora": "alpha is divided by r, not by its root",
    "loss.type loss.divergence loss_type loss_functions kd_loss": "as in loss.terms: [{type: forward_kl}]",
    "loss.beta": "as in loss.terms: [{type: jsd, beta: 0.5}]",
    "loss.alpha loss.lambda loss.kd_ratio loss.kd_weight loss.kl_weight loss.ce_weight loss.ce_ratio "
    "loss.hard_weight": (
        "the loss is the plain weighted sum of loss.terms, nothing is traded off behind it: set each term's "
        "weight, as in terms: [{type: forward_kl, weight: 0.5}, {type: cross_entropy, weight: 0.5}]"
    ),
}


def _aliases() -> dict[str, Alias]:
    cures = {name: cure for names, cure in _CURES.items() for name in names.split()}
    found = {name: Alias(field, "transformers", cures.get(name, "")) for name, field in OWNED_ARGUMENTS.items()}
    for field, text in _ELSEWHERE.items():
        for names, tools in re.findall(r"([\w. ]+)(?: \((.+?)\))?(?:; |$)", text):
            found |= {name: Alias(field, tools, cures.get(name, "")) for name in names.split()}
    return found


ALIASES: dict[str, Alias] = _aliases()
_BITS = {
    "bf16": "bfloat16", "bf16-mixed": "bfloat16", "torch.bfloat16": "bfloat16", "fp16": "float16", "half": "float16",
    "torch.float16": "float16", "fp32": "float32", "float": "float32", "full": "float32", "torch.float32": "float32",
    "int4": "auto and a checkpoint that is quantised already", "nf4": "auto and a checkpoint that is quantised already",
    "4bit": "auto and a checkpoint that is quantised already", "8bit": "int8", "float8": "fp8",
}  # fmt: skip
_KL = {
    "kl": "forward_kl", "kld": "forward_kl", "kl_div": "forward_kl", "fkl": "forward_kl", "reverse_kld": "reverse_kl",
    "rkl": "reverse_kl", "js": "jsd", "gkd": "jsd", "generalized_jsd": "jsd", "distillm": "skew_forward_kl",
    "skl": "skew_forward_kl", "srkl": "skew_reverse_kl", "skew_kl": "skew_forward_kl", "tv": "tvd", "tvd++": "tvd",
    "total_variation": "tvd", "ce": "cross_entropy", "sft": "cross_entropy", "nll": "cross_entropy",
}  # fmt: skip
# values that people know from other tools, by the last part of our field: ours
VALUES: dict[str, dict[str, str]] = {
    "format": {
        "sharegpt": "chat", "conversation": "chat", "conversations": "chat", "conversational": "chat",
        "messages": "chat", "openai": "chat", "chatml": "chat", "chat_template": "chat", "alpaca": "prompt_completion",
        "instruct": "prompt_completion", "instruction": "prompt_completion", "completion": "text", "raw": "text",
        "pretrain": "text", "pretraining": "text", "json": "auto", "jsonl": "auto", "parquet": "auto", "csv": "auto",
    },
    "dtype": _BITS,
    "precision": _BITS | {"mixed": "bfloat16", "amp": "bfloat16"},
    "optimizer_states": _BITS,
    "type": _KL,
    "schedule": {
        "cosine_with_restarts": "cosine", "cosine_with_min_lr": "cosine", "linear_with_warmup": "linear",
        "constant_with_warmup": "constant", "wsd": "warmup_stable_decay", "none": "constant",
    },
    "strategy": {
        "fsdp2": "fsdp", "full_shard": "fsdp", "zero3": "fsdp", "deepspeed": "fsdp", "zero": "fsdp", "dp": "ddp",
        "none": "ddp",
    },
    "train_on": {"last_turn": "last", "assistant": "all", "completion": "all", "response": "all"},
    "device": {"gpu": "cuda", "cuda:0": "cuda", "mps": "cpu"},
    "vocabulary": {"same": "keep", "uld": "cross", "align": "cross"},
    "engine": {"hf": "transformers"},
}  # fmt: skip

# sections for which people write one value: how it is written, and the value to show where none is given
SHORT: dict[str, tuple[str, str]] = {
    "teacher": ("{{model: {}}}", "HUB_ID_OR_FOLDER"),
    "student": ("{{model: {}}}", "HUB_ID_OR_FOLDER"),
    "student.lora": ("{{r: {}}}", "16"),
    "student.from_teacher": ("{{layers: {}}}", "22"),
    "data": ("{{source: {}}}", "chats.jsonl"),
    "data.validation": ("{{fraction: 0.02}}, or {{source: FILE}}", ""),
    "data.on_policy": ("{{fraction: 0.5}}", ""),
    "data.fields": ("{{text: {}}}", "COLUMN"),
    "loss": ("{{terms: [{{type: forward_kl}}]}}", ""),
    "loss.terms": ("[{{type: forward_kl}}]", ""),
    "train": ("{{steps: {}}}", "1000"),
    "parallel": ("{{strategy: {}}}", "fsdp"),
    "generate": ("{{prompts: []}}", ""),
}
NAMES = Names(ALIASES, VALUES, SHORT)
