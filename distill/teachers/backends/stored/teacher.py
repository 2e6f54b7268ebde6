"""A teacher by its store: outputs are read, and those that are missing are computed by the teacher inside, and stored.

The teacher inside may be loaded here, sharded, or served; a store that is only read has none, and all that it needs is
in its folder. A micro-batch trains on what was stored of it, also where the teacher was queried just now. Hidden
states, stored in the dtype that they are computed in, and the K tokens that a server sends are the teacher's to the
bit; of hidden states that are stored in fp8 or as K tokens, the first epoch is the same as later ones. Rows whose
documents are all stored are read. The teacher is queried for the others, together and in their order: for a whole
micro-batch where it is new, so that the numbers are those of a run without `online_cache`. Rounding depends on which
rows share a batch, so a document keeps the numbers of its first query.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from distill.core.labels import shift_labels
from distill.core.ranks import is_main_process
from distill.data.collator import BatchColumns, BatchRow, trained_rows
from distill.models.flops import FlopCounts
from distill.models.head import HeadWeights, LogitTransform
from distill.models.loading import load_student
from distill.models.precision.host_copy import for_transfer, to_device
from distill.objectives.hidden import HiddenFormat, StoredHead
from distill.objectives.row_packing import DTYPES, FP8, pack_top_k, unpack_hidden
from distill.objectives.targets import Batch, TargetFormat, Targets, VocabularyAlignment
from distill.objectives.top_k import TopKFormat, TopKTargets, spread, top_k_targets
from distill.objectives.top_k_encoding import rounding_cost
from distill.recipe import FromTeacher, Generate
from distill.teachers.backends.stored.contents import LogitHead, head_of, stored_tensors
from distill.teachers.backends.stored.format import (
    HEAD,
    MANIFEST,
    STUDENT,
    TEACHER,
    Plan,
    StoreKey,
    read_store_json,
    stored_documents,
)
from distill.teachers.backends.stored.identity import description, fingerprint_of
from distill.teachers.backends.stored.store import PREFIX, Fills, Store
from distill.teachers.base import AcceptedRows, Constructor, InnerTeacher, Prompt, Teacher
from distill.teachers.calibration import cut_identity
from distill.teachers.load_context import CutRequest, CutStudent

DOCUMENTS = f"{PREFIX}documents"
MOST_READ = 64  # micro-batches that were not collected


class RowDocuments:
    """The documents of each row of a batch: a column in host memory, and the batch's identity while it is read ahead.

    No sequence: those are taken apart where the tensors of a batch are moved.
    """

    def __init__(self, rows: Sequence[Sequence[StoreKey]]) -> None:
        self.rows = rows


def documents_in(batch: Batch) -> RowDocuments:
    documents: object = batch[DOCUMENTS]
    assert isinstance(documents, RowDocuments)
    return documents


def _without_documents(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: value for name, value in batch.items() if not name.startswith(PREFIX)}


def documents_column(rows: Sequence[BatchRow], batch: object, collator: object) -> dict[str, RowDocuments]:
    return {DOCUMENTS: RowDocuments([list(stored_documents(row)) for row in rows])}


class StoredTeacher(Teacher):
    """A teacher whose outputs are in a store, or get there as they are needed.

    Args:
        inner: Teacher of hidden states, or of K tokens as servers send them, that is queried for rows that are not
            stored; None for a store that is only read.
        device: Device of this process; None for that of the teacher's head.
        head: LM head of `inner`, where the caller has it; None to gather it here.
        load: Function that opens the teacher of a store that is only read, to cut a student that is not stored; None
            where the recipe does not name that teacher.
    """

    columns: Sequence[BatchColumns] = (documents_column,)
    stores_outputs = True

    def __init__(
        self,
        store: Store,
        inner: Teacher | None = None,
        *,
        device: torch.device | str | None = None,
        head: LogitHead | None = None,
        load: Callable[[], Teacher] | None = None,
    ) -> None:
        assert (inner is None) == store.read_only
        self.store = store
        self.inner = inner
        self.load = load
        self.format: TargetFormat
        if inner is None:
            self.rows = AcceptedRows(supports_new_rows=False, whole_documents=True)
            head = stored_head(store, device or "cpu")
            if head is not None:
                self.stored_head = StoredHead(head.weights, "the head in the teacher's cache")
                self.format = HiddenFormat(self.stored_head, head.transform)
        else:
            self.models = inner.models
            self.columns = (*inner.columns, documents_column)
            self.rows = inner.rows
            if store.folder is not None:
                self.rows = inner.rows._replace(supports_new_rows=False)
            self.format = inner.format
            self.head = head = head or head_of(inner)  # what is stored is encoded by it
        if not store.is_hidden:
            self.format = TopKFormat(store.manifest)
        self.dtype = torch.float32 if head is None else head.weights.weight.dtype
        self.device = torch.device(device or ("cpu" if head is None else head.weights.weight.device))
        self._begin_reading()

    def _begin_reading(self) -> None:
        self._pool = ThreadPoolExecutor(1, "reading")
        self._reading: dict[RowDocuments, Future[dict[str, torch.Tensor]]] = {}
        self._asked: dict[RowDocuments, None] = {}  # that the inner teacher has been asked for, whole

    def parts(self) -> list[InnerTeacher]:
        return [] if self.inner is None else [InnerTeacher(self.inner, "", _without_documents)]

    # ------------------------------------------------------------ outputs

    def student_batch(self, batch: Batch, needs_targets: bool) -> dict[str, torch.Tensor]:
        if needs_targets and DOCUMENTS not in batch:
            raise ValueError("batch: expected its documents in it, which Collator adds with columns=teacher.columns")
        own = _without_documents(batch)
        return own if self.inner is None else self.inner.student_batch(own, needs_targets)

    @property
    def prefetch_depth(self) -> int:
        return max(1, super().prefetch_depth)  # files are read early

    def prefetch(self, batch: Batch) -> None:
        """Begin to read a batch that is stored entirely; have the teacher prefetch one of which nothing is stored."""
        batched = documents_in(batch)
        if batched in self._asked or batched in self._reading or len(self._reading) > MOST_READ:
            return
        stored = [self.store.has(document.key) for row in batched.rows for document in row]
        if self.inner is None or all(stored):
            read = self.store.gather(batched.rows)
            device = self.device
            self._reading[batched] = self._pool.submit(lambda: for_transfer(read(), device))
        elif not any(stored):
            self._asked[batched] = None
            self.inner.prefetch(_without_documents(batch))

    def prefetch_error(self, batches: Sequence[Batch]) -> str | None:
        if self.inner is None:
            return None
        asked = [_without_documents(batch) for batch in batches if documents_in(batch) in self._asked]
        return self.inner.prefetch_error(asked)

    def targets(self, batch: Batch) -> Targets:
        """Return the stored targets of a batch, after querying the teacher for those that are not stored; 0 where no
        token is trained.

        Raises:
            ValueError: a document is not stored, and there is no teacher to query.
        """
        fresh = None if self.inner is None else self._fill(batch, self.inner)
        if fresh is None:
            fresh = self._read(batch)
        else:
            self._reading.pop(documents_in(batch), None)
        # after the targets were read: where nothing is stored, outputs are held in memory for their own batch only
        self.store.forget()
        return targets_of(self.store.manifest, {**batch, **fresh}, self.dtype)

    def _read(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return what is stored of a batch, by the names of the batch, on its device."""
        reading = self._reading.pop(documents_in(batch), None)
        values = self.store.gather(documents_in(batch).rows)() if reading is None else reading.result()
        return {name: to_device(value, batch["input_ids"].device) for name, value in values.items()}

    def _fill(self, batch: Batch, inner: Teacher) -> dict[str, torch.Tensor] | None:
        """Query the teacher for the rows of a batch that are not stored, and store its outputs.

        Returns:
            What is stored of a batch that was all new, in its order, by the names of the batch; None of any other.
        """
        store = self.store
        batched = documents_in(batch)
        rows = batched.rows
        new_rows = [n for n, row in enumerate(rows) if not all(store.has(document.key) for document in row)]
        if batched in self._asked:  # its answer is pending, whatever has been stored meanwhile
            del self._asked[batched]
            new_rows = [n for n, row in enumerate(rows) if row]
        if not self._any_process(bool(new_rows), batch["input_ids"].device):
            return None
        # documents that the store already has, or that come twice here: `add` passes over them
        repeats = sum(map(len, rows)) - len({d.key for row in rows for d in row if not store.has(d.key)})
        indices = list(new_rows) or list(range(len(batch["input_ids"])))  # a process without new rows takes part
        # some rows are stored: the others make a smaller batch, whose trained positions are counted anew
        if any(row and n not in set(indices) for n, row in enumerate(rows)):
            asked = {name: batch[name][indices] for name in ("input_ids", "position_ids", "labels") if name in batch}
            asked["valid_rows"] = trained_rows(asked)
        else:
            indices = list(range(len(batch["input_ids"])))
            asked = _without_documents(batch)
        documents = [document for n in indices if n < len(rows) for document in rows[n]]
        tensors = self._outputs(inner, asked, documents)
        if not new_rows:
            return None
        store.add(documents, tensors)
        # these outputs are the batch's own only where all of its documents are new, and K tokens are read as stored
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

    def _outputs(self, inner: Teacher, asked: Batch, documents: Sequence[StoreKey]) -> dict[str, torch.Tensor]:
        """Query the teacher; return what is stored of the trained positions, in their order.

        Tokens are drawn by the first document's key.
        """
        plan = self.store.manifest
        place = asked["valid_rows"]
        if self.head is None:
            return pack_top_k(inner.sent(asked), plan["vocabulary"], DTYPES[plan["dtype"]])
        hidden = inner.targets(asked)
        assert isinstance(hidden, torch.Tensor)
        labels = shift_labels(asked["labels"]).flatten()[place]
        seed = int.from_bytes(documents[0].key[:7], "little") if documents else 0
        generator = torch.Generator(hidden.device).manual_seed(seed ^ int(plan["seed"]))
        return stored_tensors(plan, hidden.flatten(0, 1)[place], labels, self.head, generator)

    def respond(self, prompts: Sequence[Prompt], settings: Generate) -> list[str] | None:
        """The responses are stored, for runs that do not load the teacher."""
        if self.inner is None:
            return self.store.responses(prompts, settings)
        answers = self.inner.respond(prompts, settings)
        if answers is not None and is_main_process():
            self.store.add_responses(prompts, answers, settings)
        return answers

    def validate_first_batch(
        self, batch: Batch, student: nn.Module | None, alignment: VocabularyAlignment
    ) -> list[str]:
        """Report also the cost of storing hidden states in fp8."""
        if self.inner is None:
            return []
        plain = _without_documents(batch)
        lines = self.inner.validate_first_batch(plain, student, alignment)
        dtype = DTYPES[self.store.manifest["dtype"]]
        if dtype == FP8 and self.head is not None:
            hidden = self.inner.targets(plain)
            assert isinstance(hidden, torch.Tensor)
            cost = rounding_cost(hidden.flatten(0, 1)[batch["valid_rows"]], *self.head, alignment.columns, dtype)
            lines.append(f"{'keep':<12}hidden states in fp8: on one batch KL(teacher, what is stored) {cost:.2g}")
        return lines

    # ------------------------------------------------------------ models

    def cut_student(self, request: CutRequest) -> CutStudent:
        """Return the student that is stored; one of other layers is cut from the teacher, which is loaded for that."""
        if self.inner is not None:
            return self.inner.cut_student(request)
        section = request.section
        assert section.from_teacher is not None
        try:
            indices = stored_layer_indices(section.from_teacher, self.store)
        except ValueError:
            if self.load is None:
                raise
            return self.load().cut_student(request)
        stored = section.model_copy(update={"from_teacher": None, "model": str(_folder_of(self.store) / STUDENT)})
        return CutStudent(load_student(stored, device=request.device, dtype=request.dtype), indices)

    def truncated_copy(self, layers: Sequence[int]) -> StoredTeacher:
        """Return a small teacher whose outputs are not stored; where all are read, a teacher that reads them too."""
        if self.inner is not None:
            return unsaved(self.inner.truncated_copy(layers), self.store.manifest)
        twin = copy.copy(self)
        twin._begin_reading()
        return twin

    def __deepcopy__(self, memo: dict[int, object]) -> StoredTeacher:
        """Return a copy that stores nothing, since its model may be changed; with a head and reads of its own."""
        if self.inner is not None:
            return unsaved(copy.deepcopy(self.inner, memo), self.store.manifest)
        twin = self.truncated_copy([])
        twin.stored_head = copy.deepcopy(self.stored_head, memo)
        twin.format = copy.deepcopy(self.format, memo)  # whose head is the copied one
        return twin

    # ------------------------------------------------------------ state

    def flush(self) -> None:
        """Cancel pending reads and flush the store; of a document stored twice, another copy may be read afterwards."""
        for reading in self._reading.values():
            reading.cancel()
        self._reading.clear()
        self.store.flush()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self.store.finish_writing()
        super().close()

    def constructor(self) -> Constructor:
        """Return a function that reads the same folder, or that makes a teacher whose outputs are not stored."""
        if self.inner is None:
            return read_only, (str(_folder_of(self.store).absolute()),)
        return unsaved, (self.inner, dict(self.store.manifest))

    def fingerprint(self) -> dict[str, object]:
        """Return that of the stored outputs and their teacher, which is the same while the folder is filled; where the
        recipe does not name the teacher, the hash of the manifest, which has teacher, documents, and size and checksums
        of every shard.
        """
        if self.inner is None and self.load is None:
            manifest = _folder_of(self.store) / MANIFEST
            return {"cache_sha256": hashlib.sha256(manifest.read_bytes()).hexdigest()}
        return fingerprint_of(self.store.manifest)

    # ------------------------------------------------------------ figures

    def flops_per_token(self) -> dict[str, FlopCounts | None]:
        """Return None for the FLOPs of a teacher that is loaded, which depend on how often it is queried."""
        return super().flops_per_token() if self.inner is None else {"": None}

    def size_text(self) -> str:
        return description(self.store.manifest) if self.inner is None else self.inner.size_text()


