"""Documents of different lengths into rows of one length, so that little is wasted.

`best_fit` decides which documents share a row (best-fit decreasing: Johnson, 1974, "Fast algorithms for bin packing":
never more than 11/9 of the fewest rows possible, in practice within a per cent); `Documents.rows` lays the tokens
out. A document is never split here, and each one in a row starts again at position 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

IGNORED = -100


class Documents(NamedTuple):
    """Tokenised documents, end to end.

    Attributes:
        ids: int32 [T], token ids.
        labels: int32 [T], the id where it is learned, else -100; not shifted; -100 at each document's first token.
        offsets: int64 [D + 1], document d is `ids[offsets[d]:offsets[d + 1]]`.
        origin: uint64 [D], hash of the text a document comes from: pieces of one text, and equal texts, share it.
    """

    ids: np.ndarray
    labels: np.ndarray
    offsets: np.ndarray
    origin: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """int64 [D], tokens in each document."""
        return np.diff(self.offsets)

    def trained_tokens(self, chosen: np.ndarray) -> int:
        """How many tokens of the `chosen` documents are learned."""
        counts = np.add.reduceat(self.labels != IGNORED, self.offsets[:-1], dtype=np.int64)
        return int(counts[chosen].sum())

    def rows(self, groups: list[np.ndarray], tokens_at_once: int = 1 << 22) -> Iterator[dict[str, np.ndarray]]:
        """The tokens of groups of documents, one row a group, some rows at a time.

        Args:
            groups: for each row the numbers of its documents, in their order in the row.
            tokens_at_once: about how many tokens a yielded batch holds.

        Yields:
            `input_ids`, `labels`, `position_ids`: int32 [t], rows end to end; `row_offsets`: int64 [rows + 1].
        """
        lengths = self.lengths
        ends = np.cumsum([int(lengths[group].sum()) for group in groups], dtype=np.int64)
        start, before = 0, 0
        while start < len(groups):
            stop = max(start + 1, int(np.searchsorted(ends, before + tokens_at_once, side="right")))
            order = np.concatenate(groups[start:stop])
            taken = lengths[order]
            position = np.arange(int(taken.sum())) - np.repeat(np.cumsum(taken) - taken, taken)
            source = np.repeat(self.offsets[order], taken) + position
            yield {
                "input_ids": self.ids[source],
                "labels": self.labels[source],
                "position_ids": position.astype(np.int32),
                "row_offsets": np.concatenate([[before], ends[start:stop]]) - before,
            }
            start, before = stop, int(ends[stop - 1])


def best_fit(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Which documents share a row: longest first, each into the fullest row that still has room for it.

    Documents of equal length are taken in the order given, so the result depends on nothing but the arguments.

    Args:
        lengths: int [D], tokens in each document, from 1 to `capacity`.
        capacity: tokens in a row.

    Returns:
        For each row the indices (int64) of its documents; every document is in exactly one row.
    """
    assert len(lengths) == 0 or (lengths.min() >= 1 and lengths.max() <= capacity), "a document does not fit a row"
    rows: list[list[int]] = []
    with_room: defaultdict[int, list[int]] = defaultdict(list)  # rows by the room they have left
    rooms = 0  # bit r is set where with_room[r] is not empty: the smallest room >= n is one shift away
    by_length = np.argsort(-lengths, kind="stable")
    for document, length in zip(by_length.tolist(), lengths[by_length].tolist(), strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
            rows[row].append(document)
        else:
            room, row = capacity, len(rows)
            rows.append([document])
        left = room - length
        if left:
            with_room[left].append(row)
            rooms |= 1 << left
    return [np.array(row, dtype=np.int64) for row in rows]


def rows_of(lengths: np.ndarray, chosen: np.ndarray, *, packing: bool, capacity: int, seed: int) -> list[np.ndarray]:
    """The chosen documents as shuffled rows.

    Args:
        lengths: int64 [D], tokens of every document.
        chosen: int [C], numbers of documents.
        packing: Several documents share a row of at most `capacity` tokens; else each has its own.
        capacity: Tokens a row.
        seed: Of the order; with the number of documents it decides all.

    Returns:
        Numbers of documents, an array a row.
    """
    random = np.random.default_rng([seed, len(chosen)])
    order = random.permutation(chosen)
    if packing:
        groups = [order[group] for group in best_fit(lengths[order], capacity)]
    else:
        groups = [order[number : number + 1] for number in range(len(order))]
    return [groups[number] for number in random.permutation(len(groups))]
