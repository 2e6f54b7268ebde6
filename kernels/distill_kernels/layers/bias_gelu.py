"""Bias + GELU in one pass, the middle of a GPT-style MLP.

    y = g(x + b),   dx = dy * g'(x + b),   db = sum over rows of dx

Forward moves 2 N O s bytes for N rows of O columns of s bytes, backward 3 N O s, plus the partial sums of db. The
unfused form moves 4 N O s forward: where the bytes decide, fusion is worth a factor of two, and what lies beyond that
is launches saved.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch

from distill_kernels.kernel_op import KernelOp, check_floats, forbid_double_backward
from distill_kernels.launch import DeviceFacts, cdiv, device_facts, launch, next_power_of_2, runs_on_triton, tl, triton
from distill_kernels.layers.activations import activate, activate_with_derivative
from distill_kernels.layers.column_sums import column_sums, row_groups
from distill_kernels.layers.row_layout import as_rows
from distill_kernels.operands import contiguous_rows


def reference_bias_gelu(
    x: torch.Tensor, bias: torch.Tensor, approximate: Literal["none", "tanh"] = "none"
) -> torch.Tensor:
    """Return `gelu(x + bias)` in plain PyTorch, the sum not rounded before the activation: the specification."""
    upcast = x.double() if x.dtype == torch.float64 else x.float()
    return torch.nn.functional.gelu(upcast + bias.to(upcast.dtype), approximate=approximate).to(x.dtype)


@triton.jit(do_not_specialize=["n_rows"])
def _forward_kernel(
    x_ptr,
    bias_ptr,
    y_ptr,
    x_stride,
    n_rows,
    ACTIVATION: tl.constexpr,
    N_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Compute a tile of ROWS rows and COLUMNS columns; POLICY: whether x may leave L2 first, to the output's favour."""
    column_blocks: tl.constexpr = (N_COLS + COLUMNS - 1) // COLUMNS  # not divided by at run time
    rows = (tl.program_id(0) // column_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    cols = (tl.program_id(0) % column_blocks) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    mask = (rows < n_rows)[:, None] & (cols < N_COLS)[None, :]
    at = x_ptr + rows[:, None] * x_stride + cols[None, :]
    x = tl.load(at, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
    x += tl.load(bias_ptr + cols, mask=cols < N_COLS, other=0.0).to(tl.float32)[None, :]
    y = activate(x, ACTIVATION, y_ptr.dtype.element_ty.primitive_bitwidth == 16)
    at = y_ptr + rows[:, None] * N_COLS + cols[None, :]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "rows_per_group"])
