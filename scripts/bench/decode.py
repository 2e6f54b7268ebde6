"""Decode attention against SDPA: one new token a sequence over a cache, device time in a CUDA graph.

TB/s count the cached keys and values once. Caches are rotated where they would stay in L2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from distill_kernels.attention.operands import ScoreSettings
from distill_kernels.decoding.cached_attention import decode_attention, reference_decode_attention
from torch.nn.functional import scaled_dot_product_attention

from scripts.bench.harness import Row, copy_bandwidth, graphed, host_microseconds, time_in_turn

SHAPES = [  # batch, query heads, key heads, cached positions, head size
    (1, 32, 8, 4096, 128),
    (1, 32, 8, 16384, 128),
    (1, 32, 8, 131072, 128),
    (4, 32, 8, 4096, 128),
    (8, 32, 8, 8192, 128),
    (32, 32, 8, 4096, 128),
    (64, 32, 8, 1024, 128),
    (8, 32, 8, 8192, 64),
    (8, 32, 32, 4096, 128),
    (8, 16, 2, 8192, 256),
]
EARLIER = [(1, 8, 8, 512, 128), (1, 8, 8, 1024, 128), (1, 8, 8, 2048, 128), (2, 8, 8, 1024, 128)]
CALLS = 20


def _naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def _measure(shape: tuple[int, ...], dtype: torch.dtype, naive: bool, peak: float) -> Iterator[Row]:
    batch, heads, kv_heads, slots, size = shape
    bytes_read = 2 * batch * kv_heads * slots * size * 2
    sets = max(1, min(8, math.ceil(200 * 2**20 / bytes_read)))
    q = torch.randn(batch, 1, heads, size, device="cuda", dtype=dtype).transpose(1, 2)
    caches = torch.randn(sets, 2, batch, slots, kv_heads, size, device="cuda", dtype=dtype).transpose(3, 4)
    lengths = torch.full((batch,), slots, device="cuda", dtype=torch.int32)
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "ours": lambda q, k, v: decode_attention(q, k, v, lengths),
        "SDPA": _sdpa,
    }
    if naive:
        functions["naive"] = _naive
    exact = reference_decode_attention(q.double(), *caches[0].double(), lengths, ScoreSettings(True, size**-0.5))
    name = "B={} H={}/{} T={} D={}".format(*shape)
    runs, errors = {}, {}
    for label, function in functions.items():
        errors[label] = float((function(q, *caches[0]).double() - exact).norm() / exact.norm())
        if not errors[label] < 1e-2:
            yield Row("decode", name, label, math.nan, error={"out": errors[label]}, note="wrong, not timed")
            continue
        turn = itertools.cycle(range(sets))
        runs[label] = graphed(lambda f=function, t=turn: f(q, *caches[next(t)]), calls=CALLS)
    for label, ms in time_in_turn(runs).items():
        rate = bytes_read / (ms / CALLS) / 1e9
        host = host_microseconds(lambda f=functions[label]: f(q, *caches[0]), 50)
        note = f"{100 * rate / peak:.0f} % of copy bandwidth"
        error = {"out": errors[label]}
        yield Row("decode", name, label, ms / CALLS, tb_per_s=rate, error=error, host_us=host, note=note)


def run(quick: bool, only: str) -> Iterator[Row]:
    """Measure the shapes whose name contains `only`; `quick` takes the first ones."""
    peak = copy_bandwidth(2.0)
    for shape in SHAPES[:6] if quick else SHAPES:
        if only in "B={} H={}/{} T={} D={}".format(*shape):
            yield from _measure(shape, torch.bfloat16, False, peak)
    if not quick:
        for shape in EARLIER:
            yield from _measure(shape, torch.float16, True, peak)
