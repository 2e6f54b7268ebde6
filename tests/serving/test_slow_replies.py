"""Replies of servers that never end, are too large, or are no reply at all: each is one line, in time."""

import http.server
import json
import threading
import time

import numpy as np
import pytest

from distill.core.errors import TeacherUnavailableError
from distill.teachers.backends.served import client
from distill.teachers.backends.served.client import ServerConfig, Servers
from distill.teachers.backends.served.vllm import _entry, served_model


@pytest.fixture
def serve():
    """Start a server whose replies `send` writes; returns its client."""
    started = []

    def start(send, wait=1.5):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                self.do_GET()

            def do_GET(self):
                try:
                    send(self)
                except OSError:
                    return

            def log_message(self, *args):
                return

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return Servers(ServerConfig((f"http://127.0.0.1:{server.server_port}",), wait=wait, sums=False))

    yield start
    for server in started:
        server.shutdown()


@pytest.mark.full
@pytest.mark.parametrize("chunked", [False, True])
def test_a_reply_that_trickles_has_a_deadline(serve, chunked):
    def send(handler):
        handler.send_response(200)
        if not chunked:
            handler.send_header("content-length", "1000")
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(b"x")
            handler.wfile.flush()
            time.sleep(0.2)

    before = time.monotonic()
    with pytest.raises(TeacherUnavailableError, match="the whole reply did not come in time"):
        serve(send).fetch("GET", "/v1/x")
    assert time.monotonic() - before < 8


TRICKLES = {
    "status line": b"HTTP/1.1 2" + b"0" * 100,
    "headers": b"HTTP/1.1 200 OK\r\nx-long: " + b"x" * 100,
    "interim responses": b"HTTP/1.1 100 Continue\r\n\r\n" * 100,
    "chunk size": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"0" * 200,
    "trailers": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: " + b"x" * 100,
}


def send_slowly(content):
    """Return what writes the part before the last 100 bytes at once, or all of it, a byte each fifth of a second."""

    def send(handler):
        at_once = max(len(content) - 100, 0) if b"chunked" in content else 0
        handler.wfile.write(content[:at_once])
        for place in range(at_once, len(content)):
            handler.wfile.write(content[place : place + 1])
            handler.wfile.flush()
            time.sleep(0.2)

    return send


@pytest.mark.plain("status line")
@pytest.mark.parametrize("part", TRICKLES)
def test_every_part_of_a_reply_has_the_deadline(serve, part):
    before = time.monotonic()
    with pytest.raises(TeacherUnavailableError, match="the whole reply did not come in time"):
        serve(send_slowly(TRICKLES[part])).fetch("GET", "/v1/x")
    assert time.monotonic() - before < 8


def test_the_question_for_health_has_a_deadline(serve, limit):
    limit.setattr(client, "HEALTH_SECONDS", 0.7)
    before = time.monotonic()
    assert "the whole reply did not come in time" in serve(send_slowly(TRICKLES["headers"])).silence()
    assert time.monotonic() - before < 5


@pytest.mark.full
def test_a_kept_connection_has_its_time_anew(serve):
    """A reply that took most of its time leaves none of its deadline to the next one on its connection."""

    def send(handler):
        handler.protocol_version = "HTTP/1.1"
        time.sleep(0.9)
        handler.send_response(200)
        handler.send_header("content-length", "2")
        handler.end_headers()
        handler.wfile.write(b"ok")

    servers = serve(send)
    assert [servers.ask("GET", "/v1/x") for _ in range(3)] == [b"ok"] * 3


@pytest.mark.plain("False")
@pytest.mark.parametrize("chunked", [False, True])
def test_a_reply_has_a_largest_size(serve, chunked, limit):
    limit.setattr(client, "MOST_BYTES", 100_000)

    def send(handler):
        handler.send_response(200)
        if not chunked:
            handler.send_header("content-length", str(1 << 42))
        handler.end_headers()
        while True:
            handler.wfile.write(bytes(50_000))

    with pytest.raises(TeacherUnavailableError, match="expected a reply of at most 100,000 bytes"):
        serve(send, wait=10.0).fetch("GET", "/v1/x")


def test_a_large_reply_arrives_whole(serve):
    content = np.random.default_rng(0).integers(0, 256, 3_000_001, dtype=np.uint8).tobytes()

    def send(handler):
        handler.send_response(200)
        handler.send_header("content-length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    assert serve(send, wait=30.0).ask("GET", "/v1/x") == content


def test_json_of_any_depth_is_one_line(serve):
    body = b"[" * 200_000

    def send(handler):
        handler.send_response(200)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    servers = serve(send, wait=30.0)
    with pytest.raises(ValueError, match="expected vLLM's list of models"):
        served_model(servers)
    with pytest.raises(ValueError, match=r"teacher\.url: "):
        servers.identity()


@pytest.mark.parametrize("token", [-(2**40), -1, 2**40])
def test_a_token_id_that_is_none_is_refused(token):
    entry = json.loads(json.dumps({str(token): {"logprob": -0.1}, "5": {"logprob": -2.0}}))
    with pytest.raises(TeacherUnavailableError, match="expected token ids from 0 on, got"):
        _entry(entry, 5, 1, 100)


@pytest.mark.parametrize("part", ["nothing of the reply", "half of its body"])
def test_closing_ends_the_threads_that_wait_for_a_reply(serve, part):
    """One that outlived the interpreter aborted a process whose run had succeeded."""
    asked = threading.Event()

    def send(handler):
        if part == "half of its body":
            handler.send_response(200)
            handler.send_header("content-length", "1000")
            handler.end_headers()
            handler.wfile.write(b"x" * 500)
        asked.set()
        time.sleep(20)

    servers = serve(send, wait=60)
    before = {thread for thread in threading.enumerate() if thread.name == "asking"}
    pending = [servers.submit("/v1/x", b"", 1, bytes) for _ in range(3)]
    assert asked.wait(10)
    begun = time.monotonic()
    servers.close()
    assert time.monotonic() - begun < 1.5
    assert {thread for thread in threading.enumerate() if thread.name == "asking"} <= before
    for future in pending:
        with pytest.raises(TeacherUnavailableError):
            future.result(0)
