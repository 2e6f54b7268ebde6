"""Answers of a student, or of its teacher, to the tasks of a recipe (`eval.tasks`), with the share that is right.

The prompts are the same ones each time, in the chat template of the student's tokenizer; responses are greedy. Each
process answers its share of the prompts, all of them together those of a student that is sharded, and all return the
same figures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distill.core.files import write_text
from distill.core.ranks import is_main_process, world_size
from distill.generation.decode_loop import DecodeEngine
from distill.generation.function_calls import FunctionInput, RewardFunction
from distill.generation.option_scores import OptionPrompt, OptionScorer
from distill.generation.prompts import encode_prompt
from distill.generation.stopping import visible_text
from distill.generation.task_answers import Accuracy, TaskPrompt, is_right, read_task
from distill.recipe import Recipe
from distill.recipe.evaluation import Task

FOLDER = "tasks"  # of a run: the answers of the last evaluation, a file a task
BATCH = 16  # sequences that are decoded at once


class CheckerFunction(RewardFunction):
    """A checker: the function is called as function(prompt, response, row) and returns 1 or 0."""

    field = "eval.tasks: checker"
    limit = "eval.tasks timeout"


@dataclass(frozen=True)
class TaskQuestions:
    """One task with its prompts.

    Attributes:
        code: Content of the file of a checker that is a function; empty without one.
    """

    task: Task
    prompts: Sequence[TaskPrompt]
    code: bytes

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def sha256(self) -> str:
        """Hash of the prompts and the right answers, and of all columns where a function judges by them."""
        content: list[list[Any]] = [[prompt.text, prompt.answer] for prompt in self.prompts]
        if not self.task.is_generated:
            content = [[*each, prompt.options] for each, prompt in zip(content, self.prompts, strict=True)]
        if self.task.checker_file is not None:
            content = [[*each, prompt.row] for each, prompt in zip(content, self.prompts, strict=True)]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()

    def check(self, numbers: Sequence[int], responses: Sequence[str]) -> list[bool]:
        """Return which responses to the prompts of these numbers are right.

        Raises:
            ValueError: A function failed, or returned something other than 1 or 0.
        """
        prompts = [self.prompts[number] for number in numbers]
        file = self.task.checker_file
        if file is None:
            return [is_right(self.task, *pair) for pair in zip(prompts, responses, strict=True)]
        inputs = [
            FunctionInput(prompt.location, prompt.text, response, prompt.row)
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        name = self.task.used_checker.rpartition(":")[2]
        with CheckerFunction(Path(file), self.code, name, self.task.timeout) as function:
            values = function(inputs)
            for given, value in zip(inputs, values, strict=True):
                if value not in (0, 1):
                    raise ValueError(f"{function.error_prefix(given.location)}: expected 1 or 0, got {value:g}")
        return [value == 1 for value in values]

    def choose(self, scorer: OptionScorer, numbers: Sequence[int]) -> list[str]:
        """Return the option that a model finds most probable, for each prompt of these numbers."""
        prompts = [self.prompts[number] for number in numbers]
        return scorer.choose(
            [OptionPrompt(prompt.location, prompt.text, prompt.options) for prompt in prompts],
            chat=self.task.apply_chat_template,
            normalise=self.task.normalise,
        )

    def accuracy(self, responses: Sequence[str]) -> Accuracy:
        """Return the accuracy of responses to all prompts."""
        right = self.check(range(len(self.prompts)), responses)
        return Accuracy(sum(right), len(right))


def read_tasks(recipe: Recipe, code: bytes | None) -> list[TaskQuestions]:
    """Read the prompts of a recipe's tasks.

    Args:
        code: Content of the file of functions, which `--plugin` has allowed; None without one.
    """
    return [
        TaskQuestions(task, read_task(task, f"eval.tasks.{number}"), code or b"")
        for number, task in enumerate(recipe.eval.tasks)
    ]


class StudentTasks:
    """Tasks that a student answers.

    Args:
        engine: Function that returns the engine of the student as it is now.
        scorer: Function that returns what compares options by the student as it is now.
        tokenizer: Tokenizer of the student, with its chat template.
        ends: Tokens that end a response.
        is_sharded: Whether the student's engine must be called by all processes with the same prompts.
        folder: Folder of the run.
        batch_size: Number of sequences that are decoded at once.
    """

    def __init__(
        self,
        questions: Sequence[TaskQuestions],
        engine: Callable[[], DecodeEngine],
        scorer: Callable[[], OptionScorer],
        tokenizer: Any,
        ends: Sequence[int],
        *,
        is_sharded: bool,
        folder: Path,
        batch_size: int = BATCH,
    ) -> None:
        self.questions = questions
        self.engine = engine
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.ends = frozenset(ends)
        self.is_sharded = is_sharded
        self.folder = folder
        self.batch_size = batch_size
        self._ids = {
            each.name: [encode_prompt(tokenizer, prompt.text) for prompt in each.prompts]
            for each in questions
            if each.task.is_generated
        }

    def measure(self, questions: TaskQuestions, step: int) -> Accuracy:
        """Return the accuracy of the student, and write its answers to `tasks/NAME.jsonl`; every process calls it.

        Args:
            step: Step that the student is of, for the file.
        """
        count = len(questions.prompts)
        spread = world_size() > 1 and not self.is_sharded
        numbers = range(dist.get_rank(), count, world_size()) if spread else range(count)
        if questions.task.is_generated:
            responses = self._generated(questions, numbers)
        else:
            responses = questions.choose(self.scorer(), numbers)
        right = questions.check(numbers, responses)
        own = list(zip(numbers, responses, right, strict=True))
        parts: list[Any] = [own]
        if spread:
            parts = [None] * world_size()
            dist.all_gather_object(parts, own)
        answers = sorted(answer for part in parts for answer in part)
        if is_main_process():
            self._write(questions, answers, step)
        return Accuracy(sum(right for _, _, right in answers), count)

    def _generated(self, questions: TaskQuestions, numbers: Sequence[int]) -> list[str]:
        ids = self._ids[questions.name]
        generated = self.engine().generate(
            [ids[number] for number in numbers],
            max_new_tokens=questions.task.max_new_tokens,
            batch_size=self.batch_size,
        )
        return [visible_text(self.tokenizer, tokens, self.ends) for tokens in generated.tokens]

    def _write(self, questions: TaskQuestions, answers: Sequence[tuple[int, str, bool]], step: int) -> None:
        lines = []
        for number, response, right in answers:
            prompt = questions.prompts[number]
            row = {"step": step, "prompt": prompt.text, "answer": prompt.answer, "response": response, "right": right}
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        path = self.folder / FOLDER / f"{questions.name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        write_text(path, "".join(lines))
