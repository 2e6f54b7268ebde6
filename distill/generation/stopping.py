"""End of a response: at an end token, or at the first token with which its text contains a stop string."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import GenerationConfig

from distill.models.head import unwrap_peft

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distill.data.chat import ChatTemplate


class StopStrings:
    """Stop strings, by the tokenizer of the model that generates; special tokens are text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.strings = tuple(strings)
        # each token of a match has a byte of it or more, and the first token of all may lose the space before it
        self.window = 1 + max(len(string.encode()) for string in strings)

    def find_end(self, tokens: Sequence[int], seen: int = 0) -> int | None:
        """Return the number of tokens up to the first one that completes a stop string, inclusive; None without one.

        The first `seen` tokens are known to contain none, and are not all decoded again.
        """
        if not self.contained_in(tokens[max(0, seen + 1 - self.window) :]):
            return None
        ends = range(seen + 1, len(tokens) + 1)
        return next((end for end in ends if self.contained_in(tokens[max(0, end - self.window) : end])), None)

    def contained_in(self, tokens: Sequence[int]) -> bool:
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(string in text for string in self.strings)

    def criterion(self, start: int) -> Callable[..., torch.Tensor]:
        """Return a stopping criterion for `generate`: of ids [B, S], the rows, bool [B], that contain a stop string.

        The first `start` tokens are the prompt's.
        """

        def ending(ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
            newest = ids[:, start:][:, -self.window :].tolist()
            return torch.tensor([self.contained_in(row) for row in newest], device=ids.device)

        return ending


def truncate_at_end(
    tokens: Sequence[int], limit: int, ends: Sequence[int], stop: StopStrings | None
) -> tuple[list[int], bool]:
    """Return a response up to its end, and whether it was cut off by its limit instead."""
    whole = list(tokens[:limit])
    end = next((number for number, token in enumerate(whole, 1) if token in ends), None)
    at = None if stop is None else stop.find_end(whole[:end])
    return whole[: at or end], end is None and at is None


def end_tokens(tokenizer: Any, model: nn.Module, template: ChatTemplate | None) -> list[int]:
    """Return the tokens that end a response: the tokenizer's, the model's, and those that close a template's turn.

    A turn may be a plain one or one with tool calls.
    """
    configured = getattr(getattr(unwrap_peft(model), "generation_config", None), "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])}
    if template is not None:
        ends |= {tokenizer.convert_tokens_to_ids(token) for token in template.closings()}
    return sorted(token for token in ends if token is not None)


def response_text(tokenizer: Any, tokens: Sequence[int], ends: Collection[int]) -> str:
    """Return a response as text, with special tokens such as those around a tool call, without the one that ended it.

    What rewards, environments and `distill sample` get.
    """
    kept = without_end(tokens, ends)
    return str(tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def visible_text(tokenizer: Any, tokens: Sequence[int], ends: Collection[int]) -> str:
    """Return a response as text without special tokens, for people and for tasks."""
    return str(tokenizer.decode(without_end(tokens, ends), skip_special_tokens=True)).strip()


def without_end(tokens: Sequence[int], ends: Collection[int]) -> list[int]:
    return list(tokens[:-1]) if tokens and tokens[-1] in ends else list(tokens)


@contextlib.contextmanager
def override_generation_config(
    model: Any, *, max_new_tokens: int, pad: int | None, ends: Sequence[int], temperature: float = 0.0
) -> Iterator[None]:
    """Make `model.generate` sample at this temperature, without other logits processors, inside the context.

    A chat model's own generation config would add penalties and cut-offs, and that of transformers a top-k of 50.
    """
    inner: Any = unwrap_peft(model)
    own = inner.generation_config
    drawn: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    inner.generation_config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        eos_token_id=sorted(set(ends)) or None,
        **(drawn if temperature > 0 else {"do_sample": False}),
    )
    try:
        yield
    finally:
        inner.generation_config = own
