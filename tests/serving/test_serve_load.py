"""`distill serve` under load: 64 clients among those who misbehave, a bounded queue, forwards that fail."""

import concurrent.futures
import socket
import threading
import time

import httpx2
import numpy as np
import pytest
import torch
from served import HTTP, expected_hidden, post, question, serving

from distill.models.precision.host_copy import HostCopy
from distill.serving.engine import RequestOptions, RowsRequest
from distill.serving.worker import Full, Worker
from distill.teachers.backends.served.protocol import TargetRequest, tensors_of


@pytest.mark.full
def test_64_clients_and_those_who_misbehave(engine, url):
    """Clients that leave, dawdle and send garbage among 64 that ask: each of those gets its own answer."""
    port, stop = int(url.rpartition(":")[2]), threading.Event()
    body = question(0).body()
    header = f"POST /v1/targets HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    def misbehaves(number):
        while not stop.is_set():
            with socket.create_connection(("127.0.0.1", port)) as connection:
                how = number % 4
                if how == 0:  # leaves with its answer under way
                    connection.sendall(header + body)
                elif how == 1:  # leaves in the middle of its question
                    connection.sendall(header + body[: len(body) // 2])
                elif how == 2:  # a byte now and then
                    connection.sendall(header)
                    for byte in body[:5]:
                        connection.sendall(bytes([byte]))
                        stop.wait(0.05)
                else:
                    connection.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
            stop.wait(0.1)

    def asks(number):
        query = question(number, rows=1 + number % 3, length=16 + number % 9, packed=number % 5 != 0)
        with httpx2.Client(timeout=60, verify=False) as client:
            for turn in range(2):
                options = {"deterministic": 1} if (number + turn) % 4 == 0 else {}
                answer = client.post(f"{url}/v1/targets", content=query.body(), params=options)
                assert answer.status_code == 200, answer.text
                hidden = tensors_of(answer.content)["hidden"]
        return query, hidden

    nuisances = [threading.Thread(target=misbehaves, args=(number,), daemon=True) for number in range(8)]
    for thread in nuisances:
        thread.start()
    try:
        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            answers = list(pool.map(asks, range(64)))
    finally:
        stop.set()
        for thread in nuisances:
            thread.join()
    for query, hidden in answers:
        torch.testing.assert_close(hidden, expected_hidden(engine, query), rtol=1e-4, atol=1e-5)
    served = HTTP.get(f"{url}/health").json()
    assert served["requests"] >= 128 and served["forwards"] < served["requests"] and served["waiting"] == 0


def test_a_body_that_does_not_come_is_not_waited_for(engine):
    with (
        serving(engine, read_seconds=0.5) as url,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10) as connection,
    ):
        connection.sendall(b"POST /v1/targets HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\nabc")
        begun = time.monotonic()
        assert b"408" in connection.recv(100)
        assert time.monotonic() - begun < 5


# ------------------------------------------------------------------ the queue


class Slow:
    """An engine whose forward waits to be let go."""

    def __init__(self):
        self.go, self.forwards = threading.Semaphore(0), []

    def __call__(self, jobs):
        self.forwards.append([job.query.ids.size for job in jobs])
        assert self.go.acquire(timeout=10)
        if any(job.query.ids[0, 0] == 13 for job in jobs):
            raise RuntimeError("this one is bad")
        return [{"hidden": torch.full((1,), float(job.query.ids[0, 0]))} for job in jobs]


def job(number, size=10, alone=False):
    return RowsRequest(
        TargetRequest(np.full((1, size), number, np.int32), None, np.array([0], np.int32)),
        RequestOptions(deterministic=alone),
    )


def test_the_queue_gathers_up_to_a_budget_and_is_bounded():
    slow = Slow()
    worker = Worker(slow, budget=35, most_waiting=100)
    first = worker.submit(job(1))
    while not slow.forwards:
        time.sleep(0.001)
    others = [worker.submit(job(n)) for n in (2, 3, 4, 5)]
    alone, gone, last = worker.submit(job(6, alone=True)), worker.submit(job(7)), worker.submit(job(8))
    assert gone.cancel()
    with pytest.raises(Full) as full:
        worker.submit(job(9, size=50))
    assert full.value.seconds > 0
    slow.go.release(10)
    for number, future in zip((1, 2, 3, 4, 5, 6, 8), (first, *others, alone, last), strict=True):
        assert future.result(timeout=10)["hidden"].item() == number
    assert slow.forwards == [[10], [10, 10, 10], [10], [10], [10]]
    worker.close()
    with pytest.raises(Full):
        worker.submit(job(1))


def test_one_who_makes_a_forward_fail_is_the_only_one_to_fail():
    slow = Slow()
    worker = Worker(slow, budget=100, most_waiting=1000)
    first = worker.submit(job(1))
    while not slow.forwards:
        time.sleep(0.001)
    futures = [worker.submit(job(n)) for n in (12, 13, 14)]
    slow.go.release(20)
    assert first.result(timeout=10) and futures[0].result(timeout=10) and futures[2].result(timeout=10)
    with pytest.raises(RuntimeError, match="bad"):
        futures[1].result(timeout=10)
    worker.close()


class OnTheWay(HostCopy):
    """An answer that is on its way from a GPU until it is let go."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.here = threading.Event()

    def is_ready(self):
        return self.here.is_set()

    def wait(self):
        assert self.here.wait(10)
        return self


def test_a_gpu_has_its_next_forward_before_the_answers_of_the_last_have_left_it():
    begun = []

    def answer(jobs):
        begun.append([OnTheWay({"hidden": torch.ones(1)}) for _ in jobs])
        return begun[-1]

    def until(count):
        end = time.monotonic() + 10
        while len(begun) < count and time.monotonic() < end:
            time.sleep(0.001)
        return [len(answers) for answers in begun]

    worker = Worker(answer, budget=30, most_waiting=1000)
    futures = [worker.submit(job(1, alone=True)), worker.submit(job(2, alone=True)), worker.submit(job(3))]
    assert until(2) == [1, 1] and not any(future.done() for future in futures)
    time.sleep(0.05)
    assert until(2) == [1, 1], "one beside the one that runs, and no more"
    begun[0][0].here.set()
    assert futures[0].result(timeout=10) and until(3) == [1, 1, 1] and not futures[1].done()
    begun[1][0].here.set()
    begun[2][0].here.set()
    assert futures[2].result(timeout=10)
    worker._each = 100.0  # seconds a token: the next forward will not end soon, so more may come
    futures.append(worker.submit(job(4)))
    assert until(4) == [1, 1, 1, 1]
    futures += [worker.submit(job(n)) for n in (5, 6)]
    time.sleep(0.05)
    assert until(4) == [1, 1, 1, 1], "begun before its time"
    futures.append(worker.submit(job(7)))
    assert until(5)[4] == 3, "the budget is full"
    for answers in begun:
        for each in answers:
            each.here.set()
    assert all(future.result(timeout=10) for future in futures)
    worker.close()


def test_a_full_queue_responds_with_retry_after(engine, monkeypatch):
    slow = Slow()
    monkeypatch.setattr(engine, "answer", slow)
    with serving(engine, waiting=60) as url, concurrent.futures.ThreadPoolExecutor(8) as pool:
        query = question(1)
        futures = [pool.submit(post, url, query) for _ in range(6)]
        done, _ = concurrent.futures.wait(futures, timeout=20, return_when=concurrent.futures.FIRST_COMPLETED)
        refused = done.pop().result()
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        slow.go.release(20)
        assert sorted({future.result().status_code for future in futures}) == [200, 503]


def test_no_answer_in_time_and_a_failure(engine, monkeypatch):
    slow = Slow()
    monkeypatch.setattr(engine, "answer", slow)
    with serving(engine, answer_seconds=0.2) as url:
        assert post(url, question(1)).status_code == 504
        slow.go.release(20)
        failed = post(url, TargetRequest(np.full((1, 4), 13, np.int32), None, np.array([0], np.int32)))
        assert failed.status_code == 500 and "this one is bad" in failed.json()["error"]
