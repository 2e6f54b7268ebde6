"""Normalisers and the K logits of rows with a top-K teacher, before outcomes and gradients (topk_kernel.py).

For each token 4 fp32 numbers, the student's maximum, its log sum of exps at T and at T = 1, and that of the other
tokens; and K of its logits. For the bucket the rows are swept here: -inf takes the places of the K tokens, and stays
there, so that the sweep sees and sums the other tokens only; 2 V bytes a row of 16-bit logits are read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from distill_kernels.launch import HAS_TRITON, cdiv, next_power_of_2, tl, triton
from distill_kernels.layers.fast_math import LOG2_E, exp2
from distill_kernels.losses.projection import TILE, ChunkLogits
from distill_kernels.losses.row_functions import load_tiles, logit_at, normaliser, to_int32
from distill_kernels.losses.topk_reference import TopK

NORMS = 4  # maximum, log sums of exps at T, at T = 1, and at T of the others
SMALLEST_TAIL = 1e-30  # a tail of less, relative to the row, is summed again relative to its own maximum
if HAS_TRITON:
    SMALLEST = tl.constexpr(SMALLEST_TAIL)


class JoinedTopK(NamedTuple):
    """Normalisers and logits of the K tokens.

    Attributes:
        norms: fp32 [4, n], see `NORMS`.
        top: fp32 [n, K], the student's logits at the K tokens; -inf at unused entries, NaN at an id outside
            of the vocabulary.
    """

    norms: torch.Tensor
    top: torch.Tensor


@triton.jit
def _maximum_and_mass(values_ptr, shift_ptr, V, tiles, inverse_t, base, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Return a row's largest logit and `sum(exp(z / T - base))`."""
    # Lanes of a [BLOCK, TILE] step, reduced once after the sweep. Columns beyond V load as -inf and add 0.
    maxima = tl.full((BLOCK, TILE), -float("inf"), tl.float32)
    mass = tl.zeros((BLOCK, TILE), tl.float32)
    for block in range(tl.cdiv(tiles, BLOCK)):
        tile = block * BLOCK + tl.arange(0, BLOCK)
        columns = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        z = load_tiles(values_ptr, shift_ptr, tile, columns, V, tiles)
        maxima = tl.maximum(maxima, z)
        mass += exp2(z * (inverse_t * LOG2_E) - base * LOG2_E)
    return tl.max(maxima), tl.sum(mass)


