"""Pitfalls of users who come from other tools: other names, small data, runs that cannot be compared."""

import contextlib
import errno
import io
import json
import os
import re
import shlex
import subprocess
import sys
import types

import pytest
import torch
from huggingface_hub import ModelCard
from rich.console import Console
from test_data import load, own_cache, texts  # noqa: F401
from test_recipe import MINIMAL
from tiny import save_tiny, tiny_model, tiny_tokenizer
from torch.nn.modules.module import register_module_forward_pre_hook

from distill.cli import run_command
from distill.core import console
from distill.data.formats import detect
from distill.recipe import Data, Recipe, parse
from distill.recipe import load as load_recipe
from distill.recipe.shipped import shipped_recipes
from distill.reports.model_card import licence_of, write_model_card
from distill.training.progress import ProgressReport


def test_the_tables_of_foreign_names_lead_to_fields_and_values_that_exist():
    import dataclasses

    from transformers import TrainingArguments

    from distill.core.errors import _literals, _paths
    from distill.recipe.aliases import other_tools

    aliases, values_elsewhere, short, _ = other_tools()

    fields = set(_paths(Recipe)) | {"--resume", "--name", ""}
    fields |= {f"train.arguments.{field.name}" for field in dataclasses.fields(TrainingArguments)}
    assert {name for name, alias in aliases.items() if alias.field not in fields or not any(alias)} == set()
    assert set(aliases) & fields == {"output_dir"}, "a name that is ours already, at the same place"
    assert set(short) <= fields
    for field, values in values_elsewhere.items():
        paths = ["loss.terms.type"] if field == "type" else [p for p in fields if p.rpartition(".")[2] == field]
        options = {option for path in paths for option in _literals(Recipe, path.split("."))}
        ours = {value.split(" ")[0] for value in values.values()} - {
            "fp8",
            "int8",
            "float16",
        }  # one table for all dtypes
        assert options and ours <= options, field
        assert set(values) & options <= {"transformers"}, field


def test_the_seed_orders_rows_and_another_one_chooses_those_held_out(tmp_path):
    source, tokenizer = texts(tmp_path / "a.jsonl", 60), tiny_tokenizer()

    def rows(seed, split=0, **more):
        splits = load(source, tokenizer, seed, validation={"fraction": 0.2, "seed": split}, **more)
        return [[row["input_ids"] for row in part] for part in (splits.train, splits.validation)]

    (train, held_out), (other_train, same), (_, other) = rows(0), rows(5), rows(0, 5)
    assert held_out == same and train != other_train and sorted(train) == sorted(other_train)
    assert sorted(held_out) != sorted(other)
    assert rows(0, packing=True)[1] == rows(5, packing=True)[1], "packed alike, so that figures are the same bits"
    random = [load("synthetic", None, seed, vocab_size=90) for seed in (0, 5)]
    assert [*random[0].validation] == [*random[1].validation]


