"""`distill doctor --machine`: environment and kernel checks to attach to a bug report.

    for line in machine_lines(): print(line)          # versions, GPUs and their families, folders, variables
    for finding in check_machine(): print(finding)  # each kernel compared with PyTorch, copy and GEMM rates

Kernels run in a child process: one that crashes it or its CUDA context has failed, and another process continues with
the next kernel.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from distill_kernels.launch import HAS_TRITON, device_facts

from distill.core.environment import version_of
from distill.core.files import free_bytes, nearest_existing
from distill.core.folders import RUNS
from distill.core.units import GIB
from distill.doctor.check_result import CheckLine, CheckResult
from distill.doctor.machine_checks import CHECKS, check_kernel, copy_rate, gemm_rate
from distill.models.gpu_specs import path_of

Job = tuple[str, Callable[[torch.device], CheckResult]]  # its name, and what a process is sent
RATES: tuple[Job, ...] = (("copy", copy_rate), ("GEMM", gemm_rate))
JOBS: tuple[Job, ...] = (*((name, functools.partial(check_kernel, name)) for name in CHECKS), *RATES)
LIMIT_S = 240.0  # seconds without a result from the process: a compiler that does not end, a GPU that hangs
MORE_LIBRARIES = ("numpy", "tokenizers", "safetensors", "bitsandbytes", "liger-kernel", "flash-attn", "vllm")
VARIABLES = re.compile(
    r"(ACCELERATE|CUBLAS|CUDA|DISTILL|GPU|HF|HIP|HSA|MKL|NCCL|OMP|PYTORCH|ROCR|TOKENIZERS|TORCH|TORCHINDUCTOR|TRITON)_.+"
    r"|(LOCAL_|)(RANK|WORLD_SIZE)|LD_LIBRARY_PATH|TMPDIR|VIRTUAL_ENV|XDG_CACHE_HOME"
)
SECRET = re.compile(r"TOKEN(?!IZERS)|KEY|SECRET|PASS|CREDENTIAL|AUTH")


def machine_lines() -> list[CheckLine]:
    """Return lines beyond `environment_lines`: other libraries, GPU families, disks of caches, variables."""
    found = {name: version_of(name) for name in MORE_LIBRARIES}
    lines = [CheckLine("libraries", True, ", ".join(f"{name} {value}" for name, value in found.items() if value))]
    if torch.cuda.is_available():
        cudnn = torch.backends.cudnn.version()
        hip = torch.version.hip
        lines.append(CheckLine("runtime", True, f"CUDA {torch.version.cuda}, HIP {hip}, cuDNN {cudnn}"))
        for index in range(torch.cuda.device_count()):
            facts = device_facts(torch.device("cuda", index))
            names = torch.cuda.get_device_properties(index)
            detail = f"{facts.family} ({names.major}.{names.minor}), {facts.multiprocessors} multiprocessors, "
            lines.append(
                CheckLine(
                    f"GPU {index} path",
                    True,
                    f"{detail}{facts.shared_bytes / 1024:.0f} KiB shared; {path_of(facts.family)}",
                )
            )
    else:
        interpreted = "kernels are checked in Triton's interpreter" if HAS_TRITON else "Triton is not installed"
        lines.append(CheckLine("path", True, f"PyTorch references of the kernels run on the CPU; {interpreted}"))
        for kind, seen in (("Intel", torch.xpu.is_available()), ("Apple", torch.backends.mps.is_available())):
            if seen:
                lines.append(CheckLine("path", True, f"the {kind} GPU is not used: only CUDA and CPUs are supported"))
    return [*lines, *_folders(), *_variables()]


def _folders() -> list[CheckLine]:
    """Return lines on the free space for models, compiled kernels and runs."""
    home = Path.home() / ".cache"
    places = {
        "models": Path(os.environ.get("HF_HOME", home / "huggingface")),
        "compiled kernels": Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache")),
        "runs": RUNS,
        "temporary files": Path(tempfile.gettempdir()),
    }
    lines = []
    for name, place in places.items():
        free = free_bytes(place) / GIB
        writable = os.access(nearest_existing(place), os.W_OK)
        detail = f"{place}, {free:.0f} GiB free" + ("" if writable else ", not writable")
        lines.append(CheckLine(name, writable and free >= 1, detail))
    return lines


def _variables() -> list[CheckLine]:
    """Return lines on environment variables that affect runs, without values that may be secret."""
    names = sorted(name for name in os.environ if VARIABLES.fullmatch(name))
    shown = {name: "(set)" if SECRET.search(name) else os.environ[name] for name in names}
    return [CheckLine(name, True, re.sub(r"//[^/@\s]*@", "//...@", value)) for name, value in shown.items()]


def check_machine() -> Iterator[CheckResult]:
    """Check every kernel on one GPU of each model, and the rates of every GPU; on a CPU, in Triton's interpreter."""
    if not torch.cuda.is_available():
        yield from run_in_processes(JOBS, "cpu")
        return
    seen: set[str] = set()
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        prefix = f"GPU {index} " if torch.cuda.device_count() > 1 else ""
        for result in run_in_processes(RATES if name in seen else JOBS, f"cuda:{index}"):
            yield result._replace(name=f"{prefix}{result.name}")
        seen.add(name)


