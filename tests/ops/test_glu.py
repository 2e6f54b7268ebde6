"""SwiGLU and GeGLU, separate and packed, against fp64."""

import pytest
import torch
from distill_kernels.launch import tl, triton
from distill_kernels.layers.activations import activate_with_derivative
from distill_kernels.layers.glu import geglu, glu, reference_glu, swiglu
from grids import pairwise
from layer_checks import DTYPES, check_compiles, check_layer, draw, poisoned_memory

FUNCTIONS = {
    "silu": swiglu,
    "gelu": geglu,
    "gelu_tanh": lambda gate, up=None: geglu(gate, up, approximate="tanh"),
}


def reference(activation):
    return lambda gate, up=None: reference_glu(gate, up, activation)


def make(device, rows, columns, dtype):
    gate = draw(rows, columns, dtype=dtype, device=device, scale=3.0)
    return gate, draw(rows, columns, dtype=dtype, device=device, seed=1)


@pytest.mark.plain(
    "torch.float32-silu-1-1", "torch.float32-gelu-5-1025", "torch.bfloat16-gelu-3-7", "torch.float16-gelu_tanh-4-256"
)
@pytest.mark.parametrize(
    *pairwise({"dtype": DTYPES, "activation": FUNCTIONS, "rows, columns": [(1, 1), (3, 7), (4, 256), (5, 1025)]})
)
def test_separate_gate_and_up_equal_the_reference(kernel_device, rows, columns, activation, dtype):
    check_layer(FUNCTIONS[activation], reference(activation), make(kernel_device, rows, columns, dtype), dtype)


@pytest.mark.plain("torch.float32-silu-1-1", "torch.bfloat16-gelu-3-7", "torch.float16-gelu_tanh-2-1030")
@pytest.mark.parametrize(
    *pairwise({"dtype": DTYPES, "activation": FUNCTIONS, "rows, columns": [(1, 1), (3, 7), (2, 1030)]})
)
def test_packed_gate_and_up_equal_the_reference(kernel_device, rows, columns, activation, dtype):
    packed = torch.cat(make(kernel_device, rows, columns, dtype), -1)
    check_layer(FUNCTIONS[activation], reference(activation), (packed,), dtype)


def test_strided_views_give_the_same(kernel_device):
    gate, up = make(kernel_device, 12, 96, torch.float32)
    both = torch.cat((gate, up), -1)
    check_layer(swiglu, reference("silu"), (both[:, :96], both[:, 96:]), torch.float32)
    check_layer(swiglu, reference("silu"), (both[:, 4:68],), torch.float32)
    check_layer(swiglu, reference("silu"), (gate.t(), up.t()), torch.float32)
    check_layer(lambda *a: swiglu(*a).t()[2:5], lambda *a: reference("silu")(*a).t()[2:5], (gate, up), torch.float32)
    check_layer(swiglu, reference("silu"), (gate.view(3, 4, 96), up.view(3, 4, 96)), torch.float32)


def test_mixed_dtypes_and_frozen_side(kernel_device):
    gate, up = make(kernel_device, 4, 40, torch.bfloat16)
    check_layer(swiglu, reference("silu"), (gate, up.float()), torch.bfloat16)
    check_layer(swiglu, reference("silu"), (gate, up), torch.bfloat16, differentiate=(True, False))
    check_layer(swiglu, reference("silu"), (gate, up), torch.bfloat16, differentiate=(False, True))


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_extreme_gates_stay_finite(kernel_device, activation):
    gate = torch.tensor([[-1e4, -200.0, -90.0, -14.0, -6.0, -0.0, 0.0, 6.0, 14.0, 90.0, 200.0, 1e4]])
    inputs = (gate.to(kernel_device), torch.ones_like(gate).to(kernel_device))
    check_layer(FUNCTIONS[activation], reference(activation), inputs, torch.float32)


@triton.jit
def _activation_kernel(x_ptr, value_ptr, derivative_ptr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    value, derivative = activate_with_derivative(tl.load(x_ptr + offsets), ACTIVATION)
    tl.store(value_ptr + offsets, value)
    tl.store(derivative_ptr + offsets, derivative)


def test_exact_gelu_keeps_its_relative_error_in_the_tail(kernel_device):
    """torch's own 1 + erf(x) cancels in the negative tail (all digits are gone at -6); this form does not."""
    x = torch.linspace(-9, 9, 4096, device=kernel_device)
    value, derivative = torch.empty_like(x), torch.empty_like(x)
    _activation_kernel[(1,)](x, value, derivative, ACTIVATION="gelu", BLOCK=4096)
    wide = x.double()
    exact = wide * torch.special.erfc(-wide / 2**0.5) / 2
    assert ((value - exact).abs() <= 1e-5 * exact.abs()).all()
    slope = torch.special.erfc(-wide / 2**0.5) / 2 + wide * torch.exp(-wide * wide / 2) / (2 * torch.pi) ** 0.5
    assert (derivative - slope).abs().max() < 1e-6


def test_op_passes_opcheck_and_compiles(kernel_device):
    gate, up = (tensor.requires_grad_() for tensor in make(kernel_device, 5, 48, torch.float32))
    torch.library.opcheck(torch.ops.distill.glu_forward.default, (gate, up, "silu"))
    torch.library.opcheck(torch.ops.distill.glu_forward.default, (gate, None, "gelu"))
    check_compiles(swiglu, (gate, up), (True, True))
    check_compiles(geglu, (gate,), (True,))


def test_inputs_without_rows_are_fine(kernel_device):
    with poisoned_memory():
        assert swiglu(torch.ones(0, 8, device=kernel_device)).shape == (0, 4)


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda x: swiglu(x), "gate: packed gate and up need an even last dimension, got shape"),
        (lambda x: swiglu(x, x[:, :3]), r"up: expected gate's shape \(2, 7\), got \(2, 3\)"),
        (lambda x: geglu(x, x, "sigmoid"), "approximate: expected 'none' or 'tanh', got 'sigmoid'"),
        (lambda x: glu(x, x, "relu"), "activation: expected one of silu, gelu, gelu_tanh, got 'relu'"),
        (lambda x: swiglu(x.double(), x), "gate: expected dtype .* got torch.float64"),
    ],
)
def test_mistakes_are_named(kernel_device, call, match):
    with pytest.raises(ValueError, match=match):
        call(torch.ones(2, 7, device=kernel_device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("rows, columns", [(2048, 8192), (300, 11008), (33, 18943)])
def test_shapes_of_real_models_agree(device, rows, columns, activation, dtype):
    gate, up = make(device, rows, columns, dtype)
    check_layer(FUNCTIONS[activation], reference(activation), (gate, up), dtype)
    check_layer(FUNCTIONS[activation], reference(activation), (torch.cat((gate, up), -1),), dtype)


@pytest.mark.gpu
@pytest.mark.heavy_gpu
@pytest.mark.slow
def test_offsets_past_two_to_the_31(device):
    packed = torch.randn(2**31 // 16384 + 3, 16384, device=device, dtype=torch.bfloat16)
    torch.testing.assert_close(swiglu(packed)[-3:], reference("silu")(packed[-3:]))
