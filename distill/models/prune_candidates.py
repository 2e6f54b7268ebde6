"""Shapes to prune a teacher to, for a share of its cost, and the divergence of a pruned student before training.

    for candidate in candidates(config, 0.5, parameters_share(config)):
        student = cut(candidate.cut)
        outputs.divergence(student)         # nats a token

Layers and widths are cut in a few proportions: layers alone, MLP columns alone, widths alone, and both; experts alone,
with layers and with their columns where the teacher has some. Columns are those of dense MLPs, of experts and of shared
experts, all by the same share. In each proportion the largest shape whose share of the cost is at most the one asked
for is taken, by bisection over 32 steps from the whole model to a quarter of it. Sizes are rounded down to what fits
GPUs and the family's configuration (`_multiple`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from distill_kernels import FusedDistillationLoss, LossTerm
from torch import nn
from transformers import PreTrainedConfig

from distill.core.eval_mode import eval_mode
from distill.models.head import find_head, last_hidden, probe_logits, read_head
from distill.models.meta_models import meta_student
from distill.models.prune.importance import CalibrationRow, positions_of
from distill.models.prune.pruning import student_config
from distill.models.prune.widths import GROUPED, Widths, widths_of
from distill.models.routing import routing_of
from distill.recipe import FromTeacher, Importance, Student
from distill.recipe.from_teacher import COLUMN_AXES, ColumnAxis

STEPS = 32
LEAST = 0.25
# what is cut in each proportion: the share of the way from 1 that each part goes
PROPORTIONS: dict[str, dict[str, float]] = {
    "depth": {"layers": 1.0},
    "MLP columns": {"columns": 1.0},
    "width": {"hidden": 1.0, "columns": 1.0},
    "width and heads": {"hidden": 1.0, "heads": 1.0, "columns": 1.0},
    "depth and MLP columns": {"layers": 0.5, "columns": 1.0},
    "depth and width": {"layers": 1.0, "hidden": 0.5, "columns": 1.0},
    "experts": {"experts": 1.0},
    "depth and experts": {"layers": 0.5, "experts": 1.0},
    "experts and their columns": {"experts": 1.0, "columns": 1.0},
}
Cost = Callable[[FromTeacher], float]  # share of the teacher's cost that a student of a shape has


class Candidate(NamedTuple):
    """A shape for a student.

    Attributes:
        name: Name in `PROPORTIONS`.
        cut: Settings of `student.from_teacher`.
        parameters: number of the student's.
        cost: share of the teacher's cost.
    """

    name: str
    cut: FromTeacher
    parameters: int
    cost: float


def parameters_of_cut(config: PreTrainedConfig, cut: FromTeacher) -> int:
    """Return the number of parameters of a student of a shape, without memory."""
    return meta_student(Student(from_teacher=cut), config).shape.parameters


def parameters_share(config: PreTrainedConfig) -> Cost:
    """Return the cost that is the share of a teacher's parameters."""
    whole = parameters_of_cut(config, FromTeacher(layers=config.get_text_config().num_hidden_layers))
    return lambda cut: parameters_of_cut(config, cut) / whole


def check_share(share: float) -> None:
    if not 0 < share < 1:
        raise ValueError(f"--to: expected a fraction of the teacher between 0 and 1, got {share:g}")


def candidates(
    config: PreTrainedConfig, share: float, cost: Cost, importance: Importance | None = None
) -> Iterator[Candidate]:
    """Yield the largest shape of each proportion whose cost is at most `share`; none that misses it by over a tenth.

    Args:
        config: Configuration of the teacher.
        share: Fraction of the teacher's cost, between 0 and 1.
        cost: Function that returns the cost of a shape.
        importance: Selection of parts; None for the defaults.

    Raises:
        ValueError: a share outside of 0 to 1, or one that no shape reaches.
    """
    check_share(share)
    seen: list[FromTeacher] = []
    columns = _columns_of(config)
    lacking = {name for name, there in (("columns", columns), ("experts", widths_of(config).experts)) if not there}
    for name, parts in PROPORTIONS.items():
        if lacking & parts.keys():
            continue
        # steps that cost too much, and that may be within
        low = 0
        high = STEPS
        cut = shape_at(config, parts, 1.0, columns, importance)
        reached = cost(cut)
        if reached > share:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            nearer = shape_at(config, parts, middle / STEPS, columns, importance)
            value = cost(nearer)
            if value <= share:
                high = middle
                cut = nearer
                reached = value
            else:
                low = middle
        if reached >= 0.9 * share and cut not in seen:
            seen.append(cut)
            yield Candidate(name, cut, parameters_of_cut(config, cut), reached)
    if not seen:
        raise ValueError(
            f"--to: no shape of {type(config).__name__} costs about {share:g} of the whole; expected a fraction that "
            f"cutting to {LEAST:g} of the layers or of the widths reaches"
        )


