"""Bounds on a server's connections: their number, and the time for which each may keep the server waiting.

uvicorn times a connection out between two requests only: not before the first request, not in the middle of a request's
headers, not while the client does not read its response; and it counts requests, not open connections, so that the
process runs out of open files. Here the listening socket itself counts the connections that it has accepted, TLS
handshakes included. A connection that waits for a request has a deadline; at the maximum number, a new connection
replaces the one that has waited longest, first of those that never completed a request.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
import time
from collections import OrderedDict
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
ACCEPTED_AT_ONCE = 64  # connections that asyncio accepts before any other callback runs
QUEUED = 1024  # connections that the kernel holds until they are accepted
SWEEP_S = 0.25  # between two checks of the deadlines
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: unsent bytes are dropped when the socket is closed


class Patience(NamedTuple):
    """Timeouts for a client, in seconds.

    Attributes:
        headers: Seconds for a connection's TLS handshake, and for all headers of a request.
        idle: between two requests.
        send: Seconds for the client to receive a piece of a response (1 MiB).
    """

    headers: float = 10.0
    idle: float = 75.0
    send: float = 30.0


DEFAULT_PATIENCE = Patience()


def most_connections() -> int:
    """Return the number of connections that the limit of open files allows.

    Raises:
        ValueError: it allows too few.
    """
    if resource is None:
        return MOST_OPEN
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_OPEN if soft == resource.RLIM_INFINITY else min(soft - RESERVED_FILES, MOST_OPEN)
    if most < LEAST_OPEN:
        raise ValueError(
            f"open files: expected a limit of {RESERVED_FILES + LEAST_OPEN} at least (ulimit -n), got {soft}"
        )
    return most


class Connections:
    """Registry of a server's open connections.

    Args:
        most: maximum number of open connections.
        patience: timeouts of each.

    Attributes:
        open: connections by file descriptor.
    """

    def __init__(self, most: int, patience: Patience) -> None:
        self.most = most
        self.patience = patience
        self.open: dict[int, Connection] = {}
        # those that wait for a request, longest wait first: before their first response, and after it
        self._waiting: tuple[OrderedDict[Connection, None], ...] = OrderedDict(), OrderedDict()
        self._sweeps = False

    def add(self, connection: Connection) -> None:
        """Register a connection; at the maximum number, close the one that has waited longest for a request.

        Raises:
            ConnectionAbortedError: no other waits for a request; the new one was closed.
        """
        if len(self.open) >= self.most:
            longest = next((next(iter(waiting)) for waiting in self._waiting if waiting), None)
            if longest is None:
                connection.close()
                raise ConnectionAbortedError(errno.ECONNABORTED, "all connections are in use")
            longest.end()
        self.open[connection.fileno()] = connection
        connection.await_request(self.patience.headers)
        if not self._sweeps:
            self._sweeps = True
            asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def remove(self, connection: Connection) -> None:
        """Remove a connection that is about to be closed."""
        self.open.pop(connection.fileno(), None)
        self.set_waiting(connection, False)

    def set_waiting(self, connection: Connection, waits: bool) -> None:
        """Record whether a connection waits for a request."""
        for waiting in self._waiting:
            waiting.pop(connection, None)
        if waits:
            self._waiting[connection.answered][connection] = None

    def _sweep(self) -> None:
        now = time.monotonic()
        for connection in [each for each in self.open.values() if now > min(each.request_by, each.sent_by)]:
            connection.end()
        self._sweeps = bool(self.open)
        if self._sweeps:
            asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)


class Connection(socket.socket):
    """An accepted connection.

    Attributes:
        connections: registry that it belongs to.
        answered: whether a whole response was sent on it.
        request_by: deadline for the headers of a request, on the monotonic clock.
        sent_by: deadline for the client to receive what was written.
    """

    connections: Connections
    answered = False
    request_by = sent_by = float("inf")

    def await_request(self, seconds: float) -> None:
        """Set a deadline for the headers of the next request, in `seconds`."""
        self.request_by = time.monotonic() + seconds
        self.connections.set_waiting(self, True)

    def begin_request(self) -> None:
        """Record that a request's headers are complete."""
        self.request_by = float("inf")
        self.connections.set_waiting(self, False)

    def end(self) -> None:
        """Have the event loop close the connection, and drop unsent data."""
        self.connections.set_waiting(self, False)
        self.request_by = self.sent_by = float("inf")
        try:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.shutdown(socket.SHUT_RDWR)
        except OSError as error:  # the client has closed it
            if error.errno not in (errno.ENOTCONN, errno.EBADF):
                raise

    def close(self) -> None:
        """Close the connection, and remove it from the registry."""
        self.connections.remove(self)
        super().close()


