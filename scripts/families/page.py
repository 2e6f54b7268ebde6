"""The rows of `results.jsonl`, and the table that docs/reference/supported-models.md has of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.jsonl")
PARTS = (
    ("attention", "attention"),
    ("residual_norm", "residuals"),
    ("rms_norm", "norms"),
    ("layer_norm", "norms"),
    ("glu", "MLP"),
    ("bias_gelu", "MLP"),
    ("rope", "rotary"),
)
# families of which a check fails, and why
KNOWN: dict[str, str] = {
    "gemma4_unified_text": "transformers refuses to name one size of head for layers whose heads differ",
    "inkling_text": "its logits have a scale that the loss cannot read: it is refused in one line",
    "youtu": "transformers sets the embedding of the padding token to zero whenever it loads this family",
}
HEAD = ("family", "packed rows", "padded rows", "gradients", "kernels", "cut student", "resume", "reload, export")


def read_rows() -> dict[str, dict[str, Any]]:
    """Return the recorded row of each family."""
    if not RESULTS.exists():
        return {}
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return {row["family"]: row for row in rows}


def write_rows(rows: dict[str, dict[str, Any]]) -> None:
    """Record rows, in the order of their names."""
    lines = [json.dumps(rows[name]) for name in sorted(rows)]
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def table() -> str:
    """Return a line for each family, and one of the versions that were tried."""
    rows = list(read_rows().values())
    lines = [f"| {' | '.join(HEAD)} |", "|---|" + "---|" * (len(HEAD) - 1)]
    lines += [f"| `{row['family']}` | {' | '.join(_cells(row))} |" for row in rows]
    packed = sum(isinstance(row.get("packed"), float) for row in rows)
    whole = sum(not row["failed"] for row in rows)
    versions = sorted({f"transformers {row['transformers']}, torch {row['torch']}" for row in rows})
    summary = (
        f"{len(rows)} families, {whole} of which hold in every column; {packed} take packed rows. Recorded with "
        f"{'; '.join(versions)}."
    )
    known = [f"- `{name}` does not hold in every column: {reason}." for name, reason in KNOWN.items()]
    return "\n".join([summary, "", *lines, "", *known])


def _cells(row: dict[str, Any]) -> list[str]:
    parts = [name for key, name in PARTS if key in row.get("patched", {})]
    cut = row.get("cut", "")
    handed = "yes" if row.get("reload") == row.get("export") == "yes" else "no"
    figures = [_figure(row.get(name)) for name in ("packed", "padded", "gradients")]
    if "packed_by" in row:
        figures[0] += f", by {row['packed_by']}"
    cells = [*figures, ", ".join(dict.fromkeys(parts))]
    return [*cells, cut.partition(":")[0] or "no", row.get("resume", "no"), handed]


def _figure(value: object) -> str:
    """Return a figure below what rounding explains as such."""
    if isinstance(value, float):
        return f"{max(value, 1e-12):.0e}" if value >= 1e-12 else "< 1e-12"
    return str(value or "no")
