"""urllib3's connections with one deadline for the whole of a reply: status line, headers, chunk sizes, body, trailers.

A timeout of urllib3 is one of the socket's, for a single read: a server that sends a byte now and then would begin it
anew each time, and hold a run forever. Here each read is given what is left until the deadline.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import socket
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

LATE = "the whole reply did not come in time"
SEND_SECONDS = 60.0  # for the network to take a request
# The socket of each thread's last request, which `interrupt` ends. Not its connection: that gives the socket away to a
# reply after which the server closes.
_last_used: weakref.WeakKeyDictionary[threading.Thread, socket.socket] = weakref.WeakKeyDictionary()


class _TimedReader(io.RawIOBase):
    """Bytes of a socket until a deadline, a time of `time.monotonic`."""

    def __init__(self, sock: socket.socket, raw: io.RawIOBase, until: float) -> None:
        self._sock = sock
        self._raw = raw
        self._until = until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        # A socket's timeout is that of one read: a server that sends a byte now and then would never be late. So every
        # read gets what is left of the reply's time.
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError(LATE)
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    """A response whose every byte is read through a `_TimedReader`."""

    def __init__(self, sock: socket.socket, *args: Any, until: float, **named: Any) -> None:
        super().__init__(sock, *args, **named)
        # the file that the response opened counts as a user of the socket: it stays open where the connection is closed
        self.fp = io.BufferedReader(_TimedReader(sock, self.fp.detach(), until))


class _Timed(HTTPConnection):
    """A connection whose timeout is that of a whole reply."""

    def connect(self) -> None:
        super().connect()
        _last_used[threading.current_thread()] = self.sock

    def request(self, *args: Any, **named: Any) -> None:
        # a kept connection's socket still has what the last reply left of its time
        if self.sock is not None:
            self.sock.settimeout(SEND_SECONDS)
            _last_used[threading.current_thread()] = self.sock
        super().request(*args, **named)

    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override]
        assert self.timeout is not None  # what is left of the request's time
        until = time.monotonic() + self.timeout
        self.response_class = functools.partial(_TimedResponse, until=until)  # type: ignore[assignment]
        return super().getresponse()


class _TimedTls(_Timed, HTTPSConnection):
    """The same over TLS."""


class _Pool(urllib3.HTTPConnectionPool):
    """Pool of connections to one server."""

    ConnectionCls = _Timed


class _TlsPool(urllib3.HTTPSConnectionPool):
    """Pool of connections to one server over TLS."""

    ConnectionCls = _TimedTls


def pool_manager(servers: int, connections: int) -> urllib3.PoolManager:
    """Return the pools of several servers, each of which keeps so many connections."""
    manager = urllib3.PoolManager(num_pools=servers, maxsize=connections)
    manager.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
    return manager


def interrupt(threads: Iterable[threading.Thread]) -> None:
    """End the requests that threads wait for: their reads return at once, as those of a connection that is gone."""
    for thread in threads:
        sock = _last_used.get(thread)
        if sock is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                # of the plain socket below TLS too: an SSLSocket's own shutdown takes its state from under the reader
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
