"""Experts of a frozen mixture in fp8, with a scale for each row of the activations and each output of each expert.

    s_x[n] = max_h |x[n, h]| / 448          x8 = e4m3(x / s_x)
    h[r] = s_x[n] s_g[e] (x8[n] G8_e)       a[r] = act(gate + c_e) (up + c_e), rounded to the dtype of x
    s_a[r] = max_i |a[r, i]| / 448          a8 = e4m3(a / s_a)
    y[n] = sum_j w[n, j] (s_a[r] s_d[e] (a8[r] D8_e) + d_e)

Row r is the slot of token n and its choice j, e the expert it names; N, k, S, E, H and I as in `layers/experts.py`,
whose permutation and sum these are. No pass quantises: the gather writes e4m3 and scales (N H 2 bytes read and S H
written, for 2 S H in 16 bits), and so does the activation (4 S I read, S I written). Weights take 3 E I H bytes, half
of 16 bits; each operand is off by about 2.6 % as in `fp8.py`. The GEMMs are torch's fp8 `_scaled_grouped_mm` on Hopper,
for which it is compiled; on other GPUs the same e4m3 numbers are multiplied as bf16, in which each of them is exact.
The few tokens of a decoding step are not quantised: `decoding/experts.py` reads the weights in e4m3.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import nn

from distill_kernels.decoding.experts import decode_experts, is_decoding
from distill_kernels.kernel_op import KernelOp, check_no_gradients, check_tensors
from distill_kernels.launch import cdiv, device_facts, launch, next_power_of_2, runs_on_triton, tl, triton
from distill_kernels.layers.activations import activate
from distill_kernels.layers.experts import (
    EXPERT_ACTIVATIONS,
    ExpertActivation,
    GateForm,
    gated,
    grouped_mm,
    load_pair,
    permutation,
    reference_gate,
    sum_slots,
)
from distill_kernels.matmul.fp8 import FP8, TINY, quantize_rows, reference_quantize_rows
from distill_kernels.torch_internals import scaled_grouped_gemm

_log = logging.getLogger(__name__)
HOPPER = "sm_90"
MULTIPLE = 16  # sizes that fp8 GEMMs take


def reference_fp8_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float = 0.0,
) -> torch.Tensor:
    """Return `fp8_experts` in plain PyTorch, one expert after the other."""

    def product(rows: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
        rows8, scale = reference_quantize_rows(rows)
        return ((rows8.float() @ weight.float().T) * scale * weight_scale).to(x.dtype)

    y = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(gate_up.shape[0]):
        tokens, choices = torch.where(index == expert)
        hidden = product(x[tokens], gate_up[expert], gate_up_scale[expert])
        if gate_up_bias is not None:
            hidden = hidden + gate_up_bias[expert]
        activated = reference_gate(hidden, GateForm(activation, False, alpha, limit))
        out = product(activated, down[expert], down_scale[expert]).float()
        if down_bias is not None:
            out = out + down_bias[expert].float()
        y = y.index_add(0, tokens, out * weights[tokens, choices, None].float())
    return y.to(x.dtype)


# ---- gather and activation, which quantise what they write


@triton.jit
def _gather_quantise_kernel(
    x_ptr, row_ptr, y_ptr, scale_ptr, H, stride_x, K: tl.constexpr, TINY: tl.constexpr, BLOCK: tl.constexpr
):
    """One token a program: its row is read and quantised once, and written with its scale to its K slots' rows."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * stride_x + cols, mask=cols < H, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x)) / 448.0, TINY)
    x8 = (x / scale).to(tl.float8e4nv)
    for choice in tl.static_range(K):
        row = tl.load(row_ptr + token * K + choice).to(tl.int64)
        tl.store(y_ptr + row * H + cols, x8, mask=cols < H)
        tl.store(scale_ptr + row, scale)


