"""`distill cache` is one pass of the store over the rows that a teacher reads, wherever its outputs come from."""

import pytest
from served import engine_in, serving
from test_golden_runs import INFORMED, PAIRS, REVERSE, STUDENT, TEXT, TWO_TERMS, write_place

from distill.cli import run_command
from distill.recipe import parse
from distill.run import run
from distill.training.progress import read_metrics

SERVED = "teacher: {type: server, url: '%s'%s}\n"
CASES = {
    "context": (f"teacher: {{model: teacher, {INFORMED}}}\n" + STUDENT + TWO_TERMS + PAIRS % ("", ""), "--hidden"),
    "retokenised": (
        "teacher: {model: merged}\nstudent: {model: pieces, vocabulary: cross}\n" + TWO_TERMS + TEXT,
        "--hidden",
    ),
    "served": (SERVED % ("{url}", "") + STUDENT + TWO_TERMS + TEXT, "--hidden"),
    "served top k": (SERVED % ("{url}", ", top_k: 8") + STUDENT + REVERSE + TEXT, ""),
    "served context": (SERVED % ("{url}", f", {INFORMED}") + STUDENT + REVERSE + PAIRS % ("", ""), "--hidden"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_place(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def url(place):
    with serving(engine_in(place)) as address:
        yield address


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_a_run_reads_what_the_command_stored(place, url, tmp_path, monkeypatch, capsys, name, teacher_batches):
    """The same losses to rounding, since rows share other batches; nobody is asked again."""
    for each in place.iterdir():
        (tmp_path / each.name).symlink_to(each)
    monkeypatch.chdir(tmp_path)
    text, kind = CASES[name]
    text = text.replace("{url}", url)
    (tmp_path / "r.yaml").write_text(text)
    plain = run(parse(text, name="r"), name="plain")
    dtype = "--dtype float32" if kind else ""
    assert run_command(f"cache r.yaml {kind} {dtype} --out stored".split()) == 0
    assert run_command(f"cache r.yaml {kind} {dtype} --out stored".split()) == 0
    assert "complete already" in capsys.readouterr().out

    teacher_batches.clear()
    kept = run(parse(text, ["teacher.online_cache=stored"], name="r"), name="kept")
    first, second = (
        [row["loss"] for row in read_metrics(result.folder / "metrics.jsonl") if "loss" in row]
        for result in (plain, kept)
    )
    assert not teacher_batches, "the teacher was asked, or the server's"
    assert second == pytest.approx(first, rel=2e-3 if name == "served top k" else 2e-5)
    assert run_command(["verify", "stored"]) == 0


def test_k_tokens_cannot_be_stored_for_another_tokenizer(place, tmp_path, monkeypatch, capsys):
    for each in place.iterdir():
        (tmp_path / each.name).symlink_to(each)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(CASES["retokenised"][0])
    assert run_command(["cache", "r.yaml", "--out", "stored"]) == 2
    assert "--hidden: needed with student.vocabulary: cross" in capsys.readouterr().err
    assert not (tmp_path / "stored").exists()
