"""Every rank's part of the losses from teachers of K tokens and from mixtures of teachers, in one process."""

import sys

import pytest
import torch
from dense_loss import ALL_TERMS
from distill_kernels import LossTerm
from distill_kernels.losses import linear
from distill_kernels.losses import plan as planning
from distill_kernels.losses.linear import linear_divergence, row_scales
from distill_kernels.losses.mixture import Mixture
from distill_kernels.losses.operands import Batch, Head, RequiredGrads
from distill_kernels.losses.shards import VocabShard
from distill_kernels.losses.terms import make_objective
from distill_kernels.losses.topk_reference import TopK
from helpers import no_syncs, realistic_heads
from rank_parts import PADDING, SPANS, LeftAlone, check_equal_bits, check_parts, outcomes_of, poisoned

ROWS, K = 7, 8
READINGS = [(d, t) for t in ("bucket", "renormalize") for d in ("forward", "reverse")] + [("forward", "sampled")]
HARD = LossTerm("cross_entropy", 0.3)
EVERYTHING = {
    "temperature": 2.0,
    "label_smoothing": 0.1,
    "z_loss": 1e-3,
    "student_logit_scale": 0.6,
    "student_softcap": 8.0,
}
MIXED = [LossTerm("forward_kl", 0.5), LossTerm("reverse_kl", 0.7), HARD]
PATHS = pytest.mark.parametrize("path", ["kernel", "reference"])


def draw(device, dtype, spans, k=K, rows=None):
    """A student's head, two teachers' hidden states and heads, what the first says of K tokens, and labels."""
    vocab, rows = spans[-1][1], rows or ROWS
    x, w, xt, wt = realistic_heads(rows, vocab + PADDING, 32, 48, dtype=dtype, device=device)
    _, _, yt, vt = realistic_heads(rows, vocab + PADDING, 32, 24, dtype=dtype, device=device, seed=1)
    generator = torch.Generator(device).manual_seed(2)
    biases = [torch.randn(vocab + PADDING, generator=generator, device=device).to(dtype) for _ in range(2)]
    logprobs, ids = (xt.double() @ wt[:vocab].double().T / 2).log_softmax(-1).topk(k, -1)
    labels = torch.randint(0, vocab, (rows,), generator=generator, device=device)
    labels[0], labels[1], labels[2] = ids[0, -1], spans[-1][0] % vocab, -100  # one of the K, and one of the last rank's
    return x, w, biases, [(xt, wt), (yt, vt)], ids, logprobs.float(), labels


def cut_top_k(
    device, dtype, direction, tail, spans, *, path, hard=False, k=K, wanted=None, change=None, rows=False, **settings
):
    """Outcomes of `rank_parts.outcomes_of` for a teacher of K tokens; `change` gets head, ids and log-probabilities."""
    x, w, biases, _, ids, logprobs, labels = draw(device, dtype, spans, k)
    student = Head(x, w, biases[0] if hard else None)
    ids[2], logprobs[2] = 10**6, torch.nan  # a row without a label may hold anything
    more = []
    if change is not None:
        student, ids, logprobs, *more = change(student, ids, logprobs)
    scale = row_scales(x, labels, None, None, None, ignore_index=-100, reduction="mean")
    chosen = (labels != -100).nonzero().squeeze(-1) if rows else None
    o = make_objective([LossTerm(f"{direction}_kl", 1.5), *([HARD] if hard else [])], **settings)
    batch = Batch(labels, scale, chosen, TopK(ids, logprobs, tail))
    wanted = wanted or RequiredGrads(True, True, student.bias is not None, stats=True)
    return outcomes_of(student, None, batch, o, wanted, spans, dtype, path, *more)


@pytest.mark.few(5)
@PATHS
@pytest.mark.parametrize("direction, tail", READINGS)
def test_parts_of_every_tail(kernel_device, direction, tail, path):
    outcomes = cut_top_k(kernel_device, torch.float32, direction, tail, SPANS["two"], path=path)
    check_parts(*outcomes, torch.float32)
    assert outcomes[2][0].loss.sum() > 0.01 and outcomes[2][0].stats.agreement.unique().numel() == 2


