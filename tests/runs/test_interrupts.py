"""A Ctrl-C is heard whatever was being done: imports that swallow exceptions, finalizers that drop them."""

import importlib
import os
import signal
import subprocess
import sys
import time

import pytest

from distill.core.interrupts import DeferredInterrupt

SWALLOWS = """
import os, signal
try:
    for _ in range({presses}):
        os.kill(os.getpid(), signal.SIGINT)
    done = False
    done = True
except BaseException:
    pass
"""


@pytest.fixture
def heeding():
    before = signal.signal(signal.SIGINT, DeferredInterrupt())
    yield
    signal.signal(signal.SIGINT, before)


def waits_to_hear():
    """Wait until the process handles the signal; what follows ends within a second unless it is ignored."""
    with pytest.raises(KeyboardInterrupt):
        time.sleep(1)


def run_python(code, folder):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_interrupt_in_an_import_that_swallows_it_is_heeded(heeding, tmp_path, monkeypatch):
    (tmp_path / "swallows_ctrl_c.py").write_text(SWALLOWS.format(presses=1))
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("swallows_ctrl_c").done
    waits_to_hear()


@pytest.mark.full
def test_interrupt_in_a_finalizer_is_heeded(heeding):
    class Ends:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)

    Ends()
    waits_to_hear()


def test_elsewhere_at_once_and_each_time(heeding):
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_pressed_again_in_an_import_it_leaves_at_once(tmp_path):
    (tmp_path / "swallows_ctrl_c.py").write_text(SWALLOWS.format(presses=2))
    code = (
        "import signal; from distill.core import interrupts as i; signal.signal(signal.SIGINT, i.DeferredInterrupt())"
    )
    left = run_python(f"{code}; import swallows_ctrl_c; print('went on')", tmp_path)
    assert (left.returncode, left.stdout) == (130, "")


def test_a_command_that_an_import_runs_hears_it_at_once(tmp_path):
    (tmp_path / "whole_command.py").write_text(
        "import os, signal\nfrom distill.core.interrupts import DeferredInterrupt\n"
        "signal.signal(signal.SIGINT, DeferredInterrupt())\nos.kill(os.getpid(), signal.SIGINT)"
    )
    left = run_python("import whole_command", tmp_path)
    assert "KeyboardInterrupt" in left.stderr and "line 4" in left.stderr
