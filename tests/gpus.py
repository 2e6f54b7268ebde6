"""GPUs of this machine: conditions under which tests are skipped, and memory that tests give back to each other."""

import contextlib
import fcntl
import gc
import sys
from pathlib import Path

import pytest
import torch

# read once, when nothing is replaced yet: fixtures make torch.cuda.device_count() return 1 for the program, and a
# condition that asked it then skipped every test of two GPUs on a machine with two
GPUS = torch.cuda.device_count()
NEEDS_ONE, NEEDS_TWO = "needs a CUDA device", "needs two CUDA devices"
two_gpus = pytest.mark.skipif(GPUS < 2, reason=NEEDS_TWO)
LARGE_BYTES = 1 << 30  # what a test may leave reserved; PyTorch keeps what was freed, and other workers cannot have it
HEAVY_BYTES = 8 << 30  # a test that takes more is `heavy_gpu`


def fail_wrong_skip(report: pytest.TestReport, gpus: int = GPUS) -> None:
    """Make the skip of a test for lack of GPUs that are here a failure."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if any(reason.endswith(needed) and gpus >= count for needed, count in ((NEEDS_ONE, 1), (NEEDS_TWO, 2))):
        report.outcome = "failed"
        report.longrepr = f"{reason}, and this machine has {gpus}: a fixture hides them from the condition"


def give_memory_back() -> None:
    """Free what this process holds on GPUs and no longer uses, where it is much."""
    if max(map(torch.cuda.memory_reserved, range(GPUS)), default=0) < LARGE_BYTES:
        return
    for name in ("last_exc", "last_value", "last_traceback"):  # the frames of a failed test, with its tensors
        if hasattr(sys, name):
            delattr(sys, name)
    gc.collect()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def one_at_a_time(lock: Path):
    """Hold the lock of all workers' tests that take much of a GPU's memory."""
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
        give_memory_back()  # before the next one begins
