"""Projection to logits for the row kernels, kept relative to each tile's maximum with its sum of exponentials.

A row of logits is cut into tiles of `TILE` columns. For every row and tile are kept

    shift = max(z)    total = sum(exp((z - shift) / T))    (and total at T = 1 where it is needed and T differs)

and the logits themselves as `z - shift`, in fp16 for bf16 and fp16 models: large probabilities sit near the maximum,
where fp16 is finest, so this keeps what bf16 logits lose (spacing 0.125 at 16 to 32, a 2 % error in the gradient) in
the same number of bytes. fp32 models keep fp32.

Where the loss has hard labels only and each row's log sum of exponentials is known from an earlier pass
(`HardLabelRows`), the gradient is written in place of the logits, and no row kernel follows.

Two implementations, one result. `project` takes the first where TMA and alignment allow:

1. One persistent kernel, whose flattened loop lets the next tile's loads run under this tile's epilogue.
   Reads `(N + V) H` elements, writes `N V` halves and `8 N V / TILE` bytes.
2. cuBLAS GEMMs into a small fp32 buffer and a reduction kernel over its tiles: `8 N V` bytes more, partly in L2.

On families without measured tables both are timed, the first with several tiles.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from distill_kernels.launch import DeviceFacts, cdiv, device_facts, next_power_of_2
from distill_kernels.losses.operands import Head
from distill_kernels.losses.projection_kernels import _project_kernel, _reduce_tiles_kernel
from distill_kernels.operands import blocks_of, has_aligned_rows
from distill_kernels.tuning import autotune

TILE = 256
REDUCE_ROWS = 16  # rows of a program of the reduction kernel
BUFFER_COLUMNS = 4096  # columns of one cuBLAS GEMM
LOG2_E = math.log2(math.e)


class ChunkLogits(NamedTuple):
    """Relative logits of the rows of a chunk, with their tiles' shifts and sums of exponentials.

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

    def rows(self, n: int) -> ChunkLogits:
        return ChunkLogits(self.values[:n], self.shift[:n], self.total[:n], self.total_hard[:n])


class Transform(NamedTuple):
    """Transform of raw logits, `z = cap * tanh(scale * raw / cap)` (cap 0: none), and the temperatures of the sums."""

    scale: float
    softcap: float
    temperature: float
    both_temperatures: bool


class HardLabelRows(NamedTuple):
    """Arguments of the hard-label gradient that the projection writes in place of a chunk's logits.

    Attributes:
        labels, row_scale: labels, int64, and loss factors, fp32, of all tokens, [N].
        rows: indices of these rows among the tokens, int64 [n]; None: the first n of what is passed.
        lse: log sum of exponentials of each row at T = 1, fp32 [n].
        vocab: columns.
        weight, smoothing, z_loss: settings of the hard-label term.
    """

    labels: torch.Tensor
    row_scale: torch.Tensor
    rows: torch.Tensor | None
    lse: torch.Tensor
    vocab: int
    weight: float
    smoothing: float
    z_loss: float


def fits_fused_projection(head: Head, hidden: torch.Tensor) -> bool:
    """Return whether the persistent kernel applies: 16-bit operands, rows aligned to 16 bytes, no LoRA."""
    low_precision = hidden.dtype in (torch.bfloat16, torch.float16) and head.lora_a is None
    return low_precision and has_aligned_rows(hidden) and has_aligned_rows(head.weight)


def project(
    head: Head,
    hidden: torch.Tensor,
    out: ChunkLogits,
    transform: Transform,
    hard: HardLabelRows | None = None,
    *,
    descriptors: bool = True,
) -> None:
    """Fill `out` with the relative logits of `hidden` [n, H] under `head`, of one dtype.

    With `hard`, `out.values` (of that dtype then) receives the gradient of the rows' loss, and nothing else is
    written. `descriptors=False` takes cuBLAS and the reduction kernel even where the fused kernel applies.

    Args:
        head: weight [V, H], bias [V] or None, LoRA or None.
        hidden: hidden states, [n, H].
        out: buffers of n rows and V columns.
        transform: scale, soft cap and temperature.
        hard: labels and settings of a hard-label gradient, or None.
        descriptors: allow the fused kernel.
    """
    candidate = CUBLAS
    launch = functools.partial(_project, head, hidden, out, transform, hard)
    facts = device_facts(hidden.device)
    # gradients stored through pointers would not keep to their registers
    if descriptors and fits_fused_projection(head, hidden) and (hard is None or facts.tma):
        candidates = projection_candidates(facts)
        shape = (*map(next_power_of_2, hidden.shape), next_power_of_2(out.values.shape[1]), hidden.dtype)
        candidate = autotune("logits", shape, candidates, launch, hidden.device)
    launch(candidate)


