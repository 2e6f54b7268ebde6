"""Embedding and sampling of a decoding step, in three launches and without materialised logits.

    embed      x = E[token], prepared for the first norm (`Stream`)
    scores     of each tile of columns of the head: the largest of z / T + g and where, that z, and the tile's part of
               lse z; the noise g is that of sampling.py, z is rounded to its dtype as a head would leave it
    finish     over the tiles of a row: its token, log p = z_token - lse z, and the sequence's state

A tile holds a quarter of its columns from each quarter of the vocabulary, since one Philox block gives the noise of
four columns that are that far apart. Bytes: the head's weight, once.

Symbols: `B` rows, `V` columns that may be drawn, `Q = ceil(V / 4)`, `T` temperature.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from distill_kernels.constants import LOWEST
from distill_kernels.decoding.common import (
    Stream,
    multiply,
    prefetch,
    rms_factor,
    scaled_row,
    sum_block,
    wait_for_previous_kernel,
)
from distill_kernels.decoding.fused_linear import PREFETCHED, DecodeTile
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
from distill_kernels.sampling import reference_sample

FIELDS = 4  # numbers a row and tile: best score, z there, largest z, sum of e^(z - largest)


class SequenceState(NamedTuple):
    """State of each sequence, in buffers that a step reads and writes.

    Attributes:
        token: Newest token, int64 [B]; `pad` of a sequence that is done.
        made, limits: Number of tokens generated and allowed, int64 [B].
        done, ended: Flags of sequences that are finished, and finished by an end token, bool [B].
        lengths: int64 [B], tokens in the cache and the newest.
        answers: int64 [B, most]. log_probs: float32 or float64 [B, most].
        column: int64 [1], the column of `answers` that is written next.
        ends: int64 [E], tokens that end an answer.
        pad: Token that follows the end.
    """

    token: torch.Tensor
    made: torch.Tensor
    limits: torch.Tensor
    done: torch.Tensor
    ended: torch.Tensor
    lengths: torch.Tensor
    answers: torch.Tensor
    log_probs: torch.Tensor
    column: torch.Tensor
    ends: torch.Tensor
    pad: int


class Draw(NamedTuple):
    """Sampling arguments: int64 [B] seeds and draw numbers (as in `sample_tokens`), T (0: argmax), V."""

    seeds: torch.Tensor
    draws: torch.Tensor
    temperature: float
    columns: int


def reference_finish(logits: torch.Tensor, draw: Draw, state: SequenceState) -> None:
    """Sample and update the state from logits [B, V], in plain PyTorch: the specification of `scores` and `finish`."""
    token = reference_sample(logits, draw.seeds, draw.draws, draw.temperature)
    upcast = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_p = upcast.log_softmax(-1).gather(1, token[:, None])
    state.log_probs.index_copy_(1, state.column, log_p.to(state.log_probs.dtype))
    # The order matters: whoever was done before this step gets `pad`; whoever ends now still keeps its last token.
    live = ~state.done
    state.token.copy_(torch.where(live, token, state.pad))
    state.answers.index_copy_(1, state.column, state.token[:, None])
    state.column.add_(1)
    state.made.add_(live)
    state.ended.logical_or_(live & (token[:, None] == state.ends).any(1))
    state.done.logical_or_(state.ended | (state.made >= state.limits))
    # The next step caches the new token: a sequence that is done does not grow, and rewrites its last slot instead.
    state.lengths.add_(~state.done)


@triton.jit
def _embed_kernel(token_ptr, weight_ptr, norm_ptr, x_ptr, scaled_ptr, squares_ptr, column_ptr, H, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if row == 0:
        tl.store(column_ptr, tl.load(column_ptr) + 1)  # read, less one, by the step's last kernel
    # A program a row, BLOCK columns at a time. Launched without dependence: it starts when the last step's final kernel
    # is complete, whose token it reads.
    token = tl.load(token_ptr + row)
    total = 0.0
    for first in range(0, H, BLOCK):
        h = first + tl.arange(0, BLOCK)
        x = tl.load(weight_ptr + token * H + h, mask=h < H, other=0.0)
        tl.store(x_ptr + row * H + h, x, mask=h < H)
        upcast = x.to(tl.float32)
        total += tl.sum(upcast * upcast, 0)
        scale = tl.load(norm_ptr + h, mask=h < H, other=0.0).to(tl.float32)
        tl.store(scaled_ptr + row * H + h, scaled_row(upcast, scale).to(scaled_ptr.dtype.element_ty), mask=h < H)
    # One part of squares, [1, M]: the program has the whole row.
    tl.store(squares_ptr + row, total)


@triton.jit(do_not_specialize=["square_parts"])
def _scores_kernel(
    x_ptr,
    squares_ptr,
    weight_ptr,
    seeds_ptr,
    draws_ptr,
    found_ptr,
    index_ptr,
    M,
    K,
    square_parts,
    eps,
    part,
    V,
    quarter,
    rate,
    GREEDY: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """found: fp32 [FIELDS, M, tiles]; index: int32 [M, tiles]."""
    tile = tl.program_id(0)
    tiles = tl.num_programs(0)
    QUARTER: tl.constexpr = BLOCK_N // 4
    # Lanes side by side are the four columns of one Philox block, a quarter of the vocabulary apart. Those past a
    # quarter or past V read some row of W, so as not to read beyond it, and count as -inf.
    n = tl.arange(0, BLOCK_N)
    counter = tile * QUARTER + n // 4
    column = n % 4 * quarter + counter
    inside = (counter < quarter) & (column < V)
    rows = tl.minimum(column, V - 1)
    # The head's weight is no kernel's result: its first lines come while the last layer still runs.
    if DEPENDENT_LAUNCH:
        prefetch(weight_ptr, rows, 0, K, K, PREFETCH)
    wait_for_previous_kernel(DEPENDENT_LAUNCH)
    m = tl.arange(0, BLOCK_M)
    z, _ = multiply(
        x_ptr, weight_ptr, weight_ptr, m, rows, M, K, K, 0, part, False, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION
    )
    z *= rms_factor(squares_ptr, m, M, square_parts, K, eps, PARTS)[:, None]
    # Rounded as a head would leave it, so that equal logits are ties here too; then fp32 again.
    z = tl.where(inside[None, :], z.to(x_ptr.dtype.element_ty).to(tl.float32), -float("inf"))
    # For log p, which is at T = 1 and without noise. A tile of nothing but -inf has sum 0: the clamp keeps -inf less
    # -inf out.
    high = tl.max(z, 1)
    total = tl.sum(tl.exp(z - tl.maximum(high, LOWEST)[:, None]), 1)
    score = z
    if not GREEDY:
        seed = tl.load(seeds_ptr + m, mask=m < M, other=0)
        draw = tl.load(draws_ptr + m, mask=m < M, other=0)
        # Column within the quarter in the low half, number of the draw in the high: the same words as `sample_tokens`
        # takes, wherever a tile ends.
        block = (tile * QUARTER + tl.arange(0, QUARTER)).to(tl.int64)[None, :] + (draw << 32)[:, None]
        w0, w1, w2, w3 = tl.randint4x(seed[:, None], block)
        # Joined so that the words of a block come side by side in their order, w0 to w3, as the columns do.
        words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK_M, BLOCK_N))
        # in line, as in sampling.py: in a function of its own the sum below would round twice
        u = (words.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
        small = u * (1 + u * (0.5 + u / 3))
        noise = -tl.log(tl.where(u < 0.0009765625, small, -tl.log(1 - tl.minimum(u, 0.99999994))))
        score = z * rate + noise
    best = tl.max(score, 1)
    # Of equal scores the lowest column; `there` is the logit at it, of which log p is made.
    index = tl.min(tl.where(score == best[:, None], column[None, :], 2147483647), 1)
    there = tl.max(tl.where(column[None, :] == index[:, None], z, -float("inf")), 1)
    # FIELDS planes of [M, tiles]: every program has its own places, so that nothing is added and the order does not
    # matter.
    at = m * tiles + tile
    plane = M * tiles
    in_rows = m < M
    tl.store(found_ptr + at, best, mask=in_rows)
    tl.store(found_ptr + plane + at, there, mask=in_rows)
    tl.store(found_ptr + 2 * plane + at, high, mask=in_rows)
    tl.store(found_ptr + 3 * plane + at, total, mask=in_rows)
    tl.store(index_ptr + at, index, mask=in_rows)


@triton.jit
def _finish_kernel(
    found_ptr,
    index_ptr,
    token_ptr,
    made_ptr,
    limits_ptr,
    done_ptr,
    ended_ptr,
    lengths_ptr,
    answers_ptr,
    log_probs_ptr,
    column_ptr,
    ends_ptr,
    M,
    tiles,
    most,
    ends,
    pad,
    TILES: tl.constexpr,
    ENDS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    wait_for_previous_kernel(DEPENDENT_LAUNCH)
    row = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, TILES)
    at = row * tiles + t
    plane = M * tiles
    held = t < tiles
    score = tl.load(found_ptr + at, mask=held, other=-float("inf"))
    index = tl.load(index_ptr + at, mask=held, other=2147483647)
    # Of equal scores the lowest column over all tiles, as within one: the argmax of the whole row.
    best = tl.max(score, 0)
    token = tl.min(tl.where(score == best, index, 2147483647), 0)
    # No score equals a NaN. A row of nothing else has no best token, and the next step reads the embedding of this one.
    token = tl.where(token == 2147483647, 0, token)
    z = tl.max(tl.where(index == token, tl.load(found_ptr + plane + at, mask=held, other=0.0), -float("inf")), 0)
    high = tl.load(found_ptr + 2 * plane + at, mask=held, other=-float("inf"))
    total = tl.load(found_ptr + 3 * plane + at, mask=held, other=0.0)
    top = tl.max(high, 0)
    # Sums of exponentials, each relative to its tile's largest, brought to that of the row.
    lse = top + tl.log(tl.sum(total * tl.exp(high - top), 0))
    token = token.to(tl.int64)

    # As `reference_finish`, in its order. A row is one program's alone: what is read here no other program writes.
    live = tl.load(done_ptr + row) == 0
    made = tl.load(made_ptr + row) + live.to(tl.int64)
    e = tl.arange(0, ENDS)
    is_end = tl.max(tl.where((tl.load(ends_ptr + e, mask=e < ends, other=-1) == token) & (e < ends), 1, 0), 0) == 1
    ended = (tl.load(ended_ptr + row) != 0) | (live & is_end)
    done = (tl.load(done_ptr + row) != 0) | ended | (made >= tl.load(limits_ptr + row))
    token = tl.where(live, token, pad)
    # Counted up by the step's first kernel, since programs of this one end in any order and all need the same column.
    place = row * most + tl.load(column_ptr) - 1
    tl.store(token_ptr + row, token)
    tl.store(answers_ptr + place, token)
    tl.store(log_probs_ptr + place, (z - lse).to(log_probs_ptr.dtype.element_ty))
    tl.store(made_ptr + row, made)
    tl.store(ended_ptr + row, ended.to(tl.uint8))
    tl.store(done_ptr + row, done.to(tl.uint8))
    tl.store(lengths_ptr + row, tl.load(lengths_ptr + row) + tl.where(done, 0, 1))


def embed_tokens(weight: torch.Tensor, norm: torch.Tensor, stream: Stream, state: SequenceState) -> None:
    """Fill the stream, of one part of squares, with rows of the embedding, for the first layer's norm of weight [H];
    the first of a step.

    `state.column` is counted up here, and `finish` writes at the one before.
    """
    rows, width = stream.x.shape
    block = min(next_power_of_2(width), 4096)
    launch(
        _embed_kernel,
        (rows,),
        state.token,
        weight,
        norm,
        stream.x,
        stream.scaled,
        stream.squares,
        state.column,
        width,
        BLOCK=block,
        num_warps=4,
    )


class TileScores(NamedTuple):
    """Results of `score_tokens` for `finish_tokens`: fp32 [FIELDS, B, tiles] and int32 [B, tiles]."""

    numbers: torch.Tensor
    columns: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, columns: int, tile: DecodeTile, device: torch.device) -> TileScores:
        """Return empty buffers for `rows` rows and `columns` columns of the vocabulary."""
        tiles = cdiv(cdiv(columns, 4), tile.outputs // 4)
        numbers = torch.empty(FIELDS, rows, tiles, dtype=torch.float32, device=device)
        return cls(numbers, torch.empty(rows, tiles, dtype=torch.int32, device=device))


def score_tokens(
    stream: Stream, eps: float, weight: torch.Tensor, draw: Draw, found: TileScores, tile: DecodeTile
) -> None:
    """Launch the head's product with sampling noise and fill `found`.

    Args:
        stream: Output of the last layer, before the final norm of epsilon `eps`; z is rounded to the dtype of `scaled`.
        weight: Weight of the head, [V or more, K], contiguous.
    """
    x = stream.scaled
    squares = stream.squares
    rows, inputs = x.shape
    facts = device_facts(x.device)
    part = cdiv(inputs, tile.inputs) * tile.inputs
    most = max(128, next_power_of_2(PREFETCHED // (tile.outputs * weight.element_size())) // 2)
    launch(
        _scores_kernel,
        (found.columns.shape[1],),
        x,
        squares,
        weight,
        draw.seeds,
        draw.draws,
        found.numbers,
        found.columns,
        rows,
        inputs,
        squares.shape[0],
        eps,
        part,
        draw.columns,
        cdiv(draw.columns, 4),
        0.0 if draw.temperature == 0 else 1 / draw.temperature,
        GREEDY=draw.temperature == 0,
        EVEN=part == inputs,
        PARTS=sum_block(squares),
        BLOCK_M=max(16, next_power_of_2(rows)),
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        PREFETCH=min(most, next_power_of_2(part)),
        PRECISION=dot_precision(x.dtype),
        DEPENDENT_LAUNCH=facts.dependent_launch,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent_launch_options(facts.dependent_launch),
    )


def finish_tokens(found: TileScores, state: SequenceState) -> None:
    rows, tiles = found.columns.shape
    facts = device_facts(found.columns.device)
    launch(
        _finish_kernel,
        (rows,),
        found.numbers,
        found.columns,
        state.token,
        state.made,
        state.limits,
        state.done.view(torch.uint8),
        state.ended.view(torch.uint8),
        state.lengths,
        state.answers,
        state.log_probs,
        state.column,
        state.ends,
        rows,
        tiles,
        state.answers.shape[1],
        state.ends.shape[0],
        state.pad,
        TILES=next_power_of_2(tiles),
        ENDS=next_power_of_2(state.ends.shape[0]),
        DEPENDENT_LAUNCH=facts.dependent_launch,
        num_warps=4,
        **dependent_launch_options(facts.dependent_launch),
    )
