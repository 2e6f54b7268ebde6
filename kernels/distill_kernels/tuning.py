"""Ways of launching a kernel, timed once on the GPU where no table was measured on its family.

    tile = fastest("attention dq", (64, "bfloat16", 2048), (first, second, third), launch, device)

What was found is kept on disk, in one file for a GPU's name, a release of Triton and these kernels' source; who times
holds a lock, so that ranks of one host agree and time once. The first way, which the tables give, is taken where
nothing may be timed: on a family with measured tables, in deterministic runs, while a CUDA graph is captured, under
`DISTILL_TUNE=0`, and where nothing can be kept. Other tiles round differently: `record` writes a run's choices into its
folder, and a run that is resumed takes them from there.
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

Way = TypeVar("Way", bound=tuple[object, ...])
GAIN = 1.03  # what another way has to be faster by: timings differ by as much from run to run
WARM_SECONDS, TURNS, LAUNCHES = 0.05, 7, 3

_log = logging.getLogger(__name__)
_imposed: dict[str, str] = {}  # what a resumed run chose before
_used: dict[str, str] = {}  # of this process: way by key
_record: list[Path] = []  # at most one: where a run's choices are written


def fastest(
    kernel: str, shape: Sequence[object], ways: Sequence[Way], launch: Callable[[Way], object], device: torch.device
) -> Way:
    """The one of `ways` by which `launch` takes least time; the first where nothing is timed.

    Args:
        kernel, shape: name what is chosen for. Sizes are best rounded, so that few are timed.
        ways: distinct tuples of plain values, the table's own first.
        launch: does the work by one of them; may be called any number of times. One that does not compile, or does
            not fit, is left out.
        device: where `launch` works.
    """
    facts = device_facts(device)
    if not facts.has_kernels or facts.measured or len(ways) < 2:
        return ways[0]
    key, named = f"{kernel} {_name(shape)}", _by_name(tuple(ways))
    off = os.environ.get("DISTILL_TUNE") == "0" or torch.are_deterministic_algorithms_enabled()
    name = _imposed.get(key) or (None if off else _used.get(key))
    if name not in named:
        if off or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return ways[0]
        try:
            name = _kept(cache_file(device), key, named, launch)
        except OSError as error:
            _log.warning("%s: nothing is timed, since it cannot be kept: %s", kernel, error)
            name = _name(ways[0])
    if _used.get(key) != name:
        _used[key] = name
        _write_record()
    return named[name]


def impose(choices: Mapping[str, str]) -> None:
    """Take these ways and none given before: those that a run which is resumed chose, as `read` finds them."""
    _imposed.clear()
    _imposed.update(choices)


def record(path: Path) -> None:
    """Write what this process chose and will choose into `path`; no file where it chooses nothing."""
    _record[:] = [path]
    _write_record()


def read(path: Path) -> dict[str, str]:
    """Ways by key, from a file; none from one that is missing or holds anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    pairs = found.items() if isinstance(found, dict) else ()
    return {key: way for key, way in pairs if isinstance(way, str)}


def cache_file(device: torch.device) -> Path:
    """Where choices for the GPU are kept."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    name = " ".join(filter(None, (gpu, forced_family(), triton.__version__ if HAS_TRITON else "", source_hash())))
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "distill" / "tuned" / f"{re.sub('[^A-Za-z0-9.]+', '-', name)}.json"


@functools.cache
def source_hash() -> str:
    """Of all kernels' files."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def milliseconds(launches: Sequence[Callable[[], object]]) -> list[float]:
    """Median time of each on the current GPU, inf for what fails: by turns, once clocks have risen."""
    times: list[list[float]] = [[] for _ in launches]
    alive = []
    for place, launch in enumerate(launches):
        with contextlib.suppress(*LAUNCH_ERRORS):
            launch()
            alive.append(place)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began, turn = time.perf_counter(), 0
    while alive and turn < TURNS:
        warm = time.perf_counter() - began > WARM_SECONDS
        for place in alive:
            start.record()
            for _ in range(LAUNCHES):
                launches[place]()
            end.record()
            end.synchronize()
            if warm:
                times[place].append(start.elapsed_time(end) / LAUNCHES)
        turn += warm
    return [statistics.median(each) if each else float("inf") for each in times]


def _name(values: Sequence[object]) -> str:
    return " ".join(map(str, values))


@functools.cache
def _by_name(ways: tuple[Way, ...]) -> dict[str, Way]:
    return {_name(way): way for way in ways}


def _kept(path: Path, key: str, named: Mapping[str, Way], launch: Callable[[Way], object]) -> str:
    """The way that `path` keeps for `key`; timed, and put there, where it keeps none of those `named`."""
    with _locked(path):
        choices = read(path)
        if choices.get(key) not in named:
            began = time.perf_counter()
            times = milliseconds([functools.partial(launch, way) for way in named.values()])
            best = min(range(len(times)), key=times.__getitem__)
            choices[key] = list(named)[best if times[best] * GAIN < times[0] else 0]
            _write(path, choices)
            _log.warning(
                "%s: timed %d ways in %.1f s, once for this GPU; takes %s (kept in %s; DISTILL_TUNE=0 times nothing)",
                key,
                len(times),
                time.perf_counter() - began,
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
    for path in _record if _used else ():
        with _locked(path):
            _write(path, read(path) | _used)
