"""Launch plans: what a kernel's launcher did for arguments of one description, replayed without its Python.

A launcher checks shapes, chooses tiles, allocates outputs and calls Triton's look-up by argument types: 40 to 90
microseconds of host time, for kernels that run for 5. All of it depends on shapes, strides, dtypes and plain values,
never on a tensor's contents. `record` runs a launcher once and notes which buffers it allocates and which compiled
kernels it starts with which arguments; the `LaunchPlan` made from that allocates and starts the same again for other
tensors of the same description. A launcher that does anything else (a copy, a GEMM, a view as a result) has no plan and
is called as before.

Measured on an H100, 64 rows of 2,048: `rms_norm` took 50 microseconds of host time, of which Triton's own launch
through a compiled kernel is 5 and an allocation 1.
"""

from __future__ import annotations

import functools
import inspect
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distill_kernels.launch import HAS_TRITON, TensorDescriptor

if HAS_TRITON:
    from triton import knobs

    LAUNCH_HOOKS = knobs.runtime.launch_enter_hook  # called at each launch, for Triton's profiler
else:
    LAUNCH_HOOKS = None

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


# What torch.compile's generated code allocates with: 1.0 microseconds, for 2.4 of `torch.empty_strided`
empty_on_current_device: Callable[..., torch.Tensor] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", _empty_strided
)

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_QUESTIONS = {_aten.promote_types.default}  # answered on the host, about dtypes alone
_recorder: _Recorder | None = None
_recording = threading.Lock()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a Triton kernel as `kernel[grid](*args, **options)` does, and record it where a plan is being made."""
    compiled = kernel[grid](*args, **options)
    recorder = recorder_here()
    if recorder is not None:
        recorder.add(kernel, compiled, grid, args, options)


def recorder_here() -> _Recorder | None:
    """Return the recorder that watches this thread, if any."""
    recorder = _recorder
    return recorder if recorder is not None and recorder.thread == threading.get_ident() else None


def hooked() -> bool:
    """Return whether someone watches Triton's launches (its profiler), which plans would not tell of."""
    return LAUNCH_HOOKS is not None and bool(LAUNCH_HOOKS.calls)


class LaunchPlan:
    """Allocations and launches of one call, for other tensors of the same shapes, strides, dtypes and alignment.

    Args:
        device: Index of the CUDA device, which must be the current one at each call.
        allocations: Size, stride and dtype of each buffer.
        constants: Arguments that are no addresses.
        derived: Functions of the values so far (addresses of inputs, of buffers, constants): addresses inside a
            buffer, tensor descriptors, tuples of arguments. Each appends one value.
        launches: For each kernel a function of stream and arguments, and one that picks its arguments from the values.
        outputs: A function of the buffers that returns what the launcher returns.
        same: Pairs of tensors that were one when the plan was made: which of them a kernel was given is not known.
    """

    __slots__ = ("allocations", "constants", "derived", "device", "launches", "outputs", "same")

    def __init__(
        self,
        device: int,
        allocations: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]],
        constants: list[Any],
        derived: Sequence[Callable[[list[Any]], Any]],
        launches: Sequence[tuple[Callable[..., None], Callable[[list[Any]], tuple[Any, ...]]]],
        outputs: Callable[[list[torch.Tensor]], Any],
        same: list[tuple[int, int]],
    ) -> None:
        self.device = device
        self.same = same
        self.allocations = allocations
        self.constants = constants
        self.derived = derived
        self.launches = launches
        self.outputs = outputs

    def fits(self, pointers: list[int]) -> bool:
        """Return whether the plan holds for tensors at these addresses, on the current device."""
        if self.same and any(pointers[one] != pointers[other] for one, other in self.same):
            return False
        return self.device == current_device() and not hooked()

    def __call__(self, pointers: list[int]) -> Any:
        """Return the launcher's outputs for tensors at these addresses, in the order of its arguments."""
        buffers = [empty_on_current_device(*allocation) for allocation in self.allocations]
        values: list[Any] = [*pointers, *map(torch.Tensor.data_ptr, buffers), *self.constants]
        for derive in self.derived:
            values.append(derive(values))
        stream = current_stream(self.device)
        for start, pick in self.launches:
            start(stream, pick(values))
        return self.outputs(buffers)


