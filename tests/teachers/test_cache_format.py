"""Encoding of cached teacher outputs: ids, rounding, the tail's mass, sampled weights."""

import numpy as np
import torch
from distill_kernels import FusedKLLoss, FusedTopKKLLoss
from helpers import realistic_heads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from distill.models.head import HeadWeights, LogitTransform
from distill.objectives.row_packing import FIGURES, pack_ids, unpack_ids
from distill.objectives.top_k_encoding import CHUNK_ELEMENTS, Encoding, encode, normalised, surplus_of
from distill.recipe import Loss
from distill.teachers.backends.stored import format as layout
from distill.teachers.backends.stored.settings import default_tail


@given(st.integers(1, 1 << 24), st.integers(0, 5), st.integers(1, 21), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_stored_ids_are_read_back(vocabulary, rows, k, seed):
    ids = np.random.default_rng(seed).integers(0, vocabulary, (rows, k)).astype(np.int32)
    ids[:1, 0] = vocabulary - 1
    packed = pack_ids(torch.from_numpy(ids), vocabulary)
    assert (unpack_ids(packed, vocabulary).numpy() == ids).all()
    width = sum(tensor.nbytes for tensor in packed.values())
    plan = {"kind": "top_k", "dtype": "float16", "k": k, "vocabulary": vocabulary}
    assert layout.bytes_a_token(plan) * rows == width + rows * 2 * (k + len(FIGURES))


def head_of(rows=64, width=16, vocabulary=50, std=1.0):
    weight = torch.randn(vocabulary, width) * std
    return torch.randn(rows, width), HeadWeights(weight, torch.randn(vocabulary), None)


def test_encoding_against_full_softmax(monkeypatch):
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 7 * 50)
    hidden, head = head_of()
    labels = torch.arange(64) % 48
    said = encode(hidden, head, LogitTransform(0.5, 9.0), labels, Encoding(48, 5, "bucket", 2.0))
    raw = hidden.double() @ head.weight.double()[:48].T + head.bias.double()[:48]
    logits = 9 * torch.tanh(0.5 * raw / 9)
    hard, soft = F.log_softmax(logits, -1), F.log_softmax(logits / 2, -1)
    top, ids = soft.topk(5)
    assert (said.ids == ids).all()
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(said.logprobs.double(), top, **close)
    torch.testing.assert_close(said.tail.double(), torch.log1p(-top.exp().sum(-1)), **close)
    torch.testing.assert_close(said.entropy.double(), -(hard.exp() * hard).sum(-1), **close)
    torch.testing.assert_close(said.label_logprob.double(), hard.gather(-1, labels[:, None])[:, 0], **close)


def test_rounding_is_made_good_by_the_tail():
    hidden, head = head_of(std=3.0)
    said = encode(hidden, head, LogitTransform(), torch.zeros(64, dtype=torch.long), Encoding(50, 8, "bucket"))
    rounded = said.to(torch.float16)
    given = normalised(rounded.logprobs, rounded.tail)
    tail, wanted = 1 - given.double().exp().sum(-1), said.tail.double().exp().clamp_min(1e-6)
    assert ((tail / wanted - 1).abs() < 0.3).all() and (tail > 0).all()
    large = wanted > 1e-4
    assert large.any() and ((tail / wanted - 1).abs()[large] < 6e-3).all()
    unmended = 1 - rounded.logprobs.double().exp().sum(-1)
    assert ((unmended / wanted - 1).abs().max() > (tail / wanted - 1).abs().max()) and (unmended < 0).any()


