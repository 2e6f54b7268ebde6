"""Students that a recipe's teacher could be pruned to, each measured before training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from distill.core.environment import device_name
from distill.models.dtypes import resolve_device, resolve_precision
from distill.models.loading import load_student, load_teacher
from distill.models.prune_candidates import Candidate, Cost, TeacherOutputs, candidates, check_share, parameters_share
from distill.recipe import FromTeacher, Importance, Student
from distill.teachers.calibration import stored_selection, stored_text
from distill.teachers.load_context import Calibration, calibration_of
from distill.teachers.registry import source_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from distill.recipe import Data, Recipe

HELD_OUT_ROWS = 16
log = logging.getLogger(__name__)


def measure_candidates(
    recipe: Recipe, share: float, *, cost: Callable[[PreTrainedModel, int], Cost] | None = None
) -> Iterator[tuple[Candidate, float]]:
    """Yield shapes for a student of a recipe's teacher, and KL(teacher || student) before training, in nats a token.

    A shape that the teacher's family cannot be cut to is left out, with one line that says why.

    The teacher is held once, and one student at a time; the divergence is over at most `HELD_OUT_ROWS` held-out rows.
    Parts and measured costs are cached (`data.cache`), so that the same command proposes the same shapes again.

    Args:
        recipe: Recipe with the calibration data; of its student only `from_teacher.importance` is used.
        share: Maximum cost of a student as a fraction of the teacher's.
        cost: Function from teacher and row length to the cost of a shape; None for the number of parameters.

    Raises:
        ValueError: a teacher that is not loaded here, or that cannot be cut.
    """
    check_share(share)
    cut = recipe.student.from_teacher
    importance = None if cut is None else cut.importance
    any_cut = FromTeacher(layers=1, importance=importance or Importance())
    recipe = recipe.model_copy(update={"student": Student(from_teacher=any_cut)})
    source = source_of(recipe)
    sections = list(source.sections.values())
    if len(sections) != 1 or (sections[0].model is None and sections[0].init != "random"):
        raise ValueError("teacher: expected one model to prune; name it by teacher.model")
    (section,) = sections
    vocabulary = source.vocabulary()
    splits = vocabulary.read(recipe.data, recipe.train.seed)
    calibration: Calibration = calibration_of(recipe, splits)
    held_out = [dict(splits.validation[number]) for number in range(min(HELD_OUT_ROWS, len(splits.validation)))]
    device = resolve_device(recipe.train)
    dtype = resolve_precision(recipe, device).teacher
    teacher = load_teacher(section, device=device, dtype=dtype)
    outputs = TeacherOutputs(teacher, held_out)
    shares = parameters_share(teacher.config)
    if cost is not None:
        shares = _cached(cost(teacher, recipe.data.max_length), teacher, recipe.data)
    refusals: list[ValueError] = []
    measured = 0
    for candidate in candidates(teacher.config, share, shares, importance):
        student = Student(from_teacher=candidate.cut)
        try:
            chosen = stored_selection(teacher, candidate.cut, calibration)
            model = load_student(student, teacher=teacher, device=device, dtype=dtype, selection=chosen)
        except ValueError as error:
            if not str(error).startswith("student.from_teacher"):
                raise
            refusals.append(error)
            log.warning("shape %r is left out: %s", candidate.name, error)
            continue
        measured += 1
        yield candidate, outputs.divergence(model)
        del model
    if not measured:
        raise refusals[0]


def _cached(measured: Cost, teacher: PreTrainedModel, data: Data) -> Cost:
    """Return a measured cost whose values are stored by what they depend on: times differ from call to call."""
    machine = [device_name(teacher.device), torch.__version__, torch.get_num_threads()]
    inputs = ["time of a forward", teacher.config.to_dict(), str(teacher.dtype), data.max_length, *machine]

    def cost(cut: FromTeacher) -> float:
        shape = cut.model_dump(exclude={"importance"})
        return float(stored_text([*inputs, shape], lambda: str(measured(cut)), data.cache))

    return cost
