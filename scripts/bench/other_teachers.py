"""Several teachers at the flagship's shape, and a teacher with another tokenizer, against plain PyTorch.

Mixture: the floor is the bare products of one teacher. Predicted on an H200 before any run, from the one-teacher loss's
34.9 ms: the second teacher's logits are 6.5 TFLOP, 8.3 ms at 780 TFLOP/s; mixing reads 4 V and writes 2 V bytes a row,
6.3 GB, 1.5 ms: about 44.7 ms at T = 1. At T = 2 with statistics a copy, a second mixture and a second sweep of the row
kernel come to it, some 15 GB, 3.5 ms.

Across tokenizers: two vocabularies of the flagship's size, a third of the spans with two tokens on a side, half or all
but a tenth of the tokens shared; the plain fused KL beside it. Errors are those of the gradients against fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from distill_kernels import FusedDistillationLoss, FusedKLLoss, LossTerm, TeacherHead
from distill_kernels.losses.mixture import Mixture
from distill_kernels.losses.operands import Head

from distill.models.head import HeadWeights
from distill.objectives.span_loss import CrossTokenizerLoss, Spans, SpanTargets
from scripts.bench.harness import Row
from scripts.bench.losses import FLOOR_ROWS, KL, MAIN, Inputs, exact_gradients_from, floor, measured

FLOOR = f"floor: one teacher's bare products, {FLOOR_ROWS:,} rows"
SECOND_HIDDEN = 3072
SHARES = (0.7, 0.3)


def second_head(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Another teacher's hidden states and head, bf16."""
    generator = torch.Generator("cuda").manual_seed(2)
    rows, vocab = inputs.shape.rows, inputs.shape.vocab
    x, w = (torch.randn(n, SECOND_HIDDEN, generator=generator, device="cuda") for n in (rows, vocab))
    return x.bfloat16(), (w * 4 / SECOND_HIDDEN**0.5).bfloat16()


def mixture_rows(quick: bool, only: str) -> list[Row]:
    """Two teachers against one, and against eager PyTorch."""
    inputs = Inputs(MAIN)
    y, v = second_head(inputs)

    def teachers(i: Inputs) -> list[TeacherHead]:
        return [TeacherHead(i.x_teacher, i.w_teacher, SHARES[0]), TeacherHead(y, v, SHARES[1])]

    def fused(temperature: float, stats: bool) -> Callable[[Inputs], Any]:
        module = FusedDistillationLoss([KL], temperature, skip_ignored_rows=False)

        def loss(i: Inputs) -> Any:
            made = module(i.x, i.w, teachers=teachers(i), return_stats=stats)
            return made[0] if stats else made

        return loss

    def eager(i: Inputs) -> torch.Tensor:
        log_t = sum(
            s * (x @ w.t()).float().softmax(-1)
            for s, x, w in zip(SHARES, (i.x_teacher, y), (i.w_teacher, v), strict=True)
        ).log()
        return torch.nn.functional.kl_div(
            (i.x @ i.w.t()).float().log_softmax(-1), log_t, log_target=True, reduction="batchmean"
        )

    one = FusedKLLoss(skip_ignored_rows=False)
    losses: dict[str, Callable[[Inputs], Any]] = {
        "one teacher": lambda i: one(i.x, i.w, i.x_teacher, i.w_teacher),
        "two teachers": fused(1.0, False),
        "two teachers, T = 2, statistics": fused(2.0, True),
    }
    if not quick:
        losses["eager, two teachers, full logits"] = eager
    heads = (Head(inputs.x_teacher.double(), inputs.w_teacher.double()), Head(y.double(), v.double()))
    mixture = Mixture(heads, SHARES, (1.0, 1.0), (0.0, 0.0))
    exact = {"two teachers": exact_gradients_from(inputs, mixture, one.objective, labels=None, rows=256)}
    del heads, mixture
    torch.cuda.empty_cache()
    return measured("mixture of teachers", inputs, losses, (FLOOR, floor(inputs)), exact, only, quick)


def aligned(rows: int, device: str = "cuda") -> Spans:
    """Spans that fill `rows` positions of the student; every fifth has two of its tokens, every seventh two others."""
    widths = [(1 + (number % 5 == 0), 1 + (number % 7 == 0)) for number in range(rows)]
    ends = torch.tensor(widths).cumsum(0) + 1
    count = int((ends[:, 0] <= rows).sum()), int((ends[:, 1] <= rows).sum())
    ends, starts = ends[: min(count)], torch.cat([torch.ones(1, 2, dtype=torch.int64), ends[:-1]])[: min(count)]
    both = torch.stack([starts, ends], 1).to(device)
    return Spans(both[..., 0].contiguous(), both[..., 1].contiguous())


def cross_rows(quick: bool, only: str) -> list[Row]:
    """The loss across tokenizers: half of the student's tokens shared, and all but a tenth."""
    inputs = Inputs(MAIN)
    n, vocab = inputs.shape.rows, inputs.shape.vocab
    spans = aligned(n)
    other = torch.randint(0, vocab, (n,), device="cuda")
    losses, exact = {}, {}
    for share in (0.9,) if quick else (0.5, 0.9):
        order = torch.arange(int(share * vocab))
        module = CrossTokenizerLoss(FusedDistillationLoss([LossTerm("forward_kl", 1.0)]), (order, order))
        name = f"across tokenizers, {share:.0%} shared"

        def across(x, w, x_teacher, w_teacher, module=module):
            heads = HeadWeights(w, None, None), HeadWeights(w_teacher, None, None)
            return module(x[None], *heads, SpanTargets(x_teacher[None], spans, inputs.labels, other))

        losses[name] = lambda i, f=across: f(i.x, i.w, i.x_teacher, i.w_teacher)
        wide = [
            t.detach().double().requires_grad_(t.requires_grad)
            for t in (inputs.x, inputs.w, inputs.x_teacher, inputs.w_teacher)
        ]
        loss = across(*wide)
        exact[name] = tuple(g.float() for g in torch.autograd.grad(loss, wide[:2]))
        del wide, loss
        torch.cuda.empty_cache()
    one = FusedKLLoss(skip_ignored_rows=False)
    losses["one tokenizer, the fused KL"] = lambda i: one(i.x, i.w, i.x_teacher, i.w_teacher)
    return measured("across tokenizers", inputs, losses, (FLOOR, floor(inputs)), exact, only, quick)


def run(quick: bool = False, only: str = "") -> Iterator[Row]:
    """Both cases; `only`: part of a candidate's name."""
    yield from mixture_rows(quick, only)
    yield from cross_rows(quick, only)
