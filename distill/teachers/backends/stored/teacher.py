"""A teacher that is queried once for each document: its outputs are stored, and read from then on.

The teacher may be loaded here, sharded, or served. A micro-batch trains on what was stored of it, also where the
teacher was queried just now. Hidden states, stored in the dtype that they are computed in, and the K tokens that a
server sends are the teacher's to the bit; of hidden states that are stored in fp8 or as K tokens, the first epoch is
the same as later ones. Rows whose documents are all stored are read. The teacher is queried for the others, together
and in their order: for a whole micro-batch where it is new, so that the numbers are those of a run without
`online_cache`. Rounding depends on which rows share a batch, so a document keeps the numbers of its first query.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn

from distill.core.labels import shift_labels
from distill.core.ranks import is_main_process
from distill.data.collator import BatchColumns, Row, trained_rows
from distill.models.flops import FlopCounts
from distill.models.precision.host_copy import for_transfer, to_device
from distill.objectives.row_packing import DTYPES, unpack_hidden
from distill.objectives.targets import Batch, Targets, VocabularyAlignment
from distill.objectives.top_k import TopKFormat, TopKTargets, spread, top_k_targets
from distill.objectives.top_k_encoding import rounding_cost
from distill.recipe import Generate
from distill.teachers.backends.stored.format import (
    ANSWERS,
    MANIFEST,
    Document,
    Plan,
    documents_of,
    write_signed,
)
from distill.teachers.backends.stored.identity import fingerprint_of
from distill.teachers.backends.stored.plan import LogitHead, head_of, stored_tensors, stored_top_k
from distill.teachers.backends.stored.read import PREFIX, Shards, prompt_text
from distill.teachers.backends.stored.store import Store
from distill.teachers.base import Constructor, InnerTeacher, Prompt, Teacher

DOCUMENTS = f"{PREFIX}documents"
MOST_READ = 64  # micro-batches that were not collected


class RowDocuments:
    """The documents of each row of a batch: a column in host memory, and the batch's identity while it is read ahead.

    No sequence: those are taken apart where the tensors of a batch are moved.
    """

    def __init__(self, rows: Sequence[Sequence[Document]]) -> None:
        self.rows = rows


def documents_in(batch: Batch) -> RowDocuments:
    """Return the documents of a batch of `StoredTeacher`."""
    documents: object = batch[DOCUMENTS]
    assert isinstance(documents, RowDocuments)
    return documents


def _without_documents(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: value for name, value in batch.items() if not name.startswith(PREFIX)}


def documents_column(rows: Sequence[Row], batch: object, collator: object) -> dict[str, RowDocuments]:
    """Return the documents of each row as a column of their batch."""
    return {DOCUMENTS: RowDocuments([list(documents_of(row)) for row in rows])}


class CachedTeacher(Teacher):
    """A teacher whose outputs are read from a store: the part that complete caches and growing ones share.

    Args:
        store: Stored outputs.
        device: Device of this process.
        dtype: Dtype of hidden states.
    """

    columns: Sequence[BatchColumns] = (documents_column,)
    stores_outputs = True

    def __init__(self, store: Shards, device: torch.device, dtype: torch.dtype) -> None:
        self.store = store
        self.device = device
        self.dtype = dtype
        self._begin_reading()

    def _begin_reading(self) -> None:
        self._pool = ThreadPoolExecutor(1, "reading")
        self._reading: dict[RowDocuments, Future[dict[str, torch.Tensor]]] = {}

    @property
    def prefetch_depth(self) -> int:
        return 1  # files are read early

    def student_batch(self, batch: Batch, needs_targets: bool) -> dict[str, torch.Tensor]:
        if needs_targets and DOCUMENTS not in batch:
            raise ValueError("batch: expected its documents in it, which Collator adds with columns=teacher.columns")
        return _without_documents(batch)

    def prefetch(self, batch: Batch) -> None:
        """Begin to read a batch."""
        batched = documents_in(batch)
        if batched in self._reading or len(self._reading) > MOST_READ:
            return
        read = self.store.gather(batched.rows)
        device = self.device
        self._reading[batched] = self._pool.submit(lambda: for_transfer(read(), device))

    def targets(self, batch: Batch) -> Targets:
        """Return the stored targets of a batch; 0 where no token is trained.

        Raises:
            ValueError: a document is not stored.
        """
        return targets_of(self.store.manifest, {**batch, **self.read(batch)}, self.dtype)

    def read(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return what is stored of a batch, by the names of the batch, on its device."""
        reading = self._reading.pop(documents_in(batch), None)
        values = self.store.gather(documents_in(batch).rows)() if reading is None else reading.result()
        return {name: to_device(value, batch["input_ids"].device) for name, value in values.items()}

    def flush(self) -> None:
        """Cancel pending reads; of a document stored twice, another copy may be read afterwards."""
        for reading in self._reading.values():
            reading.cancel()
        self._reading.clear()

    def close(self) -> None:
        """Stop reading."""
        self._pool.shutdown(cancel_futures=True)


