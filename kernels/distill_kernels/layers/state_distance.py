"""Distance of hidden states of two models, a token at a time, with the gradient of the first.

With s and t the states of a token in student and teacher, both of width H:

    mse         ||s - t||^2 / H               gradient 2 (s - t) / H
    cosine      1 - s.t / (||s|| ||t||)       gradient (cos s / ||s|| - t / ||t||) / ||s||

arXiv 1909.10351, 1910.01108. Forward reads both states of M tokens, backward again, and writes N H; not for compile.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from distill_kernels.kernel_op import check_floats, forbid_double_backward
from distill_kernels.launch import cdiv, next_power_of_2, runs_on_triton, tl, triton
from distill_kernels.launch_plans import launch
from distill_kernels.operands import contiguous_rows, differentiable_once

TILE = 4096  # elements that a program holds at a time


def reference_state_distance(
    student: torch.Tensor, teacher: torch.Tensor, rows: torch.Tensor, metric: str
) -> torch.Tensor:
    """Return `state_distance` in plain PyTorch, in fp32 or fp64: the specification."""
    wide = torch.promote_types(student.dtype, torch.float32)
    s, t = (states.index_select(0, rows).to(wide) for states in (student, teacher))
    if metric == "mse":
        return (s - t).square().mean(-1)
    s, t = (x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-12) for x in (s, t))
    return 1 - (s * t).sum(-1)


@triton.jit
def _load(s_ptr, t_ptr, cols, inside, WIDTH: tl.constexpr):
    mask = inside[:, None] & (cols < WIDTH)[None, :]  # [ROWS, BLOCK]
    s = tl.load(s_ptr[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    t = tl.load(t_ptr[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    return s, t, mask


@triton.jit(do_not_specialize=["n_rows"])
def _distance_kernel(
    student,
    teacher,
    rows_ptr,
    out_ptr,
    upstream,
    n_rows,
    COSINE: tl.constexpr,
    GRADIENT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    inside = number < n_rows
    row = tl.load(rows_ptr + number, mask=inside, other=0)
    s_ptr = student[0] + row * student[1]
    t_ptr = teacher[0] + row * teacher[1]
    squares = tl.zeros([ROWS], tl.float32)  # ||s||^2, or ||s - t||^2
    of_teacher = tl.zeros([ROWS], tl.float32)
    product = tl.zeros([ROWS], tl.float32)
    if COSINE or not GRADIENT:
        for start in range(0, WIDTH, BLOCK):
            s, t, _ = _load(s_ptr, t_ptr, start + tl.arange(0, BLOCK), inside, WIDTH)
            s = s if COSINE else s - t
            squares += tl.sum(s * s, 1)
            of_teacher += tl.sum(t * t, 1)
            product += tl.sum(s * t, 1)
    norm_s = tl.maximum(tl.sqrt(squares), 1e-12)
    norm_t = tl.maximum(tl.sqrt(of_teacher), 1e-12)
    cosine = product / norm_s / norm_t
    if not GRADIENT:
        tl.store(out_ptr + number, 1 - cosine if COSINE else squares / WIDTH, mask=inside)
    else:
        u = tl.load(upstream[0] + number * upstream[1], mask=inside, other=0.0)
        for start in range(0, WIDTH, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            s, t, mask = _load(s_ptr, t_ptr, cols, inside, WIDTH)
            if COSINE:
                each = (s * (cosine / norm_s)[:, None] - t / norm_t[:, None]) * (u / norm_s)[:, None]
            else:
                each = (s - t) * (u * (2.0 / WIDTH))[:, None]
            at = out_ptr + row[:, None] * WIDTH + cols[None, :]
            tl.store(at, each.to(out_ptr.dtype.element_ty), mask=mask)


def _launch(student, teacher, rows, cosine, upstream=None) -> torch.Tensor:  # distances; with upstream, the gradient
    student, teacher, rows = contiguous_rows(student), contiguous_rows(teacher), contiguous_rows(rows)
    shape, dtype = (rows.shape, torch.float32) if upstream is None else (student.shape, student.dtype)
    make = torch.empty if upstream is None or len(rows) == len(student) else torch.zeros
    out = make(shape, dtype=dtype, device=student.device)
    given, block = out if upstream is None else upstream, min(next_power_of_2(student.shape[-1]), TILE)
    constants = {"COSINE": cosine, "GRADIENT": upstream is not None, "WIDTH": student.shape[-1], "num_warps": 8}
    constants |= {"ROWS": TILE // block, "BLOCK": block}
    operands = [(states, states.stride(0)) for states in (student, teacher)]
    if count := len(rows):
        grid, upstream_rows = (cdiv(count, TILE // block),), (given, given.stride(0))
        launch(_distance_kernel, grid, *operands, rows, out, upstream_rows, count, **constants)
    return out


class _Distance(torch.autograd.Function):
    @staticmethod
    def forward(ctx, student, teacher, rows, cosine) -> torch.Tensor:
        ctx.save_for_backward(student, rows)
        ctx.teacher, ctx.cosine = teacher, cosine  # an inference tensor cannot be saved
        return _launch(student, teacher, rows, cosine)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        student, rows = ctx.saved_tensors
        return _launch(student, ctx.teacher, rows, ctx.cosine, upstream), None, None, None


def state_distance(
    student: torch.Tensor, teacher: torch.Tensor, rows: torch.Tensor, metric: Literal["mse", "cosine"]
) -> torch.Tensor:
    """Return the distance of each of `rows` between states of two models, differentiable by the student's.

    Args:
        student: Floating point [N, H].
        teacher: Floating point [N, H], without a gradient.
        rows: int64 [M], each once.
        metric: `mse` or `cosine`.

    Returns:
        fp32 [M] (fp64 for fp64).

    Raises:
        ValueError: Shapes that differ, or an unsupported dtype.
    """
    check_floats(student=student, teacher=teacher)
    if student.dim() != 2 or student.shape != teacher.shape:
        raise ValueError(f"student: expected states as the teacher's {list(teacher.shape)}, got {list(student.shape)}")
    if not runs_on_triton(student):
        return forbid_double_backward(reference_state_distance(student, teacher, rows, metric))
    return _Distance.apply(student, teacher, rows, metric == "cosine")
