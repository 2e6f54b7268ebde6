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

INTERVAL_S, WRITTEN_S = 0.02, 0.5
PHASES = {
    "load_recipe": "recipe",
    "visible_gpus": "count GPUs",
    "resolve_device": "device",
    "run_folder": "folder",
    "load_tokenizer": "tokenizer",
    "read": "read data",
    "plan_run": "plan",
    "calibration_of": "calibration",
    "load_teacher": "load teacher",
    "load_student": "load student",
    "student_cut_from": "cut student",
    "check_packing": "try packing",
    "build_lock": "hash for lock file",
    "training_arguments": "training arguments",
    "check_saving": "try saving",
    "patch_models": "patch models",
    "first_batch_lines": "first batch",
    "first_batch_report": "first batch",
    "join_models": "join projections",
    "held_out": "held-out metrics before",
    "responses_of": "samples before",
    "_answers_of": "samples before",
    "training_step": "first step",
}


def phase_of(frame: FrameType | None) -> str:
    """Return the phase of a stack, by its innermost frame that has one."""
    while frame is not None:
        name = frame.f_code.co_name
        if name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return "imports"
        if name in PHASES and "distill" in str(frame.f_globals.get("__name__")):
            return PHASES[name]
        frame = frame.f_back
    return "other"


class Sampler:
    """Sampler of the main thread's phases, which it writes to a file every `WRITTEN_S` seconds.

    The file holds [name, begun, wall, processor] for each phase, in the order in which they began, in seconds.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.start = path, time.perf_counter()
        self.phases: dict[str, list[float]] = {}
        self._main = threading.get_ident()
        threading.Thread(target=self._sample, daemon=True, name="sampler").start()

    def _sample(self) -> None:
        wall, processor = written, _ = self.start, time.process_time()
        while True:
            time.sleep(INTERVAL_S)
            phase = phase_of(sys._current_frames().get(self._main))
            now, used = time.perf_counter(), time.process_time()
            times = self.phases.setdefault(phase, [wall - self.start, 0.0, 0.0])
            times[1] += now - wall
            times[2] += used - processor
            wall, processor = now, used
            if now - written > WRITTEN_S:
                self.write()
                written = now

    def write(self) -> None:
        """Write the file."""
        unfinished = self.path.with_suffix(".tmp")
        unfinished.write_text(json.dumps([[name, *times] for name, times in self.phases.items()]), encoding="utf-8")
        unfinished.replace(self.path)


def main() -> None:
    """Run `distill` with the arguments after the first, which is the file of the phases."""
    Sampler(Path(sys.argv[1]))
    sys.argv = ["distill", *sys.argv[2:]]
    from distill.__main__ import main

    main()


if __name__ == "__main__":
    main()
