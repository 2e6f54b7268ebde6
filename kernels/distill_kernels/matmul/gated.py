"""The gated half of an MLP as one product: gate, up and their activation, over weights interleaved by rows.

    h = g(x Wg^T + bg) * (x Wu^T + bu)        x [M, K], Wg and Wu [I, K], h [M, I], g = SiLU or GELU

Wg and Wu lie in one matrix [2 I, K], row 2 i the i-th of Wg and row 2 i + 1 the i-th of Wu: each is a view whose rows
are 2 K apart, which every BLAS library takes as it is. A tile of the product then holds gate and up of the same
outputs in neighbouring columns, which tensor cores leave in one thread, and its epilogue writes h alone: of the 5 M I
numbers that two products and a kernel over their outputs write and read 4 M I fall away, and so do the two roundings.

Bound by the tensor cores: 4 M I K FLOP, by the kernel of tiled.py. It walks over the tiles in groups of rows, so that a
group's rows of x stay in L2 while the weight passes once: by arithmetic 1 GB is read from memory at 8,192 x 4,096 by
2 x 14,336, 4 with rows fastest. Inference only.

Compiled for every family, run on an H200 alone (benchmark rows `gated`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from distill_kernels.kernel_op import KernelOp, check_no_gradients, check_tensors
from distill_kernels.launch import DeviceFacts, device_facts, runs_on_triton
from distill_kernels.layers.glu import Activation, check_activation, reference_glu
from distill_kernels.primitives.split_k import check_linear, reference_split_k_linear
from distill_kernels.primitives.tiled import GemmTile, launch_tiles, steps_in_flight


class MinSize(NamedTuple):
    """Smallest inputs and rows from which the fused product beats two cuBLAS GEMMs and an activation kernel."""

    inputs: int
    rows: int


# By family, as the benchmark rows `gated` show; elsewhere weights stay apart
MIN_SIZES = {"sm_90": MinSize(4096, 4096)}
TILES = (
    GemmTile(128, 256, 8, 4, 16),
    GemmTile(128, 128, 4, 3, 16),
    GemmTile(64, 128, 4, 3, 16),
    GemmTile(64, 64, 4, 2, 16),
)


def choose_gated_tile(facts: DeviceFacts) -> GemmTile:
    """Return the largest tile that fits with at least two steps in flight."""
    fitting = (tile._replace(stages=steps_in_flight(tile, facts, tile.columns // 2)) for tile in TILES)
    return next(tile for tile in fitting if tile.stages >= 2)


def interleave_rows(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of two weights [I, K] as views of one new matrix [2 I, K], each every other row of it."""
    joined = torch.stack([gate, up], 1)
    return joined[:, 0], joined[:, 1]


def joined_weight(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor | None:
    """Return the matrix [2 I, K] whose interleaved rows two weights are (`interleave_rows`); None if they are not."""
    outputs, inputs = gate.shape
    same = gate.shape == up.shape and gate.dtype == up.dtype and gate.stride() == up.stride() == (2 * inputs, 1)
    if not same or up.data_ptr() - gate.data_ptr() != inputs * gate.element_size():
        return None
    return gate.detach().as_strided((2 * outputs, inputs), (inputs, 1))


def reference_gated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """Return the gated linear layer in plain PyTorch: the specification."""
    y = reference_split_k_linear(x, weight, bias)
    return reference_glu(y[:, 0::2], y[:, 1::2], activation)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, tile: GemmTile | None = None
) -> torch.Tensor:
    if not runs_on_triton(x):
        return reference_gated_linear(x, weight, bias, activation)
    return launch_tiles(x, weight, bias, tile or choose_gated_tile(device_facts(x.device)), activation)


def _launch_op(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    return _launch(x, weight, bias, activation)


_op = KernelOp("gated_linear", _launch_op, lambda x, weight, *_: x.new_empty(x.shape[0], weight.shape[0] // 2))


def gated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: Activation = "silu"
) -> torch.Tensor:
    """`glu(F.linear(x, gate, gate_bias), F.linear(x, up, up_bias), activation)`, without a gradient.

    Args:
        x: [..., K] float16 or bfloat16 (float32 on the CPU too).
        weight: [2 I, K], the dtype of `x`, contiguous, rows of gate and up in turn (`joined_weight`); I and K multiples
            of 8.
        bias: [2 I], gate's and up's in turn, or None.
        activation: Activation of the gate, see `glu`.

    Returns:
        [..., I] in the dtype of `x`; gate and up stay in fp32.

    Raises:
        ValueError: For shapes or dtypes other than these, or if a gradient is required.
    """
    check_tensors(x=x, weight=weight, bias=bias)
    check_no_gradients(x=x, weight=weight, bias=bias)
    check_activation(activation)
    check_linear(x, weight, bias)
    if weight.shape[0] % 16 or weight.shape[1] % 8 or not weight.is_contiguous():
        raise ValueError(
            f"weight: expected [2 I, K] with contiguous rows, I and K multiples of 8, got {tuple(weight.shape)} with "
            f"strides {weight.stride()}"
        )
    y: torch.Tensor = _op(x.reshape(-1, x.shape[-1]), weight, bias, activation)
    return y.view(*x.shape[:-1], y.shape[-1])
