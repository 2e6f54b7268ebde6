"""Definition of a distillation loss: weighted terms, validated and reduced to the numbers that the kernels need."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
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


class Clip(NamedTuple):
    """Caps on a divergence's value, in nats, before its weight and T^2; None for no cap.

    Beyond a cap the value is the cap and has no gradient. A divergence is a sum over the vocabulary of terms that are
    never negative (divergence.py); with both caps the entries' comes first.

    Attributes:
        token: cap of a token's divergence.
        entry: cap of each vocabulary entry's term.
    """

    token: float | None = None
    entry: float | None = None


class Temperatures(NamedTuple):
    """Softmax temperatures of the two models' logits, each above 0."""

    teacher: float = 1.0
    student: float = 1.0


class LossTerm(NamedTuple):
    """One weighted term of a loss.

    Attributes:
        type: cross_entropy, or a divergence: forward_kl, reverse_kl, jsd, skew_forward_kl, skew_reverse_kl, tvd.
        weight: factor of the term, >= 0. A term of weight 0 is not computed.
        beta: the teacher's share of the mixture, for jsd only, in [0, 1]; 0.5 if not given.
        alpha: the skew, for skew_forward_kl and skew_reverse_kl only, in [0, 1); 0.1 if not given.
        clip: caps of a divergence, or None.
    """

    type: str
    weight: float
    beta: float | None = None
    alpha: float | None = None
    clip: Clip | None = None


class TokenStats(NamedTuple):
    """Statistics of every token, fp32 [N], at temperature 1, natural logarithms; zero on rows that were skipped.

    Attributes:
        divergence: the weighted sum of the loss's divergence terms (at temperature 1, without the factor T^2, and
            without caps).
        cross_entropy: -log p_student[label], without smoothing; 0 without labels.
        student_entropy: entropy of the student's distribution.
        teacher_entropy: entropy of the teacher's distribution; 0 without a teacher.
        agreement: 1 where one token has the highest probability under both models and no other token has it under
            either, else 0: a tie is no agreement.
        student_label_logprob: log p_student[label]; 0 without labels.
        teacher_label_logprob: log p_teacher[label]; 0 without labels or teacher.
        clipped_tokens: 1 where a term's `Clip.token` caps the token's value, else 0.
        clipped_value: the part of `divergence` that the caps take off the loss, in the proportion that it has at the
            loss's temperatures; 0 without caps.
    """

    divergence: torch.Tensor
    cross_entropy: torch.Tensor
    student_entropy: torch.Tensor
    teacher_entropy: torch.Tensor
    agreement: torch.Tensor
    student_label_logprob: torch.Tensor
    teacher_label_logprob: torch.Tensor
    clipped_tokens: torch.Tensor
    clipped_value: torch.Tensor


@constant_in_graphs  # of numbers known while tracing; json itself cannot be traced
def _as_text(values: tuple[Any, ...]) -> str:
    return json.dumps(values)


class Objective(NamedTuple):
    """A loss in the form that row kernels take: static, hashable, checked.

    The loss of a row is `sum_i weights[i] * D_i(kinds[i], parameters[i]) + hard_weight * (CE + z_loss * lse^2)`;
    `weights` hold the factor T^2 already. A soft cap of 0 means none. `temperature` is the student's; `token_caps` and
    `entry_caps` have a number for each divergence, inf for no cap, or are empty where none is capped.
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
    teacher_temperature: float = 1.0
    token_caps: tuple[float, ...] = ()
    entry_caps: tuple[float, ...] = ()

    @property
    def needs_teacher(self) -> bool:
        """True where a divergence is part of the loss."""
        return bool(self.kinds)

    @property
    def stable_top(self) -> bool:
        """True where `g - p_s sum(g)` cancels at p_s near 1 and takes another form; see `divergence.logit_gradient`."""
        # without its capped entries the forward KL's g no longer sums to 0
        capped = bool(self.entry_caps) and "forward_kl" in self.kinds
        return capped or any(DIVERGENCES[kind].stable_top for kind in self.kinds)

    @property
    def clips(self) -> bool:
        """True where a divergence has a cap."""
        return bool(self.token_caps or self.entry_caps)

    @property
    def unclipped(self) -> Objective:
        """The objective without caps."""
        return self._replace(token_caps=(), entry_caps=())

    @property
    def divergences(self) -> Iterator[tuple[str, float, float, float, float]]:
        """Kind, weight, parameter, cap of a token's value and of an entry's of each divergence."""
        none = (math.inf,) * len(self.kinds)
        yield from zip(
            self.kinds,
            self.weights,
            self.parameters,
            self.token_caps or none,
            self.entry_caps or none,
            strict=True,
        )

    @property
    def tempered(self) -> bool:
        """True where a model's logits are divided by a temperature other than 1."""
        return self.temperature != 1.0 or self.teacher_temperature != 1.0

    @property
    def inverse_temperatures(self) -> tuple[float, float | None]:
        """1 / T as kernels take it: the student's, and the teacher's where that is another, else None."""
        same = self.teacher_temperature == self.temperature
        return 1.0 / self.temperature, None if same else 1.0 / self.teacher_temperature

    @property
    def caps(self) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
        """Caps of tokens and of entries as kernels take them: None where there are none."""
        return self.token_caps or None, self.entry_caps or None

    @property
    def codes(self) -> tuple[int, ...]:
        """Places of the kinds in the table, which name them in kernels."""
        return tuple(list(DIVERGENCES).index(kind) for kind in self.kinds)

    @property
    def subtract_sum(self) -> bool:
        """True where the gradient needs `sum(g)`, or which terms are capped, before it can be written."""
        if self.token_caps and (len(self.kinds) > 1 or self.hard_weight != 0.0):
            return True  # one divergence alone may be zeroed once its value is known
        return bool(self.entry_caps) or not all(DIVERGENCES[kind].g_sums_to_0 for kind in self.kinds)

    def needs_sums(self, *, with_gradient: bool) -> bool:
        """Return whether kernels sweep a row for its sums before the sweep that makes loss and gradient."""
        return (with_gradient and self.subtract_sum) or (bool(self.token_caps) and len(self.kinds) > 1)

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
        fields: list[Any] = [tuple(field) if isinstance(field, list) else field for field in json.loads(text)]
        return Objective(*fields)


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


