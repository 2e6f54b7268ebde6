"""Sums and differences of small numbers: rows to learn and held out, and the reward for a right answer."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

COUNT = 200  # prompts to learn, and as many held out
LONGEST = 4  # tokens of an answer
SHOTS = "7 + 6 = 13\n19 - 4 = 15\n12 + 9 = 21"


def right(prompt: object, answer: str, row: Mapping[str, object]) -> float:
    """The reward: 1 for an answer that begins with the right number."""
    found = re.match(r"\s*(-?\d+)", answer)
    return float(found is not None and found[1] == row["right"])


def rows_of() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows to learn and rows held out, the same in every process; no prompt is of both, or of the examples."""
    draw = random.Random("rewards")
    found: dict[str, dict[str, str]] = {}
    shown = {line.partition(" =")[0] for line in SHOTS.splitlines()}
    while len(found) < 2 * COUNT:
        a, b, sign = draw.randint(2, 30), draw.randint(2, 30), draw.choice("+-")
        a, b = (a, b) if sign == "+" else (max(a, b), min(a, b))
        value, text = str(a + b if sign == "+" else a - b), f"{a} {sign} {b}"
        if text not in shown:
            found[text] = {"prompt": f"{text} =", "completion": f" {value}", "right": value, "shots": SHOTS}
    rows = list(found.values())
    return rows[:COUNT], rows[COUNT:]
