"""Plan of the study of context distillation and per-domain teachers: settings of each run.

A run is `privileged.yaml` with the settings named here, so that whatever a recipe can say can be compared. `{folder}`
in a setting is where the program keeps the tasks' rows and the models that other runs made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from distill.recipe import Recipe, load
from scripts.study.tasks import MIXED, TASKS

RECIPE = Path(__file__).parent / "privileged.yaml"
CONTEXT, ROUTES, PROMPTS, SOLUTIONS = "few-shot prompt", "two teachers", "two prompts", "worked solutions"
BOTH = "+".join(MIXED)

GOLD, TAUGHT = "train", "train-taught"  # rows with the data's answers, with those of the teacher that reads the prompt
HARD = "loss.terms=[{type: cross_entropy}]"
REVERSE = "loss.terms=[{type: reverse_kl}]"
SAMPLED = "loss.terms=[{type: policy_gradient}]"
OWN = f"data.on_policy={{fraction: 1, temperature: 1, max_new_tokens: {TASKS[MIXED[0]].longest}, batch_size: 256}}"
LONGER = f"data.on_policy.max_new_tokens={TASKS['sums'].longest}"
AVERAGE = "teacher.ema=0.98"

# of a method: the rows it learns from, and its settings
FROM_CONTEXT: dict[str, tuple[str, tuple[str, ...]]] = {
    "cross-entropy, the data's answers": (GOLD, (HARD,)),
    "cross-entropy, the teacher's answers": (TAUGHT, (HARD,)),
    "forward KL, the teacher's answers": (TAUGHT, ()),
    "reverse KL, own answers": (GOLD, (REVERSE, OWN)),
    "policy gradient, own answers": (GOLD, (SAMPLED, OWN)),
    "reverse KL, own answers, teacher a running average": (GOLD, (REVERSE, OWN, AVERAGE)),
}
RATES = ("5e-6", "8e-5")  # beside the common learning rate, with one seed: would another have favoured another method?
ENOUGH = 3  # seeds before the other learning rates are looked at
PROBED = (
    "cross-entropy, the teacher's answers",
    "forward KL, the teacher's answers",
    "reverse KL, own answers",
    "policy gradient, own answers",
)
SOLUTION = 'teacher.context={template: "{solution}", place: before}'
FROM_SOLUTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cross-entropy, the solutions": (GOLD, (SOLUTION, HARD)),
    "forward KL, the solutions": (GOLD, (SOLUTION,)),
    "reverse KL, own answers": (GOLD, (SOLUTION, REVERSE, OWN, LONGER)),
    "policy gradient, own answers": (GOLD, (SOLUTION, SAMPLED, OWN, LONGER)),
    "reverse KL, own answers, teacher a running average": (GOLD, (SOLUTION, REVERSE, OWN, LONGER, AVERAGE)),
}
OF_BOTH = 'teacher.context={template: "{both}", place: before}'


class Run(NamedTuple):
    """One run.

    Attributes:
        part: of the plan.
        task: whose rows it learns from and is judged on; `BOTH` for those of both domains.
        method: what is compared.
        seed: of the order of the data and of what is drawn.
        rows: name of the file of its rows.
        settings: over `privileged.yaml`.
        keeps: the name under which its student is kept for other runs; "" for none.
        needs: models of other runs that must be there before.
    """

    part: str
    task: str
    method: str
    seed: int
    rows: str
    settings: tuple[str, ...]
    keeps: str = ""
    needs: tuple[str, ...] = ()

    def recipe(self, folder: Path, more: Sequence[str] = ()) -> Recipe:
        """The whole recipe, with the tasks' rows and the models in `folder`."""
        base = (
            f"data.source={folder}/{self.task}-{self.rows}.jsonl",
            f"data.validation.source={folder}/{self.task}-held-out.jsonl",
            f"train.seed={self.seed}",
        )
        return load(RECIPE, [*base, *(setting.replace("{folder}", str(folder)) for setting in self.settings), *more])

    @property
    def key(self) -> str:
        """A hash of all that makes the run."""
        return hashlib.sha256(json.dumps([RECIPE.read_text(encoding="utf-8"), *self]).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.part}, {self.task}, {self.method}, seed {self.seed}"


def _kept(task: str) -> str:
    return f"tuned-{task}"


def _teachers(tasks: Sequence[str], routed: bool) -> tuple[str, ...]:
    """Models tuned on `tasks` as the teachers: of the rows of their domain, or a mixture of all for each row."""
    of = [f"{{model: {{folder}}/{_kept(task)}{f', route: {task}' if routed else ''}}}" for task in tasks]
    fields = ("data.fields={teacher: domain}",) if routed else ()
    if len(tasks) == 1:
        return ("teacher=" + of[0],)
    return ("teacher=", f"teachers=[{', '.join(of)}]", *fields)


def runs(seeds: int) -> list[Run]:
    """All runs, seed by seed and the most telling first, so that whatever time cuts off leaves whole comparisons."""
    found = []
    own = (REVERSE, OWN)
    for seed in range(seeds):
        for task in MIXED:
            for method, (rows, settings) in FROM_CONTEXT.items():
                kept = _kept(task) if seed == 0 and settings == (HARD,) and rows == GOLD else ""
                found.append(Run(CONTEXT, task, method, seed, rows, settings, kept))
        if seed == 0:
            method = "cross-entropy, the data's answers"
            found.append(Run(CONTEXT, BOTH, method, seed, GOLD, (HARD,), _kept(BOTH)))
        for method, (rows, settings) in FROM_SOLUTIONS.items():
            found.append(Run(SOLUTIONS, "sums", method, seed, rows, settings))
        compared = {
            "each row's own teacher": (MIXED, True),
            "a mixture of both for every row": (MIXED, False),
            **{f"the teacher of {task} for every row": ((task,), False) for task in MIXED},
            "one teacher tuned on both": ((BOTH,), False),
        }
        for name, (tasks, routed) in compared.items():
            settings = (*_teachers(tasks, routed), *own)
            found.append(Run(ROUTES, BOTH, name, seed, GOLD, settings, needs=tuple(map(_kept, tasks))))
        for name, settings in {"each row's own prompt": (), "one prompt with half of each": (OF_BOTH,)}.items():
            found.append(Run(PROMPTS, BOTH, name, seed, GOLD, (*settings, *own)))
        if seed == min(seeds, ENOUGH) - 1:
            found += probes()
    return found


def probes() -> list[Run]:
    """Runs at other learning rates."""
    return [
        Run(CONTEXT, MIXED[0], f"{method}, learning rate {rate}", 0, rows, (*settings, f"train.learning_rate={rate}"))
        for method, (rows, settings) in FROM_CONTEXT.items()
        if method in PROBED
        for rate in RATES
    ]
