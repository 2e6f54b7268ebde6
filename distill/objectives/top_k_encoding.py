"""Compression of a teacher's distributions: K tokens of each, without the logits of a batch.

The K tokens are the most probable, with their log-probabilities (for `bucket` and `renormalize`), or `sampled`, with
weights w whose expectation is the whole distribution, E[w] = p, so that the gradient's expectation is the full forward
KL's (Sparse Logit Sampling, Anshumann et al. 2025, arXiv 2503.16870, which draws K times with replacement). Here the K
tokens are chosen to give the unbiased estimate of least variance: with the threshold c for which

    sum_v min(1, p(v) / c) = K

every token of p >= c is taken with its own probability, and any other with chance p / c and weight c (Horvitz and
Thompson, 1952; least sum of variances: Cohen, Duffield, Kaplan, Lund and Thorup, 2009), the latter by systematic
sampling (Madow, 1949), which takes exactly K and none twice. The weights add up to 1.

The value of a loss on w is above that on p, by sum w log w + H(p) on average. H(p) is stored, so that the reported
divergence can be an unbiased estimate of the full one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from distill_kernels.losses.chunked import raw_logits
from distill_kernels.losses.divergence import log_softmax, transform_logits
from distill_kernels.losses.operands import Head
from torch.nn import functional as F

from distill.models.head import HeadWeights, LogitTransform
from distill.objectives.row_packing import pack_hidden, unpack_hidden

CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 25}
LEAST_TAIL = -13.8  # log of 1e-6, the least that float32 sums of K probabilities resolve


class Encoding(NamedTuple):
    """Settings of the compression of distributions.

    Attributes:
        columns: Number of vocabulary entries that are compared.
        tail: `bucket`, `renormalize` or `sampled`.
        temperature: Temperature of the stored probabilities.
    """

    columns: int
    k: int
    tail: str
    temperature: float = 1.0


class EncodedTopK(NamedTuple):
    """K tokens of a teacher's distribution at M positions.

    Attributes:
        ids: int32 [M, K], distinct, the most probable first.
        logprobs: [M, K], natural logarithms at the temperature; of sampled tokens that of their weight, -inf for
            places that were not used.
        tail: [M], log of the probability of all other tokens, -inf where nothing is left; of sampled tokens the
            entropy of the whole distribution at the temperature.
        entropy: [M], of the whole distribution at temperature 1.
        label_logprob: [M], of the label at temperature 1.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    tail: torch.Tensor
    entropy: torch.Tensor
    label_logprob: torch.Tensor

    def to(self, dtype: torch.dtype) -> EncodedTopK:
        return EncodedTopK(self.ids, *(value.to(dtype) for value in self[1:]))


