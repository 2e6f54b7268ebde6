"""What a token is drawn from: softmax(logits / temperature), of which cut-offs leave the likeliest tokens."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from distill_kernels.sampling import sample_tokens
from transformers import MinPLogitsWarper, TopKLogitsWarper

from distill.recipe.data import OnPolicy

UNIT = 2**46  # a probability of 1: whole numbers add up to the same in any order


class Sampling(NamedTuple):
    """How a token is drawn; cut-offs come in this order, each on what is left, as in transformers' `generate`.

    Attributes:
        temperature: divides the logits; 0 for the likeliest token, whatever the cut-offs.
        top_k: so many likeliest tokens, and those as likely as the last of them; 0 for all.
        top_p: the fewest likeliest tokens with this probability together (Holtzman et al., 2020); 1 for all.
        min_p: tokens with at least this share of the likeliest one's probability (Nguyen et al., 2024); 0 for all.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def cuts(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return self.temperature > 0 and (self.top_k, self.top_p, self.min_p) != (0, 1, 0)

    def cut(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] over the temperature, float32 or wider, -inf where a cut-off leaves a token out."""
        scores = as_wide(logits) / self.temperature
        no_ids = cast(torch.LongTensor, None)  # the warpers look at the scores alone
        if self.top_k:
            scores = TopKLogitsWarper(self.top_k)(no_ids, scores)
        if self.top_p < 1:
            scores = likeliest(scores, self.top_p)
        return MinPLogitsWarper(self.min_p)(no_ids, scores) if self.min_p else scores

    def draw(self, logits: torch.Tensor, seeds: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Tokens, int64 [B], of logits [B, V]; seeds and draws as `sample_tokens` takes them. Never waits."""
        if self.cuts:
            return sample_tokens(self.cut(logits), seeds, draws, 1.0)
        return sample_tokens(logits, seeds, draws, self.temperature)


GREEDY = Sampling(0.0)


def sampling_of(section: OnPolicy) -> Sampling:
    """What a recipe's `data.on_policy` says."""
    return Sampling(section.temperature, section.top_k, section.top_p, section.min_p)


def likeliest(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """As `TopPLogitsWarper`, whose sums of floats PyTorch refuses on a GPU under `train.deterministic`."""
    ascending, order = scores.sort(-1)
    sums = (ascending.softmax(-1) * UNIT).long().cumsum(-1)
    left_out = sums <= int((1 - top_p) * UNIT)
    left_out[..., -1] = False
    return scores.masked_fill(left_out.scatter(-1, order, left_out), -torch.inf)


def as_wide(scores: torch.Tensor) -> torch.Tensor:
    """In float32, or wider where they are."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))
