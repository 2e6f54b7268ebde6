"""Runs of a plan, one after another: trained by the phases of `distill run`, judged before, along and after.

Several processes may work on one plan (one for each GPU, by CUDA_VISIBLE_DEVICES): with the same --out and --work each
takes the next run that has no row and that no other has claimed.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import PartialState
from transformers import TrainerCallback

from distill.commands.arguments import plugin_override
from distill.core.errors import RunError
from distill.core.launch import is_running
from distill.core.run_lock import RunLock
from distill.models.dtypes import resolve_device, resolve_precision
from distill.models.loading import load_teacher
from distill.models.patch.attention_choice import AttentionChoices
from distill.models.patch.patching import patch
from distill.models.precision import fp8_student
from distill.objectives.plugin import allowed_plugin
from distill.recipe import Recipe, load
from distill.run import Opened, Prepared
from distill.run import Run as Phases
from distill.training.error_translation import translate_errors
from scripts.bench.harness import environment
from scripts.study import judges, prepare
from scripts.study.planner import FOLDER, Plan, Run
from scripts.study.report import finished

MOMENTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)  # shares of the run after which the student is judged for the curve


@dataclass
class Lab:
    """What the runs of a plan share.

    Attributes:
        plan: The plan.
        work: Folder of files and models that runs read.
        data: The user's data file, `{data}` in the plan; None where the plan names none.
        more: Settings of all runs, after their own.
        teachers: Loaded teachers that judge, by their section of the recipe; one at a time.
        kept: Results of judges that runs share, such as the teacher's own answers.
    """

    plan: Plan
    work: Path
    data: Path | None
    more: Sequence[str] = ()
    teachers: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def places(self) -> dict[str, Any]:
        """What stands for the placeholders in settings."""
        return {"work": self.work, "data": self.data, "plugin": self.plugin}

    @property
    def plugin(self) -> Path | None:
        """The file with the plan's rewards."""
        name = self.plan.fields.get("plugin")
        return FOLDER / name if name else None

    def recipe(self, run: Run, *, shared: bool = False) -> Recipe:
        """Return the whole recipe of a run; one with a reward names the code's hash."""
        recipe = self.plan.recipe(run, self.places, self.more, shared=shared)
        if recipe.loss.rewarded is None:
            return recipe
        return self.plan.recipe(run, self.places, [*self.more, *plugin_override(self.plugin)], shared=shared)

    def recipe_with(self, settings: Sequence[str]) -> Recipe:
        """Return the plan's recipe with settings that are no run's."""
        return load(self.plan.recipe_file, [*settings, *self.more])

    def teacher(self, run: Run) -> Any:
        """Return the teacher that judges a run: loaded, and never in fp8, whatever the student learns from."""
        recipe = self.recipe(run, shared=True)
        key = recipe.teacher.model_dump_json()
        if key not in self.teachers:
            self.teachers.clear()
            device = resolve_device(recipe.train)
            dtype = resolve_precision(recipe, device).teacher
            teacher = load_teacher(recipe.teacher, device=device, dtype=dtype)
            if device.type == "cuda":
                patch(teacher, "teacher", attention=AttentionChoices(recipe).of(teacher, "teacher"))
            self.teachers[key] = teacher
        return self.teachers[key]

    def make(self, settings: Sequence[str]) -> None:
        """Make the files and models under `work` that settings name and that are not there."""
        for name in re.findall(rf"{re.escape(str(self.work))}/([\w.+-]+)", " ".join(settings)):
            path = self.work / name
            with _locked(self.work / f"{name}.lock"):
                if not path.exists():
                    self._make_one(name, path)

    def _make_one(self, name: str, path: Path) -> None:
        for pattern, ((how, options),) in ((key, value.items()) for key, value in self.plan.fields["made"].items()):
            parts = re.split(r"\{(\w+)\}", pattern)
            expression = "".join(f"(?P<{part}>[^-]+)" if odd % 2 else re.escape(part) for odd, part in enumerate(parts))
            found = re.fullmatch(expression, name)
            if found is None:
                continue
            known = {key: str(value) for key, value in (found.groupdict() | self.places).items()}
            print(f"making {name}", flush=True)
            begun = path.with_name(f"{name}.unfinished")
            shutil.rmtree(begun, ignore_errors=True)
            prepare.MAKERS[how](self, begun, _filled(options, known), found.groupdict())
            begun.rename(path)
            return
        raise ValueError(
            f"made: expected an entry for {name}, which a run reads; got {', '.join(self.plan.fields['made'])}"
        )


