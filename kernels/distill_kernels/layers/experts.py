"""Experts of a mixture: permutation, grouped GEMMs, gated activation, and the weighted sum over a token's experts.

    y[n] = sum_j w[n, j] (a(x[n] G_e + c_e) D_e + d_e),   e = index[n, j],   a(g, u) = act(g) u

    da = dy[n] D_e^T              (without the router weight)
    dw[n, j] = <a, da> + <d_e, dy[n]>
    d(g, u) = w a'(g, u) da       dx[n] = sum_j d(g, u) G_e^T
    dD_e = sum (w a)^T dy[n]      dG_e = sum x[n]^T d(g, u)

N tokens, k experts of each, S = N k slots (slot s = n k + j), E experts, H hidden columns, I intermediate columns. The
rows of the GEMMs are the slots in the order of their experts; among one expert's, in the order of the slots.

What is read and written beside the GEMMs, in elements: forward N H + S H (gather), 3 S I (activation), S H + N H (sum);
backward 2 (N H + S H) (gathers of dy and again of x), 6 S I (activation), S H + N H (sum of dx). The router weight's
gradient needs no output of the down GEMM, which is not kept: <a D_e, dy> = <a, dy D_e^T>.

The permutation takes two kernels, a histogram of each block of slots, and a scan over the blocks with each slot's rank
in its own; nothing is sorted, no atomics order anything, and the host waits for nothing, so that it is the same every
time and may be captured in a CUDA graph. The GEMMs are torch's `grouped_mm`.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch

from distill_kernels.kernel_op import KernelOp
from distill_kernels.launch import cdiv, launch, next_power_of_2, runs_on_triton, tl, triton
from distill_kernels.layers.activations import activate, activate_with_derivative
from distill_kernels.torch_internals import grouped_gemm

ExpertActivation = Literal["silu", "gelu", "gelu_tanh", "clamped_silu"]
EXPERT_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "clamped_silu")
SLOTS = 256  # of one program of the permutation
MAX_WASTE = 1 / 16  # of a row's columns that a tile may exceed it by


class GateForm(NamedTuple):
    """What a(g, u) is, and how g and u lie in a row of 2 I columns.

    Attributes:
        activation: One of EXPERT_ACTIVATIONS.
        interleaved: Columns of gate and up take turns; otherwise all of the gate come first.
        alpha, limit: Of gpt-oss' "clamped_silu".
    """

    activation: str
    interleaved: bool
    alpha: float
    limit: float


# ---- references: plain PyTorch, the specification


def _gate_and_up(gate_up: torch.Tensor, form: GateForm) -> tuple[torch.Tensor, torch.Tensor]:
    if form.interleaved:
        return gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate_up.chunk(2, -1)
    return gate, up


def reference_gate(gate_up: torch.Tensor, form: GateForm) -> torch.Tensor:
    """Return the gated activation [S, I] of the gate and up projections [S, 2 I].

    "clamped_silu" is gpt-oss': (clamp(up, -limit, limit) + 1) g sigmoid(alpha g) with g = min(gate, limit).
    """
    activation, _, alpha, limit = form
    gate, up = _gate_and_up(gate_up, form)
    if activation == "clamped_silu":
        gate = gate.clamp(max=limit)
        up = up.clamp(min=-limit, max=limit)
        return (up + 1) * gate * torch.sigmoid(alpha * gate)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def _reference_derivatives(gate_up: torch.Tensor, form: GateForm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # the gated activation, and its derivatives by gate and by up; written out, as nothing is differentiated in an op
    activation, _, alpha, limit = form
    gate, up = _gate_and_up(gate_up, form)
    value = reference_gate(gate_up, form)
    if activation == "clamped_silu":
        g = gate.clamp(max=limit)
        u = up.clamp(min=-limit, max=limit) + 1
        s = torch.sigmoid(alpha * g)
        return value, u * s * (1 + alpha * g * (1 - s)) * (gate <= limit), g * s * (up.abs() <= limit)
    if activation == "silu":
        s = torch.sigmoid(gate)
        return value, up * s * (1 + gate * (1 - s)), gate * s
    if activation == "gelu":
        phi = 0.5 * torch.special.erfc(-gate * 0.5**0.5)
        return value, up * (phi + gate * torch.exp(-gate * gate / 2) * (2 * math.pi) ** -0.5), gate * phi
    s = torch.sigmoid(2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
    slope = 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * gate * gate)
    return value, up * (s + gate * s * (1 - s) * slope), gate * s


def reference_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
    interleaved: bool = False,
    transposed: bool = False,
    alpha: float = 1.0,
    limit: float = 0.0,
) -> torch.Tensor:
    """Return `experts` in plain PyTorch, one expert after the other."""
    form = GateForm(activation, interleaved, alpha, limit)
    y = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        tokens, choices = torch.where(index == expert)
        first = gate_up[expert] if transposed else gate_up[expert].T
        second = down[expert] if transposed else down[expert].T
        hidden = x[tokens] @ first
        if gate_up_bias is not None:
            hidden = hidden + gate_up_bias[expert]
        out = reference_gate(hidden, form) @ second
        if down_bias is not None:
            out = out + down_bias[expert]
        y = y.index_add(0, tokens, (out * weights[tokens, choices, None]).to(y.dtype))
    return y


# ---- permutation


@triton.jit
def _histogram_kernel(index_ptr, counts_ptr, S, E, SLOTS: tl.constexpr, BLOCK_E: tl.constexpr):
    """One block of slots a program: how many of them go to each expert."""
    block = tl.program_id(0).to(tl.int64)
    slots = block * SLOTS + tl.arange(0, SLOTS)
    expert = tl.load(index_ptr + slots, mask=slots < S, other=-1).to(tl.int32)  # [SLOTS]
    for first in range(0, E, BLOCK_E):
        experts = first + tl.arange(0, BLOCK_E)  # [BLOCK_E]
        count = tl.sum((expert[:, None] == experts[None, :]).to(tl.int32), 0)
        tl.store(counts_ptr + block * E + experts, count, mask=experts < E)


@triton.jit
def _place_kernel(
    index_ptr,
    counts_ptr,
    row_ptr,
    slot_ptr,
    end_ptr,
    S,
    E,
    blocks,
    SLOTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_COUNTS: tl.constexpr,
):
    """One block of slots a program: each slot's row, the slot of each row, and (first program) where experts end."""
    block = tl.program_id(0)
    slots = block.to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    expert = tl.load(index_ptr + slots, mask=slots < S, other=-1).to(tl.int32)  # [SLOTS]
    # the rank among the block's own slots: those before it that go to the same expert
    order = tl.arange(0, SLOTS)
    before = (expert[:, None] == expert[None, :]) & (order[None, :] < order[:, None])
    row = tl.sum(before.to(tl.int32), 1)
    start = tl.zeros([], tl.int32)  # rows of all experts before the tile's first
    for first in range(0, E, BLOCK_E):
        experts = first + tl.arange(0, BLOCK_E)
        earlier = tl.zeros([BLOCK_E], tl.int32)  # slots of blocks before this one, by expert
        total = tl.zeros([BLOCK_E], tl.int32)
        for begin in range(0, blocks, BLOCK_COUNTS):
            others = begin + tl.arange(0, BLOCK_COUNTS)
            mask = (others[:, None] < blocks) & (experts[None, :] < E)
            count = tl.load(counts_ptr + others[:, None] * E + experts[None, :], mask=mask, other=0)
            total += tl.sum(count, 0)
            earlier += tl.sum(tl.where(others[:, None] < block, count, 0), 0)
        end = start + tl.cumsum(total, 0)
        base = end - total + earlier
        row += tl.sum(tl.where(expert[:, None] == experts[None, :], base[None, :], 0), 1)
        start += tl.sum(total, 0)
        tl.store(end_ptr + experts, end, mask=(experts < E) & (block == 0))
    tl.store(row_ptr + slots, row, mask=slots < S)
    tl.store(slot_ptr + row, slots.to(tl.int32), mask=slots < S)


