"""Between two logging steps the host never waits for the GPU: whatever copies or reads back a value would show here."""

from typing import get_args

import pytest
import torch
from datasets import Dataset
from tiny import tiny_model
from transformers import TrainerCallback, TrainingArguments

from distill.models.dtypes import resolve_precision
from distill.models.patch.patching import patch
from distill.planning.run_plan import plan_steps
from distill.recipe import parse
from distill.recipe.quantise import WeightFormat
from distill.training.arguments import fused_optimizer, overwrite_arguments, training_arguments
from distill.training.quantise import quantise_for_training
from distill.training.trainer import DistillationTrainer

RECIPE = """
teacher: {model: t}
student: {model: s}
data: {source: x, max_length: 128}
train: {steps: 6, batch_size: 2, tokens_per_step: 512, log_every: 100}
"""


def arguments(folder, device, *overrides):
    recipe = parse(RECIPE, overrides)
    precision = resolve_precision(recipe, device)
    return recipe, training_arguments(recipe, folder, plan_steps(recipe, 32), device=device, precision=precision)


@pytest.mark.parametrize("device, pinned", [("cuda", True), ("cuda", False), ("cpu", True)])
def test_batches_are_copied_while_the_gpu_computes(tmp_path, monkeypatch, device, pinned):
    """A user's own arguments have accelerate's default, copies that block."""
    monkeypatch.setattr(TrainingArguments, "device", torch.device(device))
    made = TrainingArguments(str(tmp_path), report_to="none", dataloader_pin_memory=pinned)
    assert not made.accelerator_config.non_blocking
    overwrite_arguments(made, {})
    assert made.accelerator_config.non_blocking == (pinned and device == "cuda")
    assert arguments(tmp_path, torch.device("cpu"))[1].dataloader_pin_memory is False


class Strict(TrainerCallback):
    """Has PyTorch raise at any synchronisation from the end of step 2, when all is compiled, to that of step 5."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in (2, 5):
            torch.cuda.set_sync_debug_mode("error" if state.global_step == 2 else "default")


TERMS = "[{type: forward_kl}, {type: hidden_state, projection: learned}, {type: attention_relation}]"
SETTINGS = {
    "full": [],
    "bfloat16": ["student.dtype=bfloat16"],
    "lora": ["student.lora={r: 4}"],
    "layer terms": [f"loss.terms={TERMS}"],
    **{f"quantise {name}": [f"student.quantise={{format: {name}, start: nearest}}"] for name in get_args(WeightFormat)},
    "absmax scales": ["student.quantise={format: q4_0, scales: absmax}"],
}


@pytest.mark.gpu
@pytest.mark.parametrize("overrides", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_step_does_not_wait_for_the_gpu(tmp_path, overrides, packed):
    from peft import LoraConfig, get_peft_model

    device = torch.device("cuda", 0)
    recipe, made = arguments(tmp_path, device, *overrides)
    precision = resolve_precision(recipe, device)
    student = tiny_model(hidden=256, dtype=precision.student)
    if recipe.student.lora is not None:
        student = get_peft_model(student, LoraConfig(r=4, target_modules="all-linear", exclude_modules=["lm_head"]))
    positions = [*range(50), *range(78)] if packed else list(range(128))
    ids = torch.randint(3, 259, (32, 128)).tolist()
    rows = Dataset.from_list([{"input_ids": row, "labels": row, "position_ids": positions} for row in ids])
    trainer = DistillationTrainer(
        student,
        tiny_model(hidden=256, seed=1, dtype=precision.teacher),
        made,
        loss=recipe.loss,
        train_dataset=rows,
        callbacks=[Strict()],
        optimizer_cls_and_kwargs=fused_optimizer(recipe, made),
    )
    for model, role in ((trainer.objective.teacher.model, "teacher"), (student, "student")):
        patch(model, role)
    if recipe.student.quantise is not None:
        quantise_for_training(trainer, recipe.student.quantise, rows, resumed=False, begins=True)
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.state.global_step == 6
