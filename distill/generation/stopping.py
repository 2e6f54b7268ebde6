"""End of a response: at an end token, or at the first token with which its text contains a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopStrings:
    """Stop strings, by the tokenizer of the model that generates; special tokens are text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.tokenizer, self.strings = tokenizer, tuple(strings)
        # each token of a match has a byte of it or more, and the first token of all may lose the space before it
        self.window = 1 + max(len(string.encode()) for string in strings)

    def end(self, tokens: Sequence[int], seen: int = 0) -> int | None:
        """Return the number of tokens up to the first one that completes a stop string, inclusive; None without one.

        The first `seen` tokens are known to contain none, and are not all decoded again.
        """
        if not self.are_in(tokens[max(0, seen + 1 - self.window) :]):
            return None
        ends = range(seen + 1, len(tokens) + 1)
        return next((end for end in ends if self.are_in(tokens[max(0, end - self.window) : end])), None)

    def are_in(self, tokens: Sequence[int]) -> bool:
        """Return whether the text of these tokens contains a stop string."""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(string in text for string in self.strings)

    def criterion(self, start: int) -> Callable[..., torch.Tensor]:
        """Return a stopping criterion for `generate`: of ids [B, S], the rows, bool [B], that contain a stop string.

        The first `start` tokens are the prompt's.
        """

        def ending(ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
            newest = ids[:, start:][:, -self.window :].tolist()
            return torch.tensor([self.are_in(row) for row in newest], device=ids.device)

        return ending


def ended(tokens: Sequence[int], limit: int, ends: Sequence[int], stop: StopStrings | None) -> tuple[list[int], bool]:
    """Return a response up to its end, and whether it was cut off by its limit instead."""
    whole = list(tokens[:limit])
    end = next((number for number, token in enumerate(whole, 1) if token in ends), None)
    at = None if stop is None else stop.end(whole[:end])
    return whole[: at or end], end is None and at is None
