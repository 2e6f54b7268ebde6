"""Held-out documents that are trained on as well, found by hashes of their tokens.

A document's hash is the sum of `r[i] * token[i]` modulo 2^64 with random `r` (multilinear hashing, Carter and Wegman,
1979), so that one cumulative sum has those of all its beginnings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from distill.core.labels import IGNORE_INDEX
from distill.data.packing import IDS, Documents
from distill.data.token_cache import cached_folder

TOKENS_AT_ONCE = 1 << 18  # few enough that they stay in the processor's cache

Chosen = tuple[Documents, np.ndarray]  # documents, and the indices of the chosen ones


def count_copies(trained: Sequence[Chosen], held_out: Sequence[Chosen], key: str, *, cache: bool) -> int:
    """Return the number of held-out documents that are a training document or its beginning.

    Both the token ids and which of them are trained on are equal. Equal texts are never both held out and trained on;
    what is left are pieces of texts, truncated chats and turns of chats that continue one another.
    """

    def build(folder: Path) -> None:
        longest = max(int(documents.columns[IDS].lengths.max()) for documents, _ in (*trained, *held_out))
        # odd factors: an even one would lose the highest bit of the product modulo 2^64
        factors = np.random.default_rng(0).integers(2**63, size=longest, dtype=np.uint64) * 2 + 1
        whole = [(hashes, place) for chosen in held_out for hashes, place, _ in _hashes(*chosen, factors, whole=True)]
        own, lengths = (np.concatenate(values) for values in zip(*whole, strict=True))
        known = np.unique(own)
        is_length = np.zeros(longest, dtype=bool)
        found = set[int]()
        is_length[lengths] = True
        for chosen in trained:
            for hashes, place, is_chosen in _hashes(*chosen, factors):
                # only beginnings as long as a held-out document can equal one
                hashes = hashes[is_length[place] & is_chosen]
                # `known` is sorted: a binary search finds where a hash would stand; % for one beyond the end
                found.update(hashes[known[np.searchsorted(known, hashes) % len(known)] == hashes].tolist())
        (folder / "copies.json").write_text(json.dumps(sum(value in found for value in own.tolist())))

    folder, _ = cached_folder(key, build, cache=cache)
    return int(json.loads((folder / "copies.json").read_text()))


def _hashes(
    documents: Documents, numbers: np.ndarray, factors: np.ndarray, *, whole: bool = False
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield for tokens of successive documents the hash of the document up to each, uint64 [tokens].

    Args:
        numbers: Indices of the chosen ones.
        factors: Random odd numbers, uint64 [longest document].
        whole: Yield the chosen documents' last tokens alone.

    Yields:
        The hashes, each token's index in its document, and whether that is chosen.
    """
    ids, offsets, labels = *documents.columns[IDS], documents.columns["labels"].values
    is_chosen = np.zeros(len(offsets) - 1, dtype=bool)
    is_chosen[numbers] = True
    first = 0
    while first < len(is_chosen):
        last = max(first + 1, int(np.searchsorted(offsets, offsets[first] + TOKENS_AT_ONCE, side="right")) - 1)
        here = slice(offsets[first], offsets[last])
        lengths = np.diff(offsets[first : last + 1])
        begins = offsets[first:last] - offsets[first]
        place = np.arange(here.stop - here.start) - np.repeat(begins, lengths)
        # the lowest bit tells whether a token is trained on
        tokens = ids[here].astype(np.uint64) * 2 + (labels[here] != IGNORE_INDEX)
        # uint64 wraps around, which is the hash's modulus: the sum up to a document's begin can be subtracted
        sums = np.cumsum(tokens * factors[place])
        before = np.concatenate([np.zeros(1, dtype=np.uint64), sums])[begins]
        hashes = sums - np.repeat(before, lengths)
        chosen = np.repeat(is_chosen[first:last], lengths)
        kept = (begins + lengths - 1)[is_chosen[first:last]] if whole else slice(None)
        yield hashes[kept], place[kept], chosen[kept]
        first = last
