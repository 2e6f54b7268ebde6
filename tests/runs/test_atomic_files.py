"""Atomic writes: what stands at the path, and what may not be replaced."""

import os
import random
import stat
import time

import pytest
import torch
from forked import PIPE, Forked, clean_environment
from safetensors.torch import load_file, save_file

from distill.core.files import atomic_folder, atomic_path, write_text
from distill.core.tensor_files import write_tensors


def test_a_pipe_or_device_is_not_replaced_by_a_file(tmp_path):
    """A file renamed by root would take the place of /dev/null for everything else on the machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="expected a file or a new name, got a device or pipe"):
        write_text(pipe, "text")
    assert stat.S_ISFIFO(pipe.stat().st_mode) and list(tmp_path.iterdir()) == [pipe]


def test_a_file_is_replaced_whole(tmp_path):
    (tmp_path / "a").write_text("before")
    write_text(tmp_path / "a", "after")
    assert (tmp_path / "a").read_text() == "after" and list(tmp_path.iterdir()) == [tmp_path / "a"]


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


def test_a_safetensors_file_has_the_modes_of_the_umask_and_leaves_no_other_file(tmp_path, umask):
    write_tensors(tmp_path / "weights.safetensors", {"a": torch.ones(3)})
    assert stat.S_IMODE((tmp_path / "weights.safetensors").stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["weights.safetensors"]
    assert torch.equal(load_file(tmp_path / "weights.safetensors")["a"], torch.ones(3))


def test_files_that_a_library_writes_into_a_folder_have_the_modes_of_the_umask(tmp_path, umask):
    with atomic_folder(tmp_path / "student") as folder:
        save_file({"a": torch.ones(3)}, folder / "model.safetensors")  # 0600 by itself
        (folder / "sub").mkdir(mode=0o700)
    assert stat.S_IMODE((tmp_path / "student/model.safetensors").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "student/sub").stat().st_mode) == 0o750


def test_a_library_that_renames_its_own_file_over_the_temporary_one_keeps_the_lock(tmp_path):
    """A second writer of the same path must not take the file of the first for one that was left behind."""
    with atomic_path(tmp_path / "f") as first:
        own = first.with_name("own")
        own.write_text("first")
        os.replace(own, first)
        write_text(tmp_path / "f", "second")
        assert first.read_text() == "first"
    assert (tmp_path / "f").read_text() == "first" and os.listdir(tmp_path) == ["f"]


WRITE_FOR_EVER = """
import itertools, sys, torch
from pathlib import Path
from distill.core.tensor_files import write_tensors
print("ready", flush=True)
for value in itertools.count():
    write_tensors(Path(sys.argv[1]), {"a": torch.full((200_000,), float(value))})
"""


def writes(code, path, **streams):
    return Forked(["-c", code, path], cwd=path.parent, env=clean_environment(), **streams)


@pytest.mark.full
def test_a_writer_that_is_killed_leaves_a_whole_file_and_what_the_next_one_removes(tmp_path):
    """Killed at twelve moments, drawn with a seed: the file is one that was written, to the bit."""
    moments, path = random.Random(7), tmp_path / "store" / "w.safetensors"
    path.parent.mkdir()
    for _ in range(12):
        writer = writes(WRITE_FOR_EVER, path, stdout=PIPE)
        assert writer.stdout.readline() == "ready\n"
        time.sleep(moments.uniform(0.002, 0.06))
        writer.kill()
        writer.wait()
        writer.stdout.close()
        if path.exists():
            values = load_file(path)["a"]
            assert len(values) == 200_000 and (values == values[0]).all()
    write_tensors(path, {"a": torch.zeros(2)})
    assert os.listdir(path.parent) == [path.name]


def test_two_processes_write_one_path_at_once(tmp_path):
    """No writer deletes the other's file before it has its name."""
    code = WRITE_FOR_EVER.replace("itertools.count()", "range(150)")
    path = tmp_path / "w.safetensors"
    writers = [writes(code, path) for _ in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert (load_file(path)["a"] == 149).all() and os.listdir(tmp_path) == [path.name]
