"""Reading of a cache: documents are found by hash, and their data are mapped, not loaded.

    cache = TeacherCache("caches/chat")
    outputs = cache.look_up(rows)   # cached_ids [M, K], cached_logprobs, ... of the rows' trained positions

The index is a sorted array, 24 bytes a document; a look-up is a binary search in it, and what is found is one
contiguous piece of a mapped file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from distill.core.manifest import first_damaged_file
from distill.objectives.row_packing import DTYPES, FIGURES, pack_top_k, unpack_top_k
from distill.recipe import Generate, Recipe
from distill.teachers.backends.stored.format import (
    ANSWERS,
    DOCUMENTS,
    HEAD,
    KEY_BYTES,
    MANIFEST,
    VERSION,
    Document,
    Plan,
    as_arrays,
    document_sums,
    documents_of,
    manifest_of,
    map_tensors,
    read_json,
    rows_of,
    shard_path,
    sizes_of,
    sum_of_sums,
)
from distill.teachers.base import Prompt

if TYPE_CHECKING:
    from distill.data.load import Splits

PREFIX = "cached_"
KEPT_CURE = f"delete the file, and {MANIFEST} where there is one, and the teacher computes again what it held"


class Shards:
    """Documents in shards, found by their keys.

    Attributes:
        path: Folder of the shards.
        manifest: Format of the stored outputs, and settings and models that they were computed with.
        stored: Number of stored positions.
        shards: Memory-mapped tensors of each shard, by name.
    """

    path: Path
    manifest: Plan
    shards: list[dict[str, np.ndarray]]
    cure = f"delete the file and {MANIFEST}, and distill cache with the same settings makes them again"

    @property
    def is_hidden(self) -> bool:
        """True where hidden states are stored, not K tokens."""
        return self.manifest["kind"] == "hidden"

    def _index(self) -> None:
        none = np.zeros((0, KEY_BYTES), np.uint8)
        keys = np.concatenate([none, *(shard["keys"].reshape(-1, KEY_BYTES) for shard in self.shards)])
        halves = np.ascontiguousarray(keys).view(np.uint64).reshape(-1, 2)
        sizes = np.array([len(shard["keys"]) for shard in self.shards], np.int32)
        owner = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        within = np.concatenate([none[:, 0].astype(np.int32), *(np.arange(size, dtype=np.int32) for size in sizes)])
        order = np.argsort(halves[:, 0], kind="stable")
        self._first = halves[order, 0]
        self._second = halves[order, 1]
        self._owner = owner[order]
        self._within = within[order]
        self.stored = sum(int(shard["offsets"][-1]) for shard in self.shards)

    def find(self, key: bytes) -> tuple[int, int] | None:
        """Return shard and number in it of a document; None where it is not in the cache."""
        first, second = np.frombuffer(key, np.uint64)
        place = int(np.searchsorted(self._first, first))
        while place < len(self._first) and self._first[place] == first:
            if self._second[place] == second:
                shard = int(self._owner[place])
                document = int(self._within[place])
                return shard, document
            place += 1
        return None

    def has(self, key: bytes) -> bool:
        return self.find(key) is not None

    def gather(self, rows: Sequence[Sequence[Document]]) -> Callable[[], dict[str, torch.Tensor]]:
        """Find the documents of some rows; return a function that reads them, in any thread, as `look_up` does.

        Raises:
            ValueError: a document is not stored.
        """
        readers = [self.reader(document, number) for number, row in enumerate(rows) for document in row]
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
        return self.gather([list(documents_of(row)) for row in rows])()

    def joined(self, pieces: Sequence[Mapping[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        """Return what is stored of some documents, concatenated; named as in the batch."""
        whole = {name: _joined([piece[name] for piece in pieces]) for name in pieces[0]}
        if self.is_hidden:
            bits = torch.from_numpy(whole.pop("hidden"))
            dtype = DTYPES[self.manifest["dtype"]]
            scale = {f"{PREFIX}{name}": torch.from_numpy(values) for name, values in whole.items()}
            return {f"{PREFIX}hidden": bits.view(dtype), **scale}
        packed = {name: torch.from_numpy(values) for name, values in whole.items()}
        top = unpack_top_k(packed, self.manifest["vocabulary"])
        return {f"{PREFIX}{name}": values for name, values in top.items()}

    def reader(self, document: Document, row: int) -> Callable[[], dict[str, np.ndarray]]:
        """Return a function that reads what is stored of a document's positions; `row` is its row, for the error.

        Raises:
            ValueError: the document is not stored.
        """
        place = self.find(document.key)
        if place is None:
            raise ValueError(
                f"teacher.path: {self.path} has no document of these tokens and labels: row {row} of the batch, "
                f"tokens {document.start} to {document.stop}, {len(document.predicting)} of them trained on; it was "
                "made from other data, another tokenizer or another split into pieces"
            )
        shard, number = place

        def read() -> dict[str, np.ndarray]:
            start, stop = self.read_back(shard, number, len(document.predicting))
            arrays = self.shards[shard]
            return {name: arrays[name][start:stop] for name in arrays.keys() - set(DOCUMENTS)}

        return read

    def file_of(self, shard: int) -> Path:
        """Return the file that a shard was read from."""
        return shard_path(self.path, shard)

    def read_back(self, shard: int, number: int, length: int | None = None) -> tuple[int, int]:
        """Return a document's positions in its shard, once its checksum is right; `length` of them where that is known.

        Raises:
            ValueError: it does not.
        """
        arrays = self.shards[shard]
        if document_sums(arrays, [number]) != [int(arrays["sums"][number])]:
            raise self._damaged(self.file_of(shard), f"document {number} of it is not as it was written")
        start, stop = arrays["offsets"][number : number + 2].tolist()
        if length is not None and stop - start != length:
            raise self._damaged(self.file_of(shard), "a document has another length")
        return start, stop

    def _damaged(self, path: Path, fault: str) -> ValueError:
        return ValueError(f"teacher.path: {path} is damaged: {fault}; {self.cure}")


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate arrays [n, ...]; in pinned memory where a GPU is in use."""
    rows, *shape = sum(map(len, parts)), *parts[0].shape[1:]
    size = rows * math.prod(shape) * parts[0].itemsize
    memory = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())
    return np.concatenate(parts, out=memory.numpy().view(parts[0].dtype).reshape(rows, *shape))


