"""Fake quantisation: weights rounded to a block format and back, in one pass, and the gradients through it.

    y = q d,   q = clamp(round(w / d)),   d = the block's own scale, or a given (learned) one

Gradients are those of learned step sizes (Esser et al., 2020, arXiv 1902.08153): `formats.reference_learned_gradients`.

Forward moves 2 N s bytes for N weights of s bytes (and 4 bytes a block of given scales); the backward of learned scales
3 N s. A program holds whole blocks, 32 weights or a row, so each weight is read once.
"""

from __future__ import annotations

from typing import Any

import torch

from distill_kernels.kernel_op import check_floats
from distill_kernels.launch import cdiv, next_power_of_2, runs_on_triton, tl, triton
from distill_kernels.launch_plans import launch
from distill_kernels.quantisation.formats import (
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
    tensors,
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
    w_ptr, scale_ptr, y_ptr = tensors
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
    tensors,
    n_blocks,
    COLUMNS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    BFLOAT16: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    w_ptr, scale_ptr, dy_ptr, dw_ptr, dscale_ptr = tensors
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


def _shape(weight: torch.Tensor, form: Format) -> tuple[tuple[int], int, dict[str, Any]]:
    """Return the grid, the number of blocks of a matrix, and the constants that both kernels take."""
    columns = form.columns(weight)
    block = next_power_of_2(columns)
    rows = max(1, TILE // block)
    constants = {"COLUMNS": columns, "LOW": form.low, "HIGH": form.high, "ROWS": rows, "BLOCK": block}
    constants |= {"BFLOAT16": form.scale_dtype == torch.bfloat16, "num_warps": min(max(rows * block // 1024, 4), 16)}
    # products and sums as written: a fused one would round a few weights in a million otherwise than the file's writer
    blocks = weight.numel() // columns
    return (cdiv(blocks, rows),), blocks, constants | {"enable_fp_fusion": False}


def _checked(weight: torch.Tensor, scale: torch.Tensor | None, name: str) -> Format | None:
    """Return the format where a kernel computes on `weight`; None where the reference does."""
    check_floats(weight=weight, scale=scale)
    form = check_fits(weight, name)
    expected = (*weight.shape[:-1], weight.shape[-1] // form.columns(weight))
    if scale is not None and tuple(scale.shape) != expected:
        raise ValueError(f"scale: expected {expected}, one for each block, got {tuple(scale.shape)}")
    fits = form.columns(weight) <= LONGEST and weight.dtype != torch.float64
    return form if fits and runs_on_triton(weight) else None


@torch.no_grad()
def fake_quantise_into(out: torch.Tensor, weight: torch.Tensor, name: str, scale: torch.Tensor | None = None) -> None:
    """Round weights to a block format and back, without a graph.

    Args:
        out: Gets the values of the file, in its own dtype; of the shape of `weight`.
        weight: [..., K], fp32, bf16 or fp16, K divisible by the format's block.
        name: A key of `formats.FORMATS`.
        scale: [..., K / block] floating, the scale of each block; None for the one that the format computes from it.

    Raises:
        ValueError: For an unknown format, and for shapes and dtypes that are not listed.
    """
    form = _checked(weight, scale, name)
    if form is None or not out.is_contiguous():
        out.copy_(reference_fake_quantise(weight.float(), name, scale))
        return
    weight = weight.contiguous()
    grid, blocks, constants = _shape(weight, form)
    constants |= {"SIGNED": form.signed, "ROUNDS_BY_STORED": form.rounds_by_stored, "GIVEN": scale is not None}
    if blocks:
        given = weight if scale is None else scale.contiguous()
        launch(_forward_kernel, grid, (weight, given, out), blocks, **constants)


@torch.no_grad()
def learned_gradients(
    weight: torch.Tensor, scale: torch.Tensor, upstream: torch.Tensor, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of weights and scales from that of the quantised values, without a graph.

    Returns:
        That of `weight`, in the dtype of `upstream`, and that of `scale`, fp32.

    Raises:
        ValueError: As `fake_quantise_into`.
    """
    form = _checked(weight, scale, name)
    if form is None:
        return reference_learned_gradients(weight, scale, upstream, name)
    weight, scale, upstream = weight.contiguous(), scale.contiguous(), upstream.contiguous()
    dw, dscale = torch.empty_like(upstream), torch.empty_like(scale, dtype=torch.float32)
    grid, blocks, constants = _shape(weight, form)
    if blocks:
        launch(_backward_kernel, grid, (weight, scale, upstream, dw, dscale), blocks, **constants)
    return dw, dscale
