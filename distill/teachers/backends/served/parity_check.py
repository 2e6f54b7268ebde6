"""Parity check on the first batch: the logits that the loss will compute here against those of the server's model.

A server's faults would otherwise be trained on silently: hidden states from before the final norm, a soft cap or scale
that is not reported, log-probabilities of the token before. The server runs its whole model over a few rows; here the
same rows' targets are turned into log-probabilities as the loss does it, and the two are compared. Where they differ,
known causes are tried, so that the error names one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from distill.models.head import HeadWeights, LogitTransform
from distill.teachers.backends.served.protocol import TargetRequest
from distill.teachers.backends.served.teacher_client import TeacherClient

TOKENS = 64
CAPS = (5.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0)
# mean rounding error over the mean size of logits, in eps, for GEMMs that add in another order
ROUNDING = {torch.float32: 64.0, torch.float64: 64.0, torch.bfloat16: 2.0, torch.float16: 2.0}
SPARSE = 0.02  # nats by which half precision may change a log-probability


class LogitReading(NamedTuple):
    """Conversion of targets into logits on this side.

    Attributes:
        head: LM-head weights, on any device; None where top-k targets are sent.
        transform: Scale and soft cap of the logits, as the server reports them.
    """

    client: TeacherClient
    head: HeadWeights | None
    transform: LogitTransform


def check_parity(teacher: LogitReading, query: TargetRequest) -> str:
    """Compare up to 64 of the query's positions; return a line on how close they are.

    Raises:
        ValueError: they differ, with the cause where it is found.
        TeacherUnavailableError: the server does not answer.
    """
    query = replace(query, rows=query.rows[:TOKENS])
    if len(query.rows) and (compared := teacher.client.parity(query)) is not None:
        return compared
    if not teacher.client.protocol.most_logits or not len(query.rows):
        why = "no token is trained on here" if teacher.client.protocol.most_logits else "it sends none"
        return f"its logits are not compared: {why}"
    expected = own_logits(teacher.client, query)
    off, allowed = _sparse(teacher, query, expected) if teacher.head is None else _dense(teacher, query, expected)
    if not off <= allowed:
        why = "" if teacher.head is None else _reason(teacher, query, expected, allowed)
        raise ValueError(
            f"{teacher.client.protocol.field}: log-probabilities made here are off by {off:.2g} nats from the "
            f"teacher's own, over {len(query.rows)} tokens ({allowed:.1g} is rounding): "
            f"{why or 'they are of other positions or columns'}"
        )
    return f"log-probabilities of {len(query.rows)} tokens are those of its own logits, to {off:.1g} nats"


def own_logits(client: TeacherClient, query: TargetRequest) -> torch.Tensor:
    """Return fp32 logits [M, V] of the rows by the server's model, in as many requests as it needs."""
    parts = np.array_split(query.rows, max(-(-len(query.rows) // client.protocol.most_logits), 1))
    return torch.cat([client.logits(replace(query, rows=rows)) for rows in parts])


def _dense(teacher: LogitReading, query: TargetRequest, expected: torch.Tensor) -> tuple[float, float]:
    """Return the mean distance of all log-probabilities, and its bound by rounding."""
    hidden = _plain_hidden(teacher, query)
    dtype = teacher.client.spec.dtype
    if hidden.shape[-1] != _head(teacher).weight.shape[1] or expected.shape[-1] != len(_head(teacher).weight):
        return float("inf"), 0.0
    off = _distance(_logits(teacher, hidden, teacher.transform), expected)
    return off, ROUNDING[dtype] * torch.finfo(dtype).eps * max(expected.abs().mean().item(), 1.0)


def _head(teacher: LogitReading) -> HeadWeights:
    assert teacher.head is not None
    return teacher.head


def _plain_hidden(teacher: LogitReading, query: TargetRequest) -> torch.Tensor:
    """Return unrounded hidden states, also where the run receives them in fp8."""
    return teacher.client.exact(query)["hidden"]


def _logits(teacher: LogitReading, hidden: torch.Tensor, transform: LogitTransform) -> torch.Tensor:
    weight, bias, _ = _head(teacher)
    return transform.applied(torch.nn.functional.linear(hidden.to(weight), weight, bias).float().cpu())


def _distance(z: torch.Tensor, expected: torch.Tensor) -> float:
    return (z.log_softmax(-1) - expected.log_softmax(-1)).abs().mean().item()


def _sparse(teacher: LogitReading, query: TargetRequest, expected: torch.Tensor) -> tuple[float, float]:
    """Return the largest distance of the labels' log-probabilities, and of the top K tokens' too, and its bound."""
    client = teacher.client
    spec = teacher.client.spec
    values = client.ask(query).result()
    logp = expected[:, : spec.columns].log_softmax(-1)
    labels = torch.from_numpy(query.labels.astype(np.int64)).clamp_max(spec.columns - 1)
    scale = logp.gather(1, labels[:, None])[:, 0]
    worst = (values["label_logprob"].float() - scale).abs() / scale.abs().clamp_min(1)
    if spec.tail != "sampled":
        at = (expected[:, : spec.columns] / spec.temperature).log_softmax(-1).gather(1, values["ids"].long())
        worst = torch.maximum(worst, ((values["logprobs"].float() - at).abs() / at.abs().clamp_min(1)).amax(-1))
    return worst.max().item(), SPARSE


def _reason(teacher: LogitReading, query: TargetRequest, expected: torch.Tensor, allowed: float) -> str:
    """Return the cause that explains the server's own logits."""
    hidden = _plain_hidden(teacher, query)
    if hidden.shape[-1] != _head(teacher).weight.shape[1]:
        return "the hidden states do not fit the head"
    plain = _logits(teacher, hidden, LogitTransform())
    own = teacher.transform
    read = _logits(teacher, hidden, own)
    enough = 10 * allowed
    if len(query.rows) > 2 and any(_distance(read.roll(by, 0)[1:-1], expected[1:-1]) < enough for by in (1, -1)):
        return "the hidden states are shifted by one position"
    cap = own.softcap
    before = expected if cap is None else cap * torch.atanh((expected / cap).clamp(-1 + 1e-6, 1 - 1e-6))
    scale = ((plain * before).sum() / (plain * plain).sum()).item()
    if _distance(_logits(teacher, hidden, LogitTransform(scale, cap)), expected) < enough:
        return f"the logit scale is missing: its logits are {scale:.4g} times the GEMM's, it reports {own.scale:g}"
    if own.softcap is not None and _distance(plain * own.scale, expected) < enough:
        return f"the soft cap of {own.softcap:g} that it reports is not in its logits"
    for cap in CAPS:
        if _distance(cap * torch.tanh(plain * own.scale / cap), expected) < enough:
            return f"the soft cap is missing: its logits are capped at {cap:g}, it reports {own.softcap}"
    return "the final norm is missing from the hidden states, or the head is another one"
