"""Training metrics: distillation metrics, tokens per second, MFU and peak memory.

Everything is summed on the device and read once per logging step, where the trainer synchronises anyway.

Tokens per second count the positions that went through the models (padding included; packing leaves little) and,
separately, the trained ones (labels that are not masked), over the wall time since the last logging step, less the time
of evaluations and checkpoints. The same time is split into phases (`phases.py`), in seconds per optimizer step.

MFU, model FLOPs utilisation (Chowdhery et al., 2022, appendix B), is the model's arithmetic divided by elapsed time and
by the GPU's dense bf16 peak; recomputation (gradient checkpointing) does not count. With P the parameters of the
decoder without its embedding and V x H the head, per step:

    teacher   2 P tokens + 2 V H trained + 4 L A pairs
    student   f P tokens + h V H trained + (4 + 8) L A pairs

f is 6 where all weights are trained and 4 with frozen base weights (LoRA: no weight gradients), h the same for the
head, L layers, A = heads x head width, pairs the (query, key) pairs inside documents, sum over tokens of position + 1
(sliding windows are not subtracted). Tokens and pairs of a teacher are those that it reads: with a privileged context
more than the student's, with routes each teacher's own. An unknown GPU, or a mixture of experts, gives no MFU rather
than a guess.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from distill.core.labels import count_trained_tokens
from distill.core.units import GIB
from distill.models.flops import FlopCounts
from distill.models.gpu_specs import peak_flops
from distill.objectives.losses import PER_ROUTE, STATISTICS
from distill.training.phases import PAUSED, Phases

OF_DIVERGENCE = [STATISTICS.index("divergence"), STATISTICS.index("clipped_value")]  # sums in the divergence's unit


class Meter:
    """Sums of one logging interval, kept on the device.

    Args:
        device: Device of the sums.
        teacher: FLOPs per token of the teacher, from its `works`; None for no MFU.
        student: FLOPs per token of the student, from `count_flops`; None for no MFU.
        divergence: Name of the objective's divergence (None: no teacher in the loss) and the sum of the terms' weights.
        routes: Routes of the teacher, each with metrics of its own.
        clips: Whether the loss caps divergences, which has metrics too.
    """

    def __init__(
        self,
        device: torch.device,
        teacher: Mapping[str, FlopCounts | None],
        student: FlopCounts | None,
        divergence: tuple[str | None, float] = ("kl", 1.0),
        routes: Sequence[str] = (),
        clips: bool = False,
    ) -> None:
        self.device = device
        self.clips = clips
        self.teacher = teacher
        self.student = student
        self.divergence = divergence
        self.routes = routes
        self.peak = peak_flops(device)
        self.tokens_seen = 0
        self._pause = 0.0
        self.phases = Phases(device)
        self.restart()

    def restart(self) -> None:
        precision = torch.float32 if self.device.type == "mps" else torch.float64
        self._sums = torch.zeros(count_sums(self.routes), dtype=precision, device=self.device)
        # trained tokens, those that the statistics are over, those of them with a teacher, pairs
        self._counts = torch.zeros(4, dtype=precision, device=self.device)
        self._drawn = torch.zeros(2 + 2 * max(len(self.routes), 1), dtype=precision, device=self.device)
        self._work = torch.zeros((), dtype=precision, device=self.device)  # of the teacher
        self._tokens = 0
        self._start = time.perf_counter()
        self._pause = 0.0
        self.phases.restart()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with self.phases.measure(PAUSED):
                yield
        finally:
            self._pause += time.perf_counter() - start

    def add(
        self,
        inputs: Mapping[str, torch.Tensor],
        statistics: torch.Tensor,
        weight: float | None = None,
        drawn: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
    ) -> None:
        """Count one micro-batch. Launches a few small kernels, never waits.

        Args:
            inputs: The collated batch.
            statistics: The objective's sums.
            weight: Weight of the divergences in `statistics` under a loss schedule, 0 where the teacher is not used;
                None without a schedule.
            drawn: Sums over sampled tokens, as the student's forward returns them; None without rollouts.
            weights: Sums of token weights, likewise; None for equal weights.
        """
        if drawn is not None:
            self._drawn += drawn
        if weight:  # rescale to the weight by which the means are divided
            begin = len(STATISTICS)
            size = len(PER_ROUTE)
            divergences = [*OF_DIVERGENCE, *range(begin + PER_ROUTE.index("divergence"), len(statistics), size)]
            statistics = statistics.detach().clone()
            statistics[divergences] *= self.divergence[1] / weight
        self._sums += statistics.detach()
        rows = inputs.get("valid_rows")
        trained = count_trained_tokens(inputs) if rows is None else rows.numel()
        tokens, pairs = _size_of(inputs)
        counted = trained if weights is None else trained - weights[2]  # a token of weight 0 has no statistics
        self._counts[0] += trained
        self._counts[1] += counted
        self._counts[2] += 0 if weight == 0 else counted
        self._counts[3] += pairs
        self._tokens += tokens
        for prefix, work in self.teacher.items() if weight != 0 and self.divergence[0] else ():
            if work is not None and f"{prefix}input_ids" in inputs:  # absent: no document of this route
                rows = inputs.get(f"{prefix}rows")
                read, read_pairs = _size_of(inputs, prefix)
                learned = trained if rows is None else rows.numel()
                self._work += work.token * read + work.trained * learned + work.pair * read_pairs

    def read(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Return the interval's metrics over all ranks, and start a new interval. One synchronisation.

        Returns:
            kl or divergence, cross_entropy, teacher_cross_entropy, student_entropy, teacher_entropy, agreement (means
            over trained tokens, natural logarithms), per route kl_NAME, agreement_NAME and tokens_NAME,
            rollout_gap (mean absolute difference between the engine's and the trainer's log-probability of a token
            that the student sampled), overlap (share of the student's top-8 tokens that are among the teacher's, on
            some tokens of its rollouts; per route overlap_NAME), clipped_tokens and clipped_value (shares of the tokens
            and of the divergence that caps take), tokens_per_second, trained_tokens_per_second,
            tokens_seen (since this process started), peak_memory_gib, time_data and the other phases (seconds per
            optimizer step, means over the ranks) and, where known, mfu, mfu_teacher and mfu_student (fractions of 1).
        """
        phases = self.phases.seconds()
        steps = max(self.phases.steps, 1)
        # The host's numbers go with the device's sums, so that one reduction and one wait serve all; the 1 counts the
        # ranks.
        host = self._counts.new_tensor([self._tokens, 1.0, *phases.values()])
        values = reduce(torch.cat([self._sums, self._drawn, self._counts, self._work[None], host])).tolist()
        begin = len(self._sums)
        end = len(self._sums) + len(self._drawn)
        sums = values[:begin]
        (gap, drawn, *shares) = values[begin:end]
        trained, counted, compared, pairs, work, tokens, ranks, *times = values[end:]
        seconds = max(time.perf_counter() - self._start - self._pause, 1e-9)
        self.tokens_seen += int(tokens)
        divergence = self.divergence if compared or not counted else (None, 1.0)
        figures = metrics_from_sums(sums, counted, divergence, self.routes, compared, self.clips) | {
            "tokens_per_second": tokens / seconds,
            "trained_tokens_per_second": trained / seconds,
            "trained_tokens": trained,
            "tokens_seen": float(self.tokens_seen),
            "seconds": seconds,
            "peak_memory_gib": peak_memory(self.device) / GIB,
            **{f"time_{name}": total / ranks / steps for name, total in zip(phases, times, strict=True)},
        }
        if drawn:
            figures["rollout_gap"] = gap / drawn
        overlaps = {"overlap": shares}  # shared tokens and count, of each route in turn
        overlaps |= {f"overlap_{route}": shares[2 * n : 2 * n + 2] for n, route in enumerate(self.routes)}
        for name, sums_and_counts in overlaps.items():
            count = sum(sums_and_counts[1::2])
            if count:
                figures[name] = sum(sums_and_counts[::2]) / count
        if self.peak and None not in self.teacher.values() and self.student:
            available = self.peak * seconds * ranks
            figures["mfu_teacher"] = work / available
            figures["mfu_student"] = self.student.total(tokens, trained, pairs) / available
            figures["mfu"] = figures["mfu_teacher"] + figures["mfu_student"]
        self.restart()
        return figures


