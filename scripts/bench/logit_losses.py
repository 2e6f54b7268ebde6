"""Losses over logits that exist, forward + backward, against eager, torch.compile and Liger: time over the bytes moved.

Fewest bytes: student and teacher logits read once, the gradient written once (cross-entropy: no teacher). `floor_ratio`
is the time over a copy of as many bytes, timed in turn with the candidates. Errors are those of the gradient against
fp64 on correlated logits of standard deviation 4.

Liger's divergences start from log-probabilities (TVD: probabilities). They are timed as one has to call them, after
bf16 softmaxes, and alone, from probabilities that are there already: the part of it that is Liger's own. Candidates in
place write the gradient over the logits, as Liger's cross-entropy always does, so they get copies.

Predicted on an H200 (4.2 TB/s, 50 MB of L2) before any run: what a later sweep finds in L2 follows from the rows in
flight. At 32,000 columns they are 34 MB: 1.1 to 1.2 x the floor for all. At 128,256, one row a multiprocessor, 68 MB of
two models' logits: 70 % of later reads are spared, forward KL 3.6 passes for 3 (1.2 x), JSD and reverse KL 4.2 (1.4 x),
cross-entropy, 34 MB, 1.1 x. At 262,144: 139 MB, 1.4 x, 1.8 x, and 1.2 x for cross-entropy.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from distill_kernels import LossTerm, distillation_loss

from scripts.bench.harness import Row, copy_bandwidth, peak_above_inputs, time_in_turn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from dense_loss import dense_rows

ROWS, MORE_ROWS = 4096, 32_768
SHORT = 65_536  # columns up to which there are more rows: 4,096 of them take the GPU less time than the host
MAIN_VOCABULARY = 128_256
MORE_VOCABULARIES = (32_000, 49_152, 151_936, 262_144)
MOST_ERROR = 5e-2
COPY = "a copy of as many bytes"
TERMS = {
    "forward_kl": LossTerm("forward_kl", 1.0),
    "reverse_kl": LossTerm("reverse_kl", 1.0),
    "jsd": LossTerm("jsd", 1.0, beta=0.5),
    "tvd": LossTerm("tvd", 1.0),
    "cross_entropy": LossTerm("cross_entropy", 1.0),
}


class Inputs:
    """Logits of both models, bf16 [rows, vocab], and labels; `student` is a leaf."""

    def __init__(self, rows: int, vocab: int, device: str = "cuda") -> None:
        generator = torch.Generator(device).manual_seed(0)

        def draw() -> torch.Tensor:
            return torch.randn(rows, vocab, device=device, generator=generator, dtype=torch.float32)

        teacher = draw()
        self.student = (4 * (0.9 * teacher + 0.19**0.5 * draw())).bfloat16().requires_grad_()
        self.teacher = (4 * teacher).bfloat16()
        self.labels = torch.randint(0, vocab, (rows,), device=device, generator=generator)


class Candidate(NamedTuple):
    """`loss(student, inputs)` of the mean over rows.

    `in_place`: it overwrites the logits. `given`: makes what it takes in the student's place; its gradient is not that
    of the logits, so it has no error to show.
    """

    loss: Callable[[torch.Tensor, Inputs], torch.Tensor]
    in_place: bool = False
    given: Callable[[torch.Tensor], torch.Tensor] | None = None


def plain(term: LossTerm, student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss in plain PyTorch, with softmaxes in fp32."""
    return dense_rows(student.float(), teacher.float(), [term], labels).mean()


def liger(term: LossTerm) -> dict[str, Candidate]:
    """Liger's loss of this term; nothing where it is not installed."""
    try:
        from liger_kernel import transformers as library
    except ImportError as error:
        print(f"without Liger: {error}", file=sys.stderr)
        return {}
    if term.type == "cross_entropy":
        entropy = library.LigerCrossEntropyLoss()
        return {"Liger LigerCrossEntropyLoss": Candidate(lambda z, i: entropy(z, i.labels), in_place=True)}
    if term.type == "tvd":
        distance, normalise = library.LigerTVDLoss(), torch.softmax
        name = "Liger LigerTVDLoss"
    else:
        normalise = torch.log_softmax
        if term.type == "forward_kl":
            distance, name = library.LigerKLDIVLoss(log_target=True, reduction="batchmean"), "Liger LigerKLDIVLoss"
        else:
            distance, name = library.LigerJSD(beta=1.0 if term.type == "reverse_kl" else 0.5), "Liger LigerJSD"
    kept: dict[int, torch.Tensor] = {}  # the teacher's probabilities, made once for the kernel alone

    def alone(given: torch.Tensor, i: Inputs) -> torch.Tensor:
        if id(i) not in kept:
            kept.clear()
            kept[id(i)] = normalise(i.teacher, -1)
        return distance(given, kept[id(i)])

    return {
        f"{name}, after bf16 softmaxes": Candidate(lambda z, i: distance(normalise(z, -1), normalise(i.teacher, -1))),
        f"{name} alone, from probabilities": Candidate(alone, given=lambda z: normalise(z, -1)),
    }


