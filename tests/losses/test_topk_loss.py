"""A teacher of K tokens a position, against autograd over the outcomes written out in full; reference and kernel."""

import pytest
import torch
from distill_kernels import FusedTopKKLLoss, kl_div
from distill_kernels.launch import interpreted
from distill_kernels.losses.operator import linear_divergence_op
from grids import pairwise
from helpers import assert_as_good_as_torch, assert_as_promised, differentiate, realistic_heads, relative_error
from torch.nn import functional as F

N, V, K = 23, 150, 8
WIDE = 2200  # several tiles of a row, and more than one block of tiles


def setup(dtype, device, temperature=1.0, k=K, rows=N, vocab=V):
    x, w, x_t, w_t = realistic_heads(rows, vocab, 24, 40, dtype=dtype, device=device)
    logprobs = F.log_softmax((x_t.double() @ w_t.double().T) / temperature, -1)
    top, ids = logprobs.topk(k, -1)
    labels = torch.arange(rows, device=device)
    labels[::4] = -100
    labels[1] = ids[1, 2]  # a label that is one of the K
    return [x, w, torch.randn(vocab, device=device).to(dtype)], top, ids, labels


def written_out(tensors, top, ids, labels, direction, tail, temperature=1.0, ce=0.0, cap=None, smoothing=0.0, z=0.0):
    """The same by a dense 0/1 matrix of outcomes and plain autograd."""
    x, w, bias = tensors
    logits = x @ w.T + bias
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    p = F.softmax(logits / temperature, -1)
    p_s, p_t = p.gather(-1, ids), top.to(p.dtype).exp()
    more = 0.0
    if tail == "bucket":
        outside = torch.ones_like(p).scatter(-1, ids, 0.0)
        p_s = torch.cat([p_s, (p * outside).sum(-1, keepdim=True)], -1)
        p_t = torch.cat([p_t, 1 - p_t.sum(-1, keepdim=True)], -1)
    elif tail == "renormalize":
        p_s, p_t = p_s / p_s.sum(-1, keepdim=True), p_t / p_t.sum(-1, keepdim=True)
    else:
        more = 1 - p_t.sum(-1)
    a, b = (p_t, p_s) if direction == "forward" else (p_s, p_t)
    rows = ((a * (a.log() - b.log())).sum(-1) + more) * temperature**2
    rows = rows + ce * F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    rows = rows + ce * z * logits.logsumexp(-1).square()
    kept = labels != -100
    return torch.where(kept, rows, 0).sum() / kept.sum()


READINGS = [(d, t) for t in ("bucket", "renormalize") for d in ("forward", "reverse")] + [("forward", "sampled")]


@pytest.mark.plain(
    "specification-torch.float16-forward-renormalize-0 settings",
    "kernel-torch.float32-reverse-renormalize-5 settings",
    "kernel-torch.bfloat16-reverse-bucket-5 settings",
    "kernel-torch.bfloat16-forward-sampled-0 settings",
)
@pytest.mark.parametrize(
    *pairwise(
        {
            "dtype": [torch.float32, torch.bfloat16, torch.float16],
            "direction, tail": READINGS,
            "more": [{}, {"temperature": 2.0, "ce": 0.5, "cap": 15.0, "smoothing": 0.1, "z": 1e-3}],
        }
    )
)
def test_values_and_gradients_equal_fp64(where, limit, dtype, direction, tail, more):
    limit.setattr("distill_kernels.losses.linear.REFERENCE_CHUNK_ELEMENTS", 5 * V)
    vocab = WIDE if dtype == torch.bfloat16 and not more else V
    tensors, top, ids, labels = setup(dtype, where, more.get("temperature", 1.0), rows=7, vocab=vocab)
    names = {
        "temperature": "temperature",
        "ce": "ce_weight",
        "cap": "student_softcap",
        "smoothing": "label_smoothing",
        "z": "z_loss",
    }
    loss = FusedTopKKLLoss(direction, tail, **{names[name]: value for name, value in more.items()})
    exact, eager = (
        differentiate(lambda leaves: written_out(leaves, top, ids, labels, direction, tail, **more), tensors, wide)
        for wide in (torch.float64, None)
    )
    ours = differentiate(lambda leaves: loss(*leaves[:2], ids, top, labels, student_bias=leaves[2]), tensors)
    for name, *results in zip(["loss", "dx", "dW", "db"], ours, eager, exact, strict=True):
        assert_as_good_as_torch(*results, dtype, name)
        if dtype == torch.bfloat16:
            assert_as_promised(name, results[0], results[2])


