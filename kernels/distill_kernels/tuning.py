"""Autotuning of kernel launches, once per GPU, where no table was measured on its family.

    tile = autotune("attention dq", (64, "bfloat16", 2048), (first, second, third), launch, device)

Choices are cached on disk, one file for each GPU name, Triton release and source of these kernels. Timing holds a file
lock, so that the ranks of one host agree and time once. The first candidate, the tables' own, is taken where nothing
may be timed: on a family with measured tables, in deterministic runs, while a CUDA graph is captured, under
`DISTILL_TUNE=0`, and where the cache cannot be written. Different tiles round differently: `record_choices` writes a
run's choices into its folder, and a resumed run presets them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from distill_kernels.launch import HAS_TRITON, LAUNCH_ERRORS, device_facts, forced_family, triton

Candidate = TypeVar("Candidate", bound=tuple[object, ...])
MIN_SPEEDUP = 1.03  # over the first candidate; timings differ by as much from run to run
WARMUP_SECONDS = 0.05
ROUNDS = 7
LAUNCHES_PER_ROUND = 3

_log = logging.getLogger(__name__)
_preset: dict[str, str] = {}  # choices that a resumed run made before it stopped
_used: dict[str, str] = {}  # choices of this process: candidate by key
_record_path: list[Path] = []  # at most one: the file that a run's choices are written to


def autotune(
    kernel: str,
    shape: Sequence[object],
    candidates: Sequence[Candidate],
    launch: Callable[[Candidate], object],
    device: torch.device,
) -> Candidate:
    """Return the fastest of `candidates` for `launch`; the first where nothing is timed.

    Args:
        kernel, shape: key of the choice. Sizes should be rounded, so that few are timed.
        candidates: distinct tuples of plain values, the table's own first.
        launch: runs the kernel with one of them; may be called any number of times. A candidate that does not
            compile, or does not fit, is left out.
        device: the device of the launch.
    """
    facts = device_facts(device)
    if not facts.has_kernels or facts.measured or len(candidates) < 2:
        return candidates[0]
    key = f"{kernel} {_name(shape)}"
    by_name = _by_name(tuple(candidates))
    off = os.environ.get("DISTILL_TUNE") == "0" or torch.are_deterministic_algorithms_enabled()
    name = _preset.get(key) or (None if off else _used.get(key))
    if name not in by_name:
        if off or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return candidates[0]
        try:
            name = _cached_choice(cache_file(device), key, by_name, launch)
        except OSError as error:
            _log.warning("%s: not autotuned, since the choice cannot be cached: %s", kernel, error)
            name = _name(candidates[0])
    if _used.get(key) != name:
        _used[key] = name
        _write_record()
    return by_name[name]


def preset_choices(choices: Mapping[str, str]) -> None:
    """Replace the preset choices, which precede timing, by those of a resumed run (`read_choices`)."""
    _preset.clear()
    _preset.update(choices)


def record_choices(path: Path) -> None:
    """Write this process's choices, past and future, to `path`; no file is written without any."""
    _record_path[:] = [path]
    _write_record()


def read_choices(path: Path) -> dict[str, str]:
    """Return the choices in a file, candidate by key; empty if it is missing or malformed."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    pairs = found.items() if isinstance(found, dict) else ()
    return {key: candidate for key, candidate in pairs if isinstance(candidate, str)}


def cache_file(device: torch.device) -> Path:
    """Return the path of the cache of choices for the GPU."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    name = " ".join(filter(None, (gpu, forced_family(), triton.__version__ if HAS_TRITON else "", source_hash())))
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "distill" / "tuned" / f"{re.sub('[^A-Za-z0-9.]+', '-', name)}.json"


@functools.cache
def source_hash() -> str:
    """Return a hash of the source of all kernel files."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def median_milliseconds(launches: Sequence[Callable[[], object]]) -> list[float]:
    """Return each launch's median milliseconds on the current GPU, inf if it fails; interleaved, after a warm-up."""
    times: list[list[float]] = [[] for _ in launches]
    alive = []
    for place, launch in enumerate(launches):
        with contextlib.suppress(*LAUNCH_ERRORS):
            launch()
            alive.append(place)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started = time.perf_counter()
    turn = 0
    while alive and turn < ROUNDS:
        warmed_up = time.perf_counter() - started > WARMUP_SECONDS
        for place in alive:
            start.record()
            for _ in range(LAUNCHES_PER_ROUND):
                launches[place]()
            end.record()
            end.synchronize()
            if warmed_up:
                times[place].append(start.elapsed_time(end) / LAUNCHES_PER_ROUND)
        turn += warmed_up
    return [statistics.median(each) if each else float("inf") for each in times]


def _name(values: Sequence[object]) -> str:
    return " ".join(map(str, values))


@functools.cache
def _by_name(candidates: tuple[Candidate, ...]) -> dict[str, Candidate]:
    return {_name(candidate): candidate for candidate in candidates}


def _cached_choice(
    path: Path, key: str, by_name: Mapping[str, Candidate], launch: Callable[[Candidate], object]
) -> str:
    """Return the cached choice for `key` in `path`; candidates are timed, and the choice stored, if there is none."""
    with _locked(path):
        choices = read_choices(path)
        if choices.get(key) not in by_name:
            started = time.perf_counter()
            times = median_milliseconds([functools.partial(launch, candidate) for candidate in by_name.values()])
            best = min(range(len(times)), key=times.__getitem__)
            choices[key] = list(by_name)[best if times[best] * MIN_SPEEDUP < times[0] else 0]
            _write(path, choices)
            _log.warning(
                "%s: timed %d candidates in %.1f s, once for this GPU: %s (cached in %s; DISTILL_TUNE=0 disables it)",
                key,
                len(times),
                time.perf_counter() - started,
                choices[key],
                path,
            )
    return choices[key]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.stem}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, choices: Mapping[str, str]) -> None:
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps(dict(choices), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    written.replace(path)


def _write_record() -> None:
    for path in _record_path if _used else ():
        with _locked(path):
            _write(path, read_choices(path) | _used)
