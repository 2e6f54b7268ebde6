"""A served teacher beside its own forward: hidden states over HTTP on loopback to 1, 8, 64 clients in another process.

Every client sends a row of random tokens, of which all but the last are learned, and sends the next once the answer is
there. `tokens_per_s` is of the whole, `ms` the median latency; the note has the 99th percentile, the rate over that of
the teacher's own forward over as many tokens as the server packs into one, the share of the time that it spent in
forwards, and the bytes of a learned token. Shapes of Llama-3.1-8B on a GPU, of SmolLM2-135M on a CPU, random weights.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from distill.recipe import parse
from distill.serving.app import RequestLimits, make_app
from distill.serving.engine import ServingEngine
from distill.serving.open import open_engine, running
from distill.teachers.backends.served.client import ServerConfig, Servers
from distill.teachers.backends.served.protocol import TargetRequest, hidden_of, tensors_of
from scripts.bench.harness import Row

NEEDS_CUDA = False
CLIENTS = (1, 8, 64)
QUESTIONS = 16  # that differ
RECIPE = """
teacher: {init: random, config: %s}
student: {init: random, config: %s}
data: {source: synthetic, max_length: %d}
train: {steps: 1}
"""


class Load(NamedTuple):
    """Latencies and throughput as measured by the clients.

    Attributes:
        seconds: from the first question to the last answer.
        latencies: of each answer, seconds.
        received: bytes of all.
        busy: seconds that the server spent in forwards meanwhile.
    """

    seconds: float
    latencies: list[float]
    received: int
    busy: float


def ask(url: str, bodies: Sequence[bytes], clients: int, requests: int) -> Load:
    """Have so many clients ask, after a warm-up; called in a process of its own."""
    servers = Servers(ServerConfig((url,), None, 600.0))

    def one(number: int) -> tuple[float, int]:
        begun = time.perf_counter()
        answer = servers.fetch("POST", "/v1/targets", bodies[number % len(bodies)])
        return time.perf_counter() - begun, len(answer)

    def forwards() -> float:
        return float(json.loads(servers.ask("GET", "/health"))["seconds"])

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, range(clients)))
        before, begun = forwards(), time.perf_counter()
        found = list(pool.map(one, range(requests)))
        seconds = time.perf_counter() - begun
    load = Load(seconds, [each for each, _ in found], sum(size for _, size in found), forwards() - before)
    servers.close()
    return load


def seconds_of_forward(engine: ServingEngine, rows: int, length: int) -> float:
    """Median of five of the teacher's own forwards over random tokens, to hidden states on its device."""
    batch = {"input_ids": torch.randint(0, engine.identity.rows, (rows, length), device=engine.device)}
    if engine.packs:  # as it is asked
        batch["position_ids"] = torch.arange(length, device=engine.device).expand(rows, length).contiguous()
    found = []
    for _ in range(6):
        begun = time.perf_counter()
        engine.forward(batch)
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
    return statistics.median(found[1:])


def require_right(url: str, engine: ServingEngine, question: TargetRequest) -> None:
    """The correctness gate: an answer is the engine's own hidden states, bit for bit."""
    servers = Servers(ServerConfig((url,), None, 600.0))
    answer = tensors_of(servers.fetch("POST", "/v1/targets?deterministic=1", question.body()))
    servers.close()
    ids = torch.from_numpy(question.ids).long().to(engine.device)
    expected = engine.forward({"input_ids": ids}).flatten(0, 1)[: len(question.rows)].cpu()
    if not torch.equal(hidden_of(answer, expected.dtype), expected):
        raise ValueError("served hidden states are not those of the teacher's own forward")


def compare(engine: ServingEngine, *, length: int, requests: int, limits: RequestLimits, shape: str) -> Iterator[Row]:
    """Rows of the table: the forward, then each number of clients."""
    generator = np.random.default_rng(0)
    learned = np.arange(length - 1, dtype=np.int32)
    ids = generator.integers(0, engine.identity.rows, (QUESTIONS, 1, length)).astype(np.int32)
    questions = [TargetRequest(row, None, learned) for row in ids]
    together = max(limits.budget // length, 1)
    own = seconds_of_forward(engine, together, length)
    rate = together * length / own
    yield Row("served", shape, "its own forward", ms=own * 1e3, tokens_per_s=rate, note=f"{together} rows at once")
    with running(make_app(engine, None, limits)) as url, multiprocessing.get_context("spawn").Pool(1) as process:
        require_right(url, engine, questions[0])
        for clients in CLIENTS:
            load = process.apply(ask, (url, [question.body() for question in questions], clients, requests))
            served = requests * length / load.seconds
            p50, p99 = (float(np.percentile(load.latencies, share)) * 1e3 for share in (50, 99))
            busy = load.busy / load.seconds
            note = (
                f"p99 {p99:,.1f} ms, {served / rate:.0%} of its own forward, {busy:.0%} in forwards, "
                f"{load.received / (requests * len(learned)):,.0f} bytes per trained token"
            )
            name = "1 client" if clients == 1 else f"{clients} clients"
            yield Row("served", shape, name, ms=p50, tokens_per_s=served, note=note)


def run(quick: bool, only: str) -> Iterator[Row]:
    """`quick` asks fewer questions; `only` has no meaning here."""
    config, length, dtype = (
        ("llama-3.1-8b", 2048, "bfloat16") if torch.cuda.is_available() else ("smollm2-135m", 128, "auto")
    )
    engine = open_engine(parse(RECIPE % (config, config, length), [f"teacher.dtype={dtype}"], name="served"), 65_536)
    held = engine.identity.dtype
    limits = RequestLimits() if engine.device.type == "cuda" else RequestLimits(budget=1024)
    yield from compare(
        engine,
        length=length,
        requests=64 if quick else 256,
        limits=limits,
        shape=f"{config}, rows of {length} tokens, {held}",
    )
