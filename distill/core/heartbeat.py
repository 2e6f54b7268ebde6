"""Heartbeats of the ranks: the end of one ends the others, which wait for it in a collective, for ever under srun.

    with announced_refusal():   # on every rank, while it reads what it was started with
        ...
    with end_together():        # on every rank, around joining and all that follows
        ...

A thread of each rank writes a count, and the number of micro-batches it has begun, into the store of the launch, which
every rank holds a connection to, and reads those of the others. A rank that leaves the block by an exception writes its
reason there. The others get `GRACE_S` to end by themselves, since most errors are raised on all ranks alike, and then
exit with one line that names the rank and its reason. A rank that is killed or stopped writes nothing: its count stands
still, or, of the rank that holds the store, the connection breaks. One that stays behind the others' micro-batches
hangs. No checkpoint can be written then: it needs the random state of every rank, from the same step.

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
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from distill.core import console
from distill.core.launch import is_running
from distill.core.ranks import is_main_process, world_size

if TYPE_CHECKING:
    from torch.distributed import Store

POLL_S = 0.5
GRACE_S = 5.0  # for a rank to end by itself after another one has
SILENT_S = 120.0  # without a heartbeat; imports and loading hold the interpreter for seconds at a time
STALLED_S = 1500.0  # behind the others' micro-batches; collectives time out after 1,800
LINGER_S = 10.0  # of the rank that holds the store, until the others have read the reason
JOIN_S = 60.0  # until the others have started, for a rank that is refused before it has joined them
RENDEZVOUS_S = 1800.0  # that torch waits for all ranks to join
FAILED = "failed"
PREFIX = "heartbeat"
STORE = ("MASTER_ADDR", "MASTER_PORT", "RANK")  # variables of a launch whose store can be reached


@contextlib.contextmanager
def announced_refusal() -> Iterator[None]:
    """Tell the other ranks of an error in the block, which this rank leaves before it joins them."""
    if world_size() == 1:
        yield
        return
    try:
        yield
    except Exception as error:
        _leave_before_joining(_failure(error), _prefix())
        raise


@contextlib.contextmanager
def end_together(*, holds_store: bool = False) -> Iterator[None]:
    """End every rank soon after one of them has ended in the block by an error.

    Args:
        holds_store: Whether the main process holds the store of a launch without a launcher from the beginning on: for
            commands whose ranks do not always join a process group, which would hold it otherwise.
    """
    if world_size() == 1:
        yield
        return
    heartbeat = Heartbeat(holds_store=holds_store and is_main_process() and not _is_held_by_launcher())
    heartbeat.start()
    try:
        yield
    # BaseException: Ctrl-C and sys.exit end this rank too, and the others wait for it all the same
    except BaseException as error:
        heartbeat.finish(_failure(error))
        raise
    heartbeat.finish(None)


@contextlib.contextmanager
def watched_training(advice: Callable[[], str]) -> Iterator[None]:
    """End every rank soon after one of them has stopped or hangs in the block, in which all of them train.

    In a run its own heartbeat does so; a script that trains by itself gets one for the block. There an exception stays
    that rank's own, since the script may handle it on all ranks.

    Args:
        advice: Function that says how to go on, for the line on a rank that has stopped.
    """
    if Heartbeat.current is not None:
        Heartbeat.current.advice = advice
        yield
        return
    if world_size() == 1 or any(name not in os.environ for name in STORE):
        yield
        return
    heartbeat = Heartbeat(advice, ends_with_store=False)
    heartbeat.start()
    try:
        yield
    finally:
        heartbeat.finish(None)


def count_micro_batch() -> None:
    if Heartbeat.current is not None:
        Heartbeat.current.begun += 1


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


class _Beat(NamedTuple):
    """Last heartbeat of a rank, with the times at which its two counts changed, by this rank's clock."""

    beats: int
    begun: int
    beaten_at: float
    begun_at: float

    def next(self, beats: int, begun: int, now: float) -> _Beat:
        beaten_at = self.beaten_at if beats == self.beats else now
        begun_at = self.begun_at if begun == self.begun else now
        return _Beat(beats, begun, beaten_at, begun_at)


