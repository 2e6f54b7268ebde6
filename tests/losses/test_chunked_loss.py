"""A user's own loss through the chunked driver, against autograd over full logits."""

import pytest
import torch
from distill_kernels import ChunkedLoss
from helpers import assert_as_good_as_torch, differentiate, realistic_heads
from torch.nn import functional as F


def own_loss(student, teacher, labels):
    """KL plus a margin at the label: nothing that the fused family has."""
    log_s, log_t = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
    margin = student.amax(-1) - student.gather(-1, labels.clamp_min(0)[:, None]).squeeze(-1)
    return (log_t.exp() * (log_t - log_s)).sum(-1) + 0.1 * margin


def inputs(dtype, device, n=37, vocab=203):
    x_s, w_s, x_t, w_t = realistic_heads(n, vocab, 24, 40, dtype=dtype, device=device)
    labels = torch.arange(n, device=device) % vocab
    labels[::3] = -100
    bias = torch.randn(vocab, device=device).to(dtype)
    a, b = torch.randn(4, 24, device=device).to(dtype) * 0.1, torch.randn(vocab, 4, device=device).to(dtype)
    return [x_s, w_s, bias, a, b], x_t, w_t, labels


def each_row(tensors, x_t, w_t, labels, weights=None, vocab=200):
    x, w, bias, a, b = tensors
    student = (x @ w.T + bias + 0.5 * (x @ a.T) @ b.T)[:, :vocab]
    rows = own_loss(student, (x_t @ w_t.T)[:, :vocab], labels)
    return torch.where(labels != -100, rows if weights is None else rows * weights, 0)


def full(tensors, x_t, w_t, labels, items=None, weights=None):
    rows = each_row(tensors, x_t, w_t, labels, weights)
    return rows.sum() / ((labels != -100).sum() if items is None else items)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", ["nothing", "items and weights", "valid rows"])
def test_equals_autograd_over_full_logits(device, dtype, given):
    seven_rows = 7 * 24 * 200 / 2**20
    tensors, x_t, w_t, labels = inputs(dtype, device)
    items = torch.tensor(50, device=device) if given == "items and weights" else None
    weights = torch.rand(len(labels), device=device) if given == "items and weights" else None
    valid = (labels != -100).nonzero().squeeze(-1) if given == "valid rows" else None

    def ours(leaves):
        x, w, bias, a, b = leaves
        return ChunkedLoss(own_loss, max_workspace_mib=seven_rows)(
            x,
            w,
            x_t,
            w_t,
            labels,
            student_bias=bias,
            student_lora=(a, b, 0.5),
            token_weights=weights,
            num_items=items,
            valid_rows=valid,
            vocab_size=200,
        )

    def exactly(leaves):
        return full(leaves, x_t.double(), w_t.double(), labels, items, weights)

    exact = differentiate(exactly, tensors, torch.float64)
    eager = differentiate(lambda leaves: full(leaves, x_t, w_t, labels, items, weights), tensors)
    made = differentiate(ours, tensors)
    for name, *results in zip(["loss", "x", "w", "bias", "a", "b"], made, eager, exact, strict=True):
        assert_as_good_as_torch(*results, dtype, name)
    assert not made[2][200:].any(), "padded vocabulary got a gradient"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("told", [False, True], ids=["labels", "valid rows"])
def test_each_rows_loss_takes_an_upstream_gradient_of_its_own(device, dtype, told):
    tensors, x_t, w_t, labels = inputs(dtype, device)
    upstream = torch.randn(len(labels), device=device, dtype=torch.float64)
    valid = (labels != -100).nonzero().squeeze(-1) if told else None

    def ours(leaves):
        x, w, bias, a, b = leaves
        loss = ChunkedLoss(own_loss, reduction="none", max_workspace_mib=7 * 24 * 200 / 2**20)
        more = {"student_bias": bias, "student_lora": (a, b, 0.5), "valid_rows": valid, "vocab_size": 200}
        return (loss(x, w, x_t, w_t, labels, **more) * upstream).sum()

    def exactly(leaves):
        return (each_row(leaves, x_t.to(leaves[0].dtype), w_t.to(leaves[0].dtype), labels) * upstream).sum()

    exact = differentiate(exactly, tensors, torch.float64)
    eager = differentiate(exactly, tensors)
    for name, *results in zip(
        ["loss", "x", "w", "bias", "a", "b"], differentiate(ours, tensors), eager, exact, strict=True
    ):
        assert_as_good_as_torch(*results, dtype, name)


def test_half_precision_keeps_small_gradients(device):
    x, w, x_t, w_t = realistic_heads(64, 4001, 24, 40, dtype=torch.float16, device=device)
    labels = torch.arange(64, device=device)
    items, scaler = 100_000, 65536.0

    def ours(leaves):
        return ChunkedLoss(own_loss)(*leaves, x_t, w_t, labels, num_items=items) * scaler

    def full_logits(leaves):
        logits = [x @ w.T for x, w in (leaves, (x_t.to(leaves[0].dtype), w_t.to(leaves[1].dtype)))]
        logits = [z if z.dtype == torch.float64 else z.float() for z in logits]
        return own_loss(*logits, labels).sum() / items * scaler  # as a gradient scaler does

    exact = differentiate(full_logits, [x, w], torch.float64)
    eager = differentiate(full_logits, [x, w])
    for results in zip(differentiate(ours, [x, w]), eager, exact, strict=True):
        assert_as_good_as_torch(*results, torch.float16)


def test_full_logits_never_exist(device):
    seen = []

    def fn(student, teacher, labels):
        seen.append(student.shape[0])
        return student.square().sum(-1)

    x = torch.randn(64, 8, device=device, requires_grad=True)
    w = torch.randn(1000, 8, device=device)
    ChunkedLoss(fn, max_workspace_mib=0.25)(x, w).backward()
    assert len(seen) > 4 and sum(seen) == 64
    expected = torch.autograd.grad((x @ w.T).square().sum() / 64, x)[0]
    torch.testing.assert_close(x.grad, expected, rtol=1e-3, atol=1e-2)


def test_only_required_gradients_and_only_one_backward(device):
    tensors, x_t, w_t, labels = inputs(torch.float32, device)
    x, w = tensors[0].requires_grad_(), tensors[1]
    loss = ChunkedLoss(own_loss)(x, w, x_t, w_t, labels)
    loss.backward(retain_graph=True)
    assert x.grad is not None and w.grad is None
    with pytest.raises(RuntimeError, match="already differentiated"):
        loss.backward()
    with torch.no_grad():
        assert ChunkedLoss(own_loss)(x, w, x_t, w_t, labels) == loss


def test_nan_in_ignored_rows_does_not_spread(device):
    tensors, x_t, w_t, labels = inputs(torch.float32, device)
    x = tensors[0].clone()
    x[0] = float("nan")  # labels[0] is ignored
    x.requires_grad_()
    ChunkedLoss(own_loss)(x, tensors[1], x_t, w_t, labels).backward()
    assert not x.grad.isnan().any() and not x.grad[0].any()


def test_mistakes_are_named(device):
    x, w = torch.randn(5, 4, device=device), torch.randn(9, 4, device=device)
    with pytest.raises(ValueError, match="fn: expected losses of shape"):
        ChunkedLoss(lambda s, t, y: s.sum())(x, w)
    with pytest.raises(ValueError, match="reduction"):
        ChunkedLoss(own_loss, reduction="median")
    with pytest.raises(ValueError, match="student_weight"):
        ChunkedLoss(own_loss)(x, w[:, :3])