def run_in_processes(
    jobs: Sequence[Job], device: str, limit_s: float = LIMIT_S, method: str = "spawn"
) -> Iterator[CheckResult]:
    """Run jobs on a device, in a process that is replaced whenever one ends or hangs.

    Args:
        jobs: Names and functions, which can be pickled.
        device: Device, as torch names it.
        limit_s: Seconds to wait for a result.
        method: Start method of multiprocessing.

    Yields:
        The result of each job; for one whose process ended or hung, why.
    """
    context: Any = multiprocessing.get_context(method)
    while jobs:
        receiver, sender = context.Pipe(duplex=False)
        with tempfile.NamedTemporaryFile("r", errors="replace") as output:
            process = context.Process(target=run_jobs, args=(jobs, device, output.name, sender), daemon=True)
            with _interpreting(device):
                process.start()
            sender.close()
            begun = False
            started = False
            why = f"no result for {limit_s:.0f} s"
            try:
                while receiver.poll(limit_s):
                    result = receiver.recv()
                    started = True
                    begun = result is None
                    if result is not None:
                        yield result
                        jobs = jobs[1:]
            except EOFError:
                process.join()
                code = process.exitcode or 0
                why = f"the process ended {f'by {signal.Signals(-code).name}' if code < 0 else f'with code {code}'}"
            finally:
                process.kill()
                process.join()
            last = (output.read().strip().splitlines() or [""])[-1]
            reason = f"{why}: {last:.300}" if last else why
        if jobs and (begun or not started):  # else it exited since the CUDA context was broken
            yield CheckResult(jobs[0][0] if begun else "kernels", False, reason)
            jobs = jobs[1:] if begun else ()


@contextlib.contextmanager
def _interpreting(device: str) -> Iterator[None]:
    """Start processes in which Triton's kernels are interpreted, where they are for a CPU."""
    before = os.environ.get("TRITON_INTERPRET")
    if device == "cpu" and HAS_TRITON:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        os.environ.pop("TRITON_INTERPRET", None)
        os.environ.update({} if before is None else {"TRITON_INTERPRET": before})


def run_jobs(jobs: Sequence[Job], device_name: str, output: str, sender: Connection) -> None:
    """Run the jobs in this process: None is sent before each, its result after it; end if the CUDA context is broken.

    Args:
        device_name: Device, as torch names it.
        output: File that standard output and error are redirected to: compilers write to both.
        sender: Other end of the pipe that the results are received from.
    """
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), stream)
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for name, job in jobs:
        sender.send(None)
        begun = time.perf_counter()
        try:
            result = job(device)
            if device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # a compiler or driver may raise anything
            first_line = (str(error).strip().splitlines() or [""])[0]
            result = CheckResult(name, False, f"{type(error).__name__}: {first_line:.300}")
        sender.send(result._replace(seconds=time.perf_counter() - begun))
        if "CUDA error" in result.detail or "HIP error" in result.detail:
            return
