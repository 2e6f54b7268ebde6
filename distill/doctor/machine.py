"""`distill doctor --machine`, to send with a report of a problem: what is there, and whether the kernels run on it.

    for line in machine_lines(): print(line)          # versions, GPUs and their families, folders, variables
    for finding in examine_machine(): print(finding)  # each kernel beside PyTorch, copy and product rates

Kernels run in a process of their own: where one ends it, or spoils the GPU for it, that is the finding, and another
process goes on with the next.
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
from distill.doctor.invariants import Finding
from distill.doctor.machine_process import JOBS
from distill.models.cards import path_of

CHILD = [sys.executable, "-m", "distill.doctor.machine_process"]
LIMIT_S = 240.0  # without a word from the process: a compiler that does not end, a GPU that does not answer
MORE_LIBRARIES = ("numpy", "tokenizers", "safetensors", "bitsandbytes", "liger-kernel", "flash-attn", "vllm")
VARIABLES = re.compile(
    r"(ACCELERATE|CUBLAS|CUDA|DISTILL|GPU|HF|HIP|HSA|MKL|NCCL|OMP|PYTORCH|ROCR|TOKENIZERS|TORCH|TORCHINDUCTOR|TRITON)_.+"
    r"|(LOCAL_|)(RANK|WORLD_SIZE)|LD_LIBRARY_PATH|TMPDIR|VIRTUAL_ENV|XDG_CACHE_HOME"
)
SECRET = re.compile(r"TOKEN(?!IZERS)|KEY|SECRET|PASS|CREDENTIAL|AUTH")


def machine_lines() -> list[Line]:
    """What `environment_lines` does not say: other libraries, families of GPUs, disks of caches, variables."""
    found = {name: version_of(name) for name in MORE_LIBRARIES}
    lines = [Line("libraries", True, ", ".join(f"{name} {value}" for name, value in found.items() if value))]
    if torch.cuda.is_available():
        cudnn, hip = torch.backends.cudnn.version(), torch.version.hip
        lines.append(Line("runtime", True, f"CUDA {torch.version.cuda}, HIP {hip}, cuDNN {cudnn}"))
        for index in range(torch.cuda.device_count()):
            facts, names = device_facts(torch.device("cuda", index)), torch.cuda.get_device_properties(index)
            detail = f"{facts.family} ({names.major}.{names.minor}), {facts.multiprocessors} multiprocessors, "
            lines.append(Line(
                f"GPU {index} path", True,
                f"{detail}{facts.shared_bytes / 1024:.0f} KiB shared; {path_of(facts.family)}",
            ))  # fmt: skip
    else:
        interpreted = "kernels are checked in Triton's interpreter" if HAS_TRITON else "Triton is not installed"
        lines.append(Line("path", True, f"PyTorch computes: the kernels' references, on the CPU; {interpreted}"))
        for kind, seen in (("Intel", torch.xpu.is_available()), ("Apple", torch.backends.mps.is_available())):
            if seen:
                lines.append(Line("path", True, f"the {kind} GPU is not used: runs know CUDA and CPUs only"))
    return [*lines, *_folders(), *_variables()]


def _folders() -> list[Line]:
    """Free space where models, compiled kernels and runs are kept."""
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
        detail = f"{place}, {free:.0f} GiB free" + ("" if writable else ", and not writable")
        lines.append(Line(name, writable and free >= 1, detail))
    return lines


def _variables() -> list[Line]:
    """Variables of the environment that change what runs; no value of one that may hold a secret."""
    names = sorted(name for name in os.environ if VARIABLES.fullmatch(name))
    shown = {name: "(set)" if SECRET.search(name) else os.environ[name] for name in names}
    return [Line(name, True, re.sub(r"//[^/@\s]*@", "//...@", value)) for name, value in shown.items()]


def examine_machine() -> Iterator[Finding]:
    """Every kernel on one GPU of each name, and the rates of every GPU; on a CPU all in Triton's interpreter."""
    if not torch.cuda.is_available():
        yield from _findings("cpu", 0, "")
        return
    seen: set[str] = set()
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        first = len(JOBS) - 2 if name in seen else 0
        seen.add(name)
        yield from _findings(f"cuda:{index}", first, f"GPU {index} " if torch.cuda.device_count() > 1 else "")


def _findings(device: str, first: int, prefix: str) -> Iterator[Finding]:
    """The jobs from number `first` on, over as many processes as it takes."""
    while first < len(JOBS):
        start, begun, why = first, False, ""
        for message in _messages(device, first):
            if "finding" in message:
                finding = Finding(**message["finding"])
                yield finding._replace(name=f"{prefix}{finding.name}")
                begun, first = False, message["number"] + 1
            else:
                begun, why = begun or "number" in message, message.get("ended", "")
        if first < len(JOBS) and (begun or first == start):  # else it left a GPU that it had spoilt to the next
            yield Finding(f"{prefix}{JOBS[first][0] if begun else 'kernels'}", False, why)
            if not begun:
                return
            first += 1


def _messages(device: str, first: int) -> Iterator[dict[str, Any]]:
    """What one process says, and at last why it ended."""
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
                if line.startswith('{"number"'):  # compilers write to standard output too
                    yield json.loads(line)
        finally:
            timer.cancel()
            process.kill()
            code = process.wait()
            process.stdout.close()
        stderr.seek(0)
        last = (stderr.read().strip().splitlines() or [""])[-1]
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    why = f"no answer in {LIMIT_S:.0f} s" if late.is_set() else f"the process ended {how}"
    yield {"ended": f"{why}{': ' * bool(last)}{last:.300}"}
