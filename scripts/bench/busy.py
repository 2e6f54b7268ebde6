"""GPU utilisation while `distill run` trains: the share of time in which kernels run.

Four optimizer steps of a real run, in which all is compiled and nothing is logged, are traced by torch's profiler; the
share is the union of all kernels and copies over the time from the first one's start to the last one's end.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import TrainerCallback

from scripts.bench.harness import Row
from scripts.bench.many_gpus import DRY, ROOT

RECIPES = {
    "full": ["recipes/llama3-8b-to-1b.yaml", "student.dtype=bfloat16"],
    "lora": [
        "recipes/llama3-8b-to-1b-lora.yaml",
        "student.dtype=bfloat16",
        "train.gradient_checkpointing=false",
        "train.batch_size=2",
        "data.max_length=4096",
    ],
}
FIRST, LAST = 5, 9


def busy_share(spans: Iterable[tuple[float, float]], bridged: float = 0.0) -> tuple[float, float]:
    """Share of the time that any of `spans` (start, end) covers, and that time, from the first start to the last end.

    Gaps of at most `bridged` seconds count as covered: what a GPU takes from one kernel of a graph to the next.

    Raises:
        ValueError: no spans.
    """
    ordered = sorted(spans)
    if not ordered:
        raise ValueError("busy: expected traced kernels, found none")
    covered, reached = 0.0, ordered[0][0]
    for start, end in ordered:
        begun = reached if start - reached <= bridged else start
        covered += max(end - max(begun, reached), 0.0)
        reached = max(reached, end)
    whole = reached - ordered[0][0]
    return covered / whole, whole


class Trace(TrainerCallback):
    """Traces the steps after `first`, up to and with `last`."""

    def __init__(self, first: int = FIRST, last: int = LAST) -> None:
        self.first, self.last = first, last
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start and stop."""
        if state.global_step == self.first:
            torch.cuda.synchronize()
            self.profiler.start()
        elif state.global_step == self.last:
            torch.cuda.synchronize()
            self.profiler.stop()

    def spans(self) -> list[tuple[float, float]]:
        """Start and end of all that ran on the GPU, seconds."""
        events: Any = self.profiler.events()
        on_gpu = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
        return [(event.time_range.start * 1e-6, event.time_range.end * 1e-6) for event in on_gpu]


def run(quick: bool, only: str) -> Iterator[Row]:
    """`only` names a part of the candidates' names."""
    import distill.run
    from distill.recipe import load
    from distill.training.trainer import DistillationTrainer

    here = os.getcwd()
    names = [name for name in RECIPES if only in name]
    for name in names:
        path, *overrides = RECIPES[name]
        trace = Trace()
        recipe = load(ROOT / path, [*DRY, *overrides, f"train.steps={LAST + 1}", "train.log_every=100"])

        class Traced(DistillationTrainer):
            def __init__(self, *args: Any, callbacks: Any = None, **more: Any) -> None:
                super().__init__(*args, callbacks=[*(callbacks or []), trace], **more)  # noqa: B023

        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            distill.run.DistillationTrainer = Traced  # type: ignore[misc]
            try:
                distill.run.run(recipe)
            finally:
                distill.run.DistillationTrainer = DistillationTrainer  # type: ignore[misc]
                os.chdir(here)
        share, seconds = busy_share(trace.spans())
        step = seconds / (LAST - FIRST)
        tokens = recipe.train.batch_size * recipe.data.max_length
        yield Row(
            case="busy",
            shape=f"8B to 1B shapes, {recipe.train.batch_size} x {recipe.data.max_length} tokens, bf16",
            candidate=name,
            ms=step * 1e3,
            peak_mib=torch.cuda.max_memory_allocated() / 2**20,
            tokens_per_s=tokens / step,
            note=f"GPU busy {share:.1%}",
        )
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
