"""A served teacher in shards over two processes gives the outputs of one process, and ends whole."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import numpy as np
import psutil
import pytest
import torch
from forked import Forked, clean_environment, free_port, stand_ins
from gpus import two_gpus
from served import HTTP, engine_in, expected_hidden, post, question, recipe_in, write_models
from two_ranks import gpu_environment

from distill.core.launch import is_running
from distill.recipe import dump
from distill.serving.engine import RequestOptions, RowsRequest
from distill.serving.open import processes_of
from distill.serving.worker import Shares
from distill.teachers.backends.served.protocol import TargetRequest, tensors_of

SHARDED = ["parallel.teacher=sharded", "train.device=cpu"]


class Server:
    """`distill serve` with two processes; torchrun's agent is the first process itself.

    Those that nobody kills are forked, `programs` in place of the Pythons that torchrun would start.
    """

    def __init__(self, folder, device, programs):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = ["serve", "tiny.yaml", "parallel.teacher=sharded", f"train.device={device}", "--port", str(port)]
        self.errors = folder / "errors"
        environment = clean_environment() if device == "cpu" else gpu_environment()
        command = ["-m", "distill", *words, "--processes", "2"]
        with self.errors.open("wb") as errors, open(os.devnull, "w") as nowhere:
            streams = {"stdout": nowhere, "stderr": errors, "start_new_session": True}
            if programs is None:
                self.launcher = subprocess.Popen([sys.executable, *command], cwd=folder, env=environment, **streams)
            else:
                environment |= stand_ins(programs)
                self.launcher = Forked(command, cwd=folder, env=environment, **streams)
        until = time.monotonic() + 200
        while self.health() is None and self.launcher.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        assert self.health() is not None, self.errors.read_text()
        shards = [each for each in psutil.Process(self.launcher.pid).children() if "RANK" in each.environ()]
        self.pids = {int(each.environ()["RANK"]): each.pid for each in shards}
        assert sorted(self.pids) == [0, 1]

    def health(self):
        with contextlib.suppress(httpx2.HTTPError):
            return HTTP.get(self.url + "/health")

    def ended(self):
        """Exit code of the launcher, and the lines of standard error; both shards have ended by then or soon after."""
        code = self.launcher.wait(timeout=100)
        until = time.monotonic() + 10
        while any(map(is_running, self.pids.values())) and time.monotonic() < until:
            time.sleep(0.05)
        assert not any(map(is_running, self.pids.values())), "a process with a shard goes on"
        return code, [line for line in self.errors.read_text().splitlines() if line.startswith("distill")]


def place_for(folder, *overrides, **of_teacher):
    write_models(folder, **of_teacher)
    (folder / "tiny.yaml").write_text(dump(recipe_in(folder, *overrides)))
    return folder


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def serve():
    """Starts a server; it is gone after the test."""
    made = []
    yield lambda folder, device="cpu", programs=None: made.append(Server(folder, device, programs)) or made[0]
    for server in made:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.launcher.pid, signal.SIGKILL)
        server.launcher.wait()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_two_processes_serve_the_outputs_of_one(tmp_path, pool, serve, kind):
    """Untied; tied, with a soft cap. Requests that go alone: to the bit."""
    cap = {"final_logit_softcapping": 5.0} if kind == "gemma2" else {}
    engine = engine_in(place_for(tmp_path, kind=kind, **cap))
    server = serve(tmp_path, programs=tmp_path)
    told = HTTP.get(server.url + "/v1/identity").json()
    assert told["hash"] == engine.identity.hash and told["fingerprint"] == engine.identity.fingerprint
    assert told["notes"]["processes"] == 2
    assert torch.equal(tensors_of(HTTP.get(server.url + "/v1/head").content)["weight"], engine.head["weight"])
    several = [question(seed, rows=2, length=14 + seed) for seed in range(6)]
    alone = [expected_hidden(engine, query) for query in several]
    for options, slack in (({"deterministic": 1}, 0.0), ({}, 1e-5)):
        asked = [pool.submit(post, server.url, query, **options) for query in several]
        for answer, expected in zip(asked, alone, strict=True):
            hidden = tensors_of(answer.result().content)["hidden"]
            torch.testing.assert_close(hidden, expected, rtol=slack, atol=slack)
    top = engine.answer(
        [RowsRequest(several[0], RequestOptions(top_k=4, deterministic=True).checked(engine.identity.rows))]
    )[0]
    asked = tensors_of(post(server.url, several[0], top_k=4, deterministic=1).content)
    assert torch.equal(asked["logprobs"], top["logprobs"])
    few = TargetRequest(several[1].ids, several[1].positions, several[1].rows[:5])
    logits = tensors_of(post(server.url, few, path="/v1/logits").content)["logits"]
    assert torch.equal(logits, engine.answer([RowsRequest(few, RequestOptions(logits=True).checked(259))])[0]["logits"])
    nothing = HTTP.post(server.url + "/v1/targets", json={"input_ids": [[1, 2, 3]], "rows": []})
    assert nothing.json() == {"hidden": []}
    assert server.health().json()["requests"] == 15
    server.launcher.send_signal(signal.SIGTERM)
    assert server.ended() == (128 + signal.SIGTERM, [])


@pytest.mark.gpu
@two_gpus
def test_two_gpus_serve_the_outputs_of_one(tmp_path, pool, serve):
    """Over NCCL, in bf16 and by our kernels; how attention is computed is timed by each process for itself."""
    place_for(tmp_path, "teacher.dtype=bfloat16", layers=3, hidden=128)
    engine, server = engine_in(tmp_path, "teacher.dtype=bfloat16", "train.device=cuda"), serve(tmp_path, "cuda")
    assert (
        HTTP.get(server.url + "/v1/identity").json()["fingerprint"]["weights"]
        == (engine.identity.fingerprint["weights"])
    )
    several = [question(seed, rows=2, length=64 + seed) for seed in range(6)]
    asked = [pool.submit(post, server.url, query, deterministic=1) for query in several]
    for query, answer in zip(several, asked, strict=True):
        alone = engine.answer([RowsRequest(query, RequestOptions(deterministic=True))])[0].wait()["hidden"]
        torch.testing.assert_close(tensors_of(answer.result().content)["hidden"], alone, rtol=3e-2, atol=3e-2)
    os.kill(server.pids[1], signal.SIGKILL)
    assert server.ended()[0] == 128 + signal.SIGKILL


@pytest.mark.full
def test_a_lost_process_ends_the_server_with_a_message(tmp_path, serve):
    """Not the one that answers, which has to notice."""
    server = serve(place_for(tmp_path))
    query = question(0)
    assert post(server.url, query).status_code == 200
    began = time.monotonic()
    os.kill(server.pids[1], signal.SIGKILL)
    with contextlib.suppress(httpx2.HTTPError):  # until it does not listen any more
        while True:
            assert post(server.url, query).status_code in (200, 503)
            time.sleep(0.01)
    code, lines = server.ended()
    assert code == 128 + signal.SIGKILL and time.monotonic() - began < 25, (code, lines)
    assert lines[-1] == "distill: rank 1 was ended by SIGKILL; the run has ended", lines


@pytest.mark.full
def test_no_shard_outlives_a_launcher_that_was_killed(tmp_path, serve):
    server = serve(place_for(tmp_path))
    server.launcher.kill()
    code, lines = server.ended()
    assert code == -signal.SIGKILL and lines == []


def test_sharded_serving_requires_several_processes(tmp_path, monkeypatch, torchrun):
    sharded, plain = recipe_in(tmp_path, *SHARDED), recipe_in(tmp_path)
    with pytest.raises(ValueError, match="--processes N, or torchrun --nproc-per-node N -m distill serve"):
        processes_of(sharded)
    assert processes_of(plain) == 1 and processes_of(sharded, 2) == 2
    with pytest.raises(ValueError, match="copies are servers of their own"):
        processes_of(plain, 2)
    torchrun(gpus=4)
    assert processes_of(recipe_in(tmp_path, "parallel.teacher=sharded", "train.device=cuda")) == 4
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert processes_of(sharded) == 1, "they are there already"
    with pytest.raises(ValueError, match="copies are servers of their own"):
        processes_of(plain)


def test_requests_are_shared_out_over_forwards():
    alone, packed, logits = RequestOptions(deterministic=True), RequestOptions(), RequestOptions(logits=True)

    def shared(most, *given):
        shares = Shares(most, 10)
        jobs = [
            RowsRequest(TargetRequest(np.zeros((1, size), np.int32), None, np.zeros(1, np.int32)), o)
            for size, o in given
        ]
        taken = [shares.add(job) for job in jobs]
        return taken, [[job.query.ids.size for job in share] for share in shares.jobs]

    assert shared(2, (4, packed), (4, packed), (6, packed), (7, packed)) == ([True] * 3 + [False], [[4, 6], [4]])
    assert shared(2, (4, alone), (9, packed), (1, packed), (1, alone)) == ([True] * 3 + [False], [[4], [9, 1]])
    assert shared(1, (40, packed), (1, packed)) == ([True, False], [[40]])
    assert shared(2, (4, logits), (1, packed)) == ([True, False], [[4]])
    assert shared(2, (1, packed), (4, logits)) == ([True, False], [[1]])
