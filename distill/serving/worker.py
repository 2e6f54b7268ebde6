"""The one thread that asks the teacher, and the bounded queue before it.

Requests wait in the order they came. The thread takes the first, and with it those after it that may share a forward,
up to a budget of tokens; it waits for nobody: what comes while a forward runs is the next one's. A request whose client
has left is not computed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from distill.serving.engine import Answer, Job

log = logging.getLogger(__name__)


class Full(RuntimeError):
    """The queue has no room; `seconds` is about when it will.

    Attributes:
        seconds: from now.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__("the server is busy")
        self.seconds = seconds


class Worker:
    """Answers jobs in a thread of its own.

    Args:
        answer: as `Engine.answer`.
        budget: tokens that share a forward.
        most_waiting: tokens that may wait; more are refused.

    Attributes:
        served: jobs, tokens and seconds of forwards so far.
    """

    def __init__(self, answer: Callable[[Sequence[Job]], list[Answer]], budget: int, most_waiting: int) -> None:
        self._answer, self._budget, self._most = answer, budget, most_waiting
        self._jobs: deque[tuple[Job, Future[Answer]]] = deque()
        self._tokens, self._closed = 0, False
        self._changed = threading.Condition()
        self.served = {"requests": 0, "tokens": 0, "seconds": 0.0, "forwards": 0}
        self._thread = threading.Thread(target=self._run, daemon=True, name="teacher")
        self._thread.start()

    def submit(self, job: Job) -> Future[Answer]:
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

    def close(self) -> None:
        """Take no more, and end after the forward that runs; who waits is told."""
        with self._changed:
            self._closed = True
            left, self._jobs = list(self._jobs), deque()
            self._changed.notify()
        for _, future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(Full(30.0))
        self._thread.join(timeout=60)

    def _take(self) -> list[tuple[Job, Future[Answer]]]:
        """The next jobs that share a forward; none once closed."""
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            taken: list[tuple[Job, Future[Answer]]] = []
            size = 0
            while self._jobs:
                job, future = self._jobs[0]
                if taken and (job.alone or taken[0][0].alone or size + job.query.ids.size > self._budget):
                    break
                self._jobs.popleft()
                self._tokens -= job.query.ids.size
                if future.set_running_or_notify_cancel():  # else its client has left
                    taken.append((job, future))
                    size += job.query.ids.size
            return taken

    def _run(self) -> None:
        while not self._closed or self._jobs:
            taken = self._take()
            if taken:
                self._compute(taken)

    def _compute(self, taken: Sequence[tuple[Job, Future[Answer]]]) -> None:
        begun = time.perf_counter()
        try:
            answers = self._answer([job for job, _ in taken])
        except Exception as error:  # one forward's fault is that of who asked for it, not the server's end
            if len(taken) > 1:  # of several: find whose
                for one in taken:
                    self._compute([one])
                return
            log.warning("a request failed: %s: %.300s", type(error).__name__, error)
            taken[0][1].set_exception(error)
            return
        self.served["seconds"] += time.perf_counter() - begun
        self.served["forwards"] += 1
        self.served["requests"] += len(taken)
        self.served["tokens"] += sum(job.query.ids.size for job, _ in taken)
        for (_, future), answer in zip(taken, answers, strict=True):
            future.set_result(answer)
