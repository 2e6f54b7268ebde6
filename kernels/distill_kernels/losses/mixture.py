"""Mixture of several teachers' probabilities, expressed as one row of teacher logits.

With shares `w_k >= 0` that add up to 1, teachers' logits `z_k` and the teachers' temperature `T`,

    p_t = sum_k w_k softmax(z_k / T)        and        z_t = T log p_t

so that `softmax(z_t / T) = p_t`: every divergence, statistic and gradient then runs as with one teacher whose logits
are `z_t`. Statistics are those of the mixture at T = 1, `sum_k w_k softmax(z_k)`, which `z_t` of another temperature
does not tell; they take a second row of logits.

This is the arithmetic mixture (ensemble average: Hinton et al., 2015, section 1). The student's
hidden size may differ from every teacher's, and theirs from each other's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from distill_kernels.losses.divergence import RowRequest, RowResult, log_softmax, reference_rows, transform_logits
from distill_kernels.losses.operands import Chosen, Head
from distill_kernels.losses.terms import Objective, TokenStats

Rows = slice | torch.Tensor


class TeacherHead(NamedTuple):
    """One teacher, as the fused losses take it (`teachers=`); no tensor of it gets a gradient.

    Attributes:
        hidden: hidden states, [N, H] or [..., H] with the student's leading dimensions.
        weight: weight of the head, [V, H]; V as the student's or at least `vocab_size`.
        share: mixing weight >= 0, divided by the sum of all; a teacher of weight 0 is left out.
        bias: bias of the head, [V] or None.
        logit_scale: factor on its logits.
        softcap: `cap * tanh(z / cap)` after the factor, or None.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    share: float = 1.0
    bias: torch.Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None

    def by_row(self) -> Head:
        """Return the head without gradients and its hidden states as [N, H]."""
        bias = None if self.bias is None else self.bias.detach()
        return Head(self.hidden.detach().flatten(0, -2), self.weight.detach(), bias)


class LossTarget(NamedTuple):
    """What a loss compares the student's distribution of each token with.

    Attributes:
        teachers: teachers of which the mixture of probabilities is the target; one is itself the target, none is for
            losses of labels, of a stored top K and of sampled tokens.
        chosen: tokens that are compared, with what is known of them; None: all of the vocabulary.
    """

    teachers: Sequence[TeacherHead] = ()
    chosen: Chosen | None = None


class Mixture(NamedTuple):
    """Heads and mixing weights of the teachers whose share is above 0.

    Attributes:
        heads: hidden states [N, H] and heads of the teachers.
        shares: mixing weights, with sum 1.
        scales, softcaps: scale and soft cap of each teacher's logits; a soft cap of 0 means none.
    """

    heads: tuple[Head, ...]
    shares: tuple[float, ...]
    scales: tuple[float, ...]
    softcaps: tuple[float, ...]

    def cut(self, vocab: int, dtype: torch.dtype) -> Mixture:
        """The first `vocab` columns of every head, in `dtype`."""
        return self._replace(heads=tuple(head.cut(vocab, dtype) for head in self.heads))


def flatten_teachers(teachers: Sequence[TeacherHead]) -> tuple[list[TeacherHead], list[float]]:
    """Return the teachers of share above 0, and their normalised share, scale and soft cap as one flat list.

    Raises:
        ValueError: naming the field: shares below 0 or all 0, a scale or soft cap that is not above 0.
    """
    for number, teacher in enumerate(teachers):
        for name, value, fits in (
            ("share", teacher.share, 0 <= teacher.share < math.inf),
            ("logit_scale", teacher.logit_scale, 0 < teacher.logit_scale < math.inf),
            ("softcap", teacher.softcap, teacher.softcap is None or 0 < teacher.softcap < math.inf),
        ):
            if not fits:
                low = "at least" if name == "share" else "above"
                raise ValueError(f"teachers[{number}].{name}: expected a finite number {low} 0, got {value!r}")
    counted = [teacher for teacher in teachers if teacher.share > 0]
    if not counted:
        raise ValueError(f"teachers: expected one of share above 0, got {[teacher.share for teacher in teachers]}")
    total = sum(teacher.share for teacher in counted)
    # A flat list of numbers, three a teacher: what an operator's arguments may be. A soft cap of 0 stands for none.
    rows = ((teacher.share / total, teacher.logit_scale, teacher.softcap or 0.0) for teacher in counted)
    return counted, [float(value) for row in rows for value in row]


