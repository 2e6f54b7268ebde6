"""Bias + GELU against fp64 and the unfused form."""

import pytest
import torch
from distill_kernels.layers.bias_gelu import BiasGELU, bias_gelu, reference_bias_gelu
from grids import pairwise
from layer_checks import DTYPES, check_compiles, check_layer, draw, outputs_and_gradients

APPROXIMATE = ["none", "tanh"]


def unfused(approximate):
    return lambda x, bias: torch.nn.functional.gelu(x + bias, approximate=approximate)


def make(device, rows, columns, dtype):
    x = draw(rows, columns, dtype=dtype, device=device, scale=2.0)
    return x, draw(columns, dtype=dtype, device=device, seed=1)


@pytest.mark.plain(
    "torch.float32-none-1-1",
    "torch.float32-tanh-5-1025",
    "torch.bfloat16-none-130-40",
    "torch.bfloat16-tanh-3-7",
    "torch.float16-none-70-64",
)
@pytest.mark.parametrize(
    *pairwise(
        {"dtype": DTYPES, "approximate": APPROXIMATE, "rows, columns": [(1, 1), (3, 7), (70, 64), (5, 1025), (130, 40)]}
    )
)
def test_values_and_gradients_equal_the_reference(kernel_device, rows, columns, approximate, dtype):
    inputs = make(kernel_device, rows, columns, dtype)
    # the reference keeps the sum in fp32, as the kernel does: the tighter of the two yardsticks
    check_layer(
        lambda *a: bias_gelu(*a, approximate),
        unfused(approximate),
        inputs,
        dtype,
        eager=lambda *a: reference_bias_gelu(*a, approximate),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_value_has_a_small_relative_error(kernel_device, dtype):
    """Far below zero too, where 1 - erf would cancel: the error over the value itself, not over the largest."""
    x = torch.linspace(-9, 9, 4099).to(kernel_device, dtype)[None]
    y = bias_gelu(x, torch.zeros_like(x[0]))
    exact = x.double() * 0.5 * torch.special.erfc(x.double() * -(0.5**0.5))
    normal = exact.abs() > torch.finfo(dtype).tiny
    error = ((y.double() - exact) / exact).abs()[normal].max().item()
    approximation = 5e-6 if dtype == torch.float32 else 2e-5  # x^2 / 2 = 40 rounded to fp32; the shorter polynomial
    assert error <= torch.finfo(dtype).eps / 2 + approximation


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_frozen_inputs_get_no_gradient(kernel_device, wanted):
    inputs = make(kernel_device, 9, 50, torch.float32)
    check_layer(bias_gelu, unfused("none"), inputs, torch.float32, differentiate=wanted)


def test_strided_inputs_give_the_same(kernel_device):
    x, bias = make(kernel_device, 12, 96, torch.float32)
    check_layer(bias_gelu, unfused("none"), (x[:, 16:80], bias[16:80]), torch.float32)
    check_layer(bias_gelu, unfused("none"), (x.view(8, 12, 12).transpose(0, 1), bias[:12]), torch.float32)
    check_layer(lambda *a: bias_gelu(*a).t()[3:9], lambda *a: unfused("none")(*a).t()[3:9], (x, bias), torch.float32)


def test_mixed_dtypes_give_the_dtype_of_the_input(kernel_device):
    x, bias = make(kernel_device, 6, 33, torch.bfloat16)
    check_layer(bias_gelu, reference_bias_gelu, (x, bias.float()), torch.bfloat16)


def test_bias_gradient_is_deterministic(kernel_device):
    inputs = make(kernel_device, 300, 33, torch.bfloat16)
    first, second = (outputs_and_gradients(bias_gelu, inputs, (True, True)) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first[1], second[1], strict=True))


def test_inputs_without_rows_are_fine(kernel_device):
    _, (dx, dbias) = outputs_and_gradients(bias_gelu, make(kernel_device, 0, 16, torch.float32), (True, True))
    assert dx.shape == (0, 16) and not dbias.any()


@pytest.mark.full
def test_op_passes_opcheck_and_compiles(kernel_device):
    x, bias = (tensor.requires_grad_() for tensor in make(kernel_device, 5, 48, torch.float32))
    torch.library.opcheck(torch.ops.distill.bias_gelu_forward.default, (x, bias, "gelu"))
    check_compiles(bias_gelu, (x, bias), (True, True))


def test_module_equals_the_function(kernel_device):
    layer = BiasGELU(24, "tanh", device=kernel_device)
    torch.nn.init.normal_(layer.bias)
    x = draw(3, 5, 24, dtype=torch.float32, device=kernel_device)
    torch.testing.assert_close(layer(x), unfused("tanh")(x, layer.bias))
    assert list(layer.state_dict()) == ["bias"]


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda x: bias_gelu(x, x[0, :3]), r"bias: expected the shape of x's last dimension, got \(3,\)"),
        (lambda x: bias_gelu(x, x[0], "fast"), "approximate: expected 'none' or 'tanh', got 'fast'"),
        (lambda x: bias_gelu(x.double(), x[0]), "x: expected dtype .* got torch.float64"),
    ],
)
def test_mistakes_are_named(kernel_device, call, match):
    with pytest.raises(ValueError, match=match):
        call(torch.ones(2, 7, device=kernel_device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("approximate", APPROXIMATE)
@pytest.mark.parametrize("rows, columns", [(512, 4096), (2048, 16384), (4097, 3073), (100_000, 96)])
def test_shapes_of_real_models_agree(device, rows, columns, approximate, dtype):
    check_layer(lambda *a: bias_gelu(*a, approximate), unfused(approximate), make(device, rows, columns, dtype), dtype)
