"""Distance of hidden states of two models, a token at a time, summed over pairs of layers, with student gradients.

With s and t the states of a token in a layer of student and teacher, both of width H:

    mse         ||s - t||^2 / H               gradient 2 (s - t) / H
    cosine      1 - s.t / (||s|| ||t||)       gradient (cos s / ||s|| - t / ||t||) / ||s||

arXiv 1909.10351, 1910.01108. One launch visits all P pairs: forward reads both states of M tokens, backward again, and
writes P N H. Not for compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from distill_kernels.kernel_op import check_floats, forbid_double_backward
from distill_kernels.launch import cdiv, launch, next_power_of_2, runs_on_triton, tl, triton
from distill_kernels.operands import contiguous_rows, differentiable_once

TILE = 4096  # elements that a program holds at a time
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def reference_state_distance(
    student: Sequence[torch.Tensor],
    teacher: Sequence[torch.Tensor],
    rows: torch.Tensor,
    metric: str,
    picked: bool = False,
) -> torch.Tensor:
    """Return `state_distance` in plain PyTorch, in fp32 or fp64: the specification."""
    total = torch.zeros((), device=rows.device)
    for own, other in zip(student, teacher, strict=True):
        wide = torch.promote_types(own.dtype, torch.float32)
        s = (own if picked else own.index_select(0, rows)).to(wide)
        t = other.index_select(0, rows).to(wide)
        if metric == "mse":
            total = total + (s - t).square().mean(-1)
        else:
            s = s / torch.linalg.vector_norm(s, dim=-1, keepdim=True).clamp_min(1e-12)
            t = t / torch.linalg.vector_norm(t, dim=-1, keepdim=True).clamp_min(1e-12)
            total = total + (1 - (s * t).sum(-1))
    return total


@triton.jit
def _rows_of(table_ptr, place, row, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    # pointers to rows of the tensor whose address and row stride stand at `place` of the table
    ptr = tl.load(table_ptr + place).to(tl.pointer_type(DTYPE))
    stride = tl.load(table_ptr + place + 1)
    if ALIGNED:
        ptr = tl.multiple_of(ptr, 16)
        stride = tl.multiple_of(stride, 16)
    return ptr + row * stride


@triton.jit
def _load(s_ptr, t_ptr, cols, inside, WIDTH: tl.constexpr):
    mask = inside[:, None] & (cols < WIDTH)[None, :]  # [ROWS, BLOCK]
    s = tl.load(s_ptr[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    t = tl.load(t_ptr[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    return s, t, mask


@triton.jit(do_not_specialize=["n_pairs", "n_rows"])
def _distance_kernel(
    table_ptr,
    rows_ptr,
    out_ptr,
    upstream,
    apart,
    n_pairs,
    n_rows,
    COSINE: tl.constexpr,
    GRADIENT: tl.constexpr,
    PICKED: tl.constexpr,
    DTYPES: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add ROWS rows' distances over all pairs of layers, or with GRADIENT write those of the student's states.

    table: int64 [pairs, 4], addresses and row strides of the student's and of the teacher's states. upstream: pointer
    and stride. apart: elements of one pair's gradient in `out`. PICKED: the student has the rows of `rows` alone.
    """
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    inside = number < n_rows
    row = tl.load(rows_ptr + number, mask=inside, other=0)
    own_row = number if PICKED else row
    total = tl.zeros([ROWS], tl.float32)
    if GRADIENT:
        u = tl.load(upstream[0] + number * upstream[1], mask=inside, other=0.0)
    for pair in range(n_pairs):
        s_ptr = _rows_of(table_ptr, 4 * pair, own_row, DTYPES[0], ALIGNED)
        t_ptr = _rows_of(table_ptr, 4 * pair + 2, row, DTYPES[1], ALIGNED)
        squares = tl.zeros([ROWS], tl.float32)  # ||s||^2, or ||s - t||^2
        of_teacher = tl.zeros([ROWS], tl.float32)
        product = tl.zeros([ROWS], tl.float32)
        # A row in steps of BLOCK columns, [ROWS, BLOCK]. The gradient of the squared distance needs no sum before it.
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
            total += 1 - cosine if COSINE else squares / WIDTH
        else:
            # The second reading of the row, mostly from L2: d(1 - cos)/ds = (s cos / |s| - t / |t|) / |s|.
            for start in range(0, WIDTH, BLOCK):
                cols = start + tl.arange(0, BLOCK)
                s, t, mask = _load(s_ptr, t_ptr, cols, inside, WIDTH)
                if COSINE:
                    each = (s * (cosine / norm_s)[:, None] - t / norm_t[:, None]) * (u / norm_s)[:, None]
                else:
                    each = (s - t) * (u * (2.0 / WIDTH))[:, None]
                at = out_ptr + own_row[:, None] * WIDTH + cols[None, :]
                tl.store(at, each.to(out_ptr.dtype.element_ty), mask=mask)
            out_ptr += apart
    if not GRADIENT:
        tl.store(out_ptr + number, total, mask=inside)


