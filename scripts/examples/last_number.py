"""Reward of word problems: whether the last number of a response is the right one, with feedback where it is not.

distill run recipes/self-distil-from-rollouts.yaml --plugin scripts/examples/last_number.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping


def right(prompt: object, answer: str, row: Mapping[str, str]) -> tuple[float, str | None]:
    """Return 1 where the last number of the answer is the first one of the row's completion, else 0 and what is wrong.

    Args:
        prompt: the messages before the response, or the text.
        answer: the response.
        row: all columns of the data's row.
    """
    numbers = numbers_in(answer)
    if not numbers:
        return 0.0, "The answer has no number. Work the problem out, and end with the number that is asked for."
    if numbers[-1] != numbers_in(row["completion"])[0]:
        return 0.0, "The number at the end of the answer is wrong. Work the problem out step by step."
    return 1.0, None


def numbers_in(text: str) -> list[float]:
    """Return the numbers of a text; commas between digits are left out."""
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d)", "", text))]
