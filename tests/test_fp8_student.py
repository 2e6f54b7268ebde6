"""A student's products in fp8: kernels against their references, gradients against the formula in fp64, training."""

import pytest
import torch
from distill_kernels.matmul import fp8_train
from distill_kernels.matmul.fp8_train import fp8_linears
from helpers import relative_error
from test_fp8 import _interpreter_rounds_to_fp8  # noqa: F401

WIDTHS = {"plain": (48, 16, 32), "swiglu": (80, 80), "swiglu_backward": (80, 80, 80)}


def draw(*shape, device, dtype=torch.bfloat16):
    """Rows and columns of very different sizes."""
    x = torch.randn(*shape, device=device) * 10 ** (2 * torch.randn(shape[0], 1, device=device))
    return (x * 10 ** torch.randn(shape[1], device=device)).to(dtype)


def same_bytes(ours, theirs, least=0.99):
    """Equal but for few numbers on the edge between two."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert (ours.view(torch.uint8) == theirs.view(torch.uint8)).double().mean() >= least


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind, with_factor", [("plain", True), ("plain", False), ("swiglu", False), ("swiglu_backward", True)]
)
def test_rows_are_quantised_as_the_reference_does(kernel_device, kind, with_factor, dtype):
    sources = [draw(9, width, device=kernel_device, dtype=dtype) for width in WIDTHS[kind]]
    sources[0][3] = 0
    sources[-1][3] = 0
    values = fp8_train.reference_values(sources, kind)
    factor = 2.0 ** torch.randint(-9, 9, (values.shape[1],), device=kernel_device) if with_factor else None
    x8, scale = fp8_train.quantize(sources, kind, factor)
    expected, expected_scale = fp8_train.reference_quantize(values, factor)
    assert torch.equal(scale, expected_scale) and torch.equal(scale.log2(), scale.log2().round())
    same_bytes(x8, expected)
    back = x8.double() * scale
    exact = values.double() * (1 if factor is None else factor)
    assert ((back - exact).abs() <= exact.abs() / 16 * (1 + 1e-6) + scale * 2.0**-10).all()
    assert scale[3] == 1 or kind == "plain"


@pytest.mark.parametrize("rows", [1, 16, 150])
def test_what_the_backward_transposes(kernel_device, rows):
    x8, c = fp8_train.quantize([draw(rows, 80, device=kernel_device)])
    padded = fp8_train.transpose_bytes(x8)
    assert padded.shape == (80, -(-rows // 16) * 16)
    assert torch.equal(padded.view(torch.uint8)[:, :rows], x8.view(torch.uint8).t())
    assert not padded.view(torch.uint8)[:, rows:].any()

    weights = [draw(size, 64, device=kernel_device) for size in (32, 16)]
    w8, sw = fp8_train.quantize([torch.cat(weights)])
    assert torch.equal(fp8_train.transpose_weights(weights, sw.view(-1)).view(torch.uint8), w8.view(torch.uint8).t())

    token, sw = (
        c * 2.0 ** torch.randint(-3, 3, c.shape, device=c.device),
        2.0 ** torch.randint(-9, 9, (80,), device=c.device),
    )
    t8, d = fp8_train.by_columns(x8, token, sw)
    expected, expected_d = fp8_train.reference_by_columns(x8, token, sw)
    assert torch.equal(d, expected_d)
    assert torch.equal(t8.view(torch.uint8)[:, :rows], expected.view(torch.uint8)), "powers of two round nothing again"
    assert not t8.view(torch.uint8)[:, rows:].any()


def test_gradients_are_those_of_the_formula(device):
    """With x, w and dy that e4m3 holds, all that is left is the products."""
    torch.manual_seed(0)
    x, *weights = (torch.randint(-8, 9, shape, device=device).bfloat16().requires_grad_() for shape in ((33, 64), (48, 64), (16, 64)))  # fmt: skip
    upstream = [torch.randint(-8, 9, (33, size), device=device).bfloat16() for size in (48, 16)]
    made = fp8_linears(x, *weights)
    gradients = torch.autograd.grad(made, [x, *weights], upstream)
    exact = [x.double() @ w.double().t() for w in weights]
    for y, right in zip(made, exact, strict=True):
        assert y.dtype == torch.bfloat16 and relative_error(y, right) < 3e-3
    for gradient, right in zip(
        gradients, torch.autograd.grad(exact, [x, *weights], [u.double() for u in upstream]), strict=True
    ):
        assert relative_error(gradient, right) < 3e-3
