"""Rotary embeddings that depend on a sequence's length, by the length of each document.

LongRoPE (Phi-3, Phi-3.5-MoE, MiniCPM) has one set of frequencies for sequences up to the length it was pretrained with
and one for longer ones. transformers takes the set from the largest position of the whole batch, so that what a
document gets depends on the padding and on the documents beside it. Here each document gets the set that it gets alone.

A document's length follows from its positions. Where a call has none, they follow from its attention mask.

Dynamic NTK scaling changes above `max_position_embeddings` only, which no row of a run exceeds.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin

from distill.models.head import unwrap_peft
from distill.models.patch.swaps import OTHER, Swap, apply_swap, replace_forward, restore_forward

KIND = "longrope"
MARK = "_distill_document_rope"  # of a rotary embedding that goes by documents
WHOLE = "_distill_long_rope"  # of a rotary embedding whose every token belongs to a long document, for now
WARNED = "_distill_document_rope_warned"  # of a decoder, once
PREPARED = "_distill_document_positions"  # of a decoder with such an embedding: its calls get positions

log = logging.getLogger(__name__)


class DocumentRope(Swap):
    """Swap of the rotary embeddings of LongRoPE.

    Args:
        survives_unpatch: False for a model that `unpatch` has to leave as it came from transformers.
    """

    kind = "document_rope"

    def __init__(self, survives_unpatch: bool = True) -> None:
        self.survives_unpatch = survives_unpatch

    def applies(self, module: nn.Module) -> str | None:
        return None if _is_long(module) and MARK not in module.__dict__ else OTHER

    def swap(self, module: nn.Module) -> None:
        module.__dict__[MARK] = True
        replace_forward(module, _forward)

    def restore(self, module: nn.Module) -> None:
        del module.__dict__[MARK]
        restore_forward(module)


def follows_length(model: nn.Module) -> bool:
    """Return whether `model` has rotary embeddings that depend on the length of a document: it needs positions."""
    return any(map(_is_long, model.modules()))


def short_length(model: nn.Module) -> int | None:
    """Return the length up to which a sequence gets LongRoPE's short set; None for a model without LongRoPE."""
    lengths = [limit for module in model.modules() if _is_long(module) for limit in _limits(module)]
    return min(lengths, default=None)


def generates_with_cache(model: nn.Module, longest: int) -> bool:
    """Return whether transformers' `generate` may keep a cache for one sequence, or for several of one length.

    The keys of a sequence that outgrows the short set have to be computed again: Phi-3's classes drop the cache there,
    others go on with it.

    Args:
        model: A model of transformers, bare or inside PEFT.
        longest: Tokens of the longest sequence that there will be.
    """
    inner: Any = unwrap_peft(model)
    limit = short_length(inner)
    if limit is None or longest <= limit:
        return True
    overrides = type(inner).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    return overrides and getattr(inner.config, "original_max_position_embeddings", None) == limit


def rope_by_document(model: nn.Module, *, survives_unpatch: bool = True) -> None:
    """Have each document of a batch rotated as it is alone, by the positions that the model is called with."""
    apply_swap(model, DocumentRope(survives_unpatch))
    for module in model.modules():
        if PREPARED not in module.__dict__ and any(map(_is_long, module.children())):
            module.__dict__[PREPARED] = True
            module.register_forward_pre_hook(_add_positions, with_kwargs=True)


@contextlib.contextmanager
def as_long_documents(model: nn.Module) -> Iterator[None]:
    """Inside, every token is rotated as one of a document that is longer than `short_length`.

    For parts of a document whose rest, which makes it long, is computed later.
    """
    modules = [module for module in model.modules() if MARK in module.__dict__]
    for module in modules:
        module.__dict__[WHOLE] = True
    try:
        yield
    finally:
        for module in modules:
            del module.__dict__[WHOLE]


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
    own = type(self).forward
    more = () if layer_type is None else (layer_type,)
    kind = self.rope_type if layer_type is None else self.rope_type[layer_type]
    if kind != KIND or position_ids.dim() != 2:
        return tuple(own(self, x, position_ids, *more))
    parameters = self.config.rope_parameters if layer_type is None else self.config.rope_parameters[layer_type]
    most = parameters["original_max_position_embeddings"]
    # one position above the limit has a whole batch take the set for long sequences, and none the other one
    beyond = torch.full_like(position_ids[:, :1], most)
    long = [table[:, :-1] for table in own(self, x, torch.cat([position_ids, beyond], 1), *more)]
    short = own(self, x, position_ids.clamp(max=most - 1), *more)
    if WHOLE in self.__dict__:
        return tuple(long)
    is_long = (document_lengths(position_ids) > most)[..., None]
    return tuple(torch.where(is_long, *tables) for tables in zip(long, short, strict=True))


def _add_positions(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give a call without positions those of its attention mask: 0 at a row's first token, wherever padding is."""
    if kwargs.get("position_ids") is not None or kwargs.get("past_key_values") is not None:
        return None
    if not any(MARK in module.__dict__ for module in decoder.children()):
        return None
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        positions = (mask.long().cumsum(1) - 1).clamp_min(0)
        return args, kwargs | {"position_ids": positions.masked_fill(mask == 0, 0)}
    given = args[0] if args else kwargs.get("input_ids")
    limit = short_length(decoder)
    several = isinstance(given, torch.Tensor) and limit is not None and len(given) > 1 and given.shape[1] > limit
    if isinstance(given, torch.Tensor) and mask is None and several and not decoder.__dict__.get(WARNED):
        decoder.__dict__[WARNED] = True
        log.warning(
            "%s: rows of %d tokens without position_ids or attention_mask: each is rotated as one document of that "
            "length, padding included, since LongRoPE depends on a document's length",
            type(decoder).__name__,
            given.shape[1],
        )
    return None


def _limits(module: Any) -> list[int]:
    """Return the lengths up to which a rotary embedding takes its short sets."""
    if not isinstance(module.rope_type, dict):
        return [module.config.rope_parameters["original_max_position_embeddings"]]
    kinds = [layer_type for layer_type, kind in module.rope_type.items() if kind == KIND]
    return [module.config.rope_parameters[kind]["original_max_position_embeddings"] for kind in kinds]


def _is_long(module: nn.Module) -> bool:
    kind = getattr(module, "rope_type", None)
    return KIND in kind.values() if isinstance(kind, dict) else kind == KIND
