"""Conversion of a recipe's `loss` section into the fused losses of `distill_kernels`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from distill_kernels import Clip, FusedDistillationLoss, LossTerm, Temperatures, TokenStats
from torch import nn

from distill.models.head import LogitTransform
from distill.recipe.loss import Clip as ClipSection
from distill.recipe.loss import Loss, TemperaturePair, Term

KL = ({"forward_kl"}, {"reverse_kl"})
STATISTICS = TokenStats._fields
PER_ROUTE = ("tokens", "divergence", "agreement")  # sums that follow the statistics for each route of the teacher

LossSpec = Loss | Mapping[str, object] | Sequence[LossTerm] | str | FusedDistillationLoss


class TargetLoss(Protocol):
    """A loss: its terms with their weights, and the kernels' settings. Only its `TargetFormat` calls it."""

    objective: Any

    @property
    def terms(self) -> Sequence[LossTerm]: ...


class LossOfParts:
    """A loss that is computed by others.

    Attributes:
        terms, objective: See `TargetLoss`.
        measured: The loss whose divergence the statistics report: a part of this one, or computed for metrics alone.
        reads_layers: Whether the loss compares layers of both models.
    """

    terms: Sequence[LossTerm]
    objective: Any
    measured: TargetLoss
    reads_layers = False

    @property
    def parts(self) -> Iterable[Any]:
        """Return the losses that compute this one."""
        raise NotImplementedError


def single_losses(loss: TargetLoss) -> Iterator[Any]:
    """Yield the losses that compute a loss, each with its own `reduction` and `workspace`; one without parts itself."""
    if not isinstance(loss, LossOfParts):
        yield loss
        return
    for part in loss.parts:
        yield from single_losses(part)


def reads_layers(loss: TargetLoss) -> bool:
    return isinstance(loss, LossOfParts) and loss.reads_layers


def measured_terms(loss: TargetLoss) -> Sequence[LossTerm]:
    """Return the terms whose divergence the statistics of a loss report."""
    while isinstance(loss, LossOfParts):
        loss = loss.measured
    return loss.terms


class LogitTransforms(dict[str, Any]):
    """Scale and soft cap of both models' logits, by the names of the fused losses' arguments."""

    def __init__(self, student: LogitTransform, teacher: LogitTransform) -> None:
        super().__init__(
            student_logit_scale=student.scale,
            student_softcap=student.softcap,
            teacher_logit_scale=teacher.scale,
            teacher_softcap=teacher.softcap,
        )


def caps_of(term: Term) -> Clip | None:
    """Return a term's caps as the kernels take them; the `clip` of other terms than divergences is no cap."""
    clip = getattr(term, "clip", None)
    return Clip(clip.token, clip.entry) if isinstance(clip, ClipSection) else None


def temperatures_of(loss: Loss) -> float | Temperatures:
    """Return the temperature, or both models', as the kernels take it."""
    if isinstance(loss.temperature, TemperaturePair):
        return Temperatures(loss.temperature.teacher, loss.temperature.student)
    return loss.temperature


def loss_terms(loss: Loss) -> list[LossTerm]:
    """Return the recipe's terms as the kernels take them; terms of weight 0 are left out."""
    return [
        LossTerm(
            term.type,
            term.weight,
            beta=getattr(term, "beta", None),
            alpha=getattr(term, "alpha", None),
            clip=caps_of(term),
        )
        for term in loss.terms
        if term.weight > 0
    ]


def build_loss(loss: LossSpec, transforms: Mapping[str, Any]) -> FusedDistillationLoss:
    """Return the fused loss for two models whose logits have these scales and soft caps.

    Raises:
        ValueError: a ready-made loss that treats the logits in another way.
    """
    if isinstance(loss, FusedDistillationLoss):
        for name, expected in transforms.items():
            field = name.replace("_logit_scale", "_scale")
            value = getattr(loss.objective, field)
            if value != (expected or 0.0):
                raise ValueError(f"loss.{name}: expected {expected} for these models, got {value}")
        return loss
    if isinstance(loss, str):
        loss = {"terms": [{"type": loss}]}
    if isinstance(loss, Mapping):
        loss = Loss.model_validate(loss)
    if not isinstance(loss, Loss):
        return FusedDistillationLoss(list(loss), **transforms)
    return FusedDistillationLoss(
        loss_terms(loss),
        temperature=temperatures_of(loss),
        scale_by_temperature_squared=loss.scale_by_temperature_squared,
        label_smoothing=loss.label_smoothing,
        z_loss=loss.z_loss,
        **transforms,
    )


class HeldOutLoss(nn.Module):
    """The forward divergence with its statistics, and the reverse one as one statistic more.

    Args:
        loss_of: Function that makes the loss of one term.
        reverse: Whether the targets determine the reverse divergence; else it is NaN.
    """

    def __init__(self, loss_of: Callable[[LossTerm], Any], reverse: bool = True) -> None:
        super().__init__()
        self.forward_kl = loss_of(LossTerm("forward_kl", 1.0))
        self.reverse = loss_of(LossTerm("reverse_kl", 1.0)) if reverse else None
        self.terms = self.forward_kl.terms
        self.objective = self.forward_kl.objective

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the forward loss and its statistics, the reverse divergence last; arguments as of the losses."""
        loss, statistics = self.forward_kl(*args, **kwargs)
        if self.reverse is None:
            return loss, (*statistics, torch.full_like(statistics.divergence, torch.nan))
        return loss, (*statistics, self.reverse(*args, **kwargs)[1].divergence)


def soft_terms(terms: Sequence[LossTerm]) -> list[LossTerm]:
    return [term for term in terms if term.type != "cross_entropy" and term.weight > 0]


def is_soft(loss: Loss) -> bool:
    """Return whether a recipe's loss needs the teacher."""
    return any(term.weight > 0 and term.type != "cross_entropy" for term in loss.terms)


def scaled_by_temperature(loss: FusedDistillationLoss) -> bool:
    """Return whether the divergences of a loss are multiplied by T^2."""
    settings = loss.objective
    return settings.weights != settings.divergence_weights or settings.temperature == 1.0  # the student's
