"""Heartbeats among the processes that serve one sharded teacher: the first process and its followers.

Each process writes a heartbeat into the launch's store once a second, and its exit code when it ends. The end of a
process is noticed at once on its own host, on other hosts by missing heartbeats.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Self

from distill.core.launch import is_running
from distill.core.ranks import restart_store, world_size

if TYPE_CHECKING:
    from torch.distributed import Store

BEAT_S = 1.0
SILENT_S = 15.0  # without a heartbeat
BEGINS_S = 300.0  # before the first heartbeat: imports
LOOKS_S = 0.001  # between two polls of the store
LINGERS_S = 10.0
STORE_GONE = "the process that holds the store of this launch is gone"


class Peers:
    """The other processes of a launch, from the view of one of them.

    Args:
        store: store of the launch, shared by all its processes.
        rank: rank of this process; 0 is the first.
        world: number of processes.
    """

    current: Peers | None = None  # the one of this process, while it serves
    launches = 0  # number of launches of this process so far

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.store = store
        self.rank = rank
        self.world = world
        self._seen: dict[int, tuple[bytes, float, float]] = {}  # heartbeat, seconds unchanged, time of the check
        self._checked = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(clone(store),), daemon=True, name="sign of life")
        self._thread.start()

    @property
    def others(self) -> range:
        """The ranks that this process monitors: the first process monitors all others, and they monitor the first."""
        return range(1, self.world) if self.rank == 0 else range(1)

    # ------------------------------------------------------------- how it ends

    def __enter__(self) -> Self:
        Peers.current = self
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        code = error.code if isinstance(error, SystemExit) else 0 if error is None else 1
        self.end(2 if isinstance(error, ValueError) else int(code or 0), str(error or ""))
        Peers.current = None

    def end(self, code: int = 0, text: str = "") -> None:
        """Record this process's end and its exit code; 2 is an error of the user's input, described by `text`."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(RuntimeError, ValueError):  # the process with the store has ended already
            self.store.set(f"end/{self.rank}", json.dumps({"code": code, "text": text}))
            until = time.monotonic() + LINGERS_S
            # unless torchrun hosts it, the store ends with this process, before the others have read it
            while self.rank == 0 and time.monotonic() < until and not all(map(self._fault_of, self.others)):
                time.sleep(10 * LOOKS_S)

    def ends(self) -> list[dict[str, object]] | None:
        """Return `code` and `text` of the others, once one has failed or all have ended; None before."""
        ends = [json.loads(self.store.get(f"end/{rank}")) for rank in self.others if self.store.check([f"end/{rank}"])]
        return ends if len(ends) == len(self.others) or any(end["code"] for end in ends) else None

    # ---------------------------------------------------------- signs of life

    def _beat(self, store: Store) -> None:
        own = f"{os.getpid()} {socket.gethostname()}"
        with contextlib.suppress(RuntimeError):  # the process with the store has ended
            for count in itertools.count():
                store.set(f"sign/{self.rank}", f"{count} {own}")
                if self._ended.wait(BEAT_S):
                    return

    def fault(self) -> str | None:
        """Return a message about a process that is gone, or None; checks at most a few times a second.

        Raises:
            ValueError: it ended by an error of the user's input, with its text.
        """
        now = time.monotonic()
        if now - self._checked < BEAT_S / 4:
            return None
        self._checked = now
        try:
            return next(filter(None, (self._fault_of(rank, now) for rank in self.others)), None)
        except RuntimeError:  # torch's DistNetworkError
            return STORE_GONE

    def _fault_of(self, rank: int, now: float = 0.0) -> str | None:
        if self.store.check([f"end/{rank}"]):
            end = json.loads(self.store.get(f"end/{rank}"))
            if end["code"] == 2:
                raise ValueError(end["text"])
            if self.rank and not end["code"]:
                return None
            return f"rank {rank} has ended" + (f": {end['text']}" if end["text"] else "")
        sign = self.store.get(f"sign/{rank}") if self.store.check([f"sign/{rank}"]) else b""
        before, silent, checked = self._seen.get(rank, (None, 0.0, now))
        # do not count time in which this process itself was suspended: the others may have been, too
        silent = silent + min(max(now - checked, 0.0), BEAT_S) if sign == before else 0.0
        self._seen[rank] = sign, silent, now
        if not sign:
            return f"rank {rank} has not begun" if silent > BEGINS_S else None
        _, pid, host = sign.decode().split(" ", 2)
        who = f"rank {rank} (process {pid} on {host})"
        if host == socket.gethostname() and not is_running(int(pid)):
            return f"{who} is gone"
        return f"{who} has given no sign of life for {silent:.0f} s" if silent > SILENT_S else None

    def fault_soon(self) -> str | None:
        """Return a message about a process that is gone after a broken connection, or None after a short wait."""
        until = time.monotonic() + 2 * BEAT_S
        while (fault := self.fault()) is None and time.monotonic() < until:
            time.sleep(10 * LOOKS_S)
        return fault


def clone(store: Store) -> Store:
    """Return another connection to the same store, since a blocking wait on one blocks all of its other users."""
    again: Store = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
    return again


def join() -> Peers:
    """Register this process among those of its launch, before any process group exists."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    world = world_size()
    given = restart_store().get("store")
    store: Store = given if isinstance(given, dist.Store) else next(dist.rendezvous("env://", rank, world))[0]
    Peers.launches += 1
    return Peers(dist.PrefixStore(f"peers-{Peers.launches}", store), rank, world)