def _size_of(inputs: Mapping[str, torch.Tensor], prefix: str = "") -> tuple[int, torch.Tensor | int]:
    """Return the tokens and (query, key) pairs of a batch as one model reads it."""
    positions = inputs.get(f"{prefix}position_ids")
    batch, length = inputs[f"{prefix}input_ids"].shape
    return batch * length, batch * length * (length + 1) // 2 if positions is None else (positions + 1).sum()


def count_sums(routes: Sequence[str]) -> int:
    """Return the number of sums that the objective returns as statistics."""
    return len(STATISTICS) + len(PER_ROUTE) * len(routes)


def held_out_figures(divergence: tuple[str | None, float], routes: Sequence[str]) -> set[str]:
    """Return the names of the figures of an evaluation; with routes those of a route without tokens are left out."""
    sums = [1.0] * count_sums(routes)
    return {"loss", "perplexity", *metrics_from_sums(sums, 1.0, divergence, routes)}


def metrics_from_sums(
    sums: list[float],
    trained: float,
    divergence: tuple[str | None, float],
    routes: Sequence[str] = (),
    compared: float | None = None,
    clips: bool = False,
) -> dict[str, float]:
    """Return means of the objective's statistics, by metric name.

    Statistics of the student are means over the `trained` tokens, those of the teacher over the `compared` tokens
    (fewer where some steps do not query it), those of a route over the route's tokens, whose number is returned too.
    With `clips`, the shares that caps take.
    """
    mean = {name: value / max(trained, 1.0) for name, value in zip(STATISTICS, sums, strict=False)}
    name, weight = divergence
    figures = {key: mean[key] for key in ("cross_entropy", "student_entropy")}
    if compared is not None and compared != trained:
        mean = {key: value * trained / max(compared, 1.0) for key, value in mean.items()}
    if name is not None:
        figures |= {name: mean["divergence"] / weight, "agreement": mean["agreement"]}
        figures |= {"teacher_entropy": mean["teacher_entropy"], "teacher_cross_entropy": -mean["teacher_label_logprob"]}
        if clips:
            whole = mean["divergence"]
            figures |= {
                "clipped_tokens": mean["clipped_tokens"],
                "clipped_value": mean["clipped_value"] / whole if whole else 0.0,
            }
    for number, route in enumerate(routes if name is not None else ()):
        begin = len(STATISTICS) + len(PER_ROUTE) * number
        tokens, total, agreement = sums[begin : begin + len(PER_ROUTE)]
        figures[f"tokens_{route}"] = tokens
        if tokens:
            figures |= {f"{name}_{route}": total / weight / tokens, f"agreement_{route}": agreement / tokens}
    return figures


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of the CUDA allocator, or on a CPU the largest resident set of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
