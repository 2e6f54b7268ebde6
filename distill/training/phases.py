"""Where an optimizer step's time goes: data, teacher, student, loss, optimizer, without stopping the device.

The one clock of steps, a run's and `distill bench`'s.

    phases = Phases(device)
    with phases.within("teacher"):
        hidden = teacher(...)
    phases.read()                   # {"time_data": ..., "time_teacher": ..., ...}, seconds an optimizer step

Every moment belongs to exactly one phase, so that the five add up to the wall time between two readings. At each
change of phase a CUDA event is recorded in the stream (on a CPU: the clock is read), and the time between two events
is that of the phase that was on: what the GPU did or, where it had run dry, how long it waited for the host.

    data        fetching and moving batches, counting tokens, the host's work between steps, waiting for other ranks
    teacher     the teacher's forward
    student     the student's forward and backward, with the all-reduce or gathering of its gradients and weights
    loss        the fused loss over both heads, which makes its gradients in its forward: almost all of its backward
    optimizer   clipping, the gradients' norm, the update
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

PHASES = ("data", "teacher", "student", "loss", "optimizer")
PAUSED = "paused"
KEYS = tuple(f"time_{phase}" for phase in PHASES)


class Phases:
    """A clock that is always on one of its phases, or paused.

    Args:
        device: Of the models; a CUDA device is timed by events, any other by the host's clock.
        names: Of the phases; it begins with the first.
    """

    def __init__(self, device: torch.device, names: Sequence[str] = PHASES) -> None:
        self.device, self.names = device, names
        self.steps = 0
        self._marks: list[tuple[str, Any]] = []
        self._free: list[torch.cuda.Event] = []
        self.restart()

    def restart(self) -> None:
        """Forget what was timed; the clock is on its first phase from now."""
        self._free += [mark for _, mark in self._marks if isinstance(mark, torch.cuda.Event)]
        self._marks, self.steps = [], 0
        self.enter(self.names[0])

    @property
    def current(self) -> str:
        """The phase that is on."""
        return self._marks[-1][0]

    def enter(self, phase: str) -> None:
        """From here on it is `phase`."""
        self._marks.append((phase, self._now()))

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """`phase` inside, then what was on before; a pause stays a pause."""
        before = self.current
        phase = PAUSED if before == PAUSED else phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, its time counted as `phase`."""

        @functools.wraps(call)
        def within(*args: Any, **kwargs: Any) -> Any:
            with self.within(phase):
                return call(*args, **kwargs)

        return within

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase since the last restart, pauses left out. Waits until the device has come here."""
        marks = [*self._marks, ("", self._now())]
        if self.device.type == "cuda":
            marks[-1][1].synchronize()
        total = dict.fromkeys((*self.names, PAUSED), 0.0)
        for (phase, start), (_, end) in itertools.pairwise(marks):
            total[phase] += start.elapsed_time(end) * 1e-3 if self.device.type == "cuda" else end - start
        del total[PAUSED]
        return total

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
