"""`distill doctor` on recipes with several teachers, another tokenizer, a cache, and a student that answers: what it
cuts from their rows, and how it reports faults. That all invariants hold for them is in tests/test_conformance.py."""

import pytest
from subjects import Caches, write_recipes

from distill.cli import run_command
from distill.data.labels import IGNORE_INDEX
from distill.doctor import examine
from distill.doctor.invariants import CHECKS, Finding
from distill.doctor.rows import SpanRows
from distill.recipe import load
from distill.teachers.cache.read import TeacherCache
from distill.teachers.mixture import MixtureTeacher


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return write_recipes(tmp_path_factory.mktemp("place"), Caches(tmp_path_factory.mktemp("caches")))


@pytest.fixture
def place(made, monkeypatch):
    """The working directory; runs are left to tests/test_conformance.py."""
    monkeypatch.chdir(made)
    monkeypatch.setattr(examine, "RUN_CHECKS", ())
    return made


def test_a_fault_is_code_1(place, monkeypatch, capsys):
    targets = MixtureTeacher.targets

    def second_is_late(self, batch):
        first, second = targets(self, batch)
        return first, second.roll(1, 1)

    monkeypatch.setattr(MixtureTeacher, "targets", second_is_late)
    assert run_command(["doctor", "several.yaml"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  fused loss" in out and "pass  divergence" in out


def test_what_is_skipped_is_not_passed(place, monkeypatch, capsys):
    monkeypatch.setattr(examine, "RUN_CHECKS", (lambda subject: Finding("ranks", None, "one process is all there is"),))
    assert run_command(["doctor", "several.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "skip  ranks: skipped: one process is all there is"
    assert lines[-1] == f"{len(CHECKS) + 1} invariants, {len(CHECKS)} hold, 1 skipped"


def test_shrunken_copies(place):
    several = examine.prepare(load("several.yaml"), small=True)
    assert [model.config.num_hidden_layers for model in several.models] == [2, 2, 2]
    assert several.weights == several.shrunk().teacher.weights == (0.75, 0.25)
    cached = examine.prepare(load("bucket.yaml"), small=True)
    assert len(cached.models) == 1 and cached.shrunk().student.config.num_hidden_layers == 2


def test_rows_of_two_readings_are_cut_after_a_span(place):
    subject = examine.prepare(load("across.yaml"))
    assert subject.form is SpanRows and len(subject.rows) == examine.ROWS
    for row in subject.rows:
        spans = [row["spans"][at : at + 4] for at in range(0, len(row["spans"]), 4)]
        assert all(0 < a < b <= len(row["input_ids"]) for a, b, _, _ in spans)
        assert all(0 < c < d <= len(row["teacher_input_ids"]) for _, _, c, d in spans)
        assert [at for at, label in enumerate(row["labels"]) if label != IGNORE_INDEX] == [a for a, *_ in spans]
        assert max(spans)[1] == len(row["input_ids"]) < 2 * examine.TOKENS
    apart = subject.documents()
    assert SpanRows.documents(SpanRows.joined(apart[:2])) == apart[:2]


def test_documents_of_a_cache_stay_whole(place):
    subject = examine.prepare(load("bucket.yaml"))
    cache = TeacherCache(subject.teacher.cache.path)
    cache.require(subject.rows, "rows")
    cut = [{name: values[:-1] for name, values in row.items()} for row in subject.rows]
    with pytest.raises(ValueError, match="lacks"):
        cache.require(cut, "rows")


def test_the_students_answers_follow_the_datas_prompts(place):
    subject = examine.prepare(load("answering.yaml"))
    learned = [sum(label != IGNORE_INDEX for label in part["labels"]) for part in subject.documents()]
    assert len(learned) == len(subject.prompts) and max(learned) <= 6
    subject.prompts[0] = subject.prompts[0][1:]
    finding = CHECKS[-1](subject)
    assert not finding.passed and "after other prompts" in finding.detail
