"""Fused linear layer of a decoding step, with the norm, activation or residual addition next to it: one launch.

    q, k, v        y = n W^T + b                     n = RMSNorm(x), W three weights, one after the other
    o, down        x <- x + y W^T (+ b)              and what the norm that follows takes of the new x: see `Stream`
    gate and up    y = silu(n W^T) * (n U^T)

x [M, K] is the residual stream, M <= 128 rows. Bytes: the weights, and for each of `outputs` columns' tile M K of x out
of the L2 cache. Rounding: as transformers' modules, every product and the sum with the residual are rounded to their
dtype; of a norm x times its weight is, once, and 1 / rms multiplies fp32 sums, where modules round the normed row too.

With `splits` > 1 the inner dimension is cut, and the last program of a tile adds the parts in their order
(`arrivals.py`): no atomics on results, the same bits every time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from distill_kernels.arrivals import last_to_arrive
from distill_kernels.decoding.common import (
    Scratch,
    Stream,
    multiply,
    prefetch,
    rms_factor,
    scaled_row,
    sum_block,
    wait_for_previous_kernel,
)
from distill_kernels.launch import (
    cdiv,
    dependent_launch_options,
    device_facts,
    dot_precision,
    launch,
    next_power_of_2,
    tl,
    triton,
)
from distill_kernels.layers.activations import activate

MAX_ROWS = 128
PREFETCHED = 16 << 10  # bytes of the weight that a program prefetches before it waits for the previous kernel


class DecodeTile(NamedTuple):
    """Launch shape of a GEMM: columns of y and of x at a time, splits of the inner dimension, warps, stages."""

    outputs: int
    inputs: int
    splits: int = 1
    warps: int = 4
    stages: int = 4


class Product(NamedTuple):
    """A linear layer, or several of one input, with the operations before and after it.

    Attributes:
        weights: One to three weights, [N, K] each, contiguous; y holds their outputs one after the other.
        biases: A bias [N] of each weight, or None for all.
        norm: Weight of an RMSNorm: of x [K] before the product, or [N] of the one after a product that `adds`.
        eps: Epsilon of a norm before the product.
        up: Second weight of a gated MLP, [N, K], whose first is `weights[0]`.
        adds: y is added to the stream; else the stream is what is multiplied.
    """

    weights: tuple[torch.Tensor, ...]
    biases: tuple[torch.Tensor | None, ...]
    norm: torch.Tensor
    eps: float = 0.0
    up: torch.Tensor | None = None
    adds: bool = False

    @property
    def outputs(self) -> int:
        """Columns of y."""
        return sum(weight.shape[0] for weight in self.weights)


def reference_product(x: torch.Tensor, product: Product, out: torch.Tensor) -> None:
    """Fill `out` from the stream x, or add to the stream `out`, in plain PyTorch, rounded as transformers' modules."""
    dtype = x.dtype if product.adds else out.dtype
    accumulate_dtype = torch.promote_types(dtype, torch.float32)
    if not product.adds:
        factor = torch.rsqrt(x.to(accumulate_dtype).pow(2).mean(-1, keepdim=True) + product.eps)
        # Rounded after the norm and again after its weight, as the modules do.
        x = product.norm * (x.to(accumulate_dtype) * factor).to(x.dtype)

    def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = x.to(dtype).to(accumulate_dtype) @ weight.to(dtype).to(accumulate_dtype).T
        return (y if bias is None else y + bias.to(dtype).to(accumulate_dtype)).to(dtype)

    y = torch.cat([linear(*each) for each in zip(product.weights, product.biases, strict=True)], 1)
    if product.up is not None:
        y = (F.silu(y.to(accumulate_dtype)) * linear(product.up, None).to(accumulate_dtype)).to(dtype)
    out.copy_(out + y if product.adds else y)


