"""Divergences over the student's K most probable tokens, from both heads in one pass; reference and kernels."""

import pytest
import torch
from distill_kernels import FusedDistillationLoss, FusedStudentTopKKLLoss, LossTerm, fused_student_top_k_kl_loss
from distill_kernels.losses import plan as planning
from distill_kernels.losses.operator import linear_divergence_op
from distill_kernels.losses.projection import TILE, ChunkLogits
from distill_kernels.losses.topk_reference import IMPOSSIBLE, StudentTopK
from distill_kernels.losses.topk_select import select_student_top_k
from grids import pairwise
from helpers import (
    assert_as_good_as_torch,
    assert_captures,
    assert_rounded_once,
    kernels_launched,
    operator_arguments,
    realistic_heads,
    relative_error,
    round_gradient,
)
from torch.nn import functional as F

N, V = 23, 300
CAPPED = {"student_logit_scale": 0.8, "student_softcap": 12.0, "teacher_logit_scale": 1.2, "teacher_softcap": 20.0}


def draw(device, dtype, rows=N, vocab=V):
    x, w, x_t, w_t = realistic_heads(rows, vocab, 24, 40, dtype=dtype, device=device)
    labels = torch.randint(0, vocab, (rows,), device=device)
    labels[::4] = -100
    return [x, w], [x_t, w_t], labels


def transformed(x, w, scale=1.0, cap=None, gradient_dtype=torch.float64):
    z = round_gradient(x @ w.T, gradient_dtype) * scale
    return z if cap is None else cap * torch.tanh(z / cap)


def dense(leaves, teacher, labels, k, direction, tail, ids=None, temperature=1.0, ce_weight=0.0, **scales):
    """Mean loss from full logits, by the definition, over `ids` or the student's most probable tokens."""
    names = "student_logit_scale", "student_softcap", "gradient_dtype"
    z = transformed(*leaves, *map({"student_logit_scale": 1.0, "gradient_dtype": torch.float64, **scales}.get, names))
    z_t = transformed(*teacher, scales.get("teacher_logit_scale", 1.0), scales.get("teacher_softcap"))
    p, q = (torch.softmax(each / temperature, -1) for each in (z, z_t))
    ids = z.detach().topk(k, -1).indices if ids is None else ids
    rest = torch.ones_like(p).scatter(-1, ids, 0.0)
    parts = []
    for each in (p, q):
        kept, others = each.gather(-1, ids), (each * rest).sum(-1, keepdim=True)
        parts.append(torch.cat([kept, others], -1) if tail == "bucket" else kept / kept.sum(-1, keepdim=True))
    a, b = parts if direction == "reverse" else parts[::-1]
    rows = (a * (a.log() - b.log())).sum(-1) * temperature**2
    rows = rows + ce_weight * F.cross_entropy(z, labels.clamp_min(0), reduction="none")
    return torch.where(labels != -100, rows, 0.0).sum() / (labels != -100).sum()


def gradients(function, tensors, dtype):
    leaves = [t.detach().to(dtype).clone().requires_grad_() for t in tensors]
    loss = function(leaves)
    return [loss.detach(), *torch.autograd.grad(2 * loss, leaves)]


@pytest.mark.plain(
    "specification-torch.float64-forward-renormalize-256-6 settings-300",
    "kernel-torch.bfloat16-reverse-bucket-2-0 settings-300",
    "kernel-torch.float16-reverse-renormalize-8-6 settings-257",
    "kernel-torch.float32-forward-bucket-64-0 settings-2200",
)
@pytest.mark.parametrize(
    *pairwise(
        {
            "dtype": [torch.bfloat16, torch.float16, torch.float32, torch.float64],
            "direction, tail": [(d, t) for d in ("reverse", "forward") for t in ("bucket", "renormalize")],
            "k": [2, 8, 64, 256],
            "more": [{}, {"temperature": 2.0, "ce_weight": 0.5, **CAPPED}],
            "vocab": [V, 257, 2200],
        }
    )
)
def test_values_and_gradients_equal_fp64(where, limit, dtype, direction, tail, k, more, vocab):
    limit.setattr("distill_kernels.losses.linear.REFERENCE_CHUNK_ELEMENTS", 5 * V)
    student, teacher, labels = draw(where, dtype, 9, vocab)
    loss = FusedStudentTopKKLLoss(k, direction, tail, **more)
    made = gradients(lambda leaves: loss(*leaves, *teacher, labels), student, dtype)
    wide = [t.double() for t in teacher]
    # a token whose logit ties with the next to the rounding of the dtype may be chosen in its place
    exact = gradients(lambda leaves: dense(leaves, wide, labels, k, direction, tail, **more), student, torch.float64)
    eager = gradients(lambda leaves: dense(leaves, teacher, labels, k, direction, tail, **more), student, dtype)
    more = {**more, "gradient_dtype": dtype}
    rounded = gradients(lambda leaves: dense(leaves, wide, labels, k, direction, tail, **more), student, torch.float64)
    for part, mine, theirs, right, products in zip(("loss", "dx", "dW"), made, eager, exact, rounded, strict=True):
        assert_as_good_as_torch(mine, theirs, right, dtype, part)
        if dtype == torch.bfloat16 and part != "loss":
            assert_rounded_once(mine, products, right)
    assert not made[1][labels == -100].any()


