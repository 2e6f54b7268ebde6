"""`distill doctor --machine`: environment and kernel checks to attach to a bug report.

    for line in machine_lines(): print(line)          # versions, GPUs and their families, folders, variables
    for finding in check_machine(): print(finding)  # each kernel compared with PyTorch, copy and GEMM rates

Kernels run in a child process: one that crashes it or its CUDA context has failed, and another process continues with
the next kernel.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from distill_kernels.launch import HAS_TRITON, device_facts

from distill.core.environment import version_of
from distill.core.folders import RUNS
from distill.core.units import GIB
from distill.doctor.examine import Line
from distill.doctor.invariants import CheckResult
from distill.doctor.machine_process import JOBS
from distill.models.gpu_specs import path_of

CHILD = [sys.executable, "-m", "distill.doctor.machine_process"]
LIMIT_S = 240.0  # seconds without output of the process: a compiler that does not end, a GPU that hangs
MORE_LIBRARIES = ("numpy", "tokenizers", "safetensors", "bitsandbytes", "liger-kernel", "flash-attn", "vllm")
VARIABLES = re.compile(
    r"(ACCELERATE|CUBLAS|CUDA|DISTILL|GPU|HF|HIP|HSA|MKL|NCCL|OMP|PYTORCH|ROCR|TOKENIZERS|TORCH|TORCHINDUCTOR|TRITON)_.+"
    r"|(LOCAL_|)(RANK|WORLD_SIZE)|LD_LIBRARY_PATH|TMPDIR|VIRTUAL_ENV|XDG_CACHE_HOME"
)
SECRET = re.compile(r"TOKEN(?!IZERS)|KEY|SECRET|PASS|CREDENTIAL|AUTH")


def machine_lines() -> list[Line]:
    """Return lines beyond `environment_lines`: other libraries, GPU families, disks of caches, variables."""
    found = {name: version_of(name) for name in MORE_LIBRARIES}
    lines = [Line("libraries", True, ", ".join(f"{name} {value}" for name, value in found.items() if value))]
    if torch.cuda.is_available():
        cudnn, hip = torch.backends.cudnn.version(), torch.version.hip
        lines.append(Line("runtime", True, f"CUDA {torch.version.cuda}, HIP {hip}, cuDNN {cudnn}"))
        for index in range(torch.cuda.device_count()):
            facts, names = device_facts(torch.device("cuda", index)), torch.cuda.get_device_properties(index)
            detail = f"{facts.family} ({names.major}.{names.minor}), {facts.multiprocessors} multiprocessors, "
            lines.append(
                Line(
                    f"GPU {index} path",
                    True,
                    f"{detail}{facts.shared_bytes / 1024:.0f} KiB shared; {path_of(facts.family)}",
                )
            )
    else:
        interpreted = "kernels are checked in Triton's interpreter" if HAS_TRITON else "Triton is not installed"
        lines.append(Line("path", True, f"PyTorch references of the kernels run on the CPU; {interpreted}"))
        for kind, seen in (("Intel", torch.xpu.is_available()), ("Apple", torch.backends.mps.is_available())):
            if seen:
                lines.append(Line("path", True, f"the {kind} GPU is not used: only CUDA and CPUs are supported"))
    return [*lines, *_folders(), *_variables()]


def _folders() -> list[Line]:
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
        there = next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.is_dir())
        free, writable = shutil.disk_usage(there).free / GIB, os.access(there, os.W_OK)
        detail = f"{place}, {free:.0f} GiB free" + ("" if writable else ", not writable")
        lines.append(Line(name, writable and free >= 1, detail))
    return lines


def _variables() -> list[Line]:
    """Return lines on environment variables that affect runs, without values that may be secret."""
    names = sorted(name for name in os.environ if VARIABLES.fullmatch(name))
    shown = {name: "(set)" if SECRET.search(name) else os.environ[name] for name in names}
    return [Line(name, True, re.sub(r"//[^/@\s]*@", "//...@", value)) for name, value in shown.items()]


def check_machine() -> Iterator[CheckResult]:
    """Check every kernel on one GPU of each model, and the rates of every GPU; on a CPU, in Triton's interpreter."""
    if not torch.cuda.is_available():
        yield from _results("cpu", 0, "")
        return
    seen: set[str] = set()
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        first = len(JOBS) - 2 if name in seen else 0
        seen.add(name)
        yield from _results(f"cuda:{index}", first, f"GPU {index} " if torch.cuda.device_count() > 1 else "")


def _results(device: str, first: int, prefix: str) -> Iterator[CheckResult]:
    """Run the jobs from number `first` on, in as many processes as needed."""
    while first < len(JOBS):
        start, begun, why = first, False, ""
        for message in _messages(device, first):
            if "finding" in message:
                finding = CheckResult(**message["finding"])
                yield finding._replace(name=f"{prefix}{finding.name}")
                begun, first = False, message["number"] + 1
            else:
                begun, why = begun or "number" in message, message.get("ended", "")
        if first < len(JOBS) and (begun or first == start):  # else it exited since the CUDA context was broken
            yield CheckResult(f"{prefix}{JOBS[first][0] if begun else 'kernels'}", False, why)
            if not begun:
                return
            first += 1


def _messages(device: str, first: int) -> Iterator[dict[str, Any]]:
    """Yield the messages of one process, and finally the reason why it ended."""
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if device == "cpu" and HAS_TRITON else {})
    late = threading.Event()
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        process = subprocess.Popen(
            [*CHILD, device, str(first)], stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
        )
        assert process.stdout is not None

        def end() -> None:
            late.set()
            process.kill()

        try:
            line = "{}"
            while line:
                timer = threading.Timer(LIMIT_S, end)
                timer.start()
                line = process.stdout.readline()
                timer.cancel()
                if line.startswith('{"number"'):  # compilers also write to standard output
                    yield json.loads(line)
        finally:
            timer.cancel()
            process.kill()
            code = process.wait()
            process.stdout.close()
        stderr.seek(0)
        last = (stderr.read().strip().splitlines() or [""])[-1]
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    why = f"no output for {LIMIT_S:.0f} s" if late.is_set() else f"the process ended {how}"
    yield {"ended": f"{why}{': ' * bool(last)}{last:.300}"}