def _columns_of(config: PreTrainedConfig) -> dict[ColumnAxis, int]:
    """Return the columns of each axis that some module has; a field of a configuration may be that of none."""
    whole = parameters_of_cut(config, FromTeacher(layers=config.get_text_config().num_hidden_layers))
    found: dict[ColumnAxis, int] = {}
    for axis in COLUMN_AXES:
        total = getattr(widths_of(config), axis)
        fewer = _multiple(total, GROUPED, 0.5)
        if fewer < total and parameters_of_cut(config, FromTeacher.model_validate({axis: fewer})) < whole:
            found[axis] = total
    return found


def shape_at(
    config: PreTrainedConfig,
    parts: dict[str, float],
    way: float,
    columns: dict[ColumnAxis, int],
    importance: Importance | None,
) -> FromTeacher:
    """Return the shape `way` (0 to 1) along a proportion, from the whole teacher to `LEAST` of it."""
    full = widths_of(config)
    layers = config.get_text_config().num_hidden_layers
    kept = {name: 1 - (1 - LEAST) * way * part for name, part in parts.items()}
    kv_heads = max(1, round(full.kv_heads * kept.get("heads", 1.0)))
    heads = kv_heads * full.group
    share = kept.get("columns", 1.0)
    narrower = {axis: _multiple(count, _step(count), share) for axis, count in columns.items()}
    widths = full._replace(heads=heads, kv_heads=kv_heads, **narrower)
    routing = routing_of(config.get_text_config())
    if routing is not None:
        experts = int(routing.experts * kept.get("experts", 1.0)) // routing.groups * routing.groups
        widths = widths._replace(experts=max(routing.least, experts))
    widths = widths._replace(hidden=_hidden(config, widths, kept.get("hidden", 1.0)))
    fields = {name: size for name, size in widths._asdict().items() if size != getattr(full, name)}
    kept_layers = max(1, round(layers * kept.get("layers", 1.0)))
    if kept_layers != layers or not fields:
        fields = {"layers": kept_layers, **fields}
    return FromTeacher(**fields, importance=importance or Importance())


def _step(size: int) -> int:
    """Return the step of a size: whole tiles of GPUs, where that is coarse whole blocks of 32 quantised weights."""
    return 64 if size >= 1024 else 32 if size >= 256 else 8


def _multiple(size: int, step: int, share: float) -> int:
    """Return the largest multiple of `step` within a share of a size; the size itself for the whole."""
    return size if share >= 1 else max(step, int(size * share) // step * step)


def _hidden(config: PreTrainedConfig, widths: Widths, share: float) -> int:
    """Return hidden channels within a share: a multiple of `_step`, and of the heads where the family's configuration
    requires it.
    """
    full = widths.hidden
    layers = range(config.get_text_config().num_hidden_layers)
    if share >= 1 and full % widths.heads == 0:
        return full
    plain = _multiple(full, _step(full), share)
    try:
        student_config(config, layers, widths._replace(hidden=plain))
    except ValueError:
        whole = math.lcm(_step(full), widths.heads)
        step = whole if whole <= full // 4 else math.lcm(GROUPED if widths.experts else 4, widths.heads)
        return max(step, _multiple(full, step, min(share, 1 - 1e-9)))
    return plain


class TeacherOutputs:
    """A teacher's last hidden states on rows, to compare students with.

    Args:
        teacher: teacher model on its device.
        rows: held out; trained positions count.
    """

    def __init__(self, teacher: nn.Module, rows: Sequence[CalibrationRow]) -> None:
        self.rows = rows
        self.teacher = teacher
        self.transform = probe_logits(teacher, "teacher")
        self.hidden = [_last_hidden(teacher, row) for row in rows]

    def divergence(self, student: nn.Module) -> float:
        """Return KL(teacher || student) in nats per token, without full logits."""
        own = probe_logits(student, "student")
        loss = FusedDistillationLoss(
            [LossTerm("forward_kl", 1.0)],
            student_logit_scale=own.scale,
            student_softcap=own.softcap,
            teacher_logit_scale=self.transform.scale,
            teacher_softcap=self.transform.softcap,
        )
        mine = read_head(find_head(student))
        theirs = read_head(find_head(self.teacher))
        columns = min(len(mine.weight), len(theirs.weight))
        total = 0.0
        tokens = 0
        with torch.no_grad():
            for row, hidden in zip(self.rows, self.hidden, strict=True):
                states = _last_hidden(student, row)
                result = loss(
                    states,
                    mine.weight,
                    hidden.to(states.device),
                    theirs.weight,
                    student_bias=mine.bias,
                    teacher_bias=theirs.bias,
                    vocab_size=None if len(mine.weight) == len(theirs.weight) else columns,
                )
                assert isinstance(result, torch.Tensor)
                total = total + float(result) * len(states)
                tokens = tokens + len(states)
        return total / tokens


def _last_hidden(model: nn.Module, row: CalibrationRow) -> torch.Tensor:
    """Return the last hidden states at a row's trained positions, [n, hidden]."""
    device = next(model.parameters()).device
    names = [name for name in ("input_ids", "position_ids") if name in row]
    given = {name: torch.tensor(row[name], device=device)[None] for name in names}
    with eval_mode(model):
        return last_hidden(model, given)[0, positions_of(row)]
