"""Sampling of tokens: softmax(logits / temperature), restricted by top-k, top-p and min-p."""

from __future__ import annotations

import hashlib
from typing import NamedTuple, cast

import torch
from distill_kernels.sampling import sample_tokens
from transformers import MinPLogitsWarper, TopKLogitsWarper

from distill.recipe.data import OnPolicy

UNIT = 2**46  # a probability of 1: sums of integers do not depend on their order


class Sampling(NamedTuple):
    """Sampling parameters; cut-offs apply in this order, each to what is left, as in transformers' `generate`.

    Attributes:
        temperature: divides the logits; 0 for the argmax token, whatever the cut-offs.
        top_k: sample from the most probable tokens, and those tied with the last of them; 0 for all.
        top_p: sample from the smallest set of most probable tokens with this total probability (Holtzman et al., 2020);
            1 for all.
        min_p: sample from tokens with at least this fraction of the top probability (Nguyen et al., 2024); 0 for all.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def has_cut_offs(self) -> bool:
        return self.temperature > 0 and (self.top_k, self.top_p, self.min_p) != (0, 1, 0)

    def restrict(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [B, V] over the temperature, float32 or wider, -inf where a cut-off excludes a token."""
        scores = at_least_float32(logits) / self.temperature
        no_ids = cast(torch.LongTensor, None)  # the warpers read the scores alone
        if self.top_k:
            scores = TopKLogitsWarper(self.top_k)(no_ids, scores)
        if self.top_p < 1:
            scores = filter_top_p(scores, self.top_p)
        return MinPLogitsWarper(self.min_p)(no_ids, scores) if self.min_p else scores

    def sample(self, logits: torch.Tensor, seeds: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Sample tokens, int64 [B], from logits [B, V]; seeds and draws as in `sample_tokens`. Never synchronises."""
        if self.has_cut_offs:
            return sample_tokens(self.restrict(logits), seeds, draws, 1.0)
        return sample_tokens(logits, seeds, draws, self.temperature)


GREEDY = Sampling(0.0)


def sampling_of(section: OnPolicy) -> Sampling:
    return Sampling(section.temperature, section.top_k, section.top_p, section.min_p)


def derived_seed(seed: int, number: int) -> int:
    """Return the seed of one of several sequences that are sampled with a seed, 64 bits with a sign."""
    digest = hashlib.blake2b(f"{seed},{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def filter_top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Mask all scores outside of the top-p set, as `TopPLogitsWarper` does, by integer sums.

    PyTorch refuses that class's floating-point cumulative sums on a GPU under `train.deterministic`.
    """
    ascending, order = scores.sort(-1)
    sums = (ascending.softmax(-1) * UNIT).long().cumsum(-1)
    left_out = sums <= int((1 - top_p) * UNIT)
    left_out[..., -1] = False
    return scores.masked_fill(left_out.scatter(-1, order, left_out), -torch.inf)


def at_least_float32(scores: torch.Tensor) -> torch.Tensor:
    """Return scores in float32, or in their own dtype if it is wider."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))