class Listener(socket.socket):
    """A listening socket that registers its connections.

    Attributes:
        connections: the registry.
    """

    connections: Connections

    def listen(self, backlog: int = QUEUED) -> None:
        """Listen with a queue of at least `QUEUED`; asyncio passes the number that it accepts at a time."""
        super().listen(max(backlog, QUEUED))

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, when asyncio calls for it.

        Raises:
            ConnectionAbortedError: there is no place for it; asyncio continues with the next.
        """
        plain, address = super().accept()
        connection = Connection(plain.family, plain.type, plain.proto, fileno=plain.detach())
        connection.connections = self.connections
        self.connections.add(connection)
        return connection, address


def listen(host: str, port: int, patience: Patience = DEFAULT_PATIENCE) -> list[Listener]:
    """Bind a host's addresses, before anything is served on them.

    Args:
        host: a name or an address.
        port: port; 0 for any that is free.
        patience: timeouts of each connection.

    Raises:
        ValueError: the port is taken, or the host is none of this machine's; naming the option.
    """
    connections = Connections(most_connections(), patience)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--host: expected a name or an address of this machine, got {host}: {error}") from None
    listeners: list[Listener] = []
    for family, kind, _, _, address in dict.fromkeys(found):
        try:
            # the protocol is named so that asyncio sends small pieces at once
            listener = Listener(family, kind, socket.IPPROTO_TCP)
            listeners.append(listener)
            listener.connections = connections
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # IPv6 only: IPv4 has a separate socket
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
        except OSError as error:
            for each in listeners:
                each.close()
            raise ValueError(_why(error, host, port)) from None
    return listeners


def _why(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"--port: {port} of {host} is in use by another program; end it, or choose another port"
    if error.errno == errno.EACCES:
        return f"--port: {port} may not be used by this account; choose one above 1023"
    return f"--host: expected an address of this machine, got {host}: {error.strerror}"


class Config(uvicorn.Config):
    """uvicorn's settings with the registry of its connections.

    Attributes:
        connections: registry of all its listeners.
    """

    connections: Connections


class Protocol(H11Protocol):
    """uvicorn's HTTP protocol with deadlines of its connection."""

    connection: Connection
    _idle = False  # nothing was received since a response

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Find the connection in the registry."""
        assert isinstance(self.config, Config)
        self.connection = self.config.connections.open[transport.get_extra_info("socket").fileno()]
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Read data; the first bytes after a response start the timeout for a request's headers."""
        super().data_received(data)
        if self._idle:
            self._idle = False
            self.connection.await_request(self.connection.connections.patience.headers)

    def handle_events(self) -> None:
        """Read a request whose headers may be complete now."""
        try:
            super().handle_events()
        except h11.LocalProtocolError:  # not HTTP, and a response has begun, so that no error can be sent
            self.transport.abort()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._idle = False
            self.connection.begin_request()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.connection.answered = self._idle = True
        self.connection.await_request(self.connection.connections.patience.idle)
        super().on_response_complete()

    def shutdown(self) -> None:
        """Close an idle connection at once: a client that waits for nothing lets the end of a TLS session take 30 s."""
        answered = self.cycle is None or self.cycle.response_complete
        if answered and not self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        """Start the timeout for the client to receive what was written."""
        self.connection.sent_by = time.monotonic() + self.connection.connections.patience.send
        super().pause_writing()

    def resume_writing(self) -> None:
        """End that timeout."""
        self.connection.sent_by = float("inf")
        super().resume_writing()


class Server(uvicorn.Server):
    """uvicorn on listeners that are bound already.

    Args:
        app: an ASGI application.
        listeners: result of `listen`.
        tls: uvicorn's `ssl_*` options.
    """

    def __init__(self, app: Callable[..., Any], listeners: list[Listener], **tls: Any) -> None:
        self.listeners = listeners
        connections = listeners[0].connections
        config = Config(
            app,
            log_level="error",
            access_log=False,
            server_header=False,
            backlog=ACCEPTED_AT_ONCE,
            timeout_keep_alive=int(connections.patience.idle) + 1,
            timeout_graceful_shutdown=30,
            ws="none",
            http=Protocol,
            loop="asyncio",
            **tls,
        )
        config.connections = connections
        super().__init__(config)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the server is told to exit.

        Raises:
            ValueError: another program has begun to listen on the port since it was bound here.
        """
        for listener in self.listeners:
            try:
                listener.listen()
            except OSError as error:
                host, port, *_ = listener.getsockname()
                raise ValueError(_why(error, host, port)) from None
        super().run(sockets or [*self.listeners])
