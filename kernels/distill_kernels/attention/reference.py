"""Attention in plain PyTorch: the definition and its gradient.

`reference_attention` and its gradient are what CPU tensors get, and, in fp64, what the kernels are held against.
Halves are computed in fp32. Shapes: q [B, H, Tq, D]; k, v [B, Hkv, Tk, D].
"""

from __future__ import annotations

import torch

from distill_kernels.attention.operands import ScoreSettings
from distill_kernels.attention.ranges import reference_mask, reference_ranges


def kept_scores(masking: ScoreSettings, batch: int, queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Return the mask of unmasked scores: bool, broadcastable to [B, H, Tq, Tk]."""
    if masking.cu_seqlens_q is None or masking.cu_seqlens_k is None:
        return reference_mask(queries, keys, masking.causal, masking.window, device)
    low, high = reference_ranges(
        masking.cu_seqlens_q, masking.cu_seqlens_k, batch * queries, masking.causal, masking.window
    )
    column = torch.arange(batch * keys, device=device).reshape(batch, 1, 1, keys)
    low = low.reshape(batch, 1, queries, 1)
    high = high.reshape(batch, 1, queries, 1)
    return (column >= low) & (column < high)


def _scores(q: torch.Tensor, k: torch.Tensor, masking: ScoreSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return masked scores [B, H, Tq, Tk] and the factor by which a soft cap dampens their gradient."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.transpose(-1, -2) * masking.scale
    damping = torch.ones((), dtype=q.dtype, device=q.device)
    if masking.softcap is not None:
        tanh = torch.tanh(scores / masking.softcap)
        scores = masking.softcap * tanh
        damping = 1 - tanh * tanh
    kept = kept_scores(masking, q.shape[0], q.shape[2], k.shape[2], q.device)
    return scores.masked_fill(~kept, float("-inf")), damping


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masking: ScoreSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [B, H, Tq, D] and lse [B, H, Tq]; a query without keys gives zeros and -inf, or its sink."""
    dtype = _computed_in(q.dtype)
    scores, _ = _scores(q.to(dtype), k.to(dtype), masking)
    lse = torch.logsumexp(scores, -1)
    if masking.sinks is not None:
        lse = torch.logaddexp(lse, masking.sinks.to(dtype)[:, None])
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0)[..., None])
    values = v.to(dtype).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return (weights @ values).to(q.dtype), lse


def reference_attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    masking: ScoreSettings,
) -> list[torch.Tensor]:
    """Return dq, dk, dv and, with sinks, dsinks, by the formulas of `flash_backward.py`."""
    dtype = _computed_in(q.dtype)
    group = q.shape[1] // k.shape[1]
    scores, damping = _scores(q.to(dtype), k.to(dtype), masking)
    lse = lse.masked_fill(lse == float("-inf"), 0).to(dtype)  # p is 0 in a row without keys
    p = torch.exp(scores - lse[..., None])
    upstream = dout.to(dtype)
    dp = upstream @ v.to(dtype).repeat_interleave(group, dim=1).transpose(-1, -2)
    delta = (upstream * out.to(dtype)).sum(-1, keepdim=True)
    ds = p * (dp - delta) * damping * masking.scale
    dq = ds @ k.to(dtype).repeat_interleave(group, dim=1)
    dk = (ds.transpose(-1, -2) @ q.to(dtype)).unflatten(1, (-1, group)).sum(2)
    dv = (p.transpose(-1, -2) @ upstream).unflatten(1, (-1, group)).sum(2)
    grads = [dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)]
    sinks = masking.sinks
    if sinks is not None:
        grads.append(-(torch.exp(sinks.to(dtype)[:, None] - lse) * delta[..., 0]).sum((0, 2)).to(sinks.dtype))
    return grads
