"""Streaming data: rows that are read, tokenised and packed while training.

    stream = splits.stream                                     # of `load_data` with `data.streaming: true`
    rows = stream.rows(800, batch_rows=4, rank=0, ranks=1)     # of 200 micro-batches
    rows[0]                                                    # as a row of data that are read whole

A source is read in windows, each of as many batches of its rows as make `data.shuffle_buffer` documents. The documents
of a window are shuffled and packed together, by the functions of data that are read whole. So a window follows from the
place where it begins, and a stream that is resumed goes on from the place of a window: its rows are read and tokenised
again, everything before them is skipped. When a source ends, its last window is a short one, and it begins again.

Of several processes each reads every n-th row of a source. The rows of several sources alternate by their weights.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from distill.core.units import plural
from distill.data.documents import encoded_batches, gather_documents, row_batches
from distill.data.packing import Ragged, rows_in_order, shuffle_into_rows
from distill.data.row_counts import RowCounts
from distill.data.rows import RawRow, RowFault
from distill.data.sources import DataSource
from distill.data.tokenise import RowBatch, RowEncoder, TokenisedDocument

logger = logging.getLogger(__name__)

PACKED_IN_ORDER = 1024  # documents that are packed together where the order of the source is kept

Row = dict[str, np.ndarray]


class Place(NamedTuple):
    """Place in a source, before one of its rows.

    Attributes:
        epoch: Number of times that the source was read to its end before.
        shard: Index of the file, or of another part that can be opened alone.
        number: Index of the row in the whole source.
    """

    epoch: int = 0
    shard: int = 0
    row: int = 0
    number: int = 0


class Mark(NamedTuple):
    """Beginning of a window.

    Attributes:
        first: Number of packed rows before it.
        place: Its place in the source.
        rows_read: Rows of the source that were read before it, over all epochs.
        dropped: Number of them that could not be used.
    """

    first: int = 0
    place: Place = Place()
    rows_read: int = 0
    dropped: int = 0


class Window(NamedTuple):
    """Packed rows from one mark to the next."""

    begin: Mark
    end: Mark
    rows: Sequence[Row]
    counts: RowCounts


class Layout(NamedTuple):
    """How documents are put into rows.

    Attributes:
        packing: Several documents share a row; else each has its own.
        capacity: Tokens of a row.
        answer_room: Tokens that the last response of a document may have, in rollouts; 0 without.
        shuffle_buffer: Documents that are shuffled together; 0 keeps the order of the source.
    """

    packing: bool
    capacity: int
    answer_room: int
    shuffle_buffer: int
    seed: int

    @property
    def window(self) -> int:
        """Number of documents of a window, at least."""
        return self.shuffle_buffer or (PACKED_IN_ORDER if self.packing else 1)


class StreamedSource(NamedTuple):
    """A source that is streamed.

    Attributes:
        number: Index of the source, as in the column `row`.
        source: Its rows.
        encoder: Encoder of its rows.
        share: Fraction of the packed rows that are of this source.
        first_row: Number of rows at its beginning that are held out.
        max_rows: Index of the row before which it ends; None for all.
    """

    number: int
    source: DataSource
    encoder: RowEncoder
    share: float
    first_row: int
    max_rows: int | None


class RowStream(NamedTuple):
    """Training data that are streamed.

    Attributes:
        layout: How documents are put into rows.
        held_out: Hashes of the texts that are held out, which are not trained on.
        workers: Number of processes that tokenise ahead; 0 tokenises when rows are needed.
    """

    sources: Sequence[StreamedSource]
    layout: Layout
    held_out: np.ndarray
    workers: int

    def rows(self, count: int, *, batch_rows: int, rank: int, ranks: int) -> StreamedRows:
        """Return the rows of a run, for one of its processes.

        Args:
            count: Number of rows of all processes.
            batch_rows: Rows of a micro-batch; micro-batches go to the processes in turn.
        """
        readers = [
            SourceReader(each, self.layout, self.held_out, workers=self.workers, rank=rank, ranks=ranks)
            for each in self.sources
        ]
        return StreamedRows(readers, count, batch_rows=batch_rows, rank=rank, ranks=ranks)


class SourceReader:
    """Packed rows of one source on one process, by their number; they are read in order."""

    def __init__(
        self, streamed: StreamedSource, layout: Layout, held_out: np.ndarray, *, workers: int, rank: int, ranks: int
    ) -> None:
        self.streamed = streamed
        self.layout = layout
        self.held_out = held_out
        self.workers = workers
        self.rank = rank
        self.ranks = ranks
        self.marks = [Mark()]
        self.unread_words: set[str] = set()  # columns that a warning was given of
        self.most_dropped = 0  # in the last warning
        self._shard_begins = {0: 0}  # index of the first row of each shard that was opened
        self._window: Window | None = None
        self._windows: Iterator[Window] = iter(())
        self._ahead: ThreadPoolExecutor | None = None
        self._next: Future[Window] | None = None

    # ------------------------------------------------------------------ rows by number

    def row(self, number: int) -> Row:
        if self._window is None or number < self._window.begin.first:
            self._start(self.mark_of(number))
        while self._window is None or number >= self._window.end.first:
            self._advance()
        return self._window.rows[number - self._window.begin.first]

    def mark_of(self, number: int) -> Mark:
        """Return the last known beginning of a window that is not after a row."""
        return next(mark for mark in reversed(self.marks) if mark.first <= number)

    def restore(self, mark: Mark) -> None:
        """Go on from the beginning of a window."""
        self.close()
        self.marks = [mark]

    @property
    def totals(self) -> tuple[int, int]:
        """Rows of the source that were read, and that were dropped, up to the end of the present window."""
        mark = self.marks[-1] if self._window is None else self._window.end
        return mark.rows_read, mark.dropped

    def close(self) -> None:
        """End the processes and the thread that read ahead."""
        if self._ahead is not None:
            self._ahead.shutdown(wait=True, cancel_futures=True)
            self._ahead = None
        self._next = None
        self._window = None
        windows = self._windows
        self._windows = iter(())
        if hasattr(windows, "close"):
            windows.close()

    def _start(self, mark: Mark) -> None:
        self.close()
        self._windows = self._read(mark)
        if self.workers:  # the next window is made while the present one is trained on
            self._ahead = ThreadPoolExecutor(1, thread_name_prefix="distill-stream")

    def _advance(self) -> None:
        if self._ahead is None:
            window = next(self._windows)
        else:
            window = (self._next or self._ahead.submit(next, self._windows)).result()
            self._next = self._ahead.submit(next, self._windows)
        self._window = window
        if window.end.first > self.marks[-1].first:  # else it was read before
            self.marks.append(window.end)
            self._report(window)

    # ------------------------------------------------------------------ windows

    def _read(self, mark: Mark) -> Iterator[Window]:
        """Yield the windows from a mark on, without end.

        Raises:
            ValueError: The source has no row that can be trained on.
        """
        ends = deque[tuple[Place, bool]]()  # of each batch: the place after it, and whether the source ends there

        def batches() -> Iterator[RowBatch]:
            place = mark.place
            while True:
                for batch in row_batches(self._rows(place)):
                    ends.append((self._place(place.epoch, batch[-1][0] + 1), False))
                    yield batch
                place = Place(place.epoch + 1)
                ends.append((place, True))
                yield []

        documents: list[TokenisedDocument] = []
        counts = RowCounts()
        rows_of_epoch = 0
        for found, tally in encoded_batches(batches(), self.streamed.encoder, self.workers):
            documents += found
            counts.add(tally)
            place, is_end = ends.popleft()
            if len(documents) < self.layout.window and not is_end:
                continue
            rows = self._packed(mark.place, documents)
            first = mark.first + len(rows)
            end = Mark(first, place, mark.rows_read + counts.rows_read, mark.dropped + sum(counts.dropped.values()))
            if rows:
                yield Window(mark, end, rows, counts)
            rows_of_epoch += len(rows)
            if is_end:
                self._require_rows(rows_of_epoch, mark, counts)
                rows_of_epoch = 0
            mark = end
            documents = []
            counts = RowCounts()

    def _require_rows(self, rows: int, mark: Mark, counts: RowCounts) -> None:
        """Raise a ValueError where a whole epoch has no rows; one that was resumed may have ended at once."""
        if rows or mark.first:
            return
        dropped = f", {sum(counts.dropped.values()):,} dropped: {counts.reasons}" if counts.dropped else ""
        share = "" if self.ranks == 1 else f" by process {self.rank} of {self.ranks}"
        raise ValueError(
            f"data.source: no trainable tokens in {self.streamed.source.name} after "
            f"{plural(self.streamed.first_row, 'held-out row')}: {plural(counts.rows_read, 'row')} read{share}{dropped}"
        )

    def _rows(self, place: Place) -> Iterator[tuple[int, RawRow | RowFault]]:
        """Yield this process's rows from a place to the end of the source, each with its number."""
        number = place.number
        row = place.row
        for shard, read in enumerate(self.streamed.source.parts):
            if shard < place.shard:
                continue
            self._shard_begins[shard] = number - row
            for content in islice(read(), row, None):
                if self.streamed.max_rows is not None and number >= self.streamed.max_rows:
                    return
                if number >= self.streamed.first_row and number % self.ranks == self.rank:
                    yield number, content
                number += 1
            row = 0

    def _place(self, epoch: int, number: int) -> Place:
        """Return the place before a row of a shard that was opened, or before the end of the last one opened."""
        shard = max(shard for shard, begin in self._shard_begins.items() if begin <= number)
        return Place(epoch, shard, number - self._shard_begins[shard], number)

    def _packed(self, place: Place, found: Sequence[TokenisedDocument]) -> list[Row]:
        """Return the documents of a window that begins at a place, in packed rows."""
        layout = self.layout
        documents = gather_documents(found, self.streamed.encoder.columns).with_row_column(self.streamed.number)
        chosen = np.flatnonzero(~np.isin(documents.origin, self.held_out))
        if not len(chosen):
            return []
        lengths = documents.lengths
        if layout.answer_room:
            lengths = documents.lengths_with_answers(layout.answer_room, layout.capacity)
        if layout.shuffle_buffer:
            entropy = [layout.seed, self.streamed.number, place.epoch, place.number]
            seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
            groups = shuffle_into_rows(
                lengths, chosen, packing=layout.packing, capacity=layout.capacity, seed=seed
            ).groups
        else:
            groups = rows_in_order(lengths, chosen, packing=layout.packing, capacity=layout.capacity)
        return [row for columns in documents.rows(groups) for row in _rows_of(columns)]

    # ------------------------------------------------------------------ reports

    def _report(self, window: Window) -> None:
        """Warn of rows that were dropped, each time that they have doubled, and of columns that are not read."""
        name = self.streamed.source.name
        dropped = window.end.dropped
        if window.counts.dropped and dropped >= 2 * self.most_dropped:
            self.most_dropped = dropped
            read = f"{dropped:,} of {plural(window.end.rows_read, 'row')}"
            logger.warning("%s: %s dropped so far; the last ones: %s", name, read, window.counts.reasons)
        words = set(window.counts.unread_words) - self.unread_words
        if words:
            self.unread_words |= words
            logger.warning(
                "%s: columns that change what is trained on, and are not read: %s (data.fields names them; "
                "data.unread silences this)",
                name,
                ", ".join(sorted(words)),
            )


