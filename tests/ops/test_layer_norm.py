"""LayerNorm against fp64 and torch.nn.functional.layer_norm."""

import pytest
import torch
from distill_kernels.layers import layer_norm as module
from distill_kernels.layers.layer_norm import LayerNorm, layer_norm, reference_layer_norm
from distill_kernels.layers.row_layout import RowConfig
from grids import pairwise
from layer_checks import DTYPES, check_compiles, check_layer, draw, outputs_and_gradients


def torch_layer_norm(x, weight=None, bias=None, eps=1e-5):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def make(device, rows, hidden, dtype, *, mean=0.0):
    x = draw(rows, hidden, dtype=dtype, device=device, scale=2.0) + mean
    weight = draw(hidden, dtype=dtype, device=device, seed=1) * 0.3 + 1
    return x, weight, draw(hidden, dtype=dtype, device=device, seed=2)


@pytest.mark.plain(
    "1-3-torch.float32",
    "3-7-torch.bfloat16",
    "5-64-torch.float16",
    "9-130-torch.float32",
    "33-576-torch.bfloat16",
    "4-1025-torch.float16",
    "2-4096-torch.float32",
)
@pytest.mark.parametrize(
    *pairwise({"rows, hidden": [(1, 3), (3, 7), (5, 64), (9, 130), (33, 576), (4, 1025), (2, 4096)], "dtype": DTYPES})
)
def test_values_and_gradients_equal_the_reference(kernel_device, rows, hidden, dtype):
    check_layer(layer_norm, torch_layer_norm, make(kernel_device, rows, hidden, dtype), dtype)


@pytest.mark.parametrize("has_weight, has_bias", [(False, False), (True, False), (False, True)])
def test_parts_of_the_affine_map(kernel_device, has_weight, has_bias):
    x, weight, bias = make(kernel_device, 11, 50, torch.float32)
    inputs = (x, weight if has_weight else None, bias if has_bias else None)
    check_layer(layer_norm, torch_layer_norm, inputs, torch.float32)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_frozen_parameters_get_no_gradient(kernel_device, wanted):
    inputs = make(kernel_device, 11, 50, torch.bfloat16)
    check_layer(layer_norm, torch_layer_norm, inputs, torch.bfloat16, differentiate=wanted)


def test_a_large_mean_does_not_cancel(kernel_device):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check_layer(layer_norm, torch_layer_norm, make(kernel_device, 7, 300, dtype, mean=30.0), dtype)


@pytest.mark.parametrize("layout", ["slice", "transposed", "upstream"])
def test_strided_inputs_give_the_same(kernel_device, layout):
    base = draw(6, 4, 160, dtype=torch.float32, device=kernel_device)
    x = {"slice": base[..., 40:104], "transposed": base.transpose(0, 1), "upstream": base}[layout]
    _, weight, bias = make(kernel_device, 1, x.shape[-1], torch.float32)
    part = (lambda y: y.transpose(0, 2)[3:9]) if layout == "upstream" else (lambda y: y)
    check_layer(
        lambda *a: part(layer_norm(*a)), lambda *a: part(torch_layer_norm(*a)), (x, weight, bias), torch.float32
    )


def test_reference_is_torchs(device):
    inputs = make(device, 9, 33, torch.float64)
    torch.testing.assert_close(reference_layer_norm(*inputs), torch_layer_norm(*inputs), rtol=1e-12, atol=1e-12)


def test_several_rows_a_program_and_determinism(kernel_device, hardware):
    hardware.setattr(module, "two_sums_rows", lambda *_: RowConfig(2, 1, programs=1, stages=1))
    inputs = make(kernel_device, 45, 33, torch.float32)
    check_layer(layer_norm, torch_layer_norm, inputs, torch.float32)
    first, second = (outputs_and_gradients(layer_norm, inputs, (True, True, True)) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first[1], second[1], strict=True))


