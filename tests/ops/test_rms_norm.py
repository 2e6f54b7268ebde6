"""RMSNorm and residual add + RMSNorm against fp64, transformers' modules, and their own reruns."""

import pytest
import torch
from distill_kernels.layers import rms_norm as module
from distill_kernels.layers.rms_norm import (
    RMSNorm,
    add_rms_norm,
    reference_add_rms_norm,
    reference_rms_norm,
    rms_norm,
    rms_norm_and_input,
)
from distill_kernels.layers.row_layout import RowConfig
from grids import pairwise
from layer_checks import DTYPES, check_compiles, check_layer, draw, outputs_and_gradients


def make(device, rows, hidden, dtype, form, *, seed=0):
    x = draw(rows, hidden, dtype=dtype, device=device, seed=seed, scale=2.0)
    weight = draw(hidden, dtype=dtype, device=device, seed=seed + 1) * 0.3 + (0.0 if form == "gemma" else 1.0)
    return x, weight


@pytest.mark.plain(
    "torch.float32-llama-1-1",
    "torch.float32-llama-2-4096",
    "torch.float32-gemma-9-130",
    "torch.bfloat16-llama-33-576",
    "torch.bfloat16-gemma-3-7",
    "torch.float16-llama-5-64",
    "torch.float16-gemma-4-1025",
)
@pytest.mark.parametrize(
    *pairwise(
        {
            "dtype": DTYPES,
            "form": ["llama", "gemma"],
            "rows, hidden": [(1, 1), (3, 7), (5, 64), (9, 130), (33, 576), (4, 1025), (2, 4096)],
        }
    )
)
def test_rms_norm_equals_its_reference(kernel_device, rows, hidden, form, dtype):
    inputs = make(kernel_device, rows, hidden, dtype, form)
    check_layer(
        lambda x, w: rms_norm(x, w, 1e-6, form), lambda x, w: reference_rms_norm(x, w, 1e-6, form), inputs, dtype
    )


