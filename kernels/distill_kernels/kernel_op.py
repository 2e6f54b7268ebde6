"""Registration of a kernel as a custom op, with a plain launch and an autograd function for eager calls.

A `torch.library.custom_op` is what `torch.compile`, fake tensors and dispatch modes need, and costs 10 to 13
microseconds of host time a call, more than many layers run for. `KernelOp` registers it, and sends an eager call on
plain tensors straight to the launcher, or through an autograd function where a gradient is required. All three run
the same launcher, `setup_context` and `backward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from distill_kernels.launch import runs_on_triton
from distill_kernels.operands import check_tensor, differentiable_once, non_view_output

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class KernelOp:
    """A kernel launcher registered as `distill::<name>`, with the dispatcher skipped where nothing needs it.

    Calls are positional. Double backward is not supported and raises, `create_graph=True` included.

    Args:
        name: The op's name; it appears as `torch.ops.distill.<name>`.
        launch: The launcher, annotated as `torch.library.custom_op` requires; no output may alias an input.
        fake: The same signature; returns empty outputs of the right shapes, dtypes and strides.
        setup_context: `(ctx, inputs, output)`, as `torch.library.register_autograd` takes it.
        backward: `(ctx, *grads)`; None for an op that no gradient passes through.
        mutates: Names of the arguments that the launcher writes to; such an op has no backward.
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
    ) -> None:
        self.launch = launch
        self.function: type[torch.autograd.Function] | None = None
        definition = torch.library.custom_op(f"distill::{name}", launch, mutates_args=mutates)
        definition.register_fake(fake)
        if backward is not None:
            assert setup_context is not None
            definition.register_autograd(differentiable_once(backward), setup_context=setup_context)
            self.function = _eager_function(name, launch, setup_context, backward)
        self.traced = getattr(torch.ops.distill, name).default

    def __call__(self, *args: Any) -> Any:
        """CachedLauncher on plain tensors; go through the dispatcher for subclasses, dispatch modes and traces."""
        if not can_skip_dispatcher(*args):
            return self.traced(*args)
        if self.function is not None and torch.is_grad_enabled():
            for arg in args:
                if isinstance(arg, torch.Tensor) and arg.requires_grad:
                    return self.function.apply(*args)
        return self.launch(*args)


def can_skip_dispatcher(*args: Any) -> bool:
    """Return whether an eager call on these arguments may skip the dispatcher."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return False
    return all(type(arg) in _PLAIN or not isinstance(arg, torch.Tensor) for arg in args)


def _eager_function(
    name: str, launch: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> type[torch.autograd.Function]:
    def forward(ctx: Any, *args: Any) -> Any:
        output = launch(*args)
        output = non_view_output(output) if isinstance(output, torch.Tensor) else tuple(map(non_view_output, output))
        setup_context(ctx, args, output)
        return output

    once = differentiable_once(once_differentiable(backward))
    methods = {"forward": staticmethod(forward), "backward": staticmethod(once)}
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
