"""Bounds on a server's connections: their number, and the time for which each may keep the server waiting.

uvicorn times a connection out between two requests only: not before the first request, not in the middle of a request's
headers, not while the client does not read its response; and it counts requests, not open connections, so that the
process runs out of open files. `Protocol` adds what it lacks: each connection counts from the moment that it is
accepted, before TLS, and has a deadline wherever the client is the one to act. At the maximum number a new connection
replaces the one that has waited longest for a request, first of those that never had a response.

The deadline of a request's body, and the bounds on the bytes of all bodies and responses, are in `app.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

try:
    import resource
except ImportError:  # no such limits on this system
    resource = None  # type: ignore[assignment]

MOST_OPEN = 4096  # connections, where the limit of open files allows so many
LEAST_OPEN = 128
RESERVED_FILES = 256  # for other files of the process, and for connections accepted while the loop closes others
ACCEPTED_AT_ONCE = 32  # connections that asyncio accepts before any other callback runs
QUEUED = 1024  # connections that the kernel holds until they are accepted
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: unsent bytes are dropped when the socket is closed


class Timeouts(NamedTuple):
    """Timeouts for a client, in seconds.

    Attributes:
        headers: Seconds for a connection's TLS handshake, and for all headers of a request.
        idle: between two requests.
        send: Seconds for the client to receive a piece of a response (1 MiB).
    """

    headers: float = 10.0
    idle: float = 75.0
    send: float = 30.0


DEFAULT_TIMEOUTS = Timeouts()


def most_connections() -> int:
    """Return the number of connections that the limit of open files allows.

    Raises:
        ValueError: it allows too few.
    """
    if resource is None:
        return MOST_OPEN
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # at its limit of open files a process can accept no connection, not even to refuse it
    most = MOST_OPEN if soft == resource.RLIM_INFINITY else min(soft - RESERVED_FILES, MOST_OPEN)
    if most < LEAST_OPEN:
        raise ValueError(
            f"open files: expected a limit of {RESERVED_FILES + LEAST_OPEN} at least (ulimit -n), got {soft}"
        )
    return most


class Config(uvicorn.Config):
    """uvicorn's settings, and the bounds of its connections.

    Attributes:
        most: maximum number of open connections.
        timeouts: timeouts of each.
        tls: TLS of all connections; None for plain HTTP.
        open: open connections.
        waiting: those that wait for a request, the longest wait first: before their first response, and after it.
    """

    most: int
    timeouts: Timeouts
    tls: ssl.SSLContext | None
    open: set[Protocol]
    waiting: tuple[dict[Protocol, None], dict[Protocol, None]]


class Protocol(H11Protocol):
    """uvicorn's HTTP protocol on a connection that is counted and has deadlines."""

    config: Config
    _socket_transport: asyncio.Transport  # under TLS the transport that uvicorn knows is another one
    _request_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _answered = False  # a whole response was sent
    _idle = False  # nothing was received since a response
    _early = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection; at the maximum number, the one that has waited longest for a request makes room."""
        self._socket_transport = transport
        if len(self.config.open) >= self.config.most:
            # connections without a response yet go first: who only opens connections cannot push out a client at work
            longest = next((next(iter(waiting)) for waiting in self.config.waiting if waiting), None)
            if longest is None:
                self.drop()
                return
            longest.drop()
        self.config.open.add(self)
        self._await_request(self.config.timeouts.headers)
        if self.config.tls is None:
            super().connection_made(transport)
        else:
            transport.pause_reading()  # what comes now is for the handshake
            self._handshake = self.loop.create_task(self._start_tls(transport, self.config.tls))

    async def _start_tls(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        # asyncio's server would shake hands before it tells any protocol of the connection, which then cannot count or
        # end it
        secure = None
        with contextlib.suppress(OSError):  # ssl.SSLError is one
            secure = await self.loop.start_tls(transport, self, context, server_side=True)
        if secure is None or secure.is_closing():
            self.drop()
            return
        super().connection_made(secure)
        if self._early:
            self.data_received(self._early)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        if self.transport is not None:  # None where it found no room, or ended before TLS was established
            super().connection_lost(exc)

    def drop(self) -> None:
        """Close the connection at once, and drop unsent data."""
        with contextlib.suppress(OSError):  # the client has closed it
            self._socket_transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._socket_transport.abort()
        self._forget()

    def _forget(self) -> None:
        self.config.open.discard(self)
        self._set_waiting(False)
        self._request_timer = self._timer(self._request_timer, None)
        self._send_timer = self._timer(self._send_timer, None)

    def _timer(self, before: asyncio.TimerHandle | None, seconds: float | None) -> asyncio.TimerHandle | None:
        """Replace a deadline by one in `seconds`; None for none."""
        if before is not None:
            before.cancel()
        return None if seconds is None else self.loop.call_later(seconds, self.drop)

    def _set_waiting(self, waits: bool) -> None:
        for waiting in self.config.waiting:
            waiting.pop(self, None)
        if waits:
            self.config.waiting[self._answered][self] = None

    def _await_request(self, seconds: float) -> None:
        """Set the deadline for all headers of the next request."""
        self._request_timer = self._timer(self._request_timer, seconds)
        self._set_waiting(True)

    def data_received(self, data: bytes) -> None:
        """Read data; the first bytes after a response start the timeout for a request's headers."""
        if self.transport is None:  # TLS is established, and `_start_tls` has not gone on yet
            self._early += data
            return
        super().data_received(data)
        if self._idle:
            self._idle = False
            self._await_request(self.config.timeouts.headers)

    def handle_events(self) -> None:
        """Read a request whose headers may be complete now."""
        try:
            super().handle_events()
        except h11.LocalProtocolError:  # not HTTP, and a response has begun, so that no error can be sent
            self.drop()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._idle = False
            self._request_timer = self._timer(self._request_timer, None)
            self._set_waiting(False)

    def on_response_complete(self) -> None:
        self._answered = True
        self._idle = True
        self._await_request(self.config.timeouts.idle)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Start the timeout for the client to receive what was written."""
        self._send_timer = self._timer(self._send_timer, self.config.timeouts.send)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._send_timer = self._timer(self._send_timer, None)
        super().resume_writing()

    def shutdown(self) -> None:
        """Close an idle connection at once: a client that waits for nothing lets the end of a TLS session take 30 s."""
        answered = self.cycle is None or self.cycle.response_complete
        if answered and not self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().shutdown()


class Server(uvicorn.Server):
    """uvicorn on sockets that are bound already.

    Args:
        app: an ASGI application.
        listeners: result of `listen`.
        tls: certificate and key; None for plain HTTP.
        timeouts: timeouts of each connection.
    """

    def __init__(
        self,
        app: Callable[..., Any],
        listeners: list[socket.socket],
        tls: ssl.SSLContext | None = None,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        self.listeners = listeners
        config = Config(
            app,
            log_level="error",
            access_log=False,
            server_header=False,
            backlog=ACCEPTED_AT_ONCE,
            timeout_keep_alive=int(timeouts.idle) + 1,
            timeout_graceful_shutdown=30,
            ws="none",
            http=Protocol,
            loop="asyncio",
        )
        config.most = most_connections()
        config.timeouts = timeouts
        config.tls = tls
        config.open = set()
        config.waiting = ({}, {})
        super().__init__(config)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the server is told to exit.

        Raises:
            ValueError: another program has begun to listen on the port since it was bound here.
        """
        for listener in self.listeners:
            try:
                listener.listen(QUEUED)
            except OSError as error:
                host, port, *_ = listener.getsockname()
                raise ValueError(_bind_error(error, host, port)) from None
        super().run(sockets or self.listeners)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start; asyncio passes the number that it accepts at a time on to the kernel as the length of its queue."""
        await super().startup(sockets)
        for listener in self.listeners:
            listener.listen(QUEUED)


def listen(host: str, port: int) -> list[socket.socket]:
    """Bind a host's addresses, before anything is served on them.

    Args:
        host: a name or an address.
        port: port; 0 for any that is free.

    Raises:
        ValueError: the port is taken, or the host is none of this machine's; naming the option.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--host: expected a name or an address of this machine, got {host}: {error}") from None
    listeners: list[socket.socket] = []
    for family, kind, _, _, address in dict.fromkeys(found):
        try:
            # the protocol is named so that asyncio sends small pieces at once
            listener = socket.socket(family, kind, socket.IPPROTO_TCP)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # IPv6 only: IPv4 has a separate socket
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
        except OSError as error:
            for each in listeners:
                each.close()
            raise ValueError(_bind_error(error, host, port)) from None
    return listeners


def _bind_error(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"--port: {port} of {host} is in use by another program; end it, or choose another port"
    if error.errno == errno.EACCES:
        return f"--port: {port} may not be used by this account; choose one above 1023"
    return f"--host: expected an address of this machine, got {host}: {error.strerror}"