@triton.jit
def _activation_quantise_kernel(
    x_ptr,
    slot_ptr,
    index_ptr,
    bias_ptr,
    y_ptr,
    scale_ptr,
    S,
    alpha,
    limit,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TINY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS whole rows a program, read once: act(gate) * up, rounded as `experts` leaves it, and quantised."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = row < S
    gate, up = load_pair(x_ptr, row, 0, cols, mask, COLUMNS, False, BLOCK)
    if HAS_BIAS:
        slot = tl.load(slot_ptr + row, mask=mask, other=0)
        expert = tl.load(index_ptr + slot, mask=mask, other=0).to(tl.int64)
        gate_bias, up_bias = load_pair(bias_ptr, expert, 0, cols, mask, COLUMNS, False, BLOCK)
        gate += gate_bias
        up += up_bias
    if ACTIVATION == "clamped_silu":
        y, _, _ = gated(gate, up, alpha, limit, ACTIVATION)
    else:
        y = activate(gate, ACTIVATION) * up
    y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    # masked columns have a gate of 0 and so an activation of 0, and leave the largest magnitude alone
    scale = tl.maximum(tl.max(tl.abs(y), 1) / 448.0, TINY)
    inside = mask[:, None] & (cols[None, :] < COLUMNS)
    tl.store(y_ptr + row[:, None] * COLUMNS + cols[None, :], (y / scale[:, None]).to(tl.float8e4nv), mask=inside)
    tl.store(scale_ptr + row, scale, mask=mask)


def _gather_quantised(x: torch.Tensor, row: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 [S, H] and scales [S] of each token's row of x [N, H] at the rows of its slots."""
    tokens, columns = x.shape
    y = torch.empty(tokens * k, columns, dtype=FP8, device=x.device)
    scale = torch.empty(tokens * k, dtype=torch.float32, device=x.device)
    if not runs_on_triton(x):
        x8, of_row = reference_quantize_rows(x)
        y.view(torch.uint8)[row.long()] = x8.view(torch.uint8).repeat_interleave(k, 0)
        scale[row.long()] = of_row.flatten().repeat_interleave(k, 0)
        return y, scale
    if tokens:
        block = next_power_of_2(columns)
        warps = min(16, max(1, block // 1024))
        launch(
            _gather_quantise_kernel,
            (tokens,),
            x,
            row,
            y,
            scale,
            columns,
            x.stride(0),
            K=k,
            TINY=TINY,
            BLOCK=block,
            num_warps=warps,
        )
    return y, scale


def _activation_quantised(
    x: torch.Tensor,
    slot: torch.Tensor,
    index: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 [S, I] and scales [S] of the gated activation of x [S, 2 I] with each row's expert's bias."""
    slots = x.shape[0]
    columns = x.shape[1] // 2
    if not runs_on_triton(x):
        if bias is not None:
            x = x + bias[index.flatten()[slot.long()]]
        y8, of_row = reference_quantize_rows(reference_gate(x, GateForm(activation, False, alpha, limit)))
        return y8, of_row.flatten()
    y = torch.empty(slots, columns, dtype=FP8, device=x.device)
    scale = torch.empty(slots, dtype=torch.float32, device=x.device)
    if slots:
        block = next_power_of_2(columns)
        rows = max(1, 2048 // block)
        launch(
            _activation_quantise_kernel,
            (cdiv(slots, rows),),
            x,
            slot,
            index,
            x if bias is None else bias,
            y,
            scale,
            slots,
            alpha,
            limit,
            COLUMNS=columns,
            ACTIVATION=activation,
            HAS_BIAS=bias is not None,
            TINY=TINY,
            ROWS=rows,
            BLOCK=block,
            num_warps=min(16, max(4, rows * block // 512)),
        )
    return y, scale


# ---- grouped GEMMs


def _takes_scales(x: torch.Tensor) -> bool:
    """Return whether torch's grouped fp8 GEMM runs on the device of `x`."""
    return x.is_cuda and scaled_grouped_gemm is not None and device_facts(x.device).family == HOPPER


@functools.cache
def _say_slow(family: str) -> None:
    _log.warning("torch has no grouped fp8 GEMM for %s: fp8 experts are multiplied in bf16, slower", family)


def _grouped_product(
    rows: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    ends: torch.Tensor,
    expert: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return [S, M] in `dtype` of quantised rows [S, K] in the order of their experts and weights [E, M, K].

    `expert` [S] is each row's; None where the GEMM itself takes scales.
    """
    if expert is None:
        product: torch.Tensor = scaled_grouped_gemm(
            rows, weight.transpose(1, 2), scale, weight_scale, offs=ends, out_dtype=dtype, use_fast_accum=True
        )
        return product
    wide = torch.bfloat16 if rows.is_cuda else torch.float32  # either holds every e4m3 number
    if rows.is_cuda:
        _say_slow(device_facts(rows.device).family)
    out = grouped_mm(rows.to(wide), weight.to(wide).transpose(1, 2), ends)
    return (out * scale[:, None] * weight_scale[expert]).to(dtype)


# ---- the op


def _launch(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    k = index.shape[1]
    index = index.contiguous()
    row, slot, ends = permutation(index, gate_up.shape[0])
    expert = None if _takes_scales(x) else index.flatten()[slot.long()]
    rows, scale = _gather_quantised(x, row, k)
    hidden = _grouped_product(rows, scale, gate_up, gate_up_scale, ends, expert, x.dtype)
    rows, scale = _activation_quantised(hidden, slot, index, gate_up_bias, activation, alpha, limit)
    out = _grouped_product(rows, scale, down, down_scale, ends, expert, x.dtype)
    return sum_slots(out, row, k, weights.contiguous(), index, down_bias, residual)


# No plan: the grouped GEMMs between the kernels are torch's.
_op = KernelOp("fp8_experts", _launch, lambda x, *rest: x.new_empty(x.shape), planned=False)


class Fp8Experts(nn.Module):
    """Experts of a frozen mixture in e4m3, half the bytes of 16 bits; activations are quantised row by row.

    Weights are kept as [E, outputs, inputs] with the gate's outputs before those of up, whatever form they came in.

    Args:
        gate_up: [E, 2 I, H], or with `transposed` [E, H, 2 I]; quantised here, an expert at a time.
        down: [E, H, I], or with `transposed` [E, I, H].
        gate_up_bias, down_bias: [E, 2 I] and [E, H], or None.
        activation, interleaved, transposed, alpha, limit: As of `experts`.

    Raises:
        ValueError: Where H or I does not divide by 16, shapes do not fit, or an unknown activation is named.
    """

    gate_up: torch.Tensor
    gate_up_scale: torch.Tensor
    down: torch.Tensor
    down_scale: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        activation: ExpertActivation = "silu",
        *,
        interleaved: bool = False,
        transposed: bool = False,
        alpha: float = 1.0,
        limit: float = 0.0,
    ) -> None:
        super().__init__()
        check_tensors(gate_up=gate_up, down=down, gate_up_bias=gate_up_bias, down_bias=down_bias)
        if activation not in EXPERT_ACTIVATIONS:
            raise ValueError(f"activation: expected one of {', '.join(EXPERT_ACTIVATIONS)}, got {activation!r}")
        if transposed:
            gate_up = gate_up.transpose(1, 2)
            down = down.transpose(1, 2)
        self.num_experts, self.hidden_size, self.inner_size = down.shape
        if self.hidden_size % MULTIPLE or self.inner_size % MULTIPLE:
            raise ValueError(f"down: expected sizes divisible by {MULTIPLE}, got {tuple(down.shape)}")
        expected = (self.num_experts, 2 * self.inner_size, self.hidden_size)
        if gate_up.shape != expected:
            raise ValueError(f"gate_up: expected shape {expected}, got {tuple(gate_up.shape)}")
        self.activation = activation
        self.alpha = float(alpha)
        self.limit = float(limit)
        order = torch.arange(2 * self.inner_size, device=gate_up.device)
        if interleaved:
            order = order.view(-1, 2).t().flatten()
        for name, weight, outputs in (("gate_up", gate_up, order), ("down", down, None)):
            weight8 = torch.empty(weight.shape, dtype=FP8, device=weight.device)
            scale = torch.empty(weight.shape[:2], dtype=torch.float32, device=weight.device)
            for expert in range(self.num_experts):  # one at a time, so that no second copy in 16 bits is ever whole
                held = weight[expert].detach()
                held = held.contiguous() if outputs is None else held[outputs]
                of_expert, scale_of_expert = quantize_rows(held)
                weight8[expert].view(torch.uint8).copy_(of_expert.view(torch.uint8))
                scale[expert] = scale_of_expert.flatten()
            self.register_buffer(name, weight8)
            self.register_buffer(f"{name}_scale", scale)
        self.register_buffer("gate_up_bias", None if gate_up_bias is None else gate_up_bias.detach()[:, order].clone())
        self.register_buffer("down_bias", None if down_bias is None else down_bias.detach().clone())

    def forward(
        self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[N, H] of tokens, the indices and weights [N, k] of their experts, and a residual to add -> [N, H].

        Raises:
            ValueError: For a GPU without products of e4m3, another dtype than bfloat16 on a GPU, or a tensor that
                requires a gradient.
        """
        check_tensors(x=x, index=index, weights=weights, residual=residual)
        check_no_gradients(x=x, weights=weights, residual=residual)
        if x.is_cuda and not device_facts(x.device).fp8:
            raise ValueError(f"x: expected a GPU with products of e4m3, got one of {device_facts(x.device).family}")
        if x.is_cuda and x.dtype != torch.bfloat16:
            raise ValueError(f"x: expected bfloat16 on a GPU, got {x.dtype}")
        if is_decoding(x):
            return decode_experts(
                x,
                index,
                weights,
                self.gate_up,
                self.down,
                self.gate_up_bias,
                self.down_bias,
                self.activation,
                residual=residual,
                alpha=self.alpha,
                limit=self.limit,
                gate_up_scale=self.gate_up_scale,
                down_scale=self.down_scale,
            )
        y: torch.Tensor = _op(
            x.contiguous(),
            index,
            weights,
            self.gate_up,
            self.gate_up_scale,
            self.down,
            self.down_scale,
            self.gate_up_bias,
            self.down_bias,
            None if residual is None else residual.contiguous(),
            self.activation,
            self.alpha,
            self.limit,
        )
        return y

    def _apply(self, fn, recurse=True):
        """Move to a device, but keep fp8 and fp32 where a caller requests another dtype (`model.bfloat16()`)."""
        names = ("gate_up", "gate_up_scale", "down", "down_scale")
        before = {name: getattr(self, name) for name in names}
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            moved = getattr(self, name)
            if moved.dtype != tensor.dtype:
                setattr(self, name, tensor.to(moved.device))
        return self

    def extra_repr(self) -> str:
        return f"experts={self.num_experts}, hidden={self.hidden_size}, inner={self.inner_size}, {self.activation}"
