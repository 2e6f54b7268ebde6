"""Every registered kind of teacher, held to what every teacher owes: a kind gets these tests by being registered.

Loss and gradients equal doctor's fp64 reference, accumulation, packing, padding, patching and workspace change nothing,
a resumed run is the same to the bit, two processes make the step of one; and `distill doctor` says so of its recipe.
"""

import importlib
import pickle
import pkgutil

import pytest
from subject_recipes import RECIPES
from subjects import KINDS

from distill import teachers
from distill.cli import run_command
from distill.core.labels import IGNORE_INDEX
from distill.doctor import examine, invariants_runs
from distill.doctor.check_result import CheckResult
from distill.doctor.invariants import CHECKS, models_read_the_same_tokens
from distill.doctor.invariants_rollouts import ROLLOUT_CHECKS
from distill.doctor.references import REFERENCES
from distill.doctor.rows import join_rows, split_row
from distill.objectives.hidden import HiddenFormat
from distill.recipe import load
from distill.teachers.backends.fp8 import Fp8Teacher
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.backends.stored.store import Store
from distill.teachers.backends.student import AveragedTeacher
from distill.teachers.base import Teacher
from distill.teachers.combination.mixture import MixtureFormat, MixtureTeacher

SAYS = {
    "one": "same ids and positions",
    "kept": "same ids and positions",
    "launched": "same ids and positions",
    "answering": "rollouts after the data's prompts",
    "several": "of the mixture (over 259 columns) from itself",
    "across": "spans cover the same",
    "routed": "documents go to their own teacher",
    "informed": "tokens before them are context",
    "bucket": "positions found in the cache",
    "served": "same ids and positions",
}
EVERY = [subject for subjects in KINDS.values() for subject in subjects]


def teacher_classes(base=Teacher):
    """Yield the classes of this package that are teachers and no other teacher's base."""
    below = [kind for kind in base.__subclasses__() if kind.__module__.startswith("distill.")]
    for kind in below:
        yield from teacher_classes(kind)
    if not below or base is LoadedTeacher:
        yield base


@pytest.mark.full
def test_every_teacher_and_format_is_here(subject_of):
    for module in pkgutil.walk_packages(teachers.__path__, "distill.teachers."):
        importlib.import_module(module.name)
    assert set(RECIPES) >= {subjects[0] for subjects in KINDS.values()}
    tested = {type(layer) for name in EVERY for layer in subject_of(name).teacher.unwrap_all()}
    # tests/models/test_fp8_teacher.py: not exact; tests/runs/test_golden_runs.py: changes in a step
    assert set(teacher_classes()) - tested == {Fp8Teacher, AveragedTeacher}
    found = {(type(teacher.format), teacher.rows.reading) for teacher in (subject_of(name).teacher for name in EVERY)}
    assert {format for format, _ in found} == REFERENCES.keys()
    # K tokens after a context: tests/teachers/test_compositions.py
    assert {format for format, reading in found if reading == "context"} == {HiddenFormat, MixtureFormat}


@pytest.mark.full
def test_the_columns_that_data_loading_sends_to_its_workers_hold_no_model(subject_of):
    for name in EVERY:
        assert len(pickle.dumps(subject_of(name).teacher.columns)) < 1000, name


@pytest.mark.plain("one", "routed informed", "served", "hidden", "bucket")
@pytest.mark.parametrize("name", EVERY)
def test_every_invariant_holds(name, subject_of):
    subject = subject_of(name)
    for check in CHECKS:
        finding = check(subject)
        assert finding.passed and str(finding).startswith("pass  "), finding
        assert not any(p.grad is not None for p in subject.student.parameters()), check.__name__
        assert "forward" not in subject.student.__dict__, check.__name__


@pytest.mark.plain("one")
@pytest.mark.parametrize("name", EVERY)
def test_resume_is_exact(name, subject_of):
    finding = invariants_runs.resume_is_exact(subject_of(name))
    assert finding.passed, finding


IN_A_SERVER = "launched"  # see tests/serving/test_launched_server.py


@pytest.mark.full
def test_ranks_change_nothing(subject_of, forked_ranks):
    names = [name for name in EVERY if name != IN_A_SERVER]
    findings = invariants_runs.check_ranks_of_setups([subject_of(name) for name in names])
    assert all(finding.passed for finding in findings), dict(zip(names, findings, strict=True))


