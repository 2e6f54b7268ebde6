"""Caps on divergences, and a temperature for each model: against definitions in fp64 that autograd differentiates.

The definitions (`entries` and `clipped_divergence` of dense_loss.py) write out each entry and clamp it; what is
compared never takes a derivative of a cap.
"""

import math

import distill_kernels as ours
import pytest
import torch
from dense_loss import ALL_TERMS, clipped_divergence, entries, softcap
from distill_kernels import (
    Clip,
    FusedDistillationLoss,
    FusedKLLoss,
    FusedStudentTopKKLLoss,
    FusedTopKKLLoss,
    LossTerm,
    TeacherHead,
    Temperatures,
    distillation_loss,
)
from distill_kernels.launch import runs_on_triton
from grids import pairwise
from helpers import realistic_heads, relative_error
from torch.nn import functional as F

V = 300
N = 11
DIVERGENCES = [term for term in ALL_TERMS if term.type != "cross_entropy"]
TEMPERATURES = [1.0, 2.5, Temperatures(teacher=1.0, student=1.3), Temperatures(teacher=0.8, student=1.0)]


def exact_dtype(device):
    """fp64 where PyTorch computes, fp32 where kernels do."""
    return torch.float32 if runs_on_triton(torch.empty(0, device=device)) else torch.float64


def both_of(temperature):
    return temperature if isinstance(temperature, Temperatures) else Temperatures(temperature, temperature)


def draw(device, dtype, vocab=V, rows=N):
    """Two heads of which a third of the rows differ much: x, w, bias; x_t, w_t; labels."""
    x, w, x_t, w_t = realistic_heads(rows, vocab, 16, 24, dtype=dtype, device=device)
    bias = torch.randn(vocab, device=device).to(dtype)
    labels = torch.randint(0, vocab, (rows,), device=device)
    labels[[1, 4]] = -100
    return [x, w, bias], [x_t, w_t], labels


def between(values, rank):
    """A number in the widest of the gaps around the `rank`-th largest value, so that rounding moves none over it."""
    ordered = values.detach().flatten().sort(descending=True).values[max(rank - 6, 0) : rank + 6]
    gap = (ordered[:-1] / ordered[1:]).argmax()
    return math.sqrt(float(ordered[gap]) * float(ordered[gap + 1]))


def with_caps(term, kinds, log_s, log_t, counted):
    """The term with caps that some of the data reach: entries in half of the rows, a third of the tokens."""
    entry = token = None
    if "entry" in kinds:
        entry = between(entries(term, log_s, log_t)[counted], len(counted))
    if "token" in kinds:
        so_far = term._replace(clip=Clip(entry=entry))
        token = between(clipped_divergence(so_far, log_s, log_t)[counted], 3)
    return term._replace(clip=Clip(token, entry))


def mean_and_gradients(rows, labels, leaves):
    counted = labels != -100
    loss = torch.where(counted, rows, 0.0).sum() / counted.sum()
    # a clamp at a kink would give half of a gradient: the caps are drawn away from all values
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize(
    *pairwise(
        {
            "path": ["specification", "kernel"],
            "source": ["head", "mixture", "logits", "long logits"],
            "term": DIVERGENCES,
            "kinds": ["entry", "token", "entry token"],
            "temperature": TEMPERATURES,
            "more": [{}, {"ce": 0.5, "scale": 0.7, "cap": 9.0}],
        }
    )
)
def test_values_and_gradients_equal_fp64(path, source, term, kinds, temperature, more, device, request, limit):
    if path == "kernel":
        device = request.getfixturevalue("kernel_device")
    torch.manual_seed(3)
    dtype = torch.float64 if path == "specification" and device.type == "cpu" else torch.float32
    if source == "long logits":
        limit.setattr("distill_kernels.losses.logit_row_kernel.MAX_REGISTER_COLUMNS", 128)
    student, teacher, labels = draw(device, dtype)
    second = realistic_heads(N, V, 16, 24, dtype=dtype, device=device)[2:]
    both = both_of(temperature)
    leaves = [t.detach().double().requires_grad_() for t in student]
    ce = more.get("ce", 0.0)
    z = softcap(leaves[0] @ leaves[1].T + leaves[2], more.get("scale", 1.0), more.get("cap"))
    log_s = (z / both.student).log_softmax(-1)
    log_t = ((teacher[0].double() @ teacher[1].double().T) / both.teacher).log_softmax(-1)
    if source == "mixture":
        other = ((second[0].double() @ second[1].double().T) / both.teacher).log_softmax(-1)
        log_t = (0.7 * log_t.exp() + 0.3 * other.exp()).log()
    counted = (labels != -100).nonzero()[:, 0]
    term = with_caps(term._replace(weight=0.6), kinds, log_s, log_t, counted)
    rows = term.weight * both.student**2 * clipped_divergence(term, log_s, log_t)
    rows = rows + ce * F.cross_entropy(z, labels.clamp_min(0), reduction="none")
    if source.endswith("logits"):
        raw = z.detach().to(dtype).requires_grad_()
        exact = mean_and_gradients(rows, labels, [z])
        loss = distillation_loss(
            raw,
            (teacher[0] @ teacher[1].T),
            labels,
            terms=[term, LossTerm("cross_entropy", ce)],
            temperature=temperature,
        )
        found = [loss.detach(), *torch.autograd.grad(loss, [raw])]
    else:
        exact = mean_and_gradients(rows, labels, leaves)
        mine = [t.detach().clone().requires_grad_() for t in student]
        module = FusedDistillationLoss(
            [term, LossTerm("cross_entropy", ce)],
            temperature,
            student_logit_scale=more.get("scale", 1.0),
            student_softcap=more.get("cap"),
        )
        given = {"teachers": [TeacherHead(*teacher, 0.7), TeacherHead(*second, 0.3)]}
        if source == "head":
            given = dict(zip(("teacher_hidden", "teacher_weight"), teacher, strict=True))
        loss = module(*mine[:2], labels=labels, student_bias=mine[2], **given)
        found = [loss.detach(), *torch.autograd.grad(loss, mine)]
    exactness = 1e-10 if dtype == torch.float64 else 3e-5
    for name, value, right in zip(("loss", "dx", "dW", "db"), found, exact, strict=False):
        assert relative_error(value, right) < exactness, name


