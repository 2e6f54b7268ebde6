"""Access to the outputs of teachers whose weights are not in this process, without the teacher's `targets`.

The outputs of a cache come from the states and the head in its files; those of a server are logits that the server
computes by the model's own forward, a code path independent of the one that serves training. A backend of another
package has a method for them, `reference_logits`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from distill.core.labels import shift_labels
from distill.data.collator import valid_rows
from distill.doctor.rows import DoctorRow
from distill.objectives.targets import Batch
from distill.teachers.backends.served.parity_check import own_logits
from distill.teachers.backends.served.protocol import TargetRequest
from distill.teachers.backends.served.teacher import ServerTeacher
from distill.teachers.backends.stored.format import HEAD
from distill.teachers.backends.stored.store import PREFIX
from distill.teachers.backends.stored.teacher import StoredTeacher, documents_in
from distill.teachers.base import Teacher
from distill.teachers.rows.reading import ReadingTeacher

Stored = dict[str, torch.Tensor]


class OutputReader(NamedTuple):
    """Functions that read one kind of stored or remote teacher.

    Attributes:
        logits: Function from teacher, rows and batch to logits [N, V] of the trained positions, on the batch's device.
        tokens: Function of the same arguments to `ids`, `logprobs` and `tail` of the K tokens that are stored or sent.
    """

    logits: Callable[[Any, Sequence[DoctorRow], Batch], torch.Tensor]
    tokens: Callable[[Any, Sequence[DoctorRow], Batch], Stored]


def stored_logits(teacher: StoredTeacher, rows: Sequence[DoctorRow], batch: Batch) -> torch.Tensor:
    """Return fp64 logits from the hidden states and the head in a cache's files."""
    device = batch["input_ids"].device
    store = teacher.store
    assert store.folder is not None
    manifest = store.manifest
    head = load_file(store.folder / HEAD, device=str(device))
    stored = {name: value.to(device).double() for name, value in teacher.store.look_up(list(rows)).items()}
    hidden = stored["cached_hidden"]
    if "cached_hidden_scale" in stored:
        hidden = hidden * stored["cached_hidden_scale"][:, None]
    z = manifest["scale"] * F.linear(hidden, head["weight"].double(), head["bias"].double() if "bias" in head else None)
    cap = manifest["softcap"]
    return cap * torch.tanh(z / cap) if cap else z


def _stored_tokens(teacher: StoredTeacher, rows: Sequence[DoctorRow], batch: Batch) -> Stored:
    device = batch["input_ids"].device
    found = teacher.store.look_up(list(rows)) if rows else teacher.store.gather(documents_in(batch).rows)()
    return {name.removeprefix(PREFIX): value.to(device) for name, value in found.items()}


def _served_logits(teacher: ServerTeacher, rows: Sequence[DoctorRow], batch: Batch) -> torch.Tensor:
    return own_logits(teacher.client, TargetRequest.of(batch, batch["valid_rows"])).to(batch["input_ids"].device)


def _served_tokens(teacher: ServerTeacher, rows: Sequence[DoctorRow], batch: Batch) -> Stored:
    values = teacher.values(TargetRequest.of(batch, batch["valid_rows"]))
    return {name: value.to(batch["input_ids"].device) for name, value in values.items()}


OUTPUT_READERS: dict[type[Teacher], OutputReader] = {
    StoredTeacher: OutputReader(stored_logits, _stored_tokens),
    ServerTeacher: OutputReader(_served_logits, _served_tokens),
}


def store_filler(teacher: Teacher) -> Teacher:
    """Return the teacher that computes what a store is filled with; any other one as it is."""
    if isinstance(teacher, StoredTeacher) and teacher.inner is not None:
        return store_filler(teacher.inner)
    return teacher


def remote_logits(teacher: Teacher, rows: Sequence[DoctorRow], batch: Batch) -> torch.Tensor:
    """Return the logits [N, V] of the trained positions of a teacher without a model in this process."""
    own = store_filler(teacher)
    reader = OUTPUT_READERS.get(type(own))
    if reader is None:
        return own.reference_logits(batch["input_ids"]).flatten(0, 1)[batch["valid_rows"]]
    return reader.logits(own, rows, batch)


def remote_tokens(teacher: Teacher, rows: Sequence[DoctorRow], batch: Batch) -> Stored:
    """Return `ids`, `logprobs` and `tail` of the K tokens of each trained position."""
    own = store_filler(teacher)
    if own.models:
        return _computed_tokens(teacher, own, batch)
    return OUTPUT_READERS[type(own)].tokens(own, rows, batch)


def _computed_tokens(teacher: Teacher, own: Teacher, batch: Batch) -> Stored:
    """Return the K most probable tokens from the full logits of a model in this process."""
    (model,) = own.models.values()
    plan = teacher.format.manifest  # type: ignore[attr-defined]
    places = batch["valid_rows"]
    inputs = {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}
    z = model(**inputs, use_cache=False).logits.flatten(0, 1)[places].double()[:, : plan["vocabulary"]]
    labels = shift_labels(batch["labels"]).flatten()[places]
    assert plan["tail"] != "sampled", "tokens that are drawn anew have no reference"
    logprobs, ids = (z / float(plan["temperature"])).log_softmax(-1).topk(plan["k"])
    rest = torch.log1p(-logprobs.exp().sum(-1).clamp_max(1.0))
    label = z.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    return {"ids": ids, "logprobs": logprobs, "tail": rest, "label_logprob": label}


def column_prefix(member: Teacher) -> str:
    """Return the prefix of the columns that one teacher reads of a batch."""
    return member.prefix if isinstance(member, ReadingTeacher) else ""


def as_read(teacher: Teacher, rows: Sequence[DoctorRow]) -> tuple[Teacher, Sequence[DoctorRow]]:
    """Return the teacher that computes the outputs of one that reads other tokens, and rows as it reads them."""
    if not isinstance(teacher, ReadingTeacher):
        return teacher, rows
    return teacher.inner, list(map(teacher.reads.teacher_row, rows))


def logits_of(teacher: Teacher, document: DoctorRow, device: torch.device) -> torch.Tensor:
    """Return the full logits [N, V] of a teacher at the places of a document whose next token has a label.

    Args:
        teacher: Teacher of one model, or without a model in this process.
        document: Row of one document, as the student reads it.
        device: Of the logits, and of the model.
    """
    inner, (row,) = as_read(teacher, [document])
    ids = torch.as_tensor(row["input_ids"], device=device)[None]
    labels = torch.as_tensor(row["labels"], device=device)[None]
    places = valid_rows(labels)
    if not inner.models:
        return remote_logits(inner, [row], {"input_ids": ids, "labels": labels, "valid_rows": places})
    (model,) = inner.models.values()
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0, places]
    return logits
