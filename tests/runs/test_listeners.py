"""Listeners of a step: their moments and order, their state in checkpoints, and a trainer that knows none by name."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from test_trainer import rows, trainer

from distill.training.listeners import StepListener
from distill.training.phases import PAUSED
from distill.training.step_guard import StepGuard

ROOT = Path(__file__).resolve().parents[2]


class Record(StepListener):
    """Every moment by name, in order."""

    def __init__(self):
        self.seen = []

    @contextmanager
    def training(self):
        self.seen.append("begin")
        yield
        self.seen.append("end")

    @contextmanager
    def phase(self, name):
        self.seen.append(f"{name} begins")
        yield
        self.seen.append(f"{name} ends")

    def begin_step(self, step):
        self.seen.append(f"step {step}")

    def epoch_batches(self, batches, count, are_final):
        self.seen.append(f"{count} batches{', final' * are_final}")
        return batches

    def batches_taken(self, batches, upcoming):
        assert list(upcoming) == []
        self.seen.append(f"taken {len(batches)}")

    def loss_computed(self, batch, result):
        assert "labels" in batch and isinstance(result[0], torch.Tensor)
        self.seen.append("loss computed")

    def forward_done(self, batch, inputs, output):
        assert inputs.targets is not None and output["statistics"].dim() == 1
        self.seen.append("forward")

    def micro_batch_done(self, batch, loss, is_last):
        self.seen.append(f"backward{', last' * is_last}")

    def gradient_norm_computed(self, norm):
        assert norm > 0
        self.seen.append("norm")

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.seen.append("optimizer")

    def metrics(self):
        self.seen.append("metrics")
        return {"steps_seen": float(sum(each == "optimizer" for each in self.seen))}

    def save(self, checkpoint):
        self.seen.append(f"save {checkpoint.name}")

    def restore(self, checkpoint):
        self.seen.append(f"restore {checkpoint.name}")


MICRO_BATCH = [
    "student begins",
    "teacher begins",
    "teacher ends",
    "loss begins",
    "loss ends",
    "loss computed",
    "forward",
    "student ends",
]


def step(number, *after):
    taken = [f"step {number}", "2 batches, final", "taken 2"]
    return [*taken, *MICRO_BATCH, "backward", *MICRO_BATCH, "backward, last", "norm", "optimizer", *after]


def test_moments_come_in_the_order_of_a_step(tmp_path):
    record = Record()
    settings = {"max_steps": 2, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2}
    made = trainer(tmp_path, callbacks=[record], **settings)
    made.train()
    saved = [f"{PAUSED} begins", "save checkpoint-2", f"{PAUSED} ends"]
    assert record.seen == ["begin", *step(0, "metrics"), *step(1, "metrics"), *saved, "end"]
    assert [row["steps_seen"] for row in made.state.log_history if "loss" in row] == [1.0, 2.0]
    again = Record()
    made = trainer(tmp_path, callbacks=[again], **(settings | {"max_steps": 3}))
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.seen[:2] == ["begin", "restore checkpoint-2"] and "step 2" in again.seen and "step 1" not in again.seen


class Backwards(StepListener):
    """Replaces each micro-batch by one with its rows in the opposite order, and remembers how many in checkpoints."""

    replaces_batches = True

    def __init__(self):
        self.count, self.final = 0, set()

    def epoch_batches(self, batches, count, are_final):
        self.final.add(are_final)
        return batches

    def replace(self, batches, step, following):
        self.count += len(batches)
        assert following == 3 - step
        columns = ("input_ids", "labels", "position_ids")
        return [{name: batch[name].flip(0) for name in columns} for batch in batches]

    def save(self, checkpoint):
        (checkpoint / "backwards.json").write_text(json.dumps(self.count))

    def restore(self, checkpoint):
        self.count = json.loads((checkpoint / "backwards.json").read_text())


def test_a_listener_replaces_batches_and_keeps_its_state(tmp_path):
    plain = trainer(tmp_path / "plain", data=rows(ragged=False))
    plain.train()
    listener = Backwards()
    made = trainer(tmp_path / "own", data=rows(ragged=False), save_strategy="steps", save_steps=2, callbacks=[listener])
    made.train()
    assert listener.count == 4 and listener.final == {False}
    losses = [[row["loss"] for row in each.state.log_history if "loss" in row] for each in (plain, made)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4), "the order of a batch's rows is of no account"
    resumed = Backwards()
    made = trainer(tmp_path / "own", data=rows(ragged=False), callbacks=[resumed])
    made.train(resume_from_checkpoint=str(tmp_path / "own/checkpoint-2"))
    assert resumed.count == 4


def test_a_listener_is_found_by_its_class(tmp_path):
    made = trainer(tmp_path)
    assert made.listeners.find(StepGuard).skipped == 0
    with pytest.raises(ValueError, match=r"^trainer: expected a callback of Record, got none$"):
        made.listeners.find(Record)
