"""A key-value cache for sequences of different lengths without padding, and the attention that reads it.

Every sequence fills its own row from slot 0, so a token's slot is its position, no mask exists, and attention reads
exactly the keys there are. Lengths live on the device: a step of decoding has fixed shapes and addresses, waits for
nothing, and can be replayed as a CUDA graph.

    cache = RaggedCache(model.config, batch=8, slots=512, device=device)
    with attention_for_ragged_cache(model):
        read_prompts(decoder, prompts, range(8), cache)          # all but their last tokens, in one row
        cache.begin(lengths)                                     # what is in, and the token to come
        model(input_ids=token, position_ids=cache.lengths[:, None] - 1, past_key_values=cache, ragged_cache=cache)
        cache.lengths += 1
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from distill_kernels.attention.decode import decode_attention
from distill_kernels.attention.flash import flash_attention
from distill_kernels.attention.kv_cache import write_newest
from distill_kernels.launch import runs_on_triton
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from distill.models.attention import RAGGED, implementations, refuse_other_scores
from distill.models.kv_cache import unsupported_layers


class AttentionCall(NamedTuple):
    """What an attention module calls its attention with: factor of the scores, keys a query sees, cap of the scores,
    and whether there are sinks."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: bool = False


class PackedPrompts(NamedTuple):
    """Prompts one after the other in a row of tokens, and where their keys and values go.

    Attributes:
        bounds: where each begins, and the last ends; cu_seqlens: the same, int32 on the device.
        source, place: int64 [n]: token `source` of the row goes to `place`, counted through all sequences' slots.
    """

    bounds: list[int]
    cu_seqlens: torch.Tensor
    source: torch.Tensor
    place: torch.Tensor


class RaggedLayer(CacheLayerMixin):
    """One layer: [B, slots, Hkv, D] keys and values, allocated when the first keys come."""

    is_sliding = False  # sliding layers keep everything; the attention selects their window

    def __init__(self, cache: RaggedCache) -> None:
        super().__init__()
        self.owner = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        _, heads, _, size = key_states.shape
        shape = (self.owner.batch, self.owner.slots, heads, size)
        self.dtype, self.device = value_states.dtype, key_states.device
        # zeros, so that slots which nobody has written to never hold a NaN
        self.keys = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.values = torch.zeros_like(self.keys)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in prompts [1, Hkv, N, D], and give them back; or newest tokens [B, Hkv, 1, D], and give all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if (packed := self.owner.packed) is None:
            write_newest(self.keys, self.values, key_states, value_states, self.owner.lengths)
            return self.keys.transpose(1, 2), self.values.transpose(1, 2)
        for kept, new in ((self.keys, key_states), (self.values, value_states)):
            tokens = new[0].transpose(0, 1).index_select(0, packed.source)
            kept.flatten(0, 1).index_copy_(0, packed.place, tokens.to(kept.dtype))
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0  # positions are always given; lengths are on the device

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Not used: no mask is built for the attention of this cache."""
        return query_length, 0

    def get_max_length(self) -> int:
        return self.owner.slots

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


class RaggedCache(Cache):
    """Room for `batch` sequences of up to `slots` tokens in every attention layer.

    Args:
        batch: sequences B.
        slots: prompt and new tokens together, at most.
        device: where `lengths` is.

    Attributes:
        lengths: int64 [B] on the device, tokens of each sequence, the one that is on its way included, so that its
            position is one less; the caller adds to it.
        calls: where it is a dict, each attention module leaves there what it called with.
        packed: the prompts that a call brings; None where it brings one newest token of every sequence.

    Raises:
        ValueError: layers that keep a state other than keys and values.
    """

    def __init__(self, config: PreTrainedConfig, batch: int, slots: int, device: torch.device) -> None:
        if foreign := unsupported_layers(config):
            raise ValueError(f"config: RaggedCache holds keys and values of attention layers, not of {foreign}")
        self.batch, self.slots = batch, slots
        self.packed: PackedPrompts | None = None
        self.calls: dict[nn.Module, AttentionCall] | None = None
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        super().__init__(layers=[RaggedLayer(self) for _ in range(config.get_text_config().num_hidden_layers)])

    def begin(self, lengths: torch.Tensor) -> None:
        """From now on each call brings the next token of every sequence; `lengths` [B] count the first of these."""
        self.lengths.copy_(lengths)

    def allocate(self, keys: torch.Tensor) -> None:
        """Memory for the layers that have none yet, as if their first keys were these [B, Hkv, S, D]."""
        for layer in self.layers:
            assert isinstance(layer, RaggedLayer)
            if not layer.is_initialized:
                layer.lazy_initialization(keys, keys)

    def kept(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [B, slots, Hkv, D] of each layer, once they are allocated."""
        pairs = []
        for layer in self.layers:
            assert isinstance(layer, RaggedLayer) and layer.keys is not None and layer.values is not None
            pairs.append((layer.keys, layer.values))
        return pairs


