"""Tokenisation of a source, in one process or several, into memory-mapped files."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from distill.core import console
from distill.core.errors import RunError
from distill.data.packing import Documents, Ragged
from distill.data.row_counts import RowCounts
from distill.data.rows import RawRow, RowFault, row_size
from distill.data.sources import DataSource
from distill.data.token_cache import cache_key, cached_folder
from distill.data.tokenise import RowBatch, RowEncoder, TokenisedDocument

logger = logging.getLogger(__name__)

BATCH_ROWS = 512
BATCH_CHARACTERS = 1 << 22


def tokenise_documents(
    source: DataSource, encoder: RowEncoder, *, max_rows: int | None = None, workers: int = 0, cache: bool = True
) -> tuple[Documents, RowCounts, str, bool]:
    """Return all documents of a source, memory-mapped.

    Args:
        workers: Number of tokenising processes; 0 and 1 mean this process.
        cache: Use and write the cache on disk.

    Returns:
        The documents, the tally of rows, the cache key, and whether it was found in the cache.
    """
    key = cache_key(source.digest, *encoder.settings(), max_rows)

    def build(folder: Path) -> None:
        logger.info("tokenising %s", source.name)
        batches = row_batches(enumerate(islice(source.rows(), max_rows)))
        tally = _write(folder, tuple(encoder.columns), encoded_batches(batches, encoder, workers))
        (folder / "tally.json").write_text(json.dumps(vars(tally)))

    folder, cached = cached_folder(key, build, cache=cache)
    tally = RowCounts()
    tally.add(RowCounts(**json.loads((folder / "tally.json").read_text())))
    names = encoder.columns
    bounds = {name: np.load(folder / f"{name}.npy") for name in names}
    columns = {  # an empty file cannot be mapped
        name: Ragged(np.memmap(folder / f"{name}.bin", np.int32, "r") if ends[-1] else np.zeros(0, np.int32), ends)
        for name, ends in bounds.items()
    }
    pointers = {name: into for name, into in names.items() if into}
    origin = np.load(folder / "origin.npy")
    rows = np.load(folder / "rows.npy")
    return Documents(columns, origin, pointers, rows), tally, key, cached


def gather_documents(documents: Sequence[TokenisedDocument], names: Mapping[str, tuple[str, ...]]) -> Documents:
    """Return documents in memory, as `tokenise_documents` returns those of a whole source."""
    columns: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for document in documents:
        for name, values in document.columns().items():
            columns[name].append(values.reshape(-1))  # spans are four numbers each, as `_write` counts them
    empty = np.zeros(0, dtype=np.int32)
    return Documents(
        {
            name: Ragged(np.concatenate([empty, *lists]), np.cumsum([0, *map(len, lists)], dtype=np.int64))
            for name, lists in columns.items()
        },
        np.array([document.origin for document in documents], dtype=np.uint64),
        {name: into for name, into in names.items() if into},
        np.array([(document.row, document.message) for document in documents], dtype=np.int32).reshape(-1, 2),
    )


def row_batches(rows: Iterable[tuple[int, RawRow | RowFault]]) -> Iterator[RowBatch]:
    batch: RowBatch = []
    characters = 0
    for number, row in rows:
        batch.append((number, row))
        if isinstance(row, dict):
            characters += row_size(row)
        if len(batch) >= BATCH_ROWS or characters >= BATCH_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


def encoded_batches(
    batches: Iterator[RowBatch], encoder: RowEncoder, workers: int
) -> Iterator[tuple[Iterable[TokenisedDocument], RowCounts]]:
    """Yield each batch's documents in order, with a tally that is complete once they are read.

    With several processes, at most two batches per worker are in flight.
    """
    if workers < 2:
        for batch in batches:
            tally = RowCounts()
            yield encoder.documents(batch, tally), tally
        return
    # spawned, not forked: threads of the tokenizer and their locks do not survive a fork
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_set_encoder, initargs=(encoder,)) as pool:
        waiting: deque[Future[tuple[list[TokenisedDocument], RowCounts]]] = deque()
        try:
            for batch in batches:
                waiting.append(pool.submit(_encode_here, batch))
                # the oldest first: documents come in the order of their batches, whichever worker is done sooner
                if len(waiting) >= 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise RunError(
                f"a tokenising process died, most often because the machine ran out of memory: lower data.workers "
                f"(now {workers})"
            ) from error


_encoder_here: RowEncoder | None = None


def _set_encoder(encoder: RowEncoder) -> None:
    global _encoder_here
    _encoder_here = encoder


def _encode_here(batch: RowBatch) -> tuple[list[TokenisedDocument], RowCounts]:
    assert _encoder_here is not None
    return _encoder_here(batch)


def _write(
    folder: Path, names: tuple[str, ...], encoded: Iterable[tuple[Iterable[TokenisedDocument], RowCounts]]
) -> RowCounts:
    """Write a file of int32 per column, its offsets, and where the documents come from."""
    tally = RowCounts()
    origins = []
    rows = []
    lengths: dict[str, list[int]] = {name: [0] for name in names}
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in names}
        for documents, counts in encoded:
            for document in documents:
                for name, values in document.columns().items():
                    files[name].write(values.tobytes())
                    lengths[name].append(values.size)
                origins.append(document.origin)
                rows.append((document.row, document.message))
            tally.add(counts)
            console.advance(counts.rows_read)
    for name in names:
        np.save(folder / f"{name}.npy", np.cumsum(lengths[name], dtype=np.int64))
    np.save(folder / "origin.npy", np.array(origins, dtype=np.uint64))
    np.save(folder / "rows.npy", np.array(rows, dtype=np.int32).reshape(-1, 2))
    return tally
