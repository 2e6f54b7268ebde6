"""Progress of a training run: the progress bar and `metrics.jsonl`."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerState

from distill.core.console import ignore_lost_terminal, share_bar, wrap_line
from distill.core.files import write_text
from distill.core.manifest import entry_mismatch, remove_from_manifest
from distill.objectives.measure import KL, DivergenceUnit
from distill.recipe import Loss
from distill.recipe.loss import clip_text
from distill.training.listeners import StepListener
from distill.training.phases import PAUSED

log = logging.getLogger(__name__)


class MetricsFile(TrainerCallback):
    """Callback that writes `metrics.jsonl`: one JSON object per logged step, evaluation metrics in the same object.

    On resume, rows beyond the checkpoint's step and a truncated last line are dropped, so that no step appears twice.
    Numbers that are not finite are written as null, since JSON cannot express them.

    Args:
        check: Called before each row is written; raises where nothing may be written.
    """

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self.check = check
        self._last: dict[str, Any] = {}
        self._offset = 0

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Keep only the rows up to the step that training starts from."""
        if not state.is_world_process_zero:
            return
        for fault in damage(self.path):
            log.warning("%s: %s", self.path, fault)
        rows = [row for row in read_metrics(self.path) if row["step"] <= state.global_step]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        remove_from_manifest(self.path.parent, self.path.name)
        write_text(self.path, text)
        last = json.dumps(rows[-1]) + "\n" if rows else ""  # which an evaluation of the same step extends
        self._last = rows[-1] if rows else {}
        self._offset = len(text.encode()) - len(last.encode())

    def on_log(self, args: object, state: TrainerState, control: object, logs: Any = None, **kwargs: object) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if "loss" not in logs and not any(key.startswith("eval_") for key in logs):
            return
        figures = {key: _number(value) for key, value in logs.items() if isinstance(value, int | float)}
        same = self._last.get("step") == state.global_step
        self._last = {**(self._last if same else {}), "step": state.global_step, **figures}
        self.check()
        mode = "r+b" if self.path.exists() else "w+b"
        with self.path.open(mode) as file:
            if not same:
                self._offset = file.seek(0, os.SEEK_END)
            file.seek(self._offset)
            file.write(json.dumps(self._last).encode() + b"\n")
            file.truncate()


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file, without truncated lines and values that are not numbers; [] without a file."""
    if not path.exists():
        return []
    rows = map(_row, path.read_text(encoding="utf-8", errors="replace").splitlines())
    return [row for row in rows if row is not None]


def _row(line: str) -> dict[str, Any] | None:
    """Return the numbers of a line of a metrics file; None for a line that is no row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    return {name: value for name, value in row.items() if value is None or type(value) in (int, float)}


