"""Divergence of attention relations of two models, a token at a time, with the gradient of the first.

With A_i the queries, keys or values of token i in one of the relation heads, of width d (arXiv 2012.15828):

    z_ij = A_i . A_j / sqrt(d)     R_i = softmax of z_ij over j <= i in the document of i
    KL(R^t_i || R^s_i) = sum_j R^t_ij (z^t_ij - z^s_ij) - lse^t_i + lse^s_i

z is symmetric, so a token's gradient is one sum over all tokens j of its document, with u the upstream gradient:

    dA_i = sum_j w_ij A_j     w_ij = u_k (R^s_k. - R^t_k.) / sqrt(d),  k the later one of i and j; twice that for j = i

Relations [S, S] are never in memory: tiles of keys are visited with running maxima and sums, as in attention. Work is
2 B h S^2 d operations forward, 6 B h S^2 d backward; bytes: both models' A read, 20 a token and head written. Not for
compile.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from distill_kernels.kernel_op import KernelOp, check_floats, forbid_double_backward
from distill_kernels.launch import cdiv, launch, next_power_of_2, runs_on_triton, tl, triton
from distill_kernels.operands import contiguous_rows, differentiable_once

MOST = 64  # tokens of a program, and of a step of its loop
OWN = 64  # columns of the gradient that a program makes


def reference_relation_divergence(
    student: torch.Tensor, teacher: torch.Tensor, documents: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `relation_divergence` in plain PyTorch, in fp32 or fp64: the specification."""
    wide = torch.promote_types(student.dtype, torch.float32)
    length = student.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=student.device).triu(1)
    if documents is not None:
        hidden = hidden | (documents[:, None, :, None] != documents[:, None, None, :])
    logs = []
    with torch.autocast(student.device.type, enabled=False):
        for states in (student.to(wide), teacher.to(wide, copy=True)):
            scores = (states / math.sqrt(states.shape[-1])) @ states.mT
            logs.append(scores.masked_fill(hidden, -torch.inf).log_softmax(-1).masked_fill(hidden, 0.0))
    return (logs[1].exp().masked_fill(hidden, 0.0) * (logs[1] - logs[0])).sum(-1).mean(1)


@triton.jit
def _scores(model, row, head, i, j, length, WIDTH: tl.constexpr, TILE: tl.constexpr):
    # z of the tokens i and j, fp32 [TILE, TILE]. model: pointer, strides of rows, heads and tokens, 1 / sqrt(d)
    ptr, row_stride, head_stride, stride, scale = model
    ptr += row * row_stride + head * head_stride
    z = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, WIDTH, 64):
        d = start + tl.arange(0, 64)
        own = tl.load(ptr + i[:, None] * stride + d[None, :], mask=(i < length)[:, None] & (d < WIDTH), other=0.0)
        other = tl.load(ptr + j[:, None] * stride + d[None, :], mask=(j < length)[:, None] & (d < WIDTH), other=0.0)
        # "ieee": fp32 states are multiplied in fp32, not in tf32
        z = tl.dot(own, other.T, z, input_precision="ieee")
    return z * scale


@triton.jit
def _sees(i, j, documents_ptr, length, PACKED: tl.constexpr):
    # whether i and j are tokens of one document, [TILE, TILE]
    sees = (i < length)[:, None] & (j < length)[None, :]
    if PACKED:
        of_i = tl.load(documents_ptr + i, mask=i < length, other=-1)
        sees &= of_i[:, None] == tl.load(documents_ptr + j, mask=j < length, other=-1)[None, :]
    return sees


@triton.jit
def _add(m, total, z, sees):
    # running maximum and sum of exponentials; the exponentials of z, and the factor of sums so far
    new = tl.maximum(m, tl.max(tl.where(sees, z, float("-inf")), 1))
    # While a row has seen nothing its maximum is -inf, and -inf less -inf would be NaN: 0 takes its place.
    shift = tl.where(new == float("-inf"), 0.0, new)
    e = tl.where(sees, tl.exp(z - shift[:, None]), 0.0)
    shrink = tl.exp(m - shift)
    return new, total * shrink + tl.sum(e, 1), e, shrink


@triton.jit
def _sums(ptr, i, apart, inside):
    # maximum of the scores and sum of exponentials below it, of the student and of the teacher
    m_s = tl.load(ptr + i, mask=inside, other=0.0)
    total_s = tl.load(ptr + apart + i, mask=inside, other=1.0)
    m_t = tl.load(ptr + 2 * apart + i, mask=inside, other=0.0)
    return m_s, total_s, m_t, tl.load(ptr + 3 * apart + i, mask=inside, other=1.0)


