"""Several causal language models that generate as one: each token is sampled from the mixture of their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class MixtureModel(nn.Module):
    """Several causal language models that generate together: each token is sampled from the mixture.

    The first one has a KV cache, the others read the whole text for every token: meant for samples, not bulk.
    """

    def __init__(self, members: Sequence[nn.Module], weights: Sequence[float]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.weights = tuple(weights)

    @property
    def config(self) -> Any:
        """Configuration of the first model, whose tokenizer makes the data."""
        return self.members[0].config

    @property
    def generation_config(self) -> Any:
        """Generation configuration of the first model."""
        return self.members[0].generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self.members[0].generation_config = value

    def generate(self, **arguments: Any) -> Any:
        """Return what `generate` of transformers does, with tokens sampled from the mixture."""
        from transformers import LogitsProcessorList

        first: Any = self.members[0]
        return first.generate(**arguments, logits_processor=LogitsProcessorList([self._mix_scores]))

    def _mix_scores(self, ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the mixture's log-probabilities [B, V] in place of the first model's scores."""
        rows = [scores]
        rows += [model(input_ids=ids, use_cache=False).logits[:, -1] for model in self.members[1:]]
        columns = min(row.shape[-1] for row in rows)
        mixed = torch.full_like(scores, -torch.inf)
        parts = [weight * row[:, :columns].float().softmax(-1) for weight, row in zip(self.weights, rows, strict=True)]
        mixed[:, :columns] = torch.stack(parts).sum(0).log().to(scores.dtype)
        return mixed  # type: ignore[return-value]