@pytest.mark.few(4)
@PATHS
@pytest.mark.parametrize(
    "direction, tail, spans",
    [
        ("forward", "bucket", "two"),
        ("reverse", "bucket", "three, one without columns"),
        ("forward", "bucket", "the first without columns"),
        ("reverse", "renormalize", "the first without columns"),
        ("forward", "sampled", "three, one without columns"),
        ("forward", "sampled", "tiles"),
    ],
)
def test_shards_with_all_options_equal_the_whole_head(kernel_device, direction, tail, spans, path):
    outcomes = cut_top_k(
        kernel_device,
        torch.bfloat16,
        direction,
        tail,
        SPANS[spans],
        path=path,
        hard=True,
        rows=spans == "two",
        **EVERYTHING,
    )
    check_parts(*outcomes, torch.bfloat16)


@PATHS
def test_parts_of_a_frozen_head_with_lora(kernel_device, path):
    def change(student, ids, logprobs):
        a = (torch.randn(4, 32, device=kernel_device) / 6).bfloat16()
        b = torch.randn(len(student.weight), 4, device=kernel_device).bfloat16()
        return student._replace(lora_a=a, lora_b=b, lora_scale=0.5), ids, logprobs

    wanted, spans = RequiredGrads(hidden=True, lora_a=True, lora_b=True), SPANS["three, one without columns"]
    outcomes = cut_top_k(
        kernel_device, torch.bfloat16, "reverse", "bucket", spans, path=path, change=change, wanted=wanted
    )
    check_parts(*outcomes, torch.bfloat16)
    assert outcomes[2][0].weight is None


@pytest.mark.few(1)
@PATHS
@pytest.mark.parametrize("tail", ["bucket", "sampled"])
def test_tokens_of_one_rank_and_ranks_of_minus_infinity(kernel_device, tail, path):
    """All K lie on the second rank; the first has nothing but -inf, or -inf but for one token."""

    def make_change(possible):
        def change(student, ids, logprobs):
            bias = torch.zeros(len(student.weight), device=kernel_device)
            bias[possible:130] = -torch.inf
            places = torch.arange(ids.shape[1], device=kernel_device) * 3
            return student._replace(bias=bias), (ids * 0 + 140 + places), logprobs

        return change

    for possible in (0, 1):
        outcomes = cut_top_k(
            kernel_device, torch.float32, "forward", tail, SPANS["two"], path=path, change=make_change(possible)
        )
        check_parts(*outcomes, torch.float32)
        assert outcomes[2][0].hidden.isfinite().all() and outcomes[2][0].loss.isfinite().all()


@pytest.mark.few(1)
@PATHS
@pytest.mark.parametrize("tail", ["bucket", "sampled"])
def test_all_tokens_leave_no_tail(kernel_device, tail, path):
    spans = ((0, 3), (3, 6))
    outcomes = cut_top_k(kernel_device, torch.float32, "forward", tail, spans, path=path, k=6, hard=True)
    check_parts(*outcomes, torch.float32)
    none = cut_top_k(kernel_device, torch.float32, "forward", tail, ((0, 2), (2, 5)), path=path, k=1)
    check_parts(*none, torch.float32)


@PATHS
def test_a_student_without_tail_probability(kernel_device, path):
    """The tail's tokens are impossible on both ranks: no gradient there, and no NaN."""

    def change(student, ids, logprobs):
        bias = torch.full((len(student.weight),), -torch.inf, device=kernel_device)
        bias[[5, 200]] = 0.0
        ids = torch.tensor([5, 200], device=kernel_device).expand(len(ids), 2).contiguous()
        return student._replace(bias=bias), ids, torch.tensor([0.0, -torch.inf], device=kernel_device).expand(ids.shape)

    alone, exact, parts = cut_top_k(
        kernel_device, torch.float32, "forward", "bucket", SPANS["two"], path=path, change=change
    )
    check_parts(alone, exact, parts, torch.float32)
    assert all(part.weight.isfinite().all() and part.loss.isfinite().all() for part in parts)


