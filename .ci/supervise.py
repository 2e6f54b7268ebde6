"""Run a command, and end every process that it started when it ends, or when this program is ended.

    python .ci/supervise.py COMMAND [ARGUMENT ...]

A process group or a session would miss those who leave it (`timeout`, torchrun, servers started in sessions of their
own). So the command runs below a process that Linux makes the parent of all its orphans (PR_SET_CHILD_SUBREAPER), which
ends its descendants one by one; the kernel sends it SIGTERM should this program die without a chance to (SIGKILL).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE = 10.0  # seconds between SIGTERM and SIGKILL


def descendants(ancestor: int) -> list[int]:
    """Return the processes that `ancestor` or one of its descendants started and that still run."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:  # it has ended meanwhile
                continue
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    found = [ancestor]
    for process in found:
        found += children.get(process, [])
    return found[1:]


def send(number: int) -> bool:
    """Send a signal to all descendants of this process; return whether there were any."""
    there = descendants(os.getpid())
    for process in there:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue
    return bool(there)


def end_descendants() -> None:
    """End all descendants of this process: SIGTERM, and SIGKILL for those that are still there after `PATIENCE`."""
    deadline = time.monotonic() + PATIENCE
    send(signal.SIGTERM)
    while descendants(os.getpid()) and time.monotonic() < deadline:
        time.sleep(0.1)
    while send(signal.SIGKILL):
        time.sleep(0.1)


def wait_for(process: int) -> int:
    """Return the status of `process`, waiting meanwhile for the orphans that this process was made the parent of.

    An orphan that nobody waits for stays a zombie when it has ended, and those who watch it take it for a running one.
    """
    while True:
        ended, status = os.wait()
        if ended == process:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def supervise(command: list[str], parent: int) -> int:
    """Run the command and end what it leaves behind; return its status. `parent`: the process to end with."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended before it could be heard
        return 128 + signal.SIGTERM
    for number in ENDING:
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        return wait_for(subprocess.Popen(command).pid)
    finally:
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        end_descendants()


def main(command: list[str]) -> int:
    """Run the command below a supervisor, pass signals on to it, and return its status."""
    own = os.getpid()
    for number in ENDING:  # until there is a supervisor to pass them on to
        signal.signal(number, signal.SIG_DFL)
    supervisor = os.fork()
    if not supervisor:
        os.setpgid(0, 0)  # Ctrl-C reaches it once, from its parent
        os._exit(supervise(command, own))
    for number in ENDING:
        signal.signal(number, lambda number, frame: os.kill(supervisor, number))
    return os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
