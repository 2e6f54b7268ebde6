"""Every rank's part of the loss, in one process: threads that take turns stand for the ranks of a cut vocabulary."""

import pytest
import torch
from dense_loss import ALL_TERMS
from distill_kernels import LossTerm
from distill_kernels.losses.linear import linear_divergence, row_scales
from distill_kernels.losses.operands import Batch, Head, RequiredGrads
from distill_kernels.losses.shards import VocabShard
from distill_kernels.losses.terms import make_objective
from helpers import no_syncs, realistic_heads
from rank_parts import PADDING, SPANS, LeftAlone, check_equal_bits, check_parts, outcomes_of, poisoned

MIXED = [LossTerm("forward_kl", 0.5), LossTerm("reverse_kl", 0.7), LossTerm("cross_entropy", 0.3)]


def whole_and_cut(device, dtype, terms, spans, *, path="kernel", rows=11, wanted=None, change=None, **settings):
    """Outcomes of one rank with everything (`dtype`; fp64) and of all ranks; `change(heads)` adds biases and LoRAs."""
    vocab, padded = spans[-1][1], spans[-1][1] + PADDING
    x, w, xt, wt = realistic_heads(rows, padded, 32, 48, dtype=dtype, device=device)
    labels = torch.randint(0, vocab, (rows,), device=device)
    labels[:3] = torch.tensor([max(spans[0][1] - 1, 0), spans[0][1] % vocab, -100])
    scale = row_scales(x, labels, None, None, None, ignore_index=-100, reduction="mean")
    rows = (labels != -100).nonzero().squeeze(-1) if settings.pop("given_rows", False) else None
    student, teacher = Head(x, w), Head(xt, wt)
    if change is not None:
        student, teacher = change(student, teacher)
    o = make_objective(terms, **settings)
    wanted = wanted or RequiredGrads(True, True, student.bias is not None, stats=True)
    batch = Batch(labels, scale, rows)
    return outcomes_of(student, teacher, batch, o, wanted, spans, dtype, path)


@pytest.mark.few(3)
@pytest.mark.parametrize("path", ["kernel", "reference"])
@pytest.mark.parametrize("term", ALL_TERMS, ids=lambda term: term.type)
def test_parts_of_every_divergence(kernel_device, term, path):
    outcomes = whole_and_cut(kernel_device, torch.float32, [term], SPANS["two"], path=path)
    check_parts(*outcomes, torch.float32)


@pytest.mark.few(1)
@pytest.mark.parametrize("path", ["kernel", "reference"])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_shards_with_all_options_equal_the_whole_head(kernel_device, spans, path):
    def change(student, teacher):
        biases = [torch.randn(len(student.weight), device=kernel_device).bfloat16() for _ in range(2)]
        return student._replace(bias=biases[0]), teacher._replace(bias=biases[1])

    for terms in (MIXED, MIXED[::2]):  # with a sum between the sweeps, and without
        outcomes = whole_and_cut(
            kernel_device,
            torch.bfloat16,
            terms,
            spans,
            path=path,
            change=change,
            given_rows=True,
            temperature=2.0,
            label_smoothing=0.1,
            z_loss=1e-3,
            student_logit_scale=0.6,
            student_softcap=8.0,
            teacher_softcap=20.0,
        )
        check_parts(*outcomes, torch.bfloat16)


@pytest.mark.parametrize("path", ["kernel", "reference"])
def test_parts_of_a_lora_head(kernel_device, path):
    def change(student, teacher):
        a = (torch.randn(4, 32, device=kernel_device) / 6).bfloat16()
        b = torch.randn(len(student.weight), 4, device=kernel_device).bfloat16()
        return student._replace(lora_a=a, lora_b=b, lora_scale=0.5), teacher

    wanted = RequiredGrads(hidden=True, lora_a=True, lora_b=True)
    spans = SPANS["three, one without columns"]
    outcomes = whole_and_cut(kernel_device, torch.bfloat16, MIXED, spans, path=path, change=change, wanted=wanted)
    check_parts(*outcomes, torch.bfloat16)
    assert outcomes[2][0].weight is None


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("path", ["kernel", "reference"])
def test_parts_of_equal_models_without_gradient(kernel_device, path, tied):
    def same(student, teacher):
        weight = torch.cat([student.weight[:150]] * 2 + [student.weight[:6] * 0])  # every top token on both ranks
        if not tied:
            weight[:150] *= 0.5
        return student._replace(weight=weight), Head(student.hidden, weight)

    spans, wanted = ((0, 150), (150, 300)), RequiredGrads(stats=True)
    _, _, parts = whole_and_cut(kernel_device, torch.float32, MIXED[:2], spans, path=path, change=same, wanted=wanted)
    for part in parts:
        assert (part.loss == 0).all() and part.hidden is None
        assert part.stats.agreement.tolist() == [float(row != 2 and not tied) for row in range(11)]


@pytest.mark.parametrize("path", ["kernel", "reference"])
def test_parts_of_minus_infinity(kernel_device, path):
    def change(student, teacher):
        bias = torch.zeros(len(student.weight), dtype=torch.bfloat16, device=kernel_device)
        bias[:130] = -torch.inf  # all that the first rank has
        return student._replace(bias=bias), teacher._replace(bias=bias)

    outcomes = whole_and_cut(kernel_device, torch.bfloat16, MIXED[:2], SPANS["two"], path=path, change=change)
    check_parts(*outcomes, torch.bfloat16)
    parts = outcomes[2]
    assert (parts[0].weight == 0).all() and parts[0].hidden.isfinite().all() and parts[0].loss.isfinite().all()


@pytest.mark.full
def test_all_ranks_plan_the_same_groups_of_chunks(kernel_device, limit):
    from distill_kernels.losses import plan as planning

    limit.setattr(planning, "ROW_MULTIPLE", 16)
    limit.setattr(planning, "CHUNK_ROWS", 16)
    spans = ((0, 40), (40, 64))
    outcomes = whole_and_cut(kernel_device, torch.bfloat16, MIXED[:1], spans, rows=40)
    check_parts(*outcomes, torch.bfloat16)


def test_every_element_of_the_parts_is_written_and_they_repeat_bitwise(kernel_device, monkeypatch):
    arguments = (kernel_device, torch.bfloat16, MIXED, SPANS["two"])
    plain = whole_and_cut(*arguments)[2]
    poisoned(monkeypatch)
    torch.manual_seed(0)
    check_equal_bits(plain, whole_and_cut(*arguments)[2])


@pytest.mark.gpu
def test_no_host_sync_between_the_parts(device):
    x, w, xt, wt = realistic_heads(300, 1000, 64, 96, dtype=torch.bfloat16, device=device)
    labels = torch.randint(0, 2000, (300,), device=device)
    batch = Batch(labels, torch.full((300,), 1 / 300, device=device), None)
    shard = VocabShard(LeftAlone(), ((0, 1000), (1000, 2000)))

    def step():
        wanted = RequiredGrads(True, True, stats=True)
        heads = Head(x, w), Head(xt, wt)
        linear_divergence(*heads, batch, make_objective(MIXED), wanted, vocab=1000, dtype=torch.bfloat16, shard=shard)

    step()
    with no_syncs():
        step()
