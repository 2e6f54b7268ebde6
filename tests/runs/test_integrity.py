"""Integrity of files: flipped bits and missing files are detected; files survive a power cut."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from forked import clean_environment
from forked import run as run_forked
from safetensors.torch import load_file, save_file
from test_resume import RECIPE, WHOLE, figures
from transformers import PreTrainedModel

from distill.cli import run_command
from distill.core.files import atomic_folder, atomic_path, write_text
from distill.core.manifest import MANIFEST
from distill.recipe import parse
from distill.teachers.backends.stored.store import Store
from distill.training.checkpoints import checkpoint_error

ROOT = Path(__file__).resolve().parents[2]


# a run with checkpoint-2 and checkpoint-4, and a cache of its teacher
COMMANDS = [*WHOLE["run"], "cache r.yaml --top-k 8 --tail bucket --out said --json"]
pytestmark = pytest.mark.place(**WHOLE | {"tokens": 260, "run": COMMANDS})


def flip(path, where=0.5):
    """Turn one bit over."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * where)] ^= 4
    path.write_bytes(content)


# ------------------------------------------------------------------ checkpoints

NAMES = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "config.json"]


@pytest.mark.parametrize("name", NAMES)
def test_one_flipped_bit_of_a_checkpoint_is_seen(finished, tmp_path, name):
    folder = shutil.copytree(finished / "runs/whole/checkpoint-4", tmp_path / "checkpoint-4")
    assert checkpoint_error(folder) is None
    flip(folder / name, 0.9)
    assert name in (checkpoint_error(folder) or "")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "config.json"])
@pytest.mark.parametrize("with_manifest", [True, False])
def test_a_file_that_is_missing_is_seen_without_a_manifest_too(finished, tmp_path, name, with_manifest):
    folder = shutil.copytree(finished / "runs/whole/checkpoint-4", tmp_path / "checkpoint-4")
    (folder / name).unlink()
    if not with_manifest:
        (folder / MANIFEST).unlink()
    assert checkpoint_error(folder)


def spoil_weights(folder):
    weights = load_file(folder / "model.safetensors")
    next(iter(weights.values())).view(-1)[3] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def empty_optimizer(folder):
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    torch.save({**state, "state": {}}, folder / "optimizer.pt")


@pytest.mark.parametrize("spoil, says", [(spoil_weights, "is not finite"), (empty_optimizer, "no optimizer moments")])
def test_damage_without_a_manifest_is_found_in_the_contents(finished, tmp_path, spoil, says):
    folder = shutil.copytree(finished / "runs/whole/checkpoint-4", tmp_path / "checkpoint-4")
    (folder / MANIFEST).unlink()
    spoil(folder)
    assert says in (checkpoint_error(folder) or "")


@pytest.mark.full
def test_the_newest_checkpoint_that_is_as_written_is_used(workplace, finished, capsys):
    flip(workplace / "runs/whole/checkpoint-4/model.safetensors", 0.9)
    assert run_command(["verify", "whole"]) == 1
    assert "DAMAGED  checkpoint-4        model.safetensors is damaged: its checksum" in capsys.readouterr().out
    assert run_command(["run", "r.yaml", "--name", "whole", "--resume"]) == 0
    out = capsys.readouterr().out
    assert "runs/whole/checkpoint-4 cannot be used: model.safetensors is damaged" in out
    assert "continuing from runs/whole/checkpoint-2" in out
    assert figures(workplace / "runs/whole") == figures(finished / "runs/whole")
    assert run_command(["verify", "whole"]) == 0


@pytest.mark.full
def test_a_checkpoint_without_a_manifest_is_used_only_unverified(workplace, finished, capsys):
    resume = ["run", "r.yaml", "--name", "whole", "--resume"]
    (workplace / "runs/whole/checkpoint-4" / MANIFEST).unlink()
    assert run_command(resume) == 0
    said = capsys.readouterr().out
    assert "runs/whole/checkpoint-4 cannot be used: it has no manifest.json to verify it against" in said
    assert "continuing from runs/whole/checkpoint-2" in said
    for folder in (workplace / "runs/whole").glob("checkpoint-*"):
        (folder / MANIFEST).unlink()
    assert run_command(resume) == 1
    said = capsys.readouterr().err
    assert (
        "checkpoint-2 cannot be used: it has no manifest.json" in said and "--unverified loads it all the same" in said
    )
    assert run_command([*resume, "--unverified"]) == 0
    assert "runs/whole/checkpoint-4 has no manifest.json: its contents are not verified" in capsys.readouterr().out
    assert figures(workplace / "runs/whole") == figures(finished / "runs/whole")
    assert run_command(["run", "r.yaml", "--unverified"]) == 2
    assert "--unverified: expected together with --resume" in capsys.readouterr().err


