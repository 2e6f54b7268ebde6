"""Divergence of attention relations of two models, a token at a time, with gradients for the student's.

With A_i the queries, keys or values of token i in one of the relation heads, of width d (arXiv 2012.15828):

    R_i = softmax over j <= i of A_i . A_j / sqrt(d), j in the document of i
    KL(R^t_i || R^s_i)     G = (R^s - R^t) / sqrt(d), gradient (G + G^T) A

Products take A in its own dtype and sum in fp32; everything else is in fp32 (fp64 for fp64). Relations [S, S] are not
kept: the backward computes them again, some rows or queries at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

CHUNK = {"cpu": 2**20, "cuda": 2**25}  # numbers of one temporary tensor
Block = tuple[slice, slice, slice, torch.Tensor]


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
    own, other = (x.transpose(1, 2).flatten(2).unflatten(-1, (heads, -1)).transpose(1, 2) for x in (student, teacher))
    divergence: torch.Tensor = _Relation.apply(own, other, documents)
    return divergence


class _Context(FunctionCtx):
    """Values that a forward keeps for its backward; the teacher's may be inference tensors, which cannot be saved."""

    saved_tensors: tuple[torch.Tensor, ...]
    teacher: torch.Tensor


class _Relation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, student: torch.Tensor, teacher: torch.Tensor, documents: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(student, documents)  # type: ignore[arg-type]  # None is saved as None
        ctx.teacher = teacher
        batch, _, length, _ = student.shape
        out = torch.empty((batch, length), dtype=_wide(student), device=student.device)
        for rows, at, keys, hidden in _blocks(student, documents):
            log_s, log_t = (_relations(x[rows], at, keys, hidden) for x in (student, teacher))
            each = log_t.exp().mul_(log_t.sub_(log_s).masked_fill_(hidden, 0.0))
            out[rows, at] = each.sum(-1).mean(1)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        student, documents = ctx.saved_tensors
        gradient = torch.zeros(student.shape, dtype=_wide(student), device=student.device)
        scale = 1 / (math.sqrt(student.shape[-1]) * student.shape[1])
        with torch.autocast(student.device.type, enabled=False):
            for rows, at, keys, hidden in _blocks(student, documents):
                p_s, p_t = (_relations(x[rows], at, keys, hidden).exp_() for x in (student, ctx.teacher))
                weights = p_s.sub_(p_t).mul_((upstream[rows, at] * scale)[:, None, :, None])
                own, weights = student[rows], weights.to(student.dtype)
                gradient[rows, :, at] += weights @ own[:, :, keys]
                gradient[rows, :, keys] += weights.mT @ own[:, :, at]
        return gradient.to(student.dtype), None, None


def _blocks(student: torch.Tensor, documents: torch.Tensor | None) -> Iterator[Block]:
    """Yield rows of the batch, places of queries, those of their keys, and which pairs are hidden [rows, 1, ...]."""
    batch, heads, length, _ = student.shape
    most = CHUNK.get(student.device.type, 2**20) // (heads * length)
    rows, queries = max(1, most // length), max(1, min(most, length))
    places = torch.arange(length, device=student.device)
    for first in range(0, batch, rows):
        for begin in range(0, length, queries):
            row, at = slice(first, first + rows), slice(begin, begin + queries)
            keys = slice(0, min(begin + queries, length))
            hidden = (places[keys] > places[at, None])[None]
            if documents is not None:
                hidden = hidden | (documents[row, None, keys] != documents[row, at, None])
            yield row, at, keys, hidden[:, None]


def _relations(states: torch.Tensor, at: slice, keys: slice, hidden: torch.Tensor) -> torch.Tensor:
    """Return log R, wide [rows, heads, queries, keys], -inf where hidden, of states [rows, heads, S, d]."""
    with torch.autocast(states.device.type, enabled=False):
        queries, others = (states[:, :, place].flatten(0, 1) for place in (at, keys))
        if states.is_cuda and states.element_size() == 2:
            scores = torch.bmm(queries, others.mT, out_dtype=torch.float32)
        else:
            scores = queries.to(_wide(states)) @ others.to(_wide(states)).mT
    scores = scores.unflatten(0, states.shape[:2]).div_(math.sqrt(states.shape[-1]))
    return scores.masked_fill_(hidden, -torch.inf).log_softmax(-1)


def _wide(states: torch.Tensor) -> torch.dtype:
    return torch.promote_types(states.dtype, torch.float32)
