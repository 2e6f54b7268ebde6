"""Launch plans: what a kernel's launcher did for arguments of one description, replayed without its Python.

A launcher checks shapes, chooses tiles, allocates outputs and calls Triton's look-up by argument types: 40 to 90
microseconds of host time, for kernels that run for 5. All of it depends on shapes, strides, dtypes and plain values,
never on a tensor's contents. `PlannedFunction` runs a launcher twice for arguments of one description (the first call
compiles and tunes) and notes at the second which buffers it allocates and which compiled kernels it starts with which
arguments. From that it writes a Python function of straight-line code: take the addresses, allocate the buffers, call
Triton's C function for each kernel. Later calls run that function and nothing else. A launcher that does anything else
(a copy, a GEMM, a view as a result) has no plan and is called as before.

A description is looked up by argument types, plain values and two tensors' shapes, and confirmed by the guards
that `torch.compile` checks its inputs with: one call into C++ compares shapes, strides, dtypes, devices, and the
dispatch modes that are on.
"""

from __future__ import annotations

import inspect
import logging
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from distill_kernels.launch import HAS_TRITON, MAX_CACHED_LAUNCHES
from distill_kernels.operands import PLAIN
from distill_kernels.plan_source import PlanSource, Unplannable, storage_address
from distill_kernels.torch_internals import (
    HAS_PLAN_INTERNALS,
    TensorGuards,
    TorchDispatchMode,
    current_device,
    current_stream,
    empty_on_current_device,
    functorch_level,
    is_in_torch_dispatch_mode,
)

_log = logging.getLogger(__name__)
# Called at each launch, for Triton's profiler
LAUNCH_HOOKS: Any = None
if HAS_TRITON:
    try:
        from triton import knobs

        LAUNCH_HOOKS = knobs.runtime.launch_enter_hook
    except (ImportError, AttributeError) as missing:
        _log.warning("Triton: %s; kernels are launched through the dispatcher, slowly", missing)
CAN_PLAN = HAS_PLAN_INTERNALS and (LAUNCH_HOOKS is not None or not HAS_TRITON)

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_QUESTIONS = {_aten.promote_types.default}  # answered on the host, about dtypes alone
MAX_ALIKE = 32  # plans that only guards tell apart; they are tried in turn
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


def on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in a GPU's memory."""
    return tensor.is_cuda


def outside_of_plans() -> bool:
    """Return whether no plan may be made or replayed: a dispatch mode or a function transform, which plans would not
    tell of, is on, or this torch or Triton lacks what plans are made of.
    """
    return not CAN_PLAN or bool(is_in_torch_dispatch_mode()) or functorch_level() is not None


class LaunchPlan:
    """Replay of the calls whose arguments have one description, and the state of its recording.

    Attributes:
        fits: Function that returns whether tensors have the plan's description.
        needs_gradient: True if one of the tensors requires a gradient.
        replay: Function of the tensors that allocates, launches and returns the outputs, or NotImplemented where these
            addresses, this device or a profiler of Triton demand the launcher. None before the second call.
        recordable: False once it is known that the launcher cannot have a plan.
        called: True after the first call.
        gradient: Storage for the owner of the `PlannedFunction`.
    """

    __slots__ = ("called", "fits", "gradient", "needs_gradient", "recordable", "replay")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        guards: Any = TensorGuards
        self.fits: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        self.needs_gradient = any(tensor.requires_grad for tensor in tensors)
        self.replay: Callable[..., Any] | None = None
        self.recordable = HAS_TRITON and all(map(on_gpu, tensors))
        self.called = False
        self.gradient: Any = None


