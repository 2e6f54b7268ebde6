"""Calls of a user's function in separate processes, so that it may hang, crash or print.

    with RewardFunction(Path("right.py"), code, "exact", timeout=10.0) as reward:
        reward(inputs)                        # one number per response, finite

A process that dies or takes too long is ended, and the run with it: one line names the file, the function and the row.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from distill.generation import function_worker

IMPORT_TIMEOUT = 120.0  # time limit of the file's imports, in seconds
MAX_WORKERS = 4
LARGEST_REWARD = 1e30  # advantages and their products with log-probabilities are float32


class Call(NamedTuple):
    """One call of a user's function.

    Attributes:
        location: the data's row, as error messages name it.
        arguments: the function's arguments, as JSON has them.
    """

    location: str
    arguments: list[object]


class FunctionInput(NamedTuple):
    """One response to reward.

    Attributes:
        location: the row, as error messages name it.
        prompt: the messages before the response, or the text.
        answer: the student's response with its special tokens, without the token that ended it.
        row: all columns of the data's row.
        tools: JSON schemas of the tools that the row declares; None for none.
    """

    location: str
    prompt: list[dict[str, object]] | str
    answer: str
    row: dict[str, object]
    tools: list[object] | None = None


class UserFunction:
    """The function `name` of a file, called several times in parallel.

    Args:
        file: path of the code; modules in its folder can be imported.
        timeout: time limit of a call, in seconds.
        workers: maximum number of processes; None for the number of processors, up to four.

    Attributes:
        field: the recipe's field that names the function, as messages begin.
        limit: its field that gives the time limit.
        returns: a key of `function_worker.RETURNS`.
    """

    field: str
    limit: str
    returns: Literal["number", "reward", "messages"]

    def __init__(self, file: Path, code: bytes, name: str, timeout: float, workers: int | None = None) -> None:
        self.file = file
        self.code = code
        self.name = name
        self.timeout = timeout
        self.count = workers or min(MAX_WORKERS, os.cpu_count() or 1)
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers: list[_Worker] = []

    def call(self, calls: Sequence[Call]) -> list[Any]:
        """Return what the function returns for each of some calls.

        Raises:
            ValueError: the function raised, hung, died, or returned something else than it should.
        """
        while len(self._workers) < min(self.count, len(calls)):
            worker = _Worker(self)
            self._workers.append(worker)
            self._idle.put(worker)
        try:
            # as many threads as processes: each takes an idle one and waits for its reply
            with ThreadPoolExecutor(max(len(self._workers), 1)) as pool:
                return list(pool.map(self._call_idle_worker, calls))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes; a later call starts new ones."""
        while self._workers:
            self._workers.pop().end()
        self._idle = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _call_idle_worker(self, call: Call) -> Any:
        worker = self._idle.get()
        try:
            return worker.call(call)
        finally:
            self._idle.put(worker)

    def error_prefix(self, location: str = "") -> str:
        return f"{self.field} {self.file}:{self.name}{f', {location}' if location else ''}"


class Judgement(NamedTuple):
    """What a reward function returns for a response: its reward, and feedback on it; None for none."""

    reward: float
    feedback: str | None = None


class RewardFunction(UserFunction):
    """A reward: the function is called as function(prompt, answer, row) and returns a finite number, or the number and
    a text.
    """

    field = "loss.terms: reward"
    limit = "loss.terms reward_timeout"
    returns = "reward"

    def __call__(self, inputs: Sequence[FunctionInput]) -> list[float]:
        """Return the reward of each response.

        Raises:
            ValueError: as of `judge`.
        """
        return [each.reward for each in self.judge(inputs)]

    def judge(self, inputs: Sequence[FunctionInput]) -> list[Judgement]:
        """Return the reward of each response and the feedback on it.

        Raises:
            ValueError: the function raised, hung, died, or returned something other than a finite number and a text.
        """
        calls = [Call(each.location, [each.prompt, each.answer, each.row]) for each in inputs]
        found = [Judgement(*value) for value in self.call(calls)]
        for each, (value, _) in zip(inputs, found, strict=True):
            if not math.isfinite(value):
                self.close()
                raise ValueError(f"{self.error_prefix(each.location)}: expected a finite number, got {value}")
            if abs(value) > LARGEST_REWARD:
                self.close()
                raise ValueError(
                    f"{self.error_prefix(each.location)}: expected a number from {-LARGEST_REWARD:g} to "
                    f"{LARGEST_REWARD:g}, got {value:g}"
                )
        return found


