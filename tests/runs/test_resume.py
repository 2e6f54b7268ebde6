"""Checkpoints that `--resume` continues from, and those it refuses: finished, damaged, hostile, other data."""

import json
import logging
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tiny import save_tiny, tiny_model, tiny_tokenizer

from distill import run as run_module
from distill.cli import run_command
from distill.training.checkpoints import checkpoint_error
from distill.training.progress import read_metrics

RECIPE = """
teacher: {model: teacher}
student: {from_teacher: {layers: 1}}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1, max_rows: 2}}
train: {steps: 4, batch_size: 2, learning_rate: 3e-3, warmup: 0, schedule: constant, log_every: 1, save_every: 2,
        device: cpu}
generate: {prompts: []}
"""
TEXT = "\n".join(f"The teacher explains line {number} and the student listens to it once more." for number in range(40))


# a finished run with checkpoint-2 and checkpoint-4, in runs/whole
WHOLE = {
    "text": TEXT,
    "files": {"r.yaml": RECIPE},
    "teacher": {"layers": 3, "seed": 1},
    "run": ["run r.yaml --name whole"],
}
pytestmark = pytest.mark.place(**WHOLE)


def resume():
    return run_command(["run", "r.yaml", "--name", "whole", "--resume"])


def figures(folder):
    timing = ("seconds", "tokens_per_second", "trained_tokens_per_second", "peak_memory_gib", "tokens_seen")
    return [
        {key: value for key, value in row.items() if key not in timing and not key.startswith("time_")}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def test_a_finished_run_is_left_as_it_is(workplace, finished, capsys, caplog):
    assert resume() == 0 and "missing keys" not in caplog.text
    run = workplace / "runs/whole"
    assert "continuing from runs/whole/checkpoint-4" in capsys.readouterr().out
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    assert figures(run) == figures(finished / "runs/whole")
    ours, theirs = (load_file(path / "runs/whole/student/model.safetensors") for path in (workplace, finished))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_finished_run_without_checkpoints_is_not_made_again(workplace, finished, capsys):
    run = workplace / "runs/whole"
    for checkpoint in run.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    with pytest.raises(SystemExit) as left:
        resume()
    assert left.value.code == 0
    assert "runs/whole is finished and has no checkpoint: nothing to train" in capsys.readouterr().out
    for path in (path for path in run.rglob("*") if path.is_file() and path.name != ".lock"):
        there = finished / path.relative_to(workplace)
        assert path.read_bytes() == there.read_bytes() and path.stat().st_mtime == there.stat().st_mtime, path


def test_runs_that_load_at_the_same_time_do_not_share_a_folder(workplace, fault, capsys):
    described = run_module.first_batch_report

    def another_begins(*args):
        shutil.copytree("runs/whole", "runs/r", dirs_exist_ok=True)
        return described(*args)

    fault.setattr(run_module, "first_batch_report", another_begins)
    assert run_command(["run", "r.yaml", "train.seed=1"]) == 1
    assert capsys.readouterr().err.startswith("distill: runs/r: another run began there while this one was loading")
    assert figures(workplace / "runs/r") == figures(workplace / "runs/whole")
    for name in ("recipe.yaml", "lock.yaml", "before.json"):
        assert (workplace / "runs/r" / name).read_bytes() == (workplace / "runs/whole" / name).read_bytes()


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


SPOILED = {
    "state cut": lambda folder: cut(folder / "trainer_state.json"),
    "state of something else": lambda folder: (folder / "trainer_state.json").write_text("[]"),
    "weights cut": lambda folder: cut(folder / "model.safetensors"),
    "weights gone": lambda folder: (folder / "model.safetensors").unlink(),
    "optimizer cut": lambda folder: cut(folder / "optimizer.pt"),
    "optimizer gone": lambda folder: (folder / "optimizer.pt").unlink(),
    "random state empty": lambda folder: (folder / "rng_state.pth").write_bytes(b""),
    "schedule garbage": lambda folder: (folder / "scheduler.pt").write_bytes(b"\0garbage" * 99),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_a_damaged_checkpoint_is_a_one_line_error(finished, tmp_path, spoil):
    folder = shutil.copytree(finished / "runs/whole/checkpoint-4", tmp_path / "checkpoint-4")
    assert checkpoint_error(folder) is None
    spoil(folder)
    fault = checkpoint_error(folder)
    assert fault and "\n" not in fault and len(fault) < 300, fault


@pytest.mark.full
def test_the_checkpoint_before_a_damaged_one_is_used(workplace, finished, capsys):
    cut(workplace / "runs/whole/checkpoint-4/optimizer.pt")
    assert resume() == 0
    out = capsys.readouterr().out
    assert "runs/whole/checkpoint-4 cannot be used: optimizer.pt is damaged: expected" in out
    assert "continuing from runs/whole/checkpoint-2" in out
    assert figures(workplace / "runs/whole") == figures(finished / "runs/whole")
    ours, theirs = (load_file(path / "runs/whole/student/model.safetensors") for path in (workplace, finished))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_where_no_checkpoint_is_of_use_nothing_starts_anew(workplace, capsys):
    for path in (workplace / "runs/whole").glob("checkpoint-*"):
        (path / "model.safetensors").unlink()
    before = (workplace / "runs/whole/metrics.jsonl").read_bytes()
    assert resume() == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "checkpoint-4 cannot be used: model.safetensors is missing" in err
    assert "move these folders away to start again" in err
    assert (workplace / "runs/whole/metrics.jsonl").read_bytes() == before


def test_names_that_look_like_checkpoints(workplace):
    for name in ("checkpoint-²", "checkpoint-", "checkpoint-9x", "checkpoint--3", "checkpoint-9999"):
        (workplace / "runs/whole" / name).mkdir()
    assert resume() == 0


def test_other_data_or_models_are_refused_by_name(workplace, capsys):
    (workplace / "text.txt").write_text(TEXT.replace("listens", "learns"))
    assert resume() == 2
    assert "lock.yaml (move it away to continue anyway): data.source differs" in capsys.readouterr().err
    (workplace / "text.txt").write_text(TEXT)
    save_tiny(workplace / "teacher", tiny_model(tiny_tokenizer(), layers=3, seed=5), tiny_tokenizer())
    assert resume() == 2
    assert "teacher.weights differs" in capsys.readouterr().err


@pytest.mark.full
def test_other_versions_are_named_and_go_on(workplace, caplog):
    lock = workplace / "runs/whole/lock.yaml"
    lock.write_text(re.sub(r"( torch:) \S+", r"\1 1.0.0", lock.read_text()))
    with caplog.at_level(logging.WARNING):
        assert resume() == 0
    assert "environment.torch was 1.0.0 when the run began" in caplog.text


@pytest.mark.full
@pytest.mark.parametrize("text", ["{", '{"held_out": {"x": 1}, "answers": {}}', "[]"])
def test_damaged_figures_from_before_are_made_again(workplace, finished, text, caplog):
    path = workplace / "runs/whole/before.json"
    path.write_text(text)
    assert resume() == 0
    assert "before.json is damaged" in caplog.text
    again, first = (json.loads(each.read_text()) for each in (path, finished / "runs/whole/before.json"))
    of_the_start = ("started", "command")
    assert [key for key in first if again[key] != first[key] and key not in of_the_start] == []


def test_a_resumed_run_launches_kernels_as_it_did(workplace, hardware):
    from distill_kernels import tuning

    folder, imposed = workplace / "runs/whole", []
    (folder / "kernels.json").write_text('{"attention dq 64": "32 64 4 2"}')
    shutil.rmtree(folder / "checkpoint-4")
    (folder / "result.json").unlink()
    hardware.setattr(tuning, "_preset", {})
    impose = tuning.preset_choices
    hardware.setattr(tuning, "preset_choices", lambda choices: (impose(choices), imposed.append(dict(tuning._preset))))
    hardware.setattr(tuning, "_used", {"attention dq 64": "32 64 4 2", "logits 4096": "0 0 8 3"})
    hardware.setattr(tuning, "_record_path", [])
    assert resume() == 0
    assert imposed == [{"attention dq 64": "32 64 4 2"}]
    assert tuning.read_choices(folder / "kernels.json") == tuning._used
