"""The fused path (projection, row kernel, back-projection) against fp64, beside what eager PyTorch achieves."""

import math

import pytest
import torch
from dense_loss import ALL_TERMS, dense_rows, softcap
from distill_kernels import LossTerm
from distill_kernels.launch import interpreted
from distill_kernels.losses import fused as fused_path
from distill_kernels.losses.accumulate import add_transposed_matmul_
from distill_kernels.losses.fused import fused_linear_divergence
from distill_kernels.losses.linear import reference_linear_divergence, row_scales
from distill_kernels.losses.operands import Head, RequiredGrads, RowBatch
from distill_kernels.losses.plan import plan_chunks
from distill_kernels.losses.projection import TILE, fits_fused_projection
from distill_kernels.losses.terms import make_objective
from helpers import assert_as_good_as_torch, assert_as_promised, assert_parts, realistic_heads, relative_error

KL = LossTerm("forward_kl", 1.0)
MIXED = [LossTerm("reverse_kl", 0.7), LossTerm("cross_entropy", 0.3)]


def dense(heads, terms, labels, scale, vocab, dtype, *, biases=(None, None), cap=None, logit_scale=1.0, **settings):
    """Row losses and gradients of full logits in `dtype`; eager when it is the inputs' dtype, exact in fp64."""
    x, w, xt, wt = (t.detach().to(dtype) for t in heads)
    x.requires_grad_()
    w.requires_grad_()
    bias, teacher_bias = (None if b is None else b.detach().to(dtype) for b in biases)
    if bias is not None:
        bias.requires_grad_()
    z, zt = torch.nn.functional.linear(x, w, bias), torch.nn.functional.linear(xt, wt, teacher_bias)
    z, zt = softcap(z[:, :vocab], logit_scale, cap), zt[:, :vocab]
    labels = None if labels is None else labels.clamp_min(0)
    rows = dense_rows(z, zt, terms, labels, **settings)
    loss = torch.where(scale != 0, rows * scale, 0.0)
    leaves = [x, w] if bias is None else [x, w, bias]
    return loss.detach(), *torch.autograd.grad(loss.sum(), leaves)


def fused(heads, terms, labels, scale, vocab, *, rows=None, wanted=None, biases=(None, None), descriptors=True, **more):
    x, w, xt, wt = heads
    settings = {key: more.pop(key) for key in list(more) if key not in ("workspace",)}
    objective = make_objective(terms, **settings)
    teacher = Head(xt, wt, biases[1]) if objective.needs_teacher else None
    wanted = wanted or RequiredGrads(True, True, biases[0] is not None)
    return fused_linear_divergence(
        Head(x, w, biases[0]),
        teacher,
        RowBatch(labels, scale, rows),
        objective,
        wanted,
        vocab=vocab,
        dtype=x.dtype,
        descriptors=descriptors,
        **more,
    )


def setup(device, rows, vocab, dtype, *, hidden=(32, 48), ignored=()):
    heads = realistic_heads(rows, vocab, *hidden, dtype=dtype, device=device)
    labels = torch.randint(0, vocab, (rows,), device=device)
    labels[list(ignored)] = -100
    scale = row_scales(heads[0], labels, None, None, None, ignore_index=-100, reduction="mean")
    return heads, labels, scale


def check(outcome, heads, terms, labels, scale, vocab, dtype, **settings):
    exact = dense(heads, terms, labels, scale.double(), vocab, torch.float64, **settings)
    eager = dense(heads, terms, labels, scale, vocab, dtype, **settings)
    assert_parts([outcome.loss, outcome.hidden, outcome.weight, outcome.bias], eager, exact, dtype)


@pytest.mark.plain("torch.float32-False")
@pytest.mark.parametrize(
    "dtype, descriptors",  # persistent, or tiles; fp32 has one way only
    [
        (torch.bfloat16, True),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.full),
        pytest.param(torch.float16, True, marks=pytest.mark.full),
        (torch.float16, False),
        (torch.float32, False),
    ],
    ids=str,
)
def test_error_is_within_that_of_eager(kernel_device, dtype, descriptors):
    heads, labels, scale = setup(kernel_device, 70, 600, dtype, ignored=(3, 69))
    if dtype == torch.float16:
        scale = scale * 64  # as the callers do, so that small gradients do not vanish
    outcome = fused(heads, MIXED, labels, scale, 600, temperature=2.0, descriptors=descriptors)
    check(outcome, heads, MIXED, labels, scale, 600, dtype, temperature=2.0)
    assert (outcome.loss[[3, 69]] == 0).all() and (outcome.hidden[[3, 69]] == 0).all()


