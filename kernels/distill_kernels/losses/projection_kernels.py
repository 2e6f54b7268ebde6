"""The kernels of a projection to logits: the persistent GEMM with its epilogue, and the reduction of cuBLAS's output.

The formulas stand in `projection.py`, which launches them.
"""

from __future__ import annotations

from distill_kernels.launch import tl, triton
from distill_kernels.layers.fast_math import exp
from distill_kernels.losses.row_functions import hard_gradient, raw_logit_gradient, to_int32
from distill_kernels.operands import load_block, store_block


@triton.jit
def _scale_and_cap(
    z,
    columns,
    V,
    bias_ptr,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    """Return logits of raw ones [rows, columns]: bias, scale and soft cap applied."""
    if HAS_BIAS:
        z += tl.load(bias_ptr + columns, mask=columns < V, other=0.0).to(tl.float32)[None, :]
    if SCALED:
        z *= scale
    if CAPPED:  # tanh(x) = 1 - 2 / (1 + exp(2x)), which saturates without overflow
        # in exp2, which the hardware has, instead of tanh, which it approximates
        z = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(z * (2.0 / softcap) * LOG2_E)))
    return z


@triton.jit
def _store_tile(
    z,
    row,
    tile,
    values_blocks,
    bias_ptr,
    numbers,
    hard,
    rows_ptr,
    N,
    V,
    tiles,
    scale,
    softcap,
    exponent,
    HAS_BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    BOTH: tl.constexpr,
    LOG2_E: tl.constexpr,
    TMA: tl.constexpr,
):
    """Store the relative logits of raw ones [rows, TILE] with shift, total and total at T = 1 (`numbers`).

    With `hard`, the gradient of the rows' hard-label loss is stored instead. `exponent` is log2(e) / T.
    """
    rows = row + tl.arange(0, z.shape[0])
    column = tile * z.shape[1]
    if hard is not None:
        labels_ptr, scale_ptr, lse_ptr, whole_vocab, weight, smoothing, z_loss = hard
        inside = rows < N
        # lse lies in the chunk's order; labels and scales are looked up by token, through rows_ptr if there is one.
        lse = tl.load(lse_ptr + rows, mask=inside, other=0.0)[:, None]
        if rows_ptr is not None:
            rows = tl.load(rows_ptr + rows, mask=inside, other=0)
        label = to_int32(tl.load(labels_ptr + rows, mask=inside, other=0), V)[:, None]
        row_scale = tl.load(scale_ptr + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
        weights = weight, smoothing, z_loss
        # z [rows, 2 HALF] -> [rows, 2, HALF] -> [rows, HALF, 2], which tl.split takes apart along its last axis: the
        # epilogue then holds the exponentials and gradients of one half at a time.
        HALF: tl.constexpr = z.shape[1] // 2  # in half the registers
        halves = tl.split(tl.permute(tl.reshape(z, (z.shape[0], 2, HALF)), (0, 2, 1)))
        at = tl.arange(0, HALF)
        # labels move into the half's own columns, so that hard_gradient compares with 0 .. HALF - 1
        for half in tl.static_range(2):
            start = column + half * HALF
            z = _scale_and_cap(halves[half], start + at, V, bias_ptr, scale, softcap, HAS_BIAS, SCALED, CAPPED, LOG2_E)
            g = hard_gradient(exp(z - lse), at[None, :], label - start, lse, whole_vocab, weights, True, True)
            g = raw_logit_gradient(g, z, row_scale, (scale, 1.0 / softcap), SCALED, CAPPED)
            # a row that does not count gets exact zeros: its exponentials may be NaN
            store_block(values_blocks, tl.where(row_scale == 0.0, 0.0, g), row, start, TMA)
    else:
        columns = column + tl.arange(0, z.shape[1])
        z = _scale_and_cap(z, columns, V, bias_ptr, scale, softcap, HAS_BIAS, SCALED, CAPPED, LOG2_E)
        # TMA pads columns past V with zeros, which are logits like others: they must not be a maximum or a sum.
        if MASKED:
            z = tl.where((columns < V)[None, :], z, -float("inf"))
        shift = tl.max(z, 1)
        # A tile whose logits are all -inf keeps them: -inf - 0 is -inf, -inf - (-inf) would be NaN.
        shift = tl.where(shift == -float("inf"), 0.0, shift)
        z -= shift[:, None]
        # exp(z / T) as exp2(z * log2(e) / T): one multiplication and one instruction an element
        total = tl.sum(tl.exp2(z * exponent), 1)
        total_hard = total
        if BOTH:
            total_hard = tl.sum(tl.exp2(z * LOG2_E), 1)
        # fp16 ends at -65504. Logits that far below their tile's maximum have probability 0 in either form; a mask by a
        # bias of -inf must stay -inf, since it excludes the token (a KL against it is infinite).
        if HAS_BIAS:  # a bias may be -inf and stays so; anything else stays within fp16
            z = tl.where(z == -float("inf"), z, tl.maximum(z, -65504.0))
        else:
            z = tl.maximum(z, -65504.0)
        store_block(values_blocks, z, row, column, TMA)
        shift_ptr, total_ptr, hard_ptr = numbers
        # [n, tiles], a row's tiles side by side, which is how the normalisers read them
        where = rows.to(tl.int64) * tiles + tile
        tl.store(shift_ptr + where, shift, mask=rows < N)
        tl.store(total_ptr + where, total, mask=rows < N)
        if BOTH:
            tl.store(hard_ptr + where, total_hard, mask=rows < N)


@triton.jit
def _project_kernel(
    hidden_blocks,
    weight_blocks,
    values_blocks,
    bias_ptr,
    numbers,
    hard,
    rows_ptr,
    N,
    V,
    H,
    tiles,
    scale,
    softcap,
    exponent,
    HAS_BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    BOTH: tl.constexpr,
    LOG2_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    TMA: tl.constexpr,
):
    row_blocks = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(H, BLOCK_H)
    # Persistent: one program a multiprocessor walks over output tiles, and `flatten` joins this loop with the one over
    # H, so that the next tile's first TMA loads are under way while this tile's epilogue runs.
    for t in tl.range(tl.program_id(0), row_blocks * tiles, tl.num_programs(0), flatten=True):
        row_block = t % row_blocks  # fastest, so that programs side by side share a tile of the weight in L2
        tile = t // row_blocks
        # The whole tile [BLOCK_N, TILE] is summed over H in fp32, so that its epilogue sees unrounded logits.
        z = tl.zeros((BLOCK_N, TILE), tl.float32)
        for step in range(steps):
            x = load_block(hidden_blocks, row_block * BLOCK_N, step * BLOCK_H, BLOCK_N, BLOCK_H, TMA)
            # weights are [V, H] as the head stores them; the transposition is a view that wgmma takes
            w = load_block(weight_blocks, tile * TILE, step * BLOCK_H, TILE, BLOCK_H, TMA)
            z = tl.dot(x, w.T, z)
        _store_tile(
            z,
            row_block * BLOCK_N,
            tile,
            values_blocks,
            bias_ptr,
            numbers,
            hard,
            rows_ptr,
            N,
            V,
            tiles,
            scale,
            softcap,
            exponent,
            HAS_BIAS,
            SCALED,
            CAPPED,
            MASKED,
            BOTH,
            LOG2_E,
            TMA,
        )


@triton.jit
def _reduce_tiles_kernel(
    raw_ptr,
    values_blocks,
    bias_ptr,
    numbers,
    hard,
    rows_ptr,
    N,
    V,
    raw_stride,
    tiles,
    first_tile,
    scale,
    softcap,
    exponent,
    HAS_BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    BOTH: tl.constexpr,
    LOG2_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
):
    """Reduce the tiles of `raw_ptr` [N, ...], the raw logits of columns `first_tile * TILE` and following."""
    row = tl.program_id(0) * BLOCK_N
    # The columns left from here on; tiles past V load zeros, which _store_tile (MASKED) turns into -inf.
    raw_blocks = raw_ptr, raw_stride, N, V - first_tile * TILE
    z = load_block(raw_blocks, row, tl.program_id(1) * TILE, BLOCK_N, TILE, False).to(tl.float32)
    _store_tile(
        z,
        row,
        first_tile + tl.program_id(1),
        values_blocks,
        bias_ptr,
        numbers,
        hard,
        rows_ptr,
        N,
        V,
        tiles,
        scale,
        softcap,
        exponent,
        HAS_BIAS,
        SCALED,
        CAPPED,
        True,
        BOTH,
        LOG2_E,
        False,
    )
