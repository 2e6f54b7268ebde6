"""Write of each sequence's newest key and value into its own slot of a cache [B, T_max, Hkv, D].

    keys[b, lengths[b] - 1, h] = k[b, h],    values likewise

Positions come before heads, as projections write them, so that a new token's keys are one contiguous row. Lengths live
on the device: nothing waits for the host, and a CUDA graph can replay the write. Bytes: 4 B Hkv D elements moved.
"""

from __future__ import annotations

import torch

from distill_kernels.kernel_op import check_tensors
from distill_kernels.launch import launch, next_power_of_2, runs_on_triton, tl, triton
from distill_kernels.operands import contiguous_rows


@triton.jit
def _put_kernel(
    keys_ptr,
    values_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
    stride_cb,
    stride_ct,
    stride_ch,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    limit,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store one sequence's and head's new key and value; a slot outside of the cache is skipped."""
    # A program a sequence and head, as int64: a cache may have more than 2^31 elements.
    batch = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(lengths_ptr + batch).to(tl.int64) - 1
    column = tl.arange(0, BLOCK)
    held = (column < SIZE) & (slot >= 0) & (slot < limit)
    to = batch * stride_cb + slot * stride_ct + head * stride_ch + column
    k = tl.load(k_ptr + batch * stride_kb + head * stride_kh + column, mask=held)
    v = tl.load(v_ptr + batch * stride_vb + head * stride_vh + column, mask=held)
    # Cast to the cache's dtype, which may be narrower. Every program has a slot of its own: no order between them.
    tl.store(keys_ptr + to, k.to(keys_ptr.dtype.element_ty), mask=held)
    tl.store(values_ptr + to, v.to(values_ptr.dtype.element_ty), mask=held)


def write_newest(
    cached_keys: torch.Tensor,
    cached_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """Write the newest position of every sequence into its own slot, in one launch that a CUDA graph can replay.

    Args:
        cached_keys, cached_values: [B, T_max, Hkv, D], contiguous; written to.
        keys, values: [B, Hkv, 1, D].
        lengths: int64 [B] on the device, 1 to T_max: tokens of each sequence, the newest included, so that its slot is
            the one before (a GPU leaves out a slot outside the cache).

    Raises:
        ValueError: shapes that do not fit.
    """
    check_tensors(keys=keys, values=values, lengths=lengths)
    batch, limit, kv_heads, size = cached_keys.shape
    if keys.shape != (batch, kv_heads, 1, size) or values.shape != keys.shape or lengths.shape != (batch,):
        raise ValueError(
            f"keys, values, lengths: expected [{batch}, {kv_heads}, 1, {size}] twice and [{batch}], got "
            f"{tuple(keys.shape)}, {tuple(values.shape)}, {tuple(lengths.shape)}"
        )
    if not runs_on_triton(keys):
        sequence = torch.arange(batch, device=keys.device)
        cached_keys[sequence, lengths - 1] = keys[:, :, 0].to(cached_keys.dtype)
        cached_values[sequence, lengths - 1] = values[:, :, 0].to(cached_values.dtype)
        return
    assert cached_keys.is_contiguous() and cached_values.is_contiguous()
    keys = contiguous_rows(keys)
    values = contiguous_rows(values)
    lengths = contiguous_rows(lengths)
    launch(
        _put_kernel,
        (batch, kv_heads),
        cached_keys,
        cached_values,
        keys,
        values,
        lengths,
        *cached_keys.stride()[:3],
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        limit,
        SIZE=size,
        BLOCK=next_power_of_2(size),
        num_warps=1,
    )
