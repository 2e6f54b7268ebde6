"""`distill generate`: a model's answer as it is made, word by word, and beside it the teacher's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from distill.judging.samples import encode_prompt


class Stream(BaseStreamer):
    """Hands on text as soon as it is whole: half of a character or an unfinished word piece waits.

    Args:
        tokenizer: Of the model.
        write: Receives each piece.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.ids: list[int] = []
        self.written = ""
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, which is not shown, or new tokens."""
        if self._prompt:
            self._prompt = False
            return
        self.ids += value.flatten().tolist()
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if not text.endswith("\ufffd") and text.startswith(self.written):
            self.write(text[len(self.written) :])
            self.written = text

    def end(self) -> None:
        """Write what was held back."""
        self.write(self.tokenizer.decode(self.ids, skip_special_tokens=True)[len(self.written) :])


@torch.no_grad()
def stream(
    model: Any, tokenizer: Any, prompt: str, write: Callable[[str], None], *, max_new_tokens: int, temperature: float
) -> str:
    """Generate an answer to `prompt`, writing it as it comes; greedy at temperature 0.

    Returns:
        The answer.
    """
    device = next(model.parameters()).device
    ids = encode_prompt(tokenizer, prompt).to(device)
    streamer = Stream(tokenizer, write)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature}
    if not temperature:
        sampling = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, use_cache=True,
        pad_token_id=tokenizer.pad_token_id, streamer=streamer, **sampling,
    )  # fmt: skip
    return tokenizer.decode(streamer.ids, skip_special_tokens=True)
