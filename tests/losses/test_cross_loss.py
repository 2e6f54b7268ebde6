"""The divergence across tokenizers against its definition, outcome by outcome, and against the plain divergences."""

import pytest
import torch
from dense_loss import ALL_TERMS
from distill_kernels import FusedDistillationLoss, LossTerm
from grids import pairwise
from helpers import assert_as_good_as_torch, realistic_heads

from distill.doctor.reference_spans import ReferenceLogits, dense_spans
from distill.models.head import HeadWeights
from distill.objectives import span_loss as cross_loss
from distill.objectives.span_loss import CrossTokenizerLoss, Spans, SpanTargets
from distill.recipe.loss import Loss

VS, VT = 40, 50
TERMS = [LossTerm("forward_kl", 0.6), LossTerm("jsd", 0.4, beta=0.3), LossTerm("cross_entropy", 0.2)]
WIDTHS = [(1, 1), (1, 1), (2, 1), (1, 3), (2, 2), (1, 1), (3, 2), (1, 1)]  # tokens of each span, of both


def case(dtype=torch.float64, *, shared=30, scale=4.0, device="cpu"):
    """Hidden states and heads of two models, tokens, spans (the first token has no prediction), shared ids."""
    generator = torch.Generator().manual_seed(3)
    counts = torch.tensor(WIDTHS)
    spans = []
    for side in (0, 1):
        stops = 1 + counts[:, side].cumsum(0)
        spans.append(torch.stack([stops - counts[:, side], stops], 1))
    n_s, n_t = (int(part[-1, 1]) for part in spans)
    ids_s, ids_t = (torch.randint(0, v, (n,), generator=generator) for v, n in ((VS, n_s), (VT, n_t)))
    pairs = torch.randperm(VS, generator=generator)[:shared], torch.randperm(VT, generator=generator)[:shared]
    for number in (0, 1):  # the first two spans are one shared token each
        ids_s[1 + number], ids_t[1 + number] = pairs[0][number], pairs[1][number]
    for number, (span, at) in enumerate(((2, 2), (3, 3))):  # others begin with shared tokens: of the student, of both
        ids_s[spans[0][span, 0]] = pairs[0][at]
        if number:
            ids_t[spans[1][span, 0]] = pairs[1][at]
    x, w, y, v = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((n_s, 16), (VS, 16), (n_t, 24), (VT, 24))
    )
    x, w, y, v = (t.to(device, dtype) for t in (x * scale / 4, w, y * scale / 5, v))
    spans = Spans(*(part.to(device) for part in spans))
    return x.requires_grad_(), w.requires_grad_(), y, v, spans, ids_s.to(device), ids_t.to(device), pairs


def recipe_loss(terms, temperature=1.0):
    spelled = [{name: value for name, value in term._asdict().items() if value is not None} for term in terms]
    return Loss.model_validate({"terms": spelled, "temperature": temperature})


def cross(x, w, y, v, spans, ids_s, ids_t, pairs, *, terms=TERMS, temperature=1.0, **more):
    plain = FusedDistillationLoss(terms, temperature)
    targets = SpanTargets(y[None], spans, ids_s[None], ids_t[None])
    loss = CrossTokenizerLoss(plain, pairs)(
        x[None], HeadWeights(w, None, None), HeadWeights(v, None, None), targets, **more
    )
    return loss, *torch.autograd.grad(loss[0] if isinstance(loss, tuple) else loss, (x, w))


@pytest.mark.plain("0-1.0-torch.float64", "7-2.5-torch.float32", "30-1.0-torch.float32", "40-1.0-torch.float32")
@pytest.mark.parametrize(
    *pairwise({"shared": [0, 7, 30, 40], "temperature": [1.0, 2.5], "dtype": [torch.float64, torch.float32]})
)
def test_loss_and_gradient_follow_the_definition(shared, temperature, dtype, device):
    inputs = case(dtype, shared=max(shared, 4), device=device)
    if not shared:  # nothing but spans and the rest
        inputs = *inputs[:-1], tuple(ids[:0] for ids in inputs[-1])
    ours = cross(*inputs, temperature=temperature)

    def dense(dtype):
        x, w, y, v = (t.detach().to(dtype).requires_grad_() for t in inputs[:4])
        spans, ids_s, ids_t, pairs = inputs[4:]
        readings = ReferenceLogits(x @ w.T, ids_s.tolist()), ReferenceLogits((y @ v.T).detach(), ids_t.tolist())
        losses = dense_spans(*readings, spans, pairs, recipe_loss(TERMS, temperature))
        return losses.mean(), *torch.autograd.grad(losses.mean(), (x, w))

    for name, mine, eager, exact in zip(("loss", "dx", "dW"), ours, dense(dtype), dense(torch.float64), strict=True):
        assert_as_good_as_torch(mine, eager, exact, dtype, name)


