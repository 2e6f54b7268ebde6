"""A test file as the program of two processes, or more, which find each other as torchrun's do."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from forked import PLACES, Forked, clean_environment
from gpus import GPUS, NEEDS_TWO
from torch.distributed import TCPStore

from scripts.bench.many_gpus import ending


def run_as_two(
    *arguments: object, device: str = "cpu", timeout: int = 400, cwd: Path | None = None, processes: int = 2
) -> str:
    """Return the output of `processes` of `python *arguments`, over gloo ("cpu") or NCCL ("cuda"); fail if one fails.

    On "cpu" both are forked from a process that has imported torch and transformers; where one fails, the other is
    ended. The test is skipped where "cuda" is asked for and there are not two devices. Packages that come through
    PYTHONPATH stay in reach.
    """
    if device == "cuda":
        return _by_torchrun(list(map(str, arguments)), timeout)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        codes, late = codes_of(arguments, processes, cwd or Path.cwd(), (out, error), timeout)
        for file in (out, error):
            file.seek(0)
        written = out.read()
        assert not any(codes), f"{codes}, late: {late}\n{written[-3000:]}{error.read()[-6000:]}"
    return written


def codes_of(arguments, processes, cwd, streams, timeout, all_end=False, device="cpu"):
    """Exit codes of forked `processes`, and who was late; where one fails the others are ended, unless `all_end`. On
    "cuda" they are started, each with a GPU."""
    patience = datetime.timedelta(seconds=timeout)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience)
    common = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "two",
    }
    started = [
        Forked(
            list(map(str, arguments)),
            cwd=cwd,
            stdout=streams[0],
            stderr=streams[1],
            env=clean_environment(**common, RANK=rank, LOCAL_RANK=rank),
        )
        if device == "cpu"
        else started_on_gpu(arguments, cwd, streams, **common, RANK=rank, LOCAL_RANK=rank)
        for rank in map(str, range(processes))
    ]
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        codes = {each.poll() for each in started}
        if None not in codes or not (all_end or codes <= {None, 0}):
            break
        time.sleep(0.02)
    late = [each.poll() is None for each in started]
    for each in started:
        each.kill()
    return [each.wait() for each in started], late


def gpu_environment(**more: str) -> dict[str, str]:
    """This environment for a process that uses a GPU."""
    path = os.pathsep.join([*PLACES, *filter(None, [os.environ.get("PYTHONPATH")])])
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return given | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def started_on_gpu(arguments, cwd, streams, **more):
    """A process of `python *arguments` in `gpu_environment`."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, stdout=streams[0], stderr=streams[1], env=gpu_environment(**more))


def _by_torchrun(arguments: list[str], timeout: int) -> str:
    if GPUS < 2:
        pytest.skip(NEEDS_TWO)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        *arguments,
    ]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        with ending(subprocess.Popen(command, stdout=out, stderr=error, env=gpu_environment()), timeout) as process:
            code = process.wait()
        for file in (out, error):
            file.seek(0)
        written = out.read()
        assert code == 0, f"{code}\n{written[-3000:]}{error.read()[-6000:]}"
    return written
