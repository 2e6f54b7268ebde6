"""Each row of an epoch is taken once, however many processes share it.

Micro-batches go to the processes in turn. Where those of an epoch do not divide by the processes, accelerate fills up
with the epoch's first rows, which then count twice: in the loss and its divisor, and in an evaluation. Here the rest
stays as short as it is, and a process that has nothing left gets a micro-batch without rows. A collator makes one row
of padding of it, of which nothing is learned: it goes through both models, so that every process takes part in what
they do together (DDP, FSDP2, sharded teachers), and gives a loss and gradients of 0.

    loader = each_row_once(accelerator.prepare(loader), processes)

Which rows a step takes then follows from its size alone, not from the processes that share it nor from the rows that
go through a model at a time; what a resumed run skips is counted in micro-batches, and these are as many as before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from distill.data.collator import Collator

log = logging.getLogger(__name__)


class EvenBatches(BatchSampler):
    """Batches of what a sampler gives, the last one short, then empty ones up to a multiple of `processes`."""

    def __init__(self, sampler: Iterable[int], batch_size: int, processes: int) -> None:
        super().__init__(sampler, batch_size, drop_last=False)
        self.processes = processes

    def __iter__(self) -> Iterator[list[int]]:
        """Lists of row numbers."""
        number = 0
        for number, batch in enumerate(super().__iter__(), 1):  # noqa: B007
            yield batch
        for _ in range(-number % self.processes):
            yield []

    def __len__(self) -> int:
        """Batches of all processes, empty ones too."""
        return -(-super().__len__() // self.processes) * self.processes


def each_row_once(loader: Any, processes: int) -> Any:
    """Have a loader that accelerate prepared repeat no rows where an epoch ends; returns it.

    Args:
        loader: cut over the processes by accelerate, not used yet. What cannot be told to (a data set that is only
            iterated, a sampler that cuts by itself) stays as it is, and a warning says so.
    """
    shard = loader.batch_sampler
    if processes == 1 or getattr(shard, "drop_last", False):
        return loader
    if not isinstance(shard, BatchSamplerShard) or shard.num_processes == 1:
        log.warning(
            "rows of %s are cut over the processes elsewhere: at the end of an epoch some may come twice, and count "
            "twice", type(loader.dataset).__name__,
        )  # fmt: skip
        return loader
    assert shard.batch_size is not None
    size = shard.batch_size // shard.num_processes if shard.split_batches else shard.batch_size
    shard.batch_sampler = EvenBatches(shard.batch_sampler.sampler, size, shard.num_processes)
    # without a size the shard deals whole batches in turn, whatever they hold, and fills none up
    shard.batch_size, shard.split_batches = None, False
    return loader


class OrPadding:
    """A collator of somebody else's, which need not know of batches without rows."""

    def __init__(self, collator: Callable[[list[Any]], dict[str, Any]], padding: Collator) -> None:
        self.collator, self.padding = collator, padding

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        """Collate rows, where there are any."""
        return self.collator(rows) if rows else self.padding(rows)
