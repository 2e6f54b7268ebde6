"""`distill init`: five answers become a recipe that validates, fits the GPU, and runs."""

import io

import pytest
from tiny import save_models

from distill.cli import run_command
from distill.recipe import load

LLAMA = ["--teacher", "meta-llama/Llama-3.1-8B-Instruct", "--student", "meta-llama/Llama-3.2-1B-Instruct"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    (tmp_path / "d.jsonl").write_text('{"text": "hello"}\n')
    return tmp_path


def init(*arguments):
    return run_command(["init", *arguments])


@pytest.mark.parametrize(
    ("gpu", "changes"),
    [
        ("80GB", {}),
        ("40GB", {"r": 16, "batch_size": 1, "checkpointing": True}),
        ("8GB", {"r": 16, "batch_size": 1, "checkpointing": True, "max_length": 1024, "offload": "cpu"}),
    ],
)
def test_the_recipe_is_as_small_as_the_gpu_asks(here, capsys, gpu, changes):
    assert init("my.yaml", *LLAMA, "--data", "openai/gsm8k", "--gpu", gpu) == 0
    recipe = load("my.yaml")
    found = {
        "r": recipe.student.lora and recipe.student.lora.r,
        "batch_size": recipe.train.batch_size,
        "checkpointing": recipe.train.gradient_checkpointing,
        "max_length": recipe.data.max_length,
        "offload": recipe.teacher.offload,
    }
    full = {"r": None, "batch_size": 4, "checkpointing": False, "max_length": 2048, "offload": None}
    assert found == full | changes
    printed = capsys.readouterr().out
    assert "memory" in printed and "does not fit" not in printed and f"distill check my.yaml --gpu {gpu}" in printed


@pytest.mark.plain("data")
@pytest.mark.parametrize("learn", ["data", "on-policy"])
def test_what_is_written_runs(here, learn):
    save_models(here, teacher={}, student={"layers": 1})
    (here / "chats.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day to you"}]}\n'
        * 40
    )
    models = ["--teacher", "./teacher", "--student", "./student"]
    assert init("my.yaml", *models, "--data", "chats.jsonl", "--learn", learn, "--gpu", "cpu") == 0
    short = ["train.steps=1", "train.epochs=null", "train.tokens_per_step=1024", "generate.prompts=[]"]
    more = ["data.on_policy.max_new_tokens=4"] if learn == "on-policy" else []
    assert run_command(["run", "my.yaml", "--name", "one", *short, *more]) == 0
    assert (here / "runs/one/student/config.json").exists()


def test_layers_of_the_teacher_and_a_server(here):
    assert init("cut.yaml", *LLAMA[:2], "--student", "8", "--data", "d.jsonl", "--gpu", "80GB") == 0
    assert load("cut.yaml").student.from_teacher.layers == 8
    given = ["--teacher", "http://127.0.0.1:1", *LLAMA[2:], "--data", "d.jsonl", "--gpu", "80GB"]
    assert init("served.yaml", *given) == 0
    assert load("served.yaml").teacher.type == "server"


def test_questions_are_asked_for_what_is_not_given(here, monkeypatch):
    asked = []
    answers = iter(["meta-llama/Llama-3.2-1B-Instruct", "d.jsonl", "data"])

    def prompt(text, default=None):
        asked.append(text.partition(":")[0])
        return next(answers)

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.prompt", prompt)
    assert init("my.yaml", *LLAMA[:2], "--gpu", "80GB") == 0
    assert asked == [
        "student",
        "data",
        "learn from the answers in the data (data), or from the student's own (on-policy)",
    ]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["my.txt"], "my.txt: expected a file that ends in .yaml"),
        (["my.yaml"], "--teacher: expected an answer, since standard input is no terminal; got none"),
        (["my.yaml", *LLAMA, "--data", "d.jsonl", "--learn", "both"], "--learn: expected data or on-policy, got both"),
        (["my.yaml", *LLAMA, "--data", "d.jsonl", "--gpu", "h900"], "--gpu: expected a GPU's name"),
        (["my.yaml", *LLAMA[:2], "--student", "./none", "--data", "e.jsonl"], "student.model: ./none does not exist"),
        (["my.yaml", *LLAMA[:2], "--student", "./none", "--data", "e.jsonl"], "'e.jsonl' does not exist"),
        (["there.yaml", *LLAMA, "--data", "d.jsonl"], "there.yaml: exists already"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(here, capsys, arguments, line):
    (here / "there.yaml").write_text("kept")
    assert init(*arguments) == 2
    assert line in capsys.readouterr().err
    assert not (here / "my.yaml").exists() and (here / "there.yaml").read_text() == "kept"
