"""Machine faults during a run: a full disk, a read-only folder, killed workers, metrics that become NaN.

Each ends with one line that names the cure, and can be resumed where there is a checkpoint.

Full disks are real ones: a file system of a few MiB, mounted by root, and a limit on the size of files.
"""

import errno
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess

import pytest
import torch
from safetensors.torch import load_file
from tiny import save_models

from distill import run_results
from distill.cli import run_command
from distill.training.checkpoints import checkpoints
from distill.training.progress import read_metrics

RECIPE = """
teacher: {model: TEACHER}
student: {from_teacher: {layers: 1}}
data: {source: SOURCE, max_length: 32, validation: {fraction: 0.1, max_rows: 2}}
train: {steps: 6, batch_size: 2, learning_rate: 3e-3, warmup: 0, log_every: 1, save_every: 2, device: cpu}
generate: {prompts: []}
"""
TEXT = "\n".join(f"The teacher explains line {number} and the student listens to it once more." for number in range(40))
KIB = 1024


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Inputs of a run, on another disk than its outputs."""
    folder = tmp_path_factory.mktemp("given")
    save_models(folder, text=TEXT, teacher={"layers": 2, "hidden": 64, "seed": 1})
    recipe = RECIPE.replace("TEACHER", str(folder / "teacher")).replace("SOURCE", str(folder / "text.txt"))
    (folder / "r.yaml").write_text(recipe)
    return folder


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """Mounts a file system of so many KiB as the working directory; resizes it when called again."""
    place, mounted = tmp_path / "disk", []

    def mount(kib, *options):
        place.mkdir(exist_ok=True)
        changed = ["remount"] if mounted else []
        settings = ",".join([*changed, f"size={kib}k", *options])
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", settings, "tmpfs", place], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"needs leave to mount a small disk: {done.stderr.strip()}")
        mounted.append(place)
        monkeypatch.chdir(place)
        return place

    yield mount
    monkeypatch.undo()
    if mounted:
        subprocess.run(["umount", "-l", place], check=True)


def ends_in_one_line(capsys, given, *arguments, says, code=1):
    assert run_command(["run", str(given / "r.yaml"), "--name", "x", *arguments]) == code
    err = capsys.readouterr().err
    assert err.startswith("distill: ") and err.count("\n") == 1, err
    for part in says:
        assert part in err, err


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) // KIB


@pytest.fixture(scope="module")
def whole(given, tmp_path_factory):
    """The same run on a disk with room."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_command(["run", str(given / "r.yaml"), "--name", "x"]) == 0
    return folder / "runs/x"


