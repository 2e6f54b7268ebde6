"""fp8 linear layers: quantisation against its reference and bounds, layers against bf16, swapping a whole model."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from distill_kernels.layers.glu import glu
from distill_kernels.layers.rms_norm import add_rms_norm, rms_norm
from distill_kernels.matmul.fp8 import (
    FP8,
    Fp8Linear,
    fp8_linear,
    fp8_rms_norm,
    quantize_rows,
    reference_fp8_linear,
    reference_quantize_rows,
    swap_linears_for_fp8,
)
from helpers import assert_as_good_as_torch, ops_called, relative_error


@pytest.fixture(autouse=True)
def _interpreter_rounds_to_fp8(device, monkeypatch):
    """Interpreted casts to e4m3 as the GPU makes them: to nearest, NaN kept (Triton's interpreter cuts off)."""
    if device.type == "cuda":
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    tl = pytest.importorskip("triton.language")
    convert = interpreter._convert_float

    def convert_float(data, input_dtype, output_dtype, rounding_mode):
        if input_dtype == tl.float32 and output_dtype == tl.float8e4nv:
            values = torch.from_numpy(data.view("float32").copy()).to(FP8)
            return values.view(torch.uint8).numpy().reshape(data.shape)
        return convert(data, input_dtype, output_dtype, rounding_mode)

    monkeypatch.setattr(interpreter, "_convert_float", convert_float)


def draw(rows, inputs, dtype, device):
    """Rows whose sizes differ by ten orders of magnitude, with outliers."""
    x = torch.randn(rows, inputs, device=device) * 10 ** torch.linspace(-5, 5, max(rows, 1), device=device)[:rows, None]
    x[:, :1] *= 30
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, inputs", [(1, 16), (5, 100), (3, 1024), (4, 1025), (2, 14336)])
def test_quantises_within_half_a_step(kernel_device, dtype, rows, inputs):
    x = draw(rows, inputs, dtype, kernel_device)
    x8, scale = quantize_rows(x)
    expected, expected_scale = reference_quantize_rows(x)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)
    back, exact = x8.double() * scale, x.double()
    bound = exact.abs() / 16 + scale * 2.0**-10
    assert ((back - exact).abs() <= bound * (1 + 1e-6)).all()
    # a quotient on the edge between two numbers may fall either way
    assert (x8.view(torch.uint8) != expected.view(torch.uint8)).double().mean() < 0.01


def test_zeros_nan_and_strides(kernel_device):
    x = torch.randn(4, 64, device=kernel_device)
    x[0], x[1, 3] = 0, float("nan")
    wide = torch.full((4, 128), float("inf"), device=kernel_device)
    wide[:, :64] = x
    for view in (x, wide[:, :64], x.t().contiguous().t()):
        x8, scale = quantize_rows(view)
        assert (x8[0].float() == 0).all() and x8[1].float().isnan().any()
        assert relative_error(x8[2:].float() * scale[2:], x[2:]) < 0.05
    assert quantize_rows(x[:0])[0].shape == (0, 64)