def a_newcomers_folder(tmp_path):
    """A folder with two models, forty short chats and a recipe as a newcomer writes it."""
    save_tiny(tmp_path / "big", tiny_model(tiny_tokenizer(), layers=4, hidden=64, seed=1))
    save_tiny(tmp_path / "small", tiny_model(tiny_tokenizer(), seed=2))
    turns = [[f"What is {n}?", f"It is the number {n}, of course."] for n in range(40)]
    chats = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
        for asked, answer in turns
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (tmp_path / "my.yaml").write_text(
        "teacher: {model: big}\nstudent: {model: small}\ndata: {source: chats.jsonl, max_length: 256}\n"
        "train: {epochs: 2, tokens_per_step: 65536}\ngenerate: {prompts: []}\n"
    )
    return tmp_path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The same, as the working directory."""
    monkeypatch.chdir(tmp_path)
    return a_newcomers_folder(tmp_path)


@pytest.mark.full
def test_too_few_data_are_reported_with_a_step_that_fits(folder, capsys):
    assert run_command(["check", "my.yaml", "--gpu", "cpu"]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    assert notes[0] == (
        "note        a step of 65,536 tokens is more than all of the data (2,437); 2 optimizer steps are too few to "
        "train on: train.tokens_per_step=256 (makes 20 steps), increase train.epochs, or use more data"
    )
    assert notes[1].startswith("note        63 held-out tokens (under 2,000) are too few for reliable metrics")
    assert run_command(["check", "my.yaml", "train.tokens_per_step=256", "data.validation.fraction=0.9"]) == 0
    out = capsys.readouterr().out
    assert "1 micro-batch per device" in out and "held-out tokens" not in out and "is more than all" not in out
    assert run_command(["run", "my.yaml", "--name", "few"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "steps       2 of all 2,437 tokens, 256 micro-batches per step on 1 x cpu" in lines
    assert any(line.startswith("few data    a step of 65,536 tokens is more than all") for line in lines)


@pytest.mark.full
def test_a_config_that_another_model_left_behind_is_not_followed(folder, capsys, caplog):
    assert run_command(["check", "my.yaml", "--gpu", "cpu"]) == 0
    own = capsys.readouterr().out
    left = ["teacher.config=llama-3.1-8b", "student.config=llama-3.2-1b"]
    assert run_command(["check", "my.yaml", "--gpu", "cpu", *left]) == 0
    assert capsys.readouterr().out.replace(" (cached)", "") == own
    assert "teacher.config: llama-3.1-8b (32 layers of 4096) is not big (4 of 64) and is not used" in caplog.text
    elsewhere = ["teacher.model=some/where", "teacher.config=llama-3.1-8b", "--no-data"]
    run_command(["check", "my.yaml", "--gpu", "cpu", *elsewhere])
    note = "teacher: some/where is not on this machine; sizes are those of teacher.config llama-3.1-8b"
    assert note in capsys.readouterr().out
    (folder / "empty").mkdir()
    assert run_command(["check", "my.yaml", "teacher.model=empty", *elsewhere[1:]]) == 2
    assert "teacher.model: the folder empty has no config.json" in capsys.readouterr().err


def test_a_terminal_gets_lines_broken_between_words(monkeypatch, capsys):
    line = "data        " + " ".join(["word"] * 40)
    console.print_lines(line)
    assert capsys.readouterr().out == line + "\n", "a log or a pipe gets it whole"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    console.print_lines(line)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 4 and max(map(len, shown)) <= 80
    assert all(part.startswith(" " * 12 + "word") for part in shown[1:]) and " ".join(shown).split() == line.split()


def test_losses_stay_in_the_scrollback_of_a_narrow_terminal():
    file = io.StringIO()
    report = ProgressReport(Console(file=file, width=80, force_terminal=True, legacy_windows=False))
    state = types.SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=100)
    report.on_train_begin(None, state, None)
    for step in (10, 20):
        state.global_step = step
        figures = {"loss": 1 / step, "kl": 1 / step, "agreement": 0.5, "tokens_per_second": 12345.0, "mfu": 0.5}
        report.on_log(None, state, None, figures)
        report.on_step_end(None, state, None)
    report.stop()
    lines = file.getvalue().splitlines()
    for step, loss in ((10, "0.1000"), (20, "0.0500")):
        assert sum(f"step {step}/100  loss {loss}" in line for line in lines) == 1
    assert "…" not in file.getvalue(), "nothing is cut off at 80 columns"


@pytest.mark.parametrize(
    "row, given, cure",
    [
        ({"conversations": []}, {"format": "text"}, "they are chat: data.format=chat"),
        ({"instruction": "a", "output": "b"}, {"format": "chat"}, "data.format=prompt_completion"),
        ({"talk": [], "id": 1}, {"format": "chat"}, "map them, as in data.fields.messages=talk"),
        ({"a": "1", "b": "2"}, {}, "map them, as in data.fields.prompt=a data.fields.completion=b"),
        ({"a": "1", "b": "2"}, {"format": "text"}, "map them, as in data.fields.text=a"),
        ({"id": "7", "body": "2"}, {}, "map them, as in data.fields.text=body"),
    ],
)
def test_columns_that_are_not_of_the_format_get_the_setting_that_reads_them(row, given, cure):
    data = Data(source="x.jsonl", **given)
    with pytest.raises(ValueError, match=r"data\.fields: expected") as error:
        detect(row, data.fields, data.format, has_template=True)
    assert str(error.value).endswith(cure)


ASKED, SAID = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is so."}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "What is it?", "chosen": "It is so.", "rejected": "No."},
        {"ask": "What is it?", "say": "It is so."},
        {"id": "7", "lang": "en", "say": "It is so.", "ask": "What is it?"},
        {"prompt": "What is it?", "chosen": [ASKED, SAID], "rejected": [ASKED, ASKED]},
        {"prompt": [ASKED], "chosen": [SAID], "rejected": [SAID]},
        {"rejected": [ASKED, ASKED], "chosen": [ASKED, SAID]},
        {"source": "What is it?", "target": "It is so."},
        {"first": "What is it?", "second": "It is so."},
    ],
)
def test_the_setting_that_is_advised_for_unknown_columns_learns_the_answer_alone(row, tmp_path):
    path, tokenizer = tmp_path / "rows.jsonl", tiny_tokenizer()
    path.write_text("".join(json.dumps({**row, "n": number}) + "\n" for number in range(3)))
    with pytest.raises(ValueError, match="map them, as in ") as error:
        load(str(path), tokenizer)
    cure = str(error.value).partition("map them, as in ")[2].partition(" (")[0]
    given = parse(MINIMAL, cure.split()).data.fields.model_dump(exclude_none=True)
    splits = load(str(path), tokenizer, fields=given, max_length=256, packing=False)
    learned = [token for token in splits.train[0]["labels"] if token != -100]
    assert tokenizer.decode(learned, skip_special_tokens=True).strip() == "It is so."


@pytest.mark.full
def test_the_command_that_cache_prints_keeps_the_overrides(folder, capsys):
    given = ["train.epochs=1", "train.tokens_per_step=512", "teacher.dtype=float32"]
    assert run_command(["cache", "my.yaml", *given, "--top-k", "8", "--out", "kept"]) == 0
    printed = capsys.readouterr().out
    command = next(line for line in printed.splitlines() if line.startswith("train from it:"))
    assert command.endswith(
        "distill run my.yaml train.epochs=1 train.tokens_per_step=512 'teacher={type: cache, path: kept}'"
    )
    assert run_command(shlex.split(command.partition("distill ")[2])) == 0
    assert "verdict" in printed and "top-k" in printed


@pytest.mark.plain(
    "def mine(s, t, labels):\\n    return s.sum()-expected a loss a row, a tensor of \\\\[\\\\d+\\\\], got \\\\[\\\\]"
)
@pytest.mark.parametrize(
    "code, told",
    [
        ("def mine(s, t, labels):\n    return s.sum()", r"expected a loss a row, a tensor of \[\d+\], got \[\]"),
        (
            "def mine(s, t, labels):\n    return s @ t",
            r"line 2: mine with logits \[\d+, 259\]: RuntimeError",
        ),
    ],
)
def test_a_function_of_ones_own_that_does_not_fit_is_one_line(folder, code, told, capsys):
    (folder / "mine.py").write_text(f"{code}\n\n\nTERMS = {{'mine': mine}}\n")
    given = ["--plugin", "mine.py", "loss.terms=[{type: mine}]", "train.epochs=1", "train.tokens_per_step=512"]
    assert run_command(["run", "my.yaml", *given]) == 2
    lines = capsys.readouterr().err.splitlines()
    faults = [line for line in lines if line.startswith("distill: ")]
    assert len(faults) == 1 and re.search(told, faults[0]) and "Traceback" not in "".join(lines)


def test_shades_reach_a_pipe(folder, capsys):
    assert run_command(["inspect", "my.yaml", "--rows", "1", "--shade", "entropy"]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"\[\d\.\d\d\]", out)) > 20 and "«" in out


def test_validate_names_files_that_are_not_here_and_those_almost_so(folder, capsys):
    assert run_command(["validate", "my.yaml"]) == 0
    assert capsys.readouterr().err == ""
    assert run_command(["validate", "my.yaml", "teacher.model=bigg"]) == 0
    captured = capsys.readouterr()
    assert parse(captured.out).teacher.model == "bigg"
    assert (
        captured.err
        == "distill: teacher.model: bigg does not exist here and is taken for a hub id; did you mean big?\n"
    )
    wrong = ["teacher.model=bigg", "student.model=./smal", "data.source=chat.jsonl", "data.chat_template=my.jinja"]
    for arguments in ([], ["--json"]):
        assert run_command(["validate", "my.yaml", *wrong, *arguments]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        second, third, fourth = captured.err.splitlines()
    assert second.startswith("distill: student.model: ./smal does not exist") and second.endswith("you mean small?")
    assert "data.source: expected a local file" in third and third.endswith("did you mean chats.jsonl?")
    assert fourth == "distill: data.chat_template: my.jinja does not exist"
    assert run_command(["run", "my.yaml", "data.source=chat.jsonl"]) == 2
    assert "did you mean chats.jsonl?" in capsys.readouterr().err
    assert run_command(["check", "my.yaml", "data.source=chat.jsonl"]) == 1
    assert "did you mean chats.jsonl?" in capsys.readouterr().out


def test_validate_refuses_lora_targets_that_match_nothing_where_the_architecture_is_known(folder, capsys):
    cut = "student={from_teacher: {layers: 1}, lora: {r: 4, targets: [qproj]}}"
    random = "student={config: llama-3.2-1b, init: random, lora: {r: 4, targets: [qproj]}}"
    for given in ("student.lora={r: 4, targets: [qproj]}", cut, random):
        assert run_command(["validate", "my.yaml", given]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("distill: student.lora.targets: 'qproj' matches no linear layer; did you")
    assert run_command(["validate", "my.yaml", "student.lora={r: 4, targets: [q_proj]}"]) == 0
    assert run_command(["validate", "my.yaml", "student.model=org/unknown", "student.lora={targets: [qproj]}"]) == 0


@pytest.mark.full
def test_inspect_shows_what_check_shows_of_the_data_and_equal_rows_are_counted(folder, capsys):
    rows = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()][:20]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows[:5], {"messages": []}]))
    shown = []
    for command in (["check", "--gpu", "cpu"], ["inspect", "--rows", "1"]):
        assert run_command([command[0], "my.yaml", "data.source=rows.jsonl", *command[1:]]) == 0
        out = capsys.readouterr().out
        data = out[out.index("data        rows.jsonl") :].partition("\nplan")[0].partition("\n\n===")[0]
        shown.append(data.strip().replace(" (cached)", ""))
    assert shown[0] == shown[1] and "dropped 1: empty (row 26: column 'messages': no messages)" in shown[0]
    assert "copies of other rows: 5 of 25 (trained on again)" in shown[0]
    (folder / "same.jsonl").write_text((json.dumps(rows[0]) + "\n") * 40)
    assert run_command(["check", "my.yaml", "--gpu", "cpu", "data.source=same.jsonl"]) == 0
    equal = "copies of other rows: 39 of 40 (all are equal, so that held-out rows are trained on as well)"
    assert equal in capsys.readouterr().out
    assert run_command(["check", "my.yaml", "--gpu", "cpu"]) == 0
    assert "copies" not in capsys.readouterr().out


def test_chat_remembers_its_turns_and_ends_with_the_pipe(folder, monkeypatch, capsys):
    tokenizer, prompts = tiny_tokenizer(), []

    def note(module, args):
        if isinstance(module, torch.nn.Embedding) and args[0].shape[1] > 1:
            prompts.append(tokenizer.decode(args[0][0]))

    def rendered(*contents):
        turns = [{"role": role, "content": text} for role, text in zip(("system", "user"), contents, strict=True)]
        return tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)

    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\nWho?\n/new\nAgain\n"))
    watched = register_module_forward_pre_hook(note)
    try:
        command = ["chat", "small", "--teacher", "big", "--system", "Be brief", "--max-new-tokens", "4"]
        assert run_command([*command, "--temperature", "0"]) == 0
    finally:
        watched.remove()
    said = capsys.readouterr().out
    assert [said.count(line) for line in ("--- teacher\n", "--- student\n")] == [3, 3]
    hello, again = rendered("Be brief", "Hello"), rendered("Be brief", "Again")
    assert prompts[:2] == [hello] * 2 and prompts[4:] == [again] * 2
    question = "<|end|>\n<|start|>user\nWho?<|end|>\n<|start|>assistant\n"
    replies = [prompt.removeprefix(hello).removesuffix(question) for prompt in prompts[2:4]]
    assert [hello + reply + question for reply in replies] == prompts[2:4] and all(reply in said for reply in replies)
    assert replies[0] != replies[1]


@pytest.mark.full
def test_chat_streams_the_response_of_generate_and_drops_old_turns(folder, monkeypatch, capsys):
    assert run_command(["generate", "small", "-p", "Hello", "--max-new-tokens", "8"]) == 0
    alone = capsys.readouterr().out.split("--- student\n")[1].strip()
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert run_command(["chat", "small", "--temperature", "0", "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out.strip() == alone
    monkeypatch.setattr("sys.stdin", io.StringIO("one two three\n" * 4))
    assert run_command(["chat", "small", "--temperature", "0", "--max-new-tokens", "400"]) == 0
    assert "the oldest turn was dropped: the model has at most 512 positions" in capsys.readouterr().err


@pytest.mark.full
def test_a_log_holds_no_noise_of_libraries(folder):
    """Four workers on fewer cores, a tokenizer with a shorter limit than the data: neither is anybody's mistake."""
    config = folder / "big" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_max_length": 16}))
    (folder / "long.jsonl").write_text("".join(json.dumps({"text": f"{n} and so on" * 40}) + "\n" for n in range(30)))
    given = [
        "data.source=long.jsonl",
        "data.workers=4",
        "train.steps=4",
        "train.tokens_per_step=1024",
        "train.eval_every=2",
    ]
    command = [sys.executable, "-m", "distill", "run", "my.yaml", *given]
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | paths)
    assert done.returncode == 0 and done.stderr == ""
    assert "held out: loss" in done.stdout, "an evaluation along the way is shown"


