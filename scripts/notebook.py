"""Run a notebook's cells in order, without Jupyter: what CI does with docs/notebooks.

    python -m scripts.notebook docs/notebooks/first-hour.ipynb STEPS=2

Cells share one namespace. Lines that begin with `!` are shell commands, with `{NAME}` replaced as IPython does; `%pip`
lines are left out, since the environment is there. An assignment `NAME = ...` at the start of a line is replaced by the
value given for it, so that CI takes fewer steps than a reader.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any


def code_cells(path: Path) -> list[str]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def as_python(cell: str, values: dict[str, str]) -> str:
    """Return a cell as Python that calls `shell` for its commands, with the given values in place of its own."""
    lines = []
    for line in cell.splitlines():
        assigned = re.match(r"(\w+) = ", line)
        if line.startswith("%pip"):
            continue
        if line.startswith("!"):
            lines.append(f"shell(f{line[1:]!r})")
        elif assigned and assigned[1] in values:
            lines.append(f"{assigned[1]} = {values[assigned[1]]}")
        else:
            lines.append(line)
    return "\n".join(lines)


def shell(command: str) -> None:
    print(f"$ {command}", flush=True)
    subprocess.run(["bash", "-ec", command], check=True)


def run(path: Path, values: dict[str, str]) -> None:
    namespace: dict[str, Any] = {"shell": shell, "__name__": "__main__"}
    for number, cell in enumerate(code_cells(path)):
        exec(compile(as_python(cell, values), f"{path.name}, code cell {number + 1}", "exec"), namespace)


if __name__ == "__main__":
    run(Path(sys.argv[1]), dict(word.split("=", 1) for word in sys.argv[2:]))
