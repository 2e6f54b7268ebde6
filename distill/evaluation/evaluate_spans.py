"""`distill eval` for a student with a tokenizer of its own: metrics over aligned spans, with confidence intervals.

The means are those of `evaluate` with the run's objective; here sums are kept per row, for resampling. There is no
calibration error, since a span is not a choice among tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from distill.core import console
from distill.core.eval_mode import eval_mode
from distill.data.collator import Collator
from distill.evaluation.bootstrap import mean_intervals
from distill.evaluation.evaluate import metrics_from_statistics
from distill.evaluation.evaluate_documents import FIGURES, EvaluationResult
from distill.teachers.objective import DistillationObjective
from distill.teachers.rows.retokenised.alignment import Shared
from distill.teachers.rows.retokenised.teacher import CrossTeacher


@torch.no_grad()
def evaluate_spans(
    student: nn.Module,
    teacher: nn.Module,
    rows: Sequence[Any],
    shared: Shared,
) -> EvaluationResult:
    """Compare `student` with `teacher` on every aligned span of `rows`.

    Args:
        student, teacher: Causal language models on one device; their train or eval mode is restored.
        rows: Rows from `load_cross_data`.

    Returns:
        Result whose `tokens` and `counts` count spans and whose calibration errors are NaN.

    Raises:
        ValueError: There are no aligned spans.
    """
    device = next(student.parameters()).device
    objective = DistillationObjective(CrossTeacher(teacher, shared), student)
    objective.loss = objective.held_out_loss()
    collate = objective.collator(Collator(0))
    sums, counts = np.zeros((len(rows), len(FIGURES))), np.zeros(len(rows))
    try:
        with eval_mode(student, teacher):
            for number, row in enumerate(rows):
                batch = {name: tensor.to(device) for name, tensor in collate([row]).items()}
                counts[number] = len(batch["spans"])
                if counts[number]:
                    statistics = student(**objective.student_inputs(batch, num_items=1))["statistics"].double().tolist()
                    of_row = metrics_from_statistics(statistics)
                    sums[number] = [of_row[name] for name in FIGURES]
                console.advance(1)
    finally:
        objective.detach()
    if not counts.sum():
        raise ValueError("data: no aligned spans in the held-out rows")
    figures = dict(zip(FIGURES, mean_intervals(sums, counts), strict=True))
    return EvaluationResult(int(counts.sum()), len(rows), figures, math.nan, math.nan, sums, counts)
