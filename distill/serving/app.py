"""HTTP application of a teacher server: Starlette, with only validation between it and `Worker`.

Status codes: 200; 400 a body that cannot be read; 401 without the token; 404, 405; 408 a body that came too slowly; 413
one that is too large; 422 one whose content is invalid; 500 the teacher failed; 503 with Retry-After while the queue is
full, or a process of a sharded teacher is gone; 504 a timeout. Errors are JSON of one line: `{"error": ...}`.

The server's memory that clients can occupy is bounded: connections and their time by `connections.py`, bodies of
requests and of responses by a `MemoryBudget` each.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from distill.core.errors import TeacherUnavailableError
from distill.serving.engine import RequestOptions, RowsRequest, RowTargets, ServingEngine
from distill.serving.memory_budget import MemoryBudget
from distill.serving.worker import Full, Worker
from distill.teachers.backends.served.integrity import CHECKSUM, checksum
from distill.teachers.backends.served.protocol import (
    BINARY,
    JSON,
    TEACHER,
    ProtocolError,
    TargetRequest,
    parts_of,
    read_body,
)

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1", "testserver")
JSON_BYTES_A_TOKEN = 32  # three numbers of up to ten digits
JSON_ANSWER = 4 << 20  # bytes of a response's tensors that may be sent as JSON, which takes ten times the memory
SENT_AT_ONCE = 1 << 20  # bytes: each piece is copied once, while it is in the processor's cache
READERS = 4  # bodies that are parsed at a time
T = TypeVar("T")


class RequestLimits(NamedTuple):
    """Limits of a teacher server.

    Attributes:
        tokens: tokens of one request.
        budget: tokens that share a forward pass.
        waiting: tokens in the queue.
        read_seconds: timeout for receiving a body.
        answer_seconds: timeout for computing a response.
        bodies: bytes of all requests that are being read or computed.
        answers: bytes of all responses that are being computed or sent, and never less than four of the largest.
    """

    tokens: int = 65_536
    budget: int = 16_384
    waiting: int = 1 << 20
    read_seconds: float = 30.0
    answer_seconds: float = 600.0
    bodies: int = 512 << 20
    answers: int = 1 << 30

    @property
    def body(self) -> int:
        """Maximum size of a request's body in bytes."""
        return JSON_BYTES_A_TOKEN * self.tokens + (1 << 16)


def make_app(engine: ServingEngine, token: str | None, limits: RequestLimits) -> Starlette:
    """Return the application, which starts the worker and ends it.

    Args:
        token: bearer token of every request except /health; None for none (then only loopback host names are accepted,
            so that no web page in a local browser can send requests by DNS rebinding).
    """
    worker = Worker(engine.answer, limits.budget, limits.waiting, engine.forwards)
    service = Service(engine, worker, limits, token)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(worker.close)

    routes = [
        Route("/health", service.health),
        Route("/v1/identity", service.identity),
        Route("/v1/files", service.files),
        Route("/v1/head", service.head),
        Route("/v1/targets", service.targets, methods=["POST"]),
        Route("/v1/logits", service.logits, methods=["POST"]),
    ]
    middleware = [] if token else [Middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK))]
    handlers: dict[Any, Any] = {HTTPException: _http_error}
    app = Starlette(routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers=handlers)
    app.state.worker = worker
    return app