def relative(z, temperature):
    """Logits [n, V] as the projection leaves them, in fp32."""
    n, vocab = z.shape
    tiles = -(-vocab // TILE)
    z = F.pad(z, (0, tiles * TILE - vocab), value=-torch.inf).view(n, tiles, TILE)
    shift = z.amax(-1)
    shift = torch.where(shift == -torch.inf, 0.0, shift)
    z = z - shift[..., None]
    total = (z / temperature).exp().sum(-1)
    return ChunkLogits(z.view(n, -1)[:, :vocab].contiguous(), shift, total, total)


@pytest.mark.plain(
    "300-1-False",
    "300-8-False",
    "300-300-False",
    "3000-1-False",
    "3000-11-False",
    "3000-12-False",
    "3000-511-False",
    "40000-64-False",
    "40000-100-False",
)
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    "vocab, k",
    [(300, 1), (300, 8), (300, 300), (3000, 1), (3000, 11), (3000, 12), (3000, 511), (40000, 64), (40000, 100)],
)
def test_selection_is_that_of_topk(kernel_device, vocab, k, named):
    """Rows of normal logits, of three values, of equal ones, of one that is possible, and with an outlier a tile."""
    generator = torch.Generator(kernel_device).manual_seed(vocab + k)
    z, z_t = (4 * torch.randn(6, vocab, device=kernel_device, generator=generator) for _ in range(2))
    z[1] = torch.randint(0, 3, (vocab,), device=kernel_device, generator=generator).float()
    z[2], z[3] = 0.0, -torch.inf
    z[3, 7] = 1.0
    z[4, 5::256] = 30.0
    z_t[5, z[5].argmax()] = -torch.inf
    rows = torch.tensor([7, 0, 6, 2, 9, 3], device=kernel_device) if named else None
    at = torch.arange(6, device=kernel_device) if rows is None else rows
    out, scale = StudentTopK(k, "bucket").allocate(10, kernel_device), torch.ones(10, device=kernel_device)
    out.ids.fill_(-7)
    select_student_top_k(relative(z, 1.5), relative(z_t, 1.5), out, row_scale=scale, rows=rows, temperature=1.5)
    ids, log_t = out.ids[at].long(), out.logprobs[at]
    assert ids.min() >= 0 and ids.max() < vocab and (ids.sort(-1).values.diff() > 0).all()
    torch.testing.assert_close(z.gather(-1, ids).sort(-1).values, z.topk(k).values.flip(-1), rtol=0, atol=1e-5)
    expected = (z_t / 1.5).log_softmax(-1).gather(-1, ids)
    most = torch.log1p(torch.tensor(-8 * torch.finfo(torch.float32).eps))
    expected -= (expected.logsumexp(-1, keepdim=True) - most).clamp_min(0)
    torch.testing.assert_close(log_t, expected.clamp_min(IMPOSSIBLE), rtol=1e-4, atol=2e-5)
    untouched = torch.ones(10, dtype=torch.bool).index_fill_(0, at.cpu(), False)
    assert (out.ids[untouched.to(kernel_device)] == -7).all()


