"""Launch plans: what a kernel's launcher did for arguments of one description, replayed without its Python.

Imported when an op is first called on a GPU, unless DISTILL_LAUNCH_PLANS=0 (kernel_op.py): it needs private names of
torch and Triton, and where a release lacks one, ops are launched plainly.

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

import copy
import inspect
import operator
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from distill_kernels.launch import MAX_CACHED_LAUNCHES, watch_launches
from distill_kernels.operands import PLAIN, refuse_double_backward
from distill_kernels.plan_source import PlanSource, Unplannable, storage_address
from distill_kernels.torch_internals import (
    current_device,
    current_stream,
    empty_on_current_device,
    in_mode_or_transform,
    internal,
)

if TYPE_CHECKING:
    from distill_kernels.kernel_op import KernelOp

# called at each launch, for Triton's profiler
LAUNCH_HOOKS: Any = knobs.runtime.launch_enter_hook

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


def recorder_here() -> _Recorder | None:
    """Return the recorder that watches this thread, if any."""
    recorder = _recorder
    return recorder if recorder is not None and recorder.thread == threading.get_ident() else None


def on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in a GPU's memory."""
    return tensor.is_cuda


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
        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self.fits: Callable[..., bool] = guards.check
        self.needs_gradient = any(tensor.requires_grad for tensor in tensors)
        self.replay: Callable[..., Any] | None = None
        self.recordable = all(map(on_gpu, tensors))
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
        if not places or in_mode_or_transform() or any(args[place].layout != torch.strided for place in places):
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


class PlannedOp:
    """The plans of an op's eager calls and of their backwards."""

    def __init__(self, op: KernelOp) -> None:
        self.op = op
        self.planned = PlannedFunction(op.launch, op.results)
        self._apply: Callable[..., Any] | None = None
        if op.backward is not None:
            function: Any = _planned_autograd_function(op, self.planned)
            parent: Any = super(torch.autograd.Function, function)
            self._apply = parent.apply  # past its look for function transforms

    def __call__(self, *args: Any) -> Any:
        """Return what the op returns; NotImplemented where the dispatcher is needed, or the arguments have no plan."""
        op = self.op
        found = self.planned.find(args) or self._first_call(args)
        if found is not None:
            plan, tensors = found
            if plan.needs_gradient and torch.is_grad_enabled():
                if self._apply is not None:
                    return self._apply((plan, args), *tensors)
                op.check(*args)  # which refuses them, if gradients were not recorded when it saw them first
            return op.returned(self.planned.run(plan, tensors, args))
        if recorder_here() is not None:
            return op.returned(op.launch(*args))  # part of another plan
        return NotImplemented

    def all_outputs(self, *args: Any) -> Any:
        """Return all outputs of a call on plain tensors, without a graph."""
        found = self.planned.find(args) or self._first_call(args)
        return self.planned.run(*found, args) if found is not None else self.op.launch(*args)

    def _first_call(self, args: tuple[Any, ...]) -> tuple[LaunchPlan, tuple[torch.Tensor, ...]] | None:
        """Check arguments that were not seen before; return their plan, or None if they can have none."""
        if in_mode_or_transform():
            return None
        self.op.check(*args)
        return self.planned.add(args)


class RecordedBackward:
    """The backward of an op's calls with inputs of one description; stands for autograd's context in it.

    Args:
        op: Op whose backward it is.
        args: Arguments of one such call.
        outputs: All outputs of that call.
        needed: For each tensor among the arguments, True if it requires a gradient.
    """

    saved_tensors: tuple[torch.Tensor | None, ...] = ()

    def __init__(self, op: KernelOp, args: tuple[Any, ...], outputs: Any, needed: tuple[bool, ...]) -> None:
        self._op = op
        self._places = [place for place, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        self.planned = PlannedFunction(self._compute)
        needs = dict(zip(self._places, needed, strict=True))
        self.needs_input_grad = tuple(needs.get(place, False) for place in range(len(args)))
        self.materialize_grads = True
        op.setup_context(self, args, outputs)
        for attribute, value in vars(self).items():
            if isinstance(value, torch.Tensor):  # of this call, and read in the backward of all others
                raise TypeError(f"setup_context: expected tensors in save_for_backward, got one as ctx.{attribute}")
        every = [*[args[place] for place in self._places], *_as_tuple(outputs)]
        at = {id(tensor): place for place, tensor in reversed(list(enumerate(every)))}
        self.pick_saved = getter([at[id(tensor)] for tensor in self.saved_tensors if tensor is not None])
        self._kept = [tensor is not None for tensor in self.saved_tensors]
        self.saved_tensors = ()
        self.latest: LaunchPlan | None = None  # one with a replay, whose upstream gradients hold no None

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value

    def mark_non_differentiable(self, *outputs: torch.Tensor) -> None:
        """Outputs that are not among the results have no gradient."""

    def __call__(self, given: tuple[Any, ...]) -> Any:
        """Return a None and a gradient for each tensor among the op's arguments; `given`: saved and upstream ones."""
        found = self.planned.find(given) or self.planned.add(given)
        if found is None:
            return self._compute(*given)
        gradients = self.planned.run(*found, given)
        self.latest = found[0] if found[0].replay is not None and len(found[1]) == len(given) else None
        return gradients

    def _compute(self, *given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        context = copy.copy(self)
        left = iter(given)
        context.saved_tensors = tuple([next(left) if kept else None for kept in self._kept])
        gradients = _as_tuple(self._op.backward(context, *left))
        return None, *[gradients[place] for place in self._places]


def _planned_autograd_function(op: KernelOp, planned: PlannedFunction) -> type[torch.autograd.Function]:
    """Return an op's autograd function: of a plan with all arguments, and of the tensors among these."""

    # few calls of Python: the backward's run on a thread whose caches the engine has filled with other things
    def forward(ctx: Any, call: tuple[LaunchPlan, tuple[Any, ...]], *tensors: torch.Tensor) -> Any:
        plan, args = call
        outputs = NotImplemented if plan.replay is None else plan.replay(*tensors)
        if outputs is NotImplemented:
            outputs = planned.run(plan, tensors, args)
        every = outputs if isinstance(outputs, tuple) else (outputs,)
        gradient = plan.gradient
        if gradient is None:
            gradient = plan.gradient = RecordedBackward(op, args, outputs, ctx.needs_input_grad[1:])
        ctx.save_for_backward(*gradient.pick_saved(tensors + every))
        ctx.materialize_grads = gradient.materialize_grads
        ctx.gradient = gradient
        return outputs if op.results is None else every[0] if op.results == 1 else every[: op.results]

    def backward(ctx: Any, *upstream: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            refuse_double_backward()
        gradient = ctx.gradient
        given = ctx.saved_tensors + upstream
        plan = gradient.latest
        if plan is not None and plan.fits(*given):
            gradients = plan.replay(*given)
            if gradients is not NotImplemented:
                return gradients
        return gradient(given)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(f"Planned_{op.name}", (torch.autograd.Function,), methods)
    backward_class = internal(function, "_backward_cls", None, "each backward looks for its function")
    if backward_class is not None:
        backward_class.apply = backward  # autograd's own would look for it at each call
    return function


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


class _Recorder(TorchDispatchMode):
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
        watch_launches(self.add)
        LAUNCH_HOOKS.add(self._count)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        LAUNCH_HOOKS.remove(self._count)
        watch_launches(None)
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
        """Note a launch, unless it is another thread's."""
        if threading.get_ident() != self.thread:
            return
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
