"""Gradients of hard labels' row losses, which the projection writes where each row's log sum of exps is known."""

import pytest
import torch
from dense_loss import dense_rows, softcap
from distill_kernels import FusedDistillationLoss, LossTerm, fused_log_probs
from distill_kernels.launch import FAMILIES, INTERPRETER
from distill_kernels.losses import plan as planning
from distill_kernels.losses import projection
from distill_kernels.losses.fused import fused_linear_divergence
from distill_kernels.losses.operands import Head, RequiredGrads, RowBatch
from distill_kernels.losses.terms import make_objective
from grids import pairwise
from helpers import assert_as_promised, assert_parts, kernels_launched, realistic_heads, relative_error

HARD = [LossTerm("cross_entropy", 0.8)]
PLAIN = {}
CAPPED = {"student_logit_scale": 0.6, "student_softcap": 8.0}
SMOOTHED = {"label_smoothing": 0.1, "z_loss": 1e-2, "temperature": 2.0}  # hard labels' loss is of temperature 1
EVERYTHING = CAPPED | SMOOTHED
ALL = RequiredGrads(True, True, True)


def inputs(device, rows, vocab, dtype, hidden=32):
    """Hidden states, weight, bias, labels (some ignored) and the upstream gradient, no two rows' alike."""
    x, w = realistic_heads(rows, vocab, hidden, hidden, dtype=dtype, device=device)[:2]
    generator = torch.Generator(device=device).manual_seed(1)
    labels = torch.randint(0, vocab, (rows,), device=device, generator=generator)
    labels[[1, rows // 2]] = -100
    bias, upstream = (torch.randn(n, device=device, generator=generator) for n in (vocab, rows))
    return x, w, bias.to(dtype), labels, upstream


def dense(x, w, bias, labels, upstream, dtype, vocab=None, *, student_logit_scale=1.0, student_softcap=None, **hard):
    """Row losses and gradients of full logits in `dtype`, of which those of ignored rows are 0."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in (x, w, bias)]
    z = softcap(torch.nn.functional.linear(*leaves)[:, :vocab], student_logit_scale, student_softcap)
    rows = dense_rows(z, None, HARD, labels.clamp_min(0), **hard)
    loss = torch.where(labels != -100, rows, 0.0)
    return loss.detach(), *torch.autograd.grad((loss * upstream.to(loss.dtype)).sum(), leaves)


ROW_KERNEL = "_row_kernel"


def ours(x, w, bias, labels, upstream, **more):
    """The same by the module, with how often the row kernel was launched forward and backward."""
    leaves = [t.detach().requires_grad_() for t in (x, w, bias)]
    inputs = {name: more.pop(name) for name in ("valid_rows", "vocab_size") if name in more}
    with kernels_launched() as forward:
        loss = FusedDistillationLoss(HARD, reduction="none", **more)(
            *leaves[:2], labels=labels, student_bias=leaves[2], **inputs
        )
    with kernels_launched() as backward:
        gradients = torch.autograd.grad(loss, leaves, upstream, retain_graph=True)
    for one, other in zip(gradients, torch.autograd.grad(loss, leaves, upstream), strict=True):
        assert torch.equal(one, other)
    return (loss.detach(), *gradients), (forward.count(ROW_KERNEL), backward.count(ROW_KERNEL))


def check(made, given, dtype, **settings):
    exact, eager = (dense(*given, wide, **settings) for wide in (torch.float64, dtype))
    assert len(made) == len(exact) == 4
    assert_parts(made, eager, exact, dtype)


@pytest.mark.plain(
    "torch.bfloat16-0 settings-None",
    "torch.bfloat16-5 settings-shuffled",
    "torch.float16-student_logit_scale student_softcap-shuffled",
    "torch.float32-label_smoothing z_loss temperature-skipped",
)
@pytest.mark.parametrize(
    *pairwise(
        {
            "dtype": [torch.bfloat16, torch.float16, torch.float32],
            "settings": [PLAIN, CAPPED, SMOOTHED, EVERYTHING],
            "rows": [None, "shuffled", "skipped"],
        }
    )
)
def test_gradients_come_without_a_row_kernel(kernel_device, dtype, settings, rows):
    given = inputs(kernel_device, 40, 300, dtype)
    more = {"skip_ignored_rows": False} if rows is None else {}
    if rows == "shuffled":
        more["valid_rows"] = (given[3] != -100).nonzero().squeeze(1).roll(7)
    made, counts = ours(*given, **settings, **more)
    assert counts == (1, 0)
    check(made, given, dtype, **settings)


@pytest.mark.plain(
    "torch.bfloat16-1_0-False",
    "torch.bfloat16-1_1-False",
    "torch.float16-2-False",
    "torch.float32-1_0-True",
    "torch.float32-1_1-True",
)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("terms", [HARD, [LossTerm("forward_kl", 0.7), *HARD], [LossTerm("jsd", 1.0, 0.3)]], ids=len)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_frozen_head_needs_no_recomputation(kernel_device, monkeypatch, dtype, terms, compiled):
    """The loss equals the one whose gradients are all computed in backward, for any number of calls."""
    x, w, bias, labels, upstream = inputs(kernel_device, 40, 300, dtype)
    teacher = realistic_heads(40, 300, 32, 48, dtype=dtype, device=kernel_device)[2:]
    loss = FusedDistillationLoss(terms, temperature=1.3, reduction="none")
    if compiled:  # as a compiled call goes
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    hidden = x.detach().requires_grad_()
    rows = loss(hidden, w, *teacher, labels=labels, student_bias=bias)
    with kernels_launched() as backward:
        for repeat in (True, False):
            (made,) = torch.autograd.grad(rows, hidden, upstream, retain_graph=repeat)
    assert not {"_project_kernel", ROW_KERNEL} & set(backward) and made.dtype == dtype
    leaves = [t.detach().double().requires_grad_() for t in (x, w)]
    own = loss(*leaves, *(t.double() for t in teacher), labels=labels, student_bias=bias.double())
    exact = torch.autograd.grad(own, leaves, upstream.double())[0]
    assert relative_error(made, exact) < {torch.bfloat16: 3e-3, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
    assert (made[labels == -100] == 0).all() and rows[labels != -100].ne(0).all()


@pytest.mark.parametrize("head", [False, True])
def test_small_token_weights_do_not_underflow_in_float16(kernel_device, head):
    """Whose smallest number is 6e-8: a gradient of a few times 1e-7 is raised before it is rounded."""
    x, w, _, labels, upstream = inputs(kernel_device, 40, 300, torch.float16)
    hidden, weight = (x.detach() * 1e-3).requires_grad_(), w.detach().requires_grad_(head)
    weights = torch.full((40,), 2e-5, device=x.device)
    loss = FusedDistillationLoss(HARD, reduction="none")
    rows = loss(hidden, weight, labels=labels, token_weights=weights)
    (made,) = torch.autograd.grad(rows, hidden, upstream * 2**14)
    leaf = hidden.detach().double().requires_grad_()
    own = loss(leaf, w.double(), labels=labels, token_weights=weights.double())
    (exact,) = torch.autograd.grad(own, leaf, upstream.double() * 2**14)
    assert relative_error(made, exact) < 1e-3


def test_several_chunks_and_columns_that_are_padding(kernel_device, limit):
    limit.setattr(planning, "ROW_MULTIPLE", 16)
    given = inputs(kernel_device, 90, 300, torch.bfloat16)
    given[3].clamp_(max=269)
    for more in ({}, {"valid_rows": (given[3] != -100).nonzero().squeeze(1).flip(0)}):
        made, counts = ours(*given, max_workspace_mib=3 * 16 * 270 * 2 / 2**20, vocab_size=270, **more)
        assert counts[0] > 1 and counts[1] == 0
        check(made, given, torch.bfloat16, vocab=270)
        assert (made[2][270:] == 0).all() and (made[3][270:] == 0).all()


@pytest.mark.parametrize("descriptors", [True, False], ids=["persistent", "tiles"])
def test_ignored_rows_get_zero_gradients(kernel_device, descriptors):
    """A row of scale 0 may hold anything; a label that is no token leaves the probabilities."""
    x, w, bias, labels, scale = inputs(kernel_device, 20, 300, torch.bfloat16)
    scale[[0, 7]] = 0.0
    x[7], x[0, 3] = float("inf"), float("nan")
    labels[2:6] = torch.tensor([300, -1, 10**12, -(10**12)])
    head, o = Head(x, w, bias), make_objective(HARD, **EVERYTHING)
    batch, how = RowBatch(labels, scale, None), {"vocab": 300, "dtype": x.dtype, "descriptors": descriptors}
    before = fused_linear_divergence(head, None, batch, o, ALL, **how)
    lse = fused_linear_divergence(head, None, batch, o, RequiredGrads(), **how).lse
    after = fused_linear_divergence(head, None, batch._replace(lse=lse), o, ALL, **how)
    assert before.loss[2:6].isnan().all() and (after.hidden[[0, 7]] == 0).all()
    for one, other in zip(after.gradients[:3], before.gradients, strict=False):
        assert other.isfinite().all() and relative_error(one, other) < 3e-3


@pytest.mark.plain("torch.float16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradient_error_is_only_the_rounding_of_the_result(kernel_device, dtype):
    """Exact GEMMs of exact logit gradients rounded to `dtype` have the same error; stored logits no less."""
    x, w, bias, labels, scale = inputs(kernel_device, 60, 1000, dtype, hidden=64)
    scale[labels == -100] = 0.0
    head, o, batch = Head(x, w, bias), make_objective(HARD), RowBatch(labels, scale, None)
    exact = dense(x, w, bias, labels, scale, torch.float64)[1:]
    lse = fused_linear_divergence(head, None, batch, o, RequiredGrads(), vocab=1000, dtype=dtype).lse
    z = torch.nn.functional.linear(x.double(), w.double(), bias.double())
    assert relative_error(lse, z.logsumexp(-1)) < 1e-6
    g = 0.8 * (z.softmax(-1) - torch.nn.functional.one_hot(labels.clamp_min(0), 1000)) * scale.double()[:, None]
    g = g.to(dtype).double()
    kept, written = (
        fused_linear_divergence(head, None, each, o, ALL, vocab=1000, dtype=dtype).gradients[:3]
        for each in (batch, batch._replace(lse=lse))
    )
    for one, other, rounded, right in zip(
        written, kept, (g @ w.double(), g.T @ x.double(), g.sum(0)), exact, strict=True
    ):
        error, of_kept, least = (relative_error(each, right) for each in (one, other, rounded.to(dtype)))
        assert error <= 1.02 * least and error <= 1.03 * of_kept


def test_gradients_are_not_stored_through_pointers_from_large_tiles(kernel_device, monkeypatch, hardware):
    """Without descriptors timing selects the persistent kernel for logits only."""
    if kernel_device.type == "cuda":
        pytest.skip("of another family")
    monkeypatch.setitem(FAMILIES, INTERPRETER, FAMILIES[INTERPRETER]._replace(tma=False))
    hardware.setattr(projection, "autotune", lambda kernel, shape, ways, *_: ways[1])
    given = inputs(kernel_device, 20, 300, torch.bfloat16)
    with kernels_launched() as launched:
        check(ours(*given)[0], given, torch.bfloat16)
    print(launched)


def test_lora_on_the_head_equals_merged_weights(kernel_device):
    x, w, bias, labels, upstream = inputs(kernel_device, 30, 300, torch.bfloat16)
    a, b = (torch.randn(*shape, device=kernel_device) / 6 for shape in ((4, 32), (300, 4)))
    made, exact = [], []
    for results, dtype in ((made, torch.bfloat16), (exact, torch.float64)):  # no kernels for fp64
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, a.bfloat16(), b.bfloat16())]
        weight, own = w.to(dtype), bias.to(dtype)
        log_p = fused_log_probs(leaves[0], weight, labels, bias=own, lora=(*leaves[1:], 0.5))
        results += [log_p.detach(), *torch.autograd.grad(log_p, leaves, upstream.to(log_p.dtype))]
    for name, mine, right in zip(("loss", "dx"), made, exact, strict=False):
        assert_as_promised(name, mine, right)
    for mine, right in zip(made[2:], exact[2:], strict=True):
        assert relative_error(mine, right) < 5e-3  # rounded once more


@pytest.mark.gpu
@pytest.mark.parametrize("ignored", [True, False])
def test_full_vocabulary_equals_the_reference(device, ignored):
    """Error of the gradients below that of logits kept in fp16, 0.21 %."""
    x, w = realistic_heads(4096, 32000, 2048, 2048, dtype=torch.bfloat16, device=device)[:2]
    labels = torch.randint(0, 32000, (4096,), device=device)
    if ignored:
        labels[::5] = -100
    made, exact = [], []
    for results, dtype in ((made, torch.bfloat16), (exact, torch.float32)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, w)]
        if dtype == torch.bfloat16:
            log_p = fused_log_probs(*leaves, labels)
        else:
            z = torch.nn.functional.linear(*leaves)
            log_p = torch.where(labels != -100, -torch.nn.functional.cross_entropy(z, labels, reduction="none"), 0.0)
        results += [log_p.detach(), *torch.autograd.grad(log_p.mean(), leaves)]
    assert relative_error(made[0], exact[0]) < 3e-4
    assert relative_error(made[1], exact[1]) < 2.1e-3
    assert relative_error(made[2], exact[2]) < 2.1e-3
