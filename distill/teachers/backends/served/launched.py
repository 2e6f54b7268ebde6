"""A teacher server that the run starts itself (`parallel.teacher: served`): `distill serve` as child processes.

    with launched_servers(recipe, device, sharded=False):       # on every process of the run
        teacher = LaunchedPlan(recipe).open(context, vocabulary)

The first process of the run starts one server a GPU, each with a copy, or one over all of them that holds shards, whose
processes torchrun starts and ends; they load while the run reads its data. All processes of the run query them over
loopback, with a token made for the run. The servers are killed when the context ends, and end at once when the process
that started them is gone; where one of them ends, the last line of its standard error is the reason that the run
reports.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from distill.core.errors import TeacherUnavailableError
from distill.core.launch import OWNER, is_running
from distill.core.ranks import broadcast_from_rank0, world_size
from distill.core.units import plural
from distill.models.flops import count_text
from distill.models.head import HeadWeights, LogitTransform
from distill.recipe import LoadedTeacherConfig, Parallel, Recipe, dump
from distill.recipe.loss import Loss
from distill.recipe.resume_policy import tokens_of_step
from distill.recipe.teacher_config import TIMEOUT_S
from distill.recipe.train import micro_batch_tokens
from distill.teachers.backends.local import LocalPlan
from distill.teachers.backends.served.client import TOKEN_VARIABLE, ServerConfig, Servers
from distill.teachers.backends.served.protocol import tensors_of
from distill.teachers.backends.served.teacher import ServerTeacher
from distill.teachers.backends.served.teacher_client import DistillProtocol, TargetSpec, TeacherClient
from distill.teachers.base import Teacher
from distill.teachers.footprint import Footprint, FootprintContext, SmallerTeacher
from distill.teachers.load_context import LoadContext
from distill.teachers.vocabulary import Vocabulary

FIELD = "parallel.teacher"
POLL_SECONDS = 0.02
LEAST_TOKENS = 65_536  # of a request that a server takes
LAUNCH = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "DISTILL_LAUNCHER",
)
USER_ERROR = 2  # exit code of `distill` where its input is wrong


class Child(NamedTuple):
    """A server's process.

    Attributes:
        pid: Process id on this machine.
        address: File that it writes its address to once it responds.
        errors: File with its standard error.
    """

    pid: int
    address: str
    errors: str


class LaunchedServers:
    """The teacher servers of this run, in any of its processes.

    Args:
        children: Server processes; of a sharded teacher the one that has started the others.
        token: Bearer token that the servers require.
        count: Number of processes that hold replicas or shards.
        sharded: True if they hold shards of one teacher, False if each holds a replica.
    """

    current: LaunchedServers | None = None  # of this process, while a run with such servers goes on

    def __init__(self, children: list[Child], token: str, count: int, sharded: bool) -> None:
        self.children = children
        self.token = token
        self.count = count
        self.sharded = sharded
        self._codes: dict[int, subprocess.Popen[bytes]] = {}  # of the process that started them

    def fault(self) -> str | None:
        """Return why the teacher is gone, in one line; None while all of its processes run."""
        child = next((child for child in self.children if not is_running(child.pid)), None)
        if child is None:
            return None
        code = self._code(child)
        how = f" by {signal.Signals(-code).name}" if code is not None and code < 0 else ""
        words = _last_line(child)
        text = f"{FIELD}: the teacher server (process {child.pid}) has ended{how}"
        return f"{text}: {words}" if words else text

    def _code(self, child: Child) -> int | None:
        process = self._codes.get(child.pid)
        return None if process is None else process.wait()

    def urls(self, seconds: float) -> tuple[str, ...]:
        """Return the addresses of all servers, once each of them answers; called by every process of the run.

        Args:
            seconds: Time for them to load the teacher (`parallel.teacher_timeout`).

        Raises:
            ValueError: the user's input that a server could not use.
            TeacherUnavailableError: a server has ended, or has not loaded the teacher in time.
        """
        found, fault, by_user = broadcast_from_rank0(lambda: self._wait(seconds))
        if fault is not None:
            raise ValueError(fault) if by_user else TeacherUnavailableError(fault, agreed=True)
        return found

    def _wait(self, seconds: float) -> tuple[tuple[str, ...], str | None, bool]:
        files = [Path(child.address) for child in self.children]
        until = time.monotonic() + seconds
        while not all(file.exists() for file in files):
            fault = self.fault()
            if fault is not None:
                ended = [child for child in self.children if not is_running(child.pid)]
                wrong = next((child for child in ended if self._code(child) == USER_ERROR), None)
                return (), fault if wrong is None else _last_line(wrong), wrong is not None
            if time.monotonic() > until:
                late = next(child.pid for child, file in zip(self.children, files, strict=True) if not file.exists())
                text = (
                    f"parallel.teacher_timeout: the teacher server (process {late}) has not loaded the teacher within"
                )
                return (), f"{text} {seconds:g} s", False
            time.sleep(POLL_SECONDS)
        return tuple(file.read_text(encoding="utf-8").strip() for file in files), None, False


def _last_line(child: Child) -> str:
    with contextlib.suppress(OSError):
        text = Path(child.errors).read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1].removeprefix("distill: ")[:400] if lines else ""
    return ""


@contextlib.contextmanager
def launched_servers(recipe: Recipe, device: torch.device, *, sharded: bool) -> Iterator[None]:
    """Run teacher servers while the context lasts, where the recipe names them; every process enters it.

    Args:
        sharded: True to hold shards of one teacher, False for one replica per GPU.

    Raises:
        ValueError: the processes are on several machines, or no GPUs are left for the teacher.
    """
    count = recipe.parallel.teacher_gpus
    if count is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        processes: dict[int, subprocess.Popen[bytes]] = {}

        def start() -> tuple[list[Child], str]:
            visible = _visible_to(count, device, sharded)
            folder = Path(tempfile.mkdtemp(prefix="distill-teacher-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.callback(_kill, processes)
            token = secrets.token_urlsafe(32)
            children = list[Child]()
            for number, gpus in enumerate(visible):
                process = _started(recipe, folder, number, count if sharded else 1, {**gpus, TOKEN_VARIABLE: token})
                processes[process.pid] = process
                address = str(folder / f"address-{number}")
                children.append(Child(process.pid, address, str(folder / f"errors-{number}")))
            return children, token

        children, token = broadcast_from_rank0(start)
        LaunchedServers.current = servers = LaunchedServers(children, token, count, sharded)
        servers._codes = processes
        try:
            yield
        finally:
            LaunchedServers.current = None


def _visible_to(count: int, device: torch.device, sharded: bool) -> list[dict[str, str]]:
    """Return the environment of each server that selects its GPUs, the last ones of this machine; empty on a CPU.

    A sharded teacher is one server, on all of them.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
    if here != world_size():
        raise ValueError(
            f"{FIELD}: served starts the teacher server on the machine of the first process, and expected all "
            f"{world_size()} processes there, got {here}; start distill serve yourself and set teacher.type: server"
        )
    if device.type != "cuda":
        return [{}] * (1 if sharded else count)
    gpus = torch.cuda.device_count()
    if gpus < here + count:
        raise ValueError(
            f"parallel.teacher_gpus: {count} for the teacher server and {here} for training are more than the {gpus} "
            "GPUs of this machine; start fewer processes, or lower it"
        )
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(gpus)] if given is None else given.split(",")[:gpus]
    own = names[-count:]
    own = [",".join(own)] if sharded else own
    return [{"CUDA_VISIBLE_DEVICES": name} for name in own]


