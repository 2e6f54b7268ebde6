"""Fused linear divergences against eager, torch.compile, Liger and TRL: time over the floor, memory, gradient errors.

The floor is what no implementation of the same arithmetic avoids: the bare bf16 products of 2,048-row chunks (student
and teacher logits, dx, dW accumulated in place), run back to back as a candidate among the others. Errors are those of
the gradients against fp64 on correlated logits of standard deviation 4, and peak memory is above the inputs, weight
gradient included. Rivals are called as their libraries offer them; one that is not installed gets a row that says so.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from distill_kernels import Clip, FusedDistillationLoss, LossTerm, Temperatures
from distill_kernels.losses.linear import reference_linear_divergence
from distill_kernels.losses.operands import Head, RequiredGrads, RowBatch

from scripts.bench.harness import Row, peak_above_inputs, time_in_turn
from scripts.bench.loss_rivals import rivals

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from helpers import realistic_heads

FLOOR_ROWS = 2048
MOST_ERROR = 5e-2
KL, REVERSE, JSD = LossTerm("forward_kl", 1.0), LossTerm("reverse_kl", 1.0), LossTerm("jsd", 1.0, beta=0.5)
SKEWED, TVD = LossTerm("skew_forward_kl", 1.0, alpha=0.1), LossTerm("tvd", 1.0)
HARD = LossTerm("cross_entropy", 0.5)
BETAS = {KL: 0.0, REVERSE: 1.0, JSD: 0.5}  # of the generalised JSD, as which the rivals take them


class Shape(NamedTuple):
    """Tokens, vocabulary, student and teacher hidden size."""

    rows: int
    vocab: int
    student: int
    teacher: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.vocab}, H {self.student} / {self.teacher}"


MAIN = Shape(8192, 128256, 2048, 4096)
MORE = [
    Shape(512, 128256, 2048, 4096),
    Shape(2048, 128256, 2048, 4096),
    Shape(8192, 32000, 2048, 4096),
    Shape(8192, 151936, 1536, 3584),
    Shape(8192, 262144, 2304, 3584),
    Shape(8192, 49152, 576, 960),
    Shape(4096, 128256, 8192, 8192),
    Shape(65536, 128256, 2048, 4096),
]


class Inputs:
    """One shape's tensors; student tensors are leaves."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        made = realistic_heads(*shape, dtype=torch.bfloat16, device="cuda")
        self.x, self.w, self.x_teacher, self.w_teacher = made
        self.x.requires_grad_()
        self.w.requires_grad_()
        generator = torch.Generator("cuda").manual_seed(1)
        self.labels = torch.randint(0, shape.vocab, (shape.rows,), device="cuda", generator=generator)
        self.half = torch.where(torch.rand(shape.rows, device="cuda", generator=generator) < 0.5, self.labels, -100)

    def clear(self) -> None:
        """Drop the gradients."""
        self.x.grad = self.w.grad = None

    def run(self, loss: Callable[[Inputs], torch.Tensor]) -> Callable[[], None]:
        """Forward and backward of `loss` from cleared gradients."""

        def step() -> None:
            self.clear()
            loss(self).backward()

        return step

    def peak(self, step: Callable[[], None]) -> float:
        """MiB above the inputs at the peak of `step`, the gradients that it leaves included."""

        def run() -> None:
            step()
            self.clear()

        return peak_above_inputs(run)


def floor(inputs: Inputs, *, head: bool = True) -> Callable[[], None]:
    """The bare products, chunk by chunk, without dW where `head` is false."""
    rows = min(FLOOR_ROWS, inputs.shape.rows)
    x, w, xt, wt = (t.detach() for t in (inputs.x, inputs.w, inputs.x_teacher, inputs.w_teacher))
    logits = torch.empty(rows, inputs.shape.vocab, dtype=torch.bfloat16, device="cuda")
    gradient = torch.empty_like(logits).normal_(std=1e-5)
    dx = torch.empty_like(x)
    dw = torch.zeros_like(w) if head else None

    def run() -> None:
        for start in range(0, inputs.shape.rows, rows):
            part = slice(start, start + rows)
            torch.mm(xt[part], wt.t(), out=logits)
            torch.mm(x[part], w.t(), out=logits)
            torch.mm(gradient, w, out=dx[part])
            if dw is not None:
                dw.addmm_(gradient.t(), x[part])

    return run


