"""Stress test of a teacher server: idle, slow and refused connections, unread answers, crafted bodies, flipped bits.

    python tests/serving/stress_server.py [--seed 0] [--seconds 15] [--only idle ...]

Starts `distill serve` with a tiny teacher on loopback, a token and at most 1,024 open files, attacks it in one way
after the other, and prints for each what the server's memory grew by, what its log, and how long another client, which
has the token, waited for an answer meanwhile. The exit code is 1 where one of its requests failed, an answer was wrong,
or memory or log grew beyond a bound.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import resource
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import torch
from crafted_requests import crafted_body, damaged_body, flipping, read_answer

from distill.core.errors import TeacherUnavailableError
from distill.teachers.backends.served.client import ServerConfig, Servers
from distill.teachers.backends.served.protocol import TargetRequest, tensors_of

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
teacher: {init: random, config: tiny.json}
student: {init: random, config: tiny.json}
data: {source: synthetic, max_length: 32, cache: false}
train: {steps: 1, device: cpu}
"""
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32_768,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
FILES = 1024  # that the server may have open
CROWD = 1400  # connections of the attacks that open many
SLOW = 300  # clients with the token that send their bodies slowly
MOST_MEMORY, MOST_LOG = 1280 << 20, 1 << 20  # bytes that an attack may cost
TARGETS = "/v1/targets?deterministic=1"


# ------------------------------------------------------------------ the server and its honest client


class Attacked(NamedTuple):
    """A server.

    Attributes:
        port: of loopback.
        token: that it asks for.
        process: of it.
        log: file of all that it prints.
        expected: the answer to the honest client's question, taken before any attack.
    """

    port: int
    token: str
    process: psutil.Process
    log: Path
    expected: torch.Tensor

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        """Return a new connection to it."""
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", self.port))
        return connection


def question(rows: int = 2, length: int = 32, seed: int = 0) -> TargetRequest:
    """Return a request in which each token but the last of a row is asked for."""
    ids = np.random.default_rng(seed).integers(0, 256, (rows, length)).astype(np.int32)
    return TargetRequest(ids, None, np.flatnonzero(np.arange(rows * length) % length < length - 1).astype(np.int32))


def ask(server: Attacked) -> torch.Tensor:
    """Return the answer to the honest client's question, over a connection of its own."""
    servers = Servers(ServerConfig((server.url,), server.token, 60.0))
    try:
        return tensors_of(servers.fetch("POST", TARGETS, question().body()))["hidden"]
    finally:
        servers.close()


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Attacked]:
    """A server in a process of its own while the context lasts."""
    (folder / "tiny.json").write_text(json.dumps(MODEL))
    (folder / "r.yaml").write_text(RECIPE)
    (folder / "token").write_text(token := secrets.token_urlsafe(32))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MALLOC_ARENA_MAX": "2"}
    words = ["serve", "r.yaml", "--port", str(port), "--token-file", "token"]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "distill", *words],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
        )
    try:
        server = Attacked(port, token, psutil.Process(process.pid), log, torch.empty(0))
        until = time.monotonic() + 180
        while b"serving" not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server has not started: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield server._replace(expected=ask(server))
    finally:
        process.terminate()
        try:
            process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()


# ------------------------------------------------------------------ attacks


class Crowd:
    """Connections that are opened again where the server closes them.

    Args:
        server: that is attacked.
        size: connections at a time.
        begin: called with each new one.
    """

    def __init__(self, server: Attacked, size: int, begin: Callable[[socket.socket], object]) -> None:
        self.server, self.size, self.begin = server, size, begin
        self.open: list[socket.socket] = []
        self.made = self.closed = 0

    def tend(self) -> None:
        """Open as many as are missing, drop those that the server has closed."""
        for connection in list(self.open):
            with contextlib.suppress(BlockingIOError):
                try:
                    if connection.recv(1 << 16):
                        continue
                except ConnectionError:
                    pass
                self.open.remove(connection)
                connection.close()
                self.closed += 1
        for _ in range(self.size - len(self.open)):
            with contextlib.suppress(OSError):
                connection = self.server.connect()
                self.open.append(connection)
                self.made += 1
                self.begin(connection)
                connection.setblocking(False)

    def leave(self) -> None:
        """Close all."""
        for connection in self.open:
            connection.close()