@pytest.mark.full
@pytest.mark.parametrize(
    "config", [RowConfig(4, 1, programs=1, stages=2), RowConfig(1, 4, programs=1, stages=3)], ids=["4 rows", "1 row"]
)
def test_looping_programs_and_inputs_converted_twice(kernel_device, hardware, config):
    hardware.setattr(module, "affine_forward_rows", lambda *_: config)
    hardware.setattr(module, "two_sums_rows", lambda *_: config._replace(twice=True))
    for hidden in (300, 1024):  # of 1,024 columns all four rows lie in the same threads
        for dtype in (torch.float32, torch.bfloat16):
            check_layer(layer_norm, torch_layer_norm, make(kernel_device, 9, hidden, dtype), dtype)


def test_statistics_are_kept_for_a_gradient_only(kernel_device):
    inputs = make(kernel_device, 5, 48, torch.float32)
    y, mean, rstd = torch.ops.distill.layer_norm_forward.default(*inputs, 1e-5, False)
    assert mean.numel() == rstd.numel() == 0
    assert torch.equal(y, torch.ops.distill.layer_norm_forward.default(*inputs, 1e-5)[0])
    torch.library.opcheck(torch.ops.distill.layer_norm_forward.default, (*inputs, 1e-5, False))


def test_column_sums_of_a_kernel_of_their_own_agree(kernel_device, limit):
    limit.setattr(module, "SEPARATE_SUMS_FROM", 20)
    for rows, hidden in ((45, 33), (1, 300), (70, 256)):
        check_layer(layer_norm, torch_layer_norm, make(kernel_device, rows, hidden, torch.float32), torch.float32)


def test_inputs_without_rows_are_fine(kernel_device):
    x, weight, bias = make(kernel_device, 0, 16, torch.float32)
    _, gradients = outputs_and_gradients(layer_norm, (x, weight, bias), (True, True, True))
    assert gradients[0].shape == (0, 16) and not gradients[1].any() and not gradients[2].any()


@pytest.mark.full
def test_op_passes_opcheck_and_compiles(kernel_device):
    inputs = [tensor.requires_grad_() for tensor in make(kernel_device, 5, 48, torch.float32)]
    torch.library.opcheck(torch.ops.distill.layer_norm_forward.default, (*inputs, 1e-5))
    torch.library.opcheck(torch.ops.distill.layer_norm_forward.default, (inputs[0], None, None, 1e-5))
    check_compiles(layer_norm, inputs, (True, True, True))


def test_module_loads_torchs_state(kernel_device):
    theirs = torch.nn.LayerNorm(40, device=kernel_device)
    torch.nn.init.normal_(theirs.weight)
    ours = LayerNorm(40, device=kernel_device)
    ours.load_state_dict(theirs.state_dict())
    x = draw(3, 5, 40, dtype=torch.float32, device=kernel_device)
    torch.testing.assert_close(ours(x), theirs(x))
    assert LayerNorm(8, bias=False).bias is None and not list(LayerNorm(8, elementwise_affine=False).parameters())


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda x: layer_norm(x, x.new_ones(3)), r"weight: expected shape \(8,\).*got \(3,\)"),
        (lambda x: layer_norm(x, None, x.new_ones(9)), r"bias: expected shape \(8,\).*got \(9,\)"),
        (lambda x: layer_norm(x.new_ones(1, 16385)), "x: expected a last dimension of 1 to 16384"),
        (lambda x: layer_norm(x.double()), "x: expected dtype .* got torch.float64"),
    ],
)
def test_mistakes_are_named(kernel_device, call, match):
    with pytest.raises(ValueError, match=match):
        call(torch.ones(2, 8, device=kernel_device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, hidden", [(8192, 2048), (1000, 4096), (257, 5120), (33, 16384), (65537, 128)])
def test_shapes_of_real_models_agree(device, rows, hidden, dtype):
    check_layer(layer_norm, torch_layer_norm, make(device, rows, hidden, dtype), dtype)
