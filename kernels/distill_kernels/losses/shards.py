"""Vocabulary sharding of a head over the ranks of a group: column ranges and collectives.

Under tensor parallelism every rank holds some rows of both [V, H] heads, while hidden states, labels and the loss are
the same on all ranks. Logits never leave their rank. Communicated for each token:

    six fp32 numbers, gathered: maximum and log sum of exps of both models (at T and at T = 1)
    one more, summed, where the divergence is not forward KL: sum(g), which the gradient needs (divergence.py)
    one or, with statistics, eight, summed once at the end: the loss and `TokenStats`
    with a top-K teacher, K summed, the student's logits there, and the tail's normaliser with the gathered ones
    with several teachers two more for each but the first, gathered: normalisers of the running mixture and the next
    Hs of dx, summed in fp32: each rank's part comes out of its product in fp32 and the sum is rounded once

Every rank must make the same calls in the same order, so that all cut the batch into the same chunks. A process that
has the whole vocabulary takes the same path by itself (`SingleRank`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from distill_kernels.torch_internals import internal

OUTSIDE = -1  # a label that no rank holds, kept by the rank that owns the row terms: its probability is 0
ON_ANOTHER_RANK = -2  # a label among another rank's columns


class Ranks:
    """Collectives over the processes of a group.

    Args:
        group: a torch.distributed process group that this process belongs to.
    """

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self.group = group
        self.index = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return all ranks' tensors of one shape, [ranks, *shape]."""
        import torch.distributed as dist

        out = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        # the later name of the same call
        gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
        gather(out, tensor.contiguous(), group=self.group)
        return out.view(self.size, *tensor.shape)

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace `tensor` by its sum over the ranks, in place."""
        self.all_reduce_async(tensor)()
        return tensor

    def all_reduce_async(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Start `all_reduce_`; the sum is in `tensor` once the returned function has been called."""
        import torch.distributed as dist

        return dist.all_reduce(tensor, group=self.group, async_op=True).wait

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elementwise maximum over the ranks."""
        return self.all_gather(tensor).amax(0)

    def broadcast_rows_(self, tensor: torch.Tensor, spans: tuple[tuple[int, int], ...]) -> torch.Tensor:
        """Fill rows `spans[rank]` of every rank's `tensor` from that rank's own."""
        import torch.distributed as dist

        for rank, (start, stop) in enumerate(spans):
            if stop > start:
                dist.broadcast(tensor[start:stop], group=self.group, group_src=rank)
        return tensor


class SingleRank(Ranks):
    """Collectives of a single process that holds the whole vocabulary: no communication."""

    def __init__(self) -> None:
        self.index = 0
        self.size = 1

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[None]

    def all_reduce_async(self, tensor: torch.Tensor) -> Callable[[], object]:
        return lambda: None


class VocabShard(NamedTuple):
    """Column ranges of the vocabulary over the ranks.

    Attributes:
        ranks: ranks over which the vocabulary is sharded.
        spans: (first, one past the last) column of each rank, in order, without the columns that are padding.
    """

    ranks: Ranks
    spans: tuple[tuple[int, int], ...]

    @staticmethod
    def whole(vocab: int) -> VocabShard:
        return VocabShard(SingleRank(), ((0, vocab),))

    @property
    def start(self) -> int:
        """The first column of this rank."""
        return self.spans[self.ranks.index][0]

    @property
    def columns(self) -> int:
        """Number of columns of this rank; 0 where others hold all that count."""
        start, stop = self.spans[self.ranks.index]
        return stop - start

    @property
    def owns_row_terms(self) -> bool:
        """True on the first rank that has columns, which adds the terms of a row that belong to no column."""
        return self.ranks.index == next((rank for rank, (start, stop) in enumerate(self.spans) if stop > start), 0)

    @property
    def max_columns(self) -> int:
        """Largest number of columns of any rank; all ranks plan their chunks by it."""
        return max(stop - start for start, stop in self.spans)

    @property
    def vocab(self) -> int:
        """Number of columns of all ranks."""
        return self.spans[-1][1]

    def local_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Return labels as columns of this rank, `ON_ANOTHER_RANK`, or, on the owner of the row terms, `OUTSIDE`."""
        own = labels - self.start
        own = torch.where((own >= 0) & (own < self.columns), own, ON_ANOTHER_RANK)
        if self.owns_row_terms:
            own = torch.where((labels < 0) | (labels >= self.vocab), OUTSIDE, own)
        return own

    def encode(self) -> str:
        spans = ",".join(f"{start}:{stop}" for start, stop in self.spans)
        return f"{spans} {self.ranks.group.group_name}"

    @staticmethod
    def decode(text: str) -> VocabShard:
        spans, name = text.split(" ", 1)
        pairs = (span.split(":") for span in spans.split(","))
        return VocabShard(Ranks(process_group_by_name(name)), tuple((int(start), int(stop)) for start, stop in pairs))


def process_group_by_name(name: str) -> Any:
    """Return the process group whose `group_name` is `name`."""
    from torch.distributed import distributed_c10d  # a fifth of a second

    only_world = "only the default process group can be resolved by its name"
    return internal(distributed_c10d, "_resolve_process_group", _default_group, only_world)(name)


def _default_group(name: str) -> Any:
    world = torch.distributed.group.WORLD
    if world is None or world.group_name != name:
        raise RuntimeError(f"process group: expected the default one, got {name}; torch cannot resolve others")
    return world


def join_normalisers(parts: torch.Tensor, period: int = 3) -> torch.Tensor:
    """Combine normalisers over each rank's columns, [ranks, numbers, n], to those over all columns, [numbers, n].

    The first of every `period` numbers is a maximum, the others are log sums of exponentials (period 3: at T and 1).
    """
    if len(parts) == 1:
        return parts[0]
    joint = torch.logsumexp(parts, 0)
    joint[::period] = parts[:, ::period].amax(0)
    return joint
