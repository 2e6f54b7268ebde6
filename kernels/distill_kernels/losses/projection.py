"""Logits for the row kernels: a head's product, kept relative to each tile's maximum, with the tile's sums of exps.

A row of logits is cut into tiles of `TILE` columns. For every row and tile are kept

    shift = max(z)    total = sum(exp((z - shift) / T))    (and total at T = 1 where it is needed and T differs)

and the logits themselves as `z - shift`, in fp16 for bf16 and fp16 models: large probabilities sit near the maximum,
where fp16 is finest, so this keeps what bf16 logits lose (spacing 0.125 at 16 to 32, a 2 % error in the gradient) in
the same number of bytes. fp32 models keep fp32.

Two ways, one result. `project` takes the first on GPUs with tensor descriptors (TMA), where alignment allows:

1. One persistent kernel, whose flattened loop lets the next tile's loads run under this tile's epilogue.
   Reads `(N + V) H` elements, writes `N V` halves and `8 N V / TILE` bytes.
2. Products by cuBLAS into a small fp32 buffer, folded tile by tile: `8 N V` bytes more traffic, partly through L2.

On families without measured tables both are timed, the first with several tiles.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from distill_kernels.launch import DeviceFacts, cdiv, device_facts, next_power_of_2, tl, triton
from distill_kernels.losses.operands import Head
from distill_kernels.operands import blocks_of, has_aligned_rows, load_block, store_block
from distill_kernels.tuning import fastest

TILE = 256
FOLD_ROWS = 16
BUFFER_COLUMNS = 4096  # of one cuBLAS product on the second way
LOG2_E = math.log2(math.e)


class Logits(NamedTuple):
    """Relative logits of the rows of a chunk and what restores them.

    Attributes:
        values: `z - shift`, [n, V], fp16 or fp32, rows `stride(0)` apart.
        shift: fp32 [n, tiles].
        total: fp32 [n, tiles], sum of exps at temperature T.
        total_hard: fp32 [n, tiles], at temperature 1 (`total` itself where T = 1).
    """

    values: torch.Tensor
    shift: torch.Tensor
    total: torch.Tensor
    total_hard: torch.Tensor

    def rows(self, n: int) -> Logits:
        """The first `n` rows."""
        return Logits(self.values[:n], self.shift[:n], self.total[:n], self.total_hard[:n])


class Transform(NamedTuple):
    """`z = cap * tanh(scale * raw / cap)` (cap 0: none), the temperature, and whether sums at T = 1 are needed too."""

    scale: float
    softcap: float
    temperature: float
    both_temperatures: bool


@triton.jit
def _relative_tile(
    z, columns, V, bias_ptr, scale, softcap, exponent,
    HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr, BOTH: tl.constexpr,
    LOG2_E: tl.constexpr,
):  # fmt: skip
    """Raw logits [rows, TILE] -> relative logits, shift, total, total at T = 1. `exponent` is log2(e) / T."""
    if HAS_BIAS:
        z += tl.load(bias_ptr + columns, mask=columns < V, other=0.0).to(tl.float32)[None, :]
    if SCALED:
        z *= scale
    if CAPPED:  # tanh(x) = 1 - 2 / (1 + exp(2x)), which saturates without overflow
        z = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(z * (2.0 / softcap) * LOG2_E)))
    if MASKED:
        z = tl.where((columns < V)[None, :], z, -float("inf"))
    shift = tl.max(z, 1)
    shift = tl.where(shift == -float("inf"), 0.0, shift)
    z -= shift[:, None]
    e = tl.exp2(z * exponent)
    total = tl.sum(e, 1)
    total_hard = total
    if BOTH:
        total_hard = tl.sum(tl.exp2(z * LOG2_E), 1)
    if HAS_BIAS:  # a bias may be -inf and stays so; anything else stays within fp16
        z = tl.where(z == -float("inf"), z, tl.maximum(z, -65504.0))
    else:
        z = tl.maximum(z, -65504.0)
    return z, shift, total, total_hard


@triton.jit
def _project_kernel(
    hidden_blocks, weight_blocks, values_blocks, bias_ptr, shift_ptr, total_ptr, hard_ptr,
    N, V, H, tiles, scale, softcap, exponent,
    HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr, BOTH: tl.constexpr,
    LOG2_E: tl.constexpr, BLOCK_N: tl.constexpr, TILE: tl.constexpr, BLOCK_H: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    row_blocks = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(H, BLOCK_H)
    for t in tl.range(tl.program_id(0), row_blocks * tiles, tl.num_programs(0), flatten=True):
        row_block = t % row_blocks  # fastest, so that programs side by side share a tile of the weight in L2
        tile = t // row_blocks
        z = tl.zeros((BLOCK_N, TILE), tl.float32)
        for step in range(steps):
            x = load_block(hidden_blocks, row_block * BLOCK_N, step * BLOCK_H, BLOCK_N, BLOCK_H, TMA)
            w = load_block(weight_blocks, tile * TILE, step * BLOCK_H, TILE, BLOCK_H, TMA)
            z = tl.dot(x, w.T, z)
        columns = tile * TILE + tl.arange(0, TILE)
        z, shift, total, total_hard = _relative_tile(
            z, columns, V, bias_ptr, scale, softcap, exponent, HAS_BIAS, SCALED, CAPPED, MASKED, BOTH, LOG2_E
        )
        store_block(values_blocks, z, row_block * BLOCK_N, tile * TILE, TMA)
        rows = row_block * BLOCK_N + tl.arange(0, BLOCK_N)
        where = rows.to(tl.int64) * tiles + tile
        tl.store(shift_ptr + where, shift, mask=rows < N)
        tl.store(total_ptr + where, total, mask=rows < N)
        if BOTH:
            tl.store(hard_ptr + where, total_hard, mask=rows < N)


@triton.jit
def _fold_kernel(
    raw_ptr, values_ptr, bias_ptr, shift_ptr, total_ptr, hard_ptr,
    N, V, raw_stride, values_stride, tiles, first_tile, scale, softcap, exponent,
    HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, BOTH: tl.constexpr,
    LOG2_E: tl.constexpr, BLOCK_N: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Columns `first_tile * TILE` on of the raw logits lie in `raw_ptr` [N, ...] from its first column."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = first_tile + tl.program_id(1)
    columns = tile * TILE + tl.arange(0, TILE)
    inside = (rows < N)[:, None] & (columns < V)[None, :]
    from_start = tl.program_id(1) * TILE + tl.arange(0, TILE)
    z = tl.load(raw_ptr + rows.to(tl.int64)[:, None] * raw_stride + from_start[None, :], mask=inside, other=0.0)
    z, shift, total, total_hard = _relative_tile(
        z.to(tl.float32), columns, V, bias_ptr, scale, softcap, exponent, HAS_BIAS, SCALED, CAPPED, True, BOTH, LOG2_E
    )
    tl.store(values_ptr + rows.to(tl.int64)[:, None] * values_stride + columns[None, :], z, mask=inside)
    where = rows.to(tl.int64) * tiles + tile
    tl.store(shift_ptr + where, shift, mask=rows < N)
    tl.store(total_ptr + where, total, mask=rows < N)
    if BOTH:
        tl.store(hard_ptr + where, total_hard, mask=rows < N)


def fits_blocks(head: Head, hidden: torch.Tensor) -> bool:
    """True where the persistent kernel can serve: 16-bit models and rows aligned to 16 bytes."""
    narrow = hidden.dtype in (torch.bfloat16, torch.float16) and head.lora_a is None
    return narrow and has_aligned_rows(hidden) and has_aligned_rows(head.weight)


def project(head: Head, hidden: torch.Tensor, out: Logits, transform: Transform, *, descriptors: bool = True) -> None:
    """Fill `out` with the relative logits of `hidden` [n, H] under `head`, of one dtype.

    `descriptors=False` takes the second way even where the first would do.
    """
    if out.values.shape[1] == 0:  # a rank without columns
        return
    way = FOLD
    if descriptors and fits_blocks(head, hidden):
        ways = ways_of(device_facts(hidden.device))
        shape = (*map(next_power_of_2, hidden.shape), next_power_of_2(out.values.shape[1]), hidden.dtype)
        way = fastest("logits", shape, ways, lambda way: _project(head, hidden, out, transform, way), hidden.device)
    _project(head, hidden, out, transform, way)


def _project(head: Head, hidden: torch.Tensor, out: Logits, transform: Transform, way: ProductTile) -> None:
    if way == FOLD:
        _project_by_tiles(head, hidden, out, transform)
    else:
        _project_fused(head, hidden, out, transform, way)


def _flags(head: Head, transform: Transform) -> dict[str, object]:
    return {
        "HAS_BIAS": head.bias is not None,
        "SCALED": transform.scale != 1.0,
        "CAPPED": transform.softcap != 0.0,
        "BOTH": transform.both_temperatures and transform.temperature != 1.0,
        "LOG2_E": LOG2_E,
        "TILE": TILE,
    }


class ProductTile(NamedTuple):
    """Rows of a tile and columns of a step of the persistent kernel, its warps, and how many steps are in flight."""

    rows: int
    steps: int
    warps: int = 8
    stages: int = 3


FOLD = ProductTile(0, 0)  # products by cuBLAS
LARGE = (ProductTile(128, 64), FOLD, ProductTile(128, 64, 8, 2), ProductTile(128, 32, 8, 4), ProductTile(64, 64, 4),
         ProductTile(64, 64, 8, 4))  # fmt: skip
SMALL = (ProductTile(64, 32), FOLD, ProductTile(64, 32, 4), ProductTile(64, 64, 8, 2), ProductTile(64, 32, 8, 4),
         ProductTile(32, 32, 4), ProductTile(32, 64, 4, 2))  # fmt: skip


def ways_of(facts: DeviceFacts) -> tuple[ProductTile, ...]:
    """By which the logits can be made; the first where nothing is timed."""
    ways = LARGE if facts.shared_bytes >= 160 << 10 else SMALL
    return ways if facts.tma else (FOLD, *(way for way in ways if way != FOLD))


def _project_fused(head: Head, hidden: torch.Tensor, out: Logits, transform: Transform, way: ProductTile) -> None:
    (n, depth), vocab = hidden.shape, out.values.shape[1]
    tiles = cdiv(vocab, TILE)
    facts = device_facts(hidden.device)
    programs = min(facts.multiprocessors, cdiv(n, way.rows) * tiles)
    _project_kernel[(programs,)](
        blocks_of(hidden, way.rows, way.steps, facts.tma), blocks_of(head.weight, TILE, way.steps, facts.tma),
        blocks_of(out.values, way.rows, TILE, facts.tma), head.bias, out.shift, out.total, out.total_hard,
        n, vocab, depth, tiles, transform.scale, transform.softcap or 1.0, LOG2_E / transform.temperature,
        **_flags(head, transform), MASKED=vocab % TILE != 0, BLOCK_N=way.rows, BLOCK_H=way.steps, TMA=facts.tma,
        num_warps=way.warps, num_stages=way.stages,
    )  # fmt: skip


def _project_by_tiles(head: Head, hidden: torch.Tensor, out: Logits, transform: Transform) -> None:
    n, vocab = out.values.shape
    tiles = cdiv(vocab, TILE)
    low = None if head.lora_a is None else torch.mm(hidden, head.lora_a.t())
    buffer = torch.empty(n * min(BUFFER_COLUMNS, vocab), dtype=torch.float32, device=hidden.device)
    for start in range(0, vocab, BUFFER_COLUMNS):
        stop = min(start + BUFFER_COLUMNS, vocab)
        raw = buffer[: n * (stop - start)].view(n, stop - start)
        product_fp32(hidden, head.weight[start:stop].t(), raw)
        if low is not None and head.lora_b is not None:
            raw.add_(product_fp32(low, head.lora_b[start:stop].t(), torch.empty_like(raw)), alpha=head.lora_scale)
        _fold_kernel[(cdiv(n, FOLD_ROWS), cdiv(stop - start, TILE))](
            raw, out.values, head.bias, out.shift, out.total, out.total_hard,
            n, vocab, raw.stride(0), out.values.stride(0), tiles, start // TILE,
            transform.scale, transform.softcap or 1.0, LOG2_E / transform.temperature,
            **_flags(head, transform), BLOCK_N=FOLD_ROWS, num_warps=8,
        )  # fmt: skip


def product_fp32(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out = a b` with an fp32 result of operands in fp32, bf16 or fp16; the tensor cores stay in use on CUDA."""
    if a.shape[1] == 0:
        return out.zero_()
    if a.dtype == torch.float32:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.mm(a.float(), b.float(), out=out)
