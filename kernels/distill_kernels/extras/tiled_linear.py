"""Linear layer for many rows on Triton alone: a persistent GEMM with TMA or asynchronous copies.

    y = x W^T + b        x [M, K], W [N, K], b [N], y [M, N]

Bound by the tensor cores: 2 M N K FLOP for 2 (M K + N K + M N) bytes. One program a multiprocessor walks over the tiles
of y, rows fastest, so that programs side by side share a tile of W in L2; the flattened loop lets the next tile's loads
run under this tile's store. Where 128 x 256 tiles are too few to give every multiprocessor one, they are cut smaller.

For prompts where `split_k_linear` serves the tokens that follow (`triton_linear` takes either), so that a whole model
can run without a CUDA library's kernels. Inference only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from distill_kernels.extras.split_k import MAX_ROWS, check_linear, reference_split_k_linear, split_k_linear
from distill_kernels.kernel_op import KernelOp, check_no_gradients, check_tensors
from distill_kernels.launch import DeviceFacts, cdiv, device_facts, launch, runs_on_triton, tl, triton
from distill_kernels.operands import blocks_of, contiguous_rows, has_aligned_rows, load_block, store_block

DEPTH = 64


class GemmTile(NamedTuple):
    """Rows and columns that a program makes at a time, and how it is compiled."""

    rows: int
    columns: int
    warps: int
    stages: int


TILES = (GemmTile(128, 256, 8, 3), GemmTile(128, 128, 4, 4), GemmTile(64, 128, 4, 4), GemmTile(64, 64, 4, 4))


def steps_in_flight(tile: GemmTile, facts: DeviceFacts) -> int:
    """Return the pipeline stages that fit shared memory beside the tile's result, at most the tile's own."""
    left = facts.shared_bytes - 2 * tile.rows * tile.columns - 1024
    return min(tile.stages, left // (2 * DEPTH * (tile.rows + tile.columns)))


def choose_tile(rows: int, outputs: int, facts: DeviceFacts) -> GemmTile:
    """The tile whose waves over the multiprocessors take least, at the rates that larger tiles reach (a quarter less
    for each size below), of those that fit into shared memory with two steps in flight or more.
    """

    def steps(tile: GemmTile) -> int:
        return steps_in_flight(tile, facts)

    def cost(place: int) -> float:
        tile = TILES[place]
        waves = cdiv(cdiv(rows, tile.rows) * cdiv(outputs, tile.columns), facts.multiprocessors)
        return waves * tile.rows * tile.columns * 1.25**place

    tile = TILES[min((place for place in range(len(TILES)) if steps(TILES[place]) >= 2), key=cost)]
    return tile._replace(stages=steps(tile))


@triton.jit
def _tiled_kernel(
    x_blocks,
    weight_blocks,
    y_blocks,
    bias_ptr,
    M,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):
    row_blocks = tl.cdiv(M, BLOCK_M)
    steps = tl.cdiv(K, BLOCK_K)
    # Tiles of y are numbered, and a program takes every num_programs-th. Flattened, the two loops are one pipeline: the
    # next tile's first loads are under way while this one is stored.
    for t in tl.range(tl.program_id(0), row_blocks * tl.cdiv(N, BLOCK_N), tl.num_programs(0), flatten=True):
        row = t % row_blocks * BLOCK_M
        column = t // row_blocks * BLOCK_N
        # fp32 over the whole inner dimension: one program has it all, and rounds once.
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(steps):
            # The last step may pass K: what lies outside loads as 0.
            x = load_block(x_blocks, row, step * BLOCK_K, BLOCK_M, BLOCK_K, TMA)
            weight = load_block(weight_blocks, column, step * BLOCK_K, BLOCK_N, BLOCK_K, TMA)
            total = tl.dot(x, weight.T, total)
        if HAS_BIAS:
            n = column + tl.arange(0, BLOCK_N)
            total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        store_block(y_blocks, total, row, column, TMA)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: GemmTile | None = None
) -> torch.Tensor:
    """Return x [M, K] times weight [N, K] in such tiles: [M, N]."""
    if not runs_on_triton(x):
        return reference_split_k_linear(x, weight, bias)
    rows, inputs = x.shape
    outputs = weight.shape[0]
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    facts = device_facts(x.device)
    tile = tile or choose_tile(rows, outputs, facts)
    # TMA takes rows that start at multiples of 16 bytes; others are copied.
    x = x if has_aligned_rows(x) else x.clone(memory_format=torch.contiguous_format)
    weight = weight if has_aligned_rows(weight) else weight.clone(memory_format=torch.contiguous_format)
    programs = min(facts.multiprocessors, cdiv(rows, tile.rows) * cdiv(outputs, tile.columns))
    launch(
        _tiled_kernel,
        (programs,),
        blocks_of(x, tile.rows, DEPTH, facts.tma),
        blocks_of(weight, tile.columns, DEPTH, facts.tma),
        blocks_of(y, tile.rows, tile.columns, facts.tma),
        contiguous_rows(bias),
        rows,
        outputs,
        inputs,
        HAS_BIAS=bias is not None,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=DEPTH,
        TMA=facts.tma,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y


def _launch_op(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _launch(x, weight, bias)


_op = KernelOp("tiled_linear", _launch_op, lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]))


def triton_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear` on Triton kernels alone, without a gradient.

    Args:
        x: [..., K] float16 or bfloat16 (float32 on the CPU too). Up to 64 rows go to `split_k_linear`.
        weight: [N, K], the dtype of `x`, rows contiguous; N and K multiples of 8.
        bias: [N] or None.

    Returns:
        [..., N] in the dtype of `x`, accumulated in fp32 and rounded once.

    Raises:
        ValueError: For shapes or dtypes other than these, or if a gradient is required.
    """
    check_tensors(x=x, weight=weight, bias=bias)
    check_no_gradients(x=x, weight=weight, bias=bias)
    inputs = x.shape[-1]
    flat = x.reshape(-1, inputs)
    if flat.shape[0] <= MAX_ROWS:
        return split_k_linear(x, weight, bias)
    check_linear(x, weight, bias)
    if weight.shape[0] % 8 or inputs % 8 or weight.stride(0) % 8:
        raise ValueError(
            f"weight: expected [N, K], both multiples of 8, and rows as far apart, got {tuple(weight.shape)} with "
            f"strides {weight.stride()}"
        )
    return _op(flat, weight, bias).view(*x.shape[:-1], weight.shape[0])
