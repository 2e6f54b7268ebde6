"""Contents of a store: its plan, its rows and shards, and the files beside them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from distill.core.files import atomic_folder, waiting_lock
from distill.core.manifest import file_checksums
from distill.core.tensor_files import write_tensors
from distill.models.head import HeadWeights, LogitTransform
from distill.models.loading import save_student
from distill.models.precision.host_copy import HostCopy
from distill.objectives.hidden import HiddenFormat
from distill.objectives.row_packing import DTYPES, pack_hidden, pack_top_k
from distill.objectives.top_k_encoding import Encoding, encode
from distill.teachers.backends.stored.format import (
    HEAD,
    KEY_BYTES,
    MANIFEST,
    PLAN,
    SHARD,
    STUDENT,
    TEACHER,
    TOKENIZER,
    Plan,
    as_arrays,
    document_sums,
    map_tensors,
    shard_path,
    sum_of_sums,
    write_signed,
)
from distill.teachers.backends.stored.settings import CacheOptions
from distill.teachers.base import Teacher

BEGIN_LOCK = ".begin.lock"


class LogitHead(NamedTuple):
    """A teacher's head, which computes logits from its hidden states.

    Attributes:
        weights: weight [V, H] and bias.
        transform: scale and soft cap.
    """

    weights: HeadWeights
    transform: LogitTransform


def head_of(teacher: Teacher) -> LogitHead | None:
    """Return the head of a teacher that gives hidden states, whole beside the shards of a sharded one; None of one that
    gives K tokens.
    """
    if not isinstance(teacher.format, HiddenFormat):
        return None
    with teacher.format.head.open() as weights:
        if teacher.is_collective():
            bias = weights.bias
            weights = HeadWeights(weights.weight.clone(), None if bias is None else bias.clone(), None)
    return LogitHead(weights, teacher.format.transform)


def hidden_content(settings: CacheOptions, head: LogitHead, columns: int, temperature: float) -> dict[str, Any]:
    """Return what is stored of a teacher's hidden states; `columns` of the vocabulary are those that K tokens are taken
    of.
    """
    kind = {"kind": "hidden"} if settings.hidden else {"kind": "top_k", "k": settings.k, "tail": settings.tail}
    rows, width = head.weights.weight.shape
    return {
        **kind,
        "temperature": None if settings.hidden else temperature,
        "dtype": settings.dtype,
        "vocabulary": rows if settings.hidden else columns,
        "hidden": width,
        "scale": head.transform.scale,
        "softcap": head.transform.softcap,
    }


@torch.no_grad()  # FSDP2's gathered weights must not be made under inference mode
def stored_tensors(
    plan: Plan, hidden: torch.Tensor, labels: torch.Tensor, head: LogitHead, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return the tensors to store for states [M, H] and labels [M]: states on their device, or K tokens on the CPU."""
    dtype = DTYPES[plan["dtype"]]
    if plan["kind"] == "hidden":
        values, scale = pack_hidden(hidden, dtype)
        return {"hidden": values} if scale is None else {"hidden": values, "hidden_scale": scale}
    encoding = Encoding(*(plan[name] for name in ("vocabulary", "k", "tail", "temperature")))
    top = encode(hidden, *head, labels, encoding, generator)
    return pack_top_k(top._asdict(), plan["vocabulary"], dtype)


def shard_of(keys: Sequence[bytes], counts: Sequence[int], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a shard: documents' tensors by position, with their keys, where their positions begin, and checksums.

    Args:
        keys: Keys of the documents, 16 bytes each.
        counts: Number of stored positions of each document.
        tensors: Stored tensors [sum of counts, ...], in the order of the documents.
    """
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    assert all(len(tensor) == offsets[-1] for tensor in tensors.values()), "a position was lost"
    named = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
    tensors |= {"keys": torch.from_numpy(named.copy()), "offsets": torch.from_numpy(offsets)}
    return tensors | {"sums": torch.tensor(document_sums(as_arrays(tensors), range(len(keys))))}


class Piece(NamedTuple):
    """Positions of one document in an answer of the teacher."""

    answer: HostCopy
    start: int
    stop: int

    def arrays(self) -> dict[str, np.ndarray]:
        tensors = self.answer.wait().items()
        return as_arrays({name: tensor[self.start : self.stop] for name, tensor in tensors})


def write_part(path: Path, keys: Sequence[bytes], pieces: Sequence[Piece]) -> None:
    answers = [piece.answer.wait() for piece in pieces]
    tensors = {
        name: torch.cat([answer[name][piece.start : piece.stop] for answer, piece in zip(answers, pieces, strict=True)])
        for name in answers[0]
    }
    write_tensors(path, shard_of(keys, [piece.stop - piece.start for piece in pieces], tensors))


def write_companions(folder: Path, config: Any, tokenizer: Any, head: HeadWeights | None, cut: Any) -> None:
    """Write what goes with the shards and is not there yet: the model's configuration, the tokenizer, the head (None
    where K tokens are stored) and the student that is cut from the teacher (None for any other).

    The caller holds `begin_lock`; each appears whole, since other processes may read while this one writes.
    """
    if not (folder / TEACHER).is_dir():
        with atomic_folder(folder / TEACHER) as beside:
            config.save_pretrained(beside)
    if tokenizer is not None and not (folder / TOKENIZER).is_dir():
        with atomic_folder(folder / TOKENIZER) as beside:
            tokenizer.save_pretrained(beside)
    if head is not None and not (folder / HEAD).is_file():
        tensors = {"weight": head.weight.detach()} | ({} if head.bias is None else {"bias": head.bias.detach()})
        write_tensors(folder / HEAD, {name: tensor.clone() for name, tensor in tensors.items()})
    if cut is not None and not (folder / STUDENT).is_dir():
        with atomic_folder(folder / STUDENT) as beside:
            save_student(cut, None, beside)


def begin_lock(folder: Path) -> AbstractContextManager[None]:
    """Return the lock under which one process of all runs begins a store, adds its companions, or completes it."""
    return waiting_lock(folder / BEGIN_LOCK, f"waiting for another process, which begins or completes {folder}")


def close_cache(folder: Path, plan: Plan) -> Plan:
    """Write the manifest, which makes the cache complete; its shards are numbered without a gap."""
    count = next(number for number in range(1 << 30) if not shard_path(folder, number).is_file())
    ends = [map_tensors(shard_path(folder, number))["offsets"] for number in range(count)]
    manifest = {
        **plan,
        "documents": sum(len(offsets) - 1 for offsets in ends),
        "positions": sum(int(offsets[-1]) for offsets in ends),
        "shards": [shard_path(folder, number).stat().st_size for number in range(count)],
        "sums": [sum_of_sums(shard_path(folder, number)) for number in range(count)],
        "files": {name: entry for name, entry in file_checksums(folder, skip=SHARD).items() if name != PLAN},
    }
    write_signed(folder / MANIFEST, manifest)
    return manifest
