"""The generated tables of docs/reference/gpus.md: which GPU runs which kernels, from the table that `check` uses."""

from __future__ import annotations

import json
from collections.abc import Iterator

from distill_kernels.launch import FAMILIES, INTERPRETER, OLDER

from distill.models.gpu_specs import GPU_SPECS, GpuSpec, has_fp8, path_of
from distill.planning.step_time import COPY_EFFICIENCY, GEMM_EFFICIENCY
from scripts.bench.harness import RESULTS
from scripts.bench.losses import MAIN

# GPUs of a family beside those of GPU_SPECS
MORE = {"sm_86": "A40, RTX A6000, RTX 30", "sm_89": "RTX 6000 Ada, RTX 40", "sm_100": "B300", "sm_120": "RTX 50, GB10"}
LOSS_CASE = "linear forward_kl", str(MAIN), "ours"
# why a prediction may miss; families that are absent were measured
CONFIDENCE = {
    "sm_80": "medium: bytes and FLOPs of kernels that run on sm_90; the range is an fp32 buffer in L2 or in memory",
    "sm_86": "medium: as sm_80, but an L2 of 6 MB does not hold the buffer of 32 MiB: rather the upper end",
    "sm_89": "medium: as sm_80, and an L2 of 48 to 96 MB holds the buffer of 32 MiB: rather the lower end",
    "sm_100": "low: tiles were chosen on sm_90, and statistics of a tile, 0.5 ms beside 13 of GEMMs, do not overlap",
    "sm_120": "low: its 99 KiB of shared memory allow half of sm_90's tiles, whose rate is unknown",
    "gfx942": "low: as sm_80, and GEMMs by hipBLASLt at an assumed 72 % of their peak",
}
SHOWN = [*(family for family in FAMILIES if family != INTERPRETER), OLDER]


def families() -> str:
    """A line for each family: its GPUs, what computes there, how far that was tried, fp8."""
    lines = ["| family | GPUs | what computes | tried | teacher in fp8 |", "|---|---|---|---|---|"]
    for family in SHOWN:
        names = [name for name, gpu_spec in GPU_SPECS.items() if gpu_spec.family == family]
        path, _, tried = path_of(family).partition("; ")
        gpus = ", ".join([*names, *([MORE[family]] if family in MORE else [])])
        fp8 = "yes" if has_fp8(family) else "no: int8, or offloaded"
        lines.append(f"| {'before sm_80' if family == OLDER else family} | {gpus} | {path} | {tried} | {fp8} |")
    lines.append("| other | Intel, Apple and other AMD GPUs, architectures to come | PyTorch computes | | no |")
    return "\n".join(lines)


def cards() -> str:
    """A line for each gpu_spec, as `check --gpu` plans with it."""
    lines = [
        "| `--gpu` | family | memory, GiB | GB/s | bf16, TFLOP/s | fp8, TFLOP/s | PCIe, GB/s |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name, gpu_spec in GPU_SPECS.items():
        rates = [f"{rate:,g}" if rate is not None else "none" for rate in (gpu_spec.bf16, gpu_spec.fp8)]
        cells = [
            name,
            gpu_spec.family,
            f"{gpu_spec.memory_gib:g}",
            f"{gpu_spec.bandwidth:,g}",
            *rates,
            f"{gpu_spec.link:g}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def predicted_ratios(spec: GpuSpec) -> tuple[float, float] | None:
    """Return the least and the largest predicted time of the fused forward KL over its GEMMs; None without bf16.

    The row kernel reads 4 bytes a logit of student and teacher and writes 2. Without TMA the projections pass through
    an fp32 buffer: 8 bytes more for each model, which cost nothing at the least (in L2) or memory bandwidth.
    """
    if spec.flops is None:
        return None
    logits = MAIN.rows * MAIN.vocab
    gemms = 2 * logits * (3 * MAIN.student + MAIN.teacher) / (GEMM_EFFICIENCY * spec.flops)
    per_byte = logits / (COPY_EFFICIENCY * spec.bandwidth * 1e9)
    buffered = 0 if FAMILIES[spec.family].tma else 16
    return 1 + 6 * per_byte / gemms, 1 + (6 + buffered) * per_byte / gemms


def measured_ratios() -> Iterator[tuple[str, float]]:
    """Yield GPU and ratio of the newest measurement of the fused forward KL, by GPU."""
    for path in sorted(RESULTS.glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [row for row in rows if (row["case"], row["shape"], row["candidate"]) == LOSS_CASE]
        if rows:
            yield rows[-1]["gpu"], rows[-1]["floor_ratio"]


def loss_times() -> str:
    """A line for each family: the fused forward KL over its GEMMs as predicted, and the confidence in it."""
    lines = ["| family | GPUs | forward KL / its GEMMs, predicted | confidence |", "|---|---|---:|---|"]
    for family in SHOWN:
        specs = {name: spec for name, spec in GPU_SPECS.items() if spec.family == family}
        ranges = [ratios for ratios in map(predicted_ratios, specs.values()) if ratios is not None]
        if ranges:
            least, most = min(low for low, _ in ranges), max(high for _, high in ranges)
            seen = ", ".join(f"{ratio:.2f} on an {gpu.split()[1]}" for gpu, ratio in measured_ratios())
            confidence = CONFIDENCE.get(family, f"measured: {seen}")
            predicted = " to ".join(dict.fromkeys((f"{least:.2f}", f"{most:.2f}")))
            lines.append(f"| {family} | {', '.join(specs)} | {predicted} | {confidence} |")
    return "\n".join(lines)
