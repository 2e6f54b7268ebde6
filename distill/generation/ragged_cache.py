"""A key-value cache for sequences of different lengths without padding, and the attention that reads it.

Every sequence fills its own row from slot 0, so a token's slot is its position, no mask exists, and attention reads
exactly the keys there are. Lengths live on the device: a step of decoding has fixed shapes and addresses, waits for
nothing, and can be replayed as a CUDA graph.

    cache = RaggedCache(model.config, batch=8, slots=512, device=device)
    with attention_for_ragged_cache(model):
        prefill(decoder, prompts, range(8), cache)          # all but their last tokens, shared prefixes once
        cache.begin(lengths)                                     # what is in, and the token to come
        model(input_ids=token, position_ids=cache.lengths[:, None] - 1, past_key_values=cache, ragged_cache=cache)
        cache.lengths += 1
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from distill_kernels.attention.flash import flash_attention
from distill_kernels.decoding.cache_write import write_newest
from distill_kernels.decoding.cached_attention import decode_attention
from distill_kernels.launch import runs_on_triton
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from distill.generation.shared_prefixes import plan_prefixes
from distill.models.patch.attention import RAGGED, implementations, refuse_other_scores
from distill.models.patch.document_rope import as_long_documents
from distill.models.precision.host_copy import to_device

KEEPS_KEYS = ("full_attention", "sliding_attention")


def unsupported_layers(config: PreTrainedConfig) -> list[str]:
    """Return the kinds of layers in a model that keep a state other than the keys and values of all positions."""
    text = config.get_text_config(decoder=True)
    return sorted(set(getattr(text, "layer_types", None) or ()) - set(KEEPS_KEYS))


class AttentionCall(NamedTuple):
    """Arguments of an attention call: factor of the scores, keys that a query sees, soft cap of the scores, sinks."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: bool = False


class PackedPrompts(NamedTuple):
    """Segments of prompts one after the other in a row of tokens, and where their keys and values go.

    Attributes:
        bounds: Start of each prompt, and the end of the last; cu_seqlens: the same, int32 on the device.
        source, place: int64 [n]: token `source` of the row goes to `place`, counted through all sequences' slots.
        moved, moved_to: int64 [m]: slots that are copied before anything is written; None where none is.
        seen: int64 [K], the slots that the segments attend to, end to end; None where each attends to itself alone.
        seen_bounds, seen_cu_seqlens: Bounds of `seen`, as `bounds` and `cu_seqlens`.
    """

    bounds: list[int]
    cu_seqlens: torch.Tensor
    source: torch.Tensor
    place: torch.Tensor
    moved: torch.Tensor | None
    moved_to: torch.Tensor | None
    seen: torch.Tensor | None
    seen_bounds: list[int]
    seen_cu_seqlens: torch.Tensor


