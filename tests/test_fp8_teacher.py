"""An fp8 teacher: its linear layers quantised, its head kept, and the divergence that costs measured exactly."""

import pytest
import torch
from distill_kernels.matmul.fp8 import Fp8Linear
from test_trainer import rows
from tiny import tiny_model
from torch.nn import functional as F

from distill.data.collator import Collator
from distill.models.fp8_teacher import quantise_teacher
from distill.recipe import RecipeError, parse
from distill.training.objective import DistillationObjective


def test_the_reported_divergences_are_those_of_the_logits():
    teacher, student = tiny_model(seed=1, hidden=64), tiny_model(seed=2)
    objective = DistillationObjective(teacher, student)
    batch = Collator(pad_token_id=2)([rows(4)[index] for index in range(4)])
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
    keep = batch["valid_rows"]

    def log_p(model):
        with torch.no_grad():
            return model(**inputs).logits.double().flatten(0, 1)[keep].log_softmax(-1)

    before, of_student = log_p(teacher), log_p(student)
    report = quantise_teacher(objective, batch)
    after = log_p(teacher)
    linears = [module for module in teacher.modules() if isinstance(module, Fp8Linear)]
    assert len(linears) == report.layers == 14
    assert type(teacher.lm_head) is torch.nn.Linear

    def kl(p, q):
        return F.kl_div(q, p, log_target=True, reduction="batchmean").item()

    assert report.teacher_kl == pytest.approx(kl(before, after), rel=1e-4)
    assert report.student_kl == pytest.approx(kl(before, of_student), rel=1e-4)
    assert 1e-5 < report.teacher_kl < 0.2 * report.student_kl


def test_training_goes_on_against_the_quantised_teacher():
    teacher, student = tiny_model(seed=1, hidden=64), tiny_model(seed=2)
    objective = DistillationObjective(teacher, student)
    batch = Collator(pad_token_id=2)([rows(4)[index] for index in range(4)])
    exact = student(**objective.compare(batch))["loss"].item()
    report = quantise_teacher(objective, batch)
    loss = student(**objective.compare(batch))["loss"]
    loss.backward()
    assert loss.item() != exact and abs(loss.item() - exact) < 0.2 * exact
    assert student.model.layers[0].mlp.up_proj.weight.grad.abs().max() > 0
    assert report.student_kl == pytest.approx(exact, rel=1e-4)


def test_fp8_is_for_teachers():
    text = "teacher: {model: a, dtype: fp8}\nstudent: {model: b%s}\ndata: {source: c}\ntrain: {steps: 1}\n"
    assert parse(text % "").teacher.dtype == "fp8"
    with pytest.raises(RecipeError, match="fp8 is for teachers"):
        parse(text % ", dtype: fp8")