@PATHS
def test_a_tail_on_both_ranks_keeps_its_digits(kernel_device, path):
    """A student's tail of e^-100, less than fp32's normal numbers and spread over the ranks, is not rounded to 0."""

    def change(student, ids, logprobs):
        bias = torch.zeros(len(student.weight), device=kernel_device)
        bias[200] = 100.0
        bias[:130] -= 7.0
        ids = torch.full_like(ids[:, :1], 200)
        return student._replace(hidden=student.hidden * 0, bias=bias), ids, torch.full_like(logprobs[:, :1], -1e-3)

    outcomes = cut_top_k(kernel_device, torch.float32, "forward", "bucket", SPANS["two"], path=path, change=change)
    check_parts(*outcomes, torch.float32)
    assert outcomes[1].bias[:130].abs().min() > 0


@pytest.mark.few(3)
@PATHS
@pytest.mark.parametrize("tail", ["bucket", "renormalize", "sampled"])
def test_statistics_without_gradient_and_ids_out_of_range(kernel_device, tail, path):
    """An id that no rank holds, its place unused, is as if the place were not there."""

    def change(student, ids, logprobs):
        outside = torch.full_like(ids[:, :2], 300)
        outside[:, 0] = -1
        more = torch.cat([ids, outside], 1), torch.cat([logprobs, torch.full_like(logprobs[:, :2], -torch.inf)], 1)
        return student, ids, logprobs, TopK(*more, tail)

    alone, exact, parts = cut_top_k(
        kernel_device,
        torch.float32,
        "forward",
        tail,
        SPANS["two"],
        path=path,
        change=change,
        wanted=RequiredGrads(stats=True),
        hard=True,
    )
    check_parts(alone, exact, parts, torch.float32)
    assert parts[0].hidden is None and parts[0].loss.isfinite().all()


# ---------------------------------------------------------------- several teachers


def cut_mixture(device, dtype, terms, spans, *, path, count=2, wanted=None, change=None, rows=False, **settings):
    """Outcomes of `rank_parts.outcomes_of` for a mixture; `change` gets the student and the teachers' heads."""
    x, w, biases, teachers, _, _, labels = draw(device, dtype, spans)
    heads = [Head(*teachers[0]), Head(*teachers[1], biases[1]), Head(*teachers[0], biases[0])][:count]
    student = Head(x, w, biases[0])
    if change is not None:
        student, heads = change(student, heads)
    mixture = Mixture(
        tuple(heads), (0.5, 0.5) if count == 2 else (0.5, 0.3, 0.2), (1.0, 0.7, 1.2)[:count], (0.0, 20.0, 0.0)[:count]
    )
    scale = row_scales(x, labels, None, None, None, ignore_index=-100, reduction="mean")
    chosen = (labels != -100).nonzero().squeeze(-1) if rows else None
    wanted = wanted or RequiredGrads(True, True, True, stats=True)
    o = make_objective(terms, **settings)
    return outcomes_of(student, mixture, Batch(labels, scale, chosen), o, wanted, spans, dtype, path)


@pytest.mark.few(4)
@PATHS
@pytest.mark.parametrize("term", ALL_TERMS[::2], ids=lambda term: term.type)
def test_parts_of_a_mixture(kernel_device, term, path):
    outcomes = cut_mixture(kernel_device, torch.float32, [term], SPANS["two"], path=path)
    check_parts(*outcomes, torch.float32)


