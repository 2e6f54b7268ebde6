"""Where kernels run and how they are launched: device facts, block sizes, and the one place that imports triton.

`import distill_kernels` must work where triton is not installed (macOS, Windows), so kernel files take `triton` and
`tl` from here; without triton, decorating a kernel works and calling it raises.

A CUDA tensor runs a Triton kernel, a CPU tensor the PyTorch reference beside it. Tests put the same kernels on CPU
tensors through Triton's interpreter by `with interpreted():`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

try:
    import triton
    import triton.language as tl
    from triton.language.target_info import is_cuda
    from triton.runtime.jit import constexpr_function
    from triton.tools.tensor_descriptor import TensorDescriptor

    HAS_TRITON = True
    LAUNCH_ERRORS: tuple[type[Exception], ...] = (triton.errors.TritonError, RuntimeError)  # of what does not compile

    @constexpr_function
    def has_ptx() -> bool:
        """In a kernel: whether it is compiled for an NVIDIA GPU, and may hold lines of PTX."""
        return not triton.knobs.runtime.interpret and bool(is_cuda())

except ImportError:
    HAS_TRITON = False
    LAUNCH_ERRORS = (RuntimeError,)

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
    TensorDescriptor = _MissingTriton()

_log = logging.getLogger(__name__)
_interpreting = False
KINDS = 4096  # of launches that a kernel keeps


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Run Triton kernels on CPU tensors too. For tests: needs TRITON_INTERPRET=1 set before triton was imported."""
    global _interpreting
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before


class Family(NamedTuple):
    """What the GPUs of one architecture share.

    Attributes:
        shared_bytes: The most shared memory that a program may take.
        tma: Whether an engine copies tiles by descriptors. (Elsewhere they are loaded through pointers.)
        warpgroups: Whether products read their operands from shared memory and leave the registers to sums.
        fp8: Whether there are products of e4m3 (the form without infinities).
        warp_size: Threads of a warp.
        measured: Whether tables were read off sweeps on such a GPU. Elsewhere launches are timed once (tuning.py).
    """

    shared_bytes: int
    tma: bool = False
    warpgroups: bool = False
    fp8: bool = False
    warp_size: int = 32
    measured: bool = False


INTERPRETER = "interpreter"
FAMILIES = {
    "sm_80": Family(163 << 10),  # Ampere: A100
    "sm_86": Family(99 << 10),  # Ampere: A40, RTX 30
    "sm_89": Family(99 << 10, fp8=True),  # Ada: L40S, RTX 40
    "sm_90": Family(227 << 10, tma=True, warpgroups=True, fp8=True, measured=True),  # Hopper: H100, H200
    "sm_100": Family(227 << 10, tma=True, warpgroups=True, fp8=True),  # Blackwell: B200, B300
    "sm_120": Family(99 << 10, tma=True, fp8=True),  # Blackwell: RTX 50, RTX PRO 6000, GB10
    "gfx942": Family(64 << 10, warp_size=64),  # CDNA 3: MI300
    INTERPRETER: Family(99 << 10, tma=True, warpgroups=True, fp8=True, measured=True),
}
_OF_CAPABILITY = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90",
    (10, 0): "sm_100",
    (10, 3): "sm_100",
    (12, 0): "sm_120",
    (12, 1): "sm_120",
}
OLDER, UNKNOWN = "older", "unknown"  # no kernel is launched there


class DeviceFacts(NamedTuple):
    """What launch decisions depend on: no kernel's file asks for a compute capability.

    Attributes:
        multiprocessors: Of the device.
        family: A key of `FAMILIES`, or `OLDER` or `UNKNOWN`.
        shared_bytes: The most shared memory that a program may take.
        l2_bytes, memory_bytes: Of the device.
    """

    multiprocessors: int
    family: str
    shared_bytes: int
    l2_bytes: int
    memory_bytes: int

    @property
    def has_kernels(self) -> bool:
        """Whether Triton kernels are launched there; elsewhere the PyTorch references run."""
        return self.family in FAMILIES

    @property
    def tma(self) -> bool:
        return self.has_kernels and FAMILIES[self.family].tma

    @property
    def warpgroups(self) -> bool:
        return self.has_kernels and FAMILIES[self.family].warpgroups

    @property
    def fp8(self) -> bool:
        return self.has_kernels and FAMILIES[self.family].fp8

    @property
    def warp_size(self) -> int:
        return FAMILIES[self.family].warp_size if self.has_kernels else 32

    @property
    def measured(self) -> bool:
        return self.has_kernels and FAMILIES[self.family].measured

    @property
    def starts_early(self) -> bool:
        """Whether a kernel can be started while the one before it ends: griddepcontrol, NVIDIA from Hopper on."""
        return self.tma and self.family != INTERPRETER