def _started(
    recipe: Recipe, folder: Path, number: int, processes: int, more: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start one server, in a session of its own: it gets no signals of this process's terminal."""
    file = folder / "teacher.yaml"
    if not file.exists():
        held = Parallel(teacher="sharded" if processes > 1 else "copied")
        student = recipe.student.model_copy(update={"vocabulary": "keep"})
        file.write_text(dump(recipe.model_copy(update={"parallel": held, "loss": Loss(), "student": student})))
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCH and not name.startswith(("TORCHELASTIC_", "ACCELERATE_"))
    }
    tokens = max(LEAST_TOKENS, recipe.train.batch_size * recipe.data.max_length)
    command = [
        sys.executable,
        "-m",
        "distill",
        "serve",
        str(file),
        "--port",
        "0",
        "--max-tokens",
        str(tokens),
        "--address-file",
        str(folder / f"address-{number}"),
        *(["--processes", str(processes)] if processes > 1 else []),
    ]
    with (folder / f"errors-{number}").open("wb") as errors:
        return subprocess.Popen(
            command,
            env={**kept, **more, OWNER: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )


def _kill(processes: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """Kill the servers, which have nothing to save."""
    for process in processes.values():
        process.kill()
    for process in processes.values():
        process.wait()


class LaunchedTeacher(ServerTeacher):
    """The teacher that servers of this run hold.

    Args:
        source: Plan of the recipe's teacher.
        context: Device of the head's copy, and the dtypes of a student that is cut from the teacher.

    Raises:
        ValueError: the user's input that a server could not use.
        TeacherUnavailableError: a server has ended.
    """

    def __init__(self, source: LocalPlan, servers: LaunchedServers, context: LoadContext) -> None:
        section = source.section
        urls = servers.urls(source.recipe.parallel.teacher_timeout)
        http = Servers(ServerConfig(urls, servers.token, TIMEOUT_S, section.prefetch_depth))
        http.ended = servers.fault
        identity = http.identity()
        dtype = getattr(torch, identity.dtype)
        spec = TargetSpec(None, identity.rows, identity.hidden, dtype, "bucket", 1.0, "auto", True)
        client = TeacherClient(http, DistillProtocol(spec, identity.limits["logits"] or 1, FIELD))
        tensors = tensors_of(http.ask("GET", "/v1/head"))
        bias = tensors["bias"].to(context.device) if "bias" in tensors else None
        super().__init__(
            client,
            identity.fingerprint,
            LogitTransform(identity.scale, identity.softcap),
            HeadWeights(tensors["weight"].to(context.device), bias, None),
            section,
            context.precision.teacher,
        )
        self._servers = servers
        self._source = source

    def size_text(self) -> str:
        count = self._servers.count
        sharded = self._servers.sharded
        where = plural(count, "GPU") if torch.cuda.is_available() else plural(count, "process")
        size = count_text(self._source.meta().shape.parameters)
        return f"{size} parameters, served from {where}, {'sharded (FSDP2)' if sharded else 'copied'}"

    def fingerprint(self) -> dict[str, object]:
        return self.identity


class LaunchedPlan(LocalPlan):
    """The recipe's one model, held by servers of this run where it has started them, else in this process."""

    def __init__(self, recipe: Recipe, section: LoadedTeacherConfig | None = None, field: str = "teacher") -> None:
        super().__init__(recipe, section, field)
        self.shardable = False  # over the processes that train

    def open(self, context: LoadContext, vocabulary: Vocabulary) -> Teacher:  # type: ignore[override]
        if LaunchedServers.current is None:  # a command in one process
            return super().open(context, vocabulary)
        return LaunchedTeacher(self, LaunchedServers.current, context)

    def footprint(self, context: FootprintContext) -> Footprint:
        """Return the footprint on a training GPU: the head, the hidden states of a step's micro-batches and of the next
        one's, and those of the current one scattered to their positions.
        """
        meta = self.meta()
        size = context.precision.teacher.itemsize
        micro_batch = micro_batch_tokens(self.recipe.train, self.recipe.data, context.world)
        ahead = 2 * max(tokens_of_step(self.recipe, context.world) // micro_batch, self.section.prefetch_depth)
        return Footprint(
            weights=float(meta.shape.head * size), token_bytes=(1 + ahead) * size * meta.shape.hidden, flops=meta.flops
        )

    def smaller(self, family: str | None = None) -> list[SmallerTeacher]:
        """Return nothing: no other way saves memory on a training GPU."""
        return []
