"""FlashAttention against PyTorch's back ends: forward, forward and backward, packed documents, and naive attention.

TFLOP/s count 4 B H T^2 D operations forward (half of it causal) and 3.5 times that with the backward's five products,
as FlashAttention's papers do; what a kernel computes again is not counted.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from distill_kernels.attention.flash import flash_attention
from distill_kernels.attention.operands import ScoreSettings
from distill_kernels.attention.ranges import reference_mask
from distill_kernels.attention.reference import reference_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from scripts.bench.harness import Row, host_microseconds, peak_above_inputs, time_in_turn

SHAPES = [  # batch, query heads, key heads, positions, head size
    (2, 32, 8, 4096, 64),
    (2, 32, 8, 4096, 128),
    (1, 32, 8, 16384, 128),
    (8, 32, 8, 1024, 128),
    (1, 16, 8, 4096, 256),
]
BACKENDS = {
    "SDPA FlashAttention-2": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
NAIVE_SHAPES = [(1, 1, 1, 512, 64), (1, 1, 1, 1024, 64), (1, 1, 1, 2048, 64), (2, 4, 4, 512, 64)]


def draw(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """q, k, v, dout as a model makes them: [B, H, T, D] views of [B, T, H, D]."""
    batch, heads, kv_heads, positions, size = shape
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(batch, positions, count, size, device="cuda", dtype=dtype, generator=generator).transpose(1, 2)
        for count in (heads, kv_heads, kv_heads, heads)
    ]


def _sdpa(backend: SDPBackend) -> Callable[..., torch.Tensor]:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        if group > 1 and backend == SDPBackend.EFFICIENT_ATTENTION:  # it knows no grouped heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])

    return run


def varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int
) -> torch.Tensor:
    """torch's variable-length attention (torch >= 2.10), causal, of [B, H, T, D] tensors; gives [B, T, H, D]."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.10 says is_causal where later ones have a window; 2.12 wants to be told that heads of keys are fewer
    known = inspect.signature(varlen_attn).parameters
    settings: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    settings |= {"enable_gqa": True} if "enable_gqa" in known else {}
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    out: Any = varlen_attn(*flat, bounds, bounds, longest, longest, **settings)
    return out.unflatten(0, (query.shape[0], query.shape[2]))


def _naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ v


def _eager_with_sinks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masking: ScoreSettings) -> torch.Tensor:
    """Compute attention with sinks as transformers does: one more column, dropped after the softmax."""
    assert masking.sinks is not None
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    mask = reference_mask(q.shape[2], k.shape[2], masking.causal, masking.window, q.device)
    scores = (q @ k.transpose(-1, -2) * masking.scale).masked_fill(~mask, float("-inf"))
    last = masking.sinks.to(q.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, last], -1), -1)[..., :-1] @ v


def _packed(positions: int, documents: int) -> torch.Tensor:
    """Cumulative lengths of `documents` documents, the longest about ten times the shortest."""
    shares = torch.linspace(1, 10, documents).double()
    inner = (shares.cumsum(0) / shares.sum() * positions).round().int()
    return torch.cat([torch.zeros(1, dtype=torch.int32), inner]).cuda()


def _errors(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor], masking: ScoreSettings) -> dict:
    """Relative errors of out, dq, dk, dv of the last batch entry's last key head against fp64."""
    q, k, v, dout = tensors
    group = q.shape[1] // k.shape[1]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    grads = torch.autograd.grad(out, leaves, dout)
    at = [slice(-group, None), slice(-1, None), slice(-1, None)]
    exact = [x[-1:, s].detach().double().requires_grad_() for x, s in zip((q, k, v), at, strict=True)]
    if masking.sinks is not None:
        masking = masking._replace(sinks=masking.sinks[-group:])
    exact_out, _ = reference_attention(*exact, masking)
    exact_grads = torch.autograd.grad(exact_out, exact, dout[-1:, at[0]].double())
    made = {"out": out[-1:, at[0]]} | {n: g[-1:, s] for n, g, s in zip(("dq", "dk", "dv"), grads, at, strict=True)}
    right = {"out": exact_out, "dq": exact_grads[0], "dk": exact_grads[1], "dv": exact_grads[2]}
    return {n: float((made[n].double() - right[n]).norm() / right[n].norm()) for n in made}


