"""The end of one rank ends the others: they wait for it in a collective, for ever where no launcher watches (srun).

    with announced_refusal():   # on every rank, while it reads what it was started with
        ...
    with end_together():        # on every rank, around joining and all that follows
        ...

A rank that leaves the block by an exception writes its reason into the store of the launch, which every rank holds a
connection to; a thread of each rank reads it. The others get `GRACE_S` to end by themselves, since most errors are
raised on all ranks alike, and then exit with one line that names the rank and its reason. A rank that is killed writes
nothing: its count of heartbeats stands still, or, of the rank that holds the store, the connection breaks.

A rank may be refused before it joins (its recipe has a typo); the others then wait for it in the rendezvous. It
connects to the store only to say so, and holds the store itself where that would have been its part.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from distill.core import console
from distill.core.launch import is_running
from distill.core.ranks import is_main_process, world_size

if TYPE_CHECKING:
    from torch.distributed import Store

POLL_S = 0.5
GRACE_S = 5.0  # for a rank to end by itself after another one has
SILENT_S = 120.0  # without a heartbeat; imports and loading hold the interpreter for seconds at a time
LINGER_S = 10.0  # of the rank that holds the store, until the others have read the reason
JOIN_S = 60.0  # until the others have started, for a rank that is refused before it has joined them
RENDEZVOUS_S = 1800.0  # that torch waits for all ranks to join
FAILED = "failed"
PREFIX = "ending"


@contextlib.contextmanager
def announced_refusal() -> Iterator[None]:
    """Tell the other ranks of an error in the block, which this rank leaves before it joins them."""
    if world_size() == 1:
        yield
        return
    try:
        yield
    except Exception as error:
        _leave_before_joining(_failure(error))
        raise


@contextlib.contextmanager
def end_together() -> Iterator[None]:
    """End every rank of the run soon after one of them has ended in the block by an error."""
    if world_size() == 1:
        yield
        return
    watch = _Watch()
    watch.start()
    try:
        yield
    except BaseException as error:
        watch.finish(_failure(error))
        raise
    watch.finish(None)


def _failure(error: BaseException) -> dict[str, object] | None:
    """Return what the others are told of an exception; None where the run ends in order."""
    if isinstance(error, SystemExit) and not error.code:
        return None
    text = str(error).strip().splitlines()
    return {
        "rank": int(os.environ["RANK"]),
        "text": text[0] if text else type(error).__name__,
        "code": 2 if isinstance(error, ValueError) else 1,
    }


class _Watch:
    """One rank's heartbeat, and its thread that reads those of the others."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="ending")
        self._store: Store | None = None  # the main thread's connection, made once the launch has a store
        self._seen: dict[int, tuple[bytes, float]] = {}  # of the others: heartbeat, and when it last changed

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def finish(self, failure: dict[str, object] | None) -> None:
        """Stop watching; tell the others why this rank ends, if it fails."""
        self._ended.set()
        store = self._store
        if store is None:  # the thread still waits for the rank that holds the store
            if failure is not None:
                _leave_before_joining(failure)
            return
        self._thread.join()
        _leave(store, failure, LINGER_S)

    def _run(self) -> None:
        """Beat, and end this process where another one has ended by an error."""
        try:
            store = _connect(RENDEZVOUS_S)
            self._store = _connect(RENDEZVOUS_S)
        except RuntimeError:  # nobody holds a store: joining fails in the main thread for the same reason
            return
        own = f"{os.getpid()} {socket.gethostname()}"
        end: dict[str, object] | None = None
        beats = itertools.count()
        while end is None:
            try:
                store.set(f"beat/{self.rank}", f"{next(beats)} {own}")
                end = self._end_of_another(store)
            except RuntimeError:
                end = {"rank": 0, "text": "its process, which holds the store of this launch, is gone", "code": 1}
            if end is None and self._ended.wait(POLL_S):
                return
        # most errors are raised on all ranks alike: the main thread may be about to print the same line
        if self._ended.wait(GRACE_S):
            return
        with contextlib.suppress(RuntimeError):
            store.set(f"done/{self.rank}", "1")
        console.print_error(f"rank {end['rank']} has ended: {end['text']}; this process ends with it")
        sys.stderr.flush()
        os._exit(int(str(end["code"])))  # the main thread waits for that rank in a collective

    def _end_of_another(self, store: Store) -> dict[str, object] | None:
        if store.check([FAILED]):
            end: dict[str, object] = json.loads(store.get(FAILED))
            return end if end["rank"] != self.rank else None
        now = time.monotonic()
        # the main process watches all others and they watch it, so that a poll costs as much on any number of ranks
        for rank in range(1, world_size()) if self.rank == 0 else range(1):
            if not store.check([f"beat/{rank}"]) or store.check([f"done/{rank}"]):
                continue
            beat = store.get(f"beat/{rank}")
            before, since = self._seen.get(rank, (b"", now))
            if beat != before:
                self._seen[rank] = (beat, now)
                since = now
            _, pid, host = beat.decode().split(" ", 2)
            who = f"process {pid} on {host}"
            if host == socket.gethostname() and not is_running(int(pid)):
                return {"rank": rank, "text": f"{who} is gone", "code": 1}
            if now - since > SILENT_S:
                return {"rank": rank, "text": f"{who} has sent no heartbeat for {now - since:.0f} s", "code": 1}
        return None


def _leave(store: Store, failure: dict[str, object] | None, linger: float) -> None:
    """Tell the others that this rank ends, and why if it fails."""
    with contextlib.suppress(RuntimeError):  # the rank that holds the store is gone
        if failure is not None and not store.check([FAILED]):
            store.set(FAILED, json.dumps(failure))
        store.set(f"done/{os.environ['RANK']}", "1")
        # unless a launcher hosts it, the store ends with the main process: the others read the reason before that
        others = [f"done/{rank}" for rank in range(world_size())]
        until = time.monotonic() + linger
        while failure is not None and is_main_process() and time.monotonic() < until:
            if store.check(others):
                return
            time.sleep(POLL_S / 10)


def _leave_before_joining(failure: dict[str, object] | None) -> None:
    """Tell the others that this rank will not join; the main process holds the store for it unless a launcher does."""
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    with contextlib.suppress(RuntimeError):  # no other rank has started
        _leave(_connect(JOIN_S, holds=is_main_process() and not by_launcher), failure, JOIN_S)


def _connect(seconds: float, *, holds: bool = False) -> Store:
    """Return a connection of its own to the launch's store, since a wait on one blocks all of its other users.

    Args:
        seconds: how long to wait for the process that holds the store.
        holds: hold the store in this process, unless it does so already.
    """
    from torch.distributed import PrefixStore, TCPStore  # torch takes a second to import

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=holds,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=seconds),
        multi_tenant=holds,
    )
    return PrefixStore(f"{PREFIX}-{attempt}", store)