def _filled(options: Any, known: dict[str, str]) -> Any:
    """Return options of the plan with placeholders replaced in all texts."""
    if isinstance(options, dict):
        return {key: _filled(value, known) for key, value in options.items()}
    if isinstance(options, list):
        return [_filled(value, known) for value in options]
    if isinstance(options, str):
        return re.sub(r"\{(\w+)\}", lambda name: known.get(name[1], name[0]), options)
    return options


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def opened(recipe: Recipe, folder: Path, plugin: Path | None) -> Iterator[tuple[Phases, Prepared, Opened]]:
    """Open a run as `distill run` does, up to its first step."""
    code = allowed_plugin(recipe.loss, plugin) if recipe.runs_code else None
    process = PartialState(cpu=resolve_device(recipe.train).type == "cpu")
    with translate_errors(recipe, folder), RunLock(folder) as lock, contextlib.ExitStack() as resources:
        phases = Phases(recipe, False, None, code, (), lock, resources, process)
        prepared = phases.prepare()
        started = phases.open(prepared)
        try:
            yield phases, prepared, started
        finally:
            started.trainer.objective.detach()


class Along(TrainerCallback):
    """Callback that judges the student during the run, off the clock."""

    def __init__(self, subject: judges.Subject, steps: int) -> None:
        self.subject = subject
        self.at = {max(1, round(share * steps)) for share in MOMENTS}
        self.curve: list[dict[str, float]] = []
        self.seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Judge at the chosen steps."""
        if state.global_step not in self.at or state.global_step == state.max_steps:
            return
        start = time.perf_counter()
        tokens = state.global_step * (self.subject.recipe.train.tokens_per_step or 0)
        self.curve.append({"tokens": tokens, **judges.point(judges.held_out(self.subject))})
        self.seconds += time.perf_counter() - start


def run_one(run: Run, lab: Lab) -> dict[str, Any]:
    """Train one student and judge it: its row, without what the machine is.

    Raises:
        SystemExit: A signal ended the training before its last step.
    """
    recipe = lab.recipe(run)
    lab.make(run.filled([*run.settings, *run.shared], lab.places))
    folder = lab.work / "runs" / str(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)
    everywhere = mock.patch.object(fp8_student, "GAINS_FROM", 0)
    with contextlib.ExitStack() as stack:
        if lab.plan.fields.get("fp8_everywhere"):
            stack.enter_context(everywhere)
        phases, prepared, started = stack.enter_context(opened(recipe, folder, lab.plugin))
        subject = judges.Subject(run, recipe, prepared, started, lab)
        row = {**run.names, "settings": run.filled(run.settings, {"work": "{work}", "data": "{data}"})}
        trains = run.options.get("train", True)
        chosen_judges = {name: judges.JUDGES[name] for name in run.judge}
        before = {name: judge.measure(subject) for name, judge in chosen_judges.items() if judge.before or not trains}
        after = before
        if trains:
            row |= _trained(phases, subject, lab.plan)
            after = {name: judge.measure(subject) for name, judge in chosen_judges.items()}
        for name, judge in chosen_judges.items():
            row |= judge.row(subject, before.get(name, after[name]), after[name])
        if lab.plan.fields.get("curve"):
            ends = ((0, before["held_out"]), (row["tokens"], after["held_out"]))
            first, last = ({"tokens": tokens, **judges.point(found)} for tokens, found in ends)
            row["curve"] = [first, *row["curve"], last]
    shutil.rmtree(folder, ignore_errors=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return row


def _trained(phases: Phases, subject: judges.Subject, plan: Plan) -> dict[str, Any]:
    """Train a student; return cost and curve."""
    trainer = subject.started.trainer
    along = Along(subject, trainer.args.max_steps) if plan.fields.get("curve") else None
    if along is not None:
        trainer.add_callback(along)
    start = time.perf_counter()
    phases.train(subject.started)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start - (along.seconds if along else 0.0)
    logs = trainer.state.log_history
    steps = trainer.state.global_step
    tokens = steps * (subject.recipe.train.tokens_per_step or 0)
    row: dict[str, Any] = {"steps": steps, "tokens": tokens, "seconds": round(seconds, 2)}
    row |= {"seconds_per_step": seconds / steps, "tokens_per_s": round(tokens / seconds)}
    row |= {"learned_tokens": int(sum(log.get("trained_tokens", 0) for log in logs))}
    if along is not None:
        row["curve"] = along.curve
    wanted = plan.fields.get("metrics")
    if wanted:
        row["curve"] = [{key: log[key] for key in ("step", *wanted) if key in log} for log in logs]
    return row


def chosen(plan: Plan, seeds: int | None, only: Sequence[str]) -> list[Run]:
    """Return the runs that are wanted: of the first seeds, and on each axis that `only` has levels of, of these.

    Raises:
        ValueError: A level that no run has.
    """
    levels = {str(level) for run in plan.runs for level in run.names.values()}
    for text in only:
        if text not in levels:
            raise ValueError(f"--only: expected some of {', '.join(sorted(levels))}; got {text}")

    def wanted(run: Run) -> bool:
        if seeds is not None and run.names["seed"] >= seeds:
            return False
        if run.options.get("asked") and not set(map(str, run.names.values())) & asked & set(only):
            return False
        return all(str(level) in only for axis, level in run.names.items() if set(only) & of_axis.get(axis, set()))

    of_axis: dict[str, set[str]] = {}
    for run in plan.runs:
        for axis, level in run.names.items():
            if axis != "seed":
                of_axis.setdefault(axis, set()).add(str(level))
    asked = {str(level) for axis in of_axis for level, found in plan.levels(axis).items() if found.get("asked")}
    return [run for run in plan.runs if wanted(run)]


def identity(row: dict[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    """Return what a row is of."""
    return tuple(row.get(name, 0) for name in names)


def make_rows(runs: Sequence[Run], lab: Lab, out: Path, *, minutes: float | None = None) -> None:
    """Make the rows that are missing in `out`."""
    facts = environment()
    gpu = facts["gpu"].replace(" ", "-").lower()
    path = out / f"{gpu}-{lab.plan.name}.jsonl"
    began = time.perf_counter()
    longest = 0.0
    (lab.work / "claimed").mkdir(parents=True, exist_ok=True)
    for number, run in enumerate(runs, 1):
        names = tuple(run.names)
        if identity(run.names, names) in {identity(row, names) for row in finished(out, lab.plan.name)}:
            continue
        start = time.perf_counter()
        if minutes is not None and start - began + longest > 60 * minutes:
            print(f"stopped before {number}/{len(runs)} {run}; the same command goes on", flush=True)
            return
        with claimed(lab.work / "claimed" / re.sub(r"\W+", "-", str(run))) as is_ours:
            if not is_ours:
                continue
            try:
                row = run_one(run, lab)
            except RunError as error:  # not finite, at twice the learning rate for example: that is a result too
                print(f"{number}/{len(runs)} {run}: no row, since it broke: {str(error).splitlines()[0]}", flush=True)
                continue
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"plan": lab.plan.name, **row, **facts}) + "\n")
        longest = max(longest, time.perf_counter() - start)
        print(f"{number}/{len(runs)} {run}: {judges.shown(row)}, {time.perf_counter() - start:.1f} s", flush=True)


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Claim a run for this process, unless another that lives has; True where it is ours."""
    with contextlib.suppress(OSError, ValueError):
        if not is_running(int(path.read_text())):
            path.unlink()  # its process was killed
    try:
        with path.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        yield False
        return
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)
