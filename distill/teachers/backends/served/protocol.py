"""Wire protocol between a trainer and a teacher server: requests, answers and the teacher's identity.

    POST /v1/targets?dtype=...   body: safetensors, `input_ids` int32 [B, S], `rows` int32 [M], and `position_ids` int32
                                 [B, S] that restart with each document (left out: each row is one)
                                 answer: safetensors, each tensor with an entry per requested row
    POST /v1/logits              the same body; answer: `logits` float32 [M, V] by the model's own forward
    GET  /v1/identity /v1/head /v1/files    the identity; `weight` and `bias`; configuration and tokenizer as text

Every answer of 200 carries a checksum (`integrity.py`).

`rows` are the flat positions b * S + i whose next token is trained, ascending. Safetensors hold numbers and nothing
else: no code, no paths. Bodies may be JSON of the same names, for use by hand; then the answer is JSON too.

Rows are packed as in `distill.objectives.row_packing`: hidden states of H take 2 H bytes a row in bf16 and H + 4 with
`dtype=fp8`, whose scales are the tensor `scale`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from distill.objectives.row_packing import DTYPES as PACKED
from distill.objectives.row_packing import pack_hidden, unpack_hidden

PROTOCOL = 3
BINARY = "application/octet-stream"
JSON = "application/json"
TEACHER = "x-distill-teacher"  # header of every answer: the identity's `hash`
FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
DTYPES = ("auto", "fp8", "float16", "bfloat16", "float32")
SAFETENSORS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class ProtocolError(ValueError):
    """A body that violates the protocol; the message names what was expected.

    Attributes:
        status: HTTP status: 400 for a body that cannot be parsed, 422 for invalid values.
    """

    def __init__(self, message: str, status: int = 422) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, eq=False)
class TargetRequest:
    """Rows of tokens, and the positions that are requested; equal to itself alone, so that its answer is found by it.

    No tuple: those are taken apart where the tensors of a batch are moved.

    Attributes:
        ids: int32 [B, S].
        positions: int32 [B, S], 0 where a document begins; None where each row is one.
        rows: int32 [M], flat positions, ascending.
    """

    ids: np.ndarray
    positions: np.ndarray | None
    rows: np.ndarray

    @staticmethod
    def of(batch: Mapping[str, torch.Tensor], rows: torch.Tensor) -> TargetRequest:
        """Return the request for a collated batch and the flat positions int64 [M] that are trained."""
        narrow = {
            name: batch[name].cpu().numpy().astype(np.int32)
            for name in ("input_ids", "position_ids")
            if batch.get(name) is not None
        }
        return TargetRequest(narrow["input_ids"], narrow.get("position_ids"), rows.cpu().numpy().astype(np.int32))

    @property
    def labels(self) -> np.ndarray:
        """Token after each of the rows, int32 [M]."""
        return self.ids.reshape(-1)[self.rows + 1]

    def body(self) -> bytes:
        arrays = {"input_ids": self.ids, "position_ids": self.positions, "rows": self.rows}
        return b"".join(parts_of({name: torch.from_numpy(a) for name, a in arrays.items() if a is not None}))

    def checked(self, vocabulary: int, most_tokens: int, longest: int | None) -> TargetRequest:
        """Return itself, once its values are valid.

        Args:
            vocabulary: Exclusive upper bound of token ids.
            most_tokens: Maximum of B * S.
            longest: Maximum length of a document in tokens; None for no limit.
        """
        shape = self.ids.shape
        size = self.ids.size
        _require(0 < size <= most_tokens, f"input_ids: expected 1 to {most_tokens} tokens, got {size}")
        low = int(self.ids.min())
        high = int(self.ids.max())
        _require(low >= 0 and high < vocabulary, f"input_ids: expected 0 to {vocabulary - 1}, got {low} to {high}")
        places = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
        if self.positions is not None:
            _require(
                self.positions.shape == shape,
                f"position_ids: expected {shape} as input_ids, got {self.positions.shape}",
            )
            places = self.positions
            on = np.zeros(shape, np.int64)
            on[:, 1:] = places[:, :-1].astype(np.int64) + 1
            _require(
                bool(((places == 0) | (places == on) & (on > 0)).all()),
                "position_ids: expected each to be 0, or one more than the one before it in its row",
            )
        deepest = int(places.max()) + 1
        _require(longest is None or deepest <= longest, f"input_ids: a document of {deepest}; at most {longest} here")
        rows = self.rows.astype(np.int64)
        inside = rows.size == 0 or (rows[0] >= 0 and rows[-1] < size - 1 and bool((np.diff(rows) > 0).all()))
        _require(inside, f"rows: expected ascending positions below {size - 1}")
        _require(bool((places.reshape(-1)[rows + 1] != 0).all()), "rows: a document's last token predicts none of it")
        return self


def read_body(body: bytes, json_body: bool) -> TargetRequest:
    if not json_body:
        arrays = {name: _array(name, tensor) for name, tensor in tensors_of(body).items()}
    else:
        try:
            arrays = {name: np.asarray(value) for name, value in dict(json.loads(body)).items()}
        except (ValueError, TypeError, RecursionError, OverflowError) as error:
            raise ProtocolError(f"body: expected JSON of lists of whole numbers: {error!s:.100}", 400) from None
    unknown = set(arrays) - {"input_ids", "position_ids", "rows"}
    given = ", ".join(map(repr, arrays))[:100]
    fine = not unknown and {"input_ids", "rows"} <= set(arrays)
    _require(fine, f"body: expected input_ids, rows and at most position_ids; got {given}")
    for name, array in arrays.items():
        dimensions = 1 if name == "rows" else 2
        fine = array.ndim == dimensions or not array.size
        _require(fine, f"{name}: expected {dimensions} dimensions, got {array.ndim}")
        fine = array.dtype.kind in "iu" or not array.size
        _require(fine, f"{name}: expected whole numbers, got {array.dtype}")
        _require(not array.size or -(2**31) <= array.min() <= array.max() < 2**31, f"{name}: expected int32")
        arrays[name] = array.astype(np.int32).reshape(-1) if dimensions == 1 else array.astype(np.int32)
    _require(arrays["input_ids"].ndim == 2, "input_ids: expected 2 dimensions and a token at least")
    return TargetRequest(arrays["input_ids"], arrays.get("position_ids"), arrays["rows"])


def _array(name: str, tensor: torch.Tensor) -> np.ndarray:
    """Return a request's tensor in NumPy, which has no float8, fewer dimensions and smaller empty arrays."""
    if tensor.is_floating_point() or tensor.dim() > 2 or max(tensor.shape, default=0) >= 2**31:
        got = f"{str(tensor.dtype).removeprefix('torch.')} of {tensor.dim()} dimensions"
        raise ProtocolError(f"{name[:40]!r}: expected whole numbers in at most 2 dimensions, got {got}", 400)
    return tensor.numpy()


