"""Test whether the built-in decode loop supports a model, on a few tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distill.core.errors import first_line
from distill.core.eval_mode import eval_mode
from distill.generation.ragged_cache import RaggedCache, attention_for_ragged_cache, prefill_sequences
from distill.models.head import bare, decoder_of
from distill.models.patch.attention import with_soft_cap
from distill.models.patch.document_rope import rope_by_document, short_length
from distill.models.patch.packed import LOWERED, distances, lowered_limits

STEPS = 5
# tokens of three prompts: beyond every lowered limit; one that passes them while it is decoded; one that shares most
# of its tokens with the first, whose keys it gets
PROMPTS = (2 * LOWERED + 3, LOWERED - 1, 2 * LOWERED + 1)
OWN = (PROMPTS[0], LOWERED - 1, 2 * LOWERED)  # of these tokens, those that are the first prompt's


@torch.no_grad()
def unsupported_reason(model: nn.Module) -> str | None:
    """Return the reason why `DecodeLoop` does not support `model`, found on a few tokens; None if it does.

    Prompts of different lengths and the next tokens of each must give the logits of the model's own forward of the same
    tokens without a cache (soft cap of the attention scores included), up to the rounding of its dtype. Windows and
    the length at which LongRoPE changes are lowered to a few tokens, so that there are tokens on both sides of each.
    """
    inner: Any = bare(model)
    if not getattr(inner, "_supports_attention_backend", False):
        return "it takes no other attention implementation"
    rope_by_document(model)
    try:
        with eval_mode(model), lowered_limits(model):
            return _differing_logits(model, inner)
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:  # another kind of forward
        return first_line(error)


def _differing_logits(model: nn.Module, inner: Any) -> str | None:
    """Return how the logits of decoding differ from those of the model's own forward; None where they do not."""
    weight = next(model.parameters())
    # far above rounding errors, far below the effect of a wrong position or key
    device = weight.device
    tolerance = min(0.1, 1e3 * max(torch.finfo(d).eps for d in (weight.dtype, torch.float32)))
    forward = type(inner).forward
    short = short_length(model)
    words = torch.arange(len(PROMPTS) * (PROMPTS[0] + STEPS)) * 7 + 3
    rows = (words % inner.config.get_text_config().vocab_size).view(len(PROMPTS), -1).tolist()
    for row, shared in zip(rows, OWN, strict=True):
        row[:shared] = rows[0][:shared]
    ids = torch.tensor(rows, device=device)

    def own_logits(part: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(part.shape[1], device=device).expand_as(part)
        logits: torch.Tensor = forward(inner, input_ids=part, position_ids=positions, use_cache=False).logits
        return logits.float()

    with with_soft_cap(model):
        together = own_logits(ids)
        alone = torch.cat([own_logits(row[None]) for row in ids])
        # experts that get more tokens may round otherwise, which says nothing about decoding
        tells = distances(alone, together) < tolerance / 2
        expected = alone
        if short is not None:  # where a token's logits depend on how long the sequence was when they were computed
            expected = alone.clone()
            for number, row in enumerate(ids):
                for end in range(PROMPTS[number], PROMPTS[number] + STEPS):
                    expected[number, end - 1] = own_logits(row[None, :end])[0, -1]
    with attention_for_ragged_cache(model):
        cache = RaggedCache(inner.config, len(rows), ids.shape[1], device)
        held = dict[int, Any]()
        starting = {number: row[:length] for number, (row, length) in enumerate(zip(rows, PROMPTS, strict=True))}
        prefill_sequences(decoder_of(model), starting, cache, held, short)
        cache.begin(torch.tensor(PROMPTS, device=device))
        for step in range(STEPS):
            lengths = [length + step for length in PROMPTS]
            outgrown = {n: rows[n][:length] for n, length in enumerate(lengths) if step and length - 1 == short}
            prefill_sequences(decoder_of(model), outgrown, cache, held, short)
            at = cache.lengths[:, None] - 1
            outputs = forward(
                inner,
                input_ids=ids.gather(1, at),
                position_ids=at,
                past_key_values=cache,
                use_cache=True,
                ragged_cache=cache,
            )
            chosen = torch.arange(len(rows), device=device), at[:, 0]
            errors = distances(expected[chosen], outputs.logits[:, -1].float())[tells[chosen]]
            if len(errors) and not errors.max() < tolerance:
                return f"its logits come out different by {errors.max():.1e}"
            cache.lengths += 1
    return None if tells.any() else "its logits depend on the rows beside a sequence, by rounding alone"
