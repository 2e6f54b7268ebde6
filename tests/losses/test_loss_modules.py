"""The losses as their users call them: autograd, reductions, options, compile, and the mistakes they name."""

import pytest
import torch
from dense_loss import ALL_TERMS, dense_rows
from distill_kernels import (
    FusedCrossEntropyLoss,
    FusedDistillationLoss,
    FusedJSDLoss,
    FusedKLLoss,
    FusedSkewKLLoss,
    FusedTVDLoss,
    LossTerm,
    TokenStats,
)
from distill_kernels.losses.operator import linear_divergence_op
from helpers import no_syncs, operator_arguments, ops_called, realistic_heads, relative_error

V, N = 60, 12


@pytest.fixture(params=["specification", "kernel"])
def where(request, device):
    """CPU tensors through the PyTorch path, and the same calls through the kernels."""
    if request.param == "specification":
        yield torch.device("cpu")
    else:
        yield request.getfixturevalue("kernel_device")


def draw(device, dtype=torch.float32, rows=N):
    x, w, xt, wt = realistic_heads(rows, V, 16, 24, dtype=dtype, device=device)
    labels = torch.randint(0, V, (rows,), device=device)
    labels[1] = labels[4] = -100
    return x.requires_grad_(), w.requires_grad_(), xt, wt, labels


def exact(tensors, terms, weights=None, **settings):
    """Row losses in fp64 (0 where ignored), and the fp64 leaves."""
    x, w, xt, wt, labels = tensors
    x, w = (t.detach().double().requires_grad_() for t in (x, w))
    rows = dense_rows(x @ w.T, xt.double() @ wt.double().T, terms, labels.clamp_min(0), **settings)
    rows = rows * (labels != -100) * (1.0 if weights is None else weights.double())
    return rows, x, w


@pytest.mark.plain(
    "specification-FusedKLLoss-0",
    "specification-FusedKLLoss-2",
    "specification-FusedSkewKLLoss-0",
    "specification-FusedTVDLoss-",
    "kernel-FusedKLLoss-1",
    "kernel-FusedJSDLoss-",
    "kernel-FusedSkewKLLoss-1",
    "kernel-FusedDistillationLoss-",
)
@pytest.mark.parametrize(
    "module, terms",
    [
        (FusedKLLoss(), [LossTerm("forward_kl", 1.0)]),
        (FusedKLLoss("reverse", 2.0), [LossTerm("reverse_kl", 1.0)]),
        (
            FusedKLLoss(divergence_weight=0.5, ce_weight=0.5),
            [LossTerm("forward_kl", 0.5), LossTerm("cross_entropy", 0.5)],
        ),
        (FusedJSDLoss(0.3), [LossTerm("jsd", 1.0, beta=0.3)]),
        (FusedSkewKLLoss(0.2), [LossTerm("skew_forward_kl", 1.0, alpha=0.2)]),
        (FusedSkewKLLoss(0.2, "reverse"), [LossTerm("skew_reverse_kl", 1.0, alpha=0.2)]),
        (FusedTVDLoss(), [LossTerm("tvd", 1.0)]),
        (FusedDistillationLoss(ALL_TERMS), ALL_TERMS),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, torch.nn.Module) else "",
)
def test_modules_compute_their_divergence(where, module, terms):
    tensors = draw(where)
    rows, x, w = exact(tensors, terms, temperature=module.objective.temperature)
    expected = rows.sum() / (N - 2)
    (expected * 3).backward()
    loss = module(*tensors)
    (loss * 3).backward()
    assert loss.shape == () and loss.dtype == torch.float32
    assert relative_error(loss, expected) < 1e-5
    assert relative_error(tensors[0].grad, x.grad) < 1e-5
    assert relative_error(tensors[1].grad, w.grad) < 1e-5


def test_cross_entropy_needs_no_teacher(where):
    x, w, _, _, labels = draw(where)
    loss, stats = FusedCrossEntropyLoss()(x, w, labels, return_stats=True)
    expected = torch.nn.functional.cross_entropy(x @ w.T, labels)
    assert relative_error(loss, expected) < 1e-5
    assert relative_error(stats.cross_entropy.sum() / (N - 2), expected) < 1e-5


@pytest.mark.plain("specification-mean", "specification-none", "kernel-mean", "kernel-none")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions_weights_and_counts(where, reduction):
    tensors = draw(where)
    weights = torch.rand(N, device=where)
    weights[0] = 0
    terms = [LossTerm("reverse_kl", 1.0), LossTerm("cross_entropy", 0.5)]
    rows, x, w = exact(tensors, terms, weights)
    upstream = torch.rand(N, device=where)
    expected = {"mean": rows.sum() / 37, "sum": rows.sum(), "none": (rows * upstream).sum()}[reduction]
    expected.backward()
    module = FusedDistillationLoss(terms, reduction=reduction)
    for num_items in (37, torch.tensor(37, device=where)):
        tensors[0].grad = tensors[1].grad = None
        loss = module(*tensors, token_weights=weights, num_items=num_items)
        if reduction == "none":
            assert relative_error(loss, rows) < 1e-5
            loss = (loss * upstream).sum()
        loss.backward()
        assert relative_error(loss, expected) < 1e-5
        assert relative_error(tensors[0].grad, x.grad) < 1e-5
        assert relative_error(tensors[1].grad, w.grad) < 1e-5