def _rows_of(columns: Mapping[str, Ragged]) -> Iterator[Row]:
    count = len(next(iter(columns.values())).offsets) - 1
    for number in range(count):
        yield {
            name: column.values[column.offsets[number] : column.offsets[number + 1]] for name, column in columns.items()
        }


class SourceTurns:
    """Sources of the packed rows in turn: each row is of the source that is furthest behind its share.

    Args:
        shares: Fraction of each source.
        counts: Rows of each source so far.
    """

    def __init__(self, shares: Sequence[float], counts: Sequence[int] | None = None) -> None:
        self.shares = tuple(shares)
        self.counts = list(counts or [0] * len(shares))

    @property
    def rows(self) -> int:
        return sum(self.counts)

    def take(self) -> tuple[int, int]:
        """Return the index of the next row's source, and the row's number there."""
        # the source whose next row is due first, if its rows are due every 1 / share rows
        due = [(count + 1) / share for count, share in zip(self.counts, self.shares, strict=True)]
        source = due.index(min(due))
        self.counts[source] += 1
        return source, self.counts[source] - 1

    def copy(self) -> SourceTurns:
        return SourceTurns(self.shares, self.counts)


class StreamedRows:
    """Rows of a run on one process, as a map-style data set that is read in order, once.

    A trainer's loader, samplers and resume know them as any other data set: it has as many rows as the run takes, and
    only those of this process's micro-batches can be read.
    """

    def __init__(self, readers: Sequence[SourceReader], count: int, *, batch_rows: int, rank: int, ranks: int) -> None:
        self.readers = readers
        self.count = count
        self.batch_rows = batch_rows
        self.rank = rank
        self.ranks = ranks
        shares = [reader.streamed.share for reader in readers]
        self._first = SourceTurns(shares)  # where this process began to read, at first or when it was resumed
        self._saved = SourceTurns(shares)  # at the last step that was saved
        self._turns = SourceTurns(shares)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Row:
        batch, within = divmod(number, self.batch_rows)
        turn, rank = divmod(batch, self.ranks)
        assert rank == self.rank, f"row {number} is of process {rank}"
        own = turn * self.batch_rows + within
        if own < self._turns.rows:
            self._turns = self._first.copy()
        assert own >= self._turns.rows, f"row {own} is before the {self._first.rows} rows that a resumed run skips"
        while own > self._turns.rows:
            self._turns.take()
        source, row = self._turns.take()
        return self.readers[source].row(row)

    def totals(self) -> tuple[int, int]:
        """Return the rows of all sources that were read on this process so far, and those that were dropped."""
        totals = [reader.totals for reader in self.readers]
        return sum(read for read, _ in totals), sum(dropped for _, dropped in totals)

    def close(self) -> None:
        for reader in self.readers:
            reader.close()

    def state(self, rows: int) -> dict[str, Any]:
        """Return the place of a row, as JSON.

        Args:
            rows: Rows of this process before it, at least as many as at the last call.
        """
        while self._saved.rows < rows:
            self._saved.take()
        marks = [list(reader.mark_of(count)) for reader, count in zip(self.readers, self._saved.counts, strict=True)]
        return {"counts": list(self._saved.counts), "marks": marks}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the place that `state` returned."""
        shares = self._first.shares
        self._first = SourceTurns(shares, state["counts"])
        self._saved = self._first.copy()
        self._turns = self._first.copy()
        for reader, (first, place, read, dropped) in zip(self.readers, state["marks"], strict=True):
            reader.restore(Mark(first, Place(*place), read, dropped))