@pytest.mark.gpu
@pytest.mark.heavy_gpu
@pytest.mark.parametrize("k", [16, 64, 256, 511])
@pytest.mark.parametrize("direction, tail", READINGS)
def test_full_size_on_the_gpu(device, direction, tail, k):
    x, w, x_t, w_t = realistic_heads(512, 151_936, 256, 512, dtype=torch.bfloat16, device=device)
    top, ids = F.log_softmax(x_t.float() @ w_t.float().T, -1).topk(k, -1)
    labels = torch.randint(0, 151_936, (512,), device=device)
    bias = torch.zeros(151_936, device=device, dtype=torch.bfloat16)
    exact, eager = (
        differentiate(lambda leaves: written_out(leaves, top, ids, labels, direction, tail, ce=0.1), [x, w, bias], wide)
        for wide in (torch.float64, None)
    )
    loss = FusedTopKKLLoss(direction, tail, ce_weight=0.1)
    ours = differentiate(lambda leaves: loss(*leaves[:2], ids, top, labels, student_bias=leaves[2]), [x, w, bias])
    for name, *results in zip(["loss", "x", "w", "bias"], ours, eager, exact, strict=True):
        assert_as_good_as_torch(*results, torch.bfloat16, name)


@pytest.mark.plain("bucket", "sampled")
@pytest.mark.parametrize("tail", ["bucket", "renormalize", "sampled"])
def test_lora_padding_weights_and_a_frozen_head(device, tail):
    """Options of the driver give the same through the kernel as through the specification."""
    pytest.importorskip("triton")
    (x, w, bias), top, ids, labels = setup(torch.float32, device)
    padded = torch.cat([w, torch.full((10, 24), 50.0, device=device)])
    a, b = torch.randn(4, 24, device=device) * 0.1, torch.randn(V + 10, 4, device=device)
    weights = torch.rand(N, device=device)
    loss = FusedTopKKLLoss(tail=tail, ce_weight=0.5, temperature=2.0, reduction="none")

    def run():
        leaves = [t.clone().requires_grad_() for t in (x, F.pad(bias, (0, 10)), a, b)]
        rows, stats = loss(
            leaves[0],
            padded,
            ids,
            top.float(),
            labels,
            student_bias=leaves[1],
            student_lora=(leaves[2], leaves[3], 0.5),
            token_weights=weights,
            vocab_size=V,
            return_stats=True,
        )
        (rows * torch.arange(N, device=device)).sum().backward()
        assert not leaves[1].grad[V:].any(), "padded vocabulary got a gradient"
        return [rows.detach(), *(leaf.grad for leaf in leaves), *stats]

    specified = run()
    with interpreted():
        for one, other in zip(run(), specified, strict=True):
            assert relative_error(one, other) < 1e-5


