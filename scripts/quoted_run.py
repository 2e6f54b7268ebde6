"""Hold pages to a shorter run of the recipe that they quote: `python -m scripts.quoted_run OUTPUT PAGE ...`.

OUTPUT is what a run printed, PAGE a file with a block of text that quotes a run of the same recipe with more steps. The
lines that do not depend on the number of steps are compared, numbers included (`guide_outputs.other_numbers`): models,
the first step, figures and samples from before training.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from scripts.guide_outputs import other_numbers, shape

FENCED = re.compile(r"^```[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
STEPLESS = (
    "teacher  ",
    "student     cut",
    "step 1/",
    "prompt:",
    "  teacher:",
    "  student before:",
    "held out",
    "student before ",
)


def comparable(text: str) -> list[str]:
    """Return the lines of a run's output that a run with fewer steps prints too."""
    lines = [line for line in text.splitlines() if line.startswith(STEPLESS)]
    return [re.sub(r"^step 1/\d+", "step 1/...", line) for line in lines]


def stale(page: str, output: str) -> list[str]:
    """Return what a page quotes that the run did not print, each with the numbers of today.

    Raises:
        ValueError: The page quotes no run.
    """
    quoted = [line for block in FENCED.findall(page) if "held out " in block for line in comparable(block)]
    if not quoted:
        raise ValueError("expected a block that quotes a run, with its held-out figures")
    found = []
    printed = comparable(output)
    for line in quoted:
        like = [each for each in printed if shape(each) == shape(line)]
        if not like:
            found.append(f"{line!r} is not printed")
        elif all(other_numbers(line, each) for each in like):
            found.append(f"{line!r}: {'; '.join(other_numbers(line, like[0]))}")
    return found


def main() -> int:
    """Compare the pages; return the exit status."""
    output = Path(sys.argv[1]).read_text(encoding="utf-8")
    faults = []
    for page in sys.argv[2:]:
        faults += [f"{page}: {line}" for line in stale(Path(page).read_text(encoding="utf-8"), output)]
    if faults:
        print("\n".join(faults), file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
