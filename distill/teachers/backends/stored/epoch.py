"""An epoch of a stored teacher's targets over a recipe's data, after which every document is stored: `distill cache`.

The rows are read in batches, longest first, each process every n-th batch, whatever is stored already; so any number of
processes goes on with what any other began. Parts are written while the epoch goes on. Copies of a teacher do not
communicate: process 0 waits until the parts of all are there, and completes the store. A sharded teacher gathers each
layer from all processes when it is called, so that all make the same number of calls: one without rows left passes
padding.
"""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from distill.core.errors import RunError
from distill.core.ranks import world_size
from distill.data.collator import Collator, move_batch
from distill.models.patch.document_rope import follows_length
from distill.objectives.targets import Batch
from distill.teachers.backends.stored.format import bytes_a_token, rows_of, stored_documents
from distill.teachers.backends.stored.store import Store
from distill.teachers.backends.stored.teacher import StoredTeacher, documents_in

LOOK_S = 0.2
STALLED_S = 3600.0  # without a document of another process, far longer than a part takes
PARTS = 64
LEAST_ROWS = 32


class Row(NamedTuple):
    """A row of the data, and the positions that are stored of documents that no row before it has."""

    split: int
    number: int
    tokens: int
    positions: int


def rows_to_read(splits: Sequence[Any]) -> list[Row]:
    """Return the rows of data sets that have trained tokens, the longest first."""
    found = []
    seen = set[bytes]()
    for split, rows in enumerate(splits):
        for number, row in enumerate(rows_of(rows)):
            documents = {d.key: len(d.predicting) for d in stored_documents(row) if d.key not in seen}
            if documents:
                found.append(Row(split, number, len(row["input_ids"]), sum(documents.values())))
                seen.update(documents)
    return sorted(found, key=lambda row: -row.tokens)


def fill_store(
    teacher: StoredTeacher,
    splits: Sequence[Any],
    *,
    batch_size: int,
    part_bytes: int,
    advance: Callable[[int], None] = lambda positions: None,
) -> None:
    """Store the documents of data sets; every process calls this.

    Args:
        teacher: whose store is filled.
        splits: the data sets of rows, as the teacher reads them.
        batch_size: rows given to the teacher at once.
        part_bytes: about how many bytes wait at most before a part is written. Few data make `PARTS`, unless these had
            fewer than `LEAST_ROWS` of full length.
        advance: called with the number of positions of all processes, as this one goes on.

    Raises:
        ValueError: another run stores into the folder.
    """
    store = teacher.store
    if not store.writes:
        raise ValueError(f"--out: another run stores into {store.folder}; wait for it, or name another folder")
    rows = rows_to_read(splits)
    width = bytes_a_token(store.manifest)
    least = LEAST_ROWS * width * max((row.tokens for row in rows), default=0)
    store.most_waiting = min(part_bytes, max(width * sum(row.positions for row in rows) // PARTS, least))
    # those that follow are submitted to the teacher, where it prefetches: a server answers several at once
    ahead = collections.deque[tuple[Batch | None, int]]()
    for batch, positions in batches_of(teacher, splits, rows, batch_size):
        if batch is not None:
            teacher.prefetch(batch)
        ahead.append((batch, positions))
        if len(ahead) > teacher.prefetch_depth:
            _store_batch(teacher, *ahead.popleft(), advance)
    while ahead:
        _store_batch(teacher, *ahead.popleft(), advance)
    store.write()
    store.land()
    # This process's parts are on disk. Copies of a teacher do not communicate, so process 0 alone maps the parts of
    # all, until none is missing; of a sharded teacher all processes flush, together.
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first or teacher.is_collective():
        store.flush()
    if is_first and not teacher.is_collective():
        _wait_for_others(store)


def batches_of(
    teacher: StoredTeacher, splits: Sequence[Any], rows: Sequence[Row], batch_size: int
) -> Iterator[tuple[Batch | None, int]]:
    """Yield the batches of this process, on its device, each with the positions that all processes store at once.

    A batch is None where this process has no rows left, or all of them are stored; a sharded teacher gets one anyway.
    """
    rank = int(os.environ.get("RANK", "0"))
    at_once = batch_size * world_size()
    tables = [rows.with_format("numpy") if hasattr(rows, "with_format") else rows for rows in splits]
    omit_positions = not any(map(follows_length, teacher.models.values()))
    collate = Collator(0, omit_plain_positions=omit_positions, columns=teacher.columns)
    # Every process goes through the same blocks of rows and takes its own part of each, so that a sharded teacher is
    # called equally often by all of them.
    for start in range(0, len(rows), at_once):
        positions = sum(row.positions for row in rows[start : start + at_once])
        mine = rows[start + rank * batch_size : start + (rank + 1) * batch_size]
        if not mine and not teacher.is_collective():
            yield None, positions
            continue
        # of no rows, too: padding, for a sharded teacher that the others call now
        batch = collate([tables[row.split][row.number] for row in mine])
        keys = [document.key for row in documents_in(batch).rows for document in row]
        if all(map(teacher.store.has, keys)) and not teacher.is_collective():
            yield None, positions
            continue
        yield move_batch(batch, teacher.device), positions


def _store_batch(teacher: StoredTeacher, batch: Batch | None, positions: int, advance: Callable[[int], None]) -> None:
    if batch is not None:
        teacher.targets(batch)
    advance(positions)


def _wait_for_others(store: Store) -> None:
    """Wait until the other processes have stored their documents.

    Raises:
        RunError: None has stored any for long; where nothing watches the processes, another one may have ended.
    """
    left = len(store.missing)
    since = time.monotonic()
    while left:
        time.sleep(LOOK_S)
        store.flush()
        now = len(store.missing)
        if now < left:
            since = time.monotonic()
        elif time.monotonic() - since > STALLED_S:
            raise RunError(
                f"--out: {store.folder}: the other processes have stored nothing for {STALLED_S:.0f} s, and {now:,} "
                "documents are missing: one of them has ended or hangs; run the same command again, which continues"
            )
        left = now
