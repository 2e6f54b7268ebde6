"""Ctrl-C, raised only where it is heard.

A `KeyboardInterrupt` within an import or a `__del__` may be swallowed, and the command goes on as if nobody had
pressed anything, or come out as another fault (a `RecursionError`, where numpy writes its docstrings).
"""

from __future__ import annotations

import _thread
import os
import sys
import time
from types import FrameType

WAIT = 0.05  # seconds until it is tried again
EXIT_CODE = 130


class Interrupts:
    """A handler of SIGINT: raises `KeyboardInterrupt`, once the imports and finalizers under way have ended.

    Pressed again while one waits, the process leaves at once, with exit code 130.
    """

    def __init__(self) -> None:
        self.outermost = sys._getframe(1)  # what calls this one may be an import that lasts as long as the command
        self.waits = False
        self.is_own = False  # the signal that comes next is the one that waited

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Called by Python in the main thread.

        Raises:
            KeyboardInterrupt: Where it is heard.
        """
        if self.waits and not self.is_own:
            os._exit(EXIT_CODE)
        self.is_own = False
        self.waits = self._is_deaf(frame)
        if not self.waits:
            raise KeyboardInterrupt
        _thread.start_new_thread(self._again, ())  # threading's locks may be held by what was interrupted

    def _again(self) -> None:
        time.sleep(WAIT)
        self.is_own = True
        _thread.interrupt_main()

    def _is_deaf(self, frame: FrameType | None) -> bool:
        """Whether an exception would pass through an import, or be dropped by a finalizer."""
        while frame is not None and frame is not self.outermost:
            code = frame.f_code
            if code.co_name == "__del__" or code.co_filename.startswith("<frozen importlib"):
                return True
            frame = frame.f_back
        return False
