"""Shuffled rows of which those that belong together stay neighbours, so that they share a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from distill.data.mixing import MixedRows
from distill.data.packing import BLOCK


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