def idle(server: Attacked, seconds: float, random: random.Random) -> dict[str, object]:
    """Hold 1,400 connections open without sending a request."""
    return _crowd(Crowd(server, CROWD, lambda connection: None), seconds)


def headers(server: Attacked, seconds: float, random: random.Random) -> dict[str, object]:
    """Hold 1,400 connections open and send a byte of a header on each now and then."""
    crowd = Crowd(server, CROWD, lambda connection: connection.sendall(b"POST /v1/targets HTTP/1.1\r\nX: "))

    def trickle() -> None:
        for connection in list(crowd.open):
            with contextlib.suppress(OSError):
                connection.send(bytes([random.randrange(97, 123)]))

    return _crowd(crowd, seconds, trickle)


def signed(server: Attacked, seconds: float, random: random.Random) -> dict[str, object]:
    """Hold 1,400 connections open, on each of which a request with a wrong token was refused."""
    body = question().body()
    head = f"POST /v1/targets HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secrets.token_urlsafe(32)}\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    crowd = Crowd(server, CROWD, lambda connection: connection.sendall(request))
    return _crowd(crowd, seconds)


def slow(server: Attacked, seconds: float, random: random.Random) -> dict[str, object]:
    """Have 300 clients with the token send a body a byte now and then."""
    size = len(question().body())
    head = f"POST /v1/targets HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
    crowd = Crowd(server, SLOW, lambda connection: connection.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode()))

    def trickle() -> None:
        for connection in list(crowd.open):
            with contextlib.suppress(OSError):
                connection.send(b"x")

    return _crowd(crowd, seconds, trickle)


def unread(server: Attacked, seconds: float, random: random.Random) -> dict[str, object]:
    """Have 60 clients with the token ask for 31.75 MiB of logits each and read nothing."""
    body = question(2, 128).body()
    header = f"POST /v1/logits HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
    request = f"{header}Content-Length: {len(body)}\r\n\r\n".encode() + body
    crowd = [server.connect(receive_buffer=4096) for _ in range(60)]
    for connection in crowd:
        connection.sendall(request)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.5)
    dropped = sum(not _is_open(connection) for connection in crowd)
    for connection in crowd:
        connection.close()
    return {"clients": len(crowd), "dropped": dropped}


def _is_open(connection: socket.socket) -> bool:
    state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state == 1  # TCP_ESTABLISHED


