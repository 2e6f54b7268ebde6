"""Selection of the student's K most probable tokens from its relative logits, and the teacher's log-probabilities.

The tiles' maxima are known from the projection, and the K tiles of the largest ones hold K tokens at least as probable
as any token elsewhere: each of them has one that no other tile's exceeds. So a row's selection reads at most K tiles of
256 columns of its V. One sweep over them lists the tokens that reach the least of these maxima: K at least, and of
independent logits 1.1 K where K is an eighth of the tiles, 1.4 K where it is half. Among these, in registers, bisection
finds a threshold that K tokens reach: over the integers that order as the logits do, counting the tokens above the
middle, until a count is K or two neighbours are left, and then ties are cut by position. Where more than `LIST` K
tokens reach the least maximum, each step of the bisection sweeps the tiles instead.

Bytes a row, 16-bit logits: `min(512 K, 2 V)` of the student, once with the list and about ten times without it; 8 V /
256 of the tiles' numbers, 4 K of the list; K sectors of the teacher, whose other logits are written by its projection
and never read. Products: the two projections and the two back-projections of a full divergence, no more.
"""

from __future__ import annotations

import math

import torch

from distill_kernels.launch import HAS_TRITON, cdiv, next_power_of_2, tl, triton
from distill_kernels.losses.projection import TILE, ChunkLogits
from distill_kernels.losses.row_functions import load_tiles, logit_at, normaliser
from distill_kernels.losses.topk_normalisers import others_normaliser
from distill_kernels.losses.topk_reference import IMPOSSIBLE, TopK

LEAST_TAIL = 8  # times the epsilon: the least of the teacher's probability outside of the K, which sums resolve
LIST = 4  # times K, and at least 256: tokens of a row's list
BLOCK = 16  # tiles of one step of a sweep
LOG_OF_MOST = math.log1p(-LEAST_TAIL * torch.finfo(torch.float32).eps)
if HAS_TRITON:
    LOG_MOST = tl.constexpr(LOG_OF_MOST)
    NO_PROBABILITY = tl.constexpr(IMPOSSIBLE)
    BELOW_ALL = tl.constexpr(-(2**31))
    LOWEST = tl.constexpr(-2139095041)  # -inf among the ordered integers


