"""Kernel launching: device facts, block sizes, and the only import of triton.

`import distill_kernels` must work where triton is not installed (macOS, Windows), so kernel files take `triton` and
`tl` from here; without triton, decorating a kernel works and calling it raises.

A CUDA tensor runs a Triton kernel, a CPU tensor the PyTorch reference in the same file. Tests run the kernels on
CPU tensors through Triton's interpreter by `with interpreted():`.
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
    LAUNCH_ERRORS: tuple[type[Exception], ...] = (triton.errors.TritonError, RuntimeError)  # failed compilations

    @constexpr_function
    def has_ptx() -> bool:
        """Return, inside a kernel, whether it is compiled for an NVIDIA GPU and may hold inline PTX."""
        return not triton.knobs.runtime.interpret and bool(is_cuda())

except ImportError as missing:
    HAS_TRITON = False
    WITHOUT_TRITON = "this needs triton, which is not installed (pip install triton, Linux only)"
    if missing.name != "triton":  # a release of Triton in which a name has moved
        WITHOUT_TRITON = f"this needs a release of triton that distill_kernels knows: {missing}"
        logging.getLogger(__name__).warning("%s; PyTorch computes on CPUs, and nothing on GPUs", WITHOUT_TRITON)
    LAUNCH_ERRORS = (RuntimeError,)

    class _MissingTriton:
        """Placeholder for a missing triton: decorators keep the function, everything else raises on use."""

        def __getattr__(self, name: str) -> typing.Any:
            if name in ("jit", "autotune", "heuristics"):
                return lambda *args, **kwargs: args[0] if args and callable(args[0]) else lambda fn: fn
            return _MissingTriton()

        def __call__(self, *args: object, **kwargs: object) -> typing.Any:
            raise RuntimeError(WITHOUT_TRITON)

    triton = _MissingTriton()
    tl = _MissingTriton()
    TensorDescriptor = _MissingTriton()

_log = logging.getLogger(__name__)
_interpreting = False
Function = typing.TypeVar("Function", bound=Callable[..., typing.Any])
MAX_CACHED_LAUNCHES = 4096  # specializations that a `CachedLauncher` holds before it starts over


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Run Triton kernels on CPU tensors too. For tests: needs TRITON_INTERPRET=1 set before triton was imported."""
    global _interpreting
    before = _interpreting
    _interpreting = True
    try:
        yield
    finally:
        _interpreting = before


class Family(NamedTuple):
    """Properties that the GPUs of one architecture share.

    Attributes:
        shared_bytes: The most shared memory that a program may take.
        tma: Tiles are copied by tensor descriptors (TMA); elsewhere they are loaded through pointers.
        warpgroups: Matrix instructions read operands from shared memory and leave the registers to accumulators.
        fp8: There are matrix instructions for e4m3 (the form without infinities).
        warp_size: Threads of a warp.
        measured: Tables of launch shapes were measured on such a GPU. Elsewhere launches are timed once (tuning.py).
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
FAMILY_BY_CAPABILITY = {
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
# no kernel is launched there
OLDER = "older"
UNKNOWN = "unknown"


class DeviceFacts(NamedTuple):
    """Device properties that launch decisions depend on, in place of compute capabilities.

    Attributes:
        multiprocessors: Number of streaming multiprocessors.
        family: A key of `FAMILIES`, or `OLDER` or `UNKNOWN`.
        shared_bytes: The most shared memory that a program may take.
        l2_bytes, memory_bytes: Sizes of the L2 cache and of the device memory.
    """

    multiprocessors: int
    family: str
    shared_bytes: int
    l2_bytes: int
    memory_bytes: int

    @property
    def has_kernels(self) -> bool:
        """True where Triton kernels are launched; elsewhere the PyTorch references run."""
        return self.family in FAMILIES

    @property
    def tma(self) -> bool:
        """True where tiles are copied by tensor descriptors (TMA)."""
        return self.has_kernels and FAMILIES[self.family].tma

    @property
    def warpgroups(self) -> bool:
        """True where matrix instructions read operands from shared memory (WGMMA, tcgen05)."""
        return self.has_kernels and FAMILIES[self.family].warpgroups

    @property
    def fp8(self) -> bool:
        """True where there are matrix instructions for e4m3."""
        return self.has_kernels and FAMILIES[self.family].fp8

    @property
    def warp_size(self) -> int:
        """Threads of a warp."""
        return FAMILIES[self.family].warp_size if self.has_kernels else 32

    @property
    def measured(self) -> bool:
        """True where tables of launch shapes were measured on such a GPU."""
        return self.has_kernels and FAMILIES[self.family].measured

    @property
    def dependent_launch(self) -> bool:
        """True where a kernel may start before the previous one ends (programmatic dependent launch, from Hopper)."""
        return self.tma and self.family != INTERPRETER


def family_of(capability: tuple[int, int], gcn: str | None = None) -> str:
    """Return the family of an NVIDIA GPU by its compute capability, of an AMD GPU by its architecture name `gcn`."""
    if gcn is not None:
        name = gcn.split(":")[0]
        return name if name in FAMILIES else UNKNOWN
    return FAMILY_BY_CAPABILITY.get(capability, OLDER if capability < (8, 0) else UNKNOWN)


def forced_family() -> str | None:
    """Return the family that the environment variable DISTILL_FAMILY selects in place of the GPU's own, for tests.

    Raises:
        ValueError: If there is no such family.
    """
    name = os.environ.get("DISTILL_FAMILY")
    if name and (name not in FAMILIES or name == INTERPRETER):
        names = ", ".join(name for name in FAMILIES if name != INTERPRETER)
        raise ValueError(f"DISTILL_FAMILY: expected one of {names}, got {name}")
    return name or None


def constant_in_graphs(function: Function) -> Function:
    """Decorate a function whose results torch.compile takes as constants, without the import of torch._dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # all that assume_constant_result does
    return function


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
        family = forced
        shared = min(shared, FAMILIES[forced].shared_bytes)
    return DeviceFacts(
        properties.multi_processor_count, family, shared, properties.L2_cache_size, properties.total_memory
    )


