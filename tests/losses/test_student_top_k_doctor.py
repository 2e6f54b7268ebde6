"""The doctor of the reverse KL over the student's own likeliest tokens: for every teacher, and with faults put in."""

from dataclasses import replace

import pytest
from distill_kernels.losses import linear
from distill_kernels.losses.topk_reference import TopK, reference_top_k_rows
from subjects import STUDENT_TOP_K, answering, informed_answering, one, routed_answering

from distill.doctor.invariants import CHECKS, fused_equals_reference, workspace_changes_nothing
from distill.objectives.student_top_k import StudentTopKLoss
from distill.recipe.loss import Loss

ALONE = {"terms": [{"type": "top_k_reverse_kl", "k": 8}]}


@pytest.mark.plain("served", "informed", "launched")
@pytest.mark.parametrize("name", ["served", "hidden", "informed", "kept", "launched"])
def test_every_hidden_state_teacher_supports_it(name, subject_of):
    subject = replace(subject_of(name), loss=Loss.model_validate(STUDENT_TOP_K))
    finding = fused_equals_reference(subject)
    assert finding.passed, finding


def test_a_cache_of_k_tokens_is_refused(subject_of):
    """The recipe's text does not tell what a cache holds."""
    subject = subject_of("bucket")
    subject.loss = Loss.model_validate(STUDENT_TOP_K)
    with pytest.raises(ValueError, match="expect hidden states of the teacher, got its top K tokens"):
        subject.objective()


@pytest.mark.full
@pytest.mark.parametrize("make", [routed_answering, answering, informed_answering])
@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_every_invariant_holds_of_it_on_the_students_answers(make, tail):
    """Routed ones of one model each."""
    subject = make()
    if make is routed_answering:
        subject.teacher = type(subject.teacher)(list(subject.teacher.models.values())[:2], subject.teacher.routes)
        subject.weights, subject.tokenizers = (1.0, 1.0), subject.tokenizers[:3]
    subject.loss = Loss.model_validate({"terms": [{"type": "top_k_reverse_kl", "k": 8, "tail": tail}]})
    for check in CHECKS:
        finding = check(subject)
        assert finding.passed, finding


def test_doctor_detects_a_missing_tail(fault):
    assert fused_equals_reference(one(ALONE)).passed
    plain = StudentTopKLoss.__init__

    def without(self, term, *args):
        plain(self, term.model_copy(update={"tail": "renormalize"}), *args)

    fault.setattr(StudentTopKLoss, "__init__", without)
    assert fused_equals_reference(one(ALONE)).passed is False


def passes_with(fault, faulty):
    """Return True where doctor passes the loss with other tokens and log-probabilities.

    `faulty(z_s, z_t, temperature)` returns logits to take the K tokens from, and the teacher's log-probabilities.
    """

    def rows(student_raw, teacher_raw, objective, request, *, student_top):
        order, log_t = faulty(student_raw, teacher_raw, objective.temperature)
        ids = order.topk(student_top.k, -1).indices
        top = TopK(ids, log_t.gather(-1, ids), student_top.tail)
        return reference_top_k_rows(student_raw, None, objective, request, top=top)

    fault.setattr(linear, "reference_student_top_k_rows", rows)
    return fused_equals_reference(one(ALONE)).passed


def test_doctor_detects_the_teachers_tokens_in_place_of_the_students(monkeypatch):
    assert passes_with(monkeypatch, lambda z_s, z_t, t: (z_s, (z_t / t).log_softmax(-1)))
    assert passes_with(monkeypatch, lambda z_s, z_t, t: (z_t, (z_t / t).log_softmax(-1))) is False


def test_doctor_detects_a_teacher_at_another_temperature(monkeypatch):
    """At 1 all is well; doctor looks at 2 as well."""
    assert passes_with(monkeypatch, lambda z_s, z_t, t: (z_s, z_t.log_softmax(-1))) is False


def test_doctor_detects_rows_of_other_tokens(monkeypatch, limit):
    """Many small chunks change nothing; the teacher's log-probabilities of other rows do."""
    limit.setattr(linear, "REFERENCE_CHUNK_ELEMENTS", 1000)
    assert fused_equals_reference(one(ALONE)).passed and workspace_changes_nothing(one(ALONE)).passed
    assert passes_with(monkeypatch, lambda z_s, z_t, t: (z_s, (z_t / t).log_softmax(-1).flip(0))) is False
