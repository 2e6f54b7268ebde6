"""The `eval:` section of a recipe: tasks that the student answers while it trains."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from distill.core.errors import Section
from distill.recipe.fields import FUNCTION, ROUTE, Count, Text

CHECKERS = ("exact", "number", "letter")
CHECKER_OF = {"plain": "exact", "gsm8k": "number", "multiple_choice": "letter", "choices": "exact"}


class TaskFields(Section):
    """Columns of a task's file; one that is left out has the usual name of the task's format.

    Attributes:
        prompt: column of the prompts, plain text; null for `prompt`, `question`, `instruction`, `question_stem` or
            `ctx`.
        answer: column of the right answers; null for `answer`, `answerKey`, `completion`, `target` or `label`.
        choices: column of the options of `multiple_choice` and `choices`; null for `choices`, `options` or `endings`.
    """

    prompt: Text | None = None
    answer: Text | None = None
    choices: Text | None = None


class Task(Section):
    """Prompts with right answers, which the student answers greedily in held-out evaluations.

    Attributes:
        name: name of the task: its figure is `eval_NAME_accuracy`.
        source: local file or hub data set, as in `data.source`.
        subset: configuration of a hub data set.
        split: split of a hub data set.
        format: form of the rows. `plain`: a prompt and an answer. `gsm8k`: a question, and an answer that ends with its
            number after `####`. `multiple_choice`: a question, options, and the right one by its index, letter or text;
            the student is asked for the letter. `choices`: the same rows; the student's answer is the option with the
            highest log-probability after the prompt, and nothing is generated.
        fields: names of the columns.
        template: text of the prompt, in which `{prompt}` stands for the row's prompt, with the options of
            `multiple_choice`; null for that of the format.
        checker: comparison of a response with the right answer. `exact`: the same text, apart from white space.
            `number`: the last number of the response. `letter`: the option whose letter it names. `FILE.py:FUNCTION`: a
            function of (prompt, response, row) that returns 1 or 0, allowed by `--plugin FILE.py`. null for that of the
            format.
        extract: regular expression; its last match in the response, or the first group of that, is what is compared.
        normalise: of `choices`, what the log-probability of an option is divided by: nothing (`none`), or the number of
            its `tokens` or of its `bytes` in UTF-8.
        apply_chat_template: of `choices`, the prompt is a user's message of the student's chat template, if it has one,
            and the options are responses; false continues the prompt by the options, after a space.
        limit: number of prompts, the first ones of the source; null for all.
        every: number of held-out evaluations (`train.eval_every`) from one answering of the task to the next.
        max_new_tokens: maximum length of a response in tokens.
        timeout: seconds for one call of a function.
    """

    name: Annotated[str, Field(pattern=ROUTE)]
    source: Text
    subset: Text | None = None
    split: Text = "test"
    format: Literal["plain", "gsm8k", "multiple_choice", "choices"] = "plain"
    fields: TaskFields = TaskFields()
    template: Text | None = None
    checker: Text | None = None
    extract: Text | None = None
    normalise: Literal["none", "tokens", "bytes"] = "none"
    apply_chat_template: bool = True
    limit: Count | None = 200
    every: Count = 1
    max_new_tokens: Annotated[int, Field(ge=1, le=2**20)] = 256
    timeout: Annotated[float, Field(gt=0, le=86400)] = 10.0

    @property
    def used_checker(self) -> str:
        return self.checker or CHECKER_OF[self.format]

    @property
    def is_generated(self) -> bool:
        """Return whether responses are generated; else one of the options is chosen by its log-probability."""
        return self.format != "choices"

    @property
    def checker_file(self) -> str | None:
        """File of the function that checks responses; None where there is none."""
        return None if self.used_checker in CHECKERS else self.used_checker.rpartition(":")[0]

    @model_validator(mode="after")
    def _can_be_checked(self) -> Self:
        if self.used_checker not in CHECKERS and not re.fullmatch(FUNCTION, self.used_checker):
            raise ValueError(f"checker: expected {', '.join(CHECKERS)} or FILE.py:FUNCTION, got {self.checker!r}")
        if not self.is_generated and (self.checker is not None or self.extract is not None):
            raise ValueError("checker and extract: expected none with format choices, which compares options")
        if self.is_generated and (self.normalise != "none" or not self.apply_chat_template):
            raise ValueError(f"normalise and apply_chat_template belong to format choices, got format {self.format}")
        if self.template is not None and "{prompt}" not in self.template:
            raise ValueError(f"template: expected a text with {{prompt}} in it, got {self.template!r}")
        if self.extract is not None:
            try:
                re.compile(self.extract)
            except re.error as error:
                raise ValueError(f"extract: expected a regular expression, got {self.extract!r} ({error})") from None
        return self


class Evaluation(Section):
    """Evaluations of the student beside the figures on held-out data.

    Attributes:
        tasks: tasks that the student answers, before and after training and in its held-out evaluations.
        batch_size: sequences per batch of a held-out evaluation and device; null for `train.batch_size`.
    """

    tasks: list[Task] = Field(default_factory=list)
    batch_size: Count | None = None

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [task.name for task in self.tasks]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"tasks: expected different names, got {name!r} twice")
        return self
