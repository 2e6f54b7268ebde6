"""loss.schedule: settings of the loss that follow the optimizer step, the same after a stop."""

import math
import shutil
from dataclasses import FrozenInstanceError

import pytest
import torch
from subjects import one
from tiny import tiny_model
from torch.distributed.utils import _apply_to_tensors, _to_kwargs
from transformers import TrainingArguments

from distill.doctor.invariants import fused_equals_reference
from distill.recipe import Loss, RecipeError, dump, load, parse
from distill.run import run
from distill.teachers.objective import DistillationObjective
from distill.training.loss_schedule import LossSchedule
from distill.training.progress import read_metrics
from distill.training.trainer import DistillationTrainer

BASE = (
    "teacher: {model: teacher}\nstudent: {model: student}\ngenerate: {prompts: []}\n"
    "data: {source: rows.jsonl, max_length: 64, cache: false, chat_template: none}\n"
    "train: {steps: 8, log_every: 1, save_every: 4, learning_rate: 1e-2}\n"
)
TERMS = "terms: [{type: forward_kl}, {type: jsd, beta: 0.5, weight: 0.5}, {type: cross_entropy, weight: 0}]"
RAMPS = (
    "{setting: terms.0.weight, steps: [2, 6], values: [1.0, 0.0]}, "
    "{setting: terms.1.beta, steps: [0, 4], values: [0.0, 1.0]}, "
    "{setting: terms.2.weight, steps: [1, 3], values: [0.0, 0.4]}, "
    "{setting: temperature, steps: [3, 5], values: [1, 2]}"
)


ROWS = [{"prompt": f"Say {n}?", "completion": f"It is {'so ' * (n % 5)}{n}."} for n in range(40)]
pytestmark = pytest.mark.place(files={"rows.jsonl": ROWS}, student={"seed": 0}, teacher={"seed": 1})


def recipe_of(schedule=RAMPS, terms=TERMS):
    return parse(BASE + f"loss: {{{terms}, schedule: [{schedule}]}}\n", name="r")


@pytest.mark.parametrize(
    "step, expected",
    [
        (0, (1, 0, 0, 1)),
        (2, (1, 0.5, 0.2, 1)),
        (3, (0.75, 0.75, 0.4, 1)),
        (4, (0.5, 1, 0.4, 1.5)),
        (6, (0, 1, 0.4, 2)),
        (900, (0, 1, 0.4, 2)),
    ],
)
def test_straight_lines_between_points(step, expected):
    loss = recipe_of().loss.at(step)
    first, second, third = loss.terms
    assert (first.weight, second.beta, third.weight, loss.temperature) == pytest.approx(expected)
    assert loss.schedule == [] and second.weight == 0.5


TWO_TEMPERATURES = (
    "loss: {temperature: {teacher: 1.5, student: 1}, terms: [{type: jsd, beta: 0.3}], schedule: ["
    "{setting: temperature.student, steps: [0, 2], values: [1, 2]}, "
    "{setting: temperature.teacher, steps: [1, 2], values: [1.5, 0.5]}]}\n"
)


@pytest.mark.parametrize(("step", "teacher", "student"), [(0, 1.5, 1), (1, 1.5, 1.5), (2, 0.5, 2), (9, 0.5, 2)])
def test_each_of_two_temperatures_has_a_schedule(step, teacher, student):
    temperatures = parse(BASE + TWO_TEMPERATURES, name="r").loss.at(step).temperatures
    assert (temperatures.teacher, temperatures.student) == pytest.approx((teacher, student))


def test_a_step_has_the_loss_of_its_two_temperatures(workplace):
    """With the same rows in each step and a learning rate of almost 0, only the temperatures change the loss."""
    rows = ["data.max_rows=8", "train.steps=3", "train.tokens_per_step=512", "train.batch_size=8"]
    still = ["train.learning_rate=1e-12", "train.save_every=null", "data.packing=false"]
    result = run(parse(BASE + TWO_TEMPERATURES, [*rows, *still], name="scheduled"))
    scheduled = read_metrics(result.folder / "metrics.jsonl")
    assert [row["temperature.student"] for row in scheduled] == [1, 1.5, 2]
    assert [row["temperature.teacher"] for row in scheduled] == [1.5, 1.5, 0.5]
    for row, temperatures in zip(scheduled, ((1.5, 1), (1.5, 1.5), (0.5, 2)), strict=True):
        fixed = f"loss.temperature={{teacher: {temperatures[0]}, student: {temperatures[1]}}}"
        name = f"fixed-{row['step']}"
        overrides = [*rows, *still, "loss.schedule=[]", fixed, "train.steps=1"]
        (alone,) = read_metrics(run(parse(BASE + TWO_TEMPERATURES, overrides, name=name)).folder / "metrics.jsonl")
        assert row["loss"] == pytest.approx(alone["loss"], rel=1e-5)


