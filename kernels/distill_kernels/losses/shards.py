"""A head whose vocabulary is cut over the ranks of a group: who holds which columns, and what crosses the wire.

Under tensor parallelism every rank holds some rows of both [V, H] heads, while hidden states, labels and the loss are
the same on all ranks. Logits never leave their rank. Of each token cross the wire

    six fp32 numbers, gathered: maximum and log sum of exps of both models (at T and at T = 1)
    one more, summed, where the divergence is not forward KL: sum(g), which the gradient needs (divergence.py)
    one or, with statistics, eight, summed once at the end: the loss and `TokenStats`
    of a teacher of K tokens, K summed, the student's logits there, and the tail's normaliser with the gathered ones
    of several teachers two more for each but the first, gathered: what normalises the mixture so far and the newcomer
    Hs of dx, summed in fp32: each rank's part comes out of its product in fp32 and the sum is rounded once

Every rank must make the same calls in the same order, so that all cut the batch into the same chunks. A process that
has the whole vocabulary takes the same path by itself (`OneRank`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

OUTSIDE = -1  # a label that no rank holds, kept by the rank that speaks: its probability is 0
ON_ANOTHER_RANK = -2  # a label among another rank's columns


class Ranks:
    """The processes of a group, as the losses use them.

    Args:
        group: a torch.distributed process group that this process belongs to.
    """

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self.group = group
        self.index, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All ranks' tensors of one shape, [ranks, *shape]."""
        import torch.distributed as dist

        out = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        # the later name of the same call
        gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
        gather(out, tensor.contiguous(), group=self.group)
        return out.view(self.size, *tensor.shape)

    def add_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace `tensor` by its sum over the ranks, in place."""
        self.add_later(tensor)()
        return tensor

    def add_later(self, tensor: torch.Tensor) -> Callable[[], object]:
        """As `add_`, beside what follows: the sum is there once the returned function was called."""
        import torch.distributed as dist

        return dist.all_reduce(tensor, group=self.group, async_op=True).wait

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest over the ranks, elementwise."""
        return self.gather(tensor).amax(0)

    def complete_(self, tensor: torch.Tensor, spans: tuple[tuple[int, int], ...]) -> torch.Tensor:
        """Fill rows `spans[rank]` of every rank's `tensor` from that rank's own."""
        import torch.distributed as dist

        for rank, (start, stop) in enumerate(spans):
            if stop > start:
                dist.broadcast(tensor[start:stop], group=self.group, group_src=rank)
        return tensor


class OneRank(Ranks):
    """A process that holds the whole vocabulary: nothing is told to anybody."""

    def __init__(self) -> None:
        self.index, self.size = 0, 1

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[None]

    def add_later(self, tensor: torch.Tensor) -> Callable[[], object]:
        return lambda: None


class VocabShard(NamedTuple):
    """Which columns of the vocabulary every rank computes.

    Attributes:
        ranks: the group (`Ranks`, or what stands for it in a test).
        spans: (first, one past the last) column of each rank, in order, without the columns that are padding.
    """

    ranks: Ranks
    spans: tuple[tuple[int, int], ...]

    @staticmethod
    def whole(vocab: int) -> VocabShard:
        """All columns on one rank."""
        return VocabShard(OneRank(), ((0, vocab),))

    @property
    def start(self) -> int:
        """The first column of this rank."""
        return self.spans[self.ranks.index][0]

    @property
    def columns(self) -> int:
        """Columns of this rank; 0 where others hold all that count."""
        start, stop = self.spans[self.ranks.index]
        return stop - start

    @property
    def speaks(self) -> bool:
        """Whether this rank, the first that has columns, adds what belongs to a row and not to its columns."""
        return self.ranks.index == next((rank for rank, (start, stop) in enumerate(self.spans) if stop > start), 0)

    @property
    def widest(self) -> int:
        """The most columns of any rank, by which all plan their chunks."""
        return max(stop - start for start, stop in self.spans)

    @property
    def vocab(self) -> int:
        """Columns of all ranks."""
        return self.spans[-1][1]

    def own_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Labels as columns of this rank, `ON_ANOTHER_RANK`, or (the rank that speaks) `OUTSIDE`."""
        own = labels - self.start
        own = torch.where((own >= 0) & (own < self.columns), own, ON_ANOTHER_RANK)
        if self.speaks:
            own = torch.where((labels < 0) | (labels >= self.vocab), OUTSIDE, own)
        return own

    def encode(self) -> str:
        """As text, for operators whose arguments must be plain."""
        spans = ",".join(f"{start}:{stop}" for start, stop in self.spans)
        return f"{spans} {self.ranks.group.group_name}"

    @staticmethod
    def decode(text: str) -> VocabShard:
        """The inverse of `encode`."""
        spans, name = text.split(" ", 1)
        pairs = (span.split(":") for span in spans.split(","))
        return VocabShard(Ranks(group_named(name)), tuple((int(start), int(stop)) for start, stop in pairs))


def group_named(name: str) -> Any:
    """The process group whose `group_name` this is."""
    from torch.distributed import distributed_c10d

    resolve: Any = distributed_c10d._resolve_process_group
    return resolve(name)


def join_normalisers(parts: torch.Tensor, period: int = 3) -> torch.Tensor:
    """Maxima and logs of sums of exps over each rank's columns, [ranks, numbers, n] -> over all columns, [numbers, n].

    The first of every `period` numbers is a maximum: of both models, with the log sums at T and at T = 1, period 3.
    """
    if len(parts) == 1:
        return parts[0]
    joint = torch.logsumexp(parts, 0)
    joint[::period] = parts[:, ::period].amax(0)
    return joint
