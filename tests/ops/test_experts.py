"""Experts of a mixture against fp64, one expert after the other in plain PyTorch."""

import pytest
import torch
from distill_kernels.layers.experts import experts, permutation, reference_experts
from helpers import assert_captures
from layer_checks import check_compiles, check_layer, draw, outputs_and_gradients, poisoned_memory

CASES = {  # tokens, choices, experts, hidden, intermediate
    "odd sizes": (37, 3, 5, 40, 24),
    "one token": (1, 2, 4, 16, 8),
    "one expert of each": (70, 1, 7, 32, 72),
    "more experts than tokens": (5, 2, 70, 16, 16),
}
FORMS = {
    "concatenated": {},
    "gelu": {"activation": "gelu"},
    "gelu_tanh, transposed": {"activation": "gelu_tanh", "transposed": True},
    "gpt-oss": {
        "activation": "clamped_silu",
        "interleaved": True,
        "transposed": True,
        "alpha": 1.702,
        "limit": 1.5,
        "bias": True,
    },
    "interleaved": {"interleaved": True},
    "biases": {"bias": True},
}
DTYPES = [torch.float32, torch.bfloat16]


def make(device, case, form, dtype):
    """Return the tensors of a call, and a function of them and one of the reference."""
    tokens, k, count, hidden, inner = CASES[case]
    settings = dict(FORMS[form])
    has_bias = settings.pop("bias", False)
    transposed = settings.get("transposed", False)
    first = (count, hidden, 2 * inner) if transposed else (count, 2 * inner, hidden)
    second = (count, inner, hidden) if transposed else (count, hidden, inner)
    generator = torch.Generator().manual_seed(2)
    # the last expert gets no token where there are others
    index = torch.rand(tokens, max(count - 1, k), generator=generator).topk(k).indices.to(device)

    def value(*shape, seed, scale=1.0):
        return draw(*shape, dtype=dtype, device=device, seed=seed, scale=scale)

    tensors = [
        value(tokens, hidden, seed=0),
        draw(tokens, k, dtype=dtype, device=device, seed=1).softmax(-1),
        value(*first, seed=3, scale=hidden**-0.5),
        value(*second, seed=4, scale=inner**-0.5),
    ]
    if has_bias:
        tensors += [value(count, 2 * inner, seed=5), value(count, hidden, seed=6)]

    def with_index(function):
        return lambda x, weights, *rest: function(x, index, weights, *rest, **settings)

    return tensors, with_index(experts), with_index(reference_experts)