@pytest.mark.parametrize("term", ALL_TERMS, ids=lambda term: term.type)
def test_every_divergence_equals_the_reference(kernel_device, term):
    heads, labels, scale = setup(kernel_device, 9, 300, torch.bfloat16)
    outcome = fused(heads, [term], labels, scale, 300)
    check(outcome, heads, [term], labels, scale, 300, torch.bfloat16)


@pytest.mark.parametrize("vocab", [256, 257, 511])
def test_one_tile_and_one_more_column(kernel_device, vocab):
    heads, labels, scale = setup(kernel_device, 5, vocab, torch.bfloat16)
    check(fused(heads, [KL], labels, scale, vocab), heads, [KL], labels, scale, vocab, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.heavy_gpu
@pytest.mark.parametrize("rows, vocab", [(2048, 128256), (1000, 151936), (6000, 32000)])
def test_full_vocabulary_equals_the_reference(device, rows, vocab):
    heads, labels, scale = setup(device, rows, vocab, torch.bfloat16, hidden=(512, 768), ignored=range(0, rows, 3))
    outcome = fused(heads, MIXED, labels, scale, vocab)
    objective = make_objective(MIXED)
    x, w, xt, wt = (t.double() for t in heads)
    exact = reference_linear_divergence(
        Head(x, w),
        Head(xt, wt),
        RowBatch(labels, scale.double(), None),
        objective,
        RequiredGrads(True, True),
        vocab=vocab,
        dtype=torch.float64,
        workspace=8 << 30,
    )
    assert relative_error(outcome.loss, exact.loss) < 3e-4
    assert relative_error(outcome.hidden, exact.hidden) < 3e-3
    assert relative_error(outcome.weight, exact.weight) < 3.5e-3


@pytest.mark.slow
@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device):
    rows, vocab = 8192, 300_000  # the buffer alone has 1.3e9 elements, chunk offsets in bytes pass 2^31
    heads, labels, scale = setup(device, rows, vocab, torch.bfloat16, hidden=(256, 256))
    outcome = fused(heads, [KL], labels, scale, vocab, workspace=8 << 30)
    last = [heads[0][-64:], heads[1], heads[2][-64:], heads[3]]
    exact = dense(last, [KL], None, scale[-64:].double(), vocab, torch.float64)
    assert relative_error(outcome.loss[-64:], exact[0]) < 3e-4
    assert relative_error(outcome.hidden[-64:], exact[1]) < 3e-3


@pytest.mark.parametrize("descriptors", [True, False], ids=["persistent", "tiles"])
def test_bias_scale_soft_cap_and_smoothing(kernel_device, descriptors):
    heads, labels, scale = setup(kernel_device, 8, 300, torch.bfloat16)
    biases = tuple(torch.randn(300, device=kernel_device).bfloat16() for _ in range(2))
    hard = {"label_smoothing": 0.1, "z_loss": 1e-3}
    outcome = fused(
        heads,
        MIXED,
        labels,
        scale,
        300,
        biases=biases,
        descriptors=descriptors,
        student_logit_scale=0.6,
        student_softcap=8.0,
        **hard,
    )
    check(outcome, heads, MIXED, labels, scale, 300, torch.bfloat16, biases=biases, cap=8.0, logit_scale=0.6, **hard)


@pytest.mark.parametrize("path", ["fused", "reference"])
def test_minus_infinity_in_a_bias_removes_a_token(kernel_device, path):
    heads, _, scale = setup(kernel_device, 4, 300, torch.bfloat16)
    biases = [torch.zeros(300, dtype=torch.bfloat16, device=kernel_device) for _ in range(2)]
    for bias in biases:
        bias[:256] = -math.inf  # a whole tile
    x, w, xt, wt = heads
    student, teacher, objective = Head(x, w, biases[0]), Head(xt, wt, biases[1]), make_objective([KL])
    run = fused_linear_divergence if path == "fused" else reference_linear_divergence
    arguments = (RowBatch(None, scale, None), objective, RequiredGrads(True, True))
    outcome = run(student, teacher, *arguments, vocab=300, dtype=x.dtype)
    few = run(Head(x, w[256:]), Head(xt, wt[256:]), *arguments, vocab=44, dtype=x.dtype)
    assert relative_error(outcome.loss, few.loss) < 1e-5
    assert relative_error(outcome.weight[256:], few.weight) < 1e-5 and (outcome.weight[:256] == 0).all()


