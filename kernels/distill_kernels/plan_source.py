"""The source of a launch plan: straight-line Python from what a recorder saw of one call.

`p0` is the address of the first tensor, `b0` the first buffer and `a0` its address, `c0` a constant;
docs/decisions/launch-plans.md prints one. A kernel is started by a C function of Triton, which Triton calls at the end
of two or three functions of Python that depend on its version: what they hand it is found by running them once with a
stand-in in its place.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from distill_kernels.launch import HAS_TRITON, TensorDescriptor, triton

MAX_TENSOR_MAPS = 256  # of a descriptor; a model's layers and their gradients need one each
_warn_once = functools.cache(logging.getLogger(__name__).warning)


class Unplannable(Exception):
    """A launcher did what no plan can repeat."""


class _Place(str):
    """An expression that stands for a kernel's argument, and the address that was there at the recording."""

    address = 0

    def data_ptr(self) -> int:
        return self.address


def _placed(expression: str, address: int = 0) -> _Place:
    place = _Place(expression)
    place.address = address
    return place


class PlanSource:
    """Expressions of one plan, and the values that they name.

    Args:
        inputs: Numbers of the tensors by address.
        buffers: Tensors that the launcher allocated.
    """

    def __init__(self, inputs: dict[int, int], buffers: Sequence[torch.Tensor]) -> None:
        self.inputs = inputs
        self.bases = {storage_address(buffer): (number, buffer) for number, buffer in enumerate(buffers)}
        self.constants: list[Any] = []
        self.allocations = [self._allocation(buffer) for buffer in buffers]

    def function(self, device: int, starts: list[str], returned: str, names: dict[str, Any]) -> Callable[..., Any]:
        """Return the function of the tensors that allocates, launches and returns the outputs.

        Args:
            device: Index of the device.
            starts: Calls that start the kernels.
            returned: Expression of the outputs.
            names: Values of `device`, `hooks`, `empty` and `stream_of`.
        """
        numbers = range(len(self.inputs))
        buffers = range(len(self.allocations))
        any_bit = " | ".join(f"p{number}" for number in numbers)
        lines = [
            f"def replay({', '.join(f't{number}' for number in numbers)}):",
            *[f"    p{number} = t{number}.data_ptr()" for number in numbers],
            f"    if ({any_bit}) & 15 or device() != {device} or hooks.calls:",
            "        return NotImplemented",
            *[f"    b{number} = {self.allocations[number]}" for number in buffers],
            *[f"    a{number} = b{number}.data_ptr()" for number in buffers],
            f"    stream = stream_of({device})",
            *[f"    {start}" for start in starts],
            f"    return {returned}",
        ]
        scope = {**names, **{f"c{number}": constant for number, constant in enumerate(self.constants)}}
        exec(compile("\n".join(lines), f"<launch plan of {len(starts)} kernels>", "exec"), scope)
        return scope["replay"]

    def outputs(self, outputs: Any, results: int | None) -> str:
        """Return the launcher's outputs as an expression; buffers take the outputs' shapes."""
        if not isinstance(outputs, (tuple, list)):
            return self._output(outputs)
        parts: list[str] = []
        for number, output in enumerate(outputs):
            unread = results is not None and number >= results and output is not None and not output.numel()
            part = "None" if unread else self._output(output)
            if part in parts and part.startswith("b"):
                raise Unplannable  # one buffer twice
            parts.append(part)
        inside = "".join(f"{part}, " for part in parts)
        return f"({inside})" if isinstance(outputs, tuple) else f"[{inside}]"

    def start(self, compiled: Any, grid: tuple[int, int, int], values: list[Any]) -> str:
        """Return the call that starts a compiled kernel over `grid` with arguments `values`."""
        placed = list(map(self._place, values))
        bases = [value.base for value in placed if HAS_TRITON and isinstance(value, TensorDescriptor)]
        launcher = compiled.run
        if getattr(launcher, "global_scratch_size", 0) or getattr(launcher, "profile_scratch_size", 0):
            raise Unplannable  # Triton allocates it at each launch
        if getattr(launcher, "gsan_enabled", False):
            raise Unplannable  # Triton's sanitizer gets the address of its state at each launch
        try:  # Triton's insides, which no release promises
            first = [*grid, _placed("stream"), compiled.function, compiled.packed_metadata, None, None, None]
            with _noted_tensor_maps() as noted:
                native, handed = _native_call(launcher, [*first, *placed])
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            _warn_unknown(launcher, error)
            raise Unplannable from error
        maps = [f"{self._constant(made)}[{base}]" for made, base in zip(noted, bases, strict=bool(noted))]
        return self._constant(native) + self._write(handed, iter(maps))

    def _allocation(self, tensor: torch.Tensor) -> str:
        return f"empty({tuple(tensor.shape)}, {tensor.stride()}, {self._constant(tensor.dtype)})"

    def _constant(self, value: Any) -> str:
        """Return `value` as an expression: integers and None as they are, all else under a name."""
        if value is None or type(value) in (int, bool):
            return repr(value)
        for number, known in enumerate(self.constants):
            if known is value:
                return f"c{number}"
        self.constants.append(value)
        return f"c{len(self.constants) - 1}"

    def _output(self, output: torch.Tensor | None) -> str:
        if output is None:
            return "None"
        if not output.numel():
            return self._allocation(output)
        number, base = self.bases.get(storage_address(output), (-1, output))
        same_memory = output.data_ptr() == base.data_ptr() and _extent(output) == _extent(base)
        if number < 0 or not same_memory or output.dtype != base.dtype:
            raise Unplannable
        self.allocations[number] = self._allocation(output)
        return f"b{number}"

    def _place(self, value: Any) -> Any:
        """Return a kernel's argument with expressions in place of its tensors."""
        if isinstance(value, tuple):
            return tuple(map(self._place, value))
        if HAS_TRITON and isinstance(value, TensorDescriptor):
            placed = copy.copy(value)
            placed.base = self._place(value.base)
            return placed
        if not isinstance(value, torch.Tensor):
            return value
        pointer = value.data_ptr()
        if not pointer:
            return 0
        if pointer in self.inputs:
            return _placed(f"p{self.inputs[pointer]}", pointer)
        if storage_address(value) not in self.bases:
            raise Unplannable
        number, base = self.bases[storage_address(value)]
        offset = pointer - base.data_ptr()
        return _placed(f"a{number} + {offset}" if offset else f"a{number}", pointer)

    def _write(self, value: Any, maps: Iterator[str]) -> str:
        """Return what a C function is called with as an expression; `maps` are its tensor maps, in order."""
        if isinstance(value, _Place):
            return str(value)
        if not _varies(value):
            return self._constant(value)
        if isinstance(value, (tuple, list)):
            return "(" + "".join(f"{self._write(part, maps)}, " for part in value) + ")"
        return next(maps)