class StoredTeacher(CachedTeacher):
    """A teacher, and the store of its outputs, which is filled as they are needed.

    Args:
        inner: Teacher of hidden states, or of K tokens as servers send them, that is queried for rows that are not
            stored.
        store: Stored outputs, to which missing ones are added.
        device: Device of this process; None for that of the teacher's head.
        head: LM head of `inner`, where the caller has it; None to gather it here.
    """

    def __init__(
        self, inner: Teacher, store: Store, device: torch.device | None = None, head: LogitHead | None = None
    ) -> None:
        head = head or head_of(inner)
        dtype = torch.float32 if head is None else head.weights.weight.dtype
        super().__init__(store, device or (torch.device("cpu") if head is None else head.weights.weight.device), dtype)
        self.inner = inner
        self.filled = store
        self.head = head
        self.models = inner.models
        self.rows = inner.rows
        self.format = inner.format if store.is_hidden else TopKFormat(store.manifest)
        self.columns = (*inner.columns, documents_column)
        if store.folder is not None:
            self.rows = inner.rows._replace(supports_new_rows=False)
        self._asked: dict[RowDocuments, None] = {}  # submitted whole

    def parts(self) -> list[InnerTeacher]:
        return [InnerTeacher(self.inner, "", _without_documents)]

    @property
    def prefetch_depth(self) -> int:
        return max(self.inner.prefetch_depth, super().prefetch_depth)

    def student_batch(self, batch: Batch, needs_targets: bool) -> dict[str, torch.Tensor]:
        return self.inner.student_batch(super().student_batch(batch, needs_targets), needs_targets)

    def prefetch(self, batch: Batch) -> None:
        """Begin to read a batch that is stored entirely; have the teacher prefetch one of which nothing is stored."""
        batched = documents_in(batch)
        if batched in self._asked:
            return
        stored = [self.store.has(document.key) for row in batched.rows for document in row]
        if all(stored):
            super().prefetch(batch)
        elif not any(stored) and len(self._reading) <= MOST_READ:
            self._asked[batched] = None
            self.inner.prefetch(_without_documents(batch))

    def prefetch_error(self, batches: Sequence[Batch]) -> str | None:
        asked = [_without_documents(batch) for batch in batches if documents_in(batch) in self._asked]
        return self.inner.prefetch_error(asked)

    def targets(self, batch: Batch) -> Targets:
        """Return the stored targets of a batch, after querying the teacher for those that are not stored; 0 where no
        token is trained.
        """
        fresh = self.fill(batch, self.filled)
        if fresh is None:
            fresh = self.read(batch)
        else:
            self._reading.pop(documents_in(batch), None)
        self.filled.forget()
        return targets_of(self.store.manifest, {**batch, **fresh}, self.dtype)

    def fill(self, batch: Batch, store: Store) -> dict[str, torch.Tensor] | None:
        """Query the teacher for the rows of a batch that are not stored, and store its outputs.

        Args:
            batch: Batch with `columns`.
            store: Store of this teacher.

        Returns:
            What is stored of a batch that was all new, in its order, by the names of the batch; None of any other.
        """
        batched = documents_in(batch)
        rows = batched.rows
        new_rows = [n for n, row in enumerate(rows) if not all(store.has(document.key) for document in row)]
        if batched in self._asked:  # its answer is pending, whatever has been stored meanwhile
            del self._asked[batched]
            new_rows = [n for n, row in enumerate(rows) if row]
        if not self._any_process(bool(new_rows), batch["input_ids"].device):
            return None
        repeats = sum(map(len, rows)) - len({d.key for row in rows for d in row if not store.has(d.key)})
        indices = list(new_rows) or list(range(len(batch["input_ids"])))  # a process without new rows takes part
        if any(row and n not in set(indices) for n, row in enumerate(rows)):
            asked = {name: batch[name][indices] for name in ("input_ids", "position_ids", "labels") if name in batch}
            asked["valid_rows"] = trained_rows(asked)
        else:
            indices = list(range(len(batch["input_ids"])))
            asked = _without_documents(batch)
        documents = [document for n in indices if n < len(rows) for document in rows[n]]
        tensors = self._outputs(asked, documents)
        if not new_rows:
            return None
        store.add(documents, tensors)
        if repeats or not store.is_hidden:
            return None
        return {f"{PREFIX}{name}": tensor for name, tensor in tensors.items()}

    def _any_process(self, here: bool, device: torch.device) -> bool:
        """Return whether the teacher is to be called: of a sharded one all processes call it, or none does."""
        if not self.is_collective():
            return here
        flag = torch.tensor(int(here), device=device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag)

    def _outputs(self, asked: Batch, documents: Sequence[Document]) -> dict[str, torch.Tensor]:
        """Query the teacher; return what is stored of the trained positions, in their order.

        Tokens are drawn by the first document's key.
        """
        plan = self.store.manifest
        place = asked["valid_rows"]
        if self.head is None:
            return stored_top_k(self.inner.sent(asked), plan)
        hidden = self.inner.targets(asked)
        assert isinstance(hidden, torch.Tensor)
        labels = shift_labels(asked["labels"]).flatten()[place]
        seed = int.from_bytes(documents[0].key[:7], "little") if documents else 0
        generator = torch.Generator(hidden.device).manual_seed(seed ^ int(plan["seed"]))
        return stored_tensors(plan, hidden.flatten(0, 1)[place], labels, self.head, generator)

    def flush(self) -> None:
        """Cancel pending reads and flush the store."""
        super().flush()
        self.filled.flush()

    def close(self) -> None:
        """Stop reading, wait for the part that is being written, and close the teacher."""
        super().close()
        self.filled.finish_writing()
        self.inner.close()

    def flops_per_token(self) -> dict[str, FlopCounts | None]:
        """Return None for the FLOPs, which depend on how often the teacher is queried."""
        return {"": None}

    def validate_first_batch(self, batch: Batch, student: nn.Module | None, pairing: VocabularyAlignment) -> list[str]:
        """Check the teacher, and report the cost of quantising it and of storing its hidden states in fp8."""
        plain = _without_documents(batch)
        lines = self.inner.validate_first_batch(plain, student, pairing)
        dtype = DTYPES[self.store.manifest["dtype"]]
        if dtype.itemsize == 1 and self.head is not None:
            hidden = self.inner.targets(plain)
            assert isinstance(hidden, torch.Tensor)
            cost = rounding_cost(hidden.flatten(0, 1)[batch["valid_rows"]], *self.head, pairing.columns, dtype)
            lines.append(f"{'keep':<12}hidden states in fp8: on one batch KL(teacher, what is stored) {cost:.2g}")
        return lines

    def respond(self, prompts: Sequence[Prompt], settings: Generate) -> list[str] | None:
        """Return the teacher's responses, and store them for runs that will not load it."""
        answers = self.inner.respond(prompts, settings)
        store = self.filled
        if answers is None or store.folder is None or not is_main_process():
            return answers
        if store.writes and not (store.folder / MANIFEST).is_file():
            paired = dict(zip(map(prompt_text, prompts), answers, strict=True))
            write_signed(store.folder / ANSWERS, {"max_new_tokens": settings.max_new_tokens, "answers": paired})
        return answers

    def constructor(self) -> Constructor:
        """Return the function that makes a store whose outputs are dropped."""
        return unsaved, (self.inner, dict(self.store.manifest))

    def truncated_copy(self, layers: Sequence[int]) -> StoredTeacher:
        """Return a small teacher whose outputs are not stored."""
        return unsaved(self.inner.truncated_copy(layers), self.store.manifest)

    def __deepcopy__(self, memo: dict[int, object]) -> StoredTeacher:
        """Return a copy that stores nothing, since its model may be changed."""
        return unsaved(copy.deepcopy(self.inner, memo), self.store.manifest)

    def fingerprint(self) -> dict[str, object]:
        return fingerprint_of(self.store.manifest)


def unsaved(inner: Teacher, plan: Plan) -> StoredTeacher:
    """Return a teacher whose outputs are those of a store, and are dropped with their batch."""
    return StoredTeacher(inner, Store(plan, None, {}))


def targets_of(plan: Plan, batch: Batch, dtype: torch.dtype) -> torch.Tensor | TopKTargets:
    """Return the stored targets of a batch at their positions; 0 where no token is trained.

    Args:
        plan: Plan of the cache.
        batch: Collated batch with `input_ids` [B, S], `valid_rows` and the stored tensors.
        dtype: Dtype of the returned hidden states.
    """
    shape = batch["input_ids"].shape
    rows = batch["valid_rows"]
    stored = {name.removeprefix(PREFIX): value for name, value in batch.items() if name.startswith(PREFIX)}
    if plan["kind"] == "hidden":
        return spread(unpack_hidden(stored["hidden"], stored.get("hidden_scale"), dtype), rows, shape)
    return top_k_targets(stored, rows, shape, plan["tail"])
