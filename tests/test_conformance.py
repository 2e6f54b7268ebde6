"""Every registered kind of teacher, held to what every teacher owes: a kind gets these tests by being registered.

Loss and gradients equal doctor's fp64 reference, accumulation, packing, padding, patching and workspace change nothing,
a resumed run is the same to the bit, two processes make the step of one; and `distill doctor` says so of its recipe.
"""

import pytest
from subjects import CACHED, KINDS, RECIPES, SUBJECTS, Caches, write_recipes

from distill.cli import run_command
from distill.doctor import examine, invariants_runs
from distill.doctor.invariants import CHECKS
from distill.doctor.references import REFERENCES
from distill.teachers.registry import SOURCES

SAYS = {
    "one": "same ids and positions",
    "answering": "answers of the student's own after the data's prompts",
    "several": "of the mixture (over 259 columns) from itself",
    "across": "spans cover the same",
    "bucket": "places found in the cache",
}
EVERY = [subject for subjects in KINDS.values() for subject in subjects]


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    return Caches(tmp_path_factory.mktemp("caches"))


@pytest.fixture
def subject_of(caches):
    return lambda name: caches.subject(name) if name in CACHED else SUBJECTS[name]()


def test_every_registered_kind_and_format_is_here(subject_of):
    assert KINDS.keys() == SOURCES.keys(), "a kind of teacher needs a subject in tests/subjects.py"
    assert set(RECIPES) >= {subjects[0] for subjects in KINDS.values()}
    assert {type(subject_of(name).teacher.format) for name in EVERY} == REFERENCES.keys()


@pytest.mark.parametrize("name", EVERY)
def test_every_invariant_holds(name, subject_of):
    subject = subject_of(name)
    for check in CHECKS:
        finding = check(subject)
        assert finding.passed and str(finding).startswith("pass  "), finding
        assert not any(p.grad is not None for p in subject.student.parameters()), check.__name__
        assert "forward" not in subject.student.__dict__, check.__name__


@pytest.mark.few(5)
@pytest.mark.parametrize("name", EVERY)
def test_resume_is_exact(name, subject_of):
    finding = invariants_runs.resume_is_exact(subject_of(name))
    assert finding.passed, finding


def test_ranks_change_nothing(subject_of, forked_ranks):
    findings = invariants_runs.ranks_of([subject_of(name) for name in EVERY])
    assert all(finding.passed for finding in findings), dict(zip(EVERY, findings, strict=True))


# ------------------------------------------------------------------ by recipe, from files


@pytest.fixture(scope="module")
def place(tmp_path_factory, caches):
    return write_recipes(tmp_path_factory.mktemp("place"), caches)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_examined(name, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setattr(examine, "RUN_CHECKS", ())
    assert run_command(["doctor", f"{name}.yaml"]) == 0, capsys.readouterr()
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("pass  ") for line in lines) == len(CHECKS)
    assert any(SAYS[name] in line for line in lines), lines
    assert lines[-1] == f"{len(CHECKS)} invariants, all hold"


@pytest.mark.slow  # two processes for each; their parts are in the default suite
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_examined_whole(name, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    assert run_command(["doctor", f"{name}.yaml", "--small"]) == 0, capsys.readouterr()
    assert capsys.readouterr().out.splitlines()[-1] == "10 invariants, all hold"
