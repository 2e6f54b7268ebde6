"""Fake quantisation: weights rounded to a block format and back, in one pass, with straight-through gradients.

    y = q d,   q = clamp(round(w / d)),   d = the block's own scale, or a given (learned) one

Without given scales the gradient passes through unchanged (Bengio et al., 2013, the straight-through estimator). With
them it is that of learned step sizes (Esser et al., 2020, arXiv 1902.08153); see `formats.reference_learned_gradients`.

Forward moves 2 N s bytes for N weights of s bytes (and 4 bytes a block of given scales); the backward of learned scales
3 N s. A program holds whole blocks, 32 weights or a row, so each weight is read once.
"""

from __future__ import annotations

from typing import Any

import torch

from distill_kernels.kernel_op import KernelOp, check_floats, forbid_double_backward
from distill_kernels.launch import cdiv, next_power_of_2, runs_on_triton, tl, triton
from distill_kernels.launch_plans import launch
from distill_kernels.quantisation.formats import (
    FORMATS,
    Format,
    check_fits,
    reference_fake_quantise,
    reference_learned_gradients,
)

TILE = 4096  # weights a program holds, unless a row is longer
LONGEST = 65_536  # weights of a block that one program can hold


@triton.jit
def _round_half_away(x):
    whole = tl.floor(tl.abs(x))
    rounded = whole + tl.where(tl.abs(x) - whole >= 0.5, 1.0, 0.0)
    return tl.where(x < 0, -rounded, rounded)


@triton.jit
def _stored(scale, BFLOAT16: tl.constexpr):
    # an fp32 scale as the format keeps it
    return scale.to(tl.bfloat16).to(tl.float32) if BFLOAT16 else scale.to(tl.float16).to(tl.float32)


@triton.jit
def _reciprocal(scale):
    return tl.where(scale == 0, 0.0, tl.div_rn(1.0, tl.where(scale == 0, 1.0, scale)))


