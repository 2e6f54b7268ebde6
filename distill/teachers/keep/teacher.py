"""A loaded teacher that is asked once for each document: what it says is stored, and read from then on.

A micro-batch trains on what was stored of it, also where it was asked just now. Of hidden states, stored in the dtype
that they are computed in, that is the teacher's word to the bit; in fp8, or as K tokens, the first epoch is the same as
later ones. Rows whose documents are all there are read. The others are put to the teacher, together and in their order:
all of a micro-batch where it is new, so that the numbers are those of a run without `keep`. Rounding depends on which
rows share a batch, so a document has the numbers that it got when it was first met.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn

from distill.core.labels import shift_labels, within_documents
from distill.core.ranks import is_first
from distill.data.collator import valid_rows
from distill.models.host_copy import for_transfer, to_device
from distill.models.work import Work
from distill.recipe import Generate, Student
from distill.teachers.base import Batch, Collate, CutStudent, Pairing, Prompt, TargetFormat, Targets, Teacher
from distill.teachers.cache.encode import rounding_cost
from distill.teachers.cache.format import ANSWERS, DTYPES, MANIFEST, Document, Plan, documents_of, write_signed
from distill.teachers.cache.plan import EncodableTeacher, encodable, stored_tensors
from distill.teachers.cache.read import PREFIX, TeacherCache
from distill.teachers.cache.teacher import CachedTeacher, targets_of
from distill.teachers.cache.top_k import TopKFormat
from distill.teachers.keep.store import Store
from distill.teachers.model import LoadedTeacher

DOCUMENTS = f"{PREFIX}documents"
MOST_READ = 64  # micro-batches that nobody came for


class RowDocuments:
    """The documents of each row of a batch, on the host whatever device the batch goes to."""

    def __init__(self, rows: Sequence[Sequence[Document]]) -> None:
        self.rows = rows

    def to(self, *_: object, **__: object) -> RowDocuments:
        """Itself."""
        return self


def _documents(batch: Batch) -> RowDocuments:
    documents: object = batch[DOCUMENTS]
    assert isinstance(documents, RowDocuments)
    return documents


class WithDocuments:
    """A collator that puts the rows' documents beside what another collator makes of the rows."""

    def __init__(self, collate: Collate) -> None:
        self.collate = collate

    def __call__(self, rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
        """Collate rows, and name their documents."""
        batch = self.collate(rows)
        if "valid_rows" not in batch:
            batch["valid_rows"] = valid_rows(within_documents(batch["labels"], batch.get("position_ids")))
        documents = RowDocuments([list(documents_of(row)) for row in rows])
        return {**batch, DOCUMENTS: documents}  # type: ignore[dict-item]


class KeptTeacher(Teacher):
    """A loaded teacher, and the store of what it says.

    Args:
        inner: asked for what is not stored.
        store: what is stored.
        parts: of `inner`, to make K tokens of what it says; None to take it apart here.
    """

    judges_new_rows = False
    ahead = 1  # read

    def __init__(self, inner: LoadedTeacher, store: Store, parts: EncodableTeacher | None = None) -> None:
        self.inner, self.store, self.models = inner, store, inner.models
        device = next(inner.model.parameters()).device
        self.parts = encodable(inner, device) if parts is None else parts
        self.format: TargetFormat = inner.hidden if store.is_hidden else TopKFormat(store.manifest)
        self._pool = ThreadPoolExecutor(1, "reading")
        self._reading: dict[RowDocuments, Future[dict[str, torch.Tensor]]] = {}

    def collate(self, plain: Collate) -> Collate:
        return WithDocuments(plain)

    def student_batch(self, batch: Batch, needs_targets: bool) -> dict[str, torch.Tensor]:
        if needs_targets and DOCUMENTS not in batch:
            raise ValueError("batch: expected its documents in it; batches come from objective.collator(...)")
        return {name: value for name, value in batch.items() if not name.startswith(PREFIX)}

    def submit(self, batch: Batch) -> None:
        """Begin to read a batch all of which is stored."""
        if (batched := _documents(batch)) in self._reading or len(self._reading) > MOST_READ:
            return
        documents = [document for row in batched.rows for document in row]
        if all(self.store.has(document.key) for document in documents):
            read, device = self.store.gather(documents), self.parts.device
            self._reading[batched] = self._pool.submit(lambda: for_transfer(read(), device))

    def targets(self, batch: Batch) -> Targets:
        """What is stored of a batch, after the teacher was asked for what is not."""
        batched = _documents(batch)
        rows, reading = batched.rows, self._reading.pop(batched, None)
        new_rows = [n for n, row in enumerate(rows) if not all(self.store.has(document.key) for document in row)]
        fresh = None
        if self._any_process(bool(new_rows)):
            fresh = self._ask(batch, rows, new_rows)
        documents = [document for row in rows for document in row]
        if fresh is None:
            values = self.store.gather(documents)() if reading is None else reading.result()
            fresh = {name: to_device(value, batch["input_ids"].device) for name, value in values.items()}
        self.store.forget()
        return targets_of(self.store.manifest, {**batch, **fresh}, self.parts.head.weight.dtype)

    def _any_process(self, here: bool) -> bool:
        """Whether the teacher is to be called: of a sharded one all processes call it, or none does."""
        if not self.is_collective:
            return here
        flag = torch.tensor(int(here), device=self.parts.device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag)

    def _ask(
        self, batch: Batch, rows: Sequence[Sequence[Document]], new_rows: Sequence[int]
    ) -> dict[str, torch.Tensor] | None:
        """Ask the teacher for rows and store what it says; returns that of a batch that was all new, in its order."""
        plain = self.student_batch(batch, True)
        repeats = sum(map(len, rows)) - len({d.key for row in rows for d in row if not self.store.has(d.key)})
        indices = list(new_rows) or list(range(len(batch["input_ids"])))  # a process with nothing to ask goes along
        if any(row and n not in set(indices) for n, row in enumerate(rows)):
            plain = {name: plain[name][indices] for name in ("input_ids", "position_ids", "labels") if name in plain}
        else:
            indices = list(range(len(batch["input_ids"])))
        hidden = self.parts.hidden_states(plain)
        if not new_rows:
            return None
        width, places, ends = batch["input_ids"].shape[1], [], 0
        for n, row in enumerate(rows):  # of each row's learned positions, where they are among the rows asked
            begins, ends = ends, ends + sum(len(document.predicting) for document in row)
            if n in indices:
                places.append(batch["valid_rows"][begins:ends] + (indices.index(n) - n) * width)
        place, documents = torch.cat(places), [document for n in indices if n < len(rows) for document in rows[n]]
        labels = shift_labels(plain["labels"]).flatten()[place]
        seed = int.from_bytes(documents[0].key[:7], "little") ^ int(self.store.manifest["seed"])
        generator = torch.Generator(hidden.device).manual_seed(seed)
        tensors = stored_tensors(self.store.manifest, hidden.flatten(0, 1)[place], labels, self.parts, generator)
        self.store.add(documents, tensors)
        if repeats or not self.store.is_hidden:
            return None
        return {f"{PREFIX}{name}": tensor for name, tensor in tensors.items()}

    def settle(self) -> None:
        """Of what is stored twice, another may be read from now on: nothing is read before."""
        for reading in self._reading.values():
            reading.cancel()
        self._reading.clear()
        self.store.settle()

    def close(self) -> None:
        """A part that is being written is whole when this returns; nothing more is read."""
        self._pool.shutdown(cancel_futures=True)
        self.store.finish_writing()

    def head_rows(self) -> list[int]:
        """Rows of the head, or the columns that K tokens were taken of."""
        return super().head_rows() if self.store.is_hidden else [self.store.columns]

    def head_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.inner.head_tensors()

    def works(self) -> dict[str, Work | None]:
        """Not known: as often as it is asked."""
        return {"": None}

    def to(self, device: torch.device) -> None:
        self.inner.to(device)

    def cut_student(self, section: Student, device: torch.device, dtype: torch.dtype) -> CutStudent:
        return self.inner.cut_student(section, device, dtype)

    def quantise(self) -> None:
        self.inner.quantise()

    def prove(self, batch: Batch, student: nn.Module | None, pairing: Pairing) -> list[str]:
        """What quantising the teacher costs, and what storing its hidden states in fp8 does."""
        plain = self.student_batch(batch, False)
        lines = self.inner.prove(plain, student, pairing)
        dtype = DTYPES[self.store.manifest["dtype"]]
        if dtype.itemsize == 1:
            hidden = self.parts.hidden_states(plain).flatten(0, 1)[batch["valid_rows"]]
            cost = rounding_cost(hidden, self.parts.head, self.parts.transform, pairing.columns, dtype)
            lines.append(f"{'keep':<12}hidden states in fp8: on one batch KL(teacher, what is stored) {cost:.2g}")
        return lines

    def respond(self, prompts: Sequence[Prompt], settings: Generate) -> list[str] | None:
        """Its answers, which are stored for runs that will not load it."""
        answers, folder = self.inner.respond(prompts, settings), self.store.folder
        fills = folder is not None and self.store.writes and not (folder / MANIFEST).is_file()
        if answers is not None and folder is not None and fills and is_first():
            paired = dict(zip(prompts, answers, strict=True))
            write_signed(folder / ANSWERS, {"max_new_tokens": settings.max_new_tokens, "answers": paired})
        return answers

    def small(self, layers: Sequence[int]) -> KeptTeacher:
        """A small teacher whose words are not kept."""
        return KeptTeacher(self.inner.small(layers), Store(self.store.manifest, None, {}))

    def __deepcopy__(self, memo: dict[int, object]) -> KeptTeacher:
        """A copy that stores nothing: its model may be changed."""
        return KeptTeacher(copy.deepcopy(self.inner, memo), Store(self.store.manifest, None, {}))

    def fingerprint(self) -> dict[str, object]:
        return fingerprint_of(self.store.manifest)


class StoredTeacher(CachedTeacher):
    """The same teacher once all that a run needs is stored: a cache, without weights.

    Args:
        cache: complete.
        device: where the stored head is held.
        load: the model that made it, where a student is cut that is not stored.
    """

    def __init__(self, cache: TeacherCache, device: torch.device, load: Callable[[], LoadedTeacher]) -> None:
        super().__init__(cache, device)
        self.load = load

    def cut_student(self, section: Student, device: torch.device, dtype: torch.dtype) -> CutStudent:
        """The student that lies in the cache; one of other layers is cut from the model, which is let go again."""
        try:
            return super().cut_student(section, device, dtype)
        except ValueError:
            return self.load().cut_student(section, device, dtype)

    def fingerprint(self) -> dict[str, object]:
        return fingerprint_of(self.cache.manifest)


IDENTITY = ("kind", "k", "tail", "temperature", "dtype", "vocabulary", "hidden", "scale", "softcap", "teacher", "text")


def fingerprint_of(plan: Plan) -> dict[str, object]:
    """Of what is stored and by whom: the same whether the weights are loaded or not."""
    identity = {name: plan.get(name) for name in (*IDENTITY, "weights")}
    return {"kept_sha256": hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()}