@triton.jit
def others_normaliser(
    values_ptr, shift_ptr, ids, held, V, tiles, inverse_t, lse, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the log sum of exponentials of a row without the `held` ones of `ids`, in whose places -inf is written.

    `lse` is that of all tokens, to which the sum is relative; where it underflows it is made again, by the maximum.
    """
    # The first barrier: every warp has read the K logits that are now overwritten. The second: the sweep reads the -inf
    # in other threads than stored it.
    tl.debug_barrier()
    tl.store(values_ptr + ids, tl.full(ids.shape, -float("inf"), values_ptr.dtype.element_ty), mask=held)
    tl.debug_barrier()
    # Of a row of nothing but -inf: 0 keeps -inf less -inf, NaN, out of the exponents.
    base = tl.where(lse == -float("inf"), 0.0, lse)
    maximum, mass = _maximum_and_mass(values_ptr, shift_ptr, V, tiles, inverse_t, base, TILE, BLOCK)
    # Only a row whose other tokens hold next to nothing is read again; the log of an underflowed sum would be -inf, and
    # the others' share lost.
    if mass < SMALLEST:
        base = maximum * inverse_t
        base = tl.where(base == -float("inf"), 0.0, base)
        _, mass = _maximum_and_mass(values_ptr, shift_ptr, V, tiles, inverse_t, base, TILE, BLOCK)
    return base + tl.log(mass)


@triton.jit
def _top_k_normalisers_kernel(
    student,
    teacher,
    scale_ptr,
    rows_ptr,
    norms_ptr,
    top_ptr,
    sizes,
    start,
    strides,
    inverse_t,
    BUCKET: tl.constexpr,
    AT_TEMPERATURE_1: tl.constexpr,
    OWNS_ROW_TERMS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Compute one row's part of `JoinedTopK` over this rank's columns, the first of which is `start`."""
    values_ptr, shift_ptr, total_ptr, hard_ptr = student
    V, whole_vocab, tiles, K = sizes
    values_stride, ids_stride, given_stride, norms_stride = strides
    ids_ptr, given_ptr = teacher
    here = tl.program_id(0).to(tl.int64)  # within the chunk
    row = here
    if rows_ptr is not None:
        row = tl.load(rows_ptr + here)
    # A skipped row keeps what the launcher filled in; the row kernel skips it too.
    if tl.load(scale_ptr + row) == 0.0:
        return
    values_ptr += here * values_stride
    shift_ptr += here * tiles
    # From the projection's sums of each tile, made before any -inf is written: those of all tokens, the K included.
    maximum, lse = normaliser(shift_ptr, total_ptr + here * tiles, tiles, inverse_t, TILES)
    lse1 = lse
    if AT_TEMPERATURE_1:
        _, lse1 = normaliser(shift_ptr, hard_ptr + here * tiles, tiles, 1.0, TILES)
    tl.store(norms_ptr + here, maximum)
    tl.store(norms_ptr + norms_stride + here, lse)
    tl.store(norms_ptr + 2 * norms_stride + here, lse1)

    lane = tl.arange(0, LANES)
    # Lanes past K have id -1 and are not used. An id of an unused place may be anything: it is never read from.
    ids = to_int32(tl.load(ids_ptr + row * ids_stride + lane, mask=lane < K, other=-1), whole_vocab)
    used = tl.load(given_ptr + row * given_stride + lane, mask=lane < K, other=-float("inf")) != -float("inf")
    own = ids - start
    held = used & (own >= 0) & (own < V)
    # Tokens of other columns add 0 here. An id that is no token makes its row's loss NaN, so that it is seen.
    z_top = tl.where(held, logit_at(values_ptr, shift_ptr, own, V, TILE), 0.0)
    if OWNS_ROW_TERMS:
        z_top = tl.where((ids < 0) | (ids >= whole_vocab), float("nan"), z_top)
        z_top = tl.where(used, z_top, -float("inf"))
    tl.store(top_ptr + here * K + lane, z_top, mask=lane < K)
    # Last, since it overwrites the K logits; `z_top` has them.
    if BUCKET:
        others = others_normaliser(values_ptr, shift_ptr, own, held, V, tiles, inverse_t, lse, TILE, BLOCK)
        tl.store(norms_ptr + 3 * norms_stride + here, others)


def top_k_normalisers(
    student: ChunkLogits,
    teacher: TopK,
    row_scale: torch.Tensor,
    rows: torch.Tensor | None,
    *,
    temperature: float,
    bucket: bool,
    at_temperature_1: bool,
    block: int,
) -> JoinedTopK:
    """Return the normalisers and top-K logits of the n rows of `student`.

    Args:
        student: relative logits, [n, V]. With `bucket`, -inf is written at the ids.
        teacher: the teacher's tokens and log-probabilities [N, K].
        row_scale, rows: see `RowCall`.
        temperature: softmax temperature T of the divergence.
        bucket: sum the other tokens.
        at_temperature_1: the normaliser at T = 1 is needed, and T differs.
        block: tiles of one step of the sweep.
    """
    n, vocab = student.values.shape
    (ids, given, *_) = teacher
    k = ids.shape[1]
    norms = torch.full((NORMS, n), -float("inf"), dtype=torch.float32, device=student.values.device)
    top = torch.zeros(n, k, dtype=torch.float32, device=student.values.device)
    tiles = cdiv(vocab, TILE)
    _top_k_normalisers_kernel[(n,)](
        tuple(student),
        (ids, given),
        row_scale,
        rows,
        norms,
        top,
        (vocab, vocab, tiles, k),
        0,  # the first column
        (student.values.stride(0), ids.stride(0), given.stride(0), norms.stride(0)),
        1.0 / temperature,
        BUCKET=bucket,
        AT_TEMPERATURE_1=at_temperature_1,
        OWNS_ROW_TERMS=True,
        TILE=TILE,
        BLOCK=block,
        TILES=next_power_of_2(tiles),
        LANES=next_power_of_2(k + 1),
        num_warps=8 if bucket else 4,
    )
    return JoinedTopK(norms, top)
