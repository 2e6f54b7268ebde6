"""Error of a cache: K stored tokens against the whole distribution, on a sample, before a run uses it.

For every K and reading, over sampled positions, with p the teacher's distribution and c what is stored of it:

    kept        the teacher's probability on the K tokens
    KL(p, c)    nats; `bucket` spreads the other tokens' probability evenly; without it c is 0 somewhere: infinite
    seen        the reported divergence over the full forward KL, teacher to student: the share of it that is seen
    gradient    |g_c - g| / |g| of the student's last hidden states, every position for itself
    head        the same of the head's weight, summed over all positions: noise averages out there, bias does not

Numbers are rounded as in storage before they are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from distill_kernels import FusedKLLoss, FusedTopKKLLoss

from distill.core.eval_mode import eval_mode
from distill.core.labels import shift_labels
from distill.data.collator import Collator, move_batch
from distill.models.head import HeadWeights, LogitTransform, decoder_of, find_head, read_head
from distill.objectives.losses import LogitTransforms
from distill.objectives.row_packing import DTYPES
from distill.objectives.top_k_encoding import (
    EncodedTopK,
    Encoding,
    encode,
    log_probabilities,
    normalised,
    rounding_cost,
    surplus_of,
)
from distill.teachers.backends.stored.contents import LogitHead
from distill.teachers.backends.stored.settings import TAILS
from distill.teachers.opening import ModelPair

KS = (8, 16, 32, 64, 128, 256)


class Lossiness(NamedTuple):
    """One row of the table; see the head of this file."""

    k: int
    tail: str
    kept: float
    kl: float
    seen: float
    gradient: float
    head: float


class Sample(NamedTuple):
    """Outputs of both models at positions of some rows.

    Attributes:
        teacher_hidden, student_hidden: [M, H] of each.
        teacher_head, student_head: weights of the heads, [V, H].
        teacher_transform, student_transform: scales and soft caps.
        labels: label of each position, int64 [M].
        columns: Number of vocabulary entries that are compared.
    """

    teacher_hidden: torch.Tensor
    student_hidden: torch.Tensor
    teacher_head: HeadWeights
    student_head: HeadWeights
    teacher_transform: LogitTransform
    student_transform: LogitTransform
    labels: torch.Tensor
    columns: int


@torch.no_grad()
def take_sample(
    pair: ModelPair, head: LogitHead, student_transform: LogitTransform, rows: Any, columns: int, positions: int
) -> Sample:
    """Run both models over rows until there are that many positions.

    Args:
        pair: Both models; the teacher gives hidden states.
        student_transform: Scale and soft cap of the student's logits.
        columns: Number of vocabulary entries that are compared.
    """
    teacher = pair.teacher
    student = pair.student
    device = next(student.parameters()).device
    collate = Collator(0, omit_plain_positions=True, columns=teacher.columns)
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    with eval_mode(student):
        for number in range(len(rows)):
            batch = move_batch(collate([rows[number]]), device)
            places = batch["valid_rows"]
            own = teacher.student_batch(batch, True)
            body = {name: value for name, value in own.items() if name not in ("labels", "valid_rows")}
            hidden = decoder_of(student)(**body, use_cache=False).last_hidden_state
            targets = teacher.targets(batch)
            labels = shift_labels(batch["labels"]).flatten()[places]
            assert isinstance(targets, torch.Tensor)
            parts.append((targets.flatten(0, 1)[places], hidden.flatten(0, 1)[places], labels))
            if sum(len(part[2]) for part in parts) >= positions:
                break
    teacher_hidden, student_hidden, labels = (torch.cat(part)[:positions] for part in zip(*parts, strict=True))
    return Sample(
        teacher_hidden,
        student_hidden,
        head.weights,
        read_head(find_head(student)),
        head.transform,
        student_transform,
        labels,
        columns,
    )


def rounding(sample: Sample, dtype: str) -> float:
    """Return KL(teacher || stored), nats a position, of hidden states stored in `dtype`."""
    s = sample
    return rounding_cost(s.teacher_hidden, s.teacher_head, s.teacher_transform, s.columns, DTYPES[dtype])


def measure(
    sample: Sample,
    *,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float16,
    ks: Sequence[int] = KS,
    seed: int = 0,
) -> list[Lossiness]:
    """Return the table of errors: every K up to the vocabulary, every reading.

    Args:
        seed: Seed of the sampled tail.
    """
    s = sample
    _, p = log_probabilities(s.teacher_hidden, s.teacher_head, s.teacher_transform, s.columns, temperature)
    full = FusedKLLoss(temperature=temperature, **LogitTransforms(s.student_transform, s.teacher_transform))
    shared = {"student_bias": s.student_head.bias, "student_lora": s.student_head.lora, "vocab_size": s.columns}
    exact = _differentiated(
        s,
        lambda x, w: full(
            x,
            w,
            s.teacher_hidden.to(s.teacher_head.weight.dtype),
            s.teacher_head.weight,
            teacher_bias=s.teacher_head.bias,
            **shared,
        ),
    )
    table = []
    for k in [k for k in ks if k <= s.columns]:
        for tail in TAILS:
            generator = torch.Generator(s.labels.device).manual_seed(seed)
            stored = encode(
                s.teacher_hidden,
                s.teacher_head,
                s.teacher_transform,
                s.labels,
                Encoding(s.columns, k, tail, temperature),
                generator,
            ).to(dtype)
            given = stored.logprobs.float() if tail == "sampled" else normalised(stored.logprobs, stored.tail)
            loss = FusedTopKKLLoss(
                "forward",
                tail,
                temperature,
                student_logit_scale=s.student_transform.scale,
                student_softcap=s.student_transform.softcap,
            )
            ids = stored.ids
            made = _differentiated(s, lambda x, w: loss(x, w, ids, given, **shared))  # noqa: B023
            if tail == "sampled":
                made[0] -= temperature**2 * surplus_of(given, stored.tail).mean()
            table.append(
                Lossiness(
                    k,
                    tail,
                    float(p.gather(-1, ids.long()).exp().sum(-1).mean()),
                    divergence(p, stored, given, tail),
                    float(made[0] / exact[0]),
                    *(_distance(a, b) for a, b in zip(made[1:], exact[1:], strict=True)),
                )
            )
    return table


def divergence(p: torch.Tensor, stored: EncodedTopK, given: torch.Tensor, tail: str) -> float:
    """Return the KL of log-probabilities p [M, V] from what is stored, as the reading spreads it over all tokens."""
    others = p.shape[1] - given.shape[1]
    if tail == "bucket" and others:
        rest = torch.log1p(-given.exp().sum(-1, keepdim=True).clamp_max(1 - 1e-7))
        spread = (rest - torch.tensor(float(others)).log()).expand_as(p)
    else:
        spread = torch.full_like(p, -torch.inf)
    if tail == "renormalize":
        given = given.log_softmax(-1)
    spread = spread.scatter(-1, stored.ids.long(), given)
    return float(torch.where(p > -torch.inf, p.exp() * (p - spread), 0.0).sum(-1).mean())


def _differentiated(sample: Sample, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    weight = sample.student_head.weight.detach().clone().requires_grad_()
    hidden = sample.student_hidden.detach().to(weight.dtype).requires_grad_()
    value = loss(hidden, weight)
    value.backward()
    assert hidden.grad is not None and weight.grad is not None
    return [value.detach(), hidden.grad, weight.grad]


def _distance(made: torch.Tensor, exact: torch.Tensor) -> float:
    return float((made.double() - exact.double()).norm() / exact.double().norm())