@pytest.mark.full
def test_checkpoints_that_lost_their_state_do_not_mean_a_fresh_start(workplace, finished, capsys):
    (workplace / "runs/whole/checkpoint-4/trainer_state.json").unlink()
    assert run_command(["verify", "whole"]) == 1
    assert "DAMAGED  checkpoint-4        trainer_state.json cannot be read" in capsys.readouterr().out
    assert run_command(["run", "r.yaml", "--name", "whole", "--resume"]) == 0
    said = capsys.readouterr().out
    assert "runs/whole/checkpoint-4 cannot be used: trainer_state.json cannot be read (FileNotFoundError" in said
    assert "continuing from runs/whole/checkpoint-2" in said
    assert figures(workplace / "runs/whole") == figures(finished / "runs/whole")
    for path in (workplace / "runs/whole").glob("checkpoint-*/trainer_state.json"):
        path.unlink()
    before = (workplace / "runs/whole/metrics.jsonl").read_bytes()
    assert run_command(["run", "r.yaml", "--name", "whole", "--resume"]) == 1
    said = capsys.readouterr()
    assert "move these folders away to start again at step 0" in said.err and "starting at step 0" not in said.out
    assert (workplace / "runs/whole/metrics.jsonl").read_bytes() == before


def test_a_checkpoint_that_lacks_a_weight_is_not_gone_on_from(workplace, capsys):
    for folder in (workplace / "runs/whole").glob("checkpoint-*"):
        (folder / MANIFEST).unlink()
        weights = load_file(folder / "model.safetensors")
        name = next(name for name in weights if "mlp" in name)
        save_file({k: v for k, v in weights.items() if k != name}, folder / "model.safetensors", {"format": "pt"})
    assert run_command(["run", "r.yaml", "--name", "whole", "--resume", "--unverified", "train.save_every=null"]) == 1
    assert f"checkpoint-4: its files lack {name}, " in capsys.readouterr().err


def test_rows_that_would_come_twice_are_refused():
    with pytest.raises(ValueError, match=r"train\.arguments\.ignore_data_skip: expected false, since a resumed"):
        parse(RECIPE, ["train.arguments={ignore_data_skip: true}"])


@pytest.mark.full
def test_metrics_of_other_types_are_left_out_of_the_report(workplace):
    path = workplace / "runs/whole/metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": "low", "kl": [1]}\n' + path.read_bytes() + b'{"step": true}\n[]\n\xff\n')
    assert run_command(["report", "whole"]) == 0


# ------------------------------------------------------------------ caches


def test_every_flipped_bit_of_a_cache_is_seen(workplace, capsys):
    assert run_command(["verify", "said"]) == 0
    shard = next(Path("said").glob("shard-*.safetensors"))
    whole = shard.read_bytes()
    for place in (0.02, 0.3, 0.6, 0.9, 0.999):
        flip(shard, place)
        capsys.readouterr()
        assert run_command(["verify", "said"]) == 1, place
        assert "damaged" in capsys.readouterr().out
        shard.write_bytes(whole)
    assert run_command(["verify", "said"]) == 0


def test_a_run_is_not_taught_by_what_was_not_written(workplace, capsys):
    for shard in Path("said").glob("shard-*.safetensors"):
        content = bytearray(shard.read_bytes())
        header = 8 + int.from_bytes(content[:8], "little")
        start, end = json.loads(content[8:header])["logprobs"]["data_offsets"]
        for position in range(header + start, header + end, 64):
            content[position] ^= 1
        shard.write_bytes(content)
    assert run_command(["run", "r.yaml", "teacher={type: cache, path: said}", "--name", "taught"]) == 2
    err = capsys.readouterr().err
    assert "is damaged: document" in err and err.count("\n") == 1, err


@pytest.mark.parametrize("text", ["[]", "{", '{"version": 1}', '{"version": 1, "shards": 5}'])
def test_a_manifest_of_other_types_is_a_line(workplace, text):
    (workplace / "said/manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"damaged"):
        Store("said")


# ------------------------------------------------------------------ written once


def test_a_file_is_whole_or_absent_and_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace
    name_of = "/proc/self/fd/{}".format
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append(os.readlink(name_of(handle))), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *pair: (done.append("renamed"), replace(*pair)))
    write_text(tmp_path / "a", "text")
    assert len(done) == 3 and done[1:] == ["renamed", str(tmp_path)] and done[0].startswith(str(tmp_path / ".a."))
    done.clear()
    with atomic_folder(tmp_path / "deep/er") as beside:
        (beside / "inner").mkdir()
        (beside / "inner/file").write_text("x")
    names = [Path(name).name for name in done]
    assert done[:2] == [str(tmp_path / "deep"), str(tmp_path)] or str(tmp_path) in done[:2], "the parents last too"
    assert {"file", "inner"} <= set(names[: names.index("renamed")]) and names[-1] == "deep"


