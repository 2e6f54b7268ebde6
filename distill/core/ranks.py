"""One process of several: who speaks, how many there are, how one of them ends."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

T = TypeVar("T")


def world_size() -> int:
    """Processes of this run, as torchrun and accelerate announce them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process is the one that speaks and writes: rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


# of processes that wait while the first one reads weights; NCCL gives up after ten minutes
PATIENCE = datetime.timedelta(hours=4)


def of_the_first(make: Callable[[], T]) -> T:
    """What `make` returns on the first process, which alone calls it, on all of them; what it raises is raised on all.

    Raises:
        ValueError: as `make` raised it.
    """
    if world_size() == 1:
        return make()
    import torch.distributed as dist

    results = [on_the_first(make)]
    dist.broadcast_object_list(results)
    return results[0]  # type: ignore[return-value]


def on_the_first(make: Callable[[], T]) -> T | None:
    """What `make` returns, on the first process; None on the others, which wait. What it raises is raised on all."""
    import torch.distributed as dist

    result, fault, waiting = None, [""], dist.new_group(backend="gloo", timeout=PATIENCE)
    if is_first():
        try:
            result = make()
        except ValueError as error:
            fault = [str(error)]
    dist.broadcast_object_list(fault, group=waiting)
    dist.destroy_process_group(waiting)
    if fault[0]:
        raise ValueError(fault[0])
    return result


def store_of_attempt() -> dict[str, object]:
    """What `init_process_group` needs in processes that torchrun started again (--max-restarts); else nothing.

    torchrun's store outlives its processes: a later attempt would read the addresses of the one before, and wait for
    them. On several machines each torchrun counts attempts by itself, so that nothing is changed there.
    """
    attempt, world = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), world_size()
    if attempt == "0" or world == 1 or os.environ.get("LOCAL_WORLD_SIZE") != str(world):
        return {}
    from torch.distributed import PrefixStore, TCPStore

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return {"store": PrefixStore(f"attempt-{attempt}", store), "rank": int(os.environ["RANK"]), "world_size": world}


LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def is_one_of_several() -> bool:
    """Whether a launcher started this process, so that it may have joined a process group of torch.distributed."""
    return "torch" in sys.modules and any(name in os.environ for name in LAUNCHED)


def leave(code: int) -> NoReturn:
    """End one of several processes, once its threads are done and all that is to happen at exit has happened.

    A thread of gloo keeps tensors until after the process group is destroyed, as long as anything (a device mesh)
    holds the group. Dropping them needs Python, and before 3.14 a thread that asks a finished interpreter for Python
    aborts the process: one in six ended so, after all its work. So the interpreter is not finished.
    """
    # as an interpreter that finishes does: idle threads of executors (torch.compile has some) are told to end before
    # they are waited for
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