@pytest.mark.parametrize("path", ["fused", "reference"])
def test_padded_vocabulary_gets_no_probability_and_no_gradient(kernel_device, path):
    heads, labels, scale = setup(kernel_device, 6, 300, torch.bfloat16)
    labels = labels % 280
    run = fused_linear_divergence if path == "fused" else reference_linear_divergence
    arguments = (RowBatch(labels, scale, None), make_objective(MIXED), RequiredGrads(True, True))
    x, w, xt, wt = heads
    cut = run(Head(x, w), Head(xt, wt), *arguments, vocab=280, dtype=x.dtype)
    bare = run(Head(x, w[:280]), Head(xt, wt[:280]), *arguments, vocab=280, dtype=x.dtype)
    assert torch.equal(cut.loss, bare.loss) and torch.equal(cut.hidden, bare.hidden)
    assert torch.equal(cut.weight[:280], bare.weight) and (cut.weight[280:] == 0).all()
    assert cut.weight.shape == w.shape


@pytest.mark.parametrize("path", ["fused", "reference"])
def test_valid_rows_give_the_same_as_ignored_labels(kernel_device, path):
    heads, labels, scale = setup(kernel_device, 20, 300, torch.bfloat16, ignored=(0, 5, 6, 19))
    rows = (labels != -100).nonzero().squeeze(-1)
    run = fused_linear_divergence if path == "fused" else reference_linear_divergence
    x, w, xt, wt = heads
    objective, wanted = make_objective(MIXED), RequiredGrads(True, True, stats=True)
    every, some = (
        run(Head(x, w), Head(xt, wt), RowBatch(labels, scale, r), objective, wanted, vocab=300, dtype=x.dtype)
        for r in (None, rows)
    )
    assert relative_error(some.loss, every.loss) < 1e-6
    check(some, heads, MIXED, labels, scale, 300, torch.bfloat16)
    assert (some.hidden[labels == -100] == 0).all()
    for one, other in zip(some.stats, every.stats, strict=True):
        assert relative_error(one, other) < 1e-6
    nothing = run(
        Head(x, w), Head(xt, wt), RowBatch(labels, scale * 0, rows[:0]), objective, wanted, vocab=300, dtype=x.dtype
    )
    assert (nothing.loss == 0).all() and (nothing.hidden == 0).all() and (nothing.weight == 0).all()


@pytest.mark.parametrize("path", ["fused", "reference"])
def test_lora_on_the_head_equals_merged_weights(kernel_device, path):
    heads, labels, scale = setup(kernel_device, 10, 300, torch.bfloat16)
    a = (torch.randn(4, 32, device=kernel_device) / 6).bfloat16()
    b = torch.randn(300, 4, device=kernel_device).bfloat16()
    x, w, xt, wt = heads

    def full(dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, a, b)]
        z = leaves[0] @ w.to(dtype).T + 0.5 * (leaves[0] @ leaves[1].T) @ leaves[2].T
        loss = dense_rows(z, xt.to(dtype) @ wt.to(dtype).T, MIXED, labels) * scale
        return loss.detach(), *torch.autograd.grad(loss.sum(), leaves)

    run = fused_linear_divergence if path == "fused" else reference_linear_divergence
    outcome = run(
        Head(x, w, None, a, b, 0.5),
        Head(xt, wt),
        RowBatch(labels, scale, None),
        make_objective(MIXED),
        RequiredGrads(hidden=True, lora_a=True, lora_b=True),
        vocab=300,
        dtype=x.dtype,
    )
    assert outcome.weight is None
    ours = (outcome.loss, outcome.hidden, outcome.lora_a, outcome.lora_b)
    for name, mine, eager, exact in zip(
        ("loss", "dx", "dA", "dB"), ours, full(x.dtype), full(torch.float64), strict=True
    ):
        assert_as_good_as_torch(mine, eager, exact, torch.bfloat16, name)
        if name in ("loss", "dx"):  # A and B see hidden states and gradients that were rounded once more
            assert_as_promised(name, mine, exact)