def test_statistics_equal_their_definitions(where):
    (x, w, _), top, ids, labels = setup(torch.float32, where)
    weights = {"ce_weight": 0.5, "divergence_weight": 3.0, "temperature": 2.0, "label_smoothing": 0.1}
    top = top / 2 - torch.logsumexp(torch.cat([top / 2, torch.full_like(top[:, :1], -3.0)], -1), -1, keepdim=True)
    _, stats = FusedTopKKLLoss(**weights)(x, w, ids, top, labels, return_stats=True)
    z, kept = x.double() @ w.double().T, labels != -100
    log_p = F.log_softmax(z, -1)
    at_label = log_p.gather(-1, labels.clamp_min(0)[:, None]).squeeze(-1)
    alone = FusedTopKKLLoss(temperature=2.0, scale_by_temperature_squared=False, reduction="none")
    expected = {
        "divergence": 3 * alone(x.double(), w.double(), ids, top),
        "cross_entropy": -at_label,
        "student_entropy": -(log_p.exp() * log_p).sum(-1),
        "agreement": (z.argmax(-1) == ids.gather(-1, top.argmax(-1, keepdim=True)).squeeze(-1)).double(),
        "student_label_logprob": at_label,
    }
    assert expected["agreement"].unique().numel() == 2
    for name, figure in stats._asdict().items():
        right = torch.where(kept, expected[name], 0.0) if name in expected else torch.zeros_like(figure)
        assert relative_error(figure, right) < 1e-5, name


@pytest.mark.parametrize("tail", ["bucket", "renormalize", "sampled"])
def test_a_tie_at_the_top_is_no_agreement(where, tail):
    z = torch.randn(6, V, device=where).clamp_max(3)
    ids = torch.tensor([[7, 8, 140]], device=where).expand(6, 3).contiguous()
    top = torch.tensor([[0.5, 0.3, 0.1]], device=where).log().repeat(6, 1)
    z[0, 7] = z[2, 7] = z[3, 8] = z[4, 7] = z[4, 9] = z[5, 7] = z[5, 8] = 5.0
    z[1] = 0.0  # a collapsed student
    top[2] = torch.tensor([0.4, 0.4, 0.1]).log()
    loss = FusedTopKKLLoss(tail=tail)
    _, stats = loss(z, torch.eye(V, device=where), ids, top, ids[:, 0], return_stats=True)
    assert stats.agreement.tolist() == [1, 0, 0, 0, 0, 0]


def test_valid_rows_items_and_leading_dimensions(where):
    (x, w, _), top, ids, labels = setup(torch.float32, where)
    loss = FusedTopKKLLoss(ce_weight=0.5)
    whole = loss(x, w, ids, top, labels, num_items=torch.tensor(9, device=where))
    rows = (labels != -100).nonzero().squeeze(-1)
    shaped = [t[None] for t in (x, ids, top, labels)]
    ids[0], top[0] = 10**6, torch.nan  # an ignored row may hold anything
    again = loss(shaped[0], w, *shaped[1:], valid_rows=rows, num_items=9)
    torch.testing.assert_close(again, whole)
    torch.testing.assert_close(loss(x, w, ids.int(), top, labels) * len(rows) / 9, whole)
    without = FusedTopKKLLoss(ce_weight=0.5, skip_ignored_rows=False)
    torch.testing.assert_close(without(x, w, ids, top, labels, num_items=9), whole)


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
    torch.testing.assert_close(FusedTopKKLLoss(tail="sampled")(x, w, ids, top), full)


def test_equal_models_and_tails_the_loss_does_not_see(where):
    (x, w, _), *_ = setup(torch.float32, where)
    top, ids = F.log_softmax(x @ w.T, -1).topk(K, -1)
    assert 0 <= FusedTopKKLLoss()(x, w, ids, top) < 1e-6
    away = torch.zeros(V, device=where).index_fill_(0, ids[0], -20.0)  # the first row's tokens made unlikely, alike
    row = (x[:1], w, ids[:1], top[:1])
    assert FusedTopKKLLoss(tail="renormalize")(*row, student_bias=away) < 1e-5
    assert FusedTopKKLLoss()(*row, student_bias=away) > 1


def draws(logprobs, count, generator, flat):
    """Ids and log-weights [n, count] of `count` draws from p^flat, importance-weighted; unused places are -inf."""
    proposal = F.softmax(flat * logprobs, -1)
    drawn = torch.multinomial(proposal, count, replacement=True, generator=generator)
    counts = torch.zeros_like(logprobs).scatter_add_(-1, drawn, torch.ones_like(drawn, dtype=logprobs.dtype))
    weights, ids = (counts / count * logprobs.exp() / proposal).topk(count, -1)
    return ids, weights.log()


