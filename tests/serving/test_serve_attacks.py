"""Resource limits of a teacher server: connections, time, memory; refusals need no token."""

import asyncio
import contextlib
import json
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from crafted_requests import crafted_body, damaged_body, read_answer
from served import HTTP, post, question, serving

from distill.serving import connections
from distill.serving.connections import Timeouts, most_connections
from distill.serving.memory_budget import MemoryBudget
from distill.teachers.backends.served.protocol import ProtocolError, read_body

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-of-more-than-sixteen"


def connect(url, **options):
    connection = socket.socket()
    if "receive_buffer" in options:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options["receive_buffer"])
    connection.settimeout(10)
    connection.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    return connection


def is_closed(connection, seconds):
    """Return whether the server has closed a connection, after its last bytes, within some seconds."""
    connection.settimeout(seconds)
    try:
        while connection.recv(1 << 20):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def own_ends(url):
    """Connections that this process has accepted on the port."""
    port = int(url.rpartition(":")[2])
    held = psutil.Process().net_connections("tcp")
    return [end for end in held if end.laddr.port == port and end.status == psutil.CONN_ESTABLISHED]


# ------------------------------------------------------------------ connections


@pytest.mark.full
def test_idle_connections_block_no_others(engine, limit):
    """More of them than may be open: those that have waited longest make room, and one that was answered goes last."""
    limit.setattr(connections, "MOST_OPEN", 128)
    query = question(1)
    with serving(engine, TOKEN, Timeouts(headers=60.0)) as url, contextlib.ExitStack() as stack:
        kept = stack.enter_context(connect(url))
        ask = f"GET /v1/identity HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
        kept.sendall(ask)
        assert read_answer(kept)[0] == 200
        crowd = [stack.enter_context(connect(url)) for _ in range(400)]
        headers = {"authorization": f"Bearer {TOKEN}"}
        began = time.monotonic()
        with connect(url) as late:
            late.sendall(ask)
            assert read_answer(late)[0] == 200
        assert HTTP.post(f"{url}/v1/targets", content=query.body(), headers=headers).status_code == 200
        assert time.monotonic() - began < 5
        assert len(own_ends(url)) <= 128
        assert is_closed(crowd[0], 5) and not is_closed(crowd[-1], 0.05)
        kept.sendall(ask)
        assert read_answer(kept)[0] == 200, "the one that had an answer was closed before those that never asked"


@pytest.mark.plain("nothing")
@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nX: "], ids=["nothing", "a header by and by"])
def test_a_request_has_a_time_limit(engine, sent):
    with serving(engine, timeouts=Timeouts(headers=0.5)) as url, connect(url) as connection:
        connection.sendall(sent)
        began, stop = time.monotonic(), threading.Event()

        def trickle():
            with contextlib.suppress(OSError):
                while sent and not stop.wait(0.1):
                    connection.sendall(b"x")

        thread = threading.Thread(target=trickle)
        thread.start()
        assert is_closed(connection, 5)
        stop.set()
        thread.join()
        assert 0.4 < time.monotonic() - began < 3


