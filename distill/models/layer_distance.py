"""Distances between layers of two models, a token at a time, with gradients for the student's.

With s and t the states of a token in student and teacher, both of width H, and A_i the queries, keys or values of token
i in one of the relation heads, of width d:

    mse         ||s - t||^2 / H                    gradient 2 (s - t) / H
    cosine      1 - s.t / (||s|| ||t||)            gradient (cos s / ||s|| - t / ||t||) / ||s||
    relation    KL(R^t_i || R^s_i)                 G = (R^s - R^t) / sqrt(d), gradient (G + G^T) A
                R_i = softmax over j <= i of A_i . A_j / sqrt(d), j in the document of i

mse and cosine: arXiv 1909.10351 and 1910.01108; relations: arXiv 2012.15828. Sums are in fp32 (fp64 for fp64). Neither
differences nor relations [S, S] are kept: the backward computes them again, chunk by chunk, from what the models hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable

Metric = Literal["mse", "cosine"]
CHUNK = {"cpu": 2**20, "cuda": 2**25}  # numbers of one temporary tensor
TINY = 1e-12  # a norm of less counts as this


def state_distance(
    student: torch.Tensor, teacher: torch.Tensor, rows: torch.Tensor, metric: Metric, *, picked: bool = False
) -> torch.Tensor:
    """Return the distance of each of `rows` between states of two models, fp32 [M], differentiable by the student's.

    Args:
        student: Floating point [N, H]; with `picked` only the M rows, [M, H].
        teacher: Floating point [N, H], without a gradient.
        rows: int64 [M], each once.
        metric: `mse` or `cosine`.
        picked: Whether the student's states are those of `rows` alone.

    Raises:
        ValueError: The widths differ.
    """
    if student.shape[-1] != teacher.shape[-1]:
        raise ValueError(
            f"student: expected states of the teacher's width {teacher.shape[-1]}, got {list(student.shape)}"
        )
    distances: torch.Tensor = _Distance.apply(student, teacher, rows, metric, picked)
    return distances


class _Context(FunctionCtx):
    """Values that a forward keeps for its backward; the teacher's may be inference tensors, which cannot be saved."""

    saved_tensors: tuple[torch.Tensor, ...]
    teacher: torch.Tensor
    metric: Metric
    picked: bool