def damage(path: Path) -> list[str]:
    """Return descriptions of damaged lines in a metrics file; a truncated last line is no damage.

    A finished run's file is compared with its checksum too.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    lines = content.splitlines()[: None if content.endswith(b"\n") else -1]
    bad = [str(number) for number, line in enumerate(lines, 1) if _row(line.decode(errors="replace")) is None]
    if bad:
        return [f"line {', '.join(bad[:8])} is damaged, and excluded from the metrics"]
    mismatch = entry_mismatch(path.parent, path.name)
    return [] if mismatch is None else [mismatch]


class ProgressReport(StepListener):
    """Listener that prints a line per logging step, in a terminal above a progress bar.

    Args:
        console: Console to print on; None for standard output.
        measure: Name and unit of the divergence.
        loss: Loss of the recipe, which is explained where it differs from the divergence beside it; None without one.
    """

    def __init__(self, console: Console | None = None, measure: DivergenceUnit = KL, loss: Loss | None = None) -> None:
        self.console = console or Console()
        self.measure = measure
        self.loss = loss
        self._explained = False
        self._bar: Progress | None = None
        self._start = 0.0
        self._start_step = 0

    @contextmanager
    def training(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.stop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Leave the time of evaluations and checkpoints out of the estimate of the time left."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            if name == PAUSED:
                self._start += time.perf_counter() - begun

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        self._start = time.perf_counter()
        self._start_step = state.global_step
        if not state.is_world_process_zero or not self.console.is_terminal:
            return
        name = TextColumn("{task.description}")
        left = TimeRemainingColumn(compact=True)
        columns = name, BarColumn(None), MofNCompleteColumn(), left, TextColumn("left")
        self._bar = Progress(*columns, console=self.console, expand=True, transient=True)
        self._task = self._bar.add_task("training", total=state.max_steps, completed=state.global_step)
        share_bar(self._bar)
        with ignore_lost_terminal():
            self._bar.start()

    def on_step_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args: object, state: TrainerState, control: object, logs: Any = None, **kwargs: object) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if "loss" not in logs:
            self._show_held_out(state, logs)
            return
        left = f"  {self._time_left(state)} left" if self._bar is None else ""
        self._show(f"step {state.global_step}/{state.max_steps}  {figures_line(logs, self.measure)}{left}")
        name = next((name for name in ("kl", "divergence") if name in logs), None)
        if self.loss is None or name is None or self._explained or math.isclose(logs["loss"], logs[name], rel_tol=1e-3):
            return
        self._explained = True
        trains_routers = "router_balance" in logs
        self._show(f"{'':<12}{explain_loss(self.loss, name, self.measure, trains_routers)}")

    def _show_held_out(self, state: TrainerState, logs: dict[str, Any]) -> None:
        figures = {name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith("eval_")}
        if "loss" not in figures:
            return
        sets = [name.removesuffix("loss") for name in figures if name.endswith("loss")]  # "" for the set without a name
        for prefix in sets:
            own = {name.removeprefix(prefix): value for name, value in figures.items() if name.startswith(prefix)}
            where = f"held out, {prefix[:-1]}" if prefix else "held out"
            self._show(f"step {state.global_step}/{state.max_steps}  {where}: {figures_line(own, self.measure)}")
        for name in figures:
            if name.endswith("_accuracy"):
                low = figures[f"{name}_low"]
                high = figures[f"{name}_high"]
                shown = f"{name.removesuffix('_accuracy')}: accuracy {figures[name]:.1%} ({low:.1%} to {high:.1%})"
                self._show(f"step {state.global_step}/{state.max_steps}  {shown}")

    def _show(self, text: str) -> None:
        with ignore_lost_terminal():
            lines = "\n".join(wrap_line(text, self.console.width))
            self.console.print(lines, highlight=False, markup=False, soft_wrap=True)

    def on_train_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._bar is not None:
            bar = self._bar
            self._bar = None
            share_bar()
            with ignore_lost_terminal():
                bar.stop()

    def _time_left(self, state: TrainerState) -> str:
        done = state.global_step - self._start_step
        seconds = (time.perf_counter() - self._start) / max(done, 1) * (state.max_steps - state.global_step)
        return f"{int(seconds) // 3600:d}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"


def explain_loss(loss: Loss, name: str, measure: DivergenceUnit = KL, trains_routers: bool = False) -> str:
    """Return in a line what `loss` is, beside the figure `kl` or `divergence`, from which it differs.

    Args:
        trains_routers: Whether losses of the student's routers are in it.
    """
    at = f" at temperature {loss.temperature_text}" if loss.tempered else ""
    if at and loss.scale_by_temperature_squared:
        at += f", divergences times {loss.scale:g}"
    terms = " + ".join(f"{term.weight:g} x {term.type}{clip_text(term)}" for term in loss.terms if term.weight > 0)
    at += ", and the losses of the student's routers" if trains_routers else ""
    # a loss without one of them reports the forward KL, a schedule may go from one to the other
    trained = sorted(kind.removesuffix("_kl") for kind in loss.divergences & {"forward_kl", "reverse_kl"})
    kinds = " or ".join(trained) or "forward"
    what = f"the {kinds} KL to the teacher" if name == "kl" else "the mean of the terms' divergences"
    where = loss.temperature_text if measure.at_loss_temperature else "1"
    if measure.at_loss_temperature and loss.temperatures.teacher != loss.temperatures.student:
        where += f", in the tables before and after training at {loss.temperatures.teacher:g} of both"
    if measure.is_estimated:
        where += "; loss is above it by a constant of the sampled tokens, without a gradient"
    return (
        f"loss is what is minimised: {terms}{at}{', by its schedule' if loss.schedule else ''}; "
        f"{measure.display_name(name)} is {what}, without weights and at temperature {where}"
    )


def figures_line(logs: dict[str, Any], measure: DivergenceUnit = KL) -> str:
    parts = [f"loss {logs['loss']:.4f}"]
    parts += [f"{measure.display_name(name)} {logs[name]:.4f}" for name in ("kl", "divergence") if name in logs]
    if "agreement" in logs:
        parts.append(f"agreement {logs['agreement']:.1%}")
    if "clipped_tokens" in logs:
        parts.append(f"clipped {logs['clipped_tokens']:.1%} of tokens, {logs['clipped_value']:.1%} of the value")
    if "overlap" in logs:
        parts.append(f"top-8 overlap {logs['overlap']:.1%}")
    if "router_load" in logs:
        parts.append(f"router load {logs['router_load']:.2f}")
    if "router_agreement" in logs:
        parts.append(f"experts in common {logs['router_agreement']:.1%}")
    if "reward" in logs:
        parts.append(f"reward {logs['reward']:.4g}")
    if "rollout_context" in logs:
        parts.append(f"context {logs['rollout_context']:.0%}")
    if "tokens_per_second" in logs:
        parts.append(f"{logs['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in logs:
        parts.append(f"MFU {logs['mfu']:.0%}")
    return "  ".join(parts)
