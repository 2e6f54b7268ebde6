"""Fake quantisation: weights rounded to a block format and back, in one pass, and the gradients through it.

    y = q d - m,   q = clamp(round((w + m) / d)),   d, m = the block's own scale, or given (learned) ones

Gradients are those of learned step sizes (Esser et al., 2020, arXiv 1902.08153): `formats.reference_learned_gradients`.

Forward moves 2 N s bytes for N weights of s bytes (and 4 bytes a block of each given scale); the backward of learned
scales 3 N s. A program holds whole blocks of a row's weights, so each weight is read once.
"""

from __future__ import annotations

from typing import Any

import torch

from distill_kernels.kernel_op import ReplayedLauncher, check_floats
from distill_kernels.launch import cdiv, launch, next_power_of_2, runs_on_triton, tl, triton
from distill_kernels.quantisation.formats import (
    check_fits,
    reference_fake_quantise,
    reference_learned_gradients,
)
from distill_kernels.quantisation.number_format import NumberFormat, Scales

TILE = 4096  # weights a program holds, unless a row is longer
LONGEST = 65_536  # weights of a block that one program can hold


@triton.jit
def _round_half_away(x):
    whole = tl.floor(tl.abs(x))
    rounded = whole + tl.where(tl.abs(x) - whole >= 0.5, 1.0, 0.0)
    return tl.where(x < 0, -rounded, rounded)


@triton.jit
def _reciprocal(scale):
    return tl.where(scale == 0, 0.0, tl.div_rn(1.0, tl.where(scale == 0, 1.0, scale)))


@triton.jit
def _round_half_even(x):
    return (x + 12582912.0) - 12582912.0  # 1.5 2^23: what does not fit is rounded off by the addition


@triton.jit
def _round(x, MANTISSA: tl.constexpr, EXPONENT: tl.constexpr, EVEN: tl.constexpr):
    # to the nearest code, before it is clamped
    if MANTISSA > 0:
        exponent = ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127
        power = tl.maximum(exponent, EXPONENT) - MANTISSA  # of the distance between codes
        step = ((127 + power) << 23).to(tl.float32, bitcast=True)
        return _round_half_even(x * ((127 - power) << 23).to(tl.float32, bitcast=True)) * step
    if EVEN:
        return _round_half_even(x)
    return _round_half_away(x)


@triton.jit
def _relative(w, minimum_ptr, blocks, mask, scale, MINIMUM: tl.constexpr, EVEN: tl.constexpr):
    # weights in units of their scales, 0 for a scale of 0
    if MINIMUM:
        w += tl.load(minimum_ptr + blocks, mask=mask, other=0.0)[:, None]
    if EVEN:
        divisor = tl.where(scale == 0, 1.0, scale)[:, None] + tl.zeros_like(w)
        return tl.where(scale[:, None] == 0, 0.0, tl.div_rn(w, divisor))
    return w * _reciprocal(scale)[:, None]