class RaggedLayer(CacheLayerMixin):
    """One layer: [B, slots, Hkv, D] keys and values, allocated when the first keys come."""

    is_sliding = False  # sliding layers keep everything; the attention selects their window

    def __init__(self, cache: RaggedCache) -> None:
        super().__init__()
        self.owner = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        _, heads, _, size = key_states.shape
        shape = (self.owner.batch, self.owner.slots, heads, size)
        self.dtype = value_states.dtype
        self.device = key_states.device
        # zeros, so that slots which nobody has written to never hold a NaN
        self.keys = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.values = torch.zeros_like(self.keys)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in prompts [1, Hkv, N, D], and give what they attend to, [1, Hkv, K, D]; or newest tokens
        [B, Hkv, 1, D], and give all.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        packed = self.owner.packed
        if packed is None:
            write_newest(self.keys, self.values, key_states, value_states, self.owner.lengths)
            return self.keys.transpose(1, 2), self.values.transpose(1, 2)
        self.move(packed)
        attended = []
        for kept, new in ((self.keys, key_states), (self.values, value_states)):
            slots = kept.flatten(0, 1)
            # a token of a shared prefix was computed once, and is written to the rows of all that begin with it
            tokens = new[0].transpose(0, 1).index_select(0, packed.source)
            slots.index_copy_(0, packed.place, tokens.to(kept.dtype))
            attended.append(new if packed.seen is None else slots.index_select(0, packed.seen).transpose(0, 1)[None])
        return attended[0], attended[1]

    def move(self, packed: PackedPrompts) -> None:
        """Copy the slots that prompts take over from other rows, all of them before any is written."""
        assert self.keys is not None and self.values is not None
        if packed.moved is not None and packed.moved_to is not None:
            for kept in (self.keys.flatten(0, 1), self.values.flatten(0, 1)):
                kept.index_copy_(0, packed.moved_to, kept.index_select(0, packed.moved))

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
        device: Device of `lengths`.

    Attributes:
        lengths: int64 [B] on the device, tokens of each sequence, the one that is on its way included, so that its
            position is one less; the caller adds to it.
        calls: where it is a dict, each attention module leaves there what it called with.
        packed: the prompts that a call brings; None where it brings one newest token of every sequence.

    Raises:
        ValueError: layers that keep a state other than keys and values.
    """

    def __init__(self, config: PreTrainedConfig, batch: int, slots: int, device: torch.device) -> None:
        foreign = unsupported_layers(config)
        if foreign:
            raise ValueError(f"config: RaggedCache holds keys and values of attention layers, not of {foreign}")
        self.batch = batch
        self.slots = slots
        self.packed: PackedPrompts | None = None
        self.calls: dict[nn.Module, AttentionCall] | None = None
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        super().__init__(layers=[RaggedLayer(self) for _ in range(config.get_text_config().num_hidden_layers)])

    def begin(self, lengths: torch.Tensor) -> None:
        """Start decoding: each call brings the next token of every sequence; `lengths` [B] are the prompts'."""
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


def prefill(
    decoder: nn.Module,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[int],
    cache: RaggedCache,
    held: Mapping[int, Sequence[int]] | None = None,
) -> None:
    """Compute all but the last token of each prompt into its row of the cache, in one call without padding.

    A prefix that prompts share is computed once (`shared_prefixes`), one that a row holds already not at all. Other
    rows keep what they hold. Call it where the attention is that of a ragged cache.

    Args:
        rows: Rows of the cache, one per prompt.
        held: prompts that rows hold already, by row, their last tokens included; those of `rows` may be among them.
    """
    written = [(tuple(prompt[:-1]), row) for prompt, row in zip(prompts, rows, strict=True) if len(prompt) > 1]
    if not written:
        return
    standing = {row: tuple(prompt[:-1]) for row, prompt in (held or {}).items() if len(prompt) > 1}
    plan = plan_prefixes([prompt for prompt, _ in written], [row for _, row in written], cache.slots, standing)
    here = functools.partial(_on, cache.lengths.device)
    cache.packed = PackedPrompts(
        plan.bounds.tolist(),
        here(plan.bounds.astype(np.int32)),
        here(plan.source),
        here(plan.place),
        here(plan.moved) if len(plan.moved) else None,
        here(plan.moved_to) if len(plan.moved) else None,
        None if plan.seen is None else here(plan.seen),
        plan.seen_bounds.tolist(),
        here(plan.seen_bounds.astype(np.int32)),
    )
    try:
        if len(plan.ids):
            decoder(
                input_ids=here(plan.ids)[None],
                position_ids=here(plan.positions)[None],
                past_key_values=cache,
                use_cache=True,
                ragged_cache=cache,
            )
        else:
            for layer in cache.layers:  # every prompt stands in other rows
                assert isinstance(layer, RaggedLayer)
                layer.move(cache.packed)
    finally:
        cache.packed = None