class _Distance(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, student: torch.Tensor, teacher: torch.Tensor, rows: torch.Tensor, metric: Metric, picked: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(student, rows)
        ctx.teacher, ctx.metric, ctx.picked = teacher, metric, picked
        out = torch.empty(len(rows), dtype=_wide(student.dtype), device=student.device)
        for at, s, t in _chunks(student, teacher, rows, picked):
            if metric == "mse":
                out[at] = (s - t).square_().mean(-1)
            else:
                out[at] = 1 - (_unit(s)[0] * _unit(t)[0]).sum(-1)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        student, rows = ctx.saved_tensors
        whole = ctx.picked or len(rows) == len(student)
        gradient = torch.empty_like(student) if whole else torch.zeros_like(student)
        for at, s, t in _chunks(student, ctx.teacher, rows, ctx.picked):
            if ctx.metric == "mse":
                each = (s - t).mul_((upstream[at] * (2 / s.shape[-1]))[:, None])
            else:
                (s, length), (t, _) = _unit(s), _unit(t)
                each = (s * (s * t).sum(-1, keepdim=True) - t).mul_(upstream[at][:, None] / length)
            if ctx.picked:
                gradient[at] = each.to(gradient.dtype)
            else:
                gradient.index_copy_(0, rows[at], each.to(gradient.dtype))
        return gradient, None, None, None, None


def _chunks(
    student: torch.Tensor, teacher: torch.Tensor, rows: torch.Tensor, picked: bool
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield parts of `rows` with the wide states of both models there."""
    wide, count = _wide(student.dtype), max(1, CHUNK.get(student.device.type, 2**20) // student.shape[-1])
    for begin in range(0, len(rows), count):
        at = slice(begin, begin + count)
        here = rows[at]
        s = student[at] if picked else student.index_select(0, here)
        yield at, s.to(wide), teacher.index_select(0, here).to(wide)


def _unit(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(TINY)
    return x / length, length


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def relation_divergence(
    student: torch.Tensor, teacher: torch.Tensor, heads: int, documents: torch.Tensor | None = None
) -> torch.Tensor:
    """Return each token's KL between relations, the mean over relation heads: fp32 [B, S], differentiable.

    Args:
        student: Queries, keys or values [B, student's heads, S, head width].
        teacher: The teacher's of the same tokens, without a gradient; its widths may differ.
        heads: Number of relation heads, which divides heads x head width in both models.
        documents: int64 [B, S], a number for each document; None for one document a row.
    """
    divergence: torch.Tensor = _Relation.apply(_regrouped(student, heads), _regrouped(teacher, heads), documents)
    return divergence


def documents_of(position_ids: torch.Tensor | None) -> torch.Tensor | None:
    """Return the number of each token's document, int64 [B, S], from positions that restart; None for None."""
    return None if position_ids is None else (position_ids == 0).cumsum(-1)


def _regrouped(states: torch.Tensor, heads: int) -> torch.Tensor:
    """Return [B, H, S, D] as [B, heads, S, H x D / heads]."""
    return states.transpose(1, 2).flatten(2).unflatten(-1, (heads, -1)).transpose(1, 2)


class _Relation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, student: torch.Tensor, teacher: torch.Tensor, documents: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(student, documents)  # type: ignore[arg-type]  # None is saved as None
        ctx.teacher = teacher
        batch, _, length, _ = student.shape
        out = torch.empty((batch, length), dtype=_wide(student.dtype), device=student.device)
        for row, at, keys, hidden in _blocks(student, documents):
            log_s, log_t = (_relations(x[row], at, keys, hidden) for x in (student, teacher))
            each = log_t.exp().mul_((log_t - log_s).masked_fill_(hidden, 0.0))
            out[row, at] = each.sum(-1).mean(0)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        student, documents = ctx.saved_tensors
        wide = _wide(student.dtype)
        gradient = torch.zeros(student.shape, dtype=wide, device=student.device)
        scale = 1 / (math.sqrt(student.shape[-1]) * student.shape[1])
        with torch.autocast(student.device.type, enabled=False):
            for row, at, keys, hidden in _blocks(student, documents):
                p_s, p_t = (_relations(x[row], at, keys, hidden).exp_() for x in (student, ctx.teacher))
                p_s.sub_(p_t).mul_((upstream[row, at] * scale)[:, None])
                own = student[row].to(wide)
                gradient[row, :, at] += p_s @ own[:, keys]
                gradient[row, :, keys] += p_s.mT @ own[:, at]
        return gradient.to(student.dtype), None, None


def _blocks(student: torch.Tensor, documents: torch.Tensor | None) -> Iterator[tuple[int, slice, slice, torch.Tensor]]:
    """Yield blocks of queries: their row of the batch, places, those of their keys, and which pairs are hidden."""
    batch, heads, length, _ = student.shape
    count = max(1, CHUNK.get(student.device.type, 2**20) // (heads * length))
    places = torch.arange(length, device=student.device)
    for row in range(batch):
        for begin in range(0, length, count):
            at, keys = slice(begin, begin + count), slice(0, min(begin + count, length))
            hidden = places[keys] > places[at, None]
            if documents is not None:
                hidden = hidden | (documents[row, keys] != documents[row, at, None])
            yield row, at, keys, hidden


def _relations(states: torch.Tensor, at: slice, keys: slice, hidden: torch.Tensor) -> torch.Tensor:
    """Return log R, wide [heads, queries, keys], -inf where hidden, of states [heads, S, d]."""
    with torch.autocast(states.device.type, enabled=False):
        wide = states[:, keys].to(_wide(states.dtype))
        scores = (wide[:, at] / math.sqrt(states.shape[-1])) @ wide.mT
    return scores.masked_fill_(hidden, -torch.inf).log_softmax(-1)


class LayerProjection(nn.Module):
    """Linear map of the student's hidden states to the teacher's width, trained with the student.

    It has no entry in state dicts: a saved or exported student does not have it, and checkpoints hold it in a file of
    its own (`distill.objectives.layer_matching`).

    Args:
        teacher: Width of the teacher's hidden states.
        student: Width of the student's; where both are equal the map begins as the identity.
        like: Tensor whose device and dtype the weight gets.
    """

    def __init__(self, teacher: int, student: int, like: torch.Tensor) -> None:
        super().__init__()
        weight = torch.eye(student)
        if teacher != student:
            generator = torch.Generator().manual_seed(0)
            weight = torch.randn(teacher, student, generator=generator) / math.sqrt(student)
        self.weight = nn.Parameter(weight.to(like.device, like.dtype))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return states [..., teacher's width] of states [..., student's width]."""
        if not torch.is_autocast_enabled(states.device.type):
            states = states.to(self.weight.dtype)
        return nn.functional.linear(states, self.weight)

    def _save_to_state_dict(self, *args: object, **kwargs: object) -> None:
        return

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        return
