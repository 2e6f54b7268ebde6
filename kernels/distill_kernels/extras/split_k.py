"""Split-K linear layer for few rows, bound by reading the weight once.

    y = x W^T + b        x [M, K], W [N, K], b [N], y [M, N], M <= 64

Bytes: 2 (N K + M K + M N), nearly all of them the weight; 2 M FLOP a weight byte leave the tensor cores idle. What
counts is that all multiprocessors stream weights all the time, and N / 64 tiles alone are too few for that: the
inner dimension is cut into `splits` parts, each a program of its own. A program multiplies its part of a [BLOCK_N, K]
tile of W with x^T (the weight is the tensor cores' 64-row operand), writes an fp32 partial to a workspace, and counts
itself in; the last to arrive at a tile adds the partials in the order of the splits. One launch, no atomics on
results: the same bits every time.

The counters return to zero by themselves. Eager calls keep one set a stream; CUDA graphs of a device share one set,
so two graphs that hold this kernel must not be replayed at the same time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from distill_kernels.arrivals import last_to_arrive
from distill_kernels.kernel_op import KernelOp, check_tensors
from distill_kernels.launch import cdiv, device_facts, launch, next_power_of_2, runs_on_triton, tl, triton
from distill_kernels.operands import contiguous_rows

MAX_ROWS = 64
COUNTERS = 1 << 14


class SplitKConfig(NamedTuple):
    """Launch shape: output and inner columns at a time, splits of the inner dimension, warps, pipeline stages."""

    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int


def reference_split_k_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x W^T + b` in plain PyTorch, accumulated in fp32 (fp64 for fp64), rounded once: the specification."""
    accumulate_dtype = torch.promote_types(x.dtype, torch.float32)
    y = x.to(accumulate_dtype) @ weight.to(accumulate_dtype).T
    return (y if bias is None else y + bias.to(accumulate_dtype)).to(x.dtype)


@triton.jit
def split_k_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    partials_ptr,
    counters_ptr,
    M,
    N,
    K,
    stride_x,
    stride_weight,
    part,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """partials: fp32 [tiles, SPLITS, BLOCK_N, BLOCK_M]; counters: int32 [tiles], zero before and after; part: inner
    length of a split, a multiple of BLOCK_K.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    # The tile is y transposed, [BLOCK_N, BLOCK_M]: outputs are the long axis, rows of x the short one.
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    first = split * part
    # outputs beyond the edge read the last row of W and are not written; rows beyond M are not read, since sixteen
    # reads of one line by every program (a clamped index) crowd one slice of the L2 cache
    x_ptrs = x_ptr + m[None, :].to(tl.int64) * stride_x + (first + k)[:, None]  # [K, M]
    in_rows = (m < M)[None, :]
    weight_ptrs = weight_ptr + tl.minimum(n, N - 1)[:, None].to(tl.int64) * stride_weight + (first + k)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, part, BLOCK_K):
        # Without a last partial step W is loaded without a mask. It is read once and may leave L2 first; x is read by
        # all.
        if EVEN:
            weight = tl.load(weight_ptrs, eviction_policy="evict_first")
            x = tl.load(x_ptrs, mask=in_rows, other=0.0)
        else:
            left = K - first - start
            weight = tl.load(weight_ptrs, mask=k[None, :] < left, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptrs, mask=in_rows & (k[:, None] < left), other=0.0)
        total = tl.dot(weight, x, total)
        weight_ptrs += BLOCK_K
        x_ptrs += BLOCK_K

    last = True
    if SPLITS > 1:
        cells = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        tile_ptr = partials_ptr + tile.to(tl.int64) * (SPLITS * BLOCK_N * BLOCK_M)
        tl.store(tile_ptr + split * (BLOCK_N * BLOCK_M) + cells, total)
        last = last_to_arrive(counters_ptr, tile, SPLITS)
        if last:
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            # In the order of the splits, its own read back too, so that who came last changes no bit.
            for other in tl.static_range(SPLITS):
                total += tl.load(tile_ptr + other * (BLOCK_N * BLOCK_M) + cells, cache_modifier=".cg")
    if last:
        if HAS_BIAS:
            total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        y_ptrs = y_ptr + m[None, :].to(tl.int64) * N + n[:, None]
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])


def choose_config(rows: int, outputs: int, inputs: int, multiprocessors: int) -> SplitKConfig:
    """Return the launch shape for given sizes: enough programs to keep every multiprocessor reading, in whole waves."""
    tiles = cdiv(outputs, 64)
    steps = cdiv(inputs, 128)
    if rows > 32:  # x takes as much shared memory as W: one deep pipeline a multiprocessor, or two shallower ones
        if multiprocessors // 2 < tiles <= multiprocessors or (2 * tiles <= multiprocessors < 4 * tiles and steps >= 2):
            return SplitKConfig(64, 128, 1 if 2 * tiles > multiprocessors else 2, 4, 4)
        if multiprocessors < cdiv(outputs, 128) <= 2 * multiprocessors:
            return SplitKConfig(128, 64, 1, 4, 4)
    best = 1
    least = float("inf")
    for splits in range(1, min(steps, 16) + 1):
        waves = cdiv(tiles * splits, 2 * multiprocessors)
        cost = waves * (cdiv(steps, splits) + 4)  # a program's start and end cost about four steps
        if cost < least:
            best = splits
            least = cost
    return SplitKConfig(64, 128, best, 4, 3 if rows > 32 else 4)


_counters: dict[tuple[torch.device, int | str], torch.Tensor] = {}


def _zero_counters(device: torch.device) -> torch.Tensor:
    """Return the zeroed counters of the current stream, or during capture those of the device's CUDA graphs."""
    if device.type != "cuda":
        return torch.zeros(COUNTERS, dtype=torch.int32)
    # Two launches at once must not share counters: a stream's follow each other. A graph keeps the address, so that its
    # set is not that of any stream; it is made before capture, which would record its zeroing and own its memory.
    capturing = torch.cuda.is_current_stream_capturing()
    key = (device, "graphs" if capturing else torch.cuda.current_stream(device).cuda_stream)
    if key not in _counters:
        if capturing:
            raise ValueError("split_k_linear: expected a call on this device before a CUDA graph is captured, got none")
        _counters[key] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        _counters.setdefault((device, "graphs"), torch.zeros_like(_counters[key]))
    return _counters[key]