@triton.jit(do_not_specialize=["length"])
def _forward_kernel(
    student,
    teacher,
    documents_ptr,
    out_ptr,
    sums_ptr,
    heads,
    length,
    WIDTHS: tl.constexpr,
    PACKED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute the divergences of TILE tokens of one head, and keep maxima and sums, [4, B h, S], for the gradient."""
    row = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m_s = tl.full([TILE], float("-inf"), tl.float32)
    m_t = tl.full([TILE], float("-inf"), tl.float32)
    total_s = tl.zeros([TILE], tl.float32)
    total_t = tl.zeros([TILE], tl.float32)
    # Sum of e^(z_t - m_t) (z_t - z_s), rescaled with the teacher's sum as its maximum moves.
    weighted = tl.zeros([TILE], tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * TILE, TILE):
        j = start + tl.arange(0, TILE)
        sees = _sees(i, j, documents_ptr + row * length, length, PACKED) & (j[None, :] <= i[:, None])
        z_s = _scores(student, row, head, i, j, length, WIDTHS[0], TILE)
        z_t = _scores(teacher, row, head, i, j, length, WIDTHS[1], TILE)
        m_s, total_s, _, _ = _add(m_s, total_s, z_s, sees)
        m_t, total_t, e_t, shrink = _add(m_t, total_t, z_t, sees)
        weighted = weighted * shrink + tl.sum(e_t * (z_t - z_s), 1)
    # KL = sum_j R_t (z_t - z_s) - lse_t + lse_s, the difference of two lse by their maxima and sums. Rows past the end
    # saw nothing: finite numbers in their place keep NaN out.
    inside = i < length
    m_s = tl.where(inside, m_s, 0.0)
    m_t = tl.where(inside, m_t, 0.0)
    total_s = tl.where(inside, total_s, 1.0)
    total_t = tl.where(inside, total_t, 1.0)
    apart = tl.num_programs(1).to(tl.int64) * length
    at = tl.program_id(1).to(tl.int64) * length + i
    value = weighted / total_t + (m_s - m_t) + (tl.log(total_s) - tl.log(total_t))
    tl.store(out_ptr + at, value, mask=inside)
    tl.store(sums_ptr + at, m_s, mask=inside)
    tl.store(sums_ptr + apart + at, total_s, mask=inside)
    tl.store(sums_ptr + 2 * apart + at, m_t, mask=inside)
    tl.store(sums_ptr + 3 * apart + at, total_t, mask=inside)


@triton.jit(do_not_specialize=["length"])
def _backward_kernel(
    student,
    teacher,
    documents_ptr,
    sums_ptr,
    upstream,
    gradient,
    heads,
    length,
    WIDTHS: tl.constexpr,
    OWN: tl.constexpr,
    PACKED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute OWN columns of the gradient of TILE tokens: relations are symmetric, so that one sum over j has it all.

    Scores of both models are computed again for each of the WIDTHS[0] / OWN programs of a tile.
    """
    row = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    a_ptr, row_stride, head_stride, stride, scale = student
    a_ptr += row * row_stride + head * head_stride
    u_ptr = upstream[0] + row * upstream[1] + head * upstream[2]
    apart = tl.num_programs(1).to(tl.int64) * length
    sums_ptr += tl.program_id(1).to(tl.int64) * length
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    d = tl.program_id(2) * OWN + tl.arange(0, OWN)
    u_i = tl.load(u_ptr + i * upstream[3], mask=i < length, other=0.0)
    m_si, total_si, m_ti, total_ti = _sums(sums_ptr, i, apart, i < length)
    total = tl.zeros([TILE, OWN], tl.float32)
    for start in range(0, length, TILE):
        j = start + tl.arange(0, TILE)
        u_j = tl.load(u_ptr + j * upstream[3], mask=j < length, other=0.0)
        m_sj, total_sj, m_tj, total_tj = _sums(sums_ptr, j, apart, j < length)
        sees = _sees(i, j, documents_ptr + row * length, length, PACKED)
        z_s = _scores(student, row, head, i, j, length, WIDTHS[0], TILE)
        z_t = _scores(teacher, row, head, i, j, length, WIDTHS[1], TILE)
        # R is a row's softmax over earlier tokens: of i and j the later one's maximum, sum and upstream gradient count.
        later = j[None, :] <= i[:, None]  # i is the later one
        r_s = tl.exp(tl.where(sees, z_s - tl.where(later, m_si[:, None], m_sj[None, :]), float("-inf")))
        r_t = tl.exp(tl.where(sees, z_t - tl.where(later, m_ti[:, None], m_tj[None, :]), float("-inf")))
        r_s /= tl.where(later, total_si[:, None], total_sj[None, :])
        r_t /= tl.where(later, total_ti[:, None], total_tj[None, :])
        w = (r_s - r_t) * tl.where(later, u_i[:, None], u_j[None, :]) * scale
        # z_ii = A_i . A_i holds A_i twice
        w = tl.where(i[:, None] == j[None, :], 2 * w, w)
        mask = (j < length)[:, None] & (d < WIDTHS[0])[None, :]
        a = tl.load(a_ptr + j[:, None] * stride + d[None, :], mask=mask, other=0.0)
        total = tl.dot(w.to(a.dtype), a, total, input_precision="ieee")
    at = gradient[0] + row * gradient[1] + head * gradient[2] + i[:, None] * gradient[3] + d[None, :]
    mask = (i < length)[:, None] & (d < WIDTHS[0])[None, :]
    tl.store(at, total.to(gradient[0].dtype.element_ty), mask=mask)


def _launch(
    kernel: Any, more: tuple[Any, ...], student: torch.Tensor, teacher: torch.Tensor, documents: torch.Tensor | None
) -> None:
    """Launch a kernel on both models' states, with `more` arguments after the documents."""
    rows, heads, length, width = student.shape
    widths = (width, teacher.shape[-1])
    tile = min(MOST, max(16, next_power_of_2(length)))
    models = [
        (states, *states.stride()[:3], 1 / math.sqrt(own))
        for states, own in zip(map(contiguous_rows, (student, teacher)), widths, strict=True)
    ]
    own = {} if kernel is _forward_kernel else {"OWN": max(16, min(next_power_of_2(width), OWN))}
    grid = (cdiv(length, tile), rows * heads, cdiv(width, own["OWN"]) if own else 1)
    places = student if documents is None else documents.contiguous()
    constants = {"WIDTHS": widths, "PACKED": documents is not None, "TILE": tile, **own}
    if rows * heads * length:
        launch(kernel, grid, *models, places, *more, heads, length, **constants, num_warps=8)


def _launch_forward(
    student: torch.Tensor, teacher: torch.Tensor, documents: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return divergences [B, h, S], and maxima and sums of the student's and of the teacher's scores [4, B, h, S]."""
    out, sums = _fake_forward(student, teacher, documents)
    _launch(_forward_kernel, (out, sums), student, teacher, documents)
    return out, sums


def _launch_backward(
    student: torch.Tensor,
    teacher: torch.Tensor,
    documents: torch.Tensor | None,
    sums: torch.Tensor,
    upstream: torch.Tensor,
) -> torch.Tensor:
    gradient = _fake_backward(student, teacher, documents, sums, upstream)
    more = (sums, (upstream, *upstream.stride()), (gradient, *gradient.stride()[:3]))
    _launch(_backward_kernel, more, student, teacher, documents)
    return gradient


def _fake_forward(
    student: torch.Tensor, teacher: torch.Tensor, documents: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = student.shape[:3]
    device = student.device
    out = torch.empty(shape, dtype=torch.float32, device=device)
    return out, torch.empty((4, *shape), dtype=torch.float32, device=device)


def _fake_backward(
    student: torch.Tensor,
    teacher: torch.Tensor,
    documents: torch.Tensor | None,
    sums: torch.Tensor,
    upstream: torch.Tensor,
) -> torch.Tensor:
    _, heads, length, width = student.shape  # in memory as projections make it
    strides = (length * heads * width, width, heads * width, 1)
    return torch.empty_strided(student.shape, strides, dtype=student.dtype, device=student.device)


def _check(student: torch.Tensor, teacher: torch.Tensor) -> None:
    check_floats(student=student, teacher=teacher)
    if student.dim() != 4 or student.shape[:3] != teacher.shape[:3]:
        shapes = f"the teacher's {list(teacher.shape)}, got {list(student.shape)}"
        raise ValueError(f"student: expected [rows, heads, tokens, width] as {shapes}")


_forward_op = KernelOp("attention_relation", _launch_forward, _fake_forward)
_backward_op = KernelOp("attention_relation_backward", _launch_backward, _fake_backward)


class _Divergence(torch.autograd.Function):
    """Not an op's own: it keeps the teacher's states as an attribute, as inference tensors cannot be saved."""

    @staticmethod
    def forward(ctx: Any, student: torch.Tensor, teacher: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
        divergence, sums = _forward_op.all_outputs(student, teacher, documents)
        ctx.save_for_backward(student, documents, sums)
        ctx.teacher = teacher
        return divergence

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        student, documents, sums = ctx.saved_tensors
        return _backward_op.all_outputs(student, ctx.teacher, documents, sums, upstream), None, None


def relation_divergence(
    student: torch.Tensor, teacher: torch.Tensor, documents: torch.Tensor | None = None
) -> torch.Tensor:
    """Return each token's KL between relations, the mean over relation heads, differentiable by the student's.

    Args:
        student: Queries, keys or values of the relation heads, floating point [B, h, S, d].
        teacher: The teacher's of the same tokens, [B, h, S, its own d], without a gradient.
        documents: int64 [B, S], a number for each document; None for one document a row.

    Returns:
        fp32 [B, S] (fp64 for fp64).

    Raises:
        ValueError: Shapes that do not match, or an unsupported dtype.
    """
    _check(student, teacher)
    if not runs_on_triton(student):
        return forbid_double_backward(reference_relation_divergence(student, teacher, documents))
    divergence: torch.Tensor = _Divergence.apply(student, teacher, documents)
    return divergence.mean(1)
