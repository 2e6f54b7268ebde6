"""A key-value cache for sequences of different lengths without padding, and the attention that reads it.

Every sequence fills its own row from slot 0, so a token's slot is its position, no mask exists, and attention reads
exactly the keys there are. Lengths live on the device: a step of decoding has fixed shapes and addresses, waits for
nothing, and can be replayed as a CUDA graph.

    cache = RaggedCache(model.config, batch=8, slots=512, device=device)
    with attention_for_ragged_cache(model):
        decoder(input_ids=padded, position_ids=positions, past_key_values=cache, ragged_cache=cache)  # on the right
        cache.begin(lengths)                                     # what is in, and the token to come
        model(input_ids=token, position_ids=cache.lengths[:, None] - 1, past_key_values=cache, ragged_cache=cache)
        cache.lengths += 1
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from distill_kernels.attention.decode import decode_attention
from distill_kernels.attention.flash import flash_attention
from distill_kernels.attention.kv_cache import put_newest
from distill_kernels.launch import runs_on_triton
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from distill.models.attention import RAGGED, implementations, refuse_sinks
from distill.models.kv_cache import unsupported_layers


class AttentionCall(NamedTuple):
    """What an attention module calls its attention with: factor of the scores, keys a query sees, cap of the scores."""

    scaling: float
    window: int | None
    softcap: float | None


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
        # zeros, so that slots which a padded prompt leaves untouched never hold a NaN
        self.keys = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.values = torch.zeros_like(self.keys)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in [B, Hkv, S, D]: of prompts from slot 0 on, and give them back; of newest tokens, and give all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if self.owner.decoding:
            put_newest(self.keys, self.values, key_states, value_states, self.owner.lengths)
            return self.keys.transpose(1, 2), self.values.transpose(1, 2)
        new = key_states.shape[2]
        self.keys[:, :new] = key_states.transpose(1, 2)
        self.values[:, :new] = value_states.transpose(1, 2)
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
        decoding: whether calls bring one newest token a sequence (after `begin`), or prompts from slot 0 on.

    Raises:
        ValueError: layers that keep a state other than keys and values.
    """

    def __init__(self, config: PreTrainedConfig, batch: int, slots: int, device: torch.device) -> None:
        if foreign := unsupported_layers(config):
            raise ValueError(f"config: RaggedCache holds keys and values of attention layers, not of {foreign}")
        self.batch, self.slots, self.decoding = batch, slots, False
        self.calls: dict[nn.Module, AttentionCall] | None = None
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        super().__init__(layers=[RaggedLayer(self) for _ in range(config.get_text_config().num_hidden_layers)])

    def begin(self, lengths: torch.Tensor) -> None:
        """From now on each call brings the next token of every sequence; `lengths` [B] count the first of these."""
        self.lengths.copy_(lengths)
        self.decoding = True

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

    def take(self, rows: torch.Tensor, other: RaggedCache, numbers: torch.Tensor | None = None) -> None:
        """Keys and values of another cache, [N, its slots, Hkv, D] a layer, into `rows` (int64 [N]) from slot 0 on; of
        its rows those with these `numbers` (int64 [N]) if they are given."""
        for layer, (keys, values) in zip(self.layers, other.kept(), strict=True):
            assert isinstance(layer, RaggedLayer)
            if not layer.is_initialized:
                layer.lazy_initialization(keys.transpose(1, 2), values.transpose(1, 2))
        for own, new in zip(self.kept(), other.kept(), strict=True):
            for mine, theirs in zip(own, new, strict=True):
                chosen = theirs if numbers is None else theirs.index_select(0, numbers)
                mine[:, : theirs.shape[1]].index_copy_(0, rows, chosen.to(mine.dtype))

    def restart(self) -> None:
        """Take prompts again; nothing is freed or cleared."""
        self.decoding = False


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
    ragged_cache: RaggedCache | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of prompts among themselves, or of one newest token a sequence to its cached keys.

    Args:
        module: the attention layer.
        query: [B, H, S, D]; key and value [B, Hkv, S or slots, D], not repeated.
        attention_mask: none is built for this attention; a mask made elsewhere is refused.
        scaling: of the scores; 1/sqrt(D) if None.
        dropout: has no place in generation.
        sliding_window: keys a query sees, itself included.
        softcap: scores become cap * tanh(score / cap).
        ragged_cache: the cache in use, handed through the model's keyword arguments.

    Returns:
        [B, S, H, D] and None (no attention weights).
    """
    refuse_sinks(kwargs)
    if attention_mask is not None or dropout > 0 or ragged_cache is None:
        raise ValueError("attention: a ragged cache takes no mask and no dropout, and must be given as ragged_cache=")
    if ragged_cache.calls is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        ragged_cache.calls[module] = AttentionCall(scale, sliding_window, softcap)
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast a rotation by fp32 angles widens them
    grouped = query.shape[1] != key.shape[1]
    kernels = runs_on_triton(query) and query.dtype != torch.float64  # which none of them takes
    if ragged_cache.decoding and not kernels and softcap is None:
        # PyTorch's attention is the faster one on a CPU; there, slots that are not filled yet can be left out
        filled = ragged_cache.slots if query.is_cuda else int(ragged_cache.lengths.max())
        slot, lengths = torch.arange(filled, device=query.device), ragged_cache.lengths[:, None]
        seen = slot < lengths
        if sliding_window is not None:
            seen &= slot >= lengths - sliding_window
        key, value = key[:, :, :filled], value[:, :, :filled]
        mask = seen[:, None, None]
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)
    elif ragged_cache.decoding:
        lengths = ragged_cache.lengths
        out = decode_attention(query, key, value, lengths, scale=scaling, window=sliding_window, softcap=softcap)
    elif kernels or sliding_window is not None or softcap is not None:
        out = flash_attention(query, key, value, scale=scaling, window=sliding_window, softcap=softcap)
    else:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2), None


AttentionInterface.register(RAGGED, ragged_attention)


def attention_for_ragged_cache(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Inside, `model` attends by `ragged_attention`: its calls must bring a RaggedCache."""
    return implementations(model, RAGGED)
