"""HTTP client of one teacher's servers: requests go to the least busy one, and to another where one is gone.

    servers = Servers(config)
    identity = servers.identity()                  # of all of them the same, or the run is refused
    future = servers.submit("/v1/targets", body, params)

Connections are those of urllib3's pools; what is added here is one deadline for a whole reply (`connections.py`), a
bound on its size, its checksum, and the choice of a server. A server that does not answer, or reports that it is full,
gets no requests for a while (exponential backoff, or its `Retry-After`), and its requests go to the others: every
request of the protocol may be repeated, since a teacher's outputs are a function of the request. Where none has
answered for `config.wait` seconds, or one answers as another teacher than the run began with,
`TeacherUnavailableError` ends the run in one line.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlencode

import torch
import urllib3

from distill.core.errors import TeacherUnavailableError
from distill.teachers.backends.served.connections import LATE, interrupt, pool_manager
from distill.teachers.backends.served.integrity import CHECKSUM, checksum_error
from distill.teachers.backends.served.protocol import BINARY, TEACHER, Identity, ProtocolError

log = logging.getLogger(__name__)

# seconds of backoff
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 30.0
CONNECT_SECONDS = 10.0
HEALTH_SECONDS = 5.0
CLOSE_SECONDS = 2.0
# of a reply, and of one read of it
MOST_BYTES = 4 << 30
CHUNK = 1 << 20
LARGE = 1 << 16  # bytes from which on an answer is read into pinned memory
TOKEN_VARIABLE = "DISTILL_SERVE_TOKEN"
RETRIED = (408, 425, 429, 500, 502, 503, 504)
T = TypeVar("T")


class ServerConfig(NamedTuple):
    """Addresses of the servers, and settings of requests to them.

    Attributes:
        urls: Base URLs of the servers, without a path.
        token: bearer token; None for none.
        wait: Seconds without a response of any server after which a request fails.
        at_once: concurrent requests per server.
        sums: True if every response must carry a checksum, as those of `distill serve` do.
    """

    urls: tuple[str, ...]
    token: str | None = None
    wait: float = 300.0
    at_once: int = 4
    sums: bool = True


def token_of(path: str | Path | None, option: str = "teacher.token_file") -> str | None:
    """Return the bearer token in a file, else in DISTILL_SERVE_TOKEN; None where there is neither."""
    if path is None:
        return os.environ.get(TOKEN_VARIABLE)
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{option}: {path} cannot be read: {error}") from None


class _Server:
    """One server: our open requests to it, its failures, and the end of its backoff."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.busy = 0
        self.failures = 0
        self.until = 0.0
        self.fault = ""


