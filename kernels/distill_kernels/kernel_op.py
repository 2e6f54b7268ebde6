"""Registration of a kernel as a custom op, with a plain launch and an autograd function for eager calls.

A `torch.library.custom_op` is what `torch.compile`, fake tensors and dispatch modes need, and costs 10 to 13
microseconds of host time a call, more than many layers run for. `KernelOp` registers it, and sends an eager call on
plain tensors straight to the launcher, or through an autograd function where a gradient is required. All three run
the same launcher, `setup_context` and `backward`; eager calls replay launch plans once there are any.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from distill_kernels.launch import runs_on_triton
from distill_kernels.launch_plans import LaunchPlan, PlannedFunction, getter, outside_of_plans, recorder_here
from distill_kernels.operands import PLAIN, check_tensor, differentiable_once, refuse_double_backward
from distill_kernels.torch_internals import internal

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class KernelOp:
    """A kernel launcher registered as `distill::<name>`, with the dispatcher skipped where nothing needs it.

    Calls are positional. Double backward is not supported and raises, `create_graph=True` included. From the third
    call on with arguments of one description (shapes, strides, dtypes, devices and plain values) an eager call on a
    GPU replays a launch plan, and so does its backward, where they can have one; nothing is checked again.

    Args:
        name: The op's name; it appears as `torch.ops.distill.<name>`.
        launch: The launcher, annotated as `torch.library.custom_op` requires; no output may alias an input or be a
            view. What it does may depend on the description of its arguments alone, never on a tensor's contents.
        fake: The same signature; returns empty outputs of the right shapes, dtypes and strides.
        setup_context: `(ctx, inputs, output)`, as `torch.library.register_autograd` takes it. It saves inputs and
            outputs only, and sets attributes by the description of the inputs: it is run once for each.
        backward: `(ctx, *grads)`; None for an op that no gradient passes through.
        mutates: Names of the arguments that the launcher writes to; such an op has no backward.
        check: The launcher's signature; raises ValueError for arguments that do not fit, by their description.
        results: Number of outputs that a call returns, one as a tensor; the others are for the backward and get no
            gradient. None for all.
    """

    def __init__(
        self,
        name: str,
        launch: Callable[..., Any],
        fake: Callable[..., Any],
        *,
        setup_context: Callable[..., None] | None = None,
        backward: Callable[..., Any] | None = None,
        mutates: tuple[str, ...] = (),
        check: Callable[..., object] | None = None,
        results: int | None = None,
    ) -> None:
        self.check = check or (lambda *args: None)
        self.results = results
        self.setup_context: Any = setup_context
        self.backward: Any = backward
        self.planned = PlannedFunction(launch, results)
        self._apply: Callable[..., Any] | None = None
        definition = torch.library.custom_op(f"distill::{name}", launch, mutates_args=mutates)
        definition.register_fake(fake)
        if backward is not None:
            traced = differentiable_once(lambda ctx, *upstream: backward(ctx, *upstream[:results]))
            definition.register_autograd(traced, setup_context=setup_context)
            function: Any = _eager_function(name, self)
            parent: Any = super(torch.autograd.Function, function)
            self._apply = parent.apply  # past its look for function transforms
        self.traced = getattr(torch.ops.distill, name).default

    def __call__(self, *args: Any) -> Any:
        """Call the op on plain tensors; go through the dispatcher for subclasses, dispatch modes and traces."""
        if not torch.compiler.is_compiling():
            found = self.planned.find(args) or self._first_call(args)
            if found is not None:
                plan, tensors = found
                if plan.needs_gradient and torch.is_grad_enabled():
                    if self._apply is not None:
                        return self._apply((plan, args), *tensors)
                    self.check(*args)  # which refuses them, if gradients were not recorded when it saw them first
                return self._returned(self.planned.run(plan, tensors, args))
            if recorder_here() is not None:
                return self._returned(self.planned.function(*args))  # part of another plan
        self.check(*args)
        return self._returned(self.traced(*args))

    def all_outputs(self, *args: Any) -> Any:
        """Return all outputs of an eager call on plain tensors, without a graph."""
        found = self.planned.find(args) or self._first_call(args)
        return self.planned.run(*found, args) if found is not None else self.planned.function(*args)

    def _first_call(self, args: tuple[Any, ...]) -> tuple[LaunchPlan, tuple[torch.Tensor, ...]] | None:
        """Check arguments that were not seen before; return their plan, or None if the dispatcher is needed."""
        if outside_of_plans():
            return None
        self.check(*args)
        return self.planned.add(args)

    def _returned(self, outputs: Any) -> Any:
        if self.results is None:
            return outputs
        return outputs[0] if self.results == 1 else outputs[: self.results]


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


def _eager_function(name: str, op: KernelOp) -> type[torch.autograd.Function]:
    """Return the autograd function of an op: of a plan with all arguments, and of the tensors among these."""

    # few calls of Python: the backward's run on a thread whose caches the engine has filled with other things
    def forward(ctx: Any, call: tuple[LaunchPlan, tuple[Any, ...]], *tensors: torch.Tensor) -> Any:
        plan, args = call
        outputs = NotImplemented if plan.replay is None else plan.replay(*tensors)
        if outputs is NotImplemented:
            outputs = op.planned.run(plan, tensors, args)
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
    function: Any = type(f"Eager_{name}", (torch.autograd.Function,), methods)
    backward_class = internal(function, "_backward_cls", None, "each backward looks for its function")
    if backward_class is not None:
        backward_class.apply = backward  # autograd's own would look for it at each call
    return function


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def can_skip_dispatcher(*args: Any) -> bool:
    """Return whether an eager call on these arguments may skip the dispatcher."""
    if torch.compiler.is_compiling() or outside_of_plans():
        return False
    return all(type(arg) in PLAIN or not isinstance(arg, torch.Tensor) for arg in args)


class _ForbidDoubleBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()  # the same memory and version; what views it could not be written to in place

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
        return upstream


def forbid_double_backward(output: torch.Tensor) -> torch.Tensor:
    return _ForbidDoubleBackward.apply(output) if output.requires_grad else output


def check_tensors(**tensors: torch.Tensor | None) -> None:
    """Check each tensor with `check_tensor`, and that all are on one device; None is skipped."""
    device = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        check_tensor(name, tensor)
        device = device or tensor.device
        if tensor.device != device:
            raise ValueError(f"{name}: expected on {device} as {next(iter(tensors))}, got {tensor.device}")


def check_no_gradients(**tensors: torch.Tensor | None) -> None:
    """Check that no tensor requires a gradient, for an inference-only op; None is skipped.

    Raises:
        ValueError: Where gradients are recorded and a tensor requires one.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: expected no gradient to be asked for, since this is for inference only, got "
                "requires_grad=True; call it under torch.no_grad()"
            )


def check_floats(**tensors: torch.Tensor | None) -> None:
    """Check that operands have dtypes that the kernels compute in; None is skipped.

    Raises:
        ValueError: For what `check_tensors` refuses, and dtypes that are not computed in: anything but fp32, bf16
            and fp16, and fp64 outside of the kernels.
    """
    check_tensors(**tensors)
    for name, tensor in tensors.items():
        if tensor is None or tensor.dtype in _DTYPES:
            continue
        if tensor.dtype != torch.float64 or runs_on_triton(tensor):
            raise ValueError(f"{name}: expected dtype float32, bfloat16 or float16, got {tensor.dtype}")
