"""Flipped bits: `distill verify` sees them in every file of a run, and no command writes or uses what is damaged."""

import json
import os
import random

import pytest
import torch
from safetensors.torch import load_file

from distill.cli import run_command
from distill.core.manifest import with_checksum
from distill.generation.environment import EnvironmentLog, read_replies

TEXT = "\n".join(f"The teacher explains line {n} {'so ' * (n % 4)}and hears {n * 31337 % 997}." for n in range(80))
RECIPE = """
teacher: {model: teacher}
student: {from_teacher: {layers: 2, importance: {rows: 4, layer_rows: 2}}}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1, max_rows: 4}}
train: {steps: 2, batch_size: 2, tokens_per_step: 128, learning_rate: 3e-3, warmup: 0, save_every: 2, device: cpu}
generate: {prompts: [Hello], max_new_tokens: 3}
export: {gguf: q4_0, tokens: 0}
stages:
  - {name: prune}
  - {name: quantise, student: {lora: {r: 2}, quantise: {format: q4_0}}}
"""
UNREAD = (".lock", "heartbeat")  # state of processes, of which nothing is read again
SEED = 51


@pytest.fixture(scope="module")
def finished(placed):
    """A finished run of two stages, a pruned student and a quantised one with an adapter, and the file it exports."""
    teacher = {"layers": 4, "seed": 1, "hidden": 64}
    folder = placed(tokens=420, text=TEXT, files={"tiny.yaml": RECIPE}, teacher=teacher, run=["run tiny.yaml"])
    log = EnvironmentLog(folder / "runs/tiny", 0)
    log.add({f"{n:032x}": None if n % 3 == 0 else [{"role": "tool", "content": f"It is {n}."}] for n in range(6)})
    return folder


@pytest.fixture
def place(workplace):
    return workplace / "runs/tiny"


def flip(path, draw):
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def files_of(folder):
    names = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size)
    return [name for name in names if not any(part.startswith(UNREAD) for part in name.parts)]


@pytest.mark.full  # half a minute
def test_a_flipped_bit_of_every_file_of_a_staged_run_is_seen(place, capsys):
    assert run_command(["verify", "tiny"]) == 0
    shown = capsys.readouterr().out
    assert "stages/1-prune/student" in shown and "environment/00000.jsonl" in shown and "export/" in shown
    draw, unseen, names = random.Random(SEED), [], files_of(place)
    for name in names:
        whole = (place / name).read_bytes()
        flip(place / name, draw)
        if run_command(["verify", "tiny"]) != 1:
            unseen.append(str(name))
        (place / name).write_bytes(whole)
    print(f"{len(names)} files, one flipped bit each, seed {SEED}: {len(names) - len(unseen)} seen")
    assert len(names) > 50 and unseen == []


@pytest.mark.plain("config")
@pytest.mark.parametrize("what", ["weights", "config", "deleted", "result.json"])
def test_a_damaged_student_is_not_exported(place, capsys, what):
    name = {"weights": "model.safetensors", "config": "config.json", "deleted": "tokenizer.json"}.get(what)
    path = place / "result.json" if name is None else place / "student" / name
    path.unlink() if what == "deleted" else flip(path, random.Random(what))
    assert run_command(["export", "tiny", "-o", "out"]) == 2
    said = capsys.readouterr().err
    assert path.name in said and "restore the file" in said and said.count("\n") == 1
    assert not (place.parent.parent / "out").exists()


def test_a_damaged_student_is_not_pushed(place, capsys, monkeypatch):
    flip(place / "student/model.safetensors", random.Random(1))
    monkeypatch.setattr("distill.reports.export.push", lambda *_, **__: pytest.fail("it was uploaded"))
    assert run_command(["export", "tiny", "-o", "out", "--push", "me/it"]) == 2
    assert "model.safetensors is damaged" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_not_exported(place, capsys):
    flip(next(place.glob("checkpoint-*")) / "quantised.safetensors", random.Random(2))
    assert run_command(["export", str(next(place.glob("checkpoint-*"))), "-o", "out"]) == 2
    assert "quantised.safetensors is damaged" in capsys.readouterr().err


def test_an_undamaged_student_is_exported_as_it_is(place):
    assert run_command(["export", "tiny", "-o", "out"]) == 0
    ours, theirs = (load_file(at / "model.safetensors") for at in (place.parent.parent / "out", place / "student"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# ------------------------------------------------------------------ the environment's log


REPLIES = {f"{n:032x}": None if n % 3 == 0 else [{"role": "tool", "content": f"It is {n}, é."}] for n in range(5)}


def test_a_flipped_bit_of_the_log_is_never_taken_for_a_reply(tmp_path, caplog):
    """Every bit of a log of five replies: what is read is what was written, or nothing."""
    EnvironmentLog(tmp_path, 0).add(REPLIES)
    file = tmp_path / "environment/00000.jsonl"
    whole = file.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        file.write_bytes(damaged)
        replies, lines = read_replies(file)
        assert all(REPLIES[key] == messages for key, messages in replies.items()), at
        # the case of a letter in "\u00e9" says nothing, and without its end the last line is an unfinished one
        assert lines or replies == REPLIES or at == len(whole) - 1
    EnvironmentLog(tmp_path, 0)
    assert caplog.text == ""  # the unfinished line is cut off
    assert file.read_bytes() == b"".join(whole.splitlines(keepends=True)[:-1])


def test_a_damaged_reply_is_named_and_asked_for_again(tmp_path, caplog):
    EnvironmentLog(tmp_path, 0).add(REPLIES)
    file = tmp_path / "environment/00000.jsonl"
    file.write_bytes(file.read_bytes().replace(b"It is 2", b"It is 3"))
    log = EnvironmentLog(tmp_path, 1)
    assert f"{2:032x}" not in log and log[f"{1:032x}"] == REPLIES[f"{1:032x}"]
    assert "environment/00000.jsonl: line 3 is damaged: its reply is not used" in caplog.text


def test_logs_of_before_there_were_checksums_are_read(tmp_path):
    (tmp_path / "environment").mkdir()
    rows = [{"key": key, "messages": messages} for key, messages in REPLIES.items()]
    (tmp_path / "environment/00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = EnvironmentLog(tmp_path, 0)
    assert all(log[key] == messages for key, messages in REPLIES.items())


@pytest.mark.parametrize("line", [b"[" * 100_000, b"7", b'{"key": 1}', b"\xff\xfe", b"{}"])
def test_a_line_of_anything_else_is_damage(tmp_path, line):
    (tmp_path / "log.jsonl").write_bytes(
        line + b"\n" + json.dumps(with_checksum({"key": "a", "messages": None})).encode() + b"\n"
    )
    assert read_replies(tmp_path / "log.jsonl") == ({"a": None}, [1])


def test_a_log_cut_off_at_any_byte_is_continued(tmp_path):
    """A writer killed at any moment: the next one of its rank goes on after the last whole line."""
    EnvironmentLog(tmp_path, 0).add(REPLIES)
    file = tmp_path / "environment/00000.jsonl"
    whole = file.read_bytes()
    for length in range(0, len(whole), 3):
        file.write_bytes(whole)
        os.truncate(file, length)
        log = EnvironmentLog(tmp_path, 0)
        log.add({key: messages for key, messages in REPLIES.items() if key not in log})
        assert file.read_bytes() == whole, length