@triton.jit(do_not_specialize=["n_blocks"])
def _forward_kernel(
    tensors,
    n_blocks,
    COLUMNS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MANTISSA: tl.constexpr,
    EXPONENT: tl.constexpr,
    EVEN: tl.constexpr,
    MINIMUM: tl.constexpr,
    SIGNED: tl.constexpr,
    ROUNDS_BY_STORED: tl.constexpr,
    BFLOAT16: tl.constexpr,
    GIVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round ROWS blocks of COLUMNS weights and back; a block is a row of the tile. GIVEN: its scale is loaded.

    Other constants are the fields of `NumberFormat` and its codes.
    """
    w_ptr, scale_ptr, minimum_ptr, y_ptr = tensors
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    cols = tl.arange(0, BLOCK)  # [BLOCK]
    mask = (rows < n_blocks)[:, None] & (cols < COLUMNS)[None, :]
    at = rows[:, None] * COLUMNS + cols[None, :]
    w = tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    if GIVEN:
        scale = tl.load(scale_ptr + rows, mask=rows < n_blocks, other=0.0)
        x = _relative(w, minimum_ptr, rows, rows < n_blocks, scale, MINIMUM, EVEN)
        codes = _round(x, MANTISSA, EXPONENT, EVEN)
    else:
        # Lanes beyond the block loaded 0, which is never the largest magnitude unless all weights are 0.
        if SIGNED:
            first = tl.argmax(tl.abs(w), 1)  # [ROWS], the first of equals
            rounding = tl.div_rn(tl.sum(tl.where(cols[None, :] == first[:, None], w, 0.0), 1), LOW * 1.0)
        else:
            rounding = tl.div_rn(tl.max(tl.abs(w), 1), HIGH * 1.0)
        # The scale as a file stores it, in 16 bits; codes are found with it, or with the one before that rounding.
        scale = rounding.to(tl.bfloat16).to(tl.float32) if BFLOAT16 else rounding.to(tl.float16).to(tl.float32)
        x = w * _reciprocal(scale if ROUNDS_BY_STORED else rounding)[:, None]
        codes = tl.floor(x + (0.5 - LOW)) + LOW if SIGNED else _round(x, MANTISSA, EXPONENT, EVEN)
    y = tl.minimum(tl.maximum(codes, LOW), HIGH) * scale[:, None]
    if MINIMUM:
        y -= tl.load(minimum_ptr + rows, mask=rows < n_blocks, other=0.0)[:, None]
    y = tl.where(tl.abs(w) < float("inf"), y, w)  # clamped codes would make NaN and infinity finite
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_blocks"])
def _backward_kernel(
    tensors,
    n_blocks,
    COLUMNS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MANTISSA: tl.constexpr,
    EXPONENT: tl.constexpr,
    EVEN: tl.constexpr,
    MINIMUM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of ROWS blocks' weights, scales and minima, with the codes of the forward found again."""
    w_ptr, scale_ptr, minimum_ptr, dy_ptr, dw_ptr, dscale_ptr, dminimum_ptr = tensors
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    cols = tl.arange(0, BLOCK)  # [BLOCK]
    mask = (rows < n_blocks)[:, None] & (cols < COLUMNS)[None, :]
    at = rows[:, None] * COLUMNS + cols[None, :]
    w = tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + rows, mask=rows < n_blocks, other=0.0)
    x = _relative(w, minimum_ptr, rows, rows < n_blocks, scale, MINIMUM, EVEN)
    rounded = _round(x, MANTISSA, EXPONENT, EVEN)
    codes = tl.minimum(tl.maximum(rounded, LOW), HIGH)
    inside = rounded == codes
    # dy/dd = q - x where rounding is passed straight through (dx/dd = -x / d), and q where x was clamped
    dscale = tl.sum(dy * (codes - tl.where(inside, x, 0.0)), 1)
    tl.store(dw_ptr + at, tl.where(inside, dy, 0.0).to(dw_ptr.dtype.element_ty), mask=mask)
    tl.store(dscale_ptr + rows, dscale, mask=rows < n_blocks)
    if MINIMUM:
        tl.store(dminimum_ptr + rows, -tl.sum(tl.where(inside, 0.0, dy), 1), mask=rows < n_blocks)


