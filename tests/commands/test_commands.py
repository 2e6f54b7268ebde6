"""Every command alike: help with examples, JSON, exit codes, completion, plain text in a pipe, a quiet Ctrl-C."""

import errno
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from distill import cli
from distill.cli import run_command

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = typer.main.get_command(cli.app).commands
NAMES = sorted(COMMANDS)
PRINTS_NO_TABLE = {"run", "chat", "serve", "schema", "init"}  # the last prints JSON as it is
NEEDS = {
    "quantise": ["-o", "out"],
    "export": ["-o", "out"],
    "generate": ["-p", "Hello"],
    "sample": ["--prompts", "p.txt", "--out", "o.jsonl", "--from", "teacher"],
}
ESCAPE = "\x1b"


def distill(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "distill", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


def test_all_commands_are_met_here():
    assert {"run", "validate", "recipes", "check", "inspect", "eval", "compare", "report"} <= set(NAMES)
    assert {"export", "generate", "bench", "doctor"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_help_explains_and_shows_examples(name, capsys):
    assert run_command([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"Usage: distill {name}" in out and ESCAPE not in out
    if name != "recipes":  # whose own examples stand at its subcommand
        examples = re.findall(rf"^ +distill {name}\b.*$", out, flags=re.M)
        assert examples, "a person copies examples before reading options"
    for line in out.splitlines():
        assert len(line) <= 80, line
    for parameter in COMMANDS[name].params:
        if parameter.param_type_name == "option" and parameter.name not in ("help",):
            assert getattr(parameter, "help", None), f"{name} {parameter.opts[0]} is not explained"


@pytest.mark.parametrize("name", NAMES)
def test_commands_that_print_a_table_also_print_json(name):
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert ("--json" in options) is (name not in PRINTS_NO_TABLE)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_option_is_one_line_and_exit_code_2(name, capsys):
    assert run_command([name, "--colour", "red"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("distill: ") and captured.err.count("\n") == 1
    assert f"distill {name} --help" in captured.err


@pytest.mark.parametrize("name", NAMES)
def test_ctrl_c_is_130_without_a_trace(name, capsys, monkeypatch):
    """Wherever a command is when the person has had enough."""
    command = COMMANDS[name]

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(command), "invoke", interrupted)
    assert run_command([name, *([] if name == "schema" else ["x"]), *NEEDS.get(name, [])]) == 130
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err and captured.out == ""


def test_a_bug_keeps_its_trace(capsys, fault, tmp_path):
    def fails(*args, **kwargs):
        raise RuntimeError("a bug\nof two lines")

    fault.setattr("distill.reports.report.find_run", fails)
    fault.setattr("tempfile.tempdir", str(tmp_path))
    fault.setattr("distill.core.run_lock.RunLock.latest", None)
    assert run_command(["report", "x"]) == 1
    (kept,) = tmp_path.iterdir()
    line = f"distill: unexpected error: RuntimeError: a bug; traceback in {kept} (DISTILL_TRACE=1 prints it)\n"
    assert capsys.readouterr().err == line
    text = kept.read_text()
    assert text.startswith("distill report x\n") and "of two lines" in text and "\ntorch " in text
    fault.setenv("DISTILL_TRACE", "1")
    with pytest.raises(RuntimeError, match="a bug"):
        run_command(["report", "x"])


def test_a_file_that_cannot_be_written_is_one_line(capsys, monkeypatch):
    def fails(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system", "runs/x/report.html.unfinished")

    monkeypatch.setattr(Path, "is_file", fails)
    assert run_command(["report", "x"]) == 1
    assert capsys.readouterr().err == "distill: runs/x/report.html.unfinished: the disk is read-only\n"
    monkeypatch.setenv("DISTILL_TRACE", "1")
    with pytest.raises(OSError, match="Read-only"):
        run_command(["report", "x"])


def test_a_failed_check_is_1(capsys):
    tiny = ["teacher.init=random", "student.init=random", "data.source=synthetic"]
    assert run_command(["check", "llama3-8b-to-1b", "--gpu", "24GB", "--no-data", *tiny]) == 1
    assert "PROBLEM     memory" in capsys.readouterr().out


# ---------------------------------------------------------------- completion


@pytest.mark.full
def test_the_shell_completes_commands_options_recipes_and_runs(tmp_path):
    def complete(words: str, number: int, cwd: Path = ROOT) -> list[str]:
        answer = subprocess.run(
            [sys.executable, "-m", "distill"],
            capture_output=True,
            text=True,
            cwd=cwd,
            env={
                **os.environ,
                "_DISTILL_COMPLETE": "complete_bash",
                "COMP_WORDS": words,
                "COMP_CWORD": str(number),
                "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
            },
        )
        return answer.stdout.split()

    assert complete("distill ex", 1) == ["export"]
    assert "--gguf" in complete("distill export --g", 2)
    assert complete("distill run quick", 2) == ["quickstart"]
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "recipe.yaml").write_text("name: mine")
    for command in ("report", "export", "eval", "generate", "compare"):
        assert complete(f"distill {command} mi", 2, tmp_path) == ["mine"], command


def test_completion_installs_itself():
    out = distill("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert out.returncode == 0 and "_DISTILL_COMPLETE=complete_bash" in out.stdout


# ---------------------------------------------------------------- terminals


def in_terminal(code: str) -> str:
    """Return the output of a Python program whose standard output and error are a terminal."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=slave, stderr=slave, cwd=ROOT, env=environment)
    os.close(slave)
    written = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # what Linux answers when the other end is closed
            break
        if not piece:
            break
        written += piece
    os.close(master)
    assert process.wait() == 0, written
    return written.decode()


@pytest.mark.full
def test_letters_that_the_output_has_not_end_no_command():
    asked = ("validate", "quickstart", "generate.prompts=[caf\u00e9]")
    told = distill(*asked, PYTHONIOENCODING="ascii")
    assert told.returncode == 0 and "- caf?\n" in told.stdout
    # where the recipe's own model is not installed, a line says so
    assert all("is not installed" in line for line in told.stderr.splitlines()), told.stderr
    assert "- caf\u00e9\n" in distill(*asked, PYTHONIOENCODING="utf-8").stdout


PROGRESS = (
    "import time; from distill.core import console\n"
    "console.LOGGED_EVERY_S = 0.1\n"
    "console.advance()\n"  # nothing is shown: nothing is counted
    "with console.spinner('comparing', 4):\n"
    "    for _ in range(4):\n"
    "        time.sleep(0.11)\n"
    "        console.advance()\n"
    "    time.sleep(0.3)\n"  # a frame is drawn ten times a second
    "    with console.spinner('answering'):\n"
    "        time.sleep(0.15)\n"
    "        console.advance(1, total=7)\n"
    "        time.sleep(0.3)\n"
    "with console.spinner('loading'):\n"  # several things, one after another
    "    for total in (2, 1):\n"
    "        for _ in range(total):\n"
    "            time.sleep(0.11)\n"
    "            console.advance(total=total)\n"
    "with console.spinner('quick', 4):\n"
    "    console.advance()\n"
    "console.show_table(['a'], [['1']])\n"
)


@pytest.mark.full
def test_bars_and_colours_are_for_terminals_only(capsys):
    drawn = in_terminal(PROGRESS)
    assert ESCAPE in drawn and "comparing" in drawn and "4 of 4" in drawn and "answering" in drawn and "1 of 7" in drawn
    plain = subprocess.run([sys.executable, "-c", PROGRESS], capture_output=True, text=True, cwd=ROOT)
    assert plain.returncode == 0 and plain.stdout == "a\n1\n"
    lines = [re.sub(r"\d+ s$", "T", line) for line in plain.stderr.splitlines()]
    counted = [f"comparing: {number} of 4 after T" for number in (1, 2, 3, 4)]
    counted.append("answering: 1 of 7 after T")
    counted += [f"loading: {count} after T" for count in ("1 of 2", "2 of 2", "1 of 1")]
    assert lines == counted, "and nothing of what is quick"
    for arguments in (["recipes"], ["validate", "quickstart"]):
        assert run_command(arguments) == 0
    captured = capsys.readouterr()
    assert ESCAPE not in captured.out + captured.err
