"""Buffers of the sequences that are decoded together, and their copies to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from distill.generation.ragged_cache import RaggedCache
from distill.generation.sampling import Sampling, at_least_float32
from distill.models.precision.host_copy import to_device


class SequenceSlots:
    """Sequence slots: the buffers of `batch` sequences, with `columns` new tokens of each, and the captured step."""

    def __init__(self, config: Any, batch: int, slots: int, columns: int, device: torch.device) -> None:
        self.batch = batch
        self.sizes = (batch, slots)
        self.cache = RaggedCache(config, batch, slots, device)
        self.token, self.seeds, self.generated, self.limits = torch.zeros(4, batch, dtype=torch.int64, device=device)
        self.done, self.ended = torch.zeros(2, batch, dtype=torch.bool, device=device)
        self.responses = torch.zeros(batch, columns, dtype=torch.int64, device=device)
        precision = torch.float32 if device.type == "mps" else torch.float64
        self.log_probs = torch.zeros(batch, columns, dtype=precision, device=device)
        self.column = torch.zeros(1, dtype=torch.int64, device=device)
        self.fused: Callable[[Sampling], None] | None = None  # a fused step on these buffers, where the model allows it
        self.cached_prompts: dict[
            int, Sequence[int]
        ] = {}  # the prompt whose keys and values are in a slot, also when it is free
        self.graph: torch.cuda.CUDAGraph | None = None
        self.captured_key: tuple[Any, ...] | None = None  # what the graph depends on, other than the buffers

    def clear(self, pad: int) -> None:
        """Empty all sequence slots: each holds one padding token, and is done."""
        for tensor, value in ((self.cache.lengths, 1), (self.token, pad), (self.responses, pad), (self.done, 1)):
            tensor.fill_(value)
        for tensor in (self.seeds, self.limits, self.generated, self.ended, self.column):
            tensor.zero_()
        self.cached_prompts.clear()

    def assign(
        self,
        slots: Sequence[int],
        sequences: Sequence[Sequence[int]],
        limits: Sequence[int],
        seeds: Sequence[int],
        generated: Sequence[int],
    ) -> None:
        """Assign sequences to free slots, while the other sequences continue.

        Args:
            sequences: Prompts, with the tokens that were generated before.
            limits: Length of each response at which it stops, with those tokens.
            seeds: Seeds of the sampled tokens.
            generated: Number of those tokens at the end of each sequence.
        """
        at = self._on_device(slots)
        self.cache.lengths.index_copy_(0, at, self._on_device([len(tokens) for tokens in sequences]))
        self.token.index_copy_(0, at, self._on_device([tokens[-1] for tokens in sequences]))
        self.seeds.index_copy_(0, at, self._on_device(seeds))
        self.limits.index_copy_(0, at, self._on_device(limits))
        self.generated.index_copy_(0, at, self._on_device(generated))
        for tensor in (self.done, self.ended):
            tensor.index_fill_(0, at, False)

    def _on_device(self, values: Sequence[int]) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self.token.device)

    def sample(
        self, logits: torch.Tensor, sampling: Sampling, ends: torch.Tensor, pad: int, *, log_probs: bool
    ) -> None:
        """Sample the next tokens from logits [B, V] and update the sequences; `ends` end one, and `pad` follows."""
        token = sampling.sample(logits, self.seeds, self.generated)
        if log_probs:
            log_p = at_least_float32(logits).log_softmax(-1).gather(1, token[:, None])
            self.log_probs.index_copy_(1, self.column, log_p.to(self.log_probs.dtype))
        # Finished sequences go on in the same shapes: they write padding, and their numbers stand still.
        live = ~self.done
        self.token.copy_(torch.where(live, token, pad))
        self.responses.index_copy_(1, self.column, self.token[:, None])
        self.column += 1
        self.generated += live
        self.ended |= live & (token[:, None] == ends).any(1)
        self.done |= self.ended | (self.generated >= self.limits)
        # the length counts the token on its way, which a finished sequence does not have
        self.cache.lengths += ~self.done


class Progress(NamedTuple):
    """What `SequenceSlots` holds at a check, on the host: tokens generated, and the columns since the last check."""

    generated: torch.Tensor
    done: torch.Tensor
    ended: torch.Tensor
    responses: torch.Tensor
    log_probs: torch.Tensor


def copy_to_host(slots: SequenceSlots, columns: int) -> Progress:
    """Copy the progress of all slots to the host, with one synchronisation for all tensors."""
    tensors = (slots.generated, slots.done, slots.ended, slots.responses[:, :columns], slots.log_probs[:, :columns])
    if slots.generated.device.type != "cuda":
        return Progress(*(tensor.to("cpu", copy=True) for tensor in tensors))
    copies = Progress(*(tensor.to("cpu", non_blocking=True) for tensor in tensors))
    torch.cuda.current_stream(slots.generated.device).record_event().synchronize()
    return copies
