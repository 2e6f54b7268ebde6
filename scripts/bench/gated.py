"""Gate, up and activation as one product over interleaved weights, against two products of cuBLAS and our SwiGLU.

Sustained: each candidate runs alone for `SECONDS`, after as long as it takes to reach its own clocks, since the card's
power is what bounds these products; joules are NVML's over that time. The first candidate is run again at the end, so
that drift shows. `cuBLAS, interleaved` is what few rows pay for the layout. A family goes into `matmul.gated.MIN_SIZES`
from the inputs and rows on from which ours wins here, with the tile that does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from distill_kernels.layers.glu import swiglu
from distill_kernels.matmul import gated
from distill_kernels.primitives.tiled import GemmTile
from torch.nn import functional as F

from distill.commands.bench import total_joules
from scripts.bench.harness import Row

SHAPES = [
    (8192, 4096, 14336),
    (2048, 4096, 14336),
    (1024, 4096, 14336),
    (256, 4096, 14336),
    (8192, 2048, 8192),
    (1024, 2048, 8192),
    (8192, 3584, 18944),
]
TILES = [
    *(GemmTile(128, 256, 8, 4, group) for group in (16, 8, 32, 0)),
    GemmTile(128, 256, 8, 3, 16),
    GemmTile(256, 128, 8, 4, 8),
]
SECONDS, SETTLE = 0.5, 0.25
Outputs = tuple[torch.Tensor, ...]


def candidates(
    rows: int, inputs: int, outputs: int, tiles: list[GemmTile], device: str = "cuda"
) -> dict[str, Callable[[], Outputs]]:
    """Return the candidates by name, on random inputs scaled as after a norm and weights scaled as in a layer."""
    x = torch.randn(rows, inputs, device=device).bfloat16()
    gate, up = ((torch.randn(outputs, inputs, device=device) * 0.02).bfloat16() for _ in range(2))
    views = gated.interleave_rows(gate, up)
    weight = gated.joined_weight(*views)
    assert weight is not None
    return {
        "cuBLAS": lambda: (swiglu(F.linear(x, gate), F.linear(x, up)),),
        "cuBLAS, interleaved": lambda: (swiglu(F.linear(x, views[0]), F.linear(x, views[1])),),
        **{str(tile): lambda tile=tile: (gated._launch(x, weight, None, "silu", tile),) for tile in tiles},
    }


def sustained(run: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds and joules of a call."""
    run()
    torch.cuda.synchronize()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < SETTLE:
        run()
        torch.cuda.synchronize()
        calls += 1
    calls = max(4, round(SECONDS / SETTLE * calls))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    joules = total_joules()
    start.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls, (total_joules() - joules) / calls


def measured(case: str, shape: str, made: dict[str, Callable[[], Outputs]], flop: float) -> Iterator[Row]:
    """A row a candidate, sustained; one whose outputs are not those of the first has no time."""
    (name, reference), *_ = made.items()
    expected, first = [one.float() for one in reference()], 0.0
    for label, run in [*made.items(), (f"{name} (again)", reference)]:
        row = Row(case, shape, label, float("nan"))
        try:
            pairs = list(zip(run(), expected, strict=True))
        except Exception as failure:  # a tile that this release of Triton does not compile
            row.note = f"{type(failure).__name__}: {failure}"[:120]
            yield row
            continue
        row.error = {"worst output": max(((a.float() - b).norm() / b.norm()).item() for a, b in pairs)}
        del pairs
        if row.error["worst output"] < 1e-2:
            row.ms, row.joules = sustained(run)
            first = first or row.ms
            row.tflop_per_s, row.note = flop / row.ms / 1e9, f"{first / row.ms:.3f} x {name}"
        yield row


@torch.no_grad()
def run(quick: bool = False, only: str = "") -> Iterator[Row]:
    """Shapes whose text contains `only`; `quick`: the first shape and four tiles."""
    shapes = [shape for shape in SHAPES if only in " ".join(map(str, shape))][: 1 if quick else None]
    tiles = TILES[: 4 if quick else None]
    for m, k, i in shapes:
        yield from measured("gated", f"{m} x {k} to 2 x {i}", candidates(m, k, i, tiles), 4 * m * k * i)