@pytest.mark.parametrize("with_bias", [False, True])
def test_layer_equals_its_reference_and_is_near_bf16(device, with_bias):
    linear = torch.nn.Linear(256, 96, bias=with_bias, device=device, dtype=torch.bfloat16).requires_grad_(False)
    layer = Fp8Linear.from_linear(linear)
    x = torch.randn(3, 10, 256, device=device).to(torch.bfloat16)
    y = layer(x)
    reference = reference_fp8_linear(x.view(30, 256), layer.weight, layer.weight_scale, layer.bias).view(3, 10, 96)
    exact = F.linear(x.double(), linear.weight.double(), None if linear.bias is None else linear.bias.double())
    assert y.dtype == torch.bfloat16
    assert_as_good_as_torch(y, reference, exact, torch.bfloat16)
    assert 0.01 < relative_error(y, exact) < 0.05  # nearer than e4m3 can be means that it was not quantised


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_fused_gated_quantisation_equals_the_separate_one(kernel_device, activation):
    layer = Fp8Linear(torch.randn(48, 96, device=kernel_device), torch.randn(48, device=kernel_device))
    both = 3 * torch.randn(2, 5, 200, device=kernel_device).to(torch.bfloat16)
    gate, up = both[..., :96], both[..., 104:]  # rows apart
    expected = layer(glu(gate, up, activation))
    assert torch.equal(layer.forward_gated(gate, up, activation), expected)
    assert torch.equal(layer.forward_gated(gate.contiguous(), up, activation), expected)
    assert layer.forward_gated(gate[:0], up[:0], activation).shape == (0, 5, 48)
    for wrong, message in (
        ((gate, up[..., :64], activation), "up: expected torch.bfloat16"),
        ((gate, up.float(), activation), "up: expected torch.bfloat16"),
        ((gate, up, "relu"), "activation: expected one of silu"),
        ((gate.requires_grad_(), up, activation), "gate: expected no gradient"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.forward_gated(*wrong)


@pytest.mark.parametrize("form", ["llama", "gemma"])
@pytest.mark.parametrize("added", [False, True])
def test_fused_norm_quantisation_equals_the_separate_one(kernel_device, form, added):
    x, residual = 3 * torch.randn(2, 2, 5, 104, device=kernel_device).to(torch.bfloat16)[..., :96]  # rows apart
    x[0, 1] = residual[0, 1] = 0
    weight = torch.randn(96, device=kernel_device).to(torch.bfloat16)
    layer = Fp8Linear(torch.randn(48, 96, device=kernel_device), torch.randn(48, device=kernel_device))
    if added:
        y, total = add_rms_norm(x, residual, weight, 1e-5, form)
    else:
        y, total = rms_norm(x, weight, 1e-5, form), x
    rows, kept = fp8_rms_norm(x, weight, 1e-5, form, residual if added else None)
    assert torch.equal(kept, total) and (rows.shape, rows.dtype) == (y.shape, y.dtype)
    for ours, expected in zip(rows.quantized, quantize_rows(y.view(-1, 96)), strict=True):
        assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(layer(rows), layer(y))
    x8, scale = rows.quantized
    assert torch.equal(rows + 0, (x8.float() * scale).view(y.shape).to(y.dtype))  # whoever else reads them
    assert type(rows.narrow(-1, 0, 8)) is torch.Tensor and relative_error(rows.float(), y) < 0.05
    assert layer(fp8_rms_norm(x[:0], weight)[0]).shape == (0, 5, 48)
    for wrong, message in (
        ((x, weight.float()), "weight: expected torch.bfloat16 as x"),
        ((x, weight, 1e-5, form, residual.float()), "residual: expected torch.bfloat16 as x"),
        ((x, weight[:64]), "weight: expected shape"),
    ):
        with pytest.raises(ValueError, match=message):
            fp8_rms_norm(*wrong)


def test_siblings_quantise_once(device):
    layers = [Fp8Linear(torch.randn(32, 64, device=device)) for _ in range(3)]
    x, other = (torch.randn(5, 64, device=device).to(torch.bfloat16) for _ in range(2))
    expected = [[fp8_linear(v, layer.weight, layer.weight_scale) for layer in layers] for v in (x, other)]
    Fp8Linear.share_input(layers)
    with ops_called("distill::quantize_rows") as made:
        outputs = [[layer(value) for layer in layers] for value in (x, other)]
    assert all(map(torch.equal, [y for each in outputs for y in each], [y for each in expected for y in each]))
    assert len(made) == 2
    made.clear()
    assert not layers[0]._shared._outputs, "activations are kept alive after the last sibling"
    layers[0](x)
    x.mul_(2)  # a second round over a tensor written to in between is quantised anew
    torch.testing.assert_close(layers[0](x), expected[0][0] * 2)
    saved = io.BytesIO()
    torch.save(layers, saved)  # while siblings are still to come
    copied = torch.load(io.BytesIO(saved.getvalue()), weights_only=False)
    assert all(layer._shared is copied[0]._shared for layer in copied)
    torch.testing.assert_close(copied[1](x), expected[0][1] * 2)
    del x
    assert not layers[0]._shared._outputs, "activations are kept alive although their source is gone"


def test_swaps_all_but_the_head(device):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(64, 64, bias=False) for _ in range(3))
            self.odd = torch.nn.Linear(64, 3)

        def forward(self, x):
            return (
                x + self.q_proj(x) * torch.sigmoid(self.k_proj(x)) + self.v_proj(x) + self.odd(x).sum(-1, keepdim=True)
            )

    model = torch.nn.Sequential()
    model.add_module("body", torch.nn.Sequential(Block(), Block()))
    model.add_module("lm_head", torch.nn.Linear(64, 128))
    model.to(device, torch.bfloat16).requires_grad_(False)
    x = torch.randn(7, 64, device=device).to(torch.bfloat16)
    before = model(x)
    names = swap_linears_for_fp8(model)
    assert names == [f"body.{i}.{name}_proj" for i in (0, 1) for name in "qkv"]
    assert type(model.lm_head) is torch.nn.Linear and type(model.body[0].odd) is torch.nn.Linear
    after = model(x)
    assert 0 < relative_error(after, before) < 0.1
    assert torch.equal(copy.deepcopy(model)(x), after)
    fresh = swap_into_copy(model)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(x), after)
    with pytest.raises(ValueError, match="got none"):
        swap_linears_for_fp8(model)


