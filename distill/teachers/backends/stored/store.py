"""Store of a teacher's outputs: a cache that is filled while it is read.

    caches/chat/
        plan.json, tokenizer/, ...                     as `distill cache` writes them
        shard-part-0001-00003.safetensors              the fourth shard of process 1; whole or absent
        settled.json                                   the parts that all processes read
        shard-00000.safetensors ..., manifest.json     once every document is there: the parts renamed, a complete cache

A process reads what it has stored itself, written yet or not, and the parts of others from the next `flush` on: at
checkpoints and at the ends of epochs and evaluations. What each process reads then follows from the run alone, not
from the speed of processes and disks, and of a document that two have stored the one of the lower rank is read. A run
that is resumed from a checkpoint finds all that was stored before it, and nothing that other processes had not seen.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from distill.core.files import try_lock
from distill.core.ranks import is_main_process
from distill.core.tensor_files import write_tensors
from distill.models.precision.host_copy import HostCopy
from distill.teachers.backends.stored.format import (
    MANIFEST,
    SHARD,
    Document,
    Plan,
    as_arrays,
    bytes_a_token,
    map_tensors,
    read_json,
    shard_path,
    write_signed,
)
from distill.teachers.backends.stored.plan import begin_lock, close_cache, shard_of
from distill.teachers.backends.stored.read import KEPT_CURE, Shards
from distill.teachers.backends.stored.settings import SHARD_BYTES

# of shards that are renamed meanwhile, and seconds between two
MOST_LISTINGS = 600
LOOK_S = 0.05
PART = f"{SHARD}part-"
SETTLED = "settled.json"
log = logging.getLogger(__name__)
_locks: dict[Path, int | None] = {}  # held until this process ends


class Piece(NamedTuple):
    """Positions of one document in an answer of the teacher."""

    answer: HostCopy
    start: int
    stop: int

    def arrays(self) -> dict[str, np.ndarray]:
        tensors = self.answer.wait().items()
        return as_arrays({name: tensor[self.start : self.stop] for name, tensor in tensors})


class Store(Shards):
    """Outputs that are stored in a folder, and those still to be written.

    Args:
        plan: Plan of the cache that the store becomes when it is complete.
        folder: Folder of the store; None to store nothing: a batch's outputs are dropped with it.
        required: Number of positions of every document of the run, by its key.
        all_parts: True to read parts that the processes have not agreed on, too.

    Attributes:
        missing: Keys of the run's documents that no process had stored at the last `flush`.
        most_waiting: Bytes of outputs in memory above which a part is written.
    """

    cure = KEPT_CURE

    def __init__(
        self, plan: Plan, folder: Path | None, required: Mapping[bytes, int], *, all_parts: bool = False
    ) -> None:
        self.manifest = plan
        self.folder = folder
        self.path = folder or Path()
        self._mapped: dict[tuple[int, int], dict[str, np.ndarray]] = {}  # by device and inode: names change
        self._pending: dict[bytes, Piece] = {}  # not mapped yet, the last ones not written
        self._unwritten: list[bytes] = []
        self._waiting = 0  # positions of these
        self.most_waiting = SHARD_BYTES
        self._writing: tuple[str, list[bytes], Future[None]] | None = None
        self._rank = int(os.environ.get("RANK", "0"))
        self.required = required
        own = f"{PART}{self._rank:04d}-"

        def readable(names: Sequence[str]) -> list[str]:
            settled = set((read_json(self.path / SETTLED) or {}).get("parts", ())) if folder else set()
            return [n for n in names if all_parts or n in settled or n.startswith(own) or not n.startswith(PART)]

        self._map(readable)
        self.missing = [key for key in required if not self.has(key)]

    # --------------------------------------------------------------- reading

    def has(self, key: bytes) -> bool:
        return key in self._pending or self.find(key) is not None

    def reader(self, document: Document, row: int) -> Callable[[], dict[str, np.ndarray]]:
        piece = self._pending.get(document.key)
        return super().reader(document, row) if piece is None else piece.arrays

    def file_of(self, shard: int) -> Path:
        return self.path / self._names[shard]

    def _listed(self) -> list[str]:
        """Return the names of all shards: numbered ones, then the parts of each process in order."""
        names = sorted(path.name for path in self.folder.glob(f"{SHARD}*.safetensors")) if self.folder else []
        return sorted(names, key=lambda name: name.startswith(PART))

    def _map(self, readable: Callable[[Sequence[str]], Sequence[str]] = lambda names: names) -> None:
        """Map the shards, among all that there are those that `readable` returns.

        Another run may rename its parts into shards between listing and mapping; then they are listed again. What is
        mapped stays readable under whatever name, or none.
        """
        for _ in range(MOST_LISTINGS):
            mapped: dict[tuple[int, int], dict[str, np.ndarray]] = {}
            names: list[str] = []
            try:
                for name in readable(self._listed()):
                    inode, arrays = self._mapped_file(self.path / name)
                    if inode not in mapped:  # one that was renamed while they were listed may be listed twice
                        mapped[inode] = arrays
                        names.append(name)
            except FileNotFoundError:
                time.sleep(LOOK_S)
                continue
            break
        else:
            raise ValueError(f"{self.path}: its shards change names all the time; {self.cure}")
        self._mapped = mapped
        self._names = names
        self.shards = list(mapped.values())
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

    # --------------------------------------------------------------- storing

    @property
    def writes(self) -> bool:
        """True where this process stores outputs: one run at a time does, others only read."""
        if self.folder is None:
            return False
        lock = self.folder.resolve() / f".keep-{self._rank:04d}.lock"
        if lock not in _locks:
            handle: int | None = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
            assert handle is not None
            if try_lock(handle) is False:
                os.close(handle)
                handle = None
                log.warning("another run stores into %s: this one reads what is there, and stores nothing", self.folder)
            _locks[lock] = handle
        return _locks[lock] is not None

    def add(self, documents: Iterable[Document], tensors: Mapping[str, torch.Tensor]) -> None:
        """Add the teacher's outputs for documents, in their order; documents that are stored already do not change."""
        answer = HostCopy(tensors)
        start = 0
        for document in documents:
            stop = start + len(document.predicting)
            if not self.has(document.key):
                self._pending[document.key] = Piece(answer, start, stop)
                self._unwritten.append(document.key)
                self._waiting += stop - start
            start = stop
        if self._waiting * bytes_a_token(self.manifest) >= self.most_waiting and self.writes:
            self.write()

    def forget(self) -> None:
        """Drop outputs that will not be written: without a folder, or where another run stores."""
        if not self.writes:
            self._pending = {}
            self._unwritten = []
            self._waiting = 0

    def write(self) -> None:
        """Begin to write a part of all pending outputs, in a thread."""
        self.land()
        if not self._unwritten:
            return
        own = f"{PART}{self._rank:04d}-"
        numbers = [int(name[len(own) :].partition(".")[0]) for name in self._names if name.startswith(own)]
        keys = self._unwritten
        self._unwritten = []
        self._waiting = 0
        pieces = [self._pending[key] for key in keys]
        name = f"{own}{max(numbers, default=-1) + 1:05d}.safetensors"
        pool = ThreadPoolExecutor(1)
        self._writing = name, keys, pool.submit(write_part, self.path / name, keys, pieces)
        pool.shutdown(wait=False)

    def land(self) -> None:
        """Wait for the part that is being written, and read it from there."""
        if self._writing is None:
            return
        name, keys, future = self._writing
        self._writing = None
        future.result()
        known = {*self._names, name}
        self._map(lambda names: [each for each in names if each in known or not each.startswith(PART)])
        for key in keys:
            if self.find(key) is not None:  # else the file was deleted meanwhile: the outputs stay in memory
                del self._pending[key]

    def finish_writing(self) -> None:
        """Wait for the part that is being written, whether or not that fails."""
        if self._writing is not None:
            self._writing[2].exception()

    def flush(self) -> None:
        """Write all pending outputs, map what the others have stored, and close the cache once it is complete. Every
        process must call this.

        Raises:
            OSError: the disk is full.
            ValueError: a file is damaged.
        """
        if self.folder is None:
            return
        if self.writes:
            self.write()
            self.land()
        _wait()
        if is_main_process() and self.writes:
            self._map()
            if any(self.find(key) is None for key in self.missing):
                parts = [name for name in self._names if name.startswith(PART)]
                write_signed(self.folder / SETTLED, {"parts": parts})
            else:
                self.close()
        _wait()
        self._map()
        self.missing = [key for key in self.missing if self.find(key) is None]

    def close(self) -> None:
        """Make a complete cache of the folder, of all mapped shards, once every document is stored."""
        assert self.folder is not None
        with begin_lock(self.folder):
            self._close_locked(self.folder)

    def _close_locked(self, folder: Path) -> None:
        parts = [name for name in self._names if name.startswith(PART)]
        manifest = read_json(folder / MANIFEST)
        if not parts and manifest is not None and len(manifest["shards"]) == len(self._names):
            return
        for number, name in enumerate(self._names):  # parts become shards, and gaps of deleted ones are closed
            if name != shard_path(folder, number).name:
                os.replace(folder / name, shard_path(folder, number))
        self._names = [shard_path(folder, number).name for number in range(len(self._names))]
        (folder / SETTLED).unlink(missing_ok=True)
        close_cache(folder, manifest or self.manifest)


def _inode(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _wait() -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        distributed.barrier()


def write_part(path: Path, keys: Sequence[bytes], pieces: Sequence[Piece]) -> None:
    """Write a shard of pieces of answers, in their order."""
    answers = [piece.answer.wait() for piece in pieces]
    tensors = {
        name: torch.cat([answer[name][piece.start : piece.stop] for answer, piece in zip(answers, pieces, strict=True)])
        for name in answers[0]
    }
    write_tensors(path, shard_of(keys, [piece.stop - piece.start for piece in pieces], tensors))
