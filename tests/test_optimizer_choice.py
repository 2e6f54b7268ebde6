"""The recipe's optimizer: FusedAdamW on a GPU, the same algorithm of torch on a CPU, others by their own names."""

from pathlib import Path

import pytest
import torch
from distill_kernels.optim.adamw import FusedAdamW

from distill.recipe import RecipeError, parse
from distill.training.arguments import fused_optimizer, resolve_precision, training_arguments

RECIPE = "teacher: {model: a}\nstudent: {model: b}\ndata: {source: c}\ntrain: {steps: 2}\n"


def arguments(recipe, device, folder, **more):
    device = torch.device(device)
    return training_arguments(
        recipe, folder, rows=8, device=device, precision=resolve_precision(recipe, device), **more
    )  # fmt: skip


def test_on_a_cpu_torch_serves(tmp_path: Path):
    recipe = parse(RECIPE)
    made = arguments(recipe, "cpu", tmp_path)
    assert fused_optimizer(recipe, made) is None
    assert made.optim == "adamw_torch"


def test_another_optimizer_by_its_name(tmp_path: Path):
    recipe = parse(RECIPE, ["train.optimizer=adafactor"])
    made = arguments(recipe, "cpu", tmp_path)
    assert fused_optimizer(recipe, made) is None and made.optim == "adafactor"


@pytest.mark.parametrize("name", ["adagrad", "adafactor"])
def test_what_cannot_train_shards_is_refused_before_it_starts(name, tmp_path: Path, monkeypatch):
    recipe = parse(RECIPE, [f"train.optimizer={name}"])
    assert arguments(recipe, "cpu", tmp_path, student_sharded=True).optim == name  # one process cuts nothing
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=rf"^train\.optimizer: {name} cannot train a student sharded .*ddp$"):
        arguments(recipe, "cpu", tmp_path, student_sharded=True)


def test_settings_of_ours_are_refused_for_others():
    with pytest.raises(RecipeError, match="belong to fused_adamw"):
        parse(RECIPE, ["train.optimizer=adafactor", "train.master_weights=true"])


@pytest.mark.gpu
def test_on_a_gpu_ours_with_its_settings(tmp_path: Path):
    recipe = parse(RECIPE, ["train.optimizer_states=float32", "train.arguments.adam_beta2=0.95"])
    chosen = fused_optimizer(recipe, arguments(recipe, "cuda", tmp_path))
    assert chosen is not None and chosen[0] is FusedAdamW
    assert chosen[1]["betas"] == (0.9, 0.95) and chosen[1]["state_dtype"] == torch.float32
    assert chosen[1]["stochastic_rounding"] and not chosen[1]["master_weights"]
