"""Settings of other tools: the field that each corresponds to, and how its value is written where that differs.

    ALIASES["micro_batch_size"]     # Alias(field="train.batch_size", cure="")
    OTHER_TOOLS["train.batch_size"]["axolotl"]      # "micro_batch_size"

The error message of an unknown field and the settings reference read these tables; no field is renamed silently. They
were read in TRL 1.16 (`GKDConfig`, `DistillationConfig`, `SFTConfig`, `ModelConfig` and
transformers.TrainingArguments), in torchtune 0.6.1 (the YAML of its recipe knowledge_distillation_distributed) and in
axolotl 0.19 (its schemas, and those of its integration kd).
"""

from __future__ import annotations

import re
from collections import defaultdict

from distill.core.errors import Alias, Names
from distill.recipe.fields import PATTERNS
from distill.recipe.train import OWNED_ARGUMENTS

TOOLS = ("TRL", "torchtune", "axolotl")
# field: its names in TOOLS, of the same or nearly the same meaning, and, last, other names in use (with their tools in
# parentheses), with a section where the name alone means something else. Names of transformers that a field of the
# recipe sets are in OWNED_ARGUMENTS
_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "train.steps": (
        "max_steps", "max_steps_per_epoch", "max_steps", "train_steps train_iters (Megatron); max_iters (nanoGPT)",
    ),
    "train.epochs": ("num_train_epochs", "epochs", "num_epochs"),
    "train.tokens_per_step": (
        "gradient_accumulation_steps", "gradient_accumulation_steps", "gradient_accumulation_steps",
        "global_batch_size (Megatron, NeMo); effective_batch_size gradient_accumulation grad_accum_steps",
    ),
    "train.batch_size": (
        "per_device_train_batch_size", "batch_size", "micro_batch_size",
        "per_device_eval_batch_size (transformers); train_batch_size (DeepSpeed)",
    ),
    "train.learning_rate": (
        "learning_rate", "optimizer.lr", "learning_rate", "lr (torchtune, PyTorch); max_lr (Megatron)",
    ),
    "train.schedule": ("lr_scheduler_type", "lr_scheduler", "lr_scheduler", "lr_schedule scheduler"),
    "train.warmup": (
        "warmup_steps, warmup_ratio", "lr_scheduler.num_warmup_steps", "warmup_steps, warmup_ratio",
        "num_warmup_steps (torchtune)",
    ),
    "train.weight_decay": ("weight_decay", "optimizer.weight_decay", "weight_decay"),
    "train.max_grad_norm": (
        "max_grad_norm", "clip_grad_norm", "max_grad_norm",
        "max_norm (PyTorch); grad_clip (nanoGPT, Megatron); gradient_clipping (DeepSpeed); gradient_clip_val "
        "(Lightning)",
    ),
    "train.optimizer": ("optim", "optimizer", "optimizer"),
    "train.precision": ("bf16, fp16", "dtype", "bf16, fp16", "mixed_precision (accelerate)"),
    "train.gradient_checkpointing": (
        "gradient_checkpointing", "enable_activation_checkpointing", "gradient_checkpointing",
        "use_gradient_checkpointing (unsloth)",
    ),
    "train.cuda_graph": ("torch_compile", "compile", "torch_compile"),
    "train.seed": ("seed", "seed", "seed", "random_state (unsloth); random_seed; data_seed (transformers)"),
    "train.save_every": ("save_steps", "", "save_steps", "saves_per_epoch (axolotl)"),
    "train.eval_every": ("eval_steps", "", "eval_steps", "evals_per_epoch (axolotl)"),
    "train.log_every": ("logging_steps", "log_every_n_steps", "logging_steps"),
    "train.report_to": ("report_to", "metric_logger", "use_tensorboard, use_wandb", "wandb_project (axolotl)"),
    "train.device": ("use_cpu", "device", ""),
    "train.deterministic": ("full_determinism", "", ""),
    "train.arguments.tf32": ("", "", "", "tf32 (transformers)"),
    "train.arguments.save_total_limit": ("", "", "", "save_total_limit (transformers)"),
    "train.arguments.adam_beta1": ("", "", "", "adam_beta1 (transformers)"),
    "train.arguments.adam_beta2": ("", "", "", "adam_beta2 (transformers)"),
    "train.arguments.adam_epsilon": ("", "", "", "adam_epsilon (transformers)"),
    "train.arguments.neftune_noise_alpha": (
        "", "", "", "neftune_noise_alpha (transformers, TRL, axolotl, LLaMA-Factory); neftune neft_alpha use_neftune",
    ),
    "output_dir": ("output_dir", "output_dir", "output_dir", "out_dir (nanoGPT); log_dir"),
    "teacher.model": (
        "teacher_model_name_or_path", "teacher_checkpointer", "kd_online_server_base_url",
        "teacher_model (DistillKit)",
    ),
    "teacher.revision": ("teacher_model_revision", "", ""),
    "teacher.dtype": ("teacher_model_init_kwargs", "dtype", "", "load_in_8bit (transformers); quantization"),
    "student.model": (
        "model_name_or_path", "checkpointer", "base_model",
        "model_name (unsloth); name_or_path model; student_model (DistillKit)",
    ),
    "student.revision": ("model_revision", "", ""),
    "student.dtype": ("dtype", "dtype", "", "torch_dtype (transformers)"),
    "student.trust_remote_code": ("trust_remote_code", "", "trust_remote_code"),
    "student.attention": (
        "attn_implementation", "", "attn_implementation", "flash_attention (axolotl); use_flash_attention",
    ),
    "student.vocabulary": ("use_uld_loss", "", ""),
    "student.lora": ("use_peft", "", "adapter", "lora use_lora peft; finetuning_type (LLaMA-Factory)"),
    "student.lora.r": ("lora_r", "model.lora_rank", "lora_r", "lora_rank (LLaMA-Factory, torchtune); rank"),
    "student.lora.alpha": ("lora_alpha", "model.lora_alpha", "lora_alpha", "use_rslora (PEFT)"),
    "student.lora.dropout": ("lora_dropout", "model.lora_dropout", "lora_dropout"),
    "student.lora.targets": (
        "lora_target_modules", "model.lora_attn_modules", "lora_target_modules",
        "target_modules (PEFT); lora_target_linear (axolotl); lora_target (LLaMA-Factory); lora_attn_modules "
        "(torchtune)",
    ),
    "student.lora.head": ("lora_modules_to_save", "model.apply_lora_to_output", "lora_modules_to_save"),
    "student.from_teacher.layers": ("", "", "", "num_hidden_layers (transformers); num_layers"),
    "student.from_teacher.hidden": ("", "", "", "hidden_size target_hidden_size (NeMo, ModelOpt)"),
    "student.from_teacher.heads": ("", "", "", "num_attention_heads target_num_attention_heads (NeMo)"),
    "student.from_teacher.kv_heads": ("", "", "", "num_key_value_heads num_query_groups (NeMo)"),
    "student.from_teacher.intermediate": (
        "", "", "", "intermediate_size ffn_hidden_size target_ffn_hidden_size (NeMo)",
    ),
    "student.from_teacher.moe_intermediate": (
        "", "", "", "moe_intermediate_size (transformers); moe_ffn_hidden_size (NeMo, ModelOpt)",
    ),
    "student.from_teacher.shared_expert_intermediate": (
        "", "", "",
        "shared_expert_intermediate_size shared_intermediate_size (transformers); moe_shared_expert_intermediate_size",
    ),
    "student.from_teacher.experts": (
        "", "", "", "num_experts n_routed_experts num_local_experts (transformers); num_moe_experts (NeMo)",
    ),
    "data.source": (
        "dataset_name", "dataset.source", "datasets.path",
        "data.path datasets (axolotl); data.name data_files (datasets); dataset (LLaMA-Factory, torchtune, "
        "DistillKit); dataset_path data_path train_data; train_file (transformers)",
    ),
    "data.subset": ("dataset_config", "", "datasets.name", "dataset_config_name (transformers)"),
    "data.split": ("dataset_train_split", "dataset.split", "datasets.split", "train_split"),
    "data.format": ("", "dataset", "datasets.type", "data.type (axolotl); dataset_format"),
    "data.fields.text": ("dataset_text_field", "", "datasets.field", "text_field"),
    "data.fields.messages": ("", "dataset.conversation_column", "datasets.field_messages", "field_messages (axolotl)"),
    "data.fields.system": ("", "", "datasets.field_system", "columns.system (LLaMA-Factory)"),
    "data.fields.input": ("", "", "datasets.field_input", "columns.query (LLaMA-Factory)"),
    "data.fields.tools": ("", "", "datasets.field_tools", "columns.tools (LLaMA-Factory)"),
    "data.chat_template": ("chat_template_path", "", "chat_template", "template (LLaMA-Factory)"),
    "data.chat_template_kwargs": ("chat_template_kwargs", "", "chat_template_kwargs", ""),
    "data.max_length": (
        "max_length", "tokenizer.max_seq_len", "sequence_len",
        "max_seq_length (unsloth, TRL, DistillKit); max_seq_len (torchtune); seq_length (Megatron, NeMo); "
        "cutoff_len (LLaMA-Factory); block_size (nanoGPT); model_max_length (transformers)",
    ),
    "data.packing": ("packing", "dataset.packed", "sample_packing", "packed (torchtune)"),
    "data.train_on": (
        "assistant_only_loss", "dataset.train_on_input", "datasets.roles_to_train",
        "train_on_inputs (axolotl); completion_only_loss (TRL)",
    ),
    "data.validation.fraction": ("", "", "val_set_size", "val_size (LLaMA-Factory); test_size (datasets)"),
    "data.on_policy.fraction": ("lmbda", "", ""),
    "data.on_policy.max_new_tokens": ("max_new_tokens, max_completion_length", "", ""),
    "data.on_policy.temperature": ("temperature", "", ""),
    "data.on_policy.top_k": ("top_k", "", ""),
    "data.on_policy.top_p": ("top_p", "", ""),
    "data.on_policy.min_p": ("min_p", "", ""),
    "data.on_policy.stop": ("", "", "", "stop_strings (transformers)"),
    "data.on_policy.samples": ("num_generations", "", "", "rollout.n (verl)"),
    "data.on_policy.engine": ("use_vllm", "", ""),
    "data.workers": (
        "dataset_num_proc, dataloader_num_workers", "", "dataset_num_proc",
        "num_proc (datasets); preprocessing_num_workers (LLaMA-Factory)",
    ),
    "data.cache": ("", "", "dataset_prepared_path"),
    "data.max_rows": (
        "", "", "", "max_samples (LLaMA-Factory); num_samples (DistillKit); max_train_samples (transformers)",
    ),
    "data.validation.source": (
        "", "", "", "test_datasets (axolotl); eval_dataset (LLaMA-Factory); validation_file (transformers)",
    ),
    "data.validation.seed": ("", "", "", "split_seed"),
    "loss.temperature": ("temperature", "", "kd_temperature", "loss.temp"),
    "loss.label_smoothing": ("label_smoothing_factor", "", ""),
    "loss.terms[].weight": ("", "kd_ratio", "kd_alpha, kd_ce_alpha"),
    "loss.terms[].type": ("", "kd_loss", ""),
    "loss.terms[].beta": ("beta", "", "kd_beta"),
    "loss.terms": (
        "", "", "",
        "loss.type loss.divergence loss.alpha loss.lambda loss.kd_ratio loss.kd_weight loss.kl_weight "
        "loss.ce_weight loss.ce_ratio loss.hard_weight; loss_type (TRL); loss_functions (DistillKit); kd_loss "
        "(KDFlow); loss.beta (TRL)",
    ),
    "parallel.strategy": ("fsdp", "", "fsdp_config"),
    "name": ("", "", "", "run_name (transformers)"),
    "teachers": ("", "", "", "teacher.weight"),
    "": ("", "", "", "load_in_4bit (transformers); use_dora (PEFT)"),
}  # fmt: skip
# how to write the value here, where another name for the field is not enough
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
    "data.type": "left out, it is detected from the columns",
    "template": "tokenizer for its own, or a .jinja file",
    "train_on_inputs completion_only_loss assistant_only_loss": "only responses are trained on: all, or the last",
    "model": "student.model names the student, teacher.model the teacher",
    "teacher.weight": "several teachers are a list under teachers:, each with its weight",
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
        "the loss is the plain weighted sum of loss.terms, no weight follows from another: set each term's "
        "weight, as in terms: [{type: forward_kl, weight: 0.5}, {type: cross_entropy, weight: 0.5}]"
    ),
}

