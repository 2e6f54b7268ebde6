"""Lock on a run's folder: held by all processes of the run, released when the last of them ends.

    with RunLock(folder) as lock:
        lock.acquire()        # rank 0, before it reads or writes anything there
        lock.share(wait)      # every process, once the folder exists
        lock.check()          # raises if the folder was moved or deleted

The lock is an flock on a file in the folder, so it ends with its processes however they end. A network disk may not
show the lock of another machine: the file therefore names the holder, with a counter that goes up every few seconds;
a file of another machine whose counter stands still belongs to a run that ended.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from distill.core.errors import RunError
from distill.core.files import make_folder, try_lock, unlock
from distill.core.folders import RUN_LOCK

BEAT_S = 5.0
POSITIONS = hasattr(os, "pwrite")  # not on Windows
SIZE = 512  # bytes of the file: rewritten in place, so that a full disk cannot stop it


def now() -> str:
    """Return the time in UTC to the second, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class RunLock:
    """Lock on the run in `folder`; released where the `with` block ends, at the latest with the process."""

    latest: ClassVar[Path | None] = None  # the folder of this process's run

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started = now()
        self.path = folder / RUN_LOCK
        self._handle: int | None = None
        self._since = 0
        self._ends = threading.Event()
        self._beats: threading.Thread | None = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self._ends.set()
        if self._handle is None:
            return
        if self._beats is not None:
            self._beats.join()
            with contextlib.suppress(OSError):
                _write(self._handle, b"{}")  # ended in order
        unlock(self._handle)
        os.close(self._handle)
        _open_locks.discard(self._handle)
        self._handle = None

    def acquire(self) -> None:
        """Acquire the lock on the folder, which is made if it does not exist.

        Raises:
            RunError: Another process holds it; the message names it.
        """
        make_folder(self.folder)
        self._open()
        handle = self._handle
        assert handle is not None
        locked = try_lock(handle)
        before = _read(handle)
        if locked is False or (before and _is_alive(self.path, before, locked)):
            self.__exit__()
            raise RunError(
                f"{self.folder}: another process writes there{_who(before)}; wait until it ends, or end it, then start "
                "this command again"
            )
        self._since = int(time.time())
        self._write(0)
        self._beats = threading.Thread(target=self._count, daemon=True, name="run lock")
        self._beats.start()

    def share(self, wait: Callable[[], None] = lambda: None) -> None:
        """Share the lock among all processes of the run, so that it outlives rank 0; every process calls it.

        Args:
            wait: Barrier over the processes of the run.

        Raises:
            RunError: Another run holds it.
        """
        if self._handle is not None:
            try_lock(self._handle, shared=True)
        wait()
        if self._handle is None:
            if not self.path.exists():  # a machine that does not share the folder
                return
            self._open()
        assert self._handle is not None
        if try_lock(self._handle, shared=True) is False:
            raise RunError(f"{self.folder}: another process has begun to write there{_who(_read(self._handle))}")

    def check(self) -> None:
        """Check that the folder is the one that was locked.

        Raises:
            RunError: It was deleted or moved.
        """
        if self._handle is None:
            return
        ours = os.fstat(self._handle)
        try:
            there: os.stat_result | None = os.stat(self.path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            raise RunError(
                f"{self.folder}: the folder was deleted or moved during the run, which ends here because its outputs "
                "would be lost"
            )

    def _open(self) -> None:
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        RunLock.latest = self.folder
        _open_locks.add(self._handle)

    def _write(self, beat: int) -> None:
        assert self._handle is not None
        who = {"host": socket.gethostname(), "pid": os.getpid(), "since": self._since, "beat": beat}
        _write(self._handle, json.dumps(who).encode())

    def _count(self) -> None:
        for beat in itertools.count(1):
            if self._ends.wait(BEAT_S):
                return
            with contextlib.suppress(OSError):
                self._write(beat)


def _write(handle: int, text: bytes) -> None:
    if POSITIONS:
        os.pwrite(handle, text.ljust(SIZE), 0)
    else:
        os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, text.ljust(SIZE))


def _read(handle: int) -> dict[str, object]:
    """Return the holder that the file names; empty where it names none."""
    try:
        if POSITIONS:
            text = os.pread(handle, SIZE, 0)
        else:
            os.lseek(handle, 0, os.SEEK_SET)
            text = os.read(handle, SIZE)
        value = json.loads(text.decode() or "{}")
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_alive(path: Path, before: dict[str, object], locked: bool | None) -> bool:
    """Return whether a holder unknown to the system's lock is alive: on another machine, or without locks."""
    if locked and before.get("host") == socket.gethostname():
        return False
    until = time.monotonic() + 3 * BEAT_S
    while time.monotonic() < until:
        time.sleep(BEAT_S / 10)
        handle = os.open(path, os.O_RDONLY)  # a network disk refreshes a file when it is opened
        try:
            now = _read(handle)
        finally:
            os.close(handle)
        if now != before:
            return bool(now)
    return False


def _who(holder: dict[str, object]) -> str:
    if not holder:
        return ""
    since = holder.get("since")
    begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since)) if isinstance(since, int | float) else "?"
    return f" (process {holder.get('pid')} on {holder.get('host')}, since {begun})"


_open_locks: set[int] = set()


def _close_after_fork() -> None:
    """Release the lock in data workers, which outlive a killed process by some seconds."""
    for handle in _open_locks:
        with contextlib.suppress(OSError):
            os.close(handle)
    _open_locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_after_fork)
