"""The setting `export`: the file of a run's student, and its metrics in llama.cpp beside the teacher's."""

import re
import shutil

import pytest
from tiny import save_tiny, tiny_model, tiny_tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from distill.cli import run_command
from distill.recipe import RecipeError, parse
from distill.reports import llama_cpp

TEXT = "\n".join(f"The teacher explains line {n} {'so ' * (n % 4)}and hears {n * 31337 % 997}." for n in range(80))
RECIPE = """
teacher: {model: teacher}
student: {from_teacher: {layers: 3}}
data: {source: text.txt, max_length: 64, cache: false, validation: {fraction: 0.1, max_rows: 4}}
train: {steps: 4, batch_size: 2, tokens_per_step: 128, learning_rate: 3e-3, warmup: 0, device: cpu}
generate: {prompts: []}
export: {gguf: q8_0}
stages:
  - {name: prune}
  - {name: quantise, student: {quantise: {format: q8_0}}, train: {steps: 2, learning_rate: 1e-4}}
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    tokenizer = tiny_tokenizer(420)  # llama.cpp reads none without merges
    tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    save_tiny(tmp_path / "teacher", tiny_model(tokenizer, layers=4, seed=1, hidden=64), tokenizer)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.full
def test_a_run_writes_its_file_and_names_the_command_where_llama_cpp_is_missing(place, monkeypatch, capsys):
    monkeypatch.setenv("DISTILL_ENGINES", str(place / "none"))
    monkeypatch.setenv("COLUMNS", "400")
    assert run_command(["run", "tiny.yaml"]) == 0
    file, last = capsys.readouterr().out.strip().splitlines()[-2:]
    assert re.fullmatch(r"file +runs/tiny/export/export-q8_0\.gguf", file)
    assert (place / "runs/tiny/export/export-q8_0.gguf").stat().st_size > 1000
    assert last.startswith("llama.cpp   not found") and last.endswith(llama_cpp.install_command())
    assert str(place / "none") in last
    written = (place / "runs/tiny/export/export-q8_0.gguf").read_bytes()
    shutil.rmtree(place / "runs/tiny/export")  # as if the run had been ended before its file was there
    for writes in (True, False):  # the second time nothing is left to do
        with pytest.raises(SystemExit, match="0"):
            run_command(["run", "tiny.yaml", "--name", "tiny", "--resume"])
        assert ("\nfile " in capsys.readouterr().out) == writes
    assert (place / "runs/tiny/export/export-q8_0.gguf").read_bytes() == written


@pytest.mark.engines
@pytest.mark.skipif(not llama_cpp.llama_cpp_is_installed(), reason="python -m scripts.engines install llama_cpp")
def test_the_file_has_the_divergence_of_the_run_on_the_same_tokens(place, monkeypatch, capsys):
    """The file holds the trained weights; llama.cpp rounds activations to 8 bits beside."""
    monkeypatch.setenv("DISTILL_ENGINES", str(llama_cpp.folder().parent.resolve()))
    monkeypatch.setenv("COLUMNS", "400")
    assert run_command(["run", "tiny.yaml", "export.tokens=100000"]) == 0
    out = capsys.readouterr().out
    last = out.strip().splitlines()[-1]
    tokens = re.findall(r"of the KL, over ([\d,]+ held-out tokens)", out)[-1]
    found = re.fullmatch(
        r"llama.cpp   student q8_0: KL ([\d.]+), [\d.]+ MB, [\d,]+ tokens/s; teacher q8_0: KL ([\d.]+), [\d.]+ MB, "
        r"[\d,]+ tokens/s; over ([\d,]+ held-out tokens)",
        last,
    )
    student_after = float(re.findall(r"student after +([\d.]+)", out)[-1])
    assert found[3] == tokens
    assert abs(float(found[1]) - student_after) < 0.05 * student_after
    assert float(found[2]) < float(found[1])


@pytest.mark.parametrize("setting", ["teacher={type: server, url: http://localhost:1}", "data.source=synthetic:64"])
def test_no_teacher_is_needed_where_no_tokens_are_written(setting):
    parse(RECIPE, [setting, "student={model: x}", "stages=[]", "export.tokens=0"])


@pytest.mark.full
@pytest.mark.parametrize(
    "setting, message",
    [
        ("teacher.model=windowed", "sliding windows"),
        ("teacher.model=other", "models of type 'gemma2'"),
        ("teacher.model=unnamed", "has no name in the format"),
        ("teacher.model=wide", "a qwen2 whose heads are 32 wide together, and its hidden channels 24"),
    ],
)
def test_a_student_that_the_file_cannot_hold_is_refused_before_it_is_trained(place, capsys, setting, message):
    tokenizer = tiny_tokenizer(420)
    tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    save_tiny(place / "windowed", tiny_model(tokenizer, kind="mistral", sliding_window=16), tokenizer)
    save_tiny(place / "wide", tiny_model(tokenizer, kind="qwen2"), tokenizer)
    save_tiny(place / "other", tiny_model(tokenizer, kind="gemma2"), tokenizer)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(), Digits(), ByteLevel(add_prefix_space=False)])
    save_tiny(place / "unnamed", tiny_model(tokenizer), tokenizer)
    arguments = ["tiny.yaml", setting, "student.from_teacher={layers: 1, hidden: 24}"]
    assert run_command(["run", *arguments]) == 2
    assert message in capsys.readouterr().err and not (place / "runs").exists()
    assert run_command(["check", *arguments]) == 1
    assert message in " ".join(capsys.readouterr().out.split()), "and the check before the run says so"


def test_weights_that_are_trained_in_a_format_are_not_rounded_to_another():
    with pytest.raises(RecipeError, match=r"export.gguf: q8_0 would round the weights again that student"):
        parse(RECIPE, ["stages.1.student.quantise.format=q4_0"])
    with pytest.raises(RecipeError, match=r"trains in int8; expected no export"):
        parse(RECIPE, ["stages.1.student.quantise.format=int8"])
    parse(RECIPE, ["stages.1.student.quantise.format=q4_0", "export.gguf=f16"])
    parse(RECIPE, ["stages.0.student.quantise={format: q4_0}"])  # of a stage before


def test_a_run_names_the_file_that_will_not_be_written(place, capsys):
    tokenizer = tiny_tokenizer(420)
    save_tiny(place / "other", tiny_model(tokenizer, kind="gemma2", hidden=64), tokenizer)
    quantise = "student={model: other, quantise: {format: q4_0, start: nearest}}"
    assert run_command(["run", "tiny.yaml", "stages=[]", "export=null", "train.steps=1", quantise]) == 0
    assert "distill export cannot write it: models of type 'gemma2'" in " ".join(capsys.readouterr().out.split())
