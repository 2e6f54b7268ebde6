"""Experts of a mixture for the few tokens of a decoding step: each token's rows times its experts' weights, where they
lie.

    a[s] = act(x[n] G_e + c_e, ...)         y[n] = sum_j w[n, j] (a[s] D_e + d_e),   e = index[n, j],   s = n k + j

as `layers/experts.py` computes them, without permutation, gather or grouped GEMMs: nothing is gained by ordering a
few rows, and a GEMM of one row is bound by its weights. Two kernels, each a product of matrices and vectors with fp32
sums: a program has some outputs of one slot (gate and up, activated), or of one token (the down products of its k
experts, added in their order, with router weights, biases and the residual). They read k 3 H I weights a token and
next to nothing else: at Qwen3-30B-A3B's sizes 75 MB a layer and token, 26 microseconds at 2.9 TB/s. Tokens that share
an expert read its weights from the L2 cache; beyond `MAX_TOKENS` the grouped GEMMs are the better way.

Weights may be e4m3 with a scale an output (`matmul/fp8_experts.py`): half the bytes. Activations are not quantised
then, since nothing would be faster for it.
"""

from __future__ import annotations

import torch

from distill_kernels.kernel_op import KernelOp, check_no_gradients
from distill_kernels.launch import cdiv, launch, next_power_of_2, runs_on_triton, tl, triton
from distill_kernels.layers.activations import activate
from distill_kernels.layers.experts import ExpertActivation, experts, gated

MAX_TOKENS = 16  # measured on an H200 at Qwen3-30B-A3B's sizes: 0.27 ms for 0.31 at 16 tokens, 0.46 for 0.40 at 32
TILE_ELEMENTS = 4096  # weights that a program has in flight, twice that of gate and up


