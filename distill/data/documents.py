"""A source's rows tokenised, in one process or several, into files that are read as they are used."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from distill.core.faults import RunError
from distill.data.packing import Documents
from distill.data.sources import Row, RowFault, Source
from distill.data.token_cache import keep, key_of, tokenizer_hash
from distill.data.tokenise import Encoder, Piece, Tally

logger = logging.getLogger(__name__)

BATCH_ROWS = 512
BATCH_CHARACTERS = 1 << 22


def tokenised(
    source: Source, encoder: Encoder, *, max_rows: int | None = None, workers: int = 0, cache: bool = True
) -> tuple[Documents, Tally, str, bool]:
    """All documents of a source, read from disk as they are used.

    Args:
        source: the rows.
        encoder: how they become tokens.
        max_rows: read no more than these.
        workers: processes that tokenise; 0 and 1 mean this one.
        cache: use and keep what is on disk.

    Returns:
        The documents, what happened to the rows, the key, and whether the cache had it.
    """
    template = encoder.template.source if encoder.template else None
    key = key_of(
        source.digest, tokenizer_hash(encoder.tokenizer), template, asdict(encoder.format), encoder.max_length,
        encoder.train_on, max_rows,
    )  # fmt: skip

    def build(folder: Path) -> None:
        logger.info("tokenising %s", source.name)
        numbered = _limited(source.rows(), max_rows)
        tally = _write(folder, _encoded(_batches(numbered), encoder, workers))
        (folder / "tally.json").write_text(json.dumps(vars(tally)))

    folder, found = keep(key, build, cache=cache)
    counts = json.loads((folder / "tally.json").read_text())
    tally = Tally()
    tally.add(Tally(**counts))
    return _read(folder), tally, key, found


def _limited(rows: Iterable[Row | RowFault], limit: int | None) -> Iterator[tuple[int, Row | RowFault]]:
    for number, row in enumerate(rows):
        if limit is not None and number >= limit:
            return
        yield number, row


Batch = list[tuple[int, Row | RowFault]]


def _batches(rows: Iterable[tuple[int, Row | RowFault]]) -> Iterator[Batch]:
    batch: Batch = []
    characters = 0
    for number, row in rows:
        batch.append((number, row))
        if isinstance(row, dict):
            characters += sum(len(value) for value in row.values() if isinstance(value, str))
        if len(batch) >= BATCH_ROWS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encoded(batches: Iterator[Batch], encoder: Encoder, workers: int) -> Iterator[tuple[list[Piece], Tally]]:
    """Encode in order, with at most two batches a worker under way."""
    if workers < 2:
        yield from map(encoder, batches)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_set_encoder, initargs=(encoder,)) as pool:
        waiting: deque[Future[tuple[list[Piece], Tally]]] = deque()
        try:
            for batch in batches:
                waiting.append(pool.submit(_encode_here, batch))
                if len(waiting) >= 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise RunError(
                f"a process that tokenises died; most often the machine ran out of memory: lower data.workers "
                f"(now {workers})"
            ) from error


_encoder_here: Encoder | None = None


def _set_encoder(encoder: Encoder) -> None:
    global _encoder_here
    _encoder_here = encoder


def _encode_here(batch: Batch) -> tuple[list[Piece], Tally]:
    assert _encoder_here is not None
    return _encoder_here(batch)


def _write(folder: Path, encoded: Iterable[tuple[list[Piece], Tally]]) -> Tally:
    tally, lengths, origins = Tally(), [], []
    with (folder / "ids.bin").open("wb") as ids, (folder / "labels.bin").open("wb") as labels:
        for pieces, counts in encoded:
            tally.add(counts)
            for piece in pieces:
                ids.write(piece.ids.tobytes())
                labels.write(piece.labels.tobytes())
                lengths.append(len(piece.ids))
                origins.append(piece.origin)
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    np.save(folder / "offsets.npy", offsets)
    np.save(folder / "origin.npy", np.array(origins, dtype=np.uint64))
    return tally


def _read(folder: Path) -> Documents:
    offsets, origin = np.load(folder / "offsets.npy"), np.load(folder / "origin.npy")
    if offsets[-1] == 0:  # an empty file cannot be mapped
        nothing = np.zeros(0, dtype=np.int32)
        return Documents(nothing, nothing, offsets, origin)
    ids, labels = (np.memmap(folder / name, dtype=np.int32, mode="r") for name in ("ids.bin", "labels.bin"))
    return Documents(ids, labels, offsets, origin)