def tensors_of(body: bytes | torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of safetensors bytes; views of a uint8 tensor, which the library would copy twice."""
    whole = body if isinstance(body, torch.Tensor) else torch.frombuffer(bytearray(body or b"?"), dtype=torch.uint8)
    try:
        ends = 8 + int.from_bytes(whole[:8].numpy().tobytes(), "little")
        if not 8 < ends <= len(whole):
            raise ValueError("the header is longer than the body")
        header = json.loads(whole[8:ends].numpy().tobytes())
        data = whole[ends:]
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {n: _tensor(data, SAFETENSORS[e["dtype"]], e["shape"], e["data_offsets"]) for n, e in entries.items()}
        if sum(tensor.nbytes for tensor in tensors.values()) != len(data):
            raise ValueError("its tensors are not all of the body")
        return tensors
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"body: expected safetensors: {error!s:.100}", 400) from None


def _tensor(data: torch.Tensor, dtype: torch.dtype, shape: list[int], offsets: list[int]) -> torch.Tensor:
    start, stop = offsets
    if any(type(number) is not int or number < 0 for number in (*shape, start, stop)):
        raise ValueError("sizes are whole numbers")
    if not start <= stop <= len(data) or stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor's size is not that of its bytes")
    part = data[start:stop]
    return (part.clone() if part.storage_offset() % dtype.itemsize else part).view(dtype).reshape(shape)


def parts_of(tensors: Mapping[str, torch.Tensor]) -> list[bytes | memoryview]:
    """Return safetensors bytes of CPU tensors in parts: the header, then each tensor's own memory, not copied."""
    names = {dtype: name for name, dtype in SAFETENSORS.items()}
    header = {}
    end = 0
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)  # the widest first, so that all are aligned
    for name, tensor in ordered:
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end := end + tensor.nbytes],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *(_bytes_of(tensor) for _, tensor in ordered)]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.contiguous().flatten()
    # a single element is contiguous whatever its stride, which may be 0 (`expand`) where a view of bytes expects 1
    flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8).numpy().data


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ProtocolError(message)