@triton.jit(do_not_specialize=["square_parts"])
def _product_kernel(
    x_ptr,
    weight_ptrs,
    up_ptr,
    bias_ptrs,
    out_ptr,
    norm_ptr,
    scaled_ptr,
    squares_ptr,
    parts_ptr,
    counters_ptr,
    M,
    K,
    sizes,
    stride_x,
    stride_out,
    square_parts,
    eps,
    part,
    SEGMENTS: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Compute one tile of the product; ADDS writes the tile's sums of squares of the stream, else all are read.

    parts: fp32 [tiles, SPLITS, 1 or 2, BLOCK_M, BLOCK_N]; counters: int32 [tiles], zero before and after.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    # the tile within its weight, and that weight's first column of y
    # Tiles are counted weight by weight, so that none holds columns of two: the last of each is cut short by its mask.
    own = tile
    base = 0
    weight_ptr = weight_ptrs[0]
    bias_ptr = bias_ptrs[0]
    N = sizes[0]
    if SEGMENTS > 1:
        tiles = tl.cdiv(sizes[0], BLOCK_N)
        if tile >= tiles:
            own = tile - tiles
            base = sizes[0]
            N = sizes[1]
            weight_ptr = weight_ptrs[1]
            bias_ptr = bias_ptrs[1]
        if SEGMENTS > 2:
            tiles += tl.cdiv(sizes[1], BLOCK_N)
            if tile >= tiles:
                own = tile - tiles
                base = sizes[0] + sizes[1]
                N = sizes[2]
                weight_ptr = weight_ptrs[2]
                bias_ptr = bias_ptrs[2]
    n = own * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1)  # outputs beyond the edge read the last row of W and are not written
    first = split * part
    # Weights are no kernel's result: their first lines are fetched while the previous kernel still runs. The rows of x,
    # its squares and the scratch are, and wait.
    if DEPENDENT_LAUNCH:
        last = tl.minimum(first + part, K)
        prefetch(weight_ptr, rows, first, last, K, PREFETCH)
        if GATED:
            prefetch(up_ptr, rows, first, last, K, PREFETCH)
    wait_for_previous_kernel(DEPENDENT_LAUNCH)
    m = tl.arange(0, BLOCK_M)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    total, total_up = multiply(
        x_ptr,
        weight_ptr,
        up_ptr,
        m,
        rows,
        M,
        K,
        stride_x,
        first,
        part,
        GATED,
        EVEN,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        PRECISION,
    )

    done = True
    if SPLITS > 1:
        # A tile's parts [SPLITS, BLOCK_M, BLOCK_N], the gated product's second plane behind the first of its split.
        PLANE: tl.constexpr = BLOCK_M * BLOCK_N
        WIDTH: tl.constexpr = PLANE * (2 if GATED else 1)
        cells = m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tile_ptr = parts_ptr + tile.to(tl.int64) * (SPLITS * WIDTH)
        tl.store(tile_ptr + split * WIDTH + cells, total)
        if GATED:
            tl.store(tile_ptr + split * WIDTH + PLANE + cells, total_up)
        done = last_to_arrive(counters_ptr, tile, SPLITS)
        if done:
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            # In the order of the splits, whoever came last, its own part read back too: the same bits every time.
            for other in tl.static_range(SPLITS):
                total += tl.load(tile_ptr + other * WIDTH + cells, cache_modifier=".cg")
            if GATED:
                total_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for other in tl.static_range(SPLITS):
                    total_up += tl.load(tile_ptr + other * WIDTH + PLANE + cells, cache_modifier=".cg")
    if done:
        if not ADDS:
            # 1 / rms is a factor of the whole row and so commutes with the product: the norm needs no pass over x
            # before it.
            factor = rms_factor(squares_ptr, m, M, square_parts, K, eps, PARTS)[:, None]
            total = total * factor
            total_up = total_up * factor
        inside = (m < M)[:, None] & (n < N)[None, :]
        at = out_ptr + m.to(tl.int64)[:, None] * stride_out + (base + n)[None, :]
        if BIAS:
            total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(DTYPE).to(tl.float32)[None, :]
        # Rounded wherever a module would hand on a tensor: the product, then its activation, then the sum with the
        # stream.
        y = total.to(DTYPE)
        if GATED:
            y = (activate(y.to(tl.float32), "silu") * total_up.to(DTYPE).to(tl.float32)).to(DTYPE)
        if ADDS:
            # The stream is updated in place: an element is read and written by the one program that finishes its tile,
            # and the product's own input is another buffer.
            before = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            # Columns past the edge hold products of the repeated last row of W, which must not enter the squares.
            y = tl.where(inside, before + y.to(tl.float32), 0.0).to(out_ptr.dtype.element_ty)
            # Of the rounded stream, which is what a norm would read.
            upcast = y.to(tl.float32)
            tl.store(squares_ptr + tile * M + m, tl.sum(upcast * upcast, 1), mask=m < M)
            scale = tl.load(norm_ptr + n, mask=n < N, other=0.0).to(tl.float32)
            scaled_at = scaled_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
            tl.store(scaled_at, scaled_row(upcast, scale[None, :]).to(DTYPE), mask=inside)
        tl.store(at, y, mask=inside)


