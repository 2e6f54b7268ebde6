"""A run of CI that ends, however it ends, leaves no process and no scratch folder behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# what stages start: a child, one that `timeout` puts into another group, one in a session of its own whose parent has
# gone, one that ignores SIGTERM
STAGES = """
scratch=$(mktemp -d -p "$PWD"); trap 'rm -rf "$scratch"' EXIT
sleep 301 &
timeout 302 sleep 302 &
(setsid sleep 303 &)
(trap '' TERM; exec sleep 304) &

sleep 305
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def sleeping(folder: Path) -> set[str]:
    """The sleepers whose working directory is this folder."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_text().split("\0")
                if words[0] == "sleep" and os.readlink(entry / "cwd") == str(folder):
                    found.add(words[1])
            except OSError:
                continue
    return found


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.plain("15-143")
@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_signal_ends_every_process_that_was_started(number, status, tmp_path):
    supervise = (ROOT / ".ci" / "supervise.py").read_text().replace("PATIENCE = 10.0", "PATIENCE = 1.0")
    (tmp_path / "supervise.py").write_text(supervise)
    run = subprocess.Popen([sys.executable, "supervise.py", "bash", "-c", STAGES], cwd=tmp_path)
    wait_until(lambda: sleeping(tmp_path) == {"301", "302", "303", "304", "305"})
    os.kill(run.pid, number)
    assert run.wait(30) == status
    wait_until(lambda: not sleeping(tmp_path))
    wait_until(lambda: not list(tmp_path.glob("tmp.*")))


@pytest.mark.plain("exit 0-0")
@pytest.mark.parametrize("ending, status", [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
def test_the_status_is_the_commands_and_what_it_left_running_is_ended(ending, status, tmp_path):
    command = ["bash", "-c", f"(setsid sleep 306 &); sleep 0.2; {ending}"]
    run = subprocess.run([sys.executable, ROOT / ".ci" / "supervise.py", *command], cwd=tmp_path, timeout=60)
    assert run.returncode == status
    assert sleeping(tmp_path) == set()


@pytest.mark.full
def test_an_orphan_that_ends_does_not_stay_a_zombie(tmp_path):
    lines = "bash -c 'sleep 0.2 & echo $! > orphan; kill -9 $$'; sleep 1; test ! -e /proc/$(cat orphan)"
    command = [sys.executable, ROOT / ".ci" / "supervise.py", "bash", "-c", lines]
    assert subprocess.run(command, cwd=tmp_path, timeout=60).returncode == 0


def test_ci_runs_below_the_supervisor():
    assert 'exec "${PYTHON:-python3}" .ci/supervise.py bash .ci/run stages' in (ROOT / ".ci" / "run").read_text()
