"""Policy-gradient losses of sampled tokens in one pass, against autograd over full logits; reference and kernels."""

import pytest
import torch
from distill_kernels import FusedPolicyGradientLoss, fused_log_probs, fused_policy_gradient_loss
from distill_kernels.losses import plan as planning
from grids import pairwise
from helpers import assert_as_good_as_torch, assert_rounded_once, kernels_launched, relative_error
from policy_cases import EVERYTHING, PENALTY, SETTINGS, H, N, V, dense, draw, expected_of, given_of, logits_of, old_of
from torch.nn import functional as F


@pytest.mark.plain(
    "specification-reward-torch.bfloat16-ignored-1300",
    "specification-everything-torch.bfloat16-ignored-1300",
    "kernel-plain-torch.bfloat16-all-300",
    "kernel-clipped-torch.float16-ignored-257",
    "kernel-k3-torch.float32-found-1300",
    "kernel-k2 and entropy-torch.float64-named-300",
)
@pytest.mark.parametrize(
    *pairwise(
        {
            "name": list(SETTINGS),
            "dtype": [torch.bfloat16, torch.float16, torch.float32, torch.float64],
            "rows": ["all", "ignored", "found", "named"],
            "vocab": [V, 257, 1300],
        }
    )
)
def test_values_and_gradients_equal_fp64(where, limit, name, dtype, rows, vocab):
    limit.setattr("distill_kernels.losses.linear.REFERENCE_CHUNK_ELEMENTS", 5 * V)
    settings = SETTINGS[name]
    tensors, labels, advantages, reference = draw(where, dtype, vocab=vocab)
    given = given_of(tensors, labels, advantages, reference, settings)
    more = {}
    if rows != "all":
        labels = labels.clone()
        labels[[1, 5, 22]] = -100
        for each in given:
            if each is not None:
                each[[1, 5]] = torch.nan  # rows that do not count may hold anything
    kept = labels != -100
    if rows == "named":
        more["valid_rows"] = kept.nonzero().squeeze(1).roll(7)
    clean = [None if each is None else torch.where(kept, each, 0.0) for each in given]
    exact, eager = (expected_of(tensors, labels, clean, wide, kept, **settings) for wide in (torch.float64, dtype))
    rounded = expected_of(tensors, labels, clean, torch.float64, kept, gradient_dtype=dtype, **settings)
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    module = FusedPolicyGradientLoss(**settings, skip_ignored_rows=rows == "found")
    loss = module(*leaves[:2], labels, *given, student_bias=leaves[2], **more)
    (2 * loss).backward()
    made = [loss.detach(), *(leaf.grad for leaf in leaves)]
    # rows' losses have either sign: the promise of the divergences', relative to a sum without cancellation
    error = (loss - exact[0].sum()).abs() / exact[0].abs().sum()
    assert error < {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, 2e-5), error
    for part, *three, products in zip(("dx", "dW", "db"), made[1:], eager[1:], exact[1:], rounded[1:], strict=True):
        assert_as_good_as_torch(*three, dtype, part)
        if dtype == torch.bfloat16:
            assert_rounded_once(three[0], products, three[2])
    assert made[1].any() and not made[1][~kept].any()


