"""The one thread that asks the teacher, and the bounded queue before it.

Requests wait in the order they came. The thread takes the first, and with it those after it that may share a forward,
up to a budget of tokens; it waits for nobody: what comes while a forward runs is the next one's. A GPU always has one
forward to go on with: the next is begun when it fills the budget, or when the one before is about to end by the rate of
those so far, while that one's answers are still under way. A request whose client has left is not computed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import NamedTuple

from distill.models.host_copy import HostCopy
from distill.serving.engine import Answer, Job

log = logging.getLogger(__name__)

LEAD_S = 0.03  # what it takes to begin a forward
LOOKS_S = 0.0005  # between two looks at the one that runs


_Asked = tuple[Job, Future[Answer]]


class Full(RuntimeError):
    """The queue has no room; `seconds` is about when it will.

    Attributes:
        seconds: from now.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__("the server is busy")
        self.seconds = seconds


class Shares:
    """Jobs shared out over forwards that are made at once, each of one job that goes alone or of several.

    Args:
        most: forwards.
        budget: tokens of one, of several jobs.

    Attributes:
        jobs: of each forward.
    """

    def __init__(self, most: int, budget: int) -> None:
        self.jobs: list[list[Job]] = []
        self._most, self._budget = most, budget
        self._room: list[int] = []

    def add(self, job: Job) -> bool:
        """Whether it had a place. Logits are of all forwards, or of none."""
        size, place = job.query.ids.size, len(self.jobs)
        if place and (job.options.logits or self.jobs[0][0].options.logits):
            return False
        if place == self._most:
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
    """One that was begun: when it was, and when the next should be; `tokens` of it."""

    taken: Sequence[_Asked]
    answers: Sequence[Answer]
    tokens: int
    begun: float
    expected: float

    def is_ready(self) -> bool:
        return all(answer.is_ready() for answer in self.answers if isinstance(answer, HostCopy))


class Worker:
    """Answers jobs in a thread of its own.

    Args:
        answer: as `Engine.answer`; where it gives a `HostCopy`, that is waited for.
        budget: tokens that share a forward.
        most_waiting: tokens that may wait; more are refused.
        forwards: that are made at once.

    Attributes:
        served: jobs, tokens and seconds of forwards so far.
    """

    def __init__(
        self, answer: Callable[[Sequence[Job]], list[Answer]], budget: int, most_waiting: int, forwards: int = 1
    ) -> None:
        self._answer, self._budget, self._most, self._forwards = answer, budget, most_waiting, forwards
        self._jobs: deque[_Asked] = deque()
        self._begun: list[Future[Answer]] = []
        self._lost: Exception | None = None
        self._tokens, self._closed = 0, False
        self._changed = threading.Condition()
        self.served = {"requests": 0, "tokens": 0, "seconds": 0.0, "forwards": 0}
        self._ended = self._each = 0.0  # when the last forward did, and its seconds a token
        self._thread = threading.Thread(target=self._run, daemon=True, name="teacher")
        self._thread.start()

    def submit(self, job: Job) -> Future[Answer]:
        """Put a job into the queue.

        Raises:
            Full: there is no room.
        """
        size = job.query.ids.size
        with self._changed:
            if self._lost is not None:
                raise self._lost
            if self._closed:
                raise Full(30.0)
            if self._jobs and self._tokens + size > self._most:
                speed = self.served["tokens"] / max(self.served["seconds"], 1e-9) or 1.0
                raise Full(min(max(self._tokens / speed / 2, 0.1), 60.0))
            future: Future[Answer] = Future()
            self._jobs.append((job, future))
            self._tokens += size
            self._changed.notify()
        return future

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._jobs)

    def lose(self, error: Exception) -> None:
        """Take no more and wait for nothing: whoever has asked, or asks, gets `error`."""
        with self._changed:
            self._closed, self._lost = True, error
            left = [*self._begun, *(future for _, future in self._jobs)]
            self._jobs.clear()
            self._changed.notify()
        for future in left:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)

    @property
    def lost(self) -> bool:
        """Whether nothing will be answered any more."""
        return self._lost is not None

    def close(self) -> None:
        """Take no more, and end after the forward that runs; who waits is told."""
        with self._changed:
            self._closed = True
            left, self._jobs = list(self._jobs), deque()
            self._changed.notify()
        for _, future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(Full(30.0))
        if self._lost is None:  # else it may wait for a GPU for ever
            self._thread.join(timeout=60)

    def _take(self, before: _Forward | None) -> list[_Asked]:
        """The next jobs that share a forward, once it is time; none once closed, or where the forward `before` has
        ended."""
        with self._changed:
            while not self._closed and not (before.is_ready() if before else self._jobs):
                if before and self._jobs and (self._is_full() or time.perf_counter() > before.expected):
                    break
                self._changed.wait(LOOKS_S if before else None)
            taken: list[_Asked] = []
            shares = Shares(self._forwards, self._budget)
            if before and before.is_ready():
                return taken
            while self._jobs:
                job, future = self._jobs[0]
                if not future.cancelled() and not shares.add(job):  # else its client has left
                    break
                self._jobs.popleft()
                self._tokens -= job.query.ids.size
                if future.set_running_or_notify_cancel():
                    taken.append((job, future))
            self._begun = [future for future in self._begun if not future.done()] + [future for _, future in taken]
            return taken

    def _is_full(self) -> bool:
        """Whether nothing that may yet come would share the next forward."""
        alone = len(self._jobs) >= self._forwards and self._jobs[0][0].alone
        return self._tokens >= self._budget * self._forwards or alone

    def _run(self) -> None:
        before: _Forward | None = None
        while not self._closed or self._jobs or before:
            taken = self._take(before)
            begun = self._begin(taken) if taken else None
            if before:
                self._finish(before)
            before = begun

    def _begin(self, taken: Sequence[_Asked]) -> _Forward | None:
        """A forward under way; None of one that has failed, of whose jobs each is then computed by itself."""
        begun, tokens = time.perf_counter(), sum(job.query.ids.size for job, _ in taken)
        try:
            answers = self._answer([job for job, _ in taken])
        except Exception as error:  # one forward's fault is that of who asked for it, not the server's end
            self._fail(taken, error)
            return None
        return _Forward(taken, answers, tokens, begun, max(begun, self._ended) + tokens * self._each - LEAD_S)

    def _fail(self, taken: Sequence[_Asked], error: Exception) -> None:
        if len(taken) > 1:  # of several: find whose
            for one in taken:
                if forward := self._begin([one]):
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
        except RuntimeError as error:  # of the GPU
            self._fail(forward.taken, error)
            return
        now = time.perf_counter()
        seconds = now - max(forward.begun, self._ended)
        self.served["seconds"] += seconds
        self.served["forwards"] += 1
        self.served["requests"] += len(forward.taken)
        self.served["tokens"] += forward.tokens
        self._ended, self._each = now, seconds / forward.tokens
        for (_, future), answer in zip(forward.taken, forward.answers, strict=True):
            if not future.done():
                future.set_result(answer)