# settings of other tools that have no counterpart here, by name: the nearest thing that there is
_UNSUPPORTED = {
    "early_stopping early_stopping_patience early_stopping_threshold early_stop patience": (
        "train.eval_every draws the held-out curve, train.save_every keeps checkpoints, and a run may be ended by "
        "Ctrl-C and continued with --resume"
    ),
    "load_best_model_at_end metric_for_best_model greater_is_better save_best_only best_model": (
        "the last weights are the student; train.save_every keeps the last checkpoints"
    ),
    "eval_strategy evaluation_strategy do_eval eval_on_start eval_delay": "train.eval_every: steps between evaluations",
    "save_strategy save_only_model save_safetensors": "train.save_every: steps between checkpoints, in safetensors",
    "logging_strategy logging_dir logging_first_step": "train.log_every and train.report_to",
    "do_train do_predict stage task_type trainer_type training_type rl": (
        "there is one task, distillation; distill run, distill eval and distill generate are commands"
    ),
    "overwrite_output_dir overwrite_cache": "every run has a folder of its own: --name NAME, or name: in the recipe",
    "push_to_hub hub_model_id hub_token hub_strategy hub_private_repo": (
        "distill export RUN -o FOLDER writes what hf upload takes"
    ),
    "group_by_length length_column_name sample_packing_eff_est pad_to_sequence_len pad_to_multiple_of padding "
    "padding_side padding_free": "data.packing fills rows with whole documents, so that nothing is padded",
    "remove_unused_columns column_names columns": (
        "data.fields names the columns that are read; others are reported, unless data.unread names them"
    ),
    "streaming iterable_dataset": "data.max_rows reads the first rows; a source is read to its end",
    "shuffle shuffle_buffer_size shuffle_merged_datasets": "rows are always shuffled, by train.seed",
    "eval_batch_size eval_sample_packing": "held-out rows go by train.batch_size and data.packing, as those trained",
    "eval_max_new_tokens do_sample num_beams": "generate.prompts and generate.max_new_tokens; samples are greedy",
    "ema use_ema ema_decay swa": "teacher.ema, of a teacher with type: student, follows the student",
    "galore galore_rank use_galore lisa badam apollo muon": (
        "train.optimizer takes what transformers calls its optimizers, such as adafactor or galore_adamw"
    ),
    "layer_freezing freeze freeze_layers freeze_embeddings unfrozen_parameters freeze_trainable_layers": (
        "student.lora trains adapters and leaves the model's own weights"
    ),
    "loraplus_lr_ratio loraplus_lr_embedding embedding_learning_rate": "all weights share train.learning_rate",
    "init_lora_weights peft_init_lora_weights pissa_init use_pissa pissa_convert": (
        "student.lora starts at the model itself, with B = 0"
    ),
    "relora relora_steps vera oft use_oft adalora prompt_tuning prefix_tuning ia3 qlora": "student.lora is plain LoRA",
    "lora_bias modules_to_save layers_to_transform lora_layers_to_transform": (
        "student.lora.targets names modules, student.lora.head adds the head"
    ),
    "load_in_2bit bnb_4bit_quant_type bnb_4bit_compute_dtype bnb_4bit_use_double_quant bnb_config gptq": (
        "a frozen model in 8 bits is teacher.dtype: int8 or fp8"
    ),
    "rope_scaling rope_theta overrides_of_model_config": "the model's own config.json determines it",
    "resize_token_embeddings resize_vocab special_tokens tokens added_tokens new_special_tokens tokenizer_type": (
        "the student uses the teacher's tokenizer, or its own with student.vocabulary: cross"
    ),
    "ref_model ref_model_name_or_path sync_ref_model": "the teacher is the only other model: teacher.model",
    "reward_model reward_funcs reward_weights reward_fn scale_rewards": (
        "a reward is a function of yours: loss.terms: [{type: policy_gradient, reward: FILE.py:function}], with "
        "reward_scale and weight"
    ),
    "dpo_beta pref_beta pref_loss simpo_gamma orpo_alpha kto_chosen_weight epsilon_high num_iterations": (
        "there are no preference losses: loss.terms with data.on_policy trains on the teacher's distribution over "
        "student-generated responses"
    ),
    "attention_distillation hidden_loss feature_loss intermediate_layers layer_mapping hidden_state_loss cosine_loss": (
        "loss.terms compare output distributions; a loss of your own is a plugin (--plugin FILE.py)"
    ),
    "seq_kd sequence_level sequence_kd": "distill sample writes the teacher's responses as data to train on",
    "logits_top_k kd_top_k_before_softmax top_logits kd_zscore_base_temp kd_normalize": (
        "teacher.top_k, of a server or a cache, is the number of top tokens; loss.temperature is the only transform"
    ),
    "context_parallel_size sequence_parallel_degree tensor_parallel_size tensor_parallel pipeline_parallel_size "
    "expert_parallel_size": "parallel.strategy: fsdp shards the student, parallel.teacher: sharded the teacher",
    "ddp_find_unused_parameters ddp_timeout local_rank world_size num_nodes gpus n_gpu num_gpus devices": (
        "all visible GPUs are used; on several nodes start it by torchrun"
    ),
    "flash_attn unsloth use_unsloth use_liger use_liger_kernel enable_liger_kernel liger_kernel": (
        "fused kernels are always on; student.attention names another attention"
    ),
    "mlflow_tracking_uri wandb_entity wandb_run_id wandb_watch swanlab_project trackio_space_id": (
        "train.report_to: wandb (or another), with its own environment variables"
    ),
    "use_chat_template add_generation_prompt chat_template_jinja default_system_message system_prompt train_on_eos "
    "train_on_eot message_field_role message_field_content roles message_property_mappings": (
        "data.chat_template: tokenizer, none or a .jinja file; the end of a turn is trained on too"
    ),
}  # fmt: skip