def _measure(
    case: str,
    name: str,
    shape: tuple[int, ...],
    candidates: dict[str, Callable[..., torch.Tensor]],
    work: float,
    masking: ScoreSettings | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[Row]:
    tensors = draw(shape, dtype)
    q, k, v, dout = tensors
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    forward, both, errors = {}, {}, {}
    checkable, masking = shape[3] <= 4096, masking or ScoreSettings(True, q.shape[-1] ** -0.5)
    for label, function in candidates.items():
        errors[label] = _errors(function, tensors, masking) if checkable else {}
        if not all(error < 1e-2 for error in errors[label].values()):
            yield Row(case, name, label, math.nan, error=errors[label], note="wrong, not timed")
            continue
        forward[label] = lambda f=function: f(q, k, v)
        both[label] = lambda f=function: torch.autograd.grad(f(*leaves), leaves, dout)
    timed = {"forward": (forward, work, ("out",)), "forward + backward": (both, 3.5 * work, ("dq", "dk", "dv"))}
    for part, (runs, operations, checked) in timed.items():
        for label, ms in time_in_turn(runs).items():
            error = {n: errors[label][n] for n in checked if n in errors[label]}
            yield Row(
                case,
                f"{name} {part}",
                label,
                ms,
                peak_mib=peak_above_inputs(runs[label]),
                error=error,
                tflop_per_s=operations / ms / 1e9,
                host_us=host_microseconds(runs[label], 50),
            )


def run(quick: bool, only: str) -> Iterator[Row]:
    """Measure the shapes whose name contains `only`; `quick` takes the first ones."""
    for shape in SHAPES[:4] if quick else SHAPES:
        batch, heads, _, positions, size = shape
        name = "B={} H={}/{} T={} D={}".format(*shape)
        if only not in name:
            continue
        work = 2.0 * batch * heads * positions**2 * size
        ours = {"ours": flash_attention}
        backends = {label: _sdpa(backend) for label, backend in list(BACKENDS.items())[: 2 if quick else 3]}
        if size > 128:
            backends.pop("SDPA memory-efficient", None)
        yield from _measure("attention", name, shape, ours | backends, work)
    for size in (128, 64) if only in "packed" else ():
        shape, documents = (1, 32, 8, 8192, size), 8
        cu = _packed(shape[3], documents)
        lengths = cu.diff().double()
        work, longest = 2.0 * shape[1] * float((lengths**2).sum()) * shape[4], int(lengths.max())
        packed: dict[str, Callable[..., torch.Tensor]] = {
            "ours": lambda q, k, v, cu=cu: flash_attention(q, k, v, cu_seqlens_q=cu),
            "torch varlen": lambda q, k, v, cu=cu, longest=longest: varlen(q, k, v, cu, longest).transpose(1, 2),
        }
        name = f"packed T={shape[3]}, {documents} documents D={size}"
        yield from _measure("attention", name, shape, packed, work, ScoreSettings(True, size**-0.5, None, None, cu, cu))
    for window in (None, 128) if only in "sinks" else ():
        shape = (1, 64, 8, 4096, 64)  # gpt-oss
        sinks = torch.randn(shape[1], device="cuda", generator=torch.Generator("cuda").manual_seed(2))
        seen = shape[3] / 2 if window is None else window
        masking = ScoreSettings(True, shape[4] ** -0.5, window, sinks=sinks)
        with_and_without: dict[str, Callable[..., torch.Tensor]] = {
            "ours": lambda q, k, v, window=window, sinks=sinks: flash_attention(q, k, v, window=window, sinks=sinks),
            "eager": lambda q, k, v, masking=masking: _eager_with_sinks(q, k, v, masking),
        }
        name = f"sinks H={shape[1]}/{shape[2]} T={shape[3]} D={shape[4]} window {window}"
        yield from _measure("attention", name, shape, with_and_without, 4.0 * shape[1] * shape[3] * seen * 64, masking)
    if only in "naive" and not quick:
        for shape in NAIVE_SHAPES:
            work = 2.0 * shape[0] * shape[1] * shape[3] ** 2 * shape[4]
            flash = "SDPA FlashAttention-2"
            candidates = {"ours": flash_attention, "naive": _naive, flash: _sdpa(BACKENDS[flash])}
            name = "naive B={} H={} T={} D={}".format(shape[0], shape[1], *shape[3:])
            yield from _measure("attention", name, shape, candidates, work, dtype=torch.float16)