def compared_teacher(
    heads: Sequence[Head], mixture: Sequence[float], objective: Objective
) -> tuple[Head | Mixture | None, Objective]:
    """Return the teacher, or mixture, to compare with, and the objective with a single teacher's scale and soft cap.

    Args:
        heads: detached heads with hidden states [N, H]: one, several, or none.
        mixture: the list of `flatten_teachers`.
        objective: objective of the module.
    """
    if not heads:
        return None, objective
    # Every third number from places 0, 1 and 2: the order of `flatten_teachers`.
    shares = tuple(mixture[0::3])
    scales = tuple(mixture[1::3])
    softcaps = tuple(mixture[2::3])
    # One teacher that counts is no mixture, whatever its share: its logits are compared as they are.
    if len(heads) == 1:
        return heads[0], objective._replace(teacher_scale=scales[0], teacher_softcap=softcaps[0])
    return Mixture(tuple(heads), shares, scales, softcaps), objective


def mixed_logits(logits: Sequence[torch.Tensor], shares: Sequence[float], temperature: float) -> torch.Tensor:
    """`T log sum_k w_k softmax(z_k / T)` of each row, from transformed logits [n, V]."""
    parts = [log_softmax(z / temperature) + math.log(share) for z, share in zip(logits, shares, strict=True)]
    # By logaddexp: probabilities that fp32 cannot hold keep their logarithms.
    mixed = parts[0]
    for part in parts[1:]:
        mixed = torch.logaddexp(mixed, part)
    return mixed * temperature


def reference_mixture_rows(
    student_raw: torch.Tensor,
    _: None,
    objective: Objective,
    request: RowRequest,
    *,
    mixture: Mixture,
    here: Rows,
    project: Callable[[Head, torch.Tensor], torch.Tensor],
) -> RowResult:
    """`reference_rows` with the mixture for a teacher.

    Args:
        student_raw, objective, request: see `reference_rows`.
        mixture: the teachers, their heads in the dtype of `student_raw`.
        here: indices of these rows in the teachers' hidden states.
        project: function from head and hidden states [n, H] to raw logits [n, V].
    """
    logits = [
        transform_logits(project(head, head.hidden[here].to(student_raw.dtype)), scale, softcap)
        for head, scale, softcap in zip(mixture.heads, mixture.scales, mixture.softcaps, strict=True)
    ]
    # Each teacher's scale and soft cap are applied above, before mixing; they must not be again.
    objective = objective._replace(teacher_scale=1.0, teacher_softcap=0.0)
    mixed = mixed_logits(logits, mixture.shares, objective.teacher_temperature)
    if not request.with_stats or objective.teacher_temperature == 1.0:
        return reference_rows(student_raw, mixed, objective, request)
    at_temperature_1 = mixed_logits(logits, mixture.shares, 1.0)
    only_stats = request._replace(with_gradient=False)
    # A clone, since `reference_rows` may overwrite the logits, which the loss needs once more.
    stats = reference_rows(student_raw.clone(), at_temperature_1, objective, only_stats).stats
    # What caps take is known at the loss's temperature alone.
    result = reference_rows(student_raw, mixed, objective, request._replace(with_stats=objective.clips))
    if stats is not None and result.stats is not None:
        stats = TokenStats(*stats[:-2], *result.stats[-2:])
    return result._replace(stats=stats)
