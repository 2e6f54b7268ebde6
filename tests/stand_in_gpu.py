"""Launched kernels without a GPU: everything between the call and the driver, which is stood in for.

Triton's own launcher runs down to its C function, which is a Python function here that starts nothing; tensors lie on
the CPU and are taken for a GPU's.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from distill_kernels import kernel_op, launch_plans
from distill_kernels.launch import TensorDescriptor, interpreted, triton
from triton.backends.nvidia import driver as nvidia


class PyCUtensorMap:
    """Stands for the driver's tensor map, of a descriptor's address, shape and strides."""

    def __init__(self, address: int, *description: Any) -> None:
        self.address, self.description = address, description


class Compiled:
    """Stands for a compiled kernel: Triton's launcher, whose C function notes what it is called with.

    Args:
        values: Arguments of the launch that it was compiled for.
        native: Stands for the C function.
    """

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self, values: list[Any], native: Callable[..., None]) -> None:
        described = [isinstance(value, TensorDescriptor) for value in values]
        signature = {str(n): "tensordesc<bf16[1]>" if is_one else "*i8" for n, is_one in enumerate(described)}
        meta = {"swizzle": 3, "elem_size": 2, "elem_type": 1, "block_size": [1], "fp4_padded": False}
        self.run = object.__new__(nvidia.CudaLauncher)
        vars(self.run).update(
            launch=nvidia.wrap_handle_tensordesc(native, signature, [meta] * sum(described)),
            num_ctas=1,
            global_scratch_size=0,
            global_scratch_align=1,
            profile_scratch_size=0,
            profile_scratch_align=1,
            launch_cooperative_grid=False,
            launch_pdl=False,
            gsan_enabled=False,  # from Triton 3.8 on
            arg_annotations=[object()],
            kernel_signature=b"signature",
        )


nothing = "".format  # a C function that takes any arguments


class Kernel:
    """Stands for a `triton.jit` function: launches nothing, and counts how often its look-up is asked.

    Args:
        function: The Python function with the kernel's signature.
        native: Stands for the C function of what it compiles to.
    """

    def __init__(self, function: Callable[..., Any], native: Callable[..., Any] = nothing) -> None:
        self.fn, self.native = function, native
        self.arg_names = list(inspect.signature(function).parameters)
        self.looked_up = 0

    def compile(self, grid: tuple[int, ...], values: list[Any]) -> Compiled:
        """Return what is launched over `grid` for arguments like `values`."""
        return Compiled(values, self.native)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        """Return what looks the kernel up for `grid`."""

        def look_up(*args: Any, **options: Any) -> Compiled:
            self.looked_up += 1
            for hook in launch_plans.LAUNCH_HOOKS.calls:
                hook(None)
            given = {name: value for name, value in options.items() if name in self.arg_names}
            bound = inspect.signature(self.fn).bind(*args, **given)
            bound.apply_defaults()
            return self.compile(grid, list(bound.arguments.values()))

        return look_up


@contextlib.contextmanager
def stand_in_gpu(*modules: ModuleType, make: Callable[..., Kernel] = Kernel) -> Iterator[list[Kernel]]:
    """Take CPU tensors for a GPU's, and the Triton kernels of `modules` for compiled ones; yields the kernels."""
    kernels: dict[Any, Kernel] = {}
    driver = SimpleNamespace(utils=SimpleNamespace())
    for name in ("fill_tma_descriptor", "fill_tma_descriptor_tiled"):  # of Triton 3.6, and from 3.7 on
        setattr(driver.utils, name, PyCUtensorMap)
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name, function in list(vars(module).items()):
                if type(function).__name__ in ("JITFunction", "InterpretedFunction"):
                    kernels.setdefault(function, make(function.fn))
                    stack.enter_context(mock.patch.object(module, name, kernels[function]))
        for name, stand_in in {
            "current_device": lambda: -1,
            "current_stream": lambda device: 7,
            "on_gpu": lambda tensor: True,
            "empty_on_current_device": torch._C._dynamo.guards._empty_strided_cpu,
        }.items():
            stack.enter_context(mock.patch.object(launch_plans, name, stand_in))
        stack.enter_context(mock.patch.object(kernel_op, "has_gpu", lambda: True))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        stack.enter_context(interpreted())
        yield list(kernels.values())
