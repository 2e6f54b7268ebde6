"""Attention of a decoding step in one launch: norms of q and k, rotary embedding, cache write, softmax over keys.

Of every sequence's row q | k | v, as the product before leaves it, a program reads a key head's G query heads and that
head's new key as the rows of one tile, so that norm and rotation are made once for all of them. It puts the new key and
value into their slot, and begins its softmax with them from registers: nothing that it wrote is read again. Older keys
are read from the cache, in `chunks` parts where sequences and heads are few; the last program of a head to finish
weighs the parts by their lse, as `attention/decode.py` does in a launch of its own.

    y1 = x1 cos1 - x2 sin1,   y2 = x2 cos2 + x1 sin2        the halves of a head, as in layers/rope.py

cos and sin are tables by position [slots, D], made once by the model's own module. Bytes: the keys and values there
are. Symbols: `B` sequences, `H` query heads, `Hkv` key heads, `G = H / Hkv`, `D` head size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from distill_kernels.arrivals import last_to_arrive
from distill_kernels.attention.operands import ScoreSettings
from distill_kernels.attention.ranges import kernel_window
from distill_kernels.constants import LOWEST
from distill_kernels.decoding.cached_attention import reference_decode_attention
from distill_kernels.decoding.common import Scratch, prefetch, wait_for_previous_kernel
from distill_kernels.launch import (
    dependent_launch_options,
    device_facts,
    dot_precision,
    launch,
    next_power_of_2,
    tl,
    triton,
)
from distill_kernels.layers.rms_norm import reference_rms_norm
from distill_kernels.layers.rope import reference_rope


class AttentionSpec(NamedTuple):
    """Shape and settings of a layer's attention.

    Attributes:
        heads, kv_heads, size: Number of query heads H and key-value heads Hkv; head size D.
        scale: Factor of the scores.
        window: Keys a query sees, itself included; None for all.
        q_norm, k_norm: Weights [D] of RMSNorms of each head, or None for both.
        eps: Epsilon of the norms.
    """

    heads: int
    kv_heads: int
    size: int
    scale: float
    window: int | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0


class LayerCache(NamedTuple):
    """Cache and rotary tables of one layer.

    Attributes:
        keys, values: [B, slots, Hkv, D], contiguous.
        lengths: int64 [B], tokens of each sequence, the new one included.
        cos, sin: [slots, D], contiguous.
    """

    keys: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class AttentionConfig(NamedTuple):
    """Launch shape: keys at a time, chunks of a sequence's keys, warps, pipeline stages, keys prefetched."""

    keys: int
    chunks: int
    warps: int = 4
    stages: int = 3
    ahead: int = 0


def reference_decode_step_attention(
    rows: torch.Tensor, shape: AttentionSpec, cached: LayerCache, out: torch.Tensor
) -> None:
    """Fill `out` [B, H D] from `rows` [B, (H + 2 Hkv) D] and write the newest cache slots, in plain PyTorch."""
    batch = rows.shape[0]
    at = cached.lengths - 1
    q, k, v = rows.view(batch, 1, -1, shape.size).split([shape.heads, shape.kv_heads, shape.kv_heads], 2)
    if shape.q_norm is not None:
        q = reference_rms_norm(q, shape.q_norm, shape.eps)
        k = reference_rms_norm(k, shape.k_norm, shape.eps)
    cos = cached.cos[at][:, None]
    sin = cached.sin[at][:, None]
    q, k = reference_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    sequence = torch.arange(batch, device=rows.device)
    # Written before the attention, which reads the new key from the cache here; the kernel takes it from registers.
    cached.keys[sequence, at] = k[:, :, 0].to(cached.keys)
    cached.values[sequence, at] = v[:, 0].to(cached.values)
    keys = cached.keys.transpose(1, 2)
    values = cached.values.transpose(1, 2)
    masking = ScoreSettings(True, shape.scale, shape.window)
    out.copy_(reference_decode_attention(q, keys, values, cached.lengths, masking).reshape(batch, -1))


@triton.jit
def _of_heads(q_ptr, k_ptr, at, mask, is_key):
    """Load a vector for the query heads' rows and one for the key's row."""
    q = tl.load(q_ptr + at, mask=mask, other=0.0)
    k = tl.load(k_ptr + at, mask=mask, other=0.0)
    return tl.where(is_key, k[None, :], q[None, :]).to(tl.float32)


