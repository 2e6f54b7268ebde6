"""Cache format: how documents are named, how a teacher's outputs for them are stored, and in how many bytes.

    caches/chat/
        plan.json                  what is cached, of which data and teacher; the first file written
        shard-00000.safetensors    documents; a shard is whole or absent
        manifest.json              the plan and the counts; the last file written: the cache is complete
        tokenizer/ teacher/        the tokenizer and the configuration of the teacher
        head.safetensors           the teacher's head, where hidden states are stored
        student/                   where the recipe cuts its student from the teacher
        answers.json               the teacher's answers to the recipe's prompts

A document is found by the hash of its tokens and of which of them are trained, so that shuffling, packing, accumulation
and ranks cannot misalign it. The positions whose next token is trained are stored, in order, each as a row of
`distill.objectives.row_packing`: `hidden`, in fp8 with `hidden_scale`; or K tokens with their numbers at the
temperature (of sampled tokens `logprobs` are the logarithms of their weights, and `tail` is the entropy), `entropy` and
`label_logprob` exact, of the whole distribution at temperature 1, for the figures.

At K = 64 that is 262 bytes a token for vocabularies up to 65,536, 270 up to 131,072 and 278 up to 262,144. The rounding
of float16 moves a probability by at most 0.4 % where it is above 1e-7 (log-probabilities from -16 to -8 are 0.0078
apart).

Beside them a shard has, for each document, its key, where its positions begin, and a checksum (XXH3, 64 bits) of key
and positions, checked whenever the document is read: hashing what is copied anyway costs about 0.1 s a GiB. The
manifest has the checksum of each shard's checksums, checked when the cache is opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file

from distill.core.errors import quote
from distill.core.files import write_json
from distill.core.labels import IGNORE_INDEX
from distill.core.manifest import SUM, has_valid_checksum, with_checksum
from distill.objectives.row_packing import FP8, hidden_bytes, top_k_bytes

VERSION = 1
PLAN = "plan.json"
MANIFEST = "manifest.json"
ANSWERS = "answers.json"
HEAD = "head.safetensors"
# folders
TOKENIZER = "tokenizer"
TEACHER = "teacher"
STUDENT = "student"
KEY_BYTES = 16
SHARD = "shard-"  # prefix of the names of shards
PART = f"{SHARD}part-"  # of those of a store that is not complete
BITS = {torch.bfloat16: torch.uint16, FP8: torch.uint8}  # dtypes that numpy does not know, and what holds their bits
Plan = Mapping[str, Any]  # description of a cache: see `distill.teachers.backends.stored.contents`
DOCUMENTS = ("keys", "offsets", "sums")  # tensors of a shard with a value per document, not per position


class StoreKey(NamedTuple):
    """One document of a row.

    Attributes:
        key: Hash of the token ids and of the positions that are trained on, 16 bytes.
        start, stop: Token range of the document in the row.
        predicting: Positions in the row whose next token is trained on, int64 [n].
    """

    key: bytes
    start: int
    stop: int
    predicting: np.ndarray


def stored_documents(row: Mapping[str, Any]) -> Iterator[StoreKey]:
    """Yield the documents of a row that have trained tokens, in order; position ids restart at 0 with each.

    Args:
        row: `input_ids`; `labels` (every token is trained without them) and `position_ids` (one document without).
    """
    ids = np.asarray(row["input_ids"], dtype=np.int32)
    labels = np.asarray(row.get("labels", ids), dtype=np.int32)
    positions = row.get("position_ids")
    starts = np.zeros(1, np.int64) if positions is None else np.flatnonzero(np.asarray(positions) == 0)
    if len(starts) == 0 or starts[0] != 0:
        starts = np.concatenate([[0], starts])
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(ids)], strict=True):
        learned = labels[start + 1 : stop] != IGNORE_INDEX
        if learned.any():
            digest = hashlib.blake2b(ids[start:stop].tobytes(), digest_size=KEY_BYTES)
            digest.update(np.packbits(learned).tobytes())
            yield StoreKey(digest.digest(), start, stop, np.flatnonzero(learned) + start)


def rows_of(rows: Any, at_once: int = 256) -> Iterator[Mapping[str, np.ndarray]]:
    """Yield the rows of a data set one by one, read in batches."""
    table = rows.with_format("numpy") if hasattr(rows, "with_format") else None
    for start in range(0, len(rows), at_once):
        if table is None:
            yield from (rows[number] for number in range(start, min(start + at_once, len(rows))))
            continue
        batch = table[start : start + at_once]
        for number in range(len(batch["input_ids"])):
            yield {name: values[number] for name, values in batch.items()}


def bytes_a_token(plan: Plan) -> int:
    if plan["kind"] == "hidden":
        return hidden_bytes(plan["hidden"], plan["dtype"])
    return top_k_bytes(plan["k"], plan["vocabulary"], plan["dtype"])


# ------------------------------------------------------------------ files


def read_store_json(path: Path) -> Plan | None:
    """Return a JSON file's content, a dictionary; None where there is no such file."""
    again = "move its folder away" if path.name == PLAN else "delete it"
    cure = f"{again}, and the same command makes it again"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is damaged: {str(error).splitlines()[0]:.120}; {cure}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is damaged: expected a section of JSON, got {quote(value)}; {cure}")
    if not has_valid_checksum(value):
        raise ValueError(f"{path}: is damaged: it is not as it was written; {cure}")
    return {name: entry for name, entry in value.items() if name != SUM}