@pytest.mark.plain(
    "odd sizes-biases-torch.bfloat16",
    "odd sizes-gpt-oss-torch.float32",
    "odd sizes-interleaved-torch.bfloat16",
    "odd sizes-gelu_tanh, transposed-torch.float32",
    "more experts than tokens-concatenated-torch.float32",
    "one token-concatenated-torch.bfloat16",
    "one expert of each-concatenated-torch.float32",
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case, form", [*[(c, "concatenated") for c in CASES], *[("odd sizes", f) for f in FORMS]])
def test_values_and_gradients_equal_the_reference(kernel_device, case, form, dtype):
    inputs, ours, reference = make(kernel_device, case, form, dtype)
    check_layer(ours, reference, inputs, dtype)


@pytest.mark.parametrize("form", FORMS)
def test_plain_steps_have_the_right_gradients_in_fp64(form):
    inputs, ours, reference = make("cpu", "odd sizes", form, torch.float64)
    wanted = (True,) * len(inputs)
    found = [outputs_and_gradients(function, inputs, wanted) for function in (ours, reference)]
    for actual, expected in zip(*[[*outputs, *gradients] for outputs, gradients in found], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("slots, count", [(1, 1), (256, 3), (257, 128), (1000, 65), (0, 4)])
def test_rows_are_in_the_order_of_experts_and_slots(kernel_device, slots, count):
    index = torch.randint(0, count, (slots, 1), generator=torch.Generator().manual_seed(0)).to(kernel_device)
    with poisoned_memory():
        row, slot, ends = permutation(index, count)
    flat = index.flatten()
    expected = torch.argsort(flat, stable=True)
    assert torch.equal(slot.long(), expected)
    assert torch.equal(row.long()[expected], torch.arange(slots, device=kernel_device))
    assert torch.equal(ends.long(), torch.bincount(flat, minlength=count).cumsum(0))


@pytest.mark.parametrize(
    "wanted", [(True, False, False, False), (False, True, False, True), (False, False, True, False)]
)
def test_frozen_inputs_get_no_gradient(kernel_device, wanted):
    inputs, ours, reference = make(kernel_device, "odd sizes", "concatenated", torch.float32)
    check_layer(ours, reference, inputs, torch.float32, differentiate=wanted)


def test_a_residual_is_added_before_rounding(kernel_device):
    inputs, _, _ = make(kernel_device, "odd sizes", "concatenated", torch.bfloat16)
    index = permuted_index(kernel_device)
    residual = draw(37, 40, dtype=torch.bfloat16, device=kernel_device, seed=8)

    def ours(residual, x, weights, *rest):
        return experts(x, index, weights, *rest, residual=residual)

    def reference(residual, x, weights, *rest):
        return residual + reference_experts(x, index, weights, *rest)

    check_layer(ours, reference, (residual, *inputs), torch.bfloat16)


@pytest.mark.full
def test_kept_rows_change_nothing(kernel_device):
    inputs, _, _ = make(kernel_device, "odd sizes", "concatenated", torch.float32)
    index = permuted_index(kernel_device)

    def by(keep):
        return lambda x, weights, *rest: experts(x, index, weights, *rest, keep_rows=keep)

    found = [outputs_and_gradients(by(keep), inputs, (True,) * 4) for keep in (False, True)]
    for one, other in zip(*[[*outputs, *gradients] for outputs, gradients in found], strict=True):
        assert torch.equal(one, other)


def permuted_index(device):
    return torch.rand(37, 5, generator=torch.Generator().manual_seed(9)).topk(3).indices.to(device)


@pytest.mark.full
def test_op_passes_opcheck_and_compiles(kernel_device):
    inputs, ours, _ = make(kernel_device, "odd sizes", "biases", torch.float32)
    x, weights, *rest = [tensor.requires_grad_() for tensor in inputs]
    index = permuted_index(kernel_device)
    arguments = (x, index, weights, *rest, torch.ones_like(x), "silu", False, False, 1.0, 0.0, True)
    torch.library.opcheck(torch.ops.distill.experts.default, arguments)
    check_compiles(ours, [tensor.detach() for tensor in inputs], (True,) * 6)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["concatenated", "gpt-oss"])
def test_forward_and_backward_are_captured(form):
    inputs, ours, _ = make("cuda", "odd sizes", form, torch.bfloat16)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    upstream = draw(37, 40, dtype=torch.bfloat16, device="cuda", seed=7)

    def step():
        y = ours(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]

    assert_captures(step)


def test_wrong_arguments_are_named():
    (x, weights, first, second), _, _ = make("cpu", "odd sizes", "concatenated", torch.float32)
    index = permuted_index("cpu")
    with pytest.raises(ValueError, match=r"^weights: expected the index' shape \(37, 3\), got \(37, 2\)"):
        experts(x, index, weights[:, :2], first, second)
    with pytest.raises(ValueError, match=r"^gate_up: expected shape"):
        experts(x, index, weights, first[:, :-2], second)
    with pytest.raises(ValueError, match=r"^down: expected x' dtype torch.float32, got torch.float64"):
        experts(x, index, weights, first, second.double())
    with pytest.raises(ValueError, match=r"^activation: expected one of silu, "):
        experts(x, index, weights, first, second, activation="relu")
