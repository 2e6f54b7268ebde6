"""The loss of spans.py from hidden states and heads: a chunk of spans at a time, gradients in the forward pass.

Per chunk: both models' logits of the rows that predict the spans' tokens, the losses and their gradient, then
`dx = G W` and `dW += G^T x`. Logits of the whole batch never exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from distill_kernels import FusedDistillationLoss, TokenStats
from distill_kernels.launch import device_facts
from distill_kernels.losses.chunked import raw_logits
from distill_kernels.losses.divergence import ClippedValue, log_softmax, transform_logits
from distill_kernels.losses.linear import HeadGradients
from distill_kernels.losses.operands import Head, RequiredGrads
from distill_kernels.losses.scaling import take_scaled_gradients
from torch import nn

from distill.models.head import HeadWeights
from distill.objectives.spans import Outcomes, Side, compare_spans, span_figures

CHUNK_ELEMENTS = 8 << 20  # logits of both models in one chunk
ELEMENT_BYTES = 24  # bytes per logit: about six fp32 copies exist at a time
CHUNK_SHARE = 24 * ELEMENT_BYTES  # those copies may take one part in 24 of a GPU's memory


class Spans(NamedTuple):
    """Aligned spans of a batch, in flat positions `b * S + i`.

    Attributes:
        student: int64 [M, 2], the first token of each span and the one after its last; the tokens before the first
            are the same document's.
        teacher: int64 [M, 2], likewise in the teacher's batch.
    """

    student: torch.Tensor
    teacher: torch.Tensor


class SpanTargets(NamedTuple):
    """The teacher's last hidden states over its own reading, and the spans that are compared.

    Attributes:
        hidden: [B, S', hidden].
        student_ids: int64 [B, S]; likewise `teacher_ids` [B, S'].
    """

    hidden: torch.Tensor
    spans: Spans
    student_ids: torch.Tensor
    teacher_ids: torch.Tensor


class _Part(NamedTuple):
    """One model's inputs: its head, and for all spans end to end the rows, the tokens they predict, and their span."""

    head: Head
    scale: float
    softcap: float
    rows: torch.Tensor
    tokens: torch.Tensor
    span: torch.Tensor
    ends: list[int]  # rows up to each span's end, on the host

    def logits(self, start: int, stop: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states [n, H] and transformed logits [n, V] of the rows of the spans `start` to `stop`."""
        hidden = self.head.hidden[self.rows[self._slice(start, stop)]].to(dtype)
        return hidden, transform_logits(raw_logits(self.head, hidden), self.scale, self.softcap)

    def side(self, z: torch.Tensor, temperature: float, start: int, stop: int) -> Side:
        here = self._slice(start, stop)
        span = self.span[here] - start
        # the numbers of the spans ascend along the rows: each span begins where its number first stands
        first = torch.searchsorted(span, torch.arange(stop - start, device=span.device))
        return Side(log_softmax(z / temperature), self.tokens[here], first, span)

    def _slice(self, start: int, stop: int) -> slice:
        return slice(self.ends[start - 1] if start else 0, self.ends[stop - 1])


class _CrossFunction(torch.autograd.Function):
    """The sum over spans; gradients are computed in the forward pass and returned once by the backward pass."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Head], Any], *leaves: Any) -> Any:
        with torch.autocast(leaves[0].device.type, enabled=False):
            loss, stats, ctx.gradients = run(Head(*leaves))
        if stats is not None:
            ctx.mark_non_differentiable(stats)
        return loss, stats

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor, _: object) -> Any:
        return (None, *take_scaled_gradients(ctx, upstream))


class CrossTokenizerLoss(nn.Module):
    """The terms of a loss of whole distributions over aligned spans, from hidden states and heads, a chunk of spans at
    a time; its cross-entropy is minus the log-probability of a span's text, at T = 1.

    Args:
        plain: loss whose terms, temperature, scales and soft caps are taken.
        shared: the ids of shared tokens, int64 [C] of the student's and of the teacher's.

    Attributes:
        workspace: bytes that a chunk's logits and their temporaries may take, about; None to choose.
    """

    workspace: int | None = None

    def __init__(self, plain: FusedDistillationLoss, shared: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.terms = plain.terms
        self.objective = plain.objective
        self.shared = shared
        self._outcomes: dict[tuple[int, int, torch.device], Outcomes] = {}

    def outcomes(self, student_rows: int, teacher_rows: int, device: torch.device) -> Outcomes:
        key = (student_rows, teacher_rows, device)
        if key not in self._outcomes:
            student, teacher = (ids.to(device) for ids in self.shared)
            self._outcomes[key] = Outcomes.of(student, teacher, student_rows, teacher_rows)
        return self._outcomes[key]

    def forward(
        self,
        student_hidden: torch.Tensor,
        student: HeadWeights,
        teacher: HeadWeights,
        targets: SpanTargets,
        num_items: torch.Tensor | int | None = None,
        return_stats: bool = False,
        span_weights: torch.Tensor | None = None,
    ) -> Any:
        """Return the mean over spans, with a gradient for the student's tensors if autograd needs it. One host sync.

        Args:
            student_hidden: [B, S, Hs]; gets a gradient, as all of `student` does.
            student: weight [Vs, Hs], bias [Vs], LoRA.
            teacher: weight [Vt, Ht], bias [Vt].
            targets: hidden states [B, S', Ht], and flat positions in both batches.
            num_items: Divisor of the sum; None for the number of spans.
            return_stats: return `(loss, TokenStats)`, its tensors [M], one entry a span.
            span_weights: Factor of each span's loss, [M]; None for equal ones.
        """
        lora_a, lora_b, lora_scale = student.lora or (None, None, 1.0)
        leaves = (student_hidden.flatten(0, -2), student.weight, student.bias, lora_a, lora_b)
        required = RequiredGrads(
            *(torch.is_grad_enabled() and leaf is not None and leaf.requires_grad for leaf in leaves)
        )
        device = student_hidden.device
        spans = targets.spans
        o = self.objective
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else student_hidden.dtype
        outcomes = self.outcomes(len(student.weight), len(teacher.weight), device)
        weights = None
        if span_weights is not None:
            weights = span_weights.detach().to(torch.float64 if dtype == torch.float64 else torch.float32)
        widths = torch.stack([part[:, 1] - part[:, 0] for part in spans]).cpu()  # the sync
        of_teacher = self._teacher_part(targets, teacher, spans.teacher, widths[1], dtype)
        chunks = _chunks(widths, len(student.weight), len(teacher.weight), device, self.workspace)

        def run(narrow: Head) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor | None]]:
            narrow = narrow._replace(lora_scale=float(lora_scale))
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            sums = HeadGradients(narrow, required, len(narrow.weight), wide)
            rows = _span_rows(spans.student, widths[0], targets.student_ids)
            own = _Part(narrow.cut(len(narrow.weight), dtype), o.student_scale, o.student_softcap, *rows)
            losses = [narrow.hidden.new_zeros((), dtype=wide)]
            figures = [losses[0].new_zeros((len(TokenStats._fields), 0), dtype=torch.float32)]
            for start, stop in chunks:
                x, z = own.logits(start, stop, dtype)
                _, z_teacher = of_teacher.logits(start, stop, dtype)
                sides = (
                    own.side(z, o.temperature, start, stop),
                    of_teacher.side(z_teacher, o.teacher_temperature, start, stop),
                )
                # cross-entropy and metrics are at temperature 1 whatever the loss's is
                ones = sides
                if o.tempered and (return_stats or o.hard_weight):
                    ones = own.side(z, 1.0, start, stop), of_teacher.side(z_teacher, 1.0, start, stop)
                clipped = ClippedValue(z.new_zeros(stop - start))
                loss, slope = compare_spans(*sides, outcomes, o, o.weights, slope=required.gradient, clipped=clipped)
                labels = ones[0].whole(), ones[1].whole()
                loss = loss - o.hard_weight * labels[0]
                if weights is not None:  # a span that is left out may have a loss of inf
                    loss = torch.where(weights[start:stop] != 0, loss * weights[start:stop], 0.0)
                losses.append(loss.sum())
                if return_stats:
                    figures.append(torch.stack(span_figures(*ones, outcomes, o, labels, clipped)).float())
                if slope is not None:
                    g = _logit_gradient(slope, sides[0].log_p).div_(o.temperature)
                    if o.hard_weight:
                        hard = torch.zeros_like(slope)
                        g += _logit_gradient(hard.scatter_(1, ones[0].tokens[:, None], -o.hard_weight), ones[0].log_p)
                    if weights is not None:
                        of_rows = weights[start:stop][sides[0].span][:, None]
                        g = torch.where(of_rows != 0, g * of_rows, 0.0)
                    if o.student_softcap:
                        # z is capped already, so that the derivative of cap * tanh(x / cap) is 1 - (z / cap)^2
                        g *= 1 - (z / o.student_softcap).square()
                    sums.add(own.head, x, g.mul_(o.student_scale), own.rows[own._slice(start, stop)])
            stats = torch.cat(figures, 1) if return_stats else None
            return torch.stack(losses).sum(), stats, list(sums.results())

        loss, stats = _CrossFunction.apply(run, *leaves)
        loss = loss / (max(len(spans.student), 1) if num_items is None else num_items)
        return (loss, TokenStats(*stats.unbind(0))) if return_stats else loss

    def matched(self, targets: SpanTargets, head: HeadWeights, rows: int) -> torch.Tensor:
        """Return the teacher's mean probability of the shared tokens where spans begin, at T = 1, a scalar.

        Args:
            targets: See `forward`.
            rows: Number of rows of the student's head.
        """
        dtype = targets.hidden.dtype
        columns = len(head.weight)
        outcomes = self.outcomes(rows, columns, targets.hidden.device)
        # spans of one token each: only the distributions where they begin are needed
        begins = targets.spans.teacher[:, :1]
        widths = torch.ones(2, len(begins), dtype=torch.int64)
        part = self._teacher_part(targets, head, torch.cat([begins, begins + 1], 1), widths[1], dtype)
        shares = []
        for start, stop in _chunks(widths, 0, columns, targets.hidden.device):
            p = part.logits(start, stop, dtype)[1].softmax(-1)
            shares.append(p[:, outcomes.teacher.shared].sum(-1))
        return torch.cat(shares).mean()

    def _teacher_part(
        self, targets: SpanTargets, head: HeadWeights, spans: torch.Tensor, widths: torch.Tensor, dtype: torch.dtype
    ) -> _Part:
        whole = Head(targets.hidden.detach().flatten(0, -2), head.weight.detach(), head.bias)
        o = self.objective
        rows = _span_rows(spans, widths, targets.teacher_ids)
        return _Part(whole.cut(len(head.weight), dtype), o.teacher_scale, o.teacher_softcap, *rows)


def _logit_gradient(slope: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """Return the gradient for logits from that for their log-probabilities, which is not overwritten."""
    return slope - log_p.exp() * slope.sum(-1, keepdim=True)


def _span_rows(
    spans: torch.Tensor, widths: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Return the last four fields of a `_Part` from spans [M, 2] and tokens; `widths` int64 [M] are on the host."""
    ends = widths.cumsum(0)
    rows = int(ends[-1]) if len(ends) else 0
    counts = spans[:, 1] - spans[:, 0]
    # the number of rows is known from the host's widths: without `output_size` this would wait for the device
    span = torch.repeat_interleave(torch.arange(len(spans), device=spans.device), counts, output_size=rows)
    begins = counts.cumsum(0) - counts
    # row k of a span belongs to its k-th token, which the position before it predicts
    predicted = spans[span, 0] + torch.arange(rows, device=spans.device) - begins[span]
    return predicted - 1, ids.flatten()[predicted], span, ends.tolist()


def _chunks(
    widths: torch.Tensor, student_columns: int, teacher_columns: int, device: torch.device, workspace: int | None = None
) -> list[tuple[int, int]]:
    """Return runs of spans whose logits fit a chunk; at least one span each."""
    elements = CHUNK_ELEMENTS
    if workspace is not None:
        elements = workspace // ELEMENT_BYTES
    elif device.type == "cuda":
        elements = device_facts(device).memory_bytes // CHUNK_SHARE
    # as many spans as fit, by the running sum of their logits
    taken = (widths[0] * student_columns + widths[1] * teacher_columns).cumsum(0)
    chunks = []
    start = 0
    before = 0
    while start < len(taken):
        stop = max(int(torch.searchsorted(taken, before + elements, right=True)), start + 1)
        chunks.append((start, stop))
        start = stop
        before = int(taken[stop - 1])
    return chunks
