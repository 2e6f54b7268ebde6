"""Definition of a distillation loss: weighted terms, validated and reduced to the numbers that the kernels need."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from distill_kernels.launch import constant_in_graphs
from distill_kernels.losses import DIVERGENCES, with_parameter


def plain_number(value: Any, name: str = "terms") -> Any:
    """Return the number in a zero-dimensional tensor, since caches key tensors by identity; other values unchanged.

    Raises:
        ValueError: naming the setting whose tensor lies on a GPU, where reading it would be a host sync.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type != "cpu":
        raise ValueError(f"{name}: expected a number, or a tensor on the CPU, got one on {value.device}")
    return value.tolist()


class LossTerm(NamedTuple):
    """One weighted term of a loss.

    Attributes:
        type: cross_entropy, or a divergence: forward_kl, reverse_kl, jsd, skew_forward_kl, skew_reverse_kl, tvd.
        weight: factor of the term, >= 0. A term of weight 0 is not computed.
        beta: the teacher's share of the mixture, for jsd only, in [0, 1]; 0.5 if not given.
        alpha: the skew, for skew_forward_kl and skew_reverse_kl only, in [0, 1); 0.1 if not given.
    """

    type: str
    weight: float
    beta: float | None = None
    alpha: float | None = None


class TokenStats(NamedTuple):
    """Statistics of every token, fp32 [N], at temperature 1, natural logarithms; zero on rows that were skipped.

    Attributes:
        divergence: the weighted sum of the loss's divergence terms (at temperature 1, without the factor T^2).
        cross_entropy: -log p_student[label], without smoothing; 0 without labels.
        student_entropy: entropy of the student's distribution.
        teacher_entropy: entropy of the teacher's distribution; 0 without a teacher.
        agreement: 1 where one token has the highest probability under both models and no other token has it under
            either, else 0: a tie is no agreement.
        student_label_logprob: log p_student[label]; 0 without labels.
        teacher_label_logprob: log p_teacher[label]; 0 without labels or teacher.
    """

    divergence: torch.Tensor
    cross_entropy: torch.Tensor
    student_entropy: torch.Tensor
    teacher_entropy: torch.Tensor
    agreement: torch.Tensor
    student_label_logprob: torch.Tensor
    teacher_label_logprob: torch.Tensor


@constant_in_graphs  # of numbers known while tracing; json itself cannot be traced
def _as_text(values: tuple[Any, ...]) -> str:
    return json.dumps(values)


class Objective(NamedTuple):
    """A loss in the form that row kernels take: static, hashable, checked.

    The loss of a row is `sum_i weights[i] * D_i(kinds[i], parameters[i]) + hard_weight * (CE + z_loss * lse^2)`;
    `weights` hold the factor T^2 already. A soft cap of 0 means none.
    """

    kinds: tuple[str, ...]
    weights: tuple[float, ...]
    parameters: tuple[float, ...]
    divergence_weights: tuple[float, ...]
    hard_weight: float = 0.0
    temperature: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    student_scale: float = 1.0
    student_softcap: float = 0.0
    teacher_scale: float = 1.0
    teacher_softcap: float = 0.0

    @property
    def needs_teacher(self) -> bool:
        """True where a divergence is part of the loss."""
        return bool(self.kinds)

    @property
    def stable_top(self) -> bool:
        """True where `g - p_s sum(g)` cancels at p_s near 1 and takes another form; see `divergence.logit_gradient`."""
        return any(DIVERGENCES[kind].stable_top for kind in self.kinds)

    @property
    def codes(self) -> tuple[int, ...]:
        """Places of the kinds in the table, which name them in kernels."""
        return tuple(list(DIVERGENCES).index(kind) for kind in self.kinds)

    @property
    def subtract_sum(self) -> bool:
        """True where the gradient needs `sum(g)`."""
        return not all(DIVERGENCES[kind].g_sums_to_0 for kind in self.kinds)

    @property
    def hard_label_flags(self) -> dict[str, bool]:
        """Constants of kernels that compute the hard-label term."""
        return {
            "HARD": self.hard_weight != 0.0,
            "SMOOTHED": self.label_smoothing != 0.0,
            "Z_LOSS": self.z_loss != 0.0,
        }

    @property
    def transform(self) -> tuple[float, float]:
        """The student's logit scale and the inverse of its soft cap, 0 without one."""
        return self.student_scale, 1.0 / self.student_softcap if self.student_softcap else 0.0

    @property
    def transform_flags(self) -> dict[str, bool]:
        """Constants of kernels that apply `transform`."""
        return {"SCALED": self.student_scale != 1.0, "CAPPED": self.student_softcap != 0.0}

    def encode(self) -> str:
        """Return the objective as text, for operators whose arguments must be plain."""
        return _as_text(tuple(self))

    @staticmethod
    def decode(text: str) -> Objective:
        """Return the objective that `encode` made `text` of."""
        kinds, weights, parameters, divergence_weights, *rest = json.loads(text)
        return Objective(tuple(kinds), tuple(weights), tuple(parameters), tuple(divergence_weights), *rest)


