"""One configuration after another in one process: the teacher is loaded once, students are copied from one cut.

Nothing here trains or judges in its own way: `DistillationTrainer`, `evaluate` along the run, `judge` before and
after it, each as `distill run` and `distill eval` use them.
"""

from __future__ import annotations

import copy
import gc
import json
import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers
from transformers import PrinterCallback, TrainerCallback

from distill.data.chat import template_of
from distill.data.load import Splits, load_data
from distill.evaluation.evaluate import evaluate
from distill.evaluation.evaluate_documents import EvaluationResult, evaluate_documents
from distill.generation.from_recipe import rollouts_from_recipe
from distill.models.dtypes import resolve_device, resolve_precision
from distill.models.fp8_teacher import quantise_teacher
from distill.models.loading import load_student, load_teacher, load_tokenizer
from distill.models.patch.attention_choice import AttentionChoices
from distill.models.patch.patching import patch
from distill.models.precision import fp8_student
from distill.planning.run_plan import plan_steps
from distill.recipe import Recipe
from distill.training.arguments import fused_optimizer, training_arguments
from distill.training.step_listeners import RolloutBatches
from distill.training.trainer import DistillationTrainer
from scripts.study.plan import Setup

MOMENTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)  # shares of the run after which the student is looked at
CURVE = ("forward_kl", "reverse_kl", "agreement", "student_cross_entropy")  # of each place on it
SPLIT_SEED = 0  # what is held out is the same for every seed


class Bench:
    """Setup shared by all configurations: teacher, tokenizer, data, students before training.

    Args:
        setups: All that will be run; of each depth one student is cut before the teacher gets our kernels.
        held_out: Rows that students are judged on at most (a held-out document may be a book of a file).
    """

    def __init__(self, setups: Sequence[Setup], held_out: int = 128) -> None:
        self.held_out = held_out
        first = setups[0].recipe()
        if first.teacher.dtype == "fp8":  # who judges is not in fp8
            first = first.model_copy(update={"teacher": first.teacher.model_copy(update={"dtype": "auto"})})
        self.device = resolve_device(first.train)
        self.precision = resolve_precision(first, self.device)
        self.teacher = load_teacher(first.teacher, device=self.device, dtype=self.precision.teacher)
        self.tokenizer = load_tokenizer(first.teacher)
        self.cuts: dict[int, Any] = {}
        self._splits: dict[str, Splits] = {}
        self._before: dict[tuple[str, int], EvaluationResult] = {}
        self._attention: dict[int, AttentionChoices] = {}
        self._in_fp8: Any = None
        for setup in setups:
            if setup.layers not in self.cuts:
                section = setup.recipe().student
                self.cuts[setup.layers] = load_student(
                    section, teacher=self.teacher, device=self.device, dtype=self.precision.student
                )
        self._use_kernels(self.teacher, "teacher", first)

    def splits(self, setup: Setup) -> Splits:
        """The rows of a configuration's data, read once."""
        if setup.data not in self._splits:
            found = load_data(setup.recipe().data, self.tokenizer, seed=SPLIT_SEED)
            rows = found.validation.select(range(min(self.held_out, len(found.validation))))  # they are shuffled
            self._splits[setup.data] = found._replace(validation=rows)
        return self._splits[setup.data]

    def student(self, setup: Setup, recipe: Recipe) -> Any:
        """A fresh student with our kernels, and computing in fp8 if the recipe says so."""
        student = copy.deepcopy(self.cuts[setup.layers])
        self._use_kernels(student, "student", recipe)
        if recipe.student.compute == "fp8":
            with mock.patch.object(
                fp8_student, "GAINS_FROM", 0
            ):  # what it costs, also where layers are too small to gain
                fp8_student.compute_in_fp8(student)
        return student

    def teacher_for(self, recipe: Recipe) -> Any:
        """Return the teacher to train with: the bench's, which also evaluates, or its fp8 copy."""
        if recipe.teacher.dtype != "fp8":
            return self.teacher
        if self._in_fp8 is None:
            self._in_fp8 = copy.deepcopy(self.teacher)
            quantise_teacher(self._in_fp8, recipe.teacher.fp8_skip)
        return self._in_fp8

    def judge(self, student: Any, setup: Setup, recipe: Recipe) -> EvaluationResult:
        """Held-out figures with intervals."""
        return evaluate_documents(
            student,
            self.teacher,
            self.splits(setup).validation,
            batch_size=recipe.train.batch_size,
            autocast=self.precision.autocast,
        )

    def before(self, student: Any, setup: Setup, recipe: Recipe) -> EvaluationResult:
        """The same of the student that is not trained yet, once for each data set and depth."""
        key = (setup.data, setup.layers)
        if key not in self._before:
            self._before[key] = self.judge(student, setup, recipe)
        return self._before[key]

    def _use_kernels(self, model: Any, role: Any, recipe: Recipe) -> None:
        """Put the kernels into the model as `distill run` does on a GPU; a model on a CPU is unchanged."""
        if self.device.type == "cuda":
            layers = model.config.num_hidden_layers
            choices = self._attention.setdefault(layers, AttentionChoices(recipe))
            patch(model, role, attention=choices.of(model, role))


