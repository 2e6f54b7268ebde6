"""Top-k losses at the edges: extremes, small tails, unused places, teacher temperatures."""

import pytest
import torch
from distill_kernels import FusedTopKKLLoss
from helpers import relative_error
from test_topk_loss import (
    READINGS,
    N,
    V,
    setup,
)
from torch.nn import functional as F


@pytest.mark.plain("specification-bucket", "specification-sampled", "kernel-sampled")
@pytest.mark.parametrize("tail", ["bucket", "renormalize", "sampled"])
def test_extreme_logits_give_finite_losses(where, tail):
    (x, w, _), top, ids, _ = setup(torch.float32, where)
    x = (x * 1e4).requires_grad_()
    loss = FusedTopKKLLoss(tail=tail)(x, w, ids, top)
    loss.backward()
    assert loss >= 0 and not loss.isnan() and not x.grad.isnan().any()
    certain = top.clone().fill_(-torch.inf)  # unused places, and a teacher that is sure of one token
    certain[:, 0] = 0.0
    sure = FusedTopKKLLoss(tail=tail)(x.detach() / 1e4, w, ids, certain)
    expected = F.cross_entropy(x.detach() / 1e4 @ w.T, ids[:, 0])
    torch.testing.assert_close(sure, expected if tail != "renormalize" else sure, rtol=1e-4, atol=1e-5)
    assert sure.isfinite()


@pytest.mark.plain("bucket")
@pytest.mark.parametrize("tail", ["bucket", "renormalize", "sampled"])
def test_poisoned_memory_does_not_matter_and_runs_repeat_bitwise(kernel_device, monkeypatch, tail):
    (x, w, _), top, ids, labels = setup(torch.bfloat16, kernel_device, rows=9)
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    def run():
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        loss, stats = FusedTopKKLLoss(tail=tail, ce_weight=0.5)(*leaves, ids, top, labels, return_stats=True)
        loss.backward()
        return [loss.detach(), *(leaf.grad for leaf in leaves), *stats]

    clean = run()
    monkeypatch.setattr(torch, "empty", poisoned)
    for one, other in zip(run(), clean, strict=True):
        assert torch.equal(one, other) and not one.isnan().any()


def test_a_small_tail_keeps_its_digits(where):
    """A student's tail of 1e-9 beside a teacher's of 1e-3: 1 - P in fp32 would be 0 and the loss inf."""
    z = torch.zeros(1, V, device=where)
    z[0, 0] = 26.0
    teacher = torch.tensor([[-1e-3]], device=where)
    one = FusedTopKKLLoss()(torch.ones(1, 1, device=where), z.T.contiguous(), torch.zeros_like(teacher).long(), teacher)
    s, t = F.log_softmax(z.double(), -1), teacher.double()
    rest_s, rest_t = s[0, 1:].logsumexp(0), (1 - t.exp()).log()
    exact = t.exp() * (t - s[0, 0]) + rest_t.exp() * (rest_t - rest_s)
    torch.testing.assert_close(one.double(), exact.squeeze(), rtol=1e-3, atol=0)


def test_a_student_without_tail_probability(where):
    """Nothing but two of the K is possible: the others' gradient is 0, not NaN."""
    bias = torch.full((V,), -torch.inf, device=where).index_fill_(0, torch.tensor([2, 9], device=where), 0.0)
    x, w = torch.randn(3, 5, device=where), torch.randn(V, 5, device=where, requires_grad=True)
    sure = torch.tensor([[0.0, -torch.inf]], device=where).expand(3, 2)
    loss = FusedTopKKLLoss()(x, w, torch.tensor([[2, 9]], device=where).expand(3, 2), sure, student_bias=bias)
    loss.backward()
    torch.testing.assert_close(loss, F.cross_entropy((x @ w.T)[:, [2, 9]], torch.zeros_like(x[:, 0]).long()))
    assert w.grad.isfinite().all() and w.grad[2].any() and not w.grad[:2].any()


def test_teacher_temperature_rescales_log_probabilities(device):
    (x, w, _), top, ids, _ = setup(torch.float32, device)
    at_temperature_1 = FusedTopKKLLoss(tail="renormalize", temperature=2.0, teacher_temperature=1.0)(x, w, ids, top)
    halved = FusedTopKKLLoss(tail="renormalize", temperature=2.0)(x, w, ids, top / 2)
    torch.testing.assert_close(at_temperature_1, halved)


def test_teacher_temperature_of_16_bits(where):
    """Log-probabilities of bf16 are multiplied in fp32: products of 16 bits lost 1.2e-2."""
    (x, w, _), top, ids, _ = setup(torch.float32, where)
    loss = FusedTopKKLLoss(tail="renormalize", temperature=3.0, teacher_temperature=1.0)
    given = top.bfloat16()
    torch.testing.assert_close(loss(x, w, ids, given), loss(x, w, ids, given.float()))


@pytest.mark.plain("specification-forward-bucket")
@pytest.mark.parametrize("direction, tail", READINGS)
def test_unused_entries_do_not_count_among_the_k(where, direction, tail):
    """Whatever their ids: out of range, or another place's token. With all columns in use, a tail is left as well."""
    (x, w, _), top, ids, labels = setup(torch.float32, where)
    more = torch.tensor([10**6, -1, 0], device=where).expand(N, 3).clone()
    more[:, 2] = ids[:, 0]
    unused = torch.full((N, 3), -torch.inf, device=where)
    loss = FusedTopKKLLoss(direction, tail, ce_weight=0.5)

    def run(*given):
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        value, stats = loss(*leaves, *given, labels, return_stats=True)
        value.backward()
        return [value.detach(), *(leaf.grad for leaf in leaves), *stats]

    right = run(ids, top.float())
    for one, other in zip(run(torch.cat([more, ids], -1), torch.cat([unused, top.float()], -1)), right, strict=True):
        assert relative_error(one, other) < 1e-6
    every = torch.arange(V, device=where).expand(N, V)
    spread = torch.full((N, V), -torch.inf, device=where).scatter(-1, ids, top.float())
    for one, other in zip(run(every, spread), right, strict=True):
        assert relative_error(one, other) < 1e-5
