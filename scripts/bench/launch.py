"""Host time of one launched call: ours against PyTorch's own function, forward, and forward with backward.

`host_us` is what the CPU takes until the work is enqueued, the median over rounds with the GPU idle at the start of
each. It decides where kernels run for less than that: small models and decoding that are not captured in a CUDA graph.
`ms` is the same time; the note says it over PyTorch's own, both measured in turn in this process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import distill_kernels
import torch
from torch.nn import functional as F

from scripts.bench.harness import Row

ROUNDS, CALLS = 15, 100
DEVICE = "cuda"
Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., torch.Tensor]


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def _heads(count: int, positions: int) -> Callable[[], Tensors]:
    return lambda: tuple(_normal(1, count, positions, 64) for _ in range(3))


CASES: dict[str, tuple[Function, Function, Callable[[], Tensors]]] = {
    "rms_norm": (
        distill_kernels.rms_norm,
        lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-6),
        lambda: (_normal(64, 2048), _normal(2048)),
    ),
    "layer_norm": (
        distill_kernels.layer_norm,
        lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias),
        lambda: (_normal(64, 2048), _normal(2048), _normal(2048)),
    ),
    "swiglu": (
        distill_kernels.swiglu,
        lambda gate, up: F.silu(gate) * up,
        lambda: (_normal(64, 2048), _normal(64, 2048)),
    ),
    "geglu": (
        distill_kernels.geglu,
        lambda gate, up: F.gelu(gate) * up,
        lambda: (_normal(64, 2048), _normal(64, 2048)),
    ),
    "bias_gelu": (
        distill_kernels.bias_gelu,
        lambda x, bias: F.gelu(x + bias),
        lambda: (_normal(64, 2048), _normal(2048)),
    ),
    "flash_attention": (
        distill_kernels.flash_attention,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        _heads(8, 512),
    ),
}


def host_microseconds(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return each run's median host time a call; their rounds alternate, so that clocks and caches are alike."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            torch.cuda.synchronize()
            for _ in range(5):
                run()
            start = time.perf_counter()
            for _ in range(CALLS):
                run()
            samples[name].append((time.perf_counter() - start) / CALLS * 1e6)
            torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in samples.items()}


def run(quick: bool = False, only: str = "") -> Iterator[Row]:
    """Yield a row for each function, direction and side.

    Args:
        quick: Leave out everything but rms_norm.
        only: A part of the names of the functions to measure.
    """
    for name, (ours, theirs, draw) in CASES.items():
        if only not in name or (quick and name != "rms_norm"):
            continue
        inputs = tuple(tensor.requires_grad_() for tensor in draw())
        upstream = torch.randn_like(ours(*inputs))
        sides = {"distill": ours, "PyTorch": theirs}

        def forward(function: Function, inputs: Tensors = inputs) -> None:
            with torch.no_grad():
                function(*inputs)

        def both(function: Function, inputs: Tensors = inputs, upstream: torch.Tensor = upstream) -> None:
            torch.autograd.grad(function(*inputs), inputs, upstream)

        for case, step in (("forward", forward), ("forward and backward", both)):
            times = host_microseconds({side: lambda f=f, step=step: step(f) for side, f in sides.items()})
            for side, microseconds in times.items():
                yield Row(
                    case=f"launch {name}, {case}",
                    shape=" x ".join(map(str, inputs[0].shape)),
                    candidate=side,
                    ms=microseconds / 1e3,
                    host_us=microseconds,
                    note=f"{microseconds / times['PyTorch']:.2f} x PyTorch's own host time",
                )
