"""SwiGLU and GeGLU: the gated half of a transformer's MLP, gate and up projection separate or packed in one matrix.

    y = g(gate) * up,   dgate = dy * up * g'(gate),   dup = dy * g(gate)

with g = SiLU or GELU (Shazeer, 2020, arXiv:2002.05202). Nothing but gate and up is kept for backward, which computes
g again. For N rows of I columns of b bytes, forward moves 3 N I b, backward 5 N I b. Arithmetic is fp32 throughout.
"""

from __future__ import annotations

from typing import Literal

import torch

from distill_kernels.kernel_op import KernelOp, can_skip_dispatcher, check_floats, forbid_double_backward
from distill_kernels.launch import cdiv, launch, runs_on_triton, tl, triton
from distill_kernels.layers.activations import activate, activate_with_derivative
from distill_kernels.layers.row_layout import as_rows
from distill_kernels.matmul.shared_input import gradient_slots
from distill_kernels.operands import differentiable_once

Activation = Literal["silu", "gelu", "gelu_tanh"]
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
BLOCK = 1024
WARPS = 4


def reference_glu(gate: torch.Tensor, up: torch.Tensor | None, activation: str) -> torch.Tensor:
    """Return `activation(gate) * up` in plain PyTorch: the specification."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


@triton.jit(do_not_specialize=["blocks_per_row"])
def _forward_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    gate_stride,
    up_stride,
    up_offset,
    n_cols,
    blocks_per_row,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK columns of one row; up lies `up_offset` columns behind its pointer, the gate's where packed."""
    # Contiguous inputs are one row of all elements, hence int64 for the columns too.
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    cols = (tl.program_id(0) % blocks_per_row).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = cols < n_cols
    gate = tl.load(gate_ptr + row * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + up_offset + cols, mask=mask, other=0.0).to(tl.float32)
    y = activate(gate, ACTIVATION) * up
    tl.store(y_ptr + row * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["blocks_per_row"])
def _backward_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    dy_stride,
    gate_stride,
    up_stride,
    up_offset,
    out_stride,
    out_offset,
    n_cols,
    blocks_per_row,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    cols = (tl.program_id(0) % blocks_per_row).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = cols < n_cols
    dy = tl.load(dy_ptr + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + up_offset + cols, mask=mask, other=0.0).to(tl.float32)
    # Computed again: kept, g would be written by the forward and read here.
    value, derivative = activate_with_derivative(gate, ACTIVATION)
    tl.store(dgate_ptr + row * out_stride + cols, (dy * up * derivative).to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + row * out_stride + out_offset + cols, (dy * value).to(dup_ptr.dtype.element_ty), mask=mask)


def _new_output(gate, up, activation) -> torch.Tensor:
    if up is None:
        return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


