"""`distill eval`: held-out metrics of a student against a teacher, with confidence intervals.

    result = evaluate_documents(student, teacher, rows)
    result.figures["forward_kl"]      # Interval(value, low, high)

The means are those of `distill.evaluation.evaluate`; here sums are kept per document, for resampling. The calibration
error (ECE, Naeini et al., 2015; Guo et al., 2017) compares confidence with accuracy: tokens are sorted into 15 equal
bins by the probability of the top-1 token, and the bins' |accuracy - mean probability| are averaged over tokens.

A student with a tokenizer of its own is compared over aligned spans, with the run's objective and sums per row; there
is no calibration error, since a span is not a choice among tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from distill_kernels.losses.divergence import unique_argmax
from torch import nn

from distill.core import console
from distill.core.eval_mode import eval_mode
from distill.data.collator import Collator, move_batch
from distill.evaluation.bootstrap import Interval, mean_intervals, reduction_interval
from distill.evaluation.evaluate import NO_GAP, HeldOut, metrics_from_statistics
from distill.models.head import HeadWeights, LogitTransform, call_head, decoder_of, find_head, probe_logits
from distill.objectives.measure import perplexity
from distill.objectives.top_k_encoding import log_probabilities
from distill.teachers.objective import DistillationObjective
from distill.teachers.rows.retokenised.alignment import Shared
from distill.teachers.rows.retokenised.teacher import CrossTeacher

BINS = 15
CHUNK = 512  # tokens per chunk of full logits
FIGURES = HeldOut._fields[1:]  # metrics, in this order


class EvaluationResult(NamedTuple):
    """Result of an evaluation.

    Attributes:
        tokens, rows: Numbers of tokens and rows that the means are over.
        figures: Means by metric, with 95 % intervals.
        calibration_error, teacher_calibration_error: ECE of student and teacher, in [0, 1].
        sums: float64 [documents, metrics] (for aligned spans [rows, metrics]), to compare students on the same data.
        counts: float64 [documents], tokens of each.
    """

    tokens: int
    rows: int
    figures: dict[str, Interval]
    calibration_error: float
    teacher_calibration_error: float
    sums: np.ndarray
    counts: np.ndarray

    def perplexity(self, who: str) -> Interval:
        """Return exp of the cross-entropy of `student` or `teacher`."""
        return Interval(*map(perplexity, self.figures[f"{who}_cross_entropy"]))

    def kl_reduction(self, before: EvaluationResult) -> Interval:
        """Return the relative reduction of `before`'s forward KL over the same rows; NaN where it was about 0."""
        if not np.array_equal(self.counts, before.counts):
            raise ValueError("before: expected an evaluation of the same rows, got other numbers of tokens")
        if before.figures["forward_kl"].value < NO_GAP:
            return Interval(math.nan, math.nan, math.nan)
        return reduction_interval(before.sums[:, 0], self.sums[:, 0])


