"""Answers of steps to come are drawn with those of a step: by which weights, in which groups, and from a checkpoint."""

import copy
import json

import pytest
import torch
from test_on_policy import COLLATE, on_policy, pairs, trainer, weights
from tiny import tiny_model
from transformers import TrainerCallback

from distill.generation.decode_loop import DecodeLoop, EngineSettings
from distill.models.patch.patching import patch
from distill.models.patch.snapshot import Snapshot
from distill.teachers.backends.local import LoadedTeacher
from distill.training.step_listeners import RolloutBatches

PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def ahead(folder, steps=1, *, fraction=1.0, device="cpu", **settings):
    """Three micro-batches of two rows a step, four steps an epoch, seven in all."""
    defaults = {"max_steps": 7, "gradient_accumulation_steps": 3, "use_cpu": device == "cpu", "learning_rate": 1e-2}
    student = tiny_model(dtype=torch.float64).to(device)
    own = {"max_staleness": steps, "fraction": fraction}
    return trainer(folder, student=student, data=pairs(24), own=own, **(defaults | settings))


def counted(made):
    """Return the number of prompts of each call of a trainer's engine, in order."""
    return counted_by(made.listeners.find(RolloutBatches).rollouts.engine)


def counted_by(engine):
    """Return the number of prompts of each call of an engine, in order."""
    counts, answer = [], engine.run

    def answer_and_count(request):
        counts.append(len(request.prompts))
        return answer(request)

    engine.run = answer_and_count
    return counts


@pytest.mark.plain("1-[12, 12, 12, 6]-[0, 1, 0, 1, 0, 1, 0]")
@pytest.mark.parametrize(
    "steps, counts, lags",
    [(0, [6] * 7, None), (1, [12, 12, 12, 6], [0, 1] * 3 + [0]), (2, [18, 6, 12, 6], [0, 1, 2, 0, 0, 1, 0])],
)
def test_rollouts_of_an_epochs_steps_are_generated_in_groups(tmp_path, steps, counts, lags):
    """Groups begin at multiples of their size, and end with an epoch or with the run."""
    made = ahead(tmp_path, steps, logging_steps=1)
    found = counted(made)
    made.train()
    logged = [row for row in made.state.log_history if "rollouts" in row]
    assert found == counts and [row["rollouts"] for row in logged] == [6] * 7
    assert [row.get("rollout_lag") for row in logged] == (lags or [None] * 7)
    assert all(0 < row["rollouts_per_second"] < 1e5 for row in logged), "each step has its share of the time"


def test_a_group_is_answered_by_the_weights_of_its_first_step():
    """And a document by its own seed of its own step: as by a copy of those weights that was asked in that step."""
    model = tiny_model(dtype=torch.float64)
    batches = [COLLATE(pairs(8, seed=n)) for n in range(6)]
    own = on_policy(model, max_staleness=2)
    epoch = own.epoch(iter(batches))
    for step, batch in enumerate(epoch):
        if step % 3 == 0:
            before = copy.deepcopy(model)
        (got,), (expected,) = (
            each.replace([batch], step, COLLATE, following=5 - step) for each in (own, on_policy(before))
        )
        assert torch.equal(got["input_ids"], expected["input_ids"])
        if step % 3:
            (now,) = on_policy(model).replace([batch], step, COLLATE)
            assert not torch.equal(got["input_ids"], now["input_ids"])
        with torch.no_grad():
            model.lm_head.weight.mul_(-1.5)
    assert step == 5 and own.pop_metrics(lambda values: values, torch.device("cpu"))["rollout_lag"] == 1


def test_other_micro_batches_than_were_looked_at_are_answered_too():
    model = tiny_model(dtype=torch.float64)
    own = on_policy(model, max_staleness=1)
    own.epoch(iter([COLLATE(pairs(8, seed=1))]))
    own.replace([COLLATE(pairs(8))], 0, COLLATE, following=1)
    other = COLLATE(pairs(8, seed=2))
    (got,), (expected,) = (each.replace([other], 1, COLLATE) for each in (own, on_policy(model)))
    assert torch.equal(got["input_ids"], expected["input_ids"]) and not own._responses


@pytest.mark.full
@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("fraction", [1.0, 0.3])
def test_a_run_resumes_within_a_group_of_asynchronous_steps(tmp_path, device, fraction):
    def figures(made):
        keys = ("loss", "rollouts", "rollout_lag", "rollout_length")
        rows = [row for row in made.state.log_history if "rollouts" in row]
        return {row["step"]: [row[key] for key in keys] for row in rows}

    whole = ahead(tmp_path / "whole", 2, fraction=fraction, device=device, save_strategy="steps", save_steps=1)
    whole.train()
    held = {step: [*(tmp_path / f"whole/checkpoint-{step}").glob("answers-*")] for step in range(1, 8)}
    assert [step for step, files in held.items() if files] == [1, 2, 5]  # groups end with steps 3, 4, 6 and 7
    for step in (1, 2, 5):
        again = ahead(tmp_path / f"again-{step}", 2, fraction=fraction, device=device)
        calls = counted(again)
        again.train(resume_from_checkpoint=str(tmp_path / f"whole/checkpoint-{step}"))
        assert len(calls) == {1: 3, 2: 3, 5: 1}[step]
        for name, value in weights(whole.model).items():
            assert torch.equal(weights(again.model)[name], value), (step, name)
        assert figures(again) == figures(whole)
    for file in held[2]:
        file.unlink()
    other = ahead(tmp_path / "other", 2, fraction=fraction, device=device)
    other.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    assert figures(other) != figures(whole), "answers by other weights are other answers"


