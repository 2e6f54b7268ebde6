"""Gate, up and activation as one product: right at every edge, tile and order of tiles, and what it refuses."""

import pytest
import torch
import torch.nn.functional as F
from distill_kernels import launch
from distill_kernels.launch import DeviceFacts
from distill_kernels.layers.glu import reference_glu
from distill_kernels.matmul import gated
from distill_kernels.matmul.gated import choose_gated_tile, gated_linear, interleave_rows, joined_weight
from distill_kernels.primitives.tiled import DEPTH, GemmTile
from grids import pairwise
from helpers import assert_as_good_as_torch

SMALL = GemmTile(64, 64, 4, 2, 2)


def draw(rows, outputs, inputs, dtype, device):
    x = torch.randn(rows, inputs, device=device).to(dtype)
    gate, up = ((torch.randn(outputs, inputs, device=device) / inputs**0.5).to(dtype) for _ in range(2))
    return x, gate, up, [torch.randn(outputs, device=device).to(dtype) for _ in range(2)]


def joined(gate, up):
    weight = joined_weight(*interleave_rows(gate, up))
    assert weight is not None
    return weight


def in_turn(biases):
    return torch.stack(biases, 1).flatten()


def check(y, x, gate, up, biases=(None, None), activation="silu"):
    eager = reference_glu(F.linear(x, gate, biases[0]), F.linear(x, up, biases[1]), activation)
    wide = [None if bias is None else bias.double() for bias in biases]
    exact = reference_glu(
        F.linear(x.double(), gate.double(), wide[0]), F.linear(x.double(), up.double(), wide[1]), activation
    )
    assert y.dtype == x.dtype
    assert_as_good_as_torch(y, eager, exact, x.dtype)
    rows = torch.linalg.vector_norm(y.double() - exact, dim=-1)
    assert rows.max() <= 2e-2 * torch.linalg.vector_norm(exact, dim=-1).mean()


@pytest.mark.parametrize(
    *pairwise(
        {
            "dtype": [torch.float16, torch.bfloat16],
            "rows, outputs, inputs": [(1, 8, 8), (64, 32, 32), (65, 40, 72), (150, 136, 136)],
            "activation": ["silu", "gelu", "gelu_tanh"],
            "with_bias": [False, True],
        }
    )
)
def test_sizes_at_the_edges_of_tiles_give_the_reference(
    kernel_device, dtype, rows, outputs, inputs, activation, with_bias
):
    x, gate, up, biases = draw(rows, outputs, inputs, dtype, kernel_device)
    y = gated._launch(x, joined(gate, up), in_turn(biases) if with_bias else None, activation, SMALL)
    check(y, x, gate, up, biases if with_bias else (None, None), activation)


@pytest.mark.parametrize("tile", [GemmTile(64, 32, 4, 2, 1), SMALL, SMALL._replace(group=64), SMALL._replace(group=0)])
def test_tiles_and_their_order(kernel_device, tile):
    """More blocks of rows than a group, a last group that is not full, and more tiles than programs."""
    x, gate, up, _ = draw(300, 136, 64, torch.bfloat16, kernel_device)
    check(gated._launch(x, joined(gate, up), None, "silu", tile), x, gate, up)


def test_pointer_based_loads_give_the_same(kernel_device, monkeypatch):
    """Pointer-based loads, of families without TMA, give the same bits, also at edges."""
    x, gate, up, biases = draw(150, 72, 72, torch.bfloat16, kernel_device)
    weight = joined(gate, up)
    uses_tma = gated._launch(x, weight, in_turn(biases), "silu", SMALL)
    family = launch.device_facts(kernel_device).family
    monkeypatch.setitem(launch.FAMILIES, family, launch.FAMILIES[family]._replace(tma=False))
    assert torch.equal(gated._launch(x, weight, in_turn(biases), "silu", SMALL), uses_tma)