def test_the_recipe_shows_what_ever_takes_part():
    """A term that begins at 0 counts as taking part: on-policy data refuse its labels, doctor looks at it."""
    recipe = recipe_of()
    assert [term.weight for term in recipe.loss.terms] == [1.0, 0.5, 0.4]
    assert parse(dump(recipe), name="r") == recipe
    with pytest.raises(RecipeError, match="cross_entropy term"):
        parse(dump(recipe), ["data.on_policy={fraction: 1.0}"], name="r")
    plain = parse(BASE + "loss: {schedule: [{setting: terms.1.weight, steps: [0, 9], values: [0, 1]}]}\n", name="r")
    assert [(term.type, term.weight) for term in plain.loss.terms] == [("forward_kl", 1.0), ("cross_entropy", 1.0)]


def test_each_step_has_the_loss_of_its_number(workplace):
    """Gradients of each step are those of an unscheduled loss with that step's numbers, to the bit."""
    rows = [{"input_ids": list(range(5 + n, 30 + n)), "labels": list(range(5 + n, 30 + n))} for n in range(8)]
    section = recipe_of().loss
    student, teacher = tiny_model(seed=0), tiny_model(seed=1)
    seen = []
    args = TrainingArguments(
        str(workplace / "out"),
        max_steps=8,
        per_device_train_batch_size=2,
        learning_rate=0.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        max_grad_norm=0.0,
        save_strategy="no",
    )
    trainer = DistillationTrainer(student, teacher, args, loss=section, train_dataset=rows)
    inner = trainer.compute_loss

    def spied(model, inputs, *more, **named):
        seen.append({name: value.clone() for name, value in inputs.items()})
        loss = inner(model, inputs, *more, **named)
        seen[-1]["loss"] = loss.detach().clone()
        return loss

    trainer.compute_loss = spied
    trainer.train()
    assert len(seen) == 8
    other = tiny_model(seed=0)
    for step, batch in enumerate(seen):
        objective = DistillationObjective(teacher, other, section.at(step))
        inputs = {name: value for name, value in batch.items() if name != "loss"}
        loss = other(**objective.student_inputs(inputs))["loss"]
        objective.detach()
        assert torch.equal(loss.detach(), batch["loss"]), step
    assert len({batch["loss"].item() for batch in seen}) == 8


@pytest.mark.full
def test_schedule_is_logged_and_resumes_bit_identically(workplace):
    (workplace / "r.yaml").write_text(BASE + f"loss: {{{TERMS}, schedule: [{RAMPS}]}}\n")
    whole, half = run(load("r.yaml"), name="whole"), run(load("r.yaml"), name="half")
    rows = read_metrics(whole.folder / "metrics.jsonl")
    assert [row["terms.0.weight"] for row in rows] == [1, 1, 1, 0.75, 0.5, 0.25, 0, 0]
    assert [row["temperature"] for row in rows] == [1, 1, 1, 1, 1.5, 2, 2, 2]
    for path in (half.folder / "student", half.folder / "checkpoint-8"):
        shutil.rmtree(path)
    (half.folder / "result.json").unlink()
    run(load("r.yaml"), name="half", resume=True)
    again = read_metrics(half.folder / "metrics.jsonl")
    assert [row["loss"] for row in rows] == [row["loss"] for row in again] and len(rows) == 8
    weights = [(result.folder / "student/model.safetensors").read_bytes() for result in (whole, half)]
    assert weights[0] == weights[1]
    with pytest.raises(ValueError, match=r"loss\.schedule\.2\.steps\.1 differs .*: expected 3, got 4"):
        changed = [f"loss.schedule=[{RAMPS.replace('[1, 3]', '[1, 4]')}]"]
        run(load("r.yaml", changed), name="half", resume=True)


@pytest.mark.full
def test_figures_do_not_follow_the_weight(workplace):
    """A divergence in the log is its mean, whatever its weight is then; and only over steps that had one."""
    text = BASE.replace("learning_rate: 1e-2", "learning_rate: 1e-12").replace("log_every: 1", "log_every: 4")
    text = text.replace("steps: 8", "steps: 8, batch_size: 40").replace("save_every: 4, ", "")
    fading = "schedule: [{setting: terms.0.weight, steps: [0, 6], values: [1.0, 0.0]}]"
    terms = "terms: [{type: forward_kl}, {type: cross_entropy, weight: 0.5}]"
    plain = run(parse(text + f"loss: {{{terms}}}\n", name="plain"))
    faded = run(parse(text + f"loss: {{{terms}, {fading}}}\n", name="faded"))
    expected, rows = (read_metrics(result.folder / "metrics.jsonl") for result in (plain, faded))
    for row, other in zip(rows, expected, strict=True):
        for name in ("kl", "agreement", "teacher_entropy", "cross_entropy", "student_entropy"):
            assert math.isclose(row[name], other[name], rel_tol=1e-4), (row["step"], name)


