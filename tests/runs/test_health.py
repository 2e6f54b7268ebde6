"""Steps that are not finite, SIGTERM, and error_translation of the machine."""

import errno
import math
import multiprocessing
import os
import signal
import subprocess
import time
from multiprocessing import resource_tracker

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from subjects import CACHED, SUBJECTS, Caches
from test_trainer import arguments, rows, trainer, weights
from tiny import tiny_model
from transformers import TrainerCallback

from distill.core.errors import RunError
from distill.recipe import dump, parse
from distill.teachers.backends.stored.store import Store
from distill.teachers.objective import DistillationObjective
from distill.training import error_translation
from distill.training.checkpoints import checkpoints
from distill.training.error_translation import translate_errors
from distill.training.step_guard import StepGuard, ignore_signals_in_workers
from distill.training.trainer import DistillationTrainer


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


@pytest.mark.plain("nan-1.0", "inf-0.0")
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(tmp_path, value, clip, caplog):
    made = trainer(tmp_path, max_steps=1, max_grad_norm=clip, weight_decay=0.1)
    Spoil(made, {1}, value)
    start = weights(made.model)
    with pytest.raises(ValueError, match=r"train: no step was taken: .* in all 1 steps of the run"):
        made.train()
    for name, weight in weights(made.model).items():
        assert torch.equal(weight, start[name]), name
    assert made.listeners.find(StepGuard).skipped == 1 and made.state.log_history[0]["skipped_steps"] == 1
    assert "step 1: loss or gradient is not finite" in caplog.text


def test_training_continues_after_a_skipped_step(tmp_path):
    made = trainer(tmp_path, max_steps=5, gradient_accumulation_steps=2)
    Spoil(made, {2, 3})
    start = weights(made.model)
    made.train()
    assert made.listeners.find(StepGuard).skipped == 2
    assert all(torch.isfinite(weight).all() for weight in weights(made.model).values())
    assert any(not torch.equal(weight, start[name]) for name, weight in weights(made.model).items())


def test_a_loss_that_is_not_finite_is_skipped_too(tmp_path):
    made = trainer(tmp_path, max_steps=2)
    guard = made.listeners.find(StepGuard)
    seen = guard.micro_batch_done
    guard.micro_batch_done = lambda batch, loss, is_last: seen(
        batch, loss * (math.inf if made.state.global_step == 0 else 1), is_last
    )
    made.train()
    assert made.listeners.find(StepGuard).skipped == 1


def test_too_many_in_a_row_stop_the_run_and_save_the_batch(tmp_path):
    made = trainer(tmp_path, max_steps=20, gradient_accumulation_steps=2)
    made.listeners.find(StepGuard).limit = 3
    Spoil(made, {2, 4, 5, 6})
    with pytest.raises(RunError, match=r"stopped at step 6: .* 3 steps in a row.*train\.learning_rate.*--resume"):
        made.train()
    saved = load_file(tmp_path / "not-finite-step-6.safetensors")
    assert saved["input_ids.0"].shape == saved["labels.0"].shape and "input_ids.1" in saved
    assert made.listeners.find(StepGuard).skipped == 4


def test_each_of_several_processes_saves_its_own_batch(tmp_path, monkeypatch):
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        health = StepGuard(lambda values: 2 * values, 2, tmp_path, limit=1)
        health.micro_batch_done({"input_ids": torch.full((1, 3 + rank), rank)}, torch.tensor(math.nan))
        with pytest.raises(RunError, match=rf"the last batch is in .*not-finite-step-7-rank-{rank}\.safetensors;"):
            health.before_step(torch.nn.Linear(1, 1), None, 7)
    for rank in (0, 1):
        saved = load_file(tmp_path / f"not-finite-step-7-rank-{rank}.safetensors")["input_ids.0"]
        assert saved.tolist() == [[rank] * (3 + rank)]


# ------------------------------------------------------------------ whose fault


def trainer_of(folder, kind, **settings):
    """A trainer on what the invariants look at, by kind of teacher."""
    subject = Caches(folder / "stored").subject(kind) if kind in CACHED else SUBJECTS[kind]()
    made = DistillationTrainer(
        subject.student,
        subject.teacher,
        arguments(folder / "run", max_grad_norm=1.0, **settings),
        loss=subject.loss,
        vocab_size=subject.vocab_size,
        train_dataset=Dataset.from_list(subject.rows),
    )
    return made, subject


def a_bad_row_of_the_embedding(made, subject):
    """A token that the teacher has no finite vector for: it occurs in every batch, and the head is another matrix."""
    model = subject.models[-2]
    head = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.get_input_embeddings().weight[:] = math.nan
    model.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)


def a_bad_head(made, subject):
    model = subject.models[0]
    with torch.no_grad():
        model.lm_head.weight[7, 3] = math.inf