def _launch_forward(gate: torch.Tensor, up: torch.Tensor | None, activation: str) -> torch.Tensor:
    y = _new_output(gate, up, activation)
    columns = y.shape[-1]
    gate, gate_stride = as_rows(gate)
    if up is None:
        source = gate
        up_stride = gate_stride
        up_offset = columns
    else:
        source, up_stride = as_rows(up)
        up_offset = 0
    elements = y.numel()
    if elements:
        if gate_stride == up_stride == columns:
            columns = elements  # contiguous: one long row
        blocks = cdiv(columns, BLOCK)
        launch(
            _forward_kernel,
            (blocks * (elements // columns),),
            gate,
            source,
            y,
            gate_stride,
            up_stride,
            up_offset,
            columns,
            blocks,
            ACTIVATION=activation,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return y


def _new_gradients(dy, gate, up, activation) -> tuple[torch.Tensor, torch.Tensor]:
    return gate.new_empty(gate.shape), dy.new_empty(0) if up is None else up.new_empty(up.shape)


def _launch_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    # returns dgate and dup; packed, both in the first and the second empty
    dgate, dup = _new_gradients(dy, gate, up, activation)
    _fill_gradients(dy, gate, up, dgate, None if up is None else dup, activation)
    return dgate, dup


def _fill_gradients(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    dgate: torch.Tensor,
    dup: torch.Tensor | None,
    activation: str,
) -> None:
    """Fill dgate and dup, whose rows have the same stride."""
    elements = dy.numel()
    columns = dy.shape[-1]
    dy, dy_stride = as_rows(dy)
    gate, gate_stride = as_rows(gate)
    source, up_stride = (gate, gate_stride) if up is None else as_rows(up)
    up_offset = columns if up is None else 0
    _, out_stride = as_rows(dgate)
    if elements:
        if dy_stride == gate_stride == up_stride == out_stride == columns:
            columns = elements
        blocks = cdiv(columns, BLOCK)
        launch(
            _backward_kernel,
            (blocks * (elements // columns),),
            dy,
            gate,
            source,
            dgate,
            dgate if dup is None else dup,
            dy_stride,
            gate_stride,
            up_stride,
            up_offset,
            out_stride,
            up_offset,
            columns,
            blocks,
            ACTIVATION=activation,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


_backward_op = KernelOp("glu_backward", _launch_backward, _new_gradients)
_fill_op = KernelOp("glu_backward_into", _fill_gradients, lambda *_: None, mutates=("dgate", "dup"))


def _setup_context(ctx, inputs, output) -> None:
    gate, up, activation = inputs
    ctx.save_for_backward(gate, up)
    ctx.activation = activation


def _backward(ctx, dy):
    gate, up = ctx.saved_tensors
    dgate, dup = _backward_op(dy, gate, up, ctx.activation)
    return dgate, None if up is None else dup, None


def check_activation(activation: str) -> None:
    """Check the name of an activation; ValueError lists those there are."""
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(_ACTIVATIONS)}, got {activation!r}")


def _check(gate: torch.Tensor, up: torch.Tensor | None, activation: str) -> None:
    check_floats(gate=gate, up=up)
    check_activation(activation)
    if gate.dim() == 0 or (up is None and gate.shape[-1] % 2):
        raise ValueError(f"gate: packed gate and up need an even last dimension, got shape {tuple(gate.shape)}")
    if up is not None and up.shape != gate.shape:
        raise ValueError(f"up: expected gate's shape {tuple(gate.shape)}, got {tuple(up.shape)}")


_forward_op = KernelOp(
    "glu_forward", _launch_forward, _new_output, setup_context=_setup_context, backward=_backward, check=_check
)


class _GluOfProjections(torch.autograd.Function):
    """The op for outputs of one `shared_linear`, whose gradients are written where its backward reads them.

    Not the op's own function, whose backward returns new tensors.
    """

    @staticmethod
    def forward(ctx, gate, up, activation, places):
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        ctx.places = places
        return _forward_op.all_outputs(gate, up, activation)

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        dgate, dup = (part.view(gate.shape) for part in ctx.places.make(gate))
        _fill_op(dy, gate, up, dgate, dup, ctx.activation)
        return dgate, dup, None, None


def glu(gate: torch.Tensor, up: torch.Tensor | None = None, activation: Activation = "silu") -> torch.Tensor:
    """Compute `activation(gate) * up`.

    Args:
        gate: [..., I], fp32, bf16 or fp16; or [..., 2 I] holding gate, then up, in each row.
        up: [..., I], or None where packed with the gate. Rows of either may be strided.
        activation: "silu", "gelu" (exact) or "gelu_tanh" (transformers' `gelu_pytorch_tanh`).

    Returns:
        [..., I] in the promoted dtype.

    Raises:
        ValueError: On shapes that differ, an odd packed dimension, an unknown activation or an unsupported dtype.
    """
    if not runs_on_triton(gate):
        _check(gate, up, activation)
        return forbid_double_backward(reference_glu(gate, up, activation))
    if up is not None and torch.is_grad_enabled() and can_skip_dispatcher(gate, up):
        places = gradient_slots(gate, up)
        if places is not None:
            projected: torch.Tensor = _GluOfProjections.apply(gate, up, activation, places)
            return projected
    return _forward_op(gate, up, activation)


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `silu(gate) * up`: `glu` with activation "silu"."""
    return glu(gate, up, "silu")


def geglu(
    gate: torch.Tensor, up: torch.Tensor | None = None, approximate: Literal["none", "tanh"] = "none"
) -> torch.Tensor:
    """Compute `gelu(gate) * up`: `glu` with "gelu", or with "gelu_tanh" for `approximate="tanh"`.

    Raises:
        ValueError: As `glu`; also on an unknown `approximate`.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate: expected 'none' or 'tanh', got {approximate!r}")
    return glu(gate, up, "gelu_tanh" if approximate == "tanh" else "gelu")