def record(launcher: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, LaunchPlan | None]:
    """Call `launcher(*args)`; return its result, and a plan that repeats it, or None if there can be none."""
    global _recorder
    if not _recording.acquire(blocking=False):  # another thread records
        return launcher(*args), None
    try:
        _recorder = recorder = _Recorder(args)
        try:
            with recorder:
                outputs = launcher(*args)
        finally:
            _recorder = None
        return outputs, recorder.plan(outputs)
    finally:
        _recording.release()


class _Unplannable(Exception):
    """A launcher did what no plan can repeat."""


class _Recorder(TorchDispatchMode):
    """Watches one call of a launcher: PyTorch's operators as a dispatch mode, Triton's launches through `launch`.

    Args:
        args: Arguments of the launcher.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.device = current_device()
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        self.inputs: dict[int, int] = {}
        self.same: list[tuple[int, int]] = []
        for number, tensor in enumerate(tensors):
            if tensor.data_ptr():
                first = self.inputs.setdefault(tensor.data_ptr(), number)
                if first != number:
                    self.same.append((first, number))
        self.input_storages = {_storage(tensor) for tensor in tensors}
        self.input_count = len(tensors)
        self.buffers: list[torch.Tensor] = []  # held, so that no address is used twice
        self.launched: list[tuple[Any, tuple[int, int, int], list[Any]]] = []
        self.starts = 0
        self.reason: str | None = None

    def __enter__(self) -> _Recorder:
        if LAUNCH_HOOKS is not None:
            LAUNCH_HOOKS.add(self._count)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if LAUNCH_HOOKS is not None:
            LAUNCH_HOOKS.remove(self._count)

    def _count(self, *_: Any) -> None:
        self.starts += threading.get_ident() == self.thread

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.buffers.append(result)
        elif func in _QUESTIONS:
            pass
        elif not _is_view(func):
            self.reason = f"it calls {func}"
        else:
            for view in result if isinstance(result, (tuple, list)) else (result,):
                if _storage(view) in self.input_storages and view.data_ptr() != args[0].data_ptr():
                    self.reason = "it reads an input from its middle on, where another input may begin"
        return result

    def add(
        self, kernel: Any, compiled: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """Note a launch."""
        if compiled is None or not hasattr(kernel, "arg_names"):
            self.reason = "its kernel is interpreted, or not Triton's own"
            return
        values = list(args)
        parameters = inspect.signature(kernel.fn).parameters
        for name in kernel.arg_names[len(args) :]:
            values.append(options[name] if name in options else parameters[name].default)
        x, y, z = (*grid, 1, 1)[:3]
        self.launched.append((compiled, (x, y, z), values))

    def plan(self, outputs: Any) -> LaunchPlan | None:
        """Return the plan of what was seen, or None; what was seen is forgotten."""
        launched, buffers = self.launched, self.buffers
        self.launched, self.buffers = [], []  # outputs, soon with a graph behind them, must not live on here
        if self.reason is not None or (LAUNCH_HOOKS is not None and self.starts != len(launched)):
            return None
        buffers = [buffer for buffer in buffers if buffer.numel()]
        allocations = [(tuple(buffer.shape), buffer.stride(), buffer.dtype) for buffer in buffers]
        bases = {_storage(buffer): (number, buffer) for number, buffer in enumerate(buffers)}
        try:
            make_outputs = _outputs(outputs, bases, allocations)
            values = _Values(self.inputs, self.input_count, bases)
            places = [[values.place(value) for value in arguments] for _, _, arguments in launched]
        except _Unplannable:
            return None
        first = {"value": 0, "constant": self.input_count + len(allocations)}
        first["derived"] = first["constant"] + len(values.constants)
        derived = []
        for make, source, more in values.derived:
            if make is _tuple:
                source = [first[kind] + number for kind, number in source]
            derived.append(functools.partial(make, source, more))
        launches = []
        for (compiled, grid, _), of_kernel in zip(launched, places, strict=True):
            if len(of_kernel) < 2:  # `itemgetter` of one is no tuple
                return None
            pick = operator.itemgetter(*(first[kind] + number for kind, number in of_kernel))
            launches.append((_start(compiled, grid), pick))
        return LaunchPlan(self.device, allocations, values.constants, derived, launches, make_outputs, self.same)


class _Values:
    """Origins of the kernel arguments: inputs, buffers, constants, or values derived from these.

    Args:
        inputs: Numbers of the inputs by address.
        input_count: How many there are.
        bases: Number and tensor of each buffer, by its storage.
    """

    def __init__(self, inputs: dict[int, int], input_count: int, bases: dict[int, tuple[int, torch.Tensor]]) -> None:
        self.inputs, self.input_count, self.bases = inputs, input_count, bases
        self.constants: list[Any] = []
        self.derived: list[tuple[Callable[..., Any], Any, Any]] = []

    def place(self, value: Any) -> tuple[str, int]:
        """Return a kind, "value" for inputs and buffers, and a number among those of its kind."""
        if isinstance(value, torch.Tensor) and value.data_ptr():
            pointer = value.data_ptr()
            if pointer in self.inputs:
                return "value", self.inputs[pointer]
            if _storage(value) not in self.bases:
                raise _Unplannable
            number, base = self.bases[_storage(value)]
            if pointer == base.data_ptr():
                return "value", self.input_count + number
            return self._derive(_offset, self.input_count + number, pointer - base.data_ptr())
        if HAS_TRITON and isinstance(value, TensorDescriptor):
            kind, number = self.place(value.base)
            if kind != "value":
                raise _Unplannable
            return self._derive(_descriptor, number, {**vars(value), "base": None})
        if isinstance(value, tuple):
            return self._derive(_tuple, [self.place(part) for part in value], None)
        self.constants.append(0 if isinstance(value, torch.Tensor) else value)
        return "constant", len(self.constants) - 1

    def _derive(self, *made: Any) -> tuple[str, int]:
        self.derived.append(made)
        return "derived", len(self.derived) - 1


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_view(func: Any) -> bool:
    """Return whether an operator returns views and writes nothing."""
    schema = func._schema
    written = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return not written and all(r.alias_info is not None for r in schema.returns)


def _offset(source: int, offset: int, values: list[Any]) -> int:
    return int(values[source] + offset)


class _Address:
    """Stands for the tensor of a descriptor, of which Triton's launch reads the address alone."""

    __slots__ = ("pointer",)

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def data_ptr(self) -> int:
        return self.pointer