def _shape(weight: torch.Tensor, form: NumberFormat) -> tuple[tuple[int], int, dict[str, Any]]:
    """Return the grid, the number of blocks of a matrix, and the constants that both kernels take."""
    columns = form.columns(weight)
    block = next_power_of_2(columns)
    rows = max(1, TILE // block)
    constants = {"COLUMNS": columns, "ROWS": rows, "BLOCK": block, "MINIMUM": form.has_minimum}
    constants |= {name.upper(): value for name, value in form.codes._asdict().items()}
    constants |= {"num_warps": min(max(rows * block // 1024, 4), 16)}
    # products and sums as written: a fused one would round a few weights in a million otherwise than the file's writer
    blocks = weight.numel() // columns
    return (cdiv(blocks, rows),), blocks, constants | {"enable_fp_fusion": False}


def _checked(weight: torch.Tensor, scales: Scales | None, name: str | NumberFormat) -> tuple[NumberFormat, bool]:
    """Return the format, and whether a kernel computes on `weight`; otherwise the reference does."""
    check_floats(weight=weight)
    form = check_fits(weight, name, scales)
    expected = (*weight.shape[:-1], weight.shape[-1] // form.columns(weight))
    for part in () if scales is None else scales[: 1 + form.has_minimum]:
        if part is None or tuple(part.shape) != expected or part.dtype != torch.float32:
            came = None if part is None else (tuple(part.shape), part.dtype)
            raise ValueError(f"scales: expected float32 {expected}, one for each block, got {came}")
    fits = form.columns(weight) <= LONGEST and weight.dtype != torch.float64
    return form, fits and runs_on_triton(weight)


@torch.no_grad()
def fake_quantise_into(
    out: torch.Tensor, weight: torch.Tensor, name: str | NumberFormat, scales: Scales | None = None
) -> None:
    """Round weights to a block format and back, without a graph.

    Args:
        out: Gets the values of the file, in its own dtype; of the shape of `weight`.
        weight: [..., K], fp32, bf16 or fp16, K divisible by the format's block.
        name: A key of `formats.FORMATS`, or a format. By name and without scales, `nvfp4` has the host wait once.
        scales: The blocks' scales, as `NumberFormat.snap` rounds them to those of a file; None for the format's own.

    Raises:
        ValueError: For an unknown format, and for shapes and dtypes that are not listed.
    """
    form, in_kernel = _checked(weight, scales, name)
    if not in_kernel or not out.is_contiguous():
        out.copy_(reference_fake_quantise(weight.float(), form, scales))
        return
    if scales is None and not form.in_kernel:
        scales = form.snap(form.first(weight))
    _forward(weight.contiguous(), *_contiguous(scales), out, form)


def _launch_forward(
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    minimum: torch.Tensor | None,
    out: torch.Tensor,
    form: NumberFormat,
) -> None:
    grid, blocks, constants = _shape(weight, form)
    constants |= {"SIGNED": form.signed, "ROUNDS_BY_STORED": form.rounds_by_stored, "GIVEN": scale is not None}
    constants |= {"BFLOAT16": form.scale_dtype == torch.bfloat16}
    tensors = weight, _given_or(scale, weight), _given_or(minimum, weight), out
    if blocks:
        launch(_forward_kernel, grid, tensors, blocks, **constants)


def _launch_backward(
    weight: torch.Tensor,
    scale: torch.Tensor,
    minimum: torch.Tensor | None,
    upstream: torch.Tensor,
    dw: torch.Tensor | None,
    dscale: torch.Tensor,
    dminimum: torch.Tensor | None,
    form: NumberFormat,
) -> None:
    """Launch the backward; None for `dw` takes the place of `upstream`."""
    grid, blocks, constants = _shape(weight, form)
    read = weight, scale, _given_or(minimum, weight), upstream
    written = _given_or(dw, upstream), dscale, _given_or(dminimum, dscale)
    if blocks:
        launch(_backward_kernel, grid, (*read, *written), blocks, **constants)


# a step rounds hundreds of matrices of few shapes
_forward = ReplayedLauncher(_launch_forward)
_backward = ReplayedLauncher(_launch_backward)


def _given_or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or another for a pointer that a kernel does not read."""
    return other if tensor is None else tensor


def _contiguous(scales: Scales | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return contiguous scales and minima, None for those that there are not."""
    if scales is None:
        return None, None
    return scales.scale.contiguous(), None if scales.minimum is None else scales.minimum.contiguous()


@torch.no_grad()
def learned_gradients(
    weight: torch.Tensor,
    scales: Scales,
    upstream: torch.Tensor,
    name: str | NumberFormat,
    out: tuple[torch.Tensor, Scales] | None = None,
) -> tuple[torch.Tensor, Scales]:
    """Return the gradients of weights and scales from that of the quantised values, without a graph.

    Args:
        weight: weights, [..., K].
        scales: scales of the blocks, as `fake_quantise_into` takes them.
        upstream: gradient of the quantised values, [..., K].
        name: key of `formats.FORMATS`, or a format.
        out: contiguous tensors that get the results, of which the first may be `upstream`.

    Returns:
        That of `weight`, in the dtype of `upstream`, and those of the scales, fp32.

    Raises:
        ValueError: As `fake_quantise_into`.
    """
    form, in_kernel = _checked(weight, scales, name)
    if not in_kernel:
        found = reference_learned_gradients(weight, scales, upstream, form)
        for own, part in zip((out[0], *out[1]), (found[0], *found[1]), strict=True) if out is not None else ():
            if own is not None and part is not None:
                own.copy_(part)
        return found if out is None else out
    weight = weight.contiguous()
    upstream = upstream.contiguous()
    scale, minimum = _contiguous(scales)
    assert scale is not None
    if out is None:
        more = torch.empty_like(scale) if form.has_minimum else None
        out = torch.empty_like(upstream), Scales(torch.empty_like(scale), more)
    dw, (dscale, dminimum) = out
    _backward(weight, scale, minimum, upstream, None if dw is upstream else dw, dscale, dminimum, form)
    return out
