"""Caps and two temperatures in recipes: every teacher's loss against doctor's reference, and metrics of runs."""

import json
from dataclasses import replace

import pytest
from subjects import KINDS
from tiny import save_models

from distill import cli
from distill.doctor.invariants import fused_equals_reference
from distill.doctor.invariants_runs import resume_is_exact
from distill.recipe import RecipeError, parse
from distill.recipe.loss import Clip, Loss, TemperaturePair

# sampled tokens take no caps: their value is not the divergence's
EVERY = [subject for subjects in KINDS.values() for subject in subjects if subject != "sampled"]


def capped(loss, clip):
    """The loss with caps on every divergence, and the student's temperature above the teacher's."""
    terms = [
        term.model_copy(update={"clip": clip}) if "clip" in type(term).model_fields else term
        for term in loss.terms
        if term.type != "policy_gradient"
    ]
    terms = [term.model_copy(update={"clip": None}) if term.type == "cross_entropy" else term for term in terms]
    warm = loss.temperatures.teacher
    return loss.model_copy(update={"terms": terms, "temperature": TemperaturePair(teacher=warm, student=1.2 * warm)})


@pytest.mark.plain("one", "bucket", "informed", "student top k", "several")
@pytest.mark.parametrize("name", EVERY)
def test_every_teachers_loss_and_gradients_have_the_caps(name, subject_of):
    subject = subject_of(name)
    loss = capped(subject.loss, None)
    free, _ = replace(subject, loss=loss).reference_loss()
    soft = [term for term in loss.terms if term.type != "cross_entropy"]
    alone, _ = replace(subject, loss=loss.model_copy(update={"terms": soft})).reference_loss()
    mean = alone.item() / loss.scale / sum(term.weight for term in soft)
    clips = [Clip(token=mean, entry=mean / 10), Clip(token=mean), Clip(entry=mean / 50)]
    for clip in clips if name in ("one", "sampled") else clips[:1]:  # each alone where targets are all or drawn
        clipped = replace(subject, loss=capped(subject.loss, clip), small=None)
        found = fused_equals_reference(clipped)
        assert found.passed, found.detail
        value, _ = clipped.reference_loss()
        assert value < 0.9999 * free, clip  # else the caps were not seen


RECIPE = """
teacher: {model: teacher}
student: {model: student}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1}}
loss:
  terms: [{type: jsd, clip: {token: 0.2, entry: 0.002}}, {type: cross_entropy, weight: 0.1}]
  temperature: {teacher: 1.0, student: 1.1}
train: {steps: 4, batch_size: 2, learning_rate: 3e-3, warmup: 0, log_every: 1, save_every: 2, device: cpu}
generate: {prompts: []}
"""


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_models(tmp_path, teacher={"layers": 3, "seed": 1}, student={"seed": 2})
    (tmp_path / "text.txt").write_text("\n".join(f"The teacher explains line {i} once more." for i in range(60)))
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path


def metrics(name):
    with open(f"runs/{name}/metrics.jsonl") as lines:
        return [line for line in map(json.loads, lines) if "clipped_tokens" in line]


def test_a_run_logs_and_reports_what_its_caps_take(workplace, capsys):
    assert cli.run_command(["run", "r.yaml", "--name", "whole"]) == 0
    shown = capsys.readouterr().out
    assert "jsd (clip: token 0.2, entry 0.002)" in shown and "1 (teacher), 1.1 (student)" in shown
    assert "% of the value" in shown
    logged = metrics("whole")
    assert len(logged) == 4
    assert all(0 <= line["clipped_tokens"] <= 1 and 0 < line["clipped_value"] < 1 for line in logged)
    assert cli.run_command(["report", "whole"]) == 0
    report = (workplace / "runs/whole/report.html").read_text()
    assert "divergence beyond the caps" in report and "jsd (clip: token 0.2, entry 0.002)" in report


def test_resume_is_exact_with_caps(subject_of):
    subject = subject_of("one")
    found = resume_is_exact(replace(subject, loss=capped(subject.loss, Clip(token=0.3, entry=0.01))))
    assert found.passed, found.detail


@pytest.mark.parametrize(
    "override, message",
    [
        ("loss.terms=[{type: jsd, clip: {}}]", r"loss\.terms\.0\.clip: expected token, entry or both"),
        (
            "loss.terms=[{type: jsd, clip: {entry: 0}}]",
            r"loss\.terms\.0\.clip\.entry: expected a number above 0, got 0",
        ),
        (
            "loss.terms=[{type: cross_entropy, clip: {token: 1}}]",
            r"loss\.terms\.0\.clip: expected null for cross_entropy",
        ),
        ("loss.temperature={student: 0}", r"loss\.temperature\.student: expected a number above 0, got 0"),
        ("loss.temperature=cold", r"loss\.temperature: expected a number, got 'cold'"),
        (
            "loss={temperature: {student: 2}, schedule: [{setting: temperature, steps: [0], values: [1]}]}",
            r"schedule\.0\.setting: expected temperature\.teacher or temperature\.student, or weight",
        ),
    ],
)
def test_what_a_recipe_cannot_say_is_refused(override, message):
    with pytest.raises(RecipeError, match=message):
        parse(RECIPE, [override])


def test_one_temperature_of_two_is_that_of_both():
    assert Loss.model_validate({"temperature": 1.5}).temperatures == TemperaturePair(teacher=1.5, student=1.5)