@pytest.mark.plain("llama-torch.float32", "llama-torch.float16", "gemma-torch.float16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["llama", "gemma"])
def test_add_rms_norm_equals_its_reference(kernel_device, form, dtype):
    x, weight = make(kernel_device, 19, 200, dtype, form)
    residual = draw(19, 200, dtype=dtype, device=kernel_device, seed=5)
    check_layer(
        lambda *a: add_rms_norm(*a, 1e-5, form),
        lambda *a: reference_add_rms_norm(*a, 1e-5, form),
        (x, residual, weight),
        dtype,
    )


@pytest.mark.parametrize("used", [0, 1])
def test_add_rms_norm_with_one_output_used(kernel_device, used):
    x, weight = make(kernel_device, 6, 40, torch.float32, "llama")
    residual = draw(6, 40, dtype=torch.float32, device=kernel_device, seed=5)
    differentiate = (True, True, used == 0)
    check_layer(
        lambda *a: add_rms_norm(*a)[used],
        lambda *a: reference_add_rms_norm(*a)[used],
        (x, residual, weight),
        torch.float32,
        differentiate=differentiate,
    )


@pytest.mark.parametrize("form", ["llama", "gemma"])
def test_written_in_another_dtype(kernel_device, form):
    """The bits of a cast afterwards, and those of its gradients; x and residual of two dtypes."""
    x, weight = make(kernel_device, 9, 72, torch.float32, form)
    residual = draw(9, 72, dtype=torch.float32, device=kernel_device, seed=5)

    def alone(dtype):
        return lambda x, residual, w: (rms_norm(x, w, 1e-6, form, dtype).bfloat16(), residual * 2)

    def added(dtype):
        def function(x, residual, w):
            y, total = add_rms_norm(x.bfloat16(), residual, w, 1e-6, form, dtype)
            return y.bfloat16(), total

        return function

    for make_one in (alone, added):
        ours, plain = (
            outputs_and_gradients(make_one(dtype), (x, residual, weight), (True, True, True))
            for dtype in (torch.bfloat16, None)
        )
        for one, other in zip(ours[0] + ours[1], plain[0] + plain[1], strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)
    y, total = add_rms_norm(x.bfloat16().requires_grad_(), residual.requires_grad_(), weight, 1e-6, form)
    narrow, wide = torch.autograd.grad((y * total).sum(), (y.grad_fn.next_functions[0][0].variable, residual))
    assert narrow.dtype == torch.bfloat16 and torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize("used", ["both", "norm", "input"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_and_input_sum_the_gradients_of_both_outputs(kernel_device, dtype, used):
    def one(y, x):
        return {"both": y * 0.7 + x * 1.3, "norm": y, "input": x * 1.3}[used]

    trained = (True, used != "input")
    inputs = make(kernel_device, 9, 72, dtype, "llama")
    check_layer(
        lambda x, w: one(*rms_norm_and_input(x, w)),
        lambda x, w: one(reference_rms_norm(x, w), x),
        inputs,
        dtype,
        differentiate=trained,
    )


@pytest.mark.parametrize("form", ["llama", "gemma"])
def test_mixed_dtypes_promote_as_in_torch(kernel_device, form):
    x, _ = make(kernel_device, 7, 96, torch.bfloat16, form)
    _, weight = make(kernel_device, 7, 96, torch.float32, form)
    check_layer(
        lambda x, w: rms_norm(x, w, 1e-6, form),
        lambda x, w: reference_rms_norm(x, w, 1e-6, form),
        (x, weight),
        torch.bfloat16,
    )
    residual = draw(7, 96, dtype=torch.float32, device=kernel_device, seed=3)
    check_layer(
        lambda *a: add_rms_norm(*a, 1e-6, form),
        lambda *a: reference_add_rms_norm(*a, 1e-6, form),
        (x, residual, weight),
        torch.bfloat16,
    )


def test_no_weight_and_frozen_weight(kernel_device):
    x, weight = make(kernel_device, 10, 72, torch.float32, "llama")
    check_layer(rms_norm, reference_rms_norm, (x, None), torch.float32)
    check_layer(rms_norm, reference_rms_norm, (x, weight), torch.float32, differentiate=(True, False))
    check_layer(rms_norm, reference_rms_norm, (x, weight), torch.float32, differentiate=(False, True))


@pytest.mark.plain("slice", "three_dims")
@pytest.mark.parametrize("layout", ["slice", "transposed", "expanded", "three_dims"])
def test_strided_inputs_give_the_same_result(kernel_device, layout):
    base = draw(6, 4, 160, dtype=torch.float32, device=kernel_device)
    x = {
        "slice": base[..., 40:104],
        "transposed": base.transpose(0, 1),
        "expanded": base[:1].expand(6, 4, 160),
        "three_dims": base[:, :3],
    }[layout]
    weight = draw(x.shape[-1], dtype=torch.float32, device=kernel_device, seed=2)
    check_layer(rms_norm, reference_rms_norm, (x, weight), torch.float32)
    check_layer(add_rms_norm, reference_add_rms_norm, (x, x.contiguous() * 0.5, weight), torch.float32)


def test_strided_upstream_gradients_give_the_same_result(kernel_device):
    x, weight = make(kernel_device, 6, 64, torch.float32, "llama")
    check_layer(
        lambda *a: rms_norm(*a).t()[3:9], lambda *a: reference_rms_norm(*a).t()[3:9], (x, weight), torch.float32
    )


def test_large_and_empty_rows(kernel_device):
    weight = torch.ones(64, device=kernel_device)
    check_layer(
        rms_norm,
        reference_rms_norm,
        (draw(8, 64, dtype=torch.float32, device=kernel_device) * 1e4, weight),
        torch.float32,
    )
    zeros = torch.zeros(3, 64, device=kernel_device)
    torch.testing.assert_close(rms_norm(zeros, weight), zeros)
    x = torch.zeros(0, 64, device=kernel_device, requires_grad=True)
    weight.requires_grad_()
    y = rms_norm(x, weight)
    y.sum().backward()
    assert y.shape == (0, 64) and weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("form", ["llama", "gemma"])
def test_rms_norm_equals_that_of_transformers(kernel_device, form):
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs = (Gemma3RMSNorm if form == "gemma" else LlamaRMSNorm)(96, eps=1e-5).to(kernel_device, torch.bfloat16)
    theirs.weight.data += draw(96, dtype=torch.bfloat16, device=kernel_device) * 0.2
    ours = RMSNorm(96, 1e-5, form, dtype=torch.bfloat16, device=kernel_device)
    ours.load_state_dict(theirs.state_dict())
    x = draw(4, 11, 96, dtype=torch.bfloat16, device=kernel_device, scale=3.0)
    expected, actual = theirs(x), ours(x)
    assert actual.dtype == expected.dtype
    # the same casting order: no more than the odd last bit differs; the other order differs in a tenth of all values
    assert (actual != expected).float().mean() < 0.02
    torch.testing.assert_close(reference_rms_norm(x, theirs.weight, 1e-5, form), expected, rtol=0, atol=0)


def test_gradients_are_deterministic(kernel_device):
    inputs = make(kernel_device, 67, 96, torch.bfloat16, "llama")
    first, second = (outputs_and_gradients(rms_norm, inputs, (True, True)) for _ in range(2))
    for one, other in zip(first[1], second[1], strict=True):
        assert torch.equal(one, other)


def test_every_program_of_backward_takes_several_rows(kernel_device, hardware):
    hardware.setattr(module, "one_sum_rows", lambda *_: RowConfig(2, 1, programs=1, stages=1, twice=True))
    for dtype in (torch.float32, torch.bfloat16):
        check_layer(rms_norm, reference_rms_norm, make(kernel_device, 45, 33, dtype, "llama"), dtype)


@pytest.mark.full
def test_op_passes_opcheck_and_compiles_without_a_graph_break(kernel_device):
    x, weight = make(kernel_device, 5, 48, torch.float32, "llama")
    x.requires_grad_()
    weight.requires_grad_()
    torch.library.opcheck(torch.ops.distill.rms_norm_forward.default, (x, None, weight, 1e-6, "llama"))
    torch.library.opcheck(torch.ops.distill.rms_norm_forward.default, (x, x.detach() + 1, weight, 1e-6, "gemma"))
    check_compiles(rms_norm, (x, weight), (True, True))
    check_compiles(add_rms_norm, (x, x.detach() + 1, weight), (True, True, True))
    check_compiles(add_rms_norm, (x, x.detach() + 1, weight), (True, False, False))
    check_compiles(lambda x, w: rms_norm_and_input(x, w)[0], (x, weight), (True, True))


def test_traced_and_direct_paths_agree(kernel_device):
    x, weight = make(kernel_device, 5, 48, torch.float32, "llama")
    direct = outputs_and_gradients(rms_norm, (x, weight), (True, True))
    traced = outputs_and_gradients(
        lambda x, w: torch.ops.distill.rms_norm_forward(x, None, w, 1e-6, "llama")[0], (x, weight), (True, True)
    )
    for one, other in zip(direct[0] + direct[1], traced[0] + traced[1], strict=True):
        assert torch.equal(one, other)


def test_second_backward_raises(kernel_device):
    x, weight = make(kernel_device, 4, 16, torch.float32, "llama")
    y = rms_norm(x.requires_grad_(), weight).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_cpu_tensors_take_the_reference(device):
    x, weight = make(torch.device("cpu"), 4, 16, torch.float64, "llama")
    torch.testing.assert_close(rms_norm(x, weight), reference_rms_norm(x, weight), rtol=0, atol=0)


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda x: rms_norm(x, form="t5"), "form: expected 'llama' or 'gemma', got 't5'"),
        (lambda x: rms_norm(x, x.new_ones(3)), r"weight: expected shape \(8,\).*got \(3,\)"),
        (lambda x: rms_norm(x.new_ones(1, 16385)), "x: expected a last dimension of 1 to 16384"),
        (lambda x: add_rms_norm(x, x[:1]), r"residual: expected x's shape \(2, 8\), got \(1, 8\)"),
        (lambda x: rms_norm(x.double()), "x: expected dtype float32, bfloat16 or float16, got torch.float64"),
    ],
)
def test_errors_name_the_invalid_argument(kernel_device, call, match):
    with pytest.raises(ValueError, match=match):
        call(torch.ones(2, 8, device=kernel_device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "rows, hidden", [(8192, 2048), (1000, 4096), (257, 5120), (64, 8192), (33, 16384), (65537, 128)]
)
def test_kernel_equals_the_reference_on_shapes_of_real_models(device, rows, hidden, dtype):
    inputs = make(device, rows, hidden, dtype, "llama")
    check_layer(rms_norm, reference_rms_norm, inputs, dtype)


@pytest.mark.gpu
@pytest.mark.heavy_gpu
@pytest.mark.slow
def test_offsets_past_two_to_the_31(device):
    x = torch.randn(2**31 // 8192 + 3, 8192, device=device, dtype=torch.bfloat16)
    y = rms_norm(x, None)
    torch.testing.assert_close(y[-3:], reference_rms_norm(x[-3:], None))
