"""Process that calls a user's function: `python function_worker.py`, with JSON lines as its protocol.

The first line it reads names the file, its code, the function and what it returns (a key of `RETURNS`); it replies
`{"ready": true}`. Each later line holds the `arguments` of a call and its number, `call`; it replies `{"value": ...}`
with the same number. Any failure is `{"error": text}`. Output of the function goes to standard error. It imports the
standard library alone, and ends with its standard input, or with the process that started it, however that ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from typing import IO

MAX_BYTES = 1 << 20  # of the messages that one call returns, as JSON
OWNER_S = 0.5  # between two looks for the process that started this one


def main() -> None:
    # A thread, since the function may never return. The present parent is the owner: another one means that it has
    # ended.
    threading.Thread(target=_end_with_owner, args=(os.getppid(),), daemon=True).start()
    own = os.getpid()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what user code and C libraries print is kept out of the replies
    lines = os.fdopen(os.dup(0), "r", encoding="utf-8")
    given = json.loads(lines.readline())
    try:
        function = _load(given["file"], given["code"], given["function"])
    except BaseException as error:  # user code may raise anything, SystemExit too
        _write_line(out, {"error": _error_text(error, given["file"])})
        return
    _leave_if_forked(own)
    _write_line(out, {"ready": True})
    read = RETURNS[given["returns"]]
    for line in lines:
        request = json.loads(line)
        try:
            reply: dict[str, object] = {"value": read(function(*request["arguments"]))}
        except BaseException as error:
            reply = {"error": _error_text(error, given["file"])}
        _leave_if_forked(own)
        _write_line(out, {"call": request["call"], **reply})


def _leave_if_forked(own: int) -> None:
    """End a copy of this process that the function has forked and let return: it would reply and read requests."""
    if os.getpid() != own:
        os._exit(0)


def _end_with_owner(owner: int) -> None:
    """End this process and all that the function started, once the process that started it is gone.

    A function that computes or waits for ever does not see the end of its standard input.
    """
    while os.getppid() == owner:
        time.sleep(OWNER_S)
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():  # a group of its own, which holds what it started
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _load(file: str, code: str, name: str) -> Callable[[object, str, object], object]:
    folder = os.path.dirname(os.path.abspath(file))
    sys.path[0] = folder  # imports come from the file's folder instead of this module's
    module = types.ModuleType("distill_function")
    module.__file__ = file
    sys.modules[module.__name__] = module
    exec(compile(code, file, "exec"), module.__dict__)
    function = getattr(module, name, None)
    if not callable(function):
        known = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ValueError(f"expected a function {name}, got {', '.join(known) or 'no function at all'}")
    return function


def _number(value: object) -> float:
    """Return the reward as a float; 0-d tensors and numpy's numbers have `item`."""
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, int | float):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    return float(value)


def _reward(value: object) -> tuple[float, str | None]:
    """Return a reward and the feedback on the response, None where the function returns the number alone."""
    if not isinstance(value, tuple | list):
        return _number(value), None
    if len(value) != 2 or not isinstance(value[1], str | None):
        raise TypeError("expected a number, or a number and a text")
    feedback = value[1]
    if feedback is not None:
        _require_utf8([feedback])
    return _number(value[0]), feedback


def _require_utf8(texts: object) -> None:
    try:
        json.dumps(texts, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half of a pair of UTF-16, which no tokenizer takes
        raise ValueError(f"expected texts that UTF-8 can hold, got {error.object[error.start]!r} in one") from None
    size = len(json.dumps(texts))
    if size > MAX_BYTES:
        raise ValueError(f"expected messages or a text of at most {MAX_BYTES:,} bytes, got {size:,}")


def _messages(value: object) -> list[dict[str, object]] | None:
    """Return messages as a list of dictionaries; None for None and for no messages."""
    if value is None or value == []:
        return None
    messages: list[dict[str, object]] = value if isinstance(value, list) else [value]  # type: ignore[list-item]
    for message in messages:
        if not isinstance(message, dict):
            raise TypeError(f"expected a message, messages or None, got {type(message).__name__}")
        role = message.get("role")
        content = message.get("content")
        if not isinstance(role, str) or role == "assistant":
            raise ValueError(f"expected a message of a role other than assistant, got {role!r}")
        if not isinstance(content, str):
            raise TypeError(f"expected a text as content of a message, got {type(content).__name__}")
    _require_utf8(messages)
    return messages


RETURNS: dict[str, Callable[[object], object]] = {"number": _number, "reward": _reward, "messages": _messages}


def _error_text(error: BaseException, file: str) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    place = f"line {lines[-1]}: " if lines else ""
    text = str(error).strip()
    return f"{place}{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"


def _write_line(out: IO[str], value: object) -> None:
    out.write(json.dumps(value) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
