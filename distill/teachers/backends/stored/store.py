"""Store of a teacher's outputs: a folder that is complete and only read, or filled while it is read.

    store = Store("caches/chat")                   # complete: it can only be read
    store = Store(folder, Fills(plan, required))   # filled as documents are needed
    outputs = store.gather(documents)()            # cached_ids [M, K], cached_logprobs, ... of their trained positions

    caches/chat/
        plan.json, tokenizer/, ...                     see `format`
        shard-part-0001-00003.safetensors              the fourth shard of process 1; whole or absent
        settled.json                                   the parts that all processes read
        shard-00000.safetensors ..., manifest.json     once every document is there: the parts renamed, a complete cache

A process reads what it has stored itself, written yet or not, and the parts of others from the next `flush` on: at
checkpoints and at the ends of epochs and evaluations. What each process reads then follows from the run alone, not
from the speed of processes and disks, and of a document that two have stored the one of the lower rank is read. A run
that is resumed from a checkpoint finds all that was stored before it, and nothing that other processes had not seen.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from distill.core.files import try_lock
from distill.core.manifest import first_damaged_file, manifest_entry
from distill.core.ranks import is_main_process
from distill.models.precision.host_copy import HostCopy
from distill.objectives.row_packing import DTYPES, FIGURES, pack_top_k, unpack_top_k
from distill.recipe import Generate
from distill.teachers.backends.stored.contents import Piece, begin_lock, close_cache, write_part
from distill.teachers.backends.stored.format import (
    ANSWERS,
    HEAD,
    MANIFEST,
    PART,
    VERSION,
    Plan,
    StoreKey,
    as_arrays,
    bytes_a_token,
    manifest_of,
    read_store_json,
    rows_of,
    shard_path,
    sizes_of,
    stored_documents,
    sum_of_sums,
    write_signed,
)
from distill.teachers.backends.stored.settings import SHARD_BYTES
from distill.teachers.backends.stored.shards import Shards
from distill.teachers.base import Prompt

PREFIX = "cached_"  # of what is stored, in a batch
SETTLED = "settled.json"
MADE_CURE = f"delete the file and {MANIFEST}, and distill cache with the same settings makes them again"
KEPT_CURE = f"delete the file, and {MANIFEST} where there is one, and the teacher computes again what it held"
log = logging.getLogger(__name__)
_locks: dict[Path, int | None] = {}  # held until this process ends


class Fills(NamedTuple):
    """What a store is filled with.

    Attributes:
        plan: Plan of the cache that the store becomes when it is complete.
        required: Number of positions of every document of the run, by its key.
        all_parts: True to read parts that the processes have not agreed on, too.
    """

    plan: Plan
    required: Mapping[bytes, int] = {}
    all_parts: bool = False


class Store:
    """A teacher's outputs for documents, found by content.

    Args:
        folder: Folder of the store; None to store nothing: a batch's outputs are dropped with it.
        fills: What is stored beside what is there; None for a complete cache, which is only read.

    Attributes:
        read_only: True if nothing is stored beside what is there.
        manifest: Format of the stored outputs, and settings and models that they were computed with.
        shards: What is on disk.
        required: Number of positions of every document of the run, by its key.
        missing: Keys of the run's documents that no process had stored at the last `flush`.
        most_waiting: Bytes of outputs in memory above which a part is written.

    Raises:
        ValueError: no complete cache is there that could be read, or it is damaged or of another version.
    """

    def __init__(self, folder: str | Path | None, fills: Fills | None = None) -> None:
        self.folder = None if folder is None else Path(folder).expanduser()
        self.read_only = fills is None
        self.required: Mapping[bytes, int] = {}
        self._pending: dict[bytes, Piece] = {}  # not mapped yet, the last ones not written
        self._unwritten: list[bytes] = []
        self._waiting = 0  # positions of these
        self.most_waiting = SHARD_BYTES
        self._writing: tuple[str, list[bytes], Future[None]] | None = None
        self._rank = int(os.environ.get("RANK", "0"))
        self._own = f"{PART}{self._rank:04d}-"
        if fills is None:
            self._open_complete()
        else:
            self.manifest = fills.plan
            self.required = fills.required
            self.shards = Shards(self.folder, KEPT_CURE)
            self.shards.map(lambda listed: listed if fills.all_parts else self._agreed(listed))
        self.missing = [key for key in self.required if not self.has(key)]

    def _open_complete(self) -> None:
        """Map the shards of the manifest, once their sizes and lists of documents are those written."""
        assert self.folder is not None
        self.manifest = manifest_of(self.folder)
        version = self.manifest.get("version")
        if version != VERSION:
            raise ValueError(f"teacher.path: {self.folder}: expected a cache of version {VERSION}, got {version}")
        # a run that kept its teacher's outputs wrote `weights`
        self.shards = Shards(self.folder, KEPT_CURE if "weights" in self.manifest else MADE_CURE)
        try:
            self._require_as_written(self.folder, self.manifest["shards"], self.manifest["sums"])
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"teacher.path: the cache {self.folder} is damaged: {error!r:.100}") from None

    def _require_as_written(self, folder: Path, sizes: Sequence[int], sums: Sequence[str]) -> None:
        cure = self.shards.cure
        names = [shard_path(folder, number).name for number in range(len(sizes))]
        for name, size, expected, expected_sum in zip(names, sizes_of(folder, names, cure), sizes, sums, strict=True):
            if size != expected:
                raise self.shards.damaged(name, f"expected {expected:,} bytes, got {size:,}")
            if sum_of_sums(folder / name, cure) != expected_sum:
                raise self.shards.damaged(name, "its list of documents is not the one written")
        head = {name: entry for name, entry in self.manifest.get("files", {}).items() if name == HEAD}
        fault = first_damaged_file(folder, head)
        if fault:
            raise ValueError(f"teacher.path: {folder}/{fault}; {cure}")
        self.shards.map(lambda listed: names)

    def _agreed(self, listed: Sequence[str]) -> list[str]:
        """Return the numbered shards, the parts that all processes read, and this process's own."""
        settled = set((read_store_json(self.folder / SETTLED) or {}).get("parts", ())) if self.folder else set()
        return [n for n in listed if n in settled or n.startswith(self._own) or not n.startswith(PART)]

    @property
    def is_hidden(self) -> bool:
        """True where hidden states are stored, not K tokens."""
        return bool(self.manifest["kind"] == "hidden")

    # --------------------------------------------------------------- reading

    def has(self, key: bytes) -> bool:
        return key in self._pending or self.shards.find(key) is not None

    def gather(self, rows: Sequence[Sequence[StoreKey]]) -> Callable[[], dict[str, torch.Tensor]]:
        """Find the documents of some rows; return a function that reads them, in any thread, as `look_up` does.

        Raises:
            ValueError: a document is not stored.
        """
        # looked up in the caller's thread: pending outputs and shards change while another thread reads
        readers = [self._reader(document, number) for number, row in enumerate(rows) for document in row]
        return lambda: self.joined([empty_piece(self.manifest), *(read() for read in readers)])

    def look_up(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return what is stored of the trained positions of some rows, in their order.

        Returns:
            Tensors named as in the batch: `cached_ids` int32 [M, K], `cached_logprobs` [M, K], `cached_tail`,
            `cached_entropy`, `cached_label_logprob` [M]; or `cached_hidden` [M, H],
            in fp8 with `cached_hidden_scale` [M].

        Raises:
            ValueError: a document is not stored.
        """
        return self.gather([list(stored_documents(row)) for row in rows])()

    def _reader(self, document: StoreKey, row: int) -> Callable[[], dict[str, np.ndarray]]:
        """Return a function that reads what is stored of a document's positions; `row` is its row, for the error."""
        piece = self._pending.get(document.key)
        if piece is not None:
            return piece.arrays
        reader = self.shards.reader(document.key, len(document.predicting))
        if reader is None:
            raise ValueError(
                f"teacher.path: {self.folder} has no document of these tokens and labels: row {row} of the batch, "
                f"tokens {document.start} to {document.stop}, {len(document.predicting)} of them trained on; it was "
                "made from other data, another tokenizer or another split into pieces"
            )
        return reader

    def joined(self, pieces: Sequence[Mapping[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        """Return what is stored of some documents, concatenated; named as in the batch."""
        whole = {name: torch.from_numpy(_joined([piece[name] for piece in pieces])) for name in pieces[0]}
        if self.is_hidden:
            whole["hidden"] = whole["hidden"].view(DTYPES[self.manifest["dtype"]])
        else:
            whole = unpack_top_k(whole, self.manifest["vocabulary"])
        return {f"{PREFIX}{name}": values for name, values in whole.items()}

    def require(self, rows: Any, name: str, hint: str = "") -> None:
        """Check that every document of a data set is stored.

        Args:
            name: Name of the data set, for the error message.
            hint: Known difference between recipe and store, for the error message.
        """
        total = 0
        missing = 0
        first = ""
        for number, row in enumerate(rows_of(rows)):
            for document in stored_documents(row):
                total += 1
                if not self.has(document.key):
                    first = first or f"row {number}, tokens {document.start} to {document.stop}"
                    missing += 1
        if missing:
            raise ValueError(
                f"teacher.path: {self.folder} lacks {missing:,} of the {total:,} documents of the {name}, "
                f"the first in {first}; {hint or 'it was made from other data'}"
            )

    def responses(self, prompts: Sequence[Prompt], settings: Generate) -> list[str] | None:
        stored = None if self.folder is None else read_store_json(self.folder / ANSWERS)
        if not prompts or not stored or stored["max_new_tokens"] != settings.max_new_tokens:
            return None
        answers = [stored["answers"].get(prompt_text(prompt)) for prompt in prompts]
        return None if None in answers else answers

    # --------------------------------------------------------------- storing

    @property
    def writes(self) -> bool:
        """True where this process stores outputs: one run at a time does, others only read."""
        if self.folder is None or self.read_only:
            return False
        # one lock for each rank: processes of a run do not exclude each other, those of another run do
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

    def add(self, documents: Iterable[StoreKey], tensors: Mapping[str, torch.Tensor]) -> None:
        """Add the teacher's outputs for documents, in their order; documents that are stored already do not change."""
        assert not self.read_only
        # the copy to the host begins here; the documents are slices of it, and whoever reads one first waits for it
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

    def add_responses(self, prompts: Sequence[Prompt], answers: Sequence[str], settings: Generate) -> None:
        """Store the teacher's responses for runs that will not load it; those of a complete cache are not replaced.

        A run may have completed the cache before it has them: they are added to the manifest then.
        """
        folder = self.folder
        if folder is None or not self.writes:
            return
        paired = dict(zip(map(prompt_text, prompts), answers, strict=True))
        with begin_lock(folder):
            manifest = read_store_json(folder / MANIFEST)
            if manifest is not None and ANSWERS in manifest["files"]:
                return
            before = read_store_json(folder / ANSWERS)
            if before is not None and before["max_new_tokens"] != settings.max_new_tokens:
                return  # the samples, which a run asks for first; the answers to a task are longer
            paired = {**({} if before is None else before["answers"]), **paired}
            write_signed(folder / ANSWERS, {"max_new_tokens": settings.max_new_tokens, "answers": paired})
            if manifest is not None:
                files = {**manifest["files"], ANSWERS: manifest_entry(folder / ANSWERS)}
                write_signed(folder / MANIFEST, {**manifest, "files": dict(sorted(files.items()))})

    def forget(self) -> None:
        """Drop outputs that will not be written: without a folder, or where another run stores."""
        if not self.writes:
            self._pending = {}
            self._unwritten = []
            self._waiting = 0

    def write(self) -> None:
        """Begin to write a part of all pending outputs, in a thread."""
        self.land()
        if not self._unwritten or self.folder is None:
            return
        own = self._own
        # the part before has landed, so its number is among the names, and no two parts are written at once
        numbers = [int(name[len(own) :].partition(".")[0]) for name in self.shards.names if name.startswith(own)]
        keys = self._unwritten
        self._unwritten = []
        self._waiting = 0
        pieces = [self._pending[key] for key in keys]
        name = f"{own}{max(numbers, default=-1) + 1:05d}.safetensors"
        pool = ThreadPoolExecutor(1)
        self._writing = name, keys, pool.submit(write_part, self.folder / name, keys, pieces)
        pool.shutdown(wait=False)

    def land(self) -> None:
        """Wait for the part that is being written, and read it from there."""
        if self._writing is None:
            return
        name, keys, future = self._writing
        self._writing = None
        future.result()
        # parts of other processes stay unread until the next `flush`, as the head of this file says
        known = {*self.shards.names, name}
        self.shards.map(lambda listed: [each for each in listed if each in known or not each.startswith(PART)])
        for key in keys:
            if self.shards.find(key) is not None:  # else the file was deleted meanwhile: the outputs stay in memory
                del self._pending[key]

    def finish_writing(self) -> None:
        """Wait for the part that is being written, whether or not that fails."""
        if self._writing is not None:
            self._writing[2].exception()

    def flush(self) -> None:
        """Write all pending outputs, map what the others have stored, and complete the cache once all is there. Every
        process must call this.

        Raises:
            OSError: the disk is full.
            ValueError: a file is damaged.
        """
        if self.folder is None or self.read_only:
            return
        if self.writes:
            self.write()
            self.land()
        _wait()  # the parts of all processes are on disk
        if is_main_process() and self.writes:
            self.shards.map()
            # The main process decides for all what is read from now on: while documents are missing, the parts that it
            # sees here; after that, shards, whose names it makes.
            if any(self.shards.find(key) is None for key in self.missing):
                parts = [name for name in self.shards.names if name.startswith(PART)]
                write_signed(self.folder / SETTLED, {"parts": parts})
            else:
                self.complete()
        _wait()  # names of shards do not change any more
        self.shards.map()
        self.missing = [key for key in self.missing if self.shards.find(key) is None]

    def complete(self) -> None:
        """Make a complete cache of the folder, of all mapped shards, once every document is stored."""
        assert self.folder is not None
        with begin_lock(self.folder):
            self._complete_locked(self.folder)

    def _complete_locked(self, folder: Path) -> None:
        names = self.shards.names
        manifest = read_store_json(folder / MANIFEST)
        has_parts = any(name.startswith(PART) for name in names)
        # the manifest is of these shards already, by this run or another one
        if not has_parts and manifest is not None and len(manifest["shards"]) == len(names):
            return
        for number, name in enumerate(names):  # parts become shards, and gaps of deleted ones are closed
            # in ascending order each moves to its own number or a lower one that is free: none is overwritten
            if name != shard_path(folder, number).name:
                os.replace(folder / name, shard_path(folder, number))
        self.shards.names = [shard_path(folder, number).name for number in range(len(names))]
        # no parts are left to agree on; the manifest comes last, since a folder that has one counts as complete
        (folder / SETTLED).unlink(missing_ok=True)
        close_cache(folder, manifest or self.manifest)


def prompt_text(prompt: Prompt) -> str:
    """Return the key of a stored response: the prompt, or its turns as JSON."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt)


def empty_piece(plan: Plan) -> dict[str, np.ndarray]:
    dtype = DTYPES[plan["dtype"]]
    if plan["kind"] == "hidden":
        tensors = {"hidden": torch.empty(0, plan["hidden"], dtype=dtype)}
        return as_arrays(tensors | ({"hidden_scale": torch.empty(0)} if plan["dtype"] == "fp8" else {}))
    top = {"ids": torch.empty(0, plan["k"], dtype=torch.int32), "logprobs": torch.empty(0, plan["k"])}
    return as_arrays(pack_top_k(top | dict.fromkeys(FIGURES, torch.empty(0)), plan["vocabulary"], dtype))


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate arrays [n, ...]; in pinned memory where a GPU is in use."""
    rows, *shape = sum(map(len, parts)), *parts[0].shape[1:]
    size = rows * math.prod(shape) * parts[0].itemsize
    memory = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())
    return np.concatenate(parts, out=memory.numpy().view(parts[0].dtype).reshape(rows, *shape))


def _wait() -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        distributed.barrier()