def outcomes(p, ids, tail):
    kept = p.gather(-1, ids)
    if tail == "renormalize":
        return kept / kept.sum(-1, keepdim=True)
    rest = (p * torch.ones_like(p).scatter(-1, ids, 0.0)).sum(-1, keepdim=True)
    return torch.cat([kept, rest], -1)


@pytest.mark.parametrize(
    *pairwise(
        {
            "path": ["specification", "kernel"],
            "tokens": ["teacher", "student"],
            "tail": ["bucket", "renormalize"],
            "direction": ["forward", "reverse"],
            "kinds": ["entry", "token", "entry token"],
            "temperature": TEMPERATURES,
            "ce": [0.0, 0.5],
        }
    )
)
def test_the_outcomes_of_k_tokens_are_entries(path, tokens, tail, direction, kinds, temperature, ce, device, request):
    if path == "kernel":
        device = request.getfixturevalue("kernel_device")
    torch.manual_seed(4)
    k = 8
    dtype = torch.float64 if path == "specification" and device.type == "cpu" else torch.float32
    student, teacher, labels = draw(device, dtype)
    both = both_of(temperature)
    leaves = [t.detach().double().requires_grad_() for t in student]
    z = leaves[0] @ leaves[1].T + leaves[2]
    p_t = ((teacher[0].double() @ teacher[1].double().T) / both.teacher).softmax(-1)
    p_s = (z / both.student).softmax(-1)
    ids = (p_t if tokens == "teacher" else p_s.detach()).topk(k, -1).indices
    log_s, log_t = (outcomes(p, ids, tail).log() for p in (p_s, p_t))
    counted = (labels != -100).nonzero()[:, 0]
    term = with_caps(LossTerm(f"{direction}_kl", 1.0), kinds, log_s, log_t, counted)
    rows = both.student**2 * clipped_divergence(term, log_s, log_t)
    rows = rows + ce * F.cross_entropy(z, labels.clamp_min(0), reduction="none")
    exact = mean_and_gradients(rows, labels, leaves)
    mine = [t.detach().clone().requires_grad_() for t in student]
    settings = {"direction": direction, "tail": tail, "temperature": temperature, "ce_weight": ce, "clip": term.clip}
    named = {"labels": labels, "student_bias": mine[2], "return_stats": True}
    if tokens == "teacher":
        logprobs = p_t.gather(-1, ids).log().to(dtype)
        loss, stats = FusedTopKKLLoss(**settings)(*mine[:2], ids, logprobs, **named)
    else:
        loss, stats = FusedStudentTopKKLLoss(k, **settings)(*mine[:2], *teacher, **named)
    found = [loss.detach(), *torch.autograd.grad(loss, mine)]
    for name, value, right in zip(("loss", "dx", "dW", "db"), found, exact, strict=True):
        assert relative_error(value, right) < (1e-10 if dtype == torch.float64 else 5e-5), name
    whole = clipped_divergence(term._replace(clip=Clip()), log_s, log_t)
    kept = clipped_divergence(term, log_s, log_t)
    count = torch.where(labels != -100, whole - kept, 0.0)
    assert relative_error(stats.clipped_value, count) < 1e-4
    if "token" in kinds:
        assert torch.equal(stats.clipped_tokens > 0, (labels != -100) & (kept == term.clip.token))
    assert relative_error(stats.divergence[counted], whole[counted]) < 1e-4


