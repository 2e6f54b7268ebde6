"""Experts of a decoding step against the definition in fp64."""

import pytest
import torch
from distill_kernels.decoding.experts import MAX_TOKENS, decode_experts, is_decoding
from distill_kernels.layers.experts import experts, reference_experts
from helpers import assert_as_good_as_torch, relative_error
from layer_checks import check_compiles, draw, poisoned_memory
from test_experts import FORMS

SIZES = {  # tokens, choices, experts, hidden, intermediate
    "odd sizes": (7, 3, 5, 70, 38),
    "one token": (1, 2, 4, 16, 8),
    "longer than a block": (2, 2, 3, 1100, 560),
}


def make(device, case, form, dtype):
    tokens, k, count, hidden, inner = SIZES[case]
    settings = dict(FORMS[form])
    has_bias = settings.pop("bias", False)
    transposed = settings.get("transposed", False)
    first = (count, hidden, 2 * inner) if transposed else (count, 2 * inner, hidden)
    second = (count, inner, hidden) if transposed else (count, hidden, inner)
    generator = torch.Generator().manual_seed(2)
    index = torch.rand(tokens, count, generator=generator).topk(k).indices.to(device)
    tensors = [
        draw(tokens, hidden, dtype=dtype, device=device, seed=0),
        draw(tokens, k, dtype=torch.float32, device=device, seed=1).softmax(-1).to(dtype),
        draw(*first, dtype=dtype, device=device, seed=3, scale=hidden**-0.5),
        draw(*second, dtype=dtype, device=device, seed=4, scale=inner**-0.5),
    ]
    if has_bias:
        tensors.append(draw(count, 2 * inner, dtype=dtype, device=device, seed=5))
        tensors.append(draw(count, hidden, dtype=dtype, device=device, seed=6))
    return index, tensors, settings


def both(index, tensors, settings):
    """Return the definition in the tensors' dtype and in fp64."""
    found = []
    for held in (tensors, [tensor.double() for tensor in tensors]):
        x, weights, *rest = held
        found.append(reference_experts(x, index, weights, *rest, **settings))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case, form", [*[(c, "concatenated") for c in SIZES], *[("odd sizes", f) for f in FORMS]])
def test_values_equal_the_reference(kernel_device, case, form, dtype):
    index, (x, weights, *rest), settings = make(kernel_device, case, form, dtype)
    loose, exact = both(index, [x, weights, *rest], settings)
    with poisoned_memory(), torch.no_grad():
        y = decode_experts(x, index, weights, *rest, **settings)
    assert_as_good_as_torch(y, loose, exact, dtype, "y")


def test_a_residual_and_strided_rows(kernel_device):
    index, (x, weights, *rest), settings = make(kernel_device, "odd sizes", "biases", torch.float32)
    residual = draw(*x.shape, dtype=x.dtype, device=kernel_device, seed=8)
    wide = torch.cat((x, x + 1), 1)[:, : x.shape[1]]
    y = decode_experts(wide, index.t().contiguous().t(), weights, *rest, residual=residual, **settings)
    expected = both(index, [x, weights, *rest], settings)[1] + residual.double()
    assert relative_error(y.double(), expected) < 1e-6


def test_it_is_for_few_tokens_without_gradients(kernel_device):
    x = torch.ones(MAX_TOKENS, 16, device=kernel_device)
    assert not is_decoding(x)
    with torch.no_grad():
        assert is_decoding(x) and not is_decoding(torch.ones(MAX_TOKENS + 1, 16, device=kernel_device))


def test_on_a_cpu_it_is_the_experts():
    index, (x, weights, *rest), settings = make("cpu", "odd sizes", "gpt-oss", torch.float32)
    with torch.no_grad():
        assert not is_decoding(x)
        expected = experts(x, index, weights, *rest, **settings)
        assert torch.equal(decode_experts(x, index, weights, *rest, **settings), expected)


def test_op_passes_opcheck_and_compiles(kernel_device):
    index, (x, weights, *rest), settings = make(kernel_device, "odd sizes", "biases", torch.float32)
    arguments = (x, index, weights, *rest, torch.ones_like(x), "silu", False, False, 1.0, 0.0)
    torch.library.opcheck(torch.ops.distill.decode_experts.default, arguments)
    check_compiles(lambda x: decode_experts(x, index, weights, *rest, **settings), [x], [False])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("form", ["concatenated", "gpt-oss"])
def test_real_shapes(tokens, form):
    count, k, hidden, inner = (32, 4, 2880, 2880) if form == "gpt-oss" else (128, 8, 2048, 768)
    SIZES["real"] = (tokens, k, count, hidden, inner)
    index, (x, weights, *rest), settings = make("cuda", "real", form, torch.bfloat16)
    loose, exact = both(index, [x, weights, *rest], settings)
    with torch.no_grad():
        y = decode_experts(x, index, weights, *rest, **settings)
    assert_as_good_as_torch(y, loose, exact, torch.bfloat16, "y")


def test_wanted_gradients_are_refused():
    index, (x, weights, *rest), settings = make("cpu", "one token", "concatenated", torch.float32)
    with pytest.raises(ValueError, match=r"^x: expected no gradient to be asked for"):
        decode_experts(x.requires_grad_(), index, weights, *rest, **settings)