def test_rows_may_be_given_found_or_not_skipped(where):
    tensors = draw(where)
    rows = (tensors[4] != -100).nonzero().squeeze(-1)
    losses = [
        FusedKLLoss()(*tensors),
        FusedKLLoss()(*tensors, valid_rows=rows),
        FusedKLLoss(skip_ignored_rows=False)(*tensors),
        FusedKLLoss()(*tensors[:4], valid_rows=rows),
    ]
    for loss in losses[1:]:
        assert relative_error(loss, losses[0]) < 1e-6


def test_valid_rows_of_all_rows_are_not_gathered(where):
    tensors = draw(where)[:4]
    losses, gathered = [], []
    for rows in (torch.randperm(N, device=where), None, torch.arange(N - 1, device=where)):
        with ops_called("aten::index", "aten::index_select") as calls:
            losses.append(FusedKLLoss()(*tensors, valid_rows=rows))
        gathered.append(len(calls))
    assert torch.equal(losses[0], losses[1]) and gathered[0] == gathered[1] < gathered[2]


def test_rows_that_are_all_ignored_give_zero(where):
    tensors = draw(where)
    tensors[4].fill_(-100)
    for module in (FusedKLLoss(), FusedKLLoss(skip_ignored_rows=False)):
        loss = module(*tensors)
        loss.backward()
        assert loss == 0 and (tensors[0].grad == 0).all() and (tensors[1].grad == 0).all()


def test_leading_dimensions_and_statistics(where):
    x, w, xt, wt, labels = draw(where)
    flat, stats = FusedKLLoss()(x, w, xt, wt, labels, return_stats=True)
    shaped = FusedKLLoss()(x.view(3, 4, -1), w, xt.view(3, 4, -1), wt, labels.view(3, 4))
    assert relative_error(shaped, flat) < 1e-6
    assert FusedKLLoss(reduction="none")(x.view(3, 4, -1), w, xt.view(3, 4, -1), wt).shape == (3, 4)
    assert isinstance(stats, TokenStats) and all(s.shape == (N,) and not s.requires_grad for s in stats)
    assert relative_error(stats.divergence.sum() / (N - 2), flat) < 1e-5


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_what_needs_a_gradient_gets_one(where, frozen, monkeypatch):
    tensors = draw(where)
    tensors[frozen].requires_grad_(False)
    FusedKLLoss()(*tensors).backward()
    assert tensors[frozen].grad is None and tensors[1 - frozen].grad is not None


def test_no_grad_makes_no_gradient(where):
    tensors = draw(where)

    def call():
        with ops_called("aten::mm", "aten::addmm", "aten::addmm_") as products:
            loss = FusedKLLoss()(*tensors)
        return loss, len(products)

    with torch.no_grad():
        loss, few = call()
    with_gradients, many = call()
    assert many - few == 2 and not loss.requires_grad
    assert relative_error(loss, with_gradients) < 1e-6


def test_second_backward_raises(where):
    loss = FusedKLLoss()(*draw(where))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already differentiated"):
        loss.backward()


def test_tied_embedding_sums_both_gradients(where):
    _, w, xt, wt, labels = draw(where)
    tokens = torch.arange(N, device=where)

    def gradient(loss_of):
        w.grad = None
        loss_of(torch.nn.functional.embedding(tokens, w)).backward()
        return w.grad

    ours = gradient(lambda x: FusedKLLoss()(x, w, xt, wt, labels))
    wide = w.detach().double().requires_grad_()
    rows = dense_rows(wide[tokens] @ wide.T, xt.double() @ wt.double().T, [LossTerm("forward_kl", 1.0)])
    ((rows * (labels != -100)).sum() / (N - 2)).backward()
    assert relative_error(ours, wide.grad) < 1e-5


def test_half_precision_keeps_small_gradients(where):
    tensors = draw(where, torch.float16)
    _, x, w = exact(tensors, [LossTerm("forward_kl", 1.0)])
    rows, x, w = exact(tensors, [LossTerm("forward_kl", 1.0)])
    (rows.sum() * 65536 / 1_000_000).backward()
    for module in (FusedKLLoss(), FusedKLLoss(reduction="none")):
        tensors[0].grad = tensors[1].grad = None
        if module.reduction == "none":
            loss = module(*tensors).sum() / 1_000_000
        else:
            loss = module(*tensors, num_items=1_000_000)
        (loss * 65536).backward()  # as a gradient scaler does
        assert relative_error(tensors[1].grad, w.grad) < 1.5e-3
        assert relative_error(tensors[0].grad, x.grad) < 1.5e-3


