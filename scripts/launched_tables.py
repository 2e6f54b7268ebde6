"""Tables of launched kernels and of earlier published work in docs/benchmarks.md, made of rows.

Rows of the cases `launch`, `earlier` and `cuda_free`; what was never measured here says so.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

GPU = "NVIDIA H100 80GB HBM3"
LAUNCHED, IN_A_GRAPH = ", launched", ", in a graph"
ABSENT, REFUSED = "not run", "failed its check"
OURS, FLEX = "ours", "FlexAttention"
OWN = (
    "Triton only",
    "Triton only, one tile for all products",
    "ours on cuBLAS, CUDA graph",
    "transformers' layers on cuBLAS, CUDA graph",
)
Rows = list[dict[str, Any]]


# reported speed-up of each configuration of the kernel collection, by its name in the rows
REPORTED = {
    "attention B=1 H=1 T=512 D=64 fp16, forward": 1.35,
    "attention B=1 H=1 T=1024 D=64 fp16, forward": 1.70,
    "attention B=1 H=1 T=2048 D=64 fp16, forward": 2.52,
    "attention B=2 H=4 T=512 D=64 fp16, forward": 2.71,
    "bias + GELU B=2 T=256 O=4096 fp16, forward": 6.21,
    "bias + GELU B=2 T=512 O=4096 fp16, forward": 10.55,
    "bias + GELU B=2 T=1024 O=4096 fp16, forward": 14.36,
    "bias + GELU B=2 T=1024 O=16384 fp16, forward": 14.65,
    "AdamW 1 M fp32, one tensor": 1.41,
    "AdamW 10 M fp32, one tensor": 3.36,
    "AdamW 50 M fp32, one tensor": 3.45,
    "decode attention B=1 H=8 T=512 D=128 fp16": 2.13,
    "decode attention B=1 H=8 T=1024 D=128 fp16": 1.94,
    "decode attention B=1 H=8 T=2048 D=128 fp16": 1.94,
    "decode attention B=2 H=8 T=1024 D=128 fp16": 3.94,
}


class Inference(NamedTuple):
    """A reported decode: milliseconds a token, compiled, with Triton kernels alone and with CUDA kernels."""

    gpu: str
    model: str
    shape: str
    triton: float
    cuda: float


INFERENCE = (
    Inference("H100", "Llama3-8B", "llama-3.1-8b, 2 x 512 in, 256 out, bf16", 10.61, 8.59),
    Inference("H100", "Granite-8B", "granite-3.3-8b, 2 x 512 in, 256 out, bf16", 11.59, 9.50),
    Inference("A100", "Llama3-8B", "llama-3.1-8b, 2 x 512 in, 256 out, bf16", 17.94, 12.96),
    Inference("A100", "Granite-8B", "granite-3.3-8b, 2 x 512 in, 256 out, bf16", 16.88, 14.25),
)
COLUMNS = ("kernel, against", "reported", "ours, launched", "ours, in a graph", "most that bytes allow")


def _made_of(rows: Rows) -> str:
    newest = max(rows, key=lambda row: row["date"])
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    made = f"{newest['gpu']}, torch {newest['torch']}, triton {newest['triton']}, driver {newest['driver']}"
    return f"<sub>{made}, commit {commits}, {newest['date']}</sub>"


def _table(heading: tuple[str, ...], lines: list[tuple[str, ...]]) -> list[str]:
    rule = "|" + "|".join(["---", *["---:"] * (len(heading) - 1)]) + "|"
    return ["| " + " | ".join(heading) + " |", rule, *["| " + " | ".join(line) + " |" for line in lines]]


def launched(rows: Rows) -> str:
    """Return the table of host times of launched calls, ours and PyTorch's, from rows of `scripts.bench launch`."""
    here = {}
    for row in rows:
        if row["gpu"] == GPU and row["case"].startswith("launch "):
            name, _, direction = row["case"].removeprefix("launch ").partition(", ")
            here.setdefault((name, row["shape"]), {})[direction, row["candidate"]] = row
    lines = []
    for (name, shape), found in here.items():
        cells = []
        for direction in ("forward", "forward and backward"):
            ours, theirs = (found[direction, candidate]["host_us"] for candidate in ("distill", "PyTorch"))
            cells += [f"{ours:.0f}", f"{theirs:.0f}", f"**{ours / theirs:.2f} x**"]
        lines.append((f"{name}, {shape}", *cells))
    heading = ("µs of host time", "ours, forward", "PyTorch", "ratio", "ours, and backward", "PyTorch", "ratio")
    return "\n".join(
        [*_table(heading, lines), "", _made_of([row for found in here.values() for row in found.values()])]
    )