def _launch(
    student: Sequence[torch.Tensor],
    teacher: Sequence[torch.Tensor],
    rows: torch.Tensor,
    constants: dict[str, bool],
    upstream: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the distances, fp32 [M]; with their upstream gradient, that of the student's states, [P, N, H]."""
    student = [contiguous_rows(states) for states in student]
    teacher = [contiguous_rows(states) for states in teacher]
    rows = contiguous_rows(rows)
    first = student[0]
    width = first.shape[1]
    if upstream is None:
        out = torch.empty(rows.shape, dtype=torch.float32, device=first.device)
    else:
        # rows that are not compared have a gradient of 0, which no program writes
        make = torch.empty if len(rows) == len(first) else torch.zeros
        out = make((len(student), *first.shape), dtype=first.dtype, device=first.device)
    if not len(rows):
        return out
    table = [[s.data_ptr(), s.stride(0), t.data_ptr(), t.stride(0)] for s, t in zip(student, teacher, strict=True)]
    aligned = not any(number % 16 for row in table for number in row)
    addresses = torch.tensor(table)
    if first.is_cuda:
        addresses = addresses.pin_memory().to(first.device, non_blocking=True)  # without a host sync
    given = out if upstream is None else upstream  # forward no gradient is read
    block = min(next_power_of_2(width), TILE)
    launch(
        _distance_kernel,
        (cdiv(len(rows), TILE // block),),
        addresses,
        rows,
        out,
        (given, given.stride(0)),
        first.numel(),
        len(student),
        len(rows),
        **constants,
        GRADIENT=upstream is not None,
        DTYPES=(_DTYPES[first.dtype], _DTYPES[teacher[0].dtype]),
        ALIGNED=aligned,
        WIDTH=width,
        ROWS=TILE // block,
        BLOCK=block,
        num_warps=8,
    )
    return out


class _Distance(torch.autograd.Function):
    """Not an op: it takes lists of tensors, of which the kernel reads a table of addresses made anew in each call, and
    keeps the teacher's states as an attribute, as inference tensors cannot be saved.
    """

    @staticmethod
    def forward(
        ctx: Any, teacher: list[torch.Tensor], rows: torch.Tensor, constants: dict[str, bool], *student: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, *student)
        ctx.teacher = teacher
        ctx.constants = constants
        return _launch(student, teacher, rows, constants)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, *student = ctx.saved_tensors
        gradient = _launch(student, ctx.teacher, rows, ctx.constants, upstream)
        return None, None, None, *gradient.unbind()


def state_distance(
    student: Sequence[torch.Tensor],
    teacher: Sequence[torch.Tensor],
    rows: torch.Tensor,
    metric: Literal["mse", "cosine"],
    *,
    picked: bool = False,
) -> torch.Tensor:
    """Return the sum over pairs of layers of each row's distance, differentiable by the student's states.

    Args:
        student: States of P layers, floating point [N, H], of one dtype.
        teacher: States of the layers that they are compared with, [N, H], of one dtype, without a gradient.
        rows: int64 [M], each once.
        metric: `mse` or `cosine`.
        picked: The student's states are those of `rows` alone, [M, H].

    Returns:
        fp32 [M] (fp64 for fp64).

    Raises:
        ValueError: Shapes or dtypes that differ, or an unsupported dtype.
    """
    wanted = [len(rows) if picked else len(teacher[0]), teacher[0].shape[1]]
    for name, states, shape in (("student", student, wanted), ("teacher", teacher, list(teacher[0].shape))):
        check_floats(**{name: states[0]})
        for each in states:
            if list(each.shape) != shape or each.dtype != states[0].dtype:
                raise ValueError(
                    f"{name}: expected states {shape} of dtype {states[0].dtype}, got {list(each.shape)} of "
                    f"{each.dtype}"
                )
    if not runs_on_triton(student[0]):
        return forbid_double_backward(reference_state_distance(student, teacher, rows, metric, picked))
    constants = {"COSINE": metric == "cosine", "PICKED": picked}
    distances: torch.Tensor = _Distance.apply(list(teacher), rows, constants, *student)
    return distances