class Quality(TrainerCallback):
    """Callback that evaluates the student during the run: held-out metrics over the tokens seen."""

    def __init__(self, bench: Bench, setup: Setup, recipe: Recipe) -> None:
        self.bench, self.setup, self.recipe, self.rows = bench, setup, recipe, bench.splits(setup).validation
        steps = recipe.train.steps or 0
        self.at = {max(1, round(share * steps)) for share in MOMENTS}
        self.trainer: DistillationTrainer | None = None
        self.curve: list[dict[str, float]] = []
        self.seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate at the chosen steps, off the clock."""
        if state.global_step not in self.at or state.global_step == state.max_steps:
            return
        start = time.perf_counter()
        self.curve.append({"tokens": state.global_step * (self.recipe.train.tokens_per_step or 0), **self.point()})
        self.seconds += time.perf_counter() - start

    def point(self) -> dict[str, float]:
        """The student's held-out figures as it stands."""
        assert self.trainer is not None
        found = evaluate(
            self.trainer.model,
            self.bench.teacher,
            self.rows,  # type: ignore[arg-type]
            batch_size=self.recipe.train.batch_size,
            autocast=self.bench.precision.autocast,
            objective=self.trainer.objective,
        )
        return {name: getattr(found, name) for name in CURVE}


class Judged(Quality):
    """Callback that evaluates the student against the loaded teacher, as after training."""

    def point(self) -> dict[str, float]:
        """The student's held-out figures as it stands."""
        assert self.trainer is not None
        return point_of(self.bench.judge(self.trainer.model, self.setup, self.recipe))


class Training(NamedTuple):
    """Cost of one training: seconds without evaluations, and the tokens trained on."""

    seconds: float
    learned: int


def train(
    recipe: Recipe, bench: Bench, student: Any, splits: Splits, quality: Quality | None = None, **kind: Any
) -> Training:
    """Train `student` by `recipe`; `kind` takes the place of the bench's teacher and plain objective.

    Raises:
        SystemExit: a signal ended it before its last step.
    """
    transformers.set_seed(recipe.train.seed)
    with tempfile.TemporaryDirectory() as folder:
        arguments = training_arguments(
            recipe,
            Path(folder),
            plan_steps(recipe, len(splits.train)),
            device=bench.device,
            precision=bench.precision,
        )
        trainer = DistillationTrainer(
            student,
            args=arguments,
            loss=recipe.loss,
            train_dataset=splits.train,
            processing_class=bench.tokenizer,
            callbacks=[quality] if quality else [],
            optimizer_cls_and_kwargs=fused_optimizer(recipe, arguments),
            **({"teacher": bench.teacher} | kind),
        )
        trainer.remove_callback(PrinterCallback)
        if quality is not None:
            quality.trainer = trainer
        rollouts = rollouts_from_recipe(
            recipe,
            student,
            bench.tokenizer,
            template=template_of(recipe.data, bench.tokenizer),
            report=splits.report,
            vocab_size=trainer.objective.columns,
            autocast=bench.precision.autocast,
        )
        if rollouts is not None:
            trainer.add_callback(RolloutBatches(rollouts, trainer))
        start = time.perf_counter()
        trainer.train()
        if bench.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start - (quality.seconds if quality else 0.0)
    trainer.objective.detach()
    return Training(seconds, int(sum(row.get("trained_tokens", 0) for row in trainer.state.log_history)))


def run_one(setup: Setup, bench: Bench) -> dict[str, Any]:
    """Train one configuration and judge it: the row of the results, without what the machine is."""
    recipe = setup.recipe()
    student, splits = bench.student(setup, recipe), bench.splits(setup)
    before = bench.before(student, setup, recipe)
    teacher = bench.teacher_for(recipe)
    judge = Quality if teacher is bench.teacher else Judged
    quality = judge(bench, setup, recipe)
    took = train(recipe, bench, student, splits, quality, teacher=teacher)
    row = row_of(setup, recipe, before, bench.judge(student, setup, recipe), quality.curve, took)
    del quality, student
    free(bench)
    return row


def row_of(
    setup: Any,
    recipe: Recipe,
    before: EvaluationResult,
    after: EvaluationResult,
    curve: list[dict[str, float]],
    took: Training,
) -> dict[str, Any]:
    """The row of one configuration."""
    tokens = (recipe.train.steps or 0) * (recipe.train.tokens_per_step or 0)
    ends = [{"tokens": n, **point_of(j)} for n, j in ((0, before), (tokens, after))]
    return {
        "key": setup.key,
        "data": setup.data,
        "layers": setup.layers,
        "objective": setup.objective,
        "seed": setup.seed,
        "settings": setup.shown,
        "tokens": tokens,
        "held_out_tokens": after.tokens,
        "held_out_rows": after.rows,
        "after": {name: list(figure) for name, figure in after.figures.items()},
        "before": {name: figure.value for name, figure in before.figures.items()},
        "gap_closed": list(after.kl_reduction(before)),
        "calibration_error": after.calibration_error,
        "curve": [ends[0], *curve, ends[1]],
        "seconds": round(took.seconds, 2),
        "tokens_per_s": round(tokens / took.seconds),
    }


def free(bench: Bench) -> None:
    """Free the memory of the last configuration."""
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def point_of(found: EvaluationResult) -> dict[str, float]:
    """A judgement's place on a curve."""
    return {name: found.figures[name].value for name in CURVE}


def finished(folder: Path, plan: str = "objectives") -> list[dict[str, Any]]:
    """Rows of a plan in all files of `folder`; a line cut short by a kill is left out."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                logging.getLogger(__name__).warning("%s: a line is cut short, and its run is made again", path)
                continue
            if row.get("plan", "objectives") == plan:
                rows.append(row)
    return rows