def prefill_sequences(
    decoder: nn.Module,
    sequences: Mapping[int, Sequence[int]],
    cache: RaggedCache,
    held: dict[int, Sequence[int]],
    short: int | None,
) -> None:
    """Prefill sequences, by their rows of the cache, and note them in `held`; arguments as of `prefill`.

    Args:
        sequences: token ids of each sequence, by its row.
        held: sequences that rows hold already; of one that has grown, what was prefilled.
        short: Length up to which a sequence gets LongRoPE's short set; None without LongRoPE.
    """
    # a prefix has other keys in a sequence beyond the short set: such sequences share with each other alone
    for is_long in (False, True):
        here = {row: tokens for row, tokens in sequences.items() if _is_long(tokens, short) == is_long}
        if not here:
            continue
        standing = {row: tokens for row, tokens in held.items() if _is_long(tokens, short) == is_long}
        # without its last token a sequence may be as long as the short set reaches
        with as_long_documents(decoder) if is_long else contextlib.nullcontext():
            prefill(decoder, list(here.values()), list(here), cache, standing)
        held |= here


def _is_long(tokens: Sequence[int], short: int | None) -> bool:
    return short is not None and len(tokens) > short


def _on(device: torch.device, values: np.ndarray) -> torch.Tensor:
    return to_device(torch.from_numpy(values), device)


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
        query: [1, H, N, D] of packed prompts, or [B, H, 1, D]; key and value [1, Hkv, N, D] or [B, Hkv, slots, D].
        attention_mask: none is built for this attention; a mask made elsewhere is refused.
        scaling: Factor of the scores; None for 1/sqrt(D).
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
    # under autocast a rotation by fp32 angles widens them
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    grouped = query.shape[1] != key.shape[1]
    kernels = runs_on_triton(query) and query.dtype != torch.float64  # which none of them takes
    torchs = softcap is None and s_aux is None  # PyTorch's attention has neither
    attend = functools.partial(flash_attention, scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    packed = ragged_cache.packed
    # Four ways: prompts in one packed call of the kernel, or one after the other without it; then a newest token per
    # sequence, by PyTorch with a mask, or by the kernel that reads the lengths on the device.
    if packed is not None and kernels:
        keys_of = None if packed.seen is None else packed.seen_cu_seqlens
        out = attend(query, key, value, cu_seqlens_q=packed.cu_seqlens, cu_seqlens_k=keys_of)
    elif packed is not None:
        plain = sliding_window is None and torchs
        parts = []
        for own, read in zip(pairwise(packed.bounds), pairwise(packed.seen_bounds), strict=True):
            q = query[:, :, slice(*own)]
            k = key[:, :, slice(*read)]
            v = value[:, :, slice(*read)]
            parts.append(_attend_plainly(q, k, v, scaling, grouped) if plain else attend(q, k, v))
        out = torch.cat(parts, 2)
    elif not kernels and torchs:
        # PyTorch's attention is the faster one on a CPU; there, slots that are not filled yet can be left out
        filled = ragged_cache.slots if query.is_cuda else int(ragged_cache.lengths.max())
        slot = torch.arange(filled, device=query.device)
        lengths = ragged_cache.lengths[:, None]
        seen = slot < lengths
        if sliding_window is not None:
            seen &= slot >= lengths - sliding_window
        key = key[:, :, :filled]
        value = value[:, :, :filled]
        mask = seen[:, None, None]
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)
    else:
        lengths = ragged_cache.lengths
        out = decode_attention(
            query, key, value, lengths, scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux
        )
    return out.transpose(1, 2), None


def _attend_plainly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, grouped: bool
) -> torch.Tensor:
    """PyTorch's attention of queries [1, H, N, D] to keys [1, Hkv, K, D], the last query seeing the last key."""
    before = k.shape[2] - q.shape[2]
    mask = None if before == 0 else torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(before)
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


AttentionInterface.register(RAGGED, ragged_attention)


def attention_for_ragged_cache(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Inside, `model` attends by `ragged_attention`: its calls must bring a RaggedCache."""
    return implementations(model, RAGGED)
