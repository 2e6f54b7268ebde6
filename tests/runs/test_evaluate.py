"""Held-out figures against full logits in float64, whatever the batch size, and models left as they were."""

import copy
import math

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer
from torch.nn import functional as F

from distill.data.collator import Collator
from distill.evaluation.evaluate import HeldOut, evaluate, relative_reduction
from distill.evaluation.evaluate_documents import evaluate_documents
from distill.models.adapters import add_lora
from distill.recipe import Lora
from distill.teachers.objective import DistillationObjective

KINDS = {"llama": {}, "gemma2": {"final_logit_softcapping": 3.0}, "granite": {"logits_scaling": 4.0}}


@pytest.fixture(scope="module")
def rows():
    """Rows of different length; two documents in some; prompts masked."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for length in (5, 17, 9, 30, 2, 12, 21):
        ids = torch.randint(3, 259, (length,), generator=generator).tolist()
        labels, positions = list(ids), list(range(length))
        if length != 9:  # a first label that is not masked has nothing before it to predict it, and must not count
            labels[0] = -100
        if length > 10:
            cut = length // 2
            labels[cut + 1 : cut + 3] = [-100] * 2
            if length % 2:  # nor has a later document's, which the one before must not predict
                labels[cut] = -100
            positions[cut:] = range(length - cut)
        made.append({"input_ids": ids, "labels": labels, "position_ids": positions})
    return made


def exact(student, teacher, rows):
    """The same figures from full logits in float64, a row at a time."""
    sums, tokens = torch.zeros(7, dtype=torch.float64), 0
    for row in rows:
        inputs = {name: torch.tensor([row[name]]) for name in ("input_ids", "position_ids")}
        with torch.no_grad():
            s = student(**inputs, use_cache=False).logits[0, :-1].double().log_softmax(-1)
            t = teacher(**inputs, use_cache=False).logits[0, :-1].double().log_softmax(-1)
        labels = torch.tensor(row["labels"][1:])
        keep = (labels != -100) & (inputs["position_ids"][0, 1:] != 0)
        s, t, labels = s[keep], t[keep], labels[keep]
        tokens += len(labels)
        per_token = [
            (t.exp() * (t - s)).sum(-1),
            (s.exp() * (s - t)).sum(-1),
            (s.argmax(-1) == t.argmax(-1)).double(),
            F.nll_loss(s, labels, reduction="none"),
            F.nll_loss(t, labels, reduction="none"),
            -(s.exp() * s).sum(-1),
            -(t.exp() * t).sum(-1),
        ]
        sums += torch.stack([values.sum() for values in per_token])
    return HeldOut(tokens, *(sums / tokens).tolist())


@pytest.mark.plain("llama", "granite")
@pytest.mark.parametrize("kind", KINDS)
def test_figures_equal_full_logits(kind, rows):
    tokenizer = tiny_tokenizer()
    teacher = tiny_model(tokenizer, layers=3, hidden=64, seed=1, kind=kind, **KINDS[kind])
    student = tiny_model(tokenizer, kind=kind, **KINDS[kind]).train()
    expected = exact(student.eval(), teacher, rows)
    student.train()
    for batch_size in (1, 3, 8):
        figures = evaluate(student, teacher, rows, batch_size=batch_size)
        assert figures.tokens == expected.tokens
        assert figures == pytest.approx(expected, rel=2e-5), batch_size
    assert student.training, "the mode must be given back"
    assert "forward" not in vars(student), "the student must not stay patched"
    assert figures.student_perplexity == pytest.approx(math.exp(expected.student_cross_entropy), rel=1e-4)
    assert figures.forward_kl != pytest.approx(figures.reverse_kl, rel=1e-3), "two different divergences"


def test_a_copy_of_the_teacher_has_no_gap(rows):
    figures = evaluate(tiny_model(), tiny_model(), rows)
    assert abs(figures.forward_kl) < 1e-6 and abs(figures.reverse_kl) < 1e-6 and figures.agreement == 1
    assert math.isnan(relative_reduction(figures._replace(forward_kl=0.0), figures))


def test_a_collapsed_student_agrees_nowhere(rows):
    """All of its tokens tie: `argmax` would say the first, which the collapsed teacher's is too."""
    student = tiny_model()
    student.get_output_embeddings().weight.data.zero_()
    for teacher in (tiny_model(layers=3, seed=1), copy.deepcopy(student)):
        assert evaluate(student, teacher, rows).agreement == 0
        assert evaluate_documents(student, teacher, rows).figures["agreement"].value == 0


def test_a_student_in_training_is_measured_through_its_objective(rows):
    teacher = tiny_model(layers=3, seed=1)
    student = add_lora(tiny_model(), Lora(r=2, head=True))
    for name, parameter in student.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    expected = exact(student.eval(), teacher, rows)
    objective = DistillationObjective(teacher, student, "reverse_kl")
    loss = objective.loss
    with_objective = evaluate(student, teacher, rows, objective=objective)
    on_its_own = evaluate(student, teacher, rows)
    assert with_objective == pytest.approx(expected, rel=2e-5) and on_its_own == pytest.approx(expected, rel=2e-5)
    assert objective.loss is loss
    batch = Collator(0)(rows[:2])
    assert "loss" in student(**objective.student_inputs(batch)), "the objective must still be attached"
    assert all(parameter.grad is None for parameter in student.parameters())


def test_nothing_to_measure_is_an_error(rows):
    with pytest.raises(ValueError, match="no held-out rows"):
        evaluate(tiny_model(), tiny_model(), [])
    masked = [{**row, "labels": [-100] * len(row["labels"])} for row in rows]
    with pytest.raises(ValueError, match="no trained tokens"):
        evaluate(tiny_model(), tiny_model(), masked)


def test_the_reduction_is_relative_to_the_kl_before_training():
    before = HeldOut(10, 4.0, 1.0, 0.1, 5.0, 2.0, 1.0, 1.0)
    assert relative_reduction(before, before._replace(forward_kl=1.0)) == 0.75
    assert relative_reduction(before, before._replace(forward_kl=5.0)) == -0.25
    assert before._replace(student_cross_entropy=1e4).student_perplexity == math.inf
