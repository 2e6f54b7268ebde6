"""The results of a run: held-out metrics and samples before and after training, the saved student and its reports."""

from __future__ import annotations

import importlib.metadata
import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from distill.core import console
from distill.core.environment import device_name, environment
from distill.core.files import write_json
from distill.core.folders import RESULT_FILE
from distill.core.launch import command_line
from distill.core.manifest import file_checksums
from distill.core.ranks import broadcast_from_rank0, is_main_process
from distill.core.run_lock import RunLock, now
from distill.evaluation.evaluate import HeldOut, evaluate
from distill.generation.task_answers import Accuracy
from distill.generation.tasks import StudentTasks
from distill.models.loading import save_student
from distill.models.sharding import is_sharded, whole_student
from distill.recipe import Recipe, dump
from distill.recipe.held_out_figures import PREFIX
from distill.recipe.schema import Generate
from distill.reports.run_manifest import (
    BEFORE_FILE,
    Answers,
    Measured,
    read_before,
    read_start,
    record_end,
    record_start,
)
from distill.reports.run_summary import TITLES, result_table, show_samples, write_samples
from distill.teachers.base import TeacherPlan
from distill.teachers.identity import model_name
from distill.teachers.opening import ModelPair
from distill.training.progress import read_metrics
from distill.training.trainer import DistillationTrainer
from distill.training.untrained import UntrainedWeights, must_measure_first

if TYPE_CHECKING:
    from distill.data.load import Splits

log = logging.getLogger(__name__)


class RunResult(NamedTuple):
    """Result of a run.

    Attributes:
        folder: Folder of the run.
        before: Held-out metrics of the untrained student.
        after: Held-out metrics of the trained student.
        kl_reduction: Relative reduction of the forward KL by training.
        steps: Number of optimizer steps.
        sets: Metrics of the untrained and the trained student on each named held-out set.
        tasks: Accuracy in each task, `before` and `after`, and of the `teacher` where it was asked.
    """

    folder: Path
    before: HeldOut
    after: HeldOut
    kl_reduction: float
    steps: int
    sets: Mapping[str, tuple[HeldOut, HeldOut]] = MappingProxyType({})
    tasks: Mapping[str, Mapping[str, Accuracy]] = MappingProxyType({})


def earlier_measurement(folder: Path, recipe: Recipe, trainer: DistillationTrainer, splits: Splits) -> Measured | None:
    """Return the untrained student's measurement by this run before it was resumed; every process calls it."""
    tasks = [task.name for task in recipe.eval.tasks]
    return broadcast_from_rank0(lambda: read_before(folder, trainer.objective.measure, list(splits.sets), tasks))


