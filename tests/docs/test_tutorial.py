"""The tutorial, walked: its files are written as the page gives them, its commands run in order, on tiny models."""

import io
import re
import shlex

import doc_blocks
import pytest
import yaml
from doc_blocks import ROOT
from tiny import save_models

from distill.cli import run_command

PAGE = ROOT / "docs" / "getting-started" / "tutorial.md"
NAME = re.compile(r"(?:# |\{#- )([\w.-]+\.\w+)")  # a block's first line where the block is a file
SMALLER = {"run": ["train.steps=2", "train.epochs=null"], "doctor": None}
QUESTIONS = 20
WRITTEN_BY_MODELS = ("generate", "chat")  # their whole output


def blocks(*languages):
    return [block for block in doc_blocks.blocks(*languages) if block.page == PAGE]


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """The reader's folder: every block that names its file, the recipe's teacher exchanged for a tiny one."""
    monkeypatch.chdir(tmp_path)
    save_models(tmp_path, tokens=260, tiny={"layers": 4})
    for block in blocks("python", "jinja", "yaml"):
        if name := NAME.match(block.text):
            (tmp_path / name[1]).write_text(block.text)
    recipe = yaml.safe_load((tmp_path / "my-chat.yaml").read_text())
    recipe["teacher"]["model"], recipe["student"]["from_teacher"] = "tiny", {"layers": 2}
    (tmp_path / "my-chat.yaml").write_text(yaml.safe_dump(recipe))
    exec((tmp_path / "make_questions.py").read_text(), {})
    questions = (tmp_path / "questions.jsonl").read_text().splitlines(keepends=True)
    assert len(questions) == 240
    (tmp_path / "questions.jsonl").write_text("".join(questions[:QUESTIONS]))
    return tmp_path


def words_of(text: str) -> set[str]:
    """Words of an output, however its lines are wrapped, without documents and what models wrote."""
    written = re.compile(
        r"^prompt:.*?(?=^held out)|^«.*?(?=^---|^\.\.\.|\Z)|\./\S+|package:\S+", re.DOTALL | re.MULTILINE
    )
    return set(re.findall(r"[a-z]{2,}", written.sub("", text).lower()))


def stale_words(block: doc_blocks.Block, output: str) -> list[str]:
    """Say which words of a quoted output are not printed, and which are printed and not quoted where none is left out.

    Numbers are those of a larger model, on the day that the page names.
    """
    quoted, printed = words_of(block.text), words_of(output)
    found = [f"{block}: {word} is not printed" for word in sorted(quoted - printed)]
    if "..." not in block.text:
        found += [f"{block}: {word} is not quoted" for word in sorted(printed - quoted)]
    return found


@pytest.mark.full
def test_tutorial_ends_with_a_model_that_responds(reader, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of the Netherlands?\n"))
    walked, printed, command_output, stale = [], "", "", []
    for block in blocks("sh", "text"):
        if block.language == "text":
            if command_output and walked[-1] not in WRITTEN_BY_MODELS:
                stale += stale_words(block, command_output)
            command_output = ""
            continue
        for words in doc_blocks.shell_commands(block.text):
            if words[0] != "distill" or words[1] == "recipes":
                continue
            more = SMALLER.get(words[1], [])
            assert run_command([*words[1:], *more]) == 0, (shlex.join(words), capsys.readouterr().err)
            walked.append(words[1])
            command_output += capsys.readouterr().out
            printed += command_output
    assert walked == [
        "sample",
        "validate",
        "validate",
        "check",
        "inspect",
        "run",
        "report",
        "eval",
        "generate",
        "run",
        "compare",
        "export",
        "chat",
    ]
    assert f"{QUESTIONS} responses" in printed and "verdict     fits and can run" in printed
    assert (reader / "my-model" / "my-model-q8_0.gguf").is_file() and (reader / "runs/first/report.html").is_file()
    templates = [(reader / name).read_text().strip() for name in ("my-model/chat_template.jinja", "my-chat.jinja")]
    assert not stale, "words of the quoted output are not those of today"
    assert templates[0] == templates[1], "whoever serves the student gets the template that it was taught with"


def test_what_it_prints_fits_a_terminal():
    assert not [line for block in blocks("text") for line in block.text.splitlines() if len(line) > 80]
