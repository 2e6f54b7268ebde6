"""KL divergence over probabilities against fp64 and torch.nn.functional.kl_div."""

import pytest
import torch
from distill_kernels.extras.probability_kl import kl_probabilities, reference_kl_probabilities
from grids import pairwise
from helpers import realistic_logits
from layer_checks import DTYPES, check_compiles, check_layer, outputs_and_gradients

REDUCTIONS = ["none", "sum", "mean", "batchmean"]


def make(device, rows, columns, dtype, log_target):
    student, teacher = realistic_logits(rows, columns)
    target = teacher.log_softmax(-1) if log_target else teacher.softmax(-1)
    return student.log_softmax(-1).to(dtype).to(device), target.to(dtype).to(device)


def both(reduction, log_target):
    def theirs(x, t):
        return torch.nn.functional.kl_div(x, t, reduction=reduction, log_target=log_target)

    return lambda x, t: kl_probabilities(x, t, reduction, log_target), theirs


@pytest.mark.plain(
    "torch.float32-False-none-1-1",
    "torch.float32-True-batchmean-5-2049",
    "torch.bfloat16-True-sum-3-7",
    "torch.float16-False-mean-5-2049",
)
@pytest.mark.parametrize(
    *pairwise(
        {
            "dtype": DTYPES,
            "log_target": [False, True],
            "reduction": REDUCTIONS,
            "rows, columns": [(1, 1), (3, 7), (5, 2049)],
        }
    )
)
def test_values_and_gradients_equal_torchs(kernel_device, rows, columns, reduction, log_target, dtype):
    ours, theirs = both(reduction, log_target)
    # the reference sums in fp32, as the kernel does: a tighter yardstick than torch's bf16 sums
    check_layer(
        ours,
        theirs,
        make(kernel_device, rows, columns, dtype, log_target),
        dtype,
        eager=lambda x, t: reference_kl_probabilities(x, t, reduction, log_target),
        differentiate=(True, False),
    )


@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("wanted", [(True, True), (False, True)])
def test_gradient_of_the_target(kernel_device, wanted, log_target):
    inputs = make(kernel_device, 4, 50, torch.float32, log_target)
    check_layer(*both("sum", log_target), inputs, torch.float32, differentiate=wanted)
    check_layer(*both("none", log_target), inputs, torch.float32, differentiate=wanted)


def test_zero_targets_add_nothing(kernel_device):
    x, target = make(kernel_device, 4, 50, torch.float32, False)
    target[:, 10:40] = 0
    check_layer(*both("sum", False), (x, target), torch.float32, differentiate=(True, False))
    x[:, 20:30] = float("-inf")  # 0 log 0: still nothing
    assert torch.isfinite(kl_probabilities(x, target, "sum"))
    x[0, 0] = float("-inf")  # mass where the input has none
    assert kl_probabilities(x, target, "sum") == float("inf")


def test_strides_and_mixed_dtypes(kernel_device):
    x, target = make(kernel_device, 6, 40, torch.float32, False)
    check_layer(*both("batchmean", False), (x.t(), target.t()), torch.float32, differentiate=(True, True))
    check_layer(*both("none", False), (x[:, 3:20], target[:, 3:20]), torch.float32, differentiate=(True, True))
    ours, _ = both("sum", False)
    check_layer(
        ours,
        lambda x, t: reference_kl_probabilities(x, t, "sum"),
        (x, target.bfloat16()),
        torch.bfloat16,
        differentiate=(True, True),
    )


def test_many_programs_sum_in_one_order(kernel_device):
    inputs = make(kernel_device, 37, 3001, torch.float32, False)
    check_layer(*both("mean", False), inputs, torch.float32, differentiate=(True, False))
    first, second = (outputs_and_gradients(both("mean", False)[0], inputs, (True, False)) for _ in range(2))
    assert torch.equal(first[0][0], second[0][0])


def test_empty_equals_torch(kernel_device):
    x = torch.ones(0, 4, device=kernel_device)
    for reduction in ("none", "sum", "mean"):
        ours, theirs = both(reduction, False)
        torch.testing.assert_close(ours(x, x), theirs(x, x), equal_nan=True)


def test_op_passes_opcheck_and_compiles(kernel_device):
    x, target = make(kernel_device, 3, 100, torch.float32, True)
    for reduction in ("sum", "none"):
        torch.library.opcheck(
            torch.ops.distill.kl_probabilities_forward.default, (x.requires_grad_(), target, reduction, True)
        )
        check_compiles(both(reduction, True)[0], (x, target), (True, True))


def test_second_backward_raises(kernel_device):
    x, target = make(kernel_device, 2, 8, torch.float32, False)
    loss = kl_probabilities(x.requires_grad_(), target, "sum")
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda x: kl_probabilities(x, x, "average"), "reduction: expected one of .* got 'average'"),
        (lambda x: kl_probabilities(x, x[:1]), r"target: expected input's shape \(2, 7\), got \(1, 7\)"),
        (lambda x: kl_probabilities(x.double(), x), "input: expected dtype .* got torch.float64"),
    ],
)
def test_mistakes_are_named(kernel_device, call, match):
    with pytest.raises(ValueError, match=match):
        call(torch.ones(2, 7, device=kernel_device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_shapes_of_real_models_agree(device, reduction, log_target, dtype):
    ours, theirs = both(reduction, log_target)
    inputs = make(device, 200, 32_000, dtype, log_target)
    check_layer(ours, theirs, inputs, dtype, differentiate=(True, False))
