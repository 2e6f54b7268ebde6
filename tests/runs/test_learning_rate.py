"""Learning-rate schedules of a recipe: their rates step by step, against formulas, and what is refused."""

import math

import pytest
import torch
import transformers

from distill.models.dtypes import resolve_precision
from distill.planning.run_plan import plan_steps
from distill.recipe import parse
from distill.training.arguments import training_arguments
from distill.training.transformers_compat import begin_above_zero

STEPS = 20
WARMUP = 4
PEAK = 0.5
MINIMAL = f"""
teacher: {{model: big}}
student: {{model: small}}
data: {{source: chats.jsonl}}
train: {{steps: {STEPS}, warmup: {WARMUP}, learning_rate: {PEAK}}}
"""


def rates(tmp_path, *overrides: str) -> list[float]:
    """The learning rate of each step, from the arguments that a run gives transformers."""
    recipe = parse(MINIMAL, overrides)
    device = torch.device("cpu")
    precision = resolve_precision(recipe, device)
    arguments = training_arguments(recipe, tmp_path, plan_steps(recipe, 64), device=device, precision=precision)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=arguments.learning_rate)
    scheduler = transformers.get_scheduler(
        arguments.lr_scheduler_type,
        optimizer,
        arguments.get_warmup_steps(STEPS),
        STEPS,
        scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
    )
    begin_above_zero(scheduler, arguments.get_warmup_steps(STEPS))
    found = []
    for _ in range(STEPS):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


def progress(step: int) -> float:
    return (step - WARMUP) / (STEPS - WARMUP)


CURVES = {
    "cosine": lambda step: 0.5 * (1 + math.cos(math.pi * progress(step))),
    "cosine_with_min_lr": lambda step: 0.5 * (1 + math.cos(math.pi * progress(step))),
    "linear": lambda step: 1 - progress(step),
    "polynomial": lambda step: (1 - progress(step)) ** 2,
    "warmup_stable_decay": lambda step: 1 if step <= 16 else 0.5 * (1 + math.cos(math.pi * (step - 16) / 4)),
}


@pytest.mark.parametrize("end", ["null", "0.05", "10%"])
@pytest.mark.parametrize("schedule", CURVES)
def test_a_schedule_decays_to_min_lr(schedule, end, tmp_path):
    if end == "null" and schedule == "cosine_with_min_lr":
        return
    power = ["train.arguments={lr_scheduler_kwargs: {power: 2.0}}"] if schedule == "polynomial" else []
    found = rates(tmp_path, f"train.schedule={schedule}", f"train.min_lr={end}", *power)
    share = 0 if end == "null" else 0.1
    expected = [PEAK * (share + (1 - share) * CURVES[schedule](step)) for step in range(WARMUP, STEPS)]
    assert found[WARMUP:] == pytest.approx(expected, rel=1e-12)
    assert max(found) == found[WARMUP - 1] == PEAK, "the peak is the last step of the warm-up"
    assert 0 < found[0] < found[1] < found[2] < PEAK


def test_schedules_without_an_end(tmp_path):
    for name in ("constant", "constant_with_warmup"):
        assert rates(tmp_path, f"train.schedule={name}")[WARMUP - 1 :] == [PEAK] * (STEPS - WARMUP + 1)
    restarts = rates(
        tmp_path, "train.schedule=cosine_with_restarts", "train.arguments={lr_scheduler_kwargs: {num_cycles: 2}}"
    )
    assert restarts[WARMUP] == restarts[WARMUP + 8] == PEAK and restarts[WARMUP + 7] < 0.05 * PEAK
    inverse = rates(tmp_path, "train.schedule=inverse_sqrt")
    assert inverse[WARMUP:] == pytest.approx([PEAK * math.sqrt(WARMUP / step) for step in range(WARMUP, STEPS)])


def test_details_of_a_schedule_are_added_to_what_the_run_sets(tmp_path):
    given = "train.arguments={lr_scheduler_kwargs: {num_decay_steps: 8, decay_type: linear}}"
    found = rates(tmp_path, "train.schedule=warmup_stable_decay", "train.min_lr=20%", given)
    assert found[12:] == pytest.approx([PEAK * (0.2 + 0.8 * (1 - step / 8)) for step in range(8)])


def test_a_stage_may_decay_elsewhere():
    recipe = parse(MINIMAL, ["stages=[{name: a}, {name: b, train: {schedule: linear, min_lr: 5%}}]"])
    first, last = (recipe.of_stage(number, "x").train for number in (0, 1))
    assert (first.schedule, first.min_learning_rate) == ("cosine", 0)
    assert (last.schedule, last.min_learning_rate) == ("linear", 0.025)
