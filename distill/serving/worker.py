"""The one thread that queries the teacher, and its bounded queue.

Requests wait in the order of arrival. The thread takes the first, and with it those after it that may share a forward
pass, up to a budget of tokens, without waiting for more: requests that arrive during a forward pass belong to the next.
A GPU always has a next forward pass: it is launched when it fills the budget, or when the current one is about to end
by the rate so far, while the outputs of the current one are still being copied. A request whose client has disconnected
is not computed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from distill.models.precision.host_copy import HostCopy
from distill.serving.engine import RowsRequest, RowTargets

log = logging.getLogger(__name__)

LAUNCH_SECONDS = 0.03  # for a forward pass
POLL_SECONDS = 0.0005  # between two checks of the current forward pass


_Asked = tuple[RowsRequest, Future[RowTargets]]


class Full(RuntimeError):
    """Error of a full queue.

    Attributes:
        seconds: estimated time until it has room.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__("the server is busy")
        self.seconds = seconds


class Shares:
    """Distribution of jobs over simultaneous forward passes, each of one job that runs alone or of several.

    Args:
        most: maximum number of forward passes.
        budget: tokens of a forward pass of several jobs.

    Attributes:
        jobs: jobs of each forward pass.
    """

    def __init__(self, most: int, budget: int) -> None:
        self.jobs: list[list[RowsRequest]] = []
        self._most = most
        self._budget = budget
        self._room: list[int] = []

    def add(self, job: RowsRequest) -> bool:
        """Add a job to a forward pass; return False where none has room. All passes compute logits, or none."""
        size = job.query.ids.size
        place = len(self.jobs)
        if place and (job.options.logits or self.jobs[0][0].options.logits):
            return False
        if place == self._most:
            # no pass is left to begin: the job goes where most room is
            place = max(range(place), key=self._room.__getitem__)
            if job.alone or size > self._room[place]:
                return False
        else:
            self.jobs.append([])
            self._room.append(0 if job.alone else self._budget)
        self.jobs[place].append(job)
        self._room[place] -= size
        return True


class _Forward(NamedTuple):
    """A launched forward pass: its jobs, outputs, tokens, time of launch, and the time to launch the next."""

    taken: Sequence[_Asked]
    answers: Sequence[RowTargets]
    tokens: int
    begun: float
    expected: float

    def is_ready(self) -> bool:
        return all(answer.is_ready() for answer in self.answers if isinstance(answer, HostCopy))