def test_sampled_weights_take_a_cap_of_tokens(where):
    torch.manual_seed(5)
    dtype = exact_dtype(where)
    student, _, _ = draw(where, dtype)
    ids = torch.stack([torch.randperm(V)[:6] for _ in range(N)]).to(where)
    weights = torch.full((N, 6), 1 / 6, device=where, dtype=dtype)
    leaves = [t.detach().double().requires_grad_() for t in student]
    log_p = (leaves[0] @ leaves[1].T + leaves[2]).log_softmax(-1).gather(-1, ids)
    rows = (weights.double() * (weights.double().log() - log_p)).sum(-1)
    cap = between(rows, 4)
    exact = mean_and_gradients(rows.clamp(max=cap), torch.zeros(N, device=where), leaves)
    mine = [t.detach().clone().requires_grad_() for t in student]
    loss = FusedTopKKLLoss(tail="sampled", clip=Clip(token=cap))(*mine[:2], ids, weights.log(), student_bias=mine[2])
    for value, right in zip([loss.detach(), *torch.autograd.grad(loss, mine)], exact, strict=True):
        assert relative_error(value, right) < 3e-5
    with pytest.raises(ValueError, match=r"clip\.entry: expected None with tail sampled"):
        FusedTopKKLLoss(tail="sampled", clip=Clip(entry=0.1))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_each_term_has_caps_of_its_own(where, limit, reduction):
    """Several terms, two of one type, in chunks, with ignored rows, token weights and a frozen head."""
    torch.manual_seed(6)
    limit.setattr("distill_kernels.losses.linear.REFERENCE_CHUNK_ELEMENTS", 3 * V)
    dtype = exact_dtype(where)
    student, teacher, labels = draw(where, dtype)
    both = Temperatures(teacher=1.0, student=1.2)
    x = student[0].detach().double().requires_grad_()
    z = x @ student[1].double().T
    log_s = (z / both.student).log_softmax(-1)
    log_t = (teacher[0].double() @ teacher[1].double().T).log_softmax(-1)
    counted = (labels != -100).nonzero()[:, 0]
    terms = [
        with_caps(LossTerm("forward_kl", 0.5), "token", log_s, log_t, counted),
        with_caps(LossTerm("jsd", 0.3, beta=0.4), "entry token", log_s, log_t, counted),
        LossTerm("skew_forward_kl", 0.2, alpha=0.3),
        with_caps(LossTerm("forward_kl", 0.4), "entry", log_s, log_t, counted),
        LossTerm("cross_entropy", 0.1),
    ]
    weights = torch.rand(N, device=where, dtype=dtype)
    rows = sum(term.weight * both.student**2 * clipped_divergence(term, log_s, log_t) for term in terms[:-1])
    rows = (rows + 0.1 * F.cross_entropy(z, labels.clamp_min(0), reduction="none")) * weights
    exact = torch.where(labels != -100, rows, 0.0).sum()
    (right,) = torch.autograd.grad(exact, x)
    mine = student[0].detach().clone().requires_grad_()
    module = FusedDistillationLoss(terms, both, reduction=reduction, max_workspace_mib=1)
    loss = module(mine, student[1], *teacher, labels, token_weights=weights, num_items=1).sum()
    (gradient,) = torch.autograd.grad(loss, mine)
    assert relative_error(loss, exact) < 2e-5 and relative_error(gradient, right) < 3e-5
    plain = module(mine.detach(), student[1], *teacher, labels, token_weights=weights, num_items=1).sum()
    assert relative_error(plain, exact) < 2e-5


