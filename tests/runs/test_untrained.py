"""The untrained student is measured after training, with the figures that it has before."""

import json
import os
import signal
from collections import namedtuple

import psutil
import pytest

from distill.cli import run_command
from distill.recipe import parse
from distill.run import run
from distill.training.progress import read_metrics

RECIPE = """
teacher: {model: teacher}
student: {model: student}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1}}
train: {steps: 3, batch_size: 2, tokens_per_step: 64, learning_rate: 3e-2, warmup: 0, log_every: 1, device: cpu}
generate: {prompts: [Hello], max_new_tokens: 5}
"""
FIRST, LAST, MEASURED = "step 1/3", "step 3/3", "the student before training"


pytestmark = pytest.mark.place(
    text="\n".join(f"The teacher explains line {number}." for number in range(60)),
    files={"r.yaml": RECIPE},
    teacher={"seed": 1},
    student={"seed": 2},
)


@pytest.fixture
def full_host(monkeypatch):
    """A host without memory for a copy of the student."""

    def fill():
        monkeypatch.setattr(psutil, "virtual_memory", lambda: namedtuple("Memory", "available total")(0, 0))

    return fill


def figures(folder):
    before = json.loads((folder / "before.json").read_text())
    rows = [(row["loss"], row["grad_norm"]) for row in read_metrics(folder / "metrics.jsonl")]
    after = json.loads((folder / "result.json").read_text())
    weights = after["files"]["model.safetensors"]
    return before["held_out"], before["answers"], rows, after["after"], after["answers"], weights


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["student.lora={r: 2, head: true}", "train.precision=bfloat16"],
        ["student.dtype=bfloat16", "train.log_every=10"],  # no step is logged
        ["student.quantise={format: q4_0}"],
        ["student.quantise={format: q4_0}", "student.lora={r: 2}"],
    ],
    ids=["all weights", "LoRA under autocast", "bfloat16, no log", "quantised", "quantised under adapters"],
)
def test_figures_are_those_of_a_measurement_before_training(workplace, full_host, capsys, overrides):
    late = run(parse(RECIPE, overrides, name="late"))
    said = capsys.readouterr().out
    full_host()
    early = run(parse(RECIPE, overrides, name="early"))
    said_early = capsys.readouterr().out
    assert figures(late.folder) == figures(early.folder)
    assert late.before != late.after, "the student has learned"
    if "train.log_every=10" not in overrides:
        assert said.index(LAST) < said.index(MEASURED)
        assert said_early.index(MEASURED) < said_early.index(FIRST)


def test_a_teacher_that_follows_the_student_is_measured_before_it_does(workplace, capsys):
    (workplace / "pairs.jsonl").write_text(
        "".join(f'{{"q": "Is {n}?", "a": "It is {n}.", "h": "{n}"}}\n' for n in range(40))
    )
    teacher = "teacher={type: student, ema: 0.5, context: {template: 'A hint. {h}', place: before}}"
    data = "data={source: pairs.jsonl, max_length: 64, cache: false, fields: {prompt: q, completion: a}}"
    run(parse(RECIPE, [teacher, data, "train.tokens_per_step=128", "loss={terms: [{type: reverse_kl}]}"], name="r"))
    said = capsys.readouterr().out
    assert said.index(MEASURED) < said.index(FIRST)


@pytest.mark.full
@pytest.mark.parametrize("quantised", [False, True], ids=["plain", "rounded by GPTQ"])
def test_a_run_that_ends_before_the_measurement_makes_it_when_it_is_resumed(workplace, capsys, at_step, quantised):
    more = ["student.quantise={format: q4_0}"] if quantised else []
    assert run_command(["run", "r.yaml", "--name", "whole", *more]) == 0
    at_step(0, lambda arguments: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit, match=r"^0$"):
        run_command(["run", "r.yaml", "--name", "ended", *more])
    at_step(None, None)
    began = json.loads((workplace / "runs/ended/before.json").read_text())
    assert (
        set(began) == {"started", "command", "device", "summary"} and (workplace / "runs/ended/checkpoint-1").exists()
    )
    assert run_command(["verify", "ended"]) == 0 and run_command(["report", "ended"]) == 0
    capsys.readouterr()
    assert run_command(["run", "r.yaml", "--name", "ended", "--resume", *more]) == 0
    said = capsys.readouterr().out
    assert said.index(LAST) < said.index(MEASURED)
    assert json.loads((workplace / "runs/ended/before.json").read_text())["started"] == began["started"]
    assert figures(workplace / "runs/ended") == figures(workplace / "runs/whole")