@pytest.mark.few(1)
@PATHS
@pytest.mark.parametrize("name", SPANS)
def test_parts_of_a_mixture_with_everything(kernel_device, name, path):
    count = 3 if name == "two" else 2
    outcomes = cut_mixture(
        kernel_device, torch.bfloat16, MIXED, SPANS[name], path=path, count=count, rows=True, **EVERYTHING
    )
    check_parts(*outcomes, torch.bfloat16)


@pytest.mark.few(1)
@PATHS
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_parts_of_teachers_with_zero_probability_on_a_rank(kernel_device, path, temperature):
    """One teacher allows nothing of the first rank's; the other still gives these tokens half of its probability."""

    def change(student, heads):
        bias = torch.zeros(len(student.weight), device=kernel_device)
        bias[:130] = -torch.inf
        return student, [heads[0]._replace(bias=bias), heads[1]]

    outcomes = cut_mixture(
        kernel_device, torch.float32, MIXED[:1], SPANS["two"], path=path, change=change, temperature=temperature
    )
    check_parts(*outcomes, torch.float32)
    assert outcomes[2][0].weight.abs().sum() > 0 and outcomes[2][0].loss.isfinite().all()


# ---------------------------------------------------------------- chunks, memory, repeats, waiting


@pytest.mark.few(2)
@PATHS
@pytest.mark.parametrize("kind", ["bucket", "mixture"])
def test_all_ranks_plan_the_same_chunks(kernel_device, monkeypatch, limit, path, kind):
    monkeypatch.setattr(sys.modules[__name__], "ROWS", 40)
    limit.setattr(planning, "ROW_MULTIPLE", 16)
    limit.setattr(planning, "CHUNK_ROWS", 16)
    limit.setattr(linear, "REFERENCE_CHUNK_ELEMENTS", 16 * 40)
    settings = {"spans": ((0, 40), (40, 64)), "path": path, "rows": True, "temperature": 2.0}
    if kind == "mixture":
        outcomes = cut_mixture(kernel_device, torch.bfloat16, MIXED[:1], **settings)
    else:
        outcomes = cut_top_k(kernel_device, torch.bfloat16, "forward", kind, hard=True, **settings)
    check_parts(*outcomes, torch.bfloat16)


def one_of_each(device):
    return (
        lambda: cut_top_k(device, torch.bfloat16, "forward", "bucket", SPANS["two"], path="kernel", hard=True)[2],
        lambda: cut_top_k(device, torch.bfloat16, "forward", "sampled", SPANS["two"], path="kernel")[2],
        lambda: cut_mixture(device, torch.bfloat16, MIXED, SPANS["two"], path="kernel", temperature=2.0)[2],
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("number", range(3))
def test_every_element_is_written_and_runs_repeat_bitwise(kernel_device, monkeypatch, number):
    run = one_of_each(kernel_device)[number]
    plain = run()
    poisoned(monkeypatch)
    check_equal_bits(plain, run())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bucket", "renormalize", "sampled", "mixture"])
def test_no_host_sync_between_the_parts(device, kind):
    spans = ((0, 1000), (1000, 2000))
    x, w, _, teachers, ids, logprobs, labels = draw(device, torch.bfloat16, spans, rows=300)
    top = None if kind == "mixture" else TopK(ids, logprobs, kind)
    batch = Batch(labels, torch.full((300,), 1 / 300, device=device), None, top)
    terms = MIXED if kind == "mixture" else [MIXED[0], HARD]
    o = make_objective(terms, temperature=2.0)
    heads = tuple(Head(hidden, weight[:1000].contiguous()) for hidden, weight in teachers)
    mixture = Mixture(heads, (0.6, 0.4), (1.0, 1.0), (0.0, 0.0)) if kind == "mixture" else None
    student = Head(x, w[:1000].contiguous())

    def step():
        linear_divergence(
            student,
            mixture,
            batch,
            o,
            RequiredGrads(True, True, stats=True),
            vocab=1000,
            dtype=torch.bfloat16,
            shard=VocabShard(LeftAlone(), spans),
        )

    step()
    with no_syncs():
        step()