def error_response(status: int, message: str, **headers: str) -> JSONResponse:
    text = " ".join(message.encode("utf-8", "replace").decode().split())
    return JSONResponse({"error": text}, status, headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    return error_response(error.status_code, error.detail)


class Refused(Exception):
    """A request that ends in an HTTP error."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.response = error_response(status, message, **headers)


class Sent:
    """A response with a callback for when it was sent or its client has disconnected."""

    def __init__(self, response: Response, done: Callable[[], None]) -> None:
        self.response = response
        self.done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, then call back."""
        try:
            await self.response(scope, receive, send)
        finally:
            self.done()


class TensorResponse(Response):
    """Tensors as safetensors, sent in pieces from their own memory, as fast as the client reads."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], headers: Mapping[str, str]) -> None:
        self.parts = parts_of(tensors)
        length = {"content-length": str(sum(map(len, self.parts)))}
        super().__init__(None, headers={**headers, **length}, media_type=BINARY)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self.parts:
            for start in range(0, len(part), SENT_AT_ONCE):
                piece = part[start : start + SENT_AT_ONCE]
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Service:
    """The HTTP endpoints."""

    def __init__(self, engine: ServingEngine, worker: Worker, limits: RequestLimits, token: str | None) -> None:
        self.engine = engine
        self.worker = worker
        self.limits = limits
        self._token = None if token is None else f"Bearer {token}".encode()
        self._headers = {TEACHER: engine.identity.hash}
        largest = limits.tokens * engine.identity.hidden * getattr(torch, engine.identity.dtype).itemsize
        self._bodies = MemoryBudget(limits.bodies)
        self._answers = MemoryBudget(max(limits.answers, 4 * largest))
        self._readers = CapacityLimiter(READERS)

    async def _read(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in one of a few threads, so that parsing takes the memory of only a few bodies."""
        return await to_thread.run_sync(function, *arguments, limiter=self._readers)

    def _refusal(self, request: Request) -> Response | None:
        given = request.headers.get("authorization", "").encode()
        if self._token is None or hmac.compare_digest(given, self._token):
            return None
        headers = {"www-authenticate": "Bearer"}
        return error_response(401, "expected Authorization: Bearer and this server's token", **headers)

    async def _with_checksum(self, request: Request, response: Response, body: bytes = b"") -> Response:
        """Add the checksum of the request as it was received and of the response."""
        parts = response.parts if isinstance(response, TensorResponse) else [bytes(response.body)]
        response.headers[CHECKSUM] = await run_in_threadpool(checksum, _target(request), body, parts)
        return response

    async def health(self, request: Request) -> Response:
        """Status and queue length; needs no token."""
        response = JSONResponse({"status": "ok", "waiting": self.worker.waiting, **self.worker.served})
        return await self._with_checksum(request, response)

    async def identity(self, request: Request) -> Response:
        response = JSONResponse(self.engine.identity.written(), headers=self._headers)
        return self._refusal(request) or await self._with_checksum(request, response)

    async def files(self, request: Request) -> Response:
        """Configuration and tokenizer, from file name to text."""
        refusal = self._refusal(request)
        if refusal:
            return refusal
        return await self._with_checksum(request, JSONResponse(self.engine.files, headers=self._headers))

    async def head(self, request: Request) -> Response:
        """The head's weight and bias as safetensors; the ETag is their hash."""
        etag = f'"{self.engine.identity.head}"'
        refusal = self._refusal(request)
        if refusal:
            return refusal
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers={**self._headers, "etag": etag})
        return await self._with_checksum(request, TensorResponse(self.engine.head, {**self._headers, "etag": etag}))

    async def targets(self, request: Request) -> Response | Sent:
        return self._refusal(request) or await self._answered(request, logits=False)

    async def logits(self, request: Request) -> Response | Sent:
        """The model's own logits of a few rows, by its own forward."""
        return self._refusal(request) or await self._answered(request, logits=True)

    async def _answered(self, request: Request, logits: bool) -> Response | Sent:
        try:
            options = self._options(request, logits)
            size = self._size(request)
            if not self._bodies.try_take(size):
                raise Refused(503, "the server reads as many requests as it may", **{"retry-after": "1"})
            try:
                body = await self._body(request, size)
                try:
                    return await self._answer(request, body, options)
                except ProtocolError as error:  # its checksum tells a client that the body received is not the one sent
                    return await self._with_checksum(request, error_response(error.status, str(error)), body)
            finally:
                self._bodies.give(size)
        except ProtocolError as error:
            return error_response(error.status, str(error))
        except Refused as refused:
            return refused.response
        except ClientDisconnect:
            return Response(status_code=499)

    async def _answer(self, request: Request, body: bytes, options: RequestOptions) -> Sent:
        as_json = request.headers.get("content-type", "").partition(";")[0].strip() == JSON
        job = RowsRequest(await self._read(self._checked, body, as_json), options)
        if options.logits and len(job.query.rows) > (most := self.engine.identity.limits["logits"] or 1):
            raise ProtocolError(f"rows: expected at most {most} for logits, got {len(job.query.rows)}")
        size = job.answer_bytes(self.engine.identity)
        if as_json and size > JSON_ANSWER:
            raise ProtocolError(
                f"rows: expected an answer of at most {JSON_ANSWER} bytes in JSON, got {size}; send safetensors"
            )
        try:
            await self._answers.take(size, self.limits.answer_seconds)
        except TimeoutError:
            raise self._late() from None
        try:
            answer = await self._computed(request, job)
            if as_json:
                response: Response = JSONResponse(await self._read(_lists, answer), headers=self._headers)
            else:
                response = TensorResponse(answer, self._headers)
            return Sent(await self._with_checksum(request, response, body), lambda: self._answers.give(size))
        except BaseException:
            self._answers.give(size)
            raise

    def _late(self) -> Refused:
        return Refused(504, f"no response within {self.limits.answer_seconds:g} s")

    def _options(self, request: Request, logits: bool) -> RequestOptions:
        given = dict(request.query_params)
        values = dict[str, Any]()
        kinds = {"top_k": int, "columns": int, "temperature": float, "tail": str, "dtype": str, "deterministic": int}
        for name, text in given.items():
            if logits or name not in kinds:
                known = "no option" if logits else f"one of {', '.join(kinds)}"
                raise ProtocolError(f"options: expected {known}, got {name[:40]!r}")
            try:
                values[name] = kinds[name](text)
            except ValueError:
                raise ProtocolError(f"{name}: expected a number, got {text[:40]!r}") from None
        if not all(math.isfinite(value) for value in values.values() if isinstance(value, float)):
            raise ProtocolError(f"temperature: expected a finite number, got {values['temperature']}")
        values["deterministic"] = bool(values.get("deterministic", 0))
        return RequestOptions(**values, logits=logits).checked(self.engine.identity.rows)

    def _size(self, request: Request) -> int:
        """Upper bound on the size of the body in bytes, known before it is read."""
        most = self.limits.body
        declared = request.headers.get("content-length")
        if declared is None:
            return most
        if not (declared.isascii() and declared.isdigit()) or len(declared) > 20 or int(declared) > most:
            raise Refused(413, f"body: expected at most {most} bytes", connection="close")
        return int(declared)

    async def _body(self, request: Request, most: int) -> bytes:
        parts = []
        size = 0
        try:
            async with asyncio.timeout(self.limits.read_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise Refused(413, f"body: expected at most {most} bytes", connection="close")
                    parts.append(part)
        except TimeoutError:
            text = f"body: expected it within {self.limits.read_seconds:g} s"
            raise Refused(408, text, connection="close") from None
        return b"".join(parts)

    def _checked(self, body: bytes, as_json: bool) -> TargetRequest:
        identity = self.engine.identity
        return read_body(body, as_json).checked(identity.rows, self.limits.tokens, identity.limits["document"])

    async def _computed(self, request: Request, job: RowsRequest) -> RowTargets:
        """Return the worker's result; a job whose client disconnects before its forward pass is not computed."""
        try:
            future = self.worker.submit(job)
        except (Full, TeacherUnavailableError) as busy:
            raise _later(busy) from None
        made: asyncio.Future[Any] = asyncio.wrap_future(future)
        # after the body, the next message is the client's disconnect
        left: asyncio.Future[Any] = asyncio.ensure_future(request.receive())
        seconds = self.limits.answer_seconds
        try:
            done, _ = await asyncio.wait({made, left}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if made in done:
                return made.result()
            if left in done:
                raise ClientDisconnect
            raise self._late()
        except (Full, TeacherUnavailableError) as busy:
            raise _later(busy) from None
        except torch.OutOfMemoryError:
            raise Refused(500, "the teacher is out of memory: start it with fewer --max-tokens") from None
        except (ClientDisconnect, Refused):
            raise
        except Exception as error:
            raise Refused(500, f"the teacher failed: {type(error).__name__}: {error!s:.200}") from None
        finally:
            made.cancel()
            left.cancel()


def _target(request: Request) -> str:
    """Path and query of a request as received, without a prefix that a proxy may have added."""
    query = request.scope["query_string"].decode("latin-1")
    return request.scope["path"] + (f"?{query}" if query else "")


def _later(error: Full | TeacherUnavailableError) -> Refused:
    return Refused(503, str(error), **{"retry-after": str(math.ceil(getattr(error, "seconds", 30.0)))})


def _lists(answer: RowTargets) -> dict[str, Any]:
    """Convert tensors to lists; numbers that JSON lacks become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(each) for each in value]
        return value if not isinstance(value, float) or math.isfinite(value) else None

    return {name: plain((t.float() if t.is_floating_point() else t).tolist()) for name, t in answer.items()}
