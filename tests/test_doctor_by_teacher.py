"""`distill doctor` on recipes with several teachers, another tokenizer, a cache, and a student that answers."""

import json

import pytest
from subjects import Caches
from tiny import save_tiny, tiny_model, tiny_tokenizer
from two_tokenizers import MERGED, PIECES

from distill.cli import run_command
from distill.data.labels import IGNORE_INDEX
from distill.doctor import examine, invariants_runs
from distill.doctor.invariants import CHECKS, Finding
from distill.doctor.subject_cross import AcrossTokenizers
from distill.recipe import load
from distill.teachers.cache.read import TeacherCache
from distill.teachers.mixture import MixtureObjective

COMMON = "train: {steps: 6, batch_size: 2, device: cpu}\n"
TEXT = "data: {source: text.txt, max_length: 64, cache: false}\n" + COMMON
RECIPES = {
    "several": "teachers: [{model: teacher, weight: 3}, {model: other}]\nstudent: {from_teacher: {layers: 3}}\n" + TEXT,
    "across": "teacher: {model: merged}\nstudent: {model: pieces, vocabulary: cross, lora: {r: 2, head: true}}\n"
    + TEXT,
    "answering": "teacher: {model: teacher}\nstudent: {from_teacher: {layers: 3}}\n"
    "data: {source: chat.jsonl, max_length: 96, cache: false, on_policy: {fraction: 0.5, max_new_tokens: 6}}\n"
    "loss: {terms: [{type: reverse_kl}]}\n" + COMMON,
}
SAYS = {
    "several": "of the mixture (over 259 columns) from itself",
    "across": "spans cover the same",
    "answering": "answers of the student's own behind the data's prompts",
    "cache": "places found in the cache",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("place")
    tokenizer = tiny_tokenizer()
    save_tiny(root / "teacher", tiny_model(tokenizer, layers=4, seed=1), tokenizer)
    save_tiny(root / "other", tiny_model(tokenizer, layers=3, hidden=64, seed=5), tokenizer)
    save_tiny(root / "merged", tiny_model(MERGED, 3, 64, seed=1), MERGED)
    save_tiny(root / "pieces", tiny_model(PIECES, 3, seed=3, tie=False), PIECES)
    lines = [f"The teacher explains line {n} and the student listens to it once more." for n in range(40)]
    (root / "text.txt").write_text("\n".join(lines))
    chats = [
        {"messages": [{"role": "user", "content": line}, {"role": "assistant", "content": "It does."}]}
        for line in lines
    ]
    (root / "chat.jsonl").write_text("\n".join(map(json.dumps, chats)))
    for name, text in RECIPES.items():
        (root / f"{name}.yaml").write_text(text)
    (root / "caches").mkdir()
    stored = Caches(root / "caches")
    cache, _ = stored.store(1.0, k=8)
    (root / "cache.yaml").write_text(
        f"teacher: {{type: cache, path: {cache.path}}}\nstudent: {{model: {stored.folder}/student}}\n"
        f"data: {{source: {stored.folder}/text.txt, max_length: 48, cache: false, validation: {{fraction: 0.1}}}}\n"
        + COMMON
    )
    return root


@pytest.fixture
def place(made, monkeypatch):
    """The working directory; runs are left to tests/test_invariants_runs_by_teacher.py."""
    monkeypatch.chdir(made)
    monkeypatch.setattr(invariants_runs, "RUN_CHECKS", ())
    return made


@pytest.mark.parametrize("name", [*RECIPES, "cache"])
def test_a_recipe_is_examined(name, place, capsys):
    assert run_command(["doctor", f"{name}.yaml"]) == 0, capsys.readouterr()
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("pass  ") for line in lines) == len(CHECKS)
    assert any(SAYS[name] in line for line in lines), lines
    assert lines[-1] == f"{len(CHECKS)} invariants, all hold"


@pytest.mark.slow  # two processes for each; their parts are in the default suite
@pytest.mark.parametrize("name", [*RECIPES, "cache"])
def test_a_recipe_is_examined_whole(name, made, monkeypatch, capsys):
    monkeypatch.chdir(made)
    assert run_command(["doctor", f"{name}.yaml", "--small"]) == 0, capsys.readouterr()
    assert capsys.readouterr().out.splitlines()[-1] == "10 invariants, all hold"


def test_a_fault_is_code_1(place, monkeypatch, capsys):
    signal = MixtureObjective.signal

    def second_is_late(self, inputs):
        first, second = signal(self, inputs)
        return first, second.roll(1, 1)

    monkeypatch.setattr(MixtureObjective, "signal", second_is_late)
    assert run_command(["doctor", "several.yaml"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  fused loss" in out and "pass  divergence" in out


def test_what_is_skipped_is_not_passed(place, monkeypatch, capsys):
    monkeypatch.setattr(
        invariants_runs, "RUN_CHECKS", (lambda subject: Finding("ranks", None, "one process is all there is"),)
    )
    assert run_command(["doctor", "several.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "skip  ranks: skipped: one process is all there is"
    assert lines[-1] == f"{len(CHECKS) + 1} invariants, {len(CHECKS)} hold, 1 skipped"


def test_shrunken_copies(place):
    several = examine.prepare(load("several.yaml"), small=True)
    assert [model.config.num_hidden_layers for model in several.models] == [2, 2, 2] and several.weights == [3.0, 1.0]
    assert several.shrunk().teacher.shares == (0.75, 0.25)
    cached = examine.prepare(load("cache.yaml"), small=True)
    assert cached.teachers == [] and cached.shrunk().student.config.num_hidden_layers == 2


def test_rows_of_two_readings_are_cut_behind_a_span(place):
    subject = examine.prepare(load("across.yaml"))
    assert isinstance(subject, AcrossTokenizers) and len(subject.rows) == examine.ROWS
    for row in subject.rows:
        spans = [row["spans"][at : at + 4] for at in range(0, len(row["spans"]), 4)]
        assert all(0 < a < b <= len(row["input_ids"]) for a, b, _, _ in spans)
        assert all(0 < c < d <= len(row["teacher_input_ids"]) for _, _, c, d in spans)
        assert [at for at, label in enumerate(row["labels"]) if label != IGNORE_INDEX] == [a for a, *_ in spans]
        assert max(spans)[1] == len(row["input_ids"]) < 2 * examine.TOKENS
    apart = [part for row in subject.rows for part in subject.documents(row)]
    assert subject.documents(subject.joined(apart[:2])) == apart[:2]


def test_documents_of_a_cache_stay_whole(place):
    subject = examine.prepare(load("cache.yaml"))
    cache = TeacherCache(subject.stored.path)
    cache.require(subject.rows, "rows")
    cut = [{name: values[:-1] for name, values in row.items()} for row in subject.rows]
    with pytest.raises(ValueError, match="lacks"):
        cache.require(cut, "rows")


def test_the_students_words_are_asked_behind_the_datas_prompts(place):
    subject = examine.prepare(load("answering.yaml"))
    learned = [
        sum(label != IGNORE_INDEX for label in part["labels"])
        for row in subject.rows
        for part in subject.documents(row)
    ]
    assert len(learned) == len(subject.prompts) and max(learned) <= 6
    subject.prompts[0] = subject.prompts[0][1:]
    finding = CHECKS[-1](subject)
    assert not finding.passed and "behind other prompts" in finding.detail