def test_autocast_takes_fp32_weights(where):
    tensors = draw(where)
    rows, _, w = exact(tensors, [LossTerm("forward_kl", 1.0)])
    (rows.sum() / (N - 2)).backward()
    with torch.autocast(where.type, dtype=torch.bfloat16):
        loss = FusedKLLoss()(*tensors)
    loss.backward()
    assert tensors[1].grad.dtype == torch.float32
    assert relative_error(tensors[1].grad, w.grad) < 2e-2  # operands were rounded to bf16


@pytest.mark.plain("specification-mean")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_calls_equal_eager_ones(where, reduction):
    tensors = draw(where)
    module = FusedKLLoss(ce_weight=0.5, reduction=reduction)

    def step(x, w):
        loss, stats = module(x, w, *tensors[2:], return_stats=True)
        return loss.sum() * 2, stats.student_entropy

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for ours, other in zip(compiled(*tensors[:2]), step(*tensors[:2]), strict=True):
        assert torch.equal(ours, other)
    one = torch.autograd.grad(compiled(*tensors[:2])[0], tensors[:2])
    other = torch.autograd.grad(step(*tensors[:2])[0], tensors[:2])
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(one, other, strict=True))


@pytest.mark.plain("specification")
def test_op_passes_opcheck(where):
    x, w, xt, wt, labels = draw(where)
    scale = (labels != -100).float()
    objective = FusedKLLoss(ce_weight=0.5).objective.encode()
    given = operator_arguments((x, w), (xt, wt), scale, V, labels=labels, objective=objective)
    torch.library.opcheck(linear_divergence_op, *given)


@pytest.mark.parametrize(
    "change, field",
    [
        ({"labels": None}, "labels"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "labels"),
        ({"labels": torch.zeros(N)}, "labels"),
        ({"teacher_hidden": None}, "teacher_hidden"),
        ({"teacher_weight": None}, "teacher_weight"),
        ({"teacher_hidden": torch.zeros(N - 1, 24)}, "teacher_hidden"),
        ({"teacher_weight": torch.zeros(V + 4, 24)}, "vocab_size"),
        ({"teacher_weight": torch.zeros(V, 25)}, "teacher_weight"),
        ({"student_weight": torch.zeros(V, 16, dtype=torch.bfloat16)}, "student_weight"),
        ({"student_weight": torch.zeros(V, 16, dtype=torch.int8)}, "quantised"),
        ({"student_hidden": torch.zeros(16)}, "student_hidden"),
        ({"vocab_size": V + 1}, "vocab_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"token_weights": torch.zeros(N + 1)}, "token_weights"),
        ({"valid_rows": torch.zeros(2)}, "valid_rows"),
        ({"student_bias": torch.zeros(3)}, "student_bias"),
        ({"teacher_bias": torch.zeros(3)}, "teacher_bias"),
        ({"student_lora": (torch.zeros(2, 16), torch.zeros(V, 3), 1.0)}, "student_lora"),
    ],
)
def test_mistakes_are_named(change, field):
    x, w, xt, wt, labels = draw(torch.device("cpu"))
    arguments = {"student_hidden": x, "student_weight": w, "teacher_hidden": xt, "teacher_weight": wt, "labels": labels}
    with pytest.raises(ValueError, match=field):
        FusedKLLoss(ce_weight=1.0)(**(arguments | change))


@pytest.mark.parametrize(
    "make, field",
    [
        (lambda: FusedKLLoss("sideways"), "direction"),
        (lambda: FusedKLLoss(reduction="median"), "reduction"),
        (lambda: FusedKLLoss(max_workspace_mib=0), "max_workspace_mib"),
        (lambda: FusedJSDLoss(beta=2.0), "beta"),
    ],
)
def test_mistakes_in_settings_are_named(make, field):
    with pytest.raises(ValueError, match=field):
        make()


@pytest.mark.gpu
def test_no_host_sync_when_the_rows_are_given(device):
    x, w, xt, wt, labels = draw(device, torch.bfloat16)
    rows = (labels != -100).nonzero().squeeze(-1)
    items = torch.tensor(10, device=device)
    FusedKLLoss(ce_weight=0.5)(x, w, xt, wt, labels, valid_rows=rows, num_items=items).backward()
    with no_syncs():
        FusedKLLoss(ce_weight=0.5)(x, w, xt, wt, labels, valid_rows=rows, num_items=items).backward()
        FusedKLLoss(skip_ignored_rows=False)(x, w, xt, wt, labels).backward()


def test_distill_offers_the_same_names():
    import distill_kernels

    import distill

    assert distill.FusedKLLoss is distill_kernels.FusedKLLoss
