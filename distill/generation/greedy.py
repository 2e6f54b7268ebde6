"""Greedy responses for people to read, one per prompt: `generate(model, tokenizer, prompts)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distill.core import console
from distill.core.eval_mode import eval_mode
from distill.data.chat import template_kwargs_of
from distill.generation.stopping import end_tokens, override_generation_config
from distill.models.patch.document_rope import generates_with_cache

Turn = dict[str, str]  # role and content


@torch.no_grad()
def generate(
    model: Any, tokenizer: Any, prompts: Sequence[str | Sequence[Turn]], max_new_tokens: int = 48
) -> list[str]:
    """Return greedy responses, one per prompt, without the prompt and without special tokens.

    With a chat template each prompt becomes a user message; without one it is continued as text. The model's training
    mode is restored; a patched student generates by its own forward.

    Args:
        model: A causal language model, bare or inside PEFT.
        prompts: Plain texts, or chats, which need a chat template.
        max_new_tokens: Maximum length of a response; it ends earlier at an end-of-sequence token.
    """
    device = next(model.parameters()).device
    ends = end_tokens(tokenizer, model, None)
    responses = []
    pad: Any = tokenizer.pad_token_id
    with eval_mode(model), override_generation_config(model, max_new_tokens=max_new_tokens, pad=pad, ends=ends):
        for prompt in prompts:
            ids = encode_prompt(tokenizer, prompt).to(device)
            use_cache = generates_with_cache(model, ids.shape[1] + max_new_tokens)
            output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=use_cache)
            responses.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip())
            console.advance()
    return responses


def encode_prompt(tokenizer: Any, prompt: str | Sequence[Turn]) -> torch.Tensor:
    """Return token ids [1, S]: the prompt as a user message of the chat template, or as plain text where there is none.

    Several turns are a chat, which needs a template; its keyword arguments are those that the tokenizer is saved with.
    """
    if getattr(tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        kwargs = template_kwargs_of(tokenizer)
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **kwargs)
        ids = tokenizer(text, add_special_tokens=False).input_ids
    else:
        ids = tokenizer(prompt).input_ids
    return torch.tensor([ids], dtype=torch.int64)
