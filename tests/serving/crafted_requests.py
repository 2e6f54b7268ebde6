"""Malformed requests and corrupted transport for tests: crafted request bodies, and a proxy that flips bits."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
from collections.abc import Iterator

from distill.teachers.backends.served.protocol import TargetRequest


def crafted_body(random: random.Random, good: TargetRequest) -> bytes:
    """Return safetensors whose header says what no request says: other types, shapes of any size and number."""
    names = ["F64", "F32", "F16", "BF16", "F8_E4M3", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "Q"]
    entries, at = {}, 0
    for name in random.sample(
        ["input_ids", "rows", "position_ids", "__metadata__", "\ud800", "x"], random.randint(1, 4)
    ):
        shape: list[object] = [random.choice((0, 1, 2, 64, 2**31, 2**62, 2**63, -1, 1.5, "2")) for _ in range(2)]
        if random.random() < 0.3:
            shape = [1] * random.choice((0, 3, 63, 64, 65, 200, 5000))
        size = random.choice((0, 1, 4, 8, 64, 2**62))
        entries[name] = {"dtype": random.choice(names), "shape": shape, "data_offsets": [at, at + size]}
        at += size if size < 100 else 0
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + random.randbytes(at)


def damaged_body(random: random.Random, good: TargetRequest) -> bytes:
    """Return a sound body with a few bytes changed, cut or repeated."""
    body = bytearray(good.body())
    for _ in range(random.randint(1, 4)):
        body[random.randrange(len(body))] = random.randrange(256)
    start, stop = sorted(random.randrange(len(body)) for _ in range(2))
    return bytes(body[:start] + body[stop:] if random.random() < 0.2 else body)


def read_answer(connection: socket.socket) -> tuple[int, bool, bytes, bool]:
    """Return an answer's status, whether it is JSON, its body, and whether the connection stays open."""
    found = b""
    while b"\r\n\r\n" not in found:
        if not (part := connection.recv(65536)):
            raise AssertionError(f"no answer: {found!r}")
        found += part
    head, _, body = found.partition(b"\r\n\r\n")
    lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    while len(body) < int(lines[b"content-length"]):
        body += connection.recv(65536)
    is_json = lines.get(b"content-type", b"").startswith(b"application/json")
    return int(head.split()[1]), is_json, body, lines.get(b"connection") != b"close"


@contextlib.contextmanager
def flipping(port: int, random: random.Random) -> Iterator[tuple[int, list[int]]]:
    """A proxy before a port of loopback; yields its own port, and how many bits it has flipped."""
    listener, count, ends = socket.create_server(("127.0.0.1", 0)), [0], threading.Event()

    def carry(source: socket.socket, target: socket.socket, flip_at: int) -> None:
        at = 0
        with contextlib.suppress(OSError):
            while part := bytearray(source.recv(65536)):
                if at <= flip_at < at + len(part):
                    part[flip_at - at] ^= 1 << (flip_at % 8)
                    count[0] += 1
                at += len(part)
                target.sendall(part)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while not ends.is_set():
            with contextlib.suppress(OSError):
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", port))
                for each in (client, server):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                where = random.choice(("question", "answer", "nowhere", "nowhere"))
                # anywhere in headers and body: the question is of about 800 bytes, the answer of 16,000
                flip = random.randrange(700) if where == "question" else random.randrange(16_000)
                for source, target, own in ((client, server, "question"), (server, client, "answer")):
                    at = flip if own == where else -1
                    threading.Thread(target=carry, args=(source, target, at), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1], count
    finally:
        ends.set()
        listener.close()
