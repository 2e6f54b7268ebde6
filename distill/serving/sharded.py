"""A served teacher larger than one GPU: sharded (FSDP2) over the processes of a launch, the first of which serves HTTP.

Processes with shards gather weights collectively, so that all make a forward pass at once, each of its own batch: W of
them compute W requests of one forward pass each, or W times the tokens when packed. The first process broadcasts the
requests of each step over gloo; the others send their hidden states to it by point-to-point communication, and a
process without a request makes a forward pass of two tokens.

torchrun starts the processes and ends all of them where one is gone, on one machine. A process whose torchrun was
killed is killed with it (`launch.end_with_parent`), which torchrun cannot do for itself.
"""

from __future__ import annotations

import datetime
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import uvicorn
from accelerate import PartialState

from distill.core import launch
from distill.core.errors import RunError, TeacherUnavailableError
from distill.core.ranks import restart_store, world_size
from distill.models.dtypes import resolve_device
from distill.recipe import Recipe
from distill.serving.engine import RequestOptions, RowsRequest, RowTargets, ServingEngine
from distill.serving.worker import Shares
from distill.teachers.backends.served.protocol import TargetRequest

# the other processes wait as long as no client sends a request; a process that is gone ends the wait
IDLE = datetime.timedelta(days=365)
NOBODY = TargetRequest(np.zeros((1, 2), np.int32), None, np.zeros(1, np.int32))  # for a process without requests
Step = Sequence[Sequence[RowsRequest]]  # jobs of each process; fewer than there are processes where some have none


class ShardedEngine(ServingEngine):
    """One of the processes with shards of a teacher; all construct it alike; the first serves, the others follow.

    Args:
        given: arguments of `ServingEngine`.
        budget: tokens of a forward pass, of one process.

    Attributes:
        error: why the processes are no longer at the same step, after which this server ends; None before.
    """

    def __init__(self, *given: Any, budget: int) -> None:
        super().__init__(*given)
        self.budget = budget
        self.forwards = world_size()
        self.identity.notes["processes"] = self.forwards
        self.error: str | None = None
        self._end: Callable[[], None] = lambda: None
        # a group of its own, on the CPU: the others wait in it for the next step without a time limit, and no GPU spins
        self._steps = dist.new_group(backend="gloo", timeout=IDLE)

    def _broadcast(self, step: Step | None) -> Step | None:
        """Return the step that the first process passes; None ends all processes."""
        held = [step]
        dist.broadcast_object_list(held, group=self._steps)
        return held[0]

    # ------------------------------------------------------------- the first one

    def answer(self, jobs: Sequence[RowsRequest]) -> list[RowTargets]:
        """Return each job's outputs as `ServingEngine.answer` does; those that `Worker` passes together are one step.

        Raises:
            TeacherUnavailableError: an error here, or in another process, has left the others waiting.
        """
        if self.error:
            raise TeacherUnavailableError(self.error)
        shares = Shares(self.forwards, self.budget)
        placed = [shares.add(job) for job in jobs if len(job.query.rows)]
        assert all(placed)
        found: dict[int, torch.Tensor] = {}
        try:
            if shares.jobs:
                # The forward gathers weights from all processes, so each of them computes one now, of padding where it
                # has no jobs. This one does its own share first: the others have theirs when it is done.
                self._broadcast(shares.jobs)
                for rank, share in enumerate(shares.jobs):
                    parts = self._part(share) if rank == 0 else self._received(rank, share)
                    found |= {id(job): rows for job, rows in zip(share, parts, strict=True)}
            nothing = self.weights.weight.new_zeros(0, self.weights.weight.shape[1])
            return [self._encoded(job, found.get(id(job), nothing)) for job in jobs]
        except Exception as error:  # the others are no longer at the same step as this one
            self.error = f"rank 0: {type(error).__name__}: {error!s:.200}".splitlines()[0]
            self._end()
            raise TeacherUnavailableError(self.error) from error

    def _received(self, rank: int, share: Sequence[RowsRequest]) -> Sequence[torch.Tensor]:
        sizes = [len(job.query.rows) for job in share]
        width = self.weights.weight.shape[0 if share[0].options.logits else 1]
        rows = self.weights.weight.new_empty(sum(sizes), width)
        dist.recv(rows, rank)
        return rows.split(sizes)

    def run(self, server: uvicorn.Server) -> None:
        """Serve until the server is told to end; the other processes end with it.

        Raises:
            RunError: one of them is gone, or an error has left them waiting.
        """

        def end() -> None:
            server.should_exit = True

        self._end = end
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # uvicorn raises it again
        try:
            server.run()
        finally:
            if self.error:
                raise RunError(f"{self.error}, so this server ends")
            try:
                self._broadcast(None)
            except RuntimeError:  # torchrun ends this process because of another
                raise RunError("a process with shards of the teacher is gone, so this server ends") from None

    # ------------------------------------------------------------- all of them

    def _part(self, share: Sequence[RowsRequest], logits: bool = False) -> list[torch.Tensor]:
        return self.hidden(share or [RowsRequest(NOBODY, RequestOptions(deterministic=True, logits=logits))])

    # ------------------------------------------------------------- the others

    def follow(self) -> None:
        """Compute the requests that the first process assigns, until it ends.

        Raises:
            SystemExit: with code 1, where the first process is gone, whose error or torchrun's tells why.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # this process ends when the first one does
            signal.signal(number, signal.SIG_IGN)
        rank = dist.get_rank()
        while True:
            try:
                step = self._broadcast(None)
            except RuntimeError as error:
                raise SystemExit(1) from error
            if step is None:
                return
            # all compute logits, or none: a forward with logits gathers the head, too, on every process
            share = step[rank] if rank < len(step) else []
            rows = self._part(share, step[0][0].options.logits)
            if share:
                dist.send(torch.cat(rows).to(self.weights.weight.dtype), 0)


def join_launch(recipe: Recipe) -> None:
    """Join the processes that serve a sharded teacher, if this is one of several."""
    if world_size() > 1:
        launch.end_with_parent()
        PartialState(cpu=resolve_device(recipe.train).type == "cpu", **restart_store())