def test_gradients_follow_finite_differences():
    """The specification's gradient where a formula is differentiated by nobody: differences of its own loss."""
    torch.manual_seed(7)
    z, z_t = torch.randn(5, 20).double() * 3, torch.randn(5, 20).double() * 3
    log_s, log_t = z.log_softmax(-1), (z_t / 1.5).log_softmax(-1)
    for term in DIVERGENCES:
        for kinds in ("entry", "token", "entry token"):
            capped = with_caps(term, kinds, log_s, log_t, torch.arange(5))

            temperature = Temperatures(teacher=1.5, student=1.0)
            mine = z.clone().requires_grad_()
            distillation_loss(mine, z_t, terms=[capped], temperature=temperature, reduction="sum").backward()
            for _ in range(3):
                step = 1e-6 * torch.randn_like(z)
                ends = (
                    distillation_loss(z + sign * step, z_t, terms=[capped], temperature=temperature, reduction="sum")
                    for sign in (1, -1)
                )
                difference = next(ends) - next(ends)
                slope = 2 * (mine.grad * step).sum()
                assert (difference - slope).abs() < 1e-6 * step.norm(), (term.type, kinds)


def test_statistics_tell_what_caps_take(where):
    torch.manual_seed(8)
    student, teacher, labels = draw(where, torch.float32)
    z, z_t = (x.double() @ w.double().T for x, w in (student[:2], teacher))
    for temperature in (1.0, Temperatures(1.0, 2.0)):
        both = both_of(temperature)
        log_s, log_t = (z / both.student).log_softmax(-1), (z_t / both.teacher).log_softmax(-1)
        counted = (labels != -100).nonzero()[:, 0]
        for source in ("head", "mixture"):
            term = with_caps(LossTerm("reverse_kl", 2.0), "entry token", log_s, log_t, counted)
            given = {"teachers": [TeacherHead(*teacher)] * 2} if source == "mixture" else {}
            heads = () if given else teacher
            _, stats = FusedDistillationLoss([term], temperature)(
                *student[:2], *heads, labels=labels, return_stats=True, **given
            )
            whole = clipped_divergence(term._replace(clip=None), log_s, log_t)
            kept = clipped_divergence(term, log_s, log_t)
            at_1 = 2.0 * clipped_divergence(term._replace(clip=None), z.log_softmax(-1), z_t.log_softmax(-1))
            right = torch.where(labels != -100, at_1 * (1 - kept / whole), 0.0)
            assert relative_error(stats.clipped_value, right) < 1e-4
            assert torch.equal(stats.clipped_tokens > 0, (labels != -100) & (kept == term.clip.token))
            assert relative_error(stats.divergence[counted], at_1[counted]) < 1e-4
            assert 0 < stats.clipped_tokens.sum() < len(counted)
    _, stats = FusedKLLoss()(*student[:2], *teacher, labels, return_stats=True)
    assert not stats.clipped_tokens.any() and not stats.clipped_value.any()


@pytest.mark.parametrize("term", DIVERGENCES, ids=lambda term: term.type)
def test_caps_beyond_all_values_change_nothing(where, term):
    student, teacher, labels = draw(where, torch.float32)

    def run(clip, temperature):
        mine = [t.detach().clone().requires_grad_() for t in student[:2]]
        loss = FusedDistillationLoss([term._replace(clip=clip)], temperature)(*mine, *teacher, labels)
        return [loss.detach(), *torch.autograd.grad(loss, mine)]

    plain = run(None, 1.5)
    for value, right in zip(run(Clip(1e6, 1e6), 1.5), plain, strict=True):
        assert relative_error(value, right) < 2e-6
    for value, right in zip(run(None, Temperatures(1.5, 1.5)), plain, strict=True):
        assert torch.equal(value, right)


@pytest.mark.parametrize("term", DIVERGENCES, ids=lambda term: term.type)
def test_a_token_beyond_its_cap_has_no_gradient(kernel_device, term):
    student, teacher, _ = draw(kernel_device, torch.float32)
    mine = [t.detach().clone().requires_grad_() for t in student[:2]]
    loss = FusedDistillationLoss([term._replace(clip=Clip(token=1e-3))])(*mine, *teacher)
    loss.backward()
    assert loss.item() == pytest.approx(1e-3, rel=1e-6)
    assert not any(tensor.grad.any() for tensor in mine)


def test_equal_models_have_no_loss_and_a_capped_sum_is_not_negative(where):
    """As capping the products p log(p/q), some of them negative, would make it."""
    z = torch.randn(6, V, device=where) * 4
    z_t = torch.randn(6, V, device=where) * 4
    for term in DIVERGENCES:
        for cap in (1e-6, 1e-3, 0.05):
            capped = [term._replace(clip=Clip(entry=cap))]
            mine = z.clone().requires_grad_()
            same = distillation_loss(mine, z, terms=capped, reduction="none")
            same.sum().backward()
            assert same.max() < 1e-6 and mine.grad.abs().max() < 1e-6
            rows = distillation_loss(z, z_t, terms=capped, reduction="none")
            assert (rows > 0).all() and (rows <= cap * V + 1e-6).all()


