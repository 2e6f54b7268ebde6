"""Measurement shared by all benchmarks: timing, memory, energy, and rows of results.

Candidates run in turn, round after round, in one process, so that all see the same thermal state; the median of
their CUDA-event timings is kept. A candidate that fails its correctness gate is not timed. Peak memory is what
a call allocates above the inputs. Rows are appended to `results/<gpu>.jsonl` with the versions that made them.
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass
class Row:
    """One measured candidate of one case. Times in ms, memory in MiB, bandwidth in TB/s, work in TFLOP/s."""

    case: str
    shape: str
    candidate: str
    ms: float
    floor_ratio: float | None = None
    peak_mib: float | None = None
    error: dict[str, float] = field(default_factory=dict)
    tb_per_s: float | None = None
    tflop_per_s: float | None = None
    host_us: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    joules: float | None = None
    note: str = ""


def time_in_turn(
    candidates: Mapping[str, Callable[[], object]], *, rounds: int = 7, calls: int = 3, settle: int = 2
) -> dict[str, float]:
    """Median milliseconds a call of each candidate; `rounds` rounds of `calls` calls each, all candidates in turn.

    Before each timed group the candidate itself runs `flush` times, so that a group starts with its own clocks and
    caches rather than its neighbour's.
    """
    for run in candidates.values():
        run()
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            for _ in range(settle):
                run()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(calls):
                run()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(start.elapsed_time(end) / calls)
    return {name: statistics.median(values) for name, values in samples.items()}


def graphed(run: Callable[[], object], *, calls: int = 10) -> Callable[[], object]:
    """`run`, captured `calls` times in one CUDA graph: what replays is device work without the host's launch cost.

    Divide the time of a replay by `calls`. Rotate input sets inside `run` where they would fit in the cache.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph.replay


def host_microseconds(run: Callable[[], object], calls: int = 200) -> float:
    """Microseconds of host time that one call takes to enqueue its work."""
    for _ in range(20):
        run()
    torch.cuda.synchronize()
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls // 5):
            run()
        samples.append((time.perf_counter() - start) / (calls // 5) * 1e6)
        torch.cuda.synchronize()
    return statistics.median(samples)


def peak_above_inputs(run: Callable[[], object]) -> float:
    """MiB that `run` allocates at its peak beyond what is allocated when it starts."""
    run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def copy_bandwidth(gib: float = 4.0) -> float:
    """TB/s of a large device-to-device copy, read plus written."""
    source = torch.randint(0, 255, (int(gib * 2**30),), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ms = time_in_turn({"copy": lambda: target.copy_(source)}, rounds=5, calls=3)["copy"]
    return 2 * source.numel() / ms / 1e9


@functools.cache
def environment() -> dict[str, str]:
    """Versions that a row depends on; BENCH_COMMIT names the commit where the working tree has no git."""
    import triton

    def ask(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return ""

    driver = ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "driver": driver[0] if driver else "",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": os.environ.get("BENCH_COMMIT") or ask("git", "rev-parse", "--short", "HEAD") or "unknown",
        "date": time.strftime("%Y-%m-%d"),
    }


def record(row: Row, folder: Path | None = None) -> Path:
    """Append `row` with the environment to `<folder>/<gpu>.jsonl`, one JSON object a line."""
    facts = environment()
    path = (folder or RESULTS) / (facts["gpu"].replace(" ", "-").lower() + ".jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in asdict(row).items() if value not in (None, {}, "")}
    with path.open("a") as file:
        file.write(json.dumps({**kept, **facts}) + "\n")
    return path


def table(rows: list[Row]) -> str:
    """The rows as plain text, one line each, grouped by case and shape."""
    lines, heading = [], None
    for row in rows:
        if (row.case, row.shape) != heading:
            heading = (row.case, row.shape)
            lines.append(f"\n{row.case}  {row.shape}")
        cells = [f"  {row.candidate:<44}", f"{row.ms:9.4f} ms" if not math.isnan(row.ms) else "   failed   "]
        for value, form in (
            (row.floor_ratio, "{:5.2f} x floor"),
            (row.tb_per_s, "{:5.2f} TB/s"),
            (row.tflop_per_s, "{:6.0f} TFLOP/s"),
            (row.peak_mib, "{:8.0f} MiB"),
            (row.host_us, "{:6.1f} us host"),
            (row.tokens_per_s, "{:7.0f} tokens/s"),
            (row.mfu, "MFU {:.3f}"),
            (row.joules, "{:6.1f} J"),
        ):
            if value is not None:
                cells.append(form.format(value))
        cells += [f"{name} {error:.1e}" for name, error in row.error.items()]
        lines.append("  ".join([*cells, row.note]).rstrip())
    return "\n".join(lines)