def test_rows_of_scale_0_are_left(kernel_device):
    z = torch.randn(3, 300, device=kernel_device)
    out = StudentTopK(4, "bucket").allocate(3, kernel_device)
    out.ids.fill_(-7)
    scale = torch.tensor([1.0, 0.0, 2.0], device=kernel_device)
    select_student_top_k(relative(z, 1.0), relative(z, 1.0), out, row_scale=scale, rows=None, temperature=1.0)
    assert (out.ids[1] == -7).all() and (out.ids[[0, 2]] >= 0).all()


@pytest.mark.plain("kernel-bucket", "specification-renormalize")
@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_all_columns_are_the_full_divergence(where, tail):
    student, teacher, labels = draw(where, torch.float32)
    for direction in ("forward", "reverse"):
        full = FusedDistillationLoss([LossTerm(f"{direction}_kl", 1.0)], temperature=2.0)
        loss = FusedStudentTopKKLLoss(V, direction, tail, 2.0)
        made, right = (
            gradients(lambda leaves, each=each: each(*leaves, *teacher, labels), student, torch.float32)
            for each in (loss, full)
        )
        for one, other in zip(made, right, strict=True):
            assert relative_error(one, other) < 2e-5


def test_one_pass_of_each_projection(kernel_device):
    student, teacher, labels = draw(kernel_device, torch.bfloat16)
    leaves = [t.requires_grad_() for t in student]
    with kernels_launched() as launched:
        FusedStudentTopKKLLoss(8)(*leaves, *teacher, labels).backward()
    assert launched.count("_project_kernel") == 2


@pytest.mark.plain("specification")
def test_chunks_named_rows_padding_bias_lora_and_items(where, limit):
    limit.setattr(planning, "ROW_MULTIPLE", 16)
    (x, w), (x_t, w_t), labels = draw(where, torch.float32, rows=90)
    labels.clamp_(max=269)
    a, b = torch.randn(3, 24, device=where) * 0.2, torch.randn(V, 3, device=where)
    bias, teacher_bias = torch.randn(2, V, device=where)
    rows = (labels != -100).nonzero().squeeze(1).flip(0)
    module = FusedStudentTopKKLLoss(8, ce_weight=0.3, max_workspace_mib=3 * 16 * V * 4 / 2**20)
    leaves = [t.clone().requires_grad_() for t in (x, w, bias, a, b)]
    loss = module(
        *leaves[:2],
        x_t,
        w_t,
        labels,
        leaves[2],
        teacher_bias,
        (*leaves[3:], 0.5),
        vocab_size=270,
        num_items=37,
        valid_rows=rows,
    )
    loss.backward()
    wide = [t.double().detach().requires_grad_() for t in leaves]
    weight = (wide[1] + 0.5 * wide[4] @ wide[3])[:270]
    student = torch.cat([wide[0], torch.ones_like(wide[0][:, :1])], 1), torch.cat([weight, wide[2][:270, None]], 1)
    teacher = (
        torch.cat([x_t, torch.ones_like(x_t[:, :1])], 1).double(),
        torch.cat([w_t, teacher_bias[:, None]], 1).double()[:270],
    )
    right = dense(student, teacher, labels, 8, "reverse", "bucket", ce_weight=0.3) * len(rows) / 37
    right.backward()
    assert relative_error(loss, right) < 1e-5
    for one, other in zip(leaves, wide, strict=True):
        assert relative_error(one.grad, other.grad) < 2e-5


@pytest.mark.plain("kernel-none")
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_token_impossible_under_the_teacher(where, reduction):
    """The reverse KL is inf at the rows whose K hold it, and every gradient is finite; the forward KL is finite."""
    (x, w), (x_t, w_t), labels = draw(where, torch.float32)
    bias = torch.zeros(V, device=where)
    bias[(x @ w.T)[1].argmax()] = -torch.inf
    holds = (((x @ w.T).topk(8).indices == (x @ w.T)[1].argmax()).any(-1)) & (labels != -100)
    for direction in ("reverse", "forward"):
        leaf = x.clone().requires_grad_()
        loss = FusedStudentTopKKLLoss(8, direction, reduction=reduction)(leaf, w, x_t, w_t, labels, teacher_bias=bias)
        loss.sum().backward()
        assert leaf.grad.isfinite().all()
        infinite = loss.isinf() if reduction == "none" else loss.isinf()[None]
        expected = holds if reduction == "none" else holds.any()[None]
        assert torch.equal(infinite, expected & (direction == "reverse"))