def tiles_of(product: Product, tile: DecodeTile) -> int:
    """Return the number of tiles along the outputs."""
    return sum(cdiv(weight.shape[0], tile.outputs) for weight in product.weights)


def scratch_of(rows: int, product: Product, tile: DecodeTile) -> tuple[int, int]:
    """Return the elements and counters of `Scratch` that a product needs."""
    tiles = tiles_of(product, tile)
    block_m = max(16, next_power_of_2(rows))
    if tile.splits == 1:
        return 0, 0
    return tiles * tile.splits * block_m * tile.outputs * (1 if product.up is None else 2), tiles


def multiply_rows(rows: torch.Tensor, stream: Stream, product: Product, scratch: Scratch, tile: DecodeTile) -> None:
    """Launch a product; what the buffers hold is not checked, since a step's own code calls this.

    Args:
        rows: Rows contiguous: [M, K] that are multiplied where the product `adds`, else [M, N] that are filled.
        stream: Is added to, [M, N], with a part of squares for each of `tiles_of`; else it is what is multiplied.
    """
    weights = product.weights
    x, out = (rows, stream.x) if product.adds else (stream.scaled, rows)
    count, inputs = x.shape
    facts = device_facts(x.device)
    steps = cdiv(cdiv(inputs, tile.splits), tile.inputs)
    part = steps * tile.inputs
    # Parts are whole steps, so that fewer of them than were asked for may reach the end.
    splits = cdiv(inputs, part)
    # A power of two of columns, so that all rows of a program's tile come to at most PREFETCHED bytes, or 128 columns
    # if that is more.
    most = max(128, next_power_of_2(PREFETCHED // (tile.outputs * weights[0].element_size())) // 2)
    biases = [x if bias is None else bias for bias in product.biases]
    last = len(weights) - 1
    three = range(3)
    launch(
        _product_kernel,
        (tiles_of(product, tile), splits),
        x,
        tuple(weights[min(i, last)] for i in three),
        weights[0] if product.up is None else product.up,
        tuple(biases[min(i, last)] for i in three),
        out,
        product.norm,
        stream.scaled,
        stream.squares,
        scratch.parts,
        scratch.counters,
        count,
        inputs,
        tuple(weights[min(i, last)].shape[0] for i in three),
        x.stride(0),
        out.stride(0),
        stream.squares.shape[0],
        product.eps,
        part,
        SEGMENTS=len(weights),
        GATED=product.up is not None,
        ADDS=product.adds,
        BIAS=product.biases[0] is not None,
        EVEN=splits * part == inputs,
        SPLITS=splits,
        PARTS=sum_block(stream.squares),
        BLOCK_M=max(16, next_power_of_2(count)),
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        PREFETCH=min(most, next_power_of_2(part)),
        PRECISION=dot_precision(x.dtype),
        DEPENDENT_LAUNCH=facts.dependent_launch,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent_launch_options(facts.dependent_launch),
    )