def test_the_model_card_has_the_hubs_metadata(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# base\n")
    names = {"name": "mine", "teacher": "org/big", "student": "org/base", "data": "org/chats", "recipe": "name: mine"}
    more = {"hub_models": ("org/base", "org/big"), "datasets": ("org/chats", "chats.jsonl")}
    write_model_card(tmp_path, **names, **more, licence=licence_of(str(tmp_path / "base")))
    card = ModelCard.load(tmp_path / "README.md").data
    assert card.base_model == ["org/base", "org/big"] and card.datasets == ["org/chats"]
    assert card.license == "apache-2.0" and card.library_name == "transformers"
    assert licence_of("no/where") is None


def test_shipped_recipes_draw_held_out_curves():
    for recipe in shipped_recipes():
        assert load_recipe(recipe.path).train.eval_every is not None, recipe.name


@pytest.mark.parametrize("number, goes_on", [(errno.EIO, True), (errno.ENOSPC, False)])
def test_a_terminal_that_is_gone_before_its_signal_is_heard_ends_nothing(number, goes_on):
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(number, os.strerror(number))

    report = ProgressReport(Console(file=Gone(), width=80, force_terminal=True, legacy_windows=False))
    state = types.SimpleNamespace(is_world_process_zero=True, global_step=1, max_steps=2)
    with contextlib.nullcontext() if goes_on else pytest.raises(OSError):
        report.on_log(None, state, None, {"loss": 0.5})
