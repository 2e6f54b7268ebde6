"""NEFTune (Jain et al., 2023, arXiv:2310.05914): noise on the student's embeddings while it trains.

    x <- x + alpha / sqrt(L d) * u        u uniform in (-1, 1) for each entry; L tokens of the sequence, d columns

L is the length of a token's document, not of its row. The paper's sequences are single examples: with this scale the
noise on a whole example has one expected norm, alpha / sqrt(3), whatever its length. transformers' own hook takes the
row's length, so that a document gets less noise the more documents share its row, or the wider the row is padded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from distill.models.head import decoder_of
from distill.models.patch.document_rope import document_lengths
from distill.training.listeners import StepListener


def add_noise(embeddings: torch.Tensor, alpha: float, position_ids: torch.Tensor | None) -> torch.Tensor:
    """Return embeddings [B, S, d] with noise; without positions each row is one document."""
    noise = torch.empty_like(embeddings).uniform_(-1, 1)
    rows, length, columns = embeddings.shape
    if position_ids is None:
        return embeddings + noise * (alpha / math.sqrt(length * columns))
    lengths = document_lengths(position_ids).expand(rows, length)
    scale = alpha / (lengths * columns).sqrt()
    return embeddings + noise * scale.unsqueeze(-1).to(noise.dtype)


class EmbeddingNoise(StepListener):
    """Listener that adds noise to the student's embeddings in training forwards.

    Evaluation, rollouts and a teacher that shares the student's modules run in eval mode or without gradients, and
    get none.

    Args:
        student: Causal language model, bare or inside PEFT.
        alpha: Scale of the noise; 5, 10 and 15 in the paper.
    """

    def __init__(self, student: nn.Module, alpha: float) -> None:
        self.student = student
        self.alpha = alpha
        self._position_ids: torch.Tensor | None = None

    @contextmanager
    def training(self) -> Iterator[None]:
        """Hook the decoder, which is told the positions, and its embedding."""
        decoder = decoder_of(self.student)
        embedding = self.student.get_input_embeddings()  # type: ignore[operator]
        # both hooks run inside of a captured graph too: positions are its inputs, noise is drawn anew in each replay
        handles: list[RemovableHandle] = [
            decoder.register_forward_pre_hook(self._note_positions, with_kwargs=True),
            embedding.register_forward_hook(self._add_noise),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note_positions(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._position_ids = kwargs.get("position_ids")

    def _add_noise(self, embedding: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        if not (embedding.training and torch.is_grad_enabled()):
            return None
        return add_noise(output, self.alpha, self._position_ids)