class PlannedFunction:
    """A function of tensors and plain values that is replayed, where it can be, from its third call on.

    Args:
        function: Function to replay; it may depend on the description of its arguments only, never on a tensor's
            contents.
        results: Number of outputs that the caller reads; of the others, a replay gives None for those without elements.
    """

    def __init__(self, function: Callable[..., Any], results: int | None = None) -> None:
        self.function = function
        self.results = results
        self._forms: dict[tuple[type, ...], tuple[Any, Any, dict[Any, list[LaunchPlan]]]] = {}
        self._count = 0

    def plans(self) -> list[LaunchPlan]:
        return [plan for _, _, known in self._forms.values() for plans in known.values() for plan in plans]

    def forget(self) -> None:
        self._forms.clear()
        self._count = 0

    def find(self, args: tuple[Any, ...]) -> tuple[LaunchPlan, tuple[torch.Tensor, ...]] | None:
        """Return the plan for `args`, and the tensors among them; None if they were not seen yet."""
        form = self._forms.get(tuple(map(type, args)))
        if form is None:
            return None
        tensors_of, values_of, known = form
        tensors = tensors_of(args)
        for plan in known.get((tensors[0].shape, tensors[-1].shape, values_of(args)), ()):
            if plan.fits(*tensors):
                return plan, tensors
        return None

    def add(self, args: tuple[Any, ...]) -> tuple[LaunchPlan, tuple[torch.Tensor, ...]] | None:
        """Return a new plan for `args`, and the tensors among them; None for arguments that can have none."""
        kinds = tuple(map(type, args))
        places = [place for place, kind in enumerate(kinds) if kind in PLAIN]
        others = [place for place, kind in enumerate(kinds) if kind not in PLAIN]
        values = [args[place] for place in others]
        if not places or outside_of_plans() or any(args[place].layout != torch.strided for place in places):
            return None
        if len({id(args[place]) for place in places}) < len(places):  # which the guards refuse
            return None
        if any(isinstance(value, torch.Tensor) or type(value).__hash__ is None for value in values):
            return None
        if self._count >= MAX_CACHED_LAUNCHES:  # shapes that are new with every batch
            self.forget()
        if kinds not in self._forms:
            self._forms[kinds] = (getter(places), getter(others), {})
        tensors_of, values_of, known = self._forms[kinds]
        tensors = tensors_of(args)
        plan = LaunchPlan(tensors)
        alike = known.setdefault((tensors[0].shape, tensors[-1].shape, values_of(args)), [])
        alike.insert(0, plan)
        del alike[MAX_ALIKE:]
        self._count += 1
        return plan, tensors

    def __call__(self, *args: Any) -> Any:
        found = self.find(args) or self.add(args)
        return self.function(*args) if found is None else self.run(*found, args)

    def run(self, plan: LaunchPlan, tensors: tuple[torch.Tensor, ...], args: tuple[Any, ...]) -> Any:
        """Return the function's outputs for `args`, whose plan and tensors are given."""
        if plan.replay is not None:
            outputs = plan.replay(*tensors)
            if outputs is not NotImplemented:
                return outputs
        if not plan.recordable:
            return self.function(*args)
        pointers = [tensor.data_ptr() for tensor in tensors]
        distinct = len({*pointers}) == len(pointers)  # else a recorder cannot tell which of them a kernel was given
        usual = distinct and not any(pointer % 16 for pointer in pointers) and not LAUNCH_HOOKS.calls
        here = all(tensor.get_device() == current_device() for tensor in tensors)
        if not plan.called or not usual or not here or not _recording.acquire(blocking=False):
            plan.called = True
            return self.function(*args)
        recorder = _Recorder(tensors)
        try:
            with recorder:
                outputs = self.function(*args)
        finally:
            _recording.release()
        plan.replay = recorder.replay(outputs, self.results)
        plan.recordable = plan.replay is not None
        return outputs


def getter(places: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that takes the arguments at `places`, as a tuple."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return operator.itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


class _Recorder(TorchDispatchMode):  # type: ignore[misc]  # `object` in a torch without it
    """Watches one call of a launcher: PyTorch's operators as a dispatch mode, Triton's launches through `launch`.

    Args:
        tensors: Tensors among the launcher's arguments.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.device = current_device()
        self.inputs = {tensor.data_ptr(): number for number, tensor in enumerate(tensors)}
        self.input_storages = {storage_address(tensor) for tensor in tensors}
        self.buffers: list[torch.Tensor] = []  # held, so that no address is used twice
        self.launched: list[tuple[Any, tuple[int, int, int], list[Any]]] = []
        self.starts = 0
        self.reason: str | None = None

    def __enter__(self) -> _Recorder:
        global _recorder
        _recorder = self
        LAUNCH_HOOKS.add(self._count)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        LAUNCH_HOOKS.remove(self._count)
        global _recorder
        _recorder = None

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
                if storage_address(view) in self.input_storages and view.data_ptr() != args[0].data_ptr():
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

    def replay(self, outputs: Any, results: int | None) -> Callable[..., Any] | None:
        """Return the function that repeats what was seen, or None; what was seen is forgotten."""
        launched = self.launched
        buffers = [buffer for buffer in self.buffers if buffer.numel()]
        # outputs, soon with a graph behind them, must not live on here
        self.launched = []
        self.buffers = []
        if self.reason is not None or self.starts != len(launched):
            return None
        source = PlanSource(self.inputs, buffers)
        try:
            returned = source.outputs(outputs, results)
            starts = [source.start(*kernel) for kernel in launched]
        except Unplannable:
            return None
        names = {"device": current_device, "stream_of": current_stream, "empty": empty_on_current_device}
        return source.function(self.device, starts, returned, {**names, "hooks": LAUNCH_HOOKS})


def _is_view(func: Any) -> bool:
    """Return whether an operator returns views and writes nothing."""
    schema = func._schema
    written = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return not written and all(r.alias_info is not None for r in schema.returns)