@pytest.mark.full
def test_between_two_requests_there_is_a_longer_one(engine):
    with serving(engine, timeouts=Timeouts(headers=0.5, idle=1.5)) as url, connect(url) as connection:
        for wait in (0.0, 1.0):
            time.sleep(wait)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert read_answer(connection)[0] == 200
        began = time.monotonic()
        connection.sendall(b"GET /health HTTP/1.1\r\n")  # and no more of it
        assert is_closed(connection, 5) and time.monotonic() - began < 1.4
    with serving(engine, timeouts=Timeouts(headers=0.5, idle=1.0)) as url, connect(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        read_answer(connection)
        began = time.monotonic()
        assert is_closed(connection, 5) and 0.9 < time.monotonic() - began < 4


@pytest.mark.full
def test_a_refused_request_whose_body_goes_on_is_ended(engine):
    with serving(engine, TOKEN, Timeouts(headers=0.5)) as url, connect(url) as connection:
        connection.sendall(b"POST /v1/targets HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n\r\n")
        assert read_answer(connection)[0] == 401
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 5:
                connection.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began < 3


@pytest.mark.full
def test_a_client_that_does_not_read_is_dropped_and_its_answer_with_it(engine, monkeypatch):
    """While another that reads slowly, but reads, gets all of it."""
    head = {"weight": torch.zeros(64 << 20, dtype=torch.uint8)}
    monkeypatch.setattr(engine, "head", head)
    ask = b"GET /v1/head HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with serving(engine, timeouts=Timeouts(send=1.0)) as url, connect(url, receive_buffer=4096) as unread:
        unread.sendall(ask)
        with connect(url) as slow:
            slow.sendall(ask)
            count, part = 0, b"."
            while part and count < 64 << 20:
                part = slow.recv(4 << 20)
                count += len(part)
                time.sleep(0.02)
            assert count >= 64 << 20
        time.sleep(1.5)
        assert not own_ends(url), "the one that does not read is still there"


@pytest.mark.full
def test_unread_answers_of_a_server_are_bounded_in_memory(engine, monkeypatch, limit):
    """A third one waits until the first two are dropped; a small one does not."""
    held, answer = [], engine.answer
    large = torch.zeros(4096, 4096)

    def answered(jobs):
        held.append(len(jobs))
        return [{"hidden": large} if job.query.ids.size > 100 else answer([job])[0] for job in jobs]

    monkeypatch.setattr(engine, "answer", answered)
    size = large.nbytes
    limit.setattr(
        "distill.serving.engine.RowsRequest.answer_bytes",
        lambda job, identity: size if job.query.ids.size > 100 else 1000,
    )
    body = question(1, rows=4, length=40).body()
    header = f"POST /v1/targets HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with (
        serving(engine, timeouts=Timeouts(send=2.0), answers=2 * size + 10_000) as url,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(5):
            stack.enter_context(connect(url, receive_buffer=4096)).sendall(header + body)
        time.sleep(1.0)
        assert sum(held) == 2, "answers that there is no room for were computed"
        assert post(url, question(2)).status_code == 200
        until = time.monotonic() + 20
        while sum(held) < 6 and time.monotonic() < until:
            time.sleep(0.05)
        assert sum(held) == 6, "those that waited were forgotten"


def test_room_is_given_to_the_first_that_fits_and_given_back():
    async def use():
        room = MemoryBudget(10)
        assert room.try_take(8) and not room.try_take(3) and room.try_take(2)
        waits = [asyncio.create_task(room.take(size, 5.0)) for size in (9, 100, 1)]
        await asyncio.sleep(0.01)
        room.give(2)
        await asyncio.sleep(0.01)
        assert [task.done() for task in waits] == [False, False, True] and room.held == 9
        with pytest.raises(TimeoutError):
            await room.take(5, 0.01)
        waits[0].cancel()
        await asyncio.sleep(0.01)
        room.give(9)
        await asyncio.sleep(0.01)
        assert waits[1].done() and room.held == 100, "one larger than the room goes alone"
        room.give(100)
        assert not room.held

    asyncio.run(use())


@pytest.mark.full
def test_bodies_are_bounded_in_memory(engine):
    body = question(1).body()
    header = f"POST /v1/targets HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with serving(engine, bodies=2 * len(body)) as url, contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(connect(url)).sendall(header + body[:100])
        time.sleep(0.3)
        refused = post(url, question(1))
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        stack.close()
        time.sleep(0.3)
        assert post(url, question(1)).status_code == 200


def test_too_few_open_files_are_refused(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    assert most_connections() == 1024 - 256
    monkeypatch.setattr(resource, "getrlimit", lambda which: (300, 4096))
    with pytest.raises(ValueError, match=r"open files: expected a limit of 384 at least \(ulimit -n\), got 300"):
        most_connections()
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert most_connections() == 4096


# ------------------------------------------------------------------ bodies


def entry(dtype, shape, start, stop):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def safetensors(entries, data):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


ROWS = entry("I32", [1], 8, 12)
CRAFTED = {
    "float8 ids": safetensors({"input_ids": entry("F8_E4M3", [1, 8], 0, 8), "rows": ROWS}, bytes(12)),
    "bfloat16 ids": safetensors({"input_ids": entry("BF16", [1, 4], 0, 8), "rows": ROWS}, bytes(12)),
    "2^62": safetensors({"input_ids": entry("I32", [2**62, 0], 0, 0), "rows": entry("I32", [1], 0, 4)}, bytes(4)),
    "rows of 2^62": safetensors(
        {"input_ids": entry("I32", [1, 2], 0, 8), "rows": entry("I32", [0, 2**62], 8, 8)}, bytes(8)
    ),
    "200 dimensions": safetensors({"input_ids": entry("I32", [1] * 199 + [2], 0, 8), "rows": ROWS}, bytes(12)),
    "a name that is no text": safetensors({"\ud800": entry("F32", [2], 0, 8)}, bytes(8)),
}


@pytest.mark.parametrize("body", CRAFTED.values(), ids=CRAFTED)
def test_crafted_bodies_are_refused_as_json(url, body):
    answer = HTTP.post(f"{url}/v1/targets", content=body)
    assert answer.status_code == 400 and "\n" not in answer.json()["error"], answer.text


@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_body_holds_it_is_read_or_a_wire_error(seed):
    generator, good = random.Random(seed), question(seed)
    refused = 0
    for _ in range(400):
        body = generator.choice((crafted_body, damaged_body))(generator, good)
        for as_json in (False, True):
            try:
                query = read_body(body, as_json).checked(259, 4096, 512)
            except ProtocolError as error:
                assert error.status in (400, 422)
                refused += 1
            else:
                assert query.ids.max() < 259
    assert refused > 400


def test_json_answers_are_small_and_every_error_is_json(url, engine, limit):
    query = question(6, rows=4, packed=False)
    body = {"input_ids": query.ids.tolist(), "rows": query.rows.tolist()}
    assert HTTP.post(f"{url}/v1/targets", json=body).status_code == 200
    limit.setattr("distill.serving.app.JSON_ANSWER", 1000)
    answer = HTTP.post(f"{url}/v1/targets", json=body)
    assert answer.status_code == 422 and "at most 1000 bytes in JSON" in answer.json()["error"]
    assert HTTP.post(f"{url}/v1/targets", json=body | {"rows": 0}).status_code == 422
    for path, status in (("/nowhere", 404), ("/v1/targets", 405)):
        answer = HTTP.get(url + path)
        assert answer.status_code == status and answer.json()["error"]


def test_what_is_no_http_neither_stops_nor_fills_the_log(engine, caplog):
    with serving(engine) as url:
        for sent in (
            b"\x16\x03\x01 no HTTP\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nnot a second request\r\n\r\n",
            b"POST /v1/targets HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"POST /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcdezz\r\n",
        ):
            with connect(url) as connection:
                connection.sendall(sent)
                assert is_closed(connection, 5)
        assert HTTP.get(f"{url}/health").status_code == 200
    assert not caplog.records


# ------------------------------------------------------------------ before it serves


@pytest.mark.full
def test_a_server_of_its_own_stands_through_all_of_it(tmp_path):
    """The script whose figures the docs have, for a few seconds each; readers that do not read take longer."""
    made = subprocess.run(
        [
            sys.executable,
            "tests/serving/stress_server.py",
            "--seconds",
            "2",
            "--seed",
            "7",
            "--only",
            "idle",
            "headers",
            "signed",
            "slow",
            "bodies",
            "flips",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert made.returncode == 0, made.stdout + made.stderr[-2000:]
    assert made.stdout.count("| 0 bytes |") == 6
    waits = [float(line.rpartition("at most ")[2].split()[0]) for line in made.stdout.splitlines()]
    assert max(waits) < 5, made.stdout
