"""The linear layer of tiles: right at every edge, every tile size, and what it refuses."""

import pytest
import torch
from distill_kernels import launch, triton_linear
from distill_kernels.extras import tiled_linear
from distill_kernels.extras.tiled_linear import TILES, GemmTile, choose_tile
from distill_kernels.launch import DeviceFacts
from grids import pairwise
from test_split_k import check, draw


@pytest.mark.plain("torch.float16-65-8-8-False", "torch.float16-100-520-200-True", "torch.bfloat16-130-264-72-True")
@pytest.mark.parametrize(
    *pairwise(
        {
            "dtype": [torch.float16, torch.bfloat16],
            "rows, outputs, inputs": [(65, 8, 8), (130, 264, 72), (100, 520, 200)],
            "with_bias": [False, True],
        }
    )
)
def test_partial_tiles_equal_linear(kernel_device, dtype, rows, outputs, inputs, with_bias):
    x, weight, bias = draw(rows, outputs, inputs, dtype, kernel_device)
    bias = bias if with_bias else None
    check(triton_linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("tile", [GemmTile(16, 32, 4, 2), *TILES[2:]])
def test_every_tile_equals_linear(kernel_device, tile):
    x, weight, bias = draw(150, 136, 136, torch.bfloat16, kernel_device)
    check(tiled_linear._launch(x, weight, bias, tile), x, weight, bias)


def test_pointer_based_loads_give_the_bits_of_tma(kernel_device, monkeypatch):
    """Pointer-based loads, of families without TMA, give the same bits, also at edges."""
    x, weight, bias = draw(150, 136, 136, torch.bfloat16, kernel_device)
    uses_tma = tiled_linear._launch(x, weight, bias, TILES[3])
    family = launch.device_facts(kernel_device).family
    monkeypatch.setitem(launch.FAMILIES, family, launch.FAMILIES[family]._replace(tma=False))
    assert torch.equal(tiled_linear._launch(x, weight, bias, TILES[3]), uses_tma)


def test_few_rows_leading_dimensions_and_strides(kernel_device):
    x, weight, bias = draw(96, 64, 128, torch.bfloat16, kernel_device)
    check(triton_linear(x[:3], weight, bias), x[:3], weight, bias)
    check(triton_linear(x.view(4, 24, 128), weight, bias).view(96, 64), x, weight, bias)
    every_other = torch.cat([x, x], 1)[:, ::2]
    check(triton_linear(every_other, weight), every_other.contiguous(), weight, None)


def test_results_do_not_depend_on_earlier_memory_contents(kernel_device, monkeypatch):
    x, weight, bias = draw(70, 72, 80, torch.bfloat16, kernel_device)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))
    check(triton_linear(x, weight, bias), x, weight, bias)


def test_every_multiprocessor_gets_a_tile():
    hopper = DeviceFacts(132, "sm_90", 227 << 10, 50 << 20, 80 << 30)
    assert choose_tile(8192, 28672, hopper) == TILES[0]
    small = choose_tile(1024, 1024, hopper)
    assert 1024 // small.rows * (1024 // small.columns) >= 0.75 * 132


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x, w, b: (x, w[:, :-8], b), "weight: expected"),
        (lambda x, w, b: (x, w[:-1], b[:-1]), "multiples of 8"),
        (lambda x, w, b: (x, w, b[:-1]), "bias: expected"),
        (lambda x, w, b: (x, w.float(), b), "dtype: expected"),
        (lambda x, w, b: (x, w.t().contiguous().t(), b), "contiguous rows"),
    ],
)
def test_errors_name_the_invalid_argument(kernel_device, change, message):
    x, weight, bias = draw(70, 64, 64, torch.bfloat16, kernel_device)
    with pytest.raises(ValueError, match=message):
        triton_linear(*change(x, weight, bias))


def test_op_passes_opcheck(kernel_device):
    x, weight, bias = draw(70, 64, 64, torch.bfloat16, "cpu")
    torch.library.opcheck(torch.ops.distill.tiled_linear.default, (x, weight, bias))


@pytest.mark.gpu
@pytest.mark.parametrize("outputs, inputs", [(4096, 4096), (1024, 4096), (28672, 4096), (4096, 14336), (128256, 4096)])
def test_shapes_of_llama_equal_linear(outputs, inputs):
    x, weight, bias = draw(1024, outputs, inputs, torch.bfloat16, "cuda")
    check(triton_linear(x, weight, bias), x, weight, bias)
