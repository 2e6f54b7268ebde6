"""Answers drawn in a thread while the step before them trains: the same ones, at the right time, and its faults."""

import threading

import pytest
import torch
from test_graph import train
from test_on_policy import on_policy, pairs, trainer, weights
from tiny import tiny_model
from transformers import TrainerCallback

from distill.core.faults import RunError
from distill.generation.decode_loop import DecodeLoop, EngineSettings
from distill.generation.on_policy import OnPolicy
from distill.generation.sampling import Sampling
from distill.models.patching import patch
from distill.models.snapshot import Snapshot


def ahead(folder, **settings):
    """Three micro-batches of two rows a step, seven steps of two epochs; on-policy, by weights one step old."""
    student = tiny_model()
    made = trainer(
        folder, student=student, data=pairs(24),
        **({"max_steps": 7, "gradient_accumulation_steps": 3, "use_cpu": True} | settings),
    )  # fmt: skip
    snapshot = Snapshot(student)
    made.on_policy = on_policy(snapshot.model, student=student, snapshot=snapshot, ahead=1)
    return made


def watched(monkeypatch):
    """The names of the threads that answered, in order."""
    names, answer = [], DecodeLoop._answer_in_turn

    def answer_and_tell(self, *args):
        names.append(threading.current_thread().name.partition("_")[0])
        return answer(self, *args)

    monkeypatch.setattr(DecodeLoop, "_answer_in_turn", answer_and_tell)
    return names


def test_what_a_thread_draws_is_what_would_be_drawn_without_it(tmp_path, monkeypatch):
    names = watched(monkeypatch)
    beside = ahead(tmp_path / "beside")
    beside.train()
    # four steps an epoch, of which the first cannot be looked at before it begins, nor the last one be followed
    assert names == ["MainThread", *["rollouts"] * 3, "MainThread", *["rollouts"] * 2]
    # or the end of the thread's autocast would clear the casts that a forward in the other thread remembers
    assert beside.on_policy._thread.submit(torch.autocast_increment_nesting).result() == 2
    names.clear()
    monkeypatch.setattr(DecodeLoop, "overlaps", False)
    after = ahead(tmp_path / "after")
    after.train()
    assert names == ["MainThread"] * 7
    for name, value in weights(after.model).items():
        assert torch.equal(weights(beside.model)[name], value), name
    rows = [
        [{key: row[key] for key in row if "rollout" in key and "second" not in key} for row in made.state.log_history]
        for made in (beside, after)
    ]
    assert rows[0] == rows[1] and rows[0][1]["rollout_lag"] == 1


def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_drawn_ahead(tmp_path):
    whole = ahead(tmp_path / "whole", save_strategy="steps", save_steps=2)
    whole.train()
    again = ahead(tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    for name, value in weights(whole.model).items():
        assert torch.equal(weights(again.model)[name], value), name


def test_the_threads_fault_ends_the_run(tmp_path, monkeypatch):
    answer = DecodeLoop._answer_in_turn

    def fail(self, *args):
        if threading.current_thread() is not threading.main_thread():
            raise RunError("no memory left")
        return answer(self, *args)

    monkeypatch.setattr(DecodeLoop, "_answer_in_turn", fail)
    made = ahead(tmp_path)
    with pytest.raises(RunError, match="no memory left"):
        made.train()
    assert made.state.global_step == 1


def test_an_evaluation_waits_for_what_is_drawn(tmp_path, monkeypatch):
    begun, go_on, drawn = threading.Event(), threading.Event(), []
    answer = DecodeLoop._answer_in_turn

    def slow(self, *args):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert go_on.wait(60)
        answers = answer(self, *args)
        drawn.append(threading.current_thread().name)
        return answers

    class Evaluates(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                assert begun.wait(60) and len(drawn) == 1
                threading.Timer(0.2, go_on.set).start()
                made.evaluate(made.train_dataset)
                assert len(drawn) == 2

    monkeypatch.setattr(DecodeLoop, "_answer_in_turn", slow)
    made = ahead(tmp_path, max_steps=2, callbacks=[Evaluates()])
    made.train()
    assert made.state.global_step == 2


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_copy_of_a_patched_student_has_our_layers_and_says_the_same(tmp_path, monkeypatch, kind):
    """Also after it took other weights, and from a checkpoint; siblings are one product each."""
    monkeypatch.setattr("distill.models.snapshot.runs_our_kernels", lambda device: True)
    student = tiny_model(kind=kind, dtype=torch.float64)
    prompts = [row["input_ids"][:4] for row in pairs(6)]
    patch(student, "student", attention=None)
    copied, again = Snapshot(student), Snapshot(student)
    layers = [module for module in copied.model.modules() if type(module) is torch.nn.Linear]
    joined = [layer for layer in layers if "forward" in layer.__dict__]
    assert len(joined) == 5 * 2 and len(layers) == 7 * 2 + 1
    calls, linear = [], torch.nn.functional.linear
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1 + 0.5 * torch.rand_like(parameter))
    copied.take(student, 7)
    copied.save(tmp_path)
    again.restore(tmp_path)
    assert again.step == 7
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *a: calls.append(1) or linear(*a))
    copied.model(input_ids=torch.tensor(prompts[:1]))
    assert len(calls) == 4 * 2 + 1
    expected, *got = (
        DecodeLoop(model, EngineSettings(2, [])).generate(prompts, max_new_tokens=6).tokens
        for model in (student, copied.model, again.model)
    )
    assert got == [expected, expected]


@pytest.mark.gpu
@pytest.mark.parametrize("graphed", [False, True])
def test_beside_a_training_step_a_gpu_draws_the_same(tmp_path, monkeypatch, graphed):
    """Decoding replayed on its own stream while the step is launched, or replayed too."""
    names = watched(monkeypatch)

    def draw_ahead(trainer):
        student = trainer.objective.student
        snapshot = Snapshot(student)
        engine = DecodeLoop(snapshot.model, EngineSettings(2, [], max_length=64))
        trainer.on_policy = OnPolicy(
            engine, fraction=1.0, max_new_tokens=32, sampling=Sampling(1.0), seed=3, max_length=64, student=student,
            snapshot=snapshot, ahead=1,
        )  # fmt: skip

    data = [row for row in pairs(96) if row["labels"].count(-100) == 6]
    ways = {}
    for overlaps in (True, False):
        if not overlaps:
            monkeypatch.setattr(DecodeLoop, "overlaps", False)
        names.clear()
        losses, made, steps, _, _ = train(tmp_path / str(overlaps), graphed, data=data * 4, steps=24, change=draw_ahead)
        assert names.count("rollouts") == (23 if overlaps else 0)
        assert steps is None or steps.graphs.replays > 0
        ways[overlaps] = losses, made
    assert ways[True][0] == ways[False][0]
    for name, value in ways[True][1].items():
        assert torch.equal(ways[False][1][name], value), name