def _checked_clip(clip: Clip | None, name: str) -> tuple[float, float]:
    """Return a term's caps of a token and of an entry, inf for None, or a ValueError that names it."""
    if clip is not None and not isinstance(clip, Clip):
        raise ValueError(f"{name}: expected Clip(token, entry) or None, got {clip!r}")
    caps = []
    for field, cap in zip(Clip._fields, clip or Clip(), strict=True):
        if cap is not None and not (math.isfinite(cap) and cap > 0):
            raise ValueError(f"{name}.{field}: expected None or a finite number above 0, got {cap!r}")
        caps.append(math.inf if cap is None else float(cap))
    return caps[0], caps[1]


def _any_cap(caps: Sequence[float]) -> tuple[float, ...]:
    """Return the caps, or nothing where all are inf."""
    return tuple(caps) if any(map(math.isfinite, caps)) else ()


def checked_temperatures(temperature: float | Temperatures) -> Temperatures:
    """Return both models' temperatures.

    Raises:
        ValueError: naming the one that is not above 0.
    """
    if not isinstance(temperature, Temperatures):
        temperature = Temperatures(temperature, temperature)
        names = ("temperature", "temperature")
    else:
        names = ("temperature.teacher", "temperature.student")
    checked = Temperatures(*(_check_range(name, given, 0.0) for name, given in zip(names, temperature, strict=True)))
    for name, given in zip(names, checked, strict=True):
        if given == 0.0:
            raise ValueError(f"{name}: expected a number above 0, got 0")
    return checked


def make_objective(
    terms: Sequence[LossTerm],
    *,
    temperature: float | Temperatures = 1.0,
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
        temperature: softmax temperature T > 0 of the divergences, of both models or of each.
        scale_by_temperature_squared: multiply divergences by T^2 (Hinton et al., 2015), the student's: the gradient for
            its logits is proportional to 1 / T^2 of its own temperature.
        label_smoothing: share of the hard target that is spread over the vocabulary, [0, 1].
        z_loss: weight of the squared log-normaliser, >= 0.
        student_logit_scale, teacher_logit_scale: factors of the logits, > 0.
        student_softcap, teacher_softcap: `cap * tanh(z / cap)` after the factor, or None.

    Raises:
        ValueError: naming the field, for an unknown type, a number out of range, a parameter that the type does not
            take, or terms of which none has a weight above 0.
    """
    teacher_temperature, student_temperature = checked_temperatures(temperature)
    known = [*DIVERGENCES, "cross_entropy"]
    # by kind, parameter and caps of a token and an entry
    weights: dict[tuple[str, float, float, float], float] = {}
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
            if term.clip is not None:
                raise ValueError(f"terms[{index}].clip: expected None for cross_entropy, got {term.clip}")
            hard_weight += weight
            continue
        kind = (*_divergence(term), *_checked_clip(term.clip, f"terms[{index}].clip"))
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
    factor = student_temperature**2 if scale_by_temperature_squared else 1.0
    return Objective(
        kinds=tuple(kind for kind, *_ in weights),
        weights=tuple(weight * factor for weight in weights.values()),
        parameters=tuple(parameter for _, parameter, *_ in weights),
        divergence_weights=tuple(weights.values()),
        hard_weight=hard_weight,
        temperature=student_temperature,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        student_scale=float(student_logit_scale),
        student_softcap=float(student_softcap or 0.0),
        teacher_scale=float(teacher_logit_scale),
        teacher_softcap=float(teacher_softcap or 0.0),
        teacher_temperature=teacher_temperature,
        token_caps=_any_cap([cap for *_, cap, _ in weights]),
        entry_caps=_any_cap([cap for *_, cap in weights]),
    )
