"""The preallocated key-value cache as a transformers `Cache`, so that `generate` can use it.

    model.generate(**inputs, past_key_values=PreallocatedCache(model.config, max_length=512))

transformers' default cache concatenates: each new token copies every layer's whole cache. This one writes the new
row into its place and hands attention a view of the filled part.
"""

from __future__ import annotations

import logging

import torch
from distill_kernels.primitives.kv_cache import KVCache
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

log = logging.getLogger(__name__)

_SUPPORTED = ("full_attention", "sliding_attention")


def unsupported_layers(config: PreTrainedConfig) -> list[str]:
    """Kinds of layers in a model that keep a state other than the keys and values of all positions."""
    text = config.get_text_config(decoder=True)
    return sorted(set(getattr(text, "layer_types", None) or ()) - set(_SUPPORTED))


class PreallocatedLayer(CacheLayerMixin):
    """One layer; its tensors are allocated when the first keys say how many sequences and heads there are."""

    is_sliding = False  # sliding layers keep everything: the mask selects their window
    is_croppable = True

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length
        self.cache: KVCache | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the buffers for the first keys and values."""
        batch, heads, _, size = key_states.shape
        if value_states.shape[-1] != size:
            raise ValueError(
                f"PreallocatedCache: keys and values of one head size are supported, got {size} and "
                f"{value_states.shape[-1]}"
            )
        self.dtype, self.device = value_states.dtype, key_states.device
        self.cache = KVCache(batch, self.max_length, heads, size, dtype=self.dtype, device=self.device)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, Hkv, S, D] keys and values; views [B, Hkv, filled, D] of all there are."""
        if self.cache is None:
            self.lazy_initialization(key_states, value_states)
        assert self.cache is not None
        self.cache.append(key_states, value_states)
        self._show()
        return self.keys, self.values  # type: ignore[return-value]

    def _show(self) -> None:
        assert self.cache is not None
        filled = slice(0, self.cache.longest)
        self.keys = self.cache.keys[:, filled].transpose(1, 2)
        self.values = self.cache.values[:, filled].transpose(1, 2)

    def get_seq_length(self) -> int:
        """Return the number of cached tokens."""
        return 0 if self.cache is None else self.cache.longest

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the next `query_length` queries face, and the position of the first."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return the capacity in tokens."""
        return self.max_length

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def reset(self) -> None:
        """Forget all cached tokens."""
        if self.cache is not None:
            self.cache.reset()
            self._show()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` positions; a positive number is the length to keep, as it once was."""
        if self.cache is not None:
            keep = tokens_to_remove if tokens_to_remove > 0 else max(self.cache.longest + tokens_to_remove, 0)
            self.cache.truncate(keep)
            self._show()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Select sequences of the batch by index."""
        if self.cache is not None:
            self.cache.reorder(beam_idx.to(self.device))
            self._show()


class PreallocatedCache(Cache):
    """A cache of `max_length` positions for every attention layer of a model.

    Args:
        max_length: prompt and new tokens together, at most.

    Raises:
        ValueError: `max_length` below 1, or layers that keep a state other than keys and values.
    """

    def __init__(self, config: PreTrainedConfig, max_length: int) -> None:
        if max_length < 1:
            raise ValueError(f"max_length: expected at least 1, got {max_length}")
        text = config.get_text_config(decoder=True)
        if foreign := unsupported_layers(config):
            raise ValueError(f"config: PreallocatedCache supports {', '.join(_SUPPORTED)} layers, got {foreign}")
        super().__init__(layers=[PreallocatedLayer(max_length) for _ in range(text.num_hidden_layers)])
        self.padded_left: bool | None = None  # whether the prompts' padding mask is zeros, then ones; not known yet

    def newest_token(self, attention_mask: torch.Tensor | None) -> dict[str, torch.Tensor | None] | None:
        """Return the arguments of `decode_attention` for the next token; None where it cannot be used.

        Args:
            attention_mask: As `generate` gives it: [B, cached tokens + 1], zeros where a prompt is padded on the left.

        Returns:
            `cache_lengths` int [B], the token to come included, and `cache_starts` int [B] or None, as keyword
            arguments for the model; None before prompts are in, or for a mask of another kind.
        """
        layer = self.layers[0]
        assert isinstance(layer, PreallocatedLayer)
        if layer.cache is None or layer.cache.longest == 0:
            return None
        if attention_mask is None:
            return {"cache_lengths": layer.cache.lengths + 1, "cache_starts": None}
        if attention_mask.dim() != 2:
            return None
        if self.padded_left is None:  # once a prompt: this waits for the device
            self.padded_left = bool((attention_mask.bool().int().diff(dim=1) >= 0).all())
            if not self.padded_left:
                log.warning("generation keeps PyTorch's attention, which is slower: prompts are not padded on the left")
        if not self.padded_left:
            return None
        return {"cache_lengths": layer.cache.lengths + 1, "cache_starts": attention_mask.bool().int().argmax(dim=1)}

    def reset(self) -> None:
        """Empty the cache; nothing is freed."""
        super().reset()
        self.padded_left = None
