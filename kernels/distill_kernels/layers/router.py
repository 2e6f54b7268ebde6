"""Router of a mixture: the experts of each token and their weights, from logits, in one kernel.

    p = softmax(l) or sigmoid(l)           choose the k largest of p + b (of l without a bias), the lower index first
    w = p[chosen], divided by its sum where normalised, times a scale

    normalised softmax    dl = scale w (dw - <w, dw>)             of the chosen, 0 elsewhere
    plain softmax         dl = scale p (dw - <p, dw>)             with dw 0 where not chosen
    sigmoid               dl = scale p (1 - p) dw,  normalised    dl = scale p (1 - p) (dw - <w, dw>) / sum p[chosen]

Normalised softmax is also the softmax of the chosen logits. With groups (DeepSeek-V3, arXiv:2412.19437) the experts
stand in `groups` equal groups, of which `kept_groups` may be chosen from: those whose two largest p + b have the
largest sums, or (`by_max`, DeepSeek-V2) those with the largest p. For N tokens and E experts, N E logits are read and
N k weights and indices written; backward reads both and writes N E. The bias moves the choice alone and gets no
gradient.
"""

from __future__ import annotations

from typing import Literal

import torch

from distill_kernels.kernel_op import KernelOp
from distill_kernels.launch import cdiv, launch, next_power_of_2, runs_on_triton, tl, triton
from distill_kernels.layers.fast_math import exp, reciprocal

Score = Literal["softmax", "sigmoid"]
MAX_EXPERTS = 1024
TINY = 1e-20  # least sum of weights, as DeepSeek's


def reference_route(
    logits: torch.Tensor,
    k: int,
    bias: torch.Tensor | None = None,
    score: str = "softmax",
    normalised: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    kept_groups: int = 1,
    by_max: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `route` in plain PyTorch."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    p = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    key = p.detach() if bias is None else p.detach() + bias
    if groups > 1:
        grouped = key.view(len(key), groups, -1)
        value = grouped.amax(-1) if by_max else grouped.topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(value, dtype=torch.bool).scatter_(1, value.topk(kept_groups, -1).indices, True)
        key = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    # stable, so that the lower index comes first among equals
    index = key.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = p.gather(1, index)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=TINY)
    return weights * scale, index