@torch.no_grad()
def evaluate_documents(
    student: nn.Module,
    teacher: nn.Module,
    rows: Sequence[Any],
    *,
    vocab_size: int | None = None,
    batch_size: int = 1,
    autocast: torch.dtype | None = None,
) -> EvaluationResult:
    """Compare `student` with `teacher` on every trained token of `rows`, with float32 logits.

    Args:
        student, teacher: Causal language models on one device; their train or eval mode is restored.
        rows: Data set of `input_ids`, `labels` (not shifted), `position_ids`.
        vocab_size: Number of logits that both heads are cut to; None for that of the smaller head.
        batch_size: Rows per forward.
        autocast: Autocast dtype of the hidden states, as in training; None for the dtype of the weights.

    Raises:
        ValueError: There are no trained tokens.
    """
    models = (student, teacher)
    transforms = [probe_logits(student, "student"), probe_logits(teacher, "teacher")]
    device = next(student.parameters()).device
    columns = vocab_size or min(len(find_head(model).linear.weight) for model in models)  # type: ignore[arg-type]
    collator = Collator(0)
    parts: list[tuple[np.ndarray, np.ndarray]] = []  # sums and tokens of documents
    bins = torch.zeros(2, 3, BINS, dtype=torch.float64, device=device)
    with eval_mode(*models):
        for first in range(0, len(rows), batch_size):
            chosen = [rows[number] for number in range(first, min(first + batch_size, len(rows)))]
            batch = move_batch(collator(chosen), device)
            keep = batch["valid_rows"]
            labels = batch["labels"].flatten()[keep + 1]
            document = (batch["position_ids"] == 0).flatten().cumsum(0)[keep]  # padding is a document too
            documents, owner = document.unique(return_inverse=True)
            body = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
            with torch.autocast(device.type, autocast, enabled=autocast is not None):
                hidden = [decoder_of(model)(**body).last_hidden_state.flatten(0, 1)[keep] for model in models]
            totals = torch.zeros(len(documents), len(FIGURES), dtype=torch.float64, device=device)
            for start in range(0, len(labels), CHUNK):
                part = slice(start, start + CHUNK)
                logs = [
                    _log_probabilities(model, h[part], transform, columns)
                    for model, h, transform in zip(models, hidden, transforms, strict=True)
                ]
                totals.index_add_(0, owner[part], _figures(logs[0], logs[1], labels[part]).T)
                for which, log in enumerate(logs):
                    _count(bins[which], log, labels[part])
            parts.append((totals.cpu().numpy(), owner.bincount(minlength=len(documents)).double().cpu().numpy()))
            console.advance(len(chosen))
    if not any(tokens.size for _, tokens in parts):
        raise ValueError("data: no trained tokens in the held-out rows (every label is masked)")
    sums, counts = (np.concatenate(part) for part in zip(*parts, strict=True))
    figures = dict(zip(FIGURES, mean_intervals(sums, counts), strict=True))
    errors = _calibration_error(bins[0]), _calibration_error(bins[1])
    return EvaluationResult(int(counts.sum()), len(rows), figures, errors[0], errors[1], sums, counts)


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
    collate = Collator(0, columns=objective.teacher.columns)
    sums = np.zeros((len(rows), len(FIGURES)))
    counts = np.zeros(len(rows))
    try:
        with eval_mode(student, teacher):
            for number, row in enumerate(rows):
                batch = move_batch(collate([row]), device)
                counts[number] = len(batch["spans"])
                if counts[number]:
                    inputs = objective.student_inputs(batch, num_items=1, weighted=False)
                    statistics = student(**inputs)["statistics"].double().tolist()
                    of_row = metrics_from_statistics(statistics)
                    sums[number] = [of_row[name] for name in FIGURES]
                console.advance(1)
    finally:
        objective.detach()
    if not counts.sum():
        raise ValueError("data: no aligned spans in the held-out rows")
    figures = dict(zip(FIGURES, mean_intervals(sums, counts), strict=True))
    return EvaluationResult(int(counts.sum()), len(rows), figures, math.nan, math.nan, sums, counts)


def _log_probabilities(model: nn.Module, hidden: torch.Tensor, transform: LogitTransform, columns: int) -> torch.Tensor:
    """Return log-probabilities [N, columns] of the model's own logits, in float32 (float64 for float64).

    Logits rounded to bfloat16 would be multiples of 1/8 between 16 and 32.
    """

    def compute(x: torch.Tensor, head: HeadWeights) -> torch.Tensor:
        return log_probabilities(x, head, transform, columns, 1.0)[1]

    return call_head(find_head(model), hidden, compute)


def _figures(student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the metrics of each token, float64 [metrics, N]."""

    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum(-1)

    def entropy(p: torch.Tensor) -> torch.Tensor:
        return -torch.where(p > -torch.inf, p.exp() * p, 0.0).sum(-1)

    at = labels[:, None]
    top = unique_argmax(student)
    agreement = (top >= 0) & (top == unique_argmax(teacher))
    return torch.stack(
        [
            kl(teacher, student),
            kl(student, teacher),
            agreement.float(),
            -student.gather(1, at)[:, 0],
            -teacher.gather(1, at)[:, 0],
            entropy(student),
            entropy(teacher),
        ]
    ).double()


def _count(bins: torch.Tensor, logs: torch.Tensor, labels: torch.Tensor) -> None:
    """Add tokens to `bins` [3, BINS]: number of tokens, sum of probabilities, number of correct ones."""
    best, token = logs.max(-1)
    sure = best.exp().double()
    place = (sure * BINS).long().clamp_max(BINS - 1)
    for part, values in enumerate((torch.ones_like(sure), sure, (token == labels).double())):
        bins[part].index_add_(0, place, values)


def _calibration_error(bins: torch.Tensor) -> float:
    number, sure, right = bins
    return float((sure - right).abs().sum() / number.sum().clamp_min(1))