class Worker:
    """Queue of jobs, computed in a thread of its own.

    Args:
        answer: function with the interface of `Engine.answer`; a `HostCopy` that it returns is waited for.
        budget: tokens that share a forward pass.
        most_waiting: maximum number of tokens in the queue; further jobs are refused.
        forwards: number of simultaneous forward passes.

    Attributes:
        served: numbers of requests, tokens and forward passes so far, and their seconds.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[RowsRequest]], list[RowTargets]],
        budget: int,
        most_waiting: int,
        forwards: int = 1,
    ) -> None:
        self._answer = answer
        self._budget = budget
        self._most = most_waiting
        self._forwards = forwards
        self._jobs: deque[_Asked] = deque()
        self._tokens = 0
        self._closed = False
        self._changed = threading.Condition()
        self.served = {"requests": 0, "tokens": 0, "seconds": 0.0, "forwards": 0}
        self._ended = self._each = 0.0  # end of the last forward pass, and its seconds per token
        self._thread = threading.Thread(target=self._run, daemon=True, name="teacher")
        self._thread.start()

    def submit(self, job: RowsRequest) -> Future[RowTargets]:
        """Put a job into the queue.

        Raises:
            Full: there is no room.
        """
        size = job.query.ids.size
        with self._changed:
            if self._closed:
                raise Full(30.0)
            if self._jobs and self._tokens + size > self._most:
                speed = self.served["tokens"] / max(self.served["seconds"], 1e-9) or 1.0
                # the client comes back when about half of the queue has been computed, at the speed so far
                raise Full(min(max(self._tokens / speed / 2, 0.1), 60.0))
            future: Future[RowTargets] = Future()
            self._jobs.append((job, future))
            self._tokens += size
            self._changed.notify()
        return future

    @property
    def waiting(self) -> int:
        return len(self._jobs)

    def close(self) -> None:
        """Accept no more jobs, and end after the current forward pass; waiting jobs fail."""
        with self._changed:
            self._closed = True
            left = list(self._jobs)
            self._jobs = deque()
            self._changed.notify()
        for _, future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(Full(30.0))
        self._thread.join(timeout=60)

    def _take(self, before: _Forward | None) -> list[_Asked]:
        """Wait for the next jobs that share a forward pass; none once closed, or once `before` has ended."""
        with self._changed:
            # Idle, the thread sleeps until a request arrives. While `before` is computed it polls the GPU's event
            # instead, and leaves early only for a next pass that is worth launching: one that is full, since waiting
            # cannot enlarge it, or any, once `before` is about to end and the GPU would otherwise stand idle.
            while not self._closed and not (before.is_ready() if before else self._jobs):
                if before and self._jobs and (self._is_full() or time.perf_counter() > before.expected):
                    break
                self._changed.wait(POLL_SECONDS if before else None)
            taken: list[_Asked] = []
            shares = Shares(self._forwards, self._budget)
            # answers that are ready go out before anything else is launched
            if before and before.is_ready():
                return taken
            while self._jobs:
                job, future = self._jobs[0]
                if not future.cancelled() and not shares.add(job):  # a cancelled one's client has disconnected
                    break
                self._jobs.popleft()
                self._tokens -= job.query.ids.size
                if future.set_running_or_notify_cancel():
                    taken.append((job, future))
            return taken

    def _is_full(self) -> bool:
        """Return whether no further job could share the next forward pass."""
        alone = len(self._jobs) >= self._forwards and self._jobs[0][0].alone
        return self._tokens >= self._budget * self._forwards or alone

    def _run(self) -> None:
        before: _Forward | None = None
        while not self._closed or self._jobs or before:
            # At most two passes are in flight: the next is launched before the current one is waited for, so its
            # kernels queue behind those of the current one while the outputs of that are copied to the host.
            taken = self._take(before)
            begun = self._begin(taken) if taken else None
            if before:
                self._finish(before)
            before = begun

    def _begin(self, taken: Sequence[_Asked]) -> _Forward | None:
        """Launch a forward pass; return None if it failed, after each of its jobs was computed alone."""
        begun = time.perf_counter()
        tokens = sum(job.query.ids.size for job, _ in taken)
        try:
            answers = self._answer([job for job, _ in taken])
        except Exception as error:  # an error of one forward pass fails its requests, not the server
            self._fail(taken, error)
            return None
        # time to launch the next: when this pass ends at the rate so far, less what a launch takes
        return _Forward(taken, answers, tokens, begun, max(begun, self._ended) + tokens * self._each - LAUNCH_SECONDS)

    def _fail(self, taken: Sequence[_Asked], error: Exception) -> None:
        if len(taken) > 1:  # find the job at fault by running each alone
            for one in taken:
                forward = self._begin([one])
                if forward:
                    self._finish(forward)
            return
        log.warning("a request failed: %s: %.300s", type(error).__name__, error)
        if not taken[0][1].done():
            taken[0][1].set_exception(error)

    def _finish(self, forward: _Forward) -> None:
        try:
            for answer in forward.answers:
                if isinstance(answer, HostCopy):
                    answer.wait()
        except RuntimeError as error:  # an error of the GPU
            self._fail(forward.taken, error)
            return
        now = time.perf_counter()
        # a pass that was launched behind another one has computed since the end of that one, not since its launch
        seconds = now - max(forward.begun, self._ended)
        self.served["seconds"] += seconds
        self.served["forwards"] += 1
        self.served["requests"] += len(forward.taken)
        self.served["tokens"] += forward.tokens
        self._ended = now
        self._each = seconds / forward.tokens
        for (_, future), answer in zip(forward.taken, forward.answers, strict=True):
            if not future.done():
                future.set_result(answer)