class _Worker:
    """One process of a user's function."""

    def __init__(self, function: UserFunction) -> None:
        self.function = function
        self.process = subprocess.Popen(
            [sys.executable, str(Path(function_worker.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=os.environ | {"PYTHONHASHSEED": "0"},
            start_new_session=True,  # a group of its own: what the function starts ends with it
        )
        self.calls = 0
        # ends the process also where this object is collected or the interpreter exits; a second call does nothing
        self.end = weakref.finalize(self, _end, self.process)
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(self.process, self.lines), daemon=True).start()
        start: dict[str, object] = {
            "file": str(function.file),
            "code": _source_of(function),
            "function": function.name,
        }
        start["returns"] = function.returns
        self._exchange(start, IMPORT_TIMEOUT, "")

    def call(self, call: Call) -> Any:
        self.calls += 1
        sent = {"call": self.calls, "arguments": call.arguments}
        return self._exchange(sent, self.function.timeout, call.location)["value"]

    def _exchange(self, sent: dict[str, object], seconds: float, location: str) -> dict[str, Any]:
        """Send a request and return the reply to it.

        The whole exchange has one deadline. A timer ends the process there, since a process that reads nothing blocks
        the writing of a large request, and one that closed its pipes but goes on would be waited for.
        """
        prefix = self.function.error_prefix(location)
        deadline = time.monotonic() + seconds
        timer = threading.Timer(seconds, self.end)
        timer.daemon = True
        timer.start()
        try:
            found = self._reply(sent, deadline)
        finally:
            timer.cancel()
        if found is None:
            limit = self.function.limit if location else "the limit for its imports"
            if time.monotonic() >= deadline:
                self.end()
                raise ValueError(f"{prefix}: no response within {seconds:g} s ({limit})")
            code = self.process.poll()
            self.end()
            how = "closed its output" if code is None else f"ended with exit code {code}"
            raise ValueError(f"{prefix}: its process {how}")
        if "error" in found:
            raise ValueError(f"{prefix}: {found['error']}")
        return found

    def _reply(self, sent: dict[str, object], deadline: float) -> dict[str, Any] | None:
        """Return the reply to a request; None where the process ends, closes its output, or is late."""
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(sent) + "\n")
            self.process.stdin.flush()
            # copies that the function forked may write for ever, whose lines are no reply
            while time.monotonic() < deadline:
                line = self.lines.get(timeout=max(deadline - time.monotonic(), 0.0))
                if not line:
                    # the end of its output comes just before the end of the process
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self.process.wait(timeout=min(1.0, max(deadline - time.monotonic(), 0.0)))
                    return None
                found: dict[str, Any] = json.loads(line)
                if found.get("call") == sent.get("call"):  # another number is the reply of a copy of the process
                    return found
                if "error" in found and "call" not in found:
                    return found
        except (queue.Empty, OSError):
            return None
        return None


def _listen(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    """Put the lines of a process into a queue, and an empty one at its end."""
    for line in _lines_of(process):
        lines.put(line)
    lines.put("")


def _lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    try:
        yield from process.stdout
    except ValueError:  # closed while it was read
        return


def _source_of(function: UserFunction) -> str:
    """Return the code of a function's file as text.

    Raises:
        ValueError: It is not UTF-8.
    """
    try:
        return function.code.decode("utf-8-sig")  # a byte order mark is no part of the code
    except UnicodeDecodeError as error:
        raise ValueError(f"{function.error_prefix()}: expected a Python file in UTF-8, got {error.reason}") from None


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a process and all that it has started."""
    if process.poll() is None and hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
