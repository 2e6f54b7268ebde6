"""Softmax against fp64, in each of its three ways of walking a row."""

import pytest
import torch
from distill_kernels.extras import row_softmax as module
from distill_kernels.extras.row_softmax import SoftmaxPlan, plan, reference_softmax, softmax
from helpers import realistic_logits
from layer_checks import DTYPES, check_compiles, check_layer, draw


def torch_softmax(x):
    return torch.softmax(x, -1)


def logits(device, rows, columns, dtype):
    return realistic_logits(rows, columns)[0].to(dtype).to(device)


WAYS = {
    "tile": lambda columns: SoftmaxPlan("tile", 2, 1 << (columns - 1).bit_length(), 2),
    "loop": lambda columns: SoftmaxPlan("loop", 1, 64, 2),
    "split": lambda columns: SoftmaxPlan("split", 1, 32, 2, parts=5),
}


@pytest.fixture(params=WAYS)
def way(request, hardware):
    hardware.setattr(module, "plan", lambda n_rows, n_cols, *_: WAYS[request.param](n_cols))
    return request.param


@pytest.mark.plain(
    "tile-1-1-torch.float32",
    "tile-3-7-torch.float32",
    "tile-5-64-torch.float32",
    "tile-4-65-torch.float32",
    "tile-2-1000-torch.bfloat16",
    "loop-1-1-torch.bfloat16",
    "loop-3-7-torch.bfloat16",
    "loop-5-64-torch.bfloat16",
    "loop-4-65-torch.bfloat16",
    "loop-2-1000-torch.bfloat16",
    "split-1-1-torch.bfloat16",
    "split-3-7-torch.float16",
    "split-5-64-torch.float16",
    "split-4-65-torch.float16",
    "split-2-1000-torch.float16",
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, columns", [(1, 1), (3, 7), (5, 64), (4, 65), (2, 1000)])
def test_softmax_equals_that_of_torch(kernel_device, way, rows, columns, dtype):
    check_layer(softmax, torch_softmax, (logits(kernel_device, rows, columns, dtype),), dtype)


def test_extreme_logits_give_the_softmax_of_torch(kernel_device, way):
    x = logits(kernel_device, 6, 200, torch.float32)
    x[0, 3], x[1], x[2, 50:], x[3, :150] = 1e4, -1e4, float("-inf"), float("-inf")
    check_layer(softmax, torch_softmax, (x,), torch.float32)
    x[4] = float("-inf")
    assert softmax(x)[4].isnan().all() and not softmax(x)[:4].isnan().any(), "as torch: NaN in that row alone"


@pytest.mark.plain("tile")
def test_strided_inputs_give_the_softmax_of_torch(kernel_device, way):
    base = draw(6, 4, 70, dtype=torch.float32, device=kernel_device, scale=3.0)
    for x in (base[..., 1:66], base.transpose(0, 1), base[:, :3], base.transpose(0, 2)):
        check_layer(softmax, torch_softmax, (x,), torch.float32)
    check_layer(
        lambda x: softmax(x).transpose(0, 2), lambda x: torch_softmax(x).transpose(0, 2), (base,), torch.float32
    )


@pytest.mark.plain("tile")
def test_op_passes_opcheck_and_compiles_without_a_graph_break(kernel_device, way):
    x = logits(kernel_device, 3, 100, torch.float32).requires_grad_()
    torch.library.opcheck(torch.ops.distill.softmax_forward.default, (x,))
    check_compiles(softmax, (x,), (True,))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_plan_covers_every_shape(direction):
    """Each way is chosen somewhere; tiles hold the row; parts leave no column out and none idle."""
    seen = set()
    for n_rows in (1, 3, 131, 199, 4096):
        for n_cols in (1, 1000, 4097, 32_768, 151_936, 262_144):
            chosen = plan(n_rows, n_cols, 132, direction)
            seen.add(chosen.strategy)
            if chosen.strategy == "tile":
                assert chosen.block >= n_cols
            if chosen.strategy == "split":
                per_part = module._per_part(n_cols, chosen)
                assert per_part % chosen.block == 0 and 1 < -(-n_cols // per_part) <= chosen.parts
    assert seen == set(WAYS)


def test_long_rows_by_default_plan(kernel_device):
    check_layer(softmax, torch_softmax, (logits(kernel_device, 2, 70_001, torch.float32),), torch.float32)


def test_softmax_accepts_empty_tensors(kernel_device):
    for shape in ((0, 5), (5, 0)):
        x = torch.ones(shape, device=kernel_device, requires_grad=True)
        softmax(x).sum().backward()
        assert x.grad is not None and x.grad.shape == shape


def test_second_backward_raises(kernel_device):
    x = logits(kernel_device, 2, 8, torch.float32).requires_grad_()
    loss = (softmax(x) ** 2).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_cpu_tensors_use_torch_and_errors_name_the_argument(kernel_device):
    x = torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(reference_softmax(x), torch_softmax(x), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"x: expected dtype .* got torch.float64"):
        softmax(x.to(kernel_device))
    with pytest.raises(ValueError, match="x: expected at least one dimension"):
        softmax(x.float()[0, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "rows, columns",
    [(8192, 2048), (300, 16_384), (300, 16_385), (300, 30_000), (4, 131_072), (300, 151_936), (200, 262_144)],
)
def test_kernel_equals_the_reference_on_shapes_of_real_models(device, rows, columns, dtype):
    check_layer(softmax, torch_softmax, (draw(rows, columns, dtype=dtype, device=device, scale=4.0),), dtype)


@pytest.mark.gpu
@pytest.mark.heavy_gpu
@pytest.mark.slow
def test_offsets_past_two_to_the_31(device):
    x = torch.randn(2**31 // 131_072 + 3, 131_072, device=device, dtype=torch.bfloat16)
    torch.testing.assert_close(softmax(x)[-3:], torch_softmax(x[-3:]))
