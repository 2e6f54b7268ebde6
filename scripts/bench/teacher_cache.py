"""A training step whose teacher is on disk beside the step that runs it: flagship shapes, random weights and tokens.

The cache is really written and read: encoding's positions per second, and steps that collate, find, decode and copy
what was stored. Candidates: `online`, `top-64 from disk`, `hidden states from disk`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from distill_kernels import FusedAdamW

from distill.core.files import make_folder
from distill.core.tensor_files import write_tensors
from distill.data.collator import Collator, move_batch
from distill.models.head import find_head, probe_logits, read_head
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.backends.stored.epoch import fill_store
from distill.teachers.backends.stored.format import HEAD, PLAN, bytes_a_token, stored_documents, write_signed
from distill.teachers.backends.stored.settings import SHARD_BYTES
from distill.teachers.backends.stored.store import Fills, Store
from distill.teachers.backends.stored.teacher import StoredTeacher
from distill.teachers.objective import DistillationObjective
from scripts.bench.harness import Row

K, ROWS, WARM_UP = 64, 16, 3


def random_rows(count: int, length: int, vocabulary: int) -> list[dict[str, Any]]:
    """Rows of one document of random tokens."""
    ids = np.random.default_rng(0).integers(0, vocabulary, (count, length))
    labels = ids.copy()
    labels[:, 0] = -100
    return [{"input_ids": i, "labels": l, "position_ids": np.arange(length)} for i, l in zip(ids, labels, strict=True)]


def write_cache(folder: Path, teacher: Any, rows: list[dict[str, Any]], *, hidden: bool, batch_size: int) -> float:
    """Cache the rows; returns seconds."""
    head, shape = read_head(find_head(teacher)), probe_logits(teacher, "teacher")
    kind = {"kind": "hidden", "dtype": "bfloat16"} if hidden else {"kind": "top_k", "k": K, "tail": "bucket"}
    plan = {
        "version": 1,
        "dtype": "float16",
        "temperature": None if hidden else 1.0,
        "vocabulary": len(head.weight),
        "hidden": head.weight.shape[1],
        "scale": shape.scale,
        "softcap": shape.softcap,
        "seed": 0,
        **kind,
    }
    make_folder(folder)
    write_signed(folder / PLAN, plan)
    if hidden:
        write_tensors(folder / HEAD, {"weight": head.weight.detach().cpu().clone()})
    required = {d.key: len(d.predicting) for row in rows for d in stored_documents(row)}
    kept = StoredTeacher(Store(folder, Fills(plan, required)), LoadedTeacher(teacher))
    start = time.perf_counter()
    fill_store(kept, [rows], batch_size=batch_size, part_bytes=SHARD_BYTES)
    seconds = time.perf_counter() - start
    kept.close()
    return seconds


def batches(
    collate: Callable[[list[Any]], dict[str, Any]], rows: list[Any], batch_size: int, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Batches on the device for ever, as a data loader with pinned memory brings them."""
    while True:
        for start in range(0, len(rows), batch_size):
            made = collate(rows[start : start + batch_size])
            on_gpu = device.type == "cuda"
            pinned = {n: t.pin_memory() if on_gpu and isinstance(t, torch.Tensor) else t for n, t in made.items()}
            yield move_batch(pinned, device, non_blocking=True)


def seconds_a_step(objective: Any, student: Any, rows: list[Any], batch_size: int, steps: int) -> float:
    """Wall time of a step, data included, once warm."""
    device = next(student.parameters()).device
    cuda = device.type == "cuda"
    kind = FusedAdamW if cuda else torch.optim.AdamW
    optimizer = kind(student.parameters(), lr=1e-5)
    collate = Collator(0, omit_plain_positions=True, columns=objective.teacher.columns)
    source = batches(collate, rows, batch_size, device)
    start = 0.0
    for number in range(WARM_UP + steps):
        if number == WARM_UP:
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
        batch = next(source)
        student(**objective.student_inputs(batch, batch["valid_rows"].numel()))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def compare(
    teacher: Any, student: Any, *, batch_size: int, length: int, steps: int, shape: str, folder: Path
) -> Iterator[Row]:
    """Rows of the table; teacher and student are on one device, patched."""
    vocabulary = min(len(read_head(find_head(model)).weight) for model in (teacher, student))
    rows, tokens = random_rows(ROWS, length, vocabulary), batch_size * length

    def row(name: str, seconds: float, note: str = "") -> Row:
        return Row("teacher_cache", shape, name, ms=seconds * 1e3, tokens_per_s=tokens / seconds, note=note)

    student.train()
    online = seconds_a_step(DistillationObjective(teacher, student, "forward_kl"), student, rows, batch_size, steps)
    yield row("online", online)
    for name, hidden in ((f"top-{K} from disk", False), ("hidden states from disk", True)):
        there = folder / name.split()[0]
        seconds = write_cache(there, teacher, rows, hidden=hidden, batch_size=batch_size)
        yield row(f"write {name}", seconds * tokens / (len(rows) * length))
        store = Store(there)
        objective = DistillationObjective(StoredTeacher(store, device=student.device), student, "forward_kl")
        spent = seconds_a_step(objective, student, rows, batch_size, steps)
        yield row(name, spent, f"{bytes_a_token(store.manifest)} bytes a token, {online / spent:.2f} x online")


def run(quick: bool, only: str) -> Iterator[Row]:
    """`quick` takes fewer steps; `only` has no meaning here."""
    from distill.models.patch.attention import choose_attention
    from distill.models.patch.patching import patch
    from scripts.bench.step import BATCH, LENGTH, STUDENT, TEACHER, random_model

    teacher, student = random_model(TEACHER, 0).requires_grad_(False), random_model(STUDENT, 1)
    for model, role in ((teacher, "teacher"), (student, "student")):
        patch(model, role, attention=choose_attention(model, BATCH, LENGTH, backward=role == "student")[0])
    with tempfile.TemporaryDirectory() as folder:
        yield from compare(
            teacher,
            student,
            batch_size=BATCH,
            length=LENGTH,
            steps=6 if quick else 16,
            folder=Path(folder),
            shape=f"{TEACHER} to {STUDENT}, {BATCH} x {LENGTH} tokens, bf16",
        )
