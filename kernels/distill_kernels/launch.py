"""Where kernels run and how they are launched: device facts, block sizes, and the one place that imports triton.

`import distill_kernels` must work where triton is not installed (macOS, Windows), so kernel files take `triton` and
`tl` from here; without triton, decorating a kernel works and calling it raises.

A CUDA tensor runs a Triton kernel, a CPU tensor the PyTorch reference beside it. Tests put the same kernels on CPU
tensors through Triton's interpreter by `with interpreted():`.
"""

from __future__ import annotations

import contextlib
import functools
import typing
from collections.abc import Iterator
from typing import NamedTuple

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _MissingTriton:
        """Stands for triton where it is not installed: decorators keep the function, everything else raises on use."""

        def __getattr__(self, name: str) -> typing.Any:
            if name in ("jit", "autotune", "heuristics"):
                return lambda *args, **kwargs: args[0] if args and callable(args[0]) else lambda fn: fn
            return _MissingTriton()

        def __call__(self, *args: object, **kwargs: object) -> typing.Any:
            raise RuntimeError("this needs triton, which is not installed (pip install triton, Linux only)")

    triton = _MissingTriton()
    tl = _MissingTriton()

_interpreting = False


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Run Triton kernels on CPU tensors too. For tests: needs TRITON_INTERPRET=1 set before triton was imported."""
    global _interpreting
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before


def runs_on_triton(tensor: torch.Tensor) -> bool:
    """True where `tensor` is served by a Triton kernel, False where by the PyTorch reference."""
    return tensor.is_cuda or _interpreting


class DeviceFacts(NamedTuple):
    """What launch decisions depend on."""

    multiprocessors: int
    capability: tuple[int, int]
    l2_bytes: int
    memory_bytes: int

    @property
    def starts_early(self) -> bool:
        """Whether a kernel can be started while the one before it ends: griddepcontrol, NVIDIA from Hopper on."""
        return self.capability >= (9, 0) and torch.version.hip is None

    @property
    def large_shared(self) -> bool:
        """Whether a program may have 160 KiB of shared memory, as on NVIDIA's data-centre GPUs from A100 on."""
        return (self.capability[0] in (9, 10) or self.capability == (8, 0)) and torch.version.hip is None


@functools.cache
def _cuda_facts(index: int) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(index)
    return DeviceFacts(
        properties.multi_processor_count,
        (properties.major, properties.minor),
        properties.L2_cache_size,
        properties.total_memory,
    )


def device_facts(device: torch.device) -> DeviceFacts:
    """Facts of a CUDA device, read once; of the CPU, small stand-ins that keep interpreted launches short."""
    if device.type != "cuda":
        return DeviceFacts(multiprocessors=4, capability=(0, 0), l2_bytes=32 << 20, memory_bytes=8 << 30)
    return _cuda_facts(torch.cuda.current_device() if device.index is None else device.index)


def cdiv(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n` (and at least 1)."""
    return 1 << max(n - 1, 0).bit_length()
