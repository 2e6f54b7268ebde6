"""Compiles what a Python snippet launches for an H100-class GPU, without a GPU: run as a program by a test.

    python tests/compile_for_gpu.py "from distill_kernels import rms_norm; rms_norm(torch.ones(4, 64), torch.ones(64))"
    compiled(snippet)     # the same in a process that was forked: [(kernel, registers, bytes spilled)]

Triton's interpreter does not know types, layouts or registers, so a kernel can pass there and not compile. Here every
launch on CPU tensors compiles its kernel down to machine code (ptxas included) and is not run; results are garbage.
Prints one line a kernel: its name, registers and bytes spilled. TRITON_INTERPRET may not be set.
"""

import os
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

TARGET = GPUTarget("cuda", 90, 32)


class Driver:
    """Stands for the CUDA driver as far as compiling asks."""

    def get_current_target(self):
        return TARGET

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compiled(snippet: str, **environment: str) -> list[tuple[str, int, int]]:
    """Each kernel's name, registers and bytes spilled."""
    from forked import clean_environment, run

    made = run([__file__, snippet], cwd=os.getcwd(), env=clean_environment(**environment))
    assert made.returncode == 0, made.stderr[-3000:]
    lines = re.findall(r"(\w+): (\d+) registers, (\d+) bytes spilled", made.stdout)
    return [(name, int(registers), int(spilled)) for name, registers, spilled in lines]


def figures(ptx: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "kernel.ptx")
        with open(source, "w") as file:
            file.write(ptx)
        command = [get_ptxas(TARGET.arch).path, "-arch=sm_90a", "-v", source, "-o", os.path.join(folder, "out")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+)", said), re.search(r"(\d+) bytes spill stores", said)
    return f"{registers.group(1)} registers, {spilled.group(1)} bytes spilled"


def main(snippet: str) -> None:
    from distill_kernels.launch import interpreted
    from triton.runtime.jit import JITFunction

    triton.runtime.driver.set_active(Driver())
    run, seen = JITFunction.run, set()

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel is not None and kernel.hash not in seen:
            seen.add(kernel.hash)
            print(f"{self._fn_name}: {figures(kernel.asm['ptx'])}", flush=True)
        return kernel

    JITFunction.run = compile_only
    with interpreted():
        exec(snippet, {"torch": torch})


if __name__ == "__main__":
    main(sys.argv[1])