def swap_into_copy(model):
    fresh = copy.deepcopy(model)
    for tensor in fresh.buffers():
        tensor.zero_()
    return fresh


def test_changing_the_model_dtype_keeps_fp8(device):
    layer = Fp8Linear(torch.randn(32, 64, device=device), torch.randn(32, device=device))
    weight, scale = layer.weight.clone(), layer.weight_scale.clone()
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == FP8 and torch.equal(layer.weight.float(), weight.float())
    assert layer.weight_scale.dtype == torch.float32 and torch.equal(layer.weight_scale, scale)
    assert layer.bias.dtype == torch.bfloat16


def test_op_passes_opcheck_and_compiles(kernel_device):
    x = torch.randn(4, 64, device=kernel_device).to(torch.bfloat16)
    torch.library.opcheck(torch.ops.distill.quantize_rows.default, (x,))
    compiled = torch.compile(quantize_rows, fullgraph=True, backend="aot_eager")
    for ours, expected in zip(compiled(x), quantize_rows(x), strict=True):
        assert torch.equal(ours.float(), expected.float())
    if kernel_device.type == "cuda":
        layer = Fp8Linear(torch.randn(32, 64, device=kernel_device))
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def test_wrong_arguments_are_named(device):
    with pytest.raises(ValueError, match=r"weight: expected .* divisible by 16"):
        Fp8Linear(torch.randn(30, 64))
    with pytest.raises(ValueError, match="x: expected a matrix"):
        quantize_rows(torch.randn(4))
    layer = Fp8Linear(torch.randn(32, 64, device=device))
    with pytest.raises(ValueError, match="x: expected no gradient"):
        layer(torch.randn(4, 64, device=device, dtype=torch.bfloat16).requires_grad_())


@pytest.mark.gpu
@pytest.mark.parametrize("outputs, inputs", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)])
def test_shapes_of_llama_8b_agree(device, outputs, inputs):
    weight = torch.randn(outputs, inputs, device=device) / inputs**0.5
    layer = Fp8Linear(weight, torch.randn(outputs, device=device, dtype=torch.bfloat16))
    x = torch.randn(300, inputs, device=device).to(torch.bfloat16)
    reference = reference_fp8_linear(x, layer.weight, layer.weight_scale, layer.bias)
    exact = x.double() @ weight.double().T + layer.bias.double()
    assert_as_good_as_torch(layer(x), reference, exact, torch.bfloat16)
