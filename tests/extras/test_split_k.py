"""The split-K linear layer: right at every edge of rows, outputs and inputs; the same bits every time."""

import copy

import pytest
import torch
import torch.nn.functional as F
from distill_kernels.extras import split_k
from distill_kernels.extras.split_k import SplitKConfig, SplitKLinear, choose_config, split_k_linear
from helpers import assert_as_good_as_torch

LLAMA_8B = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
DTYPES = [torch.float16, torch.bfloat16]


def draw(rows, outputs, inputs, dtype, device):
    x = torch.randn(rows, inputs, device=device).to(dtype)
    weight = (torch.randn(outputs, inputs, device=device) / inputs**0.5).to(dtype)
    return x, weight, torch.randn(outputs, device=device).to(dtype)


def check(y, x, weight, bias):
    eager = F.linear(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_as_good_as_torch(y, eager, exact, x.dtype)


@pytest.mark.plain(
    "1-torch.float16",
    "2-torch.float16",
    "15-torch.float16",
    "16-torch.float16",
    "17-torch.bfloat16",
    "33-torch.bfloat16",
    "64-torch.bfloat16",
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 33, 64])
def test_any_number_of_rows_equals_linear(kernel_device, dtype, rows):
    x, weight, bias = draw(rows, 96, 512, dtype, kernel_device)
    check(split_k_linear(x, weight, bias), x, weight, bias)


@pytest.mark.plain("False-1-8", "False-65-129", "False-200-1000", "True-64-128", "True-63-127", "True-130-2056")
@pytest.mark.parametrize("outputs, inputs", [(1, 8), (64, 128), (65, 129), (63, 127), (200, 1000), (130, 2048 + 8)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_odd_sizes_equal_linear(kernel_device, outputs, inputs, with_bias):
    x, weight, bias = draw(5, outputs, inputs, torch.bfloat16, kernel_device)
    bias = bias if with_bias else None
    check(split_k_linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8, 16])
def test_any_number_of_splits(kernel_device, splits):
    x, weight, bias = draw(7, 100, 1024 + 40, torch.float16, kernel_device)
    y = split_k._launch(x, weight, bias, SplitKConfig(64, 64, splits, 4, 3))
    check(y, x, weight, bias)
    if kernel_device.type == "cuda":
        assert not split_k._zero_counters(x.device).any()


def test_every_output_is_written_and_nothing_uninitialised_is_read(kernel_device, monkeypatch):
    """Buffers that hold NaN before the launch change nothing."""
    x, weight, bias = draw(3, 70, 700, torch.bfloat16, kernel_device)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))
    check(split_k_linear(x, weight, bias), x, weight, bias)


def test_strides_and_leading_dimensions(kernel_device):
    x, weight, bias = draw(12, 80, 520, torch.bfloat16, kernel_device)
    expected = split_k_linear(x, weight, bias)
    wide = torch.full((12, 1040), float("nan"), dtype=x.dtype, device=x.device)
    wide[:, :520] = x
    assert torch.equal(split_k_linear(wide[:, :520], weight, bias), expected)
    assert torch.equal(split_k_linear(x.t().contiguous().t(), weight, bias), expected)
    assert torch.equal(split_k_linear(x.view(3, 4, 520), weight, bias), expected.view(3, 4, 80))
    assert split_k_linear(x[:0], weight, bias).shape == (0, 80)


def test_the_same_bits_every_time(kernel_device):
    x, weight, bias = draw(16, 128, 4096, torch.bfloat16, kernel_device)
    first = split_k_linear(x, weight, bias)
    assert all(torch.equal(split_k_linear(x, weight, bias), first) for _ in range(20 if x.is_cuda else 2))


