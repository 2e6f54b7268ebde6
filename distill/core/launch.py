"""Start `distill run` with one process per GPU, through torchrun.

    processes = processes_to_start(os.environ, gpus=visible_gpus(), device=recipe.train.device)
    if processes > 1:
        return restart(processes)

A process that torchrun, accelerate or a cluster's scheduler started has RANK and WORLD_SIZE in its environment and
starts nothing. To use fewer GPUs than there are: `CUDA_VISIBLE_DEVICES=0,1 distill run ...`. Several nodes:
`torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m distill run ...` on each.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence

from distill.core import console
from distill.core.ranks import LAUNCHED, is_main_process

# settings of `accelerate launch` that `Trainer` would apply although a field of the recipe decides
ACCELERATES = {
    "ACCELERATE_MIXED_PRECISION": "train.precision",
    "ACCELERATE_DYNAMO_BACKEND": "train.cuda_graph",
    "ACCELERATE_USE_DEEPSPEED": "parallel.strategy",
    "ACCELERATE_USE_MEGATRON_LM": "parallel.strategy",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallel.strategy",
}

LAUNCHER = "DISTILL_LAUNCHER"  # environment variable of the processes: id of the launcher
OWNER = "DISTILL_OWNER"  # environment variable of a helper process: id of the run's process that started it
LOOKS_EVERY_S = 1.0
OWNER_EVERY_S = 0.25
PR_SET_PDEATHSIG = 1  # of Linux

log = logging.getLogger(__name__)


def end_with_launcher() -> None:
    """End this process as SIGTERM would, within seconds after its launcher: no other process would end it.

    Does nothing in a process that torchrun did not start. Training finishes its step and writes a checkpoint.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = int(os.environ.get(LAUNCHER, os.getppid()))

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(LOOKS_EVERY_S)
        if is_main_process():
            with contextlib.suppress(OSError):
                console.print_error(f"the launcher (process {launcher}) is gone, so this run ends too")
        else:
            time.sleep(2 * LOOKS_EVERY_S)  # rank 0 prints the reason before all agree to stop
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="launcher").start()


def end_with_owner() -> None:
    """Kill this process as soon as the run that started it ends, by whatever signal.

    Does nothing in a process that no run started.
    """
    if OWNER in os.environ:
        _end_with(int(os.environ[OWNER]))


def end_with_parent() -> None:
    """Kill this process, which has nothing to save, as soon as the process that started it ends, by whatever signal."""
    _end_with(os.getppid())


def _end_with(parent: int) -> None:
    # Linux kills this process at once; elsewhere, and where the parent ended before this call, a polling thread does
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(OWNER_EVERY_S)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="owner").start()


def is_running(pid: int) -> bool:
    """Return whether a process of this host is running; a zombie is not."""
    import psutil  # comes with accelerate

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def drop_accelerate_settings(environment: MutableMapping[str, str]) -> None:
    """Remove training settings of `accelerate config` from the environment; rank 0 warns of each."""
    for name, ours in ACCELERATES.items():
        value = environment.pop(name, "no")
        if value.lower() not in ("no", "false", "0", "") and is_main_process():
            log.warning("%s=%s of accelerate's configuration is ignored: the recipe's %s applies", name, value, ours)


def visible_gpus() -> int:
    """Return the number of CUDA devices that this process may use, without initialising CUDA on them."""
    import torch

    return torch.cuda.device_count()


def processes_to_start(environment: Mapping[str, str], *, gpus: int, device: str) -> int:
    """Return the number of processes to start for a run on this machine; 1 to run in this process.

    Args:
        environment: Variables of this process; those of a launcher mean that all processes run already.
        device: The recipe's `train.device`: auto, cpu or cuda.
    """
    if device == "cpu" or any(name in environment for name in LAUNCHED):
        return 1
    return max(gpus, 1)


def torchrun_arguments(processes: int, arguments: Sequence[str]) -> list[str]:
    """Return torchrun's arguments to run `distill` with `arguments` in `processes` processes of this machine.

    The rendezvous takes a free port, so that several runs fit on one machine.
    """
    return [
        "--nnodes=1",
        f"--nproc-per-node={processes}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        "--module",
        "distill",
        *arguments,
    ]


def threads_per_process(processes: int, cores: int) -> int:
    """Return OMP_NUM_THREADS of each process: an equal share of the cores, at least 1 (torchrun always sets 1)."""
    return max(cores // processes, 1)


command_line: list[str] = []  # arguments of this process's command


def restart(processes: int, overrides: Sequence[str] = ()) -> int:
    """Run this very command, with overrides of the recipe added, in `processes` processes; see `start`."""
    return start(processes, [*command_line, *overrides])


def start(processes: int, arguments: Sequence[str]) -> int:
    """Run `distill` with `arguments` in `processes` processes of this machine and wait for them.

    Returns:
        0 (also after SIGTERM and a checkpoint), or the exit code of the process that failed first, which has printed
        the reason (130 after Ctrl-C).
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    command = ["torchrun", "--nproc-per-node", str(processes), "-m", "distill", *arguments]
    line = f"{'processes':<12}{processes}, one a GPU, as by: {' '.join(command)}"
    print(line, file=sys.stderr if "--json" in arguments else sys.stdout, flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_process(processes, os.cpu_count() or 1)))
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.pop(OWNER, None)  # that of this process, which ends them
    # the failed process has printed its message; torchrun would add a table and a stack trace
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    if hasattr(os, "killpg"):
        api._terminate_process_handler = ForwardSignals()  # type: ignore[assignment]  # PContext.start makes it the handler
    try:
        torchrun.main(torchrun_arguments(processes, arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        console.print_error(f"rank {rank} was ended by {failure.signal_name()}; the run has ended")
        return 128 - failure.exitcode
    except api.SignalException as stopped:
        return 128 + int(stopped.sigval)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        del os.environ[LAUNCHER]
    return 0


class ForwardSignals:
    """Signal handler that forwards signals to the child processes and waits for them.

    torchrun's own handler would kill them 30 seconds later, possibly while a checkpoint is written, and turn a second
    Ctrl-C, which stops at once, into a SIGTERM, which finishes the step. A third Ctrl-C is sent as SIGKILL: a process
    that waits inside of NCCL handles no other signal.
    """

    def __init__(self) -> None:
        self.interrupts = 0

    def __call__(self, number: int, frame: object) -> None:
        """Send the signal to each process and its children; torchrun gives each a process group."""
        import psutil  # comes with accelerate

        self.interrupts += number == signal.SIGINT
        for process in psutil.Process().children():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL if self.interrupts > 2 else number)