def permutation(index: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Order slots by their expert; those of one expert keep their order.

    Args:
        index: [N, k] integers, every one in [0, experts).
        experts: E.

    Returns:
        int32: the row of each slot [S], the slot of each row [S], and where each expert's rows end [E].
    """
    index = index.contiguous()
    slots = index.numel()
    if not runs_on_triton(index):
        flat = index.flatten()
        slot = torch.argsort(flat, stable=True)
        row = torch.empty_like(slot)
        row[slot] = torch.arange(slots, device=index.device)
        ends = torch.bincount(flat, minlength=experts).cumsum(0)
        return row.int(), slot.int(), ends.int()
    # Every program of the second kernel reads the counts of all blocks: a scan in a launch of its own would cost more
    # than these few KiB out of L2.
    blocks = cdiv(slots, SLOTS)
    counts = torch.empty(blocks, experts, dtype=torch.int32, device=index.device)
    row = torch.empty(slots, dtype=torch.int32, device=index.device)
    slot = torch.empty_like(row)
    ends = torch.zeros(experts, dtype=torch.int32, device=index.device)  # of no slots they stay 0
    if slots:
        tile = min(64, next_power_of_2(experts))
        launch(_histogram_kernel, (blocks,), index, counts, slots, experts, SLOTS=SLOTS, BLOCK_E=tile, num_warps=4)
        launch(
            _place_kernel,
            (blocks,),
            index,
            counts,
            row,
            slot,
            ends,
            slots,
            experts,
            blocks,
            SLOTS=SLOTS,
            BLOCK_E=tile,
            BLOCK_COUNTS=128,
            num_warps=4,
        )
    return row, slot, ends


# ---- gather and sum


@triton.jit
def _gather_kernel(x_ptr, row_ptr, y_ptr, H, stride_x, K: tl.constexpr, BLOCK: tl.constexpr):
    """One tile of one token a program, read once and written to the rows of the token's K slots."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    x = tl.load(x_ptr + token * stride_x + cols, mask=cols < H, other=0.0)
    for choice in tl.static_range(K):
        row = tl.load(row_ptr + token * K + choice).to(tl.int64)
        tl.store(y_ptr + row * H + cols, x, mask=cols < H)


@triton.jit
def _sum_kernel(
    x_ptr,
    row_ptr,
    weight_ptr,
    index_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    H,
    K: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of one token a program: the sum of its K rows, in the order of its choices, in fp32."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = cols < H
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + token * H + cols, mask=mask, other=0.0).to(tl.float32)
    for choice in tl.static_range(K):  # unrolled, so that all K loads are in flight
        row = tl.load(row_ptr + token * K + choice).to(tl.int64)
        value = tl.load(x_ptr + row * H + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            expert = tl.load(index_ptr + token * K + choice).to(tl.int64)
            value += tl.load(bias_ptr + expert * H + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            value *= tl.load(weight_ptr + token * K + choice).to(tl.float32)
        total += value
    tl.store(y_ptr + token * H + cols, total.to(y_ptr.dtype.element_ty), mask=mask)


def column_tile(columns: int, most: int) -> int:
    """Return the largest power of two up to `most` whose tiles exceed `columns` by little; at least 64."""
    tile = min(most, next_power_of_2(columns))
    while tile > 64 and cdiv(columns, tile) * tile > columns * (1 + MAX_WASTE):
        tile //= 2
    return tile


def _gather(x: torch.Tensor, row: torch.Tensor, k: int) -> torch.Tensor:
    """Copy each token's row of x [N, H] to the rows of its slots; [S, H]."""
    tokens, columns = x.shape
    y = x.new_empty(tokens * k, columns)
    if not runs_on_triton(x):
        y[row.long()] = x.repeat_interleave(k, 0)
        return y
    if tokens:
        tile = column_tile(columns, 2048)
        grid = (tokens, cdiv(columns, tile))
        launch(_gather_kernel, grid, x, row, y, columns, x.stride(0), K=k, BLOCK=tile, num_warps=max(1, tile // 1024))
    return y


def sum_slots(
    x: torch.Tensor,
    row: torch.Tensor,
    k: int,
    weights: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum each token's k rows of x [S, H], each with its expert's bias and times its weight, and a residual [N, H]."""
    slots, columns = x.shape
    if not runs_on_triton(x):
        values = x[row.long()].view(slots // k, k, columns)
        if bias is not None and index is not None:
            values = values + bias[index]
        if weights is not None:
            values = values * weights[..., None]
        total = values.sum(1).to(x.dtype)
        return total if residual is None else residual + total
    y = x.new_empty(slots // k, columns)
    if slots:
        tile = column_tile(columns, 1024)
        launch(
            _sum_kernel,
            (slots // k, cdiv(columns, tile)),
            x,
            row,
            x if weights is None else weights,
            row if index is None else index,
            x if bias is None else bias,
            x if residual is None else residual,
            y,
            columns,
            K=k,
            HAS_WEIGHT=weights is not None,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            BLOCK=tile,
            num_warps=max(1, tile // 256),
        )
    return y


# ---- activation


@triton.jit
def load_pair(ptr, row, first, cols, mask, COLUMNS, INTERLEAVED: tl.constexpr, TILE: tl.constexpr):
    # gate and up [ROWS, TILE] of rows of 2 COLUMNS; interleaved they come out of one contiguous load
    if INTERLEAVED:
        both = 2 * first + tl.arange(0, 2 * TILE)  # [2 TILE]
        inside = tl.broadcast_to(both[None, :] < 2 * COLUMNS, row.shape[0], 2 * TILE)
        # rows past the end are caught by their mask's first column
        pair = tl.load(ptr + row[:, None] * (2 * COLUMNS) + both[None, :], mask=inside & mask[:, None], other=0.0)
        return tl.split(tl.reshape(pair.to(tl.float32), row.shape[0], TILE, 2))
    else:
        inside = mask[:, None] & (cols[None, :] < COLUMNS)
        offset = row[:, None] * (2 * COLUMNS) + cols[None, :]
        gate = tl.load(ptr + offset, mask=inside, other=0.0).to(tl.float32)
        return gate, tl.load(ptr + offset + COLUMNS, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def gated(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    # the value, and its derivatives by gate and up
    if ACTIVATION == "clamped_silu":
        gate_passes = gate <= limit
        up_passes = tl.abs(up) <= limit
        g = tl.minimum(gate, limit)
        u = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        silu, slope = activate_with_derivative(alpha * g, "silu")
        value = silu / alpha
        return value * u, tl.where(gate_passes, slope * u, 0.0), tl.where(up_passes, value, 0.0)
    else:
        value, slope = activate_with_derivative(gate, ACTIVATION)
        return value * up, slope * up, value


@triton.jit
def _activation_kernel(
    x_ptr,
    slot_ptr,
    index_ptr,
    bias_ptr,
    y_ptr,
    S,
    alpha,
    limit,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A tile of ROWS rows a program: act(gate) * up."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * TILE
    cols = first + tl.arange(0, TILE)
    mask = row < S
    gate, up = load_pair(x_ptr, row, first, cols, mask, COLUMNS, INTERLEAVED, TILE)
    if HAS_BIAS:
        slot = tl.load(slot_ptr + row, mask=mask, other=0)
        expert = tl.load(index_ptr + slot, mask=mask, other=0).to(tl.int64)
        gate_bias, up_bias = load_pair(bias_ptr, expert, first, cols, mask, COLUMNS, INTERLEAVED, TILE)
        gate += gate_bias
        up += up_bias
    if ACTIVATION == "clamped_silu":
        y, _, _ = gated(gate, up, alpha, limit, ACTIVATION)
    else:
        y = activate(gate, ACTIVATION) * up
    inside = mask[:, None] & (cols[None, :] < COLUMNS)
    tl.store(y_ptr + row[:, None] * COLUMNS + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _activation_backward_kernel(
    x_ptr,
    slot_ptr,
    index_ptr,
    bias_ptr,
    weight_ptr,
    da_ptr,
    dx_ptr,
    scaled_ptr,
    dweight_ptr,
    S,
    alpha,
    limit,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NEEDS_SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """ROWS whole rows a program: d(gate, up), the activation times the router weight, and the weight's gradient."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = row < S
    slot = tl.load(slot_ptr + row, mask=mask, other=0).to(tl.int64)
    weight = tl.load(weight_ptr + slot, mask=mask, other=0.0).to(tl.float32)  # [ROWS]
    expert = tl.load(index_ptr + slot, mask=mask, other=0).to(tl.int64)
    dweight = tl.zeros([ROWS], tl.float32)
    for first in range(0, COLUMNS, TILE):
        cols = first + tl.arange(0, TILE)
        inside = mask[:, None] & (cols[None, :] < COLUMNS)
        gate, up = load_pair(x_ptr, row, first, cols, mask, COLUMNS, INTERLEAVED, TILE)
        if HAS_BIAS:
            gate_bias, up_bias = load_pair(bias_ptr, expert, first, cols, mask, COLUMNS, INTERLEAVED, TILE)
            gate += gate_bias
            up += up_bias
        offset = row[:, None] * COLUMNS + cols[None, :]
        da = tl.load(da_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        value, by_gate, by_up = gated(gate, up, alpha, limit, ACTIVATION)
        # in fp32 over the whole row, which is one program's; masked columns: da is 0 there
        dweight += tl.sum(value * da, 1)
        if NEEDS_SCALED:
            scaled = value * weight[:, None]
            tl.store(scaled_ptr + offset, scaled.to(scaled_ptr.dtype.element_ty), mask=inside)
        da *= weight[:, None]
        dgate = (da * by_gate).to(dx_ptr.dtype.element_ty)
        dup = (da * by_up).to(dx_ptr.dtype.element_ty)
        if INTERLEAVED:
            both = 2 * first + tl.arange(0, 2 * TILE)
            into = dx_ptr + row[:, None] * (2 * COLUMNS) + both[None, :]
            tl.store(into, tl.interleave(dgate, dup), mask=mask[:, None] & (both[None, :] < 2 * COLUMNS))
        else:
            into = dx_ptr + row[:, None] * (2 * COLUMNS) + cols[None, :]
            tl.store(into, dgate, mask=inside)
            tl.store(into + COLUMNS, dup, mask=inside)
    tl.store(dweight_ptr + slot, dweight, mask=mask)


def _activation(
    x: torch.Tensor,
    slot: torch.Tensor,
    index: torch.Tensor,
    bias: torch.Tensor | None,
    form: GateForm,
) -> torch.Tensor:
    """Return the gated activation [S, I] of x [S, 2 I] with each row's expert's bias."""
    slots = x.shape[0]
    columns = x.shape[1] // 2
    if not runs_on_triton(x):
        if bias is not None:
            x = x + bias[index.flatten()[slot.long()]]
        return reference_gate(x, form)
    y = x.new_empty(slots, columns)
    if slots:
        tile = column_tile(columns, 512)
        rows = max(1, 2048 // tile)
        launch(
            _activation_kernel,
            (cdiv(slots, rows), cdiv(columns, tile)),
            x,
            slot,
            index,
            x if bias is None else bias,
            y,
            slots,
            form.alpha,
            form.limit,
            COLUMNS=columns,
            ACTIVATION=form.activation,
            INTERLEAVED=form.interleaved,
            HAS_BIAS=bias is not None,
            ROWS=rows,
            TILE=tile,
            num_warps=8,
        )
    return y


def _activation_backward(
    x: torch.Tensor,
    slot: torch.Tensor,
    index: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    da: torch.Tensor,
    form: GateForm,
    needs_scaled: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return d(gate, up) [S, 2 I], the activation times the router weight [S, I], and <activation, da> [N, k]."""
    slots = x.shape[0]
    columns = x.shape[1] // 2
    if not runs_on_triton(x):
        if bias is not None:
            x = x + bias[index.flatten()[slot.long()]]
        weight = weights.flatten()[slot.long(), None].to(x.dtype)
        value, by_gate, by_up = _reference_derivatives(x, form)
        gradients = (da * weight * by_gate, da * weight * by_up)
        dx = torch.stack(gradients, -1).flatten(-2) if form.interleaved else torch.cat(gradients, -1)
        by_row = (value * da).sum(1)
        dweight = torch.empty_like(by_row)
        dweight[slot.long()] = by_row
        return dx, value * weight, dweight.view(index.shape)
    dx = torch.empty_like(x)
    scaled = x.new_empty(da.shape if needs_scaled else (0,))
    dweight = torch.empty(index.shape, dtype=torch.float32, device=x.device)
    if slots:
        tile = min(1024, next_power_of_2(columns))  # masked columns cost less than more turns of the loop
        rows = max(1, 1024 // tile)
        launch(
            _activation_backward_kernel,
            (cdiv(slots, rows),),
            x,
            slot,
            index,
            x if bias is None else bias,
            weights,
            da,
            dx,
            scaled,
            dweight,
            slots,
            form.alpha,
            form.limit,
            COLUMNS=columns,
            ACTIVATION=form.activation,
            INTERLEAVED=form.interleaved,
            HAS_BIAS=bias is not None,
            NEEDS_SCALED=needs_scaled,
            ROWS=rows,
            TILE=tile,
            num_warps=4,
        )
    return dx, scaled, dweight


@triton.jit
def _expert_sums_kernel(x_ptr, end_ptr, y_ptr, columns, ROWS: tl.constexpr, TILE: tl.constexpr):
    """A tile of one expert's columns a program: the sum over its rows, from the first to the last."""
    expert = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    begin = tl.load(end_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(end_ptr + expert)
    total = tl.zeros([ROWS, TILE], tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row[:, None] < end) & (cols[None, :] < columns)
        total += tl.load(x_ptr + row[:, None].to(tl.int64) * columns + cols[None, :], mask=mask, other=0.0)
    tl.store(y_ptr + expert * columns + cols, tl.sum(total, 0).to(y_ptr.dtype.element_ty), mask=cols < columns)


def _expert_sums(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the sum of each expert's rows of x [S, C]; [E, C]."""
    experts = len(ends)
    columns = x.shape[1]
    y = x.new_zeros(experts, columns)
    if not runs_on_triton(x):
        begin = 0
        for expert, end in enumerate(ends.tolist()):
            y[expert] = x[begin:end].sum(0)
            begin = end
        return y
    # Few columns a program: an expert's rows are all its own, so that experts times tiles must fill the GPU.
    tile = 64
    launch(_expert_sums_kernel, (experts, cdiv(columns, tile)), x, ends, y, columns, ROWS=32, TILE=tile, num_warps=4)
    return y


# ---- grouped GEMMs


def grouped_mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply groups of rows: a [S, K] with b [E, K, N] to [S, N], or a [K, S] with b [S, N] to [E, K, N].

    `torch.nn.functional.grouped_mm`, or `torch._grouped_mm` before PyTorch 2.10. On a CPU one `mm` a group: torch's
    does not take every dtype and alignment there, and nothing waits for the host on a CPU.
    """
    if a.is_cuda and grouped_gemm is not None:
        product: torch.Tensor = grouped_gemm(a, b, offs=ends)
        return product
    by_rows = b.dim() == 3
    out = a.new_zeros((a.shape[0], b.shape[2]) if by_rows else (len(ends), a.shape[0], b.shape[1]))
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if by_rows:
            out[begin:end] = a[begin:end] @ b[expert]
        else:
            out[expert] = a[:, begin:end] @ b[begin:end]
        begin = end
    return out


# ---- the op


def _launch_forward(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    interleaved: bool,
    transposed: bool,
    alpha: float,
    limit: float,
    keep_rows: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    # returns y, and for the backward gate and up without bias, row, slot, ends and (kept) the gathered rows
    k = index.shape[1]
    index = index.contiguous()
    row, slot, ends = permutation(index, gate_up.shape[0])
    rows = _gather(x, row, k)
    hidden = grouped_mm(rows, gate_up if transposed else gate_up.transpose(1, 2), ends)
    activated = _activation(hidden, slot, index, gate_up_bias, GateForm(activation, interleaved, alpha, limit))
    out = grouped_mm(activated, down if transposed else down.transpose(1, 2), ends)
    y = sum_slots(out, row, k, weights.contiguous(), index, down_bias, residual)
    return y, hidden, row, slot, ends, rows if keep_rows else x.new_empty(0)


def _launch_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    hidden: torch.Tensor,
    row: torch.Tensor,
    slot: torch.Tensor,
    ends: torch.Tensor,
    rows: torch.Tensor,
    activation: str,
    interleaved: bool,
    transposed: bool,
    alpha: float,
    limit: float,
    needed: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    # returns gradients of x, weights, gate_up, down and the biases, empty where `needed` says no
    index = index.contiguous()
    k = index.shape[1]
    needs_x, needs_weights, needs_gate_up, needs_down, needs_gate_up_bias, needs_down_bias = needed
    dout = _gather(dy.contiguous(), row, k)
    da = grouped_mm(dout, down.transpose(1, 2) if transposed else down, ends)
    dhidden, scaled, by_activation = _activation_backward(
        hidden,
        slot,
        index,
        gate_up_bias,
        weights.contiguous(),
        da,
        GateForm(activation, interleaved, alpha, limit),
        needs_down,
    )
    dweights = x.new_empty(0)
    if needs_weights:
        if down_bias is not None:
            by_activation = by_activation + (dy @ down_bias.t()).gather(1, index.long())
        dweights = by_activation.to(weights.dtype)
    ddown = x.new_empty(0)
    if needs_down:
        ddown = grouped_mm(scaled.t(), dout, ends) if transposed else grouped_mm(dout.t(), scaled, ends)
    ddown_bias = x.new_empty(0)
    if needs_down_bias and down_bias is not None:
        share = torch.zeros(x.shape[0], len(ends), dtype=dy.dtype, device=dy.device)
        share.scatter_(1, index.long(), weights.to(dy.dtype))  # a token's experts are distinct
        ddown_bias = (share.t() @ dy).to(down_bias.dtype)
    dgate_up = x.new_empty(0)
    if needs_gate_up:
        if not rows.numel():
            del dout, da, scaled
            rows = _gather(x, row, k)  # read again rather than kept: 2 S H bytes less for as long as the graph lives
        dgate_up = grouped_mm(rows.t(), dhidden, ends) if transposed else grouped_mm(dhidden.t(), rows, ends)
    dgate_up_bias = x.new_empty(0)
    if needs_gate_up_bias and gate_up_bias is not None:
        dgate_up_bias = _expert_sums(dhidden, ends).to(gate_up_bias.dtype)
    dx = x.new_empty(0)
    if needs_x:
        drows = grouped_mm(dhidden, gate_up.transpose(1, 2) if transposed else gate_up, ends)
        dx = sum_slots(drows, row, k)
    return dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias


def _new_outputs(x, index, weights, gate_up, *rest) -> tuple[torch.Tensor, ...]:
    *_, transposed, _, _, keep_rows = rest
    slots = index.numel()
    hidden = x.new_empty(slots, gate_up.shape[2 if transposed else 1])
    row = x.new_empty(slots, dtype=torch.int32)
    ends = x.new_empty(gate_up.shape[0], dtype=torch.int32)
    rows = x.new_empty((slots, x.shape[1]) if keep_rows else (0,))
    return x.new_empty(x.shape), hidden, row, torch.empty_like(row), ends, rows


def _new_gradients(dy, x, index, weights, gate_up, down, gate_up_bias, down_bias, *rest) -> tuple[torch.Tensor, ...]:
    *_, needed = rest
    inputs = (x, weights, gate_up, down, gate_up_bias, down_bias)
    return tuple(
        tensor.new_empty(tensor.shape) if needs and tensor is not None else x.new_empty(0)
        for tensor, needs in zip(inputs, needed, strict=True)
    )


# No plans: the grouped GEMMs between the kernels are torch's.
_backward_op = KernelOp("experts_backward", _launch_backward, _new_gradients, planned=False)


def _setup_context(ctx, inputs, output) -> None:
    x, index, weights, gate_up, down, gate_up_bias, down_bias, _, *ctx.settings, _ = inputs
    _, hidden, row, slot, ends, rows = output
    ctx.mark_non_differentiable(hidden, row, slot, ends, rows)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, index, weights, gate_up, down, gate_up_bias, down_bias, hidden, row, slot, ends, rows)


def _backward(ctx, dy):
    if dy is None:
        return (None,) * 14
    needs = ctx.needs_input_grad
    needed = [needs[place] for place in (0, 2, 3, 4, 5, 6)]
    gradients = _backward_op(dy, *ctx.saved_tensors, *ctx.settings, needed)
    dx, dweights, *others = [
        gradient if needs_it else None for gradient, needs_it in zip(gradients, needed, strict=True)
    ]
    return dx, None, dweights, *others, dy if needs[7] else None, *[None] * 6


_forward_op = KernelOp(
    "experts",
    _launch_forward,
    _new_outputs,
    setup_context=_setup_context,
    backward=_backward,
    results=1,
    planned=False,
)


def experts(
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
    keep_rows: bool = False,
) -> torch.Tensor:
    """Compute the experts of a mixture on the tokens that a router sends to them.

    Args:
        x: [N, H], of the weights' dtype.
        index: [N, k] integers, each token's experts: distinct, every one in [0, E).
        weights: [N, k] floats, the router's weights of these.
        gate_up: [E, 2 I, H], or with `transposed` [E, H, 2 I]; gate and up projection.
        down: [E, H, I], or with `transposed` [E, I, H].
        gate_up_bias, down_bias: [E, 2 I] and [E, H], or None.
        activation: "silu", "gelu", "gelu_tanh", or gpt-oss' "clamped_silu" with `alpha` and `limit`.
        residual: [N, H], added to the sum before it is rounded.
        interleaved: Columns of gate and up take turns; otherwise all of the gate come first.
        keep_rows: Keep the gathered rows [N k, H] for the backward instead of gathering them again.

    Returns:
        [N, H].

    Raises:
        ValueError: On shapes or dtypes that do not fit, or an unknown activation.
    """
    if activation not in EXPERT_ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(EXPERT_ACTIVATIONS)}, got {activation!r}")
    if x.dim() != 2 or index.dim() != 2 or len(index) != len(x):
        raise ValueError(
            f"index: expected [{x.shape[0]}, k] for x of shape [N, H], got {tuple(index.shape)} and {tuple(x.shape)}"
        )
    if weights.shape != index.shape:
        raise ValueError(f"weights: expected the index' shape {tuple(index.shape)}, got {tuple(weights.shape)}")
    count = len(gate_up)
    columns = x.shape[1]
    inner = down.shape[1 if transposed else 2]
    for name, tensor, shape in (
        ("gate_up", gate_up, (count, columns, 2 * inner) if transposed else (count, 2 * inner, columns)),
        ("down", down, (count, inner, columns) if transposed else (count, columns, inner)),
        ("gate_up_bias", gate_up_bias, (count, 2 * inner)),
        ("down_bias", down_bias, (count, columns)),
        ("residual", residual, x.shape),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
        if tensor is not None and tensor.dtype != x.dtype:
            raise ValueError(f"{name}: expected x' dtype {x.dtype}, got {tensor.dtype}")
    y: torch.Tensor = _forward_op(
        x.contiguous(),
        index,
        weights,
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        None if residual is None else residual.contiguous(),
        activation,
        interleaved,
        transposed,
        float(alpha),
        float(limit),
        keep_rows and torch.is_grad_enabled(),
    )
    return y