def write_signed(path: Path, value: Mapping[str, Any]) -> None:
    write_json(path, with_checksum(value))


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"{SHARD}{number:05d}.safetensors"


def as_arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return numpy arrays over the same memory; dtypes that numpy does not know as their bits."""
    return {name: tensor.view(BITS.get(tensor.dtype, tensor.dtype)).numpy() for name, tensor in tensors.items()}


def map_tensors(path: Path, cure: str = "delete it") -> dict[str, np.ndarray]:
    """Return the arrays of a safetensors file, as of `as_arrays`, mapped: read from disk as they are used."""
    try:
        return as_arrays(load_file(path))
    except SafetensorError as error:
        raise ValueError(f"teacher.path: {path} is damaged: {error!s:.80}; {cure}") from None


def document_sums(arrays: Mapping[str, np.ndarray], documents: Iterable[int]) -> list[int]:
    """Return checksums of some documents of a shard, int64, over the key and all that is stored of its positions.

    Args:
        arrays: Tensors of the shard: `keys`, `offsets`, and those with one value per position.
        documents: Indices of documents in the shard.
    """
    names = sorted(set(arrays) - set(DOCUMENTS))
    sums = []
    for number in documents:
        start, stop = arrays["offsets"][number : number + 2].tolist()
        digest = xxhash.xxh3_64(arrays["keys"][number].tobytes())
        for name in names:
            digest.update(np.ascontiguousarray(arrays[name][start:stop]).data)
        sums.append(int.from_bytes(digest.digest(), "little", signed=True))
    return sums


def sum_of_sums(path: Path, cure: str = "delete it") -> str:
    """Return the XXH3 of a shard's tensors of documents: `keys`, `offsets` and `sums`."""
    arrays = map_tensors(path, cure)
    digest = xxhash.xxh3_128()
    for name in DOCUMENTS:
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()


def sizes_of(folder: Path, names: Iterable[str], cure: str) -> list[int]:
    """Return the bytes of shards, in order.

    Raises:
        ValueError: one is missing; the message has the cure.
    """
    sizes = []
    for name in names:
        path = folder / name
        if not path.is_file():
            raise ValueError(f"teacher.path: {path} is missing; {cure}")
        sizes.append(path.stat().st_size)
    return sizes


def manifest_of(folder: Path) -> Plan:
    manifest = read_store_json(folder / MANIFEST)
    if manifest is not None:
        return manifest
    if (folder / PLAN).is_file():
        read_store_json(folder / PLAN)
        raise ValueError(
            f"teacher.path: the cache in {folder} is unfinished; the same distill cache command finishes it"
        )
    raise ValueError(f"teacher.path: no cache in {folder}; expected a folder that distill cache wrote")


def stored_folder(cache: Path, name: str) -> str:
    """Return the folder of the tokenizer or of the teacher's configuration inside a complete cache."""
    manifest_of(cache)
    if not (cache / name).is_dir():
        raise ValueError(f"teacher.path: the cache {cache} was made without a {name}: its data were random tokens")
    return str(cache / name)
