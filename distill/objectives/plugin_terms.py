"""Loss functions of a plugin as terms of a recipe's loss, over chunks of logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from distill_kernels import ChunkedLoss

from distill.core.labels import IGNORE_INDEX
from distill.models.head import HeadWeights, LogitTransform
from distill.objectives.hidden import HiddenFormat
from distill.objectives.plugin import Plugin, RowLosses
from distill.objectives.targets import HeadForward, TargetFormat, VocabularyAlignment
from distill.recipe.loss import Loss, PluginTerm


class PluginTermLoss:
    """A custom loss term: a function over chunks of logits.

    Args:
        functions: the plugin's, by name.
        term: Plugin term of the recipe.
        section: the recipe's loss.
        pairing: Alignment of the two vocabularies.
        transform: scale and soft cap of the teacher.
    """

    def __init__(
        self,
        functions: Mapping[str, RowLosses],
        term: PluginTerm,
        section: Loss,
        pairing: VocabularyAlignment,
        transform: LogitTransform,
    ) -> None:
        self.term = term
        self.pairing = pairing
        self.reduction = "mean"
        self.workspace: int | None = None
        self.chunked = ChunkedLoss(_with_transforms(functions[term.function], pairing.student, transform))

    def __call__(self, call: HeadForward, teacher: HeadWeights) -> torch.Tensor:
        arguments = self.pairing.arguments(call) | {"teacher_bias": teacher.bias}
        del arguments["return_stats"]
        both = (call.hidden, call.head.weight, call.inputs.targets, teacher.weight, call.labels)
        return self.term.weight * self.chunked(*both, **arguments)


class PluginFormat(HiddenFormat):
    """Hidden states, compared by a plugin's functions too.

    Args:
        inner: the teacher's own format.
        plugin: Functions of the plugin.

    Raises:
        ValueError: a kind of teacher whose logits the functions cannot be given.
    """

    def __init__(self, inner: TargetFormat, plugin: Plugin) -> None:
        if not isinstance(inner, HiddenFormat):
            raise ValueError("--plugin: expected one teacher with hidden states, got several, or top-k outputs")
        super().__init__(inner.head, inner.transform)
        self.separate = {**self.separate, "plugin": functools.partial(PluginTermLoss, plugin.terms)}


def _with_transforms(
    function: RowLosses, student: LogitTransform, teacher: LogitTransform
) -> Callable[..., torch.Tensor]:
    """Return `function` over raw head outputs: each model's scale and soft cap are applied first."""

    def of_raw(raw: torch.Tensor, teacher_raw: Any, labels: Any) -> torch.Tensor:
        losses = function(student.applied(raw), teacher.applied(teacher_raw), labels)
        return torch.where(labels == IGNORE_INDEX, 0.0, losses) if labels is not None else losses

    return of_raw