@triton.jit(do_not_specialize=["n_blocks"])
def _forward_kernel(
    w_ptr,
    scale_ptr,
    y_ptr,
    n_blocks,
    COLUMNS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SIGNED: tl.constexpr,
    ROUNDS_BY_STORED: tl.constexpr,
    BFLOAT16: tl.constexpr,
    GIVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    cols = tl.arange(0, BLOCK)  # [BLOCK]
    mask = (rows < n_blocks)[:, None] & (cols < COLUMNS)[None, :]
    at = rows[:, None] * COLUMNS + cols[None, :]
    w = tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    if GIVEN:
        rounding = tl.load(scale_ptr + rows, mask=rows < n_blocks, other=0.0).to(tl.float32)
    elif SIGNED:
        first = tl.argmax(tl.abs(w), 1)  # [ROWS], the first of equals
        rounding = tl.div_rn(tl.sum(tl.where(cols[None, :] == first[:, None], w, 0.0), 1), LOW * 1.0)
    else:
        rounding = tl.div_rn(tl.max(tl.abs(w), 1), HIGH * 1.0)
    scale = _stored(rounding, BFLOAT16)
    if ROUNDS_BY_STORED or GIVEN:
        rounding = scale
    x = w * _reciprocal(rounding)[:, None]
    if SIGNED and not GIVEN:
        codes = tl.floor(x + 8.5) - 8.0
    else:
        codes = _round_half_away(x)
    codes = tl.minimum(tl.maximum(codes, LOW), HIGH)
    tl.store(y_ptr + at, (codes * scale[:, None]).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_blocks"])
def _backward_kernel(
    w_ptr,
    scale_ptr,
    dy_ptr,
    dw_ptr,
    dscale_ptr,
    n_blocks,
    COLUMNS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    BFLOAT16: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    cols = tl.arange(0, BLOCK)  # [BLOCK]
    mask = (rows < n_blocks)[:, None] & (cols < COLUMNS)[None, :]
    at = rows[:, None] * COLUMNS + cols[None, :]
    w = tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    scale = _stored(tl.load(scale_ptr + rows, mask=rows < n_blocks, other=0.0).to(tl.float32), BFLOAT16)
    x = w * _reciprocal(scale)[:, None]
    rounded = _round_half_away(x)
    codes = tl.minimum(tl.maximum(rounded, LOW), HIGH)
    inside = rounded == codes
    dscale = tl.sum(dy * (codes - tl.where(inside, x, 0.0)), 1)
    tl.store(dw_ptr + at, tl.where(inside, dy, 0.0).to(dw_ptr.dtype.element_ty), mask=mask)
    tl.store(dscale_ptr + rows, dscale, mask=rows < n_blocks)


def _shape(weight: torch.Tensor, form: Format) -> tuple[int, dict[str, Any]]:
    """Return the number of blocks of a matrix, and the constants that both kernels take."""
    columns = form.columns(weight)
    block = next_power_of_2(columns)
    rows = max(1, TILE // block)
    constants = {"COLUMNS": columns, "LOW": form.low, "HIGH": form.high, "ROWS": rows, "BLOCK": block}
    constants |= {"BFLOAT16": form.scale_dtype == torch.bfloat16, "num_warps": min(max(rows * block // 1024, 4), 16)}
    # products and sums as written: a fused one would round a few weights in a million otherwise than the file's writer
    return weight.numel() // columns, constants | {"enable_fp_fusion": False}


def _launch_forward(
    weight: torch.Tensor, scale: torch.Tensor | None, name: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    form = FORMATS[name]
    weight = weight.contiguous()
    y = torch.empty_like(weight) if out is None else out
    blocks, constants = _shape(weight, form)
    if blocks:
        given = scale is not None
        launch(
            _forward_kernel,
            (cdiv(blocks, constants["ROWS"]),),
            weight,
            scale.contiguous() if scale is not None else weight,
            y,
            blocks,
            SIGNED=form.signed,
            ROUNDS_BY_STORED=form.rounds_by_stored,
            GIVEN=given,
            **constants,
        )
    return y


def _new_gradients(weight, scale, upstream, name) -> tuple[torch.Tensor, torch.Tensor]:
    dw = torch.empty_like(upstream, memory_format=torch.contiguous_format)
    return dw, weight.new_empty(scale.shape, dtype=torch.float32)


def _launch_backward(
    weight: torch.Tensor, scale: torch.Tensor, upstream: torch.Tensor, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    form = FORMATS[name]
    dw, dscale = _new_gradients(weight, scale, upstream, name)
    weight, upstream = weight.contiguous(), upstream.contiguous()
    blocks, constants = _shape(weight, form)
    if blocks:
        launch(
            _backward_kernel,
            (cdiv(blocks, constants["ROWS"]),),
            weight,
            scale.contiguous(),
            upstream,
            dw,
            dscale,
            blocks,
            **constants,
        )
    return dw, dscale


def _op_forward(weight: torch.Tensor, scale: torch.Tensor | None, name: str) -> torch.Tensor:
    return _launch_forward(weight, scale, name)


def _fake_forward(weight, scale, name) -> torch.Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


_backward_op = KernelOp("fake_quantise_backward", _launch_backward, _new_gradients)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    weight, scale, ctx.name = inputs
    ctx.learned = scale is not None
    if ctx.learned:
        ctx.save_for_backward(weight, scale)


def _backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    if not ctx.learned:
        return upstream, None, None
    weight, scale = ctx.saved_tensors
    dw, dscale = _backward_op(weight, scale, upstream, ctx.name)
    return dw, dscale.to(scale.dtype), None


_forward_op = KernelOp("fake_quantise", _op_forward, _fake_forward, setup_context=_setup_context, backward=_backward)


class _Reference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, scale: torch.Tensor | None, name: str) -> torch.Tensor:
        _setup_context(ctx, (weight, scale, name), weight)
        return reference_fake_quantise(weight, name, scale)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        if not ctx.learned:
            return upstream, None, None
        weight, scale = ctx.saved_tensors
        dw, dscale = reference_learned_gradients(weight, scale, upstream, ctx.name)
        return dw, dscale.to(scale.dtype), None


def _check(weight: torch.Tensor, scale: torch.Tensor | None, name: str) -> Format:
    check_floats(weight=weight, scale=scale)
    form = check_fits(weight, name)
    expected = (*weight.shape[:-1], weight.shape[-1] // form.columns(weight))
    if scale is not None and tuple(scale.shape) != expected:
        raise ValueError(f"scale: expected {expected}, one for each block, got {tuple(scale.shape)}")
    return form


def _on_triton(weight: torch.Tensor, form: Format) -> bool:
    return runs_on_triton(weight) and form.columns(weight) <= LONGEST and weight.dtype != torch.float64


def fake_quantise(weight: torch.Tensor, name: str, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Round weights to a block format and back, with straight-through gradients.

    Args:
        weight: [..., K], fp32, bf16 or fp16, K divisible by the format's block.
        name: q4_0, q8_0, int4_g32 or int8; see `formats`.
        scale: [..., K / block] floating, the scale of each block, which gets a gradient too; None for the scale that
            the format computes from the block.

    Returns:
        The values of the file, in the shape and dtype of `weight`.

    Raises:
        ValueError: For an unknown format, and for shapes and dtypes that are not listed.
    """
    form = _check(weight, scale, name)
    if not _on_triton(weight, form):
        return forbid_double_backward(_Reference.apply(weight, scale, name))
    return _forward_op(weight, scale, name)


@torch.no_grad()
def fake_quantise_into(out: torch.Tensor, weight: torch.Tensor, name: str, scale: torch.Tensor | None = None) -> None:
    """Write `fake_quantise(weight, name, scale)` to `out`, contiguous and of the shape of `weight`, without a graph.

    Raises:
        ValueError: As `fake_quantise`.
    """
    form = _check(weight, scale, name)
    if _on_triton(weight, form) and out.is_contiguous():
        _launch_forward(weight, scale, name, out)
    else:
        out.copy_(reference_fake_quantise(weight.float(), name, scale))


@torch.no_grad()
def learned_gradients(
    weight: torch.Tensor, scale: torch.Tensor, upstream: torch.Tensor, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of weights and scales from that of the quantised values, without a graph.

    Returns:
        That of `weight`, in the dtype of `upstream`, and that of `scale`, fp32.

    Raises:
        ValueError: As `fake_quantise`.
    """
    form = _check(weight, scale, name)
    if not _on_triton(weight, form):
        return reference_learned_gradients(weight, scale, upstream, name)
    return _launch_backward(weight, scale, upstream, name)