class PackedTensor(NamedTuple):
    """A document of a request, up to the last position needed: its ids, and the requested positions.

    Attributes:
        job: Number of the request.
        ids: Token ids, int32 [n].
        query: Requested positions in `ids`, int64 [m].
    """

    job: int
    ids: np.ndarray
    query: np.ndarray


def documents(query: TargetRequest, job: int = 0, beyond: int = 0) -> list[PackedTensor]:
    """Return the documents of a request that have requested positions, in order.

    Args:
        query: Request with token ids [B, S].
        job: Number of the request, copied to the pieces.
        beyond: Number of tokens that are kept after the last requested position.
    """
    begins = np.zeros(query.ids.shape, bool)
    begins[:, 0] = True
    if query.positions is not None:
        begins |= query.positions == 0
    starts = np.flatnonzero(begins)
    owner = np.searchsorted(starts, query.rows, side="right") - 1
    flat = query.ids.reshape(-1)
    pieces = []
    for number in np.unique(owner).tolist():
        mine = query.rows[owner == number].astype(np.int64) - starts[number]
        pieces.append(PackedTensor(job, flat[starts[number] : starts[number] + mine[-1] + 1 + beyond], mine))
    return pieces


# ------------------------------------------------------------------ answers


def packed_rows(hidden: torch.Tensor, dtype: str) -> dict[str, torch.Tensor]:
    """Return hidden states [M, H] as they are sent, in a dtype that was asked for; `auto` for their own."""
    values, scale = pack_hidden(hidden, hidden.dtype if dtype == "auto" else PACKED[dtype])
    return {"hidden": values} if scale is None else {"hidden": values, "scale": scale}


def hidden_of(answer: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the hidden states [M, H] of an answer in `dtype`, whatever dtype they were sent in."""
    return unpack_hidden(answer["hidden"], answer.get("scale"), dtype)


# ------------------------------------------------------------------ who it is


class Identity(NamedTuple):
    """Identity of a served teacher. Targets depend on all but `hash`, `protocol`, `notes` and `limits`.

    Attributes:
        source: `teacher_identity` of the recipe's section: name, revision, adapter, hash of the files.
        fingerprint: Fingerprint of the weights in the dtype in which they are held (fp8 and int8 differ from bf16).
        dtype: Dtype of hidden states and head; `held`, that of the linear layers, with the layers that fp8 leaves out.
        rows, hidden: Shape [V, H] of the LM head.
        head: SHA-256 of the head's weight and bias.
        scale, softcap: Scale and soft cap of the logits; a soft cap of 0 means none.
        tokenizer, template: Hashes of tokenizer and chat template; None without one.
        files: Hash of the files that /v1/files serves.
        limits: Maximum tokens and positions of a request, and maximum length of a document.
        notes: Not compared: device, versions, error of fp8 on the wire.
    """

    protocol: int
    model: str
    source: dict[str, object]
    fingerprint: dict[str, object]
    dtype: str
    held: str
    rows: int
    hidden: int
    head: str
    scale: float
    softcap: float | None
    tokenizer: str | None
    template: str | None
    files: str
    limits: dict[str, int | None]
    notes: dict[str, object]

    @property
    def hash(self) -> str:
        """Hash of all that targets depend on, 32 hex digits."""
        others = "protocol", "limits", "notes"
        telling = {name: value for name, value in self._asdict().items() if name not in others}
        return hashlib.sha256(json.dumps(telling, sort_keys=True).encode()).hexdigest()[:32]

    def written(self) -> dict[str, object]:
        return self._asdict() | {"hash": self.hash}

    @staticmethod
    def read(tree: Mapping[str, object]) -> Identity:
        """Parse the identity that /v1/identity sends."""
        if not isinstance(tree, Mapping) or tree.get("protocol") != PROTOCOL:
            found = tree.get("protocol") if isinstance(tree, Mapping) else None
            raise ProtocolError(
                f"expected an identity of protocol {PROTOCOL}, got {found!s:.20}; install the same version of distill "
                "on both sides"
            )
        try:
            identity = Identity(**{name: tree[name] for name in Identity._fields})  # type: ignore[arg-type]
        except KeyError as error:
            raise ProtocolError(f"expected an identity with {error}") from None
        if identity.hash != tree.get("hash"):
            raise ProtocolError("expected an identity whose hash is its own")
        return identity


def head_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of the head's tensors on the CPU: names, shapes, dtypes, bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