def _backward_kernel(
    dy_ptr,
    x_ptr,
    bias_ptr,
    dx_ptr,
    partial_ptr,
    dy_stride,
    x_stride,
    n_rows,
    rows_per_group,
    ACTIVATION: tl.constexpr,
    N_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NEED_DBIAS: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Compute dx of a group of rows, for COLUMNS columns, and their sum over these rows, to one row of `partial`.

    column_sums.py adds the groups' sums in a fixed order.
    """
    # That kernel may start at once; it waits for this whole grid before it reads a sum.
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
    column_blocks: tl.constexpr = (N_COLS + COLUMNS - 1) // COLUMNS
    group = tl.program_id(0) // column_blocks
    cols = (tl.program_id(0) % column_blocks) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    bias = tl.load(bias_ptr + cols, mask=cols < N_COLS, other=0.0).to(tl.float32)[None, :]
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    first = group * rows_per_group
    last = tl.minimum(first + rows_per_group, n_rows)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS).to(tl.int64)  # [ROWS]
        mask = (rows < last)[:, None] & (cols < N_COLS)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32) + bias
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        # x + bias is computed again, and the activation's derivative with it: nothing but x was kept.
        _, derivative = activate_with_derivative(x, ACTIVATION, dx_ptr.dtype.element_ty.primitive_bitwidth == 16)
        dx = dy * derivative
        if NEED_DBIAS:
            dbias += dx
        tl.store(dx_ptr + rows[:, None] * N_COLS + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DBIAS:
        partial_ptr += group.to(tl.int64) * N_COLS + cols
        tl.store(partial_ptr, tl.sum(dbias, 0), mask=cols < N_COLS)


class TileConfig(NamedTuple):
    """Rows and columns of a program's tile, its warps; backward: programs per multiprocessor and loads in flight.

    policy: cache eviction policy of the forward kernel's input.
    """

    rows: int
    columns: int
    warps: int
    programs: int = 0
    stages: int = 1
    policy: str = ""


@functools.lru_cache(maxsize=4096)
def forward_tile(n_rows: int, columns: int, element_size: int, facts: DeviceFacts) -> TileConfig:
    """Return the forward tile: 16 elements a thread, or 8 where one wave holds them all (sweep on an H200, fp16).

    An output that fits in the L2 cache stays there for its reader if the input makes way for it.
    """
    policy = "evict_first" if n_rows * columns * element_size <= facts.l2_bytes // 2 else ""
    block = min(next_power_of_2(columns), 1024)
    if n_rows * columns <= 8 * 2048 * facts.multiprocessors:
        return TileConfig(rows=1024 // block, columns=block, warps=4, policy=policy)
    if columns >= 2048 and n_rows * columns > 32 * 1024 * facts.multiprocessors:
        return TileConfig(rows=1, columns=2048, warps=4, policy=policy)
    return TileConfig(rows=2048 // block, columns=block, warps=4, policy=policy)


@functools.cache
def backward_tile(columns: int) -> TileConfig:
    """Return the backward tile, of programs that loop over rows."""
    block = min(next_power_of_2(columns), 1024)
    return TileConfig(rows=2048 // block, columns=block, warps=4, programs=4, stages=3)


def _launch_forward(x: torch.Tensor, bias: torch.Tensor, activation: str) -> torch.Tensor:
    columns = x.shape[-1]
    n_rows = x.numel() // columns
    tile = forward_tile(n_rows, columns, x.element_size(), device_facts(x.device))
    x, x_stride = as_rows(x)
    bias = contiguous_rows(bias)
    y = x.new_empty(x.shape)
    if n_rows:
        launch(
            _forward_kernel,
            (cdiv(n_rows, tile.rows) * cdiv(columns, tile.columns),),
            x,
            bias,
            y,
            x_stride,
            n_rows,
            ACTIVATION=activation,
            N_COLS=columns,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            POLICY=tile.policy,
            num_warps=tile.warps,
        )
    return y


def _new_gradients(dy, x, bias, activation, need_dbias) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), torch.empty_like(bias) if need_dbias else dy.new_empty(0)


def _launch_backward(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, activation: str, need_dbias: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    # returns dx, and dbias (empty where not needed)
    dx, dbias = _new_gradients(dy, x, bias, activation, need_dbias)
    columns = x.shape[-1]
    tile = backward_tile(columns)
    n_rows = x.numel() // columns
    dy, dy_stride = as_rows(dy)
    x, x_stride = as_rows(x)
    bias = contiguous_rows(bias)
    if not n_rows:
        return dx, dbias.zero_()
    facts = device_facts(x.device)
    dependent_launch = need_dbias and facts.dependent_launch
    column_blocks = cdiv(columns, tile.columns)
    programs = facts.multiprocessors * tile.programs
    rows_per_group, groups = row_groups(n_rows, tile.rows, cdiv(programs, column_blocks))
    partials = torch.empty((groups, columns), dtype=torch.float32, device=x.device) if need_dbias else dx
    launch(
        _backward_kernel,
        (groups * column_blocks,),
        dy,
        x,
        bias,
        dx,
        partials,
        dy_stride,
        x_stride,
        n_rows,
        rows_per_group,
        ACTIVATION=activation,
        N_COLS=columns,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        NEED_DBIAS=need_dbias,
        STAGES=tile.stages,
        DEPENDENT_LAUNCH=dependent_launch,
        num_warps=tile.warps,
    )
    if need_dbias:
        column_sums(partials, dbias, None, dependent_launch)
    return dx, dbias


_backward_op = KernelOp("bias_gelu_backward", _launch_backward, _new_gradients)


def _setup_context(ctx, inputs, output) -> None:
    x, bias, activation = inputs
    ctx.save_for_backward(x, bias)
    ctx.activation = activation


def _backward(ctx, dy):
    x, bias = ctx.saved_tensors
    dx, dbias = _backward_op(dy, x, bias, ctx.activation, ctx.needs_input_grad[1])
    return dx, dbias if ctx.needs_input_grad[1] else None, None


_ACTIVATIONS = {"none": "gelu", "tanh": "gelu_tanh"}  # by `approximate`


def _check(x: torch.Tensor, bias: torch.Tensor, activation: str) -> None:
    check_floats(x=x, bias=bias)
    if x.dim() == 0 or x.shape[-1] == 0 or bias.shape != x.shape[-1:]:
        raise ValueError(
            f"bias: expected the shape of x's last dimension, got {tuple(bias.shape)} for {tuple(x.shape)}"
        )


_forward_op = KernelOp(
    "bias_gelu_forward",
    _launch_forward,
    lambda x, bias, activation: x.new_empty(x.shape),
    setup_context=_setup_context,
    backward=_backward,
    check=_check,
)


def bias_gelu(x: torch.Tensor, bias: torch.Tensor, approximate: Literal["none", "tanh"] = "none") -> torch.Tensor:
    """Compute `gelu(x + bias)`, the sum kept in fp32.

    Args:
        x: [..., O], fp32, bf16 or fp16; rows may be strided.
        bias: Bias [O].
        approximate: "none" (exact) or "tanh", as in `torch.nn.functional.gelu`.

    Returns:
        [..., O] in x's dtype.

    Raises:
        ValueError: On a bias of another shape, an unknown `approximate` or an unsupported dtype.
    """
    if approximate not in _ACTIVATIONS:
        raise ValueError(f"approximate: expected 'none' or 'tanh', got {approximate!r}")
    activation = _ACTIVATIONS[approximate]
    if not runs_on_triton(x):
        _check(x, bias, activation)
        return forbid_double_backward(reference_bias_gelu(x, bias, approximate))
    return _forward_op(x, bias, activation)


class BiasGELU(torch.nn.Module):
    """`bias_gelu` with its bias (zeros at first).

    Args:
        features: Number of features O.
        approximate: "none" or "tanh".
        device: Device of the bias.
        dtype: Dtype of the bias.
    """

    def __init__(
        self,
        features: int,
        approximate: Literal["none", "tanh"] = "none",
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.approximate = approximate
        self.bias = torch.nn.Parameter(torch.zeros(features, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return bias_gelu(x, self.bias, self.approximate)

    def extra_repr(self) -> str:
        return f"{self.bias.shape[0]}, approximate={self.approximate!r}"
