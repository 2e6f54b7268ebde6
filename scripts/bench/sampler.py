"""Sampler of the phases of `distill run`, from within its process: `python -m scripts.bench.sampler FILE run ...`.

It imports nothing but the standard library before `distill` does, so that the time of all imports counts.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

INTERVAL_S, WRITTEN_S = 0.02, 0.5
PHASES = {
    "load_recipe": "recipe",
    "visible_gpus": "count GPUs",
    "run_folder": "folder",
    "load_tokenizer": "tokenizer",
    "read": "read data",
    "plan_run": "plan",
    "calibration_of": "calibration",
    "load_teacher": "load teacher",
    "load_student": "load student",
    "cut_from": "cut student",
    "check_packing": "try packing",
    "build_lock": "hash for lock file",
    "training_arguments": "training arguments",
    "check_saving": "try saving",
    "patch_models": "patch models",
    "choose_attention": "time attention",
    "resolve_device": "device",
    "validate_first_batch": "first batch",
    "first_batch_report": "first batch",
    "join_models": "join projections",
    "held_out": "held-out metrics before",
    "respond": "samples before",
    "_answers_of": "samples before",
    "training_step": "first step",
}


def phase_of(frame: FrameType | None) -> str:
    """Return the phase of a stack, by its innermost frame that has one; else `other` with its innermost function."""
    innermost = ""
    while frame is not None:
        name = frame.f_code.co_name
        if name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return "imports"
        if name in PHASES and "distill" in str(frame.f_globals.get("__name__")):
            return PHASES[name]
        if not innermost and str(frame.f_globals.get("__name__")).startswith("distill."):
            innermost = f": {name}"
        frame = frame.f_back
    return f"other{innermost}"


class Sampler:
    """Sampler of the main thread's phases, which it writes to a file every `WRITTEN_S` seconds.

    The file holds `phases`: [name, begun, wall, processor] for each, in the order in which they began, and `kernels`:
    [name, ended, taken] for each that Triton compiled, all in seconds.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.start = path, time.perf_counter()
        self.phases: dict[str, list[float]] = {}
        self.kernels: list[tuple[str, float, float]] = []
        self._main = threading.get_ident()
        threading.Thread(target=self._sample, daemon=True, name="sampler").start()

    def _sample(self) -> None:
        wall, processor = written, _ = self.start, time.process_time()
        while True:
            time.sleep(INTERVAL_S)
            if (knobs := sys.modules.get("triton.knobs")) is not None and hasattr(knobs, "compilation"):
                knobs.compilation.listener = self._compiled
            phase = phase_of(sys._current_frames().get(self._main))
            now, used = time.perf_counter(), time.process_time()
            times = self.phases.setdefault(phase, [wall - self.start, 0.0, 0.0])
            times[1] += now - wall
            times[2] += used - processor
            wall, processor = now, used
            if now - written > WRITTEN_S:
                self.write()
                written = now

    def _compiled(self, *, src: Any, times: Any, cache_hit: bool, **_: object) -> None:
        taken = times.ir_initialization + sum(each for _, each in times.lowering_stages) + times.store_results
        if not cache_hit:
            self.kernels.append((src.name, time.perf_counter() - self.start, taken / 1e6))

    def write(self) -> None:
        """Write the file."""
        unfinished = self.path.with_suffix(".tmp")
        found = {"phases": [[name, *times] for name, times in self.phases.items()], "kernels": self.kernels}
        unfinished.write_text(json.dumps(found), encoding="utf-8")
        unfinished.replace(self.path)


def main() -> None:
    """Run `distill` with the arguments after the first, which is the file of the phases."""
    Sampler(Path(sys.argv[1]))
    sys.argv = ["distill", *sys.argv[2:]]
    from distill.__main__ import main

    main()


if __name__ == "__main__":
    main()
