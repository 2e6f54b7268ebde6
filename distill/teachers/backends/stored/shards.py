"""Shards of a folder, mapped: documents are found by their keys, and checked whenever they are read.

The index is a sorted array, 24 bytes a document; a look-up is a binary search in it, and what is found is one
contiguous piece of a mapped file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from distill.teachers.backends.stored.format import DOCUMENTS, KEY_BYTES, PART, SHARD, document_sums, map_tensors

# of shards that are renamed meanwhile, and seconds between two
MOST_LISTINGS = 600
LOOK_S = 0.05


class Shards:
    """Mapped shards.

    Args:
        folder: Folder of the shards; None for none.
        cure: What to do about a damaged file, for messages.

    Attributes:
        names: File names of the shards that are mapped.
        arrays: Tensors of each, by name.
        positions: Number of stored positions.
    """

    def __init__(self, folder: Path | None, cure: str) -> None:
        self.folder = folder
        self.cure = cure
        self.names: list[str] = []
        self.arrays: list[dict[str, np.ndarray]] = []
        self._mapped: dict[tuple[int, int], dict[str, np.ndarray]] = {}  # by device and inode: names change
        self._index()

    def map(self, readable: Callable[[Sequence[str]], Sequence[str]] = lambda listed: listed) -> None:
        """Map the shards, among all that there are those that `readable` returns.

        Another run may rename its parts into shards between listing and mapping; then they are listed again. What is
        mapped stays readable under whatever name, or none.
        """
        if self.folder is None:
            return
        # all or nothing: a listing that changed on the way is thrown away, so that no shard is missed between two names
        for _ in range(MOST_LISTINGS):
            mapped: dict[tuple[int, int], dict[str, np.ndarray]] = {}
            names: list[str] = []
            try:
                for name in readable(listed_shards(self.folder)):
                    inode, arrays = self._mapped_file(self.folder / name)
                    if inode not in mapped:  # one that was renamed while they were listed may be listed twice
                        mapped[inode] = arrays
                        names.append(name)
            except FileNotFoundError:
                time.sleep(LOOK_S)
                continue
            break
        else:
            raise ValueError(f"{self.folder}: its shards change names all the time; {self.cure}")
        self._mapped = mapped
        self.names = names
        self.arrays = list(mapped.values())
        self._index()

    def _mapped_file(self, path: Path) -> tuple[tuple[int, int], dict[str, np.ndarray]]:
        """Return device and inode of a shard, and its arrays, which are mapped once."""
        inode = _inode(path)
        if inode not in self._mapped:
            arrays = map_tensors(path, self.cure)
            if _inode(path) != inode:  # another file has taken the name
                raise FileNotFoundError(path)
            return inode, arrays
        return inode, self._mapped[inode]

    def _index(self) -> None:
        # A key is two 64-bit numbers. The index is sorted by the first; `find` goes through those with the same first
        # one and compares the second.
        none = np.zeros((0, KEY_BYTES), np.uint8)
        keys = np.concatenate([none, *(shard["keys"].reshape(-1, KEY_BYTES) for shard in self.arrays)])
        halves = np.ascontiguousarray(keys).view(np.uint64).reshape(-1, 2)
        sizes = np.array([len(shard["keys"]) for shard in self.arrays], np.int32)
        owner = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        within = np.concatenate([none[:, 0].astype(np.int32), *(np.arange(size, dtype=np.int32) for size in sizes)])
        # stable: of a document stored twice, that of the first shard is found, on every process the same
        order = np.argsort(halves[:, 0], kind="stable")
        self._first = halves[order, 0]
        self._second = halves[order, 1]
        self._owner = owner[order]
        self._within = within[order]
        self.positions = sum(int(shard["offsets"][-1]) for shard in self.arrays)

    def find(self, key: bytes) -> tuple[int, int] | None:
        """Return shard and number in it of a document; None where it is not stored."""
        first, second = np.frombuffer(key, np.uint64)
        place = int(np.searchsorted(self._first, first))
        while place < len(self._first) and self._first[place] == first:
            if self._second[place] == second:
                return int(self._owner[place]), int(self._within[place])
            place += 1
        return None

    def reader(self, key: bytes, length: int) -> Callable[[], dict[str, np.ndarray]] | None:
        """Return a function that reads what is stored of a document's positions, in any thread; None where it is not
        stored.

        The function raises ValueError where the document is damaged, or has not `length` positions.
        """
        place = self.find(key)
        if place is None:
            return None
        shard, number = place
        # taken now: shards are numbered anew where others are mapped before the function is called
        arrays = self.arrays[shard]
        file = self.names[shard]

        def read() -> dict[str, np.ndarray]:
            start, stop = self._checked(arrays, file, number)
            if stop - start != length:
                raise self.damaged(file, "a document has another length")
            return {name: arrays[name][start:stop] for name in arrays.keys() - set(DOCUMENTS)}

        return read

    def verify(self, shard: int, number: int) -> tuple[int, int]:
        """Return where a document's positions begin and end in its shard, once its checksum is right."""
        return self._checked(self.arrays[shard], self.names[shard], number)

    def _checked(self, arrays: Mapping[str, np.ndarray], file: str, number: int) -> tuple[int, int]:
        if document_sums(arrays, [number]) != [int(arrays["sums"][number])]:
            raise self.damaged(file, f"document {number} of it is not as it was written")
        start, stop = arrays["offsets"][number : number + 2].tolist()
        return start, stop

    def damaged(self, name: str, fault: str) -> ValueError:
        return ValueError(f"teacher.path: {self.folder}/{name} is damaged: {fault}; {self.cure}")


def listed_shards(folder: Path) -> list[str]:
    """Return the file names of all shards in a folder: numbered ones, then the parts of each process in order."""
    names = sorted(path.name for path in folder.glob(f"{SHARD}*.safetensors"))
    return sorted(names, key=lambda name: name.startswith(PART))


def _inode(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
