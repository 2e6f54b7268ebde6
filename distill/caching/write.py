"""Writing a teacher to disk: every document of the recipe's data once through the teacher, shard by shard.

The documents of training and held-out rows, equal ones once, are packed and cut into shards by a plan that follows from
the data alone. Each process takes every n-th shard and writes it whole or not at all; a later call with the same
settings makes only those that are missing, on as many processes as it likes. Process 0 waits until all shards are there
and closes the cache with its manifest. Copies of a teacher have nothing to tell each other. Where the processes hold
shards of one, each of its layers is gathered from all of them when it is called, so that all make the same number of
calls: one that has nothing left to write passes padding through it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from distill.core.errors import differences
from distill.core.labels import shift_labels
from distill.core.ranks import world_size
from distill.core.units import GIB
from distill.data.collator import Collator
from distill.data.packing import best_fit
from distill.teachers.cache.format import (
    KEY_BYTES,
    MANIFEST,
    PLAN,
    Plan,
    bytes_a_token,
    documents_of,
    read_json,
    rows_of,
    shard_path,
    write_signed,
    write_tensors,
)
from distill.teachers.cache.plan import EncodableTeacher, LogitHead, shard_of, stored_tensors

SHARDS, LEAST_ROWS = 64, 32
PAD = 0  # any token
BEGINS_WITHIN_S = 1800.0  # machines load a teacher at different speeds


class Entry(NamedTuple):
    """A document to be cached: where its tokens are, and what it will take."""

    key: bytes
    split: int
    row: int
    start: int
    stop: int
    learned: int


class Work(NamedTuple):
    """What is to be written.

    Attributes:
        entries: the documents, each once.
        shards: for each shard its rows, for each row the numbers of its documents.
    """

    entries: Sequence[Entry]
    shards: Sequence[Sequence[np.ndarray]]

    @property
    def learned(self) -> int:
        """Positions to store."""
        return sum(entry.learned for entry in self.entries)

    def learned_in(self, shard: int) -> int:
        """Positions of one shard."""
        return sum(self.entries[number].learned for row in self.shards[shard] for number in row)

    def digest(self) -> str:
        """Hash of the documents in the order of the shards: two plans with the same files have the same."""
        digest = hashlib.blake2b(digest_size=16)
        for shard in self.shards:
            digest.update(b"shard")
            for row in shard:
                for number in row:
                    digest.update(self.entries[number].key)
        return digest.hexdigest()


def plan_work(splits: Sequence[Any], *, width: int, max_length: int, packing: bool, shard_bytes: int) -> Work:
    """Which documents go into which shard.

    Args:
        splits: data sets of rows.
        width: bytes of a stored position.
        max_length: tokens of a row that is given to the teacher.
        packing: several documents may share one; else they are sorted by length, to save padding.
        shard_bytes: about how large a shard is at most. Few data make `SHARDS`, that many processes have some to write,
            unless these had fewer than `LEAST_ROWS` of full length, which fill the teacher's batches.
    """
    entries, seen = [], set()
    for split, rows in enumerate(splits):
        for number, row in enumerate(rows_of(rows)):
            for document in documents_of(row):
                if document.key not in seen:
                    seen.add(document.key)
                    count = len(document.predicting)
                    entries.append(Entry(document.key, split, number, document.start, document.stop, count))
    if not entries:
        raise ValueError("data.source: nothing to learn in it, so nothing to cache")
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


class Job(NamedTuple):
    """A cache to be written: its folder, its plan, the documents."""

    folder: Path
    plan: Plan
    work: Work


def open_folder(folder: Path, plan: Plan, *, first: bool) -> bool:
    """Begin a cache in `folder`, or continue the one that has this plan. Returns whether it is complete already.

    The first process begins; others wait for it, since they write into its folder.

    Raises:
        ValueError: the folder holds something else, or a cache of another plan, with the first difference; or the
            first process has not begun in `BEGINS_WITHIN_S`.
    """
    until = time.monotonic() + BEGINS_WITHIN_S
    while (begun := read_json(folder / PLAN)) is None and not first:
        if time.monotonic() > until:
            raise ValueError(
                f"--out: the first process began no cache in {folder} within {BEGINS_WITHIN_S / 60:.0f} minutes; "
                "name a folder that all machines share"
            )
        time.sleep(0.05)
    if begun is None:
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"--out: {folder} is not empty and holds no cache; name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        write_signed(folder / PLAN, plan)
        return False
    # another patch release makes no other cache
    for name, old, new in differences({**begun, "versions": None}, {**plan, "versions": None}):
        raise ValueError(
            f"--out: {folder} holds a cache that was begun with other settings: {name} was {old!r}, now {new!r}; "
            "name another folder, or delete that one"
        )
    return (folder / MANIFEST).is_file()


def require_room(job: Job, extra: int = 0) -> tuple[int, int]:
    """Bytes that the cache takes and that are still to be written; `extra` for head and student.

    Raises:
        ValueError: the disk has less.
    """
    folder, plan, work = job
    width = bytes_a_token(plan)
    total = width * work.learned + (KEY_BYTES + 16) * len(work.entries) + extra
    missing = missing_shards(folder, work)
    left = sum(width * work.learned_in(number) for number in missing) + extra
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    if left > free:
        raise ValueError(
            f"--out: the cache needs {left / GIB:,.1f} GiB more ({width} bytes a token), and {there} has "
            f"{free / GIB:,.1f} GiB free; use fewer tokens (--top-k, data.max_rows) or another disk"
        )
    return total, left


def missing_shards(folder: Path, work: Work) -> list[int]:
    """Numbers of the shards that are still to be written."""
    return [number for number in range(len(work.shards)) if not shard_path(folder, number).is_file()]


def write_shards(
    job: Job,
    splits: Sequence[Any],
    teacher: EncodableTeacher,
    *,
    batch_size: int,
    missing: Sequence[int] | None = None,
    advance: Callable[[int], None] = lambda positions: None,
) -> None:
    """Write this process's missing shards; process 0 then waits for those of the others.

    Args:
        job: what is written.
        splits: the data sets of rows.
        teacher: that is asked.
        batch_size: rows given to the teacher at once.
        missing: from `missing_shards`, of a sharded teacher the same on all processes; None to look here.
        advance: told how many positions were stored, as they are; process 0 hears of all processes.
    """
    rank, world = int(os.environ.get("RANK", "0")), world_size()
    tables = [rows.with_format("numpy") if hasattr(rows, "with_format") else rows for rows in splits]
    missing = missing_shards(job.folder, job.work) if missing is None else missing
    mine = [number for number in missing if number % world == rank]
    others = set(missing) - set(mine) if rank == 0 else set()
    for number in set(range(len(job.work.shards))) - set(missing):
        advance(job.work.learned_in(number))

    def look() -> None:
        for number in [number for number in others if shard_path(job.folder, number).is_file()]:
            others.remove(number)
            advance(job.work.learned_in(number))

    def batch_done(positions: int) -> None:
        advance(positions)
        look()

    for number in mine:
        tensors = shard_tensors(job, number, tables, teacher, batch_size, batch_done)
        write_tensors(shard_path(job.folder, number), tensors)
    for _ in range(calls_left(job.work, missing, batch_size, rank, world) if teacher.sharded else 0):
        padding = Collator(PAD, omit_plain_positions=True)([])
        teacher.hidden_states({name: tensor.to(teacher.device) for name, tensor in padding.items()})
        look()
    while others:
        look()
        time.sleep(0.2 if others else 0)


def calls_left(work: Work, missing: Sequence[int], batch_size: int, rank: int, world: int) -> int:
    """By how many calls of the teacher another process has more to write than this one."""
    calls = [0] * world
    for number in missing:
        calls[number % world] += -(-len(work.shards[number]) // batch_size)
    return max(calls) - calls[rank]


def shard_tensors(
    job: Job,
    number: int,
    tables: Sequence[Any],
    teacher: EncodableTeacher,
    batch_size: int,
    advance: Callable[[int], None],
) -> dict[str, torch.Tensor]:
    """Run the teacher over the documents of one shard."""
    _, plan, work = job
    generator = torch.Generator(teacher.device).manual_seed(plan["seed"] * 1_000_003 + number)
    rows = work.shards[number]
    parts: dict[str, list[torch.Tensor]] = {}
    collate = Collator(PAD, omit_plain_positions=not teacher.needs_positions)
    for start in range(0, len(rows), batch_size):
        made = [_laid_out([_tokens(work.entries[n], tables) for n in row]) for row in rows[start : start + batch_size]]
        batch = {name: tensor.to(teacher.device) for name, tensor in collate(made).items()}
        hidden = teacher.hidden_states(batch).flatten(0, 1)[batch["valid_rows"]]
        labels = shift_labels(batch["labels"]).flatten()[batch["valid_rows"]]
        for name, tensor in stored_tensors(
            plan, hidden, labels, LogitHead(teacher.head, teacher.transform), generator
        ).items():
            parts.setdefault(name, []).append(tensor.cpu())
        advance(len(batch["valid_rows"]))
    documents = [work.entries[n] for row in rows for n in row]
    tensors = {name: torch.cat(values) for name, values in parts.items()}
    return shard_of([entry.key for entry in documents], [entry.learned for entry in documents], tensors)


def _tokens(entry: Entry, tables: Sequence[Any]) -> dict[str, np.ndarray]:
    row = tables[entry.split][entry.row]
    ids = np.asarray(row["input_ids"])[entry.start : entry.stop]
    labels = np.asarray(row.get("labels", row["input_ids"]))[entry.start : entry.stop]
    return {"input_ids": ids, "labels": labels, "position_ids": np.arange(len(ids))}


def _laid_out(documents: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
    return {name: np.concatenate([document[name] for document in documents]) for name in documents[0]}
