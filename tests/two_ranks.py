"""A test file as the program of two processes, which find each other by torchrun's launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


def run_as_two(program: str, *arguments: object, device: str = "cpu", timeout: int = 400) -> str:
    """What two processes of `program` print, gloo's on "cpu" or NCCL's on "cuda"; fails where either fails.

    The test is skipped where "cuda" is asked for and there are not two devices. Packages that come through PYTHONPATH
    stay in reach.
    """
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    places = [*map(str, (ROOT, ROOT / "kernels", ROOT / "tests")), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places)), "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    environment.pop("TRITON_INTERPRET", None)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0", program, *map(str, arguments),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout
