"""Packing of documents into rows of one length.

`best_fit` decides which documents share a row (best-fit decreasing: Johnson, 1974, "Fast algorithms for bin packing":
at most 11/9 of the optimal number of rows, in practice within a per cent); `Documents.rows` copies the tokens. A
document is never split here, and positions restart at 0 with each one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from distill.core.labels import IGNORE_INDEX

BLOCK = "block"  # column of rows: those of one number belong together
ROW = "row"  # column of rows: for each document its source, its row there, and its message
IDS = "input_ids"  # what a column of token ids is called, after a prefix: such a column has positions


class Ragged(NamedTuple):
    """Concatenated lists: list i is `values[offsets[i]:offsets[i + 1]]`; int32 [T] and int64 [n + 1]."""

    values: np.ndarray
    offsets: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]."""
        return np.diff(self.offsets)

    def take(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated values of some lists, int32 [t], and each value's index in its list, int64 [t]."""
        lengths = self.offsets[numbers + 1] - self.offsets[numbers]
        # 0 1 2 0 1 0 1 2 3 ...: a running index less the index at which each list begins
        place = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return self.values[np.repeat(self.offsets[numbers], lengths) + place], place


class Documents(NamedTuple):
    """Tokenised documents.

    Attributes:
        columns: `input_ids` and `labels` (not shifted; -100 where masked and at each document's first token), and
            other columns of the encoder.
        origin: uint64 [D], hash of the text that a document comes from: pieces of one text, and equal texts, share it.
        pointers: For columns of indices, the columns that successive entries index, relative to the document's begin.
        source_rows: int32 [D, 2], the row of the source that a document comes from, and the message that its last
            trained tokens are of, -1 where the row is no chat.
    """

    columns: Mapping[str, Ragged]
    origin: np.ndarray
    pointers: Mapping[str, tuple[str, ...]]
    source_rows: np.ndarray

    def with_row_column(self, source: int) -> Documents:
        """Return the documents with the column `ROW`; `source` is the index of their source, -1 for a held-out one."""
        count = len(self.source_rows)
        values = np.concatenate([np.full((count, 1), source, dtype=np.int32), self.source_rows], 1)
        # three numbers a document: source, row, message
        column = Ragged(values.reshape(-1), np.arange(count + 1) * 3)
        return self._replace(columns={**self.columns, ROW: column})

    @property
    def lengths(self) -> np.ndarray:
        """int64 [D], the length of each document in a row: that of its longest column of ids."""
        return np.max([column.lengths for name, column in self.columns.items() if name.endswith(IDS)], axis=0)

    def lengths_with_answers(self, new: int, most: int) -> np.ndarray:
        """Return each length, int64 [D], in a row of `most` tokens if the last response may have `new` tokens."""
        labels = self.columns["labels"]
        lengths = self.lengths
        learned = labels.values != IGNORE_INDEX
        # A response begins where a trained label follows one that is not; labels are not shifted, so no document begins
        # with one and the False in front is never another document's.
        begins = learned & ~np.concatenate([[False], learned[:-1]])
        # index of each document's last beginning: the response that a rollout will replace
        last = np.maximum.reduceat(np.arange(len(begins)) * begins, labels.offsets[:-1])
        prompts = lengths - (labels.offsets[1:] - last)
        starts = self.columns.get("answer_starts")
        if starts is not None:  # labels of aligned spans have gaps
            prompts = np.maximum.reduceat(starts.values, starts.offsets[:-1]).astype(np.int64)
        return np.maximum(lengths, np.minimum(prompts + new, most))

    def tokens(self, chosen: np.ndarray, column: str = IDS) -> int:
        return int(self.columns[column].lengths[chosen].sum())

    def trained_tokens(self, chosen: np.ndarray) -> int:
        labels = self.columns["labels"]
        # no document is empty, which reduceat would count as one label of the next
        counts = np.add.reduceat(labels.values != IGNORE_INDEX, labels.offsets[:-1], dtype=np.int64)
        return int(counts[chosen].sum())

    def rows(self, groups: list[np.ndarray], tokens_at_once: int = 1 << 22) -> Iterator[dict[str, Ragged]]:
        """Yield the tokens of groups of documents, one row per group, in batches of rows.

        Args:
            groups: Indices of the documents of each row, in order.
            tokens_at_once: Approximate number of tokens in a yielded batch.

        Yields:
            The columns, and for each column of ids `position_ids` with the same prefix; list i is row i.
        """
        lengths = self.lengths
        ends = np.cumsum([int(lengths[group].sum()) for group in groups], dtype=np.int64)
        start = 0
        before = 0
        while start < len(groups):
            # as many rows as fit into `tokens_at_once`, but never none: a row may be longer than that
            stop = max(start + 1, int(np.searchsorted(ends, before + tokens_at_once, side="right")))
            yield self._laid_out(groups[start:stop])
            start = stop
            before = int(ends[stop - 1])

    def _laid_out(self, groups: list[np.ndarray]) -> dict[str, Ragged]:
        # All documents of the batch of rows one after the other. `ends` are document bounds in that sequence, and
        # ends[first] the bounds of rows: a row's list is a slice, nothing is copied a second time.
        order = np.concatenate(groups)
        first = np.cumsum([0, *map(len, groups)])  # of each row, among the documents
        made: dict[str, Ragged] = {}
        positions: dict[str, Ragged] = {}
        begins: dict[str, np.ndarray] = {}  # where each document begins in its row
        for name, column in self.columns.items():
            values, place = column.take(order)
            ends = np.concatenate([[0], np.cumsum(column.lengths[order])])
            made[name] = Ragged(values, ends[first])
            if name.endswith(IDS):
                positions[name.replace(IDS, "position_ids")] = Ragged(place.astype(np.int32), ends[first])
                begins[name] = ends[:-1] - np.repeat(ends[first[:-1]], np.diff(first))
        # Columns of indices point into their own document; in a row they move by where the document begins there.
        # Entries index their `targets` in turn (student, teacher, student, ...), each of which has its own beginnings.
        for name, targets in self.pointers.items():
            shift = np.stack([begins[target] for target in targets], 1)
            counts = self.columns[name].lengths[order] // len(targets)
            moved = made[name].values.reshape(-1, len(targets)) + np.repeat(shift, counts, axis=0)
            made[name] = Ragged(moved.reshape(-1).astype(np.int32), made[name].offsets)
        return made | positions


def best_fit(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Assign documents to rows: longest first, each into the fullest row that has room for it.

    Documents of equal length keep their order, so the result depends only on the arguments.

    Args:
        lengths: int [D], tokens in each document, from 1 to `capacity`.
        capacity: Tokens in a row.

    Returns:
        Indices (int64) of the documents of each row; every document is in exactly one row.
    """
    assert len(lengths) == 0 or (lengths.min() >= 1 and lengths.max() <= capacity), "a document does not fit a row"
    rows: list[list[int]] = []
    with_room: defaultdict[int, list[int]] = defaultdict(list)  # rows by their free tokens
    rooms = 0  # bit r is set if with_room[r] is not empty: one shift finds the smallest room >= n
    by_length = np.argsort(-lengths, kind="stable")
    # Free room is an index into `with_room`, and `rooms` the set of non-empty ones as the bits of one integer. rooms >>
    # length drops the rooms that are too small, and the lowest bit left is the fullest row that fits: O(1) a document
    # on Python's big integers instead of a search over rows.
    for document, length in zip(by_length.tolist(), lengths[by_length].tolist(), strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
            rows[row].append(document)
        else:
            room = capacity
            row = len(rows)
            rows.append([document])
        left = room - length
        if left:
            with_room[left].append(row)
            rooms |= 1 << left
    return [np.array(row, dtype=np.int64) for row in rows]


class Rows(NamedTuple):
    """Documents as rows.

    Attributes:
        groups: Numbers of the documents of each row.
        blocks: int32 [rows]: rows of one number follow each other and hold documents that belong together.
    """

    groups: list[np.ndarray]
    blocks: np.ndarray


def shuffle_into_rows(
    lengths: np.ndarray,
    chosen: np.ndarray,
    *,
    packing: bool,
    capacity: int,
    seed: int,
    together: np.ndarray | None = None,
) -> Rows:
    """The chosen documents as shuffled rows.

    Args:
        lengths: int64 [D], tokens of every document.
        chosen: int [C], numbers of documents.
        packing: Several documents share a row of at most `capacity` tokens; else each has its own.
        capacity: Tokens a row.
        seed: Seed of the order, which depends only on it and on the number of documents.
        together: [D], neighbours among `chosen` with one value share a row, or have rows that follow each other; None
            where every document stands alone.
    """
    random = np.random.default_rng([seed, len(chosen)])
    if together is not None:
        return _rows_together(lengths, chosen, together, random, capacity=capacity, packing=packing)
    # Shuffled twice: before packing, since best_fit keeps the order of documents of one length and neighbours in the
    # source would share rows; after it, since its rows come from long documents to short ones.
    order = random.permutation(chosen)
    if packing:
        groups = [order[group] for group in best_fit(lengths[order], capacity)]
    else:
        groups = [order[number : number + 1] for number in range(len(order))]
    return Rows([groups[number] for number in random.permutation(len(groups))], np.arange(len(groups), dtype=np.int32))


def rows_in_order(lengths: np.ndarray, chosen: np.ndarray, *, packing: bool, capacity: int) -> list[np.ndarray]:
    """Return the documents of each row, in their own order: a row stands where its first document does."""
    if not packing:
        return list(chosen[:, None])
    groups = [chosen[np.sort(group)] for group in best_fit(lengths[chosen], capacity)]
    return sorted(groups, key=lambda group: int(group[0]))


def _rows_together(
    lengths: np.ndarray,
    chosen: np.ndarray,
    together: np.ndarray,
    random: np.random.Generator,
    *,
    capacity: int,
    packing: bool,
) -> Rows:
    """Families of documents as shuffled blocks of rows.

    A family fills rows of its own; its emptiest row may be shared with those of other families, which makes all their
    rows one block.
    """
    begins = np.flatnonzero(np.concatenate([[True], together[chosen[1:]] != together[chosen[:-1]]]))
    families = np.split(chosen, begins[1:])
    families = [families[number] for number in random.permutation(len(families))]
    if not packing:
        blocks = [list(family[:, None]) for family in families]
    else:
        full: list[list[np.ndarray]] = []
        rest: list[np.ndarray] = []
        for family in families:
            # A family's rows but its emptiest are full; only the emptiest is packed with those of other families, so
            # that a row mixes families at most once and a block stays small.
            own = [family[np.sort(group)] for group in best_fit(lengths[family], capacity)]
            own.sort(key=lambda row: -int(lengths[row].sum()))
            rest.append(own.pop())
            full.append(own)
        shared = best_fit(np.array([int(lengths[row].sum()) for row in rest]), capacity)
        blocks = [
            [*(row for number in group for row in full[number]), np.concatenate([rest[number] for number in group])]
            for group in shared
        ]
        blocks = [blocks[number] for number in random.permutation(len(blocks))]
    sizes = [len(block) for block in blocks]
    return Rows([row for block in blocks for row in block], np.repeat(np.arange(len(blocks), dtype=np.int32), sizes))
