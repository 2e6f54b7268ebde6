"""One pass of a stored teacher over a recipe's data, shard by shard.

The documents of training and held-out rows, equal ones once, are packed and cut into shards by a plan that follows from
the data alone. Each process queries the teacher for every n-th shard, whose file is written whole or not at all; a
later call makes only those that are missing, on any number of processes. Process 0 waits until all are stored and
closes the store. Copies of a teacher do not communicate. A sharded teacher gathers each layer from all processes when
it is called, so that all make the same number of calls: one with nothing left to write passes padding through it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from distill.core.ranks import world_size
from distill.data.collator import Collator
from distill.data.packing import best_fit
from distill.models.patch.document_rope import follows_length
from distill.teachers.backends.stored.format import documents_of, rows_of
from distill.teachers.backends.stored.online_store import Store
from distill.teachers.backends.stored.online_teacher import KeptTeacher
from distill.teachers.capabilities import is_collective

SHARDS, LEAST_ROWS = 64, 32
PAD = 0  # any token


class Entry(NamedTuple):
    """A document to be cached: where its tokens are, and how many positions are stored."""

    key: bytes
    split: int
    row: int
    start: int
    stop: int
    learned: int


class Work(NamedTuple):
    """Documents to write, and their shards.

    Attributes:
        entries: the documents, each once.
        shards: Rows of each shard, each as the numbers of its documents.
    """

    entries: Sequence[Entry]
    shards: Sequence[Sequence[np.ndarray]]

    @property
    def learned(self) -> int:
        """Number of positions to store."""
        return sum(entry.learned for entry in self.entries)

    def learned_in(self, shard: int) -> int:
        """Return the number of positions of one shard."""
        return sum(self.entries[number].learned for row in self.shards[shard] for number in row)

    def keys_in(self, shard: int) -> Iterator[bytes]:
        """Yield the keys of the documents of one shard."""
        return (self.entries[number].key for row in self.shards[shard] for number in row)


def plan_work(splits: Sequence[Any], *, width: int, max_length: int, packing: bool, shard_bytes: int) -> Work:
    """Assign the documents to shards.

    Args:
        splits: data sets of rows.
        width: bytes of a stored position.
        max_length: tokens of a row that is given to the teacher.
        packing: several documents may share one; else they are sorted by length, to save padding.
        shard_bytes: about how large a shard is at most. Few data make `SHARDS`, so that every process has some to
            write, unless these had fewer than `LEAST_ROWS` of full length, which fill the teacher's batches.
    """
    entries, seen = [], set()
    for split, rows in enumerate(splits):
        for number, row in enumerate(rows_of(rows)):
            for document in documents_of(row):
                if document.key not in seen:
                    seen.add(document.key)
                    count = len(document.predicting)
                    entries.append(Entry(document.key, split, number, document.start, document.stop, count))
    lengths = np.array([entry.stop - entry.start for entry in entries])
    if packing:
        groups = best_fit(lengths, max_length)
    else:
        groups = [np.array([number]) for number in np.argsort(-lengths, kind="stable")]
    total = width * sum(entry.learned for entry in entries)
    shard_bytes = min(shard_bytes, max(total // SHARDS, LEAST_ROWS * width * max_length))
    shards: list[list[np.ndarray]] = [[]]
    size = 0
    for group in groups:
        if size >= shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(group)
        size += width * sum(entries[number].learned for number in group)
    return Work(entries, shards)


def missing_shards(store: Store, work: Work) -> list[int]:
    """Return the numbers of the shards of which a document is not stored."""
    return [n for n in range(len(work.shards)) if not all(map(store.has, work.keys_in(n)))]


def fill(
    kept: KeptTeacher,
    work: Work,
    splits: Sequence[Any],
    *,
    batch_size: int,
    missing: Sequence[int] | None = None,
    advance: Callable[[int], None] = lambda positions: None,
) -> None:
    """Store this process's missing shards; process 0 then waits for those of the others and closes the store.

    Args:
        kept: the teacher, whose store is filled.
        work: Contents to write.
        splits: the data sets of rows, as the teacher reads them.
        batch_size: rows given to the teacher at once.
        missing: Result of `missing_shards`, for a sharded teacher the same on all processes; None to compute it.
        advance: called with the number of positions after they are stored; on process 0 for those of all processes.

    Raises:
        ValueError: another run stores into the folder.
    """
    store, rank, world = kept.store, int(os.environ.get("RANK", "0")), world_size()
    if not store.writes:
        raise ValueError(f"--out: another run stores into {store.folder}; wait for it, or name another folder")
    store.most_waiting = math.inf
    tables = [rows.with_format("numpy") if hasattr(rows, "with_format") else rows for rows in splits]
    missing = missing_shards(store, work) if missing is None else missing
    mine = [number for number in missing if number % world == rank]
    others = set(missing) - set(mine) if rank == 0 else set()
    for number in set(range(len(work.shards))) - set(missing):
        advance(work.learned_in(number))

    def look() -> None:
        if others:
            store.look_again()
        for number in others - set(missing_shards(store, work)) if others else ():
            others.remove(number)
            advance(work.learned_in(number))

    collate = kept.collate(Collator(PAD, omit_plain_positions=not any(map(follows_length, kept.models.values()))))

    def ask(rows: Sequence[np.ndarray], generator: torch.Generator | None) -> int:
        made = [_laid_out([_tokens(work.entries[n], tables) for n in row]) for row in rows]
        batch = {name: value.to(kept.device) for name, value in collate(made).items()}
        kept.fill(batch, generator)
        return len(batch["valid_rows"])

    for number in mine:
        generator = torch.Generator(kept.device).manual_seed(store.manifest["seed"] * 1_000_003 + number)
        rows = work.shards[number]
        for start in range(0, len(rows), batch_size):
            advance(ask(rows[start : start + batch_size], generator))
            look()
        store.write(number)
    store.land()
    for _ in range(calls_left(work, missing, batch_size, rank, world) if is_collective(kept) else 0):
        ask([], None)
        look()
    while others:
        look()
        time.sleep(0.2 if others else 0)
    if is_collective(kept) or rank == 0:
        store.flush()


def calls_left(work: Work, missing: Sequence[int], batch_size: int, rank: int, world: int) -> int:
    """Return how many more calls of the teacher the busiest process makes than this one."""
    calls = [0] * world
    for number in missing:
        calls[number % world] += -(-len(work.shards[number]) // batch_size)
    return max(calls) - calls[rank]


def _tokens(entry: Entry, tables: Sequence[Any]) -> dict[str, np.ndarray]:
    row = tables[entry.split][entry.row]
    ids = np.asarray(row["input_ids"])[entry.start : entry.stop]
    labels = np.asarray(row.get("labels", row["input_ids"]))[entry.start : entry.stop]
    return {"input_ids": ids, "labels": labels, "position_ids": np.arange(len(ids))}


def _laid_out(documents: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
    return {name: np.concatenate([document[name] for document in documents]) for name in documents[0]}