class Servers:
    """HTTP client of servers of the same teacher, with threads of its own.

    Args:
        config: Addresses and request settings.

    Attributes:
        received: Bytes of response bodies so far; `positions`, the token positions in them.
        expected: Hash of the identity that every response must carry; None before it is known.
        ended: Function that returns why servers of this run no longer respond, or None while they run.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.expected: str | None = None
        self._headers = {"accept": BINARY}
        if config.token is not None:
            self._headers["authorization"] = f"Bearer {config.token}"
        # connections: one for each thread that sends, and for the caller's own requests
        self._pools = pool_manager(servers=len(config.urls), connections=config.at_once * len(config.urls) + 2)
        self._servers = [_Server(url) for url in config.urls]
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []  # from the first `submit` on
        self._closed = threading.Event()
        self.ended: Callable[[], str | None] = lambda: None
        self.received = self.positions = 0

    def close(self) -> None:
        """End open requests, whose futures fail, and the threads that wait for them."""
        self._closed.set()
        for _ in self._threads:
            self._work.put(None)
        # A thread that outlives the interpreter is unwound wherever it next asks for the lock. Where that is inside
        # torch, which frees an answer's memory, the process is aborted after a run that has succeeded.
        until = time.monotonic() + CLOSE_SECONDS  # late only where a thread still looks up or joins a server
        for thread in self._threads:
            while thread.is_alive() and time.monotonic() < until:
                interrupt(self._threads)  # in each round: one may have been on its way to the connection
                thread.join(0.02)
        self._pools.clear()
        atexit.unregister(self.close)

    # --------------------------------------------------------------- one request

    def submit(
        self, path: str, body: bytes, positions: int, read: Callable[[torch.Tensor], T], kind: str = BINARY
    ) -> Future[T]:
        """Send a request in a thread; return the future of `read`'s result, or of what `fetch` raises.

        Args:
            path: URL path of the request, with its query string.
            positions: Number of token positions in the response, counted in `self.positions`.
            read: Function that converts the response body, uint8 [bytes], into the result.
            kind: Content type of the body.
        """
        future: Future[T] = Future()
        if not self._threads:
            atexit.register(self.close)  # for a caller that does not close
            # daemons: what hangs in a connection's making keeps no process from ending
            names = range(self.config.at_once * len(self.config.urls))
            self._threads = [threading.Thread(target=self._answer_all, daemon=True, name="asking") for _ in names]
            for thread in self._threads:
                thread.start()

        def answer() -> T:
            found = self.fetch("POST", path, body, kind)
            with self._lock:
                self.received += len(found)
                self.positions += positions
            return read(found)

        self._work.put((future, answer))
        return future

    def _answer_all(self) -> None:
        while (asked := self._work.get()) is not None:
            future, ask = asked
            try:
                future.set_result(ask())
            except BaseException as error:  # whoever waits for the answer raises it
                future.set_exception(error)
            del asked, future, ask  # the answer is the caller's: it is not held until the next request

    def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        return self.fetch(method, path, body).numpy().tobytes()

    def fetch(self, method: str, path: str, body: bytes | None = None, kind: str = BINARY) -> torch.Tensor:
        """Return the body of an answer of any server, uint8; in pinned memory where a GPU is in use.

        Args:
            path: URL path, with its query string.
            body: Request body; None without one.
            kind: Content type of the body.

        Raises:
            TeacherUnavailableError: none answered in time, one is another teacher now, or refuses the request.
        """
        silent_since = time.monotonic()
        values = ""
        while True:
            # A server that fails is in backoff from then on, so the next round asks another one at once. Where all are
            # in backoff it looks again every 50 ms, until the wait is over.
            server = None if self._closed.is_set() else self._least_busy()
            if server is not None:
                try:
                    return self._ask_one(server, method, path, body, kind)
                except _TryAgain as again:
                    values = str(again)
                    if time.monotonic() - silent_since <= self.config.wait:
                        continue
            ended = self.ended()
            if ended is not None:
                raise TeacherUnavailableError(ended)
            if time.monotonic() - silent_since > self.config.wait or self._closed.is_set():
                faults = "; ".join(f"{server.url}: {server.fault or values}" for server in self._servers)
                raise TeacherUnavailableError(f"teacher.url: no response within {self.config.wait:g} s ({faults})")
            self._closed.wait(0.05)

    def _least_busy(self) -> _Server | None:
        """Return the least busy server outside backoff, its count of requests raised; None where there is none."""
        with self._lock:
            ready = [server for server in self._servers if server.until <= time.monotonic()]
            if not ready:
                return None
            server = min(ready, key=lambda each: each.busy)
            server.busy += 1
            return server

    def _ask_one(
        self, server: _Server, method: str, path: str, body: bytes | None = None, kind: str = BINARY
    ) -> torch.Tensor:
        try:
            response, content = self._verified(server.url, method, path, body, kind)
        except (urllib3.exceptions.LocationValueError, UnicodeError) as error:
            raise ValueError(f"teacher.url: {server.url}: {error}") from None
        except TeacherUnavailableError:
            raise
        except (OSError, urllib3.exceptions.HTTPError, RuntimeError) as error:  # RuntimeError: no memory
            self._back_off(server, _error_text(error), None)
            raise _TryAgain(server.fault) from None
        finally:
            with self._lock:
                server.busy -= 1
        if response.status in RETRIED:
            told = response.headers.get("retry-after", "")
            self._back_off(server, f"{response.status}: {_line(content)}", float(told) if told.isdigit() else None)
            raise _TryAgain(server.fault)
        if response.status != 200:
            raise TeacherUnavailableError(refusal(server.url, response.status, _line(content)))
        now = response.headers.get(TEACHER)
        if self.expected is not None and now != self.expected:
            raise TeacherUnavailableError(
                f"teacher.url: {server.url} is another teacher now: {now}, where the run began with {self.expected}; "
                "start the server with the same model and settings"
            )
        server.failures = 0
        server.fault = ""
        return content

    def _verified(
        self, url: str, method: str, path: str, body: bytes | None, kind: str
    ) -> tuple[urllib3.BaseHTTPResponse, torch.Tensor]:
        """Return a response whose checksum is right; a damaged one is requested once more, on a new connection."""
        for _ in range(2):
            response, content = self._exchange(url, method, path, body, kind, self.config.wait)
            if not self.config.sums:
                return response, content
            told = response.headers.get(CHECKSUM)
            damage = checksum_error(told, response.status, path, body or b"", content.numpy().data)
            if damage is None:
                return response, content
            log.warning("%s: %s; requesting it once more on a new connection", url, damage)
            # a connection that damaged a reply is not used again
            self._pools.clear()
        raise TeacherUnavailableError(f"teacher.url: {url}: twice in a row {damage}")

    def _exchange(
        self, url: str, method: str, path: str, body: bytes | None, kind: str, seconds: float
    ) -> tuple[urllib3.BaseHTTPResponse, torch.Tensor]:
        response = self._pools.urlopen(
            method,
            url.rstrip("/") + path,
            body=body,
            headers=self._headers | ({} if body is None else {"content-type": kind}),
            timeout=urllib3.Timeout(total=seconds, connect=min(seconds, CONNECT_SECONDS)),
            # `fetch` decides on repeating, and may choose another server
            retries=False,
            redirect=False,
            preload_content=False,
        )
        try:
            return response, _content(response)
        except BaseException:
            response.close()  # what is left of the reply is not wanted
            raise
        finally:
            response.release_conn()

    def _back_off(self, server: _Server, fault: str, seconds: float | None) -> None:
        with self._lock:
            server.failures += 1
            pause = min(FIRST_PAUSE * 2 ** (server.failures - 1), LONGEST_PAUSE, self.config.wait / 4)
            # a server that asks to be tried again at once would be asked without a pause
            pause *= 0.75 + 0.5 * random.Random(time.monotonic_ns()).random()
            pause = pause if seconds is None else max(seconds, FIRST_PAUSE)
            server.fault = fault
            server.until = time.monotonic() + min(pause, self.config.wait / 4)
        if server.failures in (1, 5, 25) and not self._closed.is_set():
            log.warning("%s does not respond (%s); retrying", server.url, fault)

    def silence(self, *, of_all: bool = False) -> str | None:
        """Return which server does not answer at /health just now, and why; None where every one does.

        Args:
            of_all: return None where any server answers, else the fault of the last one.
        """
        fault = None
        for url in self.config.urls:
            fault = self._silence_of(url)
            if (fault is None) == of_all:
                break
        return fault

    def _silence_of(self, url: str) -> str | None:
        try:
            response, _ = self._exchange(url, "GET", "/health", None, BINARY, HEALTH_SECONDS)
        except (OSError, urllib3.exceptions.HTTPError) as error:
            return f"{url}: {_error_text(error)}"
        return f"{url}: {response.status}" if response.status >= 500 else None

    # ------------------------------------------------------------- who they are

    def of_each(
        self, path: str, method: str = "GET", body: bytes | None = None, kind: str = BINARY
    ) -> dict[str, bytes]:
        """Return the answer of every server by its address; only of those that answer, where others do not.

        Raises:
            TeacherUnavailableError: none does.
        """
        until = time.monotonic() + self.config.wait
        answers: dict[str, bytes] = {}
        while not answers:
            for server in self._servers:
                with self._lock:
                    server.busy += 1
                # each server is asked, not the least busy one; `_ask_one` counts the request off at its end
                with contextlib.suppress(_TryAgain):
                    answers[server.url] = self._ask_one(server, method, path, body, kind).numpy().tobytes()
            if not answers and time.monotonic() > until:
                faults = "; ".join(f"{server.url}: {server.fault}" for server in self._servers)
                raise TeacherUnavailableError(f"teacher.url: no response within {self.config.wait:g} s ({faults})")
            if not answers:
                self.fetch(method, path, body, kind)  # waits for one
        return answers

    def identity(self) -> Identity:
        """Return the identity of all servers that answer, which must be the same; later answers are checked against it.

        Raises:
            ValueError: they differ, or one is no `distill serve`.
            TeacherUnavailableError: none answers.
        """
        found = {url: _identity(url, body) for url, body in self.of_each("/v1/identity").items()}
        (first, identity), *others = found.items()
        for url, other in others:
            if other.hash != identity.hash:
                name = next(n for n in Identity._fields if getattr(other, n) != getattr(identity, n))
                raise ValueError(
                    f"teacher.url: {url} and {first} are different teachers: {name} is "
                    f"{getattr(other, name)!r:.80} and {getattr(identity, name)!r:.80}"
                )
        self.expected = identity.hash
        return identity


class _TryAgain(Exception):
    """Failure of one server to answer, where another may."""


def _identity(url: str, body: bytes) -> Identity:
    try:
        return Identity.read(json.loads(body))
    except (ProtocolError, ValueError, RecursionError) as error:
        raise ValueError(f"teacher.url: {url}: {error}") from None


def _error_text(error: Exception) -> str:
    """Return the error of the socket or of HTTP in one of urllib3's, as text."""
    if isinstance(error, urllib3.exceptions.ReadTimeoutError):
        return LATE
    cause = error.__cause__ or (error.args[-1] if error.args else None)
    inner = cause if isinstance(cause, Exception) else error
    return f"{type(inner).__name__}: {inner}"