def kernels(rows: Rows) -> str:
    """Return the table of the kernel collection: speed-ups over forms of PyTorch, theirs and ours.

    Args:
        rows: The newest rows of all GPUs.

    Raises:
        ValueError: No row of a configuration.
    """
    here = {(row["shape"], row["candidate"]): row for row in rows if (row["gpu"], row["case"]) == (GPU, "earlier")}
    lines, used = [], []
    for name, reported in REPORTED.items():
        forms = [form for shape, form in here if shape == name + LAUNCHED and form != OURS]
        if not forms:
            raise ValueError(f"no row of the case `earlier` on an {GPU} for {name!r}")
        for form in forms:
            pairs = [(here[name + way, form], here[name + way, OURS]) for way in (LAUNCHED, IN_A_GRAPH)]
            used += [row for pair in pairs for row in pair]
            ratios = [f"**{theirs['ms'] / ours['ms']:.2f} x**" for theirs, ours in pairs]
            _, _, bound = pairs[1][0]["note"].partition("our bytes at a copy's rate: ")
            theirs = "not reported" if form == FLEX else f"{reported:.2f} x"
            lines.append((f"{name}, against {form}", theirs, *ratios, bound.split(";")[0]))
    return "\n".join([*_table(COLUMNS, lines), "", _made_of(used)])


def inference(rows: Rows) -> str:
    """Return the table of decoding without CUDA kernels: milliseconds a token, theirs and ours."""
    lines, used = [], []
    for line in INFERENCE:
        own = [row for row in rows if row["case"] == "cuda_free" and row["shape"] == line.shape]
        own = [row for row in own if line.gpu in row["gpu"].replace("H200", "H100")]
        by_candidate = {row["candidate"]: row for row in own}
        used += own
        figures = []
        for candidate in OWN:
            row = by_candidate.get(candidate)
            figures.append(ABSENT if row is None else REFUSED if math.isnan(row["ms"]) else f"{row['ms'] / 256:.2f}")
        lines.append((f"{line.model}, {line.gpu}", f"{line.triton:.2f}", f"{line.cuda:.2f}", *figures))
    heading = (
        "ms a token",
        "reported, Triton",
        "reported, CUDA",
        "ours, Triton",
        "one tile",
        "ours, cuBLAS",
        "transformers",
    )
    return "\n".join([*_table(heading, lines), "", _made_of(used)])


def tables(rows: Rows) -> str:
    """Return the tables, each under a line that says what it compares."""
    return "\n\n".join(
        [
            "Host time of one call that is launched from Python, until its work is enqueued, beside PyTorch's own "
            "function, bf16: what decides where the GPU needs less than that. (`python -m scripts.bench launch`)",
            launched(rows),
            "Speed-ups over PyTorch of a published collection of Triton kernels, and ours on the same shapes. Theirs "
            "were timed as launched from Python. *Most that bytes allow* is the speed-up of a kernel that moves our "
            "bytes at the rate of a copy: where it is below the reported figure, the baseline or the GPU was another. "
            "(case `earlier`)",
            kernels(rows),
            "Generation without CUDA kernels, 2 prompts of 512 tokens, 256 new tokens. Theirs were measured on an H100 "
            "and an A100, ours on an H200 in place of the H100; no A100 was available here. Their tuning of the matrix "
            "products for each shape gave 1.20 x end to end; *one tile* is ours without it, one launch shape for all "
            "products. (case `cuda_free`)",
            inference(rows),
        ]
    )
