"""Limits on time and memory of untrusted programs, such as chat templates."""

from __future__ import annotations

import contextlib
import signal
import threading
import types
from collections.abc import Iterator
from pathlib import Path

try:
    import resource
except ImportError:  # no such limits on this system
    resource = None  # type: ignore[assignment]


@contextlib.contextmanager
def limit_resources(seconds: float, more_bytes: int) -> Iterator[None]:
    """Limit time and memory of the block, in this process.

    Args:
        seconds: Wall-clock limit, in the main thread only, not on Windows.
        more_bytes: Memory that the process may allocate beyond the present, on Linux only.

    Raises:
        TimeoutError: The time limit was exceeded.
        MemoryError: The memory limit was exceeded.
    """
    with _memory(more_bytes), _time(seconds):
        yield


@contextlib.contextmanager
def _time(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def end(number: int, frame: types.FrameType | None) -> None:
        raise TimeoutError(f"it takes longer than {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, end)
    # repeatedly: jinja's optimiser ignores exceptions raised by a constant, and continues
    waiting, _ = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, waiting)
        signal.signal(signal.SIGALRM, handler)


@contextlib.contextmanager
def _memory(more_bytes: int) -> Iterator[None]:
    size = Path("/proc/self/statm")
    if resource is None or not size.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = int(size.read_text().split()[0]) * resource.getpagesize() + more_bytes
    bounds = [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(most, *bounds) if bounds else most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
