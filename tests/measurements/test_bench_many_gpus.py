"""The benchmark of several GPUs: its commands are valid recipes, its figures are medians of what runs write."""

import json
import sys
import time

import psutil
import pytest

from distill.recipe import load
from scripts.bench.many_gpus import RECIPE, SHAPES, command, metrics_of, run_until, summary

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


HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(300)
"""


def lives(process):
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_one_that_hangs_ends_in_time_with_all_that_it_started(tmp_path):
    """Ranks are in sessions of their own, and keep the pipe that is read."""
    begun = time.monotonic()
    with run_until([sys.executable, "-c", HANGS], tmp_path, "", begun + 1.0, stdout=-1) as process:
        child, *rest = process.stdout.read().split()
    assert time.monotonic() - begun < 20 and not rest
    while lives(int(child)):  # a killed process has closed its files before it is gone
        assert time.monotonic() - begun < 20
        time.sleep(0.01)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="hung: no end in its time"):
        metrics_of(tmp_path, [sys.executable, "-c", HANGS, "hung"], "", 3, begun + 0.5)
    assert time.monotonic() - begun < 20


def test_one_that_has_logged_enough_is_ended(tmp_path):
    lines = [json.dumps({"step": step, "tokens_per_second": 1.0}) for step in range(4)]
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 4, "tok']))
    words = [sys.executable, "-c", "import time; time.sleep(300)", "x"]
    assert len(metrics_of(tmp_path, words, "", 4, time.monotonic() + 100)) == 4
