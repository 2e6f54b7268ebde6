"""The benchmark of several GPUs: its commands are valid recipes, its figures are medians of what runs write."""

import pytest

from distill.recipe import load
from scripts.bench.many_gpus import RECIPE, SHAPES, command, summary

pytestmark = pytest.mark.full  # of scripts that measure, which no run of ours imports


@pytest.mark.parametrize("shape", SHAPES)
def test_every_command_is_a_valid_recipe(shape):
    words = command(shape, 2, "x")
    overrides = words[words.index(str(RECIPE)) + 1 : words.index("--name")]
    recipe = load(RECIPE, overrides)
    assert recipe.train.tokens_per_step is None and recipe.student.dtype == "bfloat16"
    assert recipe.parallel.teacher == ("sharded" if shape == "large" else "auto")
    steps = recipe.train.steps // recipe.train.log_every
    assert steps >= 3  # summary() leaves two out


def test_figures_are_medians_of_the_steady_steps():
    rows = [
        {
            "step": step,
            "tokens_per_second": speed,
            "tokens_seen": 100.0 * step,
            "peak_memory_gib": 1.0 + step,
            **dict.fromkeys(("time_data", "time_teacher", "time_student", "time_loss", "time_optimizer"), 0.25),
        }
        for step, speed in ((1, 1.0), (2, 2.0), (4, 50.0), (6, 70.0), (8, 60.0))
    ]
    found = summary([{"step": 0, "eval_loss": 1.0}, *rows])
    assert found["tokens_per_second"] == 60.0 and found["peak_memory_gib"] == 9.0
    assert found["tokens"] == 100.0 and found["time_loss"] == 0.25 and "mfu" not in found
    with pytest.raises(ValueError, match="at least three"):
        summary(rows[:2])
