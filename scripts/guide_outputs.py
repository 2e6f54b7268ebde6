"""Run the examples of the guides, and write what they print: `python -m scripts.guide_outputs [--check] [PAGE ...]`.

A block of shell under `<!-- output -->` is run in a folder with the files of `scripts/examples/tiny_pair.py`, those of
a page one after another. Each line quoted in the block of text after it is replaced by the line that is printed today:
`...` stands for lines that are left out, as does `...` at the end of a line for the rest of it. With `--check` nothing
is written, and the lines are compared, numbers included: those with a point to 2 % and two units of their last digit,
since the bits of a run are those of a machine. Times and rates are left out, and all numbers of an example that is
marked `<!-- output, other numbers each time -->`. One that shows a refusal is marked `<!-- output, exit code 2 -->`:
its errors are read too. A block of Python that begins with `# NAME.py` is written as that
file.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(folder) for folder in (ROOT, ROOT / "kernels") if str(folder) not in sys.path]

from scripts.examples import tiny_pair  # noqa: E402

MARK = r"<!-- output(, other numbers each time)?(?:, exit code (\d))? -->\n"
EXAMPLE = re.compile(MARK + r"```sh\n(.*?)```\n\n(?:[^\n`]+\n\n)?```text\n(.*?)```", re.DOTALL)
FILE = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"\d[\d,.:]*(?:e[+-]\d+)?|\binf\b|\bnan\b")
TIMED = re.compile(r"\d[\d,.]*(?= (?:tokens/s|s|ms|min)\b)|\d+:\d\d(?::\d\d)?")
RELATIVE = 0.02  # difference of a number that may be another machine's rounding
LIKE = 0.6  # least similarity of a line that takes the place of a quoted one
LEFT_OUT = "..."


def pages() -> list[Path]:
    """Return the pages with examples to run."""
    return [page for page in sorted((ROOT / "docs").rglob("*.md")) if re.search(MARK, page.read_text(encoding="utf-8"))]


def shape(line: str) -> str:
    """Return a line without its numbers and the width of its columns."""
    return " ".join(NUMBER.sub("#", line).split())


def other_numbers(quoted: str, line: str) -> list[str]:
    """Return what differs between the numbers of two lines of one shape, times and rates left out."""
    found = []
    both = [NUMBER.findall(TIMED.sub("0", text)) for text in (quoted.removesuffix(LEFT_OUT), line)]
    for one, other in zip(*both, strict=False):  # a line that is cut has fewer
        one, other = one.rstrip(".,:"), other.rstrip(".,:")
        if one == other:
            continue
        if one.count(".") > 1:  # an address or a version
            found.append(f"{one}, now {other}")
            continue
        shown, now = (float(text.replace(",", "").replace(":", "")) for text in (one, other))
        mantissa, _, exponent = one.partition("e")
        last_digit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
        allowed = RELATIVE * abs(now) + 2 * last_digit if "." in one else 0.0
        if not abs(shown - now) <= allowed:
            found.append(f"{one}, now {other}")
    return found


def common_length(one: str, other: str) -> int:
    """Return how many characters two lines have in common at their beginning."""
    pairs = zip(one, other, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class Programs(NamedTuple):
    """Programs that a shell finds before others of their names.

    Attributes:
        folder: where they are.
        environment: what they need of it.
    """

    folder: Path
    environment: Mapping[str, str]


def run_shell(commands: str, folder: Path, *, exit_code: int = 0, programs: Programs | None = None) -> list[str]:
    """Run a block of shell in `folder`; return the lines that it prints, those of errors only where it shall fail.

    Raises:
        ValueError: it ends with another code than `exit_code`.
    """
    before = [str(programs.folder)] if programs else []
    environment = os.environ | {
        "PATH": os.pathsep.join([*before, str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        "COLUMNS": "200",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    made = subprocess.run(
        ["bash", "-ec", commands],
        cwd=folder,
        env=environment | dict(programs.environment) if programs else environment,
        text=True,
        timeout=600,
        capture_output=True,
    )
    if made.returncode != exit_code:
        raise ValueError(f"{commands.strip()}: exit code {made.returncode}\n{made.stdout[-2000:]}{made.stderr[-2000:]}")
    return (made.stdout + made.stderr if exit_code else made.stdout).splitlines()


def printed(quoted: Sequence[str], lines: Sequence[str], *, exact: bool, numbers: bool = False) -> list[str]:
    """Return the lines that take the places of the quoted ones, in order.

    Args:
        quoted: lines of the page.
        lines: lines that the example prints.
        exact: require the same words; else the most similar line is taken.
        numbers: require the same numbers as well, as far as `other_numbers` compares them.

    Raises:
        ValueError: a quoted line is not printed, or not after those before it.
    """
    found, at = list[str](), 0
    for line in quoted:
        if line.strip() in ("", LEFT_OUT):
            found.append(line)
            continue
        wanted, is_cut = shape(line.removesuffix(LEFT_OUT)), line.endswith(LEFT_OUT)
        rest = [shape(each)[: len(wanted)] if is_cut else shape(each) for each in lines[at:]]
        near = [wanted] if wanted in rest else [] if exact else difflib.get_close_matches(wanted, rest, 1, LIKE)
        if not near:
            raise ValueError(f"expected a line like {line!r} after line {at}, got:\n" + "\n".join(lines[at:]))
        # of several such lines, as of steps, the one that begins most alike
        places = [place for place, each in enumerate(rest, at) if each == near[0]]
        at = max(places, key=lambda place: common_length(line, lines[place])) + 1
        differences = other_numbers(line, lines[at - 1]) if numbers else []
        if differences:
            raise ValueError(f"{line!r}: expected the numbers of today, got {'; '.join(differences)}")
        found.append(line if is_cut else lines[at - 1])
    return found


def refreshed(page: Path, *, exact: bool, programs: Programs | None = None) -> str:
    """Return a page with the lines that its examples print.

    Args:
        page: the file.
        exact: as of `printed`.
        programs: stand in for `distill` and `python`, except in an example that kills one with SIGKILL.

    Raises:
        ValueError: as of `run_shell` and `printed`.
    """
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_pair.main(folder)
        for file, content in FILE.findall(text):
            (folder / file).write_text(content)
        for part in ("docs", "scripts"):  # the folder stands for a checkout
            (folder / part).symlink_to(ROOT / part)
        for varies, exit_code, commands, quoted in EXAMPLE.findall(text):
            own_programs = programs if "kill -9" not in commands else None
            lines = run_shell(commands, folder, exit_code=int(exit_code or 0), programs=own_programs)
            try:
                today = printed(quoted.splitlines(), lines, exact=exact, numbers=exact and not varies)
            except ValueError as error:
                raise ValueError(f"{page.relative_to(ROOT)}: {commands.strip()}: {error}") from None
            text = text.replace(f"```text\n{quoted}```", "```text\n" + "".join(f"{line}\n" for line in today) + "```")
    return text


def main() -> int:
    """Refresh or check the pages; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.guide_outputs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; compare")
    parser.add_argument("pages", nargs="*", type=Path, help="pages of docs/; by default all that have examples")
    args = parser.parse_args()
    for page in [page.resolve() for page in args.pages] or pages():
        try:
            text = refreshed(page, exact=args.check)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
        if not args.check:
            page.write_text(text, encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: {len(EXAMPLE.findall(text))} examples")
    return 0


if __name__ == "__main__":
    sys.exit(main())
