"""Logits for the row kernels: a head's product, kept relative to each tile's maximum, with the tile's sums of exps.

A row of logits is cut into tiles of `TILE` columns. For every row and tile are kept

    shift = max(z)    total = sum(exp((z - shift) / T))    (and total at T = 1 where it is needed and T differs)

and the logits themselves as `z - shift`, in fp16 for bf16 and fp16 models: large probabilities sit near the maximum,
where fp16 is finest, so this keeps what bf16 logits lose (spacing 0.125 at 16 to 32, a 2 % error in the gradient) in
the same number of bytes. fp32 models keep fp32.

Where a loss is of hard labels alone and a pass before has said each row's log sum of exps (`HardRows`), its gradient
is written in place of the logits, and no row kernel follows.

Two ways, one result. `project` takes the first on GPUs with tensor descriptors (TMA), where alignment allows:

1. One persistent kernel, whose flattened loop lets the next tile's loads run under this tile's epilogue.
   Reads `(N + V) H` elements, writes `N V` halves and `8 N V / TILE` bytes.
2. Products by cuBLAS into a small fp32 buffer, folded tile by tile: `8 N V` bytes more traffic, partly through L2.

On families without measured tables both are timed, the first with several tiles.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from distill_kernels.launch import DeviceFacts, cdiv, device_facts, next_power_of_2
from distill_kernels.losses.operands import Head
from distill_kernels.losses.projection_kernels import _fold_kernel, _project_kernel
from distill_kernels.operands import blocks_of, has_aligned_rows
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


class HardRows(NamedTuple):
    """What turns logits of a chunk's rows into the gradient of their hard-label loss, as `run_rows` would.

    Attributes:
        labels, row_scale: of all tokens, [N].
        rows: int64 [n], which tokens these rows are; None: the first n of what is passed.
        lse: fp32 [n], log sum of exps of each row at T = 1 over the columns of all ranks.
        vocab: columns of all ranks.
        weight, smoothing, z_loss: of the hard-label term.
    """

    labels: torch.Tensor
    row_scale: torch.Tensor
    rows: torch.Tensor | None
    lse: torch.Tensor
    vocab: int
    weight: float
    smoothing: float
    z_loss: float


def fits_blocks(head: Head, hidden: torch.Tensor) -> bool:
    """True where the persistent kernel can serve: 16-bit models and rows aligned to 16 bytes."""
    narrow = hidden.dtype in (torch.bfloat16, torch.float16) and head.lora_a is None
    return narrow and has_aligned_rows(hidden) and has_aligned_rows(head.weight)


def project(
    head: Head,
    hidden: torch.Tensor,
    out: Logits,
    transform: Transform,
    hard: HardRows | None = None,
    *,
    descriptors: bool = True,
) -> None:
    """Fill `out` with the relative logits of `hidden` [n, H] under `head`, of one dtype; of `hard` rows,
    `out.values` (of that dtype then) with the gradient of their loss, and nothing else.

    `descriptors=False` takes the second way even where the first would do.
    """
    if out.values.shape[1] == 0:  # a rank without columns
        return
    way, launch = FOLD, functools.partial(_project, head, hidden, out, transform, hard)
    facts = device_facts(hidden.device)
    # gradients stored through pointers would not keep to their registers
    if descriptors and fits_blocks(head, hidden) and (hard is None or facts.tma):
        ways = ways_of(facts)
        shape = (*map(next_power_of_2, hidden.shape), next_power_of_2(out.values.shape[1]), hidden.dtype)
        way = fastest("logits", shape, ways, launch, hidden.device)
    launch(way)


def _project(
    head: Head, hidden: torch.Tensor, out: Logits, transform: Transform, hard: HardRows | None, way: ProductTile
) -> None:
    if way == FOLD:
        _project_by_tiles(head, hidden, out, transform, hard)
    else:
        _project_fused(head, hidden, out, transform, hard, way)


def _hard_arguments(hard: HardRows | None) -> tuple[tuple[object, ...] | None, torch.Tensor | None]:
    """As kernels take it: Triton 3.6 cannot hand a tuple with None in it from function to function."""
    return (None, None) if hard is None else ((*hard[:2], *hard[3:]), hard.rows)


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
LARGE = (
    ProductTile(128, 64),
    FOLD,
    ProductTile(128, 64, 8, 2),
    ProductTile(128, 32, 8, 4),
    ProductTile(64, 64, 4),
    ProductTile(64, 64, 8, 4),
)
SMALL = (
    ProductTile(64, 32),
    FOLD,
    ProductTile(64, 32, 4),
    ProductTile(64, 64, 8, 2),
    ProductTile(64, 32, 8, 4),
    ProductTile(32, 32, 4),
    ProductTile(32, 64, 4, 2),
)


def ways_of(facts: DeviceFacts) -> tuple[ProductTile, ...]:
    """By which the logits can be made; the first where nothing is timed."""
    ways = LARGE if facts.shared_bytes >= 160 << 10 else SMALL
    return ways if facts.tma else (FOLD, *(way for way in ways if way != FOLD))


def _project_fused(
    head: Head, hidden: torch.Tensor, out: Logits, transform: Transform, hard: HardRows | None, way: ProductTile
) -> None:
    (n, depth), vocab = hidden.shape, out.values.shape[1]
    tiles = cdiv(vocab, TILE)
    facts = device_facts(hidden.device)
    programs = min(facts.multiprocessors, cdiv(n, way.rows) * tiles)
    width = TILE if hard is None else TILE // 2
    _project_kernel[(programs,)](
        blocks_of(hidden, way.rows, way.steps, facts.tma),
        blocks_of(head.weight, TILE, way.steps, facts.tma),
        blocks_of(out.values, way.rows, width, facts.tma),
        head.bias,
        tuple(out[1:]),
        *_hard_arguments(hard),
        n,
        vocab,
        depth,
        tiles,
        transform.scale,
        transform.softcap or 1.0,
        LOG2_E / transform.temperature,
        **_flags(head, transform),
        MASKED=vocab % TILE != 0,
        BLOCK_N=way.rows,
        BLOCK_H=way.steps,
        TMA=facts.tma,
        num_warps=way.warps,
        num_stages=way.stages,
    )


def _project_by_tiles(
    head: Head, hidden: torch.Tensor, out: Logits, transform: Transform, hard: HardRows | None
) -> None:
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
            raw,
            blocks_of(out.values, FOLD_ROWS, TILE, False),
            head.bias,
            tuple(out[1:]),
            *_hard_arguments(hard),
            n,
            vocab,
            raw.stride(0),
            tiles,
            start // TILE,
            transform.scale,
            transform.softcap or 1.0,
            LOG2_E / transform.temperature,
            **_flags(head, transform),
            BLOCK_N=FOLD_ROWS,
            num_warps=8,
        )


def product_fp32(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out = a b` with an fp32 result of operands in fp32, bf16 or fp16; the tensor cores stay in use on CUDA."""
    if a.shape[1] == 0:
        return out.zero_()
    if a.dtype == torch.float32:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.mm(a.float(), b.float(), out=out)