@pytest.mark.parametrize("flat", [1.0, 0.8])
def test_sampled_gradients_are_unbiased(device, flat):
    """The mean of many draws' gradients nears the full forward KL's as 1 / sqrt(draws); top-K's does not move."""
    x, w, x_t, w_t = realistic_heads(6, 40, 24, 40, dtype=torch.float64, device=device, std=2.0)
    x.requires_grad_()
    logprobs = F.log_softmax(x_t @ w_t.T, -1)
    (full,) = torch.autograd.grad(kl_div(x @ w.T, logprobs), x)
    generator = torch.Generator(device).manual_seed(5)

    def mean_gradient(repeats):
        many = logprobs.repeat(repeats, 1)
        ids, weights = draws(many, 6, generator, flat)
        (made,) = torch.autograd.grad(FusedTopKKLLoss(tail="sampled")(x.repeat(repeats, 1), w, ids, weights), x)
        return relative_error(made, full)

    few, most = mean_gradient(4), mean_gradient(6400)
    assert most < few / 10, (few, most)  # sqrt(1600) = 40
    top, ids = logprobs.topk(6, -1)
    (biased,) = torch.autograd.grad(FusedTopKKLLoss(tail="renormalize")(x, w, ids, top), x)
    assert relative_error(biased, full) > 5 * most


@pytest.mark.plain("mean")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_calls_equal_eager_ones(device, reduction):
    (x, w, _), top, ids, labels = setup(torch.float32, device)
    loss = FusedTopKKLLoss(ce_weight=0.5, reduction=reduction, skip_ignored_rows=False)
    leaves = [x.requires_grad_(), w.requires_grad_()]

    def step(x, w):
        return loss(x, w, ids, top.float(), labels).sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*leaves), step(*leaves))
    one, other = (torch.autograd.grad(function(*leaves), leaves) for function in (compiled, step))
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(one, other, strict=True))


def test_opcheck_and_one_backward(device):
    (x, w, _), top, ids, labels = setup(torch.float32, device)
    module = FusedTopKKLLoss(ce_weight=0.5)
    scale = (labels != -100).float()
    torch.library.opcheck(
        linear_divergence_op,
        (
            x,
            w,
            None,
            None,
            None,
            [],
            [],
            [],
            labels,
            scale,
            None,
            [],
            module._encoded,
            1.0,
            V,
            torch.float32,
            None,
            False,
            False,
            False,
            [True, True, False, False, False, True],
            ids,
            top.float(),
            *(None, None, None),
            "bucket",
            0,
            "",
        ),
    )
    loss = module(x.requires_grad_(), w, ids, top, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already differentiated"):
        loss.backward()


def test_errors_name_the_invalid_argument(device):
    (x, w, _), top, ids, _ = setup(torch.float32, device)
    for make, name in [
        (lambda: FusedTopKKLLoss("sideways"), "direction"),
        (lambda: FusedTopKKLLoss("reverse", tail="sampled"), "direction"),
        (lambda: FusedTopKKLLoss(tail="ignore"), "tail"),
        (lambda: FusedTopKKLLoss(reduction="some"), "reduction"),
        (lambda: FusedTopKKLLoss(temperature=2.0, teacher_temperature=1.0), "teacher_temperature"),
        (lambda: FusedTopKKLLoss(tail="sampled", temperature=2.0, teacher_temperature=1.0), "teacher_temperature"),
        (lambda: FusedTopKKLLoss()(x, w, ids[:3], top), "teacher_ids"),
        (lambda: FusedTopKKLLoss()(x, w, ids, top, vocab_size=K - 1), "teacher_ids"),
        (lambda: FusedTopKKLLoss()(x, w, ids, top[:, :3]), "teacher_logprobs"),
        (lambda: FusedTopKKLLoss(ce_weight=1.0)(x, w, ids, top), "labels"),
        (lambda: FusedTopKKLLoss()(x, w[:, :3], ids, top), "student_weight"),
    ]:
        with pytest.raises(ValueError, match=name):
            make()