def _descriptor(source: int, fields: dict[str, Any], values: list[Any]) -> Any:
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(fields, base=_Address(values[source]))
    return made


def _tuple(sources: list[int], _: None, values: list[Any]) -> tuple[Any, ...]:
    return tuple([values[source] for source in sources])


def _start(compiled: Any, grid: tuple[int, int, int]) -> Callable[..., None]:
    """Return what starts a compiled kernel, as Triton's `compiled[grid]` does without looking for hooks."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    x, y, z = grid

    def start(stream: int, arguments: tuple[Any, ...]) -> None:
        run(x, y, z, stream, function, metadata, None, None, None, *arguments)

    return start


def _outputs(
    outputs: Any,
    bases: dict[int, tuple[int, torch.Tensor]],
    allocations: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]],
) -> Callable[[list[torch.Tensor]], Any]:
    """Return a function that takes the launcher's outputs from a plan's buffers; buffers take the outputs' shapes."""
    if outputs is None:
        return _nothing
    several = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    numbers = []
    for output in several:
        geometry = (tuple(output.shape), output.stride(), output.dtype)
        if not output.numel():
            allocations.append(geometry)
            numbers.append(len(allocations) - 1)
            continue
        number, base = bases.get(_storage(output), (-1, output))
        same_memory = output.data_ptr() == base.data_ptr() and _extent(output) == _extent(base)
        if number < 0 or number in numbers or not same_memory or output.dtype != base.dtype:
            raise _Unplannable
        allocations[number] = geometry
        numbers.append(number)
    if not isinstance(outputs, (tuple, list)):
        return operator.itemgetter(numbers[0])
    if isinstance(outputs, tuple) and len(numbers) > 1:
        return operator.itemgetter(*numbers)
    return functools.partial(_sequence, type(outputs), numbers)


def _nothing(buffers: list[torch.Tensor]) -> None:
    return None


def _sequence(kind: Callable[..., Any], numbers: list[int], buffers: list[torch.Tensor]) -> Any:
    return kind([buffers[number] for number in numbers])


def _extent(tensor: torch.Tensor) -> int:
    """Return the elements from a tensor's first to its last in memory."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
