"""Samples file: one greedy response per prompt from teacher, student before and student after training.

write_samples(folder / "samples.md", prompts, answers)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

TITLES = {"teacher": "teacher", "before": "student before", "after": "student after"}


def samples_text(prompts: Sequence[str], answers: Mapping[str, Sequence[str]]) -> str:
    """Return the samples as Markdown, responses as indented code blocks."""
    blocks = []
    for number, prompt in enumerate(prompts):
        blocks.append(f"## Prompt {number + 1}\n\n{_indented(prompt)}")
        blocks += [f"{TITLES.get(name, name)}:\n\n{_indented(texts[number])}" for name, texts in answers.items()]
    return "# Samples\n\nGreedy responses.\n\n" + "\n\n".join(blocks) + "\n"


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in (text or "(nothing)").splitlines())


def write_samples(path: Path, prompts: Sequence[str], answers: Mapping[str, Sequence[str]]) -> None:
    """Write the samples to `path`; does nothing without prompts."""
    if prompts:
        path.write_text(samples_text(prompts, answers), encoding="utf-8")
