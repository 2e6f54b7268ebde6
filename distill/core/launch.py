"""`distill run` on a machine with several GPUs: one process a GPU, started through torchrun.

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
from distill.core.ranks import LAUNCHED, is_first

# what `accelerate launch` hands over of its own configuration and a Trainer would take, where a field of the recipe
# decides
ACCELERATES = {
    "ACCELERATE_MIXED_PRECISION": "train.precision",
    "ACCELERATE_DYNAMO_BACKEND": "train.compile",
    "ACCELERATE_USE_DEEPSPEED": "parallel.strategy",
    "ACCELERATE_USE_MEGATRON_LM": "parallel.strategy",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallel.strategy",
}

LAUNCHER = "DISTILL_LAUNCHER"  # in the environment of the processes: the one that started them
OWNER = "DISTILL_OWNER"  # in the environment of a process that a run started for itself: the process of that run
LOOKS_EVERY_S = 1.0
OWNER_EVERY_S = 0.25
PR_SET_PDEATHSIG = 1  # of Linux

log = logging.getLogger(__name__)


def end_with_launcher() -> None:
    """Have this process end as SIGTERM would end it, within seconds after its launcher: nobody else would end it then.

    Nothing happens in a process that no torchrun started. A run that trains finishes its step and writes a checkpoint.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = int(os.environ.get(LAUNCHER, os.getppid()))

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(LOOKS_EVERY_S)
        if is_first():
            with contextlib.suppress(OSError):
                console.complain(f"the launcher (process {launcher}) is gone, so this run ends too")
        else:
            time.sleep(2 * LOOKS_EVERY_S)  # the first says why before all agree to stop
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="launcher").start()


def end_with_owner() -> None:
    """Kill this process as soon as the run that started it for itself is gone, by whatever signal.

    Nothing happens in a process that no run started. Linux does so at once; elsewhere, and where the run ended before
    this was called, a thread looks.
    """
    if OWNER not in os.environ:
        return
    owner = int(os.environ[OWNER])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(OWNER_EVERY_S)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="owner").start()


def is_running(pid: int) -> bool:
    """Return whether a process of this host has not ended; one that nobody has waited for yet has."""
    import psutil  # comes with accelerate

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def forget_accelerates_settings(environment: MutableMapping[str, str]) -> None:
    """Take out of the environment what `accelerate config` said of how to train; the first process names it."""
    for name, ours in ACCELERATES.items():
        value = environment.pop(name, "no")
        if value.lower() not in ("no", "false", "0", "") and is_first():
            log.warning("%s=%s, of accelerate's configuration, is not used: the recipe decides (%s)", name, value, ours)


def visible_gpus() -> int:
    """CUDA devices this process may use; does not start CUDA on them."""
    import torch

    return torch.cuda.device_count()


def processes_to_start(environment: Mapping[str, str], *, gpus: int, device: str) -> int:
    """How many processes a run on this machine is to be started as; 1 means that this process does it itself.

    Args:
        environment: The process's; a launcher's variables in it mean that the processes are there already.
        gpus: Visible ones.
        device: The recipe's `train.device`: auto, cpu or cuda.
    """
    if device == "cpu" or any(name in environment for name in LAUNCHED):
        return 1
    return max(gpus, 1)


def torchrun_arguments(processes: int, arguments: Sequence[str]) -> list[str]:
    """What torchrun takes to run `distill` with `arguments` in as many processes of this machine.

    The rendezvous takes a free port, so that several runs fit on one machine.
    """
    return [
        "--nnodes=1", f"--nproc-per-node={processes}", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
        "--module", "distill", *arguments,
    ]  # fmt: skip


def threads_each(processes: int, cores: int) -> int:
    """OMP_NUM_THREADS of each process: the cores shared out, at least 1 (torchrun's own choice is always 1)."""
    return max(cores // processes, 1)


command_line: list[str] = []  # the arguments of the command that this process carries out


def restart(processes: int, overrides: Sequence[str] = ()) -> int:
    """Carry out this very command, with overrides of the recipe added, in so many processes; see `start`."""
    return start(processes, [*command_line, *overrides])


def start(processes: int, arguments: Sequence[str]) -> int:
    """Run `distill` with `arguments` in `processes` processes of this machine and wait for them.

    Returns:
        0 (also after SIGTERM and a checkpoint), or the exit code of the process that failed first (130 after Ctrl-C);
        it has said why itself.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    command = ["torchrun", "--nproc-per-node", str(processes), "-m", "distill", *arguments]
    line = f"{'processes':<12}{processes}, one a GPU, as by: {' '.join(command)}"
    print(line, file=sys.stderr if "--json" in arguments else sys.stdout, flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_each(processes, os.cpu_count() or 1)))
    os.environ[LAUNCHER] = str(os.getpid())
    # the failed process's own message is enough; torchrun would add a table and a stack of its own
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    if hasattr(os, "killpg"):
        api._terminate_process_handler = PassesOn()  # type: ignore[assignment]  # PContext.start makes it the handler
    try:
        torchrun.main(torchrun_arguments(processes, arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        console.complain(f"rank {rank} was ended by {failure.signal_name()}; the run is over")
        return 128 - failure.exitcode
    except api.SignalException as stopped:
        return 128 + int(stopped.sigval)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        del os.environ[LAUNCHER]
    return 0


class PassesOn:
    """A handler of signals that has the processes do what one alone would do, and waits for them.

    torchrun's own handler would kill them 30 seconds later, in the middle of a checkpoint as like as not, and turn a
    second Ctrl-C, which is to stop at once, into a SIGTERM, which finishes the step. A third Ctrl-C is SIGKILL: a
    process that waits for others inside of NCCL hears nothing else.
    """

    def __init__(self) -> None:
        self.interrupts = 0

    def __call__(self, number: int, frame: object) -> None:
        """Send the signal to each process and those that it started; torchrun gives each a group of its own."""
        import psutil  # comes with accelerate

        self.interrupts += number == signal.SIGINT
        for process in psutil.Process().children():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL if self.interrupts > 2 else number)