def test_leading_dimensions_strides_and_no_rows(kernel_device):
    x, gate, up, _ = draw(96, 64, 128, torch.bfloat16, kernel_device)
    weight = joined(gate, up)
    check(gated_linear(x.view(4, 24, 128), weight).view(96, 64), x, gate, up)
    every_other = torch.cat([x, x], 1)[:, ::2]
    check(gated_linear(every_other, weight), every_other.contiguous(), gate, up)
    assert gated_linear(x[:0], weight).shape == (0, 64)


def test_results_do_not_depend_on_earlier_memory_contents(kernel_device, monkeypatch):
    x, gate, up, _ = draw(70, 72, 80, torch.bfloat16, kernel_device)
    weight, empty = joined(gate, up), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))
    check(gated._launch(x, weight, None, "silu", SMALL), x, gate, up)


def test_large_gates_do_not_overflow(kernel_device):
    x, gate, up, _ = draw(64, 16, 32, torch.bfloat16, kernel_device)
    y = gated._launch(x * 300, joined(gate, up), None, "silu", SMALL)
    assert y.isfinite().all()
    check(y, x * 300, gate, up)


def test_interleaved_weights_are_views_of_the_same_values():
    gate, up = torch.randn(6, 8), torch.randn(6, 8)
    a, b = interleave_rows(gate, up)
    assert torch.equal(a, gate) and torch.equal(b, up) and a.stride() == b.stride() == (16, 1)
    whole = joined_weight(a, b)
    assert torch.equal(whole[0::2], gate) and torch.equal(whole[1::2], up) and whole.is_contiguous()
    assert whole.data_ptr() == a.data_ptr()
    assert joined_weight(b, a) is None and joined_weight(gate, up) is None and joined_weight(a, b.clone()) is None
    assert joined_weight(a[:3], b) is None and joined_weight(a, interleave_rows(gate, up)[1]) is None


def test_every_family_has_a_tile():
    for family, facts in launch.FAMILIES.items():
        tile = choose_gated_tile(DeviceFacts(132, family, facts.shared_bytes, 50 << 20, 80 << 30))
        shared = 2 * tile.stages * DEPTH * (tile.rows + tile.columns) + tile.rows * tile.columns
        assert tile.stages >= 2 and shared <= facts.shared_bytes
    assert choose_gated_tile(DeviceFacts(132, "sm_90", 227 << 10, 50 << 20, 80 << 30)) == gated.TILES[0]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x, w, b: (x, w[:, :-8]), "weight: expected"),
        (lambda x, w, b: (x, w[:-8]), "multiples of 8"),
        (lambda x, w, b: (x, w, b), "bias: expected"),
        (lambda x, w, b: (x.half(), w), "dtype: expected"),
        (lambda x, w, b: (x, torch.cat([w, w], 1)[:, :64]), "contiguous rows"),
        (lambda x, w, b: (x, w, None, "relu"), "activation: expected"),
    ],
)
def test_mistakes_are_named(kernel_device, change, message):
    x, gate, up, biases = draw(70, 64, 64, torch.bfloat16, kernel_device)
    with pytest.raises(ValueError, match=message):
        gated_linear(*change(x, joined(gate, up), biases[0]))


def test_op_passes_opcheck_and_compiles():
    x, gate, up, biases = draw(70, 64, 64, torch.bfloat16, "cpu")
    torch.library.opcheck(torch.ops.distill.gated_linear.default, (x, joined(gate, up), in_turn(biases), "silu"))


@pytest.mark.gpu
@pytest.mark.parametrize("rows, outputs, inputs", [(8192, 14336, 4096), (1100, 8192, 2048), (2048, 18944, 3584)])
def test_shapes_of_real_models_agree(rows, outputs, inputs):
    x, gate, up, _ = draw(rows, outputs, inputs, torch.bfloat16, "cuda")
    check(gated_linear(x, joined(gate, up)), x, gate, up)


@pytest.mark.gpu
def test_captured_graph_replays():
    x, gate, up, _ = draw(1024, 4096, 2048, torch.bfloat16, "cuda")
    weight = joined(gate, up)
    eager = gated_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gated_linear(x, weight)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, eager)
