"""Padding masks as document boundaries: the ones of a row form a document, zeros neither attend nor are attended to.

Attention that is told of documents by cumulative lengths then computes what a causal mask with that padding would, at
all positions that are not padding, and 0 at those that are. Ones on the left, on the right or everywhere are all the
same to it, so that nothing need be known on the host; a row with a gap between its ones is the only mask that documents
cannot say. On a CPU that is seen, and PyTorch's attention takes the call. On a GPU to look is to wait: the outputs of
such a call are NaN, and a later call raises.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

log = logging.getLogger(__name__)

GAP = (
    "attention_mask: expected padding on the left, the right or none, got zeros between a row's ones: the outputs of "
    "that call are NaN. For masks of any form, patch the model with attention=None"
)


class PaddingMasks:
    """The masks that one model is called with; remembers, without waiting, whether one had a gap.

    Attributes:
        refused: Why no mask of this model is served, or None.
    """

    def __init__(self) -> None:
        self.refused: str | None = None
        self._said: set[str] = set()
        self._poison: torch.Tensor | None = None  # NaN once a mask had a gap, until it is told
        self._last: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def documents(
        self, mask: object, ids: torch.Tensor, reason: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """Return the attention arguments that replace `mask`.

        Args:
            mask: [B, T], not zero where a token counts, or whatever the model was called with.
            ids: [B, T] token ids or [B, T, H] embeddings.
            reason: Why this call is not served anyhow.

        Returns:
            Cumulative lengths of queries and of keys (see `cumulative_lengths`), and what is to be added to the
            outputs: 0, or NaN where there is a gap, a float32 scalar (None where the mask was looked at). None for a
            mask that is not served; the first time, one log line says why.

        Raises:
            ValueError: the mask of an earlier call on a GPU had a gap.
        """
        self._raise_for_last()
        reason = reason or self.refused
        if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape[:2]:
            reason = "the mask is not one of the batch's tokens, [B, T]"
        if reason is not None or not isinstance(mask, torch.Tensor):
            self._leave(str(reason))
            return None
        ones = mask != 0
        starts = ones & ~nn.functional.pad(ones[:, :-1], (1, 0))
        gap = (starts.sum(1) > 1).any()
        if mask.device.type == "cpu":
            if bool(gap):
                self._leave("it has zeros between a row's ones")
                return None
            return *cumulative_lengths(ones, starts), None
        poison = torch.where(gap, torch.nan, 0.0)
        self._remember(poison)
        return *cumulative_lengths(ones, starts), poison

    def _leave(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            log.warning("attention with this mask is PyTorch's, which is slower: %s", reason)

    def _remember(self, poison: torch.Tensor) -> None:
        if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            return
        self._poison = poison if self._poison is None else self._poison + poison
        copy = torch.empty((), dtype=poison.dtype, pin_memory=True).copy_(self._poison, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._last = copy, event

    def _raise_for_last(self) -> None:
        if torch.compiler.is_compiling() or self._last is None or not self._last[1].query():
            return
        poison = self._last[0]
        self._last = None
        if poison.isnan():
            self._poison = None
            raise ValueError(GAP)

    def __deepcopy__(self, memo: object) -> PaddingMasks:
        copied = PaddingMasks()
        copied.refused = self.refused
        return copied


def cumulative_lengths(ones: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Documents of a mask [B, T], bool, whose runs of ones begin at `starts`, without waiting for the device.

    Returns:
        Of queries and of keys, int32 [2*B*T + 1] each. A zero makes two documents, one with its query and no key, one
        with its key and no query. What is left over are empty documents after the last position.
    """
    zeros = ~ones.flatten()
    total = ones.numel()
    begins = torch.stack([starts.flatten() | zeros, zeros], 1).flatten()
    at = torch.arange(total, dtype=torch.int32, device=ones.device)
    target = torch.where(begins, begins.cumsum(0) - 1, 2 * total)  # what begins nothing writes the last entry's value

    def lengths(second: torch.Tensor) -> torch.Tensor:
        values = torch.where(begins, torch.stack([at, second], 1).flatten(), total)
        return values.new_full((2 * total + 1,), total).scatter_(0, target, values)

    return lengths(at + 1), lengths(at)


def add_to_hidden(output: Any, number: torch.Tensor) -> object:
    """A decoder's output, a scalar added to its last hidden states."""
    if isinstance(output, tuple):
        return (output[0] + number.to(output[0].dtype), *output[1:])
    output.last_hidden_state = output.last_hidden_state + number.to(output.last_hidden_state.dtype)
    return output


@torch.no_grad()
def hidden_of_padded(decoder: nn.Module) -> torch.Tensor:
    """Last hidden states [tokens, H] of a small batch, of what is not padding; the decoder in eval mode."""
    device = next(decoder.parameters()).device
    ids = torch.arange(24, device=device).view(3, 8) % decoder.get_input_embeddings().weight.shape[0]  # type: ignore
    mask = torch.tensor([[1] * 5 + [0] * 3, [0] * 2 + [1] * 6, [1] * 8], device=device)
    return decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[mask != 0].float()