@triton.jit
def _decode_gate_up_kernel(
    x_ptr,
    index_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    H,
    I,
    stride_x,
    stride_expert,
    stride_out,
    stride_in,
    alpha,
    limit,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """TILE columns of one slot's activation a program."""
    # A product of a matrix and a vector, lane by lane: of a tensor core's rows one alone would be used.
    slot = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    expert = tl.load(index_ptr + slot).to(tl.int64)
    if INTERLEAVED:
        gate_col = 2 * cols
        up_col = 2 * cols + 1
    else:
        gate_col = cols
        up_col = cols + I
    gate_ptr = weight_ptr + expert * stride_expert + gate_col[:, None].to(tl.int64) * stride_out
    up_ptr = weight_ptr + expert * stride_expert + up_col[:, None].to(tl.int64) * stride_out
    gate = tl.zeros([TILE, BLOCK], tl.float32)
    up = tl.zeros([TILE, BLOCK], tl.float32)
    for first in range(0, H, BLOCK):
        h = first + tl.arange(0, BLOCK)
        inside = (cols[:, None] < I) & (h[None, :] < H)
        x = tl.load(x_ptr + (slot // K) * stride_x + h, mask=h < H, other=0.0).to(tl.float32)
        gate += tl.load(gate_ptr + h[None, :] * stride_in, mask=inside, other=0.0).to(tl.float32) * x[None, :]
        up += tl.load(up_ptr + h[None, :] * stride_in, mask=inside, other=0.0).to(tl.float32) * x[None, :]
    # lanes are added once, after the last block
    gate_sum = tl.sum(gate, 1)
    up_sum = tl.sum(up, 1)
    if HAS_SCALE:
        gate_sum *= tl.load(scale_ptr + expert * 2 * I + gate_col, mask=cols < I, other=0.0)
        up_sum *= tl.load(scale_ptr + expert * 2 * I + up_col, mask=cols < I, other=0.0)
    if HAS_BIAS:
        gate_sum += tl.load(bias_ptr + expert * 2 * I + gate_col, mask=cols < I, other=0.0).to(tl.float32)
        up_sum += tl.load(bias_ptr + expert * 2 * I + up_col, mask=cols < I, other=0.0).to(tl.float32)
    if ACTIVATION == "clamped_silu":
        y, _, _ = gated(gate_sum, up_sum, alpha, limit, ACTIVATION)
    else:
        y = activate(gate_sum, ACTIVATION) * up_sum
    tl.store(y_ptr + slot * I + cols, y, mask=cols < I)


@triton.jit
def _decode_down_kernel(
    x_ptr,
    index_ptr,
    router_weight_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    H,
    I,
    stride_expert,
    stride_out,
    stride_in,
    K: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """TILE columns of one token's output a program: its K experts are added in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE, BLOCK], tl.float32)
    for first in range(0, I, BLOCK):
        i = first + tl.arange(0, BLOCK)
        inside = (cols[:, None] < H) & (i[None, :] < I)
        for choice in tl.static_range(K):  # unrolled, so that the loads of all experts are in flight
            slot = token * K + choice
            expert = tl.load(index_ptr + slot).to(tl.int64)
            router_weight = tl.load(router_weight_ptr + slot).to(tl.float32)
            x = tl.load(x_ptr + slot * I + i, mask=i < I, other=0.0) * router_weight
            at = weight_ptr + expert * stride_expert + cols[:, None].to(tl.int64) * stride_out
            weight = tl.load(at + i[None, :] * stride_in, mask=inside, other=0.0).to(tl.float32)
            if HAS_SCALE:
                weight *= tl.load(scale_ptr + expert * H + cols, mask=cols < H, other=0.0)[:, None]
            total += weight * x[None, :]
    y = tl.sum(total, 1)  # [TILE], the lanes of all experts together
    if HAS_BIAS:
        for choice in tl.static_range(K):
            slot = token * K + choice
            expert = tl.load(index_ptr + slot).to(tl.int64)
            router_weight = tl.load(router_weight_ptr + slot).to(tl.float32)
            y += router_weight * tl.load(bias_ptr + expert * H + cols, mask=cols < H, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + token * H + cols, mask=cols < H, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * H + cols, y.to(y_ptr.dtype.element_ty), mask=cols < H)


def _tiles(outputs: int, inputs: int, transposed: bool) -> dict[str, int]:
    """Outputs and inputs of a tile: long along the dimension that is contiguous in memory."""
    if transposed:
        tile = min(32, next_power_of_2(outputs))
    else:
        tile = min(8, next_power_of_2(outputs))
    return {"TILE": tile, "BLOCK": min(TILE_ELEMENTS // tile, next_power_of_2(inputs))}


def _launch(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    interleaved: bool,
    transposed: bool,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    tokens, hidden = x.shape
    k = index.shape[1]
    inner = down.shape[1 if transposed else 2]
    outputs, inputs = (2, 1) if transposed else (1, 2)  # dimensions of a weight
    index = index.contiguous()
    activated = torch.empty(tokens * k, inner, dtype=torch.float32, device=x.device)
    y = torch.empty_like(x)
    if not tokens:
        return y
    # Two launches, since each output of the second needs all of a slot's activation. What is not there is stood in for
    # by x, whose address the kernels do not read then.
    first = _tiles(inner, hidden, transposed)
    launch(
        _decode_gate_up_kernel,
        (tokens * k, cdiv(inner, first["TILE"])),
        x,
        index,
        gate_up,
        x if gate_up_scale is None else gate_up_scale,
        x if gate_up_bias is None else gate_up_bias,
        activated,
        hidden,
        inner,
        x.stride(0),
        gate_up.stride(0),
        gate_up.stride(outputs),
        gate_up.stride(inputs),
        alpha,
        limit,
        K=k,
        ACTIVATION=activation,
        INTERLEAVED=interleaved,
        HAS_SCALE=gate_up_scale is not None,
        HAS_BIAS=gate_up_bias is not None,
        num_warps=4,
        **first,
    )
    second = _tiles(hidden, inner, transposed)
    launch(
        _decode_down_kernel,
        (tokens, cdiv(hidden, second["TILE"])),
        activated,
        index,
        weights.contiguous(),
        down,
        x if down_scale is None else down_scale,
        x if down_bias is None else down_bias,
        x if residual is None else residual,
        y,
        hidden,
        inner,
        down.stride(0),
        down.stride(outputs),
        down.stride(inputs),
        K=k,
        HAS_SCALE=down_scale is not None,
        HAS_BIAS=down_bias is not None,
        HAS_RESIDUAL=residual is not None,
        num_warps=4,
        **second,
    )
    return y


_op = KernelOp("decode_experts", _launch, lambda x, *rest: x.new_empty(x.shape))


def is_decoding(x: torch.Tensor) -> bool:
    """Return whether `decode_experts` is the way for tokens x [N, H]: few of them, no gradients, on our kernels."""
    return len(x) <= MAX_TOKENS and not torch.is_grad_enabled() and runs_on_triton(x)


def decode_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: ExpertActivation = "silu",
    *,
    residual: torch.Tensor | None = None,
    interleaved: bool = False,
    transposed: bool = False,
    alpha: float = 1.0,
    limit: float = 0.0,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `experts` for few tokens without gradients; arguments as there, which are not checked again.

    Args:
        gate_up_scale, down_scale: fp32 [E, 2 I] and [E, H], of weights in e4m3; None for weights of the dtype of x.

    Raises:
        ValueError: Where a tensor requires a gradient and gradients are recorded.
    """
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    check_no_gradients(x=x, weights=weights, gate_up=gate_up, down=down, **biases, residual=residual)
    if not runs_on_triton(x):
        if gate_up_scale is not None and down_scale is not None:
            outputs = 1 if transposed else 2  # dimension that a scale is the same along
            gate_up = (gate_up.float() * gate_up_scale.unsqueeze(outputs)).to(x.dtype)
            down = (down.float() * down_scale.unsqueeze(outputs)).to(x.dtype)
        return experts(
            x,
            index,
            weights,
            gate_up,
            down,
            gate_up_bias,
            down_bias,
            activation,
            residual=residual,
            interleaved=interleaved,
            transposed=transposed,
            alpha=alpha,
            limit=limit,
        )
    y: torch.Tensor = _op(
        x.contiguous(),
        index,
        weights,
        gate_up,
        down,
        gate_up_scale,
        down_scale,
        gate_up_bias,
        down_bias,
        None if residual is None else residual.contiguous(),
        activation,
        interleaved,
        transposed,
        float(alpha),
        float(limit),
    )
    return y
