"""The generated tables of docs/reference/gpus.md: which GPU runs which kernels, from the table that `check` uses."""

from __future__ import annotations

from distill_kernels.launch import FAMILIES, INTERPRETER, OLDER

from distill.models.cards import CARDS, has_fp8, path_of

# GPUs of a family beside those of CARDS
MORE = {"sm_86": "A40, RTX A6000, RTX 30", "sm_89": "RTX 6000 Ada, RTX 40", "sm_100": "B300", "sm_120": "RTX 50, GB10"}
SHOWN = [*(family for family in FAMILIES if family != INTERPRETER), OLDER]


def families() -> str:
    """A line for each family: its GPUs, what computes there, how far that was tried, fp8."""
    lines = ["| family | GPUs | what computes | tried | teacher in fp8 |", "|---|---|---|---|---|"]
    for family in SHOWN:
        names = [name for name, card in CARDS.items() if card.family == family]
        path, _, tried = path_of(family).partition("; ")
        gpus = ", ".join([*names, *([MORE[family]] if family in MORE else [])])
        fp8 = "yes" if has_fp8(family) else "no: int8, or offloaded"
        lines.append(f"| {'before sm_80' if family == OLDER else family} | {gpus} | {path} | {tried} | {fp8} |")
    lines.append("| other | Intel, Apple and other AMD GPUs, architectures to come | PyTorch computes | | no |")
    return "\n".join(lines)


def cards() -> str:
    """A line for each card, as `check --gpu` plans with it."""
    lines = [
        "| `--gpu` | family | memory, GiB | GB/s | bf16, TFLOP/s | fp8, TFLOP/s | PCIe, GB/s |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name, card in CARDS.items():
        rates = [f"{rate:,g}" if rate is not None else "none" for rate in (card.bf16, card.fp8)]
        cells = [name, card.family, f"{card.memory_gib:g}", f"{card.bandwidth:,g}", *rates, f"{card.link:g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