@triton.jit
def _scores(logits, SCORE: tl.constexpr):
    # p of [ROWS, BLOCK] logits; masked ones are -inf and give 0
    if SCORE == "softmax":
        e = exp(logits - tl.max(logits, 1)[:, None])
        return e / tl.sum(e, 1)[:, None]
    else:
        return reciprocal(1.0 + exp(-logits))


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    weight_ptr,
    index_ptr,
    N,
    E,
    stride,
    scale,
    K: tl.constexpr,
    SCORE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALISED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    BY_MAX: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """ROWS tokens a program, all their logits in registers; the k largest one after the other."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (row[:, None] < N) & (cols[None, :] < E)
    logits = tl.load(logits_ptr + row[:, None] * stride + cols[None, :], mask=mask, other=float("-inf"))
    logits = tl.where(row[:, None] < N, logits.to(tl.float32), 0.0)
    p = _scores(logits, SCORE)
    key = logits  # softmax and sigmoid keep the order, and logits are not rounded as p is
    if HAS_BIAS or GROUPS > 1:
        key = p
    if HAS_BIAS:
        key += tl.load(bias_ptr + cols, mask=cols < E, other=0.0).to(tl.float32)[None, :]
    key = tl.where(cols[None, :] < E, key, float("-inf"))
    if GROUPS > 1:  # BLOCK equals E here
        # The two largest of each group without a sort: the largest is taken out by its index, and what is then the
        # largest is the second.
        grouped = tl.reshape(key, ROWS, GROUPS, BLOCK // GROUPS)
        value = tl.max(grouped, 2)  # [ROWS, GROUPS]
        if not BY_MAX:
            member = tl.arange(0, BLOCK // GROUPS)[None, None, :]
            without = tl.where(member == tl.argmax(grouped, 2)[:, :, None], float("-inf"), grouped)
            value += tl.max(without, 2)
        group = tl.arange(0, GROUPS)[None, :]
        kept = tl.zeros([ROWS, GROUPS], tl.int32)
        for _ in tl.static_range(KEPT_GROUPS):
            best = tl.argmax(value, 1)[:, None]
            kept = tl.where(group == best, 1, kept)
            value = tl.where(group == best, float("-inf"), value)
        key = tl.reshape(tl.where(kept[:, :, None] > 0, grouped, float("-inf")), ROWS, BLOCK)
    # One after the other, each taken out of `key` by its index, so that equals come in the order of their indices.
    choice = tl.arange(0, BLOCK_K)
    weights = tl.zeros([ROWS, BLOCK_K], tl.float32)
    index = tl.zeros([ROWS, BLOCK_K], tl.int32)
    for place in tl.static_range(K):
        best = tl.minimum(tl.argmax(key, 1), E - 1)  # NaN logits must not make an index of no expert
        chosen = cols[None, :] == best[:, None]
        value = tl.sum(tl.where(chosen, p, 0.0), 1)
        key = tl.where(chosen, float("-inf"), key)
        weights = tl.where(choice[None, :] == place, value[:, None], weights)
        index = tl.where(choice[None, :] == place, best[:, None], index)
    if NORMALISED:
        weights = weights / tl.maximum(tl.sum(weights, 1), 1e-20)[:, None]
    into = row[:, None] * K + choice[None, :]
    inside = (row[:, None] < N) & (choice[None, :] < K)
    tl.store(weight_ptr + into, weights * scale, mask=inside)
    tl.store(index_ptr + into, index.to(tl.int64), mask=inside)


@triton.jit
def _route_backward_kernel(
    logits_ptr,
    index_ptr,
    dweight_ptr,
    dlogits_ptr,
    N,
    E,
    stride,
    scale,
    K: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALISED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (row[:, None] < N) & (cols[None, :] < E)
    logits = tl.load(logits_ptr + row[:, None] * stride + cols[None, :], mask=mask, other=float("-inf"))
    logits = tl.where(row[:, None] < N, logits.to(tl.float32), 0.0)
    p = _scores(logits, SCORE)
    # The k gradients are brought to their experts' columns, [ROWS, BLOCK], without atomics: an expert is chosen once.
    upstream = tl.zeros([ROWS, BLOCK], tl.float32)
    chosen = tl.zeros([ROWS, BLOCK], tl.int32)
    for place in tl.static_range(K):
        index = tl.load(index_ptr + row * K + place, mask=row < N, other=0)
        dweight = tl.load(dweight_ptr + row * K + place, mask=row < N, other=0.0).to(tl.float32)
        here = cols[None, :] == index[:, None]
        upstream = tl.where(here, dweight[:, None], upstream)
        chosen = tl.where(here, 1, chosen)
    upstream *= scale
    # See the formulas above; where not chosen w and upstream are 0.
    if NORMALISED:
        kept = tl.where(chosen > 0, p, 0.0)
        total = tl.maximum(tl.sum(kept, 1), 1e-20)[:, None]
        w = kept / total
        dp_p = w * (upstream - tl.sum(w * upstream, 1)[:, None])  # p times the gradient of p
        if SCORE == "softmax":
            dlogits = dp_p
        else:
            dlogits = dp_p * (1.0 - p)
    elif SCORE == "softmax":
        dlogits = p * (upstream - tl.sum(p * upstream, 1)[:, None])
    else:
        dlogits = upstream * p * (1.0 - p)
    tl.store(dlogits_ptr + row[:, None] * E + cols[None, :], dlogits.to(dlogits_ptr.dtype.element_ty), mask=mask)


def _shape(experts: int) -> dict[str, int]:
    """Return the tile of both kernels: whole rows, together 1,024 logits or one longer row."""
    block = next_power_of_2(experts)
    return {"BLOCK": block, "ROWS": max(1, 1024 // block)}


def _launch_forward(
    logits: torch.Tensor,
    k: int,
    bias: torch.Tensor | None,
    score: str,
    normalised: bool,
    scale: float,
    groups: int,
    kept_groups: int,
    by_max: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not runs_on_triton(logits):
        weights, index = reference_route(logits, k, bias, score, normalised, scale, groups, kept_groups, by_max)
        return weights.contiguous(), index.contiguous()
    tokens, count = logits.shape
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    index = torch.empty(tokens, k, dtype=torch.int64, device=logits.device)
    shape = _shape(count)
    if tokens:
        launch(
            _route_kernel,
            (cdiv(tokens, shape["ROWS"]),),
            logits,
            logits if bias is None else bias,
            weights,
            index,
            tokens,
            count,
            logits.stride(0),
            scale,
            K=k,
            SCORE=score,
            HAS_BIAS=bias is not None,
            NORMALISED=normalised,
            GROUPS=groups,
            KEPT_GROUPS=kept_groups,
            BY_MAX=by_max,
            BLOCK_K=next_power_of_2(k),
            num_warps=4,
            **shape,
        )
    return weights, index


def _launch_backward(
    dweights: torch.Tensor, logits: torch.Tensor, index: torch.Tensor, score: str, normalised: bool, scale: float
) -> torch.Tensor:
    tokens, count = logits.shape
    k = index.shape[1]
    if not runs_on_triton(logits):
        exact = logits if logits.dtype == torch.float64 else logits.float()
        p = exact.softmax(-1) if score == "softmax" else exact.sigmoid()
        upstream = torch.zeros_like(p).scatter_(1, index, dweights.to(p.dtype) * scale)
        if normalised:
            kept = torch.zeros_like(p).scatter_(1, index, p.gather(1, index))
            w = kept / kept.sum(-1, keepdim=True).clamp(min=TINY)
            dlogits = w * (upstream - (w * upstream).sum(-1, keepdim=True))
            dlogits = dlogits if score == "softmax" else dlogits * (1 - p)
        elif score == "softmax":
            dlogits = p * (upstream - (p * upstream).sum(-1, keepdim=True))
        else:
            dlogits = upstream * p * (1 - p)
        return dlogits.to(logits.dtype)
    dlogits = logits.new_empty(tokens, count)
    shape = _shape(count)
    if tokens:
        launch(
            _route_backward_kernel,
            (cdiv(tokens, shape["ROWS"]),),
            logits,
            index,
            dweights.contiguous(),
            dlogits,
            tokens,
            count,
            logits.stride(0),
            scale,
            K=k,
            SCORE=score,
            NORMALISED=normalised,
            num_warps=4,
            **shape,
        )
    return dlogits


def _new_outputs(logits, k, *settings) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


def _new_gradient(dweights, logits, *rest) -> torch.Tensor:
    return logits.new_empty(logits.shape)


_backward_op = KernelOp("route_backward", _launch_backward, _new_gradient)


def _setup_context(ctx, inputs, output) -> None:
    logits, _, _, *settings = inputs
    _, index = output
    ctx.settings = settings[:3]
    ctx.mark_non_differentiable(index)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, index)


def _backward(ctx, dweights, _):
    if dweights is None:
        return (None,) * 9
    logits, index = ctx.saved_tensors
    return _backward_op(dweights, logits, index, *ctx.settings), *[None] * 8


_forward_op = KernelOp("route", _launch_forward, _new_outputs, setup_context=_setup_context, backward=_backward)


def route(
    logits: torch.Tensor,
    k: int,
    bias: torch.Tensor | None = None,
    score: Score = "softmax",
    *,
    normalised: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    kept_groups: int = 1,
    by_max: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts and compute their weights.

    Args:
        logits: [N, E].
        k: Experts of a token.
        bias: [E], added to the scores for the choice alone; None for no bias.
        score: "softmax" or "sigmoid".
        normalised: Weights of a token are divided by their sum.
        scale: Factor of the weights.
        groups, kept_groups: Groups that experts stand in, and how many of them a token may choose from.
        by_max: Groups are judged by their largest score instead of the sum of the two largest.

    Returns:
        fp32 weights and int64 indices, both [N, k], in the order of the scores.

    Raises:
        ValueError: On more experts than fit (1,024), or k, groups or a bias that do not fit the logits.
    """
    if logits.dim() != 2 or not 1 <= k <= logits.shape[1] <= MAX_EXPERTS:
        raise ValueError(
            f"logits: expected [N, E] with {k} to {MAX_EXPERTS} experts and k of at least 1, "
            f"got {tuple(logits.shape)} and k = {k}"
        )
    count = logits.shape[1]
    if bias is not None and bias.shape != (count,):
        raise ValueError(f"bias: expected shape ({count},), got {tuple(bias.shape)}")
    if groups > 1 and (count & (count - 1) or count % groups or not 1 <= kept_groups <= groups):
        raise ValueError(
            "groups: expected a power of two of experts, in equal groups of which 1 to all are kept, "
            f"got {count} experts in {groups} groups, {kept_groups} kept"
        )
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    weights, index = _forward_op(logits, k, bias, score, normalised, float(scale), groups, kept_groups, by_max)
    return weights, index
