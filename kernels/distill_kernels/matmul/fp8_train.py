"""Linear layers whose three products of a training step are in fp8: all operands e4m3, scales by rows.

With q(a) = e4m3(a / s), s[i] the smallest power of two that brings row i of a to 448 or less:

    x ~ s_x x8,  w ~ s_w w8,                    y[m, n]  = s_x[m] s_w[n] sum_k x8[m, k] w8[n, k]
    dy[m, n] s_w[n] ~ c[m] dy8[m, n],           dx[m, k] = c[m] sum_n dy8[m, n] w8[n, k]
    dy8[m, n] c[m] s_x[m] / s_w[n] ~ d[n] t8[n, m],      dW[n, k] = d[n] sum_m t8[n, m] x8[m, k]

A product's scales belong to rows of its result, so those of the other direction go into dy before it is quantised:
x and w are quantised once, and what the backward needs of them is their bytes, transposed. Scales are powers of two, so
that t8 is made of dy8 without rounding again (but for numbers below 2^-15 of their column's largest). e4m3 keeps 3
bits of mantissa: each operand is off by about 2.6 %, each product by about 3.7 % (root mean square); a dy in e5m2
would be off by twice as much.

Layers that read the same x (q, k, v; gate, up) are one: x is quantised once and dx is one product over all of them. A
gated MLP is one too: silu(gate) * up is quantised as it is computed, and so are its gradients.

Bytes, for M tokens: x [M, K] 2 + 1 and (transposed) 1 + 1; w [N, K] 2 + 1 and 2 + 1; dy [M, N] 2 + 1, the columns'
largest 1, transposed 1 + 1; of the MLP's h 4 + 1, of its dgate and dup 3 + 1 each. Llama-3.2-1B, 8,192 tokens: 1.1 GB a
layer beside 3 products of 1.0 TFLOP. Kept for the backward: x in one byte, gate and up, and the weights themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch

from distill_kernels.launch import cdiv, device_facts, launch, next_power_of_2, runs_on_triton
from distill_kernels.matmul.fp8 import FP8
from distill_kernels.matmul.fp8_quantize_kernels import _column_maxima_kernel, _quantize_kernel, _transpose_kernel
from distill_kernels.operands import contiguous_rows, differentiable_once
from distill_kernels.torch_internals import scaled_mm

Kind = Literal["plain", "swiglu", "swiglu_backward"]
Quantized = tuple[torch.Tensor, torch.Tensor]
TINY = 2.0**-100  # numbers up to 448 times this count as zeros
UNIT = 16  # sizes that the products take divide by it


def _power_of_two(largest: torch.Tensor) -> torch.Tensor:
    """The scale of numbers up to `largest`, fp32."""
    scale = largest * (1.0 / 448.0)
    rounded = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(scale < TINY, torch.ones_like(scale), rounded)


def reference_values(sources: Sequence[torch.Tensor], kind: Kind) -> torch.Tensor:
    """fp32 [M, columns] that are quantised: `sources` side by side; of gate and up silu(gate) * up; of gate, up and
    the gradient of that those of gate and up, side by side.
    """
    if kind == "plain":
        return torch.cat([source.float() for source in sources], 1)
    gate, up, *upstream = (source.float() for source in sources)
    s = torch.sigmoid(gate)
    if kind == "swiglu":
        return gate * s * up
    return torch.cat([upstream[0] * up * s * (1 + gate * (1 - s)), upstream[0] * gate * s], 1)


def reference_quantize(values: torch.Tensor, factor: torch.Tensor | None) -> Quantized:
    """fp32 [M, N], each column times `factor` [N]: e4m3 [M, N] and scales [M, 1]."""
    values = values if factor is None else values * factor
    scale = _power_of_two(values.abs().amax(1, keepdim=True))
    return (values * (1 / scale)).to(FP8), scale


def reference_by_columns(dy8: torch.Tensor, token: torch.Tensor, sw: torch.Tensor) -> Quantized:
    """e4m3 [M, N] times `token` [M, 1] / `sw` [N], quantised by column: e4m3 [N, M], the columns' scales [N]."""
    values = dy8.float() * token * (1 / sw)
    scale = _power_of_two(values.abs().amax(0))
    return (values * (1 / scale)).to(FP8).t(), scale


def _on_triton(tensor: torch.Tensor) -> bool:
    return runs_on_triton(tensor) and device_facts(tensor.device).fp8