def device_facts(device: torch.device) -> DeviceFacts:
    """Return the facts of a CUDA device, read once; for the CPU, small values that keep interpreted launches short."""
    if device.type != "cuda":
        return DeviceFacts(4, INTERPRETER, FAMILIES[INTERPRETER].shared_bytes, 32 << 20, 8 << 30)
    return _cuda_facts(torch.cuda.current_device() if device.index is None else device.index)


@constant_in_graphs
def _has_kernels(index: int) -> bool:
    return _cuda_facts(index).has_kernels


def runs_on_triton(tensor: object) -> bool:
    """Return whether a Triton kernel computes on `tensor`, rather than the PyTorch reference or a check's message."""
    return isinstance(tensor, torch.Tensor) and (
        _interpreting or (tensor.is_cuda and _has_kernels(tensor.get_device()))
    )


# what is told of each launch, with the kernel, what it compiled to, grid, arguments and options: a plan's recorder
launch_watcher: Callable[..., None] | None = None


def launch(kernel: typing.Any, grid: tuple[int, ...], *args: typing.Any, **options: typing.Any) -> None:
    """Launch a Triton kernel as `kernel[grid](*args, **options)` does, so that a plan of it can be made."""
    compiled = kernel[grid](*args, **options)
    if launch_watcher is not None:
        launch_watcher(kernel, compiled, grid, args, options)


def watch_launches(watcher: Callable[..., None] | None) -> None:
    """Have `watcher` told of each launch of any thread; None for nobody."""
    global launch_watcher
    launch_watcher = watcher


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def dot_precision(dtype: torch.dtype) -> str:
    """Return `tl.dot`'s input precision: fp32 operands are multiplied in fp32, not in tf32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def dependent_launch_options(dependent: bool) -> dict[str, bool]:
    """Return the launch options of a kernel that may start while the one before it still runs.

    Such a kernel waits (`gdc_wait`) before it reads what that one wrote; the option is left out where it does not.
    """
    return {"launch_pdl": True} if dependent else {}


class CachedLauncher:
    """Launcher of one kernel that bypasses Triton's look-up by argument types from the second launch on.

    The compiled kernel is called as in Triton's tutorial on fused softmax. Launches of the same `specialization` may
    differ only in what the look-up does not distinguish: values of floats, and addresses of the same divisibility
    by 16; never in types, integers or constants.
    """

    def __init__(self) -> None:
        self._runners: dict[typing.Any, Callable[..., None]] = {}

    def __call__(
        self,
        kernel: typing.Any,
        grid: int | tuple[int, int, int],
        specialization: typing.Any,
        tensors: Sequence[torch.Tensor],
        arguments: Sequence[typing.Any],
        **options: typing.Any,
    ) -> None:
        """Launch `kernel` with `tensors` and then `arguments`, which hold every constant in the signature's order."""
        specialization = (specialization, grid, torch.cuda.current_device() if torch.cuda.is_initialized() else None)
        runner = self._runners.get(specialization)
        if runner is not None:
            runner(*map(torch.Tensor.data_ptr, tensors), *arguments)
            return
        if len(self._runners) >= MAX_CACHED_LAUNCHES:  # shapes that are new with every batch
            self._runners.clear()
        compiled = kernel[grid if isinstance(grid, tuple) else (grid,)](*tensors, *arguments, **options)
        if compiled is not None:  # as the interpreter's is
            self._runners[specialization] = compiled[grid if isinstance(grid, tuple) else (grid, 1, 1)]
