"""Masks as intervals: the keys that each query attends to form one interval.

Causality, a sliding window, packed documents and padding all restrict query `i` to an interval of keys
`[low_i, high_i)`, and both ends grow with `i`. Seen from the other side, key `j` is attended by an interval of
queries. The attention kernels use no other form of mask: from the intervals of a tile's first and last row they
derive which tiles to skip, which need comparing element by element and which lie wholly inside.

With `shift = T_k - T_q` of the document (the causal diagonal ends in its last query and last key, as in
FlashAttention-2; torch's `is_causal` instead aligns the first ones) and window `w`:

    keys of query i:    [max(first, i + shift - w + 1),  min(last, i + shift + 1 or i + shift + w))
    queries of key j:   [max(first, j - shift or j - shift - w + 1),  min(last, j - shift + w))

where `first` and `last` bound the document on the other side. Dense batches compute this in the kernel; packed ones
read it from two int32 arrays that one small launch makes from the cumulative lengths.
"""

from __future__ import annotations

import torch

from distill_kernels.launch import cdiv, launch, runs_on_triton, tl, triton
from distill_kernels.operands import check_tensor, contiguous_rows


def kernel_window(window: int | None) -> int:
    """Return a window as kernels take it; for None one that no sequence reaches."""
    return 1 << 30 if window is None else window


def reference_ranges(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    rows: int,
    causal: bool,
    window: int | None,
    *,
    from_keys: bool = False,
) -> torch.Tensor:
    """Return intervals int64 [2, rows] of flat positions on the other side; empty after the last document."""
    own, other = (cu_seqlens_k, cu_seqlens_q) if from_keys else (cu_seqlens_q, cu_seqlens_k)
    own = own.long()
    other = other.long()
    row = torch.arange(rows, device=own.device)
    document = (torch.searchsorted(own, row, right=True) - 1).clamp(max=own.numel() - 2)
    outside = row >= own[-1]
    first = other[document]
    last = other[document + 1]
    diagonal = row + last - own[document + 1]
    low, high = _interval(diagonal, first, last, kernel_window(window), causal, from_keys)
    low = torch.where(outside, other[-1], low)
    return torch.stack([low, torch.where(outside, other[-1], torch.maximum(low, high))])