def test_a_checkpoint_of_two_processes_is_one_of_all_answers(tmp_path):
    """The checkpoint holds responses that are dealt differently when the run is resumed."""
    model, both = tiny_model(dtype=torch.float64), on_policy(tiny_model(dtype=torch.float64), max_staleness=1)
    rows = [pairs(6, seed=n) for n in range(4)]
    for rank in range(2):
        own = on_policy(model, max_staleness=1)
        own.epoch(iter([COLLATE(rows[2 + rank])]))
        own.replace([COLLATE(rows[rank])], 0, COLLATE, following=1)
        own.save(tmp_path / "checkpoint-1", rank)
    both.restore(tmp_path / "checkpoint-1")
    asked = counted_by(both.engine)
    mixed = COLLATE(rows[2][::2] + rows[3][::2])
    (got,) = both.replace([mixed], 1, COLLATE)
    (expected,) = on_policy(model).replace([mixed], 1, COLLATE)
    assert torch.equal(got["input_ids"], expected["input_ids"]) and not asked
    kept = json.loads((tmp_path / "checkpoint-1/answers-00001.json").read_text())
    assert list(kept) == ["1"] and len(kept["1"]) == 6


@pytest.mark.full
@pytest.mark.parametrize("cut", [False, True])
def test_a_remote_teacher_is_queried_for_all_steps_of_a_group_at_once(tmp_path, cut):
    """Requests hold the micro-batches that will train, as in a run without a server; a step's logs are its own."""

    def followed(folder, asks):
        asked, order = [], []

        class Prefetching(LoadedTeacher):
            """Teacher that notes what it is asked beforehand."""

            prefetch_depth = 1

            def prefetch(self, batch):
                asked.append(batch)

            def prefetch_error(self, batches):
                order.append((list(batches), len(asked)))

        teacher = (Prefetching if asks else LoadedTeacher)(tiny_model(seed=1, hidden=64, dtype=torch.float64))
        saving = {} if cut else {"save_strategy": "steps", "save_steps": 1}
        made = ahead(folder, 2, teacher=teacher, logging_steps=1, **saving)
        made.train(resume_from_checkpoint=str(tmp_path / "plain/checkpoint-1") if cut and asks else None)
        keys = ("step", "loss", "rollouts", "rollout_lag", "rollout_length", "rollout_truncated")
        return made, asked, order, [[r[key] for key in keys] for r in made.state.log_history if "rollouts" in r]

    if cut:
        ahead(tmp_path / "plain", 2, save_strategy="steps", save_steps=1).train()
    plain, _, _, expected = followed(tmp_path / "plain", False)
    asking, asked, order, figures = followed(tmp_path / "asking", True)
    assert figures[-6:] == expected[-6:]
    for name, value in weights(plain.model).items():
        assert torch.equal(weights(asking.model)[name], value), name
    first = 3 if cut else 9  # a step after a resume is not asked of before it begins, and its group is cut
    assert asked[0] is order[0][0][0] and order[0][1] == 3
    assert all(
        one is other for one, other in zip(asked[3:first], [b for own, _ in order[1:3] for b in own], strict=False)
    )
    later = [before for _, before in order]
    assert later == ([3, 6, 9, 12, 18, 21] if cut else [3, 12, 15, 18, 21, 27, 30])


def test_a_training_that_ends_early_draws_no_more(tmp_path):
    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 3

    made = ahead(tmp_path, 1, callbacks=[Stops()])
    counts = counted(made)
    made.train()
    assert counts == [12, 12] and made.state.global_step == 3


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_copy_of_a_patched_student_has_fused_layers_and_equal_outputs(monkeypatch, hardware, kind):
    """Also after it took other weights; siblings are one product each."""
    hardware.setattr("distill.models.patch.snapshot.runs_our_kernels", lambda device: True)
    student = tiny_model(kind=kind, dtype=torch.float64)
    prompts = [row["input_ids"][:4] for row in pairs(6)]
    patch(student, "student", attention=None)
    copied = Snapshot(student)
    layers = [module for module in copied.model.modules() if type(module) is torch.nn.Linear]
    joined = [layer for layer in layers if "forward" in layer.__dict__]
    assert len(joined) == 5 * 2 and len(layers) == 7 * 2 + 1
    calls, linear = [], torch.nn.functional.linear
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1 + 0.5 * torch.rand_like(parameter))
    copied.copy_from(student)
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *a: calls.append(1) or linear(*a))
    copied.model(input_ids=torch.tensor(prompts[:1]))
    assert len(calls) == 4 * 2 + 1
    expected, got = (
        DecodeLoop(model, EngineSettings(2, [])).generate(prompts, max_new_tokens=6).tokens
        for model in (student, copied.model)
    )
    assert got == expected
