"""Streamed generation for `distill generate` and `distill chat`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from distill_kernels.launch import runs_on_triton
from transformers.generation.streamers import BaseStreamer

from distill.generation.decode_loop import DecodeLoop
from distill.generation.engines import settings_for
from distill.generation.prompts import Turn, encode_prompt
from distill.generation.sampling import Sampling
from distill.generation.stopping import end_tokens, override_generation_config
from distill.generation.support_check import unsupported_reason
from distill.models.patch.document_rope import generates_with_cache
from distill.models.patch.triton_only import use_triton_only


class TokenStreamer(BaseStreamer):
    """Streamer that passes on decoded text once it is complete; partial characters and words wait."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        self.tokenizer = tokenizer
        self.write = write
        self.ids: list[int] = []
        self.written = ""
        self._prompt = True
        self._context = self._read = 0  # decode only after the tokens written last: decoding all would take O(n^2)

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt, which is not shown, or new tokens."""
        if self._prompt:
            self._prompt = False
            return
        self.ids += value.flatten().tolist()
        before = self.tokenizer.decode(self.ids[self._context : self._read], skip_special_tokens=True)
        text = self.tokenizer.decode(self.ids[self._context : len(self.ids)], skip_special_tokens=True)
        if len(text) > len(before) and not text.endswith("\ufffd") and text.startswith(before):
            self.write(text[len(before) :])
            self.written += text[len(before) :]
            self._context, self._read = self._read, len(self.ids)

    def end(self) -> None:
        self.write(self.tokenizer.decode(self.ids, skip_special_tokens=True)[len(self.written) :])


@torch.no_grad()
def stream(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[Turn],
    write: Callable[[str], None],
    *,
    max_new_tokens: int,
    temperature: float,
) -> str:
    """Generate a response to `prompt`, a text or the turns of a chat, and write it as it is generated.

    Tokens are sampled from softmax(logits / temperature); a temperature of 0 is greedy.
    """
    device = next(model.parameters()).device
    ids = torch.tensor([encode_prompt(tokenizer, prompt)], device=device)
    streamer = TokenStreamer(tokenizer, write)
    use_cache = generates_with_cache(model, ids.shape[1] + max_new_tokens)
    ends = end_tokens(tokenizer, model, None)
    with override_generation_config(
        model, max_new_tokens=max_new_tokens, temperature=temperature, pad=tokenizer.pad_token_id, ends=ends
    ):
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=use_cache, streamer=streamer)
    return tokenizer.decode(streamer.ids, skip_special_tokens=True)


class TritonGenerator:
    """Generator that runs one model by Triton kernels alone; called as `stream`, it writes the text at once.

    Args:
        model: Model, changed in place; see `use_triton_only`.

    Raises:
        ValueError: The kernels do not run on this GPU, or do not support the model.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        weight = next(model.parameters())
        if not runs_on_triton(weight):
            raise ValueError("--kernels: triton needs a CUDA device (sm_90 or later); omit --kernels on a CPU")
        reason = unsupported_reason(model)
        if reason is not None:
            raise ValueError(f"--kernels: triton does not support this model: {reason}; omit --kernels")
        use_triton_only(model)
        self.tokenizer = tokenizer
        self.loop = DecodeLoop(model, settings_for(model, tokenizer, None))

    def __call__(self, prompt: str, write: Callable[[str], None], *, max_new_tokens: int, temperature: float) -> str:
        responses = self.loop.generate(
            [encode_prompt(self.tokenizer, prompt)],
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature),
            seeds=[int(torch.randint(2**62, ()))],
        )
        text = str(self.tokenizer.decode(responses.tokens[0], skip_special_tokens=True))
        write(text)
        return text
