"""A model on ranks of its own, as the ranks that train see it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import nn

from distill.core.worlds import Worlds
from distill.models.head import LogitTransform
from distill.recipe import Teacher as TeacherSection
from distill.teachers.base import Batch, OpenContext, Pairing, Teacher
from distill.teachers.footprint import Footprint, FootprintContext, SmallerTeacher
from distill.teachers.model import ModelSource
from distill.teachers.ranks.link import LOGITS, StudentLink
from distill.teachers.server.exchange import Exchange, TargetSpec, TargetTensors, require_sound
from distill.teachers.server.proof import LogitReading, prove
from distill.teachers.server.teacher import ServerTeacher
from distill.teachers.server.wire import TargetRequest
from distill.teachers.vocabulary import Vocabulary

FIELD = "parallel.teacher"
LOGITS_BYTES = 64 << 20


class Received(NamedTuple):
    """Hidden states that are under way to this rank's device."""

    future: Future[torch.Tensor]

    def result(self) -> TargetTensors:
        """Them, on their device, for the stream that is current here.

        Raises:
            TeacherGone: the rank that sends them is gone.
        """
        hidden = self.future.result()
        if hidden.is_cuda:  # its memory is another stream's
            hidden.record_stream(torch.cuda.current_stream(hidden.device))
        return {"hidden": hidden}


class RanksExchange(Exchange):
    """With the ranks that hold the teacher.

    Args:
        link: to them.
    """

    field = FIELD

    def __init__(self, link: StudentLink) -> None:
        facts = link.facts
        self.link, self.most_logits = link, max(LOGITS_BYTES // (4 * facts.rows), 1)
        self.spec = TargetSpec(None, facts.rows, facts.width, link.dtype, "bucket", 1.0, "auto", True)

    def ask(self, query: TargetRequest) -> Received:
        return Received(self.link.ask(query))

    def exact(self, query: TargetRequest) -> TargetTensors:
        return require_sound(super().exact(query), len(query.rows), self.spec, FIELD)

    def logits(self, query: TargetRequest) -> torch.Tensor:
        return self.link.ask(query, LOGITS).result().cpu()

    def cost(self) -> float:
        return self.link.received / max(self.link.positions, 1)

    def close(self) -> None:
        self.link.close()


class RanksTeacher(ServerTeacher):
    """What the teacher's ranks say of the rows of a batch: asked for by `submit`, waited for by `fault_of`.

    Args:
        link: to them.
        section: of the model, in whose files a student that is cut from it finds its layers.
        dtype: that it is cut in.
    """

    def __init__(self, link: StudentLink, section: TeacherSection, dtype: torch.dtype) -> None:
        facts = link.facts
        self.link = link
        transform = LogitTransform(facts.scale, facts.softcap)
        super().__init__(RanksExchange(link), facts.fingerprint, transform, link.head, section, dtype)

    def fault_of(self, batches: Sequence[Batch]) -> str | None:
        return super().fault_of(batches) or self.link.worlds.fault()

    def prove(self, batch: Batch, student: nn.Module, pairing: Pairing) -> list[str]:
        self.targets(batch)
        proof = prove(LogitReading(self.exchange, self.link.head, self.transform), self._asked(batch))
        return [f"{'teacher at':<12}{self.exchange.cost():,.0f} bytes a learned token; {proof}"]

    def parameters_text(self) -> str:
        facts, count = self.link.facts, self.link.worlds.teachers
        return f"{facts.parameters} on {count} rank{'s' * (count > 1)} of its own, {facts.held}"

    def fingerprint(self) -> dict[str, object]:
        return self.identity


class RanksSource(ModelSource):
    """The recipe's one model, on ranks of its own where a launch has parted them, else in this process."""

    shardable = False  # over the ranks that train

    def open(self, context: OpenContext, vocabulary: Vocabulary) -> Teacher:  # type: ignore[override]
        if Worlds.current is None:  # a command in one process
            return super().open(context, vocabulary)
        return RanksTeacher(StudentLink(Worlds.current, context.device), self.section, context.precision.teacher)

    def footprint(self, context: FootprintContext) -> Footprint:
        """On a rank that trains: the head, and what was said of a step's micro-batches and the next one's, spread out
        for the one that is trained."""
        meta, train = self.meta(), self.recipe.train
        size, micro = context.precision.teacher.itemsize, train.batch_size * self.recipe.data.max_length * context.world
        ahead = 2 * max((train.tokens_per_step or micro) // micro, self.section.prefetch)
        return Footprint(
            weights=float(meta.shape.head * size), token_bytes=(1 + ahead) * size * meta.shape.hidden, work=meta.work
        )

    def smaller(self, family: str | None = None) -> list[SmallerTeacher]:
        """None that a rank which trains would gain by."""
        return []
