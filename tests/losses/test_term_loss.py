"""The reduction of terms beside the fused ones: each token's loss, and their mean over the tokens of a step."""

import pytest
import torch
from test_student_top_k_term import V, called, operands

from distill.core.labels import IGNORE_INDEX
from distill.models.head import HeadWeights, LogitTransform
from distill.objectives.hidden import HiddenFormat, StoredHead
from distill.objectives.losses import single_losses
from distill.objectives.plugin import PluginTermLoss
from distill.objectives.targets import HeadForward, StepInputs
from distill.recipe.loss import Loss

TERMS = {
    "policy_gradient": {"type": "policy_gradient"},
    "policy_gradient, discounted": {"type": "policy_gradient", "discount": 0.5},
    "top_k_reverse_kl": {"type": "top_k_reverse_kl", "k": 5},
    "top_k_reverse_kl, sampled tail": {"type": "top_k_reverse_kl", "k": 5, "tail": "sampled"},
    "plugin": {"type": "plugin", "function": "squares"},
}
TEMPERED = ("top_k_reverse_kl", "top_k_reverse_kl, sampled tail")


def squares(student_logits, teacher_logits, labels):
    return (student_logits - teacher_logits).square().sum(-1)


def composite(term, weight, teacher, squared=True):
    """Format, alignment and loss of one term at temperature 2."""
    format = HiddenFormat(StoredHead(HeadWeights(teacher["weight"], None, None)), LogitTransform())
    format.makers["plugin"] = lambda *arguments: PluginTermLoss({"squares": squares}, *arguments)
    section = Loss.model_validate(
        {
            "temperature": 2.0,
            "scale_by_temperature_squared": squared,
            "terms": [term | {"weight": weight}],
            "plugin": {"file": "p.py", "sha256": "0" * 64},
        }
    )
    alignment = format.pair(LogitTransform(), V, None)
    return format, alignment, format.loss(section, alignment)


@pytest.fixture(params=TERMS)
def kind(request):
    return request.param


def test_tokens_losses_add_up_to_the_mean_over_the_tokens_of_a_step(kind):
    """Micro-batches are divided by the tokens of all, and each token takes an upstream gradient of its own."""
    student, teacher, labels = operands()
    head = HeadWeights(teacher["weight"], None, None)
    (term,) = composite(TERMS[kind], 0.7, teacher)[2].own
    leaves = list(student.values())
    upstream = torch.full(labels.shape, 1 / 23, dtype=torch.float64)
    term.reduction = "none"
    each = called(term, student, teacher, labels)
    assert each.shape == labels.shape and (each != 0).sum() == (labels != IGNORE_INDEX).sum()
    term.reduction = "mean"
    mean = called(term, student, teacher, labels, items=torch.tensor(23))
    torch.testing.assert_close(mean, each.sum() / 23, rtol=1e-12, atol=0)
    for one, other in zip(
        torch.autograd.grad(mean, leaves), torch.autograd.grad((each * upstream).sum(), leaves), strict=True
    ):
        assert one.any()
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-15)
    parts = []
    for row in range(len(labels)):  # as micro-batches
        own = HeadWeights(student["weight"], None, None)
        inputs = StepInputs(teacher["hidden"][row : row + 1], torch.tensor(23), False)
        parts.append(
            term(HeadForward(student["hidden"][row : row + 1], own, inputs, labels[row : row + 1], None), head)
        )
    torch.testing.assert_close(sum(parts), mean, rtol=1e-12, atol=0)


def test_weight_and_squared_temperature_multiply_the_loss(kind):
    student, teacher, labels = operands()
    values = [
        called(composite(TERMS[kind], weight, teacher, squared)[2].own[0], student, teacher, labels)
        for weight, squared in ((1.0, False), (0.7, False), (0.7, True))
    ]
    assert values[0] != 0
    torch.testing.assert_close(values[1], 0.7 * values[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(values[2], (4 if kind in TEMPERED else 1) * values[1], rtol=1e-12, atol=0)


def test_a_small_workspace_changes_nothing_but_the_chunks(kind):
    student, teacher, labels = operands()
    format, alignment, loss = composite(TERMS[kind], 0.7, teacher)
    head = HeadWeights(student["weight"], None, None)
    call = HeadForward(student["hidden"], head, StepInputs(teacher["hidden"], None, False), labels, None)
    whole = format.apply(loss, alignment, call)
    (own, _) = singles = list(single_losses(loss))
    for single in singles:
        single.workspace = 24 * V * 2
    assert own.kernel_settings()["max_workspace_mib"] == 24 * V * 2 / 2**20
    torch.testing.assert_close(format.apply(loss, alignment, call), whole, rtol=1e-12, atol=0)
