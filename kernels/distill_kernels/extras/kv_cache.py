"""Key-value cache allocated once: [B, T_max, Hkv, D], filled from the front, each sequence with its own length.

Positions come before heads, as projections write them, so that a new token's keys are one contiguous row. Lengths
live on the device: appending and attending need no host sync and replay inside a CUDA graph.
"""

from __future__ import annotations

import torch

from distill_kernels.decoding.cache_write import write_newest
from distill_kernels.decoding.cached_attention import decode_attention
from distill_kernels.kernel_op import check_tensors


class KVCache:
    """Keys and values of one attention layer.

    Args:
        batch: sequences B.
        max_length: slots of each, T_max.
        kv_heads, head_size: number of key-value heads Hkv; head size D.
        dtype, device: dtype and device of the tensors.

    Attributes:
        keys, values: [B, T_max, Hkv, D]; slots behind a sequence's length are undefined.
        lengths: int64 [B] on the device, the filled slots of each sequence.
    """

    def __init__(
        self,
        batch: int,
        max_length: int,
        kv_heads: int,
        head_size: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
    ) -> None:
        for name, value in (("batch", batch), ("max_length", max_length), ("kv_heads", kv_heads)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        self.keys = torch.empty(batch, max_length, kv_heads, head_size, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self._longest = 0  # on the host, so that a full cache is noticed without waiting for the device

    @property
    def max_length(self) -> int:
        """Slots of each sequence, T_max."""
        return self.keys.shape[1]

    @property
    def longest(self) -> int:
        """Upper bound, known to the host, of the slots filled by the longest sequence.

        An `append` with counts adds S, so that it may be too high until `truncate`.
        """
        return self._longest

    def append(self, keys: torch.Tensor, values: torch.Tensor, counts: torch.Tensor | None = None) -> None:
        """Append S new positions to every sequence.

        Args:
            keys, values: [B, Hkv, S, D].
            counts: int [B], how many of the S each sequence keeps (the first ones); all if None.

        Raises:
            ValueError: the shapes differ, or the cache would overflow by the bound `longest`.
        """
        check_tensors(keys=keys, values=values, counts=counts)
        batch, slots, kv_heads, size = self.keys.shape
        new = keys.shape[2]
        if keys.shape != (batch, kv_heads, new, size) or values.shape != keys.shape:
            raise ValueError(
                f"keys, values: expected [{batch}, {kv_heads}, new, {size}], got {tuple(keys.shape)}, "
                f"{tuple(values.shape)}"
            )
        if self._longest + new > slots:
            raise ValueError(f"keys: {self._longest} + {new} positions exceed the cache's max_length of {slots}")
        if new == 1 and counts is None:
            # Lengths first: `write_newest` puts the new position into the slot before the length.
            self.lengths += 1
            self._longest += 1
            write_newest(self.keys, self.values, keys, values, self.lengths)
            return
        # a discarded position is written too, and overwritten by the next; it lies behind the length
        at = self.lengths[:, None] + torch.arange(new, device=self.keys.device)
        sequence = torch.arange(batch, device=self.keys.device)[:, None]
        self.keys[sequence, at] = keys.transpose(1, 2).to(self.keys.dtype)
        self.values[sequence, at] = values.transpose(1, 2).to(self.values.dtype)
        self.lengths += new if counts is None else counts
        self._longest += new

    def attend(
        self,
        q: torch.Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return `decode_attention` of the newest tokens' q [B, H, S, D], whose keys were appended before."""
        keys = self.keys.transpose(1, 2)
        values = self.values.transpose(1, 2)
        return decode_attention(q, keys, values, self.lengths, scale=scale, window=window, softcap=softcap, sinks=sinks)

    def truncate(self, length: int) -> None:
        """Drop positions from `length` on (rejected speculative tokens)."""
        if length < 0:
            raise ValueError(f"length: expected at least 0, got {length}")
        self.lengths.clamp_(max=length)
        self._longest = min(self._longest, length)

    def reorder(self, sequences: torch.Tensor) -> None:
        """Replace sequence i by a copy of sequence `sequences[i]` (beam search)."""
        filled = slice(0, self._longest)
        # The right-hand side is a copy, so that no sequence is overwritten before it is read. Only up to the host's
        # bound.
        self.keys[:, filled] = self.keys[sequences, filled]
        self.values[:, filled] = self.values[sequences, filled]
        # into the same memory: a captured step reads the lengths where they were when it was captured
        self.lengths.copy_(self.lengths[sequences])

    def reset(self) -> None:
        """Empty the cache; nothing is freed or cleared."""
        self.lengths.zero_()
        self._longest = 0
