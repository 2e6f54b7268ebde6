"""Decode attention: one or a few new tokens a sequence against its cached keys and values.

Every cached key and value is read once for little arithmetic, so the time is 2 B T Hkv D elements over the memory's
bandwidth. A sequence and key head alone would keep few multiprocessors busy: its keys are split into chunks, each
program makes the softmax of its own chunk, and a second small kernel weighs the chunks by their lse (Dao et al.,
Flash-Decoding, 2023):

    out = sum_c exp(lse_c - lse) out_c,     lse = log sum_c exp lse_c

The G query heads of a key head, times the S new tokens, are the rows of one tile, so a key serves all of them when
it is read. Lengths differ by sequence and live on the device: nothing waits for the host, and a CUDA graph can
replay the call while the cache grows.

Symbols: `B` sequences, `S` new tokens (their keys are in the cache already), `T` cache slots, `G = H / Hkv`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from distill_kernels.attention.operands import (
    ScoreSettings,
    check_attention,
    empty_positions_first,
    head_block,
    initial_softmax_state,
    softcapped,
)
from distill_kernels.attention.ranges import kernel_window
from distill_kernels.constants import LOWEST
from distill_kernels.kernel_op import KernelOp, check_no_gradients
from distill_kernels.launch import (
    DeviceFacts,
    cdiv,
    dependent_launch_options,
    device_facts,
    dot_precision,
    launch,
    next_power_of_2,
    runs_on_triton,
    tl,
    triton,
)
from distill_kernels.operands import check_tensor, contiguous_rows

MAX_NEW_TOKENS = 16
PROGRAMS = 2  # a multiprocessor, which is as many as their tiles leave shared memory for: all run at once


def reference_decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    masking: ScoreSettings,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute decode attention in plain PyTorch; token s of S sees the last `window` keys below length - S + 1 + s."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    new = q.shape[2]
    end = lengths[:, None].long() - new + 1 + torch.arange(new, device=q.device)  # [B, S]
    column = torch.arange(k.shape[2], device=q.device)
    kept = column < end[..., None]
    if masking.window is not None:
        kept &= column >= end[..., None] - masking.window
    if starts is not None:
        kept &= column >= starts[:, None, None]
    k = k.to(dtype).repeat_interleave(group, dim=1)
    v = v.to(dtype).repeat_interleave(group, dim=1)
    scores = q.to(dtype) @ k.transpose(-1, -2) * masking.scale
    if masking.softcap is not None:
        scores = masking.softcap * torch.tanh(scores / masking.softcap)
    scores = scores.masked_fill(~kept[:, None], float("-inf"))
    # Finite, also for a row that sees nothing, whose weights are then 0 by the least total below.
    largest = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    if masking.sinks is not None:
        largest = torch.maximum(largest, masking.sinks.to(dtype)[:, None, None])
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    if masking.sinks is not None:
        total = total + torch.exp(masking.sinks.to(dtype)[:, None, None] - largest)
    weights = weights / total.clamp(min=1e-30)
    # slots outside of the mask hold anything, NaN included
    v = v.masked_fill(~kept.any(1)[:, None, :, None], 0)
    return (weights @ v).to(q.dtype)


@triton.jit
def _chunk_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
    starts_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    sizes,
    window,
    score_factors,
    WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STARTS: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Attend ROWS >= GROUP * new query rows of one key head to one chunk of one sequence's keys.

    WHOLE: the chunk holds all keys, and results are stored; else the chunk's part, in fp32, and its lse. Strides are of
    sequences, heads, positions. sizes: key heads, new tokens, slots of the cache. score_factors: of `ScoreSettings`.
    """
    stride_qb, stride_qh, stride_qs = q_strides
    stride_kb, stride_kh, stride_kt = k_strides
    stride_vb, stride_vh, stride_vt = v_strides
    stride_ob, stride_oh, stride_os = out_strides
    kv_heads, new, slots = sizes
    score_scale, cap, cap_rate = score_factors
    # The combining kernel may start at once; it waits for this whole grid before it reads a part.
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + batch).to(tl.int32), slots)
    row = tl.arange(0, ROWS)  # new token major: row = token * GROUP + head within the group
    token = row // GROUP
    column = tl.arange(0, BLOCK_D)
    in_row = row < new * GROUP
    in_column = column < HEAD_DIM
    head = kv_head * GROUP + row % GROUP
    q_at = q_ptr + batch * stride_qb + head[:, None] * stride_qh + token[:, None] * stride_qs + column[None, :]
    q = tl.load(q_at, mask=in_row[:, None] & in_column[None, :], other=0.0)
    # First key that a token does not see: each of the S sees one more than the one before. `low` is the first that it
    # sees.
    high = length - new + 1 + token
    low = high - window

    begin = 0
    if STARTS:
        begin = tl.maximum(tl.load(starts_ptr + batch).to(tl.int32), 0)
        low = tl.maximum(low, begin)
    # From the first key that any of the S tokens sees, in whole tiles dealt out evenly over the chunks; one may get
    # none.
    first = tl.minimum(tl.maximum(length - new + 1 - window, begin), length) // BLOCK_N
    tiles = tl.cdiv(length, BLOCK_N) - first
    start = (first + tiles * chunk // chunks) * BLOCK_N
    end = (first + tiles * (chunk + 1) // chunks) * BLOCK_N
    # Finite, not -inf: a row that has seen nothing yet would make -inf less -inf. Scores are to base 2.
    m_i = tl.full([ROWS], LOWEST, tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    if SINKS:  # of the first chunk
        m_i, l_i = initial_softmax_state(sinks_ptr, head)
        # A sink counts once in the row's sum; in other chunks it is only a maximum to start from.
        l_i = tl.where(chunk == 0, l_i, 0.0)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kh
    v_base = v_ptr + batch * stride_vb + kv_head * stride_vh
    for n in tl.range(start, end, BLOCK_N):
        slot = n + tl.arange(0, BLOCK_N)
        # Slots outside may hold NaN: they are not loaded, since 0 times NaN would stay in the sum.
        held = ((slot < length) & (slot >= begin))[:, None] & in_column[None, :]
        slot_64 = slot[:, None].to(tl.int64)
        k = tl.load(k_base + slot_64 * stride_kt + column[None, :], mask=held, other=0.0)
        v = tl.load(v_base + slot_64 * stride_vt + column[None, :], mask=held, other=0.0)
        s = tl.dot(q, k.T, input_precision=PRECISION)  # [ROWS, BLOCK_N]
        if SOFTCAP:
            s, _ = softcapped(s, cap_rate, cap)
        # Masked by row, as the tokens of the tile see different keys; rows past the last one are computed and not
        # stored.
        s = tl.where((slot[None, :] >= low[:, None]) & (slot[None, :] < high[:, None]), s, float("-inf"))
        # Online softmax: what was summed so far is scaled to the new maximum, then this tile's keys are added.
        m_new = tl.maximum(m_i, tl.max(s, 1) * score_scale)
        p = tl.exp2(s * score_scale - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m_i = m_new
    # A row that saw nothing gives 0, and as a part an lse of -inf: no weight.
    empty = l_i == 0
    acc = acc * (1 / tl.where(empty, 1.0, l_i))[:, None]
    if WHOLE:
        at = out_ptr + batch * stride_ob + head[:, None] * stride_oh + token[:, None] * stride_os + column[None, :]
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=in_row[:, None] & in_column[None, :])
    else:
        part = (tl.program_id(1).to(tl.int64) * chunks + chunk) * (new * GROUP) + row
        tl.store(lse_ptr + part, tl.where(empty, float("-inf"), m_i + tl.log2(l_i)), mask=in_row)
        tl.store(out_ptr + part[:, None] * HEAD_DIM + column[None, :], acc, mask=in_row[:, None] & in_column[None, :])


@triton.jit
def _combine_kernel(
    part_ptr,
    lse_ptr,
    out_ptr,
    out_strides,
    sizes,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Weigh the chunks of one query row by their lse; sizes: key heads, new tokens, chunks."""
    stride_ob, stride_oh, stride_os = out_strides
    kv_heads, new, chunks = sizes
    if DEPENDENT_LAUNCH:  # this kernel started while the chunks were still being made
        tl.extra.cuda.gdc_wait()
    # A program a query row, with all of its chunks as one tile [CHUNKS, BLOCK_D].
    row = tl.program_id(0)
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    head = tl.program_id(1) % kv_heads * GROUP + row % GROUP
    chunk = tl.arange(0, CHUNKS)
    column = tl.arange(0, BLOCK_D)
    part = (tl.program_id(1).to(tl.int64) * chunks + chunk) * (new * GROUP) + row
    lse = tl.load(lse_ptr + part, mask=chunk < chunks, other=float("-inf"))
    # The clamp keeps -inf less -inf out where no chunk saw a key; the total is 0 then, and so is the row.
    weight = tl.exp2(lse - tl.maximum(tl.max(lse, 0), LOWEST))
    total = tl.sum(weight, 0)
    held = (chunk < chunks)[:, None] & (column < HEAD_DIM)[None, :]
    parts = tl.load(part_ptr + part[:, None] * HEAD_DIM + column[None, :], mask=held, other=0.0)
    out = tl.sum(parts * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    at = out_ptr + batch * stride_ob + head.to(tl.int64) * stride_oh + (row // GROUP).to(tl.int64) * stride_os + column
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM)


def chunk_count(slots: int, heads: int, multiprocessors: int, programs: int = PROGRAMS) -> int:
    """Return the chunks to split a cache into: at most `programs` a multiprocessor, so that all run in one wave."""
    return max(1, min(programs * multiprocessors // heads, cdiv(slots, 64), 128))


class DecodeConfig(NamedTuple):
    """Launch shape: keys at a time, programs a multiprocessor, warps, stages (None: by the number of programs)."""

    keys: int
    programs: int = PROGRAMS
    warps: int = 4
    stages: int | None = None


@functools.lru_cache(maxsize=4096)
def choose_decode_config(
    block_d: int, rows: int, low_precision: bool, slots: int, heads: int, facts: DeviceFacts
) -> DecodeConfig:
    """Return the launch shape found by a sweep on an H200, 16 bits."""
    if block_d == 64 and rows == 16 and low_precision and heads <= facts.multiprocessors:
        if heads * slots >= 3072 * facts.multiprocessors and facts.shared_bytes >= 160 << 10:
            return DecodeConfig(keys=256, programs=1, stages=3)
        return DecodeConfig(keys=64, programs=4, warps=2, stages=3)
    return DecodeConfig(keys=min(128, 8192 // block_d))


def decode_on_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    masking: ScoreSettings,
    out: torch.Tensor,
    starts: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """Fill `out` by the decode kernels; `config` is for measurements.

    Args:
        q, out: [B, H, S, D].
        k, v: [B, Hkv, slots, D].
        lengths, starts: int [B], filled slots and first key of each sequence; starts may be None.
        masking: scale, window, soft cap and sinks.
    """
    batches, heads, new, size = q.shape
    kv_heads = k.shape[1]
    slots = k.shape[2]
    group = heads // kv_heads
    q = contiguous_rows(q)
    k = contiguous_rows(k)
    v = contiguous_rows(v)
    lengths = contiguous_rows(lengths)
    starts = contiguous_rows(starts)
    sinks = contiguous_rows(masking.sinks)
    facts = device_facts(q.device)
    block_d = head_block(size)
    rows = max(16, next_power_of_2(group * new))
    if config is None:
        config = choose_decode_config(block_d, rows, q.element_size() == 2, slots, batches * kv_heads, facts)
    chunks = chunk_count(slots, batches * kv_heads, facts.multiprocessors, config.programs)
    # more programs than run at once: a shallower pipeline leaves room for a third on a multiprocessor
    stages = config.stages or (2 if batches * kv_heads > config.programs * facts.multiprocessors else 3)
    # With one chunk the results go straight to `out`, and these arguments are not used as parts.
    parts = lse = out
    dependent_launch = chunks > 1 and facts.dependent_launch
    if chunks > 1:
        parts = torch.empty(batches * kv_heads, chunks, new * group, size, dtype=torch.float32, device=q.device)
        lse = torch.empty(parts.shape[:3], dtype=torch.float32, device=q.device)
    begins = lengths if starts is None else starts
    launch(
        _chunk_kernel,
        (chunks, batches * kv_heads, 1),
        q,
        k,
        v,
        lengths,
        begins,
        q if sinks is None else sinks,
        parts,
        lse,
        q.stride()[:3],
        k.stride()[:3],
        v.stride()[:3],
        out.stride()[:3],
        (kv_heads, new, slots),
        kernel_window(masking.window),
        masking.score_factors,
        WHOLE=chunks == 1,
        GROUP=group,
        HEAD_DIM=size,
        BLOCK_D=block_d,
        ROWS=rows,
        BLOCK_N=config.keys,
        STARTS=starts is not None,
        SINKS=sinks is not None,
        SOFTCAP=masking.softcap is not None,
        PRECISION=dot_precision(q.dtype),
        DEPENDENT_LAUNCH=dependent_launch,
        num_warps=config.warps,
        num_stages=stages if q.element_size() == 2 else 1,
    )
    if chunks == 1:
        return out
    at_once = next_power_of_2(chunks)
    warps = 4 if facts.measured else min(max(at_once * block_d // 2048, 4), 16)  # measured, it spills
    launch(
        _combine_kernel,
        (new * group, batches * kv_heads, 1),
        parts,
        lse,
        out,
        out.stride()[:3],
        (kv_heads, new, chunks),
        GROUP=group,
        HEAD_DIM=size,
        BLOCK_D=block_d,
        CHUNKS=at_once,
        DEPENDENT_LAUNCH=dependent_launch,
        num_warps=warps,
        **dependent_launch_options(dependent_launch),
    )
    return out


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    starts: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    masking = ScoreSettings(True, scale, window, softcap, sinks=sinks)
    out = empty_positions_first(q)
    if not runs_on_triton(q):
        return out.copy_(reference_decode_attention(q, k, v, lengths, masking, starts))
    return out if q.numel() == 0 else decode_on_triton(q, k, v, lengths, masking, out, starts)


def _check(q, k, v, lengths, scale, window, softcap, starts=None, sinks=None) -> None:
    check_attention(q, k, v, ScoreSettings(True, scale, window, softcap, sinks=sinks))
    check_no_gradients(q=q, k=k, v=v, sinks=sinks)
    if not 1 <= q.shape[2] <= MAX_NEW_TOKENS:
        raise ValueError(f"q: expected 1 to {MAX_NEW_TOKENS} new tokens, got {q.shape[2]}; use flash_attention")
    if q.shape[2] * q.shape[1] // k.shape[1] > 256:
        raise ValueError(f"q: new tokens x query heads per key head up to 256, got {tuple(q.shape)}, {tuple(k.shape)}")
    for name, slots in (("lengths", lengths), ("starts", starts)):
        if slots is None:
            continue
        check_tensor(name, slots)
        if slots.shape != q.shape[:1] or slots.dtype not in (torch.int32, torch.int64) or slots.device != q.device:
            raise ValueError(
                f"{name}: expected int [{q.shape[0]}] on {q.device}, got {slots.dtype} {tuple(slots.shape)} on "
                f"{slots.device}"
            )


_op = KernelOp("decode_attention", _launch, lambda q, *_: empty_positions_first(q), check=_check)


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    starts: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a few new tokens a sequence to its cached keys and values, inference only.

    Args:
        q: [B, H, S, D], the S <= 16 newest tokens, S * H / Hkv <= 256, fp16, bf16 or fp32, D up to 256.
        k, v: [B, Hkv, T, D], any strides with adjacent columns (a [B, T, Hkv, D] cache transposed costs no copy).
            Slots from a sequence's length on are not read.
        lengths: int [B] on the device: filled slots of each sequence, the new tokens included. New token s sees
            the first length - S + 1 + s of them.
        scale: factor of q.k, > 0; 1/sqrt(D) by default.
        window: a token sees the last `window` keys up to its own.
        softcap: scores become softcap * tanh(score / softcap).
        starts: int [B] on the device, the first slot of each sequence that is seen: those before are padding.
        sinks: [H], attention sinks; see `flash_attention`.

    Returns:
        [B, H, S, D] in q's dtype, [B, S, H, D] in memory. A sequence that sees nothing gives zeros.

    Raises:
        ValueError: shapes, dtypes or arguments that do not fit, or a tensor that requires a gradient.
    """
    if not isinstance(q, torch.Tensor):
        check_tensor("q", q)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return _op(q, k, v, lengths, scale, window, softcap, starts, sinks)