def test_sampled_weights_are_right_on_average_and_close_each_time():
    hidden, head = head_of(rows=1)
    p = F.log_softmax(hidden @ head.weight.T + head.bias, -1).exp().double()
    times, k = 8000, 8
    generator = torch.Generator().manual_seed(3)
    labels = torch.zeros(times, dtype=torch.long)
    said = encode(
        hidden.expand(times, -1), head, LogitTransform(), labels, Encoding(50, k, "sampled"), generator=generator
    )
    ids = said.ids.long()
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all(), "ids are distinct"
    weights = torch.zeros(times, 50, dtype=torch.float64).scatter(-1, ids, said.logprobs.double().exp())
    torch.testing.assert_close(weights.sum(-1), torch.ones(times, dtype=torch.float64), rtol=0, atol=1e-5)
    assert ((weights > 0).sum(-1) == k).all(), "no place is wasted"
    sure = weights.amin(0) > 0
    assert 1 < sure.sum() < k and (weights[:, sure] - p[:, sure]).abs().max() < 1e-6
    threshold = weights[weights > 0].view(times, k).amin(-1).mean()
    chance = (p[0] / threshold).clamp_max(1)
    torch.testing.assert_close(chance.sum(), torch.tensor(float(k), dtype=torch.float64), rtol=1e-4, atol=0)
    noise = threshold * (chance * (1 - chance) / times).sqrt()
    assert ((weights.mean(0) - p[0]).abs() <= 5 * noise + 1e-6).all(), "unbiased, token by token"
    independent = (p * (1 - p) / k).sum()  # of draws with replacement
    assert weights.var(0).sum() < 0.5 * independent
    torch.testing.assert_close(said.tail[0].double(), -(p * p.log()).sum(), rtol=1e-5, atol=1e-5)


def test_sampling_where_nothing_is_left():
    """All tokens, and probabilities that are 0 but for a few."""
    hidden, head = head_of()
    labels = torch.zeros(64, dtype=torch.long)
    said = encode(hidden, head, LogitTransform(), labels, Encoding(50, 50, "sampled"))
    p = F.softmax(hidden @ head.weight.T + head.bias, -1)
    torch.testing.assert_close(p.gather(-1, said.ids.long()), said.logprobs.exp())
    sharp = HeadWeights(head.weight * 400, None, None)
    said = encode(hidden, sharp, LogitTransform(), labels, Encoding(50, 8, "sampled"))
    assert (said.ids.long().sort(-1).values.diff(dim=-1) > 0).all() and not said.logprobs.isnan().any()
    torch.testing.assert_close(said.logprobs.exp().sum(-1), torch.ones(64))
    assert (said.logprobs == -torch.inf).any()


def test_surplus_that_sampling_adds_to_a_loss_is_known():
    """Loss less surplus is the full divergence on average, the gradient too."""
    x, w, x_t, w_t = realistic_heads(1, 512, 32, 48, std=2.0)
    times = 4000
    generator = torch.Generator().manual_seed(1)
    said = encode(
        x_t.expand(times, -1),
        HeadWeights(w_t, None, None),
        LogitTransform(),
        torch.zeros(times, dtype=torch.long),
        Encoding(512, 16, "sampled"),
        generator=generator,
    )
    full = FusedKLLoss()(x, w, x_t, w_t)
    loss = FusedTopKKLLoss(tail="sampled")
    _, stats = loss(x.expand(times, -1), w, said.ids, said.logprobs, return_stats=True)
    single = stats.divergence - surplus_of(said.logprobs, said.tail)
    assert abs(single.mean() - full) < 5 * single.std() / times**0.5
    assert stats.divergence.mean() - full > 20 * single.std() / times**0.5, "uncorrected it is above"


def test_errors_of_few_tokens_on_peaked_distributions():
    """Top-64 of 4,096 tokens in float16 is close to the full divergence with realistic logits, top-8 is not."""
    x, w, x_t, w_t = realistic_heads(96, 4096, 32, 48)
    w.requires_grad_()

    def gradient(loss):
        w.grad = None
        loss.backward()
        return w.grad.clone()

    full = gradient(FusedKLLoss()(x, w, x_t, w_t))
    errors = []
    for k in (8, 64, 256):
        said = encode(
            x_t,
            HeadWeights(w_t, None, None),
            LogitTransform(),
            torch.zeros(96, dtype=torch.long),
            Encoding(4096, k, "bucket"),
        ).to(torch.float16)
        found = gradient(FusedTopKKLLoss()(x, w, said.ids, normalised(said.logprobs, said.tail)))
        errors.append(float((found - full).norm() / full.norm()))
    assert errors[0] > errors[1] > errors[2] and errors[2] < 0.02 < errors[0], errors


def test_the_default_reading_follows_from_the_loss():
    def named(*terms, **settings):
        return default_tail(Loss.model_validate({"terms": [{"type": term, **settings} for term in terms]}))

    assert named("forward_kl") == named("forward_kl", "cross_entropy") == "sampled"
    assert named("reverse_kl") == named("reverse_kl", "cross_entropy") == "bucket"
    for caps in ({"token": 1.0}, {"entry": 0.1}):
        assert named("forward_kl", clip=caps) == "bucket", "a sample's value is above the divergence that is capped"