OTHER_TOOLS: dict[str, dict[str, str]] = {
    setting: {tool: name for tool, name in zip(TOOLS, names, strict=False) if name}
    for setting, names in _ELSEWHERE.items()
    if any(names[: len(TOOLS)])
}


def _aliases() -> dict[str, Alias]:
    cures = {name: cure for names, cure in _CURES.items() for name in names.split()}
    found = dict(OWNED_ARGUMENTS)
    settings = defaultdict[str, set[str]](set)
    for setting, tools in OTHER_TOOLS.items():
        for name in ", ".join(tools.values()).split(", "):
            settings[name].add(setting.partition("[")[0])
    ours = {setting.rpartition(".")[2] for setting in _ELSEWHERE}
    found |= {name: min(of) for name, of in settings.items() if len(of) == 1 and "." not in name and name not in ours}
    for setting, names in _ELSEWHERE.items():
        for words in re.findall(r"([\w. ]+)(?: \(.+?\))?(?:; |$)", "; ".join(names[len(TOOLS) :])):
            found |= dict.fromkeys(words.split(), setting)
    known = {name: Alias(setting, cures.get(name, "")) for name, setting in found.items()}
    missing = {
        name: Alias("", f"not supported; {near}") for names, near in _UNSUPPORTED.items() for name in names.split()
    }
    return missing | known


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
# values in other tools, by the last part of the field's name: the value here
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

# sections that are often given as one value: the correct form, and the value to show where none is given
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
NAMES = Names(ALIASES, VALUES, SHORT, PATTERNS)