def test_clipped_tokens_get_no_gradient(where):
    tensors, labels, _, _ = draw(where, torch.float64)
    old, signs = old_of(tensors, labels), torch.ones(N, device=where)
    signs[::2] = -1
    x = tensors[0].requires_grad_()
    rows = FusedPolicyGradientLoss(clip=0.2, reduction="none")(
        x, tensors[1], labels, signs, old, student_bias=tensors[2]
    )
    rows.sum().backward()
    ratio = (fused_log_probs(x, tensors[1], labels, bias=tensors[2]) - old).exp()
    cut = ((ratio > 1.2) & (signs > 0)) | ((ratio < 0.8) & (signs < 0))
    assert cut.any() and not cut.all()
    assert torch.equal(x.grad.any(-1), ~cut)
    torch.testing.assert_close(
        rows, torch.where(cut, -signs * ratio.clamp(0.8, 1.2), -signs * ratio), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_log_probabilities_are_exact(where, dtype, name):
    """Those of unlikely tokens too, whose stored logits are rounded relative to a maximum far above them."""
    settings, vocab = SETTINGS[name], 1300
    tensors, labels, advantages, reference = draw(where, dtype, vocab=vocab)
    tensors[0] = (tensors[0] * 4).to(dtype)
    given = given_of(tensors, labels, advantages, reference, settings)
    a, b = (torch.randn(*s, device=where) * 0.3 for s in ((3, H), (vocab, 3)))
    low = [t.to(dtype) for t in (a, b)]
    x, w, bias = tensors
    module = FusedPolicyGradientLoss(**settings)
    for strided in (False, True):
        x_, w_ = (t.t().contiguous().t() if strided else t for t in (x, w))
        _, stats = module(x_, w_, labels, *given, bias, return_stats=True)
        z = logits_of([t.double() for t in tensors], **settings).log_softmax(-1)
        error = (stats.student_label_logprob - z.gather(-1, labels[:, None])[:, 0]).abs()
        assert error.max() < 2e-5 * (1 + z.abs().max())
    _, stats = module(x, w, labels, *given, bias, (*low, 0.5), return_stats=True)
    errors, eye = [], torch.eye(vocab, device=where, dtype=torch.float64)
    for rounded in (dtype, torch.float64):  # the LoRA's inner product, by the kernels and by the specification
        rank = (x.double() @ low[0].double().T).to(rounded).double()
        raw = F.linear(x.double(), w.double(), bias.double()) + 0.5 * rank @ low[1].double().T
        z = logits_of([raw, eye], **settings).log_softmax(-1)
        errors.append((stats.student_label_logprob - z.gather(-1, labels[:, None])[:, 0]).abs().max())
    assert min(errors) < 2e-5 * (1 + z.abs().max())


def test_three_products_and_one_row_kernel(kernel_device):
    """Projections, and row losses: one of each a chunk, none in backward."""
    tensors, labels, advantages, _ = draw(kernel_device, torch.bfloat16)
    leaves = [t.requires_grad_() for t in tensors]
    with kernels_launched() as forward:
        loss = fused_policy_gradient_loss(*leaves[:2], labels, advantages, student_bias=leaves[2])
    with kernels_launched() as backward:
        loss.backward()
    assert [forward.count(name) for name in ("_project_kernel", "_policy_kernel", "_row_kernel")] == [1, 1, 0]
    assert not {"_project_kernel", "_policy_kernel", "_row_kernel"} & set(backward)


def test_gradient_is_that_of_the_log_probabilities(where):
    """Row losses with any upstream gradient, computed again in backward, and a LoRA on the head."""
    tensors, labels, advantages, _ = draw(where)
    x, w, bias = tensors
    labels[3] = -100
    generator = torch.Generator(where).manual_seed(4)
    a, b, upstream = (torch.randn(*s, device=where, generator=generator) for s in ((3, H), (V, 3), (N,)))
    results = []
    for which in ("fused", "log-probabilities"):
        leaves = [t.detach().clone().requires_grad_() for t in (x, w, bias, a * 0.2, b)]
        lora = (*leaves[3:], 0.5)
        if which == "fused":
            module = FusedPolicyGradientLoss(reduction="none", temperature=1.0)
            rows = module(*leaves[:2], labels, advantages, student_bias=leaves[2], student_lora=lora)
        else:
            log_p = fused_log_probs(*leaves[:2], labels, bias=leaves[2], lora=lora)
            rows = -(log_p - log_p.detach()).exp() * advantages * (labels != -100)
        results.append([rows.detach(), *torch.autograd.grad(rows, leaves, upstream)])
    for one, other in zip(*results, strict=True):
        assert relative_error(one, other) < 1e-5


@pytest.mark.parametrize("head", [True, False])
def test_a_frozen_head_and_padding_columns(where, head):
    tensors, labels, advantages, reference = draw(where)
    labels.clamp_(max=269)
    x, w, bias = (t.requires_grad_(head or i == 0) for i, t in enumerate(tensors))
    module = FusedPolicyGradientLoss(**PENALTY, reduction="sum")
    old = old_of([w[:270].detach() if i == 1 else t.detach()[:270] for i, t in enumerate(tensors)], labels)
    loss = module(x, w, labels, advantages, old, reference, student_bias=bias, vocab_size=270)
    loss.backward()
    leaves = [t.detach().double().requires_grad_() for t in (x, w, bias)]
    dense(F.linear(*leaves)[:, :270], labels, advantages, old, reference, **PENALTY).sum().backward()
    assert relative_error(x.grad, leaves[0].grad) < 1e-5
    if head:
        assert not w.grad[270:].any() and not bias.grad[270:].any()
        assert relative_error(w.grad, leaves[1].grad) < 1e-5 and relative_error(bias.grad, leaves[2].grad) < 1e-5
    else:
        assert w.grad is None and bias.grad is None


@pytest.mark.parametrize("name", ["plain", "k3", "k2 and entropy", "everything"])
@pytest.mark.parametrize("grad", [True, False])
def test_statistics_equal_their_definitions(where, name, grad):
    settings = SETTINGS[name]
    tensors, labels, advantages, reference = draw(where)
    given = given_of(tensors, labels, advantages, reference, settings)
    labels[2] = -100
    leaves = [t.requires_grad_(grad) for t in tensors]
    loss, stats = FusedPolicyGradientLoss(**settings)(
        *leaves[:2], labels, *given, student_bias=leaves[2], return_stats=True
    )
    all_log_p = logits_of([t.detach().double() for t in tensors], **settings).log_softmax(-1)
    kept = labels != -100
    log_p = torch.where(kept, all_log_p.gather(-1, labels.clamp_min(0)[:, None])[:, 0], 0.0)
    close = {"rtol": 2e-5, "atol": 2e-5}
    torch.testing.assert_close(stats.student_label_logprob.double(), log_p, **close)
    torch.testing.assert_close(stats.cross_entropy.double(), -log_p, **close)
    entropy = torch.where(kept, -(all_log_p.exp() * all_log_p).sum(-1), 0.0)
    torch.testing.assert_close(stats.student_entropy.double(), entropy, **close)
    d = torch.zeros_like(log_p) if given[2] is None else torch.where(kept, given[2] - log_p, 0.0)
    torch.testing.assert_close(stats.divergence.double(), d.exp() - d - 1, **close)
    torch.testing.assert_close(
        stats.teacher_label_logprob.double(), torch.where(kept, d + log_p, 0.0) * (given[2] is not None), **close
    )
    assert not stats.agreement.any() and not stats.teacher_entropy.any()
    torch.testing.assert_close(
        loss, FusedPolicyGradientLoss(**settings)(*leaves[:2], labels, *given, student_bias=leaves[2])
    )


def test_a_small_divergence_keeps_its_digits(where):
    """k3 of log-probabilities that differ in the third digit, whose terms in fp32 cancel."""
    eye, labels = torch.eye(4, device=where), torch.zeros(6, dtype=torch.int64, device=where)
    z = torch.zeros(6, 4, device=where)
    d = torch.tensor([1e-3, -1e-3, 3e-2, -0.09, 0.11, 0.0], device=where)
    log_p = torch.log_softmax(z, -1)[:, 0]
    rows, stats = FusedPolicyGradientLoss(kl_weight=1.0, reduction="none")(
        z, eye, labels, None, None, log_p + d, return_stats=True
    )
    exact = (log_p + d).double() - log_p.double()
    exact = exact.expm1() - exact
    torch.testing.assert_close(rows.double(), exact, rtol=1e-3, atol=1e-12)
    torch.testing.assert_close(stats.divergence.double(), exact, rtol=1e-3, atol=1e-12)


def test_small_advantages_do_not_underflow_in_float16(where):
    """Token weights of 2e-5 are raised before the logits' gradient is rounded."""
    tensors, labels, advantages, _ = draw(where, torch.float16)
    x = tensors[0].requires_grad_()
    weights = torch.full((N,), 2e-5, device=where)
    module = FusedPolicyGradientLoss(reduction="sum")
    (made,) = torch.autograd.grad(module(x, tensors[1], labels, advantages, token_weights=weights) * 2**14, x)
    leaf = x.detach().double().requires_grad_()
    rows = dense(leaf @ tensors[1].double().T, labels, advantages, None, None)
    (exact,) = torch.autograd.grad((rows * 2e-5).sum() * 2**14, leaf)
    assert relative_error(made, exact) < 1e-3


@pytest.mark.full
def test_chunks_give_the_loss_of_one_pass(kernel_device, limit):
    limit.setattr(planning, "ROW_MULTIPLE", 16)
    tensors, labels, advantages, reference = draw(kernel_device, torch.bfloat16, rows=90)
    given = given_of(tensors, labels, advantages, reference, EVERYTHING)
    labels[[1, 40]] = -100
    kept = labels != -100
    for more in ({}, {"valid_rows": kept.nonzero().squeeze(1).flip(0)}):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        module = FusedPolicyGradientLoss(**EVERYTHING, max_workspace_mib=3 * 16 * V * 2 / 2**20)
        loss = module(*leaves[:2], labels, *given, student_bias=leaves[2], **more)
        loss.backward()
        exact = expected_of(tensors, labels, given, torch.float64, kept, 1.0, **EVERYTHING)
        assert (loss - exact[0].sum()).abs() < 3e-4 * exact[0].abs().sum()
        for leaf, right in zip(leaves, exact[1:], strict=True):
            assert relative_error(leaf.grad, right) < 3e-3
