"""A bfloat16 student on a CPU: master weights, states of another dtype and stochastic rounding, as on a GPU."""

import pytest
import torch
from distill_kernels.optim.adamw import FusedAdamW
from test_optimizer_choice import arguments
from tiny import tiny_model

from distill.recipe import parse
from distill.training.arguments import fused_optimizer
from distill.training.trainer import DistillationTrainer

RECIPE = """
teacher: {model: a}
student: {model: b, dtype: bfloat16}
data: {source: c, max_length: 16}
train: {steps: 8, batch_size: 4, learning_rate: 1e-5, schedule: constant, warmup: 0, weight_decay: 0, device: cpu}
"""
ROWS = [{"input_ids": list(range(start, start + 14))} for start in range(3, 35)]


def trained(tmp_path, *overrides, dtype=torch.bfloat16):
    """Return the student's weights before and after eight steps at 1e-5, and the optimizer."""
    recipe = parse(RECIPE, list(overrides))
    student, teacher = tiny_model(dtype=dtype), tiny_model(seed=1)
    before = {name: parameter.detach().float() for name, parameter in student.named_parameters()}
    made = arguments(recipe, "cpu", tmp_path)
    trainer = DistillationTrainer(
        student, teacher, made, train_dataset=ROWS, optimizer_cls_and_kwargs=fused_optimizer(recipe, made)
    )
    trainer.train()
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return before, dict(student.named_parameters()), inner


def test_master_weights_move_where_bfloat16_cannot(tmp_path):
    before, after, optimizer = trained(tmp_path, "train.master_weights=true", "train.optimizer_states=float32")
    assert isinstance(optimizer, FusedAdamW)
    moved = rounded = total = 0
    for name, parameter in after.items():
        state = optimizer.state[parameter]
        assert {state[key].dtype for key in ("master", "exp_avg", "exp_avg_sq")} == {torch.float32}
        assert torch.equal(parameter.detach(), state["master"].bfloat16()), "a weight is its master, rounded"
        reached = state["exp_avg_sq"] > 0  # rows of the embedding that no token of the data reads stay
        moved += int((state["master"] != before[name])[reached].sum())
        rounded += int((parameter.detach().float() != before[name])[reached].sum())
        total += int(reached.sum())
    assert moved > 0.99 * total
    assert rounded < 0.3 * total, "and the test can fail: most updates are below half of bfloat16's spacing"


@pytest.mark.plain("bfloat16")
@pytest.mark.parametrize("states", ["auto", "float32", "bfloat16"])
def test_rounding_at_random_moves_weights_by_what_float32_moves_them(states, tmp_path):
    before, after, optimizer = trained(tmp_path, f"train.optimizer_states={states}")
    _, exact, plain = trained(tmp_path, "student.dtype=float32", dtype=torch.float32)
    assert isinstance(optimizer, FusedAdamW) and not isinstance(plain, FusedAdamW)
    expected_dtype = torch.float32 if states == "float32" else torch.bfloat16
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {expected_dtype}
    ours, theirs = [], []
    for name, parameter in after.items():
        start = tiny_model().get_parameter(name).detach()
        ours.append((parameter.detach().float() - before[name]).flatten())
        theirs.append((exact[name].detach() - start).flatten())
    ours, theirs = torch.cat(ours), torch.cat(theirs)
    # a rounding at random is right on average: along float32's own update it goes as far
    progress = float(ours @ theirs / (theirs @ theirs))
    assert 0.8 < progress < 1.2, progress


def test_states_alone_are_taken_too(tmp_path):
    recipe = parse(RECIPE, ["student.dtype=float32", "train.optimizer_states=bfloat16"])
    chosen = fused_optimizer(recipe, arguments(recipe, "cpu", tmp_path))
    assert chosen is not None and chosen[1]["state_dtype"] == torch.bfloat16
