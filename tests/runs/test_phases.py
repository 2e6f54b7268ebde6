"""The split of a step's time: it adds up, each phase gets what happened in it, and it goes wherever figures go."""

import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from helpers import no_syncs
from tiny import tiny_model
from transformers import TrainerCallback, TrainingArguments

from distill.training import metrics
from distill.training import phases as phases_module
from distill.training.phases import KEYS, PAUSED, PHASES, Phases
from distill.training.progress import MetricsFile
from distill.training.trainer import DistillationTrainer


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self):
        self.now = 100.0

    def sleep(self, seconds):
        self.now += seconds

    def slow(self, call):
        def sleep_first(*args, **kwargs):
            self.sleep(1.0)
            return call(*args, **kwargs)

        return sleep_first


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (metrics, phases_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_time_goes_to_the_phase_that_is_on(clock):
    phases = Phases(torch.device("cpu"))
    clock.sleep(1)
    with phases.measure("student"):
        clock.sleep(2)
        with phases.measure("loss"):
            clock.sleep(4)
    with phases.measure(PAUSED), phases.measure("loss"):
        clock.sleep(8)
    assert phases.seconds() == {"data": 1, "teacher": 0, "student": 2, "loss": 4, "optimizer": 0}
    phases.restart()
    assert list(phases.seconds().values()) == [0] * len(PHASES)


def train(folder, callbacks=(), **settings):
    rows = Dataset.from_list([{"input_ids": list(range(3, 13))} for _ in range(16)])
    defaults = {
        "max_steps": 4,
        "logging_steps": 2,
        "gradient_accumulation_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    trainer = DistillationTrainer(
        tiny_model(),
        tiny_model(seed=1, hidden=64),
        TrainingArguments(str(folder), **(defaults | settings)),
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=list(callbacks),
    )
    return trainer


@pytest.mark.plain("student")
@pytest.mark.parametrize("where", ["data", "teacher", "student", "loss", "optimizer", "evaluation"])
def test_each_phase_covers_its_part_of_the_step(tmp_path, clock, where):
    path = tmp_path / "metrics.jsonl"
    trainer = train(tmp_path, [MetricsFile(path)], per_device_train_batch_size=1)
    if where == "data":
        trainer.data_collator = clock.slow(trainer.data_collator)
    elif where == "teacher":
        body = trainer.objective.teacher.model.model
        body.forward = clock.slow(body.forward)
    elif where == "student":  # once in the forward and once in the backward
        trainer.model.model.layers[0].register_forward_pre_hook(lambda *_: clock.sleep(0.5))
        trainer.model.model.layers[0].register_full_backward_hook(lambda *_: clock.sleep(0.5))
    elif where == "loss":
        trainer.objective.loss.forward = clock.slow(trainer.objective.loss.forward)
    elif where == "optimizer":
        trainer.create_optimizer()
        trainer.optimizer.step = clock.slow(trainer.optimizer.step)
    else:
        trainer.held_out_figures = clock.slow(trainer.held_out_figures)
    trainer.train()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4]
    expected = {} if where == "evaluation" else {f"time_{where}": 1.0 if where == "optimizer" else 2.0}
    for row in rows:
        if where != "data" or row is not rows[0]:  # the data loader reads one batch ahead
            assert {key: row[key] for key in KEYS if row[key]} == expected, row
        # an interval of two steps; pauses are in neither
        assert 2 * sum(row[key] for key in KEYS) == pytest.approx(row["seconds"], abs=1e-6)


def test_every_report_gets_the_phases(tmp_path):
    seen = []

    class Report(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    train(tmp_path, [Report()], eval_strategy="no").train()
    logged = [logs for logs in seen if "loss" in logs]
    assert len(logged) == 2 and all(set(KEYS) <= logs.keys() for logs in logged)
    assert all(isinstance(logs[key], float) for logs in logged for key in KEYS)


def test_tensorboard_gets_the_phases(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, report_to="tensorboard", eval_strategy="no").train()
    (event,) = tmp_path.rglob("events.out.*")
    found = EventAccumulator(str(event.parent))
    found.Reload()
    assert {f"train/{key}" for key in KEYS} <= set(found.Tags()["scalars"])


@pytest.mark.gpu
def test_phases_on_a_gpu_do_not_stop_it():
    device = torch.device("cuda")
    phases = Phases(device)
    x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    with no_syncs():
        for _ in range(3):
            with phases.measure("teacher"):
                for _ in range(20):
                    x @ x
            phases.enter("data")
    found = phases.seconds()
    assert found["teacher"] > 10 * found["optimizer"] and found["teacher"] > 0