def rows_at_once(device: torch.device, columns: int) -> int:
    """Return the rows of a chunk, whose logits over this many columns are held at once."""
    return max(CHUNK_ELEMENTS.get(device.type, 1 << 25) // columns, 1)


@torch.no_grad()
def log_probabilities(
    hidden: torch.Tensor, head: HeadWeights, transform: LogitTransform, columns: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [n, columns] and log-probabilities at the temperature, fp32 (fp64 for fp64), of states [n, H]."""
    narrow = Head(hidden, head.weight, head.bias, *(head.lora or ())).cut(columns, head.weight.dtype)
    raw = raw_logits(narrow, narrow.hidden.to(head.weight.dtype))
    logits = transform_logits(raw, transform.scale, transform.softcap or 0.0)
    return logits, log_softmax(logits / temperature)


@torch.no_grad()
def encode(
    hidden: torch.Tensor,
    head: HeadWeights,
    transform: LogitTransform,
    labels: torch.Tensor,
    encoding: Encoding,
    generator: torch.Generator | None = None,
) -> EncodedTopK:
    """Return K tokens of each position's distribution, computed chunk by chunk.

    Args:
        hidden: last hidden states, [M, H].
        head: LM head that computes the logits, with `transform`.
        labels: int64 [M], the next tokens.
        encoding: Numbers stored per position.
        generator: random generator of the device, for `sampled`.
    """
    columns, k, tail, temperature = encoding
    rows = rows_at_once(hidden.device, columns)
    parts = []
    for start in range(0, len(hidden), rows):
        here = slice(start, start + rows)
        logits, logp = log_probabilities(hidden[here], head, transform, columns, temperature)
        hard = logp if temperature == 1.0 else log_softmax(logits)
        entropy = -torch.where(hard > -torch.inf, hard.exp() * hard, 0.0).sum(-1)
        label = hard.gather(-1, labels[here, None]).squeeze(-1)
        chosen = _sampled(logp, k, generator) if tail == "sampled" else _likeliest(logp, k)
        parts.append(EncodedTopK(*chosen, entropy, label))
    if not parts:
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return EncodedTopK(empty.new_zeros(0, k, dtype=torch.int32), empty.new_zeros(0, k), empty, empty, empty)
    return EncodedTopK(*(torch.cat(values) for values in zip(*parts, strict=True)))


def _likeliest(logp: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    top, ids = logp.topk(k, -1)
    rest = logp.scatter(-1, ids, -torch.inf).logsumexp(-1)
    return ids.to(torch.int32), top, rest


def _sampled(
    logp: torch.Tensor, k: int, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    p = logp.exp()
    top, ids = p.topk(k, -1)
    # a token is certain while its probability reaches the threshold: the probability left over the places left
    before = F.pad(top.double().cumsum(-1)[:, :-1], (1, 0))
    left = (p.sum(-1, keepdim=True, dtype=torch.float64) - before).clamp_min(0)
    places = torch.arange(k, 0, -1, device=p.device)
    certain = (top >= left / places).cumprod(-1).bool()
    sure = torch.zeros_like(p, dtype=torch.bool).scatter(-1, ids, certain)
    ends = p.masked_fill(sure, 0.0).cumsum(-1, dtype=torch.float64)
    mass = ends[:, -1:].clone()
    left_over = k - certain.sum(-1, keepdim=True)
    ends.mul_(left_over / mass.clamp_min(torch.finfo(torch.float64).tiny))
    u = torch.rand(len(p), 1, generator=generator, device=p.device, dtype=torch.float64)
    passed = ends.sub_(u).ceil_().clamp_min_(0).minimum(left_over)  # points j + u below the end of a token's interval
    drawn = passed.diff(dim=-1, prepend=torch.zeros_like(mass)) > 0
    threshold = (mass / left_over.clamp_min(1)).to(p.dtype)
    weights = torch.where(sure, p, torch.where(drawn, threshold, 0.0))
    # where all other probabilities are 0, places are left over: filled up with weight 0
    _, chosen = ((weights > 0) + p / 2).topk(k, -1)
    entropy = -torch.where(p > 0, p * logp, 0.0).sum(-1)
    return chosen.to(torch.int32), weights.gather(-1, chosen).log(), entropy


def normalised(logprobs: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """Return stored log-probabilities [M, K] in fp32, scaled so that their probabilities and the tail [M] add up to 1.

    Rounding changes their sum by more than a small tail; the tail is stored on its own, and takes precedence. One
    below 1e-6 counts as 1e-6: float32 sums resolve no less, and without a tail the reverse KL would be infinite.
    """
    wide = logprobs.float()
    stored = torch.log1p(-tail.float().clamp_min(LEAST_TAIL).exp())
    return wide + (stored - wide.logsumexp(-1))[..., None]


def surplus_of(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """Return by how much the loss on sampled log-weights [M, K] exceeds that on the whole distribution, on average."""
    wide = logprobs.float()
    return torch.where(wide > -torch.inf, wide.exp() * wide, 0.0).sum(-1) + entropy.float()


def rounding_cost(
    hidden: torch.Tensor, head: HeadWeights, transform: LogitTransform, columns: int, dtype: torch.dtype
) -> float:
    """Return KL(exact || stored), nats a position at temperature 1, of hidden states [M, H] stored in `dtype`."""
    values, scale = pack_hidden(hidden, dtype)
    stored = unpack_hidden(values, scale, hidden.dtype)
    rows = rows_at_once(hidden.device, columns)
    total = 0.0
    for start in range(0, len(hidden), rows):
        p = log_probabilities(hidden[start : start + rows], head, transform, columns, 1.0)[1]
        q = log_probabilities(stored[start : start + rows], head, transform, columns, 1.0)[1]
        total += float(torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum())
    return total / max(len(hidden), 1)
