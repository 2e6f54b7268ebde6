"""A served teacher larger than one GPU: sharded (FSDP2) over the processes of a launch, the first of which serves HTTP.

Processes with shards gather weights collectively, so that all make a forward pass at once, each of its own batch: W of
them compute W requests of one forward pass each, or W times the tokens when packed. Each step's requests are written to

    step/n      in the launch's store: each process's requests, in the form of /v1/targets (served/protocol.py)

and read by the other processes, which send their hidden states to the first one by point-to-point communication; a
process without a request makes a forward pass of two tokens. Each writes heartbeats (`peers.py`): where a process is
gone, waiting and new requests are refused with a 503, and the server ends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import uvicorn
from accelerate import PartialState

from distill.core.errors import RunError, TeacherUnavailableError
from distill.core.ranks import world_size
from distill.models.dtypes import resolve_device
from distill.recipe import Recipe
from distill.serving.engine import Answer, Engine, Job, Options
from distill.serving.peers import BEAT_S, LOOKS_S, STORE_GONE, Peers, clone, join
from distill.serving.worker import Shares, Worker
from distill.teachers.backends.served.protocol import TargetRequest, read_body

REFUSES_S = 2.0  # after a process is gone, so that waiting clients receive the error
PART = struct.Struct("<BBI")  # of a step: flags, the process that computes it, bytes of the request
ALONE = 1
LOGITS = 2
ENDS = 4
NOBODY = TargetRequest(np.zeros((1, 2), np.int32), None, np.zeros(1, np.int32))  # for a process without requests


class ShardedEngine(Engine):
    """One of the processes with shards of a teacher; all construct it alike; the first serves, the others follow.

    Args:
        given: arguments of `Engine`.
        peers: the processes of the launch.
        budget: tokens of a forward pass, of one process.
    """

    def __init__(self, *given: Any, peers: Peers, budget: int) -> None:
        super().__init__(*given)
        self.peers = peers
        self.budget = budget
        self.forwards = peers.world
        self.identity.notes["processes"] = self.forwards
        self.fault: str | None = None
        self._steps = itertools.count()

    # ------------------------------------------------------------- the first one

    def answer(self, jobs: Sequence[Job]) -> list[Answer]:
        """Return the outputs for each job, as `Engine.answer` does; jobs passed together by `Worker` are one step.

        Raises:
            TeacherUnavailableError: another process is gone, or an error here has left the others waiting for this
                process.
        """
        if self.fault:
            raise TeacherUnavailableError(self.fault)
        shares = Shares(self.forwards, self.budget)
        placed = [shares.add(job) for job in jobs if len(job.query.rows)]
        assert all(placed)
        found: dict[int, torch.Tensor] = {}
        try:
            if shares.jobs:
                self._share_out(shares.jobs)
                for rank, share in enumerate(shares.jobs):
                    parts = self._part(share) if rank == 0 else self._received(rank, share)
                    found |= {id(job): rows for job, rows in zip(share, parts, strict=True)}
            nothing = self.weights.weight.new_zeros(0, self.weights.weight.shape[1])
            return [self._encoded(job, found.get(id(job), nothing)) for job in jobs]
        except Exception as error:  # the others are no longer at the same step as this one
            gone = self.peers.fault_soon()
            self.fault = gone or f"rank 0: {type(error).__name__}: {error!s:.200}".splitlines()[0]
            raise TeacherUnavailableError(self.fault) from error

    def _share_out(self, shares: Sequence[Sequence[Job]]) -> None:
        number = next(self._steps)
        body = b""
        logits = LOGITS * shares[0][0].options.logits
        for rank, share in enumerate(shares):
            for job in share:
                query = job.query.body()
                body += PART.pack(logits | ALONE * job.alone, rank, len(query)) + query
        self.peers.store.set(f"step/{number}", body)  # type: ignore[arg-type]
        if number > 1:  # all have completed the step before the last one with this process
            self.peers.store.delete_key(f"step/{number - 2}")

    def _received(self, rank: int, share: Sequence[Job]) -> Sequence[torch.Tensor]:
        sizes = [len(job.query.rows) for job in share]
        rows = self.weights.weight.new_empty(sum(sizes), self._width(share[0].options.logits))
        dist.recv(rows, rank)
        return rows.split(sizes)

    def _width(self, logits: bool) -> int:
        return self.weights.weight.shape[0 if logits else 1]

    def run(self, server: uvicorn.Server, worker: Worker) -> None:
        """Serve until the server is told to end; the other processes end with it.

        Raises:
            RunError: one of them is gone.
        """

        def end() -> None:
            server.should_exit = True

        self.watch(worker.lose, end)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # uvicorn raises it again
        try:
            server.run()
        finally:
            if self.fault:
                raise RunError(f"{self.fault}, so this server ends")
            self.peers.store.set(f"step/{next(self._steps)}", PART.pack(ENDS, 0, 0))  # type: ignore[arg-type]

    def watch(self, lose: Callable[[Exception], None], end: Callable[[], None]) -> None:
        """Start monitoring the other processes: where one is gone, call `lose` with an error, and `end` soon after."""

        def look() -> None:
            while self.fault is None:
                time.sleep(BEAT_S / 4)
                try:
                    self.fault = self.fault or self.peers.fault()
                except ValueError as error:  # by which the process ended
                    self.fault = str(error)
            lose(TeacherUnavailableError(self.fault))
            time.sleep(REFUSES_S)
            end()

        threading.Thread(target=look, daemon=True, name="shards").start()

    # ------------------------------------------------------------- all of them

    def _part(self, share: Sequence[Job], logits: bool = False) -> list[torch.Tensor]:
        return self.hidden(share or [Job(NOBODY, Options(deterministic=True, logits=logits))])

    # ------------------------------------------------------------- the others

    def follow(self) -> None:
        """Compute the requests that the first process assigns, until it ends.

        Raises:
            RunError: it is gone.
            SystemExit: with code 1, where it has failed.
        """
        self.watch(lambda error: None, lambda: os._exit(1))  # this thread may wait for a GPU forever
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # this process ends when the first one does
            signal.signal(number, signal.SIG_IGN)
        for step in itertools.count():
            body = self._step(step)
            at = 0
            share = list[Job]()
            what = 0
            while at < len(body):
                what, rank, size = PART.unpack_from(body, at)
                query = body[at + PART.size : at + PART.size + size]
                at = at + PART.size + size
                if rank == self.peers.rank:
                    options = Options(deterministic=bool(what & ALONE), logits=bool(what & LOGITS))
                    share.append(Job(read_body(query, json_body=False), options))
            if what & ENDS:
                return
            rows = self._part(share, bool(what & LOGITS))
            if share:
                dist.send(torch.cat(rows).to(self.weights.weight.dtype), 0)

    def _step(self, number: int) -> bytes:
        """Return the requests of a step from the first process, polled less often the longer none come."""
        begun = time.monotonic()
        try:
            while not self.peers.store.check([f"step/{number}"]):
                if self.fault and self.peers.ends():
                    raise SystemExit(1)
                if self.fault:
                    raise RunError(f"{self.fault}, so this server ends")
                time.sleep(min(max(LOOKS_S, (time.monotonic() - begun) / 100), 20 * LOOKS_S))
            return self.peers.store.get(f"step/{number}")
        except RuntimeError as error:
            raise error if isinstance(error, RunError) else RunError(f"{STORE_GONE}, so this server ends") from error


@contextlib.contextmanager
def join_launch(recipe: Recipe) -> Iterator[None]:
    """Join the processes that serve a sharded teacher, inside the context, if this is one of several."""
    if world_size() == 1:
        yield
        return
    with join() as peers:
        store = dist.PrefixStore("shards", clone(peers.store))
        rank = peers.rank
        device = resolve_device(recipe.train)
        PartialState(cpu=device.type == "cpu", store=store, rank=rank, world_size=world_size())
        yield
