"""Several teachers in a run: the models as one module, and the objective that compares with their mixture.

    p_t = sum_k w_k softmax(z_k / T)

The student learns the mixture of the teachers' probabilities, made in the fused pass (`distill_kernels.TeacherHead`);
held-out figures are against the mixture too. All teachers see the same tokens, so they share one vocabulary. Each is
loaded for itself, also where two of them are the same model with different adapters.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from distill_kernels import TeacherHead
from torch import nn

from distill.models.head import HeadWeights, LogitShape, find_head, probe_logits, whole
from distill.models.load import load_teacher, load_tokenizer
from distill.models.precision import COMPUTE, Precision
from distill.models.vocabulary import compare
from distill.recipe import Recipe
from distill.teachers.objective import Comparison, DistillationObjective, Reading, last_hidden

log = logging.getLogger(__name__)


def load_several(
    recipe: Recipe, tokenizer: Any, device: torch.device, precision: Precision, sharing: Any, choices: Any
) -> Any:
    """What `load_models` gives, for a recipe with `teachers`; `teacher` is a `TeacherGroup`.

    Raises:
        ValueError: a teacher whose tokens or rules differ from the first one's, and what `load_models` refuses.
    """
    from distill.teachers.opening import check_length, check_packing, load_models

    for number, section in enumerate(recipe.teachers[1:], 1):
        if tokenizer is not None:  # before gigabytes are read
            compare(tokenizer, load_tokenizer(section, f"teachers.{number}")).require(field=f"teachers.{number}.model")
    if sharing.teacher_sharded:
        raise ValueError(
            "parallel.teacher: several teachers cannot be sharded over the devices, and do not fit as copies; name "
            "fewer or smaller ones, or set it to copied"
        )
    models = load_models(
        recipe.model_copy(update={"teachers": []}), tokenizer, device, precision, sharing, choices
    )  # fmt: skip
    members = [models.teacher]
    for number, section in enumerate(recipe.teachers[1:], 1):
        if any(section.model == other.model and section.config == other.config for other in recipe.teachers[:number]):
            log.info("teachers.%d: %s is loaded a second time", number, section.model or section.config)
        dtype = precision.teacher if section.dtype == "auto" else COMPUTE[section.dtype]
        members.append(load_teacher(section, device=device, dtype=dtype))
        check_length(recipe, members[-1], f"teachers.{number}")
        check_packing(recipe, members[-1], f"teachers.{number}")
    rows = [len(find_head(model).linear.weight) for model in members]  # type: ignore[arg-type]
    group = TeacherGroup(members, [section.weight for section in recipe.teachers])
    return models._replace(
        teacher=group, vocab_size=min(models.vocab_size or min(rows), *rows), objective=MixtureObjective
    )


class TeacherGroup(nn.Module):
    """Several causal language models and their shares.

    Args:
        members: the models, over one vocabulary.
        shares: their weights in the mixture, >= 0, not all 0; kept divided by their sum.
    """

    def __init__(self, members: Sequence[nn.Module], shares: Sequence[float]) -> None:
        super().__init__()
        if len(members) != len(shares) or not members or min(shares) < 0 or sum(shares) <= 0:
            raise ValueError(
                f"teachers: expected a weight >= 0 for each of {len(members)} models, not all 0; came {list(shares)}"
            )
        self.members = nn.ModuleList(members)
        self.shares = tuple(share / sum(shares) for share in shares)

    @property
    def config(self) -> Any:
        """Of the first teacher, whose tokenizer makes the data."""
        return self.members[0].config

    @property
    def generation_config(self) -> Any:
        """Of the first teacher."""
        return self.members[0].generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self.members[0].generation_config = value

    def generate(self, **arguments: Any) -> Any:
        """As `generate` of transformers; each token is drawn from the mixture.

        The first teacher keeps a cache, the others read the whole text for every token: meant for samples, not bulk.
        """
        from transformers import LogitsProcessorList

        first: Any = self.members[0]
        return first.generate(**arguments, logits_processor=LogitsProcessorList([self._mix_scores]))

    def _mix_scores(self, ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """The mixture's log-probabilities [B, V] in place of the first teacher's scores."""
        rows = [scores]
        rows += [model(input_ids=ids, use_cache=False).logits[:, -1] for model in self.members[1:]]
        columns = min(row.shape[-1] for row in rows)
        mixed = torch.full_like(scores, -torch.inf)
        parts = [share * row[:, :columns].float().softmax(-1) for share, row in zip(self.shares, rows, strict=True)]
        mixed[:, :columns] = torch.stack(parts).sum(0).log().to(scores.dtype)
        return mixed  # type: ignore[return-value]


class MixtureObjective(DistillationObjective):
    """`DistillationObjective` against the mixture of a `TeacherGroup`."""

    def read(self, student: nn.Module, vocab_size: int | None) -> Reading:
        """Probe every teacher; the columns are those that all heads have."""
        members = self.teacher.members
        self.shapes = [probe_logits(model, f"teachers.{number}") for number, model in enumerate(members)]
        rows = [len(find_head(model).linear.weight) for model in (student, *members)]  # type: ignore[arg-type]
        if vocab_size is not None and not 0 < vocab_size <= min(rows):
            raise ValueError(f"vocab_size: expected 1 to {min(rows)} (rows of the heads: {rows}), got {vocab_size}")
        columns = vocab_size or min(rows)
        return Reading(
            probe_logits(student, "student"), LogitShape(), None if columns == max(rows) else columns
        )  # fmt: skip

    @property
    def columns(self) -> int:
        """Columns of the vocabulary that the loss is over."""
        return self.reading.vocab_size or len(find_head(self.teacher.members[0]).linear.weight)  # type: ignore[arg-type]

    def signal(self, inputs: Mapping[str, Any]) -> Any:
        """Each teacher's last hidden states, [B, S, its hidden size]; None where the loss needs none."""
        if not self.loss.objective.needs_teacher:
            return None
        return tuple(last_hidden(model, inputs) for model in self.teacher.members)

    def loss_of(
        self,
        hidden: torch.Tensor,
        head: HeadWeights,
        comparison: Comparison,
        labels: torch.Tensor,
        valid_rows: torch.Tensor | None,
    ) -> Any:
        """As of `DistillationObjective`, against the mixture."""
        with contextlib.ExitStack() as gathered:
            teachers = None
            if comparison.signal is not None:
                heads = [gathered.enter_context(whole(find_head(model))) for model in self.teacher.members]
                teachers = [
                    TeacherHead(states, found.weight, share, found.bias, shape.scale, shape.softcap)
                    for states, found, share, shape in zip(
                        comparison.signal, heads, self.teacher.shares, self.shapes, strict=True
                    )
                ]
            shared = self.arguments(head, comparison, valid_rows)
            return self.loss(hidden, head.weight, labels=labels, teachers=teachers, **shared)
