"""A teacher's forward with its layers in host memory: resident, ours, and accelerate's `cpu_offload`, Llama-3.1-8B.

The floor is the slower of the resident forward and the layers' bytes over the rate of one pinned copy, measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import cpu_offload

from distill.models.head import decoder_of
from distill.models.precision.offload import offload_layers
from scripts.bench.harness import Row, peak_above_inputs, time_in_turn
from scripts.bench.step import TEACHER, random_model

SHAPES = {"1 x 512": (1, 512), "2 x 4096": (2, 4096), "8 x 4096": (8, 4096)}
CUDA = torch.device("cuda", 0)


def bus_gb_per_s(gib: int = 2) -> float:
    """GB/s of one large copy from pinned host memory to the GPU."""
    source = torch.empty(gib * 2**30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(gib * 2**30, dtype=torch.uint8, device=CUDA)
    ms = time_in_turn({"copy": lambda: target.copy_(source, non_blocking=True)}, rounds=5, calls=2)["copy"]
    return source.numel() / ms / 1e6


def hidden_of(model: Any, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The forward that training asks of a teacher."""

    def run() -> torch.Tensor:
        with torch.inference_mode():
            return decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    return run


def run(quick: bool, only: str) -> Iterator[Row]:
    """`quick` takes two shapes and leaves accelerate out; `only` names shapes."""
    rate = bus_gb_per_s()
    torch.cuda.empty_cache()
    ours: Any = random_model(TEACHER, 0).requires_grad_(False).cpu()
    offload_layers(ours, CUDA)
    streamer = ours.__dict__["_distill_streamer"]
    moved = sum(map(len, streamer.host))
    models = {"ours, offloaded": ours, "resident": random_model(TEACHER, 0).requires_grad_(False)}
    if not quick:
        models["accelerate cpu_offload"] = cpu_offload(random_model(TEACHER, 0).requires_grad_(False).cpu(), CUDA)
    for name, (batch, length) in SHAPES.items():
        if (only and only not in name) or (quick and name == "8 x 4096"):
            continue
        ids = torch.randint(0, 128_000, (batch, length), device=CUDA)
        candidates = {label: hidden_of(model, ids) for label, model in models.items()}
        expected = candidates["resident"]().float()
        errors = {
            label: ((call().float() - expected).norm() / expected.norm()).item() for label, call in candidates.items()
        }
        times = time_in_turn(candidates, rounds=5, calls=2, settle=1)
        floor = max(times["resident"], moved / rate / 1e6)
        for label, call in candidates.items():
            yield Row(
                case="offload",
                shape=f"{TEACHER} forward, {name} tokens, bf16",
                candidate=label,
                ms=times[label],
                floor_ratio=times[label] / floor,
                peak_mib=peak_above_inputs(call),
                error={"hidden": errors[label]},
                tokens_per_s=batch * length / times[label] * 1e3,
                note=f"{moved / 2**30:.1f} GiB of layers; the bus carries {rate:.1f} GB/s",
            )
