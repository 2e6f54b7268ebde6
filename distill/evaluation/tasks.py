"""Tasks on loaded models: a recipe's, and those of EleutherAI's lm-evaluation-harness (package `lm_eval`, an extra).

    models = {"student": student, "teacher": teacher}
    scores = run_tasks(models, dict.fromkeys(models, tokenizer), check_tasks(["hellaswag"]))
    scores[0].of["student"]          # Score(value, error)

The harness's own tasks, prompts, metrics and standard errors are used, so scores are comparable with published ones.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distill.data.chat import template_kwargs_of
from distill.generation.engines import greedy_responses
from distill.generation.option_scores import OptionScorer
from distill.generation.task_answers import read_task
from distill.generation.tasks import TaskQuestions
from distill.models.head import probe_logits
from distill.recipe import Recipe

INSTALL = 'pip install "lm-eval>=0.4.9"'


class TaskMetric(NamedTuple):
    """Score with its standard error, NaN where the harness gives none."""

    value: float
    error: float


class Tasks(NamedTuple):
    """Names of tasks of the harness, and its task manager."""

    names: list[str]
    manager: Any


class TaskScore(NamedTuple):
    """Metric of a task, by model name."""

    task: str
    metric: str
    of: dict[str, TaskMetric]


def check_tasks(tasks: Sequence[str], folder: Path | None = None) -> Tasks:
    """Look up tasks, before models are loaded.

    Args:
        tasks: Names, groups or patterns (`mmlu_*`) as the harness knows them.
        folder: Folder with YAML files of custom tasks.

    Raises:
        ValueError: The harness is not installed, or a task is unknown.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(f"--tasks: lm-evaluation-harness is not installed: {INSTALL}")
    if folder is not None and not folder.is_dir():
        raise ValueError(f"--task-folder: expected a folder, got {folder}")
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if folder is None else str(folder))
    unknown = [name for name in tasks if not manager.match_tasks([name])]
    if unknown or not tasks:
        names = ", ".join(map(repr, unknown)) or "none"
        raise ValueError(f"--tasks: expected tasks of lm-evaluation-harness (lm-eval ls tasks lists them), got {names}")
    return Tasks(list(manager.match_tasks(list(tasks))), manager)


def chat_variables(tokenizers: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the harness's arguments for the variables that each tokenizer renders its chat template with.

    Raises:
        ValueError: There are some, and the installed harness does not take them.
    """
    from lm_eval.models.huggingface import HFLM

    arguments: dict[str, dict[str, Any]] = {}
    for name, tokenizer in tokenizers.items():
        kwargs = template_kwargs_of(tokenizer)
        arguments[name] = {"chat_template_args": kwargs} if kwargs else {}
        missing = arguments[name].keys() - inspect.signature(HFLM).parameters.keys()
        if missing:
            raise ValueError(
                f"--chat: the chat template of the {name} has variables of its own ({', '.join(kwargs)}), and this "
                f"lm-evaluation-harness has no {missing.pop()}; expected a later one: pip install -U lm-eval"
            )
    return arguments


def run_tasks(
    models: Mapping[str, Any],
    tokenizers: Mapping[str, Any],
    tasks: Tasks,
    *,
    limit: int | None = None,
    batch_size: int = 8,
    chat: bool = False,
) -> list[TaskScore]:
    """Return every metric of `tasks` for every model.

    Args:
        models: Causal language models by name; set to eval mode.
        tokenizers: Tokenizer of each model.
        tasks: Tasks from `check_tasks`.
        chat: Apply each tokenizer's chat template to prompts, with the variables that it is saved with.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    arguments = chat_variables(tokenizers) if chat else {}
    scores: dict[tuple[str, str], dict[str, TaskMetric]] = {}
    for name, model in models.items():
        # generation tasks need the cache
        used = model.config.use_cache
        model.config.use_cache = True
        try:
            answer = simple_evaluate(
                HFLM(
                    pretrained=model.eval(),
                    tokenizer=tokenizers[name],
                    batch_size=batch_size,
                    **arguments.get(name, {}),
                ),
                tasks=tasks.names,
                task_manager=tasks.manager,
                limit=limit,
                log_samples=False,
                apply_chat_template=chat,
                bootstrap_iters=1000,
            )
        finally:
            model.config.use_cache = used
        assert answer is not None  # None is for the harness's other ranks
        for task, figures in answer["results"].items():
            for metric, score in _scores(figures):
                scores.setdefault((task, metric), {})[name] = score
    return [TaskScore(task, metric, of) for (task, metric), of in scores.items()]


def _scores(figures: Mapping[str, Any]) -> list[tuple[str, TaskMetric]]:
    """Return metrics with their standard errors, from keys such as `acc,none` and `acc_stderr,none`."""
    scores = []
    for key, value in figures.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = figures.get(f"{metric}_stderr,{filtered}")
        known = isinstance(error, int | float)
        label = metric if filtered == "none" else f"{metric} ({filtered})"
        scores.append((label, TaskMetric(float(value), float(error) if known else math.nan)))  # type: ignore[arg-type]
    return scores


def recipe_tasks(recipe: Recipe | None, names: Sequence[str], limit: int | None) -> list[TaskQuestions]:
    """Return the tasks of a recipe (`eval.tasks`) among some names, with their prompts.

    Raises:
        ValueError: A task is checked by a function of a file, which only a run is allowed to call.
    """
    found = []
    for number, task in enumerate([] if recipe is None else recipe.eval.tasks):
        if task.name not in names:
            continue
        if task.checker_file is not None:
            raise ValueError(f"--tasks: {task.name} is checked by {task.used_checker}, which distill run alone calls")
        limits = [most for most in (limit, task.limit) if most is not None]
        task = task.model_copy(update={"limit": min(limits, default=None)})
        found.append(TaskQuestions(task, read_task(task, f"eval.tasks.{number}"), b""))
    return found


def run_recipe_tasks(
    models: Mapping[str, Any], tokenizers: Mapping[str, Any], tasks: Sequence[TaskQuestions], *, batch_size: int
) -> list[TaskScore]:
    """Return the accuracy of every model in a recipe's tasks, as a run measures it.

    Args:
        models: Causal language models by name.
        tokenizers: Tokenizer of each model.
        batch_size: Options that are compared at once.
    """
    found = []
    for questions in tasks:
        of = {}
        for name, model in models.items():
            if questions.task.is_generated:
                texts = [prompt.text for prompt in questions.prompts]
                responses = greedy_responses(model, tokenizers[name], texts, questions.task.max_new_tokens)
            else:
                scorer = OptionScorer(model, tokenizers[name], probe_logits(model, name), batch_size)
                responses = questions.choose(scorer, range(len(questions.prompts)))
            accuracy = questions.accuracy(responses)
            # of the mean of zeros and ones, as the harness computes it
            error = math.sqrt(accuracy.value * (1 - accuracy.value) / max(accuracy.prompts - 1, 1))
            of[name] = TaskMetric(accuracy.value, error)
        found.append(TaskScore(questions.name, "accuracy", of))
    return found
