"""The doctor's checks of a teacher with its own prompt, each shown to fail once its fault is put in."""

import pytest
from subjects import informed, informed_answering

from distill.doctor.invariants import fused_equals_reference, models_read_the_same_tokens
from distill.generation.documents import RolloutDocument
from distill.teachers.rows.context.teacher import ContextTeacher


@pytest.mark.parametrize("subject", [informed, informed_answering])
def test_the_teachers_prompt_in_the_students_rows_is_found(subject, monkeypatch):
    own = ContextTeacher.student_batch

    def leaking(self, batch, needs_targets):
        width = batch["input_ids"].shape[1]
        return own(self, batch, needs_targets) | {"input_ids": batch["teacher_input_ids"][:, :width]}

    subject = subject()
    longest = max(len(row["teacher_input_ids"]) for row in subject.rows)
    monkeypatch.setattr(ContextTeacher, "student_batch", leaking)
    subject.batch = lambda rows=None, **more: type(subject).batch(subject, rows, pad_to_multiple_of=longest, **more)
    finding = models_read_the_same_tokens(subject)
    assert not finding.passed and finding.detail == "input_ids differ"


def test_private_text_in_the_students_prompt_is_found():
    subject = informed()
    assert models_read_the_same_tokens(subject).passed
    leaking = []
    for document in subject.documents():
        secret = list(range(200, 220))
        other = [*document["teacher_input_ids"][:1], *secret, *document["teacher_input_ids"][1:]]
        own = [document["input_ids"][0], *secret[3:18], *document["input_ids"][1:]]
        labels = [-100] * 16 + document["labels"][1:]
        leaking.append(
            {
                "input_ids": own,
                "labels": labels,
                "position_ids": list(range(len(own))),
                "teacher_input_ids": other,
                "teacher_position_ids": list(range(len(other))),
            }
        )
    subject.rows = leaking
    finding = models_read_the_same_tokens(subject)
    assert not finding.passed and "are in the student's prompt" in finding.detail
    same = [row | {f"teacher_{name}": row[name] for name in ("input_ids", "position_ids")} for row in leaking]
    subject.rows = same
    assert "has no context that the student lacks" in models_read_the_same_tokens(subject).detail


@pytest.mark.parametrize("off", [-1, 1])
def test_targets_of_the_wrong_token_are_found(off, monkeypatch):
    spread = ContextTeacher.targets
    monkeypatch.setattr(ContextTeacher, "targets", lambda self, batch: spread(self, batch).roll(off, 1))
    assert not fused_equals_reference(informed()).passed


def test_a_teacher_that_reads_the_students_prompt_is_found(monkeypatch):
    """The teacher without its context: all would train, and teach nothing that is private."""
    monkeypatch.setattr(
        ContextTeacher,
        "targets",
        lambda self, batch: self.inner.targets({name: batch[name] for name in ("input_ids", "position_ids")}),
    )
    assert not fused_equals_reference(informed()).passed
    assert not models_read_the_same_tokens(informed()).passed


def test_new_answers_after_another_prompt_are_found(monkeypatch):
    subject = informed_answering()
    answered = RolloutDocument.with_response
    monkeypatch.setattr(
        RolloutDocument,
        "with_response",
        lambda self, prompt, answer, *more: answered(self, self.teacher_ids[: len(prompt)], answer, *more),
    )
    fresh = subject.rollouts.with_responses(subject.student, [subject.batch(subject.documents())])
    subject.rows = [row for row in fresh if any(label != -100 for label in row["labels"])]
    assert not models_read_the_same_tokens(subject).passed
