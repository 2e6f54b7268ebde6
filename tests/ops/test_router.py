"""Routing of a mixture against fp64."""

import pytest
import torch
from distill_kernels.layers.router import reference_route, route
from layer_checks import check_compiles, check_layer, draw

FORMS = {
    "normalised softmax": {},
    "plain softmax": {"normalised": False},
    "sigmoid with bias": {"score": "sigmoid", "scale": 2.5, "bias": True},
    "plain sigmoid": {"score": "sigmoid", "normalised": False},
    "softmax with bias": {"bias": True},
    "groups": {"score": "sigmoid", "scale": 2.5, "bias": True, "groups": 4, "kept_groups": 2},
    "groups by their maximum": {"normalised": False, "groups": 4, "kept_groups": 2, "by_max": True},
}


def make(device, form, count, dtype):
    settings = dict(FORMS[form])
    bias = draw(count, dtype=torch.float32, device=device, seed=3, scale=0.3) if settings.pop("bias", False) else None
    logits = draw(37, count, dtype=dtype, device=device, scale=2.0)

    def by(function, k=3):
        def dense(given):
            wide = bias.double() if bias is not None and given.dtype == torch.float64 else bias
            weights, index = function(given, k, wide, **settings)
            return torch.zeros(given.shape, dtype=weights.dtype, device=device).scatter(1, index, weights)

        return dense

    return logits, by


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form, count", [*[(form, 16) for form in FORMS], ("normalised softmax", 67)])
def test_weights_and_gradients_equal_the_reference(kernel_device, form, count, dtype):
    logits, by = make(kernel_device, form, count, dtype)
    check_layer(by(route), by(reference_route), (logits,), dtype)


@pytest.mark.parametrize("form", FORMS)
def test_plain_steps_have_the_right_gradients_in_fp64(form):
    logits, by = make("cpu", form, 16, torch.float64)
    one, other = [logits.clone().requires_grad_() for _ in range(2)]
    upstream = draw(37, 16, dtype=torch.float64, device="cpu", seed=5)
    by(route)(one).backward(upstream)
    by(reference_route)(other).backward(upstream)
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)


def test_equal_logits_choose_the_lower_index(kernel_device):
    weights, index = route(torch.zeros(3, 8, device=kernel_device), 3)
    assert index.tolist() == [[0, 1, 2]] * 3
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 3))


def test_nan_logits_name_experts_that_exist(kernel_device):
    _, index = route(torch.full((4, 5), torch.nan, device=kernel_device), 2)
    assert ((index >= 0) & (index < 5)).all()


def test_op_passes_opcheck_and_compiles(kernel_device):
    logits, by = make(kernel_device, "sigmoid with bias", 16, torch.float32)
    bias = torch.zeros(16, device=kernel_device)
    arguments = (logits.clone().requires_grad_(), 3, bias, "sigmoid", True, 2.5, 1, 1, False)
    torch.library.opcheck(torch.ops.distill.route.default, arguments)
    check_compiles(by(route), (logits,), (True,))


def test_wrong_arguments_are_named():
    logits = torch.zeros(3, 12)
    with pytest.raises(ValueError, match=r"^logits: expected \[N, E\] with 13 to 1024 experts"):
        route(logits, 13)
    with pytest.raises(ValueError, match=r"^bias: expected shape \(12,\), got \(8,\)"):
        route(logits, 2, torch.zeros(8))
    with pytest.raises(ValueError, match=r"^groups: expected a power of two of experts"):
        route(logits, 2, groups=4)
