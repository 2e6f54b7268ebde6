"""Several teachers in a run: the student learns the mixture of their probabilities.

    p_t = sum_k w_k softmax(z_k / T)

The mixture is made in the fused pass (`distill_kernels.TeacherHead`); held-out figures are against it too. All teachers
share one vocabulary; those with a context read it before each answer, the same one in a mixture. Each is loaded for
itself, also where two of them are the same model with different adapters; of a route some may be served or cached
(`distill.teachers.combination.routes`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from distill_kernels import TeacherHead
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList

from distill.core.ranks import is_main_process
from distill.data.collator import BatchColumns, BatchRow, Collator
from distill.generation.engines import greedy_responses
from distill.models.head import LogitTransform
from distill.models.load.fingerprint import model_identity
from distill.objectives.hidden import FusedFormat, HiddenFormat, pairing_of
from distill.objectives.losses import TargetLoss
from distill.objectives.targets import Batch, HeadForward, LossResult, TargetProperties, VocabularyAlignment
from distill.recipe import Generate
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.base import AcceptedRows, Constructor, InnerTeacher, Prompt, Teacher
from distill.teachers.rows.context.data import ContextColumns
from distill.teachers.rows.reading import PREFIX

log = logging.getLogger(__name__)
MEMBER = re.compile(r"member\d+_")  # prefix of a member's own columns


class MixtureFormat(FusedFormat):
    """Each teacher's last hidden states, and all their heads; its scale and cap travel with its head.

    Args:
        weights: Mixing weights of the teachers' probabilities, with sum 1.
    """

    def __init__(self, members: Sequence[HiddenFormat], weights: Sequence[float]) -> None:
        self.members = list(members)
        self.weights = tuple(weights)
        self.properties = TargetProperties(tuple(member.head.rows for member in self.members))

    def pair(self, student: LogitTransform, rows: int, vocab_size: int | None) -> VocabularyAlignment:
        heads = {f"teachers.{number}": columns for number, columns in enumerate(self.properties.columns)}
        return pairing_of(student, {"student": rows, **heads}, vocab_size)

    def apply(self, loss: TargetLoss, alignment: VocabularyAlignment, call: HeadForward) -> LossResult:
        targets: Any = call.inputs.targets
        # all heads at once: the fused loss mixes their probabilities tile by tile, and sharded ones are gathered
        # meanwhile
        with contextlib.ExitStack() as opened:
            heads = None
            if targets is not None:
                weights = [opened.enter_context(member.head.open()) for member in self.members]
                heads = [
                    TeacherHead(hidden, head.weight, share, head.bias, member.transform.scale, member.transform.softcap)
                    for hidden, head, share, member in zip(targets, weights, self.weights, self.members, strict=True)
                ]
            arguments = alignment.arguments(call) | {"return_stats": call.inputs.statistics}
            fused: Any = loss
            return fused(call.hidden, call.head.weight, labels=call.labels, teachers=heads, **arguments)

    def scores(self, targets: object, rows: torch.Tensor) -> torch.Tensor:
        assert isinstance(targets, tuple)
        each = [member.scores(hidden, rows) for member, hidden in zip(self.members, targets, strict=True)]
        columns = min(logits.shape[-1] for logits in each)
        parts = zip(self.weights, each, strict=True)
        return sum((share * logits[:, :columns].softmax(-1) for share, logits in parts), each[0].new_zeros(()))


def models_of(teacher: Teacher) -> Mapping[str, nn.Module]:
    """Return the models that identify a teacher; none of one with a store, which needs none once that is full."""
    return {} if teacher.stores_outputs else teacher.models


class SeveralTeachers(Teacher):
    """Common base of mixtures and of routed teachers.

    Args:
        members: the teachers, or causal language models; all give hidden states.
    """

    def __init__(self, members: Sequence[Teacher | nn.Module]) -> None:
        self.members: list[Teacher] = [
            LoadedTeacher(member, field=f"teachers.{number}") if isinstance(member, nn.Module) else member
            for number, member in enumerate(members)
        ]
        self.models = {name: model for member in self.members for name, model in member.models.items()}
        self.rows = AcceptedRows(
            supports_new_rows=all(member.rows.supports_new_rows for member in self.members),
            whole_documents=any(member.rows.whole_documents for member in self.members),
        )

    def parts(self) -> list[InnerTeacher]:
        return [
            InnerTeacher(member, self.prefix_of(number), functools.partial(self.member_batch, number))
            for number, member in enumerate(self.members)
        ]

    def prefix_of(self, number: int) -> str:
        return ""

    def member_batch(self, number: int, batch: Batch) -> Batch | None:
        raise NotImplementedError

    def batches(self, batch: Batch) -> Iterator[tuple[int, Teacher, Batch]]:
        """Yield number, teacher and batch of each member that reads some of a batch."""
        for number, member in enumerate(self.members):
            own = self.member_batch(number, batch)
            if own is not None:
                yield number, member, own

    def elsewhere(self) -> dict[str, object]:
        """Return the fingerprints of the members whose weights are not in this process, or need not be."""
        return {f"member {number}": m.fingerprint() for number, m in enumerate(self.members) if not models_of(m)}


class MixtureTeacher(SeveralTeachers):
    """Several teachers of hidden states over one vocabulary.

    Args:
        members: the teachers, or causal language models.
        weights: Mixing weights of the teachers' probabilities, >= 0 and not all 0; divided by their sum.
    """

    def __init__(self, members: Sequence[Teacher | nn.Module], weights: Sequence[float]) -> None:
        if len(members) != len(weights) or not members or min(weights) < 0 or sum(weights) <= 0:
            raise ValueError(
                f"teachers: expected a weight >= 0 for each of {len(members)} models, not all 0; got {list(weights)}"
            )
        super().__init__(members)
        if not all(isinstance(member.format, HiddenFormat) for member in self.members):
            raise ValueError("teachers: expected several teachers that give hidden states, got one that gives top k")
        self.weights = tuple(weight / sum(weights) for weight in weights)
        self.format = MixtureFormat([cast("HiddenFormat", member.format) for member in self.members], self.weights)
        if any(member.rows.reading == "context" for member in self.members):
            self.rows = self.rows._replace(reading="context")
            # once for all members, and for on-policy, which replaces responses after the teachers' prompt too
            self.columns = (ContextColumns(),)
        self.columns = (*self.columns, MixtureColumns([member.columns for member in self.members]))

    def student_batch(self, batch: Batch, needs_targets: bool) -> dict[str, torch.Tensor]:
        for _, member, own in self.batches(batch):
            member.student_batch(own, needs_targets)  # raises where a column is missing
        return {name: value for name, value in batch.items() if not MEMBER.match(name) and not name.startswith(PREFIX)}

    def member_batch(self, number: int, batch: Batch) -> Batch:
        own = f"member{number}_"
        # columns that all members read alike are in the batch once; a member's own take their place under the plain
        # name
        plain = {name: value for name, value in batch.items() if not MEMBER.match(name)}
        named = {name.removeprefix(own): value for name, value in batch.items() if name.startswith(own)}
        return {**plain, **named}

    def targets(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        return tuple(cast("torch.Tensor", member.targets(own)) for _, member, own in self.batches(batch))

    def respond(self, prompts: Sequence[Prompt], settings: Generate) -> list[str] | None:
        """Return responses sampled from the mixture; None where one of the teachers is not loaded or has a context."""
        first = self.members[0]
        if len(self.models) < len(self.members) or self.rows.reading != "same" or not is_main_process():
            return None
        assert isinstance(first, LoadedTeacher)
        group = MixtureModel(list(self.models.values()), self.weights)
        if first.tokenizer is None:
            return None
        return greedy_responses(group, first.tokenizer, prompts, settings.max_new_tokens)

    def constructor(self) -> Constructor:
        return MixtureTeacher, (self.members, self.weights)

    def truncated_copy(self, layers: Sequence[int]) -> MixtureTeacher:
        return MixtureTeacher([member.truncated_copy(layers) for member in self.members], self.weights)

    def fingerprint(self) -> dict[str, object]:
        models = [model for member in self.members for model in models_of(member).values()]
        return (model_identity(MixtureModel(models, self.weights)) if models else {}) | self.elsewhere()


@dataclass(frozen=True)
class MixtureColumns:
    """Columns of each member of a mixture under `member{n}_`, but those that the batch has already."""

    members: Sequence[Sequence[BatchColumns]]

    def __call__(
        self, rows: Sequence[BatchRow], batch: Mapping[str, Any], collator: Collator
    ) -> dict[str, torch.Tensor]:
        return {
            f"member{number}_{name}": value
            for number, columns in enumerate(self.members)
            for name, value in replace(collator, columns=columns).extend(rows, batch).items()
            if name not in batch
        }


class MixtureModel(nn.Module):
    """Several causal language models that generate together: each token is sampled from the mixture.

    The first one has a KV cache, the others read the whole text for every token: meant for samples, not bulk.
    """

    def __init__(self, members: Sequence[nn.Module], weights: Sequence[float]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.weights = tuple(weights)

    @property
    def config(self) -> Any:
        return self.members[0].config

    @property
    def generation_config(self) -> Any:
        return self.members[0].generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self.members[0].generation_config = value

    def generate(self, *, logits_processor: Sequence[LogitsProcessor] = (), **arguments: Any) -> Any:
        """Return what `generate` of transformers does, with tokens sampled from the mixture."""
        first: Any = self.members[0]
        processors = LogitsProcessorList([self._mix_scores, *logits_processor])
        return first.generate(**arguments, logits_processor=processors)

    def _mix_scores(self, ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the mixture's log-probabilities [B, V] in place of the first model's scores."""
        rows = [scores]
        rows += [model(input_ids=ids, use_cache=False).logits[:, -1] for model in self.members[1:]]
        # heads may be padded to different sizes: tokens that one of them lacks are never drawn
        columns = min(row.shape[-1] for row in rows)
        mixed = torch.full_like(scores, -torch.inf)
        parts = [weight * row[:, :columns].float().softmax(-1) for weight, row in zip(self.weights, rows, strict=True)]
        mixed[:, :columns] = torch.stack(parts).sum(0).log().to(scores.dtype)
        return mixed  # type: ignore[return-value]