def test_a_served_teacher_is_queried_in_every_step():
    fading = "{setting: terms.0.weight, steps: [0, 9], values: [1, 0]}"
    fading += ", {setting: terms.1.weight, steps: [0], values: [0]}"
    own = BASE.replace("{model: teacher}", "{type: server, url: http://localhost:1}")
    with pytest.raises(RecipeError, match=r"type: server: requires a divergence of weight above 0 in every step"):
        parse(own + f"loss: {{{TERMS.replace('weight: 0}', 'weight: 1}')}, schedule: [{fading}]}}\n", name="r")


def test_the_largest_weight_is_known_to_the_loss_alone():
    loss = Loss.model_validate(
        {"terms": [{"type": "reverse_kl"}], "schedule": [{"setting": "terms.0.weight", "steps": [0], "values": [3]}]}
    )
    assert loss.terms[0].weight == 3.0 and loss.at(0).terms[0].weight == 3.0


def test_a_prefetched_teacher_is_queried_in_every_step(monkeypatch):
    """Whatever its kind: several with routes may have one among them that is."""
    fading = recipe_of(
        "{setting: terms.0.weight, steps: [0, 9], values: [1, 0]}", "terms: [{type: forward_kl}, {type: cross_entropy}]"
    ).loss
    objective = DistillationObjective(tiny_model(seed=1), tiny_model(), fading)
    LossSchedule(objective, fading)
    monkeypatch.setattr(type(objective.teacher), "prefetch_depth", 2)
    with pytest.raises(ValueError, match="outputs are prefetched"):
        LossSchedule(objective, fading)


def test_inputs_of_a_step_are_frozen_and_reach_the_student_as_they_were_made():
    """FSDP2 casts the tensors of a call's arguments to the parameters' dtype; those of the loss keep theirs."""
    objective = DistillationObjective(tiny_model(seed=1), tiny_model())
    ids = torch.tensor([[3, 4, 5, 6]])
    inputs = objective.student_inputs({"input_ids": ids, "labels": ids, "sampled_log_p": torch.zeros(1, 4)})
    step = inputs["step_inputs"].value
    with pytest.raises(FrozenInstanceError):
        step.num_items = 3
    given = _apply_to_tensors(lambda tensor: tensor.bfloat16(), inputs)
    assert given["labels"].dtype == torch.bfloat16 and given["step_inputs"].value is step
    given = _to_kwargs((), inputs, torch.device("cpu"), use_side_stream_for_tensor_copies=False)[1][0]
    assert given["step_inputs"].value is step and step.sampled_log_p.dtype == torch.float32


def test_the_weight_of_a_step_stands_in_its_inputs():
    terms = "terms: [{type: forward_kl}, {type: cross_entropy}]"
    section = recipe_of("{setting: terms.0.weight, steps: [0, 4], values: [1, 0]}", terms).loss
    objective = DistillationObjective(tiny_model(seed=1), tiny_model(), section)
    batch = {"input_ids": torch.tensor([[3, 4, 5, 6]]), "labels": torch.tensor([[3, 4, 5, 6]])}
    inputs = objective.student_inputs(batch)["step_inputs"].value
    assert inputs.weight is None and inputs.batch is batch, "no schedule yet"
    schedule, found = LossSchedule(objective, section), []
    for step in (0, 1, 4):
        schedule.begin_step(step)
        inputs = objective.student_inputs(batch, 3)["step_inputs"].value
        found.append((inputs.weight, inputs.num_items, inputs.targets is None))
    assert found == [(1.0, 3, False), (0.75, 3, False), (0.0, 3, True)]


def test_doctor_looks_at_every_term_that_is_scheduled():
    """A term that begins at 0 as well: a fault of it is found."""
    later = recipe_of(
        "{setting: terms.1.weight, steps: [5, 9], values: [0, 1]}", "terms: [{type: forward_kl}, {type: reverse_kl}]"
    ).loss
    subject = one(later)
    assert fused_equals_reference(subject).passed
    assert [term.weight for term in subject.objective().terms] == [1.0, 1.0]
