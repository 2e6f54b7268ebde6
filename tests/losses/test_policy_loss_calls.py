"""Policy-gradient losses compiled, with mistakes, and at full size on a GPU."""

import pytest
import torch
from distill_kernels import FusedPolicyGradientLoss
from distill_kernels.losses.fused import fused_linear_divergence
from distill_kernels.losses.linear import reference_linear_divergence
from distill_kernels.losses.operands import Head, RequiredGrads, RowBatch
from distill_kernels.losses.operator import linear_divergence_op
from distill_kernels.losses.policy_reference import Policy, PolicySettings
from helpers import assert_captures, relative_error
from policy_cases import EVERYTHING, SETTINGS, N, V, draw, given_of


def test_a_label_that_is_no_token_makes_its_row_nan(kernel_device):
    """Other rows keep theirs, as on a GPU, where values are not checked."""
    (x, w, bias), labels, advantages, _ = draw(kernel_device)
    labels[2:5] = torch.tensor([V, -1, 10**12], device=x.device)
    module = FusedPolicyGradientLoss()
    batch = RowBatch(labels, torch.ones(N, device=x.device), None, Policy(advantages, None, None, module.policy))
    how = {"vocab": V, "dtype": x.dtype}
    output = fused_linear_divergence(Head(x, w, bias), None, batch, module.objective, RequiredGrads(True), **how)
    wrong = torch.zeros(N, dtype=torch.bool, device=x.device)
    wrong[2:5] = True
    assert torch.equal(output.loss.isnan(), wrong) and output.hidden[~wrong].isfinite().all()


@pytest.mark.plain("k3-mean")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["k3", "everything"])
def test_compiled_calls_equal_eager_ones(device, reduction, name):
    (x, w, _), labels, advantages, reference = draw(device)
    given = given_of([x, w], labels, advantages, reference, SETTINGS[name])
    labels[3] = -100
    loss = FusedPolicyGradientLoss(**SETTINGS[name], reduction=reduction, skip_ignored_rows=False)
    leaves = [x.requires_grad_(), w.requires_grad_()]

    def step(x, w):
        return loss(x, w, labels, *given).sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*leaves), step(*leaves))
    one, other = (torch.autograd.grad(function(*leaves), leaves) for function in (compiled, step))
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(one, other, strict=True))


def test_operators_pass_opcheck(device):
    (x, w, _), labels, advantages, reference = draw(device)
    module = FusedPolicyGradientLoss(kl_weight=0.1)
    required = [True, True, False, False, False, True]
    nothing = [None] * 3
    torch.library.opcheck(
        linear_divergence_op,
        (
            *(x.requires_grad_(), w.requires_grad_(), *nothing, [], [], [], labels, torch.ones(N, device=device), None),
            *([], module._encoded, 1.0, V, torch.float32, None, False, False, False, required),
            *(None, None, advantages, None, reference, "", 0, module.policy.encode()),
        ),
    )


def test_modifying_what_backward_reads_raises(where):
    (x, w, _), labels, advantages, _ = draw(where)
    loss = FusedPolicyGradientLoss(reduction="none")(x.requires_grad_(), w.requires_grad_(), labels, advantages)
    advantages.add_(1)
    with pytest.raises(ValueError, match="advantages: expected no change before backward"):
        loss.sum().backward()


def test_errors_name_the_invalid_argument(device):
    (x, w, _), labels, advantages, _ = draw(device)
    for make, message in [
        (lambda: FusedPolicyGradientLoss(clip=0.0), "clip: expected None or a number above 0, got 0.0"),
        (lambda: FusedPolicyGradientLoss(clip_high=0.2), "clip: expected a number beside clip_high, got None"),
        (lambda: FusedPolicyGradientLoss(kl_weight=-1), "kl_weight: expected a finite number of at least 0, got -1"),
        (lambda: FusedPolicyGradientLoss(kl_estimator="k1"), "kl_estimator: expected reward or k2 or k3, got 'k1'"),
        (lambda: FusedPolicyGradientLoss(entropy_weight=float("nan")), "entropy_weight"),
        (lambda: FusedPolicyGradientLoss()(x, w, labels), "advantages: expected a tensor without"),
        (lambda: FusedPolicyGradientLoss(clip=0.2)(x, w, labels, advantages), "old_logprobs: expected a tensor with"),
        (lambda: FusedPolicyGradientLoss(kl_weight=1)(x, w, labels, advantages), "reference_logprobs: expected"),
        (lambda: FusedPolicyGradientLoss()(x, w, labels, advantages[:3]), r"advantages: expected floating \[23\]"),
        (lambda: FusedPolicyGradientLoss()(x, w, labels, labels), "advantages: expected floating"),
        (lambda: FusedPolicyGradientLoss()(x, w, labels, advantages, [0.0]), "old_logprobs: expected a torch.Tensor"),
        (lambda: FusedPolicyGradientLoss()(x, w, None, advantages), "labels"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()
    assert PolicySettings.decode(PolicySettings(0.1, 0.2, 0.3, "k2", 0.4).encode()) == (0.1, 0.2, 0.3, "k2", 0.4)


@pytest.mark.gpu
@pytest.mark.heavy_gpu
@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.parametrize("rows, vocab", [(2048, 128_256), (1000, 151_936), (6000, 32_000)])
def test_full_vocabulary_keeps_the_error_bounds(device, rows, vocab, name):
    settings = SETTINGS[name]
    tensors, labels, advantages, reference = draw(device, torch.bfloat16, rows, vocab, hidden=512)
    given = given_of(tensors, labels, advantages, reference, settings)
    labels[::5] = -100
    module = FusedPolicyGradientLoss(**settings)
    leaves = [t.detach().requires_grad_() for t in tensors]
    loss = module(*leaves[:2], labels, *given, student_bias=leaves[2])
    loss.backward()
    scale = (labels != -100).double() / (labels != -100).sum()
    exact = reference_linear_divergence(
        Head(*(t.double() for t in tensors)),
        None,
        RowBatch(labels, scale, None, Policy(*given, module.policy)),
        module.objective,
        RequiredGrads(True, True, True),
        vocab=vocab,
        dtype=torch.float64,
        workspace=8 << 30,
    )
    assert (loss - exact.loss.sum()).abs() < 3e-4 * exact.loss.abs().sum()
    for leaf, right in zip(leaves, exact.gradients, strict=False):
        assert relative_error(leaf.grad, right) < 3e-3


@pytest.mark.gpu
def test_neither_syncs_nor_breaks_a_graph(device):
    tensors, labels, advantages, reference = draw(device, torch.bfloat16, 300, 5000)
    given = given_of(tensors, labels, advantages, reference, EVERYTHING)
    x, w, _ = (t.requires_grad_() for t in tensors)
    module = FusedPolicyGradientLoss(**EVERYTHING, skip_ignored_rows=False)

    def step():
        return torch.autograd.grad(module(x, w, labels, *given), (x, w))

    assert_captures(step)
