"""Atomic writes: what stands at the path, and what may not be replaced."""

import os
import stat

import pytest

from distill.core.files import write_text


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
