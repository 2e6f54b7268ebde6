"""Runs of every kind of teacher: resumed bit for bit, and the same step on two processes; each fails with its fault."""

import pytest
from subjects import CACHED, SUBJECTS, Caches

from distill.doctor import invariants_runs
from distill.generation.on_policy import OnPolicy
from distill.training.trainer import DistillationTrainer

KINDS = [*SUBJECTS, "bucket", "hidden"]


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    return Caches(tmp_path_factory.mktemp("caches"))


@pytest.fixture
def subject_of(caches):
    return lambda kind: caches.subject(kind) if kind in CACHED else SUBJECTS[kind]()


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact(kind, subject_of):
    finding = invariants_runs.resume_is_exact(subject_of(kind))
    assert finding.passed, finding


def test_resume_fails_where_the_optimizer_is_forgotten(subject_of, monkeypatch):
    monkeypatch.setattr(DistillationTrainer, "_load_optimizer_and_scheduler", lambda *_: None)
    finding = invariants_runs.resume_is_exact(subject_of("across"))
    assert not finding.passed and "weights" in finding.detail


def test_resume_fails_where_other_words_are_drawn(subject_of, monkeypatch):
    """Answers drawn from a generator that no checkpoint keeps."""
    replace, calls = OnPolicy.replace, []

    def by_calls(self, batches, step, collate):
        calls.append(step)
        return replace(self, batches, len(calls), collate)

    monkeypatch.setattr(OnPolicy, "replace", by_calls)
    finding = invariants_runs.resume_is_exact(subject_of("answering"))
    assert not finding.passed and "logged losses" in finding.detail, finding


def test_ranks_change_nothing(subject_of, forked_ranks):
    findings = invariants_runs.ranks_of([subject_of(kind) for kind in KINDS])
    assert all(finding.passed for finding in findings), dict(zip(KINDS, findings, strict=True))


FAULTS = """
import sys
from pathlib import Path
from distill.doctor import invariants_runs, subject_several
from distill.teachers.cache.read import CachedRows
from distill.teachers.cross.data import CrossCollator
from distill.training.trainer import DistillationTrainer

# several: the weights are lost on the way to the processes
group = subject_several.TeacherGroup
subject_several.TeacherGroup = lambda members, weights: group(members, [1.0] * len(members))
# across: only the first row's spans reach a process, counted as all
collate = CrossCollator.__call__
def fewer(self, rows):
    batch = collate(self, rows)
    return batch | {"spans": batch["spans"][: len(batch["spans"]) // 2]}
CrossCollator.__call__ = fewer
# caches: what was stored of another place
cached = CachedRows.__call__
def shifted(self, rows):
    return {n: v.roll(1, 0) if n.startswith("cached") else v for n, v in cached(self, rows).items()}
CachedRows.__call__ = shifted
# the student's own words: every process counts its own tokens
DistillationTrainer.get_batch_samples = lambda self, *given: (
    (made := super(DistillationTrainer, self).get_batch_samples(*given))[0], made[1])
invariants_runs._main(Path(sys.argv[-1]))
"""


@pytest.mark.slow  # that ranks can fail is shown for one teacher by tests/test_invariants.py
def test_ranks_fail_where_the_processes_do_something_else(subject_of, tmp_path, forked_ranks):
    program = tmp_path / "faulty.py"
    program.write_text(FAULTS)
    findings = invariants_runs.ranks_of([subject_of(kind) for kind in KINDS], program=[str(program)])
    assert not any(finding.passed for finding in findings), dict(zip(KINDS, findings, strict=True))
    assert all("differ by" in finding.detail for finding in findings)
