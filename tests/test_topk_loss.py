"""A teacher of top-k log-probabilities, against autograd over the outcomes written out in full."""

import pytest
import torch
from distill_kernels import FusedTopKKLLoss, kl_div
from helpers import assert_as_good_as_torch, realistic_heads
from torch.nn import functional as F

N, V, K = 23, 150, 8


def setup(dtype, device, temperature=1.0, k=K):
    x, w, x_t, w_t = realistic_heads(N, V, 24, 40, dtype=dtype, device=device)
    logprobs = F.log_softmax((x_t.double() @ w_t.double().T) / temperature, -1)
    top, ids = logprobs.topk(k, -1)
    labels = torch.arange(N, device=device)
    labels[::4] = -100
    return [x, w, torch.randn(V, device=device).to(dtype)], top, ids, labels


def written_out(tensors, top, ids, labels, direction, tail, temperature, ce=0.0, cap=None):
    """The same by a dense 0/1 matrix of outcomes and plain autograd."""
    x, w, bias = tensors
    z = x @ w.T + bias
    z = z if cap is None else cap * torch.tanh(z / cap)
    p = F.softmax(z / temperature, -1)
    p_s, p_t = p.gather(-1, ids), top.to(p.dtype).exp()
    if tail == "bucket":
        outside = torch.ones_like(p).scatter(-1, ids, 0.0)
        p_s = torch.cat([p_s, (p * outside).sum(-1, keepdim=True)], -1)
        p_t = torch.cat([p_t, 1 - p_t.sum(-1, keepdim=True)], -1)
    else:
        p_s, p_t = p_s / p_s.sum(-1, keepdim=True), p_t / p_t.sum(-1, keepdim=True)
    a, b = (p_t, p_s) if direction == "forward" else (p_s, p_t)
    rows = (a * (a.log() - b.log())).sum(-1) * temperature**2
    rows = rows + ce * F.cross_entropy(z, labels, reduction="none")
    kept = labels != -100
    return torch.where(kept, rows, 0).sum() / kept.sum()


def differentiate(function, tensors, dtype=None):
    leaves = [t.detach().to(dtype or t.dtype).clone().requires_grad_() for t in tensors]
    loss = function(leaves)
    (2 * loss).backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
@pytest.mark.parametrize("temperature, ce, cap", [(1.0, 0.0, None), (2.0, 0.5, 15.0)])
def test_values_and_gradients(device, monkeypatch, dtype, direction, tail, temperature, ce, cap):
    monkeypatch.setattr("distill_kernels.losses.chunked.chunk_rows", lambda *_: 5)
    tensors, top, ids, labels = setup(dtype, device, temperature)
    loss = FusedTopKKLLoss(direction, tail, temperature, ce_weight=ce, student_softcap=cap)
    arguments = (top, ids, labels, direction, tail, temperature, ce, cap)
    exact = differentiate(lambda leaves: written_out(leaves, *arguments), tensors, torch.float64)
    eager = differentiate(lambda leaves: written_out(leaves, *arguments), tensors)
    ours = differentiate(lambda leaves: loss(*leaves[:2], ids, top, labels, student_bias=leaves[2]), tensors)
    for name, *results in zip(["loss", "x", "w", "bias"], ours, eager, exact, strict=True):
        assert_as_good_as_torch(*results, dtype, name)


def test_valid_rows_items_and_leading_dimensions(device):
    (x, w, _), top, ids, labels = setup(torch.float32, device)
    loss = FusedTopKKLLoss(ce_weight=0.5)
    whole = loss(x, w, ids, top, labels, num_items=torch.tensor(9, device=device))
    rows = (labels != -100).nonzero().squeeze(-1)
    shaped = [t[None] for t in (x, ids, top, labels)]
    again = loss(shaped[0], w, *shaped[1:], valid_rows=rows, num_items=9)
    torch.testing.assert_close(again, whole)
    torch.testing.assert_close(loss(x, w, ids, top, labels) * len(rows) / 9, whole)


def test_bucket_bounds_the_full_divergence_and_meets_it(device):
    (x, w, _), top, ids, _ = setup(torch.float64, device, k=V)
    teacher = torch.zeros(N, V, dtype=torch.float64, device=device).scatter(-1, ids, top)
    full = kl_div(x @ w.T, teacher)
    last = 0.0
    for k in (1, 8, 64, V):
        bucket = FusedTopKKLLoss()(x, w, ids[:, :k], top[:, :k])
        assert last <= bucket <= full * (1 + 1e-9)
        last = bucket
    torch.testing.assert_close(last, full)


def test_equal_models_and_blind_spots(device):
    (x, w, _), *_ = setup(torch.float32, device)
    top, ids = F.log_softmax(x @ w.T, -1).topk(K, -1)
    assert FusedTopKKLLoss()(x, w, ids, top) < 1e-6
    away = torch.zeros(V, device=device).index_fill_(0, ids[0], -20.0)  # the first row's tokens made unlikely, alike
    row = (x[:1], w, ids[:1], top[:1])
    assert FusedTopKKLLoss(tail="renormalize")(*row, student_bias=away) < 1e-5
    assert FusedTopKKLLoss()(*row, student_bias=away) > 1


def test_teacher_temperature_and_extremes(device):
    (x, w, _), top, ids, _ = setup(torch.float32, device)
    at_one = FusedTopKKLLoss(tail="renormalize", temperature=2.0, teacher_temperature=1.0)(x, w, ids, top)
    halved = FusedTopKKLLoss(tail="renormalize", temperature=2.0)(x, w, ids, top / 2)
    torch.testing.assert_close(at_one, halved)
    x = (x * 1e4).requires_grad_()
    for tail in ("bucket", "renormalize"):
        loss = FusedTopKKLLoss(tail=tail)(x, w, ids, top)
        loss.backward()
        assert loss >= 0 and not loss.isnan() and not x.grad.isnan().any()


def test_mistakes_are_named(device):
    (x, w, _), top, ids, _ = setup(torch.float32, device)
    for make, name in [
        (lambda: FusedTopKKLLoss("sideways"), "direction"),
        (lambda: FusedTopKKLLoss(tail="ignore"), "tail"),
        (lambda: FusedTopKKLLoss(temperature=2.0, teacher_temperature=1.0), "teacher_temperature"),
        (lambda: FusedTopKKLLoss()(x, w, ids[:3], top), "teacher_ids"),
        (lambda: FusedTopKKLLoss()(x, w, ids, top[:, :3]), "teacher_logprobs"),
        (lambda: FusedTopKKLLoss(ce_weight=1.0)(x, w, ids, top), "labels"),
        (lambda: FusedTopKKLLoss()(x, w[:, :3], ids, top), "student_weight"),
    ]:
        with pytest.raises(ValueError, match=name):
            make()