class Heartbeat:
    """One rank's heartbeat, and its thread that reads those of the others.

    Args:
        advice: Function that says how to go on after another rank has stopped.
        ends_with_store: Whether this process ends where the one that holds the store is gone.
        holds_store: Whether this process holds the store, from the first heartbeat until all others are done.

    Attributes:
        current: The heartbeat of this process, while it has one.
        begun: Number of micro-batches that this rank has begun.
    """

    current: ClassVar[Heartbeat | None] = None
    made: ClassVar[int] = 0  # every rank makes as many, so that each has keys of its own in the store

    def __init__(
        self, advice: Callable[[], str] = str, *, ends_with_store: bool = True, holds_store: bool = False
    ) -> None:
        self.rank = int(os.environ["RANK"])
        self.advice = advice
        self.ends_with_store = ends_with_store
        self.holds_store = holds_store
        self.begun = 0
        self._prefix = _prefix()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")
        self._store: Store | None = None  # the main thread's connection, made once the launch has a store
        self._seen: dict[int, _Beat] = {}

    def start(self) -> None:
        Heartbeat.current = self
        Heartbeat.made += 1
        self._thread.start()

    def finish(self, failure: dict[str, object] | None) -> None:
        """Stop beating; tell the others why this rank ends, if it fails."""
        Heartbeat.current = None
        self._ended.set()
        store = self._store
        if store is None:  # the thread still waits for the rank that holds the store
            if failure is not None:
                _leave_before_joining(failure, self._prefix)
                # it may have met the store just now: inside of it a thread must not outlive the interpreter
                self._thread.join(GRACE_S)
            return
        # the thread ends first: from here on only the main thread speaks for this rank
        self._thread.join()
        if not self.holds_store:
            _leave(store, failure, LINGER_S, waits=failure is not None)
        elif failure is not None:
            _leave(store, failure, JOIN_S)  # the others may not have started
        else:
            # the store ends with this process: to others that are still at work, its end would look like a failure
            _leave(store, None, SILENT_S)

    def _run(self) -> None:
        """Beat, and end this process where another one has ended by an error."""
        try:
            # one connection for this thread, one for the main thread: a call that waits blocks all others on its own
            store = _connect(RENDEZVOUS_S, self._prefix, holds=self.holds_store)
            # a held store lives as long as a connection that holds it: longer than this thread
            self._store = _connect(RENDEZVOUS_S, self._prefix, holds=self.holds_store)
        except RuntimeError:  # nobody holds a store: joining fails in the main thread for the same reason
            return
        who = f"{os.getpid()} {socket.gethostname()}"
        end: dict[str, object] | None = None
        counts = itertools.count()
        while end is None:
            try:
                store.set(f"beat/{self.rank}", f"{next(counts)} {self.begun} {who}")
                end = self._end_of_another(store)
            except RuntimeError:
                if not self.ends_with_store:
                    return
                end = {"rank": 0, "text": "its process, which holds the store of this launch, is gone", "code": 1}
            if end is None and self._ended.wait(POLL_S):
                return
        # most errors are raised on all ranks alike: the main thread may be about to print the same line
        if self._ended.wait(GRACE_S):
            return
        with contextlib.suppress(RuntimeError):
            # the rank that holds the store waits until all others are done
            store.set(f"done/{self.rank}", "1")
        advice = self.advice()
        after = f"; {advice}" if advice else ""
        console.print_error(f"rank {end['rank']} has ended: {end['text']}; this process ends with it{after}")
        sys.stderr.flush()
        os._exit(int(str(end["code"])))  # the main thread waits for that rank in a collective

    def _end_of_another(self, store: Store) -> dict[str, object] | None:
        """Return why another rank has ended, stopped or hangs; None where none has."""
        if store.check([FAILED]):
            end: dict[str, object] = json.loads(store.get(FAILED))
            return end if end["rank"] != self.rank else None
        now = time.monotonic()
        own = self._beat_of(self.rank, 0, self.begun, now)
        # the main process watches all others and they watch it, so that a poll costs as much on any number of ranks
        for rank in range(1, world_size()) if self.rank == 0 else range(1):
            if not store.check([f"beat/{rank}"]) or store.check([f"done/{rank}"]):
                continue
            beats, begun, pid, host = store.get(f"beat/{rank}").decode().split(" ", 3)
            beat = self._beat_of(rank, int(beats), int(begun), now)
            fault = None
            if host == socket.gethostname() and not is_running(int(pid)):
                fault = "is gone"
            elif now - beat.beaten_at > SILENT_S:
                fault = f"has sent no heartbeat for {now - beat.beaten_at:.0f} s: stopped, or its machine is down"
            elif beat.begun < own.begun and now - max(beat.begun_at, own.begun_at) > STALLED_S:
                # by the later of two moments: a rank that has just gone ahead gives the other one time to follow
                stalled = now - beat.begun_at
                fault = f"hangs: for {stalled:.0f} s it has not begun a micro-batch that another rank has begun"
            if fault is not None:
                found = {"rank": rank, "text": f"process {pid} on {host} {fault}", "code": 1}
                store.set(FAILED, json.dumps(found))  # the others read it while this rank waits for `GRACE_S`
                return found
        return None

    def _beat_of(self, rank: int, beats: int, begun: int, now: float) -> _Beat:
        beat = self._seen.get(rank, _Beat(beats, begun, now, now)).next(beats, begun, now)
        self._seen[rank] = beat
        return beat


def _leave(store: Store, failure: dict[str, object] | None, linger: float, *, waits: bool = True) -> None:
    """Tell the others that this rank is done; the main process waits for them for up to `linger` seconds."""
    with contextlib.suppress(RuntimeError):  # the rank that holds the store is gone
        # the first reason stands: later ones follow from it
        if failure is not None and not store.check([FAILED]):
            store.set(FAILED, json.dumps(failure))
        store.set(f"done/{os.environ['RANK']}", "1")
        # unless a launcher hosts it, the store ends with the main process: the others read the reason before that
        others = [f"done/{rank}" for rank in range(world_size())]
        until = time.monotonic() + linger
        while waits and is_main_process() and time.monotonic() < until:
            if store.check(others):
                return
            time.sleep(POLL_S / 10)


def _leave_before_joining(failure: dict[str, object] | None, prefix: str) -> None:
    """Tell the others that this rank will not join; the main process holds the store for it unless a launcher does."""
    holds = is_main_process() and not _is_held_by_launcher()
    with contextlib.suppress(RuntimeError):  # no other rank has started
        _leave(_connect(JOIN_S, prefix, holds=holds), failure, JOIN_S, waits=failure is not None)


def _is_held_by_launcher() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _prefix() -> str:
    """Return the prefix of the next heartbeat's keys; a launcher's store outlives the processes that it restarts."""
    return f"{PREFIX}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{Heartbeat.made}"


def _connect(seconds: float, prefix: str, *, holds: bool = False) -> Store:
    """Return a connection of its own to the launch's store, since a wait on one blocks all of its other users.

    Args:
        seconds: How long to wait for the process that holds the store.
        holds: Hold the store in this process, unless it does so already.
    """
    from torch.distributed import PrefixStore, TCPStore  # torch takes a second to import

    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=holds,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=seconds),
        multi_tenant=holds,
    )
    return PrefixStore(prefix, store)
