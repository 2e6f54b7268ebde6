"""Every setting and argument that names a path or a thing, given what is none: one line, never "unexpected error"."""

import io
import json
import os
import shutil
from pathlib import Path

import pytest
from tiny import save_tiny, tiny_model, tiny_tokenizer

from distill.cli import run_command

RECIPE = """
teacher: {model: big}
student: {model: small}
data: {source: d.jsonl, max_length: 64, cache: false}
train: {steps: 1, device: cpu}
generate: {prompts: []}
"""
KINDS = {
    "missing": "k/missing",
    "missing folder": "k/no/way/x",
    "file": "k/file",
    "folder": "k/folder",
    "full": "k/full",
    "under a file": "k/file/x",
    "dead link": "k/dead",
    "link to itself": "k/loop",
    "empty": "k/empty",
    "binary": "k/binary",
    "long": "k/" + "x" * 300,
    "nul": "k/a\0b",
    "device": "/dev/null",
}
SETTINGS = [
    "output_dir={}",
    "data.source={}",
    "data.validation.source={}",
    "data.chat_template={}",
    "teacher.model={}",
    "student.model={}",
    "teacher.adapter={}",
    "teacher.online_cache={}",
    "teacher={{type: cache, path: {}}}",
    "student={{config: {}, init: random}}",
    "loss.plugin={{file: {}}}",
    "name={}",
    "data.subset={}",
    "data.split={}",
    "train.optimizer={}",
    "student.attention={}",
    "student.lora={{targets: [{}]}}",
    "data.fields.text={}",
    "train.report_to={}",
    "teacher.revision={}",
]
ARGUMENTS = [
    "run {}",
    "validate {}",
    "check {} --gpu cpu",
    "inspect {}",
    "inspect {} --rollouts",
    "doctor {}",
    "run my.yaml --output-dir {}",
    "run my.yaml --lock {}",
    "run my.yaml --plugin {}",
    "run my.yaml --name {}",
    "recipes copy quickstart {}",
    "cache my.yaml --out {}",
    "eval {}",
    "eval r --before {}",
    "eval r --tasks x --task-folder {}",
    "compare r {}",
    "compare r r --plot {}",
    "report {}",
    "report r -o {}",
    "generate {} -p Hi",
    "generate small -p Hi --teacher {}",
    "chat {}",
    "export {} -o out",
    "export r -o {}",
    "export r --gguf f16 -o {}",
    "sample my.yaml --prompts {} --out k/o.jsonl",
    "sample my.yaml --prompts p.txt --max-new-tokens 2 --out {}",
    "verify {}",
    "serve {} --port 0",
]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with two models, a recipe and its finished run."""
    folder, before = tmp_path_factory.mktemp("paths"), os.getcwd()
    save_tiny(folder / "big", tiny_model(tiny_tokenizer(), seed=1))
    save_tiny(folder / "small", tiny_model(tiny_tokenizer(), seed=2))
    rows = [{"prompt": f"What is {number}?", "completion": f"It is {number}."} for number in range(12)]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "p.txt").write_text("Hello\nYou\n")
    (folder / "my.yaml").write_text(RECIPE)
    os.chdir(folder)
    try:
        assert run_command(["run", "my.yaml", "--name", "r"]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def paths(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    shutil.rmtree("k", ignore_errors=True)
    for name in ("k", "k/folder", "k/full"):
        Path(name).mkdir()
    Path("k/file").write_text("x")
    Path("k/full/x").write_text("1")
    Path("k/empty").touch()
    Path("k/binary").write_bytes(bytes(range(256)) * 20)
    Path("k/dead").symlink_to("nowhere")
    Path("k/loop").symlink_to("loop")
    yield workplace
    for name in ("out", "runs/my"):
        shutil.rmtree(name, ignore_errors=True)


def told(capsys, *arguments):
    """The exit code and the lines of a command that may refuse, and must not break."""
    code = run_command(list(arguments))
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line.startswith("distill: ")]
    assert "unexpected error" not in err and "Traceback" not in err, err
    assert code == 0 or lines or arguments[0] in ("check", "doctor"), "refused without a line"
    assert Path("/dev/null").is_char_device(), "a device was replaced by a file"
    return code, lines


@pytest.mark.plain("loss.plugin={{file: {}}}-missing")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_setting_breaks_a_command(paths, setting, kind, capsys):
    given = setting.format(json.dumps(KINDS[kind]))
    for command in ("validate", "run"):
        told(capsys, command, "my.yaml", given)


@pytest.mark.plain("run {}-missing", "eval r --tasks x --task-folder {}-dead link", "serve {} --port 0-device")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nul"])  # which no command line can hold
@pytest.mark.parametrize("command", ARGUMENTS)
def test_no_argument_breaks_a_command(paths, command, kind, capsys):
    told(capsys, *(part.format(KINDS[kind]) for part in command.split()))


@pytest.mark.parametrize("kind", ["under a file", "dead link", "link to itself", "device"])
@pytest.mark.parametrize(
    "command, field",
    [
        ("run my.yaml output_dir={}", "output_dir"),
        ("run my.yaml --output-dir {}", "output_dir"),
        ("check my.yaml --gpu cpu teacher.online_cache={}", "teacher.online_cache"),
        ("validate my.yaml teacher={{type:_cache,_path:_{}}}", "teacher.path"),
        ("cache my.yaml --out {}", "--out"),
        ("export r -o {}", "--output"),
    ],
)
def test_a_folder_that_cannot_be_is_named_with_its_field(paths, command, field, kind, capsys):
    arguments = [part.replace("_", " ") if "type:" in part else part for part in command.split()]
    code, lines = told(capsys, *(part.format(KINDS[kind]) for part in arguments))
    assert code == 2 and len(lines) == 1 and KINDS[kind] in lines[0], lines
    assert (
        lines[0].startswith(f"distill: {field}: expected a folder")
        or "is a link to" in lines[0]
        or (kind == "device" and field == "--output")
    ), lines