def same_end(folder, whole):
    """The run ended as the undisturbed one did."""
    ours, theirs = (load_file(path / "student/model.safetensors") for path in (folder, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    losses = [[(row["step"], row["loss"]) for row in read_metrics(path / "metrics.jsonl")] for path in (folder, whole)]
    assert losses[0] == losses[1]


@pytest.mark.full
def test_a_disk_that_fills_up_at_a_checkpoint(disk, given, whole, capsys):
    one = size_of(whole / "checkpoint-6")
    place = disk(2 * one + one // 2)  # two checkpoints and half of the third
    ends_in_one_line(capsys, given, says=["the disk is full", "make room", "checkpoint-4 with --resume"])
    assert [path.name for path in checkpoints(place / "runs/x")] == ["checkpoint-2", "checkpoint-4"]
    disk(20 * one)
    assert run_command(["run", str(given / "r.yaml"), "--name", "x", "--resume"]) == 0
    assert ".unfinished/checkpoint-6 is unfinished" in capsys.readouterr().out
    same_end(place / "runs/x", whole)


@pytest.mark.plain("4")
@pytest.mark.parametrize("kib", [4, 8, 12, 16, 24, 40])
def test_a_disk_that_is_full_from_the_start(disk, given, whole, kib, capsys):
    """The cure in the message works: start again, or --resume where the run has begun and --name would refuse."""
    place = disk(kib)
    assert run_command(["run", str(given / "r.yaml"), "--name", "x"]) == 1
    err = capsys.readouterr().err
    assert "the disk is full" in err and err.count("\n") == 1, err
    again = ["--resume"] if "then start again with --name x --resume" in err else []
    assert again or err.endswith("then start again\n")
    disk(20 * size_of(whole))
    assert run_command(["run", str(given / "r.yaml"), "--name", "x", *again]) == 0
    same_end(place / "runs/x", whole)


@pytest.mark.full
def test_a_disk_that_fills_up_at_the_very_end(disk, given, whole, capsys, fault):
    place = disk(20 * size_of(whole))
    save, disk_left = run_results.save_student, size_of(whole / "checkpoint-6") // 3

    def fill_then_save(*arguments, **more):
        with (place / "filler").open("wb") as filler:
            filler.write(b"\0" * (shutil.disk_usage(place).free - disk_left * KIB))
        return save(*arguments, **more)

    with fault.context() as fault:
        fault.setattr(run_results, "save_student", fill_then_save)
        ends_in_one_line(capsys, given, says=["the disk is full", "checkpoint-6 with --resume"])
    assert not (place / "runs/x/student").exists()
    (place / "filler").unlink()
    assert run_command(["run", str(given / "r.yaml"), "--name", "x", "--resume"]) == 0
    same_end(place / "runs/x", whole)


def test_a_disk_too_small_for_the_tokens(disk, given, tmp_path, monkeypatch, capsys):
    cache = disk(8)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISTILL_CACHE", str(cache))
    ends_in_one_line(capsys, given, says=["data.cache", "the disk is full", "DISTILL_CACHE"])
    assert list(cache.iterdir()) == [] and not (tmp_path / "runs").exists()


def test_the_disk_that_is_full_is_named(disk, given, tmp_path, monkeypatch, capsys, at_step):
    """The teacher's outputs go to another disk than the run: that one is full, and its library names no file."""
    small = disk(1000)
    monkeypatch.chdir(tmp_path)
    says = [f"{small}/kept: the disk is full ({small} has 0.0 GiB free); make room there"]
    at_step(0, lambda arguments: (small / "filler").write_bytes(b"\0" * shutil.disk_usage(small).free))
    ends_in_one_line(capsys, given, f"teacher.online_cache={small}/kept", "train.steps=2", says=says)


def test_a_disk_that_is_read_only(disk, given, capsys):
    disk(4000, "ro")
    says = ["the disk is read-only; make it writable, or start in another folder", "runs"]
    ends_in_one_line(capsys, given, says=says)


@pytest.mark.full
def test_files_that_may_not_grow(given, whole, tmp_path, monkeypatch, capsys):
    """The same without root: the system refuses files beyond a size."""
    monkeypatch.chdir(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    weights = (whole / "checkpoint-6/model.safetensors").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (weights + 4 * KIB, limits[1]))  # weights fit, the optimizer does not
    try:
        ends_in_one_line(capsys, given, says=["larger than this system allows (ulimit -f)", "--name x --resume"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoints(tmp_path / "runs/x") == []
    assert run_command(["run", str(given / "r.yaml"), "--name", "x", "--resume"]) == 0
    assert "no checkpoint yet: starting at step 0" in capsys.readouterr().out
    same_end(tmp_path / "runs/x", whole)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o500)
    try:
        ends_in_one_line(capsys, given, says=["access is not permitted", "runs"])
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_that_the_system_refuses(given, tmp_path, monkeypatch, capsys):
    """For root, who may write anywhere: the refusal itself is made."""
    monkeypatch.chdir(tmp_path)

    def refuse(path, *arguments, **more):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    ends_in_one_line(capsys, given, "data.cache=false", says=["access is not permitted"])


# ------------------------------------------------------------------ processes that die


def kill_children():
    """kill -9 of every process that this one started through multiprocessing."""
    children = multiprocessing.active_children()
    for child in children:
        os.kill(child.pid, signal.SIGKILL)
    return len(children)


def test_a_data_worker_that_dies(given, whole, tmp_path, monkeypatch, capsys, at_step):
    monkeypatch.chdir(tmp_path)
    killed = []
    at_step(3, lambda arguments: killed.append(kill_children()))
    # so little is prefetched that the worker is missed
    more = ("data.workers=1", "train.arguments={dataloader_prefetch_factor: 1}", "train.steps=40")
    says = ["a data worker died", "lower data.workers (now 1)", "then continue from runs/x/checkpoint-"]
    ends_in_one_line(capsys, given, *more, says=says)
    assert killed[0] >= 1


def test_a_tokenising_process_that_dies(given, tmp_path, monkeypatch, capsys, fault):
    from distill.data import documents

    monkeypatch.chdir(tmp_path)
    in_batches = documents.row_batches

    def killing(rows):
        for batch in in_batches(rows):
            yield batch
            assert kill_children() == 1  # it has the batch by now

    fault.setattr(documents, "row_batches", killing)
    ends_in_one_line(
        capsys,
        given,
        "data.cache=false",
        "data.workers=2",
        says=["a tokenising process died", "lower data.workers (now 2)"],
    )
    assert not (tmp_path / "runs").exists()


# ------------------------------------------------------------------ numbers that are none


def test_losses_that_are_no_numbers_stop_the_run_with_the_batch(given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    more = ("train.learning_rate=1e30", "train.schedule=constant", "train.steps=30", "train.save_every=5")
    says = ["stopped at step 11", "NaN or infinite 10 steps in a row", "the last batch is in", "continue from"]
    ends_in_one_line(capsys, given, *more, says=says)  # the first step is sound, and makes weights of 1e30
    saved = load_file(tmp_path / "runs/x/not-finite-step-11.safetensors")
    assert saved["input_ids.0"].shape[0] == 2
    lines = (tmp_path / "runs/x/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [row.get("skipped_steps", 0) for row in rows] == list(range(10))
    kept = [load_file(path / "model.safetensors") for path in checkpoints(tmp_path / "runs/x")]
    assert len(kept) == 2 and all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])
    assert all(torch.isfinite(weight).all() for weight in kept[0].values())
