"""Between two logging steps the host never waits for the GPU: whatever copies or reads back a value would show here."""

import pytest
import torch
from datasets import Dataset
from tiny import tiny_model
from transformers import TrainerCallback

from distill.models.patch.patching import patch
from distill.models.precision.dtypes import resolve_precision
from distill.planning.run_plan import plan_steps
from distill.recipe import parse
from distill.training.arguments import fused_optimizer, training_arguments
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


def test_batches_are_copied_while_the_gpu_computes(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    device = torch.device("cuda", 0)
    made = arguments(tmp_path, device)[1]
    assert made.accelerator_config.non_blocking and made.dataloader_pin_memory
    kept = arguments(tmp_path, device, "train.arguments={accelerator_config: {split_batches: true}}")[1]
    assert kept.accelerator_config.non_blocking and kept.accelerator_config.split_batches
    assert not arguments(tmp_path, torch.device("cpu"))[1].accelerator_config.non_blocking


class Strict(TrainerCallback):
    """Has PyTorch raise at any synchronisation from the end of step 2, when all is compiled, to that of step 5."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in (2, 5):
            torch.cuda.set_sync_debug_mode("error" if state.global_step == 2 else "default")


@pytest.mark.gpu
@pytest.mark.parametrize("overrides", [[], ["student.dtype=bfloat16"], ["student.lora={r: 4}"]])
@pytest.mark.parametrize("packed", [False, True])
def test_a_step_does_not_wait_for_the_gpu(tmp_path, overrides, packed):
    from peft import LoraConfig, get_peft_model

    device = torch.device("cuda", 0)
    recipe, made = arguments(tmp_path, device, *overrides)
    precision = resolve_precision(recipe, device)
    student = tiny_model(hidden=128, dtype=precision.student)
    if recipe.student.lora is not None:
        student = get_peft_model(student, LoraConfig(r=4, target_modules="all-linear", exclude_modules=["lm_head"]))
    positions = [*range(50), *range(78)] if packed else list(range(128))
    ids = torch.randint(3, 259, (32, 128)).tolist()
    rows = Dataset.from_list([{"input_ids": row, "labels": row, "position_ids": positions} for row in ids])
    trainer = DistillationTrainer(
        student,
        tiny_model(hidden=256, seed=1, dtype=precision.teacher),
        made,
        train_dataset=rows,
        callbacks=[Strict()],
        optimizer_cls_and_kwargs=fused_optimizer(recipe, made),
    )
    for model, role in ((trainer.objective.teacher.model, "teacher"), (student, "student")):
        patch(model, role)
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.state.global_step == 6
