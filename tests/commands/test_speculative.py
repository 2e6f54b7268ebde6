"""A student as the draft of its teacher: acceptance by transformers' assisted generation beside 1 - TVD."""

import json

import pytest
import torch
from tiny import save_models, tiny_model

from distill.cli import run_command
from distill.evaluation.speculative import measure_acceptance

PROMPTS = [[5 + n, 6, 7, 8 + n, 9] for n in range(6)]


def test_equal_models_accept_every_draft():
    teacher = tiny_model(seed=1)
    student = tiny_model(seed=1)
    found = measure_acceptance(student, teacher, PROMPTS[:2], count=12)
    assert found["drafts_accepted"].value == 1 and found["drafts_predicted"].value == pytest.approx(1, abs=1e-6)
    assert found["tokens_per_forward"].value == 2, "the draft and the teacher's own next token"
    assert not student._forward_pre_hooks and not teacher._forward_pre_hooks


@pytest.mark.full
def test_acceptance_is_that_of_the_distributions():
    """Two models of 1 - TVD well below 1: the share of drafts is within its error of it, and the same again."""
    teacher, student = tiny_model(seed=1), tiny_model(seed=2)
    with torch.no_grad():
        for model in (teacher, student):
            model.get_output_embeddings().weight.mul_(2)
    found = measure_acceptance(student, teacher, PROMPTS, count=60)
    accepted, predicted = found["drafts_accepted"], found["drafts_predicted"]
    assert 0.05 < predicted.value < 0.95
    assert abs(accepted.value - predicted.value) < 0.1 and accepted.low < predicted.value < accepted.high
    assert found["tokens_per_forward"].value == pytest.approx(1 + accepted.value, abs=0.05)
    again = [measure_acceptance(student, teacher, PROMPTS, count=6) for _ in range(2)]
    assert again[0] == again[1]


@pytest.mark.full
def test_the_command_adds_them_to_its_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = "\n".join(f"The teacher explains line {n} and the student listens to it once more." for n in range(12))
    save_models(tmp_path, text=text, teacher={"layers": 2, "seed": 1}, student={"layers": 1})
    command = ["eval", "student", "--teacher", "teacher", "--data", "text.txt", "--max-length", "32"]
    target = ["--target" if part == "--teacher" else part for part in command]  # the target of the drafts
    assert run_command([*target, "--speculative", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert {"drafts_accepted", "drafts_predicted", "tokens_per_forward"} <= figures.keys()
    assert run_command([*command, "--json"]) == 0
    assert "drafts_accepted" not in json.loads(capsys.readouterr().out)["figures"]