def bodies(server: Attacked, seconds: float, random: random.Random) -> dict[str, object]:
    """Send crafted and damaged bodies."""
    statuses: Counter[int] = Counter()
    until = time.monotonic() + seconds
    connection, good = None, question()
    while time.monotonic() < until:
        body = random.choice((crafted_body, damaged_body))(random, good)
        kind = random.choice(("application/octet-stream", "application/json"))
        connection = connection or server.connect()
        connection.sendall(
            f"POST /v1/targets HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
            f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        status, is_json, answer, stays = read_answer(connection)
        statuses[status] += 1
        if status not in (200, 400, 413, 422) or (status != 200 and not (is_json and json.loads(answer)["error"])):
            raise AssertionError(f"{status} for {body[:400]!r}: {answer[:400]!r}")
        if not stays:
            connection.close()
            connection = None
    return {"bodies": sum(statuses.values()), **{str(status): count for status, count in sorted(statuses.items())}}


def flips(server: Attacked, seconds: float, random: random.Random) -> dict[str, object]:
    """Ask through a proxy that flips a bit, in the question or in the answer, of every other exchange."""
    outcomes: Counter[str] = Counter()
    until = time.monotonic() + seconds
    with flipping(server.port, random) as (port, count):
        while time.monotonic() < until:
            before = count[0]
            servers = Servers(ServerConfig((f"http://127.0.0.1:{port}",), server.token, 2.0))
            try:
                answer = tensors_of(servers.fetch("POST", TARGETS, question().body()))["hidden"]
                if not torch.equal(answer, server.expected):
                    raise AssertionError("an answer that was damaged was taken")
                outcomes["right" if count[0] == before else "right after a flip"] += 1
            except TeacherUnavailableError:
                outcomes["ended in a line"] += 1
            finally:
                servers.close()
    return {"flips": count[0], **outcomes}


def _crowd(crowd: Crowd, seconds: float, tick: Callable[[], None] = lambda: None) -> dict[str, object]:
    until = time.monotonic() + seconds
    most = 0
    while time.monotonic() < until:
        crowd.tend()
        tick()
        most = max(most, crowd.server.process.num_fds())
        time.sleep(0.2)
    crowd.leave()
    return {"connections": crowd.made, "closed by the server": crowd.closed, "most open files": most}


ATTACKS = {attack.__name__: attack for attack in (idle, headers, signed, slow, unread, bodies, flips)}


# ------------------------------------------------------------------ figures


class AttackResult(NamedTuple):
    """Result of an attack.

    Attributes:
        figures: its own.
        memory: bytes that the server's resident memory grew by, at most.
        log: bytes that the server's log grew by.
        waited: seconds for each answer to the honest client meanwhile.
    """

    figures: dict[str, object]
    memory: int
    log: int
    waited: list[float]


def attacked(server: Attacked, attack: Callable[..., dict[str, object]], seconds: float, seed: int) -> AttackResult:
    """Attack a server while another client asks it.

    Raises:
        AssertionError: the other client's answer was wrong, or the attack was let through.
        TeacherUnavailableError: the other client had none.
    """
    before, log, ends = server.process.memory_info().rss, server.log.stat().st_size, threading.Event()
    peak, waited, faults = [before], list[float](), list[Exception]()

    def watch() -> None:
        while not ends.wait(0.05):
            peak.append(server.process.memory_info().rss)

    def honest() -> None:
        while not ends.wait(0.25):
            began = time.monotonic()
            try:
                answer = ask(server)
            except Exception as error:
                faults.append(error)
                return
            if not torch.equal(answer, server.expected):
                faults.append(AssertionError("an honest client's answer differs"))
            waited.append(time.monotonic() - began)

    threads = [threading.Thread(target=target) for target in (watch, honest)]
    for thread in threads:
        thread.start()
    try:
        figures = attack(server, seconds, random.Random(seed))
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    for fault in faults:
        raise fault
    return AttackResult(figures, max(peak) - before, server.log.stat().st_size - log, waited)


def main() -> int:
    """Attack, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each attack; unread ones take 35 at least")
    parser.add_argument("--only", nargs="*", choices=list(ATTACKS), default=list(ATTACKS))
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logging.getLogger("distill").setLevel(logging.ERROR)  # each damaged answer is a warning
    fine = True
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server:
        for name in args.only:
            seconds = max(args.seconds, 35.0) if name == "unread" else args.seconds
            outcome = attacked(server, ATTACKS[name], seconds, args.seed)
            figures = ", ".join(f"{key} {value:,}" for key, value in outcome.figures.items())
            print(
                f"| {name} | {figures} | {outcome.memory / 2**20:.1f} MiB | {outcome.log:,} bytes | "
                f"{len(outcome.waited)}, at most {max(outcome.waited, default=0.0):.2f} s |",
                flush=True,
            )
            fine &= outcome.memory <= MOST_MEMORY and outcome.log <= MOST_LOG and bool(outcome.waited)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
