"""Lock on a run's folder: held by all processes of the run, released when the last of them ends.

    with RunLock(folder) as lock:
        lock.acquire()        # rank 0, before it reads or writes anything there
        lock.share(wait)      # every process, once the folder exists
        lock.check()          # raises if the folder was moved or deleted

The lock is an flock on a file in the folder, so it ends with its processes however they end; network disks show it to
all machines. The file names the holder, for messages. On a disk without locks the file alone tells: a run that ended in
order has cleared it, a process of this machine is looked up, and one of another machine counts as alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from distill.core.errors import RunError
from distill.core.files import make_folder, try_lock, unlock
from distill.core.folders import RUN_LOCK
from distill.core.launch import is_running


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
        self._is_ours = False  # whether this process has written its name into the file

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._handle is None:
            return
        if self._is_ours:
            with contextlib.suppress(OSError):
                _write(self._handle, {})  # ended in order
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
        # where the disk has no locks (None), the holder that the file names is all that tells
        locked = try_lock(handle)
        holder = _read(handle)
        if locked is False or (locked is None and _is_alive(holder)):
            # closes the file only: the name in it is that of the other process
            self.__exit__()
            unknown = f", or, if it has ended, delete {self.path}: this disk has no locks" if locked is None else ""
            raise RunError(
                f"{self.folder}: another process writes there{_who(holder)}; wait until it ends, or end it, then start "
                f"this command again{unknown}"
            )
        _write(handle, {"host": socket.gethostname(), "pid": os.getpid(), "since": int(time.time())})
        self._is_ours = True

    def share(self, wait: Callable[[], None] = lambda: None) -> None:
        """Share the lock among all processes of the run, so that it outlives rank 0; every process calls it.

        Args:
            wait: Barrier over the processes of the run.

        Raises:
            RunError: Another run holds it.
        """
        if self._handle is not None:
            try_lock(self._handle, shared=True)
        # Rank 0 makes its exclusive lock a shared one before the barrier; the others take theirs after it, since they
        # would be refused as long as the exclusive one is held.
        wait()
        if self._handle is None:
            if not self.path.exists():  # a machine that does not share the folder
                return
            self._open()
        assert self._handle is not None
        if try_lock(self._handle, shared=True) is False:
            raise RunError(f"{self.folder}: another process has begun to write there{_who(_read(self._handle))}")

    def check(self) -> None:
        """Check that the folder is the one that was locked."""
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


def _write(handle: int, holder: dict[str, object]) -> None:
    os.lseek(handle, 0, os.SEEK_SET)
    # written over and then cut to its length: a reader never finds it empty
    os.truncate(handle, os.write(handle, json.dumps(holder).encode()))


def _read(handle: int) -> dict[str, object]:
    os.lseek(handle, 0, os.SEEK_SET)
    try:
        value = json.loads(os.read(handle, 1024) or b"{}")
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_alive(holder: dict[str, object]) -> bool:
    if holder.get("host") != socket.gethostname():
        return bool(holder)
    return is_running(int(str(holder.get("pid", 0))))


def _who(holder: dict[str, object]) -> str:
    if not holder:
        return ""
    since = holder.get("since")
    begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since)) if isinstance(since, int | float) else "?"
    return f" (process {holder.get('pid')} on {holder.get('host')}, since {begun})"


_open_locks: set[int] = set()


def _close_after_fork() -> None:
    """Release the lock in data workers, which outlive a killed process by some seconds."""
    # an flock is held until the last copy of its descriptor is closed, and a fork copies it
    for handle in _open_locks:
        with contextlib.suppress(OSError):
            os.close(handle)
    _open_locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_after_fork)
