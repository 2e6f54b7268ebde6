"""Pytest plugin that prints the processor time of each test file, its processes included, and the time it waited.

    pytest -p scripts.suite_times                       # the 25 files that cost most, and the 25 tests
    pytest -p scripts.suite_times -m full tests/runs/test_crash.py

Wall time says little where several suites share a machine: processor time is that of this process, of those it waited
for and of all that still run below it; a test waits where its main thread neither runs nor is ready to.
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

LISTED = 25
TICK = os.sysconf("SC_CLK_TCK")


class Times(NamedTuple):
    """Seconds so far: of this process, of those below it, on the clock, and in which the main thread was runnable."""

    own: float
    below: float
    clock: float
    runnable: float


def seconds_below(process: int) -> float:
    """Return the processor time of the processes below one that have not been waited for yet."""
    total = 0.0
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:  # it has ended meanwhile
        return total
    for child in map(int, children):
        try:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15])) / TICK + seconds_below(child)
    return total


def now() -> Times:
    """Return the seconds so far."""
    process = os.getpid()
    runs, ready = Path(f"/proc/self/task/{process}/schedstat").read_text().split()[:2]
    own, waited_for = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    below = waited_for.ru_utime + waited_for.ru_stime + seconds_below(process)
    return Times(own.ru_utime + own.ru_stime, below, time.monotonic(), (int(runs) + int(ready)) * 1e-9)


class SuiteTimes:
    """Processor and waiting seconds by test, of this process or, in the one that starts workers, of all of them."""

    def __init__(self) -> None:
        self.used: Counter[str] = Counter()
        self.waited: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Measure a test with its fixtures; those of a file are counted with its first test."""
        before = now()
        try:
            return (yield)
        finally:
            after = now()
            own, below, clock, runnable = (b - a for a, b in zip(before, after, strict=True))
            self.used[item.nodeid] += own + below
            self.waited[item.nodeid] += max(0.0, clock - runnable - below)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand the figures of a worker to the process that started it."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["suite_times"] = (dict(self.used), dict(self.waited))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the figures of a worker."""
        used, waited = getattr(node, "workeroutput", {}).get("suite_times", ({}, {}))
        self.used.update(used)
        self.waited.update(waited)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the files and the tests that cost most."""
        write = terminalreporter.write_line
        write(f"processor time {sum(self.used.values()):.0f} s, waiting {sum(self.waited.values()):.0f} s")
        files, waited = Counter[str](), Counter[str]()
        for total, figures in ((files, self.used), (waited, self.waited)):
            for name, seconds in figures.items():
                total[name.partition("::")[0]] += seconds
        for title, most, waits in (("file", files, waited), ("test", self.used, self.waited)):
            write(f"{'seconds':>8}{'waiting':>9}  {title}")
            for name, seconds in most.most_common(LISTED):
                write(f"{seconds:8.1f}{waits[name]:9.1f}  {name}")


def pytest_configure(config: pytest.Config) -> None:
    """Register the measurement."""
    config.pluginmanager.register(SuiteTimes())