def _launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: SplitKConfig | None = None
) -> torch.Tensor:
    rows, inputs = x.shape
    outputs = weight.shape[0]
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    config = config or choose_config(rows, outputs, inputs, device_facts(x.device).multiprocessors)
    block_n, block_k, splits, warps, stages = config
    tiles = cdiv(outputs, block_n)
    block_m = max(16, next_power_of_2(rows))
    part = cdiv(cdiv(inputs, splits), block_k) * block_k
    # Parts are whole steps, so that fewer of them than were asked for may reach the end.
    splits = cdiv(inputs, part)
    partials = torch.empty(
        tiles * splits * block_n * block_m if splits > 1 else 0, dtype=torch.float32, device=x.device
    )
    launch(
        split_k_kernel,
        (tiles, splits),
        x,
        weight,
        x if bias is None else contiguous_rows(bias),
        y,
        partials,
        _zero_counters(x.device),
        rows,
        outputs,
        inputs,
        x.stride(0),
        weight.stride(0),
        part,
        HAS_BIAS=bias is not None,
        EVEN=part * splits == inputs,
        SPLITS=splits,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
        num_stages=stages,
    )
    return y


def _forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _launch(x, weight, bias) if runs_on_triton(x) else reference_split_k_linear(x, weight, bias)


def _setup_context(ctx, inputs, output) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, dy: torch.Tensor):
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad
    return (
        dy @ weight if needs_x else None,
        dy.T @ x if needs_weight else None,
        # Summed in fp32: 16 bits would lose small terms beside a large sum.
        dy.float().sum(0).to(dy.dtype) if needs_bias else None,
    )


# No plan: the counters are the current stream's, or a graph's, and not memory that a call allocates. Gradients are
# PyTorch's own products, so that they have gradients too.
_op = KernelOp(
    "split_k_linear",
    _forward,
    lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]),
    setup_context=_setup_context,
    backward=_backward,
    planned=False,
    second_order=True,
)


def check_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Check that `x` [..., K], `weight` [N, K] and `bias` [N] or None fit a linear layer of 16-bit kernels.

    Raises:
        ValueError: For shapes that do not, dtypes that differ or that no kernel takes, or rows of W with gaps.
    """
    check_tensors(x=x, weight=weight, bias=bias)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight: expected [N, {x.shape[-1]}] to fit x {tuple(x.shape)}, got {tuple(weight.shape)}")
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(f"bias: expected [{weight.shape[0]}], got {tuple(bias.shape)}")
    if weight.dtype != x.dtype or (x.is_cuda and x.dtype not in (torch.float16, torch.bfloat16)):
        raise ValueError(
            f"dtype: expected x and weight both float16 or both bfloat16, got {x.dtype} and {weight.dtype}"
        )
    if weight.stride(1) != 1:
        raise ValueError(f"weight: expected contiguous rows, got strides {weight.stride()}")


def split_k_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `torch.nn.functional.linear` for at most 64 rows at memory speed, bitwise reproducible.

    Args:
        x: [..., K] float16 or bfloat16 (float32 on the CPU too), at most 64 rows in all.
        weight: [N, K], the dtype of `x`, rows contiguous.
        bias: [N] or None.

    Returns:
        [..., N] in the dtype of `x`. Gradients flow to all three by ordinary matrix products.

    Raises:
        ValueError: For shapes, dtypes or row counts other than these.
    """
    check_linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    if flat.shape[0] > MAX_ROWS:
        raise ValueError(f"x: expected at most {MAX_ROWS} rows, got {flat.shape[0]}")
    y: torch.Tensor = _op(contiguous_rows(flat), weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


class SplitKLinear(nn.Module):
    """`nn.Linear` that serves up to 64 rows by `split_k_linear` and more by `torch.nn.functional.linear`.

    Shares the parameters of the layer it is made from, under the same names.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        check_tensors(weight=weight, bias=bias)
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> SplitKLinear:
        """Return a split-K layer that shares the parameters of `linear`."""
        return cls(linear.weight, linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        check_tensors(x=x)
        few = x.numel() <= MAX_ROWS * self.in_features
        linear = split_k_linear if few else F.linear
        return linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
