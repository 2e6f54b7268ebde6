"""Ctrl-C that is raised only where Python does not swallow it.

A `KeyboardInterrupt` within an import or a `__del__` may be swallowed, so that the command goes on, or surface as
another exception (a `RecursionError`, where numpy writes its docstrings).
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

WAIT = 0.05  # seconds until the next attempt
EXIT_CODE = 130


class RunStopped(SystemExit):
    """End of a run by a signal, from where it can be continued."""


@contextlib.contextmanager
def stop_run_on_sigterm(doing: str) -> Iterator[None]:
    """Raise `RunStopped` on SIGTERM in the block, so that temporary files are deleted and the command is told.

    Args:
        doing: What the run is doing, for the line that is printed.

    Raises:
        RunStopped: SIGTERM came; its code is 143.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    process = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a worker that was forked in the block ends without a word
            os._exit(128 + number)
        print(f"stopped by SIGTERM while {doing}", flush=True)
        raise RunStopped(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class DeferredInterrupt:
    """Handler of SIGINT that raises `KeyboardInterrupt` once running imports and finalizers have ended.

    A second Ctrl-C while the first one waits exits the process at once, with exit code 130.
    """

    def __init__(self) -> None:
        self.outermost = sys._getframe(1)  # the caller may itself be an import that lasts as long as the command
        self.waits = False
        self.is_own = False  # the next signal is the deferred one, sent by this process

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; Python calls it in the main thread.

        Raises:
            KeyboardInterrupt: No import or finalizer is running.
        """
        if self.waits and not self.is_own:
            os._exit(EXIT_CODE)
        self.is_own = False
        self.waits = self._in_import_or_finalizer(frame)
        if not self.waits:
            raise KeyboardInterrupt
        _thread.start_new_thread(self._again, ())  # threading's locks may be held by the interrupted code

    def _again(self) -> None:
        time.sleep(WAIT)
        self.is_own = True
        _thread.interrupt_main()

    def _in_import_or_finalizer(self, frame: FrameType | None) -> bool:
        """Return whether an exception would pass through an import or be dropped by a finalizer."""
        while frame is not None and frame is not self.outermost:
            code = frame.f_code
            if code.co_name == "__del__" or code.co_filename.startswith("<frozen importlib"):
                return True
            frame = frame.f_back
        return False