def quantize(
    sources: Sequence[torch.Tensor],
    kind: Kind = "plain",
    factor: torch.Tensor | None = None,
    out: Quantized | None = None,
) -> Quantized:
    """Rows in e4m3, each by its largest magnitude.

    Args:
        sources: [M, n_i] floating, what `kind` is computed of (`reference_values`).
        factor: fp32 [N] that columns are multiplied by before.
        out: Tensors to write to, of the shapes returned; rows of the first may be apart. None allocates them.

    Returns:
        e4m3 [M, N] and fp32 scales [M, 1], powers of two.
    """
    sources = [contiguous_rows(source) for source in sources]
    widths = [sources[0].shape[1]] * 2 if kind == "swiglu_backward" else [source.shape[1] for source in sources]
    widths = widths[:1] if kind == "swiglu" else widths
    rows = sources[0].shape[0]
    if not _on_triton(sources[0]):
        made = reference_quantize(reference_values(sources, kind), factor)
        if out is None:
            return made
        out[0].copy_(made[0]), out[1].copy_(made[1])
        return out
    x8, scale = out or (
        torch.empty(rows, sum(widths), dtype=FP8, device=sources[0].device),
        torch.empty(rows, 1, dtype=torch.float32, device=sources[0].device),
    )
    if rows:
        block = next_power_of_2(max(widths))
        launch(
            _quantize_kernel,
            (rows,),
            tuple(sources),
            tuple(source.stride(0) for source in sources),
            tuple(widths),
            factor,
            x8,
            scale,
            x8.stride(0),
            PARTS=len(widths),
            KIND=kind,
            TINY=TINY,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )
    return x8, scale


def _transpose(source: torch.Tensor, out: torch.Tensor, kind: str, *operands: torch.Tensor | None) -> None:
    rows, columns = source.shape
    width = out.shape[1]
    launch(
        _transpose_kernel,
        (cdiv(width, 128), cdiv(columns, 64)),
        source,
        out.view(torch.uint8),
        *operands,
        rows,
        columns,
        width,
        source.stride(0),
        out.stride(0),
        KIND=kind,
        TINY=TINY,
        BLOCK_M=128,
        BLOCK_N=64,
        num_warps=4,
    )


def transpose_bytes(x8: torch.Tensor) -> torch.Tensor:
    """e4m3 [M, K] as [K, M'], with M' the next multiple of 16 and zeros beyond M."""
    rows, columns = x8.shape
    if not _on_triton(x8):
        return torch.nn.functional.pad(x8.view(torch.uint8).t(), (0, -rows % UNIT)).contiguous().view(FP8)
    out = x8.new_empty(columns, cdiv(rows, UNIT) * UNIT)
    _transpose(x8.view(torch.uint8), out, "copy", None, None, None, None)
    return out


def transpose_weights(weights: Sequence[torch.Tensor], sw: torch.Tensor) -> torch.Tensor:
    """Weights [n_i, K] by the scales of their rows `sw` [N]: e4m3 [K, N]."""
    out = torch.empty(weights[0].shape[1], sw.shape[0], dtype=FP8, device=sw.device)
    first = 0
    for weight in weights:
        last = first + weight.shape[0]
        if _on_triton(weight):
            _transpose(contiguous_rows(weight), out[:, first:last], "weight", None, sw[first:last], None, None)
        else:
            out[:, first:last] = (weight.float() * (1 / sw[first:last, None])).to(FP8).t()
        first = last
    return out


def by_columns(dy8: torch.Tensor, token: torch.Tensor, sw: torch.Tensor) -> Quantized:
    """`dy8` [M, N] times `token` [M, 1] / `sw` [N], transposed: e4m3 [N, M'] as `transpose_bytes`, fp32 scales [N]."""
    rows, columns = dy8.shape
    if not _on_triton(dy8):
        t8, scale = reference_by_columns(dy8, token, sw)
        return torch.nn.functional.pad(t8.view(torch.uint8), (0, -rows % UNIT)).contiguous().view(FP8), scale
    largest = torch.zeros(columns, dtype=torch.int32, device=dy8.device)
    rows_a_program = 256
    launch(
        _column_maxima_kernel,
        (cdiv(columns, 128), cdiv(rows, rows_a_program)),
        dy8.view(torch.uint8),
        token,
        sw,
        largest,
        rows,
        columns,
        ROWS=rows_a_program,
        BLOCK_M=64,
        BLOCK_N=128,
        num_warps=4,
    )
    out = dy8.new_empty(columns, cdiv(rows, UNIT) * UNIT)
    scale = torch.empty_like(sw)
    _transpose(dy8.view(torch.uint8), out, "gradient", token, sw, largest, scale)
    return out, scale