# ------------------------------------------------------------------ by recipe, from files


@pytest.fixture
def place(recipes_of_kinds, monkeypatch):
    """The working directory; runs are left to the tests above."""
    monkeypatch.chdir(recipes_of_kinds)
    monkeypatch.setattr(examine, "RUN_CHECKS", ())


@pytest.mark.full
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_examined(name, place, capsys):
    assert run_command(["doctor", f"{name}.yaml"]) == 0, capsys.readouterr()
    lines = capsys.readouterr().out.splitlines()
    count = len(CHECKS) + len(ROLLOUT_CHECKS) * ("on_policy" in RECIPES[name])
    assert sum(line.startswith("pass  ") for line in lines) == count
    assert any(SAYS[name] in line for line in lines), lines
    assert lines[-1] == f"{count} invariants, all passed"


@pytest.mark.slow  # two processes for each; their parts are in the default suite
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_examined_whole(name, recipes_of_kinds, monkeypatch, capsys):
    monkeypatch.chdir(recipes_of_kinds)
    assert run_command(["doctor", f"{name}.yaml", "--small"]) == 0, capsys.readouterr()
    assert capsys.readouterr().out.splitlines()[-1] in ("11 invariants, all passed", "13 invariants, all passed")


def test_a_fault_is_code_1(place, monkeypatch, capsys):
    targets = MixtureTeacher.targets

    def second_is_late(self, batch):
        first, second = targets(self, batch)
        return first, second.roll(1, 1)

    monkeypatch.setattr(MixtureTeacher, "targets", second_is_late)
    assert run_command(["doctor", "several.yaml"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  fused loss" in out and "pass  divergence" in out


@pytest.mark.full
def test_skipped_checks_do_not_count_as_passed(place, monkeypatch, capsys):
    monkeypatch.setattr(
        examine, "RUN_CHECKS", (lambda subject: CheckResult("ranks", None, "one process is all there is"),)
    )
    assert run_command(["doctor", "several.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "skip  ranks: skipped: one process is all there is"
    assert lines[-1] == f"{len(CHECKS) + 1} invariants, {len(CHECKS)} passed, 1 skipped"


def test_small_copies_keep_two_layers_and_the_weights(place):
    several = examine.prepare(load("several.yaml"), small=True)
    assert [model.config.num_hidden_layers for model in several.models] == [2, 2, 2]
    assert several.weights == several.truncated().teacher.weights == (0.75, 0.25)
    cached = examine.prepare(load("bucket.yaml"), small=True)
    assert len(cached.models) == 1 and cached.truncated().student.config.num_hidden_layers == 2


def test_rows_of_two_readings_are_cut_after_a_span(place):
    subject = examine.prepare(load("across.yaml"))
    assert len(subject.rows) == examine.ROWS
    for row in subject.rows:
        spans = [row["spans"][at : at + 4] for at in range(0, len(row["spans"]), 4)]
        assert all(0 < a < b <= len(row["input_ids"]) for a, b, _, _ in spans)
        assert all(0 < c < d <= len(row["teacher_input_ids"]) for _, _, c, d in spans)
        assert [at for at, label in enumerate(row["labels"]) if label != IGNORE_INDEX] == [a for a, *_ in spans]
        assert max(spans)[1] == len(row["input_ids"]) < 2 * examine.TOKENS
    apart = subject.documents()
    assert split_row(join_rows(apart[:2])) == apart[:2]


def test_documents_of_a_cache_stay_whole(place):
    subject = examine.prepare(load("bucket.yaml"))
    cache = Store(subject.teacher.store.folder)
    cache.require(subject.rows, "rows")
    cut = [{name: values[:-1] for name, values in row.items()} for row in subject.rows]
    with pytest.raises(ValueError, match="lacks"):
        cache.require(cut, "rows")


def test_the_students_answers_follow_the_datas_prompts(place):
    subject = examine.prepare(load("answering.yaml"))
    learned = [sum(label != IGNORE_INDEX for label in part["labels"]) for part in subject.documents()]
    assert len(learned) == len(subject.prompts) and max(learned) <= 6
    subject.prompts[0] = subject.prompts[0][1:]
    finding = models_read_the_same_tokens(subject)
    assert not finding.passed and "after other prompts" in finding.detail