class _TensorMaps(dict[int, Any]):
    """Tensor maps (the driver's form of tensor descriptors) by address, for one descriptor of a kernel.

    Args:
        fill: Triton's function that makes one.
        layout: Arguments of `fill` after the address.
    """

    def __init__(self, fill: Callable[..., Any], layout: Sequence[Any]) -> None:
        super().__init__()
        self._fill = fill
        self._layout = layout

    def __missing__(self, address: int) -> Any:
        if len(self) >= MAX_TENSOR_MAPS:
            self.clear()
        self[address] = made = self._fill(address, *self._layout)
        return made


@contextlib.contextmanager
def _noted_tensor_maps() -> Iterator[list[_TensorMaps]]:
    """Note the tensor maps that Triton makes inside, on this thread, in their order."""
    noted: list[_TensorMaps] = []
    utils = triton.runtime.driver.active.utils
    here = threading.get_ident()
    fills = {name: fill for name, fill in vars(utils).items() if name.startswith("fill_tma_descriptor")}

    def noting(fill: Callable[..., Any], address: int, *layout: Any) -> Any:
        if threading.get_ident() == here:
            noted.append(_TensorMaps(fill, layout))
        return fill(address, *layout)

    for name, fill in fills.items():
        setattr(utils, name, functools.partial(noting, fill))
    try:
        yield noted
    finally:
        for name, fill in fills.items():
            setattr(utils, name, fill)


def _native_call(launcher: Any, arguments: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the C function in which Triton's launcher ends, and what it calls that with; nothing is launched."""
    handed: list[tuple[Any, ...]] = []

    def stand_in(*arguments: Any) -> None:
        handed.append(arguments)

    launch = getattr(launcher, "launch", None)
    copied = copy.copy(launcher)
    if isinstance(launch, types.FunctionType):  # makes tensor maps of descriptors, then calls the C function `launcher`
        cells = dict(zip(launch.__code__.co_freevars, launch.__closure__ or (), strict=True))
        native = cells["launcher"].cell_contents if "launcher" in cells else None
        cells["launcher"] = types.CellType(stand_in)
        closure = tuple(cells[name] for name in launch.__code__.co_freevars)
        copied.launch = types.FunctionType(launch.__code__, launch.__globals__, closure=closure)
    else:
        native = launch
        if launch is not None:
            copied.launch = stand_in
    if native is None:
        _warn_unknown(launcher, None)
        raise Unplannable
    copied(*arguments)
    return native, handed[0]


def _warn_unknown(launcher: Any, error: Exception | None) -> None:
    why = "" if error is None else f" ({type(error).__name__}: {error})"
    _warn_once("Triton's %s has a form unknown here%s: every launch is looked up, slowly", type(launcher).__name__, why)


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def _varies(value: Any) -> bool:
    """Return whether an argument of a C function differs from call to call."""
    if isinstance(value, (tuple, list)):
        return any(map(_varies, value))
    return isinstance(value, _Place) or type(value).__name__ == "PyCUtensorMap"


def _extent(tensor: torch.Tensor) -> int:
    """Return the elements from a tensor's first to its last in memory."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