@functools.cache
def _ones(size: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.ones(size, dtype=torch.float32, device=device)


def _product(a8: torch.Tensor, a_scale: torch.Tensor, b8: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    """[M, N] from [M, K] and [N, K], bf16; on the CPU fp32."""
    a_scale = a_scale.view(-1, 1)
    b_scale = b_scale.view(1, -1)
    if not a8.is_cuda:
        return (a8.float() @ b8.float().t()) * a_scale * b_scale
    return scaled_mm(a8, b8.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def _quantize_weights(weights: Sequence[torch.Tensor]) -> Quantized:
    """Weights [n_i, K] one below the other: e4m3 [N, K], scales [N]."""
    outputs = sum(weight.shape[0] for weight in weights)
    w8 = torch.empty(outputs, weights[0].shape[1], dtype=FP8, device=weights[0].device)
    sw = torch.empty(outputs, 1, dtype=torch.float32, device=w8.device)
    first = 0
    for weight in weights:
        last = first + weight.shape[0]
        quantize([weight.detach()], out=(w8[first:last], sw[first:last]))
        first = last
    return w8, sw.view(-1)


def _forward(x8: torch.Tensor, sx: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
    """The products with each of `weights`, and the scales of their rows."""
    w8, sw = _quantize_weights(weights)
    sizes = [weight.shape[0] for weight in weights]
    return [_product(x8, sx, *part) for part in zip(w8.split(sizes), sw.split(sizes), strict=True)], sw


def _gradients(
    dy8: Quantized, x8: Quantized, weights: Sequence[torch.Tensor], sw: torch.Tensor, required: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Return dx [M, K] and the gradient of each weight, where `required`; `dy8` [M, N] includes the factor `sw` [N]."""
    dx = None
    if required[0]:
        w8t = transpose_weights(weights, sw)
        dx = _product(*dy8, w8t, _ones(w8t.shape[0], w8t.device))
    if not any(required[1:]):
        return [dx, *(None for _ in weights)]
    t8, d = by_columns(dy8[0], dy8[1] * x8[1], sw)
    x8t = transpose_bytes(x8[0])
    gradients = _product(t8, d, x8t, _ones(x8t.shape[0], x8t.device)).split([weight.shape[0] for weight in weights])
    pairs = zip(gradients, weights, required[1:], strict=True)
    return [dx, *(gradient.to(weight.dtype) if one else None for gradient, weight, one in pairs)]


# Functions and no ops: they are mostly cuBLAS's products, and what they keep for the backward depends on which of the
# weights are trained.


class _Linears(torch.autograd.Function):
    """Products of one input, which is quantised once, with several weights."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x8, sx = quantize([x.reshape(-1, x.shape[-1])])
        outputs, sw = _forward(x8, sx, weights)
        trained = any(ctx.needs_input_grad[1:])
        ctx.save_for_backward(x8 if trained else None, sx, sw, *weights)
        ctx.shape = x.shape
        ctx.dtype = x.dtype
        return tuple(y.to(x.dtype).view(*x.shape[:-1], y.shape[1]) for y in outputs)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x8, sx, sw, *weights = ctx.saved_tensors
        dy8 = quantize([dy.reshape(-1, dy.shape[-1]) for dy in upstream], factor=sw)
        dx, *gradients = _gradients(dy8, (x8, sx), weights, sw, ctx.needs_input_grad)
        return dx if dx is None else dx.to(ctx.dtype).view(ctx.shape), *gradients


class _SwigluMlp(torch.autograd.Function):
    """A gated MLP: its activation, and the gradients of gate and up, are quantised as they are computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        x8, sx = quantize([x.reshape(-1, x.shape[-1])])
        (gate, up), sw = _forward(x8, sx, weights[:2])
        h8, sh = quantize([gate, up], "swiglu")
        (y,), sw_down = _forward(h8, sh, weights[2:])
        ctx.save_for_backward(x8, sx, sw, gate, up, h8, sh, sw_down, *weights)
        ctx.shape = x.shape
        ctx.dtype = x.dtype
        return y.to(x.dtype).view(*x.shape[:-1], y.shape[1])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x8, sx, sw, gate, up, h8, sh, sw_down, *weights = ctx.saved_tensors
        required = ctx.needs_input_grad
        dy8 = quantize([upstream.reshape(-1, upstream.shape[-1])], factor=sw_down)
        dh, of_down = _gradients(dy8, (h8, sh), weights[2:], sw_down, (True, required[3]))
        assert dh is not None
        dy8 = quantize([gate, up, dh], "swiglu_backward", sw)
        dx, of_gate, of_up = _gradients(dy8, (x8, sx), weights[:2], sw, required[:3])
        return dx if dx is None else dx.to(ctx.dtype).view(ctx.shape), of_gate, of_up, of_down


def _check(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    if x.is_cuda and not device_facts(x.device).fp8:
        raise ValueError(f"x: expected a GPU with products of e4m3, got one of {device_facts(x.device).family}")
    for weight in weights:
        if weight.dim() != 2 or weight.shape[0] % UNIT or weight.shape[1] % UNIT:
            raise ValueError(f"weight: expected [N, K], both divisible by {UNIT}, got {tuple(weight.shape)}")


def fp8_linears(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`F.linear(x, weight)` of each weight, products of the forward and of the backward in fp8.

    Args:
        x: [..., K] floating; what it is on a GPU besides bf16 is what products in bf16 are cast to.
        weights: [n_i, K] floating, n_i and K divisible by 16; those that ask for no gradient cost no product.

    Returns:
        [..., n_i] each, in the dtype of x; a product is off by about 4 % of its norm.

    Raises:
        ValueError: For other sizes, or a GPU without products of e4m3.
    """
    _check(x, weights)
    outputs: tuple[torch.Tensor, ...] = _Linears.apply(x, *weights)
    return outputs


def fp8_swiglu_mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """`down(silu(gate(x)) * up(x))`, as `fp8_linears`.

    Args:
        x: Input, [..., H].
        gate, up: Weights, [I, H].
        down: Weight, [H, I].

    Raises:
        ValueError: As there.
    """
    _check(x, (gate, up, down))
    y: torch.Tensor = _SwigluMlp.apply(x, gate, up, down)
    return y
