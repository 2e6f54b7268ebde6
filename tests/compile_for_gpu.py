"""Compiles what a Python snippet launches for a family of GPUs, without a GPU: run as a program by a test.

    python tests/compile_for_gpu.py sm_90 "ours.rms_norm(torch.ones(4, 64), torch.ones(64))"
    compiled("sm_90", snippet)     # the same in a forked process: what was made of each kernel

Triton's interpreter does not know types, layouts or registers, so a kernel can pass there and not compile. Here every
launch on CPU tensors compiles its kernel down to machine code (ptxas included) and is not run; results are garbage.
Prints one line a kernel: its name, its code's hash, registers, bytes spilled, shared memory and the instructions that
move and multiply tiles.
"""

import contextlib
import hashlib
import io
import os
import re
import sys
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

INSTRUCTIONS = {
    "cp.async": "cp.async.c",
    "tma": "cp.async.bulk.tensor",
    "mma": "mma.sync",
    "wgmma": "wgmma.mma",
    "tcgen05": "tcgen05.mma",
    "mfma": "v_mfma",
}


class Compiled(NamedTuple):
    """Compiled code of one kernel."""

    module: str  # of distill_kernels
    kernel: str
    code: str  # hash of the PTX, or of the assembly on AMD
    registers: int  # of a thread
    spilled: int  # bytes a thread
    shared: int  # bytes
    tensor: int  # columns of tensor memory, of 512
    instructions: set[str]


def compiled(family: str, snippet: str, **environment: str) -> list[Compiled]:
    """Return the compiled kernels of a snippet; TRITON_CACHE_DIR in `environment` gives it a cache of its own."""
    from forked import clean_environment, run

    # a cache apart: what is compiled in use lacks the figures; without lines, since code must not change as they move
    apart = {"TRITON_CACHE_DIR": os.path.expanduser("~/.triton/offline"), "TRITON_DISABLE_LINE_INFO": "1"}
    made = run([__file__, family, snippet], cwd=os.getcwd(), env=clean_environment(**apart | environment))
    assert made.returncode == 0, made.stderr[-3000:]
    figures = r"(\d+) registers, (\d+) bytes spilled, (\d+) bytes shared, (\d+) columns, (.*)"
    lines = re.findall(rf"kernels\.([\w.]+)\.(\w+) (\w+): {figures}", made.stdout)
    return [Compiled(*line[:3], *map(int, line[3:7]), set(line[7].split())) for line in lines]


class Driver:
    """Stands for the GPU's driver as far as compiling asks."""

    def __init__(self, family: str, warp_size: int) -> None:
        amd = family.startswith("gfx")
        self.target = GPUTarget("hip" if amd else "cuda", family if amd else int(family[3:]), warp_size)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def without_products() -> torch.library.Library:
    """Matrix products of PyTorch are left out: in bfloat16 a CPU takes 15 s for one of a vocabulary of 262,144."""
    products = torch.library.Library("aten", "IMPL")

    def mm_into(a, b, *, out):
        return out

    products.impl("mm", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), "CPU")
    products.impl("mm.out", mm_into, "CPU")
    return products


_make_cubin = CUDABackend.make_cubin


def make_cubin(self, src, metadata, opt, capability):
    """Triton's own, which keeps what ptxas says of registers."""
    with contextlib.redirect_stdout(io.StringIO()) as said, triton.knobs.nvidia.scope():
        triton.knobs.nvidia.dump_ptxas_log = True
        cubin = _make_cubin(self, src, metadata, opt, capability)
    metadata["registers"] = int(re.search(r"Used (\d+)", said.getvalue()).group(1))
    metadata["spilled"] = int(re.search(r"(\d+) bytes spill stores", said.getvalue()).group(1))
    return cubin


def figures(kernel) -> tuple[int, int]:
    """Registers and spilled bytes of a thread."""
    if "amdgcn" not in kernel.asm:
        return kernel.metadata.registers, kernel.metadata.spilled
    vector, scratch = (
        int(re.search(rf"\.{name}: +(\d+)", kernel.asm["amdgcn"]).group(1))
        for name in ("vgpr_count", "private_segment_fixed_size")
    )
    return vector, scratch


def main(family: str, snippet: str) -> None:
    import distill_kernels as ours
    from distill_kernels.launch import FAMILIES, DeviceFacts, interpreted
    from triton.runtime.jit import JITFunction

    facts = DeviceFacts(132, family, FAMILIES[family].shared_bytes, 50 << 20, 80 << 30)
    for name, module in list(sys.modules.items()):
        if name.startswith("distill_kernels.") and hasattr(module, "device_facts"):
            module.device_facts = lambda device: facts
    triton.runtime.driver.set_active(Driver(family, FAMILIES[family].warp_size))
    CUDABackend.make_cubin = make_cubin
    os.environ["DISTILL_TUNE"] = "0"
    run, seen = JITFunction.run, set()

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel is not None and kernel.hash not in seen:
            seen.add(kernel.hash)
            code = kernel.asm["ptx" if "ptx" in kernel.asm else "amdgcn"]
            moves = " ".join(name for name, text in INSTRUCTIONS.items() if text in code)
            registers, spilled = figures(kernel)
            print(
                f"{self._fn_name} {hashlib.sha256(code.encode()).hexdigest()[:16]}: {registers} registers, "
                f"{spilled} bytes spilled, {kernel.metadata.shared} bytes shared, "
                f"{getattr(kernel.metadata, 'tmem_size', 0)} columns, {moves}",
                flush=True,
            )
        # nothing is returned, since it could not be launched

    JITFunction.run = compile_only
    _products = without_products()  # until the program ends
    with interpreted():
        exec(snippet, {"torch": torch, "ours": ours, "facts": facts})


if __name__ == "__main__":
    main(*sys.argv[1:])
