"""A remote teacher, on other GPUs or another host, whose outputs are prefetched."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from distill.core.errors import TeacherUnavailableError
from distill.data.collator import trained_rows
from distill.models.head import HeadWeights, LogitTransform
from distill.models.loading import load_teacher
from distill.models.precision.host_copy import to_device
from distill.objectives.hidden import HiddenFormat, StoredHead
from distill.objectives.targets import Batch, TargetFormat, VocabularyAlignment
from distill.objectives.top_k import TopKFormat, TopKTargets, spread, top_k_targets
from distill.recipe import TeacherConfig
from distill.teachers.backends.served.parity_check import LogitReading, check_parity
from distill.teachers.backends.served.protocol import TargetRequest
from distill.teachers.backends.served.teacher_client import ServedTargets, TargetTensors, TeacherClient
from distill.teachers.base import Constructor, Teacher
from distill.teachers.calibration import cut_from
from distill.teachers.load_context import CutRequest, CutStudent

SERVED = "served"  # column of a batch: the query to the servers
MOST_PENDING = 4096  # answers that were not collected


def query_of(batch: Batch) -> TargetRequest:
    return TargetRequest.of(batch, trained_rows(batch))


def query_column(rows: object, batch: Batch, collator: object) -> dict[str, TargetRequest]:
    return {SERVED: query_of(batch)}


class ServerTeacher(Teacher):
    """Outputs of servers for the rows of a batch, requested by `prefetch` and awaited by `targets`.

    Args:
        identity: Identity of the teacher, for the lock file.
        transform: Scale and soft cap from the product with the head to the logits; an attribute too.
        head: LM-head weights; None where top-k targets are sent.
        dtype: Weight dtype of a student that is cut from the model named there.
    """

    columns = (query_column,)

    def __init__(
        self,
        client: TeacherClient,
        identity: dict[str, object],
        transform: LogitTransform,
        head: HeadWeights | None,
        section: TeacherConfig,
        dtype: torch.dtype,
    ) -> None:
        self.client = client
        self.identity = identity
        self.section = section
        self.dtype = dtype
        self.stored_head = None if head is None else StoredHead(head, "the head of the served teacher")
        spec = client.spec
        self.format: TargetFormat = (
            TopKFormat(spec.manifest(transform.scale, transform.softcap))
            if self.stored_head is None
            else HiddenFormat(self.stored_head, transform)
        )
        self.transform = transform
        self._pending: OrderedDict[TargetRequest, ServedTargets] = OrderedDict()  # not collected yet, the oldest first

    def __deepcopy__(self, memo: dict[int, object]) -> ServerTeacher:
        """Return a copy of the same servers' teacher, which shares the connections."""
        return copy.copy(self)

    def student_batch(self, batch: Batch, needs_targets: bool) -> dict[str, torch.Tensor]:
        return {name: value for name, value in batch.items() if name != SERVED}

    @property
    def prefetch_depth(self) -> int:
        return self.section.prefetch_depth

    def prefetch(self, batch: Batch) -> None:
        query = self._asked(batch)
        if len(query.rows) and query not in self._pending:
            self._pending[query] = self.client.ask(query)
            while len(self._pending) > MOST_PENDING:
                self._pending.popitem(last=False)

    def prefetch_error(self, batches: Sequence[Batch]) -> str | None:
        for batch in batches:
            answer = self._pending.get(self._asked(batch))
            if answer is not None:
                try:
                    answer.result()
                except TeacherUnavailableError as gone:
                    return str(gone)
        return None

    def targets(self, batch: Batch) -> torch.Tensor | TopKTargets:
        """Return the targets at their positions; 0 where no token is trained."""
        values = self.sent(batch)
        shape = batch["input_ids"].shape
        device = batch["input_ids"].device
        if device.type != "cpu":
            values = {name: to_device(value, device) for name, value in values.items()}
        rows = trained_rows(batch)
        if self.stored_head is not None:
            return spread(values["hidden"], rows, shape)
        return top_k_targets(values, rows, shape, self.client.spec.tail)

    def sent(self, batch: Batch) -> TargetTensors:
        return self.values(self._asked(batch))

    def values(self, query: TargetRequest) -> TargetTensors:
        """Return the servers' outputs for some rows, on the CPU.

        Raises:
            TeacherUnavailableError: no answer came in time, or none that is valid.
        """
        if not len(query.rows):
            return self.client.spec.nothing()
        answer = self._pending.pop(query, None) or self.client.ask(query)
        return answer.result()

    @staticmethod
    def _asked(batch: Batch) -> TargetRequest:
        found: Any = batch.get(SERVED)
        return found if found is not None else query_of(batch)

    def size_text(self) -> str:
        spec = self.client.spec
        values = "hidden states" if self.stored_head is not None else f"top {spec.top_k} ({spec.tail})"
        return f"{values} from {', '.join(self.section.urls)}"

    def cut_student(self, request: CutRequest) -> CutStudent:
        """The model that the recipe names beside the server is loaded for that."""
        model = load_teacher(self.section.loaded(), device="cpu", dtype=self.dtype)
        return cut_from(model, request)

    def validate_first_batch(
        self, batch: Batch, student: nn.Module | None, alignment: VocabularyAlignment
    ) -> list[str]:
        self.targets(batch)
        weights = None if self.stored_head is None else self.stored_head.weights
        each = self.client.cost()
        compared = check_parity(LogitReading(self.client, weights, self.transform), self._asked(batch))
        return [f"{'served':<12}{each:,.0f} bytes per trained token; {compared}"]

    def fingerprint(self) -> dict[str, object]:
        spec = self.client.spec
        query = {"top_k": spec.top_k, "tail": spec.tail} if self.stored_head is None else {"send": spec.send}
        return {**self.identity, **query}

    def constructor(self) -> Constructor:
        spec = self.client.spec._asdict() | {"dtype": str(self.client.spec.dtype).removeprefix("torch.")}
        from distill.teachers.backends.served.source import reconnected  # whose plan opens this teacher

        return reconnected, (self.section.model_dump(mode="json"), spec)

    def close(self) -> None:
        self.client.close()
