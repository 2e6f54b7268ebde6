"""Steps that are not finite, SIGTERM, and failures of the machine."""

import errno
import math
import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from test_trainer import trainer, weights
from transformers import TrainerCallback

from distill.cli import run_command
from distill.faults import RunError
from distill.recipe import parse
from distill.training import failures
from distill.training.checkpoints import checkpoints


class Spoil(TrainerCallback):
    """Makes a gradient not finite in some steps, before clipping has a chance to hide it."""

    def __init__(self, made, steps, value=math.nan):
        self.made, self.steps = made, steps
        step = made.training_step

        def spoiled(model, inputs, *args, **kwargs):
            loss = step(model, inputs, *args, **kwargs)
            if made.state.global_step + 1 in steps:
                next(model.parameters()).grad.view(-1)[3] = value
            return loss

        made.training_step = spoiled


@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(tmp_path, value, clip, caplog):
    made = trainer(tmp_path, max_steps=1, max_grad_norm=clip, weight_decay=0.1)
    Spoil(made, {1}, value)
    start = weights(made.model)
    made.train()
    for name, weight in weights(made.model).items():
        assert torch.equal(weight, start[name]), name
    assert made.health.skipped == 1 and made.state.log_history[0]["skipped_steps"] == 1
    assert "step 1: loss or gradient is not finite" in caplog.text


def test_training_goes_on_after_a_skipped_step(tmp_path):
    made = trainer(tmp_path, max_steps=5, gradient_accumulation_steps=2)
    Spoil(made, {2, 3})
    start = weights(made.model)
    made.train()
    assert made.health.skipped == 2
    assert all(torch.isfinite(weight).all() for weight in weights(made.model).values())
    assert any(not torch.equal(weight, start[name]) for name, weight in weights(made.model).items())


def test_a_loss_that_is_not_finite_is_skipped_too(tmp_path):
    made = trainer(tmp_path, max_steps=2)
    seen = made.health.see_batch
    made.health.see_batch = lambda inputs, loss: seen(inputs, loss * (math.inf if made.state.global_step == 0 else 1))
    made.train()
    assert made.health.skipped == 1


def test_too_many_in_a_row_stop_the_run_and_save_the_batch(tmp_path):
    made = trainer(tmp_path, max_steps=20, gradient_accumulation_steps=2)
    made.health.limit = 3
    Spoil(made, {2, 4, 5, 6})
    with pytest.raises(RunError, match=r"stopped at step 6: .* 3 steps in a row.*train\.learning_rate.*--resume"):
        made.train()
    saved = load_file(tmp_path / "not-finite-step-6.safetensors")
    assert saved["input_ids.0"].shape == saved["labels.0"].shape and "input_ids.1" in saved
    assert made.health.skipped == 4


class Press(TrainerCallback):
    """Ctrl-C in the third step, as often as asked for."""

    def __init__(self, times):
        self.times = times

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("times, left", [(1, ["checkpoint-3"]), (2, [])])
def test_ctrl_c_leaves_a_checkpoint_and_a_second_one_does_not_wait(times, left, tmp_path, capsys):
    made = trainer(tmp_path, max_steps=9)
    made.add_callback(Press(times))
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert [path.name for path in checkpoints(tmp_path)] == left
    assert "Ctrl-C again stops at once" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is handler


def test_sigterm_ends_behind_the_step_with_a_checkpoint(tmp_path):
    made = trainer(tmp_path, max_steps=9)

    class Terminate(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    made.add_callback(Terminate())
    handler = signal.getsignal(signal.SIGTERM)
    made.train()
    assert made.health.stopping and made.state.global_step == 3
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3"]
    assert signal.getsignal(signal.SIGTERM) is handler
    again, whole = trainer(tmp_path, max_steps=9), trainer(tmp_path / "whole", max_steps=9)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    whole.train()
    for name, weight in weights(whole.model).items():
        assert torch.equal(weights(again.model)[name], weight), name


RECIPE = parse(
    """
    teacher: {model: t}
    student: {from_teacher: {layers: 2}}
    data: {source: x, max_length: 512, workers: 3}
    train: {steps: 6, batch_size: 4, tokens_per_step: 4096}
    """
)


@pytest.mark.parametrize(
    "error, expected",
    [
        (OSError(errno.ENOSPC, "No space left on device", "f"), ["f: the disk is full", "GiB free", "start again"]),
        (OSError(errno.EROFS, "Read-only file system", "f"), ["f: the disk is read-only"]),
        (PermissionError(errno.EACCES, "Permission denied", "f"), ["f: access is not permitted"]),
        (RuntimeError("Error while serializing: I/O error: No space left on device"), ["the disk is full"]),
        (OSError(errno.EFBIG, "File too large", "f"), ["larger than this system allows"]),
        (RuntimeError("PytorchStreamWriter failed: File too large"), ["larger than this system allows"]),
        (MemoryError(), ["out of memory", "train.batch_size (now 4)"]),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory"), ["machine is out of memory"]),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), ["worker died", "(now 3)"]),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
            ["Tried to allocate 2.00 GiB", "train.batch_size from 4 to 2", "train.gradient_checkpointing to true"],
        ),
    ],
)
def test_failures_of_the_machine_are_one_line(tmp_path, error, expected):
    with pytest.raises(RunError) as raised, failures.explained(RECIPE, tmp_path):
        raise error
    assert len(str(raised.value).splitlines()) == 1 and raised.value.__cause__ is error
    for part in expected:
        assert part in str(raised.value)


def test_a_full_disk_names_the_last_checkpoint(tmp_path):
    (tmp_path / "checkpoint-8").mkdir()
    (tmp_path / "checkpoint-8" / "trainer_state.json").write_text("{}")
    with (
        pytest.raises(RunError, match=r"then continue from .*checkpoint-8 with --resume"),
        failures.explained(RECIPE, tmp_path),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [KeyError("x"), FileNotFoundError(errno.ENOENT, "no", "f"), ValueError("y")])
def test_other_errors_pass_through(tmp_path, error):
    with pytest.raises(type(error)) as raised, failures.explained(RECIPE, tmp_path):
        raise error
    assert raised.value is error


def test_advice_leaves_out_what_is_set_already():
    recipe = RECIPE.model_copy(update={"train": RECIPE.train.model_copy(update={"batch_size": 1})})
    text = failures.out_of_memory(recipe, torch.OutOfMemoryError("full"))
    assert "train.batch_size" not in text and "data.max_length from 512 to 256" in text


def test_the_command_ends_with_one_line_and_code_1(monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RunError("the disk is full; make room there")

    monkeypatch.setattr("distill.cli.app", broken)
    assert run_command(["run", "x"]) == 1
    assert capsys.readouterr().err == "distill: the disk is full; make room there\n"
