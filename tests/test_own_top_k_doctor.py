"""The doctor of the reverse KL over the student's own likeliest tokens: for every teacher, and with faults put in."""

from dataclasses import replace

import pytest
from subjects import OWN_TOP_K, answering, informed_answering, one, routed_answering

from distill.doctor.invariants import CHECKS, fused_equals_reference, workspace_changes_nothing
from distill.recipe.loss import Loss
from distill.teachers import own_top_k
from distill.teachers.own_top_k import OwnTopKLoss

ALONE = {"terms": [{"type": "top_k_reverse_kl", "k": 8}]}


@pytest.mark.parametrize("name", ["served", "hidden", "informed", "kept", "launched"])
def test_every_hidden_state_teacher_supports_it(name, subject_of):
    subject = replace(subject_of(name), loss=Loss.model_validate(OWN_TOP_K))
    finding = fused_equals_reference(subject)
    assert finding.passed, finding


def test_a_cache_of_k_tokens_is_refused(subject_of):
    """The recipe's text does not tell what a cache holds."""
    subject = subject_of("bucket")
    subject.loss = Loss.model_validate(OWN_TOP_K)
    with pytest.raises(ValueError, match="need hidden states, got K tokens"):
        subject.objective()


@pytest.mark.few(1)
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


def test_doctor_detects_a_missing_tail(monkeypatch):
    assert fused_equals_reference(one(ALONE)).passed
    plain = OwnTopKLoss.__init__

    def without(self, term, *args):
        plain(self, term.model_copy(update={"tail": "renormalize"}), *args)

    monkeypatch.setattr(OwnTopKLoss, "__init__", without)
    assert fused_equals_reference(one(ALONE)).passed is False


def test_doctor_detects_the_teachers_tokens_in_place_of_the_students(monkeypatch):
    def of_the_teacher(head, hidden):
        return own_top_k.log_probabilities(*seen[0])[0]

    seen, tokens = [], OwnTopKLoss.own_tokens

    def remember(self, call, teacher):
        rows = call.inputs.targets.flatten(0, 1)[call.valid_rows]
        seen[:] = [(rows, teacher, self.transform, self.pairing.columns, 1.0)]
        return tokens(self, call, teacher)

    monkeypatch.setattr(OwnTopKLoss, "own_tokens", remember)
    assert fused_equals_reference(one(ALONE)).passed
    monkeypatch.setattr(own_top_k, "raw_logits", of_the_teacher)
    assert fused_equals_reference(one(ALONE)).passed is False


def test_doctor_detects_a_teacher_at_another_temperature(monkeypatch):
    """At 1 all is well; doctor looks at 2 as well."""
    log_probabilities = own_top_k.log_probabilities
    monkeypatch.setattr(own_top_k, "log_probabilities", lambda *args: log_probabilities(*args[:-1], 1.0))
    assert fused_equals_reference(one(ALONE)).passed is False


def test_doctor_detects_rows_of_other_chunks(monkeypatch):
    """Many small chunks change nothing; what is said of them in another order does."""
    monkeypatch.setattr(own_top_k, "rows_at_once", lambda device, columns: 3)
    assert fused_equals_reference(one(ALONE)).passed and workspace_changes_nothing(one(ALONE)).passed
    spread = own_top_k.spread
    monkeypatch.setattr(own_top_k, "spread", lambda values, rows, shape: spread(values, rows.flip(0), shape))
    assert fused_equals_reference(one(ALONE)).passed is False