def reference_mask(
    queries: int, keys: int, causal: bool, window: int | None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return the mask of a dense batch, bool [queries, keys]: True where query i attends to key j."""
    row = torch.arange(queries, device=device)
    width = kernel_window(window)
    low, high = _interval(row + keys - queries, 0 * row, 0 * row + keys, width, causal, False)
    column = torch.arange(keys, device=device)
    return (column >= low[:, None]) & (column < high[:, None])


def _interval(
    diagonal: torch.Tensor, first: torch.Tensor, last: torch.Tensor, window: int, causal: bool, from_keys: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    before = diagonal - window + 1
    after = diagonal + window
    if causal and from_keys:
        before = diagonal
    elif causal:
        after = diagonal + 1
    return torch.maximum(first, before), torch.minimum(last, after)


@triton.jit
def attended_interval(diagonal, first, last, window, CAUSAL: tl.constexpr, FROM_KEYS: tl.constexpr):
    """Return the interval of the module docstring; `diagonal` is i + shift for queries, j - shift for keys."""
    if CAUSAL and FROM_KEYS:
        low = tl.maximum(first, diagonal)
    else:
        low = tl.maximum(first, diagonal - window + 1)
    if CAUSAL and not FROM_KEYS:
        high = tl.minimum(last, diagonal + 1)
    else:
        high = tl.minimum(last, diagonal + window)
    return low, high


@triton.jit
def dense_or_packed_interval(
    row, batch, ranges_ptr, sizes, window, CAUSAL: tl.constexpr, PACKED: tl.constexpr, FROM_KEYS: tl.constexpr
):
    """Return the interval of `row` (int32 scalar or block) on the other side, in positions of this batch entry.

    sizes: batch entries, positions on the own side, positions on the other.
    """
    batches, rows, others = sizes
    if PACKED:
        # Two planes of flat positions: a batch entry's own begin at 0.
        at = ranges_ptr + batch.to(tl.int64) * rows + row
        low = tl.load(at) - batch * others
        high = tl.load(at + batches * rows) - batch * others
    else:
        # The last position sees the last of the other side. `row * 0` gives the bounds the shape of `row`.
        low, high = attended_interval(row + (others - rows), row * 0, row * 0 + others, window, CAUSAL, FROM_KEYS)
    return low, high


@triton.jit
def key_tiles(
    m,
    row,
    batch,
    ranges_ptr,
    sizes,
    window,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    LEFT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Return the range of key tiles that the query tile at `m` visits, and each row's interval.

    Tiles [start, full_begin) and [full_end, end) cross an interval's end; [full_begin, full_end) lie within every
    row's. Without LEFT no interval has a beginning to cross. sizes: batch entries, queries, keys.
    """
    _, queries, _ = sizes
    last_row = tl.minimum(m + BLOCK_M, queries) - 1
    # Both ends of the intervals grow with the row: the first row's and the last row's bound those of all between.
    first_low, first_high = dense_or_packed_interval(m, batch, ranges_ptr, sizes, window, CAUSAL, PACKED, False)
    last_low, last_high = dense_or_packed_interval(last_row, batch, ranges_ptr, sizes, window, CAUSAL, PACKED, False)
    # Rows past the end repeat the last one, so that packed intervals are not read beyond theirs.
    row = tl.minimum(row, last_row)
    low, high = dense_or_packed_interval(row, batch, ranges_ptr, sizes, window, CAUSAL, PACKED, False)
    end = tl.maximum(last_high, 0)
    # Rounded to tiles of keys: outwards where visits begin, inwards where the comparison is left out.
    if LEFT:
        start = tl.maximum(first_low, 0) // BLOCK_N * BLOCK_N
        full_begin = tl.minimum(tl.cdiv(tl.maximum(last_low, 0), BLOCK_N), tl.cdiv(end, BLOCK_N)) * BLOCK_N
        full_begin = tl.maximum(full_begin, start)
    else:
        start = 0
        full_begin = 0
    full_end = tl.maximum(full_begin, first_high // BLOCK_N * BLOCK_N)
    return start, full_begin, full_end, end, low, high


@triton.jit
def _ranges_kernel(
    own_ptr,
    other_ptr,
    out_ptr,
    rows,
    documents,
    steps,
    window,
    CAUSAL: tl.constexpr,
    FROM_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # The last document that starts at or before the row, by bisection: `below` always does, `above` never. Empty
    # documents are stepped over, since the last of several equal starts is found.
    below = tl.zeros([BLOCK], tl.int32)
    above = tl.zeros([BLOCK], tl.int32) + documents
    for _ in range(steps):
        middle = (below + above) // 2
        starts = tl.load(own_ptr + middle) <= row
        below = tl.where(starts, middle, below)
        above = tl.where(starts, above, middle)
    own_last = tl.load(own_ptr + below + 1).to(tl.int32)
    first = tl.load(other_ptr + below).to(tl.int32)
    last = tl.load(other_ptr + below + 1).to(tl.int32)
    low, high = attended_interval(row + last - own_last, first, last, window, CAUSAL, FROM_KEYS)
    # Positions behind the last document see nothing: an empty interval at the other side's end, so that both ends
    # still grow with the row.
    outside = row >= tl.load(own_ptr + documents)
    nothing = tl.load(other_ptr + documents).to(tl.int32)
    low = tl.where(outside, nothing, low)
    high = tl.where(outside, nothing, tl.maximum(low, high))
    tl.store(out_ptr + row, low, mask=row < rows)
    tl.store(out_ptr + rows + row, high, mask=row < rows)


def packed_ranges(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    rows: int,
    causal: bool,
    window: int | None,
    *,
    from_keys: bool = False,
) -> torch.Tensor:
    """Return `reference_ranges` as int32 in one launch, without waiting for the device.

    Lengths of `cu_seqlens_from_position_ids` keep what was made of them, for all of a model's layers; but not where
    either is captured in a CUDA graph and the other is not: a replay reads lengths that may have changed since.

    Args:
        cu_seqlens_q, cu_seqlens_k: int [documents + 1].
        rows: positions on the own side.
        causal, window: settings of the mask.
        from_keys: intervals of queries for each key, in place of keys for each query.
    """
    none: dict[tuple[object, ...], torch.Tensor] = {}
    captured, kept = getattr(cu_seqlens_q, "distill_ranges", (None, none))
    if cu_seqlens_q is cu_seqlens_k and captured == _is_captured(cu_seqlens_q):
        key = (rows, causal, window, from_keys, None if cu_seqlens_q.is_inference() else cu_seqlens_q._version)
        if key not in kept:
            kept[key] = _packed_ranges(cu_seqlens_q, cu_seqlens_k, rows, causal, window, from_keys)
        return kept[key]
    return _packed_ranges(cu_seqlens_q, cu_seqlens_k, rows, causal, window, from_keys)


def _packed_ranges(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, rows: int, causal: bool, window: int | None, from_keys: bool
) -> torch.Tensor:
    if not runs_on_triton(cu_seqlens_q):
        return reference_ranges(cu_seqlens_q, cu_seqlens_k, rows, causal, window, from_keys=from_keys).int()
    own, other = (cu_seqlens_k, cu_seqlens_q) if from_keys else (cu_seqlens_q, cu_seqlens_k)
    own = contiguous_rows(own)
    other = contiguous_rows(other)
    out = torch.empty(2, rows, dtype=torch.int32, device=own.device)
    documents = own.numel() - 1
    block = 256
    launch(
        _ranges_kernel,
        (cdiv(rows, block),),
        own,
        other,
        out,
        rows,
        documents,
        documents.bit_length(),
        kernel_window(window),
        CAUSAL=causal,
        FROM_KEYS=from_keys,
        BLOCK=block,
    )
    return out


def cu_seqlens_from_position_ids(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the cumulative document lengths of a packed batch, without a host sync.

    Args:
        position_ids: [B, T] int, restarting at 0 with each document (padding counts as a document of its own).

    Returns:
        int32 [B*T + 1]: the flat start of each document and then B*T over and over. The length does not depend on
        the data, so nothing is synchronised; the trailing documents are empty and cost nothing.
    """
    check_tensor("position_ids", position_ids)
    total = position_ids.numel()
    starts = position_ids.reshape(-1) == 0
    starts[:1].fill_(True)  # an assignment would copy the value from the host
    out = torch.full((total + 1,), total, dtype=torch.int32, device=position_ids.device)
    flat = torch.arange(total, dtype=torch.int32, device=position_ids.device)
    # rows that start no document all write to the last entry what it holds already
    target = torch.where(starts, starts.cumsum(0) - 1, total)
    out.scatter_(0, target, torch.where(starts, flat, total))
    if not torch.compiler.is_compiling():
        out.distill_ranges = (_is_captured(out), {})  # type: ignore[attr-defined]
    return out


def _is_captured(tensor: torch.Tensor) -> bool:
    """Return whether operations on `tensor` are being captured into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