def _check_range(name: str, value: float, low: float, high: float = math.inf, *, open_high: bool = False) -> float:
    """Return `value` as a float within [low, high] (or [low, high)), or a ValueError that names it."""
    number = float(value)
    inside = low <= number < high if open_high else low <= number <= high
    if not inside or math.isinf(number):
        bracket = ")" if open_high or math.isinf(high) else "]"
        raise ValueError(f"{name}: expected a number in [{low:g}, {high:g}{bracket}, got {value!r}")
    return number


def _divergence(term: LossTerm) -> tuple[str, float]:
    """Return a term's kind and parameter, with a mixture at the end of its range reduced to the plain divergence."""
    row = DIVERGENCES[term.type]
    if not row.parameter:
        return term.type, 0.0
    given = getattr(term, row.parameter)
    name = f"{term.type}.{row.parameter}"
    value = _check_range(name, row.default if given is None else given, 0.0, 1.0, open_high=row.below_1)
    return (row.limits[value], 0.0) if value in row.limits else (term.type, value)


def make_objective(
    terms: Sequence[LossTerm],
    *,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = True,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    student_logit_scale: float = 1.0,
    student_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
) -> Objective:
    """Check `terms` and their settings and reduce them to an `Objective`.

    Terms of weight 0 are left out, equal divergences are added up, and the factor T^2 is multiplied in.

    Args:
        terms: several terms of one type are allowed.
        temperature: softmax temperature T > 0 of the divergences.
        scale_by_temperature_squared: multiply divergences by T^2 (Hinton et al., 2015).
        label_smoothing: share of the hard target that is spread over the vocabulary, [0, 1].
        z_loss: weight of the squared log-normaliser, >= 0.
        student_logit_scale, teacher_logit_scale: factors of the logits, > 0.
        student_softcap, teacher_softcap: `cap * tanh(z / cap)` after the factor, or None.

    Raises:
        ValueError: naming the field, for an unknown type, a number out of range, a parameter that the type does not
            take, or terms of which none has a weight above 0.
    """
    temperature = _check_range("temperature", temperature, 0.0)
    if temperature == 0.0:
        raise ValueError("temperature: expected a number above 0, got 0")
    known = [*DIVERGENCES, "cross_entropy"]
    weights: dict[tuple[str, float], float] = {}
    hard_weight = 0.0
    for index, term in enumerate(terms):
        if term.type not in known:
            raise ValueError(f"terms[{index}].type: expected one of {', '.join(known)}, got {term.type!r}")
        weight = _check_range(f"terms[{index}].weight", term.weight, 0.0)
        for name in ("beta", "alpha"):
            given = getattr(term, name)
            takes = with_parameter(name)
            if given is not None and term.type not in takes:
                expected = f"None, since only {' and '.join(takes)} have it"
                raise ValueError(f"terms[{index}].{name}: expected {expected}, got {given!r} for {term.type}")
        if term.type == "cross_entropy":
            hard_weight += weight
            continue
        kind = _divergence(term)
        if weight > 0.0:
            weights[kind] = weights.get(kind, 0.0) + weight
    if not weights and hard_weight == 0.0:
        raise ValueError(f"terms: expected at least one term of weight above 0, got {list(terms)!r}")
    label_smoothing = _check_range("label_smoothing", label_smoothing, 0.0, 1.0)
    z_loss = _check_range("z_loss", z_loss, 0.0)
    if hard_weight == 0.0 and (label_smoothing or z_loss):
        raise ValueError(
            "label_smoothing, z_loss: expected a cross_entropy weight above 0, whose part they are, got weight 0"
        )
    for name, scale in (("student_logit_scale", student_logit_scale), ("teacher_logit_scale", teacher_logit_scale)):
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"{name}: expected a finite number above 0, got {scale!r}")
    for name, cap in (("student_softcap", student_softcap), ("teacher_softcap", teacher_softcap)):
        if cap is not None and not (math.isfinite(cap) and cap > 0):
            raise ValueError(f"{name}: expected None or a finite number above 0, got {cap!r}")
    factor = temperature**2 if scale_by_temperature_squared else 1.0
    return Objective(
        kinds=tuple(kind for kind, _ in weights),
        weights=tuple(weight * factor for weight in weights.values()),
        parameters=tuple(parameter for _, parameter in weights),
        divergence_weights=tuple(weights.values()),
        hard_weight=hard_weight,
        temperature=temperature,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        student_scale=float(student_logit_scale),
        student_softcap=float(student_softcap or 0.0),
        teacher_scale=float(teacher_logit_scale),
        teacher_softcap=float(teacher_softcap or 0.0),
    )