def _folder_of(store: Store) -> Path:
    assert store.folder is not None, "a store without a folder is not read only"
    return store.folder


def stored_head(store: Store, device: torch.device | str) -> LogitHead | None:
    """Return the head in a store's folder, on a device; None where K tokens are stored."""
    if not store.is_hidden:
        return None
    tensors = load_file(_folder_of(store) / HEAD, device=str(device))
    weights = HeadWeights(tensors["weight"], tensors.get("bias"), None)
    return LogitHead(weights, LogitTransform(store.manifest["scale"], store.manifest["softcap"]))


def stored_layer_indices(cut: FromTeacher, store: Store) -> list[int] | None:
    """Return the layers of the student that is stored, which must be those of the recipe; None of one whose parts were
    chosen by the data.

    Raises:
        ValueError: it holds no student, or one of other layers.
    """
    there = store.manifest["student_layers"]
    config = read_store_json(_folder_of(store) / TEACHER / "config.json") or {}
    total = int(config.get("num_hidden_layers") or config.get("n_layer") or 0)
    expected = cut_identity(cut, total)
    if there != expected:
        of = "layers " if isinstance(there, list) else ""
        has = "no student" if there is None else f"the student of {of}{there}"
        raise ValueError(
            f"student.from_teacher: a cached teacher has no weights to cut from; {store.folder} holds {has}, expected "
            f"{expected}. Cache with this student in the recipe, which stores it, or give student.model: the folder "
            "of one that is cut already"
        )
    return expected if isinstance(expected, list) else None


def read_only(folder: str | Path) -> StoredTeacher:
    """Return the teacher of the complete cache in a folder."""
    return StoredTeacher(Store(folder))


def unsaved(inner: Teacher, plan: Plan) -> StoredTeacher:
    """Return a teacher whose outputs are those of a store, and are dropped with their batch."""
    return StoredTeacher(Store(None, Fills(plan)), inner)


def targets_of(plan: Plan, batch: Batch, dtype: torch.dtype) -> torch.Tensor | TopKTargets:
    """Return the stored targets of a batch at their positions; 0 where no token is trained.

    Args:
        batch: Collated batch with `input_ids` [B, S], `valid_rows` and the stored tensors.
        dtype: Dtype of the returned hidden states.
    """
    shape = batch["input_ids"].shape
    rows = batch["valid_rows"]
    stored = {name.removeprefix(PREFIX): value for name, value in batch.items() if name.startswith(PREFIX)}
    if plan["kind"] == "hidden":
        return spread(unpack_hidden(stored["hidden"], stored.get("hidden_scale"), dtype), rows, shape)
    return top_k_targets(stored, rows, shape, plan["tail"])
