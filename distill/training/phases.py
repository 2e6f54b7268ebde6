"""Breakdown of an optimizer step's time into data, teacher, student, loss and optimizer, without device syncs.

Runs and `distill bench` share this clock.

    phases = Phases(device)
    with phases.measure("teacher"):
        hidden = teacher(...)
    phases.seconds()                # {"data": ..., "teacher": ..., ...}, seconds since the last restart

Every moment belongs to exactly one phase, so the five add up to the wall time between two readings. At each change of
phase a CUDA event is recorded in the stream (on a CPU: the clock is read), and the time between two events is that of
the current phase: the GPU's work or, where its queue was empty, its wait for the host.

    data        fetching and copying batches, counting tokens, the host's work between steps, waiting for other ranks
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
    """Clock that is always in one of its phases, or paused.

    Args:
        device: Device of the models; a CUDA device is timed by events, any other by the host's clock.
        names: Names of the phases; the clock begins with the first.
    """

    def __init__(self, device: torch.device, names: Sequence[str] = PHASES) -> None:
        self.device = device
        self.names = names
        self.steps = 0
        self._marks: list[tuple[str, Any]] = []
        self._free: list[torch.cuda.Event] = []
        self.restart()

    def restart(self) -> None:
        # events are used again rather than made anew in each step
        self._free += [mark for _, mark in self._marks if isinstance(mark, torch.cuda.Event)]
        self._marks = []
        self.steps = 0
        self.enter(self.names[0])

    @property
    def current(self) -> str:
        return self._marks[-1][0]

    def enter(self, phase: str) -> None:
        self._marks.append((phase, self._now()))

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Enter `phase` in the block, then return to the previous one; a paused clock stays paused."""
        before = self.current
        phase = PAUSED if before == PAUSED else phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with its time counted as `phase`."""

        @functools.wraps(call)
        def measured(*args: Any, **kwargs: Any) -> Any:
            with self.measure(phase):
                return call(*args, **kwargs)

        return measured

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase since the last restart, without pauses. Synchronises with the device."""
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
