"""Calls of a user's function in separate processes, so that it may hang, crash or print.

    with RewardFunction(Path("right.py"), code, "exact", timeout=10.0) as reward:
        reward(inputs)                        # one number per response, finite

A process that dies or takes too long is ended, and the run with it: one line names the file, the function and the row.
"""

from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from distill.generation import function_worker

IMPORT_TIMEOUT = 120.0  # time limit of the file's imports, in seconds
MAX_WORKERS = 4


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
        answer: the student's response, without special tokens.
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
        code: content of the file.
        name: name of the function.
        timeout: time limit of a call, in seconds.
        workers: maximum number of processes; None for the number of processors, up to four.

    Attributes:
        field: the recipe's field that names the function, as messages begin.
        limit: its field that gives the time limit.
        returns: `number` or `messages`.
    """

    field: str
    limit: str
    returns: Literal["number", "messages"]

    def __init__(self, file: Path, code: bytes, name: str, timeout: float, workers: int | None = None) -> None:
        self.file, self.code, self.name, self.timeout = file, code, name, timeout
        self.count = workers or min(MAX_WORKERS, os.cpu_count() or 1)
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers: list[_Worker] = []

    def call(self, calls: Sequence[Call]) -> list[Any]:
        """Return what the function returns for each of some calls.

        Raises:
            ValueError: the function raised, hung, died, or returned something else than it should.
        """
        while len(self._workers) < min(self.count, len(calls)):
            self._workers.append(worker := _Worker(self))
            self._idle.put(worker)
        try:
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
        """Return the beginning of an error message."""
        return f"{self.field} {self.file}:{self.name}{f', {location}' if location else ''}"


class RewardFunction(UserFunction):
    """A reward: the function is called as function(prompt, answer, row) and returns a finite number."""

    field, limit, returns = "loss.terms: reward", "loss.terms reward_timeout", "number"

    def __call__(self, inputs: Sequence[FunctionInput]) -> list[float]:
        """Return the reward of each response.

        Raises:
            ValueError: the function raised, hung, died, or returned something other than a finite number.
        """
        values = self.call([Call(each.location, [each.prompt, each.answer, each.row]) for each in inputs])
        for each, value in zip(inputs, values, strict=True):
            if not math.isfinite(value):
                self.close()
                raise ValueError(f"{self.error_prefix(each.location)}: expected a finite number, got {value}")
        return values


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
        )
        self.end = weakref.finalize(self, _end, self.process)
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(self.process, self.lines), daemon=True).start()
        start: dict[str, object] = {
            "file": str(function.file),
            "code": function.code.decode(),
            "function": function.name,
        }
        start["returns"] = function.returns
        self._exchange(start, IMPORT_TIMEOUT, "")

    def call(self, call: Call) -> Any:
        return self._exchange({"arguments": call.arguments}, self.function.timeout, call.location)["value"]

    def _exchange(self, sent: dict[str, object], seconds: float, location: str) -> dict[str, Any]:
        prefix = self.function.error_prefix(location)
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(sent) + "\n")
            self.process.stdin.flush()
            line = self.lines.get(timeout=seconds)
        except queue.Empty:
            self.end()
            limit = self.function.limit if location else "the limit for its imports"
            raise ValueError(f"{prefix}: no response within {seconds:g} s ({limit})") from None
        except OSError:
            line = ""
        if not line:
            code = self.process.wait()
            raise ValueError(f"{prefix}: its process ended with exit code {code}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise ValueError(f"{prefix}: {found['error']}")
        return found


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


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
