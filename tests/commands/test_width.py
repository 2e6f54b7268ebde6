"""Output of commands into a pipe or file fits 80 columns, except what is copied or read by programs."""

import contextlib
import io
import re

import pytest
import torch
import uvicorn
from distill_kernels.launch import device_facts
from forked import free_port
from test_newcomers import a_newcomers_folder

from distill.cli import run_command
from distill.core.console import print_lines, print_verbatim, show_table, wrap_line
from distill.doctor import machine
from distill.doctor.machine_checks import CHECKS

WIDTH = 80
NO_ONE = ["generate.prompts=[]"]
VERBATIM = re.compile(r'train from it:  distill | *"')
OF_RUNS = ("eval", "compare", "report", "generate", "export", "verify")
COMMANDS = (
    ["--help"],
    ["recipes"],
    ["recipes", "copy", "llama3-8b-to-1b-cached", "a-recipe-of-a-rather-long-name.yaml"],
    ["settings"],
    ["settings", "data"],
    ["settings", "loss.terms"],
    ["validate", "my.yaml"],
    ["validate", "llama3-8b-to-1b-cached"],
    ["check", "my.yaml"],
    ["check", "llama3-70b-to-8b-lora", "--gpu", "4090", "--gpus", "4", "--no-data"],
    ["check", "llama3-8b-to-1b", "--gpu", "v100", "teacher.offload=cpu", "--no-data"],
    ["inspect", "my.yaml", "--json"],
    ["cache", "my.yaml", "--top-k", "8", "--report"],
    ["cache", "my.yaml", "--top-k", "8", "--out", "cached"],
    ["sample", "my.yaml", "--prompts", "chats.jsonl", "--out", "a.jsonl", "--from", "teacher", "--max-new-tokens", "4"],
    ["eval", "one"],
    ["compare", "one", "two", "--anyway"],
    ["compare", "one", "two", "--plot", "curves.html"],
    ["report", "one"],
    ["generate", "one", "-p", "What is 4?", "--with-teacher", "--max-new-tokens", "8"],
    ["export", "one", "-o", "exported"],
    ["verify", "one"],
)


def too_wide(text: str) -> list[str]:
    """Lines of more than 80 columns, but for those that are verbatim."""
    return [line for line in text.splitlines() if len(line) > WIDTH and not VERBATIM.match(line)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return a_newcomers_folder(tmp_path_factory.mktemp("width"))


@pytest.fixture(scope="module")
def finished(folder):
    """What two runs of the newcomer's recipe printed."""
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(WIDTH))
        assert run_command(["run", "my.yaml", "--name", "one", "generate.prompts=['What is 4?']"]) == 0
        more = ["train.tokens_per_step=512", "train.log_every=1", "train.eval_every=2", "train.cuda_graph=false"]
        assert run_command(["run", "my.yaml", "--name", "two", *more, *NO_ONE]) == 0
    return printed.getvalue()


@pytest.mark.full
def test_a_runs_lines_fit(finished):
    assert "few data" in finished and "workspace" in finished and "held out" in finished
    assert not too_wide(finished)


@pytest.mark.plain("validate my.yaml", "inspect my.yaml --json")
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_commands_lines_fit(words, folder, request, monkeypatch, capsys):
    if words[0] in OF_RUNS:
        request.getfixturevalue("finished")
        capsys.readouterr()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    assert run_command(words) in (0, 1)
    printed = capsys.readouterr().out
    assert printed.strip() and not too_wide(printed)


@pytest.mark.full
@pytest.mark.parametrize("words", [["doctor", "my.yaml"], ["doctor", "--machine"]], ids=" ".join)
def test_lines_of_doctor_fit_the_terminal(words, folder, request, monkeypatch, capsys, forked_ranks, limit):
    """Of the checks of kernels those with the longest name, with kernels and without, and those that no CPU computes;
    tests/ops/test_ops.py runs all."""
    facts = device_facts(torch.device("cpu"))
    cannot = {name for name in CHECKS if not CHECKS[name].needs(facts)}
    computed = {"fused_kl_loss", "lora_linear", max(CHECKS.keys() - cannot, key=len)}
    limit.setattr(machine, "JOBS", [job for job in machine.JOBS if job[0] in cannot | computed or job in machine.RATES])
    test_a_commands_lines_fit(words, folder, request, monkeypatch, capsys)


def test_a_servers_lines_fit(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: setattr(server, "started", True))
    assert run_command(["serve", "my.yaml", "--port", str(free_port())]) == 0
    printed = capsys.readouterr().out
    assert "serving" in printed and not too_wide(printed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would time")
def test_a_table_of_bench_fits(monkeypatch, capsys):
    """The table is the one that `bench` prints on a GPU."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    phases = "teacher 199 / student 61 / loss 34 / backward 118 / optimizer 4"
    rows = [["distill-graphs", "339.1", "24,158", "41%", "49.8", "210.4", phases]]
    show_table(["variant", "ms", "tokens/s", "MFU", "peak GiB", "joules", "ms by phase"], rows)
    printed = capsys.readouterr().out
    assert not too_wide(printed) and set(" ".join(rows[0]).split()) <= set(printed.split())


def test_lines_are_broken_where_a_reader_expects_it(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    print_lines("steps       40 of 512 tokens, one micro-batch a step\n\n  teacher: " + "word " * 12)
    assert capsys.readouterr().out == (
        "steps       40 of 512 tokens, one\n            micro-batch a step\n\n"
        "  teacher: word word word word word word\n           word word word word word word\n"
    )
    figures = "step 10/100  loss 0.1000  kl 0.1000  agreement 50.0%  12,345 tokens/s"
    assert wrap_line(figures, 60)[1] == "             12,345 tokens/s"
    assert wrap_line("/a/path/" + "x" * 90, 80) == ["/a/path/" + "x" * 90]
    print_verbatim("distill run " + "x " * 40)
    assert len(capsys.readouterr().out) > 80
    monkeypatch.setenv("COLUMNS", "200")
    print_lines("word " * 30)
    assert capsys.readouterr().out == "word " * 30 + "\n"