@pytest.mark.parametrize("kind", ["kernel", "reference"])
def test_gradients_are_as_exact_as_those_of_torch(request, kind):
    device = request.getfixturevalue("kernel_device" if kind == "kernel" else "device")
    ours = [t.requires_grad_() for t in draw(6, 72, 136, torch.bfloat16, device)]
    eager = [t.detach().clone().requires_grad_() for t in ours]
    exact = [t.detach().double().requires_grad_() for t in ours]
    dy = torch.randn(6, 72, device=device).to(torch.bfloat16)
    split_k_linear(*ours).backward(dy)
    F.linear(*eager).backward(dy)
    F.linear(*exact).backward(dy.double())
    for name, a, b, c in zip(("x", "weight", "bias"), ours, eager, exact, strict=True):
        assert_as_good_as_torch(a.grad, b.grad, c.grad, torch.bfloat16, name)
    x, weight, bias = (t.detach() for t in ours)  # where the bias alone is trained
    split_k_linear(x, weight, bias.requires_grad_()).backward(dy)
    assert torch.equal(bias.grad, ours[2].grad)


def test_op_passes_opcheck_and_compiles_without_a_graph_break(kernel_device):
    x, weight, bias = draw(4, 64, 128, torch.bfloat16, kernel_device)
    x.requires_grad_()
    torch.library.opcheck(torch.ops.distill.split_k_linear.default, (x, weight, bias))
    torch.library.opcheck(torch.ops.distill.split_k_linear.default, (x, weight, None))
    compiled = torch.compile(split_k_linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight, bias), split_k_linear(x, weight, bias))


def test_module_serves_few_and_many_rows(kernel_device):
    linear = torch.nn.Linear(136, 72, device=kernel_device, dtype=torch.bfloat16)
    ours = SplitKLinear.from_linear(linear)
    assert ours.state_dict().keys() == linear.state_dict().keys()
    for shape in [(136,), (1, 136), (2, 3, 136), (65, 136)]:
        x = torch.randn(shape, device=kernel_device).to(torch.bfloat16)
        y = ours(x)
        check(y, x, linear.weight.detach(), linear.bias.detach())
    assert torch.equal(copy.deepcopy(ours)(x), y)


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("outputs, inputs", [*LLAMA_8B, (1, 8), (128256, 2048), (64, 65536)])
@pytest.mark.parametrize("multiprocessors", [4, 108, 132])
def test_chosen_configs_are_sound(rows, outputs, inputs, multiprocessors):
    config = choose_config(rows, outputs, inputs, multiprocessors)
    assert config.block_n in (32, 64, 128, 256) and config.block_k >= 32
    assert 1 <= config.splits <= -(-inputs // config.block_k)
    block_m = max(16, rows)
    assert config.stages * config.block_k * (config.block_n + block_m) * 2 <= 227 * 1024


@pytest.mark.parametrize(
    "x, weight, bias, field",
    [
        ((65, 16), (8, 16), None, "x: expected at most 64 rows, got 65"),
        ((2, 16), (8, 15), None, "weight: expected"),
        ((2, 16), (8, 16), (7,), "bias: expected"),
    ],
)
def test_wrong_shapes_are_named(x, weight, bias, field):
    with pytest.raises(ValueError, match=field):
        split_k_linear(torch.ones(x), torch.ones(weight), None if bias is None else torch.ones(bias))


def test_wrong_dtypes_and_strides_are_named():
    with pytest.raises(ValueError, match="dtype: expected"):
        split_k_linear(torch.ones(1, 8), torch.ones(8, 8).half())
    with pytest.raises(ValueError, match="contiguous rows"):
        split_k_linear(torch.ones(1, 8), torch.ones(8, 8).t())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("outputs, inputs", LLAMA_8B)
def test_shapes_of_llama_8b_equal_linear(device, rows, outputs, inputs):
    x, weight, bias = draw(rows, outputs, inputs, torch.bfloat16, device)
    check(split_k_linear(x, weight, bias), x, weight, bias)


@pytest.mark.gpu
def test_in_a_cuda_graph(device):
    x, weight, bias = draw(4, 512, 4096, torch.bfloat16, device)
    expected = split_k_linear(x, weight, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = split_k_linear(x, weight, bias)
        z = split_k_linear(x, weight, bias)
    for _ in range(3):
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected) and torch.equal(z, expected)
    assert torch.equal(split_k_linear(x, weight, bias), expected)


@pytest.mark.gpu
@pytest.mark.slow
def test_offsets_past_2_to_31(device):
    x, weight, _ = draw(2, 300_000, 8192, torch.bfloat16, device)
    y = split_k_linear(x, weight)
    check(y[:, -1000:], x, weight[-1000:], None)
