"""Compiles what a Python snippet launches for a family of GPUs, without a GPU: run as a program by a test.

    python tests/compile_for_gpu.py sm_90 "ours.rms_norm(torch.ones(4, 64), torch.ones(64))"
    compiled("sm_90", snippet)     # the same in a forked process: what was made of each kernel

Triton's interpreter does not know types, layouts or registers, so a kernel can pass there and not compile. Here every
launch on CPU tensors compiles its kernel down to machine code (ptxas included) and is not run; results are garbage.
Prints one line a kernel: its name, registers, bytes spilled, shared memory and the instructions that move and multiply
tiles.
"""

import os
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

INSTRUCTIONS = {
    "cp.async": "cp.async.c", "tma": "cp.async.bulk.tensor", "mma": "mma.sync", "wgmma": "wgmma.mma",
    "tcgen05": "tcgen05.mma",
}  # fmt: skip


class Compiled(NamedTuple):
    """What was made of one kernel."""

    kernel: str
    registers: int  # of a thread
    spilled: int  # bytes a thread
    shared: int  # bytes
    instructions: set[str]


def compiled(family: str, snippet: str, **environment: str) -> list[Compiled]:
    """What the snippet's kernels became; TRITON_CACHE_DIR in `environment` for a cache of its own."""
    from forked import clean_environment, run

    made = run([__file__, family, snippet], cwd=os.getcwd(), env=clean_environment(**environment))
    assert made.returncode == 0, made.stderr[-3000:]
    lines = re.findall(r"(\w+): (\d+) registers, (\d+) bytes spilled, (\d+) bytes shared, (.*)", made.stdout)
    return [Compiled(name, *map(int, sizes), set(moves.split())) for name, *sizes, moves in lines]


class Driver:
    """Stands for the CUDA driver as far as compiling asks."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def figures(capability: int, ptx: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "kernel.ptx")
        with open(source, "w") as file:
            file.write(ptx)
        arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
        command = [get_ptxas(capability).path, f"-arch={arch}", "-v", source, "-o", os.path.join(folder, "out")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+)", said), re.search(r"(\d+) bytes spill stores", said)
    return f"{registers.group(1)} registers, {spilled.group(1)} bytes spilled"


def main(family: str, snippet: str) -> None:
    import distill_kernels as ours
    from distill_kernels.launch import FAMILIES, DeviceFacts, interpreted
    from triton.runtime.jit import JITFunction

    facts = DeviceFacts(132, family, FAMILIES[family].shared_bytes, 50 << 20, 80 << 30)
    for name, module in list(sys.modules.items()):
        if name.startswith("distill_kernels.") and hasattr(module, "device_facts"):
            module.device_facts = lambda device: facts
    capability = int(family.removeprefix("sm_"))
    triton.runtime.driver.set_active(Driver(capability))
    run, seen = JITFunction.run, set()

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel is not None and kernel.hash not in seen:
            seen.add(kernel.hash)
            ptx, shared = kernel.asm["ptx"], kernel.metadata.shared
            moves = " ".join(name for name, text in INSTRUCTIONS.items() if text in ptx)
            print(f"{self._fn_name}: {figures(capability, ptx)}, {shared} bytes shared, {moves}", flush=True)
        return kernel

    JITFunction.run = compile_only
    with interpreted():
        exec(snippet, {"torch": torch, "ours": ours, "facts": facts})


if __name__ == "__main__":
    main(*sys.argv[1:])