def test_an_excluded_token_is_a_finite_loss_and_nan_stays_nan(where):
    torch.manual_seed(9)
    z, z_t = (torch.randn(3, V, device=where) for _ in range(2))
    z[0, 5] = -math.inf
    z_t[0, 7] = -math.inf
    z[1, 3] = math.nan
    for kind in ("forward_kl", "reverse_kl"):
        for clip in (Clip(token=2.0), Clip(entry=0.02), Clip(2.0, 0.02)):
            mine = z.clone().requires_grad_()
            rows = distillation_loss(mine, z_t, terms=[LossTerm(kind, 1.0, clip=clip)], reduction="none")
            rows.sum().backward()
            assert rows[0].isfinite() and mine.grad[0].isfinite().all()
            assert rows[1].isnan() and mine.grad[1].isnan().any()
            assert rows[2].isfinite() and mine.grad[2].abs().max() > 0
            if clip == Clip(token=2.0):
                assert rows[0] == 2.0 and not mine.grad[0].any()


def test_compiled_calls_get_the_caps():
    torch.manual_seed(10)
    student, teacher, labels = draw(torch.device("cpu"), torch.float32)
    module = FusedKLLoss("reverse", Temperatures(1.0, 1.2), clip=Clip(token=3.0, entry=0.1))

    def run(call):
        mine = [t.detach().clone().requires_grad_() for t in student[:2]]
        loss = call(*mine, *teacher, labels)
        return [loss.detach(), *torch.autograd.grad(loss, mine)]

    compiled = torch.compile(module, fullgraph=True, backend="eager")
    for value, right in zip(run(compiled), run(module), strict=True):
        assert torch.equal(value, right)
    assert "clipped (token=3, entry=0.1)" in repr(module) and "teacher=1, student=1.2" in repr(module)


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: FusedKLLoss(clip=Clip(token=0.0)),
            r"terms\[0\]\.clip\.token: expected None or a finite number above 0",
        ),
        (lambda: FusedKLLoss(clip=Clip(entry=math.inf)), r"terms\[0\]\.clip\.entry: expected None or a finite number"),
        (lambda: FusedKLLoss(clip={"entry": 1.0}), r"terms\[0\]\.clip: expected Clip\(token, entry\) or None"),
        (lambda: FusedKLLoss(temperature=Temperatures(1.0, 0.0)), r"temperature\.student: expected a number above 0"),
        (lambda: FusedKLLoss(temperature=Temperatures(-1.0, 1.0)), r"temperature\.teacher: expected a number"),
        (
            lambda: ours.FusedDistillationLoss([LossTerm("cross_entropy", 1.0, clip=Clip(1.0))]),
            r"terms\[0\]\.clip: expected None for cross_entropy",
        ),
    ],
)
def test_what_cannot_be_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", ["entry", "token", "entry token"])
@pytest.mark.parametrize("term", DIVERGENCES, ids=lambda term: term.type)
def test_large_vocabularies_in_16_bits(device, term, kinds):
    """bf16 heads over Qwen's vocabulary: loss and gradients within what 16 bits allow."""
    torch.manual_seed(11)
    rows = 128
    student, teacher, labels = draw(device, torch.bfloat16, vocab=151_936, rows=rows)
    both = Temperatures(teacher=1.0, student=1.1)
    leaves = [t.detach().double().requires_grad_() for t in student[:2]]
    log_s = ((leaves[0] @ leaves[1].T) / both.student).log_softmax(-1)
    log_t = (teacher[0].double() @ teacher[1].double().T).log_softmax(-1)
    counted = (labels != -100).nonzero()[:, 0]
    capped_term = with_caps(term, kinds, log_s, log_t, counted)
    exact = mean_and_gradients(both.student**2 * clipped_divergence(capped_term, log_s, log_t), labels, leaves)
    mine = [t.detach().clone().requires_grad_() for t in student[:2]]
    module = FusedDistillationLoss([capped_term], both)
    loss, stats = module(*mine, *teacher, labels, return_stats=True)
    found = [loss.detach(), *torch.autograd.grad(loss, mine)]
    # A token or an entry whose value rounds over its cap jumps: few do, and each is a small part of the whole.
    for name, value, right, bound in zip(("loss", "dx", "dW"), found, exact, (1e-3, 3e-2, 3e-2), strict=True):
        assert relative_error(value, right) < bound, name
    assert 0 < stats.clipped_value.sum() < stats.divergence.sum()
