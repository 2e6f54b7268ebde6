"""The page docs/guides/row-layouts.md, and the lists of columns and keys in docs/guides/data-formats.md.

The page is written from `tests/data/row_layouts.yaml`, whose every case a test compares with what is read.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from distill.data.known_columns import (
    CHAT,
    CHAT_COLUMNS,
    COLUMNS,
    KEYS,
    PAIR,
    PAIR_COLUMNS,
    PROMPTS,
    TEXT_COLUMNS,
    WORDS,
)

TABLE = Path(__file__).resolve().parents[1] / "tests" / "data" / "row_layouts.yaml"
# a template of ChatML's kind with tools and reasoning
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INTRODUCTION = """\
# Row layouts

{note}

Rows as data sets have them, and what is trained on. Text in «» is masked from the loss, the rest is trained on. Every \
example on this page is a test. The chat template is one of ChatML's kind that writes tools, calls and reasoning; \
[Data formats](data-formats.md#what-is-read) lists the columns and keys that are read.
"""


def page(note: str) -> str:
    """Return docs/guides/row-layouts.md."""
    cases = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    lines = [INTRODUCTION.format(note=note)]
    for layout, group in groupby(cases, key=lambda case: case["layout"]):
        lines.append(f"## {layout}\n")
        for case in group:
            lines += _example(case)
    return "\n".join(lines).rstrip() + "\n"


def _example(case: dict[str, Any]) -> list[str]:
    title = case["case"][:1].upper() + case["case"][1:]
    lines = [f"**{title}**\n"]
    settings = dict(case.get("settings") or {})
    file = settings.pop("file", None)
    if settings:
        lines.append(f"`data: {yaml.safe_dump(settings, default_flow_style=True, width=1000).strip()}`\n")
    if file:
        lines.append(f"The rows of a {file} file:\n")
    lines.append(f"```jsonl\n{case['rows'].rstrip()}\n```\n")
    if "refused" in case:
        lines.append(f"The run stops:\n\n```text\n{case['refused']}\n```\n")
    if case.get("read"):
        texts = "\n---\n".join(text.rstrip("\n") for text in case["read"])
        lines.append(f"```text\n{texts}\n```\n")
    if "report" in case:
        lines.append("The report of the data says:\n\n```text\n" + "\n".join(case["report"]) + "\n```\n")
    return lines


def read_lists() -> str:
    """Return the lists of columns and keys that are read, for docs/guides/data-formats.md."""
    pairs = ", ".join(f"`{first}` + `{second}`" for first, second in PAIR_COLUMNS)
    rows = [
        ("chats", ", ".join(f"`{name}`" for name in CHAT_COLUMNS), "the conversation"),
        ("pairs", pairs, "prompt and completion"),
        ("plain text", ", ".join(f"`{name}`" for name in TEXT_COLUMNS), "the text"),
    ]
    kinds = {PAIR: "pairs", CHAT: "chats", PROMPTS: "prompts"}
    for known in COLUMNS:
        where = ", ".join(kinds[kind] for kind in known.kinds)
        rows.append((where, ", ".join(f"`{name}`" for name in known.names), known.reading))
    keys = [(", ".join(f"`{name}`" for name in key.names), key.reading) for key in KEYS]
    lines = ["| rows | columns | read as |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows), ""]
    lines += ["Keys of a message:", "", "| keys | read as |", "|---|---|", *(f"| {' | '.join(row)} |" for row in keys)]
    words = ", ".join(f"`{name}`" for name in sorted(WORDS))
    lines += [
        "",
        f"In pairs, chats and prompts, columns of these names stop the run if nothing reads them: {words}.",
    ]
    return "\n".join(lines)
