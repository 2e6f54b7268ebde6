"""Rotary embeddings that depend on a sequence's length, by the length of each document.

LongRoPE (Phi-3, Phi-3.5-MoE, MiniCPM) has one set of frequencies for sequences up to the length it was pretrained with
and one for longer ones. transformers takes the set from the largest position of the whole batch, so that what a
document gets depends on the padding and on the documents beside it. Here each document gets the set that it gets alone.

Dynamic NTK scaling changes above `max_position_embeddings` only, which no row of a run exceeds.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

KIND = "longrope"
MARK = "_distill_document_rope"


def follows_length(model: nn.Module) -> bool:
    """Return whether `model` has rotary embeddings that depend on the length of a document: it needs positions."""
    return any(map(_is_long, model.modules()))


def rope_by_document(model: nn.Module) -> None:
    """Have each document of a batch rotated as it is alone, by the positions that the model is called with."""
    for module in model.modules():
        if _is_long(module) and MARK not in module.__dict__:
            module.__dict__[MARK] = True
            module.forward = types.MethodType(_forward, module)


def document_lengths(positions: torch.Tensor) -> torch.Tensor:
    """Return the length of each token's document as far as it lies in its row, by positions int64 [B, S].

    Returns:
        int64 [B, S]: one more than the last position of the run of consecutive positions that a token is in.
    """
    length = positions.shape[1]
    at = torch.arange(length, device=positions.device).expand_as(positions)
    is_last = nn.functional.pad(positions[:, 1:] != positions[:, :-1] + 1, (0, 1), value=True)
    last = torch.where(is_last, at, length).flip(1).cummin(1).values.flip(1)
    return positions.gather(1, last) + 1


def _forward(
    self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
) -> tuple[torch.Tensor, ...]:
    own, more = type(self).forward, () if layer_type is None else (layer_type,)
    kind = self.rope_type if layer_type is None else self.rope_type[layer_type]
    if kind != KIND or position_ids.dim() != 2:
        return tuple(own(self, x, position_ids, *more))
    parameters = self.config.rope_parameters if layer_type is None else self.config.rope_parameters[layer_type]
    most = parameters["original_max_position_embeddings"]
    # one position above the limit has a whole batch take the set for long sequences, and none the other one
    beyond = torch.full_like(position_ids[:, :1], most)
    long = [table[:, :-1] for table in own(self, x, torch.cat([position_ids, beyond], 1), *more)]
    short = own(self, x, position_ids.clamp(max=most - 1), *more)
    is_long = (document_lengths(position_ids) > most)[..., None]
    return tuple(torch.where(is_long, *tables) for tables in zip(long, short, strict=True))


def _is_long(module: nn.Module) -> bool:
    kind = getattr(module, "rope_type", None)
    return KIND in kind.values() if isinstance(kind, dict) else kind == KIND