def read_prompts(decoder: nn.Module, prompts: Sequence[Sequence[int]], rows: Sequence[int], cache: RaggedCache) -> None:
    """All but the last token of each prompt into its row of the cache, in one call without padding; equal ones once.

    What the sequences of other rows hold stays. Call it where the attention is that of a ragged cache.
    """
    written = [(tuple(prompt[:-1]), row) for prompt, row in zip(prompts, rows, strict=True) if len(prompt) > 1]
    slots = {document: torch.arange(len(document)) for document, _ in written}
    if not slots:
        return
    bounds = list(accumulate(map(len, slots), initial=0))
    begin = dict(zip(slots, bounds, strict=False))

    def joined(parts: Iterable[torch.Tensor]) -> torch.Tensor:
        return sent(torch.cat(list(parts)), cache.lengths.device)

    ids, positions = joined(map(torch.tensor, slots))[None], joined(slots.values())[None]
    source = joined(begin[document] + slots[document] for document, _ in written)
    place = joined(row * cache.slots + slots[document] for document, row in written)
    cu_seqlens = joined([torch.tensor(bounds, dtype=torch.int32)])
    cache.packed = PackedPrompts(bounds, cu_seqlens, source, place)
    try:
        decoder(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, ragged_cache=cache)
    finally:
        cache.packed = None


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host's on `device`, by the current stream, without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def ragged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    ragged_cache: RaggedCache | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of each prompt's tokens among themselves, or of one newest token a sequence to its cached keys.

    Args:
        module: the attention layer.
        query: [1, H, N, D] of packed prompts, or [B, H, 1, D]; key and value [1, Hkv, N, D] or [B, Hkv, slots, D].
        attention_mask: none is built for this attention; a mask made elsewhere is refused.
        scaling: of the scores; 1/sqrt(D) if None.
        dropout: has no place in generation.
        sliding_window: keys a query sees, itself included.
        softcap: scores become cap * tanh(score / cap).
        s_aux: [H], attention sinks.
        ragged_cache: the cache in use, handed through the model's keyword arguments.

    Returns:
        [B, S, H, D] and None (no attention weights).
    """
    refuse_other_scores(kwargs)
    if attention_mask is not None or dropout > 0 or ragged_cache is None:
        raise ValueError("attention: a ragged cache takes no mask and no dropout, and must be given as ragged_cache=")
    if ragged_cache.calls is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        ragged_cache.calls[module] = AttentionCall(scale, sliding_window, softcap, s_aux is not None)
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast a rotation by fp32 angles widens them
    grouped = query.shape[1] != key.shape[1]
    kernels = runs_on_triton(query) and query.dtype != torch.float64  # which none of them takes
    torchs = softcap is None and s_aux is None  # PyTorch's attention has neither
    attend = functools.partial(flash_attention, scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    if ragged_cache.packed is not None and kernels:
        out = attend(query, key, value, cu_seqlens_q=ragged_cache.packed.cu_seqlens)
    elif ragged_cache.packed is not None:
        if sliding_window is None and torchs:
            attend = functools.partial(scaled_dot_product_attention, is_causal=True, scale=scaling, enable_gqa=grouped)
        spans = [slice(*span) for span in pairwise(ragged_cache.packed.bounds)]
        out = torch.cat([attend(*(tensor[:, :, span] for tensor in (query, key, value))) for span in spans], 2)
    elif not kernels and torchs:
        # PyTorch's attention is the faster one on a CPU; there, slots that are not filled yet can be left out
        filled = ragged_cache.slots if query.is_cuda else int(ragged_cache.lengths.max())
        slot, lengths = torch.arange(filled, device=query.device), ragged_cache.lengths[:, None]
        seen = slot < lengths
        if sliding_window is not None:
            seen &= slot >= lengths - sliding_window
        key, value = key[:, :, :filled], value[:, :, :filled]
        mask = seen[:, None, None]
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)
    else:
        lengths = ragged_cache.lengths
        out = decode_attention(
            query, key, value, lengths, scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux
        )
    return out.transpose(1, 2), None


AttentionInterface.register(RAGGED, ragged_attention)


def attention_for_ragged_cache(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Inside, `model` attends by `ragged_attention`: its calls must bring a RaggedCache."""
    return implementations(model, RAGGED)