@dataclass(frozen=True)
class RunResults:
    """Evaluates a run's student and writes what the run produces.

    Attributes:
        source: Source of the run's teacher, with the recipe.
        pair: Teacher and student.
        trainer: Trainer of the student.
        splits: Data of the run.
        autocast: Compute dtype of the student where that is not its weights'.
        run_lock: Lock on the run's folder.
        tasks: Tasks that the student answers; None where there are none.
        summary: Lines that describe the run, as they were printed before it started; none on other ranks.
    """

    source: TeacherPlan
    pair: ModelPair
    trainer: DistillationTrainer
    splits: Splits
    autocast: torch.dtype | None
    run_lock: RunLock
    tasks: StudentTasks | None
    summary: Sequence[str] = ()

    @property
    def recipe(self) -> Recipe:
        return self.source.recipe

    @property
    def folder(self) -> Path:
        return self.run_lock.folder

    def measure(self) -> Measured:
        """Measure the student on all held-out rows."""
        sets = {name: self._held_out(rows) for name, rows in self.splits.sets.items()}
        held_out = self._held_out(self.splits.validation)
        tasks = {}
        if self.tasks is not None:
            step = self.trainer.state.global_step
            tasks = {each.name: self.tasks.measure(each, step) for each in self.tasks.questions}
        return Measured(held_out, sets, tasks, {})

    def _held_out(self, rows: Sequence[Any]) -> HeldOut:
        """Return metrics on some rows; a student sharded by FSDP is called through its wrapper."""
        trainer = self.trainer
        return evaluate(
            trainer.model_wrapped if trainer.is_fsdp_enabled else trainer.model,
            self.pair.teacher,
            rows,
            batch_size=self.recipe.eval.batch_size or self.recipe.train.batch_size,
            autocast=self.autocast,
            objective=trainer.objective,
        )

    def untrained(self) -> Measured | UntrainedWeights:
        """Return the measurement of the untrained student, or the weights with which it is made after training.

        Every process calls it, before a checkpoint is loaded and the first step is made.
        """
        measured = earlier_measurement(self.folder, self.recipe, self.trainer, self.splits)
        if measured is not None:
            return measured
        if is_main_process():
            self._write_before({})
        return self._measure_untrained() if must_measure_first(self.trainer) else UntrainedWeights(self.trainer.model)

    def before(self, untrained: Measured | UntrainedWeights) -> Measured:
        """Return the measurement of the untrained student, after training; every process calls it."""
        if not isinstance(untrained, UntrainedWeights):
            return untrained
        with untrained.exchanged(self.trainer.model):
            return self._measure_untrained()

    def _measure_untrained(self) -> Measured:
        """Measure the student, which has its untrained weights, and write before.json."""
        pair = self.pair
        recipe = self.recipe
        with console.announced("evaluating", "the student before training, on held-out rows"):
            before = self.measure()
        answers: Answers = {}
        if recipe.generate.prompts:
            with console.announced("generating", "samples, teacher and student"):
                texts = pair.teacher.respond(recipe.generate.prompts, recipe.generate)
                answers |= {} if texts is None else {"teacher": texts}
                if pair.tokenizer is not None and (is_main_process() or is_sharded(pair.student)):
                    answers["before"] = self._answers_of(pair.student)
        # after the samples, which a store of the teacher's outputs keeps for later runs
        teacher = self._teacher_tasks()
        if is_main_process():
            measure = self.trainer.objective.measure
            figures: dict[str, Any] = {"held_out": measure.to_json(before.held_out._asdict())}
            if before.sets:
                figures["sets"] = {name: measure.to_json(own._asdict()) for name, own in before.sets.items()}
            if before.tasks:
                figures["tasks"] = {name: {"before": own.as_dict()} for name, own in before.tasks.items()}
                for name, own in teacher.items():
                    figures["tasks"][name]["teacher"] = own.as_dict()
            self._write_before({**figures, "measure": measure, "answers": answers})
        return before._replace(answers=answers, teacher_tasks=teacher)

    def _teacher_tasks(self) -> dict[str, Accuracy]:
        """Return the teacher's accuracy in each task, in the first process; empty where it cannot answer."""
        found = {}
        for questions in () if self.tasks is None else self.tasks.questions:
            texts = [prompt.text for prompt in questions.prompts]
            settings = Generate(prompts=texts, max_new_tokens=questions.task.max_new_tokens)
            teacher = self.pair.teacher
            with console.announced("answering", f"{questions.name}, the teacher", len(texts)):
                is_generated = questions.task.is_generated
                responses = teacher.respond(texts, settings) if is_generated else teacher.choose(questions)
            if responses is not None and is_main_process():
                found[questions.name] = questions.accuracy(responses)
        if self.tasks is not None and not found and is_main_process():
            log.warning(
                "eval.tasks: no accuracy of the teacher (%s), which answers no prompts in this run", self.source.title()
            )
        return found

    def _write_before(self, figures: dict[str, Any]) -> None:
        """Write before.json: start of the run, and the untrained student's figures once it is measured."""
        record = {
            "started": self.run_lock.started,
            "command": shlex.join(["distill", *command_line]) if command_line else None,
            "device": device_name(self.trainer.args.device),
            "summary": list(self.summary),
            **read_start(self.folder),
            **figures,
        }
        write_json(self.folder / BEFORE_FILE, console.to_jsonable(record))
        record_start(self.folder)

    def save(self, result: RunResult, answers: Answers) -> None:
        """Save the student, its samples and reports, and print the table of results; every process calls it.

        Args:
            result: Result of the run.
            answers: Responses from before training; those of the trained student are added.
        """
        recipe = self.recipe
        trainer = self.trainer
        sharded = self.trainer.is_fsdp_enabled
        student: Any = trainer.accelerator.unwrap_model(trainer.model)
        if self.pair.tokenizer is not None and recipe.generate.prompts and (is_main_process() or sharded):
            with console.announced("generating", "samples again", len(recipe.generate.prompts)):
                answers["after"] = self._answers_of(student)
        if sharded:
            student = whole_student(trainer.accelerator, student)
        if not is_main_process():
            return
        save_student(student, self.pair.tokenizer, self.folder / "student", recipe.student.lora)
        self._write_card(result)
        if answers:
            write_samples(self.folder / "samples.md", recipe.generate.prompts, answers)
            show_samples(recipe.generate.prompts, answers)
        self._draw_curves()
        heading, rows, closing = result_table(result.before, result.after, trainer.objective.measure, result.sets)
        console.print_lines("")
        console.show_table(heading, rows, numbers=True)
        for name, own in result.tasks.items():
            closing += f"\n{name:<11} " + ", ".join(f"{TITLES[who]} {accuracy}" for who, accuracy in own.items())
        best = self._best()
        if best is not None:
            value = f"{best['value']:.4f}"
            closing += f"\nbest        held-out {best['figure']} {value} at step {best['step']} of {result.steps}"
        console.print_lines(f"{closing}\nstudent     {self.folder / 'student'}")
        self._write_result(result, answers)
        record_end(self.folder)

    def _answers_of(self, student: Any) -> list[str]:
        # greedy: no random numbers are used, so training is the same with and without samples
        settings = self.recipe.generate
        if not settings.prompts:
            return []
        from distill.generation.engines import greedy_responses

        return greedy_responses(student, self.pair.tokenizer, settings.prompts, settings.max_new_tokens)

    def _best(self) -> dict[str, Any] | None:
        """Return figure, value and step of the evaluation whose student is kept; None where it is the last step's."""
        state = self.trainer.state
        if not self.trainer.args.load_best_model_at_end or state.best_model_checkpoint is None:
            return None
        figure = str(self.trainer.args.metric_for_best_model).removeprefix(PREFIX)
        return {"figure": figure, "value": state.best_metric, "step": state.best_global_step}

    def _write_card(self, result: RunResult) -> None:
        from distill.reports.model_card import hub_ids, licence_of, write_model_card

        recipe = self.recipe
        source = self.source
        write_model_card(
            self.folder / "student",
            name=recipe.name,
            teacher=source.title(),
            student=model_name(recipe.student),
            data=self.splits.report.source,
            recipe=dump(recipe),
            before=result.before,
            after=result.after,
            versions={name: importlib.metadata.version(name) for name in ("torch", "transformers")},
            hub_models=hub_ids(*(s.model for s in (recipe.student, recipe.teacher, *source.sections.values()))),
            datasets=hub_ids(*(part.data.source for part in recipe.data.parts), recipe.data.validation.source),
            licence=licence_of(recipe.student.model or recipe.teacher.model or ""),
            measure=self.trainer.objective.measure,
        )

    def _draw_curves(self) -> None:
        from distill.reports.curves import draw_curves

        folder = self.folder
        measure = self.trainer.objective.measure
        draw_curves(read_metrics(folder / "metrics.jsonl"), folder / "curves.svg", title=folder.name, measure=measure)

    def _write_result(self, result: RunResult, answers: Answers) -> None:
        measure = self.trainer.objective.measure
        best = self._best()
        sets = {
            name: {"before": measure.to_json(before._asdict()), "after": measure.to_json(after._asdict())}
            for name, (before, after) in result.sets.items()
        }
        tasks = {name: {who: each.as_dict() for who, each in own.items()} for name, own in result.tasks.items()}
        summary = {
            "before": measure.to_json(result.before._asdict()),
            "after": measure.to_json(result.after._asdict()),
            **({"sets": sets} if sets else {}),
            **({"tasks": tasks} if tasks else {}),
            "measure": measure,
            "gap_closed": result.kl_reduction,
            "data": self.splits.report.as_dict(),
            "steps": result.steps,
            "stopped_early": result.steps < self.trainer.state.max_steps,
            **({} if best is None else {"best": best}),
            "finished": now(),
            "prompts": self.recipe.generate.prompts,
            "answers": answers,
            "environment": environment(),
            "files": file_checksums(self.folder / "student"),
        }
        write_json(self.folder / RESULT_FILE, console.to_jsonable(summary))
