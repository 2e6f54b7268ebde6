"""Rank and number of the processes of a run, and broadcasts from rank 0."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from distill.core.diff_settings import diff_settings
from distill.core.errors import quote

T = TypeVar("T")


def world_size() -> int:
    """Return the number of processes of this run, as torchrun and accelerate announce it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Return whether this is the main process, which prints and writes files: rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


# timeout of processes that wait while rank 0 reads weights; NCCL's default is ten minutes
PATIENCE = datetime.timedelta(hours=4)


def broadcast_from_rank0(make: Callable[[], T]) -> T:
    """Call `make` on rank 0 and return its result on every rank; a `ValueError` there is raised on all."""
    if world_size() == 1:
        return make()
    import torch.distributed as dist

    results = [run_on_rank0(make)]
    dist.broadcast_object_list(results)
    return results[0]  # type: ignore[return-value]


def run_on_rank0(make: Callable[[], T]) -> T | None:
    """Call `make` on rank 0 while the others wait; return its result there, None on the others."""
    import torch.distributed as dist

    result = None
    fault = [""]
    # a group with a timeout of its own: in the run's, the others would give up while rank 0 still works
    waiting = dist.new_group(backend="gloo", timeout=PATIENCE)
    if is_main_process():
        try:
            result = make()
        except ValueError as error:
            fault = [str(error)]
    # the others wait here; an error of rank 0 reaches them, or they would go on into a collective without it
    dist.broadcast_object_list(fault, group=waiting)
    dist.destroy_process_group(waiting)
    if fault[0]:
        raise ValueError(fault[0])
    return result


def require_equal_on_ranks(own: Mapping[str, object]) -> None:
    """Check that every rank has the same values as rank 0; every rank calls it.

    Args:
        own: This rank's values by name, plain data.

    Raises:
        ValueError: On every rank, with the first rank that differs, the value's name with dots, and both values.
    """
    if world_size() == 1:
        return
    import torch.distributed as dist

    every: list[Any] = [None] * world_size()
    dist.all_gather_object(every, own)
    for rank, values in enumerate(every):
        for name, first, other in diff_settings(every[0], values):
            raise ValueError(
                f"rank {rank}: {name} differs from rank 0's: expected {quote(first)}, got {quote(other)}; every "
                "process of a run needs the same recipe, data, weights and files"
            )


def restart_store() -> dict[str, object]:
    """Return arguments of `init_process_group` for processes that torchrun restarted (--max-restarts); else {}.

    torchrun's store outlives its processes: a later attempt would read the addresses of the previous one and wait for
    them. On several machines each torchrun counts attempts separately, so nothing is changed there.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    world = world_size()
    if attempt == "0" or world == 1 or os.environ.get("LOCAL_WORLD_SIZE") != str(world):
        return {}
    from torch.distributed import PrefixStore, TCPStore

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return {"store": PrefixStore(f"attempt-{attempt}", store), "rank": int(os.environ["RANK"]), "world_size": world}


LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def is_launched_process() -> bool:
    """Return whether a launcher started this process, so that it may have joined a process group."""
    return "torch" in sys.modules and any(name in os.environ for name in LAUNCHED)


def exit_process(code: int) -> NoReturn:
    """Exit a distributed process without finalizing the interpreter, after joining threads and exit handlers.

    A gloo thread keeps tensors until after the process group is destroyed, as long as anything (a device mesh) refers
    to the group. Freeing them needs the GIL, and before Python 3.14 a thread that requests the GIL of a finalized
    interpreter aborts the process: one run in six ended so, after all its work.
    """
    # as an interpreter does when it exits: idle threads of executors (torch.compile has some) are told to end before
    # they are joined
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