def _require_in_bounds(size: int) -> None:
    if size > MOST_BYTES:
        raise TeacherUnavailableError(f"teacher.url: expected a reply of at most {MOST_BYTES:,} bytes, got {size:,}")


def _content(response: urllib3.BaseHTTPResponse) -> torch.Tensor:
    """Return a response's body, uint8, read into pinned memory where the GPU will copy from it."""
    length = response.length_remaining
    if length is None:  # in chunks, as other servers send
        chunks = bytearray()
        while chunk := response.read(CHUNK, decode_content=False):
            chunks += chunk
            _require_in_bounds(len(chunks))
        return torch.frombuffer(chunks or bytearray(b"\0"), dtype=torch.uint8)
    _require_in_bounds(length)
    pinned = torch.cuda.is_initialized() and length > LARGE
    content = torch.empty(length, dtype=torch.uint8, pin_memory=pinned)
    memory = content.numpy().data
    place = 0
    while place < len(memory):
        chunk = response.read(min(len(memory) - place, CHUNK), decode_content=False)
        memory[place : place + len(chunk)] = chunk
        place += len(chunk)
    return content


def with_query(path: str, **params: object) -> str:
    return f"{path}?{urlencode(params)}"


def _line(content: torch.Tensor) -> str:
    text = content[:2000].numpy().tobytes().decode(errors="replace")
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        tree = json.loads(text)
        inner = tree.get("error", tree.get("message", tree)) if isinstance(tree, dict) else tree
        text = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    return " ".join(text.split())[:300]


def refusal(url: str, status: int, text: str) -> str:
    """Return a message for a refusal that repeating the request would not change."""
    if status in (401, 403):
        return f"teacher.token_file: {url} refuses the token ({text})"
    if "logprobs" in text and "max" in text.lower():  # vLLM's own limit
        return f"teacher.top_k: {url} gives fewer ({text}); start vLLM with a larger --max-logprobs, or lower it"
    return f"teacher.url: {url} refuses the request: {status}, {text}"
