"""Whether documents that share a row stay apart in a model.

They do where attention is told of them by positions that restart. Recurrent and convolutional layers (Mamba, LFM2,
Qwen3-Next) carry their state from one document into the next, attention biased by distance (ALiBi) asks for no
positions, and some models of transformers do not hand positions on to where masks are made. None of them says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distill.core.eval_mode import eval_mode
from distill.models.head import bare, decoder_of, find_head
from distill.models.quantised import quantised_by_transformers

HALF = 6  # tokens of each of the two documents that are tried
ROUNDINGS = 4  # documents that see each other differ by tens of percent, far more than rounding does


@torch.no_grad()
def keeps_apart(model: nn.Module, *, row_by_row: bool = False) -> bool:
    """Whether no document of a packed row changes what `model` makes of another one; a forward or two of 3 x 12 tokens.

    Three rows of two documents each, of which one document is the same in two rows: what is made of it must be the
    same, too, however the rest of its row reads.

    Args:
        model: A causal language model with weights, on any device; left in the mode (train or eval) it was in.
        row_by_row: Call it with a row at a time.
    """
    decoder, vocabulary = decoder_of(model), bare(model).config.get_text_config().vocab_size  # type: ignore[union-attr,operator]
    device: Any = find_head(model).linear.weight.device
    words = (torch.arange(4 * HALF, device=device) * 7 + 3) % vocabulary
    one, other, second, last = words.split(HALF)

    def look(*pairs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        ids = torch.stack([torch.cat(pair) for pair in pairs])
        positions = torch.arange(HALF, device=device).repeat(2).expand(len(ids), -1)
        parts = zip(*(tensor.split(1 if row_by_row else len(ids)) for tensor in (ids, positions)), strict=True)
        return torch.cat(
            [decoder(input_ids=row, position_ids=at, use_cache=False).last_hidden_state for row, at in parts]
        )

    with eval_mode(model):
        try:
            hidden = look((one, second), (other, second), (one, last))
            found = _distance(hidden[0, HALF:], hidden[1, HALF:]), _distance(hidden[0, :HALF], hidden[2, :HALF])
            # mostly they are the same to the bit; what is not finite is no matter of packing, and found elsewhere
            tolerance = max(2 * torch.finfo(hidden.dtype).eps, 1e-4) if not quantised_by_transformers(model) else 0.1
            if not any(distance > tolerance for distance in found):
                return True
            # experts that get more or fewer tokens round otherwise: as a row does when other rows stand beside it
            rounding = _distance(hidden[0], look((one, second), (last, other), (other, one))[0])
            return not any(distance > ROUNDINGS * rounding for distance in found)
        except (TypeError, ValueError):  # it takes no positions, or refuses packed rows by itself
            return False


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Of two [T, hidden], relative, of the middle one of the tokens."""
    one, other = one.double(), other.double()
    return ((one - other).norm(dim=-1) / one.norm(dim=-1).clamp_min(1e-30)).median().item()
