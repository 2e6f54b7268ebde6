"""FusedAdamW against torch's three forms: a 1.24 B bf16 model, variants of states, and single fp32 tensors of 1-50 M.

Each candidate updates its own parameters, whose gradients stay. `tb_per_s` counts the fewest bytes that a candidate
can move: parameter, gradient, moments and master read, all but the gradient written, the gradient read twice to clip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from distill_kernels.optim.adamw import FusedAdamW

from scripts.bench.harness import Row, copy_bandwidth, host_microseconds, time_in_turn


def llama_1b_shapes() -> list[tuple[int, ...]]:
    """Llama-3.2-1B: 146 tensors, 1.24 B elements."""
    hidden, intermediate, kv = 2048, 8192, 512
    layer: list[tuple[int, ...]] = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    layer += [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate), (hidden,), (hidden,)]
    return [(128256, hidden), *layer * 16, (hidden,)]


Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def torch_form(**form: bool) -> Make:
    """Return a maker of `torch.optim.AdamW` in one of its forms (fused, foreach)."""
    return lambda params: torch.optim.AdamW(params, lr=1e-3, **form)  # type: ignore[arg-type]


def ours(**settings: object) -> Make:
    """Return a maker of `FusedAdamW`."""
    return lambda params: FusedAdamW(params, lr=1e-3, **settings)  # type: ignore[arg-type]


def build(shapes: list[tuple[int, ...]], dtype: torch.dtype, make: Make) -> Callable[[], object]:
    """Return the step function of an optimizer over new bf16 or fp32 parameters of these shapes."""
    params = [torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype) * 0.02) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    return make(params).step


def measure(
    name: str, shapes: list[tuple[int, ...]], dtype: torch.dtype, makers: dict[str, Make], copy: float
) -> list[Row]:
    """Time every optimizer on one set of parameter shapes and return its rows."""
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    steps = {candidate: build(shapes, dtype, make) for candidate, make in makers.items()}
    times = time_in_turn(steps, rounds=5, calls=3 if elements > 1e8 else 20)
    rows = []
    for candidate, ms in times.items():
        state = 4 if "fp32 states" in candidate else dtype.itemsize
        master = 8 - dtype.itemsize if "masters" in candidate else 0
        clipping = dtype.itemsize if "clipping" in candidate else 0
        rate = elements * (3 * dtype.itemsize + 4 * state + master + clipping) / ms / 1e9
        host = host_microseconds(steps[candidate], calls=10 if elements > 1e8 else 50)
        row = Row("adamw", name, candidate, ms, floor_ratio=copy / rate, tb_per_s=rate, host_us=host)
        rows.append(row)
    steps.clear()
    torch.cuda.empty_cache()
    return rows


def run(quick: bool = False, only: str = "") -> Iterator[Row]:
    """Rows of every shape whose name contains `only`; `quick`: the 1.24 B model and 50 M alone."""
    copy = copy_bandwidth(2.0)
    bf16 = {
        "torch fused": torch_form(fused=True),
        "torch foreach": torch_form(foreach=True),
        "ours": ours(),
        "ours, stochastic rounding": ours(stochastic_rounding=True),
        "ours, clipping and finite check": ours(max_grad_norm=1.0, skip_nonfinite=True),
        "ours, fp32 states, stochastic rounding": ours(state_dtype=torch.float32, stochastic_rounding=True),
        "ours, fp32 states and masters": ours(state_dtype=torch.float32, master_weights=True),
    }
    forms = {
        "torch for-loop": torch_form(foreach=False),
        "torch foreach": torch_form(foreach=True),
        "torch fused": torch_form(fused=True),
        "ours": ours(),
    }
    if only in "1.24 B bf16, 146 tensors":
        yield from measure("1.24 B bf16, 146 tensors", llama_1b_shapes(), torch.bfloat16, bf16, copy)
    for millions in (50,) if quick else (1, 10, 50):
        if only in f"{millions} M fp32":
            yield from measure(f"{millions} M fp32", [(millions * 10**6,)], torch.float32, forms, copy)
    if not quick and only in "4,000 tensors of mixed sizes":
        sizes: list[tuple[int, ...]] = [(16 * (1 + 37 * i % 997),) for i in range(4000)]
        yield from measure(
            "4,000 tensors of mixed sizes, bf16",
            sizes,
            torch.bfloat16,
            {k: bf16[k] for k in ("torch fused", "ours")},
            copy,
        )