@triton.jit
def _ordered(z):
    """Return int32 that order as the fp32 `z` do."""
    # Floats of one sign order as their bits; of negative ones all but the sign is turned over, since larger bits mean
    # less. A NaN's bits lie beyond those of both infinities, where fewer than K tokens would be found, and places of
    # the K stay unset: it counts as -inf, of which every column is a candidate. The normaliser makes the loss NaN.
    bits = tl.where(z == z, z, -float("inf")).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _candidates(values_ptr, shift_ptr, list_ptr, block, sizes, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Return columns and ordered logits of the listed tiles of one block; columns that do not count are below all."""
    V, tiles, count = sizes
    at = block * BLOCK + tl.arange(0, BLOCK)
    # A step is BLOCK of the listed tiles, [BLOCK, TILE] columns. Places past the list's end name the tile after the
    # last, whose columns are all beyond V.
    tile = at
    if list_ptr is not None:
        tile = tl.load(list_ptr + at, mask=at < count, other=0)
    tile = tl.where(at < count, tile, tiles)
    columns = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    keys = _ordered(load_tiles(values_ptr, shift_ptr, tile, columns, V, tiles))
    # Below -inf too: rows whose K most probable tokens include some of -inf still choose columns that exist.
    return columns, tl.where(columns < V, keys, BELOW_ALL)


@triton.jit
def _count(
    keys, middle, values_ptr, shift_ptr, list_ptr, sizes, HELD: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """Return how many candidates are at least `middle`: of `keys` where HELD, else of all blocks."""
    # HELD compiles the sweep away: the candidates stay in registers for all steps of the bisection.
    if HELD:
        found = tl.sum((keys >= middle).to(tl.int32))
    else:
        found = tl.zeros((), tl.int32)
        for block in range(tl.cdiv(sizes[2], BLOCK)):
            _, more = _candidates(values_ptr, shift_ptr, list_ptr, block, sizes, TILE, BLOCK)
            found += tl.sum((more >= middle).to(tl.int32))
    return found


@triton.jit
def _threshold(
    keys,
    K,
    low,
    high,
    values_ptr,
    shift_ptr,
    list_ptr,
    sizes,
    HELD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return (low, high, above): at least K candidates reach `low`, and fewer, `above`, reach `high`.

    Between them lie those that are missing to K, or equal ones. All are int64, whose differences do not overflow.
    """
    # What holds before and after every step: K candidates or more reach `low`, fewer than K reach `high`.
    above = tl.zeros((), tl.int32)
    reached = tl.full((), 2147483647, tl.int32)
    # Every step halves the interval, below 2^32 at first, so that it ends within 32 steps; sooner where a count is K.
    # Then all that reach `low` are chosen; if the bounds are neighbours instead, those between them are equal.
    while (high - low > 1) & (reached != K):
        # Rounded down, and above `low` while the bounds are no neighbours: the interval shrinks every time.
        middle = low + (high - low) // 2
        found = _count(keys, middle.to(tl.int32), values_ptr, shift_ptr, list_ptr, sizes, HELD, TILE, BLOCK)
        enough = found >= K
        reached = tl.where(enough, found, reached)
        above = tl.where(enough, above, found)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low, high, above


@triton.jit
def _places(keys, K, bounds, counted):
    """Return the place among K of every chosen element of [m, n] keys, K or more for others, and the counts so far.

    bounds: of `_threshold`. counted: how many of the blocks before reach `high`, and lie between.
    """
    low, high, above = bounds
    # Those that reach `high` take the first places in their order, those between follow from place `above` on. Equal
    # ones beyond K get places of K or more, which are not stored: ties are cut by position.
    sure = keys >= high.to(tl.int32)
    perhaps = (keys >= low.to(tl.int32)) & (keys < high.to(tl.int32))
    both = sure.to(tl.int32) + (perhaps.to(tl.int32) << 16)  # one scan counts both, at most 2^14 each
    totals = tl.sum(both, 1)
    # Elements before each one: within its row of the block, plus all rows above it.
    before = tl.cumsum(both, 1) - both + (tl.cumsum(totals, 0) - totals)[:, None]
    place = tl.where(sure, counted[0] + (before & 0xFFFF), above + counted[1] + (before >> 16))
    total = tl.sum(totals, 0)
    return tl.where(sure | perhaps, place, K), (counted[0] + (total & 0xFFFF), counted[1] + (total >> 16))


@triton.jit
def _choose_listed(
    listed_ptr, found, values_ptr, shift_ptr, ids_ptr, K, low, high, sizes, LISTED: tl.constexpr, TILE: tl.constexpr
):
    """Store the K of `found` listed columns whose logits are highest, in their order."""
    at = tl.arange(0, LISTED)[None, :]
    # The list has columns only: their logits are read again, a gather of few sectors, rather than kept in a second
    # list.
    columns = tl.load(listed_ptr + at, mask=at < found, other=-1)
    keys = tl.where(at < found, _ordered(logit_at(values_ptr, shift_ptr, columns, sizes[0], TILE)), BELOW_ALL)
    bounds = _threshold(keys, K, low, high, values_ptr, shift_ptr, None, sizes, True, TILE, 1)
    place, _ = _places(keys, K, bounds, (0, 0))
    tl.store(ids_ptr + place, columns, mask=place < K)


@triton.jit
def _choose_by_sweeps(
    list_ptr, values_ptr, shift_ptr, ids_ptr, K, low, high, sizes, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """Store the K columns of the searched tiles whose logits are highest, in their order."""
    # Nothing is held: the first argument only fills the place of `keys`. Each step of the bisection reads the tiles.
    bounds = _threshold(low, K, low, high, values_ptr, shift_ptr, list_ptr, sizes, False, TILE, BLOCK)
    # One more sweep hands out places; the counts carried from block to block continue them.
    sure = tl.zeros((), tl.int32)
    between = tl.zeros((), tl.int32)
    for block in range(tl.cdiv(sizes[2], BLOCK)):
        columns, keys = _candidates(values_ptr, shift_ptr, list_ptr, block, sizes, TILE, BLOCK)
        place, counted = _places(keys, K, bounds, (sure, between))
        tl.store(ids_ptr + place, columns, mask=place < K)
        sure, between = counted


@triton.jit
def _select_kernel(
    student,
    teacher,
    tokens,
    scratch,
    out,
    sizes,
    strides,
    inverse_t,
    LISTED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Store the ids of one row's K most probable tokens, and the teacher's log-probabilities of them (and of the rest).

    scratch: int32 [n, count] for the tiles that are searched and [n, LISTED] for their tokens that may be among the K;
    both None where all tiles are searched.
    """
    values_ptr, shift_ptr, total_ptr = student
    teacher_ptr, teacher_shift_ptr, teacher_total_ptr = teacher
    scale_ptr, rows_ptr = tokens
    list_ptr, listed_ptr = scratch
    ids_ptr, logprobs_ptr, rest_ptr = out
    V, tiles, K, count = sizes
    values_stride, teacher_stride = strides
    # A program a row, as int64: row times stride may pass 2^31 elements.
    here = tl.program_id(0).to(tl.int64)  # within the chunk
    row = here
    if rows_ptr is not None:
        row = tl.load(rows_ptr + here)
    # The kernels that follow skip such a row too, and so never read what is left uninitialised here.
    if tl.load(scale_ptr + row) == 0.0:
        return
    values_ptr += here * values_stride
    shift_ptr += here * tiles
    teacher_ptr += here * teacher_stride
    teacher_shift_ptr += here * tiles
    ids_ptr += row * K
    searched = V, tiles, count

    tile = tl.arange(0, TILES)
    maxima = tl.load(shift_ptr + tile, mask=tile < tiles, other=0.0)
    totals = tl.load(total_ptr + here * tiles + tile, mask=tile < tiles, other=0.0)
    # A tile of nothing but -inf has total 0 and a shift of 0 that is no logit; lanes past the last tile lie below even
    # it.
    maxima = _ordered(tl.where(totals > 0.0, maxima, -float("inf")))
    maxima = tl.where(tile < tiles, maxima, BELOW_ALL)
    # All columns reach -inf, and none the number after the largest maximum: bounds that `_threshold` may start from.
    low = tl.full((), LOWEST, tl.int64)
    high = tl.max(maxima, 0).to(tl.int64) + 1
    # First bisection, over the tiles' maxima: the `count` tiles of the largest. It needs fewer than all tiles to save
    # anything; else the branch is compiled away, and all tiles are swept.
    if list_ptr is not None:
        list_ptr += here * count
        bounds = _threshold(maxima, count, low, high, values_ptr, shift_ptr, None, searched, True, TILE, BLOCK)
        tile_place, _ = _places(maxima[None, :], count, bounds, (0, 0))
        tl.store(list_ptr + tile_place, tl.broadcast_to(tile[None, :], tile_place.shape), mask=tile_place < count)
        # Other threads read the list than those that stored it; the program's own row, so a barrier within it is
        # enough.
        tl.debug_barrier()
        # Each of these tiles has a token at its maximum, K tokens in all: `low` holds as the lower bound for tokens
        # too.
        low = bounds[0]
        listed_ptr += here * LISTED
        found = tl.zeros((), tl.int32)
        # No token reaches the upper bound here: all that reach `low` count as between, and are placed in their order.
        # What does not fit is dropped but counted, which is how the list is known to be too short.
        reach = low, tl.full((), 2147483647, tl.int64), 0
        for block in range(tl.cdiv(count, BLOCK)):
            columns, keys = _candidates(values_ptr, shift_ptr, list_ptr, block, searched, TILE, BLOCK)
            place, counted = _places(keys, LISTED, reach, (0, found))
            tl.store(listed_ptr + place, columns, mask=place < LISTED)
            found = counted[1]
        tl.debug_barrier()
        # The same for all threads, since `found` is a sum over the program.
        if found <= LISTED:
            _choose_listed(listed_ptr, found, values_ptr, shift_ptr, ids_ptr, K, low, high, searched, LISTED, TILE)
        else:
            _choose_by_sweeps(list_ptr, values_ptr, shift_ptr, ids_ptr, K, low, high, searched, TILE, BLOCK)
    else:
        _choose_by_sweeps(None, values_ptr, shift_ptr, ids_ptr, K, low, high, searched, TILE, BLOCK)
    tl.debug_barrier()

    # The K ids come back as one vector, in other threads than stored them: hence the barrier above.
    lane = tl.arange(0, LANES)
    ids = tl.load(ids_ptr + lane, mask=lane < K, other=-1)
    _, lse = normaliser(teacher_shift_ptr, teacher_total_ptr + here * tiles, tiles, inverse_t, TILES)
    log_t = logit_at(teacher_ptr, teacher_shift_ptr, ids, V, TILE) * inverse_t - lse
    # With `rest` the teacher's tail is summed, which keeps a small tail's digits. Without it, it is 1 less the K's sum:
    # the K are scaled down where they leave less than that sum resolves.
    if rest_ptr is not None:
        rest = others_normaliser(teacher_ptr, teacher_shift_ptr, ids, lane < K, V, tiles, inverse_t, lse, TILE, BLOCK)
        tl.store(rest_ptr + row, tl.maximum(rest - lse, NO_PROBABILITY))
    else:
        peak = tl.maximum(tl.max(log_t, 0), NO_PROBABILITY)
        log_t -= tl.maximum(peak + tl.log(tl.sum(tl.exp(log_t - peak), 0)) - LOG_MOST, 0.0)
    # A token that the teacher excludes keeps a finite mark: -inf would mean an unused place.
    tl.store(logprobs_ptr + row * K + lane, tl.maximum(log_t, NO_PROBABILITY), mask=lane < K)


def select_student_top_k(
    student: ChunkLogits,
    teacher: ChunkLogits,
    out: TopK,
    *,
    row_scale: torch.Tensor,
    rows: torch.Tensor | None,
    temperature: float,
) -> None:
    """Fill the rows of `out` with the student's K most probable tokens and the teacher's log-probabilities of them.

    Args:
        student, teacher: relative logits of the n rows of a chunk, [n, V].
        out: int32 and fp32 [N, K], of all tokens; rows of scale 0 are left as they are. Where it has `rest`, that is
            summed over the teacher's other tokens, whose logits are read once, and the K are lost from `teacher`; else
            the K are kept from adding up to more than 1 less `LEAST_TAIL` epsilons.
        row_scale: factor of each row's loss, [N]; rows of factor 0 are skipped.
        rows: int64 [n], which tokens these rows are; None: the first n of what is passed.
        temperature: T of the teacher's probabilities.
    """
    n, vocab = student.values.shape
    k = out.ids.shape[1]
    if n == 0:
        return
    tiles = cdiv(vocab, TILE)
    count = min(k, tiles)
    listed = max(next_power_of_2(LIST * k), 256)
    scratch: tuple[torch.Tensor | None, ...] = None, None
    if count < tiles:
        scratch = tuple(torch.empty(n, m, dtype=torch.int32, device=row_scale.device) for m in (count, listed))
    _select_kernel[(n,)](
        tuple(student[:3]),
        tuple(teacher[:3]),
        (row_scale, rows),
        scratch,
        (out.ids, out.logprobs, out.rest),
        (vocab, tiles, k, count),
        (student.values.stride(0), teacher.values.stride(0)),
        1.0 / temperature,
        LISTED=listed,
        TILE=TILE,
        BLOCK=BLOCK,
        TILES=next_power_of_2(tiles),
        LANES=next_power_of_2(k),
        num_warps=8,
    )
