"""Registration of a kernel as a custom op, with a plain launch and an autograd function for eager calls.

A `torch.library.custom_op` is what `torch.compile`, fake tensors and dispatch modes need, and costs 10 to 13
microseconds of host time a call, more than many layers run for. `KernelOp` registers it, and sends an eager call on
plain tensors straight to the launcher, or through an autograd function where a gradient is required. All three run
the same launcher, `setup_context` and `backward`; eager calls replay a launcher's `LaunchPlan` once there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from distill_kernels.launch import MAX_CACHED_LAUNCHES, runs_on_triton
from distill_kernels.launch_plans import LaunchPlan, current_device, hooked, record, recorder_here
from distill_kernels.operands import check_tensor, differentiable_once, non_view_output

_functorch_level = torch._C._functorch.maybe_current_level
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class KernelOp:
    """A kernel launcher registered as `distill::<name>`, with the dispatcher skipped where nothing needs it.

    Calls are positional. Double backward is not supported and raises, `create_graph=True` included. From the third
    call on with arguments of one description (shapes, strides, dtypes, devices and plain values) an eager call on a
    GPU replays a `LaunchPlan`, where the launcher can have one, and checks nothing again.

    Args:
        name: The op's name; it appears as `torch.ops.distill.<name>`.
        launch: The launcher, annotated as `torch.library.custom_op` requires; no output may alias an input. What it
            does may depend on the description of its arguments alone, never on a tensor's contents.
        fake: The same signature; returns empty outputs of the right shapes, dtypes and strides.
        setup_context: `(ctx, inputs, output)`, as `torch.library.register_autograd` takes it.
        backward: `(ctx, *grads)`; None for an op that no gradient passes through.
        mutates: Names of the arguments that the launcher writes to; such an op has no backward.
        check: The launcher's signature; raises ValueError for arguments that do not fit, by their description.
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
    ) -> None:
        self.launch = launch
        self.check = _accept if check is None else check
        self.function: type[torch.autograd.Function] | None = None
        self._plans: dict[tuple[Any, ...], LaunchPlan | int] = {}  # or how often seen; NO_PLAN
        definition = torch.library.custom_op(f"distill::{name}", launch, mutates_args=mutates)
        definition.register_fake(fake)
        if backward is not None:
            assert setup_context is not None
            definition.register_autograd(differentiable_once(backward), setup_context=setup_context)
            self.function = _eager_function(name, self._launch, setup_context, backward)
        self.traced = getattr(torch.ops.distill, name).default

    def __call__(self, *args: Any) -> Any:
        """Call the op on plain tensors; go through the dispatcher for subclasses, dispatch modes and traces."""
        if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or _functorch_level() is not None:
            if not torch.compiler.is_compiling() and recorder_here() is not None:
                return self.launch(*args)  # part of another op's plan
            self.check(*args)
            return self.traced(*args)
        # the description of the arguments: what a launcher's decisions and Triton's look-up depend on
        kinds = tuple(map(type, args))
        description: list[Any] = [kinds]
        pointers = []
        address_bits = 0
        needs_gradient = False
        try:
            for kind, arg in zip(kinds, args, strict=True):
                if kind is torch.Tensor or kind is torch.nn.Parameter:
                    pointer = arg.data_ptr()
                    pointers.append(pointer)
                    address_bits |= pointer
                    description += (arg.shape, arg.stride(), arg.dtype, arg.get_device())
                    needs_gradient = needs_gradient or arg.requires_grad
                elif isinstance(arg, torch.Tensor):
                    return self._outside(args)
                else:
                    description.append(arg)
            key = tuple(description)
            plan = self._plans.get(key, 0)
        except (RuntimeError, TypeError):  # no storage (sparse), or an argument that cannot be hashed
            return self._outside(args)
        if isinstance(plan, LaunchPlan) and not address_bits & 15 and plan.fits(pointers):
            if needs_gradient and self.function is not None and torch.is_grad_enabled():
                return self.function.apply(*args, (plan, pointers))
            return plan(pointers)
        if plan == 0:
            self.check(*args)
        if needs_gradient and self.function is not None and torch.is_grad_enabled():
            return self.function.apply(*args, (None, key))
        return self._launch(key, args)

    def _outside(self, args: tuple[Any, ...]) -> Any:
        """Call the op for arguments that have no description, such as tensor subclasses."""
        self.check(*args)
        return self.traced(*args)

    def _launch(self, key: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        """Call the launcher, and make a plan at the second call with this key: the first compiles and tunes."""
        seen = self._plans.get(key, 0)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if seen == NO_PLAN or not tensors or not all(map(on_gpu, tensors)):
            return self.launch(*args)
        here = all(tensor.get_device() == current_device() for tensor in tensors)
        pointers = list(map(torch.Tensor.data_ptr, tensors))
        seen_once = seen == 1 or (isinstance(seen, LaunchPlan) and not seen.fits(pointers))
        if not seen_once or not here or hooked() or any(pointer % 16 for pointer in pointers):
            output = self.launch(*args)
            if seen == 0:
                if len(self._plans) >= MAX_CACHED_LAUNCHES:  # shapes that are new with every batch
                    self._plans.clear()
                self._plans[key] = 1
            return output
        output, plan = record(self.launch, args)
        self._plans[key] = NO_PLAN if plan is None else plan
        return output


NO_PLAN = -1


def on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in a GPU's memory."""
    return tensor.is_cuda


def _accept(*args: Any) -> None:
    return None


def has_kernel(tensor: object) -> bool:
    """Return whether the first argument of an op is a tensor that a kernel computes on; all else is the reference's.

    Where it is not, the caller checks the arguments itself.
    """
    return isinstance(tensor, torch.Tensor) and runs_on_triton(tensor)


def can_skip_dispatcher(*args: Any) -> bool:
    """Return whether an eager call on these arguments may skip the dispatcher."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return False
    return all(type(arg) in _PLAIN or not isinstance(arg, torch.Tensor) for arg in args)


def _eager_function(
    name: str, launch: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> type[torch.autograd.Function]:
    """Return the autograd function of an op, whose last argument is a plan with addresses, or None and a key."""

    def forward(ctx: Any, *args: Any) -> Any:
        plan, more = args[-1]
        args = args[:-1]
        if plan is not None:
            output = plan(more)
        else:
            output = launch(more, args)
            output = (
                non_view_output(output) if isinstance(output, torch.Tensor) else tuple(map(non_view_output, output))
            )
        setup_context(ctx, args, output)
        return output

    def backward_once(ctx: Any, *upstream: Any) -> Any:
        gradients = backward(ctx, *upstream)
        return (*gradients, None) if isinstance(gradients, tuple) else (gradients, None)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(differentiable_once(backward_once))}
    return type(f"Eager_{name}", (torch.autograd.Function,), methods)


class _ForbidDoubleBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()  # the same memory and version; what views it could not be written to in place

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
        return upstream


def forbid_double_backward(output: torch.Tensor) -> torch.Tensor:
    """Return a reference's `output` so that differentiating it twice raises, as for a kernel's output."""
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
