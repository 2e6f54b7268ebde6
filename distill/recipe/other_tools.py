"""What other trainers call our settings: data for the settings reference.

Read in TRL 1.16 (`GKDConfig`, `DistillationConfig`, `SFTConfig`, `ModelConfig` and transformers.TrainingArguments), in
torchtune 0.6.1 (the YAML of its recipe knowledge_distillation_distributed) and in axolotl 0.19 (its schemas, and those
of its integration kd). A name stands here where its meaning is the same or nearly so.
"""

_TRAINING = {  # names of transformers.TrainingArguments, which TRL inherits
    "train.steps": ("max_steps", "max_steps_per_epoch", "max_steps"),
    "train.epochs": ("num_train_epochs", "epochs", "num_epochs"),
    "train.tokens_per_step": (
        "gradient_accumulation_steps", "gradient_accumulation_steps", "gradient_accumulation_steps",
    ),
    "train.batch_size": ("per_device_train_batch_size", "batch_size", "micro_batch_size"),
    "train.learning_rate": ("learning_rate", "optimizer.lr", "learning_rate"),
    "train.schedule": ("lr_scheduler_type", "lr_scheduler", "lr_scheduler"),
    "train.warmup": ("warmup_steps, warmup_ratio", "lr_scheduler.num_warmup_steps", "warmup_steps, warmup_ratio"),
    "train.weight_decay": ("weight_decay", "optimizer.weight_decay", "weight_decay"),
    "train.max_grad_norm": ("max_grad_norm", "clip_grad_norm", "max_grad_norm"),
    "train.optimizer": ("optim", "optimizer", "optimizer"),
    "train.precision": ("bf16, fp16", "dtype", "bf16, fp16"),
    "train.gradient_checkpointing": (
        "gradient_checkpointing", "enable_activation_checkpointing", "gradient_checkpointing",
    ),
    "train.compile": ("torch_compile", "compile", "torch_compile"),
    "train.seed": ("seed", "seed", "seed"),
    "train.save_every": ("save_steps", "", "save_steps"),
    "train.eval_every": ("eval_steps", "", "eval_steps"),
    "train.log_every": ("logging_steps", "log_every_n_steps", "logging_steps"),
    "train.report_to": ("report_to", "metric_logger", "use_tensorboard, use_wandb"),
    "train.device": ("use_cpu", "device", ""),
    "train.deterministic": ("full_determinism", "", ""),
}  # fmt: skip
_OTHERS = {
    "output_dir": ("output_dir", "output_dir", "output_dir"),
    "teacher.model": ("teacher_model_name_or_path", "teacher_checkpointer", "kd_online_server_base_url"),
    "teacher.revision": ("teacher_model_revision", "", ""),
    "teacher.dtype": ("teacher_model_init_kwargs", "dtype", ""),
    "student.model": ("model_name_or_path", "checkpointer", "base_model"),
    "student.revision": ("model_revision", "", ""),
    "student.dtype": ("dtype", "dtype", ""),
    "student.trust_remote_code": ("trust_remote_code", "", "trust_remote_code"),
    "student.attention": ("attn_implementation", "", "attn_implementation"),
    "student.vocabulary": ("use_uld_loss", "", ""),
    "student.lora": ("use_peft", "", "adapter"),
    "student.lora.r": ("lora_r", "model.lora_rank", "lora_r"),
    "student.lora.alpha": ("lora_alpha", "model.lora_alpha", "lora_alpha"),
    "student.lora.dropout": ("lora_dropout", "model.lora_dropout", "lora_dropout"),
    "student.lora.targets": ("lora_target_modules", "model.lora_attn_modules", "lora_target_modules"),
    "student.lora.head": ("lora_modules_to_save", "model.apply_lora_to_output", "lora_modules_to_save"),
    "data.source": ("dataset_name", "dataset.source", "datasets.path"),
    "data.subset": ("dataset_config", "", "datasets.name"),
    "data.split": ("dataset_train_split", "dataset.split", "datasets.split"),
    "data.format": ("", "dataset", "datasets.type"),
    "data.fields.text": ("dataset_text_field", "", "datasets.field"),
    "data.fields.messages": ("", "dataset.conversation_column", "datasets.field_messages"),
    "data.chat_template": ("chat_template_path", "", "chat_template"),
    "data.max_length": ("max_length", "tokenizer.max_seq_len", "sequence_len"),
    "data.packing": ("packing", "dataset.packed", "sample_packing"),
    "data.train_on": ("assistant_only_loss", "dataset.train_on_input", "datasets.roles_to_train"),
    "data.validation.fraction": ("", "", "val_set_size"),
    "data.on_policy.fraction": ("lmbda", "", ""),
    "data.on_policy.max_new_tokens": ("max_new_tokens, max_completion_length", "", ""),
    "data.on_policy.temperature": ("temperature", "", ""),
    "data.on_policy.engine": ("use_vllm", "", ""),
    "data.workers": ("dataset_num_proc, dataloader_num_workers", "", "dataset_num_proc"),
    "data.cache": ("", "", "dataset_prepared_path"),
    "loss.temperature": ("temperature", "", "kd_temperature"),
    "loss.label_smoothing": ("label_smoothing_factor", "", ""),
    "loss.terms[].weight": ("", "kd_ratio", "kd_alpha, kd_ce_alpha"),
    "loss.terms[].type": ("", "kd_loss", ""),
    "loss.terms[].beta": ("beta", "", "kd_beta"),
    "parallel.strategy": ("fsdp", "", "fsdp_config"),
}
OTHER_TOOLS: dict[str, dict[str, str]] = {
    setting: {tool: name for tool, name in zip(("TRL", "torchtune", "axolotl"), names, strict=True) if name}
    for setting, names in (_TRAINING | _OTHERS).items()
}
