"""Linear layers of Llama-3-8B: split-K against cuBLAS at 1 to 64 rows, fp8 against bf16 at 8,192 tokens.

Split-K rotates among weights that together exceed the L2 cache, inside a CUDA graph; its floor is the weight's bytes
over the copy bandwidth. The fp8 layers are timed with quantisation; the product alone stands beside them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from distill_kernels.matmul.fp8 import Fp8Linear, quantize_rows
from distill_kernels.primitives import split_k

from scripts.bench.harness import Row, copy_bandwidth, graphed, host_microseconds, time_in_turn

SHAPES = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)]  # inputs x outputs
CALLS = 24


def error(y: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error of `y` in the Frobenius norm."""
    return ((y.double() - exact).norm() / exact.norm()).item()


def rotated(layer: Callable[[torch.Tensor], object], weights: list[torch.Tensor]) -> Callable[[], object]:
    """Return a graph of calls of `layer` that alternate between weights, so that none stays in L2."""
    turn = itertools.cycle(weights)
    return graphed(lambda: layer(next(turn)), calls=CALLS)


def split_k_rows(inputs: int, outputs: int, counts: tuple[int, ...], copy: float) -> Iterator[Row]:
    """Yield rows of split-K and cuBLAS for one weight shape and several row counts."""
    copies = max(2, -(-(192 << 20) // (2 * inputs * outputs)))
    weights = [torch.randn(outputs, inputs, device="cuda").to(torch.bfloat16) / inputs**0.5 for _ in range(copies)]
    for count in counts:
        x = torch.randn(count, inputs, device="cuda").to(torch.bfloat16)
        layers: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "cuBLAS": lambda w, x=x: F.linear(x, w),
            "split-K": lambda w, x=x: split_k.split_k_linear(x, w),
        }
        exact = x.double() @ weights[0].double().T
        times = time_in_turn({name: rotated(layer, weights) for name, layer in layers.items()}, rounds=5, calls=2)
        shape = f"{inputs}x{outputs}, {count} rows"
        for name, ms in times.items():
            rate = 2 * inputs * outputs * CALLS / ms / 1e9
            errors = {"y": error(layers[name](weights[0]), exact)}
            host = host_microseconds(lambda layer=layers[name]: layer(weights[0]))  # type: ignore[misc]
            yield Row("split_k", shape, name, ms / CALLS, copy / rate, tb_per_s=rate, error=errors, host_us=host)


def fp8_rows(inputs: int, outputs: int, tokens: int) -> Iterator[Row]:
    """Yield rows of fp8 and bf16 linear layers for one shape."""
    linear = torch.nn.Linear(inputs, outputs, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    layer = Fp8Linear.from_linear(linear)
    x = torch.randn(tokens, inputs, device="cuda").to(torch.bfloat16)
    x8, scale = quantize_rows(x)
    scale_w = layer.weight_scale.view(1, -1)

    def product(fast: bool) -> torch.Tensor:
        return torch._scaled_mm(
            x8, layer.weight.t(), scale_a=scale, scale_b=scale_w, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    candidates = {
        "bf16 cuBLAS": lambda: linear(x),
        "fp8 layer": lambda: layer(x),
        "fp8 product alone": lambda: product(True),
        "fp8 product alone, exact accumulation": lambda: product(False),
    }
    exact = x[:256].double() @ linear.weight.double().T
    flop = 2 * tokens * inputs * outputs
    times = time_in_turn({**candidates, "quantise alone": lambda: quantize_rows(x)}, rounds=5, calls=5)
    for name, ms in times.items():
        row = Row("fp8", f"{inputs}x{outputs}, {tokens} tokens", name, ms)
        if name in candidates:
            row.tflop_per_s, row.error = flop / ms / 1e9, {"y": error(candidates[name]()[:256], exact)}
            row.note = f"{times['bf16 cuBLAS'] / ms:.2f} x bf16"
        else:
            row.tb_per_s = 3 * x.numel() / ms / 1e9
        yield row


def run(quick: bool = False, only: str = "") -> Iterator[Row]:
    """Rows of the kernels whose name (split_k, fp8) contains `only`; `quick`: 16 rows alone."""
    copy = copy_bandwidth(2.0)
    for inputs, outputs in SHAPES:
        if only in "split_k":
            yield from split_k_rows(inputs, outputs, (16,) if quick else (1, 4, 16, 32, 64), copy)
    for inputs, outputs in SHAPES:
        if only in "fp8":
            yield from fp8_rows(inputs, outputs, 8192)