def test_a_writer_that_fails_leaves_what_was_there(tmp_path):
    (tmp_path / "f").write_text("old")
    with pytest.raises(RuntimeError), atomic_path(tmp_path / "f") as beside:
        beside.write_text("half")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["f"] and (tmp_path / "f").read_text() == "old"


def test_files_of_a_killed_writer_are_removed_and_no_others(tmp_path):
    (tmp_path / "f.unfinished").write_text("a person's")
    (tmp_path / ".f.abc.unfinished").write_text("left")
    with (
        atomic_path(tmp_path / "f") as one,
        atomic_path(tmp_path / "f") as two,
    ):  # the other one lives: it is left alone
        assert one.parent.exists() and two.parent.exists() and not (tmp_path / ".f.abc.unfinished").exists()
        one.write_text("1")
        two.write_text("2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "f.unfinished"]


def test_names_as_long_as_names_can_be(tmp_path):
    write_text(tmp_path / ("x" * 255), "text")
    assert (tmp_path / ("x" * 255)).read_text() == "text"


def test_everything_of_a_run_is_written_so(workplace, monkeypatch):
    """student/, lock.yaml, recipe.yaml and result.json, and the folders above them."""
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda handle: synced.add(Path(os.readlink(f"/proc/self/fd/{handle}"))))
    assert run_command(["run", "r.yaml", "--name", "safe", "train.save_every=null"]) == 0
    run = workplace / "runs/safe"
    names = {path.stem for path in synced if path.parent.parent == run and path.parent.name.endswith(".unfinished")}
    assert {"student", "lock", "recipe", "result", "before", "metrics"} <= names
    assert {run, run.parent} <= synced


# ------------------------------------------------------------------ exports


def test_an_export_deletes_nothing_of_a_persons(workplace):
    Path("mine.unfinished").mkdir()
    (Path("mine.unfinished") / "thesis.txt").write_text("years of work")
    assert run_command(["export", "whole", "-o", "mine"]) == 0
    assert (Path("mine.unfinished") / "thesis.txt").read_text() == "years of work"


def test_two_exports_into_one_folder_are_a_line(workplace, monkeypatch, capsys):
    save = PreTrainedModel.save_pretrained

    def another_is_first(model, folder, **settings):
        Path("out").mkdir()
        (Path("out") / "config.json").write_text("{}")
        return save(model, folder, **settings)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", another_is_first)
    assert run_command(["export", "whole", "-o", "out"]) == 2
    err = capsys.readouterr().err
    assert "--output: out exists and is not an empty folder" in err and err.count("\n") == 1
    assert not list(Path().glob("*.unfinished"))


def test_an_export_that_was_killed_can_be_made_again(workplace, monkeypatch):
    """The export is killed while the GGUF file is written."""
    code = (
        "import os, distill.reports.gguf_file as g\n"
        "g._check = lambda *a: os.kill(os.getpid(), 9)\n"
        "from distill.cli import run_command\n"
        "run_command(['export', 'whole', '-o', 'out', '--gguf', 'f32'])"
    )
    killed = run_forked(["-c", code], cwd=workplace, env=clean_environment())
    assert killed.returncode == -9 and not Path("out").exists(), killed.stderr
    assert list(Path().glob(".out.*.unfinished"))
    assert run_command(["export", "whole", "-o", "out"]) == 0
    assert not list(Path().glob(".out.*.unfinished"))


# ------------------------------------------------------------------ one line


def test_a_full_disk_is_a_line_whatever_writes(workplace, monkeypatch, capsys):
    def full(*args, **kwargs):
        raise RuntimeError(f"Error while serializing: I/O error: {os.strerror(errno.ENOSPC)} (os error 28)")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    assert run_command(["export", "whole", "-o", "out"]) == 1
    assert capsys.readouterr().err == "distill: the disk is full\n"


@pytest.mark.plain("0.0")
@pytest.mark.parametrize("wait", [0.0, 0.1, 0.3])
def test_an_early_ctrl_c_shows_no_trace(workplace, wait):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    code = "import distill.__main__ as m, sys; print('up', flush=True); sys.argv[1:] = ['run', 'r.yaml']; m.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "up\n"
    time.sleep(wait)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=120)[1]
    assert process.returncode == 130 and "Traceback" not in err, err
    assert json.loads((workplace / "runs/whole/result.json").read_text())["steps"] == 4
