"""Distance of hidden states of two models as a kernel: values and gradients against fp64, inference tensors."""

import pytest
import torch
from distill_kernels.layers.state_distance import reference_state_distance, state_distance
from grids import pairwise
from layer_checks import DTYPES, check_layer, draw

METRICS = ["mse", "cosine"]


def states(device, tokens, width, dtype):
    student, teacher = (draw(tokens, width, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    generator = torch.Generator().manual_seed(2)
    rows = torch.randperm(tokens, generator=generator)[: max(tokens * 2 // 3, 1)].to(device)
    return student, teacher, rows


@pytest.mark.parametrize(
    *pairwise(
        {
            "dtype": DTYPES,
            "metric": METRICS,
            "tokens, width": [(1, 1), (7, 33), (40, 576), (3, 4097), (300, 16)],
        }
    )
)
def test_distances_and_gradients(kernel_device, tokens, width, metric, dtype):
    student, teacher, rows = states(kernel_device, tokens, width, dtype)
    check_layer(
        lambda s: state_distance(s, teacher, rows, metric),
        lambda s: reference_state_distance(s, teacher.to(s.dtype), rows, metric),
        (student,),
        dtype,
    )


@pytest.mark.parametrize("metric", METRICS)
def test_rows_that_are_not_compared_have_no_gradient(kernel_device, metric):
    student, teacher, rows = states(kernel_device, 30, 48, torch.float32)
    student.requires_grad_()
    (gradient,) = torch.autograd.grad(state_distance(student, teacher, rows, metric).sum(), student)
    others = torch.ones(30, dtype=torch.bool, device=kernel_device)
    others[rows] = False
    assert not gradient[others].any() and gradient[rows].abs().amin(0).any()
    assert state_distance(student, teacher, rows[:0], metric).shape == (0,)


def test_states_may_be_strided_and_norms_zero(kernel_device):
    wide, other = (draw(20, 96, dtype=torch.float32, device=kernel_device, seed=seed) for seed in (0, 1))
    rows = torch.arange(20, device=kernel_device)
    for metric in METRICS:
        check_layer(
            lambda s, metric=metric: state_distance(s, other[:, 5:53].to(s.dtype), rows, metric),
            lambda s, metric=metric: reference_state_distance(s, other[:, 5:53].to(s.dtype), rows, metric),
            (wide[:, 16:64],),
            torch.float32,
        )
    zeros = torch.zeros(20, 96, device=kernel_device, requires_grad=True)
    (gradient,) = torch.autograd.grad(state_distance(zeros, other, rows, "cosine").sum(), zeros)
    assert gradient.isfinite().all()


def test_teachers_may_be_inference_tensors(kernel_device):
    student, teacher, rows = states(kernel_device, 24, 48, torch.float32)
    with torch.inference_mode():
        frozen = teacher.clone()
    student.requires_grad_()
    alone = torch.autograd.grad(state_distance(student, teacher, rows, "mse").sum(), student)[0]
    with_frozen = torch.autograd.grad(state_distance(student, frozen, rows, "mse").sum(), student)[0]
    assert torch.equal(alone, with_frozen)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"student: expected states as the teacher's \[3, 8\], got \[3, 4\]"):
        state_distance(torch.zeros(3, 4), torch.zeros(3, 8), torch.arange(3), "mse")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, width", [(8192, 576), (8192, 4096), (65_536, 5120)])
def test_real_shapes(device, tokens, width):
    student, teacher, rows = states(device, tokens, width, torch.bfloat16)
    for metric in METRICS:
        check_layer(
            lambda s, metric=metric: state_distance(s, teacher, rows, metric),
            lambda s, metric=metric: reference_state_distance(s, teacher.to(s.dtype), rows, metric),
            (student,),
            torch.bfloat16,
        )
