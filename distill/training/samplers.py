"""Order of the training rows of an epoch, and their distribution over several processes without duplicates.

`BlockSampler` shuffles rows of which those that belong together stay neighbours, so that they share a step.

Micro-batches go to the processes in turn. Where their number is not a multiple of the processes, accelerate repeats the
epoch's first rows, which then count twice in the loss, its divisor and evaluations. Here the last batch stays short,
and a process that has no rows left gets an empty micro-batch. The collator turns it into one row of padding, masked
from the loss: it goes through both models, so that every process takes part in the collectives (DDP, FSDP2, sharded
teachers), with a loss and gradients of 0.

    loader = without_repeated_rows(accelerator.prepare(loader), processes)

So the rows of a step depend on its size alone, not on the number of processes or the micro-batch size, and a resumed
run skips as many micro-batches as before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, Sampler

from distill.data.mixing import MixedRows
from distill.data.packing import BLOCK

log = logging.getLogger(__name__)


class BlockSampler(Sampler[int]):
    """Numbers of rows, in an order that follows from seed and epoch: blocks are shuffled, rows within them are not.

    Args:
        rows: Data set with the column `BLOCK`.
    """

    def __init__(self, rows: Any, seed: int) -> None:
        self.rows = rows
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        blocks = sampler_blocks(self.rows)
        runs = np.split(np.arange(len(blocks)), np.flatnonzero(blocks[1:] != blocks[:-1]) + 1)
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(runs))
        return (int(number) for run in order for number in runs[run])

    def __len__(self) -> int:
        return len(self.rows)


def sampler_blocks(rows: Any) -> np.ndarray:
    """Return the block of each row: int [rows]."""
    own = rows.rows if isinstance(rows, MixedRows) else rows
    blocks = np.concatenate(own.select_columns([BLOCK])[:][BLOCK])
    return blocks[rows.numbers] if isinstance(rows, MixedRows) else blocks


class EmptyPaddedBatchSampler(BatchSampler):
    """Batch sampler whose last batch may be short, followed by empty ones up to a multiple of `processes`."""

    def __init__(self, sampler: Iterable[int], batch_size: int, processes: int) -> None:
        super().__init__(sampler, batch_size, drop_last=False)
        self.processes = processes

    def __iter__(self) -> Iterator[list[int]]:
        number = 0
        for number, batch in enumerate(super().__iter__(), 1):  # noqa: B007
            yield batch
        for _ in range(-number % self.processes):
            yield []

    def __len__(self) -> int:
        """Return the number of batches of all processes, including empty ones."""
        return -(-super().__len__() // self.processes) * self.processes


def without_repeated_rows(loader: Any, processes: int) -> Any:
    """Make a loader prepared by accelerate repeat no rows at the end of an epoch; returns it.

    Args:
        loader: Loader sharded over the processes by accelerate, not used yet. One that accelerate does not shard by a
            batch sampler (an iterable data set, a sampler that shards by itself) stays as it is, with a warning.
    """
    shard = loader.batch_sampler
    is_done = isinstance(getattr(shard, "batch_sampler", None), EmptyPaddedBatchSampler)
    if processes == 1 or is_done or getattr(shard, "drop_last", False):
        return loader
    if not isinstance(shard, BatchSamplerShard) or shard.num_processes == 1:
        log.warning(
            "rows of %s are not distributed by a batch sampler: at the end of an epoch some may be repeated and count "
            "twice",
            type(loader.dataset).__name__,
        )
        return loader
    assert shard.batch_size is not None
    size = shard.batch_size // shard.num_processes if shard.split_batches else shard.batch_size
    shard.batch_sampler = EmptyPaddedBatchSampler(shard.batch_sampler.sampler, size, shard.num_processes)
    # without a batch size accelerate hands out whole batches in turn, of any length, and pads none
    shard.batch_size = None
    shard.split_batches = False
    return loader