def a_bad_cache(made, subject):
    cache, joined = subject.teacher.store, Store.joined
    cache.joined = lambda pieces: {
        name: value.float() * math.nan if name == "cached_logprobs" else value
        for name, value in joined(cache, pieces).items()
    }


@pytest.mark.plain(
    "several-a_bad_row_of_the_embedding-outputs of the teachers\\\\.1 at \\\\d+ of \\\\d+ positions",
    "bucket-a_bad_cache-outputs of the teacher at \\\\d+ of \\\\d+ positions",
)
@pytest.mark.parametrize(
    "kind, fault, says",
    [
        ("several", a_bad_row_of_the_embedding, r"outputs of the teachers\.1 at \d+ of \d+ positions"),
        ("several", a_bad_head, r"the weights of the teachers\.0's head"),
        ("across", a_bad_row_of_the_embedding, r"outputs of the teacher at \d+ of \d+ positions"),
        ("bucket", a_bad_cache, r"outputs of the teacher at \d+ of \d+ positions"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_teacher_that_is_not_finite_is_named(kind, fault, says, tmp_path, caplog):
    (tmp_path / "stored").mkdir()
    made, subject = trainer_of(tmp_path, kind, max_steps=9)
    made.listeners.find(StepGuard).limit = 2
    fault(made, subject)
    with pytest.raises(
        RunError, match=rf"stopped at step 2: the teacher is NaN or infinite \({says}\).*teacher\.dtype"
    ):
        made.train()
    assert "step 1: the teacher is not finite" in caplog.text and "learning_rate" not in caplog.text


def test_a_student_that_is_not_finite_does_not_accuse_the_teacher(tmp_path, caplog):
    made = trainer(tmp_path, max_steps=2)
    with torch.no_grad():
        made.model.get_input_embeddings().weight[:] = math.nan
    with pytest.raises(ValueError, match="train: no step was taken"):
        made.train()
    assert "step 1: loss or gradient is not finite" in caplog.text and "teacher" not in caplog.text


def test_the_teacher_is_checked_only_where_a_step_was_skipped(tmp_path):
    made = trainer(tmp_path, max_steps=6)
    Spoil(made, {3})
    guard = made.listeners.find(StepGuard)
    asked, blame = [], guard.diagnose
    guard.diagnose = lambda batches: (asked.append(made.state.global_step + 1), blame(batches))[1]
    made.train()
    assert asked == [3]


def test_a_teacher_on_another_rank(tmp_path, monkeypatch):
    made = trainer(tmp_path, max_steps=1)
    monkeypatch.setattr(made.accelerator, "reduce", lambda values, how: values + 1)
    assert made.listeners.find(StepGuard).diagnose([]) == "on another rank"
    monkeypatch.setattr(made.accelerator, "reduce", lambda values, how: values)
    assert made.listeners.find(StepGuard).diagnose([]) is None


def test_logits_that_are_not_finite_are_refused_before_the_run():
    teacher = tiny_model(seed=1)
    with torch.no_grad():
        teacher.model.norm.weight[2] = math.nan
    with pytest.raises(ValueError, match=r"teacher: the logits of LlamaForCausalLM are NaN or infinite: its weights"):
        DistillationObjective(teacher, tiny_model())


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
    assert "press Ctrl-C again to stop at once" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.full
def test_sigterm_ends_behind_the_step_with_a_checkpoint(tmp_path):
    made = trainer(tmp_path, max_steps=9)

    class Terminate(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    made.add_callback(Terminate())
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):  # no script goes on as if it had finished
        made.train()
    assert made.listeners.find(StepGuard).stopping and made.state.global_step == 3
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3"]
    assert signal.getsignal(signal.SIGTERM) is handler
    again, whole = trainer(tmp_path, max_steps=9), trainer(tmp_path / "whole", max_steps=9)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    whole.train()
    for name, weight in weights(whole.model).items():
        assert torch.equal(weights(again.model)[name], weight), name


class SignalToAll(TrainerCallback):
    """SIGTERM and Ctrl-C in the third step, to the data workers too, as a terminal or a scheduler sends them."""

    def __init__(self, number):
        self.number = number

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            workers = multiprocessing.active_children()
            assert workers
            # sent by another process: what their trainer sends ends them
            subprocess.run(["kill", f"-{int(self.number)}", *(str(each.pid) for each in workers), str(os.getpid())])
            time.sleep(0.5)
            assert multiprocessing.active_children() == workers


def test_data_workers_end_when_their_trainer_ends_them():
    """A process waits for its children when it exits, so that a worker that ignored this would keep it for ever."""
    before = set(multiprocessing.active_children())
    loader = torch.utils.data.DataLoader(range(64), num_workers=1)
    ignore_signals_in_workers(loader)
    iterator = iter(loader)
    assert next(iterator) == 0
    (worker,) = set(multiprocessing.active_children()) - before
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    assert [int(next(iterator)) for _ in range(9)] == [*range(1, 10)]
    worker.terminate()
    worker.join(20)
    assert worker.exitcode == 0


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_all_processes_leaves_the_data_workers_to_finish_the_step(number, tmp_path, capfd):
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        pytest.skip("SIGHUP is ignored here, as under nohup, and so it is by a run")
    resource_tracker.ensure_running()  # a child, too, where texts were tokenised by several: one that SIGHUP ends
    made = trainer(tmp_path, data=rows(64), max_steps=9, dataloader_num_workers=2)
    made.add_callback(SignalToAll(number))
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
        made.train()
    assert made.listeners.find(StepGuard).stopping and [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3"]
    assert capfd.readouterr().err.count("press Ctrl-C again to stop at once") == (number == signal.SIGINT)


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
    with pytest.raises(RunError) as raised, translate_errors(RECIPE, tmp_path):
        raise error
    assert len(str(raised.value).splitlines()) == 1 and raised.value.__cause__ is error
    for part in expected:
        assert part in str(raised.value)


def test_a_full_disk_names_the_last_checkpoint(tmp_path):
    (tmp_path / "checkpoint-8").mkdir()
    (tmp_path / "checkpoint-8" / "trainer_state.json").write_text("{}")
    with (
        pytest.raises(RunError, match=r"then continue from .*checkpoint-8 with --resume"),
        translate_errors(RECIPE, tmp_path),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [KeyError("x"), FileNotFoundError(errno.ENOENT, "no", "f"), ValueError("y")])
def test_other_errors_pass_through(tmp_path, error):
    with pytest.raises(type(error)) as raised, translate_errors(RECIPE, tmp_path):
        raise error
    assert raised.value is error


def test_torchs_memory_report_does_not_hide_the_advice():
    said = (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 138.21 GiB "
        "is free. Of the allocated memory 1.00 GiB is allocated by PyTorch. If reserved but unallocated memory is "
        "large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )
    text = error_translation.out_of_memory(RECIPE, torch.OutOfMemoryError(said))
    assert text.startswith("the GPU is out of memory: CUDA out of memory. Tried to allocate 20.00 MiB; set train.batch")


def checkpoint(folder, step=8):
    (folder / f"checkpoint-{step}").mkdir(parents=True)
    (folder / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")


@pytest.mark.parametrize(
    "overrides, ends",
    [
        ([], "--name a --resume train.batch_size=2"),
        (["train.tokens_per_step=null"], "--name a --resume train.batch_size=2 train.tokens_per_step=2048"),
        (["train.batch_size=1"], "--name a --resume train.gradient_checkpointing=true"),
        (["train.batch_size=1", "train.gradient_checkpointing=true"], "--name a --resume teacher.offload=cpu"),
        (["data.on_policy={samples: 2}"], "--name a --resume train.gradient_checkpointing=true"),
        (["data.on_policy={fraction: 0.5}"], "--name a --resume train.batch_size=2"),
    ],
)
def test_memory_that_runs_out_behind_a_checkpoint_ends_with_how_to_go_on(tmp_path, overrides, ends):
    folder = tmp_path / "a"
    checkpoint(folder)
    recipe = parse(dump(RECIPE), overrides)
    with pytest.raises(RunError) as raised, translate_errors(recipe, folder):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    text = str(raised.value)
    assert text.endswith(f"{folder / 'checkpoint-8'} is kept: continue with the same command and {ends}")
    # what a resumed run may not be told comes apart from what it may
    can, only_new = text.split(" (a new run can set ")
    assert (
        "student.lora" not in can and "student.lora" in only_new and "train.gradient_checkpointing to" not in only_new
    )
    before = error_translation.out_of_memory(recipe, torch.OutOfMemoryError("full"), tmp_path / "absent")
    assert "--resume" not in before and "student.lora" in before and before.endswith("by the GiB they save")


def test_nothing_is_said_of_resuming_where_only_another_run_would_fit(tmp_path):
    checkpoint(tmp_path)
    told = ["train.batch_size=1", "train.gradient_checkpointing=true", "teacher.dtype=fp8"]
    text = error_translation.out_of_memory(parse(dump(RECIPE), told), torch.OutOfMemoryError("full"), tmp_path)
    assert "a new run can set data.max_length from 512 to 256" in text and "student.lora to {}" in text
    assert "--resume" not in text


def test_advice_leaves_out_what_is_set_already():
    recipe = RECIPE.model_copy(update={"train": RECIPE.train.model_copy(update={"batch_size": 1})})
    text = error_translation.out_of_memory(recipe, torch.OutOfMemoryError("full"))
    assert "train.batch_size" not in text and "data.max_length from 512 to 256" in text
