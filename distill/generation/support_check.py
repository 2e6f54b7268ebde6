"""Test whether the built-in decode loop supports a model, on a few tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distill.core.errors import first_line
from distill.core.eval_mode import eval_mode
from distill.generation.ragged_cache import RaggedCache, attention_for_ragged_cache, prefill
from distill.models.head import bare, decoder_of
from distill.models.patch.attention import with_soft_cap


@torch.no_grad()
def unsupported_reason(model: nn.Module) -> str | None:
    """Return the reason why `DecodeLoop` does not support `model`, found on a few tokens; None if it does.

    Two prompts of different lengths and two more tokens of each must give the logits of the model's own forward without
    a cache (soft cap of the attention scores included), up to the rounding of its dtype.
    """
    inner: Any = bare(model)
    if not getattr(inner, "_supports_attention_backend", False):
        return "it takes no other attention implementation"
    weight = next(model.parameters())
    # far above rounding errors, far below the effect of a wrong position or key
    device, tolerance = weight.device, min(0.1, 1e3 * max(torch.finfo(d).eps for d in (weight.dtype, torch.float32)))
    ids = torch.arange(12, device=device).reshape(2, 6) % inner.config.get_text_config().vocab_size
    forward, lengths = type(inner).forward, torch.tensor([4, 2], device=device)
    try:
        with eval_mode(model), with_soft_cap(model):
            expected = forward(inner, input_ids=ids, use_cache=False).logits.float()
        cache = RaggedCache(inner.config, 2, 8, device)
        with eval_mode(model), attention_for_ragged_cache(model):
            prompts = [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
            prefill(decoder_of(model), prompts, range(2), cache)
            cache.begin(lengths)
            for _ in range(2):
                at = cache.lengths[:, None] - 1
                outputs = forward(
                    inner,
                    input_ids=ids.gather(1, at),
                    position_ids=at,
                    past_key_values=cache,
                    use_cache=True,
                    ragged_cache=cache,
                )
                given = outputs.logits[:, -1].float()
                right = expected[torch.arange(2, device=device), at[:, 0]]
                error = (given - right).norm() / right.norm()
                if not error < tolerance:
                    return f"its logits come out different by {error:.1e}"
                cache.lengths += 1
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:  # another kind of forward
        return first_line(error)
    return None
