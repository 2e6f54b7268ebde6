"""Sampling of next tokens from logits, greedy or from softmax(logits / T): one launch, no host sync, graph-safe.

A draw is the largest of logits / T plus Gumbel noise (Gumbel, 1954; Maddison et al., 2014), so that no softmax, sum or
sort is made and the logits are read once:

    token = argmax_v z_v / T + g_v,   g_v = -log(e_v),   e_v = -log(1 - u_v)

The noise is a pure function of (the row's seed, the number of the draw, v) by Philox-4x32-10 (Salmon et al., 2011,
"Parallel random numbers: as easy as 1, 2, 3"): a sequence's tokens depend neither on its neighbours in the batch nor
on what was drawn before, and CPU and GPU draw the same up to rounding. Of one Philox block the four words serve the
columns v, v + Q, v + 2 Q and v + 3 Q, Q = ceil(V / 4).

Symbols: `B` rows, `V` vocabulary, `T` temperature.
"""

from __future__ import annotations

import torch

from distill_kernels.kernel_op import KernelOp, check_tensors
from distill_kernels.launch import cdiv, launch, runs_on_triton, tl, triton
from distill_kernels.operands import contiguous_rows

_MASK = 0xFFFFFFFF
BLOCK = 1024


def _philox(counter: torch.Tensor, draw: torch.Tensor, seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return four words of Philox-4x32-10, int64 below 2**32, from counters (counter, draw, 0, 0) and 64-bit keys."""
    key0 = seed & _MASK
    key1 = (seed >> 32) & _MASK
    # The counter is (column within its quarter, number of the draw, 0, 0) and the key the seed's two halves: a block of
    # noise has one address, and no state is carried from draw to draw.
    c0, c1, c2, c3 = torch.broadcast_tensors(counter, draw & _MASK, torch.zeros_like(draw), torch.zeros_like(draw))
    for _ in range(10):
        # a product of two 32-bit words wraps around int64 with all 64 bits right
        low = 0xD2511F53 * c0
        high = 0xCD9E8D57 * c2
        # Ten rounds, as published; the order of the words is what makes them equal to those of Triton's generator.
        c0 = ((high >> 32) & _MASK) ^ c1 ^ key0
        c2 = ((low >> 32) & _MASK) ^ c3 ^ key1
        c1 = high & _MASK
        c3 = low & _MASK
        key0 = (key0 + 0x9E3779B9) & _MASK
        key1 = (key1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def reference_noise(seeds: torch.Tensor, draws: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the Gumbel noise, fp32 [B, columns], of draw number `draws` [B] under `seeds` [B]."""
    # The four words of a block, side by side, are the four quarters of a row; the last may be cut short.
    quarter = cdiv(columns, 4)
    counter = torch.arange(quarter, device=seeds.device)[None]
    return _gumbel(torch.cat(_philox(counter, draws[:, None].long(), seeds[:, None]), dim=1)[:, :columns])


def _gumbel(words: torch.Tensor) -> torch.Tensor:
    """Return Gumbel noise, fp32, from uniform words below 2**32."""
    # In fp32 the largest words round up to 1, where the noise would be infinite; the half keeps 0 out at the other end.
    u = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    # 1 - u would round a small u away, and with it the largest values of the noise
    exponential = torch.where(u < 2.0**-10, u * (1 + u * (0.5 + u / 3)), -torch.log(1 - u))
    return -torch.log(exponential)


def reference_sample(
    logits: torch.Tensor, seeds: torch.Tensor, draws: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the sampled tokens, int64 [B], in plain PyTorch: the specification of `sample_tokens`."""
    if temperature == 0:
        return logits.argmax(-1)
    return (logits.float() / temperature + reference_noise(seeds, draws, logits.shape[-1])).argmax(-1)


@triton.jit
def _sample_kernel(
    logits_ptr,
    seeds_ptr,
    draws_ptr,
    out_ptr,
    stride_row,
    columns,
    quarter,
    rate,
    GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the first column of one row's largest (noisy) logit."""
    # A program a row, BLOCK counters at a time, each of which serves four columns a quarter of the row apart: loads of
    # a quarter are contiguous, and all four words of a block are used.
    row = tl.program_id(0).to(tl.int64)
    seed = tl.load(seeds_ptr + row)
    draw = tl.load(draws_ptr + row)
    best = -float("inf")
    index = 0
    for start in range(0, quarter, BLOCK):
        counter = start + tl.arange(0, BLOCK)
        # The offset's two halves are the counter's first two words, as in `_philox`. Unused, and compiled away, if
        # greedy.
        words = tl.randint4x(seed, counter.to(tl.int64) + (draw << 32))
        for lane in tl.static_range(4):
            column = lane * quarter + counter
            # The last step passes the end of a quarter, and the last quarter that of the row: neither may count as a
            # column.
            held = (counter < quarter) & (column < columns)
            at = logits_ptr + row * stride_row + column
            score = tl.load(at, mask=held, other=-float("inf")).to(tl.float32)
            if not GREEDY:
                u = (words[lane].to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
                small = u * (1 + u * (0.5 + u / 3))
                noise = -tl.log(tl.where(u < 0.0009765625, small, -tl.log(1 - tl.minimum(u, 0.99999994))))
                score = score * rate + noise
            top = tl.max(score, 0)
            # Of equal scores the lowest column, here within a step and below between steps, whose order is not that of
            # columns.
            first = tl.min(tl.where(score == top, column, 2147483647), 0)
            better = (top > best) | ((top == best) & (first < index))
            index = tl.where(better, first, index)
            best = tl.where(better, top, best)
    tl.store(out_ptr + row, index)


def _launch(logits: torch.Tensor, seeds: torch.Tensor, draws: torch.Tensor, temperature: float) -> torch.Tensor:
    if not runs_on_triton(logits):
        return reference_sample(logits, seeds, draws, temperature)
    rows, columns = logits.shape
    logits = contiguous_rows(logits)
    seeds = contiguous_rows(seeds)
    draws = contiguous_rows(draws)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        launch(
            _sample_kernel,
            (rows,),
            logits,
            seeds,
            draws,
            out,
            logits.stride(0),
            columns,
            cdiv(columns, 4),
            0.0 if temperature == 0 else 1 / temperature,
            GREEDY=temperature == 0,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return out


def _check(logits: torch.Tensor, seeds: torch.Tensor, draws: torch.Tensor, temperature: float) -> None:
    check_tensors(logits=logits, seeds=seeds, draws=draws)
    if logits.dim() != 2 or not logits.is_floating_point() or not 0 < logits.shape[1] < 2**31:
        raise ValueError(
            f"logits: expected floating point [rows, vocabulary], got {logits.dtype} {tuple(logits.shape)}"
        )
    for name, tensor in (("seeds", seeds), ("draws", draws)):
        if tensor.shape != logits.shape[:1] or tensor.dtype != torch.int64 or tensor.device != logits.device:
            raise ValueError(
                f"{name}: expected int64 [{logits.shape[0]}] on {logits.device}, got {tensor.dtype} "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: expected a number from 0, got {temperature}")


# A plan may repeat a draw's launch: what is random in it comes from seeds and draws, tensors that the kernel reads.
_op = KernelOp(
    "sample_tokens",
    _launch,
    lambda logits, seeds, draws, temperature: seeds.new_empty(logits.shape[0]),
    check=_check,
)


def sample_tokens(
    logits: torch.Tensor, seeds: torch.Tensor, draws: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Sample one token a row: the argmax, or a draw at a temperature with noise that depends on the row's seed alone.

    Args:
        logits: [B, V], floating point, V below 2**31.
        seeds: int64 [B], one a sequence.
        draws: int64 [B] below 2**31, how many tokens the sequence has drawn before: the same seed and number give the
            same noise.
        temperature: T; 0 for the argmax (the first of equals).

    Returns:
        int64 [B].

    Raises:
        ValueError: shapes, dtypes or a temperature that do not fit.
    """
    tokens: torch.Tensor = _op(logits, seeds, draws, temperature)
    return tokens
