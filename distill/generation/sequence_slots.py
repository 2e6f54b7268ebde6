"""Buffers of the sequences that are decoded together, and their copies to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
            slots: Slot of each sequence.
            sequences: Prompts, with the tokens that were generated before.
            limits: Length of each response at which it stops, with those tokens.
            seeds: Seeds of the sampled tokens.
            generated: Number of those tokens at the end of each sequence.
        """
        at, *started = (
            to_device(torch.tensor(values, dtype=torch.int64), self.token.device)
            for values in (
                slots,
                [len(tokens) for tokens in sequences],
                [tokens[-1] for tokens in sequences],
                seeds,
                limits,
                generated,
            )
        )
        states = (self.cache.lengths, self.token, self.seeds, self.limits, self.generated)
        for tensor, values in zip(states, started, strict=True):
            tensor.index_copy_(0, at, values)
        for tensor in (self.done, self.ended):
            tensor.index_fill_(0, at, False)

    def sample(
        self, logits: torch.Tensor, sampling: Sampling, ends: torch.Tensor, pad: int, *, log_probs: bool
    ) -> None:
        """Sample the next tokens from logits [B, V] and update the sequences; `ends` end one, and `pad` follows."""
        token = sampling.sample(logits, self.seeds, self.generated)
        if log_probs:
            log_p = at_least_float32(logits).log_softmax(-1).gather(1, token[:, None])
            self.log_probs.index_copy_(1, self.column, log_p.to(self.log_probs.dtype))
        live = ~self.done
        self.token.copy_(torch.where(live, token, pad))
        self.responses.index_copy_(1, self.column, self.token[:, None])
        self.column += 1
        self.generated += live
        self.ended |= live & (token[:, None] == ends).any(1)
        self.done |= self.ended | (self.generated >= self.limits)
        self.cache.lengths += ~self.done


def copy_to_host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copy tensors to the host, with one synchronisation for all of them."""
    if tensors[0].device.type != "cuda":
        return [tensor.to("cpu", copy=True) for tensor in tensors]
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    torch.cuda.current_stream(tensors[0].device).record_event().synchronize()
    return copies