def empty_piece(plan: Plan) -> dict[str, np.ndarray]:
    """Return the stored tensors of no positions."""
    dtype = DTYPES[plan["dtype"]]
    if plan["kind"] == "hidden":
        tensors = {"hidden": torch.empty(0, plan["hidden"], dtype=dtype)}
        return as_arrays(tensors | ({"hidden_scale": torch.empty(0)} if plan["dtype"] == "fp8" else {}))
    none = torch.empty(0)
    top = {"ids": torch.empty(0, plan["k"], dtype=torch.int32), "logprobs": torch.empty(0, plan["k"])}
    return as_arrays(pack_top_k(top | dict.fromkeys(FIGURES, none), plan["vocabulary"], dtype))


class TeacherCache(Shards):
    """A complete cache, open for reading."""

    def __init__(self, path: str | Path) -> None:
        """Open the cache in a folder.

        Raises:
            ValueError: there is none, or it is unfinished, damaged or of another version.
        """
        self.path = Path(path).expanduser()
        manifest = manifest_of(self.path)
        if manifest.get("version") != VERSION:
            raise ValueError(
                f"teacher.path: {self.path}: expected a cache of version {VERSION}, got {manifest.get('version')}"
            )
        self.manifest = manifest
        self.cure = KEPT_CURE if "weights" in manifest else self.cure  # a run that kept its teacher's outputs wrote it
        try:
            self._open(manifest["shards"], manifest["sums"])
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"teacher.path: the cache {self.path} is damaged: {error!r:.100}") from None

    def _open(self, sizes: list[int], sums: list[str]) -> None:
        for number, (size, expected) in enumerate(zip(sizes_of(self.path, len(sizes), self.cure), sizes, strict=True)):
            path = shard_path(self.path, number)
            if size != expected:
                raise self._damaged(path, f"expected {expected:,} bytes, got {size:,}")
            if sum_of_sums(path, self.cure) != sums[number]:
                raise self._damaged(path, "its list of documents is not the one written")
        head = {name: entry for name, entry in self.manifest.get("files", {}).items() if name == HEAD}
        fault = first_damaged_file(self.path, head)
        if fault:
            raise ValueError(f"teacher.path: {self.path}/{fault}; {self.cure}")
        self.shards = [map_tensors(shard_path(self.path, number), self.cure) for number in range(len(sizes))]
        self._index()

    def require(self, rows: Any, name: str, hint: str = "") -> None:
        """Check that every document of a data set is in the cache.

        Args:
            rows: Rows of the data set.
            name: Name of the data set, for the error message.
            hint: Known difference between recipe and cache, for the error message.

        Raises:
            ValueError: how many are missing, and the first of them.
        """
        total = 0
        missing = 0
        first = ""
        for number, row in enumerate(rows_of(rows)):
            for document in documents_of(row):
                total += 1
                if self.find(document.key) is None:
                    first = first or f"row {number}, tokens {document.start} to {document.stop}"
                    missing += 1
        if missing:
            raise ValueError(
                f"teacher.path: {self.path} lacks {missing:,} of the {total:,} documents of the {name}, "
                f"the first in {first}; {hint or 'it was made from other data'}"
            )

    def require_data(self, recipe: Recipe, splits: Splits) -> None:
        """Check that every document of a run is in the cache.

        Raises:
            ValueError: how many are missing and the first of them, with the first setting that differs.
        """
        hint = what_differs(self.manifest["data"], data_settings(recipe, splits.report.digest))
        self.require(splits.train, "training data", hint)
        self.require(splits.validation, "held-out data", hint)

    def answers(self, prompts: Sequence[Prompt], settings: Generate) -> list[str] | None:
        """Return the teacher's responses to prompts; None where the cache was made with other prompts."""
        stored = read_json(self.path / ANSWERS)
        if not prompts or not stored or stored["max_new_tokens"] != settings.max_new_tokens:
            return None
        answers = [stored["answers"].get(prompt_text(prompt)) for prompt in prompts]
        return None if None in answers else answers


def prompt_text(prompt: Prompt) -> str:
    """Return the key of a stored response: the prompt, or its turns as JSON."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt)


# ------------------------------------------------------------------ is this the cache of this recipe?


def data_settings(recipe: Recipe, digest: str) -> dict[str, Any]:
    """Return the settings that documents depend on: the data section without their arrangement, the source's hash."""
    section = recipe.data.model_dump(mode="json", exclude={"packing", "workers", "cache"})
    section["validation"] = {"source": section["validation"]["source"]}
    return section | {"digest": digest}


def what_differs(cached: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Return the first data setting that differs from when the cache was made, in words; empty if none does."""
    for name, value in cached.items():
        if now.get(name) != value:
            return f"data.{name} was {value!r} when the cache was made and is {now.get(name)!r} here"
    return ""