@pytest.mark.plain("specification-True")
@pytest.mark.parametrize("grad", [True, False])
def test_statistics_equal_their_definitions(where, grad):
    (x, w), teacher, labels = draw(where, torch.float32)
    module = FusedStudentTopKKLLoss(8, temperature=2.0)
    loss, stats = module(x.requires_grad_(grad), w, *teacher, labels, return_stats=True)
    rows = FusedStudentTopKKLLoss(8, temperature=2.0, reduction="none")(x, w, *teacher, labels)
    torch.testing.assert_close(stats.divergence * 4, rows.detach())
    torch.testing.assert_close(loss, rows.sum() / (labels != -100).sum())
    log_p = (x @ w.T).detach().log_softmax(-1)
    right = torch.where(labels != -100, log_p.gather(-1, labels.clamp_min(0)[:, None])[:, 0], 0.0)
    torch.testing.assert_close(stats.student_label_logprob, right, rtol=1e-4, atol=1e-5)


@pytest.mark.plain("mean")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_calls_equal_eager_ones(device, reduction):
    student, teacher, labels = draw(device, torch.float32)
    leaves = [t.requires_grad_() for t in student]

    def step(x, w):
        return FusedStudentTopKKLLoss(8, ce_weight=0.5, reduction=reduction, skip_ignored_rows=False)(
            x, w, *teacher, labels
        ).sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*leaves), step(*leaves))
    one, other = (torch.autograd.grad(function(*leaves), leaves) for function in (compiled, step))
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(one, other, strict=True))


def test_operators_pass_opcheck(device):
    (x, w), (x_t, w_t), _ = draw(device, torch.float32)
    scale = torch.ones(N, device=device)
    student = (x.requires_grad_(), w.requires_grad_())
    objective = FusedStudentTopKKLLoss()._encoded
    given = operator_arguments(student, (x_t, w_t), scale, V, objective=objective, tail="bucket", student_k=8)
    torch.library.opcheck(linear_divergence_op, *given)


def test_errors_name_the_invalid_argument(device):
    student, teacher, labels = draw(device, torch.float32)
    for make, message in [
        (lambda: FusedStudentTopKKLLoss(0), "k: expected 1 to 511, got 0"),
        (lambda: FusedStudentTopKKLLoss(512), "k: expected 1 to 511, got 512"),
        (lambda: FusedStudentTopKKLLoss(8, "sideways"), "direction"),
        (lambda: FusedStudentTopKKLLoss(8, tail="sampled"), "tail: expected bucket or renormalize, got 'sampled'"),
        (lambda: FusedStudentTopKKLLoss(400)(*student, *teacher, labels), f"k: expected 1 to the {V} columns"),
        (lambda: FusedStudentTopKKLLoss(8)(*student, None, None, labels), "teacher_hidden"),
        (lambda: fused_student_top_k_kl_loss(*student, *teacher, labels, k=8, vocab_size=7), "k: expected 1 to the 7"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.gpu
@pytest.mark.heavy_gpu
@pytest.mark.parametrize("k", [1, 8, 64, 256, 511])
@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_full_vocabulary_keeps_the_error_bounds(device, tail, k):
    """At its own tokens, which the rounding of logits may exchange with the next; they are those of exact logits."""
    student, teacher, labels = draw(device, torch.bfloat16, 512, 151_936)
    if k == 1 and tail == "renormalize":
        pytest.skip("one token alone has probability 1")
    loss = FusedStudentTopKKLLoss(k, tail=tail)
    made = gradients(lambda leaves: loss(*leaves, *teacher, labels), student, torch.bfloat16)
    wide = [t.double() for t in teacher]
    exact = gradients(lambda leaves: dense(leaves, wide, labels, k, "reverse", tail), student, torch.float64)
    assert relative_error(made[0], exact[0]) < 1e-3
    assert all(relative_error(mine, right) < 3e-3 for mine, right in zip(made[1:], exact[1:], strict=True))


@pytest.mark.gpu
def test_neither_syncs_nor_breaks_a_graph(device):
    (x, w), teacher, labels = draw(device, torch.bfloat16, 300, 40_000)
    x, w = x.requires_grad_(), w.requires_grad_()
    module = FusedStudentTopKKLLoss(64, skip_ignored_rows=False)

    def step():
        return torch.autograd.grad(module(x, w, *teacher, labels), (x, w))

    assert_captures(step)
