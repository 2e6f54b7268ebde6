"""The generated tables of docs/reference/gpus.md: which GPU runs which kernels, from the table that `check` uses."""

from __future__ import annotations

from distill_kernels.launch import FAMILIES, INTERPRETER, OLDER

from distill.models.gpu_specs import GPU_SPECS, has_fp8, path_of

# GPUs of a family beside those of GPU_SPECS
MORE = {"sm_86": "A40, RTX A6000, RTX 30", "sm_89": "RTX 6000 Ada, RTX 40", "sm_100": "B300", "sm_120": "RTX 50, GB10"}
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