@triton.jit
def _attention_kernel(
    rows_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    lengths_ptr,
    out_ptr,
    parts_ptr,
    counters_ptr,
    stride_row,
    stride_out,
    slots,
    window,
    score_scale,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    NORM: tl.constexpr,
    CHUNKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Compute one key head's new token over one chunk of keys; the last program of a head merges the chunks.

    parts: fp32 [B Hkv, G, CHUNKS, 2 BLOCK_HALF], then lse [B Hkv, G, CHUNKS]; counters: int32 [B Hkv].
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = D // 2
    COLUMNS: tl.constexpr = 2 * BLOCK_HALF
    chunk = tl.program_id(0)
    pair = tl.program_id(1)
    batch = (pair // KV_HEADS).to(tl.int64)
    kv_head = pair % KV_HEADS
    newest = tl.minimum(tl.load(lengths_ptr + batch).to(tl.int32), slots) - 1  # of the step before
    # Older keys seen are slots `low` to `newest` - 1. Whole tiles of them are dealt out evenly over the chunks; a chunk
    # may get none.
    low = tl.maximum(newest + 1 - window, 0)
    first_tile = low // BLOCK_N
    tiles = tl.cdiv(newest, BLOCK_N) - first_tile
    begin = (first_tile + tiles * chunk // CHUNKS) * BLOCK_N
    end = (first_tile + tiles * (chunk + 1) // CHUNKS) * BLOCK_N
    base = (batch * slots * KV_HEADS + kv_head) * D
    if DEPENDENT_LAUNCH and AHEAD > 0:  # what older steps have written
        older = tl.minimum(begin + tl.arange(0, AHEAD), tl.maximum(end - 1, 0))
        prefetch(keys_ptr + base, older, 0, D, KV_HEADS * D, COLUMNS)
        prefetch(values_ptr + base, older, 0, D, KV_HEADS * D, COLUMNS)
    wait_for_previous_kernel(DEPENDENT_LAUNCH)
    # A tile of ROWS, at least 16 for the tensor cores: the G query heads, the new key, and rows that hold 0. Halves of
    # a head are two tiles, so that the rotation needs no exchange between threads.
    row = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_HALF)
    head = tl.where(row < GROUP, kv_head * GROUP + row, HEADS + kv_head)  # row GROUP is the new key
    held = (row <= GROUP)[:, None] & (d < HALF)[None, :]
    x_ptrs = rows_ptr + batch * stride_row + head[:, None] * D + d[None, :]
    x1 = tl.load(x_ptrs, mask=held, other=0.0)
    x2 = tl.load(x_ptrs + HALF, mask=held, other=0.0)
    # fp32 inside; `low_precision` is the dtype of the rows and of the cache, to which modules round between steps.
    low_precision = x1.dtype
    x1 = x1.to(tl.float32)
    x2 = x2.to(tl.float32)
    if NORM:
        # Lanes past HALF are 0 and add nothing; the mean is over D, not over the padded columns.
        factor = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
        is_key = (row == GROUP)[:, None]
        in_half = d < HALF
        w1 = _of_heads(q_norm_ptr, k_norm_ptr, d, in_half, is_key)
        w2 = _of_heads(q_norm_ptr + HALF, k_norm_ptr + HALF, d, in_half, is_key)
        x1 = ((x1 * factor).to(low_precision).to(tl.float32) * w1).to(low_precision).to(tl.float32)
        x2 = ((x2 * factor).to(low_precision).to(tl.float32) * w2).to(low_precision).to(tl.float32)
    # The tables' row is the new token's position, the same for queries and key.
    angle = newest.to(tl.int64) * D + d
    cos1 = tl.load(cos_ptr + angle, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos_ptr + angle + HALF, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin_ptr + angle, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin_ptr + angle + HALF, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    y1 = (x1 * cos1 - x2 * sin1).to(low_precision)
    y2 = (x2 * cos2 + x1 * sin2).to(low_precision)
    # [ROWS, BLOCK_HALF] twice, side by side
    q = tl.reshape(tl.permute(tl.join(y1, y2), (0, 2, 1)), (ROWS, COLUMNS))

    # A padded column of the tile to its column of the head: each half is padded to BLOCK_HALF on its own.
    c = tl.arange(0, COLUMNS)
    column = c // BLOCK_HALF * HALF + c % BLOCK_HALF  # of a head
    in_column = c % BLOCK_HALF < HALF
    # Finite, not -inf: a row that has seen nothing yet would make -inf less -inf. Scores are to base 2, log2(e) being
    # in their factor.
    m_i = tl.full((ROWS,), LOWEST, tl.float32)
    l_i = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    # The new key is one chunk's alone, and starts its softmax: weight exp2(0) = 1, its value as the sum. It is stored
    # to a slot that no chunk reads (older ones are below it), so that no barrier is needed.
    if chunk == CHUNKS - 1:
        key = tl.sum(tl.where((row == GROUP)[:, None], q.to(tl.float32), 0.0), 0)
        value_at = rows_ptr + batch * stride_row + (HEADS + KV_HEADS + kv_head) * D
        value = tl.load(value_at + column, mask=in_column, other=0.0)
        to = base + newest.to(tl.int64) * (KV_HEADS * D) + column
        tl.store(keys_ptr + to, key.to(low_precision), mask=in_column)
        tl.store(values_ptr + to, value, mask=in_column)
        m_i = tl.sum(q.to(tl.float32) * key[None, :], 1) * score_scale
        l_i += 1.0
        acc += value.to(tl.float32)[None, :]

    for n in tl.range(begin, end, BLOCK_N):
        slot = n + tl.arange(0, BLOCK_N)
        # The first tile may begin before the window and the last end past the newest slot. What is there may be NaN: it
        # is not loaded, since 0 times NaN would stay in the sum.
        seen = (slot >= low) & (slot < newest)
        at = base + slot.to(tl.int64)[:, None] * (KV_HEADS * D) + column[None, :]
        k = tl.load(keys_ptr + at, mask=seen[:, None] & in_column[None, :], other=0.0)
        v = tl.load(values_ptr + at, mask=seen[:, None] & in_column[None, :], other=0.0)
        s = tl.dot(q, k.T, input_precision=PRECISION)  # [ROWS, BLOCK_N]
        s = tl.where(seen[None, :], s * score_scale, float("-inf"))
        # Online softmax: what was summed so far is scaled to the new maximum, then this tile's keys are added.
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(low_precision), v, acc * alpha[:, None], input_precision=PRECISION)
        m_i = m_new

    out_at = out_ptr + batch * stride_out + kv_head * (GROUP * D)
    in_group = row < GROUP
    # A chunk without keys: 0 by any number, and an lse so low that its weight below is 0.
    whole = tl.where(l_i == 0, 1.0, l_i)
    acc = acc / whole[:, None]
    if CHUNKS == 1:
        tl.store(
            out_at + row[:, None] * D + column[None, :],
            acc.to(low_precision),
            mask=in_group[:, None] & in_column[None, :],
        )
    else:
        # Behind the parts of all B Hkv heads, in the same buffer.
        lse_ptr = parts_ptr + tl.num_programs(1).to(tl.int64) * (GROUP * CHUNKS * COLUMNS)
        part = (pair.to(tl.int64) * GROUP + row) * CHUNKS + chunk
        tl.store(lse_ptr + part, tl.where(l_i == 0, LOWEST, m_i + tl.log2(whole)), mask=in_group)
        tl.store(parts_ptr + part[:, None] * COLUMNS + c[None, :], acc, mask=in_group[:, None])
        if last_to_arrive(counters_ptr, pair, CHUNKS):
            other = tl.arange(0, AT_ONCE)
            there = other < CHUNKS
            # A query head at a time, its chunks the rows of one tile; the order is fixed, so the bits are the same
            # every time.
            for g in tl.static_range(GROUP):
                of_head = (pair.to(tl.int64) * GROUP + g) * CHUNKS + other
                lse = tl.load(lse_ptr + of_head, mask=there, other=LOWEST, cache_modifier=".cg")
                weight = tl.where(there, tl.exp2(lse - tl.max(lse, 0)), 0.0)
                at = parts_ptr + of_head[:, None] * COLUMNS + c[None, :]
                of_chunks = tl.load(at, mask=there[:, None], other=0.0, cache_modifier=".cg")
                y = tl.sum(of_chunks * weight[:, None], 0) / tl.sum(weight, 0)
                tl.store(out_at + g * D + column, y.to(low_precision), mask=in_column)


def scratch_of(batch: int, shape: AttentionSpec, config: AttentionConfig) -> tuple[int, int]:
    """Return the elements and counters of `Scratch` that the attention needs."""
    if config.chunks == 1:
        return 0, 0
    columns = 2 * max(16, next_power_of_2(shape.size // 2))
    return batch * shape.heads * config.chunks * (columns + 1), batch * shape.kv_heads


def decode_step_attention(
    rows: torch.Tensor,
    shape: AttentionSpec,
    cached: LayerCache,
    out: torch.Tensor,
    scratch: Scratch,
    config: AttentionConfig,
) -> None:
    """Launch the attention of one new token a sequence; what the buffers hold is not checked.

    Args:
        rows: [B, (H + 2 Hkv) D], q, k and v, rows contiguous, in the cache's dtype.
        out: [B, H D], rows contiguous, in that dtype.
    """
    facts = device_facts(rows.device)
    launch(
        _attention_kernel,
        (config.chunks, rows.shape[0] * shape.kv_heads),
        rows,
        rows if shape.q_norm is None else shape.q_norm,
        rows if shape.k_norm is None else shape.k_norm,
        cached.cos,
        cached.sin,
        cached.keys,
        cached.values,
        cached.lengths,
        out,
        scratch.parts,
        scratch.counters,
        rows.stride(0),
        out.stride(0),
        cached.keys.shape[1],
        kernel_window(shape.window),
        shape.scale * math.log2(math.e),
        shape.eps,
        HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        D=shape.size,
        NORM=shape.q_norm is not None,
        CHUNKS=config.chunks,
        AT_ONCE=next_power_of_2(config.chunks),
        ROWS=max(16, next_power_of_2(shape.heads // shape.kv_heads + 1)),
        BLOCK_HALF=max(16, next_power_of_2(shape.size // 2)),
        BLOCK_N=config.keys,
        AHEAD=config.ahead,
        PRECISION=dot_precision(rows.dtype),
        DEPENDENT_LAUNCH=facts.dependent_launch,
        num_warps=config.warps,
        num_stages=config.stages,
        **dependent_launch_options(facts.dependent_launch),
    )