def family_of(capability: tuple[int, int], gcn: str | None = None) -> str:
    """The family of an NVIDIA GPU by its compute capability; of an AMD GPU by its architecture's name `gcn`."""
    if gcn is not None:
        name = gcn.split(":")[0]
        return name if name in FAMILIES else UNKNOWN
    return _OF_CAPABILITY.get(capability, OLDER if capability < (8, 0) else UNKNOWN)


def forced_family() -> str | None:
    """The family of which DISTILL_FAMILY says that its paths are to be taken, on another GPU: for tests.

    Raises:
        ValueError: If there is no such family.
    """
    name = os.environ.get("DISTILL_FAMILY")
    if name and (name not in FAMILIES or name == INTERPRETER):
        names = ", ".join(name for name in FAMILIES if name != INTERPRETER)
        raise ValueError(f"DISTILL_FAMILY: expected one of {names}, got {name}")
    return name or None


@functools.cache
def _cuda_facts(index: int) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(index)
    gcn = getattr(properties, "gcnArchName", None) if torch.version.hip else None
    family = family_of((properties.major, properties.minor), gcn)
    shared = getattr(properties, "shared_memory_per_block_optin", None) or properties.shared_memory_per_block
    if family not in FAMILIES:
        _log.warning("%s: no kernels for GPUs as old or as new as this; PyTorch computes instead", properties.name)
    elif forced := forced_family():
        _log.warning("%s: takes the paths of %s (DISTILL_FAMILY)", properties.name, forced)
        family, shared = forced, min(shared, FAMILIES[forced].shared_bytes)
    return DeviceFacts(
        properties.multi_processor_count, family, shared, properties.L2_cache_size, properties.total_memory
    )


def device_facts(device: torch.device) -> DeviceFacts:
    """Facts of a CUDA device, read once; of the CPU, small stand-ins that keep interpreted launches short."""
    if device.type != "cuda":
        return DeviceFacts(4, INTERPRETER, FAMILIES[INTERPRETER].shared_bytes, 32 << 20, 8 << 30)
    return _cuda_facts(torch.cuda.current_device() if device.index is None else device.index)


@torch.compiler.assume_constant_result
def _has_kernels(index: int) -> bool:
    return _cuda_facts(index).has_kernels


def runs_on_triton(tensor: torch.Tensor) -> bool:
    """True where `tensor` is served by a Triton kernel, False where by the PyTorch reference."""
    return _interpreting or (tensor.is_cuda and _has_kernels(tensor.get_device()))


def cdiv(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n` (and at least 1)."""
    return 1 << max(n - 1, 0).bit_length()


class Launch:
    """Launches of one kernel: of each kind, from the second on, past Triton's look-up by argument types.

    The compiled kernel is called as Triton's own tutorial on fused softmax calls one. Only what the look-up would not
    tell apart may differ between launches of the same `kinds`: values of floats, addresses that are multiples of 16 or
    not as before, never types, other numbers or constants.
    """

    def __init__(self) -> None:
        self._compiled: dict[typing.Any, typing.Any] = {}
        self._runners: dict[typing.Any, Callable[..., None]] = {}

    def __call__(
        self,
        kernel: typing.Any,
        grid: int | tuple[int, int, int],
        kinds: typing.Any,
        tensors: Sequence[torch.Tensor],
        others: Sequence[typing.Any],
        **options: typing.Any,
    ) -> None:
        """Launch `kernel` with `tensors` and then `others`, which hold every constant in the signature's order."""
        kinds = (kinds, grid, torch.cuda.current_device() if torch.cuda.is_initialized() else None)
        runner = self._runners.get(kinds)
        if runner is not None:
            runner(*map(torch.Tensor.data_ptr, tensors), *others)
            return
        before = self._compiled.pop(kinds, None)
        if before is not None:  # and no other thread has taken it
            whole = grid if isinstance(grid, tuple) else (grid, 1, 1)
            self._runners[kinds] = before[whole]
            self(kernel, grid, kinds[0], tensors, others)
            return
        if len(self._runners) + len(self._compiled) >= KINDS:  # shapes that are new with every batch
            self._runners.clear()
            self._compiled.clear()
        compiled = kernel[grid if isinstance(grid, tuple) else (grid,)](*tensors, *others, **options)
        if compiled is not None:  # as the interpreter's is
            self._compiled[kinds] = compiled