def _project(
    head: Head,
    hidden: torch.Tensor,
    out: ChunkLogits,
    transform: Transform,
    hard: HardLabelRows | None,
    candidate: MatmulTile,
) -> None:
    if candidate == CUBLAS:
        _project_by_cublas(head, hidden, out, transform, hard)
    else:
        _project_fused(head, hidden, out, transform, hard, candidate)


def _hard_arguments(hard: HardLabelRows | None) -> tuple[tuple[object, ...] | None, torch.Tensor | None]:
    """Return `hard` as kernel arguments: Triton 3.6 cannot pass a tuple with None in it between functions."""
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


class MatmulTile(NamedTuple):
    """Launch shape of the persistent kernel: rows of a tile, columns of a step, warps, pipeline stages."""

    rows: int
    steps: int
    warps: int = 8
    stages: int = 3


CUBLAS = MatmulTile(0, 0)  # GEMMs by cuBLAS and the reduction kernel
LARGE_CANDIDATES = (
    MatmulTile(128, 64),
    CUBLAS,
    MatmulTile(128, 64, 8, 2),
    MatmulTile(128, 32, 8, 4),
    MatmulTile(64, 64, 4),
    MatmulTile(64, 64, 8, 4),
)
SMALL_CANDIDATES = (
    MatmulTile(64, 32),
    CUBLAS,
    MatmulTile(64, 32, 4),
    MatmulTile(64, 64, 8, 2),
    MatmulTile(64, 32, 8, 4),
    MatmulTile(32, 32, 4),
    MatmulTile(32, 64, 4, 2),
)


def projection_candidates(facts: DeviceFacts) -> tuple[MatmulTile, ...]:
    """Return the candidate launch shapes of the projection; the first is taken where nothing is timed."""
    candidates = LARGE_CANDIDATES if facts.shared_bytes >= 160 << 10 else SMALL_CANDIDATES
    return candidates if facts.tma else (CUBLAS, *(candidate for candidate in candidates if candidate != CUBLAS))


def _project_fused(
    head: Head,
    hidden: torch.Tensor,
    out: ChunkLogits,
    transform: Transform,
    hard: HardLabelRows | None,
    candidate: MatmulTile,
) -> None:
    n, depth = hidden.shape
    vocab = out.values.shape[1]
    tiles = cdiv(vocab, TILE)
    facts = device_facts(hidden.device)
    # Persistent: at most one program a multiprocessor. Blocks are tensor descriptors with TMA, else masked pointers.
    programs = min(facts.multiprocessors, cdiv(n, candidate.rows) * tiles)
    # the hard-label epilogue stores by halves of a tile
    width = TILE if hard is None else TILE // 2
    _project_kernel[(programs,)](
        blocks_of(hidden, candidate.rows, candidate.steps, facts.tma),
        blocks_of(head.weight, TILE, candidate.steps, facts.tma),
        blocks_of(out.values, candidate.rows, width, facts.tma),
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
        BLOCK_N=candidate.rows,
        BLOCK_H=candidate.steps,
        TMA=facts.tma,
        num_warps=candidate.warps,
        num_stages=candidate.stages,
    )


def _project_by_cublas(
    head: Head, hidden: torch.Tensor, out: ChunkLogits, transform: Transform, hard: HardLabelRows | None
) -> None:
    n, vocab = out.values.shape
    tiles = cdiv(vocab, TILE)
    low = None if head.lora_a is None else torch.mm(hidden, head.lora_a.t())
    buffer = torch.empty(n * min(BUFFER_COLUMNS, vocab), dtype=torch.float32, device=hidden.device)
    # BUFFER_COLUMNS is a multiple of TILE, so that no tile spans two GEMMs. The next GEMM overwrites `raw` only after
    # the reduction has read it: one stream.
    for start in range(0, vocab, BUFFER_COLUMNS):
        stop = min(start + BUFFER_COLUMNS, vocab)
        raw = buffer[: n * (stop - start)].view(n, stop - start)
        matmul_fp32(hidden, head.weight[start:stop].t(), raw)
        if low is not None and head.lora_b is not None:
            # LoRA's part is added before the tiles' maxima are taken
            raw.add_(matmul_fp32(low, head.lora_b[start:stop].t(), torch.empty_like(raw)), alpha=head.lora_scale)
        _reduce_tiles_kernel[(cdiv(n, REDUCE_ROWS), cdiv(stop - start, TILE))](
            raw,
            blocks_of(out.values, REDUCE_ROWS, TILE, False),
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
            BLOCK_N=REDUCE_ROWS,
            num_warps=8,
        )


def matmul_fp32(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Compute `out = a b` in fp32 from operands in fp32, bf16 or fp16, on tensor cores where there are any."""
    if a.shape[1] == 0:
        return out.zero_()
    if a.dtype == torch.float32:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.mm(a.float(), b.float(), out=out)
