"""SwiGLU's backward in the epilogue of the down product's input gradient, against cuBLAS and our kernel after it.

    dh = dy W        dgate = dh up silu'(gate)        dup = dh silu(gate)        dy [M, K], W [K, N], gate and up [M, N]

dh is neither written nor read: 4 M N numbers move in place of 6. A study, whose kernel stands here until it wins: run
on no GPU. Triton waits for each part of gate and up where the epilogue asks for it, so that one program a
multiprocessor hides none of them under products: by arithmetic 0.53 to 0.59 ms at 8,192 x 2,048 x 8,192, against 0.41
of cuBLAS and 0.16 of the kernel. Two programs of smaller tiles take turns; loads past the copy engine go out together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from distill_kernels.launch import cdiv, device_facts, tl, triton
from distill_kernels.layers.activations import activate_with_derivative
from distill_kernels.layers.glu import _launch_backward
from distill_kernels.operands import blocks_of, load_block, store_block

from scripts.bench.gated import Outputs, measured
from scripts.bench.harness import Row

SHAPES = [(8192, 2048, 8192), (8192, 4096, 14336), (4096, 2048, 8192)]
GROUP = 16  # blocks of rows, as in matmul/tiled.py


class Way(NamedTuple):
    """Tile, warps, stages, programs a multiprocessor, parts that the epilogue goes by, and what brings gate and up."""

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int
    parts: int
    tma: bool = True


WAYS = (
    Way(128, 256, 8, 3, 1, 4), Way(128, 256, 8, 4, 1, 4), Way(128, 128, 4, 3, 2, 4), Way(128, 128, 8, 4, 1, 2),
    Way(128, 256, 8, 3, 1, 4, False), Way(128, 128, 4, 3, 2, 4, False), Way(128, 128, 8, 4, 1, 2, False),
)  # fmt: skip


@triton.jit
def _halves(block):
    """The left and the right half of a block's columns, which its threads hold already."""
    return tl.split(tl.permute(tl.reshape(block, (block.shape[0], 2, block.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _part(dh, gate_blocks, up_blocks, dgate_blocks, dup_blocks, row, column, TMA: tl.constexpr, LOAD_TMA: tl.constexpr):
    gate = load_block(gate_blocks, row, column, dh.shape[0], dh.shape[1], LOAD_TMA)
    up = load_block(up_blocks, row, column, dh.shape[0], dh.shape[1], LOAD_TMA).to(tl.float32)
    value, derivative = activate_with_derivative(gate.to(tl.float32), "silu")
    store_block(dgate_blocks, dh * up * derivative, row, column, TMA)
    store_block(dup_blocks, dh * value, row, column, TMA)


@triton.jit
def _down_backward_kernel(
    dy_blocks, weight_blocks, gate_blocks, up_blocks, dgate_blocks, dup_blocks, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    TMA: tl.constexpr, LOAD_TMA: tl.constexpr,
):  # fmt: skip
    row_blocks, column_blocks = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group, steps = GROUP * column_blocks, tl.cdiv(K, BLOCK_K)
    WIDTH: tl.constexpr = BLOCK_N // PARTS
    for t in tl.range(tl.program_id(0), row_blocks * column_blocks, tl.num_programs(0), flatten=True):
        first = t // group * GROUP
        size = tl.minimum(row_blocks - first, GROUP)
        row, column = (first + t % group % size) * BLOCK_M, t % group // size * BLOCK_N
        dh = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(steps):
            dy = load_block(dy_blocks, row, step * BLOCK_K, BLOCK_M, BLOCK_K, TMA)
            weight = load_block(weight_blocks, step * BLOCK_K, column, BLOCK_K, BLOCK_N, TMA)
            dh = tl.dot(dy, weight, dh)
        left, right = _halves(dh)
        if PARTS == 2:
            _part(left, gate_blocks, up_blocks, dgate_blocks, dup_blocks, row, column, TMA, LOAD_TMA)
            _part(right, gate_blocks, up_blocks, dgate_blocks, dup_blocks, row, column + WIDTH, TMA, LOAD_TMA)
        else:
            one, two = _halves(left)
            _part(one, gate_blocks, up_blocks, dgate_blocks, dup_blocks, row, column, TMA, LOAD_TMA)
            _part(two, gate_blocks, up_blocks, dgate_blocks, dup_blocks, row, column + WIDTH, TMA, LOAD_TMA)
            one, two = _halves(right)
            _part(one, gate_blocks, up_blocks, dgate_blocks, dup_blocks, row, column + 2 * WIDTH, TMA, LOAD_TMA)
            _part(two, gate_blocks, up_blocks, dgate_blocks, dup_blocks, row, column + 3 * WIDTH, TMA, LOAD_TMA)


def down_backward(
    dy: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, way: Way, depth: int = 64
) -> Outputs:
    """Gradients of gate and of up, each [M, N]."""
    (rows, inputs), outputs = dy.shape, weight.shape[1]
    out = torch.empty_like(gate), torch.empty_like(up)
    facts, part = device_facts(dy.device), way.columns // way.parts
    tma = facts.tma and way.tma
    programs = min(way.programs * facts.multiprocessors, cdiv(rows, way.rows) * cdiv(outputs, way.columns))
    _down_backward_kernel[(programs,)](
        blocks_of(dy, way.rows, depth, facts.tma), blocks_of(weight, depth, way.columns, facts.tma),
        *(blocks_of(m, way.rows, part, tma) for m in (gate, up)),
        *(blocks_of(m, way.rows, part, facts.tma) for m in out), rows, outputs, inputs, BLOCK_M=way.rows,
        BLOCK_N=way.columns, BLOCK_K=depth, GROUP=GROUP, PARTS=way.parts, TMA=facts.tma, LOAD_TMA=tma,
        num_warps=way.warps, num_stages=way.stages,
    )  # fmt: skip
    return out


def candidates(
    rows: int, inputs: int, outputs: int, ways: tuple[Way, ...] = WAYS, device: str = "cuda"
) -> dict[str, Callable[[], Outputs]]:
    """By name."""
    dy, gate, up = (torch.randn(rows, n, device=device).bfloat16() for n in (inputs, outputs, outputs))
    weight = (torch.randn(inputs, outputs, device=device) * 0.02).bfloat16()
    return {
        "cuBLAS and the kernel": lambda: _launch_backward(dy @ weight, gate, up, "silu"),
        **{str(way): lambda way=way: down_backward(dy, weight, gate, up, way) for way in ways},
    }


def run(quick: bool = False, only: str = "") -> Iterator[Row]:
    """Shapes whose text contains `only`; `quick`: the first."""
    shapes = [shape for shape in SHAPES if only in " ".join(map(str, shape))][: 1 if quick else None]
    for m, k, n in shapes:
        yield from measured("down_backward", f"{m} x {k} x {n}", candidates(m, k, n), 2 * m * k * n)
