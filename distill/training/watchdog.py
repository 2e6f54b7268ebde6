"""Watchdog that names a hanging rank: the others wait for it inside of a collective and cannot report it.

    with watch_ranks(folder, progress=lambda: batches): ...     # on every rank, while it trains

A thread of each rank writes a heartbeat count, and the number of micro-batches it has begun, into a file in the run's
folder, and reads those of the others. A rank whose heartbeat stands still is stopped, swapped out or dead; one that
stays behind the others' batches for long hangs. Either is named, and every rank that sees it exits with code 1. No
checkpoint can be written then: it needs the random state of every rank, from the same step.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from distill.core import console
from distill.core.ranks import broadcast_from_rank0, world_size
from distill.training.checkpoints import checkpoints
from distill.training.listeners import StepListener

FOLDER = ".ranks"
SILENT_S = 120.0  # seconds without a heartbeat
STALLED_S = 1500.0  # seconds behind the others' batches; collectives time out after 1,800
SIZE = 256


class RankWatch(StepListener):
    """Listener that watches the other ranks while a trainer trains; see `watch_ranks`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._begun = 0  # micro-batches

    def training(self) -> contextlib.AbstractContextManager[None]:
        """Watch the other ranks in the context."""
        return watch_ranks(self.folder, lambda: self._begun)

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Count a micro-batch that begins."""
        self._begun += name == "student"
        return contextlib.nullcontext()


@contextlib.contextmanager
def watch_ranks(folder: Path, progress: Callable[[], int]) -> Iterator[None]:
    """Watch the other ranks in the block; a rank that hangs is named and ends the run.

    Args:
        folder: The run's folder; ranks of machines that do not share it are not watched.
        progress: Function that returns how many micro-batches this rank has begun.
    """
    ends = threading.Event()
    launch = broadcast_from_rank0(lambda: secrets.token_hex(8))
    thread = threading.Thread(target=_watch, args=(folder, launch, progress, ends), daemon=True, name="watchdog")
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
        shutil.rmtree(folder / FOLDER, ignore_errors=True)


def _watch(folder: Path, launch: str, progress: Callable[[], int], ends: threading.Event) -> None:
    rank = int(os.environ["RANK"])
    others = PeerMonitor(rank, launch)
    for count in itertools.count():
        begun = progress()
        own = {"launch": launch, "count": count, "begun": begun, "pid": os.getpid(), "host": socket.gethostname()}
        with contextlib.suppress(OSError):  # a full disk or a deleted folder is reported elsewhere
            (folder / FOLDER).mkdir(exist_ok=True)
            (folder / FOLDER / str(rank)).write_text(json.dumps(own).ljust(SIZE))
        if ends.wait(SILENT_S / 12):
            return
        fault = others.fault(folder / FOLDER, begun)
        if fault is None or ends.is_set():
            continue
        last = checkpoints(folder)[-1:]
        with contextlib.suppress(OSError):
            after = f"continue from {last[0]} with --resume" if last else "there is no checkpoint"
            console.print_error(f"{fault}; the run ends; {after}")
            sys.stdout.flush()
        os._exit(1)  # the main thread waits for that rank


class PeerMonitor:
    """Heartbeats of the other ranks, with the times of their last changes by this rank's clock."""

    def __init__(self, rank: int, launch: str) -> None:
        self.rank = rank
        self.launch = launch
        self._seen: dict[int, tuple[dict[str, object], float, float]] = {}  # file, its counts' last changes
        self._begun = (-1, 0.0)

    def fault(self, folder: Path, begun: int) -> str | None:
        """Return a description of a rank that hangs; None where none does."""
        now = time.monotonic()
        if begun != self._begun[0]:
            self._begun = (begun, now)
        for rank in range(world_size()):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                there = json.loads((folder / str(rank)).read_text())
                if rank == self.rank or there["launch"] != self.launch:  # an earlier run left it
                    continue
                before, last_beat, moved = self._seen.get(rank, (there, now, now))
                last_beat = now if there["count"] != before["count"] else last_beat
                moved = now if there["begun"] != before["begun"] else moved
                self._seen[rank] = (there, last_beat, moved)
                who = f"rank {rank} (process {there['pid']} on {there['host']})"
                if now - last_beat > SILENT_S:
                    return f"{who} has sent no heartbeat for {now - last_beat:.0f} s: stopped, or its machine is down"
                if there["begun"] < begun and min(now - moved, now - self._begun[1]) > STALLED_S:
                    return f"{who} hangs: for {now - moved:.0f} s it has not begun a batch that the others have begun"
        return None
