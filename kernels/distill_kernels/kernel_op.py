"""Registration of a kernel as a custom op, with a plain launch and an autograd function for eager calls.

A `torch.library.custom_op` is what `torch.compile`, fake tensors and dispatch modes need, and costs 10 to 13
microseconds of host time a call, more than many layers run for. `KernelOp` registers it, and sends an eager call on
plain tensors straight to the launcher, or through an autograd function where a gradient is required. All three run
the same launcher, `setup_context` and `backward`.

On GPUs eager calls go through launch plans (launch_plans.py) from the third of a kind on, which a module of its own
adds to an op when it is first called there: `DISTILL_LAUNCH_PLANS=0` in the environment leaves it out.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from distill_kernels.launch import HAS_TRITON, runs_on_triton
from distill_kernels.operands import PLAIN, check_tensor, differentiable_once
from distill_kernels.torch_internals import in_mode_or_transform

_log = logging.getLogger(__name__)
_plans_allowed = HAS_TRITON and os.environ.get("DISTILL_LAUNCH_PLANS") != "0"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def plans_of(launch: Callable[..., Any], op: KernelOp | None = None) -> Any:
    """Return launch plans of a launcher, or of an op; None where none are used (yet)."""
    if not (_plans_allowed and has_gpu()):
        return None
    module = plan_module()
    if module is None:
        return None
    return module.PlannedFunction(launch) if op is None else module.PlannedOp(op)


@functools.cache
def plan_module() -> Any:
    """Return launch_plans.py, which needs private names of torch and Triton; None, and a line of the log, without."""
    try:
        return importlib.import_module("distill_kernels.launch_plans")
    except (ImportError, AttributeError) as missing:
        _log.warning("torch %s: %s; kernels are launched without plans, slowly", torch.__version__, missing)
        return None


def has_gpu() -> bool:
    """Return whether this process has used a GPU."""
    return torch.cuda.is_initialized()


class KernelOp:
    """A kernel launcher registered as `distill::<name>`, with the dispatcher skipped where nothing needs it.

    Calls are positional. A double backward raises, `create_graph=True` included, unless `second_order`. On a GPU, from
    the third call on with arguments of one description (shapes, strides, dtypes, devices and plain values), an eager
    call replays a launch plan, and so does its backward, where they can have one; nothing is checked again.

    Args:
        name: The op's name; it appears as `torch.ops.distill.<name>`.
        launch: The launcher, annotated as `torch.library.custom_op` requires; no output may alias an input or be a
            view. What it does may depend on the description of its arguments alone, never on a tensor's contents.
        fake: The same signature; returns empty outputs of the right shapes, dtypes and strides.
        setup_context: `(ctx, inputs, output)`, as `torch.library.register_autograd` takes it. It saves inputs and
            outputs only, and sets attributes by the description of the inputs: plans run it once for each.
        backward: `(ctx, *grads)`; None for an op that no gradient passes through.
        mutates: Names of the arguments that the launcher writes to; such an op has no backward.
        check: The launcher's signature; raises ValueError for arguments that do not fit, by their description.
        results: Number of outputs that a call returns, one as a tensor; the others are for the backward and get no
            gradient. None for all.
        planned: False for a launcher that no plan can repeat, whatever its arguments (it calls PyTorch's operators
            between its kernels, or hands them memory of its own). It would be recorded in vain for each new
            description; its calls go to the launcher at once, and are checked each time.
        second_order: True where `backward` consists of PyTorch's operators, so that a gradient of its gradient exists.
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
        planned: bool = True,
        second_order: bool = False,
    ) -> None:
        assert not (planned and second_order), "a plan's backward has no graph"
        self.name = name
        self.launch = launch
        self.check = check or (lambda *args: None)
        self.results = results
        self.planned = planned
        self.setup_context: Any = setup_context
        self.backward: Any = backward
        self.plans: Any = None
        definition = torch.library.custom_op(f"distill::{name}", launch, mutates_args=mutates)
        definition.register_fake(fake)
        self._eager: Any = None
        if backward is not None:
            guarded = backward if second_order else differentiable_once(backward)
            definition.register_autograd(
                lambda ctx, *upstream: guarded(ctx, *upstream[:results]), setup_context=setup_context
            )
            self._eager = _eager_function(self, guarded)
        self.traced = getattr(torch.ops.distill, name).default

    def __call__(self, *args: Any) -> Any:
        """Call the op on plain tensors; go through the dispatcher for subclasses, dispatch modes and traces."""
        if self.planned and not torch.compiler.is_compiling():
            if self.plans is None:
                self.plans = plans_of(self.launch, self)
            if self.plans is not None:
                outputs = self.plans(*args)
                if outputs is not NotImplemented:
                    return outputs
        self.check(*args)
        if not can_skip_dispatcher(*args):
            return self.returned(self.traced(*args))
        if self._eager is not None and torch.is_grad_enabled() and any(map(_requires_grad, args)):
            return self._eager.apply(*args)
        return self.returned(self.launch(*args))

    def all_outputs(self, *args: Any) -> Any:
        """Return all outputs of an eager call on plain tensors, without a graph."""
        if self.planned and self.plans is None:
            self.plans = plans_of(self.launch, self)
        return self.launch(*args) if self.plans is None else self.plans.all_outputs(*args)

    def returned(self, outputs: Any) -> Any:
        """Return of the launcher's outputs those that a call returns."""
        if self.results is None:
            return outputs
        return outputs[0] if self.results == 1 else outputs[: self.results]


class ReplayedLauncher:
    """A launcher without an op or a gradient, replayed like one where launch plans are used.

    Args:
        launch: The launcher; what it does may depend on the description of its arguments alone.
    """

    def __init__(self, launch: Callable[..., Any]) -> None:
        self.launch = launch
        self.plans: Any = None

    def __call__(self, *args: Any) -> Any:
        if self.plans is None:
            self.plans = plans_of(self.launch)
        return self.launch(*args) if self.plans is None else self.plans(*args)


def _requires_grad(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.requires_grad


def _eager_function(op: KernelOp, backward: Callable[..., Any]) -> type[torch.autograd.Function]:
    """Return the autograd function of an op's eager calls, over its launcher, `setup_context` and `backward`."""

    def forward(ctx: Any, *args: Any) -> Any:
        outputs = op.launch(*args)
        op.setup_context(ctx, args, outputs)
        return op.returned(outputs)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(f"Eager_{op.name}", (torch.autograd.Function,), methods)


def can_skip_dispatcher(*args: Any) -> bool:
    """Return whether an eager call on these arguments may skip the dispatcher."""
    if torch.compiler.is_compiling() or in_mode_or_transform():
        return False
    return all(type(arg) in PLAIN or not isinstance(arg, torch.Tensor) for arg in args)


class _ForbidDoubleBackward(torch.autograd.Function):
    """A node behind a reference's output: there the graph is PyTorch's own, whose gradients could be differentiated."""

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
