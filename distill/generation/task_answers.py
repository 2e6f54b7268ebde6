"""Prompts with right answers, and whether responses to them are right (`eval.tasks`).

GSM8K (Cobbe et al., 2021, arXiv 2110.14168) is checked by the last number of a response, as the filter
`flexible-extract` of EleutherAI's lm-evaluation-harness does. Multiple choice asks for a letter and reads it from the
response, as the harness's generative tasks do (`mmlu_*_generative`); its other tasks compare log-probabilities of the
options, as the format `choices` does (`option_scores.py`).
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from distill.data.rows import RowFault
from distill.data.sources import open_source
from distill.recipe.evaluation import Task

# the last ones as in OpenBookQA (Mihaylov et al., 2018) and HellaSwag (Zellers et al., 2019)
PROMPTS = ("prompt", "question", "instruction", "question_stem", "ctx")
ANSWERS = ("answer", "answerKey", "completion", "target", "label")
CHOICES = ("choices", "options", "endings")
TEMPLATES = {
    "plain": "{prompt}",
    "gsm8k": "{prompt}\n\nSolve this step by step, and end with a line #### and the number.",
    "multiple_choice": "{prompt}\n\nAnswer with the letter of the right option.",
    "choices": "{prompt}",
}
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
Z = 1.959963984540054  # quantile of the normal distribution for an interval of 95 %


class TaskPrompt(NamedTuple):
    """One prompt of a task.

    Attributes:
        location: The row, as error messages name it.
        text: Text of the user's message.
        answer: The right answer, as the checker compares it; of `multiple_choice` a letter, of `choices` an option.
        letters: Letters of the options; empty without options.
        row: All columns of the row.
        options: Texts of the options; empty without options.
    """

    location: str
    text: str
    answer: str
    letters: str
    row: dict[str, Any]
    options: tuple[str, ...] = ()


class Accuracy(NamedTuple):
    """Share of right answers, one response per prompt (pass@1), with its interval of 95 % (Wilson, 1927).

    Attributes:
        right: Number of right answers.
        prompts: Number of prompts.
    """

    right: int
    prompts: int

    @property
    def value(self) -> float:
        return self.right / self.prompts

    @property
    def interval(self) -> tuple[float, float]:
        """Return the score interval, which unlike the normal one stays within 0 and 1 and has a width at both ends."""
        share = self.value
        spread = Z * Z / self.prompts
        centre = (share + spread / 2) / (1 + spread)
        half = Z / (1 + spread) * math.sqrt(share * (1 - share) / self.prompts + spread / (4 * self.prompts))
        return max(0.0, centre - half), min(1.0, centre + half)

    def as_dict(self) -> dict[str, float]:
        low, high = self.interval
        return {"accuracy": self.value, "low": low, "high": high, "right": self.right, "prompts": self.prompts}

    @staticmethod
    def of(figures: dict[str, Any]) -> Accuracy:
        """Return the accuracy that `as_dict` wrote."""
        return Accuracy(int(figures["right"]), int(figures["prompts"]))

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.1%} ({low:.1%} to {high:.1%}) of {self.prompts}"


# ------------------------------------------------------------------ prompts


def read_task(task: Task, field: str) -> list[TaskPrompt]:
    """Return the first prompts of a task's source, in its order.

    Args:
        field: The recipe's field of the task, as in `eval.tasks.0`.

    Raises:
        ValueError: The source cannot be read, or a row has no prompt, no answer or no options.
    """
    source = open_source(task.source, field=f"{field}.source", subset=task.subset, split=task.split)
    found = []
    for number, row in enumerate(source.rows()):
        if task.limit is not None and number >= task.limit:
            break
        location = f"row {number} of {source.name}"
        if isinstance(row, RowFault) or not isinstance(row, dict):
            raise ValueError(f"{field}.source: {location}: expected columns by name, got {row!s:.80}")
        found.append(_prompt_of(task, row, location, field))
    if not found:
        raise ValueError(f"{field}.source: {source.name} has no rows")
    return found


def _prompt_of(task: Task, row: dict[str, Any], location: str, field: str) -> TaskPrompt:
    prompt = _column(row, task.fields.prompt, PROMPTS, f"{field}.fields.prompt", location)
    answer = _column(row, task.fields.answer, ANSWERS, f"{field}.fields.answer", location)
    template = task.template or TEMPLATES[task.format]
    letters = ""
    options: list[str] = []
    if task.format in ("multiple_choice", "choices"):
        choices = _column(row, task.fields.choices, CHOICES, f"{field}.fields.choices", location)
        labels, options = _options(choices, f"{field}.fields.choices", location)
        letters = string.ascii_uppercase[: len(options)]
        right = _right_option(answer, labels, options, f"{field}.fields.answer", location)
        answer = options[right]
    if task.format == "multiple_choice":
        prompt = "\n".join(
            [f"{prompt}\n", *(f"{letter}. {text}" for letter, text in zip(letters, options, strict=True))]
        )
        answer = letters[right]
    if task.format == "gsm8k":
        answer = str(answer).rpartition("####")[2].strip()
    # not str.format: prompts have braces of their own
    text = template.replace("{prompt}", str(prompt))
    return TaskPrompt(location, text, str(answer), letters, row, tuple(options))


def _column(row: dict[str, Any], named: str | None, usual: Sequence[str], field: str, location: str) -> Any:
    name = named or next((name for name in usual if name in row), None)
    if name is None or row.get(name) is None:
        expected = repr(named) if named else f"one of {', '.join(usual)}"
        raise ValueError(f"{field}: {location}: expected the column {expected}, got {', '.join(map(str, row))}")
    return row[name]


def _options(choices: Any, field: str, location: str) -> tuple[list[str], list[str]]:
    """Return labels and texts of the options: a list of texts, or two lists by name as in ARC."""
    if isinstance(choices, dict) and isinstance(choices.get("text"), list):
        texts = [str(text) for text in choices["text"]]
        labels = [str(label) for label in choices.get("label") or range(len(texts))]
    elif isinstance(choices, list):
        texts = [str(text) for text in choices]
        labels = [str(number) for number in range(len(texts))]
    else:
        raise ValueError(f"{field}: {location}: expected a list of options, got {choices!r:.80}")
    if not 2 <= len(texts) <= len(string.ascii_uppercase) or len(labels) != len(texts):
        raise ValueError(f"{field}: {location}: expected 2 to 26 options, each with its label, got {choices!r:.80}")
    return labels, texts


def _right_option(answer: Any, labels: list[str], options: list[str], field: str, location: str) -> int:
    """Return the index of the right option, named by its label or index, its letter, or its text, in this order."""
    for names in (labels, list(string.ascii_uppercase[: len(options)]), options):
        if str(answer).strip() in names:
            return names.index(str(answer).strip())
    raise ValueError(f"{field}: {location}: expected one of the {len(options)} options, got {answer!r:.80}")


# ------------------------------------------------------------------ checkers


def is_right(task: Task, prompt: TaskPrompt, response: str) -> bool:
    """Return whether a response is right, by a checker that is no function."""
    text = extracted(task.extract, response)
    if text is None:
        return False
    return COMPARISONS[task.used_checker](text, prompt)


def extracted(pattern: str | None, response: str) -> str | None:
    """Return the last match of a pattern in a response, or its first group; None where nothing matches."""
    if pattern is None:
        return response
    matches = list(re.finditer(pattern, response))
    if not matches:
        return None
    last = matches[-1]
    return last.group(1) if last.re.groups else last.group()


def _is_same_text(text: str, prompt: TaskPrompt) -> bool:
    return text.split() == prompt.answer.split()


def _is_same_number(text: str, prompt: TaskPrompt) -> bool:
    return _last_number(text) is not None and _last_number(text) == _last_number(prompt.answer)


def _last_number(text: str) -> Decimal | None:
    found = NUMBER.findall(text)
    try:
        return Decimal(found[-1].replace(",", "")) if found else None
    except InvalidOperation:
        return None


def _names_letter(text: str, prompt: TaskPrompt) -> bool:
    return _letter(text, prompt.letters or string.ascii_uppercase) == prompt.answer.strip()


def _letter(text: str, letters: str) -> str | None:
    """Return the letter with which a response begins, in brackets or not, else the last one that stands alone."""
    first = re.match(rf"\W*([{letters}])(?!\w|['’])(?! [a-z])", text)
    if first is not None:
        return first.group(1)
    alone = re.findall(rf"(?<!\w)([{letters}])(?!\w|['’])", text)
    return alone[-1] if alone else None


COMPARISONS: dict[str, Callable[[str, TaskPrompt], bool]] = {
    "exact": _is_same_text,
    "number": _is_same_number,
    "letter": _names_letter,
}