@pytest.mark.full
@pytest.mark.parametrize("relative", [True, False])
def test_logits_kept_in_bf16_would_be_noticed(kernel_device, fault, relative):
    """A tolerance of 1.5 times eager's error would allow errors ten times ours."""
    heads, labels, scale = setup(kernel_device, 70, 600, torch.bfloat16, ignored=(3, 69))
    check(fused(heads, MIXED, labels, scale, 600), heads, MIXED, labels, scale, 600, torch.bfloat16)
    inner = fused_path.project

    def project(head, hidden, out, *rest, **named):
        inner(head, hidden, out, *rest, **named)
        shift = 0.0 if relative else out.shift.repeat_interleave(TILE, 1)[:, : out.values.shape[1]]
        out.values.copy_((out.values + shift).bfloat16() - shift)

    fault.setattr(fused_path, "project", project)
    with pytest.raises(AssertionError, match="exceeds"):
        check(fused(heads, MIXED, labels, scale, 600), heads, MIXED, labels, scale, 600, torch.bfloat16)


def test_one_wrong_row_of_8192_would_be_noticed():
    exact = torch.randn(8192, 64, dtype=torch.float64)
    ours = exact.clone()
    assert_as_promised("dx", ours.bfloat16(), exact)
    ours[4000] *= 0.9
    with pytest.raises(AssertionError, match="worst row"):
        assert_as_promised("dx", ours.bfloat16(), exact)


@pytest.mark.full
def test_several_groups_of_chunks_and_summing_in_fp32(kernel_device, limit):
    from distill_kernels.losses import plan as planning

    limit.setattr(planning, "ROW_MULTIPLE", 16)
    heads, labels, scale = setup(kernel_device, 90, 64, torch.bfloat16, hidden=(16, 16))
    one = fused(heads, [KL], labels, scale, 64)
    many = fused(heads, [KL], labels, scale, 64, workspace=3 * 16 * 64 * 2)
    assert relative_error(many.loss, one.loss) < 1e-6 and relative_error(many.hidden, one.hidden) < 1e-5
    check(many, heads, [KL], labels, scale, 64, torch.bfloat16)
    limit.setattr(planning, "MAX_16_BIT_GROUPS", 0)
    limit.setattr(planning, "CHUNK_ROWS", 16)
    wide = fused(heads, [KL], labels, scale, 64)
    exact = dense(heads, [KL], None, scale.double(), 64, torch.float64)[2]
    assert relative_error(wide.weight, exact) <= relative_error(many.weight, exact)


def test_weight_gradient_accumulation_rounds_once(kernel_device):
    shape = {"dtype": torch.bfloat16, "device": kernel_device}
    c, a, b = torch.randn(130, 264, **shape), torch.randn(70, 136, **shape)[:, :130], torch.randn(70, 264, **shape)
    exact = c.double() + a.double().T @ b.double()
    ours = relative_error(add_transposed_matmul_(c.clone(), a, b), exact)
    assert ours <= relative_error(exact.bfloat16(), exact) * 1.01
    odd = torch.randn(130, 7, **shape)  # no descriptor: the slower way, same result but for a rounding
    exact = odd.double() + a.double().T @ b[:, :7].double()
    assert relative_error(add_transposed_matmul_(odd.clone(), a, b[:, :7]), exact) < 4e-3