def ours(
    *terms: LossTerm,
    workspace: float | None = None,
    half: bool = False,
    stats: bool = False,
    temperature: float | Temperatures = 1.0,
) -> Callable:
    """Our loss of these terms, at its defaults but for `workspace`; labels of half the rows ignored if `half`.

    Without ignored rows there is none to skip, so none is looked for, as where the collator gives the valid rows.
    """
    module = FusedDistillationLoss(terms, temperature, max_workspace_mib=workspace, skip_ignored_rows=half)
    hard = any(term.type == "cross_entropy" for term in terms)

    def loss(i: Inputs) -> torch.Tensor:
        labels = i.half if half else i.labels if hard else None
        out = module(i.x, i.w, i.x_teacher, i.w_teacher, labels, return_stats=stats)
        return out[0] if isinstance(out, tuple) else out

    return loss


def exact_gradients(inputs: Inputs, term: LossTerm, *, rows: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
    """dx and dW of the mean divergence in fp64 on the GPU, `rows` at a time; then rounded to fp32, to save memory."""
    n, vocab = inputs.shape.rows, inputs.shape.vocab
    outcome = reference_linear_divergence(
        Head(inputs.x.detach().double(), inputs.w.detach().double()),
        Head(inputs.x_teacher.detach().double(), inputs.w_teacher.detach().double()),
        RowBatch(None, torch.full((n,), 1.0 / n, dtype=torch.float64, device=inputs.x.device), None),
        FusedDistillationLoss([term]).objective,
        RequiredGrads(True, True),
        vocab=vocab,
        dtype=torch.float64,
        workspace=4 * rows * vocab * 8,
    )
    assert outcome.hidden is not None and outcome.weight is not None
    return outcome.hidden.float(), outcome.weight.float()


def gradient_errors(inputs: Inputs, step: Callable[[], None], exact: tuple[torch.Tensor, torch.Tensor]) -> dict:
    """Relative errors of dx and dW after `step`."""
    step()
    found = {}
    for name, leaf, right in (("dx", inputs.x, exact[0]), ("dW", inputs.w, exact[1])):
        if leaf.requires_grad:
            difference = sum(
                (a.float() - b).square().sum(dtype=torch.float64)
                for a, b in zip(leaf.grad.split(4096), right.split(4096), strict=True)
            )
            norm = sum(b.square().sum(dtype=torch.float64) for b in right.split(4096))
            found[name] = float((difference / norm).sqrt())
    return found


def compare(shape: Shape, term: LossTerm, candidates: dict[str, Callable], rounds: int, *, exact: bool = True) -> list:
    """Rows of the candidates (makers of losses) beside the floor on one shape and divergence."""
    inputs = Inputs(shape)
    right = exact_gradients(inputs, term) if exact else None
    rows, steps = [], {"floor: bare products": floor(inputs)}
    case = f"linear {term.type}"
    for name, make in candidates.items():
        try:
            step = inputs.run(make())
            row = Row(case, str(shape), name, math.nan, peak_mib=inputs.peak(step))
            if right is not None:
                row.error = gradient_errors(inputs, step, right)
        except (ImportError, torch.OutOfMemoryError) as error:
            inputs.clear()
            rows.append(Row(case, str(shape), name, math.nan, note=f"{type(error).__name__}: {error}"[:80]))
            continue
        rows.append(row)
        if all(error < MOST_ERROR for error in row.error.values()):
            steps[name] = step
        else:
            row.note = "wrong: not timed"
    inputs.clear()
    del right
    torch.cuda.empty_cache()
    times = time_in_turn(steps, rounds=rounds, calls=2, settle=1)
    base = times["floor: bare products"]
    work = 2 * shape.rows * shape.vocab * (3 * shape.student + shape.teacher)
    for row in rows:
        if row.candidate in times:
            row.ms = times[row.candidate]
            row.floor_ratio = row.ms / base
            row.tflop_per_s = work / row.ms / 1e9
    return [Row(case, str(shape), "floor: bare products", base, 1.0, tflop_per_s=work / base / 1e9), *rows]


def variants(rounds: int) -> list[Row]:
    """Measure the main shape under each divergence and option; ratios are to the GEMM lower bound of the same case."""
    inputs = Inputs(MAIN)
    kinds: dict[str, Callable] = {
        "forward KL": ours(KL),
        "reverse KL": ours(REVERSE),
        "JSD(0.5)": ours(JSD),
        "skewed KL(0.1)": ours(SKEWED),
        "total variation": ours(TVD),
        "forward KL + cross-entropy": ours(KL, HARD),
        "forward KL, statistics": ours(KL, stats=True),
        "forward KL, half of the labels ignored": ours(KL, half=True),
        "forward KL, max_workspace_mib=256": ours(KL, workspace=256),
    }
    steps = {name: inputs.run(loss) for name, loss in kinds.items()}
    peaks = {name: inputs.peak(step) for name, step in steps.items()}
    errors: dict[str, dict] = {}
    gated = {
        KL: ("forward KL, statistics", "forward KL, max_workspace_mib=256"),
        SKEWED: ("skewed KL(0.1)",),
        TVD: ("total variation",),
    }
    for term, names in gated.items():
        right = exact_gradients(inputs, term)
        errors.update({name: gradient_errors(inputs, steps[name], right) for name in names})
    frozen = Inputs(MAIN)
    frozen.w.requires_grad_(False)
    steps["forward KL, frozen head"] = frozen.run(ours(KL))
    peaks["forward KL, frozen head"] = frozen.peak(steps["forward KL, frozen head"])
    errors["forward KL, frozen head"] = gradient_errors(
        frozen, steps["forward KL, frozen head"], exact_gradients(inputs, KL)
    )
    inputs.clear()
    frozen.clear()
    torch.cuda.empty_cache()
    floors = {"floor: bare products": floor(inputs), "floor: without dW": floor(frozen, head=False)}
    times = time_in_turn({**floors, **steps}, rounds=rounds, calls=2, settle=1)
    rows = []
    for name, ms in times.items():
        base = times["floor: without dW" if "frozen" in name or "without" in name else "floor: bare products"]
        row = Row("linear variants", str(MAIN), name, ms, ms / base, peaks.get(name))
        row.error = errors.get(name, {})
        rows.append(row)
    return rows


def clipped(rounds: int) -> list[Row]:
    """Measure caps and two temperatures beside the same divergence without; ratios are to that.

    The caps are reached: the note says by which share of the tokens, and how much of the value.
    """
    inputs = Inputs(MAIN)
    temperatures = Temperatures(teacher=1.0, student=1.1)
    rows = []
    for name, term in (("forward KL", KL), ("JSD(0.5)", JSD)):
        options = {
            "clip.token": {"clip": Clip(token=1.0 if term is KL else 0.2)},
            "clip.entry": {"clip": Clip(entry=0.05)},
        }
        terms = {option: term._replace(**settings) for option, settings in options.items()}
        kinds = {"without": ours(term), **{option: ours(each) for option, each in terms.items()}}
        kinds["two temperatures"] = ours(term, temperature=temperatures)
        steps = {option: inputs.run(loss) for option, loss in kinds.items()}
        errors = {
            option: gradient_errors(inputs, steps[option], exact_gradients(inputs, each))
            for option, each in terms.items()
        }
        notes = {}
        for option, each in terms.items():
            x = inputs.x.detach()
            _, stats = FusedDistillationLoss([each])(
                x, inputs.w.detach(), inputs.x_teacher, inputs.w_teacher, return_stats=True
            )
            share = stats.clipped_value.sum() / stats.divergence.sum()
            notes[option] = f"caps {stats.clipped_tokens.mean().item():.1%} of tokens, {share.item():.1%} of the value"
        inputs.clear()
        torch.cuda.empty_cache()
        times = time_in_turn(steps, rounds=rounds, calls=2, settle=1)
        for option, ms in times.items():
            row = Row("linear clipped", str(MAIN), f"{name}, {option}", ms, ms / times["without"])
            row.error = errors.get(option, {})
            row.note = notes.get(option, "")
            rows.append(row)
    return rows


def run(quick: bool = False, only: str = "") -> Iterator[Row]:
    """All cases; `quick`: the main shape with its rivals and variants; `only`: part of a case's or shape's name."""
    rounds = 5 if quick else 7
    for term in (KL, REVERSE, JSD):
        if only in f"linear {term.type} {MAIN}":
            candidates = {"ours": lambda term=term: ours(term)}
            if term != REVERSE:
                candidates.update(rivals(BETAS[term]))
            yield from compare(MAIN, term, candidates, rounds)
    if only in "linear variants":
        yield from variants(rounds)
    if only in "linear clipped":
        yield from clipped(rounds)
    if not quick:
        for shape in MORE:
            if only in f"linear forward_kl {shape}":
                yield from compare(shape, KL, {"ours": lambda: ours(KL)}, rounds, exact=shape.rows <= 8192)
