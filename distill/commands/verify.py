"""Command `verify`: read a run or a cache back and compare it with its checksums."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from distill.commands.arguments import AsJson, complete_run, print_json
from distill.core import console
from distill.core.errors import first_line
from distill.core.folders import RECIPE_FILE, RESULT_FILE, STAGES
from distill.core.units import plural

Line = tuple[str, str, bool]  # name of the part, result in words, whether it is undamaged


def verify(
    target: Annotated[
        str,
        typer.Argument(metavar="RUN_OR_CACHE", help="A run, or the folder of a cache.", autocompletion=complete_run),
    ],
    as_json: AsJson = False,
) -> None:
    """Verify a run or a cache: checksums, shapes, finite numbers, versions. Exit code 1 if anything is wrong.

    \b
    distill verify support-bot
    distill verify caches/chat --json
    """
    from distill.reports.report import find_run
    from distill.teachers.backends.stored.format import PLAN

    is_cache = (Path(target) / PLAN).is_file()
    read = _cache(Path(target)) if is_cache else _run(find_run(target))
    with console.spinner("reading"):
        lines = list(read)
    if as_json:
        print_json([{"what": what, "result": result, "sound": sound} for what, result, sound in lines])
    else:
        for what, result, sound in lines:
            console.print_lines(f"{'ok' if sound else 'DAMAGED':<9}{what:<19} {result}")
    if not all(sound for _, _, sound in lines):
        raise typer.Exit(1)


def _line(what: str, read: Callable[[], str]) -> Line:
    try:
        return what, read(), True
    except (ValueError, OSError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        return what, first_line(error), False


def _run(folder: Path) -> Iterator[Line]:
    from distill.core.manifest import MANIFEST, entry_mismatch
    from distill.generation.environment import FOLDER as ENVIRONMENT
    from distill.recipe import load
    from distill.reports.run_manifest import BEFORE_FILE, METRICS_FILE
    from distill.training.checkpoints import checkpoints, unfinished_checkpoints
    from distill.training.lock_file import LOCK_FILE
    from distill.training.rollout_files import FOLDER, files

    for stage in sorted(path for path in (folder / STAGES).glob("*") if path.is_dir()):
        for what, result, undamaged in _run(stage):
            yield f"{STAGES}/{stage.name}/{what}", result, undamaged

    def noted(path: Path, read: Callable[[], str]) -> Line:
        name = path.relative_to(folder).as_posix()
        shown = path.name if path.parent.name == FOLDER else name
        return _line(shown, lambda: _raise(entry_mismatch(folder, name)) or read())

    if (folder / MANIFEST).exists():
        yield _line(MANIFEST, lambda: _manifest(folder))
    yield noted(folder / RECIPE_FILE, lambda: load(folder / RECIPE_FILE).name)
    yield noted(folder / LOCK_FILE, lambda: _versions(folder / LOCK_FILE))
    names = _noted_names(folder)
    if (folder / BEFORE_FILE).exists() or BEFORE_FILE in names:
        yield noted(folder / BEFORE_FILE, lambda: _before(folder / BEFORE_FILE))
    yield noted(folder / METRICS_FILE, lambda: _metrics(folder / METRICS_FILE))
    for path in files(folder):
        yield noted(path, lambda path=path: _rollouts(path))  # type: ignore[misc]
    for path in sorted((folder / ENVIRONMENT).glob("*.jsonl")):
        yield noted(path, lambda path=path: _replies(path))  # type: ignore[misc]
    for path in checkpoints(folder, damaged=True):
        yield _line(path.name, lambda path=path: _checkpoint(path))  # type: ignore[misc]
    for path in unfinished_checkpoints(folder):
        yield path.name, "unfinished; never loaded", True
    if (folder / RESULT_FILE).exists() or RESULT_FILE in names:
        yield noted(folder / RESULT_FILE, lambda: _figures(folder / RESULT_FILE, "before", "after"))
    if (folder / "student").is_dir():
        yield _line("student", lambda: _student(folder))
    shown = {RECIPE_FILE, LOCK_FILE, BEFORE_FILE, METRICS_FILE, RESULT_FILE}
    for name in sorted(names - shown):
        if not (name.startswith(FOLDER) and (folder / name).exists()):
            yield noted(folder / name, lambda: "as written")


def _raise(fault: str | None) -> str:
    if fault is not None:
        raise ValueError(fault)
    return ""


def _manifest(folder: Path) -> str:
    from distill.core.manifest import SUM, has_valid_checksum, read_manifest

    manifest = read_manifest(folder) or {}
    if SUM not in manifest or not has_valid_checksum(manifest):
        raise ValueError("its checksum does not match; move it away to check only the form of the files")
    return f"checksums of {plural(len(_noted_names(folder)), 'file')}"


def _noted_names(folder: Path) -> set[str]:
    from distill.core.manifest import read_manifest

    try:
        return set((read_manifest(folder) or {}).get("files", {}))  # type: ignore[call-overload]
    except (ValueError, TypeError):
        return set()


def _figures(path: Path, *names: str) -> str:
    found = json.loads(path.read_text(encoding="utf-8"))
    for name in names:
        if not all(value is None or isinstance(value, int | float) for value in found[name].values()):
            raise ValueError(f"{name} holds metrics that are not numbers")
    return f"held-out metrics over {next(iter(found[names[0]].values())):,} tokens"


def _before(path: Path) -> str:
    from distill.reports.run_manifest import START

    measured = not set(json.loads(path.read_text(encoding="utf-8"))) <= set(START)
    return _figures(path, "held_out") if measured else "not measured yet"


def _replies(path: Path) -> str:
    from distill.generation.environment import read_replies

    replies, damaged = read_replies(path)
    if damaged:
        raise ValueError(f"line {', '.join(map(str, damaged))} is not as it was written")
    return f"replies to {plural(len(replies), 'conversation')}"


def _rollouts(path: Path) -> str:
    from distill.training.rollout_files import read

    return plural(len(read(path)), "rollout")


def _versions(path: Path) -> str:
    from distill.core.diff_settings import diff_settings
    from distill.core.environment import environment
    from distill.training.lock_file import read_lock

    here = environment()
    others = [f"{name} {old}, here {new}" for name, old, new in diff_settings(read_lock(path)["environment"], here)]
    return "; ".join(others) or "the versions are those of this machine"


def _metrics(path: Path) -> str:
    from distill.training.progress import damage, read_metrics

    faults = damage(path)
    if faults:
        raise ValueError(faults[0])
    rows = read_metrics(path)
    steps = [row["step"] for row in rows]
    if steps != sorted(set(steps)):
        raise ValueError("steps are repeated or out of order")
    return plural(len(steps), "row")


def _checkpoint(path: Path) -> str:
    from distill.core.manifest import MANIFEST
    from distill.training.checkpoints import checkpoint_error

    fault = checkpoint_error(path)
    if fault:
        raise ValueError(fault)
    return "as written" if (path / MANIFEST).is_file() else f"readable; it has no {MANIFEST}"


def _student(folder: Path) -> str:
    import torch
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    from distill.core.manifest import first_damaged_file
    from distill.models.adapters import base_of
    from distill.models.load.read_weights import weights_fault
    from distill.models.loading import load_config
    from distill.recipe import Student
    from distill.training.checkpoints import not_finite, shapes_of

    result = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8")) if (folder / RESULT_FILE).is_file() else {}
    if result and "files" not in result:
        raise ValueError(f"{RESULT_FILE}: expected files, the checksums of the student's files, got none")
    if result and (fault := first_damaged_file(folder / "student", result["files"])):
        raise ValueError(fault)
    there: dict[str, Any] = {}
    for path in sorted((folder / "student").glob("*.safetensors")):
        name = not_finite(path)
        if name:
            raise ValueError(f"{path.name}: {name} is not finite")
        there |= shapes_of(path)
    base = base_of(folder / "student")
    config = load_config(Student.model_validate(base or {"model": str(folder / "student")}), "student")
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
        if base:
            model = get_peft_model(model, PeftConfig.from_pretrained(str(folder / "student")))
    if not base and (fault := weights_fault(folder / "student", model, "student")):
        raise ValueError(fault)
    for name, tensor in sorted(get_peft_model_state_dict(model).items()) if base else ():
        if there.get(name) != (expected := list(tensor.shape)):
            raise ValueError(f"{name}: expected the shape {expected} of its configuration, got {there.get(name)}")
    return "as written" if result else "readable; the run has not finished"


def _cache(folder: Path) -> Iterator[Line]:
    import numpy as np

    from distill.core.manifest import first_damaged_file
    from distill.teachers.backends.stored.format import MANIFEST, PLAN, read_store_json
    from distill.teachers.backends.stored.store import Fills, Store

    yield _line(PLAN, lambda: f"{(read_store_json(folder / PLAN) or {})['kind'].replace('_', ' ')} of a teacher")
    try:
        complete = (folder / MANIFEST).is_file()
        store = Store(folder, None if complete else Fills(read_store_json(folder / PLAN) or {}, all_parts=True))
    except (ValueError, KeyError) as error:
        yield folder.name, str(error), False
        return
    shards = store.shards
    if complete:
        fault = first_damaged_file(folder, store.manifest.get("files", {}))
        text = f"version {store.manifest['version']}, {plural(shards.positions, 'position')}"
        yield "files", fault or text, fault is None
    else:
        yield folder.name, f"incomplete: {plural(shards.positions, 'position')} so far", True

    def shard(number: int) -> str:
        arrays = shards.arrays[number]
        for document in range(len(arrays["keys"])):
            start, stop = shards.verify(number, document)
            for name in ("logprobs", "hidden"):
                if name in arrays and arrays[name].dtype.kind == "f" and np.isnan(arrays[name][start:stop]).any():
                    raise ValueError(f"{name} of document {document} contain NaN")
        return plural(len(arrays["keys"]), "document")

    for number, name in enumerate(shards.names):
        yield _line(name, lambda number=number: shard(number))  # type: ignore[misc]