def test_every_element_is_written_and_results_repeat_bitwise(kernel_device, monkeypatch):
    heads, labels, scale = setup(kernel_device, 70, 300, torch.bfloat16, ignored=(4,))
    plain = fused(heads, MIXED, labels, scale, 300, wanted=RequiredGrads(True, True, stats=True))
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
    again = fused(heads, MIXED, labels, scale, 300, wanted=RequiredGrads(True, True, stats=True))
    for one, other in ((plain.loss, again.loss), (plain.hidden, again.hidden), (plain.weight, again.weight)):
        assert torch.equal(one, other)
    for one, other in zip(plain.stats, again.stats, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("vocab, descriptors", [(600, True), (70, False)])
def test_padding_columns_hold_finite_numbers_for_cpu_gemms(monkeypatch, vocab, descriptors):
    """Some CPUs' bf16 products read on beyond a row's last column and multiply by 0: that must not be NaN."""
    pytest.importorskip("triton")
    heads, labels, scale = setup(torch.device("cpu"), 20, vocab, torch.bfloat16)
    low = torch.randn(3, 32).bfloat16(), torch.randn(vocab, 3).bfloat16()
    multiply, empty, seen = torch.mm, torch.empty, []

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        made.view(torch.uint8).fill_(255)  # NaN in fp16, and in bf16, as which the same memory is read later
        return made

    def mm(a, b, **kwargs):
        for matrix in (a, b):
            if matrix.dtype == torch.bfloat16:
                wide = matrix if matrix.stride(-1) == 1 else matrix.t()
                whole = wide.as_strided((wide.shape[0], wide.stride(0)), wide.stride())
                seen.append(wide.stride(0) > wide.shape[1])
                assert whole.isfinite().all(), (matrix.shape, matrix.stride())
        return multiply(a, b, **kwargs)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "mm", mm)
    student, teacher = Head(*heads[:2], None, *low), Head(*heads[2:])
    wanted, batch = RequiredGrads(True, True, lora_a=True, lora_b=True), RowBatch(labels, scale, None)
    with interpreted():
        fused_linear_divergence(
            student,
            teacher,
            batch,
            make_objective(MIXED),
            wanted,
            vocab=vocab,
            dtype=torch.bfloat16,
            descriptors=descriptors,
        )
    assert any(seen), "no operand with room beyond its rows was seen"


def test_strided_inputs_give_the_same(kernel_device):
    heads, labels, scale = setup(kernel_device, 12, 300, torch.bfloat16)
    strided = [torch.stack([t, t], 1).flatten(1)[:, : t.shape[1]].clone() for t in heads]
    views = [torch.cat([t, t], 1)[:, : t.shape[1]] for t in strided]
    transposed = [t.t().contiguous().t() for t in strided]
    plain = fused(strided, [KL], labels, scale, 300)
    for inputs in (views, transposed):
        assert not inputs[0].is_contiguous()
        outcome = fused(inputs, [KL], labels, scale, 300)
        assert relative_error(outcome.loss, plain.loss) < 1e-3
        assert relative_error(outcome.weight, plain.weight) < 4e-3
    assert fits_fused_projection(Head(views[0], views[1]), views[0])
    assert not fits_fused_projection(Head(*transposed[:2]), transposed[0])


PLANS = [
    (rows, vocab, hidden, mib)
    for rows in (1, 127, 513, 2048, 8192, 9000, 65536)
    for vocab in (32000, 262144)
    for hidden in (576, 4096)
    for mib in (None, 64, 256)
]


@pytest.mark.parametrize("models", [1, 2])
@pytest.mark.parametrize("rows, vocab, hidden, mib", PLANS)
def test_plans_cover_all_rows_within_their_buffer(rows, vocab, hidden, mib, models):
    plan = plan_chunks(
        rows,
        vocab,
        logit_bytes=2,
        models=models,
        weight_bytes=2 * vocab * hidden,
        memory_bytes=80 << 30,
        workspace=None if mib is None else mib << 20,
    )
    assert sum(map(sum, plan.groups)) == rows
    for index, group in enumerate(plan.groups):
        used = 0
        for size in group:
            assert size > 0
            beside = plan.extra_rows if index == 0 and plan.extra_rows else 0
            assert used + (size if beside or models == 1 else 2 * size) <= plan.buffer_rows
            assert not beside or size <= beside
            used += size
    assert plan.accumulate_fp32 == (mib is None and len(plan.groups) > 8)
    if mib is not None:
        assert plan.buffer_rows * vocab * 2 <= max(mib << 20, 128 * models * vocab * 2)


def test_the_plan_of_the_main_shape():
    plan = plan_chunks(8192, 128256, logit_bytes=2, models=2, weight_bytes=2 * 128256 * 2048, memory_bytes=140 << 30)
    assert [sum(group) for group in plan.groups] == [4096, 4096] and not plan.accumulate_fp32
    assert plan_chunks(0, 8, logit_bytes=2, models=2, weight_bytes=1, memory_bytes=1 << 30).groups == ()