@pytest.mark.parametrize("term", ALL_TERMS[:-1], ids=lambda term: term.type)
def test_one_tokenizer_gives_the_divergence_itself(term, device):
    """All tokens shared, every span one token: the loss over given pairs of models is the plain one."""
    x, w, y, v = realistic_heads(9, VS, 16, 24, device=device)
    x, w = x.requires_grad_(), w.requires_grad_()
    ids = torch.arange(9, device=device)
    places = torch.stack([torch.arange(1, 9), torch.arange(2, 10)], 1).to(device)
    spans, pairs = Spans(places, places), (torch.arange(VS), torch.arange(VS))
    terms = [term, LossTerm("cross_entropy", 0.3)]
    (loss, stats), *gradients = cross(
        x, w, y, v, spans, ids, ids, pairs, terms=terms, temperature=2.0, return_stats=True
    )
    labels = torch.cat([ids[1:], ids.new_tensor([-100])])
    plain, plain_stats = FusedDistillationLoss(terms, 2.0)(x, w, y, v, labels, return_stats=True)
    for mine, right in zip((loss, *gradients), (plain, *torch.autograd.grad(plain, (x, w))), strict=True):
        assert_as_good_as_torch(mine, right, right, torch.float32)
    for name, mine, right in zip(stats._fields, stats, plain_stats, strict=True):
        assert_as_good_as_torch(mine, right[:-1], right[:-1], torch.float32, name)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_equal_models_give_zero(temperature):
    """The same model on both sides: nothing to learn, whatever the spans and however few tokens are known as shared."""
    for shared in (VS, 10):
        x, w, _, _, spans, ids, *_ = case()
        spans = Spans(spans.student, spans.student)
        pairs = (torch.arange(shared), torch.arange(shared))
        loss, *gradients = cross(x, w, x, w, spans, ids, ids, pairs, terms=TERMS[:2], temperature=temperature)
        assert loss < 1e-12 and all(gradient.abs().max() < 1e-12 for gradient in gradients)


def test_scale_cap_bias_and_lora():
    """Logit transforms of either side match the definition by autograd."""
    x, w, y, v, spans, ids_s, ids_t, pairs = case()
    bias, teacher_bias = torch.randn(VS).double().requires_grad_(), torch.randn(VT).double()
    a, b = torch.randn(3, 16).double().requires_grad_(), torch.randn(VS, 3).double().requires_grad_()
    leaves = (x, w, bias, a, b)
    plain = FusedDistillationLoss(
        TERMS, 2.0, student_logit_scale=0.7, student_softcap=5.0, teacher_logit_scale=1.3, teacher_softcap=9.0
    )
    heads = HeadWeights(w, bias, (a, b, 0.5)), HeadWeights(v, teacher_bias, None)
    targets = SpanTargets(y[None], spans, ids_s[None], ids_t[None])
    loss = CrossTokenizerLoss(plain, pairs)(x[None], *heads, targets)
    ours = loss, *torch.autograd.grad(loss * 3, leaves)
    z_s = 5 * torch.tanh(0.7 * (x @ (w + 0.5 * b @ a).T + bias) / 5)
    z_t = 9 * torch.tanh(1.3 * (y @ v.T + teacher_bias) / 9)
    readings = ReferenceLogits(z_s, ids_s.tolist()), ReferenceLogits(z_t, ids_t.tolist())
    dense = dense_spans(*readings, spans, pairs, recipe_loss(TERMS, 2.0)).mean()
    for mine, right in zip(ours, (dense, *torch.autograd.grad(dense * 3, leaves)), strict=True):
        assert_as_good_as_torch(mine, right, right, torch.float64)


def test_chunks_change_neither_loss_nor_counts(limit):
    """A span at a time, and the whole step's number of spans: the same sums."""
    inputs = case()
    (loss, stats), *gradients = cross(*inputs, return_stats=True)
    limit.setattr(cross_loss, "CHUNK_ELEMENTS", 1)
    (tight, tight_stats), *tight_gradients = cross(*inputs, return_stats=True, num_items=torch.tensor(16))
    for mine, right in zip((tight, *tight_gradients), (loss, *gradients), strict=True):
        assert_as_good_as_torch(mine * 2, right, right, torch.float64)
    for mine, right in zip(tight_stats, stats, strict=True):
        assert_as_good_as_torch(mine, right, right, torch.float32)


def test_statistics_are_at_temperature_1():
    inputs = case()
    x, w, y, v, spans, ids_s, ids_t, pairs = inputs
    (_, stats), *_ = cross(*inputs, temperature=2.5, return_stats=True)
    soft = TERMS[:2]
    readings = ReferenceLogits(x @ w.T, ids_s.tolist()), ReferenceLogits(y @ v.T, ids_t.tolist())
    divergence = dense_spans(*readings, spans, pairs, recipe_loss(soft))
    with_text = recipe_loss([*soft, LossTerm("cross_entropy", 1.0)])
    text = dense_spans(*readings, spans, pairs, with_text) - divergence
    for name, right in (("divergence", divergence), ("cross_entropy", text), ("student_label_logprob", -text)):
        assert_as_good_as_torch(getattr(stats, name), right, right, torch.float32, name)
    tops = [z.argmax(-1)[part[:, 0] - 1] for (z, _), part in zip(readings, spans, strict=True)]
    known = dict(zip(*(ids.tolist() for ids in pairs), strict=True))
    assert stats.agreement.tolist() == [
        known.get(one) == other for one, other in zip(*map(torch.Tensor.tolist, tops), strict=True)
    ]


@pytest.mark.parametrize("collapsed", ["student", "teacher", "both"])
def test_a_tie_of_all_tokens_is_no_agreement(collapsed):
    x, w, y, v, *others = case()
    others[-1] = tuple(torch.arange(VS) for _ in range(2))  # the first tokens, which argmax says in a tie, are partners
    w, v = w * (collapsed == "teacher"), v * (collapsed == "student")
    (_, stats), *_ = cross(x, w.detach().requires_grad_(), y, v, *others, return_stats=True)
    assert not stats.agreement.any()


def test_a_second_backward_raises():
    x, w, y, v, spans, ids_s, ids_t, pairs = case()
    targets = SpanTargets(y[None], spans, ids_s[None], ids_t[None])
    module = CrossTokenizerLoss(FusedDistillationLoss(TERMS), pairs)
    loss = module(x[None], HeadWeights(w, None, None), HeadWeights(v, None, None), targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already differentiated"):
        loss.backward()