def candidates(term: LossTerm) -> dict[str, Candidate]:
    """Everything that is compared for one term."""

    def ours(z: torch.Tensor, i: Inputs, in_place: bool = False) -> torch.Tensor:
        return distillation_loss(z, i.teacher, i.labels, terms=[term], in_place=in_place)

    torch._dynamo.reset()
    compiled = torch.compile(plain)
    return {
        "ours": Candidate(ours),
        "ours, in place": Candidate(lambda z, i: ours(z, i, True), in_place=True),
        "eager": Candidate(lambda z, i: plain(term, z, i.teacher, i.labels)),
        "torch.compile": Candidate(lambda z, i: compiled(term, z, i.teacher, i.labels)),
        **liger(term),
    }


def exact_gradient(term: LossTerm, inputs: Inputs, rows: int = 128) -> torch.Tensor:
    """The gradient of the mean loss for the student's logits by autograd in fp64, `rows` at a time; kept in fp32."""
    made = torch.empty_like(inputs.student, dtype=torch.float32)
    for start in range(0, len(made), rows):
        part = slice(start, start + rows)
        z = inputs.student.detach()[part].double().requires_grad_()
        loss = dense_rows(z, inputs.teacher[part].double(), [term], inputs.labels[part]).sum() / len(made)
        made[part] = torch.autograd.grad(loss, z)[0].float()
    return made


def make_step(candidate: Candidate, inputs: Inputs) -> tuple[Callable[[], None], torch.Tensor]:
    """Forward and backward from a cleared gradient, and the leaf that gets it."""
    leaf = inputs.student
    if candidate.given is not None:
        leaf = candidate.given(inputs.student.detach()).requires_grad_()
    elif candidate.in_place:
        leaf = inputs.student.detach().clone().requires_grad_()

    def step() -> None:
        leaf.grad = None
        # a view is no leaf, so that it may be overwritten; after the first call it holds a gradient, as long to read
        candidate.loss(leaf.view_as(leaf), inputs).backward()

    return step, leaf


def gradient_error(candidate: Candidate, inputs: Inputs, exact: torch.Tensor) -> float:
    """Relative error of the gradient that `candidate` leaves."""
    step, leaf = make_step(candidate, inputs)
    step()
    assert leaf.grad is not None
    parts = zip(leaf.grad.split(256), exact.split(256), strict=True)
    missed = sum((made.float() - right).square().sum(dtype=torch.float64) for made, right in parts)
    leaf.grad = None
    return float((missed / exact.square().sum(dtype=torch.float64)).sqrt())


def rows_of(vocab: int) -> int:
    """Return the number of rows of `vocab` columns to time."""
    return MORE_ROWS if vocab <= SHORT else ROWS


def measure(name: str, vocab: int, rounds: int) -> list[Row]:
    """Rows of every candidate for one term and vocabulary."""
    term, inputs, shape = TERMS[name], Inputs(rows_of(vocab), vocab), f"{rows_of(vocab)} x {vocab}"
    moved = (2 if name == "cross_entropy" else 3) * inputs.student.numel() * inputs.student.element_size()
    exact = exact_gradient(term, inputs)
    rows, steps = [], {}
    for label, candidate in candidates(term).items():
        row = Row(f"logits {name}", shape, label, math.nan)
        rows.append(row)
        try:
            if candidate.given is None:
                row.error = {"dz": gradient_error(candidate, inputs, exact)}
            step, leaf = make_step(candidate, inputs)
            row.peak_mib = peak_above_inputs(step)
        except (torch.OutOfMemoryError, RuntimeError) as failure:
            row.note = f"{type(failure).__name__}: {failure}"[:80]
            continue
        leaf.grad = None
        if row.error and not row.error["dz"] < MOST_ERROR:
            row.note = "wrong: not timed"
            continue
        steps[label] = step
    del exact
    torch.cuda.empty_cache()
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = time_in_turn({**steps, COPY: lambda: target.copy_(source)}, rounds=rounds, calls=2, settle=1)
    rows.append(Row(f"logits {name}", shape, COPY, math.nan))
    for row in rows:
        if row.candidate in times:
            row.ms = times[row.candidate]
            row.floor_ratio = row.ms / times[COPY]
            row.tb_per_s = moved / row.ms / 1e9
    return rows


def run(quick: bool = False, only: str = "") -> Iterator[Row]:
    """All terms over all vocabularies; `quick`: the main one; `only`: part of "logits <term> <shape>"."""
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth:.2f} TB/s")
    for vocab in (MAIN_VOCABULARY,) if quick else (MAIN_VOCABULARY, *MORE_VOCABULARIES):
        for name in TERMS:
            if only in f"logits {name} {rows_of(vocab)} x {vocab}":
                yield from measure(name, vocab, rounds=5 if quick else 7)
                torch.cuda.empty_cache()
