"""Distances of layers of two models as kernels: values and gradients against fp64, inference tensors."""

import pytest
import torch
from distill_kernels.layers.attention_relation import reference_relation_divergence, relation_divergence
from distill_kernels.layers.state_distance import reference_state_distance, state_distance
from grids import pairwise
from layer_checks import DTYPES, check_layer, draw

METRICS = ["mse", "cosine"]


def states(device, tokens, width, dtype):
    student, teacher = (draw(tokens, width, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    generator = torch.Generator().manual_seed(2)
    rows = torch.randperm(tokens, generator=generator)[: max(tokens * 2 // 3, 1)].to(device)
    return student, teacher, rows


@pytest.mark.plain(
    "torch.float32-mse-1-False-1-1",
    "torch.float32-mse-1-False-3-4097",
    "torch.float32-cosine-3-False-40-576",
    "torch.bfloat16-cosine-3-True-7-33",
    "torch.float16-mse-1-False-300-16",
)
@pytest.mark.parametrize(
    *pairwise(
        {
            "dtype": DTYPES,
            "metric": METRICS,
            "pairs": [1, 3],
            "picked": [False, True],
            "tokens, width": [(1, 1), (7, 33), (40, 576), (3, 4097), (300, 16)],
        }
    )
)
def test_distances_and_gradients(kernel_device, tokens, width, picked, pairs, metric, dtype):
    student, teacher, rows = states(kernel_device, tokens, width, dtype)
    own = [(student[rows] if picked else student) * (n + 1) for n in range(pairs)]
    others = [teacher.roll(n, 0) for n in range(pairs)]
    check_layer(
        lambda *s: state_distance(s, others, rows, metric, picked=picked),
        lambda *s: reference_state_distance(s, [t.to(s[0].dtype) for t in others], rows, metric, picked),
        own,
        dtype,
    )


@pytest.mark.parametrize("metric", METRICS)
def test_rows_that_are_not_compared_have_no_gradient(kernel_device, metric):
    student, teacher, rows = states(kernel_device, 30, 48, torch.float32)
    student.requires_grad_()
    (gradient,) = torch.autograd.grad(state_distance([student], [teacher], rows, metric).sum(), student)
    others = torch.ones(30, dtype=torch.bool, device=kernel_device)
    others[rows] = False
    assert not gradient[others].any() and gradient[rows].abs().amin(0).any()
    assert state_distance([student], [teacher], rows[:0], metric).shape == (0,)


def test_states_may_be_strided_and_norms_zero(kernel_device):
    wide, other = (draw(20, 96, dtype=torch.float32, device=kernel_device, seed=seed) for seed in (0, 1))
    rows = torch.arange(20, device=kernel_device)
    for metric in METRICS:
        check_layer(
            lambda s, metric=metric: state_distance([s], [other[:, 5:53].to(s.dtype)], rows, metric),
            lambda s, metric=metric: reference_state_distance([s], [other[:, 5:53].to(s.dtype)], rows, metric),
            (wide[:, 16:64],),
            torch.float32,
        )
    zeros = torch.zeros(20, 96, device=kernel_device, requires_grad=True)
    (gradient,) = torch.autograd.grad(state_distance([zeros], [other], rows, "cosine").sum(), zeros)
    assert gradient.isfinite().all()


def relation(device, rows, heads, length, widths, dtype):
    """Return states of both models as attention has them, views of [rows, tokens, heads x width], and documents."""
    made = [
        draw(rows, length, heads * width, dtype=dtype, device=device, seed=seed).unflatten(-1, (heads, width))
        for seed, width in enumerate(widths)
    ]
    starts = torch.zeros(rows, length, dtype=torch.int64)
    starts[:, 0] = starts[:, length // 3] = 1
    return *(states.transpose(1, 2) for states in made), starts.cumsum(-1).to(device)


@pytest.mark.plain(
    "torch.float32-False-1-1-1-(16, 16)",
    "torch.bfloat16-False-1-1-40-(200, 16)",
    "torch.bfloat16-True-2-3-17-(5, 40)",
    "torch.float16-False-2-3-65-(64, 64)",
)
@pytest.mark.parametrize(
    *pairwise(
        {
            "dtype": DTYPES,
            "packed": [False, True],
            "rows, heads": [(1, 1), (2, 3)],
            "length, widths": [(1, (16, 16)), (17, (5, 40)), (65, (64, 64)), (130, (24, 150)), (40, (200, 16))],
        }
    )
)
def test_relations_and_gradients(kernel_device, length, widths, rows, heads, packed, dtype):
    student, teacher, documents = relation(kernel_device, rows, heads, length, widths, dtype)
    documents = documents if packed else None
    check_layer(
        lambda s: relation_divergence(s, teacher, documents),
        lambda s: reference_relation_divergence(s, teacher.to(s.dtype), documents),
        (student,),
        dtype,
    )


def test_equal_relations_diverge_by_nothing(kernel_device):
    student, _, documents = relation(kernel_device, 2, 2, 70, (32, 32), torch.float32)
    student.requires_grad_()
    divergence = relation_divergence(student, student.detach(), documents)
    assert divergence.abs().max() < 1e-6
    (gradient,) = torch.autograd.grad(divergence.sum(), student)
    assert not gradient.any()


def test_teachers_may_be_inference_tensors(kernel_device):
    student, teacher, rows = states(kernel_device, 24, 48, torch.float32)
    with torch.inference_mode():
        frozen = teacher.clone()
    student.requires_grad_()
    alone = torch.autograd.grad(state_distance([student], [teacher], rows, "mse").sum(), student)[0]
    with_frozen = torch.autograd.grad(state_distance([student], [frozen], rows, "mse").sum(), student)[0]
    assert torch.equal(alone, with_frozen)
    own, other, documents = relation(kernel_device, 1, 2, 20, (16, 16), torch.float32)
    own = own.detach().requires_grad_()
    with torch.inference_mode():
        frozen = other.clone()
    both = [torch.autograd.grad(relation_divergence(own, t).sum(), own)[0] for t in (other, frozen)]
    assert torch.equal(*both)
    torch.library.opcheck(torch.ops.distill.attention_relation.default, (own.detach(), other, documents))


def test_each_call_is_differentiated_with_its_own_teacher(kernel_device):
    """Many layers have tensors of one description: what a call keeps for its backward is not another call's."""
    student, teacher, documents = relation(kernel_device, 1, 2, 20, (16, 16), torch.float32)
    own = [(student * (n + 1)).requires_grad_() for n in range(5)]
    others = [teacher * (n + 2) for n in range(5)]
    made, exact = (
        torch.autograd.grad(sum(function(s, t, documents).sum() for s, t in zip(own, others, strict=True)), own)
        for function in (relation_divergence, reference_relation_divergence)
    )
    torch.testing.assert_close(made, exact, rtol=1e-4, atol=1e-5)


def test_mistakes_are_named():
    wide, narrow, rows = torch.zeros(3, 8), torch.zeros(3, 4), torch.arange(3)
    with pytest.raises(ValueError, match=r"student: expected states \[3, 8\] of dtype torch.float32, got \[3, 4\]"):
        state_distance([narrow], [wide], rows, "mse")
    with pytest.raises(ValueError, match=r"teacher: expected states .*float32, got \[3, 8\] of torch.bfloat16"):
        state_distance([wide, wide], [wide, wide.bfloat16()], rows, "mse")
    with pytest.raises(ValueError, match=r"student: expected states \[2, 8\]"):
        state_distance([wide], [wide], rows[:2], "mse", picked=True)

    with pytest.raises(ValueError, match=r"student: expected \[rows, heads, tokens, width\] as the teacher's"):
        relation_divergence(torch.zeros(1, 2, 3, 4), torch.zeros(1, 1, 3, 4))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tokens, width", [(8192, 576), (8192, 4096), pytest.param(65_536, 5120, marks=pytest.mark.heavy_gpu)]
)
def test_real_shapes(device, tokens, width):
    student, teacher, rows = states(device, tokens, width, torch.bfloat16)
    for metric in METRICS:
        check_layer(
            lambda s, metric=metric: state_distance([s], [teacher], rows, metric),
            lambda s, metric=metric: reference_state_distance([s], [teacher.to(s.dtype)], rows, metric),
            (student,),
            torch.bfloat16,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("rows, heads, length, widths", [(8, 3, 1024, (192, 192)), (2, 8, 2048, (128, 512))])
def test_real_relations(device, rows, heads, length, widths):
    student, teacher, documents = relation(device, rows, heads, length, widths, torch.bfloat16)
    check_layer(
        lambda s: relation_divergence(s, teacher, documents),
        lambda s: reference_relation_divergence(s, teacher.to(s.dtype), documents),
        (student,),
        torch.bfloat16,
    )
